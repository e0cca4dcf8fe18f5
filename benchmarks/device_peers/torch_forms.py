"""Tables of torch tensors, and their calls: eager, compiled by inductor, captured in a CUDA graph.

On the CPU a captured call is the call itself, so that adapters can be tried without a GPU.
"""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import torch
from gpu_clock import captured
from peers.interface import Array, NotOfferedError, Rows
from speed import work as contents

from device_peers.interface import (
    ADD,
    ADD_AND_SAMPLE,
    ALL,
    BOTH,
    CAPTURED,
    COMPILED,
    EPOCHS,
    SAMPLE,
    UPDATE,
    Call,
    Case,
    Table,
)

SYNC = "called a synchronizing CUDA operation"  # torch's warning


class TorchTable(Table):
    """A table whose calls torch can compile and capture.

    Args:
        case: What it holds.
        compiler: Backend of torch.compile.

    Attributes:
        given: The transitions that `add` adds. [added, ...] each.
        td: The priorities that `update` sets. [B].
    """

    #: Forms that the system does not have, and why.
    not_offered: ClassVar[Mapping[str, str]] = {}

    def __init__(self, case: Case, compiler: str) -> None:
        self.case = case
        self.given: dict[str, torch.Tensor] = {}
        self.td = 1 - torch.rand(case.batch, device=case.device)
        self._compiler = compiler
        self._is_cuda = case.device == "cuda"
        if self._is_cuda and torch.cuda.current_stream() == torch.cuda.default_stream():
            torch.cuda.set_stream(torch.cuda.Stream())  # as a Replay's
        torch._dynamo.reset()  # one function of an adapter is compiled for many tables
        if case.length == 1:
            self.given = self.on_device(contents.steps(case.items, case.added))

    @abstractmethod
    def add(self) -> None:
        """Add the given transitions."""

    @abstractmethod
    def sample(self) -> None:
        """Make the next batch."""

    def update(self) -> None:
        """Set the priorities of the last batch."""
        raise NotOfferedError

    def add_and_sample(self) -> None:
        self.add()
        self.sample()

    def epochs(self) -> None:
        for _ in self.minibatches():
            pass

    def all_three(self) -> None:
        self.add()
        self.sample()
        self.update()

    def made(self, form: str, work: str) -> Call:
        if form in self.not_offered:
            raise NotOfferedError(self.not_offered[form])
        if work == EPOCHS and form in (COMPILED, BOTH):
            raise NotOfferedError  # a compiler leaves out minibatches that no learner reads
        calls: dict[str, Call] = {
            ADD: self.add,
            SAMPLE: self.sample,
            UPDATE: self.update,
            ADD_AND_SAMPLE: self.add_and_sample,
            ALL: self.all_three,
            EPOCHS: self.epochs,
        }
        call = calls[work]
        if form in (COMPILED, BOTH):
            torch._dynamo.utils.counters.clear()
            call = torch.compile(call, backend=self._compiler)
            call()
        if form in (CAPTURED, BOTH) and self._is_cuda:
            call = captured(call)
        return call

    def wait(self) -> None:
        if self._is_cuda:
            torch.cuda.synchronize()

    def host_waits(self, call: Call) -> int | None:
        return count_waits(call) if self._is_cuda else None

    def graph_breaks(self) -> int | None:
        return sum(torch._dynamo.utils.counters["graph_break"].values())

    def offer(self, rows: Rows) -> None:
        for name, tensor in self.given.items():
            tensor.copy_(torch.from_numpy(rows[name]).view(tensor.shape))

    def report(self, priorities: Array) -> None:
        self.td.copy_(torch.from_numpy(priorities))

    def on_device(self, rows: Rows) -> dict[str, torch.Tensor]:
        """Return rows as tensors of the device."""
        return {name: torch.from_numpy(each).to(self.case.device) for name, each in rows.items()}


def count_waits(call: Call) -> int:
    """Count torch's warnings of synchronizing operations in a call."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum(SYNC in str(warning.message) for warning in caught)


def as_arrays(tensors: Mapping[str, torch.Tensor]) -> Rows:
    """Return tensors as NumPy arrays."""
    return {name: tensor.cpu().numpy() for name, tensor in tensors.items()}
