// A global batch of the items of highest priority of a ring. Callers check.
#pragma once
#include "ring/ring.h"

namespace gear::cpu {

// Of equal priorities the items of the lowest ids, and of one trajectory the first steps. Fewer
// items than samples: the batch has no samples. All weights are 1. `counts`: adds to how often each
// trajectory was drawn; then items are trajectories.
void RingTopK(const Ring& ring, const RingShape& shape, const RingRule& rule, const RingDraw& draw,
              int64_t count, bool counts, Resolution* resolutions, float* weights);

}  // namespace gear::cpu

namespace gear::cuda {

// Words of scratch memory that RingTopK needs.
int64_t RingTopKScratch(const RingShape& shape, const RingRule& rule, int64_t count);
void RingTopK(const cpu::Ring& ring, const RingShape& shape, const RingRule& rule,
              const cpu::RingDraw& draw, int64_t count, bool counts, Resolution* resolutions,
              float* weights, int64_t* scratch, void* stream);

}  // namespace gear::cuda
