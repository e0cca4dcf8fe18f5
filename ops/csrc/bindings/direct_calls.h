// Functions of C++ as plain functions of Python, without pybind11: arguments, errors, the GIL.
//
// A call through pybind11 takes up to 0.8 us more. Of an op, the work of torch's dispatcher for
// devices, gradients and tracing takes longer than the op over a small batch, and tensors of a
// store need none of it.
#pragma once
#include <Python.h>

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <c10/util/MaybeOwned.h>
#include <c10/util/SmallVector.h>

#include <exception>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>

namespace gear::direct {

struct PythonError : std::exception {};  // Python's error indicator is set

[[noreturn]] inline void RaiseType(const char* expected, PyObject* got) {
  PyErr_Format(PyExc_TypeError, "gear: expected %s, got %s", expected, Py_TYPE(got)->tp_name);
  throw PythonError{};
}

// The caller's reference keeps the tensor alive, and an unchanged list those in it: counting
// another reference would need the GIL. Defined in module.cpp: torch's header for Python tensors
// takes longer to compile than all ops, so that one source alone includes it.
at::Tensor& AsTensor(PyObject* object);

inline int64_t AsInt(PyObject* object) {
  const int64_t value = PyLong_AsLongLong(object);
  if (value == -1 && PyErr_Occurred() != nullptr) throw PythonError{};
  return value;
}

inline double AsDouble(PyObject* object) {
  const double value = PyFloat_AsDouble(object);
  if (value == -1 && PyErr_Occurred() != nullptr) throw PythonError{};
  return value;
}

template <typename T>
T* AddressOf(PyObject* number) {
  void* address = PyLong_AsVoidPtr(number);
  if (PyErr_Occurred() != nullptr) throw PythonError{};
  return static_cast<T*>(address);
}

// One argument: converts it from Python, keeps what the function refers to, passes it on. An object
// of C++ is given by its address.
template <typename T, typename = void>
struct Argument {
  explicit Argument(PyObject* object) : value(*AddressOf<T>(object)) {}
  T& value;
};

template <typename T>
struct Argument<T*> {
  explicit Argument(PyObject* object) : value(AddressOf<T>(object)) {}
  T* value;
};

template <>
struct Argument<PyObject*> {
  explicit Argument(PyObject* object) : value(object) {}
  PyObject* value;
};

template <typename T>
struct Argument<T, std::enable_if_t<std::is_arithmetic_v<T>>> {
  explicit Argument(PyObject* object) {
    if constexpr (std::is_same_v<T, bool>)
      value = PyObject_IsTrue(object) == 1;
    else if constexpr (std::is_floating_point_v<T>)
      value = AsDouble(object);
    else
      value = static_cast<T>(AsInt(object));
  }
  T value;
};

template <>
struct Argument<at::Tensor> {
  explicit Argument(PyObject* object) : value(AsTensor(object)) {}
  at::Tensor& value;
};

template <>
struct Argument<std::optional<at::Tensor>> {
  explicit Argument(PyObject* object) {
    if (object != Py_None) value = AsTensor(object);
  }
  std::optional<at::Tensor> value;
};

// Calls visit(item) for each item of a list or a tuple.
template <typename Visit>
void ForEach(PyObject* list, const Visit& visit) {
  if (!PyList_Check(list) && !PyTuple_Check(list)) RaiseType("a list or a tuple", list);
  const Py_ssize_t size = PySequence_Fast_GET_SIZE(list);
  for (Py_ssize_t i = 0; i < size; ++i) visit(PySequence_Fast_ITEMS(list)[i]);
}

template <>
struct Argument<at::TensorList> {
  using Borrow = c10::MaybeOwnedTraits<at::Tensor>;
  explicit Argument(PyObject* list) {
    ForEach(list, [](PyObject* item) { AsTensor(item); });  // raises before anything is borrowed
    ForEach(list, [&](PyObject* item) { value.push_back(Borrow::createBorrow(AsTensor(item))); });
  }
  ~Argument() {
    for (at::Tensor& tensor : value) Borrow::destroyBorrow(tensor);
  }
  Argument(const Argument&) = delete;
  Argument& operator=(const Argument&) = delete;
  c10::SmallVector<at::Tensor, 16> value;
};

template <>
struct Argument<at::IntArrayRef> {
  explicit Argument(PyObject* list) {
    ForEach(list, [&](PyObject* item) { value.push_back(AsInt(item)); });
  }
  c10::SmallVector<int64_t, 64> value;
};

template <>
struct Argument<at::ArrayRef<double>> {
  explicit Argument(PyObject* list) {
    ForEach(list, [&](PyObject* item) { value.push_back(AsDouble(item)); });
  }
  c10::SmallVector<double, 16> value;
};

// Other threads of Python run meanwhile, as during an op of torch's.
class WithoutLock {
 public:
  WithoutLock() : state_(PyEval_SaveThread()) {}
  ~WithoutLock() { PyEval_RestoreThread(state_); }
  WithoutLock(const WithoutLock&) = delete;
  WithoutLock& operator=(const WithoutLock&) = delete;

