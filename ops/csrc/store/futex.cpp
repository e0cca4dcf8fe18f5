// Notifies and waits by the futex system call on a counter in shared memory.
#include "store/futex.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>
#include <cmath>

namespace gear::cpu {

namespace {

uint32_t CountOf(const uint32_t* event) { return __atomic_load_n(event, __ATOMIC_ACQUIRE); }

}  // namespace

void FutexNotify(uint32_t* event) {
  __atomic_fetch_add(event, 1, __ATOMIC_SEQ_CST);  // pairs with the acquire of CountOf
  syscall(SYS_futex, event, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

uint32_t FutexWait(uint32_t* event, uint32_t seen, double timeout_s) {
  if (CountOf(event) != seen || timeout_s <= 0) return CountOf(event);
  const double whole = std::floor(timeout_s);
  const timespec left{static_cast<time_t>(whole), static_cast<long>((timeout_s - whole) * 1e9)};
  syscall(SYS_futex, event, FUTEX_WAIT, seen, &left, nullptr, 0);  // at once if it is not `seen`
  return CountOf(event);
}

void Fence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

}  // namespace gear::cpu
