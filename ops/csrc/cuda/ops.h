// The ops of cpu/ops.h on a GPU: raw device pointers, sizes and a stream. Every launch is followed
// by an error check, which throws std::runtime_error; an empty input returns before it. Nothing
// waits for the device. What only the device can see (an index in memory) is checked there: a wrong
// one ends the kernel with an error, before it reads or writes outside, and torch reports it at the
// next synchronisation, as for its own indexing. What nodes tell each other about draws and reports
// (AssignDraws and on in cpu/ops.h) runs on the host only.
#pragma once
#include <cstdint>

#include "cpu/ops.h"

namespace gear::cuda {

using cpu::Field;
using cpu::NStep;
using cpu::Priorities;
using cpu::RowLayout;
using cpu::RowSample;
using cpu::Updates;

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

// Entries [first, last) of a ring that lies on the device; what they name is checked there.
void SlotMasses(uint64_t* sums, const Slot* slots, int64_t num_slots, const int64_t* log,
                int64_t log_size, int64_t first, int64_t last, const AnchorRule& rule, int64_t unit,
                void* stream);

void Resolve(const uint64_t* sums, const Slot* slots, int64_t num_slots, const int64_t* coordinates,
             int64_t count, const AnchorRule& rule, int64_t unit, uint64_t seed,
             uint32_t stream_number, int64_t first, Resolution* resolutions, void* stream);

// A row that is no step of its slot ends the kernel.
void ResolveRows(const uint64_t* sums, const Slot* slots, int64_t num_slots,
                 const int32_t* row_slots, int64_t num_rows, const int64_t* coordinates,
                 int64_t count, int64_t first, Resolution* resolutions, void* stream);

void MassOf(const float* priorities, int64_t count, MassScale scale, int64_t* masses, void* stream);

void Importance(const Resolution* resolutions, int64_t size, uint64_t numerator, uint64_t count,
                uint64_t beta, float* weights, void* stream);

void MinimaBuild(const uint64_t* sums, int64_t num_items, uint64_t* minima, void* stream);

void MinimaUpdate(const uint64_t* sums, int64_t num_items, const int64_t* items, int64_t count,
                  uint64_t* minima, void* stream);

// Words of scratch memory that TopK needs.
int64_t TopKScratch(int64_t num_items, int64_t k);
void TopK(const float* priorities, const uint64_t* sums, int64_t num_items, int64_t k,
          int64_t* items, int64_t* scratch, void* stream);

void WriteReports(Report* log, int64_t size, const Resolution* resolutions, const float* priorities,
                  int64_t count, int64_t tail, int64_t batch, void* stream);

// Words of scratch memory that Prioritize needs: items, and a hash table of them.
int64_t PrioritizeScratch(int64_t count);
// Reports need not be in order: the last one of an item is found as it is.
void Prioritize(const Priorities& priorities, const Slot* slots, int64_t num_slots, int64_t unit,
                const Updates& updates, int64_t count, MassScale scale, int64_t* counts,
                int64_t* scratch, void* stream);

void SuffixSum(const void* reward, int64_t dtype, const int64_t* extents, int64_t num_extents,
               int64_t num_rows, float* out, void* stream);

void NStepReturn(const NStep& n_step, int64_t num_rows, const Resolution* resolutions,
                 int64_t count, float* returns, float* discount, int64_t* steps, void* stream);

// Gathers all samples of all fields, in launches of up to 16 fields. `held`: rows of each column.
// `order`: the samples in the order in which they are taken, or null; each is in it once.
// `most_blocks`: of a launch; its fields share them by their bytes, with one each at least, and
// launches are short, for some samples each. 0: as many as there is work for, for all samples at
// once. counters += real rows, rows, bytes.
void Gather(const Field* fields, const int64_t* held, int64_t num_fields,
            const Resolution* resolutions, const int64_t* n_steps, const int64_t* order,
            int64_t count, int64_t most_blocks, int64_t* counters, void* stream);

// What PackRows and UnpackRows know of the rows that travel. All of it lies on the device, and is
// checked there.
struct RowRequest {
  const RowSample* samples;
  int64_t count;
  RowLayout layout;
  int64_t num_member_rows;  // of layout.members
  int64_t num_slots;        // that a sample may have
  const int64_t* heads;
  int64_t num_peers;
};

// A run of memory on the device.
struct Bytes {
  char* data;
  int64_t size;
};

// Words of scratch memory that both need.
int64_t RowsScratch(const RowRequest& request);

// `columns` and `messages` lie on the host.
void PackRows(const RowRequest& request, const Slot* slots, const Bytes* columns, int64_t* sizes,
              char* message, int64_t message_bytes, int64_t* scratch, void* stream);

// A message that is too short and a room that lies outside end the kernel.
void UnpackRows(const RowRequest& request, const Bytes* columns, const Bytes* messages,
                const cpu::RowRoom& room, const int64_t* which, int64_t ring_rows, Resolution* ring,
                int64_t* sizes, int64_t* needed, int64_t* scratch, void* stream);

// Copies bytes[i] bytes each, from memory of the host that CUDA knows or of the device. On a stream
// that is not the legacy default one, and is not captured: graphs have no such node. Throws where
// driver or toolkit is older than CUDA 12.8.
void CopyPieces(const void* const* from, void* const* to, const int64_t* bytes, int64_t count,
                void* stream);

}  // namespace gear::cuda
