"""Curves of training runs as a figure; several: `python examples/plot.py OUT.png NAME=RESULT.json
...`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

Curves = dict[str, list[tuple[int, float]]]


def plot_curves(runs: dict[str, Curves], goal: float | None, loss_name: str, path: Path) -> None:
    """Draw loss and return over steps.

    Args:
        runs: Curves by name of the run.
        goal: The return that was conditioned on, if any.
        loss_name: Of the axis; it is logarithmic if all losses are positive.
        path: File of the PNG.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.6), constrained_layout=True)
    for name, curves in runs.items():
        left.plot(*zip(*curves["loss"], strict=True), label=name)
        right.plot(*zip(*curves["return"], strict=True), marker="o", markersize=4, label=name)
    is_positive = all(loss > 0 for curves in runs.values() for _, loss in curves["loss"])
    scale = "log" if is_positive else "linear"
    left.set(xlabel="step", ylabel=loss_name, title="loss", yscale=scale)
    if goal is not None:
        right.axhline(
            goal, linestyle="--", linewidth=1, color="gray", label=f"asked for: {goal:.0f}"
        )
    right.set(xlabel="step", ylabel="return", title="mean return of 5 episodes")
    right.legend(loc="best", fontsize="small")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main() -> None:
    runs: dict[str, Curves] = {}
    for argument in sys.argv[2:]:
        name, _, file = argument.partition("=")
        result = json.loads(Path(file).read_text())
        runs[name] = result["curves"]
    plot_curves(runs, result["goal"], result["loss_name"], Path(sys.argv[1]))


if __name__ == "__main__":
    main()
