// The steps of many environments at once, from Python's buffers: one call takes a step, stores the
// trajectories that end and publishes the others. A step that is not plain is left to Python
// (writer/vector_writer.py), which does the same.
#pragma once
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "bindings/direct.h"
#include "bindings/store.h"
#include "store/vector_steps.h"

namespace gear::python {

struct VectorSteps : cpu::VectorSteps {
  struct Source {
    py::str name;
    RowForm form;
    std::vector<float> converted;  // rows that came as float64
  };
  std::vector<Source> given;  // by column
  // Given in every step also where the schema has no such columns.
  struct End {
    py::str name;
    bool is_column;
  };
  End terminated, truncated;
  std::vector<const char*> values;

  void SetStore(uintptr_t of_store, const std::vector<uintptr_t>& of_columns, int64_t most,
                bool whole, bool begins, bool cuts, double timeout) {
    store = At<Store>(of_store);
    sources.clear();
    for (const uintptr_t source : of_columns) sources.push_back(At<const char>(source));
    most_steps = most;
    adds = whole;
    may_begin = begins;
    may_cut = cuts;
    timeout_s = timeout;
  }

  // A flag of each environment; null if they are not [num_envs] bool.
  const char* Flags(const Buffer& buffer) const {
    if (!buffer.held() || KindOf(buffer.view().format) != 'b') return nullptr;
    const Py_buffer& view = buffer.view();
    const bool fits = (view.ndim == 1 && view.shape[0] == num_envs) ||
                      (view.ndim == 2 && view.shape[0] == num_envs && view.shape[1] == 1);
    return fits ? static_cast<const char*>(view.buf) : nullptr;
  }

  // Whether a buffer holds a row of each environment, of its form or of float64 for float32. A row
  // of no shape may have one of [1], and rows of one environment no axis.
  bool Fits(const RowForm& form, const Buffer& buffer, bool* converts) const {
    if (!buffer.held()) return false;
    const Py_buffer& view = buffer.view();
    *converts = form.kind == 'f' && form.item_bytes == 4 && view.itemsize == 8;
    const Py_ssize_t item_bytes = *converts ? 8 : form.item_bytes;
    if (view.itemsize != item_bytes || KindOf(view.format) != form.kind) return false;
    const auto rank = static_cast<int>(form.shape.size());
    const int lead = num_envs == 1 && view.ndim == rank && rank > 0 ? 0 : 1;
    if (lead == 1 && (view.ndim < 1 || view.shape[0] != num_envs)) return false;
    if (rank == 0) return view.ndim == 1 || (view.ndim == 2 && view.shape[1] == 1);
    if (view.ndim != rank + lead) return false;
    return std::equal(form.shape.begin(), form.shape.end(), view.shape + lead);
  }

  // The rows of a buffer in the stored form; null if it does not fit, or a value overflows.
  const char* RowsIn(size_t column, const Buffer& buffer) {
    Source& source = given[column];
    bool converts = false;
    if (!Fits(source.form, buffer, &converts)) return nullptr;
    if (!converts) return static_cast<const char*>(buffer.view().buf);
    const auto* wide = static_cast<const double*>(buffer.view().buf);
    const auto count = static_cast<size_t>(buffer.view().len / 8);
    source.converted.resize(count);
    bool fits = true;
    for (size_t i = 0; i < count; ++i) {
      source.converted[i] = static_cast<float>(wide[i]);
      fits &= std::isfinite(source.converted[i]) || !std::isfinite(wide[i]);
    }
    return fits ? reinterpret_cast<const char*>(source.converted.data()) : nullptr;
  }

