// A robust, process-shared, timed mutex in shared memory that records its owner.
#pragma once
#include <pthread.h>

#include <cstdint>

namespace gear::cpu {

struct SharedMutex {
  pthread_mutex_t mutex;
  int64_t owner;  // process id of the holder, for error texts only; written under the mutex
};
static_assert(sizeof(SharedMutex) <= 128, "a store's header reserves 128 bytes for it");

enum class Locked : int { kYes = 0, kOwnerDied = 1, kTimeout = 2, kBroken = 3 };

// The id of this process, without a system call: each takes as long as a free mutex.
int64_t ProcessId();

void MutexInit(SharedMutex* mutex);

// kOwnerDied: the caller holds the mutex, must rebuild state that the dead owner may have left
// incomplete, then call MutexConsistent before it unlocks.
Locked MutexLock(SharedMutex* mutex, double timeout_s);
void MutexConsistent(SharedMutex* mutex);
void MutexUnlock(SharedMutex* mutex);

}  // namespace gear::cpu
