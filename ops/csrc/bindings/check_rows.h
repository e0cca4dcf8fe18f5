// Checks of the bindings of both devices for messages of rows: of shapes, not of values in memory.
#pragma once
#include <c10/util/SmallVector.h>

#include "bindings/checks.h"

namespace gear {

inline constexpr int64_t kSampleWords = sizeof(cpu::RowSample) / sizeof(int64_t);
inline constexpr int64_t kWindowWords = sizeof(cpu::RowWindow) / sizeof(int64_t);
inline constexpr int64_t kColumnWords = sizeof(cpu::RowColumn) / sizeof(int64_t);
inline constexpr int64_t kWordBytes = sizeof(int64_t);

// Bytes of a tensor of bytes.
inline int64_t BytesOf(const at::Tensor& tensor, const char* name) {
  CheckTensor(tensor, name, at::kByte);
  TORCH_CHECK(tensor.dim() == 1, "gear: ", name, " must be [n], got ", tensor.sizes());
  return tensor.numel();
}

inline int64_t* LongsOf(at::Tensor& tensor, const char* name, int64_t count) {
  CheckTensor(tensor, name, at::kLong);
  TORCH_CHECK(tensor.numel() == count, "gear: ", name, " must have ", count, " values, got ",
              tensor.numel());
  return tensor.mutable_data_ptr<int64_t>();
}

inline char* CharsOf(const at::Tensor& tensor) {
  return static_cast<char*>(const_cast<void*>(tensor.const_data_ptr()));
}

inline cpu::RowLayout ShapeOfLayout(const at::Tensor& windows, const at::Tensor& members,
                                    const at::Tensor& columns) {
  CheckRecords(windows, "windows", kWindowWords);
  CheckRecords(columns, "columns", kColumnWords);
  CheckTensor(members, "members", at::kBool);
  TORCH_CHECK(members.dim() == 2 && members.size(0) >= windows.size(0),
              "gear: members must be [windows or more, needs], got ", members.sizes());
  return {Records<cpu::RowWindow>(windows), windows.size(0),
          members.const_data_ptr<bool>(),   members.size(1),
          Records<cpu::RowColumn>(columns), columns.size(0)};
}

inline void CheckNumColumns(at::TensorList tensors, const cpu::RowLayout& layout) {
  TORCH_CHECK(static_cast<int64_t>(tensors.size()) == layout.num_columns, "gear: there must be ",
              layout.num_columns, " columns, got ", tensors.size());
}

inline cpu::RowRoom RoomOf(at::IntArrayRef room) {
  const auto is_size = [](int64_t word) { return word >= 0 && word <= kMostSteps; };
  bool are_sizes = room.size() == 6;
  for (const int64_t word : room) are_sizes = are_sizes && is_size(word);
  TORCH_CHECK(are_sizes,
              "gear: room must be first row, rows, first slot, slots, base row, base "
              "slot");
  return {room[0], room[1], room[2], room[3], room[4], room[5]};
}

inline void CheckMessages(at::TensorList messages, int64_t num_peers) {
  TORCH_CHECK(static_cast<int64_t>(messages.size()) == num_peers,
              "gear: there must be a message of each peer");
  for (const at::Tensor& message : messages) CheckTensor(message, "messages", at::kLong);
}

}  // namespace gear
