// Collection with a change of type or scale: one kernel for each pair of types.
#include "cuda/gather.h"

namespace gear::cuda {
namespace {

struct Arguments {
  const Field& field;
  int64_t held;
  const Resolution* resolutions;
  const int64_t* n_steps;
  int64_t count;
  int64_t* counters;
  void* stream;
};

template <typename From, typename To>
void Launch(const Arguments& a) {
  const To pad = Store<To, double>::From(a.field.pad_value == 0 ? 0.0 : a.field.pad_value);
  LaunchGather<ConvertRows<From, To>>(a.field, a.held, a.resolutions, a.n_steps, a.count, pad,
                                      a.counters, a.stream);
}

// The pairs that IsConversion admits; others never come here.
template <typename From>
void LaunchFrom(const Arguments& a) {
  if constexpr (std::is_integral_v<From> && sizeof(From) <= 4) {
    if (a.field.to == kInt64) return Launch<From, int64_t>(a);
  }
  if constexpr (std::is_integral_v<From> && sizeof(From) <= 2) {
    if (a.field.to == kInt32) return Launch<From, int32_t>(a);
  }
  switch (a.field.to) {
    case kFloat16:
      return Launch<From, Half>(a);
    case kBfloat16:
      return Launch<From, Bfloat>(a);
    case kFloat32:
      return Launch<From, float>(a);
    case kFloat64:
      return Launch<From, double>(a);
  }
}

}  // namespace

void GatherConverted(const Field& field, int64_t held, const Resolution* resolutions,
                     const int64_t* n_steps, int64_t count, int64_t* counters, void* stream) {
  const Arguments a{field, held, resolutions, n_steps, count, counters, stream};
  switch (field.from) {
    case kBool:
    case kUint8:
      return LaunchFrom<uint8_t>(a);
    case kInt8:
      return LaunchFrom<int8_t>(a);
    case kInt16:
      return LaunchFrom<int16_t>(a);
    case kInt32:
      return LaunchFrom<int32_t>(a);
    case kInt64:
      return LaunchFrom<int64_t>(a);
    case kFloat16:
      return LaunchFrom<Half>(a);
    case kBfloat16:
      return LaunchFrom<Bfloat>(a);
    case kFloat32:
      return LaunchFrom<float>(a);
    case kFloat64:
      return LaunchFrom<double>(a);
  }
}

}  // namespace gear::cuda
