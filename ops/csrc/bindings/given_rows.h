// Rows of a column as a program gives them, in the stored form: rows of that form are read in
// place, Python and NumPy numbers of other types are converted. What is left to Python:
// conversions of large arrays, and all that it refuses (data/trajectory_checks.py, `cast`).
#pragma once
#include <Python.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <optional>
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

// Reads the rows of one column, call after call. Not thread-safe.
class GivenRows {
 public:
  explicit GivenRows(RowForm form) : form_(std::move(form)) {}

  const RowForm& form() const { return form_; }

  // Returns the address of `num_rows` rows that an object holds, null if they are left to Python.
  // It is valid until the next call, and while `buffers` hold the object. Rows without a shape may
  // have one of [1], and a single row no axis of rows; with `admits_numbers` it may be a number.
  const char* Read(PyObject* object, int64_t num_rows, bool admits_numbers,
                   std::vector<Buffer>* buffers) {
    const bool may_be_number = admits_numbers && num_rows == 1 && form_.shape.empty();
    if (may_be_number) {
      const std::optional<Number> number = ReadNumber(object);
      if (number.has_value()) return Converted(*number);
    }
    const Buffer& buffer = buffers->emplace_back(object);
    if (!buffer.held()) return nullptr;
    const Py_buffer& view = buffer.view();
    if (may_be_number && view.ndim == 0) {
      const std::optional<Number> number = ReadNumber(view.format, view.itemsize, view.buf);
      return number.has_value() ? Converted(*number) : nullptr;
    }
    if (!HasShape(view, num_rows)) return nullptr;
    if (KindOf(view.format) == form_.kind && view.itemsize == form_.item_bytes)
      return static_cast<const char*>(view.buf);
    return Convert(view);
  }

 private:
  // A larger array is converted by NumPy, which is faster by element.
  static constexpr Py_ssize_t kMostNumbers = 4096;

  bool HasShape(const Py_buffer& view, int64_t num_rows) const {
    const auto rank = static_cast<int>(form_.shape.size());
    const int lead = num_rows == 1 && view.ndim == rank && rank > 0 ? 0 : 1;
    if (lead == 1 && (view.ndim < 1 || view.shape[0] != num_rows)) return false;
    if (rank == 0) return view.ndim == 1 || (view.ndim == 2 && view.shape[1] == 1);
    if (view.ndim != rank + lead) return false;
    return std::equal(form_.shape.begin(), form_.shape.end(), view.shape + lead);
  }

  const char* Converted(const Number& number) {
    converted_.resize(static_cast<size_t>(form_.item_bytes));
    return WriteNumber(form_, number, converted_.data()) ? converted_.data() : nullptr;
  }

  const char* Convert(const Py_buffer& view) {
    const bool narrows = form_.kind == 'f' && form_.item_bytes == 4 && view.itemsize == 8 &&
                         KindOf(view.format) == 'f';
    // Unsigned rows with a shape may be the bytes of opaque values.
    const bool may_be_opaque = form_.kind == 'u' && !form_.shape.empty();
    const Py_ssize_t count = view.len / view.itemsize;
    if (!narrows && (may_be_opaque || count > kMostNumbers)) return nullptr;
    converted_.resize(static_cast<size_t>(count * form_.item_bytes));
    if (narrows) return Narrow(static_cast<const double*>(view.buf), count);
    const auto* from = static_cast<const char*>(view.buf);
    for (Py_ssize_t i = 0; i < count; ++i) {
      const auto number = ReadNumber(view.format, view.itemsize, from + i * view.itemsize);
      char* to = converted_.data() + i * form_.item_bytes;
      if (!number.has_value() || !WriteNumber(form_, *number, to)) return nullptr;
    }
    return converted_.data();
  }

  // float64 to float32, which the rewards of most environments need: a loop that vectorizes.
  const char* Narrow(const double* from, Py_ssize_t count) {
    auto* to = reinterpret_cast<float*>(converted_.data());
    bool fits = true;
    for (Py_ssize_t i = 0; i < count; ++i) {
      to[i] = static_cast<float>(from[i]);
      fits &= std::isfinite(to[i]) || !std::isfinite(from[i]);
    }
    return fits ? converted_.data() : nullptr;
  }

  RowForm form_;
  std::vector<char> converted_;
};

}  // namespace gear::python
