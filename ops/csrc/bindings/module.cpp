// The Python module: the table of its functions that are direct calls, and its classes.
//
// Classes, and functions that are called seldom, are defined in store.h, and the ops as plain
// functions in library.cpp.
#include <Python.h>
#include <torch/csrc/autograd/python_variable.h>

#include "bindings/direct_calls.h"
#include "bindings/gather_call.h"
#include "bindings/statistics.h"
#include "bindings/store.h"
#include "bindings/stream.h"
#include "bindings/trajectory_reader.h"
#include "bindings/vector_steps.h"
#include "store/futex.h"
#include "store/mutex.h"

namespace gear::direct {

extern PyMethodDef kOps[];  // of library.cpp

at::Tensor& AsTensor(PyObject* object) {
  if (!THPVariable_Check(object)) RaiseType("a tensor", object);
  return const_cast<at::Tensor&>(THPVariable_Unpack(object));
}

}  // namespace gear::direct

namespace {

using gear::direct::Function;

PyMethodDef kMethods[] = {
    Function<gear::cpu::MutexLock, true>("mutex_lock",
                                         "mutex_lock(address, timeout_s) -> 0 locked, 1 locked "
                                         "after its owner died, 2 timed out, 3 broken"),
    Function<gear::cpu::MutexUnlock>("mutex_unlock", "mutex_unlock(address) -> None"),
    Function<gear::python::AddTrajectory>(
        "store_add", "store_add(reader, trajectory, timeout_s) -> (id, slot, late) or None"),
    Function<gear::python::WriteGroup>(
        "group_write",
        "group_write(reader, trajectories, number, slots, apart, timeout_s) -> 0, refusal or "
        "None"),
    Function<gear::python::GroupSharedSteps>(
        "group_shared_steps", "group_shared_steps(reader, trajectories, apart) -> steps of each"),
    Function<gear::python::CommitGroup>(
        "group_commit", "group_commit(store, slots, present, version, born) -> ids"),
    Function<gear::python::RowFits>("row_fits", "row_fits(targets, target, row) -> bool"),
    Function<gear::python::PutRows>("rows_put", "rows_put(targets, columns, rows) -> column"),
    Function<gear::python::WriteLateRows>(
        "late_rows_write",
        "late_rows_write(store, column, bit, records, values, offset, slots) -> (written, "
        "repeated, row)"),
    Function<gear::python::MarkLateRows>("late_rows_mark",
                                         "late_rows_mark(store, bit, slots) -> None"),
    Function<gear::python::TakeStep>(
        "vector_step", "vector_step(steps, columns, final, observed, publish) -> events"),
    Function<gear::python::PublishSteps, true>("vector_publish",
                                               "vector_publish(steps) -> whether all is published"),
    Function<gear::python::GatherInto, true>("gather_into",
                                             "gather_into(call, resolutions, n_steps) -> None"),
    Function<gear::python::TakeSelection>(
        "stream_take",
        "stream_take(stream, number, alpha, beta, part, num_parts, call) -> part or None"),
    Function<gear::python::ReportPriorities, true>(
        "stream_report", "stream_report(stream, resolutions, priorities, batch) -> whether done"),
    Function<gear::cpu::FutexNotify>("futex_notify", "futex_notify(event) -> None"),
    Function<gear::cpu::FutexWait, true>("futex_wait",
                                         "futex_wait(event, seen, timeout_s) -> count"),
    Function<gear::cpu::Fence>("fence", "fence() -> None"),
    Function<gear::python::AddRowMoments, true>(
        "row_moments_add",
        "row_moments_add(values, dtype, num_rows, num_elements, keep, block_rows, moments) -> "
        "None"),
    Function<gear::cpu::CountPixels, true>(
        "pixels_count", "pixels_count(pixels, keep, num_rows, outer, inner, last, bins) -> None"),
    Function<gear::python::FindQuantilesInBins, true>(
        "quantile_bins_find",
        "quantile_bins_find(values, dtype, num_elements, first, count, runs, num_runs, levels, "
        "num_levels, found) -> None"),
    Function<gear::python::CountQuantileDigits, true>(
        "quantile_digits_count",
        "quantile_digits_count(values, dtype, num_rows, num_elements, first, count, keep, passes, "
        "num_passes, counts) -> None"),
    Function<gear::python::CountQuantileBrackets, true>(
        "quantile_brackets_count",
        "quantile_brackets_count(values, dtype, num_rows, num_elements, keep, bounds, num_of, "
        "most, below, "
        "keys, capacity, num_keys) -> None"),
    Function<gear::python::SelectQuantileKeys, true>(
        "quantile_keys_select",
        "quantile_keys_select(keys, are_long, num_keys, bounds, num_brackets, ranks, num_ranks, "
        "found) -> "
        "None"),
    Function<gear::python::AllFinite, true>("all_finite",
                                            "all_finite(values, bytes, type) -> bool"),
    {nullptr, nullptr, 0, nullptr}};

}  // namespace

namespace gear::python {

PyObject* MakeModule() {
  static PyModuleDef module = {
      PyModuleDef_HEAD_INIT, "gear", nullptr, -1, kMethods, nullptr, nullptr, nullptr, nullptr};
  PyObject* made = PyModule_Create(&module);
  if (made == nullptr || PyModule_AddFunctions(made, gear::direct::kOps) != 0) {
    Py_XDECREF(made);
    return nullptr;
  }
  try {
    auto classes = pybind11::reinterpret_borrow<pybind11::module_>(made);
    Bind(classes);
    BindGatherCall(classes);
    BindStream(classes);
    BindVectorSteps(classes);
    BindTrajectories(classes);
  } catch (pybind11::error_already_set& error) {
    error.restore();
    Py_CLEAR(made);
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_ImportError, error.what());
    Py_CLEAR(made);
  }
  return made;
}

}  // namespace gear::python
