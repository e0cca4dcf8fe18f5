// The lock of a store, and the word of its holder, for a scope. As StoreLock of
// deepspeed_gear/store/store_lock.py, except that it repairs nothing: that is left to Python.
#pragma once
#include <unistd.h>

#include <cstdint>

#include "store/mutex.h"

namespace gear::cpu {

// Why the lock was not taken.
enum class Refused { kNo, kTimeout, kBroken, kMustRecover };

class Held {
 public:
  Held(SharedMutex* mutex, int64_t* holder, double timeout_s) : mutex_(mutex), holder_(holder) {
    const Locked locked = MutexLock(mutex, timeout_s);
    if (locked == Locked::kTimeout || locked == Locked::kBroken) {
      refused_ = locked == Locked::kTimeout ? Refused::kTimeout : Refused::kBroken;
      return;
    }
    if (locked == Locked::kOwnerDied) MutexConsistent(mutex);
    if (locked == Locked::kOwnerDied || *holder != 0) {
      if (*holder == 0) *holder = getpid();  // the next holder repairs
      MutexUnlock(mutex);
      refused_ = Refused::kMustRecover;
      return;
    }
    *holder = getpid();
  }
  ~Held() {
    if (refused_ != Refused::kNo) return;
    *holder_ = 0;
    MutexUnlock(mutex_);
  }
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;
  Refused refused() const { return refused_; }

 private:
  SharedMutex* mutex_;
  int64_t* holder_;
  Refused refused_ = Refused::kNo;
};

}  // namespace gear::cpu
