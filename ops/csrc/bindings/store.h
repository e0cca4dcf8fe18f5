// The store as a class of Python, buffers and forms of rows, row targets, and late rows.
//
// They hold addresses in shared memory that their user keeps mapped.
#pragma once
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "bindings/direct_calls.h"
#include "common/row_copies.h"
#include "store/compact.h"
#include "store/eviction.h"
#include "store/late_rows.h"
#include "store/map_guard.h"
#include "store/mutex.h"
#include "store/open_trajectories.h"
#include "store/rate_limiter.h"
#include "store/reserve_rows.h"
#include "store/slots.h"
#include "store/store.h"

namespace gear::python {

namespace py = pybind11;
using direct::ForEach;
using direct::WithoutLock;

template <typename T>
T* At(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

// The addresses and numbers of an object of C++, by name; a missing one is an error.
using WordMap = std::map<std::string, int64_t>;

// Sets members by the names of their words: name, member, and so on.
template <typename T, typename... More>
void ReadWords(const WordMap& words, const char* name, T* member, const More&... more) {
  const auto found = words.find(name);
  if (found == words.end()) throw py::key_error(name);
  if constexpr (std::is_pointer_v<T>)
    *member = reinterpret_cast<T>(found->second);
  else
    *member = static_cast<T>(found->second);
  if constexpr (sizeof...(more) > 0) ReadWords(words, more...);
}

// A class whose objects direct calls take by their address.
template <typename T>
py::class_<T> AddressedClass(const py::module_& module, const char* name) {
  return py::class_<T>(module, name, py::module_local())
      .def_property_readonly("address", [](T& one) { return reinterpret_cast<uintptr_t>(&one); });
}

// The memory of an array, or of a dense tensor on the CPU; released at the end of the scope.
class Buffer {
 public:
  explicit Buffer(PyObject* object) {
    if (THPVariable_CheckExact(object)) {
      held_ = HoldTensor(object);
      return;
    }
    held_ = PyObject_GetBuffer(object, &view_, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) == 0;
    if (!held_) PyErr_Clear();
  }
  ~Buffer() {
    if (held_) PyBuffer_Release(&view_);
  }
  Buffer(Buffer&& other) noexcept : view_(other.view_), held_(other.held_) { other.held_ = false; }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  bool held() const { return held_; }
  const Py_buffer& view() const { return view_; }

 private:
  // The format of a tensor's elements; null for those that NumPy has not.
  static const char* FormatOf(at::ScalarType type) {
    switch (type) {
      case at::kBool:
        return "?";
      case at::kByte:
        return "B";
      case at::kChar:
        return "b";
      case at::kShort:
        return "h";
      case at::kInt:
        return "i";
      case at::kLong:
        return "q";
      case at::kHalf:
        return "e";
      case at::kFloat:
        return "f";
      case at::kDouble:
        return "d";
      default:
        return nullptr;
    }
  }

  // Sets the view of a tensor, which has no buffer protocol; false: its values are not plain
  // memory.
  bool HoldTensor(PyObject* object) {
    const at::Tensor& tensor = THPVariable_Unpack(object);
    const bool is_plain = !tensor.is_nested() && tensor.layout() == at::kStrided &&
                          tensor.device().is_cpu() && !tensor.is_quantized() &&
                          tensor.has_storage() && tensor.is_contiguous() && !tensor.is_neg() &&
                          !tensor._is_zerotensor();
    const char* format = is_plain ? FormatOf(tensor.scalar_type()) : nullptr;
    if (format == nullptr) return false;
    static_assert(sizeof(Py_ssize_t) == sizeof(int64_t));
    view_ = {};
    view_.buf = tensor.data_ptr();
    view_.obj = Py_NewRef(object);
    view_.len = static_cast<Py_ssize_t>(tensor.nbytes());
    view_.itemsize = static_cast<Py_ssize_t>(tensor.element_size());
    view_.format = const_cast<char*>(format);
    view_.ndim = static_cast<int>(tensor.dim());
    view_.shape = reinterpret_cast<Py_ssize_t*>(const_cast<int64_t*>(tensor.sizes().data()));
    return true;
  }

  Py_buffer view_;
  bool held_;
};

}  // namespace gear::python

namespace gear::direct {

template <>
struct Argument<python::Buffer> {
  explicit Argument(PyObject* object) : value(object) {}
  python::Buffer value;
};

template <>
struct Argument<std::vector<python::Buffer>> {
  explicit Argument(PyObject* list) {
    value.reserve(16);
    ForEach(list, [&](PyObject* item) { value.emplace_back(item); });
  }
  std::vector<python::Buffer> value;
};

}  // namespace gear::direct

namespace gear::python {

// 'f', 'i', 'u' or 'b' as NumPy's kinds; 0 for anything else.
inline char KindOf(const char* format) {
  if (format == nullptr || format[0] == 0 || format[1] != 0) return 0;
  if (std::strchr("efd", format[0]) != nullptr) return 'f';
  if (std::strchr("bhilq", format[0]) != nullptr) return 'i';
  if (std::strchr("BHILQ", format[0]) != nullptr) return 'u';
  return format[0] == '?' ? 'b' : 0;
}

// Dtype and shape of a column's rows.
struct RowForm {
  char kind;
  Py_ssize_t item_bytes, row_bytes;
  cpu::Exponents checked;
  std::vector<Py_ssize_t> shape;

