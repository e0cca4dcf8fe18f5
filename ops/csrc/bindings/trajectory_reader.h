// Reader of whole trajectories and groups of leases from dicts of columns; adds each by one call.
//
// It also finds the steps of a prompt that a group shares. Where a trajectory is left to Python
// nothing has changed, and Python stores or refuses it alike (writer/inserter.py).
#pragma once
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/row_conversion.h"
#include "bindings/store.h"
#include "store/whole_trajectories.h"

namespace gear::python {

// A trajectory that was read. It holds the objects in which rows were found in place.
struct ReadTrajectory {
  std::vector<Buffer> buffers;
  std::vector<std::vector<char>> converted;  // by column
  std::vector<const void*> sources;          // by column; null: a late column that it has not
  int64_t num_steps = 0, present = 0;

  cpu::Whole whole() const { return {sources.data(), num_steps, present}; }
};

// What a column of steps decides where two trajectories begin alike: whether their prompt is the
// same; whether an equal prompt may be stored once; or nothing.
enum class PromptPart : int64_t { kIdentity, kStored, kUnread };

// Reads the trajectories of a table. Its calls share no memory but the store.
struct TrajectoryReader {
  struct Source {
    py::object name;   // interned
    int64_t late_bit;  // 0: it is not late
    bool is_end;       // a flag of it ends its trajectory
    PromptPart part;
  };
  Store* store = nullptr;
  std::vector<Source> given;  // by column
  int64_t most_steps = 0;     // 0: any number
  int64_t group = -1;         // columns of the groups' numbers and of the loss mask; -1: none
  int64_t mask = -1;
  bool shares_prompts = false;

  const RowForm& form(size_t column) const { return store->forms[column]; }

  bool is_single(size_t column) const { return store->columns[column].rows == cpu::kPerTrajectory; }

  // Reads a trajectory; false: it is left to Python. `number`: of its group, in the stored form,
  // which the trajectory has too or leaves out; null: it has the column like any other.
  bool Read(PyObject* object, const std::vector<char>* number, ReadTrajectory* read) const {
    if (!PyDict_CheckExact(object)) return false;
    const size_t num_columns = given.size();
    read->buffers.reserve(num_columns);
    read->converted.resize(num_columns);
    read->sources.assign(num_columns, nullptr);
    Py_ssize_t num_given = 0;
    for (size_t c = 0; c < num_columns; ++c) {
      const bool is_number = number != nullptr && static_cast<int64_t>(c) == group;
      PyObject* value = PyDict_GetItemWithError(object, given[c].name.ptr());
      if (value == nullptr) {
        if (PyErr_Occurred() != nullptr) throw direct::PythonError{};
        if (is_number) read->sources[c] = number->data();
        if (!is_number && given[c].late_bit == 0) return false;
        continue;
      }
      ++num_given;
      const auto [rows, count] =
          ReadColumn(form(c), value, is_single(c), &read->buffers, &read->converted[c]);
      if (rows == nullptr) return false;
      if (is_number && std::memcmp(rows, number->data(), number->size()) != 0) return false;
      read->sources[c] = rows;
      read->present |= given[c].late_bit;
      if (!is_single(c) && !HasSteps(c, count, rows, read)) return false;
    }
    const bool fits = most_steps == 0 || read->num_steps <= most_steps;
    // All its columns were found, so another number is another name.
    return fits && read->num_steps >= 1 && num_given == PyDict_GET_SIZE(object);
  }

  bool IsFinite(const ReadTrajectory& read) const {
    for (size_t c = 0; c < given.size(); ++c) {
      const int64_t rows = is_single(c) ? 1 : read.num_steps + store->columns[c].rows;
      const bool is_given = read.sources[c] != nullptr;
      const int64_t bytes = rows * form(c).row_bytes;
      if (is_given && !cpu::AllFinite(read.sources[c], bytes, form(c).checked)) return false;
    }
    return true;
  }

