"""Creating and writing the figures of commands, and the bins of their histograms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from deepspeed_gear.errors import ConfigError

COLOR, ACCENT = "#33658a", "#c1440e"
_SAME = 1e-9  # values that differ by less, as a part of the largest one, are drawn as equal
_EXACT = 2.0**52  # below it float64 holds the edges between integers


def new_figure(width: float, height: float) -> Any:
    """Return an empty figure, in inches.

    Raises:
        ConfigError: matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("--plot", "must have matplotlib", None, "pip install matplotlib") from None
    return Figure(figsize=(width, height), layout="constrained")


def tick_whole_numbers(axis: Any, whole_x: bool) -> None:
    """Put a histogram's ticks at whole numbers: those of its counts and, where they are whole, its values."""
    axis.yaxis.get_major_locator().set_params(integer=True)
    if whole_x:
        axis.xaxis.get_major_locator().set_params(integer=True)


def save(figure: Any, path: Path) -> None:
    """Write a figure; the suffix of the path chooses the file type.

    Raises:
        ConfigError: It cannot be written there.
    """
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        remedy = "use a writable path that ends in .png, .svg or .pdf"
        raise ConfigError(f"--plot {path}", "must be writable", str(error), remedy) from error


def bin_edges(values: np.ndarray, most: int) -> np.ndarray:
    """Return the edges of a histogram.

    Args:
        values: Finite, at least one. [n], float64.
        most: Bins.
    Returns:
        Bins of equally many integers where all values are whole numbers, one bin where all values are equal,
        else `most` bins, or fewer for few values. [bins + 1], float64.
    """
    low, high = float(values.min()), float(values.max())
    largest = max(abs(low), abs(high))
    if largest < _EXACT and are_whole(values):
        width = -(-int(high - low + 1) // most)
        return low - 0.5 + width * np.arange(-(-int(high - low + 1) // width) + 1)
    if is_constant(low, high):
        return (low + high) / 2 + 0.05 * largest * np.array([-1.0, 1.0])
    return np.linspace(low, high, min(most, max(10, len(values) // 4)) + 1)


def are_whole(values: np.ndarray) -> bool:
    """Return whether all values are whole numbers."""
    return bool((values == np.rint(values)).all())


def is_constant(low: float, high: float) -> bool:
    """Return whether an axis from `low` to `high` would show rounding errors only."""
    return high - low <= _SAME * max(abs(low), abs(high))
