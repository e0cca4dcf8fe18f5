"""A bounded sample of a data set's values, always the same, for pictures of data of any size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from deepspeed_gear.data.statistics.dataset_statistics import ColumnStatistics
from deepspeed_gear.data.stored_values import as_numbers
from deepspeed_gear.notebook_views import evenly
from deepspeed_gear.schema import LENGTH_BYTES, Column, Schema

MOST_ROWS = 1 << 16
MOST_ELEMENTS = 1 << 21
MOST_RETURN_STEPS = 1 << 22  # rewards that are summed for the returns
RUN_STEPS = 64  # consecutive steps, which lie side by side on the disk
_NULL = b"null"  # the JSON text of a value that is missing
_LEAST_SIDE = 8  # pixels of the smaller side of an image


class SampledData(Protocol):
    """The parts of a `Dataset` that a sample reads."""

    schema: Schema
    first_rows: NDArray[np.int64]
    lengths: NDArray[np.int64]
    num_steps: int
    columns: dict[str, NDArray[Any]]
    statistics: dict[str, ColumnStatistics]

    def __len__(self) -> int: ...


@dataclass(frozen=True)
class ColumnSample:
    """Values of some rows of a column.

    Attributes:
        values: Numbers; of an opaque column the lengths of its values in bytes.
            [rows, elements], float64.
        num_rows: Rows of the column in the data set, without padding.
        missing: Share of values that are missing: NaN and infinite elements over the training
            split of a floating column, from its statistics; empty and null values among the sampled
            rows of an opaque column; 0 of the others, which cannot have any.
    """

    values: NDArray[np.float64]
    num_rows: int
    missing: float

    @property
    def is_whole(self) -> bool:
        return len(self.values) == self.num_rows


def sampled_steps(num_steps: int, most: int) -> NDArray[np.int64]:
    """Return the steps of a sample: runs of consecutive ones that begin at even distances.

    Args:
        num_steps: Steps of all trajectories, which are numbered one after the other.
        most: Most steps of the sample; all steps if there are no more.
    Returns:
        [at most `most`], int64, strictly increasing. Of 1,000 steps and at most 256, runs of 4
        steps begin at 0, 15, 31, ..., 996.
    """
    if num_steps <= most:
        return np.arange(num_steps, dtype=np.int64)
    run = run_steps(most)
    begins = evenly(num_steps - run + 1, most // run)
    return np.asarray((begins[:, None] + np.arange(run)).reshape(-1))


def run_steps(most: int) -> int:
    """Return the number of consecutive steps in each run of a sample of at most `most` steps."""
    return max(1, min(RUN_STEPS, most // 64))


class DatasetSample:
    """Values of evenly spaced steps and trajectories of a data set.

    The numbers of rows are bounded, so the cost does not grow with the data: at most `most_rows`
    rows and 2^21 elements of each column are read, from at most 1,024 places of its file.

    Attributes:
        num_steps: Number of sampled steps, in columns of small rows.
        num_trajectories: Number of sampled trajectories, likewise.
        run_steps: Number of consecutive steps in each run of sampled steps, likewise.
    """

    def __init__(self, dataset: SampledData, most_rows: int = MOST_ROWS) -> None:
        self._dataset = dataset
        self._most_rows = most_rows
        self.num_steps = len(sampled_steps(dataset.num_steps, most_rows))
        self.num_trajectories = min(len(dataset), most_rows)
        self.run_steps = run_steps(most_rows)
        # The number of the first step of each trajectory: for lengths [2, 3] it is [0, 2].
        self._first_steps = np.cumsum(dataset.lengths) - dataset.lengths

    def column(self, column: Column) -> ColumnSample:
        """Read the sampled rows of a column, and count what is missing."""
        dataset = self._dataset
        elements = 1 if column.is_opaque else column.num_elements
        most = max(1, min(self._most_rows, MOST_ELEMENTS // elements))
        if column.rows == "1":
            rows = evenly(len(dataset), most)
            num_rows = len(dataset)
        else:
            rows = self._rows(sampled_steps(dataset.num_steps, most))
            num_rows = dataset.num_steps
        stored = dataset.columns[column.name]
        if column.is_opaque:  # a row may have many bytes, of which only the first are read
            lengths, is_null = _opaque_values(stored[rows, : LENGTH_BYTES + len(_NULL)], column)
            return ColumnSample(lengths[:, None], num_rows, float(is_null.mean()))
        with np.errstate(invalid="ignore"):  # converting a signalling NaN raises the flag
            values = (
                as_numbers(stored[rows], column).astype(np.float64).reshape(len(rows), elements)
            )
        missing = 0.0
        if column.is_floating:
            statistics = dataset.statistics[column.name]
            missing = statistics.non_finite / max(1, statistics.count * elements)
        return ColumnSample(values, num_rows, missing)

    def _rows(self, steps: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the row of each step in columns with rows for steps."""
        owner = np.searchsorted(self._first_steps, steps, side="right") - 1
        return np.asarray(self._dataset.first_rows[owner] + steps - self._first_steps[owner])

    def returns(self, most_steps: int = MOST_RETURN_STEPS) -> NDArray[np.float64] | None:
        """Return the returns of evenly spaced trajectories: stored, or the sums of the rewards.

        Args:
            most_steps: Most rewards to read; with longer trajectories fewer of them are taken.
        Returns:
            [at most `most_rows`], float64; None without a column of the role return or reward, and
            if a trajectory alone has more than `most_steps` steps.
        """
        dataset = self._dataset
        stored = dataset.schema.role("return")
        reward = dataset.schema.role("reward")
        if stored is not None and stored.rows == "1":
            return self.column(stored).values[:, 0]
        if reward is None:
            return None
        count = self.num_trajectories
        chosen = evenly(len(dataset), count)
        while int(dataset.lengths[chosen].sum()) > most_steps:
            if count == 1:
                return None
            count //= 2
            chosen = evenly(len(dataset), count)
        values = dataset.columns[reward.name]
        sums = np.zeros(len(chosen))
        with np.errstate(invalid="ignore", over="ignore"):
            for place, number in enumerate(chosen.tolist()):
                first = int(dataset.first_rows[number])
                rewards = as_numbers(values[first : first + int(dataset.lengths[number])], reward)
                sums[place] = rewards.sum(dtype=np.float64)
        return sums

    def frames(self, column: Column, trajectory: int, count: int) -> tuple[Any, list[int]]:
        """Read evenly spaced frames of a column of images from one trajectory.

        Returns:
            Frames, each [H, W] or [H, W, 3], in [0, 1]; and the step of each.
        """
        steps = evenly(int(self._dataset.lengths[trajectory]), count)
        first = int(self._dataset.first_rows[trajectory])
        values = self._dataset.columns[column.name]
        frames = [frame_of(as_numbers(values[first + step], column), column) for step in steps]
        return frames, steps.tolist()