  // Number of first steps that each trajectory of a group shares with the first one: those of the
  // prompt, less the last one, whose logits predict the first token of the loss; 0 if it begins in
  // another way. A prompt ends at the first step with a loss, of either trajectory.
  // [4, 4, 4 | 1, 2], [4, 4, 4 | 3] and [5, 4 | 3] share 0, 2 and 0 steps.
  // `apart`: takes the steps that are stored again although the prompt is the same, and how many
  // trajectories differ there by column, [1 + columns].
  std::vector<int64_t> SharedSteps(const std::vector<ReadTrajectory>& all, int64_t* apart) const {
    std::vector<int64_t> shared(all.size());
    if (!shares_prompts) return shared;
    const int64_t first = PromptSteps(all[0]);
    for (size_t i = 1; i < all.size(); ++i) {
      const int64_t length = std::min(first, PromptSteps(all[i]));
      if (length <= 1 || !HaveEqualSteps(PromptPart::kIdentity, all[0], all[i], length)) continue;
      const bool is_equal = HaveEqualSteps(PromptPart::kStored, all[0], all[i], length, apart + 1);
      (is_equal ? shared[i] : apart[0]) += length - 1;
    }
    return shared;
  }

 private:
  static bool IsSet(char flag) { return flag != 0; }

  static bool IsZero(const char* rows, size_t bytes) {
    return std::none_of(rows, rows + bytes, IsSet);
  }

  // Whether rows are equal; null: of a late column that is missing, whose rows are 0.
  static bool AreEqual(const void* one, const void* other, size_t bytes) {
    if (one == other) return true;
    if (one == nullptr || other == nullptr)
      return IsZero(static_cast<const char*>(one == nullptr ? other : one), bytes);
    return std::memcmp(one, other, bytes) == 0;
  }

  // Steps before the first one with a loss; without one all of them.
  int64_t PromptSteps(const ReadTrajectory& one) const {
    const auto* flags = static_cast<const char*>(one.sources[static_cast<size_t>(mask)]);
    if (flags == nullptr) return one.num_steps;
    return std::find_if(flags, flags + one.num_steps, IsSet) - flags;
  }

  // Whether the first steps of two trajectories are equal in all columns of a part. `differ`:
  // counts the columns that are not; null: the first one is enough.
  bool HaveEqualSteps(PromptPart part, const ReadTrajectory& one, const ReadTrajectory& other,
                      int64_t num_steps, int64_t* differ = nullptr) const {
    bool is_equal = true;
    for (size_t c = 0; c < given.size(); ++c) {
      if (is_single(c) || given[c].part != part) continue;
      const auto bytes = static_cast<size_t>(num_steps * form(c).row_bytes);
      if (AreEqual(one.sources[c], other.sources[c], bytes)) continue;
      if (differ == nullptr) return false;
      ++differ[c];
      is_equal = false;
    }
    return is_equal;
  }

