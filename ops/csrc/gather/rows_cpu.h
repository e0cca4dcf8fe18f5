// Copies, conversions and padding of the rows of one window, on the host.
#pragma once
#include <cstdint>
#include <cstring>
#include <type_traits>
#if defined(__AVX__)
#include <immintrin.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "common/convert.h"
#include "gather/gather.h"

namespace gear::cpu {

// (x - shift) * gain over whole rows; shift and gain repeat every `period` elements.
template <typename From, typename To>
void Convert(const From* from, To* to, int64_t count, const Field& field) {
  using C = std::conditional_t<kNeedsDouble<From> || kNeedsDouble<To>, double, float>;
  const auto* shift = static_cast<const double*>(field.shift);
  const auto* gain = static_cast<const double*>(field.gain);
  if constexpr (std::is_integral_v<From> && std::is_integral_v<To>) {
    if (gain == nullptr) {  // to a wider type, exact: a loop that every instruction set vectorises
      for (int64_t i = 0; i < count; ++i) to[i] = static_cast<To>(from[i]);
      return;
    }
  }
  if (gain == nullptr) {
    for (int64_t i = 0; i < count; ++i) to[i] = Store<To>(Load<C>(from[i]));
  } else if (field.period == 1) {
    const double s = shift[0], g = gain[0];
    for (int64_t i = 0; i < count; ++i) to[i] = Store<To>((Load<double>(from[i]) - s) * g);
  } else {
    for (int64_t done = 0; done < count; done += field.period) {
      const int64_t n = Min(field.period, count - done);
      for (int64_t i = 0; i < n; ++i)
        to[done + i] = Store<To>((Load<double>(from[done + i]) - shift[i]) * gain[i]);
    }
  }
}

template <typename To>
void FillValue(To* to, int64_t count, double value) {
  const To x = Store<To>(value);
  for (int64_t i = 0; i < count; ++i) to[i] = x;
}

// The shortest run that is worth a store past the caches. Narrow stores lose on short ones.
#if defined(__AVX__)
constexpr int64_t kLeastStreamedRun = 4096;
#else
constexpr int64_t kLeastStreamedRun = 16384;
#endif

// Copies bytes past the caches where the machine can: a store that misses would first read its
// line. EndStreaming comes before anyone reads them. Prefetches in the loop would take part of its
// time: the processor's own are early enough.
inline void CopyStreaming(const char* from, char* to, int64_t bytes) {
#if defined(__SSE2__)
  constexpr int64_t kLine = 64;
  const int64_t head = Min(-reinterpret_cast<intptr_t>(to) & (kLine - 1), bytes);
  std::memcpy(to, from, static_cast<size_t>(head));
  int64_t at = head;
  for (; at + kLine <= bytes; at += kLine) {
#if defined(__AVX__)
    const auto* source = reinterpret_cast<const __m256i*>(from + at);
    auto* target = reinterpret_cast<__m256i*>(to + at);
    const __m256i low = _mm256_loadu_si256(source), high = _mm256_loadu_si256(source + 1);
    _mm256_stream_si256(target, low);
    _mm256_stream_si256(target + 1, high);
#else
    constexpr int64_t kUnits = kLine / sizeof(__m128i);
    __m128i line[kUnits];
    std::memcpy(line, from + at, kLine);
    for (int64_t i = 0; i < kUnits; ++i)
      _mm_stream_si128(reinterpret_cast<__m128i*>(to + at) + i, line[i]);
#endif
  }
  std::memcpy(to + at, from + at, static_cast<size_t>(bytes - at));
#else
  std::memcpy(to, from, static_cast<size_t>(bytes));
#endif
}

inline void EndStreaming() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

// Copies whole rows unchanged.
struct CopyRows {
  static void Run(const void* from, void* to, int64_t rows, const Field& field) {
    std::memcpy(to, from, static_cast<size_t>(rows * field.elements * field.to_bytes));
  }
};

// The same past the caches.
struct StreamRows {
  static void Run(const void* from, void* to, int64_t rows, const Field& field) {
    CopyStreaming(static_cast<const char*>(from), static_cast<char*>(to),
                  rows * field.elements * field.to_bytes);
  }
};

template <typename From, typename To>
struct ConvertRows {
  static void Run(const void* from, void* to, int64_t rows, const Field& field) {
    Convert(static_cast<const From*>(from), static_cast<To*>(to), rows * field.elements, field);
  }
};

// Fills `count` rows at `to` with padding.
template <typename To, typename Rows>
void PadRows(const Field& field, const char* edge, char* to, int64_t count) {
  const int64_t row_bytes = field.elements * field.to_bytes;
  if (field.pad == kPadEdge) {
    for (int64_t i = 0; i < count; ++i) Rows::Run(edge, to + i * row_bytes, 1, field);
  } else if (field.pad_value == 0) {
    std::memset(to, 0, static_cast<size_t>(count * row_bytes));
  } else {
    FillValue(reinterpret_cast<To*>(to), count * field.elements, field.pad_value);
  }
}

inline bool IsCopy(const Field& field) {
  return !IsComputed(field.source) && field.from == field.to && field.gain == nullptr;
}

// Calls visit(to, rows) with an element of the type that a field is written in, and how its rows
// get there.
template <typename Visit>
auto WithRows(const Field& field, const Visit& visit) {
  return WithType(field.from, [&](auto from) {
    using From = decltype(from);
    if (IsCopy(field)) return visit(from, CopyRows{});
    return WithTarget<From>(field.to,
                            [&](auto to) { return visit(to, ConvertRows<From, decltype(to)>{}); });
  });
}

}  // namespace gear::cpu
