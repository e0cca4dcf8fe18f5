"""Draw docs/figures/grpo.png: what `examples/grpo.py` learns, for each seed.

    for seed in 0 1 2; do python examples/grpo.py --seed $seed --out runs/grpo-$seed; done
    python docs/figures/grpo.py runs/grpo-*

The result of each run is kept in docs/figures/grpo.json, from which the figure is drawn again
without folders.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

RUNS = Path(__file__).with_suffix(".json")
BEFORE = 0.45
AFTER = 0.8


def main() -> None:
    folders = [Path(name) for name in sys.argv[1:]]
    if folders:
        found = [json.loads((folder / "result.json").read_text()) for folder in folders]
        for run in found:
            run["curve"] = [
                [number, round(s, 1), round(value, 3)] for number, s, value in run["curve"]
            ]
        lines = ",\n ".join(json.dumps(run) for run in sorted(found, key=lambda run: run["seed"]))
        RUNS.write_text(f"[{lines}]\n")
    runs: list[dict[str, Any]] = json.loads(RUNS.read_text())
    figure, axes = plt.subplots(figsize=(7, 3.2), layout="constrained")
    for run in runs:
        batches = [point[0] for point in run["curve"]]
        accuracy = [point[2] for point in run["curve"]]
        axes.plot(batches, accuracy, marker=".", label=f"seed {run['seed']}")
    for level in (BEFORE, AFTER):
        axes.axhline(level, color="grey", linewidth=0.8, linestyle=":")
    axes.set(
        xlabel="rollout batches after the supervised warm start",
        ylabel="right answers",
        ylim=(0, 1),
    )
    axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    axes.set_xlim(left=0)
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(Path(__file__).with_suffix(".png"), dpi=110)


if __name__ == "__main__":
    main()
