// The calls themselves, written against CPython's vectorcall: a 4-byte all-reduce costs less than a general binding's
// argument handling. Python's functions in ringlet/collectives.py are the public face; these take positional arguments:
//
//   collective(group, output, input, op, algorithm, root, timeout_ms, scale, async_op)
//       output and input may be None, or lists (bindings/lists.h)
//   message(group, tensor, peer, sending, timeout_ms, async_op)
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <array>
#include <string_view>

#include "bindings/errors.h"
#include "bindings/lists.h"
#include "bindings/module.h"
#include "bindings/on_device.h"
#include "bindings/profiled.h"
#include "bindings/tensors.h"
#include "comm/communicator.h"
#include "engine/selector.h"

namespace py = pybind11;

namespace ringlet {
namespace {

using std::chrono::milliseconds;
using Tensors = std::vector<at::Tensor>;

std::string_view text_of(PyObject* object, const char* what) {
  Py_ssize_t length = 0;
  const char* text = PyUnicode_Check(object) ? PyUnicode_AsUTF8AndSize(object, &length) : nullptr;
  if (text == nullptr) throw InvalidUsage(std::string(what) + " must be a string");
  return {text, static_cast<size_t>(length)};
}

ReduceOp parse_op(PyObject* object) {
  const std::string_view text = text_of(object, "op");
  std::string known;
  for (int i = 0; i < kReduceOps; ++i) {
    const auto op = static_cast<ReduceOp>(i);
    if (text == name(op)) return op;
    known += std::string(i ? ", " : "") + name(op);
  }
  throw InvalidUsage("op \"" + std::string(text) + "\" is not one of " + known);
}

/// Null for None.
const at::Tensor* tensor_of(PyObject* object, const char* call, const char* role) {
  if (object == Py_None) return nullptr;
  if (!THPVariable_Check(object)) throw InvalidUsage(std::string(call) + ": the " + role + " is not a tensor");
  const at::Tensor& tensor = THPVariable_Unpack(object);
  check_tensor(tensor, call, role);
  return &tensor;
}

/// Null where there is none.
const at::Tensor* first(const Tensors& tensors) { return tensors.empty() ? nullptr : tensors.data(); }

bool is_list(PyObject* object) { return PyList_Check(object) || PyTuple_Check(object); }

/// Of a list, of one tensor, of None.
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

std::string elements(size_t count) { return std::to_string(count) + " elements"; }

/// Checks both tensors against the collective's shape and fills the call's count, dtype and pointers.
void bind_tensors(Call& call, const Communicator& group, const at::Tensor* output, const at::Tensor* input) {
  const char* what = name(call.collective);
  const int rank = group.rank(), world = group.world();
  const bool wants_input =
      input_elements({.collective = call.collective, .root = call.root, .count = 1}, rank, world) > 0;
  const bool wants_output =
      output_elements({.collective = call.collective, .root = call.root, .count = 1}, rank, world) > 0;
  if (wants_input && input == nullptr) throw InvalidUsage(std::string(what) + ": this rank must give an input tensor");
  if (wants_output && output == nullptr)
    throw InvalidUsage(std::string(what) + ": this rank must give an output tensor");
  const at::Tensor* any = wants_input ? input : output;
  if (any == nullptr) return;  // a barrier
  call.dtype = dtype_of(*any);
  // The tensor that holds exactly one block, or the divided buffer, tells the count.
  Call unit = call;
  unit.count = 1;
  const size_t blocks = wants_input ? input_elements(unit, rank, world) : output_elements(unit, rank, world);
  const size_t numel = static_cast<size_t>(any->numel());
  if (numel % blocks != 0) {
    throw InvalidUsage(std::string(what) + ": " + elements(numel) + " do not divide into " + std::to_string(blocks) +
                       " equal blocks");
  }
  call.count = numel / blocks;
  if (wants_input && wants_output) {
    const size_t expected = output_elements(call, rank, world);
    if (output->scalar_type() != input->scalar_type()) {
      throw InvalidUsage(std::string(what) + ": output is " + c10::toString(output->scalar_type()) + ", input is " +
                         c10::toString(input->scalar_type()));
    }
    if (static_cast<size_t>(output->numel()) != expected) {
      throw InvalidUsage(std::string(what) + ": the output has " + elements(static_cast<size_t>(output->numel())) +
                         ", " + elements(expected) + " are needed for an input of " + elements(numel) + " and " +
                         std::to_string(world) + " ranks");
    }
  }
  call.input = wants_input ? data_of(*input) : nullptr;
  call.output = wants_output ? data_of(*output) : nullptr;
}

PyObject* as_python(std::shared_ptr<Work> work) { return py::cast(std::move(work)).release().ptr(); }

using Kept = std::array<at::Tensor, 2>;

/// Small calls keep the GIL until a wait gives the processor up: letting it go and taking it again costs more than most
/// of them do. Ranks that are threads must let it go at once, since the rank they wait for needs it.
constexpr size_t kKeepGilBytes = size_t{64} << 10;

void run(Communicator& group, const Call& call) {
  static const RuntimeHooks hooks{[]() -> void* { return PyEval_SaveThread(); },
                                  [](void* state) { PyEval_RestoreThread(static_cast<PyThreadState*>(state)); }};
  const size_t blocks = is_divided(call.collective) ? 1 : static_cast<size_t>(group.world());
  if (group.ranks_are_threads() || call.count * element_size(call.dtype) * blocks > kKeepGilBytes) {
    const py::gil_scoped_release unlocked;
    group.run(call);
    return;
  }
  struct Reset {
    ~Reset() { runtime_hooks = nullptr; }
  } reset;
  runtime_hooks = &hooks;
  group.run(call);
}

PyObject* on_device(Communicator& group, const DeviceCalls& calls) {
  auto enqueued = std::make_shared<Enqueued>([&] {
    const py::gil_scoped_release unlocked;
    return enqueue(group, calls);
  }());
  if (calls.async) return py::cast(std::move(enqueued)).release().ptr();
  Py_RETURN_NONE;
}

/// On a GPU equal blocks travel as one tensor, which is how other ranks may have given theirs. An all-to-all's stay: that
/// this rank's are equal does not say that all are.
PyObject* on_packed_lists(Communicator& group, Call call, const Tensors& outputs, const Tensors& inputs, bool async) {
  const at::NoGradGuard no_grad;
  const at::Tensor output = packed(outputs, /*received=*/true), input = packed(inputs, /*received=*/false);
  bind_tensors(call, group, &output, &input);
  DeviceCalls calls{.device = output.device(), .calls = {call}, .tensors = {output, input}, .async = async};
  if (outputs.size() > 1) calls.deliver = [&] { unpack(output, outputs); };
  return on_device(group, calls);
}

std::shared_ptr<Work> watched(std::shared_ptr<Work> work, const std::shared_ptr<Profiled>& profiled) {
  if (profiled) work->then([profiled](const std::exception_ptr&) { profiled->end(); });
  return work;
}

PyObject* on_lists(Communicator& group, const Call& given, PyObject* const* args) {
  const char* what = name(given.collective);
  const Tensors outputs = tensors_of(args[1], what, "output"), inputs = tensors_of(args[2], what, "input");
  const auto made = list_call(given, outputs, inputs, group.rank(), group.world());
  const c10::Device device = common_device(made->tensors, what);
  const bool async = args[8] == Py_True;
  const auto issued = [&]() -> PyObject* {
    if (!device.is_cpu()) {
      const bool pack = !made->blocks.uneven && given.collective != Collective::all_to_all;
      if (pack) return on_packed_lists(group, given, outputs, inputs, async);
      return on_device(group, {.device = device, .calls = {made->call}, .tensors = made->tensors, .async = async});
    }
    const auto profiled = profile(made->call, first(outputs), first(inputs));
    if (async) return as_python(watched(group.start(made->call, made), profiled));
    run(group, made->call);
    Py_RETURN_NONE;
  };
  PyObject* const result = issued();
  for (const at::Tensor& output : outputs) mark_written(output);
  return result;
}

/// A work, None where it was waited for.
PyObject* issue(Communicator& group, Call& call, const at::Tensor* output, const at::Tensor* input, bool async) {
  const auto profiled = profile(call, output, input);
  const auto elsewhere = [](const at::Tensor* tensor) { return tensor != nullptr && !tensor->is_cpu(); };
  if (elsewhere(output) || elsewhere(input)) {
    std::vector<at::Tensor> tensors;
    for (const at::Tensor* tensor : {output, input}) {
      if (tensor != nullptr) tensors.push_back(*tensor);
    }
    const c10::Device device = common_device(tensors, name(call.collective));
    return on_device(group, {.device = device, .calls = {call}, .tensors = std::move(tensors), .async = async});
  }
  if (async) {
    auto keep = std::make_shared<Kept>();
    if (output != nullptr) (*keep)[0] = *output;
    if (input != nullptr) (*keep)[1] = *input;
    return as_python(watched(group.start(call, std::move(keep)), profiled));
  }
  run(group, call);
  Py_RETURN_NONE;
}

PyObject* collective(PyObject* const* args, Collective which) {
  auto& group = *py::handle(args[0]).cast<Communicator*>();
  const char* what = name(which);
  Call call;
  call.collective = which;
  call.root = static_cast<int>(PyLong_AsLong(args[5]));
  call.op = parse_op(args[3]);
  call.algorithm = named_algorithm(which, text_of(args[4], "algorithm"));
  call.timeout = milliseconds(PyLong_AsLongLong(args[6]));
  call.scale = PyFloat_AsDouble(args[7]);
  if (PyErr_Occurred()) return nullptr;
  if (call.root < 0 || call.root >= group.world()) {
    throw InvalidUsage(std::string(what) + ": root " + std::to_string(call.root) + " is not a rank of a group of " +
                       std::to_string(group.world()));
  }
  if (is_list(args[1]) || is_list(args[2])) return on_lists(group, call, args);
  const at::Tensor* output = tensor_of(args[1], what, "output");
  const at::Tensor* input = tensor_of(args[2], what, "input");
  bind_tensors(call, group, output, input);
  PyObject* const result = issue(group, call, output, input, args[8] == Py_True);
  if (call.output != nullptr && !(which == Collective::broadcast && call.root == group.rank())) mark_written(*output);
  return result;
}

PyObject* issue(Communicator& group, const Message& message, const at::Tensor& tensor, bool async) {
  if (!tensor.is_cpu()) {
    return on_device(group, {.device = tensor.device(), .messages = {message}, .tensors = {tensor}, .async = async});
  }
  const char* const title = message.sending ? "ringlet:send" : "ringlet:recv";
  const auto profiled = profiling() ? std::make_shared<Profiled>(title, Tensors{tensor}) : nullptr;
  if (async) return as_python(watched(group.start(message, std::make_shared<Kept>(Kept{tensor, {}})), profiled));
  {
    const py::gil_scoped_release unlocked;
    group.run(message);
  }
  Py_RETURN_NONE;  // counts a reference, for which the GIL is needed
}

PyObject* message(PyObject* const* args) {
  auto& group = *py::handle(args[0]).cast<Communicator*>();
  const bool sending = args[3] == Py_True;
  const at::Tensor* tensor = tensor_of(args[1], sending ? "send" : "recv", "given");
  if (tensor == nullptr) throw InvalidUsage(std::string(sending ? "send" : "recv") + ": no tensor given");
  const Message message{
      static_cast<int>(PyLong_AsLong(args[2])), sending,          dtype_of(*tensor),
      static_cast<size_t>(tensor->numel()),     data_of(*tensor), milliseconds(PyLong_AsLongLong(args[4]))};
  if (PyErr_Occurred()) return nullptr;
  PyObject* const result = issue(group, message, *tensor, args[5] == Py_True);
  if (!sending) mark_written(*tensor);
  return result;
}

template <typename Act>
PyObject* guarded(Py_ssize_t given, Py_ssize_t wanted, Act act) {
  if (given != wanted) {
    PyErr_Format(PyExc_TypeError, "takes %zd arguments, got %zd", wanted, given);
    return nullptr;
  }
  try {
    return act();
  } catch (...) {
    set_python_error(std::current_exception());
  }
  return nullptr;
}

// The default group's handle, which lives as long as it is set here; of the thread where ranks are threads.
PyObject* default_of_process = nullptr;
thread_local PyObject* default_of_thread = nullptr;

/// The plain call, `all_reduce(tensor[, op][, algorithm=])` on the default group; false where it is not that.
bool plain_all_reduce(PyObject* const* args, Py_ssize_t positional, PyObject* keywords) {
  PyObject* handle = default_of_thread != nullptr ? default_of_thread : default_of_process;
  if (handle == nullptr || positional < 1 || positional > 2 || !THPVariable_CheckExact(args[0])) return false;
  PyObject* op = positional == 2 ? args[1] : nullptr;
  PyObject* algorithm = nullptr;
  const Py_ssize_t named = keywords != nullptr ? PyTuple_GET_SIZE(keywords) : 0;
  for (Py_ssize_t i = 0; i < named; ++i) {
    const std::string_view keyword = text_of(PyTuple_GET_ITEM(keywords, i), "keyword");
    if (keyword == "algorithm") {
      algorithm = args[positional + i];
    } else if (keyword == "op" && op == nullptr) {
      op = args[positional + i];
    } else {
      return false;
    }
  }
  const at::Tensor& tensor = THPVariable_Unpack(args[0]);
  check_tensor(tensor, "all_reduce", "given");
  if (!tensor.is_cpu()) return false;
  Call call;
  call.collective = Collective::all_reduce;
  call.op = op != nullptr ? parse_op(op) : ReduceOp::sum;
  call.algorithm = algorithm != nullptr ? named_algorithm(call.collective, text_of(algorithm, "algorithm")) : nullptr;
  call.dtype = dtype_of(tensor);
  call.count = static_cast<size_t>(tensor.numel());
  call.input = call.output = data_of(tensor);
  const auto profiled = profile(call, &tensor, &tensor);
  const auto kept = py::reinterpret_borrow<py::object>(handle);  // another thread may end it while this one waits
  run(*kept.cast<Communicator*>(), call);
  mark_written(tensor);
  return true;
}

PyObject* general_all_reduce = nullptr;  // the Python function that takes every argument

PyObject* all_reduce_shortcut(PyObject*, PyObject* const* args, Py_ssize_t positional, PyObject* keywords) {
  return guarded(0, 0, [&]() -> PyObject* {
    if (!plain_all_reduce(args, positional, keywords)) {
      return PyObject_Vectorcall(general_all_reduce, args, static_cast<size_t>(positional), keywords);
    }
    return Py_NewRef(args[0]);
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
  return guarded(given, 9, [&] { return collective(args, which); });
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
  m.def(
      "set_default",
      [](const py::handle& group, bool of_thread) {
        (of_thread ? default_of_thread : default_of_process) = group.is_none() ? nullptr : group.ptr();
      },
      py::arg("group"), py::arg("of_thread"));
}

}  // namespace ringlet
