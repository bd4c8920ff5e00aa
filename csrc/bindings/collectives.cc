// The calls, written for CPython's vectorcall, because a 4-byte all-reduce costs less than a general binding's argument
// handling. The public functions are in ringlet/collectives.py; these take positional arguments:
//
//   collective(group, output, input, op, algorithm, root, timeout, scale, async_op)
//       output and input may be None, or lists (bindings/lists.h)
//   message(group, tensor, peer, sending, timeout, async_op)
#include <ATen/core/grad_mode.h>
#include <cxxabi.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <array>
#include <optional>
#include <string_view>

#include "bindings/arguments.h"
#include "bindings/authored.h"
#include "bindings/errors.h"
#include "bindings/gil.h"
#include "bindings/hold.h"
#include "bindings/issue.h"
#include "bindings/lists.h"
#include "bindings/module.h"
#include "bindings/on_device.h"
#include "bindings/profiled.h"
#include "bindings/tensors.h"
#include "comm/communicator.h"
#include "engine/selector.h"

namespace py = pybind11;

/// Python sees every call's handle as a Work, so pybind11 need not look its own type up.
template <>
struct pybind11::polymorphic_type_hook<ringlet::Work> {
  static const void* get(const ringlet::Work* work, const std::type_info*&) { return work; }
};

namespace ringlet {
namespace {

using std::chrono::milliseconds;
using Tensors = std::vector<at::Tensor>;

constexpr Py_ssize_t kArguments = 9;  // of a collective

/// Null for None.
const at::Tensor* tensor_of(PyObject* object, const char* call, const char* role) {
  if (object == Py_None) return nullptr;
  if (!THPVariable_Check(object))
    throw InvalidUsage(std::string(call) + ": " + role + " must be a tensor, got a " + Py_TYPE(object)->tp_name);
  const at::Tensor& tensor = THPVariable_Unpack(object);
  check_dense(tensor, call, role);
  return &tensor;
}

/// Null for an empty list.
const at::Tensor* first(const Tensors& tensors) { return tensors.empty() ? nullptr : tensors.data(); }

bool is_list(PyObject* object) { return PyList_Check(object) || PyTuple_Check(object); }

/// The tensors of a list; one for a tensor, none for None.
Tensors tensors_of(PyObject* object, const char* call, const char* role) {
  Tensors tensors;
  const auto add = [&](PyObject* one) {
    if (const at::Tensor* tensor = tensor_of(one, call, role)) tensors.push_back(*tensor);
  };
  if (!is_list(object)) {
    add(object);
    return tensors;
  }
  for (const py::handle one : py::reinterpret_borrow<py::sequence>(object)) add(one.ptr());
  return tensors;
}

/// The tensors of a call; null if it has none.
struct Bound {
  const at::Tensor* output;
  const at::Tensor* input;
};

/// Which tensors a call needs on this rank.
struct Needs {
  bool output, input;
};

Needs needs_of(const Call& call, const Communicator& group) {
  const Call unit{.collective = call.collective, .root = call.root, .count = 1};
  return {output_elements(unit, group.rank(), group.world()) > 0,
          input_elements(unit, group.rank(), group.world()) > 0};
}

[[noreturn]] void refuse_absent(const char* call, const char* role) {
  throw InvalidUsage(std::string(call) + ": " + role + " must be a tensor on this rank, got None");
}

/// Checks both tensors against the collective's shape and fills the call's count, dtype and pointers.
void bind_tensors(Call& call, const Communicator& group, const Bound& bound) {
  const char* what = name(call.collective);
  const int rank = group.rank(), world = group.world();
  const auto [wants_output, wants_input] = needs_of(call, group);
  const auto [output, input] = bound;
  if (wants_input && input == nullptr) refuse_absent(what, "input");
  if (wants_output && output == nullptr) refuse_absent(what, "output");
  const at::Tensor* any = wants_input ? input : output;
  if (any == nullptr) return;  // a barrier
  call.dtype = dtype_of(*any);
  // The count follows from the tensor that is exactly one block, or from the divided buffer.
  Call unit = call;
  unit.count = 1;
  const size_t blocks = wants_input ? input_elements(unit, rank, world) : output_elements(unit, rank, world);
  const size_t numel = static_cast<size_t>(any->numel());
  if (numel % blocks != 0) {
    throw InvalidUsage(std::string(what) + ": the " + (wants_input ? "input" : "output") + " tensor must divide into " +
                       std::to_string(blocks) + " equal blocks, got " + std::to_string(numel) + " elements");
  }
  call.count = numel / blocks;
  if (wants_input && wants_output) {
    const size_t expected = output_elements(call, rank, world);
    if (output->scalar_type() != input->scalar_type()) check_dtype(*output, call.dtype, what);
    if (static_cast<size_t>(output->numel()) != expected) refuse_elements(what, "output", *output, expected, world);
  }
  call.input = wants_input ? data_of(*input) : nullptr;
  call.output = wants_output ? data_of(*output) : nullptr;
}

/// None for null.
PyObject* as_python(std::shared_ptr<Work> work) { return py::cast(std::move(work)).release().ptr(); }

/// Small calls keep the GIL until a wait gives the processor up, because to release and retake it costs more than most
/// of these calls. Ranks that are threads must release it at once: the rank for which they wait needs it.
constexpr size_t kKeepGilBytes = size_t{64} << 10;

/// Releases the GIL when a wait gives the processor up. From then on other threads could free the memory.
struct LetGoOfGil final : RuntimeHooks {
  explicit LetGoOfGil(const Bound& bound)
      : RuntimeHooks{&leave, &enter}, bound(bound), around(std::exchange(runtime_hooks, this)) {}
  ~LetGoOfGil() { runtime_hooks = around; }
  LetGoOfGil(const LetGoOfGil&) = delete;

