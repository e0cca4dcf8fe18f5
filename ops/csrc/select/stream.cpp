// The plain selections of a batch stream: apply changes of slots and priority reports, draw,
// resolve, commit; and the next batch drawn ahead. All under the store's lock.
#include "select/stream.h"

#include <algorithm>
#include <cstring>

#include "common/prefetch.h"
#include "common/tree.h"
#include "select/select.h"
#include "store/scoped_lock.h"
#include "store/store.h"

namespace gear::cpu {
namespace {

// Keeps the order of writes: a process may die between any two of them.
void Write(int64_t& word, int64_t value) { __atomic_store_n(&word, value, __ATOMIC_RELEASE); }

int64_t* HeadOf(const Stream& stream, int64_t number) {
  return stream.heads + number % stream.depth * kSelectionWords;
}

bool HaveReached(const int64_t* words, int64_t count, int64_t number) {
  for (int64_t i = 0; i < count; ++i) {
    if (__atomic_load_n(&words[i], __ATOMIC_ACQUIRE) < number) return false;
  }
  return true;
}

// Whether every process has released what the ring entry of a global batch holds.
bool IsReleased(const Stream& stream, int64_t number) {
  const int64_t held = HeadOf(stream, number)[kNumber];
  return held == kNothing || HaveReached(stream.consumed, stream.num_peers, held + 1);
}

bool HasChanges(const Stream& stream) {
  return stream.has_priorities || stream.changes[kNumQueued] != 0 ||
         stream.changes[kSeen] != stream.control[kChanged];
}

// Whether the changes of slots that precede a selection can be applied here.
bool CanApply(const Stream& stream, int64_t alpha) {
  const int64_t* changes = stream.changes;
  if (changes[kNumQueued] != 0 || changes[kApplying] != 0) return false;
  if (stream.has_priorities && alpha != changes[kAlpha]) return false;
  const int64_t changed = stream.control[kChanged];
  if (changes[kSeen] == changed) return true;
  return stream.plain_unit >= 0 && stream.log != nullptr &&
         changed - changes[kSeen] <= stream.log_size;
}

bool ApplySlots(Stream& stream) {
  const int64_t seen = stream.changes[kSeen], changed = stream.control[kChanged];
  if (seen == changed) return true;
  if (!stream.has_priorities) {
    SlotMasses(stream.sums, stream.slots, stream.num_slots, stream.log, stream.log_size, seen,
               changed, stream.rule, stream.plain_unit);
  } else {
    const StreamPriorities& given = stream.priorities;
    const int64_t initial = given.initial < 0 ? given.counts[kHighestPriority] : given.initial;
    const MassScale scale{static_cast<uint64_t>(stream.changes[kAlpha]),
                          static_cast<int>(given.most_bits)};
    Write(stream.changes[kApplying], -1 - changed);
    const int64_t done = SlotPriorities(
        given.target, given.known, stream.slots, stream.log, stream.log_size, seen, changed,
        stream.rule, stream.plain_unit, static_cast<uint32_t>(initial), scale, given.counts);
    if (done != changed) return false;  // the op raises the error
    Write(stream.changes[kApplying], 0);
  }
  Write(stream.changes[kSeen], changed);
  return true;
}

// Takes the updates that a selection applies, process by process; notes where their logs end.
void TakeReports(Stream& stream, int64_t number) {
  const StreamPriorities& given = stream.priorities;
  const int64_t until = number - given.lag;
  stream.reports.clear();
  for (int64_t peer = 0; peer < given.num_peers; ++peer) {
    int64_t* ends = given.ends + peer * kLogEndWords;
    const Report* log = given.logs + peer * given.log_size;
    // The waiting entries of a ring are one or two runs of memory.
    const int64_t head = ends[kLogHead], tail = ends[kLogTail];
    int64_t at = head;
    while (at < tail) {
      const Report* run = log + at % given.log_size;
      const Report* run_end = run + Min(tail - at, log + given.log_size - run);
      const Report* due_end =
          std::find_if(run, run_end, [&](const Report& report) { return report.batch >= until; });
      stream.reports.insert(stream.reports.end(), run, due_end);
      at += due_end - run;
      if (due_end < run_end) break;
    }
    ends[kLogNext] = at;
  }
}

// Removes the taken updates from all logs or none: a part, applied again, would override others.
void DropReports(const StreamPriorities& given) {
  Write(given.ends[kLogTaking], 1);
  for (int64_t peer = 0; peer < given.num_peers; ++peer) {
    int64_t* ends = given.ends + peer * kLogEndWords;
    Write(ends[kLogHead], ends[kLogNext]);
  }
  Write(given.ends[kLogTaking], 0);
}

bool ApplyReports(Stream& stream, int64_t number) {
  const StreamPriorities& given = stream.priorities;
  int64_t* window = given.window + number % given.window_size * 2;
  TakeReports(stream, number);
  const auto count = static_cast<int64_t>(stream.reports.size());
  if (count == 0) {
    window[0] = window[1] = 0;
    return true;
  }
  std::vector<Report> sorted;
  const Report* reports = InOrder(stream.reports.data(), count, &sorted);
  const Updates updates{reinterpret_cast<const int64_t*>(reports),
                        sizeof(Report) / sizeof(int64_t)};
  stream.items.resize(static_cast<size_t>(count));
  const int64_t found = ItemsOf(stream.slots, stream.num_slots, stream.rule, given.unit, updates,
                                count, given.target.num_items, stream.items.data());
  if (found != count) return false;  // the op raises the error
  const int64_t applied = given.counts[kApplied], clamped = given.counts[kClamped];
  const MassScale scale{static_cast<uint64_t>(stream.changes[kAlpha]),
                        static_cast<int>(given.most_bits)};
  Prioritize(given.target, updates, stream.items.data(), count, scale, given.counts);
  window[0] = given.counts[kApplied] - applied;
  window[1] = given.counts[kClamped] - clamped;
  DropReports(given);
  return true;
}

// Draws and resolves the samples of a global batch. False: a row is no step of its slot.
bool DrawSamples(Stream& stream, int64_t number, int64_t first, uint64_t total) {
  int64_t* coordinates = stream.coordinates.data();
  Resolution* ring = stream.ring + number % stream.depth * stream.batch;
  Draw(stream.seed, stream.random_key, first, total, stream.batch, coordinates);
  if (stream.has_priorities && stream.priorities.known.row_slots != nullptr)
    return ResolveRows(stream.sums, stream.slots, stream.num_slots,
                       stream.priorities.known.row_slots, stream.num_items, coordinates,
                       stream.batch, first, ring) == stream.batch;
  Resolve(stream.sums, stream.slots, stream.num_slots, coordinates, stream.batch, stream.rule,
          stream.unit, stream.seed, stream.random_key, first, ring);
  return true;
}

void Weigh(const Stream& stream, const Resolution* samples, int64_t beta, int64_t* head) {
  const StreamPriorities& given = stream.priorities;
  head[kDivisor] = 1;
  head[kExponent] = beta;
  if (given.normalize == kByBatch) {
    int64_t least = samples[0].mass;
    for (int64_t i = 1; i < stream.batch; ++i) least = Min(least, samples[i].mass);
    head[kNumerator] = least;
  } else if (given.normalize == kByTable) {
    const Priorities& masses = given.target;
    head[kNumerator] = static_cast<int64_t>(
        LeastOfTree(masses.sums, masses.minima, ShapeOfTree(masses.num_items)));
  } else {
    head[kNumerator] = head[kTotal];
    head[kDivisor] = given.counts[kDrawable];
  }
}

// Draws for the next selection, so that ranks that sample concurrently do not wait for each other.
void DrawAhead(Stream& stream, int64_t number) {
  int64_t* position = stream.position;
  if (position[kNumber] != number || position[kAhead] == number || HasChanges(stream)) return;
  if (!IsReleased(stream, number)) return;
  const uint64_t total = TotalOfTree(stream.sums, ShapeOfTree(stream.num_items));
  Write(HeadOf(stream, number)[kNumber], kNothing);
  if (total == 0) return;
  DrawSamples(stream, number, position[kSamples], total);
  Write(position[kAhead], number);
}

bool SelectHeld(Stream& stream, int64_t number, int64_t alpha, int64_t beta) {
  int64_t* position = stream.position;
  int64_t* head = HeadOf(stream, number);
  if (position[kRecovered] != stream.control[kRecoveries]) return false;
  if (head[kNumber] == number) return true;
  if (position[kNumber] != number || head[kNumber] > number || !IsReleased(stream, number))
    return false;
  const bool by_priority = stream.has_priorities;
  if (by_priority && !HaveReached(stream.priorities.asked, stream.priorities.num_peers,
                                  number - stream.priorities.lag))
    return false;
  if (!CanApply(stream, alpha)) return false;
  const bool is_drawn = position[kAhead] == number && !HasChanges(stream);
  int64_t after[kNumSet];
  std::copy_n(position, kNumSet, after);
  Write(head[kNumber], kNothing);
  if (!ApplySlots(stream) || (by_priority && !ApplyReports(stream, number))) return false;
  const uint64_t total = TotalOfTree(stream.sums, ShapeOfTree(stream.num_items));
  if (total == 0 || total >> kMostTotalBits != 0) return false;
  Resolution* samples = stream.ring + number % stream.depth * stream.batch;
  if (!is_drawn && !DrawSamples(stream, number, after[kSamples], total)) return false;
  if (stream.last_drawn != nullptr) {
    for (int64_t i = 0; i < stream.batch; ++i) stream.last_drawn[samples[i].slot] = number;
  }
  after[kTotal] = static_cast<int64_t>(total);
  after[kFillers] = 0;
  after[kSelected] = stream.batch;
  after[kSamples] += stream.batch;
  if (by_priority) Weigh(stream, samples, beta, after);
  std::copy_n(after + 1, kNumSet - 1, head + 1);
  if (stream.numbers != nullptr) {
    const int64_t size = stream.moments_size;
    const double* current = stream.moments + stream.moments_head[kCurrent] * size;
    std::copy_n(current, size, stream.numbers + number % stream.depth * size);
  }
  Write(head[kNumber], number);  // the commit point
  std::copy_n(after + 1, kNumSet - 1, position + 1);
  Write(position[kDone], 0);
  Write(position[kNumber], number + 1);
  return true;
}

}  // namespace

bool Select(Stream& stream, int64_t number, int64_t alpha, int64_t beta) {
  const ScopedLock held(stream.mutex, stream.holder, stream.timeout_s);
  if (held.refusal() != 0 || !SelectHeld(stream, number, alpha, beta)) return false;
  const bool is_turn = stream.num_peers > 1 && (number + 1) % stream.num_peers == stream.peer;
  if (is_turn || stream.parts_ahead > 0) DrawAhead(stream, number + 1);
  return true;
}

bool NextPart(const Stream& stream, int64_t number, int64_t part, int64_t num_parts,
              Resolution* samples) {
  // With 2 replicas and 2 micro batches, replica 1 has parts 1 and 3; after 3 comes 1 of the next.
  part += stream.parts_ahead;
  if (part >= num_parts) {
    part -= num_parts;
    ++number;
    // Pairs with the release stores of DrawAhead and SelectHeld.
    const int64_t drawn = __atomic_load_n(&stream.position[kAhead], __ATOMIC_ACQUIRE);
    const int64_t held = __atomic_load_n(&HeadOf(stream, number)[kNumber], __ATOMIC_ACQUIRE);
    if (drawn != number && held != number) return false;
  }
  const Resolution* ring = stream.ring + number % stream.depth * stream.batch + part;
  for (int64_t i = 0; i < stream.batch / num_parts; ++i) samples[i] = ring[i * num_parts];
  return true;
}

bool HasRoom(const Stream& stream, int64_t count) {
  const int64_t* ends = stream.priorities.ends + stream.peer * kLogEndWords;
  return count <= stream.priorities.log_size - (ends[kLogTail] - ends[kLogHead]);
}

bool Publish(Stream& stream, const Resolution* samples, const float* priorities, int64_t count,
             int64_t batch) {
  const StreamPriorities& given = stream.priorities;
  int64_t* ends = given.ends + stream.peer * kLogEndWords;
  Report* log = given.logs + stream.peer * given.log_size;
  const int64_t tail = ends[kLogTail], waiting = tail - ends[kLogHead];
  // After a load no batch was requested; the log stays in order.
  if (waiting > 0) batch = Max(batch, log[(tail - 1) % given.log_size].batch);
  if (count > 0) AppendReports(log, given.log_size, samples, priorities, count, tail, batch);
  // The lock orders the entries before the tail, for the process that selects next.
  const ScopedLock held(stream.mutex, stream.holder, stream.timeout_s);
  if (held.refusal() != 0) return false;
  ends[kLogTail] = tail + count;
  return true;
}

}  // namespace gear::cpu
