// Every op as raw pointers and sizes. No torch, no CUDA header. gear::cuda has the same list with a
// stream at the end.
#pragma once
#include <cstdint>
#include <vector>

#include "common/power.h"
#include "common/slot.h"
#include "common/window.h"

namespace gear::cpu {

// coordinates[i] = a point in [0, total) for sample first + i.
void Draw(uint64_t seed, uint32_t stream, int64_t first, uint64_t total, int64_t count,
          int64_t* coordinates);

// coordinates[i] = where the epoch's permutation of [0, size) puts index first + i.
void Permute(uint64_t seed, uint32_t stream, int64_t epoch, int64_t first, uint64_t size,
             int64_t count, int64_t* coordinates);

// Sums every inner node of a tree whose leaves are set.
void TreeBuild(uint64_t* sums, int64_t num_items);

// Sets leaves and mends the nodes above them; of equal items the last wins. Cost: levels additions
// an item.
void TreeUpdate(uint64_t* sums, int64_t num_items, const int64_t* items, const int64_t* masses,
                int64_t count);
// Sets the masses of the slots that entries [first, last) of a ring name.
void SlotMasses(uint64_t* sums, const Slot* slots, int64_t num_slots, const int64_t* log,
                int64_t log_size, int64_t first, int64_t last, const AnchorRule& rule,
                int64_t unit);

// What each coordinate hits: slot, anchor, mass, and the sample number first + i.
void Resolve(const uint64_t* sums, const Slot* slots, int64_t num_slots, const int64_t* coordinates,
             int64_t count, const AnchorRule& rule, int64_t unit, uint64_t seed, uint32_t stream,
             int64_t first, Resolution* resolutions);

// What each coordinate hits in a tree whose items are the rows of the store. Returns `count`, or
// the index of the first draw whose row is no step of its slot: the draws before it are written.
int64_t ResolveRows(const uint64_t* sums, const Slot* slots, int64_t num_slots,
                    const int32_t* row_slots, int64_t num_rows, const int64_t* coordinates,
                    int64_t count, int64_t first, Resolution* resolutions);

// The mass of each priority. All are finite and at least 0.
void MassOf(const float* priorities, int64_t count, MassScale scale, int64_t* masses);

// weights[i] = (numerator / (count * mass of resolution i))^beta, for `size` resolutions.
void Importance(const Resolution* resolutions, int64_t size, uint64_t numerator, uint64_t count,
                uint64_t beta, float* weights);

// Sets every node of the tree of minima above leaves that are set.
void MinimaBuild(const uint64_t* sums, int64_t num_items, uint64_t* minima);

// Mends the minima above leaves that have changed; items may repeat.
void MinimaUpdate(const uint64_t* sums, int64_t num_items, const int64_t* items, int64_t count,
                  uint64_t* minima);

// The k leaves with a mass of highest priority, in falling order, equal ones by their number; -1
// behind the last. Cost: about one pass over the priorities.
void TopK(const float* priorities, const uint64_t* sums, int64_t num_items, int64_t k,
          int64_t* items);

// Writes the new priorities of samples into a ring of reports, from `tail` modulo its size on.
void WriteReports(Report* log, int64_t size, const Resolution* resolutions, const float* priorities,
                  int64_t count, int64_t tail, int64_t batch);

// Brings reports into the order in which they count: by batch and sample number, equal ones as they
// stand. Returns what is in order already, else a copy in `sorted`.
const Report* InOrder(const Report* reports, int64_t count, std::vector<Report>* sorted);

// Updates, each at the beginning of a row: a PriorityUpdate or a Report.
struct Updates {
  const int64_t* rows;
  int64_t row_words;

