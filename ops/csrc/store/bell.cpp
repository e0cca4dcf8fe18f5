#include "store/bell.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>
#include <cmath>

namespace gear::cpu {

namespace {

uint32_t CountOf(const uint32_t* bell) { return __atomic_load_n(bell, __ATOMIC_ACQUIRE); }

}  // namespace

void BellRing(uint32_t* bell) {
  __atomic_fetch_add(bell, 1, __ATOMIC_SEQ_CST);  // pairs with the acquire of CountOf
  syscall(SYS_futex, bell, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

uint32_t BellWait(uint32_t* bell, uint32_t seen, double timeout_s) {
  if (CountOf(bell) != seen || timeout_s <= 0) return CountOf(bell);
  const double whole = std::floor(timeout_s);
  const timespec left{static_cast<time_t>(whole), static_cast<long>((timeout_s - whole) * 1e9)};
  syscall(SYS_futex, bell, FUTEX_WAIT, seen, &left, nullptr, 0);  // at once if it is not `seen`
  return CountOf(bell);
}

void Fence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

}  // namespace gear::cpu
