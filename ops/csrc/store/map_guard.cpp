// Handles SIGBUS: prints the mapped file that was truncated, then ends the process as before.
#include "store/map_guard.h"

#include <errno.h>
#include <signal.h>
#include <string.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <initializer_list>

namespace gear::cpu {

namespace {

constexpr int kMaps = 1024;
constexpr size_t kPathBytes = 512;

struct GuardedMap {
  std::atomic<uintptr_t> begin{0};  // 0: the entry is free
  std::atomic<uintptr_t> end{0};
  char path[kPathBytes];
};

static_assert(std::atomic<uintptr_t>::is_always_lock_free, "the handler must not wait for a lock");

GuardedMap maps[kMaps];
struct sigaction earlier;

const char* PathAt(uintptr_t address) {
  for (const GuardedMap& map : maps) {
    const uintptr_t begin = map.begin.load(std::memory_order_acquire);  // pairs with MapGuardAdd
    if (begin != 0 && begin <= address && address < map.end.load(std::memory_order_relaxed))
      return map.path;
  }
  return nullptr;
}

// Only calls that signal-safety(7) admits, on the stack: write, sigaction, raise.
void OnBusError(int number, siginfo_t* info, void*) {
  const int error = errno;
  const bool is_fault = info->si_code > 0;  // else a process has sent the signal: it has no address
  const char* path = is_fault ? PathAt(reinterpret_cast<uintptr_t>(info->si_addr)) : nullptr;
  if (path != nullptr) {
    char text[kPathBytes + 320];
    size_t length = 0;
    for (const char* part :
         {"gear: fatal: the file ", path,
          " was truncated, or its disk failed, while this process had it mapped (SIGBUS); end the "
          "run, restore the file (copy the data set again or make it with gear ingest), and leave "
          "a data set unchanged while a run uses it\n"}) {
      const size_t size = strlen(part);
      memcpy(text + length, part, size);
      length += size;
    }
    const ssize_t written = write(STDERR_FILENO, text, length);
    (void)written;
  }
  // The instruction is repeated and faults again; that signal goes to the earlier handler.
  sigaction(number, &earlier, nullptr);
  if (!is_fault) raise(number);
  errno = error;
}

void Install() {
  struct sigaction current;
  if (sigaction(SIGBUS, nullptr, &current) != 0) return;
  if ((current.sa_flags & SA_SIGINFO) != 0 && current.sa_sigaction == OnBusError) return;
  earlier = current;
  struct sigaction ours = {};
  ours.sa_sigaction = OnBusError;
  ours.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigemptyset(&ours.sa_mask);
  sigaction(SIGBUS, &ours, nullptr);
}

}  // namespace

int MapGuardAdd(const void* begin, size_t num_bytes, const char* path) {
  for (int entry = 0; entry < kMaps; ++entry) {
    GuardedMap& map = maps[entry];
    if (map.begin.load(std::memory_order_relaxed) != 0) continue;  // one caller at a time
    const auto first = reinterpret_cast<uintptr_t>(begin);
    strncpy(map.path, path, kPathBytes - 1);
    map.path[kPathBytes - 1] = '\0';
    map.end.store(first + num_bytes, std::memory_order_relaxed);
    map.begin.store(first, std::memory_order_release);  // pairs with PathAt: path and end are there
    Install();
    return entry;
  }
  return -1;
}

void MapGuardRemove(int entry) {
  if (entry >= 0 && entry < kMaps) maps[entry].begin.store(0, std::memory_order_relaxed);
}

}  // namespace gear::cpu
