// The lock of a store, taken for a scope, with the word of its holder; or the refusal.
//
// As StoreLock of deepspeed_gear/store/store_lock.py, except that it repairs nothing after a death:
// it refuses with kMustRecover, and the next lock in Python does.
#pragma once
#include <cstdint>

#include "store/mutex.h"
#include "store/store.h"

namespace gear::cpu {

class ScopedLock {
 public:
  ScopedLock(SharedMutex* mutex, int64_t* holder, double timeout_s)
      : mutex_(mutex), holder_(holder) {
    const Locked locked = MutexLock(mutex, timeout_s);
    if (locked == Locked::kTimeout || locked == Locked::kBroken) {
      refusal_ = locked == Locked::kTimeout ? kLockTimeout : kLockBroken;
      return;
    }
    if (locked == Locked::kOwnerDied) MutexConsistent(mutex);
    if (locked == Locked::kOwnerDied || *holder != 0) {
      if (*holder == 0) *holder = ProcessId();  // the next holder repairs
      MutexUnlock(mutex);
      refusal_ = kMustRecover;
      return;
    }
    *holder = ProcessId();
  }
  ~ScopedLock() {
    if (refusal_ != 0) return;
    *holder_ = 0;
    MutexUnlock(mutex_);
  }
  ScopedLock(const ScopedLock&) = delete;
  ScopedLock& operator=(const ScopedLock&) = delete;
  int64_t refusal() const { return refusal_; }  // why the lock was not taken; 0: it was

 private:
  SharedMutex* mutex_;
  int64_t* holder_;
  int64_t refusal_ = 0;
};

}  // namespace gear::cpu
