// The table in the memory of one device (common/ring_layout.h): ops on the host and on a GPU. Callers
// check. On a GPU they read state from memory, never from their arguments, so that a graph can
// replay them; the last argument is the stream.
#pragma once
#include "common/open_steps.h"
#include "common/ring_layout.h"
#include "priorities/priorities.h"

namespace gear::cpu {

// A ring and its memory.
struct Ring {
  RingShape shape;
  RingRule rule;
  int64_t* state;      // [kRingWords]
  Slot* slots;         // [num_slots]
  int64_t* begins;     // [num_slots]: number of the first row
  uint64_t* sums;      // tree over the items
  uint64_t* minima;    // its least masses; null: not maintained
  float* priorities;   // [items]; null: there are none
  int32_t* row_slots;  // [num_rows], where items are rows

  GEAR_HOST_DEVICE int64_t NumItems() const {
    return rule.by_row ? shape.num_rows : shape.num_slots;
  }
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

// The memory of a ring's open trajectories.
struct OpenRing {
  OpenTrajectory* opened;  // [num_envs]
  int32_t* owners;         // [num_rows]: the slot of each row
  bool* truncations;       // [num_rows]: the column, or null
};

// Rows of one column, as they are stored.
struct ScatterColumn {
  char* rows;
  const char* values;
  int64_t num_rows;  // of the column
  int64_t row_bytes;
  int64_t most_rows;  // of a trajectory in `values`
  int64_t source;     // a Source of gather/gather.h
};

// The record of a draw of an item of `mass`, in the slot `at`. False, and nothing written, if its
// item is no step of the slot.
GEAR_HOST_DEVICE bool ResolveItem(const Ring& ring, const RingDraw& draw, Hit hit, int64_t at,
                                  const Slot& slot, uint64_t mass, int64_t number,
                                  Resolution* resolution) {
  const RingRule& rule = ring.rule;
  if (rule.by_row) return ResolveRow(slot, at, hit.item, mass, number, resolution);
  const int64_t anchor = ChooseAnchor(rule.anchors, rule.unit, slot.num_steps, hit.remainder,
                                      draw.seed, static_cast<uint64_t>(number), draw.stream);
  *resolution = ResolutionOf(slot, at, anchor, mass, number);
  return true;
}

// The same of an item that is only known by its number.
GEAR_HOST_DEVICE bool ResolveItem(const Ring& ring, const RingDraw& draw, Hit hit, int64_t number,
                                  Resolution* resolution) {
  if (hit.item < 0 || hit.item >= ring.NumItems()) return false;
  const int64_t at = ring.rule.by_row ? ring.row_slots[hit.item] : hit.item;
  if (at < 0 || at >= ring.shape.num_slots) return false;
  return ResolveItem(ring, draw, hit, at, ring.slots[at], ring.sums[hit.item], number, resolution);
}

// Number of sample i of the next global batch.
GEAR_HOST_DEVICE int64_t NumberOf(const RingDraw& draw, const int64_t* state, int64_t i) {
  return (state[kRingSamples] + i) * draw.stride + draw.offset;
}

// Where sample i of a batch is drawn in [0, total).
GEAR_HOST_DEVICE uint64_t PointOf(const RingDraw& draw, int64_t number, uint64_t total, int64_t i,
                                  int64_t count) {
  const auto counter = static_cast<uint64_t>(number);
  const uint64_t point = Coordinate(Philox(draw.seed, counter, draw.stream, kForCoordinate), total);
  if (!draw.stratified) return point;
  return Stratify(point, total, static_cast<uint64_t>(i), static_cast<uint64_t>(count));
}

// Adds one trajectory: lengths outside [0, most_steps] are rejected and counted; 0 adds nothing.
// `initial`: bits of the priority of new items; below 0: the highest when a batch was last drawn.
void RingAdd(const Ring& ring, const int64_t* lengths, int64_t count, int64_t initial,
             Placed* placed);

// Adds a step of every environment to its open trajectory (common/open_steps.h). `begun`: slot, row
// and 1 of the steps that begin a trajectory, slot -1 elsewhere.
void RingExtend(const Ring& ring, const OpenRing& open, const EnvSteps& steps, int64_t initial,
                PlacedStep* placed, int64_t* begun);

// Removed trajectories keep their rows until they would be evicted. Ids that are not stored are
// ignored. `removed`: the slot of each id, -1 where nothing was removed.
void RingRemove(const Ring& ring, const int64_t* ids, int64_t count, int64_t* removed);

// Fills resolutions, and weights unless they are null. Where no item has a mass the batch has no
// samples, weights of 0, and is counted.
void RingSelect(const Ring& ring, const RingDraw& draw, int64_t count, Resolution* resolutions,
                float* weights);

// Draws one sample after the other: a trajectory that was drawn `most` times has no mass for the
// draws after it. Counts the draws in the slots. Items are trajectories. Fewer draws left than
// samples: the batch has no samples, and nothing is counted.
void RingSelectLimited(const Ring& ring, const RingDraw& draw, int64_t count, int64_t most,
                       Resolution* resolutions, float* weights);

// The items of highest priority; of equal ones those of the lowest ids, and of one trajectory the
// first steps. Fewer items than samples: the batch has no samples. All weights are 1. `counts`:
// adds to how often each trajectory was drawn; then items are trajectories.
void RingTopK(const Ring& ring, const RingDraw& draw, int64_t count, bool counts,
              Resolution* resolutions, float* weights);
inline int64_t RingTopKScratch(const Ring&, int64_t) { return 0; }

// Of equal items the last wins. Values that are no priorities are rejected and counted.
void RingUpdate(const Ring& ring, const Resolution* resolutions, const float* values,
                int64_t count);
inline int64_t RingUpdateScratch(int64_t) { return 0; }

// Writes the rows of trajectories to their places. False: a place lies outside a column.
bool Scatter(const ScatterColumn* columns, int64_t num_columns, const int64_t* placed,
             int64_t place_words, int64_t count);

}  // namespace gear::cpu

namespace gear::cuda {

using cpu::OpenRing;
using cpu::Ring;
using cpu::RingDraw;
using cpu::ScatterColumn;

void RingAdd(const Ring& ring, const int64_t* lengths, int64_t count, int64_t initial,
             Placed* placed, void* stream);
void RingExtend(const Ring& ring, const OpenRing& open, const EnvSteps& steps, int64_t initial,
                PlacedStep* placed, int64_t* begun, void* stream);
void RingRemove(const Ring& ring, const int64_t* ids, int64_t count, int64_t* removed,
                void* stream);
void RingSelect(const Ring& ring, const RingDraw& draw, int64_t count, Resolution* resolutions,
                float* weights, void* stream);
void RingSelectLimited(const Ring& ring, const RingDraw& draw, int64_t count, int64_t most,
                       Resolution* resolutions, float* weights, void* stream);

// With words of scratch memory before the stream.
int64_t RingTopKScratch(const Ring& ring, int64_t count);
void RingTopK(const Ring& ring, const RingDraw& draw, int64_t count, bool counts,
              Resolution* resolutions, float* weights, int64_t* scratch, void* stream);
int64_t RingUpdateScratch(int64_t count);
void RingUpdate(const Ring& ring, const Resolution* resolutions, const float* values, int64_t count,
                int64_t* scratch, void* stream);

// A place that lies outside a column ends the kernel.
void Scatter(const ScatterColumn* columns, int64_t num_columns, const int64_t* placed,
             int64_t place_words, int64_t count, void* stream);

}  // namespace gear::cuda
