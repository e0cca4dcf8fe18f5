// Gathers windows of columns into the tensors of a batch, and whole trajectories into packs.
#pragma once
#include <cstdint>

#include "common/slot.h"
#include "common/window.h"

namespace gear::cpu {

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

// What a window is placed after, besides the anchor: nothing, the sample's n-step steps, or, in
// place of the anchor, the step of its goal (on the host; of a sample without one nothing is
// written).
enum Follows : int64_t { kAnchor = 0, kNStep = 1, kGoal = 2 };

struct Field {
  int64_t source;  // enum Source
  Window window;
  Part part;         // of the window
  int64_t follows;   // enum Follows; `n_steps` are what is added to the anchor
  int64_t pad;       // enum Pad
  int64_t elements;  // of one row
  int64_t from, to;  // enum Dtype
  int64_t to_bytes;  // of one element
  double pad_value;  // 0 for kPadEdge: a record that is no sample has no edge
  const void* column;
  const void* shift;  // [period], double, or null
  const void* gain;
  int64_t period;  // elements after which shift and gain repeat: 1 or a multiple of `elements`
  void* out;       // [count, part.count, elements]
  bool* mask;      // [count, part.count], or null
};

// Gathers the samples [begin, end) of all fields. `batch`: samples that all threads together
// gather; 0: these. Returns the number of real rows.
int64_t Gather(const Field* fields, int64_t num_fields, const Resolution* resolutions,
               const int64_t* n_steps, int64_t begin, int64_t end, int64_t batch = 0);

// Writes the rows [first, first + rows) of a pack: rows of whole trajectories without padding
// between them. Trajectory i lies at [places[i], places[i] + num_steps). A place holds the
// trajectory's step that is `window.offset` later; where there is none, the pad value. Places of no
// trajectory are not written. Field::out is [rows, elements].
void Pack(const Field* fields, int64_t num_fields, const Resolution* resolutions,
          const int64_t* places, int64_t count, int64_t first, int64_t rows);

}  // namespace gear::cpu

namespace gear::cuda {

using cpu::Field;

// Gathers all samples of all fields, in launches of up to 16 fields. `held`: rows of each column.
// `order`: the samples in the order of the gather, or null; each is in it once.
// `most_blocks`: of a launch; its fields share them by their bytes, with one each at least, and
// launches are short, for some samples each. 0: as many as there is work for, for all samples at
// once. counters += real rows, rows, bytes.
void Gather(const Field* fields, const int64_t* held, int64_t num_fields,
            const Resolution* resolutions, const int64_t* n_steps, const int64_t* order,
            int64_t count, int64_t most_blocks, int64_t* counters, void* stream);

}  // namespace gear::cuda
