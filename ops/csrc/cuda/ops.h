// The ops of cpu/ops.h on a GPU: raw device pointers, sizes and a stream. Every launch is followed
// by an error check, which throws std::runtime_error; an empty input returns before it. Nothing
// waits for the device. What only the device can see (an index in memory) is checked there: a wrong
// one ends the kernel with an error, before it reads or writes outside, and torch reports it at the
// next synchronisation, as for its own indexing.
#pragma once
#include <cstdint>

#include "cpu/ops.h"

namespace gear::cuda {

using cpu::Field;
using cpu::NStep;

void Draw(uint64_t seed, uint32_t stream_number, int64_t first, uint64_t total, int64_t count,
          int64_t* coordinates, void* stream);

void Permute(uint64_t seed, uint32_t stream_number, int64_t epoch, int64_t first, uint64_t size,
             int64_t count, int64_t* coordinates, void* stream);

void TreeBuild(uint64_t* sums, int64_t num_items, void* stream);

// Words of scratch memory that TreeUpdate needs for `count` items: a hash table, to find the last
// of equal items.
int64_t TreeUpdateScratch(int64_t count);
void TreeUpdate(uint64_t* sums, int64_t num_items, const int64_t* items, const int64_t* masses,
                int64_t count, int64_t* scratch, void* stream);

void Resolve(const uint64_t* sums, const Slot* slots, int64_t num_slots, const int64_t* coordinates,
             int64_t count, const AnchorRule& rule, int64_t unit, uint64_t seed,
             uint32_t stream_number, int64_t first, Resolution* resolutions, void* stream);

// A row that is no step of its slot ends the kernel.
void ResolveRows(const uint64_t* sums, const Slot* slots, int64_t num_slots,
                 const int32_t* row_slots, int64_t num_rows, const int64_t* coordinates,
                 int64_t count, int64_t first, Resolution* resolutions, void* stream);

// TopK, Prioritize and what nodes send each other run on the host only: they belong to the store.
void MassOf(const float* priorities, int64_t count, uint64_t alpha, int64_t* masses, void* stream);

void Importance(const Resolution* resolutions, int64_t size, uint64_t numerator, uint64_t count,
                uint64_t beta, float* weights, void* stream);

void MinimaBuild(const uint64_t* sums, int64_t num_items, uint64_t* minima, void* stream);

void MinimaUpdate(const uint64_t* sums, int64_t num_items, const int64_t* items, int64_t count,
                  uint64_t* minima, void* stream);

void SuffixSum(const void* reward, int64_t dtype, const int64_t* extents, int64_t num_extents,
               int64_t num_rows, float* out, void* stream);

void NStepReturn(const NStep& n_step, int64_t num_rows, const Resolution* resolutions,
                 int64_t count, float* returns, float* discount, int64_t* steps, void* stream);

// Collects all samples of one field. `held`: rows of its column. counters[0] += real rows.
void Gather(const Field& field, int64_t held, const Resolution* resolutions, const int64_t* n_steps,
            int64_t count, int64_t* counters, void* stream);

// Copies bytes[i] bytes each, from memory of the host that CUDA knows or of the device. On a stream
// that is not the legacy default one. Throws where driver or toolkit is older than CUDA 12.8.
void CopyPieces(const void* const* from, void* const* to, const int64_t* bytes, int64_t count,
                void* stream);

// counters[i] += amount[i], for what the host knows.
void AddToCounters(int64_t* counters, int64_t rows, int64_t bytes, void* stream);

}  // namespace gear::cuda
