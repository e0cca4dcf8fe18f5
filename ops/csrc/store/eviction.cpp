// Chooses victims by policy, tests which slots are pinned, and frees retired ones.
#include "store/eviction.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "common/convert.h"
#include "select/stream.h"
#include "store/slots.h"

namespace gear::cpu {

namespace {

// Whether a trajectory is stored and does not grow.
bool IsComplete(const Store& store, int64_t slot) {
  return store.slots[slot].state == kCommitted && OpenOf(store, slot) == 0;
}

int64_t AnyComplete(const Store& store) {
  std::vector<int64_t> slots;
  for (int64_t slot = 0; slot < store.num_slots; ++slot) {
    if (IsComplete(store, slot)) slots.push_back(slot);
  }
  if (slots.empty()) return -1;
  const auto number = static_cast<uint64_t>(store.control[kNextId]);
  return slots[Coordinate(Philox(0, number, 0, kForEviction), slots.size())];
}

// The complete trajectory of the lowest value, of equal ones that of the lowest id; -1: none.
template <typename ValueOf>
int64_t LowestComplete(const Store& store, const ValueOf& value_of) {
  int64_t lowest = -1;
  double least = 0;
  for (int64_t slot = 0; slot < store.num_slots; ++slot) {
    if (!IsComplete(store, slot)) continue;
    const double value = value_of(slot);
    const bool is_lower = lowest < 0 || value < least ||
                          (value == least && store.slots[slot].id < store.slots[lowest].id);
    if (!is_lower) continue;
    lowest = slot;
    least = value;
  }
  return lowest;
}

double ValueOf(const Store& store, int64_t slot) {
  const ColumnOf& column = store.columns[store.value_column];
  const char* at = column.base + slot * column.row_bytes;
  const double value = WithType(store.value_dtype, [at](auto one) {
    return Load<double>(*reinterpret_cast<const decltype(one)*>(at));
  });
  return std::isnan(value) ? -INFINITY : value;
}

// Frees a retired slot: priorities of its rows must not be those of the next trajectory there.
void FreeWithPriorities(Store& store, int64_t slot) {
  const Slot& record = store.slots[slot];
  for (const StreamView& stream : store.streams) {
    if (stream.steps.target.sums != nullptr)
      ForgetRows(stream.steps, record.first_row, record.num_rows);
  }
  Free(store, slot);
}

}  // namespace

bool IsFrozen(const StreamView& stream) {
  if (stream.held == nullptr) return false;
  const int64_t* position = stream.position;
  const int64_t walked = position[kSamples] + position[kDone] - position[kEpochFirst];
  return walked < position[kEpochSize];
}

bool IsRead(const Store& store, int64_t slot) {
  for (const StreamView& stream : store.streams) {
    const int64_t drawn = stream.last_drawn[slot];
    for (int64_t peer = 0; peer < stream.num_peers; ++peer) {
      if (store.peers[peer * kPeerWords + kPid] == 0) continue;  // no process has this place
      // Pairs with the release of a process that has copied its rows of the selection.
      if (__atomic_load_n(&stream.consumed[peer], __ATOMIC_ACQUIRE) <= drawn) return true;
    }
  }
  return false;
}

bool IsHeld(const Store& store, int64_t slot) {
  if (IsRead(store, slot)) return true;
  int64_t item = slot;  // of a group its leader, which represents it in trees
  if (store.groups != nullptr && store.groups[slot * kGroupWords + kLeader] > 0)
    item = store.groups[slot * kGroupWords + kLeader] - 1;
  for (const StreamView& stream : store.streams) {
    if (IsFrozen(stream) && stream.held[item] != 0) return true;
  }
  return false;
}

bool IsPinned(const Store& store, int64_t slot) {
  return OpenOf(store, slot) != 0 || IsHeld(store, slot);
}

Freed FreeRetired(Store& store) {
  constexpr size_t kParts = 4;  // of a store that frees in parts, a fourth goes at once
  const int64_t sentinel = store.num_slots + 1;
  std::vector<int64_t> free;  // by age
  for (int64_t slot = LinkOf(store, sentinel, kNewer); slot != sentinel;
       slot = LinkOf(store, slot, kNewer)) {
    if (!IsPinned(store, slot)) free.push_back(slot);
  }
  const size_t count = store.frees_in_parts ? (free.size() + kParts - 1) / kParts : free.size();
  for (size_t i = 0; i < count; ++i) FreeWithPriorities(store, free[i]);
  return {static_cast<int64_t>(count), count == free.size()};
}

int64_t RowsBeingRead(const Store& store) {
  const int64_t sentinel = store.num_slots + 1;
  int64_t rows = 0;
  for (int64_t slot = LinkOf(store, sentinel, kNewer); slot != sentinel;
       slot = LinkOf(store, slot, kNewer))
    rows += OpenOf(store, slot) == 0 ? store.slots[slot].num_rows : 0;
  return rows;
}

int64_t FirstComplete(const Store& store, Link link) {
  const int64_t sentinel = store.num_slots;
  int64_t slot = LinkOf(store, sentinel, link);
  while (slot != sentinel && OpenOf(store, slot) != 0) slot = LinkOf(store, slot, link);
  return slot == sentinel ? -1 : slot;
}

float PriorityOf(const Store& store, int64_t slot) {
  const Slot& record = store.slots[slot];
  for (const StreamView& stream : store.streams) {
    if (stream.priorities == nullptr) continue;
    if (stream.generations[slot] != record.generation) return INFINITY;
    if (stream.steps.target.sums == nullptr) return stream.priorities[slot];
    const float* first = stream.priorities + record.first_row;
    return *std::max_element(first, first + record.num_rows);
  }
  return INFINITY;
}

int64_t Victim(const Store& store) {
  switch (store.removal) {
    case kOldest:
      return FirstComplete(store, kNewer);
    case kNewest:
      return FirstComplete(store, kOlder);
    case kUniform:
      return AnyComplete(store);
    case kLowestPriority:
      return LowestComplete(store, [&](int64_t slot) { return PriorityOf(store, slot); });
    case kLowestValue:
      return LowestComplete(store, [&](int64_t slot) { return ValueOf(store, slot); });
    default:
      return -1;
  }
}

bool Evict(Store& store, int64_t slot) {
  Retire(store, slot);
  if (IsPinned(store, slot)) return false;
  store.control[kShortRover] = LinkOf(store, slot, kBefore);
  FreeWithPriorities(store, slot);
  return true;
}

}  // namespace gear::cpu