  // Whether a buffer holds `rows` such rows; one row alone has no axis of rows if `rows` is -1.
  bool Fits(const Buffer& buffer, Py_ssize_t rows) const {
    if (!buffer.held()) return false;
    const Py_buffer& view = buffer.view();
    const int lead = rows < 0 ? 0 : 1;
    if (view.itemsize != item_bytes || KindOf(view.format) != kind) return false;
    if (view.ndim != static_cast<int>(shape.size()) + lead) return false;
    if (lead == 1 && view.shape[0] != rows) return false;
    for (size_t i = 0; i < shape.size(); ++i) {
      if (view.shape[i + lead] != shape[i]) return false;
    }
    return true;
  }
};

inline RowForm MakeForm(char kind, Py_ssize_t item_bytes, int64_t checked,
                        std::vector<Py_ssize_t> shape) {
  RowForm form{kind, item_bytes, item_bytes, static_cast<cpu::Exponents>(checked),
               std::move(shape)};
  for (const Py_ssize_t size : form.shape) form.row_bytes *= size;
  return form;
}

// A store with the forms of its columns.
struct Store : cpu::Store {
  std::vector<RowForm> forms;

  // Columns: address, code of `rows`, form.
  void SetColumns(const std::vector<std::tuple<uintptr_t, int64_t, RowForm>>& given) {
    columns.clear();
    forms.clear();
    for (const auto& [address, rows, form] : given) {
      columns.push_back({At<char>(address), form.row_bytes, rows, form.checked});
      forms.push_back(form);
    }
  }

  // Sets the rate limiter: code of its unit, least size, samples per insert, most.
  void SetRate(int64_t unit, int64_t min_size, double samples_per_insert, double most) {
    rate = {true, static_cast<cpu::RateUnit>(unit), min_size, samples_per_insert, most};
  }

  // Sets the eviction policy; `column` and the code of its dtype are those of kLowestValue.
  void SetEviction(int64_t policy, size_t column, int64_t dtype) {
    removal = static_cast<cpu::Removal>(policy);
    value_column = column;
    value_dtype = dtype;
  }

  void AddStream(const WordMap& words) {
    cpu::StreamView stream{};
    ReadWords(words, "position", &stream.position, "last_drawn", &stream.last_drawn);
    ReadWords(words, "consumed", &stream.consumed, "num_peers", &stream.num_peers);
    ReadWords(words, "held", &stream.held, "priorities", &stream.priorities);
    ReadWords(words, "generations", &stream.generations);
    cpu::StepPriorities& steps = stream.steps;
    ReadWords(words, "sums", &steps.target.sums, "minima", &steps.target.minima);
    ReadWords(words, "num_items", &steps.target.num_items, "counts", &steps.counts);
    ReadWords(words, "priorities", &steps.target.values);
    streams.push_back(stream);
  }

  int64_t ReserveRows(int64_t num_rows, int64_t num_steps, int64_t inserts,
                      std::pair<int64_t, int64_t> latest, bool samples, bool selects,
                      bool has_victim, bool has_released) {
    const cpu::SlotUse last{latest.first, latest.second};
    return cpu::ReserveWithRemoval(
        *this, {num_rows, num_steps, inserts, last, samples, selects, has_victim, has_released});
  }

