// Steps of many environments from Python's buffers: their reading and checks, final observations.
//
// One call takes a step, stores the trajectories that end and publishes the others. A step that is
// not plain is left to Python (writer/vector_writer.py), which does the same.
#pragma once
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "bindings/direct_calls.h"
#include "bindings/row_conversion.h"
#include "bindings/store.h"
#include "store/vector_steps.h"

namespace gear::python {

struct VectorSteps : cpu::VectorSteps {
  struct Source {
    py::str name;
    StepRowReader rows;
  };
  std::vector<Source> given;  // by column
  // Flags of the environments, given in every step also where the schema has no such columns.
  struct End {
    py::str name;
    bool is_column = false;
    StepRowReader flags = StepRowReader({'b', 1, 1, cpu::Exponents::kUnchecked, {}});
  };
  End terminated, truncated;
  StepRowReader observations = StepRowReader({});  // that a step was taken at, of the first column
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
      const RowForm& form = given[c].rows.form();
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
    std::vector<Buffer> buffers;
    buffers.reserve(columns.size() + 3);
    const bool admits_numbers = observed != nullptr;
    const auto read = [&](StepRowReader& rows_of, PyObject* object) {
      return rows_of.Read(object, num_envs, admits_numbers, &buffers);
    };
    const char* ended = read(terminated.flags, ends);
    const char* cut = cuts == nullptr ? nullptr : read(truncated.flags, cuts);
    if (ended == nullptr || (cuts != nullptr && cut == nullptr)) return cpu::kLeft;
    const char* before = nullptr;
    if (observed != nullptr) {
      before = read(observations, observed);
      if (before == nullptr) return cpu::kLeft;
    }
    if (!Plan(ended, cut, before)) return cpu::kLeft;
    for (size_t c = 0; c < columns.size(); ++c) {
      PyObject* value = PyDict_GetItemWithError(step, given[c].name.ptr());
      if (value == nullptr) return cpu::kLeft;
      values[c] = read(given[c].rows, value);
      const int64_t* places = columns[c].is_state ? following.data() : rows.data();
      if (values[c] == nullptr || !RowsAreFinite(given[c].rows.form(), values[c], places, num_envs))
        return cpu::kLeft;
    }
    if (before != nullptr) {  // only those that begin an episode are stored
      const RowForm& form = observations.form();
      for (int64_t i = 0; i < num_envs; ++i) {
        if (starts[i] != 0 &&
            !cpu::AllFinite(before + i * form.row_bytes, form.row_bytes, form.checked))
          return cpu::kLeft;
      }
    }
    std::vector<Buffer> final_buffers;
    std::vector<const char*> finals;
    if (has_ends && autoreset == cpu::Autoreset::kSameStep &&
        !ReadFinals(final, ended, cut, &finals, &final_buffers))
      return cpu::kLeft;
    if (!has_ends && !has_cuts && !publish)
      return Take(values.data(), finals, before, ended, cut, false);
    const WithoutLock unlocked;  // a wait for the store's lock must not stop other threads
    return Take(values.data(), finals, before, ended, cut, publish);
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
    made.given.push_back({name, StepRowReader(form)});
  }
  const auto end = [&made](const py::str& name) {
    const auto& all = made.given;
    return VectorSteps::End{name, std::any_of(all.begin(), all.end(), [&name](const auto& column) {
                              return column.name.equal(name);
                            })};
  };
  made.observations = StepRowReader(made.given[0].rows.form());
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