  // Whether a column has the steps of those before it, and an end flag at its last step only.
  bool HasSteps(size_t column, int64_t count, const char* rows, ReadTrajectory* read) const {
    const int64_t num_steps = count - store->columns[column].rows;
    if (num_steps < 1 || (read->num_steps > 0 && num_steps != read->num_steps)) return false;
    read->num_steps = num_steps;
    const int64_t inner = (num_steps - 1) * form(column).row_bytes;
    return !given[column].is_end || IsZero(rows, static_cast<size_t>(inner));
  }
};

// Adds a trajectory; takes the lock. Id or refusal, slot, and bits of its late columns; None: it is
// left to Python, and nothing has changed.
inline PyObject* AddTrajectory(const TrajectoryReader& reader, PyObject* trajectory,
                               double timeout_s) {
  ReadTrajectory read;
  if (!reader.Read(trajectory, nullptr, &read)) Py_RETURN_NONE;
  cpu::Added added{};
  {
    const WithoutLock unlocked;
    added = cpu::Add(*reader.store, read.whole(), timeout_s);
  }
  return Py_BuildValue("LLL", static_cast<long long>(added.id), static_cast<long long>(added.slot),
                       static_cast<long long>(read.present));
}

// Reserves and writes the trajectories of a group, whose number they have or leave out; takes the
// lock. `slots`: takes their slots, and then the bits of their late columns, [2, count]. `apart`:
// as SharedSteps, which adds to it. 0 or a refusal; None: they are left to Python, and nothing has
// changed.
inline PyObject* WriteGroup(const TrajectoryReader& reader, PyObject* members, int64_t number,
                            const Buffer& slots, const Buffer& apart, double timeout_s) {
  if (!PyList_CheckExact(members) && !PyTuple_CheckExact(members)) Py_RETURN_NONE;
  const Py_ssize_t count = PySequence_Fast_GET_SIZE(members);
  int64_t* made = WordsOf(slots, -1);
  int64_t* differences = WordsOf(apart, static_cast<Py_ssize_t>(1 + reader.given.size()));
  if (count == 0 || slots.view().len != count * 16) Py_RETURN_NONE;
  const RowForm& numbers = reader.form(static_cast<size_t>(reader.group));
  std::vector<char> stored;
  if (ConvertedNumber(numbers, {false, 0, number}, &stored) == nullptr) Py_RETURN_NONE;
  std::vector<ReadTrajectory> all(static_cast<size_t>(count));
  std::vector<cpu::Whole> wholes;
  for (Py_ssize_t i = 0; i < count; ++i) {
    ReadTrajectory& one = all[static_cast<size_t>(i)];
    PyObject* given = PySequence_Fast_ITEMS(members)[i];
    if (!reader.Read(given, &stored, &one) || !reader.IsFinite(one)) Py_RETURN_NONE;
    wholes.push_back(one.whole());
  }
  const std::vector<int64_t> shared = reader.SharedSteps(all, differences);
  int64_t refusal = 0;
  {
    const WithoutLock unlocked;
    refusal = cpu::WriteGroup(*reader.store, wholes.data(), count, shared.data(), made, timeout_s);
  }
  for (Py_ssize_t i = 0; i < count; ++i) made[count + i] = all[static_cast<size_t>(i)].present;
  return direct::ToPython(refusal);
}

// The steps that the trajectories of a group share with the first one, of columns in the stored
// form. `apart`: as SharedSteps, which adds to it.
inline PyObject* GroupSharedSteps(const TrajectoryReader& reader, PyObject* members,
                                  const Buffer& apart) {
  int64_t* differences = WordsOf(apart, static_cast<Py_ssize_t>(1 + reader.given.size()));
  std::vector<ReadTrajectory> all;
  ForEach(members, [&](PyObject* member) {
    if (!reader.Read(member, nullptr, &all.emplace_back()))
      direct::RaiseType("columns in the stored form", member);
  });
  return py::cast(reader.SharedSteps(all, differences)).release().ptr();
}

// Commits the slots of a group, with the bits of their late columns; wants the lock. Their ids.
inline PyObject* CommitGroup(Store& store, const Buffer& slots, const Buffer& present,
                             int64_t version, int64_t born) {
  const int64_t* reserved = WordsOf(slots, -1);
  const Py_ssize_t count = slots.view().len / 8;
  const int64_t* late = WordsOf(present, count);
  std::vector<int64_t> ids(static_cast<size_t>(count));
  cpu::CommitGroup(store, reserved, late, count, version, born, ids.data());
  return py::cast(ids).release().ptr();
}

inline void BindTrajectories(py::module_& module) {
  const auto make = [](uintptr_t store,
                       const std::vector<std::tuple<std::string, int64_t, bool, int64_t>>& columns,
                       int64_t most, int64_t group, int64_t mask, bool shares_prompts) {
    TrajectoryReader reader;
    reader.store = At<Store>(store);
    for (const auto& [name, late_bit, is_end, part] : columns) {
      PyObject* interned = PyUnicode_InternFromString(name.c_str());
      if (interned == nullptr) throw py::error_already_set();
      auto column = py::reinterpret_steal<py::object>(interned);
      reader.given.push_back({std::move(column), late_bit, is_end, static_cast<PromptPart>(part)});
    }
    reader.most_steps = most;
    reader.group = group;
    reader.mask = mask;
    reader.shares_prompts = shares_prompts;
    return reader;
  };
  AddressedClass<TrajectoryReader>(module, "TrajectoryReader")
      .def(py::init(make), py::kw_only(), py::arg("store"), py::arg("columns"), py::arg("most"),
           py::arg("group"), py::arg("mask"), py::arg("shares_prompts"));
}

}  // namespace gear::python
