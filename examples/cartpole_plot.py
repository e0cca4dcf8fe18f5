"""Curves of CartPole runs as a figure: `python examples/cartpole_plot.py OUT.png NAME=RESULT.json
...`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

Curves = dict[str, list[tuple[int, float]]]


def plot_curves(runs: dict[str, Curves], path: Path) -> None:
    """Draw return, loss and the concentration of the probabilities over steps.

    Args:
        runs: Curves by name of the run. Later ones are drawn thinner, so that equal ones are all
            visible.
        path: File of the PNG.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, middle, right) = pyplot.subplots(
        1, 3, figsize=(13, 3.8), constrained_layout=True
    )
    for i, (name, curves) in enumerate(runs.items()):
        style = {"color": f"C{i}", "linewidth": 1.2 + 1.6 * (len(runs) - 1 - i), "label": name}
        left.plot(*zip(*curves["return"], strict=True), **style)
        middle.semilogy(*zip(*curves["loss"], strict=True), **style)
        right.plot(*zip(*curves["top_tenth"], strict=True), **style)
        right.plot(
            *zip(*curves["effective"], strict=True), **{**style, "linestyle": "--", "label": None}
        )
    left.set(xlabel="step", ylabel="return", title="mean return of 20 episodes")
    middle.set(xlabel="step", ylabel="loss", title="loss")
    right.set(xlabel="step", ylim=(0, 1.05), title="concentration of the probabilities")
    right.axhline(0.1, linestyle=":", linewidth=1, color="gray")
    right.plot([], [], color="black", label="share of the top tenth of the steps")
    right.plot([], [], color="black", linestyle="--", label="effective sample size / steps")
    right.plot([], [], color="gray", linestyle=":", label="share of a tenth if uniform")
    left.legend(loc="lower right", fontsize="small")
    right.legend(handles=right.get_lines()[-3:], loc="upper right", fontsize="small")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main() -> None:
    runs: dict[str, Curves] = {}
    for argument in sys.argv[2:]:
        name, _, file = argument.partition("=")
        runs[name] = json.loads(Path(file).read_text())["curves"]
    plot_curves(runs, Path(sys.argv[1]))


if __name__ == "__main__":
    main()
