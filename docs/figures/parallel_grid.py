"""Draw the parts of a global batch of each rank in a grid of 2 stages, 2 replicas and 2 tensor
ranks.

python docs/figures/parallel_grid.py > docs/figures/parallel_grid.svg
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path

from deepspeed_gear.config import parse
from deepspeed_gear.distributed.topology import RankCoordinates

ROOT = Path(__file__).resolve().parents[2]
COLORS = ("#dbe9f6", "#fde5cc")  # of replicas
FONT = "font-family='sans-serif' font-size='12'"
WIDTH = 176
HEIGHT = 100
LEFT = 116
TOP = 92
GAP = 14


def text(x: float, y: float, words: str, extra: str = "") -> str:
    return f"<text x='{x}' y='{y}' {extra}>{words}</text>"


def rank_box(rank: int, place: RankCoordinates, names: list[str]) -> list[str]:
    """Draw a rank with the fields that it reads."""
    column = 2 * place.data_rank + place.tensor_rank
    x = LEFT + column * (WIDTH + GAP) + place.data_rank * GAP
    y = TOP + place.pipe_rank * (HEIGHT + 56)
    kind = "inputs" if place.is_first_stage else "labels"
    color = COLORS[place.data_rank]
    lines = [
        f"<rect x='{x}' y='{y}' width='{WIDTH}' height='{HEIGHT}' rx='6' fill='{color}' "
        f"stroke='#555'/>"
    ]
    lines.append(text(x + 10, y + 20, f"rank {rank}: {kind}", "font-weight='bold'"))
    pairs = [names[i : i + 2] for i in range(0, len(names), 2)]
    lines += [text(x + 10, y + 40 + 17 * i, ", ".join(pair)) for i, pair in enumerate(pairs)]
    reports = "reports priorities" if place.reports else ""
    return [*lines, text(x + 10, y + 90, reports, "font-style='italic' fill='#a33'")]


def main() -> None:
    gear = json.loads((ROOT / "configs" / "pipeline_parallel.json").read_text())["gear"]
    pipeline = parse(gear).pipeline
    assert pipeline is not None
    width = LEFT + 4 * (WIDTH + GAP) + 2 * GAP
    height = TOP + 2 * HEIGHT + 56 + 20
    lines = [f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' {FONT}>"]
    lines.append(f"<rect width='{width}' height='{height}' fill='white'/>")
    lines.append(
        text(LEFT, 24, "one global batch, selected once", "font-size='15' font-weight='bold'")
    )
    for data in range(2):
        x = LEFT + data * (2 * (WIDTH + GAP) + GAP)
        lines.append(
            text(
                x,
                52,
                f"replica {data}: samples {data}, {data + 2}, {data + 4}, ...",
                "font-weight='bold'",
            )
        )
        for tensor in range(2):
            lines.append(text(x + tensor * (WIDTH + GAP), 74, f"tensor {tensor}"))
    for rank, (pipe, data, tensor) in enumerate(itertools.product(range(2), repeat=3)):
        place = RankCoordinates(data, 2, tensor, 2, pipe, 2)
        lines += rank_box(rank, place, pipeline.inputs if place.is_first_stage else pipeline.labels)
        if pipe == 0:
            x = LEFT + (2 * data + tensor) * (WIDTH + GAP) + data * GAP + WIDTH / 2
            y = TOP + HEIGHT + 8
            lines.append(f"<path d='M{x} {y}v32m-5 -8l5 8l5 -8' fill='none' stroke='#555'/>")
            lines.append(text(x + 12, y + 22, "activations"))
    for pipe, name in enumerate(("first stage", "last stage")):
        lines.append(text(12, TOP + pipe * (HEIGHT + 56) + HEIGHT / 2, name, "font-weight='bold'"))
    print("\n".join([*lines, "</svg>"]))


if __name__ == "__main__":
    main()
