// Gather: one launch for all fields of a batch, or several launches of some samples each, where
// blocks must be few and short. Every field has its own blocks, with a team of lanes for each
// window. A launch without conversions is a kernel of fewer registers, so that more windows are
// under way.
#include "common/launch_cuda.h"
#include "gather/gather_cuda.h"

namespace gear::cuda {
namespace {

inline constexpr int kMostFields = 16;            // of a launch
inline constexpr int64_t kMostSamples = 1 << 30;  // so that an index of samples is an int

// Bytes of a launch of few blocks: it ends after 0.1 to 0.2 ms at the 35 to 50 GB/s of PCIe 5, and
// then its multiprocessors are free for others. At least eight windows of any size: each may keep
// 16 KiB of reads under way, and the bus needs 75 KB.
inline constexpr int64_t kLaunchBytes = 6 << 20, kFewestSamples = 8;

// How the elements of a field get into the batch.
enum Kind : int { kComputes = 0, kCopies1, kCopies2, kCopies4, kCopies8, kConverts };

struct Task {
  Field field;
  int64_t held;  // rows of its column
  uint64_t pad;  // bits of the value that pads it
  int kind, team;
  bool is_plain;  // a window lies at its anchor, and all of it is written
  unsigned first_block, num_blocks;
};

struct Batch {
  Task tasks[kMostFields];
  int num_tasks;
  const Resolution* resolutions;
  const int64_t* n_steps;
  const int64_t* order;
  int count;        // of all samples
  int first, last;  // of the order, that this launch takes
  uint64_t* counters;
  uint64_t rows, bytes;  // that the tasks write
  Faults faults;
};
static_assert(sizeof(Batch) <= 4096, "parameters of a kernel hold 4 KiB on every device");

__device__ int SampleAt(const Batch& batch, int k) {
  if (batch.order == nullptr) return k;
  const int64_t sample = batch.order[k];
  batch.faults.Require(sample >= 0 && sample < batch.count, kGatherOrder, k);
  return static_cast<int>(sample);
}

__device__ Window WindowOf(const Batch& batch, const Field& field, int64_t sample) {
  Window window = field.window;
  if (field.follows) window.offset += batch.n_steps[sample];
  return window;
}

// Steps or places of windows: a thread for each. Returns the real ones.
__device__ uint64_t Compute(const Batch& batch, const Task& task, int64_t thread, int64_t threads) {
  const Field& field = task.field;
  const int64_t length = field.part.count;
  uint64_t real = 0;
  for (int64_t i = batch.first * length + thread; i < batch.last * length; i += threads) {
    const int64_t sample = SampleAt(batch, static_cast<int>(i / length)), t = i % length;
    const Resolution r = batch.resolutions[sample];
    const Span span =
        Cut(Bounds(WindowOf(batch, field, sample), r.anchor, r.num_steps), field.part);
    const bool is_real = t >= span.place && t < span.place + span.end - span.begin;
    const int64_t edge = t < span.place ? span.before : span.after;
    const int64_t step = is_real ? span.begin + t - span.place
                                 : (field.pad == kPadEdge ? edge : static_cast<int64_t>(task.pad));
    const int64_t to = sample * length + t;
    static_cast<int64_t*>(field.out)[to] =
        field.source == cpu::kPosition ? field.part.first + t : step;
    if (field.mask != nullptr) field.mask[to] = is_real;
    real += is_real;
  }
  return real;
}

// Calls `body` with the types of a conversion.
template <typename Body>
__device__ void WithTypes(const Field& field, const Body& body) {
  WithType(field.from, [&](auto from) {
    using From = decltype(from);
    WithTarget<From>(field.to, [&](auto to) { body(ConvertedElements<From, decltype(to)>{}); });
  });
}

// Pads first: the registers of padding need not be kept while the run is converted. The switch over
// types is inside each unit, so that there is one copy of the reading code; all lanes of a block
// have one field, so they do not diverge.
__device__ void Convert(const Task& task, const Read& read, Lane lane) {
  const Field& field = task.field;
  WithTypes(field,
            [&](auto elements) { PadWindow<decltype(elements)>(field, task.pad, read, lane); });
  const auto write = [&](uint4 unit, char* to, int first, int count, int scale) {
    WithTypes(field, [&](auto elements) {
      using Elements = decltype(elements);
      auto* elements_to = reinterpret_cast<typename Elements::To*>(to);
      Elements::Unit(field, unit, elements_to, first, count, scale);
    });
  };
  ConvertWindow(field, task.held, read, lane, write);
}

// Before the copy, as in Convert.
__device__ void PadCopied(const Task& task, const Read& read, Lane lane) {
  switch (task.kind) {  // only the size of an element matters
    case kCopies1:
      return PadWindow<SameElements<uint8_t>>(task.field, task.pad, read, lane);
    case kCopies2:
      return PadWindow<SameElements<uint16_t>>(task.field, task.pad, read, lane);
    case kCopies4:
      return PadWindow<SameElements<uint32_t>>(task.field, task.pad, read, lane);
    default:
      return PadWindow<SameElements<uint64_t>>(task.field, task.pad, read, lane);
  }
}

template <bool kHasConversions>
__device__ void Write(const Task& task, const Read& read, Lane lane) {
  if constexpr (kHasConversions) {
    if (task.kind == kConverts) return Convert(task, read, lane);
  }
  if (read.span.end - read.span.begin != task.field.part.count) PadCopied(task, read, lane);
  CopyWindow(task.field, task.held, read, lane);
}

// The real rows of a window. One that lies in its trajectory, as most do, needs no arithmetic of
// its edges.
__device__ Span SpanOf(const Batch& batch, const Task& task, int sample, int64_t anchor,
                       int64_t rows) {
  const Field& field = task.field;
  const int64_t begin = anchor + field.window.offset, end = begin + field.part.count;
  if (task.is_plain && begin >= 0 && end <= rows) return {begin, end, 0, begin, end - 1};
  return Cut(Bounds(WindowOf(batch, field, sample), anchor, rows), field.part);
}

// Pads all of a sample that is none: byte by byte, as it is rare.
__device__ void PadSample(const Task& task, int64_t sample, Lane lane) {
  const Field& field = task.field;
  const int64_t rows = field.part.count, bytes = rows * field.elements * field.to_bytes;
  char* out = static_cast<char*>(field.out) + sample * bytes;
  for (int64_t i = lane.index; i < bytes; i += lane.team)
    out[i] = static_cast<char>(task.pad >> ((i & (field.to_bytes - 1)) * 8));
  if (field.mask == nullptr) return;
  for (int64_t t = lane.index; t < rows; t += lane.team) field.mask[sample * rows + t] = false;
}

// What is read of a sample's record.
struct Record {
  int sample;
  int64_t first_row, num_steps, anchor;  // first_row: of a row of trajectories its slot
};

__device__ Record RecordOf(const Batch& batch, const Field& field, int sample) {
  const Resolution& r = batch.resolutions[sample];
  const bool is_single = field.source == cpu::kTrajectoryRow;
  return {sample, is_single ? r.slot : r.first_row, r.num_steps, r.anchor};
}

// Windows of a column: a team of lanes for each. The record of the next one is on its way to the
// cache while one is copied. Returns the real rows, in the first lanes.
template <bool kHasConversions>
__device__ unsigned Gather(const Batch& batch, const Task& task, int64_t thread, int64_t threads) {
  const Field& field = task.field;
  const Lane lane{static_cast<int>(threadIdx.x) & (task.team - 1), task.team};
  const int64_t length = field.part.count;
  const int bits = __ffs(task.team) - 1;  // a power of two
  const auto teams = static_cast<int>(threads >> bits);
  unsigned real = 0;  // a team has several windows only where there are many
  int k = batch.first + static_cast<int>(thread >> bits);
  for (; k < batch.last; k += teams) {
    const Record r = RecordOf(batch, field, SampleAt(batch, k));
    if (k + teams < batch.last) Prefetch(&batch.resolutions[SampleAt(batch, k + teams)]);
    if (r.num_steps == 0 && IsNoSample(batch.resolutions[r.sample])) {
      PadSample(task, r.sample, lane);
      continue;
    }
    Read read{r.sample, r.first_row, {0, 1, 0, 0, 0}};
    if (field.source != cpu::kTrajectoryRow) {
      batch.faults.Require(IsAnchored(r.num_steps, r.anchor), kGatherAnchor, r.sample);
      const int64_t held = r.num_steps + (field.source == cpu::kStepRowsPlusOne ? 1 : 0);
      read.span = SpanOf(batch, task, r.sample, r.anchor, held);
    }
    const Span& span = read.span;
    batch.faults.Require(IsInside(read.first_row, span, length, field.pad, task.held), kGatherRows,
                         r.sample);
    const int64_t rows = span.end - span.begin;
    if (field.mask != nullptr)
      for (int64_t t = lane.index; t < length; t += lane.team)
        field.mask[r.sample * length + t] = t >= span.place && t < span.place + rows;
    if (lane.index == 0) real += static_cast<unsigned>(rows);
    Write<kHasConversions>(task, read, lane);
  }
  return real;
}

// Of a multiprocessor: as many as keep its memory busy, in registers enough for every pair of types
// (80), or for copies (64).
constexpr int BlocksOf(bool has_conversions) { return has_conversions ? 3 : 4; }

template <bool kHasConversions>
__global__ void __launch_bounds__(kThreads, BlocksOf(kHasConversions))
    GatherKernel(const __grid_constant__ Batch batch) {
  __shared__ uint64_t of_block;  // one addition to a counter a block: all go to one address
  if (threadIdx.x == 0) of_block = 0;
  __syncthreads();
  int t = 0;
  while (t + 1 < batch.num_tasks && blockIdx.x >= batch.tasks[t + 1].first_block) ++t;
  const Task& task = batch.tasks[t];
  const int64_t thread = int64_t{blockIdx.x - task.first_block} * kThreads + threadIdx.x;
  const int64_t threads = int64_t{task.num_blocks} * kThreads;
  const uint64_t real = SumOfWarp(
      task.kind == kComputes ? Compute(batch, task, thread, threads)
                             : uint64_t{Gather<kHasConversions>(batch, task, thread, threads)});
  if (threadIdx.x % kWarp == 0 && real != 0) AtomicAdd(&of_block, real);
  __syncthreads();
  if (threadIdx.x == 0 && of_block != 0) AtomicAdd(batch.counters, of_block);
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    batch.counters[1] += batch.rows;
    batch.counters[2] += batch.bytes;
  }
}

// The bits of the value that pads a field.
uint64_t PadOf(const Field& field) {
  return WithType(field.to, [&](auto one) {
    const auto value = Store<decltype(one)>(field.pad_value == 0 ? 0.0 : field.pad_value);
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof value);
    return bits;
  });
}

