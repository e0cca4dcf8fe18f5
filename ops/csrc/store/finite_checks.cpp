// Finds NaN and infinities by their exponents, in loops that the compiler vectorises.
#include "store/finite_checks.h"

#include <algorithm>
#include <cstring>

namespace gear::cpu {

namespace {

// Adding the lowest exponent bit to the exponent carries into the sign bit if and only if all its
// bits are ones. So the loop has neither branches nor comparisons, in integers of the element's own
// width: the compiler vectorises it for every instruction set.
template <typename Bits>
bool NoneIsAllOnes(const char* values, int64_t bytes, Bits exponent) {
  const Bits lowest = exponent & static_cast<Bits>(~exponent + 1);
  const int64_t count = bytes / static_cast<int64_t>(sizeof(Bits));
  Bits carried = 0;
  for (int64_t i = 0; i < count; ++i) {
    Bits bits;  // the values of a caller may be unaligned
    std::memcpy(&bits, values + i * static_cast<int64_t>(sizeof(Bits)), sizeof(Bits));
    carried |= static_cast<Bits>((bits & exponent) + lowest);
  }
  return (carried >> (8 * sizeof(Bits) - 1)) == 0;
}

}  // namespace

bool AllFinite(const void* values, int64_t bytes, Exponents type) {
  const auto* from = static_cast<const char*>(values);
  switch (type) {
    case Exponents::kFloat16:
      return NoneIsAllOnes<uint16_t>(from, bytes, 0x7c00);
    case Exponents::kBFloat16:
      return NoneIsAllOnes<uint16_t>(from, bytes, 0x7f80);
    case Exponents::kFloat32:
      return NoneIsAllOnes<uint32_t>(from, bytes, 0x7f800000);
    case Exponents::kFloat64:
      return NoneIsAllOnes<uint64_t>(from, bytes, 0x7ff0000000000000);
    case Exponents::kUnchecked:
      break;
  }
  return true;
}

bool CopyFinite(void* to, const void* from, int64_t bytes, Exponents type) {
  if (type == Exponents::kUnchecked) {
    std::memcpy(to, from, static_cast<size_t>(bytes));
    return true;
  }
  constexpr int64_t kBlock = 8192;  // a block and its copy fit into the nearest cache
  bool finite = true;
  for (int64_t at = 0; at < bytes; at += kBlock) {
    const int64_t size = std::min(kBlock, bytes - at);
    char* copy = static_cast<char*>(to) + at;
    std::memcpy(copy, static_cast<const char*>(from) + at, static_cast<size_t>(size));
    finite &=
        AllFinite(copy, size, type);  // checks the stored copy: the source may change meanwhile
  }
  return finite;
}

}  // namespace gear::cpu
