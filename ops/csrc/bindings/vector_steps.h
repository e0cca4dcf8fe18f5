// The steps of many environments at once: one call takes a step into the writer's staging, another
// one publishes it. A step that is not plain is left to Python (writer/vector_writer.py), which
// does the same.
#pragma once
#include <pybind11/pybind11.h>

#include <algorithm>
#include <string>
#include <tuple>
#include <vector>

#include "bindings/direct.h"
#include "bindings/store.h"

namespace gear::python {

struct VectorSteps {
  struct Column {
    py::str name;
    char* base;
    RowForm form;
    bool is_state;  // of the state that a step leads to; else of what was done
  };
  std::vector<Column> columns;
  // Given in every step also where the schema has no such columns.
  struct End {
    py::str name;
    bool is_column;
  };
  End terminated, truncated;
  int64_t num_envs;
  int64_t* next;         // row of each environment's next state
  const int64_t* first;  // row of each environment's first state
  const bool* waits;     // for its first observation
  bool resets,
      has_final;  // the step after the last one resets; the last one comes with a final state
  // Of the table, for publishing; null: Python does it.
  Store* store = nullptr;
  std::vector<const char*> staged;  // by column of the store
  cpu::Growing* growing = nullptr;
  int64_t most_steps = 0;
  double timeout_s = 0;
  std::vector<int64_t> rows, following;
  std::vector<cpu::Staged> steps;

  void SetPublishing(uintptr_t of_store, const std::vector<uintptr_t>& sources, uintptr_t words,
                     int64_t most, double timeout) {
    store = At<Store>(of_store);
    staged.clear();
    for (const uintptr_t source : sources) staged.push_back(At<const char>(source));
    growing = At<cpu::Growing>(words);
    most_steps = most;
    timeout_s = timeout;
  }

  // Reads a flag of each environment; false: it is not [num_envs] bool, or not given and needed.
  // Adds one to `num_others` if it was given and is no column.
  bool ReadFlags(PyObject* given, const End& end, bool needed, std::vector<bool>* flags,
                 size_t* num_others) const {
    PyObject* values = PyDict_GetItemWithError(given, end.name.ptr());
    if (values == nullptr) return !needed && PyErr_Occurred() == nullptr;
    if (!end.is_column) ++*num_others;
    const Buffer buffer(values);
    if (!buffer.held() || KindOf(buffer.view().format) != 'b') return false;
    if (buffer.view().ndim != 1 || buffer.view().shape[0] != num_envs) return false;
    const bool* set = static_cast<const bool*>(buffer.view().buf);
    for (int64_t i = 0; i < num_envs; ++i) {
      if (set[i]) (*flags)[static_cast<size_t>(i)] = true;
    }
    return true;
  }

  // Takes a step of all environments. Returns kLeft, and nothing has happened, or which events are
  // left to Python, which then also advances `next`.
  enum : int64_t { kLeft = -1, kBegun = 1, kEnded = 2 };
  int64_t Take(PyObject* given) {
    const auto count = static_cast<size_t>(num_envs);
    std::vector<bool> ended(count, false);
    size_t num_others = 0;
    if (!ReadFlags(given, terminated, true, &ended, &num_others) ||
        !ReadFlags(given, truncated, false, &ended, &num_others))
      return kLeft;
    // All columns must be given, so another number is another name: Python takes or refuses it.
    if (static_cast<size_t>(PyDict_GET_SIZE(given)) != columns.size() + num_others) return kLeft;
    int64_t events = 0;
    for (size_t i = 0; i < count; ++i) {
      rows[i] = next[i] - 1;
      following[i] = next[i];
      if (waits[i]) {
        if (!resets || next[i] == first[i]) return kLeft;
        rows[i] = -1;
        following[i] = first[i];
        events |= kBegun;
      } else if (ended[i]) {
        events |= kEnded;
      }
    }
    if ((events & kEnded) != 0 && has_final) return kLeft;
    std::vector<Buffer> buffers;
    buffers.reserve(columns.size());
    for (const Column& column : columns) {
      PyObject* value = PyDict_GetItemWithError(given, column.name.ptr());
      if (value == nullptr) return kLeft;
      const Buffer& buffer = buffers.emplace_back(value);
      const int64_t* places = column.is_state ? following.data() : rows.data();
      if (!column.form.Fits(buffer, num_envs) ||
          !RowsAreFinite(column.form, static_cast<const char*>(buffer.view().buf), places,
                         num_envs))
        return kLeft;
    }
    for (size_t c = 0; c < columns.size(); ++c) {
      const Column& column = columns[c];
      cpu::ScatterRows(column.base, static_cast<const char*>(buffers[c].view().buf),
                       column.form.row_bytes, column.is_state ? following.data() : rows.data(),
                       num_envs);
    }
    for (size_t i = 0; i < count; ++i) next[i] = following[i] + (events == 0 ? 1 : 0);
    return events;
  }

