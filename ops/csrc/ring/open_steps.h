// A step of every environment, added to its open trajectory (common/open_steps.h). Callers check.
#pragma once
#include "common/open_steps.h"
#include "ring/ring.h"

namespace gear::cpu {

// The memory of a ring's open trajectories.
struct OpenRing {
  OpenTrajectory* opened;  // [num_envs]
  int32_t* owners;         // [num_rows]: the slot of each row
  bool* truncations;       // [num_rows]: the column, or null
};

// `begun`: slot, row and 1 of the steps that begin a trajectory, slot -1 elsewhere.
void RingExtend(const Ring& ring, const OpenRing& open, const RingShape& shape,
                const RingRule& rule, const EnvSteps& steps, int64_t initial, PlacedStep* placed,
                int64_t* begun);

}  // namespace gear::cpu

namespace gear::cuda {

using cpu::OpenRing;

void RingExtend(const cpu::Ring& ring, const OpenRing& open, const RingShape& shape,
                const RingRule& rule, const EnvSteps& steps, int64_t initial, PlacedStep* placed,
                int64_t* begun, void* stream);

}  // namespace gear::cuda