  // The last states of the environments that end, from `final` of the step; false: not plain.
  bool ReadFinals(PyObject* final, const char* ends, const char* cuts,
                  std::vector<const char*>* rows, std::vector<Buffer>* buffers) {
    if (!PyDict_Check(final)) return false;
    size_t num_states = 0;
    for (size_t c = 0; c < columns.size(); ++c) num_states += columns[c].is_state ? 1 : 0;
    if (static_cast<size_t>(PyDict_GET_SIZE(final)) != num_states) return false;
    const auto count = static_cast<size_t>(num_envs);
    rows->reserve(num_states * count);
    buffers->reserve(num_states * (count + 1));  // references to them stay valid
    for (size_t c = 0; c < columns.size(); ++c) {
      if (!columns[c].is_state) continue;
      const RowForm& form = given[c].form;
      PyObject* value = PyDict_GetItemWithError(final, given[c].name.ptr());
      if (value == nullptr) return false;
      const Buffer& buffer = buffers->emplace_back(value);
      const bool is_array = form.Fits(buffer, num_envs);
      const bool are_objects = buffer.held() && buffer.view().format != nullptr &&
                               std::strcmp(buffer.view().format, "O") == 0 &&
                               buffer.view().ndim == 1 && buffer.view().shape[0] == num_envs;
      if (!is_array && !are_objects) return false;
      for (int64_t i = 0; i < num_envs; ++i) {
        const char* row = nullptr;
        if (waits[i] || (ends[i] == 0 && (cuts == nullptr || cuts[i] == 0))) {
          rows->push_back(nullptr);
          continue;
        }
        if (is_array) {
          row = static_cast<const char*>(buffer.view().buf) + i * form.row_bytes;
        } else {
          PyObject* one = static_cast<PyObject**>(buffer.view().buf)[i];
          if (one == nullptr) return false;
          const Buffer& held_row = buffers->emplace_back(one);
          if (!form.Fits(held_row, -1)) return false;
          row = static_cast<const char*>(held_row.view().buf);
        }
        if (!cpu::AllFinite(row, form.row_bytes, form.checked)) return false;
        rows->push_back(row);
      }
    }
    return true;
  }

