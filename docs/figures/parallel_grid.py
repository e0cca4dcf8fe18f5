"""Draw the parts of a global batch of each rank in a grid of 2 stages, 2 replicas and 2 tensor
ranks.

python docs/figures/parallel_grid.py > docs/figures/parallel_grid.svg
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path

from drawing import Drawing

from deepspeed_gear.config import parse
from deepspeed_gear.distributed.topology import RankCoordinates

ROOT = Path(__file__).resolve().parents[2]
LABEL = (
    "A grid of two stages, two replicas and two tensor ranks. The tensor ranks of a replica read "
    "the same samples; the first stage reads the inputs, the last stage the labels."
)
KINDS = ("blue", "green")  # of replicas
WIDTH = 176
HEIGHT = 104
LEFT = 116
TOP = 96
GAP = 14
BETWEEN = 56  # stages


def column_at(data: int, tensor: int) -> int:
    """Return the left edge of a rank's box."""
    return LEFT + (2 * data + tensor) * (WIDTH + GAP) + data * GAP


def draw_rank(picture: Drawing, rank: int, place: RankCoordinates, names: list[str]) -> None:
    """Draw a rank with the fields that it reads."""
    x = column_at(place.data_rank, place.tensor_rank)
    y = TOP + place.pipe_rank * (HEIGHT + BETWEEN)
    kind = "inputs" if place.is_first_stage else "labels"
    picture.box(x, y, WIDTH, HEIGHT, KINDS[place.data_rank])
    picture.text(x + 12, y + 24, f"rank {rank}: {kind}", "title", "start")
    pairs = [names[i : i + 2] for i in range(0, len(names), 2)]
    for line, pair in enumerate(pairs):
        picture.text(x + 12, y + 44 + 17 * line, ", ".join(pair), "small", "start")
    if place.reports:
        picture.bar(x + 12, y + HEIGHT - 22, 10, 10, "orange")
        picture.text(x + 28, y + HEIGHT - 13, "reports priorities", "small", "start")


def main() -> None:
    gear = json.loads((ROOT / "configs" / "pipeline_parallel.json").read_text())["gear"]
    pipeline = parse(gear).pipeline
    assert pipeline is not None
    width = LEFT + 4 * (WIDTH + GAP) + 2 * GAP
    height = TOP + 2 * HEIGHT + BETWEEN + 24
    picture = Drawing(width, height, LABEL)
    picture.text(width / 2, 30, "one global batch, selected once", "title")
    for data in range(2):
        x = column_at(data, 0)
        words = f"replica {data}: samples {data}, {data + 2}, {data + 4}, ..."
        picture.text(x, 60, words, "text", "start")
        for tensor in range(2):
            picture.text(column_at(data, tensor), 82, f"tensor {tensor}", "small", "start")
    for rank, (pipe, data, tensor) in enumerate(itertools.product(range(2), repeat=3)):
        place = RankCoordinates(data, 2, tensor, 2, pipe, 2)
        names = pipeline.inputs if place.is_first_stage else pipeline.labels
        draw_rank(picture, rank, place, names)
        if pipe == 0:
            x = column_at(data, tensor) + WIDTH / 2
            picture.arrow(f"M{x:g} {TOP + HEIGHT + 6}v{BETWEEN - 12}")
            picture.text(x + 10, TOP + HEIGHT + BETWEEN / 2 + 4, "activations", "small", "start")
    for pipe, name in enumerate(("first stage", "last stage")):
        y = TOP + pipe * (HEIGHT + BETWEEN) + HEIGHT / 2 + 5
        picture.text(14, y, name, "text", "start")
    print(picture.svg())


if __name__ == "__main__":
    main()
