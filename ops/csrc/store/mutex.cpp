// Locks a robust mutex: spins for some microseconds, then sleeps until a timeout.
#include "store/mutex.h"

#include <errno.h>
#include <time.h>
#include <unistd.h>

#include <cmath>

namespace gear::cpu {

namespace {

constexpr int kTries = 200;  // some microseconds

void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

int64_t known_process = 0;

}  // namespace

int64_t ProcessId() {
  // Each forked process sets it again, while it has one thread.
  static const bool is_kept = [] {
    known_process = getpid();
    return pthread_atfork(nullptr, nullptr, [] { known_process = getpid(); }) == 0;
  }();
  return is_kept ? known_process : getpid();
}

void MutexInit(SharedMutex* mutex) {
  pthread_mutexattr_t attributes;
  pthread_mutexattr_init(&attributes);
  pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
  pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
  pthread_mutex_init(&mutex->mutex, &attributes);
  pthread_mutexattr_destroy(&attributes);
  mutex->owner = 0;
}

Locked MutexLock(SharedMutex* mutex, double timeout_s) {
  // Most holders are done in less than a microsecond; sleeping and waking takes fifty.
  int error = pthread_mutex_trylock(&mutex->mutex);
  for (int tries = 0; error == EBUSY && tries < kTries; ++tries) {
    Pause();
    if (__atomic_load_n(&mutex->owner, __ATOMIC_RELAXED) == 0)
      error = pthread_mutex_trylock(&mutex->mutex);
  }
  if (error == EBUSY) {
    timespec until;
    clock_gettime(CLOCK_REALTIME, &until);  // the clock of pthread_mutex_timedlock
    const double whole = std::floor(timeout_s);
    until.tv_sec += static_cast<time_t>(whole);
    until.tv_nsec += static_cast<long>((timeout_s - whole) * 1e9);
    if (until.tv_nsec >= 1000000000L) {
      until.tv_nsec -= 1000000000L;
      ++until.tv_sec;
    }
    error = pthread_mutex_timedlock(&mutex->mutex, &until);
  }
  if (error == ETIMEDOUT) return Locked::kTimeout;
  if (error != 0 && error != EOWNERDEAD) return Locked::kBroken;
  mutex->owner = ProcessId();
  return error == 0 ? Locked::kYes : Locked::kOwnerDied;
}

void MutexConsistent(SharedMutex* mutex) { pthread_mutex_consistent(&mutex->mutex); }

void MutexUnlock(SharedMutex* mutex) {
  __atomic_store_n(&mutex->owner, 0, __ATOMIC_RELAXED);
  pthread_mutex_unlock(&mutex->mutex);
}

}  // namespace gear::cpu
