"""Statistics of columns, accumulated in float64 over the rows of the training split."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepspeed_gear.data.file_threads import Task, Workers
from deepspeed_gear.data.splits import are_for_training
from deepspeed_gear.data.statistics.column_scan import ColumnScan, block_rows, is_image
from deepspeed_gear.data.statistics.quantile_bins import QuantileBins
from deepspeed_gear.data.statistics.quantile_brackets import QuantileBrackets
from deepspeed_gear.data.statistics.quantile_digits import QuantileDigits
from deepspeed_gear.data.statistics.quantiles import LEVELS, QUANTILES, Int64, interpolated
from deepspeed_gear.data.statistics.running_moments import Float64, Moment
from deepspeed_gear.errors import DataError
from deepspeed_gear.schema import Column, Schema

# Of a column whose quantiles are found by bins where brackets do not find them; those of larger
# ones are found by digits.
MOST_BINNED_BYTES = 256 * 1024 * 1024
# Least spread of normalised values, in units of the last place of their shift. A value is rounded
# by at most half a unit, so it is off by at most 0.1% of the spread.
LEAST_SPREAD = 2.0**9
_SPREADS = 1e-307, 1e307  # deviations whose reciprocals float64 can hold
_BLOCK_BYTES = 4 * 1024 * 1024
_ARRAYS = ("mean", "std", "min", "max")


@dataclass(frozen=True, eq=False)
class ColumnStatistics:
    """Statistics of one column, for each element of its row, or for each channel of images.

    Arrays are [*shape], where `shape` of images has 1 for height and width. They hold NaN where an
    element has no finite value, or where float64 overflows.
    """

    count: int  # rows that were read
    mean: Float64
    std: Float64  # of the population: divided by count
    min: Float64
    max: Float64
    quantiles: dict[str, Float64]  # by level, "0.01" to "0.99", linearly interpolated
    # Rows that the quantiles come from. Fewer than `count` in data sets of earlier versions, which
    # took a sample of large columns.
    quantile_rows: int
    non_finite: int  # NaN and infinite values that were left out, all elements together

    def to_json(self) -> dict[str, Any]:
        """Return nested lists; NaN becomes null."""

        def plain(value: Any) -> Any:
            if isinstance(value, dict):
                return {level: plain(array) for level, array in value.items()}
            is_array = isinstance(value, np.ndarray)
            return np.where(np.isnan(value), np.array(None), value).tolist() if is_array else value

        return {field.name: plain(getattr(self, field.name)) for field in fields(self)}

    @classmethod
    def from_json(cls, entry: Mapping[str, Any], column: Column) -> ColumnStatistics:
        """Reverse `to_json`; KeyError or ValueError if a statistic is absent or misshapen."""
        # Data sets of earlier versions have statistics of images by element.
        shapes = (column.shape, column.statistics_shape)

        def array(values: Any) -> Float64:
            numbers = np.array(values, dtype=np.float64)
            if numbers.shape not in shapes:
                raise ValueError(
                    f"column {column.name} has statistics of shape {list(numbers.shape)}"
                )
            return numbers

        return cls(
            count=int(entry["count"]),
            **{name: array(entry[name]) for name in _ARRAYS},
            quantiles={level: array(entry["quantiles"][level]) for level in QUANTILES},
            quantile_rows=int(entry["quantile_rows"]),
            non_finite=int(entry["non_finite"]),
        )


@dataclass(frozen=True, eq=False)
class KeptRows:
    """The rows of a data set that its statistics cover: those of the kept trajectories."""

    first_rows: Int64  # of each trajectory, [n]
    lengths: Int64  # steps of each trajectory, [n]
    keep: NDArray[np.bool_]  # which trajectories are kept, [n]
    has_final_row: bool  # every extent has one more row than steps

    def count(self, column: Column) -> int:
        """Return the number of a column's kept rows."""
        if column.rows == "1":
            return int(self.keep.sum())
        return int((self.lengths[self.keep] + int(column.rows == "T+1")).sum())

    def mask(self, column: Column, low: int, high: int) -> NDArray[np.bool_]:
        """Return which rows of [low, high) hold values of kept trajectories, and no padding."""
        if column.rows == "1":
            return self.keep[low:high]
        first = int(np.searchsorted(self.first_rows, low, side="right")) - 1
        last = int(np.searchsorted(self.first_rows, high, side="left"))
        starts = self.first_rows[first:last]
        lengths = self.lengths[first:last]
        # The mask covers whole trajectories, from the first one that reaches into [low, high). With
        # final rows, extents of 2 and 3 steps are rows 0 to 2 and 3 to 6; in columns of T rows the
        # rows 2 and 6 are padding.
        mask = np.repeat(self.keep[first:last], lengths + int(self.has_final_row))
        if self.has_final_row and column.rows == "T":
            mask[starts + lengths - starts[0]] = False
        return mask[low - starts[0] : high - starts[0]]

    def runs(self, column: Column) -> Int64:
        """Return the first row and the length of each run of kept rows, as [k, 2], int64."""
        first = self.first_rows[self.keep]
        lengths = self.lengths[self.keep] + int(column.rows == "T+1")
        if column.rows == "1":
            first = np.flatnonzero(self.keep)
            lengths = np.ones_like(first)
        # Runs that touch are one: [[0, 2], [2, 3], [7, 1]] is [[0, 5], [7, 1]].
        ends = first + lengths
        begins = np.flatnonzero(np.concatenate([[True], first[1:] != ends[:-1]]))
        lasts = np.concatenate([begins[1:] - 1, [len(first) - 1]])
        return np.stack([first[begins], ends[lasts] - first[begins]], axis=1)


