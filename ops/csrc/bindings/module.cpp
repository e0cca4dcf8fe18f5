// The module itself: the mutex of the stores, by address, and the ops as plain functions; classes
// and functions that are called seldom are those of store.h.
#include <Python.h>

#include "bindings/bell.h"
#include "bindings/direct.h"
#include "bindings/ops.h"
#include "bindings/store.h"
#include "store/mutex.h"

namespace {

gear::cpu::SharedMutex* MutexAt(PyObject* address) {
  return static_cast<gear::cpu::SharedMutex*>(PyLong_AsVoidPtr(address));
}

PyObject* PyMutexLock(PyObject*, PyObject* arguments) {
  PyObject* address;
  double timeout_s;
  if (!PyArg_ParseTuple(arguments, "Od", &address, &timeout_s)) return nullptr;
  auto* mutex = MutexAt(address);
  if (PyErr_Occurred()) return nullptr;
  int result;
  Py_BEGIN_ALLOW_THREADS result = static_cast<int>(gear::cpu::MutexLock(mutex, timeout_s));
  Py_END_ALLOW_THREADS return PyLong_FromLong(result);
}

PyObject* PyMutexUnlock(PyObject*, PyObject* address) {
  auto* mutex = MutexAt(address);
  if (PyErr_Occurred()) return nullptr;
  gear::cpu::MutexUnlock(mutex);
  Py_RETURN_NONE;
}

using gear::direct::Function;
using gear::direct::Method;

PyMethodDef kMethods[] = {
    {"mutex_lock", PyMutexLock, METH_VARARGS,
     "mutex_lock(address, timeout_s) -> 0 locked, 1 locked after its owner died, 2 timed out, 3 "
     "broken"},
    {"mutex_unlock", PyMutexUnlock, METH_O, "mutex_unlock(address) -> None"},
    Method<gear::Draw>("draw_", "draw_(coordinates, seed, stream, first, total) -> None"),
    Method<gear::Permute>("permute_",
                          "permute_(coordinates, seed, stream, epoch, first, size) -> None"),
    Method<gear::TreeBuild>("tree_build_", "tree_build_(sums, num_items) -> None"),
    Method<gear::TreeUpdate>("tree_update_",
                             "tree_update_(sums, num_items, items, masses) -> None"),
    Method<gear::SlotMasses>("slot_masses_",
                             "slot_masses_(sums, slots, log, first, last, rule, unit) -> None"),
    Method<gear::Resolve>(
        "resolve_",
        "resolve_(resolutions, sums, slots, coordinates, rule, unit, seed, stream, first) -> None"),
    Method<gear::ResolveRows>(
        "resolve_rows_",
        "resolve_rows_(resolutions, sums, slots, row_slots, coordinates, first) -> None"),
    Method<gear::MassOf>("mass_", "mass_(masses, priorities, alpha, most_bits) -> None"),
    Method<gear::Importance>("importance_",
                             "importance_(weights, resolutions, numerator, count, beta) -> None"),
    Method<gear::MinimaBuild>("minima_build_", "minima_build_(minima, sums, num_items) -> None"),
    Method<gear::MinimaUpdate>("minima_update_",
                               "minima_update_(minima, sums, num_items, items) -> None"),
    Method<gear::TopK>("top_k_", "top_k_(items, priorities, sums) -> None"),
    Method<gear::WriteReports>("report_",
                               "report_(log, resolutions, priorities, tail, batch) -> None"),
    Method<gear::Prioritize>("prioritize_",
                             "prioritize_(sums, minima, priorities, counts, slots, updates, alpha, "
                             "unit, most_bits) -> None"),
    Method<gear::SuffixSum>("suffix_sum_", "suffix_sum_(out, reward, extents) -> None"),
    Method<gear::NStepReturn>(
        "n_step_",
        "n_step_(returns, discount, steps, reward, terminated, truncated, powers, resolutions, n) "
        "-> None"),
    Method<gear::Gather>(
        "gather_",
        "gather_(outs, masks, counters, columns, shifts, gains, resolutions, n_steps, spec, "
        "pad_values, threads, order) -> None"),
    Function<gear::python::AddTrajectory>(
        "store_add", "store_add(store, columns, num_steps, timeout_s) -> (id, slot)"),
    Function<gear::python::RowFits>("row_fits", "row_fits(targets, target, row) -> bool"),
    Function<gear::python::PutRows>("rows_put", "rows_put(targets, columns, rows) -> column"),
    Method<gear::PackRows>(
        "pack_rows_",
        "pack_rows_(message, sizes, stored, samples, windows, members, columns, heads, slots) -> "
        "None"),
    Method<gear::UnpackRows>(
        "unpack_rows_",
        "unpack_rows_(arrivals, ring, sizes, needed, messages, which, samples, windows, members, "
        "columns, heads, room) -> None"),
    Method<gear::AssignDraws>(
        "assign_draws_",
        "assign_draws_(owner, own, points, found, coordinates, totals, index) -> None"),
    Method<gear::SendDraws>("send_draws_",
                            "send_draws_(samples, packed, ends, records, own, steps, goals, "
                            "readers, need_of, offset, index, takes_own) -> None"),
    Method<gear::TakeDraws>(
        "take_draws_",
        "take_draws_(ring, origins, samples, which, found, heard, records, own, steps, owner, "
        "asked, need_of, first, offset, index, takes_own) -> None"),
    Method<gear::PackReports>("pack_reports_",
                              "pack_reports_(packed, ends, reports, latest) -> None"),
    Method<gear::UnpackReports>("unpack_reports_",
                                "unpack_reports_(reports, packed, latest) -> None"),
    Method<gear::CopyPieces>("copy_pieces_", "copy_pieces_(out, columns, pieces) -> None"),
    Function<gear::direct::RingBell>("bell_ring", "bell_ring(bell) -> None"),
    Function<gear::direct::WaitForBell>("bell_wait", "bell_wait(bell, seen, timeout_s) -> count"),
    Function<gear::direct::FenceMemory>("fence", "fence() -> None"),
    {nullptr, nullptr, 0, nullptr}};

}  // namespace

// The name under which DeepSpeed's jit_load imports the shared library.
#define GEAR_JOIN(a, b) a##b
#define GEAR_INIT(name) GEAR_JOIN(PyInit_, name)
PyMODINIT_FUNC GEAR_INIT(TORCH_EXTENSION_NAME)() {
  static PyModuleDef module = {
      PyModuleDef_HEAD_INIT, "gear", nullptr, -1, kMethods, nullptr, nullptr, nullptr, nullptr};
  PyObject* made = PyModule_Create(&module);
  if (made == nullptr) return nullptr;
  try {
    auto classes = pybind11::reinterpret_borrow<pybind11::module_>(made);
    gear::python::Bind(classes);
  } catch (pybind11::error_already_set& error) {
    error.restore();
    Py_CLEAR(made);
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_ImportError, error.what());
    Py_CLEAR(made);
  }
  return made;
}
