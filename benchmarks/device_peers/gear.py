"""This project: DeviceReplay."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from peers.interface import Array, Rows
from speed import work

from deepspeed_gear import DeviceReplay
from device_peers.interface import ALPHA, BETA, NUM_EPOCHS, NUM_MINIBATCHES, Case
from device_peers.torch_forms import TorchTable, as_arrays

PACKAGE = "deepspeed_gear"


class Gear(TorchTable):
    """Transitions as trajectories of one step, windows of trajectories, or roll-outs."""

    def __init__(self, case: Case, compiler: str) -> None:
        super().__init__(case, compiler)
        first = next(case.content())
        names = tuple(first)
        steps = work.EPISODE if case.length > 1 else max(case.rollout, 1)
        columns: dict[str, Any] = {
            name: {"dtype": str(values.dtype), "shape": list(values.shape[1:])}
            for name, values in first.items()
        }
        table: dict[str, Any] = {
            "placement": "device",
            "remove": "fifo",
            "schema": {"columns": columns},
            "capacity_steps": case.items,
            "capacity_trajectories": case.items // steps,
            "max_length": steps,
        }
        sampler: dict[str, Any] = {"kind": "uniform", "unit": "step"}
        field: dict[str, Any] = {}
        if case.prioritized:
            sampler = {"kind": "prioritized", "unit": "step", "alpha": ALPHA, "beta": BETA}
        if case.rollout:
            sampler["kind"] = "epoch"
        if case.length > 1:
            sampler["anchors"] = "fits"
            field = {"offset": 0, "length": case.length}
        config = {
            "seed": 0,
            "tables": {"main": table},
            "sampler": sampler,
            "fields": dict.fromkeys(names, field),
            "batch_size": case.batch,
        }
        self._replay = DeviceReplay(config, torch.device(case.device))
        self._names = names
        for rows in case.content():
            self._replay.add_(
                {
                    name: values.unflatten(0, (-1, steps))
                    for name, values in self.on_device(rows).items()
                }
            )
        self._batch = self._replay.new_batch()
        if case.rollout:
            # [T, E, ...]: steps of all environments, which the program writes into a roll-out.
            sizes = (case.rollout, case.num_envs)
            self.given = {name: values.unflatten(0, sizes) for name, values in self.given.items()}
            self._rollout = {
                name: torch.zeros_like(
                    values.transpose(0, 1), memory_format=torch.contiguous_format
                )
                for name, values in self.given.items()
            }
            return
        # [added, 1, ...]: trajectories of one step.
        self.given = {name: values[:, None].contiguous() for name, values in self.given.items()}

    def add(self) -> None:
        if not self.case.rollout:
            self._replay.add_(self.given)
            return
        for t in range(self.case.rollout):
            for name, values in self.given.items():
                self._rollout[name][:, t] = values[t]
        self._replay.add_(self._rollout)

    def sample(self) -> None:
        self._replay.sample_(self._batch)

    def minibatches(self) -> Iterator[None]:
        for _ in range(NUM_EPOCHS * NUM_MINIBATCHES):
            self._replay.sample_(self._batch)
            yield

    def update(self) -> None:
        self._replay.update_priorities_(self._batch, self.td)

    def batch(self) -> Rows:
        return as_arrays({name: self._batch[name] for name in self._names})

    def stored(self) -> Array:
        return self._replay.table.columns["reward"].cpu().numpy().astype(np.int64)

    def close(self) -> None:
        self._replay.close()


make = Gear
