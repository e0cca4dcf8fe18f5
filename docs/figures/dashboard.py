"""Draw values of DeepSpeed's monitor over a run, from dashboard.json.

python docs/figures/dashboard.py > docs/figures/dashboard.svg

`python docs/figures/dashboard.py CSV_FOLDER` first reads them from a run's `csv_monitor` into
dashboard.json, in at most so many points as the picture can show.
"""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

from drawing import Drawing

VALUES = Path(__file__).with_suffix(".json")
LABEL = (
    "Values of DeepSpeed's monitor over a run of two ranks: table fill, trajectories added and "
    "samples drawn per second, wait share, effective samples, priority, age, and how late each "
    "rank was. After half of the time rank 1 is slowed down."
)
# Of each panel: its title, its values and their colors.
PANELS: tuple[tuple[str, tuple[tuple[str, str, str], ...]], ...] = (
    ("table_fill", (("table_fill.main", "blue", ""),)),
    ("added_per_s", (("added_per_s.main", "green", ""),)),
    ("drawn_per_s", (("drawn_per_s.main", "green", ""),)),
    ("wait_share", (("wait_share", "orange", ""),)),
    ("late_ms", (("late_ms.rank0", "gray", "rank 0"), ("late_ms.rank1", "orange", "rank 1"))),
    ("effective_samples", (("effective_samples", "blue", ""),)),
    ("priority", (("priority", "blue", ""),)),
    ("age", (("age", "blue", ""),)),
)
COLUMNS = 2
WIDTH = 380
HEIGHT = 96
LEFT = 56
TOP = 66
POINTS = 120


def read(folder: Path) -> dict[str, list[float]]:
    """Return the values of a run by name, each the mean of as many optimizer steps."""
    found = {}
    names = [name for _, lines in PANELS for name, _, _ in lines]
    for name in names:
        with (folder / f"Train_Gear_{name}.csv").open() as file:
            rows = list(csv.reader(file))[1:]
        every = max(len(rows) // POINTS, 1)
        groups = [rows[at : at + every] for at in range(0, len(rows) - every + 1, every)]
        means = [sum(float(value) for _, value in group) / len(group) for group in groups]
        found[name] = [float(f"{mean:.4g}") for mean in means]
        found["samples"] = [float(group[-1][0]) for group in groups]
    return found


def draw(picture: Drawing, at: int, title: str, values: dict[str, list[float]]) -> None:
    """Draw a panel: its lines from 0 to the maximum of them all."""
    lines = dict(PANELS)[title]
    x = 20 + (WIDTH + 20) * (at % COLUMNS)
    y = TOP + (HEIGHT + 44) * (at // COLUMNS)
    top = max(max(values[name]) for name, _, _ in lines) or 1.0
    picture.box(x, y, WIDTH, HEIGHT + 30, "group")
    picture.text(x + 12, y + 20, f"Train/Gear/{title}", "text", "start")
    base = y + HEIGHT + 14
    scale = HEIGHT - 22
    step = (WIDTH - LEFT - 16) / max(len(values["samples"]) - 1, 1)
    for number, (name, color, words) in enumerate(lines):
        points = [
            (x + LEFT + step * index, base - scale * value / top)
            for index, value in enumerate(values[name])
        ]
        picture.curve(points, color)
        if words:
            picture.dot(x + 200 + 80 * number, y + 15, 4, color)
            picture.text(x + 210 + 80 * number, y + 20, words, "small", "start")
    most = f"{top:,.0f}" if top >= 100 else f"{top:.3g}"
    picture.text(x + LEFT - 8, base - scale + 4, most, "small", "end")
    picture.text(x + LEFT - 8, base + 2, "0", "small", "end")


def main() -> None:
    if len(sys.argv) > 1 and Path(sys.argv[1]).is_dir():
        VALUES.write_text(json.dumps(read(Path(sys.argv[1]))) + "\n", encoding="utf-8")
    values = json.loads(VALUES.read_text(encoding="utf-8"))
    rows = -(-len(PANELS) // COLUMNS)
    picture = Drawing(20 + (WIDTH + 20) * COLUMNS, TOP + (HEIGHT + 44) * rows + 10, LABEL)
    samples = int(values["samples"][-1])
    picture.text(20, 30, "DeepSpeed's monitor over a run of two ranks", "title", "start")
    picture.text(20, 50, f"from its start to {samples:,} samples", "small", "start")
    for at, (title, _) in enumerate(PANELS):
        draw(picture, at, title, values)
    print(picture.svg())


if __name__ == "__main__":
    main()