  const PriorityUpdate& operator[](int64_t i) const {
    return *reinterpret_cast<const PriorityUpdate*>(rows + i * row_words);
  }
};

// The item of each update, -1 where its trajectory is gone. Returns `count`, or the index of the
// first one whose item would lie outside.
int64_t ItemsOf(const Slot* slots, int64_t num_slots, int64_t unit, const Updates& updates,
                int64_t count, int64_t num_items, int64_t* items);

// What an update changes; `minima` is null where nobody keeps them.
struct Priorities {
  uint64_t* sums;
  uint64_t* minima;
  float* values;  // [num_items]
  int64_t num_items;
};

// What updates did.
enum UpdateCount {
  kApplied = 0,          // += updates that were applied
  kStale = 1,            // += updates whose trajectory is gone
  kClamped = 2,          // += masses that were clamped
  kHighestPriority = 3,  // float32 bits of the highest priority seen
  kDrawable = 4,         // += items that got a mass, less those that lost it
  kNumUpdateCounts = 5
};

// Sets priorities in order, so that the last of equal items wins, and mends sums and minima.
void Prioritize(const Priorities& priorities, const Updates& updates, const int64_t* items,
                int64_t count, MassScale scale, int64_t* counts);

// out[row] = sum of reward over [row, end of its trajectory), summed in double from the end.
void SuffixSum(const void* reward, int64_t dtype, const int64_t* extents, int64_t num_extents,
               float* out);

// The n-step return, discount and number of steps of each resolution. powers[k] = gamma^k, k <= n.
struct NStep {
  const void* reward;
  int64_t dtype;
  const bool* terminated;
  const bool* truncated;  // null: never
  const double* powers;
  int64_t n;
};
void NStepReturn(const NStep& n_step, const Resolution* resolutions, int64_t count, float* returns,
                 float* discount, int64_t* steps);

// A sample whose rows travel between this node and a peer.
struct RowSample {
  int64_t peer, need, slot, num_steps, anchor;
  int64_t n_steps;  // of its n-step return
  int64_t goal;     // the row of its achieved goal, -1 for none
};
static_assert(sizeof(RowSample) == 56, "a sample is a row of 7 int64");

// Rows [anchor + first, anchor + end) of the columns of a group that a sample reads, or the row of
// its goal.
struct RowWindow {
  int64_t group, is_goal, first, end;
  int64_t follows;    // they lie behind the sample's n-step steps
  int64_t edge;       // the nearest row is read where the trajectory has none of them
  int64_t final_row;  // 1 if the columns have T+1 rows
};
static_assert(sizeof(RowWindow) == 56, "a window is a row of 7 int64");

// A column of steps that is read through the windows of a group, or (group -1) one of a row per
// trajectory that is read by the samples of `members`.
struct RowColumn {
  int64_t group, members, row_bytes;
};
static_assert(sizeof(RowColumn) == 24, "a column is a row of 3 int64");

struct RowLayout {
  const RowWindow* windows;  // by group, from 0 on
  int64_t num_windows;
  const bool* members;  // [windows and more, num_needs]: which needs have each
  int64_t num_needs;
  const RowColumn* columns;
  int64_t num_columns;
};

// The columns of a layout in memory.
struct RowColumns {
  char* const* data;        // of each column
  const int64_t* num_rows;  // that it has
};

// Where arriving rows go, and the numbers that the first ones of all arrivals have.
struct RowRoom {
  int64_t first_row, num_rows, first_slot, num_slots, base_row, base_slot;
};

enum class RowsTaken { kAll, kNoRoom, kShort, kOutside };

// Plans the rows of samples, each row once, and copies them from the columns of a store into
// messages, one behind the other, each from a multiple of 8 bytes on: a head, and the rows column
// by column. Sets the bytes of rows of each; copies nothing where `message` is too short. Returns
// false, and copies nothing, if a row lies outside its column.
bool PackRows(const RowSample* samples, int64_t count, const RowLayout& layout, const Slot* slots,
              const RowColumns& columns, const int64_t* heads, int64_t num_peers, int64_t* sizes,
              char* message, int64_t message_bytes);

// Plans the same rows from what the receiver knows, and copies them from each peer's message into
// the columns of arrivals, from the first row and slot of a room on. Sets the rows and slots that
// are needed, the bytes of rows of each message, and in the ring, at `which`, the slot of each
// sample and what is added to a step's number to find its row. Copies all rows, or none and says
// why: there is no room, a message is too short, the room lies outside the arrivals.
RowsTaken UnpackRows(const RowSample* samples, int64_t count, const RowLayout& layout,
                     const RowColumns& columns, const RowRoom& room, const int64_t* heads,
                     int64_t num_peers, char* const* messages, const int64_t* message_bytes,
                     const int64_t* which, Resolution* ring, int64_t* sizes, int64_t* needed);

// Where the draws of a cut go.
struct DrawRoutes {
  const int64_t* readers;  // [num_replicas, most]: nodes that read a replica's samples, then -1
  int64_t num_replicas, most;
  const int16_t* need_of;  // [num_nodes, num_replicas]: what is read there, -1 for nothing
  int64_t num_nodes, index;
  int64_t offset;        // of the cut's first sample among those of all tables
  bool takes_own;        // this node copies rows for itself as well
  const int64_t* steps;  // of the n-step return of each own record, or null
  int64_t words;         // of a packed resolution: 4, or 5 where steps travel
};

// The shard that each coordinate hits; which ones hit shard `index`, and where. Returns their
// number.
int64_t AssignDraws(const int64_t* coordinates, int64_t count, const int64_t* totals,
                    int64_t num_shards, int64_t index, int64_t* owner, int64_t* own,
                    int64_t* points);

// What other nodes need of this node's draws, by node: samples, and packed resolutions. `goals` are
// rows of achieved goals, or null. Returns their number.
int64_t SendDraws(const Resolution* records, const int64_t* own, const int64_t* goals,
                  int64_t count, const DrawRoutes& routes, RowSample* samples, int64_t* packed,
                  int64_t* ends);

// Puts packed resolutions of other nodes into the ring; the samples whose rows this node needs, and
// their indices in the cut. Returns their number.
int64_t TakeDraws(const int64_t* const* heard, const int64_t* owner, const int64_t* asked,
                  int64_t count, const DrawRoutes& routes, int64_t first, Resolution* ring,
                  int64_t* origins, RowSample* samples, int64_t* which);

// Puts this node's own resolutions into the ring; as TakeDraws those that it copies for itself.
int64_t PutDraws(const Resolution* records, const int64_t* own, int64_t count,
                 const DrawRoutes& routes, Resolution* ring, int64_t* origins, RowSample* samples,
                 int64_t* which);

// A report on its way to the node that holds its item.
struct PackedReport {
  int64_t handle;  // generation << 32 | slot, or the id where the reporter does not know the slot
  int64_t value;   // priority << 32 | anchor
  int64_t order;   // batches before the latest << 48 | sample number, or one of the last two by id
};
static_assert(sizeof(PackedReport) == 24, "a packed report is a row of 3 int64");

inline constexpr int64_t kNumberBits = 48;
inline constexpr int64_t kMostNumber = (int64_t{1} << kNumberBits) - 1;
inline constexpr int64_t kUnknownById = kMostNumber, kKnownById = kMostNumber - 1;
inline constexpr int64_t kAnySlot = (int64_t{1} << 32) - 1;  // in place of a slot that is not known
inline constexpr int64_t kMostBack = (1 << 16) - 1;
inline constexpr int64_t kById = int64_t{1} << 62;  // the number of a report by id

// Packs reports by shard, which stands above the 32 bits of their slot.
void PackReports(const Report* reports, int64_t count, int64_t latest, int64_t num_shards,
                 PackedReport* packed, int64_t* ends);

// The inverse, but for the shard; where the slot is not known: -1, the id in place of the
// generation.
void UnpackReports(const PackedReport* packed, int64_t count, int64_t latest, Report* reports);

// How one field is gathered from one column.
enum Source : int64_t {
  kStepRows = 0,
  kStepRowsPlusOne = 1,
  kTrajectoryRow = 2,
  kTimestep = 3,  // the step's number in its trajectory
  kPosition = 4   // its place in the window, also where that is padded
};

// Whether a source is computed: it has no column, and its field is int64.
constexpr bool IsComputed(int64_t source) { return source >= kTimestep; }

constexpr bool IsStepRow(int64_t source) { return source <= kStepRowsPlusOne; }

struct Field {
  int64_t source;  // enum Source
  Window window;
  Part part;             // of the window
  int64_t after_n_step;  // add the sample's number of n-step steps to the offset
  int64_t pad;           // enum Pad
  int64_t elements;      // of one row
  int64_t from, to;      // enum Dtype
  int64_t to_bytes;      // of one element
  double pad_value;      // for kPadEdge 0: of what is no sample there is no edge
  const void* column;
  const void* shift;  // [period] of the arithmetic type, or null
  const void* gain;
  int64_t period;  // elements after which shift and gain repeat: 1 or a multiple of `elements`
  void* out;       // [count, part.count, elements]
  bool* mask;      // [count, part.count], or null
};

// Gathers the samples [begin, end) of all fields. Returns the number of real rows.
int64_t Gather(const Field* fields, int64_t num_fields, const Resolution* resolutions,
               const int64_t* n_steps, int64_t begin, int64_t end);

}  // namespace gear::cpu
