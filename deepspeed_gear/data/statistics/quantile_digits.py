"""The values around quantiles of a column of any size: digits of their keys are counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deepspeed_gear.data.statistics.column_scan import CODES
from deepspeed_gear.data.statistics.quantiles import Bool, UInt64, divided, no_values, ranks_around
from deepspeed_gear.data.statistics.running_moments import Float64
from deepspeed_gear.data.statistics.value_keys import keys_of, values_of
from deepspeed_gear.data.stored_values import as_float64
from deepspeed_gear.ops.backends import existing_native
from deepspeed_gear.schema import Column

#: Rows in file order, in parts, each with which of them count; None: all of them do.
Parts = Callable[[], Iterator[tuple[NDArray[np.generic], Bool | None]]]

_COUNT_BYTES = 128 << 20  # of the counts of one pass, of all threads together
_BIN_BYTES = 12  # a count, and the index of a node
_MOST_BITS = 16  # of a digit
_MOST_ELEMENTS = 4096  # that one task finds


@dataclass(frozen=True)
class _Pass:
    """A digit of all keys: (key >> shift) & (2^bits - 1)."""

    shift: int
    bits: int
    #: Node of the next pass that a digit of a node leads to, -1: none. [nodes, 2^bits], int32.
    children: NDArray[np.int32]


class QuantileDigits:
    """The finite values of each element of a column around quantiles, found in several passes.

    A value's key is the unsigned integer whose order is that of the values. A pass over the rows
    counts the highest digit of the keys of each element. The counts show which digit a rank has,
    and the next pass counts the next digit of the keys that share it. After the last digit the key
    is known. So the result is exact, and the memory does not depend on the number of rows.

    Cost: 2 passes over up to 16 elements of 4 bytes, 4 over those of 8; one or two more over wide
    rows, whose digits are shorter.
    """

    def __init__(
        self, parts: Parts, num_bytes: int, column: Column, levels: Float64, num_threads: int = 1
    ) -> None:
        """Prepare the tasks.

        Args:
            parts: Called once for each pass.
            num_bytes: Bytes of all rows.
            column: The column.
            levels: Ascending levels in [0, 1].
            num_threads: Threads for which the elements are divided.
        """
        num_elements = column.num_elements
        self._parts = parts
        self._column = column
        self._levels = levels
        self._native = existing_native(num_bytes)
        self._num_tasks = max(-(-num_elements // _MOST_ELEMENTS), min(num_threads, num_elements))
        self._count_bytes = _COUNT_BYTES // min(num_threads, self._num_tasks)
        #: What the tasks find, as in `no_values`.
        self.found = no_values(levels, num_elements)

    @property
    def tasks(self) -> list[Callable[[], None]]:
        """Tasks that find the values; they may run at the same time."""
        return divided(self._find, self._column.num_elements, self._num_tasks)

    def _find(self, first: int, end: int) -> None:
        """Find the values around quantiles of elements [first, end)."""
        num_elements = end - first
        num_ranks = 2 * len(self._levels)
        # Of each rank of each element: the node that its key has reached, its rank there, its key.
        nodes = np.broadcast_to(np.arange(num_elements), (num_ranks, num_elements)).copy()
        ranks = np.zeros((num_ranks, num_elements), np.int64)
        keys = np.zeros((num_ranks, num_elements), np.uint64)
        passes: list[_Pass] = []
        num_nodes = num_elements
        shift = 8 * self._column.numpy_dtype.itemsize
        while shift > 0 and num_nodes > 0:
            # All bins fit into the bytes: of 17 elements and 64 MiB they have 16 bits.
            fitting = self._count_bytes // (_BIN_BYTES * num_nodes)
            bits = min(shift, _MOST_BITS, max(1, fitting.bit_length() - 1))
            shift -= bits
            passes.append(_Pass(shift, bits, np.full((num_nodes, 1 << bits), -1, np.int32)))
            counts = self._count(first, end, passes)
            if len(passes) == 1:  # its nodes are the elements
                num_finite = counts.sum(axis=1, dtype=np.int64)
                self.found[0, first:end] = num_finite
                ranks = ranks_around(self._levels, num_finite)
                nodes[:, num_finite == 0] = -1
            num_nodes = _descend(counts, passes[-1], nodes, ranks, keys)
        self.found[1:, first:end] = np.where(nodes >= 0, values_of(keys, self._column), np.nan)

    def _count(self, first: int, end: int, passes: list[_Pass]) -> UInt64:
        """Count the digits of the last pass. [nodes, 2^bits]."""
        column = self._column
        counts = np.zeros(passes[-1].children.shape, np.uint64)
        words = [(one.shift, one.bits, one.children.ctypes.data) for one in passes]
        table = np.array(words, np.int64)
        for rows, keep in self._parts():
            if self._native is None:
                kept = rows if keep is None else rows[keep]
                flat = kept.reshape(len(kept), column.num_elements)
                _count_plainly(flat[:, first:end], column, passes, counts)
                continue
            self._native.quantile_digits_count(
                rows.ctypes.data,
                CODES[column.dtype],
                len(rows),
                column.num_elements,
                first,
                end - first,
                0 if keep is None else keep.ctypes.data,
                table.ctypes.data,
                len(table),
                counts.ctypes.data,
            )
        return counts


def _descend(
    counts: UInt64,
    digits: _Pass,
    nodes: NDArray[np.int64],
    ranks: NDArray[np.int64],
    keys: UInt64,
) -> int:
    """Find the digit of each rank; return the number of nodes of the next pass.

    `nodes`, `ranks` and `keys` are overwritten, and the nodes' children are set.
    """
    num_nodes = 0
    order = np.argsort(nodes, axis=None, kind="stable")
    starts = np.flatnonzero(np.diff(nodes.reshape(-1)[order], prepend=-2))
    for places in np.split(order, starts[1:]):
        node = int(nodes.flat[places[0]])
        if node < 0:
            continue
        until = np.cumsum(counts[node], dtype=np.int64)
        # Of counts [2, 0, 3] there are [2, 2, 5] values with up to each digit: rank 2 has digit 2,
        # and is the first with it.
        digit = np.searchsorted(until, ranks.flat[places], side="right")
        before = np.where(digit > 0, until[digit - 1], 0)
        ranks.flat[places] -= before
        keys.flat[places] |= digit.astype(np.uint64) << np.uint64(digits.shift)
        known = np.unique(digit)
        digits.children[node, known] = np.arange(num_nodes, num_nodes + len(known))
        num_nodes += len(known)
        nodes.flat[places] = digits.children[node, digit]
    return num_nodes


def _count_plainly(
    rows: NDArray[np.generic],
    column: Column,
    passes: list[_Pass],
    counts: UInt64,
) -> None:
    """Add the digits of the last pass, as the native op counts them."""
    is_finite = np.isfinite(as_float64(rows, column))
    keys = keys_of(rows, column)[is_finite]
    node = np.broadcast_to(np.arange(rows.shape[1]), rows.shape)[is_finite]
    for one in passes:
        digit = (keys >> np.uint64(one.shift)).astype(np.int64) & ((1 << one.bits) - 1)
        if one is passes[-1]:
            found, times = np.unique((node << one.bits) + digit, return_counts=True)
            counts.reshape(-1)[found] += times.astype(np.uint64)
            return
        node = one.children[node, digit].astype(np.int64)
        is_wanted = node >= 0
        node = node[is_wanted]
        keys = keys[is_wanted]
