"""The figure of `gear inspect --plot`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from deepspeed_gear.cli.figures import (
    ACCENT,
    COLOR,
    are_whole,
    bin_edges,
    is_constant,
    new_figure,
    save,
    tick_whole_numbers,
)
from deepspeed_gear.data.dataset_statistics import ColumnStatistics
from deepspeed_gear.schema import Column

if TYPE_CHECKING:
    from deepspeed_gear.data.dataset import Dataset

_MAX_PANELS = 12
_MAX_TICKS = 16
_MAX_BINS = 50


def plot_dataset(dataset: Dataset, path: Path) -> None:
    """Draw histograms of return and length, and mean, std and range of every numeric step column.

    Args:
        dataset: The data.
        path: Where to write; the suffix chooses the file type.
    Raises:
        ConfigError: matplotlib is missing or cannot write there.
    """
    columns = [c for c in dataset.schema.step_columns if c.role not in ("terminated", "truncated")]
    columns = columns[:_MAX_PANELS]
    num_rows = 1 + -(-len(columns) // 2)
    figure = new_figure(11, 3.1 * num_rows)
    axes = figure.subplots(num_rows, 2, squeeze=False).ravel().tolist()
    returns = dataset.schema.role("return")
    if returns is None:
        axes[0].set_axis_off()
    else:
        _histogram(axes[0], dataset.columns[returns.name], "return of a trajectory")
    _histogram(axes[1], dataset.lengths, "length of a trajectory in steps")
    for axis, column in zip(axes[2:], columns, strict=False):
        _elements(axis, column, dataset.statistics[column.name])
    if columns:
        known = axes[2].get_legend_handles_labels()
        figure.legend(*known, loc="outside lower center", ncols=2, frameon=False)
    for axis in axes[2 + len(columns) :]:
        axis.set_axis_off()
    figure.suptitle(f"{dataset.path.name}: {len(dataset):,} trajectories, {dataset.num_steps:,} steps")
    save(figure, path)


def _histogram(axis: Any, values: NDArray[Any], label: str) -> None:
    numbers = np.asarray(values, dtype=np.float64)
    numbers = numbers[np.isfinite(numbers)]
    if len(numbers):
        edges = bin_edges(numbers, _MAX_BINS)
        axis.hist(numbers, bins=edges, color=COLOR)
        if len(edges) == 2:  # one value, in the middle
            axis.set_xlim(*(edges + 10 * (edges[1] - edges[0]) * np.array([-1, 1])))
        tick_whole_numbers(axis, are_whole(numbers))
        axis.axvline(numbers.mean(), color=ACCENT)
        axis.set_title(f"mean {numbers.mean():.4g} ± {numbers.std():.4g}", fontsize="medium")
    axis.set_xlabel(label)
    axis.set_ylabel("trajectories")


def _elements(axis: Any, column: Column, statistics: ColumnStatistics) -> None:
    """Draw mean and standard deviation of each element, and its 1% to 99% range."""
    mean, std = statistics.mean.ravel(), statistics.std.ravel()
    places = np.arange(len(mean))
    low, high = (statistics.quantiles[level].ravel() for level in ("0.01", "0.99"))
    if len(mean) <= 4 * _MAX_TICKS:
        axis.vlines(places, low, high, color=COLOR, alpha=0.25, linewidth=7, label="1% to 99%")
        axis.errorbar(
            places, mean, yerr=std, fmt="o", color=COLOR, ecolor=ACCENT, capsize=3, label="mean ± std"
        )
    else:
        axis.fill_between(places, low, high, color=COLOR, alpha=0.25, label="1% to 99%")
        axis.fill_between(places, mean - std, mean + std, color=ACCENT, alpha=0.4, label="mean ± std")
        axis.plot(places, mean, color=COLOR)
    if len(mean) <= _MAX_TICKS:
        axis.set_xticks(places, [str(i) for i in places] if column.shape else [""])
        axis.set_xlim(-0.6, len(mean) - 0.4)
    ends = np.concatenate([low, high, mean - std, mean + std])
    ends = ends[np.isfinite(ends)]
    if len(ends) and is_constant(ends.min(), ends.max()):
        axis.set_ylim(ends[0] - (abs(ends[0]) or 1), ends[0] + (abs(ends[0]) or 1))
    axis.set_title(f"{column.name} {column.dtype}{list(column.shape)}", fontsize="medium")
    axis.set_xlabel("element" if column.shape else "")
