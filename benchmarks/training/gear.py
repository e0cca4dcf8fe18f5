"""This project: a Replay over all nodes, of which each holds a part of the data set, or
the whole.
"""

from __future__ import annotations

from pathlib import Path

from speed import work
from torch import Tensor

from deepspeed_gear import Column, DatasetWriter, Replay, Schema
from training.model import COLUMNS, MODES


def write(folder: Path, count: int) -> None:
    """Write the data set of so many trajectories."""
    schema = Schema([Column(name, "float32", shape) for name, shape in COLUMNS.items()])
    with DatasetWriter(folder, schema) as to:
        for rows in work.trajectories(count):
            to.add({name: rows[name] for name in COLUMNS})


class Source:
    """This rank's parts of global batches of whole trajectories."""

    def __init__(self, mode: str, batch: int, rank: int, world: int, folder: str) -> None:
        data = {"path": folder, "load": "memory", "replicate": mode != MODES["gear"][0]}
        fields = {name: {"length": work.EPISODE} for name in COLUMNS}
        sampler = {"kind": "uniform", "unit": "trajectory", "anchors": "start"}
        section = {"data": data, "sampler": sampler, "fields": fields, "batch_size": batch * world}
        self._replay = Replay({**section, "prefetch": 1})

    def next(self) -> dict[str, Tensor]:
        """Return the next batch, which holds until the one after it."""
        batch = self._replay.sample()
        return {name: batch[name] for name in COLUMNS}

    def close(self) -> None:
        self._replay.close()
