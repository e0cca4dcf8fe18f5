"""TorchRL: tensordict replay buffers with their storage on the device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from peers.interface import Array, NotOfferedError, Rows
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import (
    PrioritizedSampler,
    RandomSampler,
    SamplerWithoutReplacement,
)

from device_peers.interface import ALPHA, BETA, NUM_EPOCHS, NUM_MINIBATCHES, Case
from device_peers.torch_forms import TorchTable, as_arrays

PACKAGE = "torchrl"


def prioritized_sampler(case: Case) -> tuple[Any, str]:
    """Return a sampler with its trees on the device; on the host where TorchRL has no other."""
    asked: dict[str, Any] = {"max_capacity": case.items, "alpha": ALPHA, "beta": BETA}
    try:
        return PrioritizedSampler(**asked, device=case.device), ""
    except RuntimeError:
        if case.device == "cpu":
            raise
        note = "trees on the host: this build of TorchRL has none for CUDA"
        return PrioritizedSampler(**asked, device="cpu"), note


class Torchrl(TorchTable):
    """`extend`, `sample` and `update_tensordict_priority` of a compilable buffer."""

    def __init__(self, case: Case, compiler: str) -> None:
        if case.length > 1:
            raise NotOfferedError
        super().__init__(case, compiler)
        sampler: Any = RandomSampler()
        if case.prioritized:
            sampler, self.note = prioritized_sampler(case)
        elif case.rollout:
            sampler = SamplerWithoutReplacement()
            self.note = "a roll-out is added by one call of `extend`"
        self._buffer = TensorDictReplayBuffer(
            storage=LazyTensorStorage(case.items, device=case.device, compilable=True),
            sampler=sampler,
            priority_key="td_error",
            batch_size=case.batch,
            compilable=True,
        )
        for rows in case.content():
            self._buffer.extend(self._dict(self.on_device(rows)))
        self._rows = self._dict(self.given)
        self._last: Any = None if case.rollout else self._buffer.sample()

    def _dict(self, rows: dict[str, torch.Tensor]) -> TensorDict:
        return TensorDict(rows, [len(rows["reward"])], device=self.case.device)

    def add(self) -> None:
        self._buffer.extend(self._rows.copy())  # to which the buffer adds an index

    def sample(self) -> None:
        self._last = self._buffer.sample()

    def minibatches(self) -> Iterator[None]:
        for _ in range(NUM_EPOCHS * NUM_MINIBATCHES):
            self._last = self._buffer.sample()
            yield

    def update(self) -> None:
        self._last["td_error"] = self.td
        self._buffer.update_tensordict_priority(self._last)

    def batch(self) -> Rows:
        return as_arrays({name: self._last[name] for name in self.given})

    def stored(self) -> Array:
        return self._buffer.storage[:]["reward"].cpu().numpy().astype(np.int64)


make = Torchrl
