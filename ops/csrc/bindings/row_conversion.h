// Conversion of a program's rows to the stored form of a column: numbers, lists, arrays, tensors.
//
// Rows of the stored form are read in place; Python and NumPy numbers of other types, and lists of
// numbers, are converted. What is left to Python: conversions of large arrays, and all that it
// refuses (data/stored_values.py, `cast`).
#pragma once
#include <Python.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include "bindings/store.h"

namespace gear::python {

// A real number of Python or of an array.
struct Number {
  bool is_float;
  double real;      // if it is
  int64_t integer;  // if it is not
};

template <typename T>
Number ReadAs(const void* at) {
  T value;
  std::memcpy(&value, at, sizeof(T));
  if constexpr (std::is_floating_point_v<T>) return {true, static_cast<double>(value), 0};
  return {false, 0, static_cast<int64_t>(value)};
}

// The number at an address, of a format of Python's buffers; none for other formats and for
// integers that int64 does not hold.
inline std::optional<Number> ReadNumber(const char* format, Py_ssize_t item_bytes, const void* at) {
  switch (KindOf(format)) {
    case 'b':
      return ReadAs<bool>(at);
    case 'f':
      if (item_bytes == 4) return ReadAs<float>(at);
      if (item_bytes == 8) return ReadAs<double>(at);
      return std::nullopt;
    case 'i':
      if (item_bytes == 1) return ReadAs<int8_t>(at);
      if (item_bytes == 2) return ReadAs<int16_t>(at);
      return item_bytes == 4 ? ReadAs<int32_t>(at) : ReadAs<int64_t>(at);
    case 'u': {
      if (item_bytes == 1) return ReadAs<uint8_t>(at);
      if (item_bytes == 2) return ReadAs<uint16_t>(at);
      if (item_bytes == 4) return ReadAs<uint32_t>(at);
      const Number wide = ReadAs<uint64_t>(at);
      return wide.integer < 0 ? std::nullopt : std::optional(wide);
    }
    default:
      return std::nullopt;
  }
}

// The value of a Python number; none for other objects and for integers that int64 does not hold.
// NumPy's float64 is a float of Python's; its other scalars are buffers.
inline std::optional<Number> ReadNumber(PyObject* object) {
  if (PyFloat_Check(object)) return Number{true, PyFloat_AS_DOUBLE(object), 0};
  if (PyBool_Check(object)) return Number{false, 0, object == Py_True ? 1 : 0};
  if (!PyLong_CheckExact(object)) return std::nullopt;
  int overflow = 0;
  const long long value = PyLong_AsLongLongAndOverflow(object, &overflow);
  if (overflow != 0) return std::nullopt;
  return Number{false, 0, value};
}

template <typename T>
bool WriteAs(const Number& number, char* to) {
  T stored;
  if constexpr (std::is_floating_point_v<T>) {
    // Integers up to 2^53 become a double exactly, so that the number is rounded once.
    constexpr int64_t kMostExact = int64_t{1} << 53;
    if (!number.is_float && (number.integer > kMostExact || number.integer < -kMostExact))
      return false;
    const double value = number.is_float ? number.real : static_cast<double>(number.integer);
    stored = static_cast<T>(value);
    if (!std::isfinite(stored) && std::isfinite(value)) return false;
  } else {
    int64_t value = number.integer;
    if (number.is_float) {
      if (!(std::fabs(number.real) < 9.0e15) || number.real != std::floor(number.real))
        return false;
      value = static_cast<int64_t>(number.real);
    }
    if (value < static_cast<int64_t>(std::numeric_limits<T>::min())) return false;
    if (value > static_cast<int64_t>(std::numeric_limits<T>::max())) return false;
    stored = static_cast<T>(value);
  }
  std::memcpy(to, &stored, sizeof(T));
  return true;
}

// Writes a number in a stored form; a floating-point form rounds. False: the form does not hold it,
// or is float16 or bfloat16 (stored as uint16), which are left to Python.
inline bool WriteNumber(const RowForm& form, const Number& number, char* to) {
  switch (form.kind) {
    case 'b':
      return WriteAs<bool>(number, to);
    case 'f':
      if (form.item_bytes == 4) return WriteAs<float>(number, to);
      return form.item_bytes == 8 && WriteAs<double>(number, to);
    case 'i':
      if (form.item_bytes == 1) return WriteAs<int8_t>(number, to);
      if (form.item_bytes == 2) return WriteAs<int16_t>(number, to);
      return form.item_bytes == 4 ? WriteAs<int32_t>(number, to) : WriteAs<int64_t>(number, to);
    default:
      return form.item_bytes == 1 && WriteAs<uint8_t>(number, to);
  }
}

// From here on `into` takes converted rows. Null: they are left to Python.

inline const char* ConvertedNumber(const RowForm& form, const Number& number,
                                   std::vector<char>* into) {
  into->resize(static_cast<size_t>(form.item_bytes));
  return WriteNumber(form, number, into->data()) ? into->data() : nullptr;
}

// To a narrower type, as the float64 rewards of environments and the int64 tokens of tokenizers
// need: a loop that vectorizes. Finite values become finite, integers stay as they are.
template <typename From, typename To>
const char* Narrowed(const void* values, Py_ssize_t count, std::vector<char>* into) {
  into->resize(static_cast<size_t>(count) * sizeof(To));
  const auto* from = static_cast<const From*>(values);
  auto* to = reinterpret_cast<To*>(into->data());
  bool fits = true;
  for (Py_ssize_t i = 0; i < count; ++i) {
    to[i] = static_cast<To>(from[i]);
    if constexpr (std::is_floating_point_v<To>)
      fits &= std::isfinite(to[i]) || !std::isfinite(from[i]);
    else
      fits &= static_cast<From>(to[i]) == from[i];
  }
  return fits ? into->data() : nullptr;
}

inline const char* ConvertedArray(const RowForm& form, const Py_buffer& view,
                                  std::vector<char>* into) {
  // A larger array is converted by NumPy, which is faster by element.
  constexpr Py_ssize_t kMostNumbers = 4096;
  const Py_ssize_t count = view.len / view.itemsize;
  const char kind = KindOf(view.format);
  if (view.itemsize == 8 && form.item_bytes == 4 && kind == form.kind) {
    if (kind == 'f') return Narrowed<double, float>(view.buf, count, into);
    if (kind == 'i') return Narrowed<int64_t, int32_t>(view.buf, count, into);
  }
  // Unsigned rows with a shape may be the bytes of opaque values.
  const bool may_be_opaque = form.kind == 'u' && !form.shape.empty();
  if (may_be_opaque || count > kMostNumbers) return nullptr;
  into->resize(static_cast<size_t>(count * form.item_bytes));
  const auto* from = static_cast<const char*>(view.buf);
  for (Py_ssize_t i = 0; i < count; ++i) {
    const auto number = ReadNumber(view.format, view.itemsize, from + i * view.itemsize);
    char* to = into->data() + i * form.item_bytes;
    if (!number.has_value() || !WriteNumber(form, *number, to)) return nullptr;
  }
  return into->data();
}

// The numbers of a list or a tuple, as NumPy converts them: with a float among them all become
// float64, which holds integers up to 2^53 exactly.
inline const char* ConvertedList(const RowForm& form, PyObject* list, std::vector<char>* into) {
  constexpr int64_t kMostExact = int64_t{1} << 53;
  const Py_ssize_t count = PySequence_Fast_GET_SIZE(list);
  PyObject** items = PySequence_Fast_ITEMS(list);
  into->resize(static_cast<size_t>(count * form.item_bytes));
  bool has_float = false, is_exact = true;
  for (Py_ssize_t i = 0; i < count; ++i) {
    const std::optional<Number> number = ReadNumber(items[i]);
    char* to = into->data() + i * form.item_bytes;
    if (!number.has_value() || !WriteNumber(form, *number, to)) return nullptr;
    has_float |= number->is_float;
    is_exact &= number->is_float || std::abs(number->integer) <= kMostExact;
  }
  return is_exact || !has_float ? into->data() : nullptr;
}

// The rows of a trajectory's column, and their number; 1 of a column of one value.
struct ColumnRows {
  const char* rows;
  int64_t count;
};

// Reads the rows of a trajectory's column: [rows, *shape], or [*shape] of a `single` value. They
// are valid while `buffers` hold the object, and `into` is not changed.
inline ColumnRows ReadColumn(const RowForm& form, PyObject* object, bool single,
                             std::vector<Buffer>* buffers, std::vector<char>* into) {
  constexpr ColumnRows kLeft{nullptr, 0};
  if (form.shape.empty() && single) {
    const std::optional<Number> number = ReadNumber(object);
    if (number.has_value()) return {ConvertedNumber(form, *number, into), 1};
  }
  if (form.shape.empty() && !single && (PyList_CheckExact(object) || PyTuple_CheckExact(object)))
    return {ConvertedList(form, object, into), PySequence_Fast_GET_SIZE(object)};
  if (PyBytes_Check(object)) return kLeft;  // text for NumPy
  const Buffer& buffer = buffers->emplace_back(object);
  if (!buffer.held()) return kLeft;
  const Py_buffer& view = buffer.view();
  const int lead = single ? 0 : 1;
  if (view.ndim != static_cast<int>(form.shape.size()) + lead) return kLeft;
  if (!std::equal(form.shape.begin(), form.shape.end(), view.shape + lead)) return kLeft;
  const int64_t count = single ? 1 : view.shape[0];
  const bool is_stored = KindOf(view.format) == form.kind && view.itemsize == form.item_bytes;
  if (is_stored) return {static_cast<const char*>(view.buf), count};
  return {ConvertedArray(form, view, into), count};
}

// Reads the rows of one column of environments' steps, call after call. Not thread-safe.
class StepRowReader {
 public:
  explicit StepRowReader(RowForm form) : form_(std::move(form)) {}

