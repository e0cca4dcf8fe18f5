"""Statistics of columns, streamed in float64 over the rows of one split."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepspeed_gear.data.running_moments import Float64, Moment, add_rows
from deepspeed_gear.data.splits import split_of
from deepspeed_gear.data.trajectory_checks import as_numbers
from deepspeed_gear.errors import ConfigError, DataError
from deepspeed_gear.schema import Column, Schema

QUANTILES = ("0.01", "0.1", "0.25", "0.5", "0.75", "0.9", "0.99")
MAX_SAMPLE_ROWS = 1 << 22
MAX_SAMPLE_BYTES = 256 * 1024 * 1024
LEAST_SPREAD = (
    2.0**9
)  # of normalised values, in units of the last place of their shift: off by 0.1% at most
_SPREADS = 1e-307, 1e307  # whose reciprocals float64 holds
_BLOCK_ROWS = 1 << 16
_BLOCK_BYTES = 32 * 1024 * 1024
_SAMPLE_KEY = 0x6765_6172
_LEAST_IMAGE = 1024  # elements of a row; smaller ones are kept by element: boards, tiles
_ARRAYS = ("mean", "std", "min", "max")

Int64 = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class ColumnStatistics:
    """Statistics of one column, per element of its row; of images per channel, and `shape` has 1
    for H and W.

    Arrays are [*shape], NaN where an element has no finite value or float64 overflows.
    """

    count: int  # rows that were read
    mean: Float64
    std: Float64  # of the population: divided by count
    min: Float64
    max: Float64
    quantiles: dict[str, Float64]  # by level, "0.01" to "0.99", linearly interpolated
    quantile_rows: int  # that the quantiles come from; equal to `count` where they are exact
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
        """Reverse `to_json`; a KeyError or ValueError if a statistic is missing or of another
        shape.
        """

        def array(values: Any) -> Float64:
            found = np.array(values, dtype=np.float64)
            if found.shape not in (
                column.shape,
                statistics_shape(column),
            ):  # older ones are per element
                raise ValueError(
                    f"column {column.name} has statistics of shape {list(found.shape)}"
                )
            return found

        return cls(
            count=int(entry["count"]),
            **{name: array(entry[name]) for name in _ARRAYS},
            quantiles={level: array(entry["quantiles"][level]) for level in QUANTILES},
            quantile_rows=int(entry["quantile_rows"]),
            non_finite=int(entry["non_finite"]),
        )


def statistics_shape(column: Column) -> tuple[int, ...]:
    """Return the shape of statistics: of images (uint8, [..., H, W, C] or [..., C, H, W]) 1 for H
    and W.
    """
    if column.dtype != "uint8" or len(column.shape) < 3 or column.num_elements <= _LEAST_IMAGE:
        return column.shape
    *rest, first, _, last = column.shape  # the channels are the smaller end
    return (*rest, 1, 1, last) if last <= first else (*rest, first, 1, 1)


@np.errstate(invalid="ignore")  # signalling NaNs
def _as_float64(array: NDArray[Any], column: Column) -> Float64:
    return as_numbers(array, column).astype(np.float64)


def sample_positions(num_rows: int, num_sampled: int) -> Int64:
    """Return which of `num_rows` rows a sample takes: a fixed pseudo-random one of each of equal
    strata.

    All rows if there are no more than `num_sampled`. [min(num_rows, num_sampled)], int64, strictly
    rising.
    """
    if num_rows <= num_sampled:
        return np.arange(num_rows, dtype=np.int64)
    jitter = np.random.Generator(np.random.Philox(key=_SAMPLE_KEY)).random(num_sampled)
    bounds = np.arange(num_sampled + 1, dtype=np.int64) * num_rows // num_sampled
    return np.asarray(bounds[:-1] + (jitter * np.diff(bounds)).astype(np.int64))


@np.errstate(over="ignore", invalid="ignore")
def _quantiles(sample: NDArray[Any], column: Column) -> dict[str, Float64]:
    """Return the quantiles of each element over the sampled rows. sample: [m, elements]."""
    num_elements = sample.shape[1]
    result = np.full((len(QUANTILES), num_elements), np.nan)
    levels = [float(level) for level in QUANTILES]
    group = max(1, _BLOCK_BYTES // (8 * max(1, len(sample))))
    for first in range(0, num_elements, group):
        part = _as_float64(sample[:, first : first + group], column)
        finite = np.isfinite(part)
        if finite.all():
            result[:, first : first + group] = np.quantile(part, levels, axis=0)
            continue
        for element in np.flatnonzero(finite.any(axis=0)):
            result[:, first + element] = np.quantile(part[finite[:, element], element], levels)
    return dict(zip(QUANTILES, result, strict=True))


@dataclass(frozen=True, eq=False)
class KeptRows:
    """The rows of a data set that statistics cover, by first row and steps of each
    trajectory. [n].
    """

    first_rows: Int64
    lengths: Int64
    keep: NDArray[np.bool_]  # which trajectories count
    has_final_row: bool  # every extent has one more row than steps

    def count(self, column: Column) -> int:
        if column.rows == "1":
            return int(self.keep.sum())
        return int((self.lengths[self.keep] + int(column.rows == "T+1")).sum())

    def mask(self, column: Column, low: int, high: int) -> NDArray[np.bool_]:
        """Return which rows of [low, high) hold real values of trajectories that count."""
        if column.rows == "1":
            return self.keep[low:high]
        first = int(np.searchsorted(self.first_rows, low, side="right")) - 1
        last = int(np.searchsorted(self.first_rows, high, side="left"))
        starts = self.first_rows[first:last]
        lengths = self.lengths[first:last]
        mask = np.repeat(self.keep[first:last], lengths + int(self.has_final_row))
        if self.has_final_row and column.rows == "T":
            mask[starts + lengths - starts[0]] = False
        return mask[low - starts[0] : high - starts[0]]


def _blocks(values: NDArray[Any], column: Column, rows: KeptRows) -> Iterator[NDArray[Any]]:
    """Yield the real rows that count, [r, elements] in the stored dtype, r bounded."""
    step = max(1, min(_BLOCK_ROWS, _BLOCK_BYTES // (8 * column.num_elements)))
    for low in range(0, len(values), step):
        high = min(low + step, len(values))
        mask = rows.mask(column, low, high)
        if not mask.any():
            continue
        block = np.asarray(values[low:high]).reshape(high - low, column.num_elements)
        yield block if mask.all() else block[mask]


@np.errstate(over="ignore", invalid="ignore")
def column_statistics(values: NDArray[Any], column: Column, rows: KeptRows) -> ColumnStatistics:
    """Compute the statistics of one stored column over the real rows of the trajectories that
    count.

    Cost: one pass over the column; at most `MAX_SAMPLE_BYTES` and a few blocks of memory. Quantiles
    are
        exact up to `MAX_SAMPLE_ROWS` rows and `MAX_SAMPLE_BYTES`; beyond, they are those of a fixed
        sample of that size.
    """
    if statistics_shape(column) != column.shape:
        return _image_statistics(values, column, rows)
    count = rows.count(column)
    budget = max(1, min(MAX_SAMPLE_ROWS, MAX_SAMPLE_BYTES // column.row_bytes))
    positions = sample_positions(count, budget)
    sample = np.empty((len(positions), column.num_elements), dtype=column.numpy_dtype)
    moments = np.zeros((Moment.NUM_WORDS, column.num_elements))
    seen = 0
    taken = 0
    for block in _blocks(values, column, rows):
        moments = add_rows(moments, _as_float64(block, column))
        until = int(np.searchsorted(positions, seen + len(block)))
        sample[taken:until] = block[positions[taken:until] - seen]
        seen, taken = seen + len(block), until
    num_finite = moments[Moment.COUNT]

    def shaped(array: Float64) -> Float64:
        return np.where((num_finite == 0) | ~np.isfinite(array), np.nan, array).reshape(
            column.shape
        )

    return ColumnStatistics(
        count=count,
        mean=shaped(moments[Moment.FIRST] + moments[Moment.MEAN]),
        std=shaped(np.sqrt(np.maximum(moments[Moment.SQUARES], 0.0) / np.maximum(num_finite, 1))),
        min=shaped(moments[Moment.LEAST]),
        max=shaped(moments[Moment.GREATEST]),
        quantiles={level: shaped(array) for level, array in _quantiles(sample, column).items()},
        quantile_rows=len(positions),
        non_finite=count * column.num_elements - int(num_finite.sum()),
    )


@np.errstate(over="ignore", invalid="ignore")
def running_statistics(moments: Float64, columns: Sequence[Column]) -> dict[str, ColumnStatistics]:
    """Return what columns are normalised with, by name; without quantiles.

    An element with fewer than two finite values is left as it is: mean 0, deviation 1. So is the
    deviation of one that is constant, or whose spread float64 does not hold beside its mean: it may
    vary later.
    """
    count = moments[Moment.COUNT]
    mean = moments[Moment.FIRST] + moments[Moment.MEAN]
    std = np.sqrt(moments[Moment.SQUARES] / np.maximum(count, 1.0))
    least = np.maximum(2 * LEAST_SPREAD * np.spacing(np.abs(mean)), _SPREADS[0])
    varies = (count >= 2) & (std >= least) & (std <= _SPREADS[1])
    mean = np.where((count >= 2) & np.isfinite(mean), mean, 0.0)
    low, high = (np.where(varies, moments[word], mean) for word in (Moment.LEAST, Moment.GREATEST))
    arrays = {"mean": mean, "std": np.where(varies, std, 1.0), "min": low, "max": high}
    found = {}
    first = 0
    for column in columns:
        own = slice(first, first + column.num_elements)
        parts = {name: array[own].reshape(column.shape) for name, array in arrays.items()}
        most = int(count[own].max(initial=0))
        found[column.name] = ColumnStatistics(
            most, **parts, quantiles={}, quantile_rows=0, non_finite=0
        )
        first = own.stop
    return found


def _image_statistics(values: NDArray[Any], column: Column, rows: KeptRows) -> ColumnStatistics:
    """Compute the statistics of images per channel: exact, from the numbers of pixels of each
    value.
    """
    shape = statistics_shape(column)
    channels = np.arange(math.prod(shape)).reshape(shape)
    bins = np.zeros(256 * math.prod(shape), np.int64)
    base = np.broadcast_to(256 * channels, column.shape).reshape(-1)
    for block in _blocks(values, column, rows):
        bins += np.bincount((block + base).reshape(-1), minlength=len(bins))
    pixels = bins.reshape(*shape, 256)
    value = np.arange(256.0)
    until = pixels.cumsum(axis=-1)  # for pixels [2, 0, 3] it is [2, 2, 5]
    count = int(until.flat[-1])
    mean = pixels @ value / count
    std = np.sqrt((pixels * (value - mean[..., None]) ** 2).sum(axis=-1) / count)

    def quantile(level: float) -> Float64:
        place = level * (count - 1)
        low, high = ((until <= int(at)).sum(axis=-1) for at in (place, place + 1))
        return np.asarray(low + (high - low) * (place % 1))

    found = {"mean": mean, "std": std, "min": quantile(0.0), "max": quantile(1.0)}
    levels = {level: quantile(float(level)) for level in QUANTILES}
    num_rows = rows.count(column)
    return ColumnStatistics(
        count=num_rows, **found, quantiles=levels, quantile_rows=num_rows, non_finite=0
    )


def check_split(split: Mapping[str, float]) -> dict[str, float]:
    """Return a split in the order of its names; raise ConfigError if it is malformed."""
    for name, share in split.items():
        if not name or name == "train" or not 0 < share < 1:
            rule = "must name a held-out part (not train) and its share in (0, 1)"
            raise ConfigError(f"split.{name}", rule, share, 'for example {"eval": 0.05}')
    if sum(split.values()) >= 1:
        raise ConfigError(
            "split", "must leave a share for training", dict(split), "use smaller shares"
        )
    return {name: float(split[name]) for name in sorted(split)}


def compute_statistics(
    schema: Schema,
    columns: Mapping[str, NDArray[Any]],
    first_rows: Int64,
    lengths: Int64,
    split: Mapping[str, float],
) -> dict[str, ColumnStatistics]:
    """Compute the statistics of all columns but opaque ones over the training split, in
    one pass.
    """
    split = check_split(split)
    keep = split_of(np.arange(len(lengths), dtype=np.int64), split) == 0
    if not keep.any():
        rule = f"must leave at least one of {len(lengths)} trajectories for training"
        raise DataError("split", rule, dict(split), "use smaller shares or more trajectories")
    rows = KeptRows(first_rows, lengths, keep, schema.has_final_row)
    numeric = [column for column in schema if not column.is_opaque]
    return {
        column.name: column_statistics(columns[column.name], column, rows) for column in numeric
    }
