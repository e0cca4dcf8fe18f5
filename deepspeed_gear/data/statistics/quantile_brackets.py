"""The values around quantiles of a column, from one pass that counts brackets given by a sample."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from deepspeed_gear.data.statistics.column_scan import CODES
from deepspeed_gear.data.statistics.quantiles import (
    Bool,
    Int64,
    UInt64,
    divided,
    no_values,
    ranks_around,
)
from deepspeed_gear.data.statistics.row_sample import RowSample
from deepspeed_gear.data.statistics.running_moments import Float64
from deepspeed_gear.data.statistics.value_keys import keys_of, values_of
from deepspeed_gear.data.stored_values import not_finite
from deepspeed_gear.ops.backends import existing_native
from deepspeed_gear.schema import Column

#: Some blocks of rows in any order, each with which of its rows count; None: all of them do. The
#: arguments are the number of the share, and the number of shares that all blocks are divided into.
Shares = Callable[[int, int], Iterator[tuple[NDArray[np.generic], Bool | None]]]

_DEVIATIONS = 4.0  # half the width of a bracket: one in 15,000 does not have its quantile
_LEAST_SAMPLED = 1024  # finite values, of which brackets are narrow enough
_MOST_TIES = 16  # in a sample, of a value that is not counted by itself
_KEY_BYTES = 512 << 20  # of collected keys, of all threads together
_ROOM = 1.5  # for keys, as a multiple of their number that the sample shows
_TILE = 4096  # keys beyond that number: at least a tile of CountQuantileBrackets


class QuantileBrackets:
    """The finite values of each element of a column around quantiles, found in one pass.

    A quantile of a sample is near that of all rows: its deviation is known. So each rank gets a
    bracket of keys, and a pass over the rows counts the keys below each bracket and collects those
    in it. The counts show whether a rank is in its bracket, and at which place. So what is found is
    exact, and does not depend on the sample; where a rank is not in its bracket, nothing is found
    (`is_found`), and another way has to be taken. A value that is frequent in the sample has a
    bracket of its own, whose keys are counted only.

    If the sample has all rows, there is no pass.

    Memory: the collected keys, 9% of a column of which 32,768 rows are sampled, 2% with a million.
    Cost: one pass.
    """

    def __init__(
        self,
        shares: Shares,
        sample: RowSample,
        num_finite: Float64,
        num_rows: int,
        column: Column,
        levels: Float64,
        num_threads: int = 1,
    ) -> None:
        """Prepare the tasks.

        Args:
            shares: Yields the rows, for the pass.
            sample: Sample of the rows.
            num_finite: Finite values of each element. [elements].
            num_rows: Rows that count.
            column: The column.
            levels: Ascending levels in [0, 1].
            num_threads: Threads for which rows and elements are divided.
        """
        self._shares = shares
        self._sample = sample
        self._num_rows = num_rows
        self._column = column
        self._levels = levels
        self._num_threads = num_threads
        self._native = existing_native(num_rows * column.row_bytes)
        self._key_dtype = np.dtype(np.uint64 if column.numpy_dtype.itemsize > 4 else np.uint32)
        self._ranks = ranks_around(levels, num_finite.astype(np.int64))
        self._brackets: list[list[tuple[int, int]]] = []  # least and greatest key, by element
        self._counts: list[_Counts] = []
        #: What the tasks find, as in `no_values`.
        self.found = no_values(levels, column.num_elements)
        self.found[0] = num_finite
        #: Whether all values are found, after the tasks.
        self.is_found = True

    def rounds(self) -> Iterator[list[Callable[[], None]]]:
        """Yield tasks that may run at the same time; all of them before the next ones are made."""
        if self._sample.is_complete:
            yield [self._find_in_sample]
            return
        yield [self._make_brackets]
        if not self.is_found:
            return
        shares = range(len(self._counts))
        yield [functools.partial(self._count, number) for number in shares]
        num_elements = self._column.num_elements
        yield divided(self._select, num_elements, min(num_elements, 4 * self._num_threads))
        self._counts.clear()

    def _sampled_keys(self) -> NDArray[np.unsignedinteger]:
        """Return the keys of the sample in ascending order; those that are not finite come last."""
        sampled = np.ascontiguousarray(self._keys(self._sample.kept_rows()).T)
        sampled.sort(axis=1)
        return sampled

    def _find_in_sample(self) -> None:
        """Find the values of all elements in a sample that has all rows."""
        known = self.found[0] > 0
        keys = np.take_along_axis(self._sampled_keys()[known], self._ranks.T[known], axis=1)
        self.found[1:, known] = values_of(keys.T.astype(np.uint64), self._column)

    def _make_brackets(self) -> None:
        num_elements = self._column.num_elements
        sampled = self._sampled_keys()
        num_sampled = (sampled <= self._last_key).sum(axis=1)
        if num_sampled.min() < _LEAST_SAMPLED:
            self.is_found = False
            return
        most_share = 0.0
        for element in range(num_elements):
            keys = sampled[element, : num_sampled[element]]
            brackets = _brackets(keys, self._levels, self._last_key)
            self._brackets.append(brackets)
            inside = sum(_count(keys, low, high) for low, high in brackets if low < high)
            most_share = max(most_share, inside / len(keys))
        num_shares = self._num_threads
        capacity = int(_ROOM * most_share * self._num_rows / num_shares) + _TILE
        num_bytes = num_shares * num_elements * capacity * self._key_dtype.itemsize
        if num_bytes > _KEY_BYTES:
            self.is_found = False
            return
        most = max(map(len, self._brackets))
        for _ in range(num_shares):
            self._counts.append(
                _Counts(
                    np.empty((num_elements, capacity), self._key_dtype),
                    np.zeros(num_elements, np.int64),
                    np.zeros((num_elements, most, 2), np.int64),
                )
            )

    @property
    def _last_key(self) -> int:
        """The greatest key that a finite value may have."""
        return int(np.iinfo(self._key_dtype).max) - int(self._column.is_floating)

    def _keys(self, rows: NDArray[np.generic]) -> NDArray[np.unsignedinteger]:
        """Return the keys of rows, the greatest one for values that are not finite. [rows, n]."""
        flat = rows.reshape(len(rows), self._column.num_elements)
        keys = keys_of(flat, self._column).astype(self._key_dtype)
        if self._column.is_floating:
            keys[not_finite(flat, self._column)] = np.iinfo(self._key_dtype).max
        return keys

    def _count(self, share: int) -> None:
        """Count the rows of a share."""
        column = self._column
        counts = self._counts[share]
        num_of = np.array([len(brackets) for brackets in self._brackets])
        bounds: UInt64 = np.zeros(counts.brackets.shape, np.uint64)
        for element, brackets in enumerate(self._brackets):
            bounds[element, : len(brackets)] = brackets
        for rows, keep in self._shares(share, len(self._counts)):
            if self._native is None:
                self._count_plainly(rows if keep is None else rows[keep], counts)
                continue
            self._native.quantile_brackets_count(
                rows.ctypes.data,
                CODES[column.dtype],
                len(rows),
                column.num_elements,
                0 if keep is None else keep.ctypes.data,
                bounds.ctypes.data,
                num_of.ctypes.data,
                bounds.shape[1],
                counts.brackets.ctypes.data,
                counts.keys.ctypes.data,
                counts.keys.shape[1],
                counts.num_keys.ctypes.data,
            )

    def _count_plainly(self, rows: NDArray[np.generic], counts: _Counts) -> None:
        """Count rows as the native op does."""
        capacity = counts.keys.shape[1]
        for element, keys in enumerate(self._keys(rows).T):
            is_collected = np.zeros(len(keys), np.bool_)
            for place, (low, high) in enumerate(self._brackets[element]):
                is_inside = (keys >= low) & (keys <= high)
                counts.brackets[element, place, 0] += np.count_nonzero(keys < low)
                counts.brackets[element, place, 1] += np.count_nonzero(is_inside)
                is_collected |= is_inside & (low < high)
            collected = keys[is_collected]
            begin = counts.num_keys[element]
            end = begin + len(collected)
            if end <= capacity:
                counts.keys[element, begin:end] = collected
            counts.num_keys[element] = min(end, capacity + 1)

    def _select(self, first: int, end: int) -> None:
        """Find the values of elements [first, end)."""
        for element in range(first, end):  # all have finite values in the sample
            keys = self._keys_of_ranks(element, self._ranks[:, element])
            if keys is None:
                self.is_found = False
                return
            self.found[1:, element] = values_of(keys, self._column)

    def _keys_of_ranks(self, element: int, ranks: Int64) -> UInt64 | None:
        """Return the keys of ranks of an element; None if one is not known."""
        capacity = self._counts[0].keys.shape[1]
        if any(counts.num_keys[element] > capacity for counts in self._counts):
            return None
        brackets = np.array(self._brackets[element], np.uint64)
        counted = sum(counts.brackets[element, : len(brackets)] for counts in self._counts)
        below, inside = np.asarray(counted).T
        place = np.searchsorted(below + inside, ranks, side="right")
        if place.max() == len(brackets) or (ranks < below[place]).any():
            return None
        keys = np.asarray(brackets[place, 0])
        are_collected = brackets[:, 0] < brackets[:, 1]
        is_collected = are_collected[place]
        if is_collected.any():
            # Collected keys in ascending order are those of one bracket after the other: with 4
            # keys in [1, 3], 9 in [4, 4], which are only counted, and 2 in [5, 8], they begin at
            # the places [0, 4, 4].
            own = np.where(are_collected, inside, 0)
            first = np.cumsum(own) - own
            at = (first[place] + ranks - below[place])[is_collected]
            collected = np.concatenate(
                [counts.keys[element, : counts.num_keys[element]] for counts in self._counts]
            )
            keys[is_collected] = self._of_ranks(collected, brackets[are_collected], at)
        return keys

    def _of_ranks(
        self, keys: NDArray[np.unsignedinteger], brackets: UInt64, ranks: Int64
    ) -> UInt64:
        """Return the keys of some ranks among collected keys."""
        known, places = np.unique(ranks, return_inverse=True)
        if self._native is None:
            return np.partition(keys, known)[known].astype(np.uint64)[places]
        bounds = np.ascontiguousarray(brackets)
        found = np.empty(len(known), np.uint64)
        self._native.quantile_keys_select(
            keys.ctypes.data,
            keys.dtype == np.uint64,
            len(keys),
            bounds.ctypes.data,
            len(bounds),
            known.ctypes.data,
            len(known),
            found.ctypes.data,
        )
        return found[places]


@dataclass(eq=False)
class _Counts:
    """What a share of the rows shows."""

    keys: NDArray[np.unsignedinteger]  # that are collected, [elements, capacity]
    num_keys: Int64  # of each element; more than the capacity if they did not fit
    brackets: Int64  # finite keys below each bracket, and those in it. [elements, brackets, 2]


def _brackets(
    keys: NDArray[np.unsignedinteger], levels: Float64, last_key: int
) -> list[tuple[int, int]]:
    """Return disjoint ranges of keys that probably have the quantiles, in ascending order.

    Args:
        keys: Sampled keys of an element, sorted.
        last_key: The greatest key.
    """
    size = len(keys)
    single = set[int]()
    ranges = []
    for level in levels.tolist():
        spread = _DEVIATIONS * np.sqrt(level * (1 - level) * size) + 2
        first = int(level * (size - 1) - spread)
        last = int(level * (size - 1) + spread) + 1
        low = int(keys[first]) if first >= 0 else 0
        high = int(keys[last]) if last < size else last_key
        for key in (low, high):
            if _count(keys, key, key) > _MOST_TIES:
                single.add(key)
        ranges.append((low, high))
    brackets = [(key, key) for key in single]
    # [1, 5] and [4, 9] with the frequent keys 4 and 9 become [1, 3], [4, 4], [5, 8] and [9, 9].
    joined: list[tuple[int, int]] = []
    for low, high in ranges:
        if joined and low <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(high, joined[-1][1]))
        else:
            joined.append((low, high))
    for low, high in joined:
        cuts = [key for key in sorted(single) if low <= key <= high]
        for before, after in pairwise([low - 1, *cuts, high + 1]):
            if before + 1 <= after - 1:
                brackets.append((before + 1, after - 1))
    return sorted(brackets)


def _count(keys: NDArray[np.unsignedinteger], low: int, high: int) -> int:
    """Return how many sorted keys are in [low, high]."""
    bounds = np.array([low, high], keys.dtype)
    begin = np.searchsorted(keys, bounds[0], side="left")
    return int(np.searchsorted(keys, bounds[1], side="right") - begin)
