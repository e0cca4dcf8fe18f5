"""A sample of a column's rows, taken while they are written, from which quantiles are guessed."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Int64 = NDArray[np.int64]
_LEAST_ROWS = 1 << 15  # that are sampled, where there are as many
_SHARE_BITS = 7  # one of 128 rows is sampled, of a column with more of them
_MIX = np.uint64(0x9E3779B97F4A7C15)


class RowSample:
    """Some rows of a column, spread evenly over all of them; all rows of a short column.

    The file is divided into strata of 2^level rows, of which one row each is sampled. When there
    are too many, every two strata become one, which keeps the row of one of them: which one depends
    on their number alone. So the sample does not depend on how rows are passed on.
    """

    def __init__(self, row_bytes: int, num_bytes: int) -> None:
        """Make an empty sample.

        Args:
            row_bytes: Bytes of a row.
            num_bytes: Bytes of the sampled rows, at most.
        """
        self._fitting_rows = max(2, num_bytes // row_bytes)
        self._level = 0
        self._num_rows = 0  # of the file
        self._num_sampled = 0
        self._rows: list[NDArray[np.generic]] = []
        self._keep: list[NDArray[np.bool_]] = []

    @property
    def _most_rows(self) -> int:
        """Most rows of the sample."""
        return min(self._fitting_rows, max(_LEAST_ROWS, self._num_rows >> _SHARE_BITS))

    @property
    def is_complete(self) -> bool:
        """Whether all rows are in it."""
        return self._level == 0

    def add(self, rows: NDArray[np.generic], keep: NDArray[np.bool_] | None) -> None:
        """Add the next rows of the file, of which some may not count."""
        first = self._num_rows
        self._num_rows += len(rows)
        # A long block would be copied as a whole before most of its rows are left out again.
        while len(rows) >> self._level > 2 * self._most_rows:
            self._halve()
        strata = np.arange(first >> self._level, (self._num_rows - 1 >> self._level) + 1)
        picks = self._picks(strata) - first
        picks = picks[(picks >= 0) & (picks < len(rows))]
        if not len(picks):
            return
        self._rows.append(rows[picks])
        self._keep.append(np.ones(len(picks), np.bool_) if keep is None else keep[picks])
        self._num_sampled += len(picks)
        while self._num_sampled > self._most_rows:
            self._halve()

    def kept_rows(self) -> NDArray[np.generic]:
        """Return the sampled rows that count."""
        return np.concatenate(self._rows)[np.concatenate(self._keep)]

    def _picks(self, strata: Int64) -> Int64:
        """Return the sampled row of each stratum."""
        for level in range(self._level, 0, -1):
            strata = 2 * strata + _bits(strata, level)
        return strata

    def _halve(self) -> None:
        self._level += 1
        if not self._rows:
            return
        strata = np.arange(self._num_sampled + 1 >> 1)
        kept = 2 * strata + _bits(strata, self._level)
        kept = kept[kept < self._num_sampled]
        self._rows = [np.concatenate(self._rows)[kept]]
        self._keep = [np.concatenate(self._keep)[kept]]
        self._num_sampled = len(kept)


def _bits(strata: Int64, level: int) -> Int64:
    """Return 0 or 1 for each stratum, as if by chance."""
    mixed = (strata.astype(np.uint64) * np.uint64(64) + np.uint64(level)) * _MIX
    mixed ^= mixed >> np.uint64(29)
    return np.asarray((mixed * _MIX) >> np.uint64(63)).astype(np.int64)
