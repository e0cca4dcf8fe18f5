"""Collectives of tensors on the ranks' own devices: NCCL between GPUs, gloo where the device is the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed_gear.distributed.control_plane import lane


class DeviceCollectives:
    """Collectives between the devices of some ranks. One thread; all ranks call in one order.

    A collective of NCCL is queued on the current CUDA stream, in the same order on every rank, and the host
    does not wait for it. Ranks that share a GPU, which NCCL refuses, use gloo and host memory.

    Args:
        ranks: Global ranks, in the order in which they are counted here.
        is_shared: Whether any two of the ranks have the same GPU.
        timeout_s: Longest wait for another rank, in seconds.
        purpose: Groups of different purposes never wait for each other.
    """

    def __init__(
        self, ranks: Sequence[int], device: torch.device, is_shared: bool, timeout_s: float, purpose: str
    ) -> None:
        self._ranks, self._timeout_s, self._purpose = tuple(ranks), timeout_s, purpose
        self._backend = "nccl" if device.type == "cuda" and not is_shared else "gloo"
        self._is_staged = device.type == "cuda" and is_shared
        self._group: Any = None
        # Left out of what torch.compile traces. As a decorator it would import the compiler with the package.
        self._broadcast_untraced: Callable[[Tensor, int], None] = torch.compiler.disable(self._broadcast)  # type: ignore[no-untyped-call]

    def open(self) -> None:
        """Make the group. Collective over the ranks that take part."""
        self._group = lane(tuple(sorted(self._ranks)), self._purpose, self._timeout_s, self._backend)

    def broadcast(self, values: Tensor, source: int) -> None:
        """Broadcast the values of one rank, in place. Can be captured in a CUDA graph over NCCL."""
        self._broadcast_untraced(values, source)

    def _broadcast(self, values: Tensor, source: int) -> None:
        there = values.cpu() if self._is_staged else values
        dist.broadcast(there, self._ranks[source], group=self._group)
        if there is not values:
            values.copy_(there)
