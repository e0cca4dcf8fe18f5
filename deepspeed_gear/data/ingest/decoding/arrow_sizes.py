"""Sizes of Arrow arrays as NumPy arrays or Python objects, computed before any conversion.

Arrow's layouts repeat values without storing them again: a dictionary or a list view may refer to
one value any number of times, and nulls, runs and lists of width 0 have only a length. Converting
them takes memory for every repetition.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

# Bytes of Python objects, about, and rather too many than too few.
ROW_BYTES = 64  # a row: the least that a dict takes
_POINTER_BYTES = 8  # an element of a list, without the object
_TEXT_BYTES = 64  # a str or bytes, without its content
NUMBER_BYTES = 40  # a number and its place in a list
_OBJECT_BYTES = 168  # a decimal, a date or a time
_LIST_BYTES = 120  # a list, or a view of an array
_TUPLE_BYTES = 64  # a pair of key and value
_MAPPING_BYTES = 200  # a dict without its entries
_KEY_BYTES = 48  # an entry of a dict, without the value
# Bytes of each element: one number for all, or an array with one for each. They are floats because
# sums of untrusted lengths would overflow integers.
Costs: TypeAlias = "float | NDArray[np.float64]"


class ArrowSizes:
    """Estimate of the memory that converted Arrow arrays take.

    The arrays must have passed `validate()`, but not `validate(full=True)`: the contents of their
    buffers, such as offsets and dictionary indices, are not trusted.
    """

    def __init__(self, check: Callable[[int], None]) -> None:
        """Start an estimate.

        Args:
            check: Raises if a number of bytes is too large. It is called before the estimate itself
                allocates about that much.
        """
        self._check = check

    def column_bytes(self, arrow: Any, array: Any, are_objects: bool = False) -> int:
        """Return the bytes of a converted column, after `check` has accepted them.

        Args:
            arrow: The module pyarrow.
            array: The column.
            are_objects: Numbers become Python objects as well, as they do below structs and beside
                nulls.
        """
        costs = self._costs(arrow, array, are_objects)
        num_bytes = int(costs.sum() if isinstance(costs, np.ndarray) else costs * len(array))
        self._check(num_bytes)
        return num_bytes

    def _costs(self, arrow: Any, array: Any, are_objects: bool) -> Costs:
        """Return the bytes of each element, including its place in a list."""
        kind = array.type
        types = arrow.types
        if isinstance(kind, arrow.BaseExtensionType):
            return self._costs(arrow, array.storage, are_objects)
        if types.is_null(kind):
            return _POINTER_BYTES
        if types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind):
            is_object = are_objects or array.null_count
            return NUMBER_BYTES if is_object else max(1, kind.bit_width // 8)
        self._check(len(array) * _POINTER_BYTES)  # the array of costs takes as much
        if types.is_dictionary(kind):
            costs = self._costs(arrow, array.dictionary, are_objects or bool(array.null_count))
            self._check_least(costs, len(array))
            return _taken(costs, np.asarray(array.indices.fill_null(0)))
        if types.is_run_end_encoded(kind):
            return self._costs_of_runs(arrow, array)
        if types.is_struct(kind):
            parts = [
                self._costs(arrow, array.field(i), are_objects) for i in range(kind.num_fields)
            ]
            own = _MAPPING_BYTES + _KEY_BYTES * len(parts) if are_objects else 0.0
            return sum(parts, own)
        if types.is_union(kind):
            return self._costs_of_union(arrow, array)
        if types.is_map(kind):
            low, high, lengths = _spans(array)
            parts = [part.slice(low, high - low) for part in (array.keys, array.items)]
            each = sum((self._costs(arrow, part, True) for part in parts), float(_TUPLE_BYTES))
            return _costs_of_lists(each, np.cumsum(lengths) - lengths, lengths)
        if types.is_list(kind) or types.is_large_list(kind):
            low, high, lengths = _spans(array)
            inner = array.values.slice(low, high - low)
            each = self._costs(arrow, inner, are_objects or bool(array.null_count))
            return _costs_of_lists(each, np.cumsum(lengths) - lengths, lengths)
        if types.is_list_view(kind) or types.is_large_list_view(kind):
            each = self._costs(arrow, array.values, True)
            return _costs_of_lists(each, np.asarray(array.offsets), np.asarray(array.sizes))
        if types.is_fixed_size_list(kind):
            size = kind.list_size
            inner = array.values.slice(array.offset * size, len(array) * size)
            each = self._costs(arrow, inner, are_objects or bool(array.null_count))
            if isinstance(each, np.ndarray):
                each = np.asarray(each.reshape(len(array), size).sum(axis=1))
                size = 1
            return each * float(size) + _LIST_BYTES
        self._check(len(array) * _TEXT_BYTES)
        return _costs_of_values(types, array)

    def _check_least(self, costs: Costs, length: int) -> None:
        """Check the least that `length` values take, before each gets a cost of its own."""
        least = costs.min(initial=np.inf) if isinstance(costs, np.ndarray) else costs
        self._check(int(least * length) if np.isfinite(least) else 0)

    def _costs_of_runs(self, arrow: Any, array: Any) -> Costs:
        """Return the costs of run-end encoded elements.

        `run_ends` holds the index after each run: of the run ends [2, 5], elements 0 and 1 have
        value 0, and elements 2 to 4 have value 1.
        """
        costs = self._costs(arrow, array.values, True)
        self._check_least(costs, len(array))
        places = np.arange(len(array), dtype=np.int64) + array.offset
        return _taken(costs, np.searchsorted(np.asarray(array.run_ends), places, side="right"))

    def _costs_of_union(self, arrow: Any, array: Any) -> Costs:
        kind = array.type
        length = len(array)
        buffers = array.buffers()
        codes = np.frombuffer(buffers[1] or b"", np.int8)[array.offset :][:length]
        places: NDArray[Any] = np.arange(length)
        if kind.mode == "dense":
            places = np.frombuffer(buffers[2] or b"", np.int32)[array.offset :][:length]
        costs = np.zeros(length)
        for number, code in enumerate(kind.type_codes):
            chosen = np.flatnonzero(codes == code)
            costs[chosen] = _taken(self._costs(arrow, array.field(number), True), places[chosen])
        return costs


def _costs_of_lists(each: Costs, firsts: NDArray[Any], lengths: NDArray[Any]) -> Costs:
    """Return the costs of lists from those of their elements; lists may share elements."""
    lengths = np.maximum(lengths.astype(np.int64), 0)
    if not isinstance(each, np.ndarray):
        return lengths * float(each) + _LIST_BYTES
    before = np.append(0.0, np.cumsum(each))  # for [3, 5] it is [0, 3, 8]
    firsts = firsts.astype(np.int64)
    return np.asarray(_taken(before, firsts + lengths) - _taken(before, firsts) + _LIST_BYTES)


def _taken(costs: Costs, places: NDArray[Any]) -> Costs:
    """Return the costs at places, clipped to the valid ones, as places are not trusted."""
    if not isinstance(costs, np.ndarray):
        return costs
    if not len(costs):
        return np.zeros(len(places))
    return np.asarray(costs[np.clip(places.astype(np.int64), 0, len(costs) - 1)])


def _spans(array: Any) -> tuple[int, int, NDArray[np.int64]]:
    """Return the first element of a list column, the end of the last list, and all lengths."""
    offsets = np.asarray(array.offsets).astype(np.int64)
    low, high = (int(offsets[0]), int(offsets[-1])) if len(offsets) else (0, 0)
    return max(0, low), max(0, low, high), np.diff(offsets)


def _costs_of_values(types: Any, array: Any) -> Costs:
    """Return the costs of texts, byte strings and other single values."""
    kind = array.type
    if types.is_fixed_size_binary(kind):
        return _TEXT_BYTES + int(kind.byte_width)
    if types.is_string_view(kind) or types.is_binary_view(kind):
        # A view is four int32: the size, and three words of content or place.
        views = np.frombuffer(array.buffers()[1] or b"", np.int32).reshape(-1, 4)
        sizes = views[array.offset : array.offset + len(array), 0].astype(np.int64)
    elif types.is_binary(kind) or types.is_string(kind):
        sizes = _differences(array, np.dtype(np.int32))
    elif types.is_large_binary(kind) or types.is_large_string(kind):
        sizes = _differences(array, np.dtype(np.int64))
    else:
        return _OBJECT_BYTES
    if array.null_count:
        sizes = np.where(np.asarray(array.is_valid()), sizes, 0)
    return np.maximum(sizes, 0).astype(np.float64) + _TEXT_BYTES


def _differences(array: Any, dtype: np.dtype[Any]) -> NDArray[np.int64]:
    if not len(array):
        return np.zeros(0, np.int64)
    offsets = np.frombuffer(
        array.buffers()[1], dtype, len(array) + 1, array.offset * dtype.itemsize
    )
    return np.asarray(np.diff(offsets.astype(np.int64)))
