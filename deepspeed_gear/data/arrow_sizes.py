"""Sizes of Arrow arrays as NumPy arrays or Python objects, counted before anything is converted.

Arrow's layouts repeat values without taking bytes for them: a dictionary and a list view refer to
one value any number of times, and nulls, runs and lists of no width have a length only. Their
conversion takes memory for each of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

ROW_BYTES = 64  # of a row: a mapping of Python's is at least this large
_POINTER_BYTES = 8  # of each element of a list
_TEXT_BYTES = 64  # of a str or bytes, without its content
NUMBER_BYTES = 40  # of a number as an element of a list
_OBJECT_BYTES = 168  # of a decimal, a date or a time
_LIST_BYTES = 120  # of a list, or of a view of an array
_TUPLE_BYTES = 64  # of a key and a value
_MAPPING_BYTES = 200
_KEY_BYTES = 48
# Of each element: one for all, or one for each. Floats, as sums of untrusted lengths overflow
# integers.
Costs: TypeAlias = "float | NDArray[np.float64]"


class ArrowSizes:
    """Counts the bytes of converted arrays.

    The arrays need not be valid, but for `validate()` without `full`: what their buffers hold is
    not trusted.
    """

    def __init__(self, check: Callable[[int], None]) -> None:
        """`check` raises if a number of bytes is too large; counting itself takes at
        most as many.
        """
        self._check = check

    def column_bytes(self, arrow: Any, array: Any, are_objects: bool = False) -> int:
        """Return the bytes of a column, of which `check` has approved.

        Args:
            arrow: The module pyarrow.
            array: The column.
            are_objects: Numbers become Python objects too, as they do below structs, and beside
                nulls.
        """
        costs = self._costs(arrow, array, are_objects)
        num_bytes = int(costs.sum() if isinstance(costs, np.ndarray) else costs * len(array))
        self._check(num_bytes)
        return num_bytes

    def _costs(self, arrow: Any, array: Any, are_objects: bool) -> Costs:
        """Return the bytes of each element, with its place in a list."""
        kind = array.type
        types = arrow.types
        if isinstance(kind, arrow.BaseExtensionType):
            return self._costs(arrow, array.storage, are_objects)
        if types.is_null(kind):
            return _POINTER_BYTES
        if types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind):
            is_object = are_objects or array.null_count
            return NUMBER_BYTES if is_object else max(1, kind.bit_width // 8)
        self._check(len(array) * _POINTER_BYTES)  # which the costs take themselves
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
            return _sum(_MAPPING_BYTES + _KEY_BYTES * len(parts) if are_objects else 0.0, parts)
        if types.is_union(kind):
            return self._costs_of_union(arrow, array)
        if types.is_map(kind):
            low, high, lengths = _spans(array)
            parts = [part.slice(low, high - low) for part in (array.keys, array.items)]
            each = _sum(_TUPLE_BYTES, [self._costs(arrow, part, True) for part in parts])
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
        """Check as many values as there are, at least, before each of them has a cost
        of its own.
        """
        least = costs.min(initial=np.inf) if isinstance(costs, np.ndarray) else costs
        self._check(int(least * length) if np.isfinite(least) else 0)

    def _costs_of_runs(self, arrow: Any, array: Any) -> Costs:
        """Return the costs of values that are repeated up to the element after each
        run's last one.
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
    """Return the costs of lists, of the costs of their elements; lists may share elements."""
    lengths = np.maximum(lengths.astype(np.int64), 0)
    if not isinstance(each, np.ndarray):
        return lengths * float(each) + _LIST_BYTES
    before = np.append(0.0, np.cumsum(each))  # of [3, 5] it is [0, 3, 8]
    firsts = firsts.astype(np.int64)
    return np.asarray(_taken(before, firsts + lengths) - _taken(before, firsts) + _LIST_BYTES)


def _sum(own: float, parts: list[Costs]) -> Costs:
    total: Costs = own
    for part in parts:
        total = total + part
    return total


def _taken(costs: Costs, places: NDArray[Any]) -> Costs:
    """Return the costs at places, which are not trusted."""
    if not isinstance(costs, np.ndarray):
        return costs
    if not len(costs):
        return np.zeros(len(places))
    return np.asarray(costs[np.clip(places.astype(np.int64), 0, len(costs) - 1)])


def _spans(array: Any) -> tuple[int, int, NDArray[np.int64]]:
    """Return the first element of a column of lists, that after the last one, and the length of
    each list.
    """
    offsets = np.asarray(array.offsets).astype(np.int64)
    low, high = (int(offsets[0]), int(offsets[-1])) if len(offsets) else (0, 0)
    return max(0, low), max(0, low, high), np.diff(offsets)


def _costs_of_values(types: Any, array: Any) -> Costs:
    """Return the costs of texts and other single values."""
    kind = array.type
    if types.is_fixed_size_binary(kind):
        return _TEXT_BYTES + int(kind.byte_width)
    if types.is_string_view(kind) or types.is_binary_view(kind):
        views = np.frombuffer(array.buffers()[1] or b"", np.int32).reshape(
            -1, 4
        )  # the size comes first
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