  const RowForm& form() const { return form_; }

  // Returns the address of `num_rows` rows that an object holds, null if they are left to Python.
  // It is valid until the next call, and while `buffers` hold the object. Rows without a shape may
  // have one of [1], and a single row no axis of rows; with `admits_numbers` it may be a number.
  const char* Read(PyObject* object, int64_t num_rows, bool admits_numbers,
                   std::vector<Buffer>* buffers) {
    const bool may_be_number = admits_numbers && num_rows == 1 && form_.shape.empty();
    if (may_be_number) {
      const std::optional<Number> number = ReadNumber(object);
      if (number.has_value()) return ConvertedNumber(form_, *number, &converted_);
    }
    const Buffer& buffer = buffers->emplace_back(object);
    if (!buffer.held()) return nullptr;
    const Py_buffer& view = buffer.view();
    if (may_be_number && view.ndim == 0) {
      const std::optional<Number> number = ReadNumber(view.format, view.itemsize, view.buf);
      return number.has_value() ? ConvertedNumber(form_, *number, &converted_) : nullptr;
    }
    if (!HasShape(view, num_rows)) return nullptr;
    if (KindOf(view.format) == form_.kind && view.itemsize == form_.item_bytes)
      return static_cast<const char*>(view.buf);
    return ConvertedArray(form_, view, &converted_);
  }

 private:
  bool HasShape(const Py_buffer& view, int64_t num_rows) const {
    const auto rank = static_cast<int>(form_.shape.size());
    const int lead = num_rows == 1 && view.ndim == rank && rank > 0 ? 0 : 1;
    if (lead == 1 && (view.ndim < 1 || view.shape[0] != num_rows)) return false;
    if (rank == 0) return view.ndim == 1 || (view.ndim == 2 && view.shape[1] == 1);
    if (view.ndim != rank + lead) return false;
    return std::equal(form_.shape.begin(), form_.shape.end(), view.shape + lead);
  }

  RowForm form_;
  std::vector<char> converted_;
};

}  // namespace gear::python
