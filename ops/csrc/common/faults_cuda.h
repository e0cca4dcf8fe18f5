// Faults that end a kernel: a wrong index in device memory, or a value that its op does not take.
// A trap ends the context of the whole process without a reason, so the kernel first writes a word
// to pinned host memory, which outlives the context. Errors of later calls name that fault.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "common/host_device.h"

namespace gear::cuda {

// Each fault: op, tensor (the index of a fault is a position in it), its rule, and a remedy.
// clang-format off
#define GEAR_RECORDS_REMEDY "pass records that a draw from the table of these tensors has written"
#define GEAR_TABLE_REMEDY "change the tensors of a table only by its ops, on one stream"
#define GEAR_FAULTS(FAULT) \
  FAULT(kGatherOrder, "gather_", "order", "must be a position in the batch", \
        "pass a permutation of the batch's positions") \
  FAULT(kGatherAnchor, "gather_", "resolutions", "must have an anchor among its steps", \
        GEAR_RECORDS_REMEDY) \
  FAULT(kGatherRows, "gather_", "resolutions", "must lead to rows of every column", \
        GEAR_RECORDS_REMEDY) \
  FAULT(kNStepAnchor, "n_step_", "resolutions", "must have an anchor among its steps", \
        GEAR_RECORDS_REMEDY) \
  FAULT(kNStepRows, "n_step_", "resolutions", "must lead to rows of the rewards", \
        GEAR_RECORDS_REMEDY) \
  FAULT(kSuffixSumExtent, "suffix_sum_", "extents", "must lie in the rewards", \
        "pass first row and steps of stored trajectories") \
  FAULT(kMassPriority, "mass_", "priorities", "must be finite and at least 0", \
        "correct what computes them") \
  FAULT(kScatterPlace, "scatter_", "placed", "must lie in every column", \
        "pass the places that an add to the table of these columns has written") \
  FAULT(kSelectSlot, "ring_select_", "row_slots", "must be a slot where the row has a mass", \
        GEAR_TABLE_REMEDY) \
  FAULT(kSelectStep, "ring_select_", "row_slots", "must be the slot that the row belongs to", \
        GEAR_TABLE_REMEDY) \
  FAULT(kLimitedItem, "ring_select_limited_", "slots", "must have a trajectory where sums has a mass", \
        GEAR_TABLE_REMEDY) \
  FAULT(kEpochItem, "ring_epoch_", "slots", "must have a trajectory where sums has a mass", \
        GEAR_TABLE_REMEDY) \
  FAULT(kTopKOldest, "ring_top_k_", "items", "must be the oldest stored item", GEAR_TABLE_REMEDY) \
  FAULT(kTopKItem, "ring_top_k_", "items", "must be a step of a stored trajectory", \
        GEAR_TABLE_REMEDY) \
  FAULT(kTopKChange, "ring_top_k_", "priorities", "must not change while they are searched", \
        GEAR_TABLE_REMEDY) \
  FAULT(kUpdateItem, "ring_update_", "items", "must be an item of the table", GEAR_TABLE_REMEDY)
// clang-format on

enum Fault : uint32_t {
  kNoFault = 0,
#define GEAR_FAULT_NAME(name, ...) name,
  GEAR_FAULTS(GEAR_FAULT_NAME)
#undef GEAR_FAULT_NAME
      kNumFaults
};

// A word holds a fault and an index, so that one store writes both and threads do not mix theirs.
// Of several faults any one may be kept.
inline constexpr int kFaultBits = 8;
static_assert(kNumFaults <= 1 << kFaultBits, "a fault fits its bits");

GEAR_HOST_DEVICE uint64_t FaultWord(Fault fault, int64_t index) {
  return static_cast<uint64_t>(index) << kFaultBits | fault;
}

// Where kernels leave the fault that ends them. A kernel gets it as an argument, which a graph
// keeps: the word lives as long as the process.
struct Faults {
  uint64_t* word;

  // Ends the kernel where a condition does not hold. `index`: that breaks it.
  __device__ void Require(bool condition, Fault fault, int64_t index) const {
    if (condition) return;
    *static_cast<volatile uint64_t*>(word) = FaultWord(fault, index);
    __threadfence_system();  // the host has it before the context ends
    __trap();
  }
};

// Those of this process. The first call allocates the word, also while a graph is captured.
Faults FaultsOfProcess();

}  // namespace gear::cuda
