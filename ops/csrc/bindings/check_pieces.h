// Checks of the pieces of `copy_pieces_`: on the host, where they lie for every device.
#pragma once
#include <ATen/core/Tensor.h>

#include <vector>

#include "bindings/checks.h"

namespace gear {

struct Piece {
  const char* from;
  char* to;
  int64_t bytes;
};

inline constexpr int64_t kPieceWords = 4;  // column, first byte in it, first byte in `out`, bytes

inline std::vector<Piece> PiecesOf(const at::Tensor& out, at::TensorList columns,
                                   const at::Tensor& pieces) {
  CheckTensor(out, "out", at::kByte);
  CheckRecords(pieces, "pieces", kPieceWords);
  TORCH_CHECK(pieces.device().is_cpu(), "gear: pieces must be in memory of the host");
  for (const at::Tensor& column : columns)
    TORCH_CHECK(column.is_contiguous(), "gear: columns must be contiguous");
  const auto is_inside = [](int64_t begin, int64_t bytes, int64_t size) {
    return begin >= 0 && bytes > 0 && bytes <= size && begin <= size - bytes;
  };
  const int64_t* words = pieces.const_data_ptr<int64_t>();
  const int64_t room = out.numel(), num_columns = static_cast<int64_t>(columns.size());
  char* to = reinterpret_cast<char*>(out.mutable_data_ptr<uint8_t>());
  std::vector<Piece> found(static_cast<size_t>(pieces.size(0)));
  for (size_t i = 0; i < found.size(); ++i, words += kPieceWords) {
    const int64_t column = words[0], bytes = words[3];
    TORCH_CHECK(
        column >= 0 && column < num_columns &&
            is_inside(words[1], bytes,
                      static_cast<int64_t>(columns[static_cast<size_t>(column)].nbytes())) &&
            is_inside(words[2], bytes, room),
        "gear: piece ", i, " must lie in its column and in out: column ", column, " from ",
        words[1], " to ", words[2], " bytes ", bytes);
    const auto* from =
        static_cast<const char*>(columns[static_cast<size_t>(column)].const_data_ptr());
    found[i] = {from + words[1], to + words[2], bytes};
  }
  return found;
}

}  // namespace gear
