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
  int64_t normalize;     // Normalize
  const int64_t* betas;  // by global batch, Q62; the last one stays in force
  int64_t num_betas;
};

// The record of a draw. False, and nothing written, if its item is no step of a slot.
GEAR_HOST_DEVICE bool ResolveItem(const Ring& ring, const RingShape& shape, const RingRule& rule,
                                  const RingDraw& draw, Hit hit, int64_t number,
                                  Resolution* resolution) {
  if (hit.item < 0 || hit.item >= ItemsOfRing(shape, rule)) return false;
  const uint64_t mass = ring.sums[hit.item];
  if (rule.by_row)
    return ResolveRow(ring.slots, shape.num_slots, ring.row_slots[hit.item], hit.item, mass, number,
                      resolution);
  const Slot& slot = ring.slots[hit.item];
  const int64_t anchor = ChooseAnchor(rule.anchors, rule.unit, slot.num_steps, hit.remainder,
                                      draw.seed, static_cast<uint64_t>(number), draw.stream);
  *resolution = ResolutionOf(slot, hit.item, anchor, mass, number);
  return true;
}

// Number of sample i of the next global batch.
GEAR_HOST_DEVICE int64_t NumberOf(const RingDraw& draw, const int64_t* state, int64_t i) {
  return (state[kRingSamples] + i) * draw.stride + draw.offset;
}

// Adds one trajectory: lengths outside [0, most_steps] are rejected and counted; 0 adds nothing.
// `initial`: bits of the priority of new items; below 0: the highest when a batch was last drawn.
void RingAdd(const Ring& ring, const RingShape& shape, const RingRule& rule, const int64_t* lengths,
             int64_t count, int64_t initial, Placed* placed);

// The total mass that a batch is drawn from.
uint64_t RingTotal(const uint64_t* sums, int64_t num_items);

// Fills resolutions, and weights unless they are null. Where no item has a mass the batch has no
// samples, weights of 0, and is counted.
void RingSelect(const Ring& ring, const RingShape& shape, const RingRule& rule,
                const RingDraw& draw, int64_t count, Resolution* resolutions, float* weights);

// The weights of a batch of samples.
void Weigh(const Ring& ring, const RingShape& shape, const RingRule& rule, const RingDraw& draw,
           uint64_t total, int64_t count, const Resolution* resolutions, float* weights);

// The state after a batch; total 0: it has no samples.
void Advance(int64_t* state, uint64_t total, int64_t count);

// A batch without samples.
void FillEmpty(const Ring& ring, const RingDraw& draw, int64_t count, Resolution* resolutions,
               float* weights);

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