  static void* leave() {
    const auto& self = *static_cast<const LetGoOfGil*>(runtime_hooks);
    if (!self.hold) self.hold.emplace({self.bound.output, self.bound.input});
    return PyEval_SaveThread();
  }
  static void enter(void* state) { take_gil_back(static_cast<PyThreadState*>(state)); }

  const Bound bound;
  const RuntimeHooks* const around;  // of a call that a signal handler interrupts
  mutable std::optional<MemoryHold> hold{};
};

bool keeps_gil(const Communicator& group, const Call& call) {
  return !group.ranks_are_threads() && buffer_bytes(call, group.world()) <= kKeepGilBytes;
}

void run(Communicator& group, const Call& call, const Bound& bound) {
  if (!keeps_gil(group, call)) {
    const MemoryHold hold({bound.output, bound.input});
    const GilReleased unlocked;
    group.run(call);
    return;
  }
  const LetGoOfGil unlocking(bound);
  group.run(call);
}

/// start() does as much of the call at once as it can.
std::shared_ptr<Work> start(Communicator& group, const Call& call, std::shared_ptr<void> keep) {
  if (keeps_gil(group, call)) {
    const LetGoOfGil unlocking({});  // `keep` has the tensors
    return group.start(call, std::move(keep));
  }
  const GilReleased unlocked;
  return group.start(call, std::move(keep));
}

PyObject* on_device(Communicator& group, const DeviceCalls& calls) {
  Enqueued enqueued = [&] {
    const GilReleased unlocked;
    return enqueue(group, calls);
  }();
  if (calls.async) return py::cast(std::make_shared<DeviceWork>(std::move(enqueued))).release().ptr();
  Py_RETURN_NONE;
}

/// Null stays null.
std::shared_ptr<Work> watched(std::shared_ptr<Work> work, const std::shared_ptr<Profiled>& profiled) {
  if (profiled && work) work->note_end([profiled](const std::exception_ptr&) { profiled->end(); });
  return work;
}

/// Runs a call on one contiguous tensor, or on two. Returns a work, or None if the call is complete.
PyObject* issue_plain(Communicator& group, Call& call, const Bound& bound, bool async) {
  const auto profiled = profile(call, bound.output, bound.input);
  check_on_host(call);
  if (async) {
    auto keep = std::make_shared<MemoryHold>(std::initializer_list{bound.output, bound.input});
    return as_python(watched(start(group, call, std::move(keep)), profiled));
  }
  run(group, call, bound);
  Py_RETURN_NONE;
}

/// Runs any call: on a device, on lists, on tensors that are not contiguous. `output`: for profilers; may be null.
PyObject* issue(Communicator& group, Issue&& issue, const at::Tensor* output, bool async) {
  issue.check(group);
  Call& call = issue.steps[0].call;
  const auto profiled = profile(call, output, first(issue.inputs));
  const c10::Device device = issue.device();
  if (!device.is_cpu()) return on_device(group, issue.on(device, async));
  check_on_host(call);
  std::shared_ptr<Work> work;
  {
    const GilReleased unlocked;
    async ? void(work = std::move(issue).start(group)) : issue.run(group);
  }
  if (!async) Py_RETURN_NONE;
  return as_python(watched(std::move(work), profiled));
}

PyObject* on_lists(Communicator& group, const Call& given, PyObject* const* args, const Needs& needs, bool async) {
  const char* what = name(given.collective);
  const Tensors outputs = tensors_of(needs.output ? args[1] : Py_None, what, "output");
  const Tensors inputs = tensors_of(needs.input ? args[2] : Py_None, what, "input");
  Issue call(what);
  call.add_blocks(given, outputs, inputs, chunk_counts(given.collective, outputs, inputs, group.rank(), group.world()));
  PyObject* const result = issue(group, std::move(call), first(outputs), async);
  for (const at::Tensor& output : outputs) mark_written(output);
  return result;
}

PyObject* on_tensors(Communicator& group, Call& call, const Bound& bound, bool async) {
  const auto plain = [](const at::Tensor* tensor) {
    return tensor == nullptr || (tensor->is_contiguous() && tensor->is_cpu());
  };
  bind_tensors(call, group, bound);
  if (plain(bound.output) && plain(bound.input)) [[likely]]
    return issue_plain(group, call, bound, async);
  const Needs needs = needs_of(call, group);
  const auto given = [](bool needed, const at::Tensor* tensor) {
    return needed && tensor != nullptr ? *tensor : at::Tensor();
  };
  Issue made(name(call.collective));
  made.add(call, given(needs.output, bound.output), given(needs.input, bound.input));
  return issue(group, std::move(made), bound.output, async);
}

bool requires_grad(PyObject* object) {
  if (is_list(object)) {
    const auto list = py::reinterpret_borrow<py::sequence>(object);
    return std::any_of(list.begin(), list.end(), [](py::handle one) { return requires_grad(one.ptr()); });
  }
  return THPVariable_Check(object) && THPVariable_Unpack(object).requires_grad();
}

PyObject* differentiable_collective = nullptr;  // Python's, which takes a collective's name and arguments

PyObject* differentiable(Collective which, PyObject* const* args) {
  const auto call = py::reinterpret_steal<py::object>(PyUnicode_FromString(name(which)));
  std::array<PyObject*, kArguments + 1> all{call.ptr()};
  std::copy(args, args + kArguments, all.begin() + 1);
  return PyObject_Vectorcall(differentiable_collective, all.data(), all.size(), nullptr);
}

PyObject* collective(PyObject* const* args, Collective which) {
  auto& group = *py::handle(args[0]).cast<Communicator*>();
  const char* what = name(which);
  Call call;
  call.collective = which;
  call.root = integer_of(args[5], what, "root");
  call.op = parse_op(args[3], what);
  call.algorithm = algorithm_of(args[4], which);
  call.timeout = timeout_of(args[6]).value_or(milliseconds(0));
  call.scale = number_of(args[7], what, "scale");
  const bool async = truth_of(args[8]);
  check_root(which, call.root, group.world());
  if (at::GradMode::is_enabled() && (requires_grad(args[1]) || requires_grad(args[2]))) {
    return differentiable(which, args);
  }
  agree_on_added(group, call);
  const bool lists[] = {is_list(args[1]), is_list(args[2])};
  Needs needs{true, true};
  if (lists[0] || lists[1]) {
    needs = needs_of(call, group);  // a list that this rank does not need, as of a gather's other ranks, is left alone
    if ((lists[0] && needs.output) || (lists[1] && needs.input)) return on_lists(group, call, args, needs, async);
  }
  const Bound bound{lists[0] ? nullptr : tensor_of(args[1], what, "output"),
                    lists[1] ? nullptr : tensor_of(args[2], what, "input")};
  PyObject* const result = on_tensors(group, call, bound, async);
  const bool only_read = which == Collective::broadcast && call.root == group.rank();
  if (bound.output != nullptr && needs_of(call, group).output && !only_read) mark_written(*bound.output);
  return result;
}

PyObject* issue(Communicator& group, const Message& message, const at::Tensor& tensor, bool async) {
  if (!tensor.is_cpu()) {
    return on_device(group, {.device = tensor.device(), .messages = {message}, .tensors = {tensor}, .async = async});
  }
  const char* const title = message.sending ? "ringlet:send" : "ringlet:recv";
  const auto profiled = profiling() ? std::make_shared<Profiled>(title, Tensors{tensor}) : nullptr;
  if (async) {
    auto keep = std::make_shared<MemoryHold>(std::initializer_list{&tensor});
    return as_python(watched(group.start(message, std::move(keep)), profiled));
  }
  {
    const MemoryHold hold({&tensor});
    const GilReleased unlocked;
    group.run(message);
  }
  Py_RETURN_NONE;  // changes a reference count, and so needs the GIL
}

PyObject* message(PyObject* const* args) {
  auto& group = *py::handle(args[0]).cast<Communicator*>();
  const bool sending = args[3] == Py_True;
  const char* what = sending ? "send" : "recv";
  const at::Tensor* tensor = tensor_of(args[1], what, "given");
  if (tensor == nullptr) refuse_absent(what, "tensor");
  check_tensor(*tensor, what, "given");
  if (!sending && at::GradMode::is_enabled() && tensor->grad_fn() != nullptr) {
    throw InvalidUsage(
        "recv: the given tensor must not be the result of an operation that autograd records: pass "
        "tensor.detach(), or call recv under torch.no_grad()");
  }
  const Message message{
      integer_of(args[2], what, "peer"),    sending,          dtype_of(*tensor),
      static_cast<size_t>(tensor->numel()), data_of(*tensor), timeout_of(args[4]).value_or(milliseconds(0))};
  PyObject* const result = issue(group, message, *tensor, truth_of(args[5]));
  if (!sending) mark_written(*tensor);
  return result;
}

/// Throws InvalidUsage if torch allows no in-place write to one of the tensors, or if the tensors overlap.
void check_written(const Tensors& tensors, const char* call) {
  check_apart(tensors, call);
  try {
    for (const at::Tensor& tensor : tensors) torch::autograd::check_inplace(tensor, /*requires_grad=*/true);
  } catch (const c10::Error& error) {
    throw InvalidUsage(std::string(call) + ": " + error.what_without_backtrace() +
                       " Pass an output that does not require grad, or make the call under torch.no_grad()");
  }
}

template <typename Act>
PyObject* guarded(Py_ssize_t given, Py_ssize_t wanted, Act act) {
  if (given != wanted) {
    PyErr_Format(PyExc_TypeError, "takes %zd arguments, got %zd", wanted, given);
    return nullptr;
  }
  try {
    return act();
  } catch (const abi::__forced_unwind&) {  // Python ends this thread, in a function of Python's that was called
    throw;
  } catch (...) {
    set_python_error(std::current_exception());
  }
  return nullptr;
}

// The default group's handle, which lives as long as it is set here. Ranks that are threads have one for each thread.
struct DefaultGroup {
  PyObject* handle = nullptr;
  Communicator* group = nullptr;  // the handle's
};
DefaultGroup default_of_process;
thread_local constinit DefaultGroup default_of_thread;

/// The plain call, `all_reduce(tensor[, op][, algorithm=][, async_op=])` on the default group. Returns what it returns;
/// null for any other call.
PyObject* plain_all_reduce(PyObject* const* args, Py_ssize_t positional, PyObject* keywords) {
  const DefaultGroup chosen = default_of_thread.handle != nullptr ? default_of_thread : default_of_process;
  if (chosen.handle == nullptr || positional < 1 || positional > 2 || !THPVariable_CheckExact(args[0])) return nullptr;
  PyObject* op = positional == 2 ? args[1] : nullptr;
  PyObject *algorithm = nullptr, *async = Py_False;
  const Py_ssize_t named = keywords != nullptr ? PyTuple_GET_SIZE(keywords) : 0;
  // Python interns the keywords of a program. Python's all_reduce takes those that are not.
  static PyObject* const op_keyword = PyUnicode_InternFromString("op");
  static PyObject* const algorithm_keyword = PyUnicode_InternFromString("algorithm");
  static PyObject* const async_keyword = PyUnicode_InternFromString("async_op");
  for (Py_ssize_t i = 0; i < named; ++i) {
    PyObject* const keyword = PyTuple_GET_ITEM(keywords, i);
    if (keyword == algorithm_keyword) {
      algorithm = args[positional + i];
    } else if (keyword == op_keyword && op == nullptr) {
      op = args[positional + i];
    } else if (keyword == async_keyword && PyBool_Check(args[positional + i])) {
      async = args[positional + i];
    } else {
      return nullptr;
    }
  }
  const at::Tensor& tensor = THPVariable_Unpack(args[0]);
  check_dense(tensor, "all_reduce", "given");
  if (!tensor.is_cpu() || !tensor.is_contiguous()) return nullptr;
  if (tensor.requires_grad() && at::GradMode::is_enabled()) return nullptr;
  Call call;
  call.collective = Collective::all_reduce;
  call.op = op != nullptr ? parse_op(op, "all_reduce") : ReduceOp::sum;
  call.algorithm = algorithm != nullptr ? algorithm_of(algorithm, call.collective) : nullptr;
  call.dtype = dtype_of(tensor);
  call.count = static_cast<size_t>(tensor.numel());
  call.input = call.output = data_of(tensor);
  const auto kept =
      py::reinterpret_borrow<py::object>(chosen.handle);  // another thread may end it while this one waits
  Communicator& group = *chosen.group;
  agree_on_added(group, call);
  PyObject* const work = issue_plain(group, call, {&tensor, &tensor}, async == Py_True);
  mark_written(tensor);
  if (async == Py_True) return work;
  Py_DECREF(work);  // None
  return Py_NewRef(args[0]);
}

PyObject* general_all_reduce = nullptr;  // the Python function that takes every argument

PyObject* all_reduce_shortcut(PyObject*, PyObject* const* args, Py_ssize_t positional, PyObject* keywords) {
  return guarded(0, 0, [&]() -> PyObject* {
    PyObject* const result = plain_all_reduce(args, positional, keywords);
    if (result != nullptr) return result;
    return PyObject_Vectorcall(general_all_reduce, args, static_cast<size_t>(positional), keywords);
  });
}

/// `function` (Python's all_reduce) with a shortcut for the plain call; its name, signature and text stay.
py::object with_shortcut(const py::function& function) {
  static std::string text;
  const py::module_ inspect = py::module_::import("inspect");
  const py::object signature = inspect.attr("signature")(function);
  py::list parameters;  // CPython reads a text signature back only without annotations
  for (const py::handle parameter : signature.attr("parameters").attr("values")()) {
    parameters.append(parameter.attr("replace")(py::arg("annotation") = inspect.attr("Parameter").attr("empty")));
  }
  text = "all_reduce" + py::str(inspect.attr("Signature")(parameters)).cast<std::string>() + "\n--\n\n" +
         py::str(function.attr("__doc__")).cast<std::string>();
  static PyMethodDef method{"all_reduce", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&all_reduce_shortcut)),
                            METH_FASTCALL | METH_KEYWORDS, nullptr};
  method.ml_doc = text.c_str();
  general_all_reduce = py::function(function).release().ptr();
  return py::reinterpret_steal<py::object>(PyCFunction_NewEx(&method, nullptr, function.attr("__module__").ptr()));
}

