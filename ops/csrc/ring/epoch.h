// Epochs over the table in the memory of one device: every item once in each, in a keyed order that
// no array holds. The op is defined in deepspeed_gear/ops/reference/epochs.py.
#pragma once
#include "ring/ring.h"

namespace gear::cpu {

// How the batches of epochs are drawn.
struct EpochDraw {
  RingDraw base;    // seed, stream, stride and offset
  bool is_shared;   // all replicas hold the same items, and each draws every stride-th sample
  bool drops_tail;  // an epoch's last items are left out where they do not fill a global batch
};

// Fills resolutions, and the epoch of each sample. Items are slots. Where no item has a mass, or an
// epoch whose tail is dropped is shorter than a global batch, the batch has no samples.
void RingEpoch(const Ring& ring, const EpochDraw& draw, int64_t count, Resolution* resolutions,
               int64_t* epochs);

}  // namespace gear::cpu

namespace gear::cuda {

using cpu::EpochDraw;

void RingEpoch(const Ring& ring, const EpochDraw& draw, int64_t count, Resolution* resolutions,
               int64_t* epochs, void* stream);

}  // namespace gear::cuda
