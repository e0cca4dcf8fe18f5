"""HF datasets: an Arrow file with a row for each trajectory, mapped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from datasets import Array2D, Dataset, Features, List, Value
from speed import work

from peers.interface import Buffer, Rows, System

FEATURES = Features(
    {
        "observation": Array2D((work.EPISODE, work.OBSERVATION), "float32"),
        "action": Array2D((work.EPISODE, work.ACTION), "float32"),
        "reward": List(Value("float32"), length=work.EPISODE),
        "done": List(Value("bool"), length=work.EPISODE),
    }
)


def write(count: int, folder: Path) -> None:
    Dataset.from_generator(
        work.trajectories,
        features=FEATURES,
        cache_dir=str(folder),
        gen_kwargs={"count": count // work.EPISODE},
    )


class Stored(Buffer):
    def __init__(self, count: int, batch: int, length: int, folder: Path) -> None:
        self._data = Dataset.from_file(str(next(folder.rglob("*.arrow")))).with_format("numpy")
        self._batch = batch
        self._length = length
        self._random = np.random.default_rng(0)

    def sample(self) -> Any:
        numbers = self._random.integers(len(self._data), size=self._batch)
        found = self._data[numbers]
        if self._length == work.EPISODE:
            return found
        first = self._random.integers(work.EPISODE - self._length + 1, size=self._batch)
        steps = first[:, None] + np.arange(self._length)
        return {
            name: values[np.arange(self._batch)[:, None], steps] for name, values in found.items()
        }

    def rows(self, found: Any) -> Rows:
        return dict(found)


SYSTEM = System("datasets", write=write, stored=Stored)
