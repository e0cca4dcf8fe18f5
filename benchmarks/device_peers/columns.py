"""Columns of torch tensors, as a user writes them without a library.

A ring with its cursor on the device, `randint`, or a sum of the priorities that `searchsorted`
reads, and one index for each column. Windows are `column.unfold(0, T, 1)[first]`. Of a roll-out, an
epoch is a `randperm`.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from peers.interface import Array, Rows
from speed import work

from device_peers.interface import ALPHA, BETA, NUM_EPOCHS, Case
from device_peers.torch_forms import TorchTable, as_arrays

PACKAGE = "torch"


class Columns(TorchTable):
    """Tensors, a cursor, and the mass of each item in float32."""

    def __init__(self, case: Case, compiler: str) -> None:
        super().__init__(case, compiler)
        parts = [self.on_device(rows) for rows in case.content()]
        device = case.device
        self._columns = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        self.cursor = torch.zeros((), dtype=torch.int64, device=device)
        self._added = torch.arange(case.added, device=device)
        self._masses = torch.ones(case.items, device=device)
        self._highest = torch.ones((), device=device)
        self._index = torch.zeros(case.batch, dtype=torch.int64, device=device)
        self._weight = torch.ones(case.batch, device=device)
        self._out = {
            name: torch.zeros_like(self._windows(values)[self._index])
            for name, values in self._columns.items()
        }

    def _windows(self, column: torch.Tensor) -> torch.Tensor:
        """Return a view with a window for each first step: [items - T + 1, T, ...]; or the rows."""
        if self.case.length == 1:
            return column
        return column.unfold(0, self.case.length, 1).movedim(-1, 1)

    def add(self) -> None:
        if self.case.rollout:
            for name, column in self._columns.items():
                steps = column.unflatten(0, (self.case.rollout, self.case.num_envs))
                given = self.given[name].view(steps.shape)
                for t in range(self.case.rollout):
                    steps[t] = given[t]
            return
        place = (self.cursor + self._added) % self.case.items
        for name, column in self._columns.items():
            column[place] = self.given[name]
        if self.case.prioritized:
            self._masses[place] = self._highest.expand(self.case.added)
        self.cursor += self.case.added

    def sample(self) -> None:
        count = self.case.batch
        device = self.case.device
        if self.case.prioritized:
            sums = self._masses.cumsum(0)
            drawn = torch.rand(count, device=device) * sums[-1]
            index = torch.searchsorted(sums, drawn, right=True).clamp_max(self.case.items - 1)
            weight = (self._masses[index] / sums[-1] * self.case.items) ** -BETA
            self._weight.copy_(weight / weight.max())
        elif self.case.length > 1:
            starts = work.EPISODE - self.case.length + 1  # of windows inside a trajectory
            first = torch.randint(starts, (count,), device=device)
            episode = torch.randint(self.case.items // work.EPISODE, (count,), device=device)
            index = episode * work.EPISODE + first
        else:
            index = torch.randint(self.case.items, (count,), device=device)
        self._index.copy_(index)
        self._copy(index)

    def _copy(self, index: torch.Tensor) -> None:
        for name, column in self._columns.items():
            self._out[name].copy_(self._windows(column)[index])

    def minibatches(self) -> Iterator[None]:
        for _ in range(NUM_EPOCHS):
            order = torch.randperm(self.case.items, device=self.case.device)
            for index in order.split(self.case.batch):
                self._copy(index)
                yield

    def update(self) -> None:
        masses = self.td**ALPHA
        self._masses[self._index] = masses
        self._highest.copy_(torch.maximum(self._highest, masses.max()))

    def batch(self) -> Rows:
        return as_arrays(self._out)

    def stored(self) -> Array:
        return self._columns["reward"].cpu().numpy().astype(np.int64)


make = Columns
