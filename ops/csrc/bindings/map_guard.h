// The handler that names a mapped file, as functions of Python.
#pragma once
#include <Python.h>

#include "bindings/store.h"
#include "store/map_guard.h"

namespace gear::direct {

// map_guard_add(address, num_bytes, path) -> entry; Python's lock makes one caller at a time
inline PyObject* AddMapGuard(PyObject* const* given, Py_ssize_t count) {
  CheckCount(count, 3);
  const auto* begin = AddressOf<void>(given[0]);
  const auto num_bytes = static_cast<size_t>(AsInt(given[1]));
  const char* path = PyBytes_AsString(given[2]);
  if (path == nullptr) throw PythonError{};
  return PyLong_FromLong(cpu::MapGuardAdd(begin, num_bytes, path));
}

// map_guard_remove(entry) -> None
inline PyObject* RemoveMapGuard(PyObject* const* given, Py_ssize_t count) {
  CheckCount(count, 1);
  cpu::MapGuardRemove(static_cast<int>(AsInt(given[0])));
  Py_RETURN_NONE;
}

}  // namespace gear::direct