 private:
  PyThreadState* state_;
};

template <typename T>
PyObject* ToPython(T result) {
  if constexpr (std::is_pointer_v<T>)
    return result;
  else if constexpr (std::is_same_v<T, bool>)
    return PyBool_FromLong(result);
  else
    return PyLong_FromLongLong(static_cast<long long>(result));
}

template <bool kUnlocked, typename T, typename... Ts, size_t... Is>
PyObject* CallWith(T (*function)(Ts...), PyObject* const* given, std::index_sequence<Is...>) {
  std::tuple<Argument<std::decay_t<Ts>>...> arguments(given[Is]...);
  const auto call = [&] {
    std::optional<WithoutLock> unlocked;
    if (kUnlocked) unlocked.emplace();
    return function(std::get<Is>(arguments).value...);
  };
  if constexpr (std::is_void_v<T>) {
    call();
    Py_RETURN_NONE;
  } else {
    return ToPython(call());
  }
}

// How many arguments an op has at least: those that may be None are left out at the end.
template <typename... Ts>
constexpr size_t NumNeeded() {
  constexpr bool kMayBeNone[] = {std::is_same_v<std::decay_t<Ts>, std::optional<at::Tensor>>...,
                                 false};
  size_t needed = sizeof...(Ts);
  while (needed > 0 && kMayBeNone[needed - 1]) --needed;
  return needed;
}

template <bool kUnlocked, typename T, typename... Ts>
PyObject* CallChecked(T (*function)(Ts...), PyObject* const* given, Py_ssize_t count) {
  constexpr size_t kNeeded = NumNeeded<Ts...>(), kMost = sizeof...(Ts);
  const auto have = static_cast<size_t>(count);
  if (have < kNeeded || have > kMost) {
    PyErr_Format(PyExc_TypeError, "gear: expected %zu arguments, got %zd", kMost, count);
    throw PythonError{};
  }
  PyObject* all[kMost + 1];
  for (size_t i = 0; i < kMost; ++i) all[i] = i < have ? given[i] : Py_None;
  return CallWith<kUnlocked>(function, all, std::index_sequence_for<Ts...>{});
}

// A METH_FASTCALL function; its exception becomes Python's error.
template <auto* kFunction, bool kUnlocked>
PyObject* Call(PyObject*, PyObject* const* given, Py_ssize_t count) {
  try {
    return CallChecked<kUnlocked>(kFunction, given, count);
  } catch (const PythonError&) {
  } catch (const c10::Error& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what_without_backtrace());
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

// `kUnlocked`: it uses nothing of Python's, so that other threads run meanwhile.
template <auto* kFunction, bool kUnlocked = false>
PyMethodDef Function(const char* name, const char* signature) {
  void* call = reinterpret_cast<void*>(&Call<kFunction, kUnlocked>);
  return {name, reinterpret_cast<PyCFunction>(call), METH_FASTCALL, signature};
}

}  // namespace gear::direct
