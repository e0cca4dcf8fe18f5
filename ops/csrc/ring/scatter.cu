// Rows of trajectories, written to their places: a warp for each trajectory and column.
#include "common/copy_cuda.h"
#include "common/launch_cuda.h"
#include "gather/gather.h"
#include "ring/ring.h"

namespace gear::cuda {
namespace {

constexpr int64_t kMostColumns = 16;  // of one launch

struct Columns {
  ScatterColumn at[kMostColumns];
};

__global__ void ScatterKernel(const Columns columns, int64_t num_columns,
                              const int64_t* __restrict__ placed, int64_t place_words,
                              int64_t count, const Faults faults) {
  const Lane lane{static_cast<int>(threadIdx.x) % kWarp, kWarp};
  for (int64_t i = GlobalThread() / kWarp; i < count * num_columns; i += GlobalThreads() / kWarp) {
    const int64_t* place = placed + i / num_columns * place_words;
    const ScatterColumn& column = columns.at[i % num_columns];
    if (place[0] < 0) continue;
    const bool is_single = column.source == cpu::kTrajectoryRow;
    const int64_t more = column.source == cpu::kStepRowsPlusOne ? 1 : 0;
    const int64_t rows = is_single ? 1 : place[2] + more, first = is_single ? place[0] : place[1];
    faults.Require(
        place[2] >= 0 && rows <= column.most_rows && first >= 0 && first <= column.num_rows - rows,
        kScatterPlace, i / num_columns);
    const int64_t own = column.most_rows * column.row_bytes;
    CopyBytes(column.values + i / num_columns * own, column.values + count * own,
              column.rows + first * column.row_bytes, rows * column.row_bytes, lane);
  }
}

}  // namespace

void Scatter(const ScatterColumn* columns, int64_t num_columns, const int64_t* placed,
             int64_t place_words, int64_t count, void* stream) {
  if (count == 0) return;
  for (int64_t first = 0; first < num_columns; first += kMostColumns) {
    const int64_t now = Min(num_columns - first, kMostColumns);
    Columns part{};
    for (int64_t c = 0; c < now; ++c) {
      part.at[c] = columns[first + c];
      if (part.at[c].most_rows * part.at[c].row_bytes / kVectorBytes > kMostVectors)
        throw std::runtime_error("gear: rows of a trajectory in a column must be below 32 GiB");
    }
    Launch("Scatter", ScatterKernel, Blocks(count * now * kWarp), kThreads, stream, part, now,
           placed, place_words, count, FaultsOfProcess());
  }
}

}  // namespace gear::cuda
