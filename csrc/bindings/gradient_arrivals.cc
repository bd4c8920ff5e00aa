// What the gradient reducer has to do when a gradient arrives, without the interpreter: between two gradients a model's
// arithmetic empties the caches, and Python code that runs once in between takes many times as long.
//
// A hook notes a gradient that arrives as the reducer expects it, and whose bucket still lacks others; Python takes the
// notes when it next has something to do. It calls Python for every other gradient: the first of a backward, the last
// of a bucket, one that arrives again or in another layout. Thread safety: by the GIL.
#include <Python.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/extension.h>

#include <ctime>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include "base/error.h"
#include "bindings/module.h"

namespace ringlet {
namespace {

namespace py = pybind11;

/// How many tensors have the memory. Autograd takes a gradient as it is, even if it is a view of one that still flows
/// through the backward, or of another parameter's gradient: such memory must not be reduced in place.
size_t storage_owners(const at::Tensor& tensor) { return tensor.has_storage() ? tensor.storage().use_count() : 0; }

class GradientArrivals {
 public:
  /// Of each gradient its index, its time in nanoseconds and the tensor, in order.
  using Noted = std::tuple<std::vector<int>, std::vector<int64_t>, std::vector<at::Tensor>>;

  GradientArrivals(const std::vector<at::Tensor>& expected, size_t owners) : owners_(owners) {
    for (const at::Tensor& one : expected) {
      parameters_.push_back(
          {.shape = c10::DimVector(one.sizes()), .strides = c10::DimVector(one.strides()), .dtype = one.scalar_type()});
    }
  }

  void place(const std::vector<std::pair<int, uintptr_t>>& places) {
    if (places.size() != parameters_.size()) throw InvalidUsage("place: one bucket and address a parameter");
    disarm();
    for (size_t i = 0; i < places.size(); ++i) {
      parameters_[i].bucket = static_cast<size_t>(places[i].first);
      parameters_[i].view = reinterpret_cast<const void*>(places[i].second);
    }
  }

  void arm(std::vector<int> missing, const std::vector<int>& arrived) {
    disarm();
    missing_ = std::move(missing);
    for (const Parameter& one : parameters_) {
      if (one.bucket >= missing_.size()) throw InvalidUsage("arm: one number a bucket");
    }
    for (const int index : arrived) parameters_.at(static_cast<size_t>(index)).arrived = true;
    backward_ = torch::autograd::get_current_graph_task_id();
  }

  void disarm() {
    noted_ = {};
    backward_ = kNone;
    for (Parameter& one : parameters_) one.arrived = false;
  }

  bool armed() const { return backward_ != kNone; }

  Noted take() { return std::exchange(noted_, {}); }

