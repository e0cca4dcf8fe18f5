// Copies of many pieces by the copy engine. On a GPU only.
#pragma once
#include <cstdint>

namespace gear::cuda {

// Copies bytes[i] bytes each, from registered host memory or device memory. On a stream
// that is not the legacy default one, and is not captured: graphs have no such node. Throws where
// driver or toolkit is older than CUDA 12.8.
void CopyPieces(const void* const* from, void* const* to, const int64_t* bytes, int64_t count,
                void* stream);

}  // namespace gear::cuda
