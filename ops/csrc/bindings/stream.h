// A batch stream as a class of Python, and its selections and reported priorities as direct calls.
//
// It holds addresses in shared memory that its user keeps mapped.
#pragma once
#include <ATen/EmptyTensor.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>

#include <vector>

#include "bindings/direct_calls.h"
#include "bindings/gather_call.h"
#include "bindings/store.h"
#include "select/stream.h"

namespace gear::python {

inline cpu::Stream MakeStream(const WordMap& words, const std::vector<int64_t>& rule,
                              double timeout_s) {
  if (rule.size() != 5) throw py::value_error("rule must have 5 words");
  cpu::Stream stream{};
  stream.rule = {rule[0], rule[1], rule[2], rule[3], rule[4]};
  stream.timeout_s = timeout_s;
  ReadWords(words, "mutex", &stream.mutex, "holder", &stream.holder, "control", &stream.control);
  ReadWords(words, "slots", &stream.slots, "num_slots", &stream.num_slots);
  ReadWords(words, "log", &stream.log, "log_size", &stream.log_size, "consumed", &stream.consumed);
  ReadWords(words, "num_peers", &stream.num_peers, "peer", &stream.peer);
  ReadWords(words, "position", &stream.position, "heads", &stream.heads, "ring", &stream.ring);
  ReadWords(words, "changes", &stream.changes, "last_drawn", &stream.last_drawn);
  ReadWords(words, "batch", &stream.batch, "depth", &stream.depth);
  ReadWords(words, "seed", &stream.seed, "random_key", &stream.random_key, "unit", &stream.unit);
  ReadWords(words, "sums", &stream.sums, "num_items", &stream.num_items);
  ReadWords(words, "plain_unit", &stream.plain_unit, "has_priorities", &stream.has_priorities);
  ReadWords(words, "moments_head", &stream.moments_head, "moments", &stream.moments);
  ReadWords(words, "numbers", &stream.numbers, "moments_size", &stream.moments_size);
  ReadWords(words, "parts_ahead", &stream.parts_ahead);
  stream.coordinates.resize(static_cast<size_t>(stream.batch));
  if (!stream.has_priorities) return stream;
  cpu::StreamPriorities& given = stream.priorities;
  cpu::Priorities& target = given.target;
  cpu::PrioritizedSlots& known = given.known;
  ReadWords(words, "sums", &target.sums, "num_items", &target.num_items);
  ReadWords(words, "minima", &target.minima, "priorities", &target.values);
  ReadWords(words, "bases", &known.bases, "generations", &known.generations);
  ReadWords(words, "steps", &known.steps, "row_slots", &known.row_slots);
  ReadWords(words, "counts", &given.counts, "logs", &given.logs, "reports_size", &given.log_size);
  ReadWords(words, "window", &given.window, "window_size", &given.window_size);
  ReadWords(words, "ends", &given.ends, "asked", &given.asked, "lag", &given.lag);
  ReadWords(words, "num_peers", &given.num_peers, "update_unit", &given.unit);
  ReadWords(words, "initial", &given.initial, "most_bits", &given.most_bits);
  ReadWords(words, "normalize", &given.normalize);
  return stream;
}

// The part of a selection that a process gathers: its head, records and weights, or None. They are
// copies, valid after the ring entry is reused. With a call the part is gathered, too.
inline PyObject* TakeSelection(cpu::Stream& stream, int64_t number, int64_t alpha, int64_t beta,
                               int64_t part, int64_t num_parts, GatherCall* call) {
  int64_t words[cpu::kNumSet];
  at::Tensor taken, weights;
  const auto take = [&] {
    const WithoutLock unlocked;
    if (!cpu::Select(stream, number, alpha, beta)) return false;
    const int64_t entry = number % stream.depth, count = stream.batch / num_parts;
    std::copy_n(stream.heads + entry * cpu::kSelectionWords, cpu::kNumSet, words);
    taken = at::detail::empty_cpu({count, 8}, at::kLong);
    auto* records = reinterpret_cast<Resolution*>(taken.mutable_data_ptr<int64_t>());
    const Resolution* samples = stream.ring + entry * stream.batch + part;
    for (int64_t i = 0; i < count; ++i) records[i] = samples[i * num_parts];
    if (stream.has_priorities) {
      weights = at::detail::empty_cpu({count}, at::kFloat);
      cpu::Importance(records, count, static_cast<uint64_t>(words[cpu::kNumerator]),
                      static_cast<uint64_t>(words[cpu::kDivisor]),
                      static_cast<uint64_t>(words[cpu::kExponent]),
                      weights.mutable_data_ptr<float>());
    }
    if (call == nullptr) return true;
    std::vector<Resolution> next(stream.parts_ahead > 0 ? static_cast<size_t>(count) : 0);
    const bool is_drawn =
        !next.empty() && cpu::NextPart(stream, number, part, num_parts, next.data());
    call->Run(records, count, std::nullopt, is_drawn ? next.data() : nullptr);
    return true;
  };
  if (!take()) Py_RETURN_NONE;
  PyObject* head = PyList_New(cpu::kNumSet);
  if (head == nullptr) throw direct::PythonError{};
  for (Py_ssize_t i = 0; i < cpu::kNumSet; ++i)
    PyList_SET_ITEM(head, i, PyLong_FromLongLong(words[i]));
  return Py_BuildValue("NNN", head, THPVariable_Wrap(std::move(taken)),
                       THPVariable_Wrap(std::move(weights)));
}

// Whether the values of a tensor lie in host memory one after the other, as they are.
inline bool IsPlain(const at::Tensor& tensor, at::ScalarType type, int64_t dims) {
  return tensor.is_cpu() && tensor.layout() == at::kStrided && !tensor.is_nested() &&
         tensor.scalar_type() == type && tensor.dim() == dims && tensor.is_contiguous() &&
         !tensor.is_neg() && !tensor.unsafeGetTensorImpl()->is_python_dispatch();
}

// Appends priorities of this process's samples, one for each, to its log. False: Python must do it,
// which also converts them or raises the error.
inline bool ReportPriorities(cpu::Stream& stream, const at::Tensor& resolutions,
                             const at::Tensor& priorities, int64_t batch) {
  if (!IsPlain(priorities, at::kFloat, 1) || !IsPlain(resolutions, at::kLong, 2)) return false;
  const int64_t count = priorities.numel();
  if (resolutions.size(0) != count || !cpu::HasRoom(stream, count)) return false;
  const Resolution* records = Rows<Resolution>(resolutions, "resolutions", count);
  const float* values = Values<float>(priorities, "priorities");
  CheckPriorities(values, count);
  return cpu::Publish(stream, records, values, count, batch);
}

inline void BindStream(py::module_& module) {
  AddressedClass<cpu::Stream>(module, "Stream")
      .def(py::init(&MakeStream), py::kw_only(), py::arg("words"), py::arg("rule"),
           py::arg("timeout_s"));
}

}  // namespace gear::python
