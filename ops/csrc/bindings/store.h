// The store's lists and its writers as functions of Python. A store is a capsule of addresses in
// shared memory, which whoever opens it keeps mapped.
#pragma once
#include <Python.h>

#include <array>
#include <cstring>
#include <vector>

#include "bindings/direct.h"
#include "store/step_rows.h"
#include "store/store.h"

namespace gear::direct {

inline constexpr const char* kStoreName = "gear.store";
inline constexpr const char* kTargetsName = "gear.targets";

template <typename T>
T* Unpack(PyObject* capsule, const char* name) {
  void* found = PyCapsule_GetPointer(capsule, name);
  if (found == nullptr) throw PythonError{};
  return static_cast<T*>(found);
}

inline cpu::Store& StoreOf(PyObject* capsule) { return *Unpack<cpu::Store>(capsule, kStoreName); }

template <typename T>
T* AddressOf(PyObject* number) {
  void* address = PyLong_AsVoidPtr(number);
  if (PyErr_Occurred() != nullptr) throw PythonError{};
  return static_cast<T*>(address);
}

inline void CheckCount(Py_ssize_t count, Py_ssize_t wanted) {
  if (count == wanted) return;
  PyErr_Format(PyExc_TypeError, "gear: expected %zd arguments, got %zd", wanted, count);
  throw PythonError{};
}

// Calls a function of (arguments, count); what it throws becomes Python's error.
template <PyObject* (*kFunction)(PyObject* const*, Py_ssize_t)>
PyObject* Guarded(PyObject*, PyObject* const* given, Py_ssize_t count) {
  try {
    return kFunction(given, count);
  } catch (const PythonError&) {
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

template <PyObject* (*kFunction)(PyObject* const*, Py_ssize_t)>
PyMethodDef Function(const char* name, const char* signature) {
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&Guarded<kFunction>)),
          METH_FASTCALL, signature};
}