def _opaque_values(
    rows: NDArray[np.uint8], column: Column
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return the bytes of each value of an opaque column, and whether it is empty or null. [n].

    Args:
        rows: The first bytes of each row: the length, and at least as many as "null" has.
            [n, bytes], uint8.
    """
    lengths = rows[:, :LENGTH_BYTES].copy().view("<u4").reshape(-1)
    is_null = lengths == 0
    if column.dtype == "json" and column.max_bytes >= len(_NULL):
        content = rows[:, LENGTH_BYTES : LENGTH_BYTES + len(_NULL)]
        is_null |= (lengths == len(_NULL)) & (content == np.frombuffer(_NULL, np.uint8)).all(axis=1)
    return lengths.astype(np.float64), is_null


def holds_images(column: Column) -> bool:
    """Return whether the rows of a column are images.

    These are uint8 rows of two axes or more, and floating rows of three axes or more with one,
    three or four channels; height and width have 8 pixels at least.
    """
    shape = column.shape
    if column.rows == "1" or column.is_opaque or len(shape) < 2:
        return False
    if len(shape) == 2:
        return column.dtype == "uint8" and min(shape) >= _LEAST_SIDE
    first, middle, last = shape[-3:]
    channels, height, width = (last, first, middle) if last <= first else (first, middle, last)
    is_known = column.dtype == "uint8" or (column.is_floating and channels in (1, 3, 4))
    return is_known and min(height, width) >= _LEAST_SIDE


def frame_of(row: NDArray[Any], column: Column) -> NDArray[np.float64]:
    """Return an image as [H, W] or [H, W, 3] in [0, 1].

    The last three axes are H, W, C, or C, H, W if the first is smaller than the last, as for the
    statistics. Of a history of images the last is taken, and of other channels than three the last,
    which is the newest of stacked frames. Floating values are scaled by their range, unless that is
    within [0, 1].
    """
    image = np.asarray(row, np.float64)
    while image.ndim > 3:
        image = image[-1]
    if image.ndim == 3:
        image = image if image.shape[2] <= image.shape[0] else np.moveaxis(image, 0, 2)
        image = image if image.shape[2] == 3 else image[..., -1]
    if column.dtype == "uint8":
        return image / 255
    image = np.where(np.isfinite(image), image, 0.0)
    low = min(0.0, float(image.min()))
    high = max(1.0, float(image.max()))
    return np.asarray((image / 2 - low / 2) / (high / 2 - low / 2))
