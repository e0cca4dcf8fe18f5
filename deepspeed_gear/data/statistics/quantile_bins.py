"""The values around quantiles of a column in memory: keys are counted in bins of equal width."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from deepspeed_gear.data.statistics.column_scan import CODES
from deepspeed_gear.data.statistics.quantiles import Int64, divided, no_values, ranks_around
from deepspeed_gear.data.statistics.running_moments import Float64
from deepspeed_gear.data.stored_values import as_float64
from deepspeed_gear.ops.backends import existing_native
from deepspeed_gear.schema import Column

_GROUP_ELEMENTS = 16  # that one task searches


class QuantileBins:
    """The finite values of each element of a column around quantiles, found in its array.

    The values in the bins that hold a wanted rank are compared.

    Cost: three passes over the elements, a fourth over those that share a bin with a wanted value;
    320 KiB for each of at most 16 elements.
    """

    def __init__(
        self,
        rows: NDArray[np.generic],
        column: Column,
        runs: Int64,
        levels: Float64,
        num_threads: int = 1,
    ) -> None:
        """Prepare the tasks.

        Args:
            rows: Rows in the stored dtype, [*, *shape] in C order.
            runs: First row and length of each run of rows that counts. [k, 2]
            levels: Ascending levels in [0, 1].
            num_threads: Threads for which the elements are divided.
        """
        num_elements = column.num_elements
        self._rows = rows
        self._column = column
        self._runs = np.ascontiguousarray(runs)
        self._levels = levels
        #: What the tasks find, as in `no_values`.
        self.found = no_values(levels, num_elements)
        self.found[0] = 0
        self._num_tasks = max(-(-num_elements // _GROUP_ELEMENTS), min(num_threads, num_elements))
        self._native = existing_native(rows.nbytes)

    @property
    def tasks(self) -> list[Callable[[], None]]:
        """Tasks that find the values; they may run at the same time."""
        find = self._find_plainly if self._native is None else self._find
        return divided(find, self._column.num_elements, self._num_tasks)

    def _find(self, first: int, end: int) -> None:
        assert self._native is not None
        self._native.quantile_bins_find(
            self._rows.ctypes.data,
            CODES[self._column.dtype],
            self._column.num_elements,
            first,
            end - first,
            self._runs.ctypes.data,
            len(self._runs),
            self._levels.ctypes.data,
            len(self._levels),
            self.found.ctypes.data,
        )

    def _find_plainly(self, first: int, end: int) -> None:
        """Find what the native op does, by a partial sort."""
        part = self._rows.reshape(len(self._rows), -1)[:, first:end]
        kept = [part[:0], *(part[at : at + count] for at, count in self._runs.tolist())]
        numbers = as_float64(np.concatenate(kept), self._column)
        for element in range(first, end):
            values = numbers[:, element - first]
            values = values[np.isfinite(values)]
            self.found[0, element] = len(values)
            if not len(values):
                continue
            ranks = ranks_around(self._levels, np.array([len(values)]))[:, 0]
            self.found[1:, element] = np.partition(values, np.unique(ranks))[ranks]
