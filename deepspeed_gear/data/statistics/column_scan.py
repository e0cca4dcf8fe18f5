"""One pass over the rows of a column for its moments or its counts of pixel values.

The native module computes statistics where a build of it exists (ops/csrc/statistics); NumPy gives
the same bits otherwise, several times as slowly. A data set is written where no compiler is, so
nothing is built for it.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from deepspeed_gear.data.statistics.quantiles import Bool, Int64
from deepspeed_gear.data.statistics.row_sample import RowSample
from deepspeed_gear.data.statistics.running_moments import Float64, Moment, add_rows
from deepspeed_gear.data.stored_values import as_float64
from deepspeed_gear.ops.backends import existing_native
from deepspeed_gear.schema import DTYPES, Column

_BLOCK_ELEMENTS = 1 << 15
_BLOCK_ROWS = (16, 4096)  # fewest and most rows of a block
CODES = {name: code for code, name in enumerate(DTYPES)}  # common/convert.h
SAMPLE_BYTES = 32 * 1024 * 1024
_MOST_SAMPLED_ROW = 2048  # bytes: at least 2,048 rows are sampled
_PIXEL_BYTES = 32 * 1024 * 1024


def is_image(column: Column) -> bool:
    """Return whether a column has its statistics by channel."""
    return column.statistics_shape != column.shape


def block_rows(column: Column) -> int:
    """Return the rows of a block, whose moments are computed before they are merged.

    Blocks begin at fixed rows of the file, so moments do not depend on how rows are passed on.
    """
    if column.is_opaque or is_image(column):
        return 1
    low, high = _BLOCK_ROWS
    return max(low, min(high, _BLOCK_ELEMENTS // column.num_elements))


class ColumnScan:
    """Moments of the elements of a column, or counts of its pixel values, over rows in file order.

    Not thread-safe; several scans may run at the same time.
    """

    def __init__(self, column: Column, sample_bytes: int = SAMPLE_BYTES) -> None:
        """Make a scan of no rows.

        Args:
            sample_bytes: Bytes of the sampled rows, at most.
        """
        self.column = column
        #: Sample for brackets of quantiles; None of wide rows, of which it would have too few.
        self.sample: RowSample | None = None
        if column.row_bytes <= _MOST_SAMPLED_ROW and not is_image(column):
            self.sample = RowSample(column.row_bytes, sample_bytes)
        self.moments: Float64 = np.zeros((Moment.NUM_WORDS, column.num_elements))
        #: Counts of pixel values by channel; empty unless the column holds images.
        self.bins: Int64 = np.zeros(0, np.int64)
        self._block_rows = block_rows(column)
        if is_image(column):
            self.moments = np.zeros((Moment.NUM_WORDS, 0))
            self.bins = np.zeros((math.prod(column.statistics_shape), 256), np.int64)

    def add(self, rows: NDArray[np.generic], keep: Bool | None = None) -> None:
        """Add the next rows of the file.

        Args:
            rows: In the stored dtype, [n, *shape] in C order. Every call but the last one has a
                multiple of `block_rows`.
            keep: Which rows count, [n]; None: all of them.
        """
        column = self.column
        if self.sample is not None:
            self.sample.add(rows, keep)
        native = existing_native(rows.nbytes)
        if native is None:
            self._add_plainly(rows.reshape(len(rows), column.num_elements), keep)
            return
        flags = 0 if keep is None else keep.ctypes.data
        at = rows.ctypes.data
        if is_image(column):
            outer, inner, last = _pixels(column)
            bins = self.bins.ctypes.data
            native.pixels_count(at, flags, len(rows), outer, inner, last, bins)
            return
        size = (CODES[column.dtype], len(rows), column.num_elements)
        moments = self.moments.ctypes.data
        native.row_moments_add(at, *size, flags, self._block_rows, moments)

    def _add_plainly(self, rows: NDArray[np.generic], keep: Bool | None) -> None:
        if is_image(self.column):
            shape = self.column.statistics_shape
            channels = np.arange(math.prod(shape)).reshape(shape)
            # Channel c has the bins from 256 * c on; `base` is that number for each element.
            base = np.broadcast_to(256 * channels, self.column.shape).reshape(-1)
            step = max(1, _PIXEL_BYTES // (8 * len(base)))
            kept = rows if keep is None else rows[keep]
            for low in range(0, len(kept), step):
                values = (kept[low : low + step].astype(np.int64) + base).reshape(-1)
                self.bins += np.bincount(values, minlength=self.bins.size).reshape(-1, 256)
            return
        for low in range(0, len(rows), self._block_rows):
            block = rows[low : low + self._block_rows]
            if keep is not None:
                block = block[keep[low : low + self._block_rows]]
            if len(block):
                self.moments = add_rows(self.moments, as_float64(block, self.column))


def _pixels(column: Column) -> tuple[int, int, int]:
    """Return the form [outer, inner, last] of an image whose channels are outer and last."""
    *rest, first, second, last = column.shape
    if last <= first:
        return math.prod(rest), first * second, last
    return math.prod(rest) * first, second * last, 1
