// Handler of SIGBUS: prints which mapped file was truncated, or on which one the disk failed.
#pragma once
#include <cstddef>

namespace gear::cpu {

// Adds the map of a file, and installs the handler of SIGBUS if it is not the current one. Returns
// the entry for MapGuardRemove, -1 where all entries are taken: then the file is not printed.
// Calls are serialised by the caller.
int MapGuardAdd(const void* begin, size_t num_bytes, const char* path);

// Removes an entry, before its memory is unmapped.
void MapGuardRemove(int entry);

}  // namespace gear::cpu
