// The table in the memory of one device (common/ring.h), here on the host. Callers check.
#pragma once
#include "common/ring.h"

namespace gear::cpu {

// The memory of a ring.
struct Ring {
  int64_t* state;      // [kRingWords]
  Slot* slots;         // [num_slots]
  int64_t* begins;     // [num_slots]: number of the first row
  uint64_t* sums;      // tree over the items
  uint64_t* minima;    // its least masses; null: not maintained
  float* priorities;   // [items]; null: there are none
  int32_t* row_slots;  // [num_rows], where items are rows
};

// How a global batch is drawn.
struct RingDraw {
  uint64_t seed;
  uint32_t stream;
  int64_t stride, offset;  // sample i has number (samples + i) * stride + offset
  bool stratified;
  int64_t normalize;     // kNotNormalized, kByBatch, kByTable
  const int64_t* betas;  // by global batch, Q62; the last one stays in force
  int64_t num_betas;
};

// Adds one trajectory: lengths outside [0, most_steps] are rejected and counted; 0 adds nothing.
// `initial`: bits of the priority of new items; below 0: the highest so far.
void RingAdd(const Ring& ring, const RingShape& shape, const RingRule& rule, const int64_t* lengths,
             int64_t count, int64_t initial, Placed* placed);

// The total mass that a batch is drawn from.
uint64_t RingTotal(const uint64_t* sums, int64_t num_items);

// Fills resolutions, and weights unless they are null. Where no item has a mass the batch has no
// samples, weights of 0, and is counted.
void RingSelect(const Ring& ring, const RingShape& shape, const RingRule& rule,
                const RingDraw& draw, int64_t count, Resolution* resolutions, float* weights);

// Of equal items the last wins. Values that are no priorities are rejected and counted.
void RingUpdate(const Ring& ring, const RingShape& shape, const RingRule& rule,
                const Resolution* resolutions, const float* values, int64_t count);

// Rows of one column, as they are stored.
struct ScatterColumn {
  char* rows;
  const char* values;
  int64_t num_rows;  // of the column
  int64_t row_bytes;
  int64_t most_rows;  // of a trajectory in `values`
  int64_t source;     // a Source of ring/ring.h
};

// Writes the rows of trajectories to their places. False: a place lies outside a column.
bool Scatter(const ScatterColumn* columns, int64_t num_columns, const int64_t* placed,
             int64_t place_words, int64_t count);

}  // namespace gear::cpu
