// Collection of rows as they are, of time steps and of positions.
#include "cuda/gather.h"

namespace gear::cuda {
namespace {

__global__ void ComputedKernel(const Field field, const Resolution* __restrict__ resolutions,
                               const int64_t* __restrict__ n_steps, int64_t count, int64_t pad,
                               uint64_t* counters) {
  const int64_t length = field.part.count;
  uint64_t real = 0;
  for (int64_t i = GlobalThread(); i < count * length; i += GlobalThreads()) {
    const int64_t sample = i / length, t = i % length;
    const Resolution r = resolutions[sample];
    Window window = field.window;
    if (field.after_n_step) window.offset += n_steps[sample];
    const Span span = Cut(Bounds(window, r.anchor, r.num_steps), field.part);
    const bool is_real = t >= span.place && t < span.place + span.end - span.begin;
    const int64_t edge = t < span.place ? span.before : span.after;
    const int64_t step =
        is_real ? span.begin + t - span.place : (field.pad == kPadEdge ? edge : pad);
    static_cast<int64_t*>(field.out)[i] =
        field.source == cpu::kPosition ? field.part.first + t : step;
    if (field.mask != nullptr) field.mask[i] = is_real;
    real += is_real;
  }
  if (real != 0) AtomicAdd(counters, real);
}

__global__ void AddKernel(int64_t* counters, int64_t rows, int64_t bytes) {
  counters[1] += rows;
  counters[2] += bytes;
}

template <typename T>
T PadOf(const Field& field) {
  return Store<T, double>::From(field.pad_value == 0 ? 0.0 : field.pad_value);
}

}  // namespace

void Gather(const Field& field, int64_t held, const Resolution* resolutions, const int64_t* n_steps,
            int64_t count, int64_t* counters, void* stream) {
  if (count == 0) return;
  if (cpu::IsComputed(field.source)) {
    ComputedKernel<<<Blocks(count * field.part.count), kThreads, 0, AsStream(stream)>>>(
        field, resolutions, n_steps, count, PadOf<int64_t>(field),
        reinterpret_cast<uint64_t*>(counters));
    return CheckLaunch("Gather");
  }
  if (field.from != field.to || field.gain != nullptr)
    return GatherConverted(field, held, resolutions, n_steps, count, counters, stream);
  // Only the size of an element matters; its padding is given as bits.
  const auto launch = [&](auto rows, auto pad) {
    LaunchGather<decltype(rows)>(field, held, resolutions, n_steps, count, pad, counters, stream);
  };
  switch (field.to) {
    case kBool:
    case kUint8:
      return launch(CopyRows<uint8_t>{}, PadOf<uint8_t>(field));
    case kInt8:
      return launch(CopyRows<uint8_t>{}, BitCast<uint8_t>(PadOf<int8_t>(field)));
    case kInt16:
      return launch(CopyRows<uint16_t>{}, BitCast<uint16_t>(PadOf<int16_t>(field)));
    case kInt32:
      return launch(CopyRows<uint32_t>{}, BitCast<uint32_t>(PadOf<int32_t>(field)));
    case kInt64:
      return launch(CopyRows<uint64_t>{}, BitCast<uint64_t>(PadOf<int64_t>(field)));
    case kFloat16:
      return launch(CopyRows<uint16_t>{}, PadOf<Half>(field).bits);
    case kBfloat16:
      return launch(CopyRows<uint16_t>{}, PadOf<Bfloat>(field).bits);
    case kFloat32:
      return launch(CopyRows<uint32_t>{}, BitCast<uint32_t>(PadOf<float>(field)));
    default:
      return launch(CopyRows<uint64_t>{}, BitCast<uint64_t>(PadOf<double>(field)));
  }
}

void AddToCounters(int64_t* counters, int64_t rows, int64_t bytes, void* stream) {
  AddKernel<<<1, 1, 0, AsStream(stream)>>>(counters, rows, bytes);
  CheckLaunch("AddToCounters");
}

}  // namespace gear::cuda
