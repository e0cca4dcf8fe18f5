// Futex notifications: a counter in shared memory that one process waits for and others increment.
#pragma once
#include <cstdint>

namespace gear::cpu {

// Adds one and wakes all waiters. Release: a process that reads the new count reads all earlier
// writes.
void FutexNotify(uint32_t* event);

// Returns the count as soon as it differs from `seen`, at the latest after the timeout or a signal.
// Acquire.
uint32_t FutexWait(uint32_t* event, uint32_t seen, double timeout_s);

// Full fence between earlier and later accesses of this thread, for words in shared memory that
// Python accesses by plain loads and stores.
void Fence();

}  // namespace gear::cpu
