#include "cpu/mutex.h"

#include <errno.h>
#include <time.h>
#include <unistd.h>

#include <cmath>

namespace gear::cpu {

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
  int error = pthread_mutex_trylock(&mutex->mutex);
  if (error == EBUSY) {
    timespec until;
    clock_gettime(CLOCK_REALTIME, &until);  // what pthread_mutex_timedlock counts in
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
  mutex->owner = getpid();
  return error == 0 ? Locked::kYes : Locked::kOwnerDied;
}

void MutexConsistent(SharedMutex* mutex) { pthread_mutex_consistent(&mutex->mutex); }

void MutexUnlock(SharedMutex* mutex) {
  mutex->owner = 0;
  pthread_mutex_unlock(&mutex->mutex);
}

}  // namespace gear::cpu
