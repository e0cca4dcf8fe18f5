// Prints what the shared headers compute for numbers read from the standard input;
// test_host_arithmetic.py compares it with Python's big integers. The same headers are compiled
// into the kernels.
#include <cinttypes>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <limits>
#include <vector>

#include "common/convert.h"
#include "common/permutation.h"
#include "common/power.h"
#include "common/slot.h"
#include "common/tree.h"
#include "common/window.h"
#include "gather/cache_sizes.h"
#include "gather/rows_cpu.h"

namespace {

using namespace gear;

// One line of input: the name of a function and its arguments.
bool Answer() {
  char name[32];
  if (std::scanf("%31s", name) != 1) return false;
  const auto next = [] {
    uint64_t x = 0;
    if (std::scanf("%" SCNu64, &x) != 1) std::puts("malformed input");
    return x;
  };
  const auto is = [&](const char* other) { return std::strcmp(name, other) == 0; };
  if (is("mulhi")) {
    const uint64_t a = next(), b = next();
    std::printf("%" PRIu64 "\n", MulHi(a, b));
  } else if (is("philox")) {
    const uint64_t seed = next(), number = next(), stream = next(), purpose = next();
    const Word128 word =
        Philox(seed, number, static_cast<uint32_t>(stream), static_cast<uint32_t>(purpose));
    std::printf("%" PRIu64 " %" PRIu64 "\n", word.high, word.low);
  } else if (is("coordinate")) {
    const uint64_t high = next(), low = next(), total = next();
    std::printf("%" PRIu64 "\n", Coordinate({high, low}, total));
  } else if (is("tree")) {
    const TreeShape shape = ShapeOfTree(static_cast<int64_t>(next()));
    std::printf("%" PRId64, shape.words);
    for (int i = 0; i < shape.levels; ++i)
      std::printf(" %" PRId64 " %" PRId64, shape.offset[i], shape.width[i]);
    std::puts("");
  } else if (is("half")) {  // every half as a float, and back
    for (uint32_t i = 0; i < 65536; ++i) {
      const float x = ToFloat(Half{static_cast<uint16_t>(i)});
      std::printf("%" PRIu32 " %u ", BitCast<uint32_t>(x), ToHalf(x).bits);
    }
    std::puts("");
  } else if (is("narrow")) {  // a float to both 16-bit types
    const float x = BitCast<float>(static_cast<uint32_t>(next()));
    std::printf("%u %u\n", ToHalf(x).bits, ToBfloat(x).bits);
  } else if (is("mass")) {  // bits of a priority, alpha, bits of the largest mass
    const uint64_t bits = next(), alpha = next();
    const MassScale scale{alpha, static_cast<int>(next())};
    const Mass mass = MassOfPriority(static_cast<uint32_t>(bits), scale);
    std::printf("%" PRIu64 " %d\n", mass.value, mass.clamped);
  } else if (is("falls")) {  // how often the mass falls while the priority rises by `step` bits
    const uint64_t alpha = next(), step = next();
    uint64_t falls = 0, before = 0;
    for (uint64_t bits = 0; bits < 0x7F800000u; bits += step) {
      const uint64_t mass =
          MassOfPriority(static_cast<uint32_t>(bits), {alpha, kMostMassBits}).value;
      falls += mass < before;
      before = mass;
    }
    std::printf("%" PRIu64 " %" PRIu64 "\n", falls, before);
  } else if (is("weight")) {  // numerator, count, mass, beta
    const uint64_t numerator = next(), count = next(), mass = next(), beta = next();
    std::printf("%u\n", ImportanceBits(Log2(numerator) - Log2(count), mass, beta));
  } else if (is("float")) {  // significand, exponent + 1000
    const uint64_t significand = next(), exponent = next();
    std::printf("%u\n", FloatBits({significand, static_cast<int>(exponent) - 1000}));
  } else if (is("log2")) {
    std::printf("%" PRId64 "\n", Log2(next()));
  } else if (is("exp2")) {  // fraction, Q64
    std::printf("%" PRIu64 "\n", Exp2Fraction(next()));
  } else if (is("streamed")) {  // bytes of the second and the third level
    const int64_t second = static_cast<int64_t>(next()), third = static_cast<int64_t>(next());
    std::printf("%" PRId64 "\n", cpu::LeastStreamed({second, third}));
  } else if (is("caches")) {  // a folder
    char folder[256];
    if (std::scanf("%255s", folder) != 1) return false;
    const cpu::Caches caches = cpu::CachesIn(folder);
    std::printf("%" PRId64 " %" PRId64 "\n", caches.second, caches.third);
  } else if (is("machine")) {  // as /sys has it, and as the processor answers
    const cpu::Caches caches = cpu::CachesOfMachine(), asked = cpu::CachesOfProcessor();
    std::printf("%" PRId64 " %" PRId64 " %" PRId64 " %" PRId64 "\n", caches.second, caches.third,
                asked.second, asked.third);
  } else if (is("copied")) {  // offsets of source and target, bytes; how many bytes are right
    const uint64_t from = next(), to = next(), bytes = next();
    std::vector<char> source(from + bytes + 1), target(to + bytes + 129, 'x');
    for (size_t i = 0; i < source.size(); ++i) source[i] = static_cast<char>(i * 7 % 251);
    cpu::CopyStreaming(source.data() + from, target.data() + to, static_cast<int64_t>(bytes));
    cpu::EndStreaming();
    uint64_t right = 0;
    for (size_t i = 0; i < target.size(); ++i) {
      const bool is_inside = i >= to && i < to + bytes;
      right += target[i] == (is_inside ? source[from + i - to] : 'x');
    }
    std::printf("%" PRIu64 " %zu\n", right, target.size());
  } else if (is("priority")) {
    std::printf("%d\n", IsPriority(static_cast<uint32_t>(next())));
  } else {
    std::printf("unknown function %s\n", name);
  }
  return true;
}

}  // namespace

// What Python repeats as numbers in deepspeed_gear/ops/constants.py.
static_assert(sizeof(Slot) == 64 && offsetof(Slot, generation) == 8 &&
                  offsetof(Slot, first_row) == 24,
              "");
static_assert(offsetof(Resolution, first_row) == 24 && offsetof(Resolution, anchor) == 40, "");
static_assert(std::numeric_limits<float>::is_iec559 && std::numeric_limits<double>::is_iec559, "");

int main() {
  while (Answer()) {
  }
}
