// Futex notifications (store/bell.h) as functions of Python, by address.
#pragma once
#include <Python.h>

#include "bindings/direct.h"
#include "store/bell.h"

namespace gear::direct {

// bell_ring(bell) -> None
inline PyObject* RingBell(PyObject* const* given, Py_ssize_t count) {
  CheckCount(count, 1);
  cpu::BellRing(AddressOf<uint32_t>(given[0]));
  Py_RETURN_NONE;
}

// bell_wait(bell, seen, timeout_s) -> count
inline PyObject* WaitForBell(PyObject* const* given, Py_ssize_t count) {
  CheckCount(count, 3);
  auto* bell = AddressOf<uint32_t>(given[0]);
  const auto seen = static_cast<uint32_t>(AsInt(given[1]));
  const double timeout_s = AsDouble(given[2]);
  uint32_t found;
  {
    const WithoutLock unlocked;
    found = cpu::BellWait(bell, seen, timeout_s);
  }
  return PyLong_FromUnsignedLong(found);
}

// fence() -> None
inline PyObject* FenceMemory(PyObject* const*, Py_ssize_t count) {
  CheckCount(count, 0);
  cpu::Fence();
  Py_RETURN_NONE;
}

}  // namespace gear::direct