int KindOf(const Field& field) {
  if (cpu::IsComputed(field.source)) return kComputes;
  if (field.from != field.to || field.gain != nullptr) return kConverts;
  const int64_t bytes = field.to_bytes;
  return bytes == 1 ? kCopies1 : bytes == 2 ? kCopies2 : bytes == 4 ? kCopies4 : kCopies8;
}

// Bytes that a sample's window moves: those read of its column, or those written if none are read.
int64_t BytesOf(const Field& field) {
  const int64_t each = cpu::IsComputed(field.source) ? field.to_bytes : SizeOf(field.from);
  return field.part.count * field.elements * each;
}

int64_t BytesOf(const Field* fields, int num_fields) {
  int64_t bytes = 0;
  for (int f = 0; f < num_fields; ++f) bytes += BytesOf(fields[f]);
  return bytes;
}

Task TaskOf(const Field& field, int64_t held) {
  const int kind = KindOf(field);
  const int64_t elements = field.part.count * field.elements;
  if (Max(elements, field.period) > kMostElements)
    throw std::runtime_error("gear: a window must have fewer than 2^31 elements");
  const int64_t bytes = BytesOf(field);
  const int team = kind == kConverts ? TeamOf(bytes, 32, kThreads) : TeamOfCopy(bytes, kThreads);
  const bool is_plain =
      !field.follows && field.part.first == 0 && field.part.count == field.window.length;
  return {field, held, PadOf(field), kind, team, is_plain, 0, 0};
}

