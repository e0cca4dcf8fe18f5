"""Reader of a ragged column for the places of a pack."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from deepspeed_gear.batching.pack_rows import PADDING, PackShape
from deepspeed_gear.data.ragged import Ragged
from deepspeed_gear.errors import StoreError
from deepspeed_gear.schema import Column
from deepspeed_gear.store.table import Table


@dataclass
class RaggedReader:
    """Reader of a ragged column, while the rollout batch keeps the rows of its trajectories."""

    column: Column
    offset: int  # place i has the values of the step that is so many later
    tables: Sequence[Table]  # of the rollout batch
    source: np.ndarray  # table of each trajectory of the pack. [S], int64
    numbers: np.ndarray  # number of each trajectory's item; 0: it has no values. [S], int64
    # Items by table, which `fetch` has read; None: they are read on demand.
    _items: list[dict[int, Ragged]] | None = field(default=None, init=False)

    def fetch(self, lock: Any) -> None:
        """Read the items now, with the lock of the table held, as nothing pins the trajectories."""
        self._items = [self._of_table(number, lock) for number in range(len(self.tables))]

    def _of_table(self, index: int, lock: Any) -> dict[int, Ragged]:
        media = self.tables[index].media
        assert media is not None
        return media.ragged(self.column, self.numbers[self.source == index], lock)

    def read(self, shape: PackShape) -> Ragged:
        """Return the values at this rank's places of a pack, in host memory.

        Args:
            shape: The pack, of S trajectories. A place of a shared prefix has the values of the
                first trajectory that has it.
        Raises:
            StoreError: The rollout batch has ended, and a trajectory has left the store.
        """
        items = self._items
        if items is None:
            every = enumerate(self.tables)
            items = [self._of_table(index, table.lock) for index, table in every]
        parts = []
        for trajectory, number in enumerate(self.numbers.tolist()):
            of_table = items[int(self.source[trajectory])]
            if number and number not in of_table:
                rule = "must be read while its rollout batch is trained"
                remedy = "read micro.ragged in the loop"
                raise StoreError(f"micro.ragged({self.column.name!r})", rule, None, remedy)
            if number:
                parts.append(of_table[number])
            else:
                steps = int(shape.lengths[trajectory])
                none = torch.zeros(0, dtype=self.column.values.torch_dtype)
                parts.append(Ragged(none, torch.zeros(steps + 1, dtype=torch.int64)))
        none = torch.zeros(0, dtype=self.column.values.torch_dtype)
        values = torch.cat([none, *(part.values for part in parts)])
        counts = [torch.zeros(1, dtype=torch.int64), *(part.counts for part in parts)]
        joined = Ragged(values, torch.cat(counts).cumsum(0))
        return joined.take(torch.from_numpy(self._steps(shape, [len(part) for part in parts])))

    def _steps(self, shape: PackShape, stored: list[int]) -> np.ndarray:
        """Return the step of each place among those of all trajectories, -1: none. [places]."""
        owner = shape.owners()
        is_step = owner != PADDING
        first = np.cumsum(stored) - stored  # for trajectories of [2, 3] steps first is [0, 2]
        step = shape.positions() + self.offset
        index: np.ndarray = np.full(len(owner), -1, np.int64)
        # The place of the last token has no values where they stand one place before their token.
        is_step[is_step] = step[is_step] < shape.lengths[owner[is_step]]
        index[is_step] = first[owner[is_step]] + step[is_step]
        return index
