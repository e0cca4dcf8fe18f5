"""Curves of online runs as a figure: `python examples/online_plot.py OUT.png
NAME=RESULT.json ...`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

GOAL = 475


def main() -> None:
    figure, axes = pyplot.subplots(figsize=(7, 3.6), constrained_layout=True)
    for argument in sys.argv[2:]:
        name, _, file = argument.partition("=")
        curve = json.loads(Path(file).read_text())["curves"]["return"]
        axes.plot(*zip(*curve, strict=True), marker="o", markersize=3, label=name)
    axes.axhline(GOAL, linestyle="--", linewidth=1, color="gray", label=f"goal: {GOAL}")
    axes.set(xlabel="seconds", ylabel="return", title="mean return of 20 episodes")
    axes.legend(loc="lower right", fontsize="small")
    figure.savefig(sys.argv[1], dpi=110)


if __name__ == "__main__":
    main()