// Samples of a launch: all, or those of about kLaunchBytes where blocks are to be few. Launches are
// of about equal size then.
int64_t SamplesOf(int64_t count, int64_t bytes, int64_t most_blocks) {
  if (most_blocks == 0) return count;
  const int64_t most = Max(kLaunchBytes / Max<int64_t>(bytes, 1), kFewestSamples);
  const int64_t launches = (count + most - 1) / most;
  return (count + launches - 1) / launches;
}

// Most blocks of a field: one, and its share of the others by the bytes that it moves.
int64_t ShareOf(int64_t bytes, int64_t all_bytes, int64_t most_blocks, int num_fields) {
  const auto others = static_cast<double>(Max<int64_t>(most_blocks - num_fields, 0));
  const double share = static_cast<double>(bytes) / static_cast<double>(Max<int64_t>(all_bytes, 1));
  return 1 + static_cast<int64_t>(others * share);
}

// Launches the samples [batch->first, batch->last) of the order.
void LaunchBatch(Batch* batch, int64_t bytes, int64_t most_blocks, void* stream) {
  const int64_t samples = batch->last - batch->first;
  unsigned blocks = 0;
  bool has_conversions = false;
  batch->rows = batch->bytes = 0;
  for (int t = 0; t < batch->num_tasks; ++t) {
    Task& task = batch->tasks[t];
    const Field& field = task.field;
    has_conversions |= task.kind == kConverts;
    task.first_block = blocks;
    task.num_blocks = Blocks(samples * (task.kind == kComputes ? field.part.count : task.team));
    if (most_blocks > 0) {
      const int64_t most = ShareOf(BytesOf(field), bytes, most_blocks, batch->num_tasks);
      task.num_blocks = static_cast<unsigned>(Min<int64_t>(task.num_blocks, most));
    }
    blocks += task.num_blocks;
    batch->rows += static_cast<uint64_t>(samples * field.part.count);
    batch->bytes +=
        static_cast<uint64_t>(samples * field.part.count * field.elements * field.to_bytes);
  }
  const auto kernel = has_conversions ? GatherKernel<true> : GatherKernel<false>;
  Launch("Gather", kernel, blocks, kThreads, stream, *batch);
}

}  // namespace