template <Collective which>
PyObject* entry(PyObject*, PyObject* const* args, Py_ssize_t given) {
  return guarded(given, kArguments, [&] { return collective(args, which); });
}

PyObject* message_entry(PyObject*, PyObject* const* args, Py_ssize_t given) {
  return guarded(given, 6, [&] { return message(args); });
}

template <Collective which>
PyMethodDef row() {
  return {name(which), reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&entry<which>)), METH_FASTCALL, nullptr};
}

}  // namespace

void bind_collectives(py::module_& m) {
  static PyMethodDef methods[] = {
      row<Collective::all_reduce>(),
      row<Collective::reduce_scatter>(),
      row<Collective::all_gather>(),
      row<Collective::broadcast>(),
      row<Collective::reduce>(),
      row<Collective::gather>(),
      row<Collective::scatter>(),
      row<Collective::all_to_all>(),
      row<Collective::barrier>(),
      {"message", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&message_entry)), METH_FASTCALL, nullptr},
      {nullptr, nullptr, 0, nullptr},
  };
  if (PyModule_AddFunctions(m.ptr(), methods) != 0) throw py::error_already_set();
  m.def("with_shortcut", &with_shortcut);
  m.def("set_differentiable", [](py::object function) { differentiable_collective = function.release().ptr(); });
  m.def("check_written", &check_written, py::arg("tensors"), py::arg("call"));
  m.def("milliseconds", [](const py::object& timeout) { return required_timeout_of(timeout.ptr()).count(); });
  m.def(
      "set_default",
      [](const py::handle& group, bool of_thread) {
        DefaultGroup& kept = of_thread ? default_of_thread : default_of_process;
        kept = group.is_none() ? DefaultGroup{} : DefaultGroup{group.ptr(), group.cast<Communicator*>()};
      },
      py::arg("group"), py::arg("of_thread"));
}

}  // namespace ringlet