@dataclass(frozen=True, eq=False)
class _Blocks:
    """The rows of a column that has kept ones, a few MiB at a time."""

    values: NDArray[Any]
    column: Column
    rows: KeptRows

    def __call__(
        self, share: int = 0, num_shares: int = 1
    ) -> Iterator[tuple[NDArray[Any], NDArray[np.bool_] | None]]:
        """Yield blocks with which of their rows are kept; None: all are.

        Args:
            share, num_shares: Yield this share of the blocks: with 3 shares, every third one.
        """
        step = block_rows(self.column)
        step *= max(1, _BLOCK_BYTES // (step * self.column.row_bytes))
        for low in range(share * step, len(self.values), num_shares * step):
            block = np.ascontiguousarray(self.values[low : low + step])
            mask = self.rows.mask(self.column, low, low + len(block))
            if mask.any():
                yield block, None if mask.all() else np.ascontiguousarray(mask)


class ColumnSummary:
    """The statistics of one column: a scan of its rows, then the values around its quantiles."""

    def __init__(
        self,
        values: NDArray[Any],
        column: Column,
        rows: KeptRows,
        scan: ColumnScan | None = None,
        num_threads: int = 1,
    ) -> None:
        """Prepare the tasks.

        Args:
            values: The column, which may be mapped, or decodes its rows.
            scan: Of all rows of the column, where they were scanned already.
            num_threads: Threads for which the tasks are divided.
        """
        self._values = values
        self._column = column
        self._rows = rows
        self._scan = scan
        self._num_threads = num_threads
        # No method of this object, which would keep the map of the column until it is collected.
        self._blocks = _Blocks(values, column, rows)
        self._around_quantiles: Float64 | None = None

    def scan(self) -> None:
        """Scan all rows of the column, a few MiB at a time, unless they were scanned before."""
        if self._scan is not None:
            return
        scan = ColumnScan(self._column)
        for block, keep in self._blocks():
            scan.add(block, keep)
        self._scan = scan

    def find_quantiles(self) -> Iterator[list[Task]]:
        """Yield rounds of tasks, which find the values around quantiles.

        The tasks of a round may run at the same time; all of them before the next round is made.
        """
        column = self._column
        if is_image(column):
            return
        assert self._scan is not None
        num_rows = self._rows.count(column)
        if self._scan.sample is not None:
            brackets = QuantileBrackets(
                self._blocks,
                self._scan.sample,
                self._scan.moments[Moment.COUNT],
                num_rows,
                column,
                LEVELS,
                self._num_threads,
            )
            yield from brackets.rounds()
            if brackets.is_found:
                self._around_quantiles = brackets.found
                return
        is_small = num_rows <= max(1, MOST_BINNED_BYTES // column.row_bytes)
        is_array = isinstance(self._values, np.ndarray)
        search: QuantileBins | QuantileDigits
        if is_small and is_array and self._values.flags.c_contiguous:
            runs = self._rows.runs(column)
            search = QuantileBins(self._values, column, runs, LEVELS, self._num_threads)
        else:
            size = len(self._values) * column.row_bytes
            search = QuantileDigits(self._blocks, size, column, LEVELS, self._num_threads)
        yield search.tasks
        self._around_quantiles = search.found

    @np.errstate(over="ignore", invalid="ignore")
    def result(self) -> ColumnStatistics:
        """Return the statistics, after `scan` and the tasks of `find_quantiles`."""
        assert self._scan is not None
        column = self._column
        count = self._rows.count(column)
        if self._around_quantiles is None:
            return _image_statistics(self._scan.bins, column, count)
        moments = self._scan.moments
        num_finite = moments[Moment.COUNT]

        def shaped(array: Float64) -> Float64:
            is_known = (num_finite > 0) & np.isfinite(array)
            # Adding 0 makes -0 a 0: which of the two is least or in the middle is arbitrary.
            return np.where(is_known, array + 0.0, np.nan).reshape(column.shape)

        squares = np.maximum(moments[Moment.SQUARES], 0.0)
        quantiles = zip(QUANTILES, interpolated(self._around_quantiles, LEVELS), strict=True)
        return ColumnStatistics(
            count=count,
            mean=shaped(moments[Moment.FIRST] + moments[Moment.MEAN]),
            std=shaped(np.sqrt(squares / np.maximum(num_finite, 1))),
            min=shaped(moments[Moment.LEAST]),
            max=shaped(moments[Moment.GREATEST]),
            quantiles={level: shaped(array) for level, array in quantiles},
            quantile_rows=count,
            non_finite=count * column.num_elements - int(num_finite.sum()),
        )


def column_statistics(values: NDArray[Any], column: Column, rows: KeptRows) -> ColumnStatistics:
    """Compute the statistics of one stored column over the kept rows.

    Cost: one pass over the column, and one for its quantiles, which are exact; memory for a few
    MiB, and for 2 to 9% of the column, at most 512 MiB. Where that does not suffice, and for rows
    of more than 2 KiB, quantiles take two to four passes.
    """
    summary = ColumnSummary(values, column, rows)
    summary.scan()
    for tasks in summary.find_quantiles():
        Workers(1).run(tasks)
    return summary.result()


@np.errstate(over="ignore", invalid="ignore")
def running_statistics(moments: Float64, columns: Sequence[Column]) -> dict[str, ColumnStatistics]:
    """Return the statistics that columns are normalised with, by name; without quantiles.

    An element with fewer than two finite values gets mean 0 and deviation 1, which leaves it as it
    is. The deviation is also 1 where an element is constant, or varies by less than float64 can
    resolve beside its mean: it may vary later.
    """
    count = moments[Moment.COUNT]
    mean = moments[Moment.FIRST] + moments[Moment.MEAN]
    std = np.sqrt(moments[Moment.SQUARES] / np.maximum(count, 1.0))
    least = np.maximum(2 * LEAST_SPREAD * np.spacing(np.abs(mean)), _SPREADS[0])
    varies = (count >= 2) & (std >= least) & (std <= _SPREADS[1])
    mean = np.where((count >= 2) & np.isfinite(mean), mean, 0.0)
    low, high = (np.where(varies, moments[word], mean) for word in (Moment.LEAST, Moment.GREATEST))
    arrays = {"mean": mean, "std": np.where(varies, std, 1.0), "min": low, "max": high}
    statistics = {}
    first = 0
    for column in columns:
        own = slice(first, first + column.num_elements)
        parts = {name: array[own].reshape(column.shape) for name, array in arrays.items()}
        most = int(count[own].max(initial=0))
        statistics[column.name] = ColumnStatistics(
            most, **parts, quantiles={}, quantile_rows=0, non_finite=0
        )
        first = own.stop
    return statistics


def _image_statistics(bins: Int64, column: Column, num_rows: int) -> ColumnStatistics:
    """Compute the statistics of images per channel from the counts of their pixel values.

    They are exact: counts of the 256 pixel values determine all of them.
    """
    shape = column.statistics_shape
    pixels = bins.reshape(*shape, 256)
    value = np.arange(256.0)
    until = pixels.cumsum(axis=-1)  # for pixels [2, 0, 3] it is [2, 2, 5]
    count = int(until.flat[-1])
    mean = pixels @ value / count

    def quantile(level: float) -> Float64:
        # The sorted pixel at place p has the first value whose cumulative count exceeds p: with
        # until = [2, 2, 5], places 0 and 1 have value 0, and places 2 to 4 have value 2.
        place = level * (count - 1)
        low, high = ((until <= int(at)).sum(axis=-1) for at in (place, place + 1))
        return np.asarray(low + (high - low) * (place % 1))

    return ColumnStatistics(
        count=num_rows,
        mean=mean,
        std=np.sqrt((pixels * (value - mean[..., None]) ** 2).sum(axis=-1) / count),
        min=quantile(0.0),
        max=quantile(1.0),
        quantiles={level: quantile(float(level)) for level in QUANTILES},
        quantile_rows=num_rows,
        non_finite=0,
    )


def statistics_of_groups(
    schema: Schema,
    columns: Mapping[str, NDArray[Any]],
    first_rows: Int64,
    lengths: Int64,
    groups: Mapping[Any, NDArray[np.bool_]],
) -> dict[Any, dict[str, ColumnStatistics]]:
    """Compute the statistics of all columns but opaque ones over several sets of trajectories.

    Args:
        groups: Which trajectories a set has, by its key. [n] each, bool, at least one True.
    Cost: one pass over the columns for each set.
    """
    numeric = [column for column in schema if not column.is_opaque]
    found = {}
    for key, keep in groups.items():
        rows = KeptRows(first_rows, lengths, keep, schema.has_final_row)
        found[key] = {one.name: column_statistics(columns[one.name], one, rows) for one in numeric}
    return found


def compute_statistics(
    schema: Schema,
    columns: Mapping[str, NDArray[Any]],
    first_rows: Int64,
    lengths: Int64,
    split: Mapping[str, float],
    workers: Workers,
    scans: Mapping[str, ColumnScan] | None = None,
) -> dict[str, ColumnStatistics]:
    """Compute the statistics of all columns but opaque ones over the training split.

    Args:
        workers: Threads; the statistics do not depend on their number.
        scans: Scans of all rows of the columns, where there are any.
    Cost: as `column_statistics` for each column; without a pass where it was scanned.
    """
    keep = are_for_training(0, len(lengths), split)
    if not keep.any():
        raise DataError(
            "split",
            f"must leave at least one of {len(lengths)} trajectories for training",
            dict(split),
            "use smaller shares or more trajectories",
        )
    rows = KeptRows(first_rows, lengths, keep, schema.has_final_row)
    scans = {} if scans is None else scans
    numeric = [column for column in schema if not column.is_opaque]
    summaries = {
        c.name: ColumnSummary(columns[c.name], c, rows, scans.get(c.name), workers.num_threads)
        for c in numeric
    }
    workers.run([summary.scan for summary in summaries.values()])
    rounds = [summary.find_quantiles() for summary in summaries.values()]
    while tasks := [task for each in rounds for task in next(each, [])]:
        workers.run(tasks)
    return {name: summary.result() for name, summary in summaries.items()}