void Gather(const Field* fields, const int64_t* held, int64_t num_fields,
            const Resolution* resolutions, const int64_t* n_steps, const int64_t* order,
            int64_t count, int64_t most_blocks, int64_t* counters, void* stream) {
  if (count == 0) return;
  if (count > kMostSamples) throw std::runtime_error("gear: a gather must have fewer samples");
  for (int64_t first = 0; first < num_fields; first += kMostFields) {
    Batch batch{};
    batch.num_tasks = static_cast<int>(Min<int64_t>(num_fields - first, kMostFields));
    batch.resolutions = resolutions;
    batch.n_steps = n_steps;
    batch.order = order;
    batch.count = static_cast<int>(count);
    batch.counters = reinterpret_cast<uint64_t*>(counters);
    batch.faults = FaultsOfProcess();
    for (int t = 0; t < batch.num_tasks; ++t)
      batch.tasks[t] = TaskOf(fields[first + t], held[first + t]);
    const int64_t bytes = BytesOf(fields + first, batch.num_tasks);
    const int64_t samples = SamplesOf(count, bytes, most_blocks);
    for (; batch.first < count; batch.first = batch.last) {
      batch.last = static_cast<int>(Min(batch.first + samples, count));
      LaunchBatch(&batch, bytes, most_blocks, stream);
    }
  }
}

}  // namespace gear::cuda