// A buffer of Python's, released at the end of the scope.
class Buffer {
 public:
  explicit Buffer(PyObject* object) {
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
  Py_buffer view_;
  bool held_;
};

// 'f', 'i', 'u' or 'b' as NumPy's kinds; 0 for anything else.
inline char KindOf(const char* format) {
  if (format == nullptr || format[0] == 0 || format[1] != 0) return 0;
  if (std::strchr("efd", format[0]) != nullptr) return 'f';
  if (std::strchr("bhilq", format[0]) != nullptr) return 'i';
  if (std::strchr("BHILQ", format[0]) != nullptr) return 'u';
  return format[0] == '?' ? 'b' : 0;
}

// What the rows of a column look like.
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

inline RowForm FormOf(PyObject* kind, PyObject* item_bytes, PyObject* checked, PyObject* shape) {
  RowForm form{};
  form.checked = static_cast<cpu::Exponents>(AsInt(checked));
  form.kind = static_cast<char>(AsInt(kind));
  form.item_bytes = form.row_bytes = AsInt(item_bytes);
  ForEach(shape, [&](PyObject* size) {
    form.shape.push_back(AsInt(size));
    form.row_bytes *= form.shape.back();
  });
  return form;
}

struct Target {
  char* base;
  RowForm form;
};

// A store with the forms of its columns.
struct OpenStore : cpu::Store {
  std::vector<RowForm> forms;
};

// store_open(words) -> store
inline PyObject* OpenStoreAt(PyObject* const* given, Py_ssize_t count) {
  CheckCount(count, 1);
  std::vector<PyObject*> words;
  ForEach(given[0], [&](PyObject* word) { words.push_back(word); });
  CheckCount(static_cast<Py_ssize_t>(words.size()), 17);
  auto* store = new OpenStore;
  try {
    store->mutex = AddressOf<cpu::SharedMutex>(words[0]);
    store->holder = AddressOf<int64_t>(words[1]);
    store->control = AddressOf<int64_t>(words[2]);
    store->links = AddressOf<int64_t>(words[3]);
    store->log = AddressOf<int64_t>(words[4]);
    store->retention = AddressOf<int64_t>(words[5]);
    store->slots = AddressOf<Slot>(words[6]);
    store->num_slots = AsInt(words[7]);
    store->num_rows = AsInt(words[8]);
    store->log_size = AsInt(words[9]);
    store->id_index = AsInt(words[10]);
    store->id_count = AsInt(words[11]);
    store->peer = AsInt(words[12]);
    store->most_trajectories = AsInt(words[13]);
    store->most_steps = AsInt(words[14]);
    store->position = AddressOf<const int64_t>(words[15]);
    store->least_free_rows = AsInt(words[16]);
  } catch (...) {
    delete store;
    throw;
  }
  return PyCapsule_New(static_cast<cpu::Store*>(store), kStoreName, [](PyObject* capsule) {
    delete static_cast<OpenStore*>(
        static_cast<cpu::Store*>(PyCapsule_GetPointer(capsule, kStoreName)));
  });
}

// store_columns(store, columns) -> None; columns: (base, rows, kind, item_bytes, checked, shape)
inline PyObject* SetColumns(PyObject* const* given, Py_ssize_t count) {
  CheckCount(count, 2);
  auto& store = static_cast<OpenStore&>(StoreOf(given[0]));
  store.columns.clear();
  store.forms.clear();
  ForEach(given[1], [&](PyObject* column) {
    std::vector<PyObject*> parts;
    ForEach(column, [&](PyObject* part) { parts.push_back(part); });
    CheckCount(static_cast<Py_ssize_t>(parts.size()), 6);
    RowForm form = FormOf(parts[2], parts[3], parts[4], parts[5]);
    store.columns.push_back(
        {AddressOf<char>(parts[0]), form.row_bytes, AsInt(parts[1]), form.checked});
    store.forms.push_back(std::move(form));
  });
  Py_RETURN_NONE;
}

// store_retention(store, pins, removal, rate) -> None; pins: (last_drawn, consumed, num_peers);
// rate: () or (per_step, min_size, samples_per_insert, most)
inline PyObject* SetRetention(PyObject* const* given, Py_ssize_t count) {
  CheckCount(count, 4);
  cpu::Store& store = StoreOf(given[0]);
  store.pins.clear();
  ForEach(given[1], [&](PyObject* pins) {
    std::vector<PyObject*> parts;
    ForEach(pins, [&](PyObject* part) { parts.push_back(part); });
    CheckCount(static_cast<Py_ssize_t>(parts.size()), 3);
    store.pins.push_back(
        {AddressOf<const int64_t>(parts[0]), AddressOf<const int64_t>(parts[1]), AsInt(parts[2])});
  });
  store.removal = static_cast<cpu::Removal>(AsInt(given[2]));
  std::vector<PyObject*> rate;
  ForEach(given[3], [&](PyObject* part) { rate.push_back(part); });
  store.rate = {};
  if (!rate.empty()) {
    CheckCount(static_cast<Py_ssize_t>(rate.size()), 4);
    store.rate = {true, AsInt(rate[0]) != 0, AsInt(rate[1]), AsDouble(rate[2]), AsDouble(rate[3])};
  }
  Py_RETURN_NONE;
}

// Those below want the store's lock.

// store_reserve(store, num_rows, num_steps) -> slot or refusal
inline PyObject* ReserveRows(PyObject* const* given, Py_ssize_t count) {
  CheckCount(count, 3);
  return PyLong_FromLongLong(cpu::Reserve(StoreOf(given[0]), AsInt(given[1]), AsInt(given[2])));
}

// store_make_room(store, num_rows, num_steps) -> slot or refusal
inline PyObject* MakeRoom(PyObject* const* given, Py_ssize_t count) {
  CheckCount(count, 3);
  return PyLong_FromLongLong(
      cpu::ReserveWithRemoval(StoreOf(given[0]), AsInt(given[1]), AsInt(given[2])));
}

// store_commit(store, slot, num_steps, num_rows, born) -> id
inline PyObject* CommitSlot(PyObject* const* given, Py_ssize_t count) {
  CheckCount(count, 5);
  return PyLong_FromLongLong(cpu::Commit(StoreOf(given[0]), AsInt(given[1]), AsInt(given[2]),
                                         AsInt(given[3]), AsInt(given[4])));
}

// store_retire(store, slot) -> None
inline PyObject* RetireSlot(PyObject* const* given, Py_ssize_t count) {
  CheckCount(count, 2);
  cpu::Retire(StoreOf(given[0]), AsInt(given[1]));
  Py_RETURN_NONE;
}

// store_free(store, slot) -> None
inline PyObject* FreeSlot(PyObject* const* given, Py_ssize_t count) {
  CheckCount(count, 2);
  cpu::Free(StoreOf(given[0]), AsInt(given[1]));
  Py_RETURN_NONE;
}

// store_may_insert(store, num_steps) -> bool
inline PyObject* MayInsertNow(PyObject* const* given, Py_ssize_t count) {
  CheckCount(count, 2);
  return PyBool_FromLong(cpu::MayInsert(StoreOf(given[0]), AsInt(given[1])) ? 1 : 0);
}

// store_add(store, columns, num_steps, timeout_s) -> (id or refusal, slot); takes the lock. None:
// a column is not as it is stored, and nothing has happened.
inline PyObject* AddTrajectory(PyObject* const* given, Py_ssize_t count) {
  CheckCount(count, 4);
  auto& store = static_cast<OpenStore&>(StoreOf(given[0]));
  const int64_t num_steps = AsInt(given[2]);
  const double timeout_s = AsDouble(given[3]);
  std::vector<Buffer> buffers;
  buffers.reserve(store.forms.size());
  ForEach(given[1], [&](PyObject* column) { buffers.emplace_back(column); });
  if (buffers.size() != store.forms.size()) Py_RETURN_NONE;
  std::vector<const void*> sources;
  sources.reserve(buffers.size());
  for (size_t i = 0; i < buffers.size(); ++i) {
    const int64_t rows = store.columns[i].rows;
    const bool single = rows == cpu::kPerTrajectory;
    if (!store.forms[i].Fits(buffers[i], single ? -1 : num_steps + rows)) Py_RETURN_NONE;
    sources.push_back(buffers[i].view().buf);
  }
  cpu::Added added{};
  {
    const WithoutLock unlocked;
    added = cpu::Add(store, sources.data(), num_steps, timeout_s);
  }
  return Py_BuildValue("LL", static_cast<long long>(added.id), static_cast<long long>(added.slot));
}

// store_are_finite(store, columns) -> whether each column is as it is stored and holds no NaN and
// no infinity where it must not
inline PyObject* AreFinite(PyObject* const* given, Py_ssize_t count) {
  CheckCount(count, 2);
  const auto& store = static_cast<OpenStore&>(StoreOf(given[0]));
  size_t num_columns = 0;
  bool finite = true;
  ForEach(given[1], [&](PyObject* column) {
    const Buffer buffer(column);
    const size_t i = num_columns++;
    finite &= i < store.forms.size() && buffer.held() &&
              buffer.view().itemsize == store.forms[i].item_bytes &&
              cpu::AllFinite(buffer.view().buf, buffer.view().len, store.forms[i].checked);
  });
  return PyBool_FromLong(finite && num_columns == store.forms.size() ? 1 : 0);
}

// rows_targets(columns) -> targets; columns: (base, kind, item_bytes, checked, shape)
inline PyObject* MakeTargets(PyObject* const* given, Py_ssize_t count) {
  CheckCount(count, 1);
  auto* targets = new std::vector<Target>;
  try {
    ForEach(given[0], [&](PyObject* column) {
      std::vector<PyObject*> parts;
      ForEach(column, [&](PyObject* part) { parts.push_back(part); });
      CheckCount(static_cast<Py_ssize_t>(parts.size()), 5);
      targets->push_back(
          {AddressOf<char>(parts[0]), FormOf(parts[1], parts[2], parts[3], parts[4])});
    });
  } catch (...) {
    delete targets;
    throw;
  }
  return PyCapsule_New(targets, kTargetsName, [](PyObject* capsule) {
    delete static_cast<std::vector<Target>*>(PyCapsule_GetPointer(capsule, kTargetsName));
  });
}

// row_fits(targets, target, row) -> whether one row is as it is stored, and holds no NaN and no
// infinity where it must not
inline PyObject* RowFits(PyObject* const* given, Py_ssize_t count) {
  CheckCount(count, 3);
  const RowForm& form = Unpack<std::vector<Target>>(given[0], kTargetsName)
                            ->at(static_cast<size_t>(AsInt(given[1])))
                            .form;
  const Buffer row(given[2]);
  const bool fits =
      form.Fits(row, -1) && cpu::AllFinite(row.view().buf, form.row_bytes, form.checked);
  return PyBool_FromLong(fits ? 1 : 0);
}

// Whether the rows that are to be copied are finite; those that are left out may be anything.
inline bool RowsAreFinite(const RowForm& form, const char* source, const int64_t* rows,
                          Py_ssize_t num_rows) {
  if (cpu::AllFinite(source, num_rows * form.row_bytes, form.checked)) return true;
  for (Py_ssize_t i = 0; i < num_rows; ++i) {
    const char* row = source + i * form.row_bytes;
    if (rows[i] >= 0 && !cpu::AllFinite(row, form.row_bytes, form.checked)) return false;
  }
  return true;
}

// rows_put(targets, columns, rows) -> index of the first column that is not as it is stored, or
// holds NaN or an infinity and must not, and nothing has happened; -1
inline PyObject* PutRows(PyObject* const* given, Py_ssize_t count) {
  CheckCount(count, 3);
  const auto& targets = *Unpack<std::vector<Target>>(given[0], kTargetsName);
  std::vector<Buffer> buffers;
  buffers.reserve(targets.size());
  ForEach(given[1], [&](PyObject* column) { buffers.emplace_back(column); });
  const Buffer rows(given[2]);
  const bool are_rows = rows.held() && KindOf(rows.view().format) == 'i' &&
                        rows.view().itemsize == 8 && rows.view().ndim == 1;
  if (!are_rows || buffers.size() != targets.size()) {
    PyErr_SetString(PyExc_TypeError,
                    "gear: rows_put expects a buffer for each target, and rows [n] int64");
    throw PythonError{};
  }
  const Py_ssize_t num_rows = rows.view().shape[0];
  const auto* places = static_cast<const int64_t*>(rows.view().buf);
  for (size_t i = 0; i < targets.size(); ++i) {
    const RowForm& form = targets[i].form;
    if (!form.Fits(buffers[i], num_rows) ||
        !RowsAreFinite(form, static_cast<const char*>(buffers[i].view().buf), places, num_rows)) {
      return PyLong_FromSize_t(i);
    }
  }
  for (size_t i = 0; i < targets.size(); ++i) {
    cpu::ScatterRows(targets[i].base, static_cast<const char*>(buffers[i].view().buf),
                     targets[i].form.row_bytes, places, num_rows);
  }
  return PyLong_FromLong(-1);
}

}  // namespace gear::direct
