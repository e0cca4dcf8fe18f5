// Checks of an op's tensors: dtype, shape, device and bounds, so that kernels stay inside them.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <iterator>
#include <optional>
#include <type_traits>
#include <utility>

#include "common/convert.h"
#include "common/power.h"
#include "common/slot.h"
#include "common/tree.h"

namespace gear {

// The Dtype of a tensor.
inline int64_t CodeOf(const at::Tensor& tensor) {
  constexpr at::ScalarType kTypes[] = {at::kBool,  at::kByte,  at::kChar, at::kShort,
                                       at::kInt,   at::kLong,  at::kHalf, at::kBFloat16,
                                       at::kFloat, at::kDouble};
  const at::ScalarType* found = std::find(kTypes, std::end(kTypes), tensor.scalar_type());
  TORCH_CHECK(found != std::end(kTypes), "gear: dtype ", tensor.scalar_type(), " is not supported");
  return found - kTypes;
}

inline void CheckTensor(const at::Tensor& tensor, const char* name, at::ScalarType type) {
  TORCH_CHECK(tensor.scalar_type() == type, "gear: ", name, " must be ", type, ", got ",
              tensor.scalar_type());
  TORCH_CHECK(tensor.is_contiguous(), "gear: ", name, " must be contiguous");
}

// The data of a tensor: for writing, or (of a const one) for reading.
template <typename T, typename Tensor>
auto* Data(Tensor& tensor) {
  if constexpr (std::is_const_v<Tensor>)
    return static_cast<const T*>(tensor.const_data_ptr());
  else
    return static_cast<T*>(tensor.mutable_data_ptr());
}

// The dtype of a tensor of T: masses and bytes are those of int64 and uint8.
template <typename T>
constexpr at::ScalarType TypeOf() {
  if constexpr (std::is_same_v<T, uint64_t>)
    return at::kLong;
  else if constexpr (std::is_same_v<T, char>)
    return at::kByte;
  else
    return c10::CppTypeToScalarType<T>::value;
}

inline constexpr int64_t kAny = -1;  // in place of a number of values or rows

// The values of a contiguous tensor of T, as many as `count`.
template <typename T, typename Tensor>
auto* Values(Tensor& tensor, const char* name, int64_t count = kAny) {
  CheckTensor(tensor, name, TypeOf<T>());
  TORCH_CHECK(count == kAny || tensor.numel() == count, "gear: ", name, " must have ", count,
              " values, got ", tensor.numel());
  return Data<T>(tensor);
}

// Likewise, but null where there are no values.
template <typename T, typename Tensor>
auto* ValuesOrNull(Tensor& tensor, const char* name, int64_t count) {
  auto* values = Values<T>(tensor, name);
  TORCH_CHECK(tensor.numel() == 0 || tensor.numel() == count, "gear: ", name, " must have ", count,
              " values, or none, got ", tensor.numel());
  return tensor.numel() == 0 ? nullptr : values;
}

// The rows of a contiguous tensor of int64, each a record.
template <typename Record, typename Tensor>
auto* Rows(Tensor& tensor, const char* name, int64_t count = kAny) {
  constexpr int64_t kWords = sizeof(Record) / sizeof(int64_t);
  CheckTensor(tensor, name, at::kLong);
  TORCH_CHECK(tensor.dim() == 2 && tensor.size(1) == kWords, "gear: ", name, " must be [n, ",
              kWords, "], got ", tensor.sizes());
  TORCH_CHECK(count == kAny || tensor.size(0) == count, "gear: ", name, " must have ", count,
              " rows, got ", tensor.size(0));
  return Data<Record>(tensor);
}

// The same, and how many they are.
template <typename Record, typename Tensor>
auto CountedRows(Tensor& tensor, const char* name) {
  auto* rows = Rows<Record>(tensor, name);
  return std::pair{rows, int64_t{tensor.size(0)}};
}

template <typename Tensor>
auto* TreeOf(Tensor& sums, int64_t num_items) {
  auto* words = Values<uint64_t>(sums, "sums");
  TORCH_CHECK(num_items >= 0 && sums.numel() == ShapeOfTree(num_items).words, "gear: sums of ",
              num_items, " items must have ", ShapeOfTree(num_items).words, " words, got ",
              sums.numel());
  return words;
}

// Words of the tree of minima.
inline int64_t MinimaWords(int64_t num_items) {
  const TreeShape shape = ShapeOfTree(num_items);
  return shape.words - shape.width[0];
}

template <typename Tensor>
auto* MinimaOf(Tensor& minima, int64_t num_items) {
  auto* words = Values<uint64_t>(minima, "minima");
  TORCH_CHECK(minima.numel() == MinimaWords(num_items), "gear: minima of ", num_items,
              " items must have ", MinimaWords(num_items), " words, got ", minima.numel());
  return words;
}

// Null: the caller keeps none.
template <typename Tensor>
auto* MinimaOrNull(Tensor& minima, int64_t num_items) {
  CheckTensor(minima, "minima", at::kLong);
  return minima.numel() == 0 ? nullptr : MinimaOf(minima, num_items);
}

inline AnchorRule AnchorsOf(at::IntArrayRef rule) {
  TORCH_CHECK(rule.size() == 5 && rule[2] > 0,
              "gear: rule must be first, trim, stride, most, from_end");
  return {rule[0], rule[1], rule[2], rule[3], rule[4]};
}

inline void CheckExponent(const char* name, int64_t value) {
  TORCH_CHECK(value >= 0 && value <= static_cast<int64_t>(kOneQ62), "gear: ", name,
              " must be in [0, 2^62] (Q62), got ", value);
}

inline MassScale ScaleOf(int64_t alpha, int64_t most_bits) {
  CheckExponent("alpha", alpha);
  TORCH_CHECK(most_bits >= 1 && most_bits <= kMostMassBits, "gear: most_bits must be in [1, ",
              kMostMassBits, "], got ", most_bits);
  return {static_cast<uint64_t>(alpha), static_cast<int>(most_bits)};
}

inline void CheckPriority(uint32_t bits, int64_t index) {
  TORCH_CHECK(IsPriority(bits), "gear: priority ", index, " must be finite and at least 0, got ",
              BitCast<float>(bits));
}

inline void CheckPriorities(const float* priorities, int64_t count) {
  for (int64_t i = 0; i < count; ++i) CheckPriority(BitCast<uint32_t>(priorities[i]), i);
}

}  // namespace gear
