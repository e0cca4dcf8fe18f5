"""MosaicML Streaming: MDS shards with a sample for each trajectory."""

from __future__ import annotations

from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

import numpy as np
from streaming import MDSWriter, StreamingDataset

from speed import work
from speed.work import Batches, Rows

COLUMNS = {
    "observation": f"ndarray:float32:{work.EPISODE},{work.OBSERVATION}",
    "action": f"ndarray:float32:{work.EPISODE},{work.ACTION}",
    "reward": f"ndarray:float32:{work.EPISODE}",
    "done": f"ndarray:uint8:{work.EPISODE}",  # there is no bool
}


def version() -> str:
    return version_of("mosaicml-streaming")


def write(count: int, folder: Path) -> None:
    with MDSWriter(columns=COLUMNS, out=str(folder / "shards")) as writer:
        for rows in work.trajectories(count // work.EPISODE):
            writer.write({**rows, "done": rows["done"].view(np.uint8)})


class Stored(Batches):
    def __init__(self, count: int, batch: int, length: int, folder: Path) -> None:
        self._data = StreamingDataset(local=str(folder / "shards"), batch_size=batch)
        self._batch, self._length = batch, length
        self._random = np.random.default_rng(0)

    def sample(self) -> Any:
        numbers = self._random.integers(self._data.num_samples, size=self._batch)
        firsts = self._random.integers(work.EPISODE - self._length + 1, size=self._batch)
        windows = []
        for number, first in zip(numbers.tolist(), firsts.tolist(), strict=True):
            trajectory = self._data[number]
            windows.append([trajectory[name][first : first + self._length] for name in COLUMNS])
        return {
            name: np.stack(parts) for name, parts in zip(COLUMNS, zip(*windows, strict=True), strict=True)
        }

    def rows(self, found: Any) -> Rows:
        return dict(found)


stored = Stored
