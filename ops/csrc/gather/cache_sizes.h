// Sizes of this machine's caches, and the size of a batch from which its rows are stored past them
// (streaming stores).
#pragma once
#include <sched.h>

#include <cstdint>
#include <cstdio>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "common/host_device.h"

namespace gear::cpu {

// Bytes of the caches that a core uses: its own second level, and the third, which cores share.
// 0: unknown.
struct Caches {
  int64_t second, third;
};

// The bytes of a batch from which its rows are stored past the caches.
//
// A plain store that misses the caches first reads its line from memory; a store past them does
// not, but always writes to memory. So plain stores are better while a batch's buffers are still in
// the third level when their turn comes again. Until then four batches pass: a ring has two
// buffers, and each batch reads as many bytes as it writes. Other data pass as well, and the cache
// replaces lines before it is full, so that half of it counts: an eighth of it is the largest
// batch. Example: 32 MB of the third level stream from 4 MB.
//
// All threads of a gather count as one batch. Other ranks that use the same cache do not: their
// number is unknown here, and while they do nothing, all of it is free.
inline int64_t LeastStreamed(const Caches& caches) {
  constexpr int64_t kParts = 8, kThird = 32 << 20;  // where a machine does not report it
  const int64_t third = caches.third > 0 ? caches.third : kThird;
  return Max(caches.second, third / kParts);
}

// Reads the caches from a folder as /sys/devices/system/cpu/cpu0/cache.
inline Caches CachesIn(const char* folder) {
  constexpr int kMostIndex = 16;
  Caches caches{0, 0};
  for (int index = 0; index < kMostIndex; ++index) {
    const auto read = [&](const char* name, const char* format, auto*... values) {
      char path[512];
      std::snprintf(path, sizeof(path), "%s/index%d/%s", folder, index, name);
      std::FILE* file = std::fopen(path, "r");
      if (file == nullptr) return false;
      const int matched = std::fscanf(file, format, values...);
      std::fclose(file);
      return matched >= 1;
    };
    int level = 0;
    char type[16] = "", unit = ' ';
    long long size = 0;
    if (!read("level", "%d", &level) || !read("type", "%15s", type)) break;
    if (!read("size", "%lld%c", &size, &unit) || type[0] == 'I') continue;  // of instructions
    const int64_t bytes = size * (unit == 'K' ? 1 << 10 : unit == 'M' ? 1 << 20 : 1);
    if (level == 2) caches.second = bytes;
    if (level == 3) caches.third = bytes;
  }
  return caches;
}

// Asks the processor, for containers that hide /sys: leaf 4, or AMD's of the same form.
inline Caches CachesOfProcessor() {
  Caches caches{0, 0};
#if defined(__x86_64__)
  for (const unsigned leaf : {4u, 0x8000001Du}) {
    for (unsigned index = 0; index < 16; ++index) {
      unsigned a = 0, b = 0, c = 0, d = 0;
      if (!__get_cpuid_count(leaf, index, &a, &b, &c, &d)) break;
      const unsigned type = a & 31, level = a >> 5 & 7;
      if (type == 0) break;
      if (type == 2) continue;  // of instructions
      const int64_t ways = (b >> 22) + 1, partitions = (b >> 12 & 1023) + 1, line = (b & 4095) + 1;
      const int64_t bytes = ways * partitions * line * (static_cast<int64_t>(c) + 1);
      if (level == 2) caches.second = bytes;
      if (level == 3) caches.third = bytes;
    }
  }
#endif
  return caches;
}

// Returns the caches of the core that this thread runs on. Not from sysconf: for some processors
// in virtual machines glibc computes a third level of several times its size.
inline Caches CachesOfMachine() {
  char folder[64];
  std::snprintf(folder, sizeof(folder), "/sys/devices/system/cpu/cpu%d/cache", sched_getcpu());
  Caches caches = CachesIn(folder);
  const Caches asked = CachesOfProcessor();
  if (caches.second == 0) caches.second = asked.second;
  if (caches.third == 0) caches.third = asked.third;
  return caches;
}

}  // namespace gear::cpu
