// Draws from a ring whose trajectories may be drawn a limited number of times. Callers check.
#pragma once
#include "ring/ring.h"

namespace gear::cpu {

// Draws one sample after the other: a trajectory that was drawn `most` times has no mass for the
// draws after it. Counts the draws in the slots. Items are trajectories. Fewer draws left than
// samples: the batch has no samples, and nothing is counted.
void RingSelectLimited(const Ring& ring, const RingShape& shape, const RingRule& rule,
                       const RingDraw& draw, int64_t count, int64_t most, Resolution* resolutions,
                       float* weights);

}  // namespace gear::cpu

namespace gear::cuda {

void RingSelectLimited(const cpu::Ring& ring, const RingShape& shape, const RingRule& rule,
                       const cpu::RingDraw& draw, int64_t count, int64_t most,
                       Resolution* resolutions, float* weights, void* stream);

}  // namespace gear::cuda