  // Publishes the steps of all environments; returns how many have some left, for Python to do.
  int64_t Publish() {
    for (int64_t i = 0; i < num_envs; ++i) {
      const int64_t used = waits[i] ? 0 : next[i] - first[i] - 1;
      steps[static_cast<size_t>(i)] = {staged.data(), first[i], used};
    }
    const WithoutLock unlocked;
    return cpu::Grow(*store, steps.data(), growing, num_envs, most_steps, timeout_s);
  }
};

// Columns: name, address of the staging, form, whether it is of the state.
inline VectorSteps MakeVectorSteps(
    const std::vector<std::tuple<py::str, uintptr_t, RowForm, bool>>& columns,
    const std::pair<py::str, py::str>& ends, int64_t num_envs, uintptr_t next, uintptr_t first,
    uintptr_t waits, const std::string& autoreset) {
  VectorSteps made;
  for (const auto& [name, base, form, is_state] : columns)
    made.columns.push_back({name, At<char>(base), form, is_state});
  const auto end = [&made](const py::str& name) {
    const auto& all = made.columns;
    return VectorSteps::End{name, std::any_of(all.begin(), all.end(), [&name](const auto& column) {
                              return column.name.equal(name);
                            })};
  };
  made.terminated = end(ends.first);
  made.truncated = end(ends.second);
  made.num_envs = num_envs;
  made.next = At<int64_t>(next);
  made.first = At<const int64_t>(first);
  made.waits = At<const bool>(waits);
  made.resets = autoreset == "next_step";
  made.has_final = autoreset == "same_step";
  made.rows.resize(static_cast<size_t>(num_envs));
  made.following.resize(static_cast<size_t>(num_envs));
  made.steps.resize(static_cast<size_t>(num_envs));
  return made;
}

// vector_step(steps, columns) -> events, or -1
inline PyObject* TakeStep(PyObject* const* given, Py_ssize_t count) {
  direct::CheckCount(count, 2);
  if (!PyDict_Check(given[1])) direct::RaiseType("a dict", given[1]);
  const int64_t events = direct::AddressOf<VectorSteps>(given[0])->Take(given[1]);
  if (PyErr_Occurred() != nullptr) throw direct::PythonError{};
  return PyLong_FromLongLong(events);
}

// vector_publish(steps) -> environments with steps left to publish
inline PyObject* PublishSteps(PyObject* const* given, Py_ssize_t count) {
  direct::CheckCount(count, 1);
  return PyLong_FromLongLong(direct::AddressOf<VectorSteps>(given[0])->Publish());
}

inline void BindVectorSteps(py::module_& module) {
  py::class_<VectorSteps>(module, "VectorSteps", py::module_local())
      .def(py::init(&MakeVectorSteps), py::kw_only(), py::arg("columns"), py::arg("ends"),
           py::arg("num_envs"), py::arg("next"), py::arg("first"), py::arg("waits"),
           py::arg("autoreset"))
      .def_property_readonly("address",
                             [](VectorSteps& steps) { return reinterpret_cast<uintptr_t>(&steps); })
      .def("set_publishing", &VectorSteps::SetPublishing);
}

}  // namespace gear::python
