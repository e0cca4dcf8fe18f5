"""Free runs of rows, derived from the extents in use."""

from __future__ import annotations

import numpy as np


class FreeRows:
    """First-fit allocation of runs of rows. Private to a process; not thread-safe.

    Args:
        num_rows: Rows of the table.
        firsts: First rows of the extents in use. [n], int64.
        counts: Their numbers of rows. [n], int64.
    """

    def __init__(self, num_rows: int, firsts: np.ndarray, counts: np.ndarray) -> None:
        order = np.argsort(firsts, kind="stable")
        begins = np.concatenate([[0], firsts[order] + counts[order]])
        ends = np.concatenate([firsts[order], [num_rows]])
        gaps = ends > begins
        self._runs: list[tuple[int, int]] = list(zip(begins[gaps].tolist(), ends[gaps].tolist(), strict=True))

    @property
    def total(self) -> int:
        return sum(end - begin for begin, end in self._runs)

    @property
    def longest(self) -> int:
        return max((end - begin for begin, end in self._runs), default=0)

    def take(self, count: int) -> int | None:
        """Take the first run of at least `count` rows; return its first row, or None."""
        for i, (begin, end) in enumerate(self._runs):
            if end - begin >= count:
                if end - begin == count:
                    del self._runs[i]
                else:
                    self._runs[i] = (begin + count, end)
                return begin
        return None
