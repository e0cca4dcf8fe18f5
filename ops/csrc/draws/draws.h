// Messages between nodes about draws and priority reports: which node holds a draw, and how draws
// and reports are encoded. On the host only.
#pragma once
#include <cstdint>

#include "common/slot.h"
#include "rows/rows.h"

namespace gear::cpu {

// The nodes that need the draws of a selection.
struct DrawRoutes {
  const int64_t* readers;  // [num_replicas, most]: nodes that read a replica's samples, then -1
  int64_t num_replicas, most;
  const int16_t* need_of;  // [num_nodes, num_replicas]: what is read there, -1 for nothing
  int64_t num_nodes, index;
  int64_t offset;        // of the selection's first sample among those of all tables
  bool takes_own;        // this node copies rows for itself as well
  const int64_t* steps;  // of the n-step return of each own record, or null
  int64_t words;         // of an encoded resolution: 4, or 5 with steps
};

// The shard that each coordinate hits; which ones hit shard `index`, and where. Returns their
// number.
int64_t AssignDraws(const int64_t* coordinates, int64_t count, const int64_t* totals,
                    int64_t num_shards, int64_t index, int64_t* owner, int64_t* own,
                    int64_t* points);

// Encodes this node's draws for the nodes that need them, by node: samples, and encoded
// resolutions. `goals` are rows of achieved goals, or null. Returns their number.
int64_t EncodeDraws(const Resolution* records, const int64_t* own, const int64_t* goals,
                    int64_t count, const DrawRoutes& routes, RowSample* samples, int64_t* encoded,
                    int64_t* ends);

// Puts encoded resolutions of other nodes into the ring; the samples whose rows this node needs,
// and their indices in the selection. Returns their number.
int64_t DecodeDraws(const int64_t* const* received, const int64_t* owner, const int64_t* asked,
                    int64_t count, const DrawRoutes& routes, int64_t first, Resolution* ring,
                    int64_t* origins, RowSample* samples, int64_t* which);

// Puts this node's own resolutions into the ring; as DecodeDraws those that it copies for itself.
int64_t PutDraws(const Resolution* records, const int64_t* own, int64_t count,
                 const DrawRoutes& routes, Resolution* ring, int64_t* origins, RowSample* samples,
                 int64_t* which);

// A report as it is sent to the node that holds its item.
struct EncodedReport {
  int64_t handle;  // generation << 32 | slot, or the id where the reporting node lacks the slot
  int64_t value;   // priority << 32 | anchor
  int64_t order;   // batches before the latest << 48 | sample number, or one of the last two by id
};
static_assert(sizeof(EncodedReport) == 24, "an encoded report is a row of 3 int64");

inline constexpr int64_t kNumberBits = 48;
inline constexpr int64_t kMostNumber = (int64_t{1} << kNumberBits) - 1;
inline constexpr int64_t kUnknownById = kMostNumber, kKnownById = kMostNumber - 1;
inline constexpr int64_t kAnySlot = (int64_t{1} << 32) - 1;  // in place of an unknown slot
inline constexpr int64_t kMostBack = (1 << 16) - 1;
inline constexpr int64_t kById = int64_t{1} << 62;  // the number of a report by id

// Encodes reports by shard, which stands above the 32 bits of their slot.
void EncodeReports(const Report* reports, int64_t count, int64_t latest, int64_t num_shards,
                   EncodedReport* encoded, int64_t* ends);

// The inverse, without the shard; an unknown slot is -1, with the id in place of the generation.
void DecodeReports(const EncodedReport* encoded, int64_t count, int64_t latest, Report* reports);

}  // namespace gear::cpu