  // Which of `count` slots are held; `found`: [count], bool.
  void FindHeld(uintptr_t slots, int64_t count, uintptr_t found) {
    for (int64_t i = 0; i < count; ++i)
      At<bool>(found)[i] = cpu::IsHeld(*this, At<const int64_t>(slots)[i]);
  }

  // The highest priority of each of `count` slots; `found`: [count], float32.
  void FindPriorities(uintptr_t slots, int64_t count, uintptr_t found) {
    for (int64_t i = 0; i < count; ++i)
      At<float>(found)[i] = cpu::PriorityOf(*this, At<const int64_t>(slots)[i]);
  }

  // Whether each column has its stored dtype, and no NaN or infinity unless the schema allows them.
  bool AreFinite(py::handle given) const {
    const direct::Argument<std::vector<Buffer>> columns_given(given.ptr());
    const std::vector<Buffer>& buffers = columns_given.value;
    bool finite = buffers.size() == forms.size();
    for (size_t i = 0; finite && i < buffers.size(); ++i) {
      const Buffer& buffer = buffers[i];
      finite = buffer.held() && buffer.view().itemsize == forms[i].item_bytes &&
               cpu::AllFinite(buffer.view().buf, buffer.view().len, forms[i].checked);
    }
    return finite;
  }
};

// Whether the rows to copy are finite; rows that are left out are not checked.
inline bool RowsAreFinite(const RowForm& form, const char* source, const int64_t* rows,
                          Py_ssize_t num_rows) {
  if (cpu::AllFinite(source, num_rows * form.row_bytes, form.checked)) return true;
  for (Py_ssize_t i = 0; i < num_rows; ++i) {
    const char* row = source + i * form.row_bytes;
    if (rows[i] >= 0 && !cpu::AllFinite(row, form.row_bytes, form.checked)) return false;
  }
  return true;
}

// Places of rows that are put one by one.
struct RowTargets {
  std::vector<std::pair<uintptr_t, RowForm>> targets;
};

inline Store MakeStore(const WordMap& words) {
  Store store;
  ReadWords(words, "mutex", &store.mutex, "holder", &store.holder, "control", &store.control);
  ReadWords(words, "links", &store.links, "log", &store.log, "log_size", &store.log_size);
  ReadWords(words, "retention", &store.retention, "slots", &store.slots);
  ReadWords(words, "num_slots", &store.num_slots, "num_rows", &store.num_rows);
  ReadWords(words, "most_trajectories", &store.most_trajectories, "most_steps", &store.most_steps);
  ReadWords(words, "least_free_rows", &store.least_free_rows, "position", &store.position);
  ReadWords(words, "id_index", &store.id_index, "id_count", &store.id_count, "peer", &store.peer);
  ReadWords(words, "peers", &store.peers, "spare_rows", &store.spare_rows);
  ReadWords(words, "groups", &store.groups, "group_counts", &store.group_counts);
  ReadWords(words, "frees_in_parts", &store.frees_in_parts);
  ReadWords(words, "group_column", &store.group_column, "most_of_group", &store.most_of_group);
  ReadWords(words, "shared_prompts", &store.shared_prompts);
  return store;
}

// Functions called for each trajectory, step or row take the address of their object (`address`)
// and are direct calls.

// Whether one row has its stored dtype and shape, and no NaN or infinity unless allowed.
inline bool RowFits(const RowTargets& targets, int64_t target, const Buffer& row) {
  const RowForm& form = targets.targets.at(static_cast<size_t>(target)).second;
  return form.Fits(row, -1) && cpu::AllFinite(row.view().buf, form.row_bytes, form.checked);
}

// Returns the index of the first column of another dtype or shape, or with a NaN or infinity that
// is not allowed, and copies nothing; -1 if there is none.
inline int64_t PutRows(const RowTargets& given, const std::vector<Buffer>& columns,
                       const Buffer& rows) {
  const auto& targets = given.targets;
  const bool are_rows = rows.held() && KindOf(rows.view().format) == 'i' &&
                        rows.view().itemsize == 8 && rows.view().ndim == 1;
  if (!are_rows || columns.size() != targets.size()) {
    PyErr_SetString(PyExc_TypeError,
                    "gear: rows_put expects a buffer for each target, and rows [n] int64");
    throw direct::PythonError{};
  }
  const Py_ssize_t num_rows = rows.view().shape[0];
  const auto* places = static_cast<const int64_t*>(rows.view().buf);
  for (size_t i = 0; i < targets.size(); ++i) {
    const RowForm& form = targets[i].second;
    if (!form.Fits(columns[i], num_rows) ||
        !RowsAreFinite(form, static_cast<const char*>(columns[i].view().buf), places, num_rows))
      return static_cast<int64_t>(i);
  }
  for (size_t i = 0; i < targets.size(); ++i)
    cpu::ScatterRows(At<char>(targets[i].first), static_cast<const char*>(columns[i].view().buf),
                     targets[i].second.row_bytes, places, num_rows);
  return -1;
}

// The words of a buffer of int64, of `num_words` in all; -1: as many as it has.
inline int64_t* WordsOf(const Buffer& buffer, Py_ssize_t num_words) {
  const bool fits = buffer.held() && KindOf(buffer.view().format) == 'i' &&
                    buffer.view().itemsize == 8 &&
                    (num_words < 0 || buffer.view().len == 8 * num_words);
  if (!fits) {
    PyErr_SetString(PyExc_TypeError, "gear: expected a contiguous buffer of int64");
    throw direct::PythonError{};
  }
  return static_cast<int64_t*>(buffer.view().buf);
}

// Returns slots written, trajectories that had the column, first row that is not finite or -1.
inline PyObject* WriteLateRows(Store& store, int64_t column, int64_t bit, const Buffer& records,
                               const Buffer& values, int64_t offset, const Buffer& slots) {
  const auto late = static_cast<size_t>(column);
  const auto* all = reinterpret_cast<const Resolution*>(WordsOf(records, -1));
  const auto num = records.view().len / static_cast<Py_ssize_t>(sizeof(Resolution));
  int64_t* written = WordsOf(slots, num);
  const int64_t rows_of = store.columns.at(late).rows;
  Py_ssize_t rows = num;
  if (rows_of != cpu::kPerTrajectory) {
    rows = 0;
    for (Py_ssize_t i = 0; i < num; ++i) rows += all[i].num_steps + rows_of;
  }
  if (!store.forms[late].Fits(values, rows)) {
    PyErr_Format(PyExc_TypeError, "gear: late_rows_write expects %zd rows of the column", rows);
    throw direct::PythonError{};
  }
  cpu::LateRows done{};
  {
    const WithoutLock unlocked;
    done = cpu::WriteLateRows(store, late, bit, all, num,
                              static_cast<const char*>(values.view().buf), offset, written);
  }
  return Py_BuildValue("LLL", static_cast<long long>(done.written),
                       static_cast<long long>(done.repeated),
                       static_cast<long long>(done.not_finite));
}

inline void MarkLateRows(Store& store, int64_t bit, const Buffer& slots) {
  cpu::MarkPresent(store, bit, WordsOf(slots, -1), slots.view().len / 8);
}

// Adds the classes and the functions that are called seldom. Functions that are called in every
// step (mutex, notifications, ops) are in module.cpp: a call through pybind11 takes 0.8 us more.
inline void Bind(py::module_& module) {
  py::register_local_exception_translator([](std::exception_ptr error) {
    try {
      if (error) std::rethrow_exception(error);
    } catch (const direct::PythonError&) {  // Python's error indicator is set
    }
  });
  py::class_<RowForm>(module, "RowForm", py::module_local())
      .def(py::init(&MakeForm), py::arg("kind"), py::arg("item_bytes"), py::arg("check"),
           py::arg("shape"));
  AddressedClass<Store>(module, "Store")
      .def(py::init(&MakeStore), py::kw_only(), py::arg("words"))
      .def("set_columns", &Store::SetColumns)
      .def("set_rate", &Store::SetRate)
      .def("set_eviction", &Store::SetEviction)
      .def("add_stream", &Store::AddStream)
      // Arrays: address of each, bytes of a row.
      .def("set_row_arrays",
           [](Store& store, const std::vector<std::pair<uintptr_t, int64_t>>& arrays) {
             store.row_arrays.clear();
             for (const auto& [base, row_bytes] : arrays)
               store.row_arrays.push_back({At<char>(base), row_bytes});
           })
      .def("make_run", [](Store& store, int64_t rows) { return cpu::MakeRun(store, rows); })
      .def("slide", [](Store& store, int64_t slot, int64_t to) { cpu::Slide(store, slot, to); })
      .def("finish_move", [](Store& store) { cpu::FinishMove(store); })
      .def("set_ends",
           [](Store& store, uintptr_t terminated, uintptr_t truncated) {
             store.terminated = At<bool>(terminated);
             store.truncated = At<bool>(truncated);
           })
      // Columns: index, code of the dtype, elements, first of them among those of all.
      .def("set_moments",
           [](Store& store, uintptr_t head, uintptr_t words, int64_t num_elements,
              const std::vector<std::tuple<int64_t, int64_t, int64_t, int64_t>>& columns) {
             store.moments = {At<int64_t>(head), At<double>(words), num_elements, {}};
             for (const auto& [column, dtype, elements, first] : columns)
               store.moments.columns.push_back({column, dtype, elements, first});
           })
      .def("stage_moments",
           [](Store& store, int64_t slot, int64_t known, int64_t steps) {
             cpu::StageMoments(store, slot, steps, cpu::MomentsOf(store, slot, known, steps));
           })
      .def("reserve", [](Store& store, int64_t rows,
                         int64_t steps) { return cpu::Reserve(store, rows, steps); })
      .def("commit",
           [](Store& store, int64_t slot, int64_t steps, int64_t rows, int64_t born,
              int64_t present) {
             return cpu::Commit(store, slot, steps, rows, born, nullptr, {present, 0});
           })
      .def("reserve_with_removal", &Store::ReserveRows)
      .def("may_insert", [](Store& store, int64_t steps) { return cpu::MayInsert(store, steps); })
      .def("free_retired", [](Store& store) { return cpu::FreeRetired(store).count; })
      .def("victim", [](Store& store) { return cpu::Victim(store); })
      .def("first_complete",
           [](Store& store, int64_t link) {
             return cpu::FirstComplete(store, static_cast<cpu::Link>(link));
           })
      .def("find_held", &Store::FindHeld)
      .def("find_priorities", &Store::FindPriorities)
      .def("are_frozen",
           [](Store& store) {
             return std::any_of(store.streams.begin(), store.streams.end(), cpu::IsFrozen);
           })
      .def("grow",
           [](Store& store, int64_t slot, int64_t steps) { cpu::PublishSteps(store, slot, steps); })
      .def("end", [](Store& store, int64_t slot, bool truncated,
                     bool returns) { cpu::End(store, slot, truncated, returns); })
      .def("note", [](Store& store, int64_t slot) { cpu::Note(store, slot); })
      .def("retire", [](Store& store, int64_t slot) { cpu::Retire(store, slot); })
      .def("free", [](Store& store, int64_t slot) { cpu::Free(store, slot); })
      .def("are_finite", &Store::AreFinite);
  AddressedClass<RowTargets>(module, "RowTargets")
      .def(py::init<std::vector<std::pair<uintptr_t, RowForm>>>());
  module.def("mutex_init", [](uintptr_t mutex) { cpu::MutexInit(At<cpu::SharedMutex>(mutex)); });
  module.def("mutex_consistent",
             [](uintptr_t mutex) { cpu::MutexConsistent(At<cpu::SharedMutex>(mutex)); });
  module.def("mutex_owner", [](uintptr_t mutex) {
    return __atomic_load_n(&At<cpu::SharedMutex>(mutex)->owner, __ATOMIC_RELAXED);
  });
  module.def("map_guard_add", [](uintptr_t begin, size_t num_bytes, const std::string& path) {
    return cpu::MapGuardAdd(At<const void>(begin), num_bytes, path.c_str());
  });
  module.def("map_guard_remove", [](int entry) { cpu::MapGuardRemove(entry); });
  module.def("read_ahead_add", [](uintptr_t begin, size_t num_bytes, int64_t most_bytes) {
    return cpu::ReadAheadAdd(At<const void>(begin), num_bytes, most_bytes);
  });
  module.def("read_ahead_remove", [](int entry) { cpu::ReadAheadRemove(entry); });
}

}  // namespace gear::python
