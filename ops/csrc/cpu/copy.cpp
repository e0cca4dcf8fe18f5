// Rows of a store into a message, and back.
#include <cstring>

#include "cpu/ops.h"
#include "cpu/prefetch.h"

namespace gear::cpu {

void CopyPieces(const Piece* pieces, int64_t count, const char* source, char* to) {
  constexpr int64_t kLookAhead = 16;  // pieces that are requested before their turn
  for (int64_t i = 0; i < count; ++i) {
    if (i + kLookAhead < count) {
      const Piece& next = pieces[i + kLookAhead];
      PrefetchBytes(source + next.source, next.bytes);
    }
    const Piece& piece = pieces[i];
    std::memcpy(to + piece.to, source + piece.source, static_cast<size_t>(piece.bytes));
  }
}

}  // namespace gear::cpu
