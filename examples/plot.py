"""Curves of a training run as a figure."""

from __future__ import annotations

from pathlib import Path


def plot_curves(curves: dict[str, list[tuple[int, float]]], target: float, path: Path) -> None:
    """Draw loss and return over steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.6), constrained_layout=True)
    left.semilogy(*zip(*curves["loss"], strict=True))
    left.set(xlabel="step", ylabel="loss (squared error of actions)", title="loss")
    right.plot(*zip(*curves["return"], strict=True), marker="o")
    right.axhline(target, linestyle="--", linewidth=1, color="gray", label=f"asked for: {target:.0f}")
    right.set(xlabel="step", ylabel="return", title="mean return of 5 episodes")
    right.legend(loc="lower right")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