  // Takes a step of all environments: columns by name, last states of episodes with same_step, the
  // observations that it was taken at or null. Returns StepEvent's; kLeft: nothing has happened.
  int64_t TakeStep(PyObject* step, PyObject* final, PyObject* observed, bool publish) {
    PyObject* ends = PyDict_GetItemWithError(step, terminated.name.ptr());
    if (ends == nullptr) return cpu::kLeft;
    PyObject* cuts = PyDict_GetItemWithError(step, truncated.name.ptr());
    const size_t num_others =
        (terminated.is_column ? 0 : 1) + (cuts == nullptr || truncated.is_column ? 0 : 1);
    // All columns must be given, so another number is another name: Python takes or refuses it.
    if (static_cast<size_t>(PyDict_GET_SIZE(step)) != columns.size() + num_others)
      return cpu::kLeft;
    const Buffer end_flags(ends);
    std::optional<Buffer> cut_flags;
    const char* ended = Flags(end_flags);
    const char* cut = nullptr;
    if (cuts != nullptr) cut = Flags(cut_flags.emplace(cuts));
    if (ended == nullptr || (cuts != nullptr && cut == nullptr)) return cpu::kLeft;
    std::optional<Buffer> at;
    const char* observations = nullptr;
    if (observed != nullptr) {
      bool converts = false;
      at.emplace(observed);
      if (!Fits(given[0].form, *at, &converts) || converts) return cpu::kLeft;
      observations = static_cast<const char*>(at->view().buf);
    }
    if (!Plan(ended, cut, observations)) return cpu::kLeft;
    std::vector<Buffer> buffers;
    buffers.reserve(columns.size());
    for (size_t c = 0; c < columns.size(); ++c) {
      PyObject* value = PyDict_GetItemWithError(step, given[c].name.ptr());
      if (value == nullptr) return cpu::kLeft;
      values[c] = RowsIn(c, buffers.emplace_back(value));
      const int64_t* places = columns[c].is_state ? following.data() : rows.data();
      if (values[c] == nullptr || !RowsAreFinite(given[c].form, values[c], places, num_envs))
        return cpu::kLeft;
    }
    if (observations != nullptr) {  // only those that begin an episode are stored
      for (int64_t i = 0; i < num_envs; ++i) {
        const char* row = observations + i * columns[0].row_bytes;
        if (starts[i] != 0 && !cpu::AllFinite(row, columns[0].row_bytes, given[0].form.checked))
          return cpu::kLeft;
      }
    }
    std::vector<Buffer> final_buffers;
    std::vector<const char*> finals;
    if (has_ends && autoreset == cpu::Autoreset::kSameStep &&
        !ReadFinals(final, ended, cut, &finals, &final_buffers))
      return cpu::kLeft;
    if (!has_ends && !has_cuts && !publish)
      return Take(values.data(), finals, observations, ended, cut, false);
    const WithoutLock unlocked;  // a wait for the store's lock must not stop other threads
    return Take(values.data(), finals, observations, ended, cut, publish);
  }
};

// Columns: name, address of the staging, form, whether it is of the state. Words: the addresses of
// next, first, waits, unstored, was_truncated, checks_resets, counts, completed, growing.
inline VectorSteps MakeVectorSteps(
    const std::vector<std::tuple<py::str, uintptr_t, RowForm, bool>>& columns,
    const std::pair<py::str, py::str>& ends, int64_t num_envs, int64_t length,
    const std::vector<uintptr_t>& words, const std::string& autoreset, int64_t truncated_column) {
  VectorSteps made;
  for (const auto& [name, base, form, is_state] : columns) {
    made.columns.push_back({At<char>(base), form.row_bytes, is_state});
    made.given.push_back({name, form, {}});
  }
  const auto end = [&made](const py::str& name) {
    const auto& all = made.given;
    return VectorSteps::End{name, std::any_of(all.begin(), all.end(), [&name](const auto& column) {
                              return column.name.equal(name);
                            })};
  };
  made.terminated = end(ends.first);
  made.truncated = end(ends.second);
  made.num_envs = num_envs;
  made.length = length;
  size_t word = 0;
  const auto read = [&](auto&... members) {
    ((members = At<std::remove_pointer_t<std::decay_t<decltype(members)>>>(words.at(word++))), ...);
  };
  read(made.next, made.first, made.waits, made.unstored, made.was_truncated, made.checks_resets,
       made.counts, made.completed, made.growing);
  made.truncated_column = truncated_column;
  made.autoreset = autoreset == "next_step"   ? cpu::Autoreset::kNextStep
                   : autoreset == "same_step" ? cpu::Autoreset::kSameStep
                                              : cpu::Autoreset::kDisabled;
  const auto count = static_cast<size_t>(num_envs);
  made.rows.resize(count);
  made.following.resize(count);
  made.starts.resize(count);
  made.values.resize(columns.size());
  return made;
}

inline int64_t TakeStep(VectorSteps& steps, PyObject* columns, PyObject* final, PyObject* observed,
                        bool publish) {
  if (!PyDict_Check(columns)) direct::RaiseType("a dict", columns);
  const int64_t events =
      steps.TakeStep(columns, final, observed == Py_None ? nullptr : observed, publish);
  if (PyErr_Occurred() != nullptr) throw direct::PythonError{};
  return events;
}

inline bool PublishSteps(VectorSteps& steps) { return steps.Publish(); }

inline void BindVectorSteps(py::module_& module) {
  AddressedClass<VectorSteps>(module, "VectorSteps")
      .def(py::init(&MakeVectorSteps), py::kw_only(), py::arg("columns"), py::arg("ends"),
           py::arg("num_envs"), py::arg("length"), py::arg("words"), py::arg("autoreset"),
           py::arg("truncated_column"))
      .def("set_store", &VectorSteps::SetStore, py::kw_only(), py::arg("of_store"),
           py::arg("of_columns"), py::arg("most"), py::arg("whole"), py::arg("begins"),
           py::arg("cuts"), py::arg("timeout"));
}

}  // namespace gear::python
