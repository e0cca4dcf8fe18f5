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
from deepspeed_gear.cli.value_distribution import returns_of
from deepspeed_gear.data.dataset_statistics import ColumnStatistics
from deepspeed_gear.schema import Column

if TYPE_CHECKING:
    from deepspeed_gear.data.dataset import Dataset

_MAX_PANELS = 12
_MAX_TICKS = 16
_MAX_BINS = 50
_MAX_BARS = 4  # elements of a discrete action that have bars of their own


def plot_dataset(dataset: Dataset, path: Path) -> None:
    """Draw histograms of returns, lengths and discrete actions, and the range of each other step column.

    Args:
        dataset: The data.
        path: Where to write; the suffix chooses the file type.
    Raises:
        ConfigError: matplotlib is missing or cannot write there.
    """
    columns = [c for c in dataset.schema.step_columns if c.role not in ("terminated", "truncated")]
    columns, returns = columns[:_MAX_PANELS], returns_of(dataset)
    num_panels = 1 + (returns is not None) + len(columns)
    num_rows = -(-num_panels // 2)
    figure = new_figure(11, 3.1 * num_rows)
    axes = figure.subplots(num_rows, 2, squeeze=False).ravel().tolist()
    for axis in axes[num_panels:]:
        axis.set_axis_off()
    panels = iter(axes)
    if returns is not None:
        _histogram(next(panels), returns, "return of a trajectory")
    _histogram(next(panels), dataset.lengths, "length of a trajectory in steps")
    labels: dict[str, Any] = {}
    for column, axis in zip(columns, panels, strict=False):
        if column.role == "action" and not column.is_floating:
            _classes(axis, column, dataset.columns[column.name])
        else:
            _elements(axis, column, dataset.statistics[column.name])
            handles, names = axis.get_legend_handles_labels()
            labels |= dict(zip(names, handles, strict=True))
    if labels:
        figure.legend(labels.values(), labels, loc="outside lower center", ncols=len(labels), frameon=False)
    figure.suptitle(f"{dataset.path.name}: {len(dataset):,} trajectories, {dataset.num_steps:,} steps")
    save(figure, path)


def _histogram(axis: Any, values: NDArray[Any], label: str) -> None:
    numbers = np.asarray(values, dtype=np.float64)
    numbers = numbers[np.isfinite(numbers)]
    if len(numbers):
        _bars(axis, [numbers], [None])
        axis.axvline(numbers.mean(), color=ACCENT)
        axis.set_title(f"mean {numbers.mean():.4g} ± {numbers.std():.4g}", fontsize="medium")
    axis.set_xlabel(label)
    axis.set_ylabel("trajectories")


def _classes(axis: Any, column: Column, values: NDArray[Any]) -> None:
    """Draw how often each value of a discrete action occurs, element by element where these are few."""
    elements = values.reshape(len(values), -1).astype(np.float64)
    if elements.shape[1] in range(2, _MAX_BARS + 1):
        _bars(axis, list(elements.T), [f"element {i}" for i in range(elements.shape[1])])
        axis.set_ylim(top=1.2 * axis.get_ylim()[1])  # room for the legend
        axis.legend(frameon=False, loc="upper center", ncols=_MAX_BARS)
    else:
        _bars(axis, [elements.ravel()], [None])
    _name(axis, column, "value")
    axis.set_ylabel("steps")


def _bars(axis: Any, groups: list[NDArray[Any]], labels: list[str | None]) -> None:
    every = np.concatenate(groups)
    edges = bin_edges(every, _MAX_BINS)
    width = 0.9 if len(edges) <= _MAX_TICKS else 1.0  # apart, or one area
    colors = [COLOR] if len(groups) == 1 else None
    axis.hist(groups, bins=edges, rwidth=width, color=colors, label=labels)
    if len(edges) == 2:  # one value, in the middle
        axis.set_xlim(*(edges + 10 * (edges[1] - edges[0]) * np.array([-1, 1])))
    tick_whole_numbers(axis, are_whole(every))


def _name(axis: Any, column: Column, of_x: str) -> None:
    axis.set_title(f"{column.name} {column.dtype}{list(column.shape)}", fontsize="medium")
    axis.set_xlabel(of_x)


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
    _name(axis, column, "element" if column.shape else "")
