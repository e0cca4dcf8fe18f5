"""The buffer as LeanRL's programs use it: TorchRL's, called outside of what is captured.

Each update takes `extend`, `sample` and a learner's step in a `CudaGraphModule`, which copies the
batch into the inputs of its graph. The step here reads one column.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from peers.interface import Array, NotOfferedError, Rows
from tensordict import TensorDict
from tensordict.nn import CudaGraphModule
from torchrl.data import LazyTensorStorage, ReplayBuffer

from device_peers.interface import ADD, BOTH, CAPTURED, COMPILED, SAMPLE, Call, Case
from device_peers.torch_forms import TorchTable, as_arrays

PACKAGE = "torchrl"
OUTSIDE = "LeanRL compiles and captures its update, and calls the buffer outside of it"


class Leanrl(TorchTable):
    """`ReplayBuffer` over a `LazyTensorStorage` of the device."""

    note = "captured: a batch is copied into the inputs of a captured step"
    not_offered: ClassVar = {COMPILED: OUTSIDE, BOTH: OUTSIDE}

    def __init__(self, case: Case, compiler: str) -> None:
        if case.length > 1 or case.prioritized or case.rollout:
            raise NotOfferedError
        super().__init__(case, compiler)
        self._buffer = ReplayBuffer(storage=LazyTensorStorage(case.items, device=case.device))
        for rows in case.content():
            self._buffer.extend(self._dict(self.on_device(rows)))
        self._last: Any = None
        self._step = CudaGraphModule(_loss)

    def _dict(self, rows: dict[str, torch.Tensor]) -> TensorDict:
        return TensorDict(rows, [len(rows["reward"])], device=self.case.device)

    def made(self, form: str, work: str) -> Call:
        if form != CAPTURED:
            return super().made(form, work)
        if work == ADD:
            raise NotOfferedError(OUTSIDE)
        call = self._sample_for_graph if work == SAMPLE else self._add_and_sample_for_graph
        for _ in range(3):  # it captures in the second or third call
            call()
        return call

    def add(self) -> None:
        self._buffer.extend(torch.cat([self._dict(self.given)]))

    def sample(self) -> None:
        self._last = self._buffer.sample(self.case.batch)

    def _sample_for_graph(self) -> None:
        self.sample()
        self._step(self._last)

    def _add_and_sample_for_graph(self) -> None:
        self.add()
        self._sample_for_graph()

    def batch(self) -> Rows:
        return as_arrays({name: self._last[name] for name in self.given})

    def stored(self) -> Array:
        return self._buffer.storage[:]["reward"].cpu().numpy().astype(np.int64)


def _loss(data: TensorDict) -> torch.Tensor:
    return data["reward"].mean()


make = Leanrl
