// A batch stream as a class of Python, over addresses in shared memory that its user keeps mapped,
// and its selections as a direct call.
#pragma once
#include <ATen/EmptyTensor.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <map>
#include <string>

#include "bindings/direct.h"
#include "bindings/store.h"
#include "select/stream.h"

namespace gear::python {

// The addresses and numbers of a stream, by name; a missing one is an error.
class StreamWords {
 public:
  explicit StreamWords(const std::map<std::string, int64_t>& given) : given_(given) {}
  int64_t operator[](const char* name) const {
    const auto found = given_.find(name);
    if (found == given_.end()) throw py::key_error(name);
    return found->second;
  }
  template <typename T>
  T* At(const char* name) const {
    return python::At<T>(static_cast<uintptr_t>((*this)[name]));
  }

 private:
  const std::map<std::string, int64_t>& given_;
};

inline cpu::StreamPriorities MakeStreamPriorities(const StreamWords& words, uint64_t* sums,
                                                  int64_t num_items) {
  return {{sums, words.At<uint64_t>("minima"), words.At<float>("priorities"), num_items},
          {words.At<int64_t>("bases"), words.At<int64_t>("generations"), words.At<int64_t>("steps"),
           words.At<int32_t>("row_slots")},
          words.At<int64_t>("counts"),
          words.At<int64_t>("window"),
          words["window_size"],
          words.At<Report>("logs"),
          words.At<int64_t>("ends"),
          words.At<const int64_t>("asked"),
          words["reports_size"],
          words["num_peers"],
          words["lag"],
          words["update_unit"],
          words["initial"],
          words["most_bits"],
          words["normalize"]};
}

inline cpu::Stream MakeStream(const std::map<std::string, int64_t>& given,
                              const std::vector<int64_t>& rule, double timeout_s) {
  const StreamWords words(given);
  if (rule.size() != 5) throw py::value_error("rule must have 5 words");
  cpu::Stream stream{};
  stream.mutex = words.At<cpu::SharedMutex>("mutex");
  stream.holder = words.At<int64_t>("holder");
  stream.control = words.At<const int64_t>("control");
  stream.slots = words.At<const Slot>("slots");
  stream.num_slots = words["num_slots"];
  stream.log = words.At<const int64_t>("log");
  stream.log_size = words["log_size"];
  stream.position = words.At<int64_t>("position");
  stream.heads = words.At<int64_t>("heads");
  stream.changes = words.At<int64_t>("changes");
  stream.ring = words.At<Resolution>("ring");
  stream.consumed = words.At<const int64_t>("consumed");
  stream.num_peers = words["num_peers"];
  stream.peer = words["peer"];
  stream.last_drawn = words.At<int64_t>("last_drawn");
  stream.sums = words.At<uint64_t>("sums");
  stream.num_items = words["num_items"];
  stream.rule = {rule[0], rule[1], rule[2], rule[3], rule[4]};
  stream.unit = words["unit"];
  stream.plain_unit = words["plain_unit"];
  stream.seed = static_cast<uint64_t>(words["seed"]);
  stream.key = static_cast<uint32_t>(words["key"]);
  stream.batch = words["batch"];
  stream.depth = words["depth"];
  stream.timeout_s = timeout_s;
  stream.has_priorities = words["has_priorities"] != 0;
  if (stream.has_priorities)
    stream.priorities = MakeStreamPriorities(words, stream.sums, stream.num_items);
  stream.moments_head = words.At<const int64_t>("moments_head");
  stream.moments = words.At<const double>("moments");
  stream.numbers = words.At<double>("numbers");
  stream.moments_size = words["moments_size"];
  stream.coordinates.resize(static_cast<size_t>(stream.batch));
  return stream;
}

// The part of a selection that a process gathers: copies, valid after the ring entry is reused.
struct SelectionPart {
  int64_t head[cpu::kNumSet];
  at::Tensor records, weights;
};

inline bool TakePart(cpu::Stream& stream, int64_t key, int64_t alpha, int64_t beta, int64_t part,
                     int64_t num_parts, SelectionPart* taken) {
  const WithoutLock unlocked;
  if (!cpu::Select(stream, key, alpha, beta)) return false;
  const int64_t entry = key % stream.depth;
  std::copy_n(stream.heads + entry * cpu::kSelectionWords, cpu::kNumSet, taken->head);
  const int64_t count = stream.batch / num_parts;
  taken->records = at::detail::empty_cpu({count, 8}, at::kLong);
  auto* records = reinterpret_cast<Resolution*>(taken->records.mutable_data_ptr<int64_t>());
  const Resolution* samples = stream.ring + entry * stream.batch + part;
  for (int64_t i = 0; i < count; ++i) records[i] = samples[i * num_parts];
  if (!stream.has_priorities) return true;
  taken->weights = at::detail::empty_cpu({count}, at::kFloat);
  cpu::Importance(records, count, static_cast<uint64_t>(taken->head[cpu::kNumerator]),
                  static_cast<uint64_t>(taken->head[cpu::kDivisor]),
                  static_cast<uint64_t>(taken->head[cpu::kExponent]),
                  taken->weights.mutable_data_ptr<float>());
  return true;
}

// Head, records and weights, or None.
inline PyObject* TakeSelection(cpu::Stream& stream, int64_t key, int64_t alpha, int64_t beta,
                               int64_t part, int64_t num_parts) {
  SelectionPart taken;
  if (!TakePart(stream, key, alpha, beta, part, num_parts, &taken)) Py_RETURN_NONE;
  PyObject* head = PyList_New(cpu::kNumSet);
  if (head == nullptr) throw direct::PythonError{};
  for (Py_ssize_t i = 0; i < cpu::kNumSet; ++i)
    PyList_SET_ITEM(head, i, PyLong_FromLongLong(taken.head[i]));
  PyObject* weights = Py_None;
  if (taken.weights.defined())
    weights = THPVariable_Wrap(std::move(taken.weights));
  else
    Py_INCREF(weights);
  return Py_BuildValue("NNN", head, THPVariable_Wrap(std::move(taken.records)), weights);
}

inline void BindStream(py::module_& module) {
  py::class_<cpu::Stream>(module, "Stream", py::module_local())
      .def(py::init(&MakeStream), py::kw_only(), py::arg("words"), py::arg("rule"),
           py::arg("timeout_s"))
      .def_property_readonly(
          "address", [](cpu::Stream& stream) { return reinterpret_cast<uintptr_t>(&stream); });
}

}  // namespace gear::python
