// Collection: one launch for all fields of a batch. Every field has blocks of its own, and in them
// a team of lanes for each window.
#include "cuda/gather.h"

#include "cuda/launch.h"

namespace gear::cuda {
namespace {

inline constexpr int kMostFields = 16;  // of a launch

// How the elements of a field get into the batch.
enum Kind : int { kComputes = 0, kCopies1, kCopies2, kCopies4, kCopies8, kConverts };

struct Task {
  Field field;
  int64_t held;  // rows of its column
  uint64_t pad;  // bits of the value that pads it
  int kind, team;
  unsigned first_block, num_blocks;
};

struct Batch {
  Task tasks[kMostFields];
  int num_tasks;
  const Resolution* resolutions;
  const int64_t* n_steps;
  const int64_t* order;
  int64_t count;
  uint64_t* counters;
  uint64_t rows, bytes;  // that the tasks write
};
static_assert(sizeof(Batch) <= 4096, "parameters of a kernel hold 4 KiB on every device");

__device__ int64_t SampleAt(const Batch& batch, int64_t k) {
  if (batch.order == nullptr) return k;
  const int64_t sample = batch.order[k];
  Require(sample >= 0 && sample < batch.count);
  return sample;
}

__device__ Window WindowOf(const Batch& batch, const Field& field, int64_t sample) {
  Window window = field.window;
  if (field.after_n_step) window.offset += batch.n_steps[sample];
  return window;
}

// Steps or places of windows: a thread for each. Returns the real ones.
__device__ uint64_t Compute(const Batch& batch, const Task& task, int64_t thread, int64_t threads) {
  const Field& field = task.field;
  const int64_t length = field.part.count;
  uint64_t real = 0;
  for (int64_t i = thread; i < batch.count * length; i += threads) {
    const int64_t sample = SampleAt(batch, i / length), t = i % length;
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

// The pairs that IsConversion admits; others never come here.
template <typename From>
__device__ void ConvertFrom(const Task& task, const Read& read, Lane lane) {
  const auto write = [&](auto elements) {
    ConvertWindow<decltype(elements)>(task.field, read, lane);
    PadWindow<decltype(elements)>(task.field, task.pad, read, lane);
  };
  if constexpr (std::is_integral_v<From> && sizeof(From) <= 4) {
    if (task.field.to == kInt64) return write(ConvertedElements<From, int64_t>{});
  }
  if constexpr (std::is_integral_v<From> && sizeof(From) <= 2) {
    if (task.field.to == kInt32) return write(ConvertedElements<From, int32_t>{});
  }
  switch (task.field.to) {
    case kFloat16:
      return write(ConvertedElements<From, Half>{});
    case kBfloat16:
      return write(ConvertedElements<From, Bfloat>{});
    case kFloat32:
      return write(ConvertedElements<From, float>{});
    case kFloat64:
      return write(ConvertedElements<From, double>{});
  }
}

__device__ void Convert(const Task& task, const Read& read, Lane lane) {
  switch (task.field.from) {
    case kBool:
    case kUint8:
      return ConvertFrom<uint8_t>(task, read, lane);
    case kInt8:
      return ConvertFrom<int8_t>(task, read, lane);
    case kInt16:
      return ConvertFrom<int16_t>(task, read, lane);
    case kInt32:
      return ConvertFrom<int32_t>(task, read, lane);
    case kInt64:
      return ConvertFrom<int64_t>(task, read, lane);
    case kFloat16:
      return ConvertFrom<Half>(task, read, lane);
    case kBfloat16:
      return ConvertFrom<Bfloat>(task, read, lane);
    case kFloat32:
      return ConvertFrom<float>(task, read, lane);
    case kFloat64:
      return ConvertFrom<double>(task, read, lane);
  }
}

__device__ void Write(const Task& task, const Read& read, Lane lane) {
  if (task.kind == kConverts) return Convert(task, read, lane);
  CopyWindow(task.field, task.held, read, lane);
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

// Pads all of a sample that is none: byte by byte, as it is rare.
__device__ void PadSample(const Task& task, int64_t sample, Lane lane) {
  const Field& field = task.field;
  const int64_t rows = field.part.count, bytes = rows * field.elements * field.to_bytes;
  char* out = static_cast<char*>(field.out) + sample * bytes;
  for (int64_t i = lane.index; i < bytes; i += lane.team)
    out[i] = static_cast<char>(task.pad >> (i % field.to_bytes * 8));
  if (field.mask == nullptr) return;
  for (int64_t t = lane.index; t < rows; t += lane.team) field.mask[sample * rows + t] = false;
}

// Windows of a column: a team of lanes for each. Returns the real rows, in the first lanes.
__device__ uint64_t Collect(const Batch& batch, const Task& task, int64_t thread, int64_t threads) {
  const Field& field = task.field;
  const Lane lane{static_cast<int>(threadIdx.x) & (task.team - 1), task.team};
  const int64_t length = field.part.count;
  uint64_t real = 0;
  for (int64_t k = thread / task.team; k < batch.count; k += threads / task.team) {
    const int64_t sample = SampleAt(batch, k);
    const Resolution r = batch.resolutions[sample];
    if (IsNoSample(r)) {
      PadSample(task, sample, lane);
      continue;
    }
    Read read{sample, r.slot, {0, 1, 0, 0, 0}};
    if (field.source != cpu::kTrajectoryRow) {
      Require(IsAnchored(r));
      const int64_t held = r.num_steps + (field.source == cpu::kStepRowsPlusOne ? 1 : 0);
      read.span = Cut(Bounds(WindowOf(batch, field, sample), r.anchor, held), field.part);
      read.first_row = r.first_row;
    }
    const Span& span = read.span;
    Require(IsInside(read.first_row, span, length, field.pad, task.held));
    Write(task, read, lane);
    const int64_t rows = span.end - span.begin;
    if (field.mask != nullptr)
      for (int64_t t = lane.index; t < length; t += lane.team)
        field.mask[sample * length + t] = t >= span.place && t < span.place + rows;
    if (lane.index == 0) real += static_cast<uint64_t>(rows);
  }
  return real;
}

// Three blocks a multiprocessor: as many as keep its memory busy, in registers enough for every
// pair.
__global__ void __launch_bounds__(kThreads, 3) GatherKernel(const __grid_constant__ Batch batch) {
  int t = 0;
  while (t + 1 < batch.num_tasks && blockIdx.x >= batch.tasks[t + 1].first_block) ++t;
  const Task& task = batch.tasks[t];
  const int64_t thread = int64_t{blockIdx.x - task.first_block} * kThreads + threadIdx.x;
  const int64_t threads = int64_t{task.num_blocks} * kThreads;
  const uint64_t real = SumOfWarp(task.kind == kComputes ? Compute(batch, task, thread, threads)
                                                         : Collect(batch, task, thread, threads));
  if (threadIdx.x % kWarp == 0 && real != 0) AtomicAdd(batch.counters, real);
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    batch.counters[1] += batch.rows;
    batch.counters[2] += batch.bytes;
  }
}

template <typename T>
uint64_t PadBits(const Field& field) {
  const T value = Store<T, double>::From(field.pad_value == 0 ? 0.0 : field.pad_value);
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof value);
  return bits;
}

uint64_t PadOf(const Field& field) {
  switch (field.to) {
    case kBool:
    case kUint8:
      return PadBits<uint8_t>(field);
    case kInt8:
      return PadBits<int8_t>(field);
    case kInt16:
      return PadBits<int16_t>(field);
    case kInt32:
      return PadBits<int32_t>(field);
    case kInt64:
      return PadBits<int64_t>(field);
    case kFloat16:
      return PadBits<Half>(field);
    case kBfloat16:
      return PadBits<Bfloat>(field);
    case kFloat32:
      return PadBits<float>(field);
    default:
      return PadBits<double>(field);
  }
}

int KindOf(const Field& field) {
  if (cpu::IsComputed(field.source)) return kComputes;
  if (field.from != field.to || field.gain != nullptr) return kConverts;
  const int64_t bytes = field.to_bytes;
  return bytes == 1 ? kCopies1 : bytes == 2 ? kCopies2 : bytes == 4 ? kCopies4 : kCopies8;
}

Task TaskOf(const Field& field, int64_t held, int64_t count, int64_t most_blocks,
            unsigned first_block) {
  const int kind = KindOf(field);
  const int team = TeamOf(field.part.count * field.elements * field.to_bytes, kThreads);
  const int64_t threads = count * (kind == kComputes ? field.part.count : team);
  unsigned blocks = Blocks(threads);
  if (most_blocks > 0) blocks = static_cast<unsigned>(Min(int64_t{blocks}, most_blocks));
  return {field, held, PadOf(field), kind, team, first_block, blocks};
}

}  // namespace

void Gather(const Field* fields, const int64_t* held, int64_t num_fields,
            const Resolution* resolutions, const int64_t* n_steps, const int64_t* order,
            int64_t count, int64_t most_blocks, int64_t* counters, void* stream) {
  if (count == 0) return;
  for (int64_t first = 0; first < num_fields; first += kMostFields) {
    Batch batch{};
    batch.num_tasks = static_cast<int>(Min<int64_t>(num_fields - first, kMostFields));
    batch.resolutions = resolutions;
    batch.n_steps = n_steps;
    batch.order = order;
    batch.count = count;
    batch.counters = reinterpret_cast<uint64_t*>(counters);
    unsigned blocks = 0;
    for (int t = 0; t < batch.num_tasks; ++t) {
      const Field& field = fields[first + t];
      batch.tasks[t] = TaskOf(field, held[first + t], count, most_blocks, blocks);
      blocks += batch.tasks[t].num_blocks;
      batch.rows += static_cast<uint64_t>(count * field.part.count);
      batch.bytes +=
          static_cast<uint64_t>(count * field.part.count * field.elements * field.to_bytes);
    }
    GatherKernel<<<blocks, kThreads, 0, AsStream(stream)>>>(batch);
    CheckLaunch("Gather");
  }
}

}  // namespace gear::cuda
