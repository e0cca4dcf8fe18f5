// The selections of a batch stream over a store's shared memory, each in one call.
//
// The same in plain Python, which a selection is left to where it is not plain:
// deepspeed_gear/sampling/selector.py.
#pragma once
#include <cstdint>
#include <vector>

#include "common/power.h"
#include "common/slot.h"
#include "priorities/priorities.h"
#include "store/mutex.h"

namespace gear::cpu {

// Words of a selection; of the stream's position, those of its latest selection with the next
// number.
enum SelectionWord : int64_t {
  kNumber,
  kSamples,
  kEpoch,
  kEpochFirst,
  kEpochSize,
  kTotal,
  kSelected,
  kFillers,
  kNumerator,
  kDivisor,
  kExponent,
  kNumSet,     // words that a selection sets
  kDone = 11,  // of a position: samples of the next selection that are resolved
  kAhead,      // the global batch whose draws are in its ring entry already
  kRecovered,  // kRecoveries of the store when the stream was last repaired
  kSelectionWords = 16,
};
inline constexpr int64_t kNothing = -1;  // the number of an empty ring entry

// Words of the mass changes that wait for a selection.
enum ChangeWord : int64_t { kNumQueued, kApplying, kAlpha, kSeen };

// Words of the ends of a process's priority log.
enum LogEnd : int64_t { kLogHead, kLogTail, kLogNext, kLogTaking, kLogEndWords = 16 };

// Priorities of a stream's items, and the logs of their updates.
struct StreamPriorities {
  Priorities target;
  PrioritizedSlots known;
  int64_t* counts;  // by UpdateCount
  int64_t* window;  // [window_size, 2]: updates of the latest global batches, and clamped ones
  int64_t window_size;
  Report* logs;          // [peers, log_size]
  int64_t* ends;         // [peers, kLogEndWords]
  const int64_t* asked;  // [peers]: the global batch that each process has requested
  int64_t log_size, num_peers, lag;
  int64_t unit;     // of an update's item
  int64_t initial;  // float32 bits of a new item's priority; -1: the highest so far
  int64_t most_bits;
  int64_t normalize;  // Normalize
};

struct Stream {
  SharedMutex* mutex;
  int64_t* holder;
  const int64_t* control;
  const Slot* slots;
  int64_t num_slots;
  const int64_t* log;  // of changed slots, or null: the table never changes
  int64_t log_size;
  int64_t *position, *heads, *changes;
  Resolution* ring;
  const int64_t* consumed;
  int64_t num_peers, peer;
  int64_t* last_drawn;  // [slots], or null
  uint64_t* sums;
  int64_t num_items;
  AnchorRule rule;
  int64_t unit;        // of a draw's item
  int64_t plain_unit;  // of the masses of changed slots; -1: they do not follow from the slots
  uint64_t seed;
  uint32_t random_key;
  int64_t batch, depth;
  double timeout_s;
  int64_t parts_ahead;  // from a part of this process to its next one; 0: rows are not read ahead
  bool has_priorities;
  StreamPriorities priorities;
  // Running moments of the table; each selection has a copy in its ring entry. Null: none.
  const int64_t* moments_head;
  const double* moments;
  double* numbers;  // [depth + 1, moments_size]
  int64_t moments_size;
  std::vector<int64_t> coordinates;
  std::vector<Report> reports;
  std::vector<int64_t> items;
};

// Makes the selection of a global batch, or finds it made; draws for the next one where it is this
// process's turn, or where rows are read ahead. Takes the lock. False: Python must make it; at most
// changes that precede the selection were written to the tree, as Python does again.
bool Select(Stream& stream, int64_t number, int64_t alpha, int64_t beta);

// Copies the samples that this process gathers after a part of a global batch, [batch / num_parts];
// false: they are not drawn yet. Only priorities and changes of slots decide draws, and a batch is
// drawn ahead where there are none.
bool NextPart(const Stream& stream, int64_t number, int64_t part, int64_t num_parts,
              Resolution* samples);

// Whether this process's log has room for so many more priorities.
bool HasRoom(const Stream& stream, int64_t count);

// Appends the priorities of samples to this process's log, which has room, as of a global batch,
// and publishes them; takes the lock. False: Python must do it, as the lock was refused; nothing is
// published.
bool Publish(Stream& stream, const Resolution* samples, const float* priorities, int64_t count,
             int64_t batch);

}  // namespace gear::cpu