  /// Whether nothing but the note is to be done for the gradient now.
  bool note(size_t index, const at::Tensor& gradient) {
    if (backward_ == kNone) return false;
    Parameter& one = parameters_[index];
    if (one.arrived) return false;
    one.arrived = true;
    // A nested backward (reentrant checkpoints), or one after a backward that raised, is Python's. It counts here, too:
    // a gradient may arrive in it first, and then again in the outer one.
    const bool nested = backward_ != torch::autograd::get_current_graph_task_id();
    int& missing = missing_[one.bucket];
    if (--missing < 1 || nested || !fits(one, gradient)) return false;
    timespec now{};
    ::clock_gettime(CLOCK_MONOTONIC, &now);
    auto& [indices, times, tensors] = noted_;
    indices.push_back(static_cast<int>(index));
    times.push_back(now.tv_sec * 1'000'000'000L + now.tv_nsec);
    tensors.push_back(gradient);
    return true;
  }

 private:
  struct Parameter {
    c10::DimVector shape;
    c10::DimVector strides;
    at::ScalarType dtype;
    size_t bucket = 0;
    const void* view = nullptr;  // its place in its bucket's buffer, if that has been made
    bool arrived = false;
  };
  static constexpr int kNone = -1;

  bool fits(const Parameter& one, const at::Tensor& gradient) const {
    return gradient.defined() && gradient.layout() == at::kStrided && gradient.is_cpu() &&
           gradient.scalar_type() == one.dtype && gradient.sizes() == at::IntArrayRef(one.shape) &&
           gradient.strides() == at::IntArrayRef(one.strides) && gradient.const_data_ptr() != one.view &&
           !gradient.requires_grad() && !gradient.is_conj() && !gradient.is_neg() &&
           storage_owners(gradient) <= owners_;
  }

  const size_t owners_;  // of a gradient's memory that nothing else uses
  std::vector<Parameter> parameters_;
  std::vector<int> missing_;  // of each bucket; below 1: Python's
  Noted noted_;
  int backward_ = kNone;
};

/// One parameter's hook. It keeps neither the reducer nor the parameter alive.
struct Hook {
  std::weak_ptr<GradientArrivals> arrivals;
  size_t index;
  PyObject* otherwise;  // a strong reference
};

constexpr const char* kHook = "ringlet.gradient_hook";

Hook* hook_of(PyObject* capsule) { return static_cast<Hook*>(PyCapsule_GetPointer(capsule, kHook)); }

PyObject* arrived(PyObject* self, PyObject* parameter) {
  const Hook& hook = *hook_of(self);
  if (const auto arrivals = hook.arrivals.lock(); arrivals && THPVariable_Check(parameter)) {
    if (arrivals->note(hook.index, THPVariable_Unpack(parameter).grad())) Py_RETURN_NONE;
  }
  return PyObject_CallOneArg(hook.otherwise, parameter);
}

py::object make_hook(const std::shared_ptr<GradientArrivals>& arrivals, size_t index, const py::function& otherwise) {
  static PyMethodDef method = {"gradient_arrived", &arrived, METH_O, nullptr};
  auto* hook = new Hook{arrivals, index, otherwise.inc_ref().ptr()};
  PyObject* capsule = PyCapsule_New(hook, kHook, [](PyObject* self) {
    Hook* const ended = hook_of(self);
    Py_DECREF(ended->otherwise);
    delete ended;
  });
  const auto owner = py::reinterpret_steal<py::object>(capsule);
  return py::reinterpret_steal<py::object>(PyCFunction_New(&method, owner.ptr()));
}

/// What a hook of make_hook() calls; None for any other function.
py::object fallback_of(const py::handle& function) {
  if (!PyCFunction_Check(function.ptr())) return py::none();
  PyObject* const self = PyCFunction_GetSelf(function.ptr());
  if (self == nullptr || !PyCapsule_IsValid(self, kHook)) return py::none();
  return py::reinterpret_borrow<py::object>(hook_of(self)->otherwise);
}

}  // namespace

void bind_gradients(py::module_& m) {
  py::class_<GradientArrivals, std::shared_ptr<GradientArrivals>>(m, "GradientArrivals")
      .def(py::init<const std::vector<at::Tensor>&, size_t>(), py::arg("expected"), py::arg("owners"),
           "expected: tensors with the shapes, strides and dtypes of the parameters' gradients, on any device. owners: "
           "storage_owners() of a gradient whose memory nothing else uses.")
      .def("place", &GradientArrivals::place, py::arg("places"),
           "The bucket of each parameter, and the address of its part of the bucket's buffer (0: there is none).")
      .def(
          "arm", &GradientArrivals::arm, py::arg("missing"), py::arg("arrived"),
          "From now on, and in the backward under way, gradients are noted. missing: how many each bucket lacks, 0 for "
          "a bucket that is left to Python. arrived: parameters whose gradients are there.")
      .def("disarm", &GradientArrivals::disarm, "Leaves all to Python, and forgets what was noted.")
      .def_property_readonly("armed", &GradientArrivals::armed)
      .def("take", &GradientArrivals::take, "What was noted since, in order: indices, times in ns, gradients.")
      .def("hook", &make_hook, py::arg("index"), py::arg("otherwise"));
  m.def("storage_owners", &storage_owners, py::arg("tensor"), "How many tensors have the tensor's memory.");
  m.def("hook_fallback", &fallback_of, py::arg("function"));
}

}  // namespace ringlet
