// A word in shared memory that processes wait for: who has something for its owner rings it.
#pragma once
#include <cstdint>

namespace gear::cpu {

// Adds one and wakes whoever waits. Release: who sees the new count sees what was written before.
void BellRing(uint32_t* bell);

// Returns the count as soon as it is not `seen`, at the latest after the time or a signal. Acquire.
uint32_t BellWait(uint32_t* bell, uint32_t seen, double timeout_s);

// Orders what this thread has done before against what it does behind, for words in shared memory
// that are plain loads and stores of Python's.
void Fence();

}  // namespace gear::cpu
