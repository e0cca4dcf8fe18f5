"""The figure of `gear inspect --plot` of a saved or a running store."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from deepspeed_gear.cli.figures import ACCENT, COLOR, bin_edges, new_figure, save, tick_whole_numbers
from deepspeed_gear.cli.inspect_distribution import Distribution, histogram

_POINTS = 1000
_MAX_BINS = 60


def plot_distributions(found: Sequence[Distribution], path: Path) -> None:
    """Draw, for each table, the priorities or masses, the cumulative mass, and how often items were drawn.

    Args:
        found: The tables.
        path: Where to write; the suffix chooses the file type.
    Raises:
        ConfigError: matplotlib is missing or cannot write there.
    """
    figure = new_figure(13, 3.6 * len(found))
    axes = figure.subplots(len(found), 3, squeeze=False)
    for row, one in zip(axes, found, strict=True):
        _weights(row[0], one)
        _cumulative(row[1], one)
        _draws(row[2], one)
    save(figure, path)


def _weights(axis: Any, one: Distribution) -> None:
    new = f"\n{one.waiting:,} of them added since the latest selection" if one.waiting else ""
    title = f"{one.table}: {len(one.masses) + one.waiting:,} {one.items} can be drawn{new}"
    axis.set_title(title, fontsize="medium")
    bins = histogram(one.weights)
    if not bins:
        _note(axis, _no_masses(one))
        return
    axis.bar(list(bins), list(bins.values()), width=0.95, align="edge", color=COLOR)
    axis.set_xlim(min(bins) - 1, max(bins) + 2)
    tick_whole_numbers(axis, True)
    axis.set_xlabel("log2 of the mass" if one.priorities is None else "log2 of the priority")
    axis.set_ylabel(one.items)


def _cumulative(axis: Any, one: Distribution) -> None:
    """Draw the share of the total mass that the items of highest mass have together."""
    if not len(one.masses):
        _note(axis, _no_masses(one))
        return
    falling = np.sort(one.masses)[::-1]
    mass = np.concatenate([[0.0], np.cumsum(falling) / falling.sum()])
    at = np.unique(np.linspace(0, len(falling), _POINTS).astype(np.int64))
    axis.plot(at / len(falling), mass[at], color=COLOR)
    axis.plot([0, 1], [0, 1], color=ACCENT, linewidth=0.8, linestyle="--", label="equal masses")
    axis.legend(loc="lower right", frameon=False)  # no curve lies below the diagonal
    axis.set_xlabel(f"part of the {one.items}, highest mass first")
    axis.set_ylabel("part of the mass")


def _draws(axis: Any, one: Distribution) -> None:
    if one.draws is None or not len(one.draws):
        _note(axis, "draws are not counted\n(gear.count_draws)" if one.draws is None else _no_masses(one))
        return
    axis.hist(one.draws, bins=bin_edges(one.draws.astype(np.float64), _MAX_BINS), color=COLOR)
    tick_whole_numbers(axis, True)
    axis.axvline(one.draws.mean(), color=ACCENT)
    axis.set_xlabel("times drawn")
    axis.set_ylabel("steps" if one.unit == "step" else one.items)
    axis.set_title(f"never: {(one.draws == 0).mean():.1%}", fontsize="medium")


def _no_masses(one: Distribution) -> str:
    return "masses are set by\nthe next selection" if one.waiting else "nothing can be drawn"


def _note(axis: Any, text: str) -> None:
    axis.text(0.5, 0.5, text, ha="center", va="center", transform=axis.transAxes)
    axis.set_xticks([])
    axis.set_yticks([])
