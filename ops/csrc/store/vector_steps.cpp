// Takes a step of all environments, stores the episodes that end, publishes the others.
#include "store/vector_steps.h"

#include <algorithm>
#include <cstring>

#include "common/row_copies.h"
#include "store/scoped_lock.h"

namespace gear::cpu {

namespace {

// An episode of more bytes is stored by Python, whose call copies it without the lock.
constexpr int64_t kMostCopied = 256 * 1024;

bool IsSet(const char* flags, int64_t env) { return flags != nullptr && flags[env] != 0; }

}  // namespace

bool VectorSteps::Plan(const char* terminated, const char* truncated, const char* observed) {
  has_ends = has_cuts = false;
  num_begun = 0;
  const bool checks = *checks_resets;
  const StepColumn& state = columns[0];
  for (int64_t i = 0; i < num_envs; ++i) {
    const bool is_first = next[i] == first[i];  // it was never reset
    const bool ends = terminated[i] != 0 || IsSet(truncated, i);
    starts[i] = 0;
    if (waits[i] && autoreset == Autoreset::kDisabled) {
      if (observed == nullptr || (checks && was_truncated[i] && !is_first)) return false;
      starts[i] = 1;
      rows[i] = first[i];
      following[i] = first[i] + 1;
      has_ends |= ends;
      continue;
    }
    if (waits[i] && (autoreset != Autoreset::kNextStep || is_first || checks)) return false;
    if (observed != nullptr &&
        std::memcmp(state.base + (next[i] - 1) * state.row_bytes, observed + i * state.row_bytes,
                    static_cast<size_t>(state.row_bytes)) != 0)
      return false;
    if (waits[i]) {
      rows[i] = -1;
      following[i] = first[i];
      ++num_begun;
      continue;
    }
    rows[i] = next[i] - 1;
    following[i] = next[i];
    has_cuts |= following[i] - first[i] > length;
    has_ends |= ends;
    if (ends && autoreset == Autoreset::kSameStep && checks && IsSet(truncated, i)) return false;
  }
  return !has_cuts || (may_cut && store != nullptr);
}

int64_t VectorSteps::Take(const char* const* values, const std::vector<const char*>& finals,
                          const char* observed, const char* terminated, const char* truncated,
                          bool publish) {
  if (has_cuts && !Cut()) return kLeft;
  const bool same_step = autoreset == Autoreset::kSameStep;
  const auto copy_row = [this](size_t column, int64_t row, const char* from) {
    const int64_t row_bytes = columns[column].row_bytes;
    std::memcpy(columns[column].base + row * row_bytes, from, static_cast<size_t>(row_bytes));
  };
  for (int64_t i = 0; i < num_envs; ++i) {
    if (starts[i] == 0) continue;
    copy_row(0, first[i], observed + i * columns[0].row_bytes);
    waits[i] = false;
  }
  for (size_t c = 0; c < columns.size(); ++c)
    ScatterRows(columns[c].base, values[c], columns[c].row_bytes,
                columns[c].is_state ? following.data() : rows.data(), num_envs);
  counts[kStepsTaken] += num_envs - num_begun;
  std::vector<int64_t> ended;
  for (int64_t i = 0; i < num_envs; ++i) {
    next[i] = following[i] + 1;
    if (waits[i]) {
      waits[i] = false;
    } else if (has_ends && (terminated[i] != 0 || IsSet(truncated, i))) {
      ended.push_back(i);
      next[i] = following[i];
      was_truncated[i] = IsSet(truncated, i);
      size_t at = static_cast<size_t>(i);
      for (size_t c = 0; same_step && c < columns.size(); ++c) {
        if (!columns[c].is_state) continue;
        copy_row(c, following[i], finals[at]);
        at += static_cast<size_t>(num_envs);
      }
    }
  }
  const int64_t cut = has_cuts ? kCompletedSome : 0;
  if (ended.empty() && !publish) return cut;
  size_t num_stored = 0;
  bool published = !publish;
  if (store != nullptr) {
    const ScopedLock held(store->mutex, store->holder, timeout_s);
    if (held.refusal() == 0) {
      for (const int64_t env : ended) {
        if (!StoreEnded(env, following[env] - first[env], false)) break;
        ++num_stored;
        if (same_step) {
          for (size_t c = 0; c < columns.size(); ++c) {
            if (columns[c].is_state)
              copy_row(c, first[env], values[c] + env * columns[c].row_bytes);
          }
          next[env] = first[env] + 1;
        } else {
          waits[env] = true;
          ++next[env];
        }
      }
      if (publish && num_stored == ended.size()) published = PublishHeld();
    }
  }
  for (size_t i = num_stored; i < ended.size(); ++i) unstored[ended[i]] = true;
  return cut | (num_stored > 0 ? kCompletedSome : 0) | (num_stored < ended.size() ? kEndsLeft : 0) |
         (published ? 0 : kPublishLeft);
}

bool VectorSteps::Publish() {
  const ScopedLock held(store->mutex, store->holder, timeout_s);
  return held.refusal() == 0 && PublishHeld();
}

// Stores the trajectories of environments whose rows are full; the next ones begin at their last
// states. False: some are left, and nothing of the step has been taken.
bool VectorSteps::Cut() {
  const ScopedLock held(store->mutex, store->holder, timeout_s);
  if (held.refusal() != 0) return false;
  for (int64_t i = 0; i < num_envs; ++i) {
    const int64_t num_steps = following[i] - first[i] - 1;
    if (rows[i] < 0 || starts[i] != 0 || num_steps < length) continue;
    if (truncated_column >= 0) columns[truncated_column].base[first[i] + num_steps - 1] = 1;
    if (!StoreEnded(i, num_steps, true)) return false;
    for (const StepColumn& column : columns) {
      if (column.is_state)
        std::memcpy(column.base + first[i] * column.row_bytes,
                    column.base + (first[i] + num_steps) * column.row_bytes,
                    static_cast<size_t>(column.row_bytes));
    }
    rows[i] = first[i];
    following[i] = next[i] = first[i] + 1;
  }
  return true;
}

// Stores the trajectory of an environment, or publishes the rest of it and ends it. False: it is
// left, and nothing has changed but rows that may be published.
bool VectorSteps::StoreEnded(int64_t env, int64_t num_steps, bool is_cut) {
  Growing& one = growing[env];
  const Staged staged = StagedOf(env, num_steps);
  Completed& done = completed[counts[kNumCompleted]];
  if (one.slot >= 0) {
    if (!Grow(*store, staged, one, most_steps)) return false;
    done = {env, one.id, one.published};
    EndGrowth(*store, one, is_cut);
  } else {
    if (!adds || one.first > 0 || num_steps * bytes_per_step() > kMostCopied) return false;
    const int64_t id = AddStaged(*store, staged);
    if (id < 0) return false;
    done = {env, id, num_steps};
    ++counts[kWholeAdded];
  }
  ++counts[kNumCompleted];
  return true;
}

int64_t VectorSteps::bytes_per_step() const {
  int64_t bytes = 0;
  for (const StepColumn& column : columns) bytes += column.row_bytes;
  return bytes;
}

Staged VectorSteps::StagedOf(int64_t env, int64_t num_steps) const {
  return {sources.data(), first[env], num_steps, env};
}

// Publishes the steps of all open trajectories, first of those that are published already, as
// Python does. False: some are left.
bool VectorSteps::PublishHeld() {
  constexpr int64_t kAhead = 4;  // environments whose rows are requested before their turn
  bool left = false;
  for (const bool begins : {false, true}) {
    for (int64_t i = 0; i < num_envs; ++i) {
      if (!begins && i + kAhead < num_envs) PrefetchSteps(*store, growing[i + kAhead]);
      const int64_t num_steps = waits[i] ? 0 : next[i] - first[i] - 1;
      Growing& one = growing[i];
      if (num_steps <= one.first || (one.slot < 0) != begins) continue;
      if (!begins) {
        left |= !Grow(*store, StagedOf(i, num_steps), one, most_steps);
      } else {
        if (!may_begin) return false;
        if (Begin(*store, StagedOf(i, num_steps), one, most_steps) != 0) return false;
        ++counts[kBegun];
      }
    }
    if (left) return false;
  }
  return true;
}

}  // namespace gear::cpu
