"""Collectives of tensors on the ranks' own devices: NCCL between GPUs, gloo where the device is the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
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
        device: Of this rank.
        is_shared: Whether any two of the ranks have the same GPU.
        timeout_s: Longest wait for another rank, in seconds.
        purpose: Groups of different purposes never wait for each other.
        guard: Context manager around each collective only.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        device: torch.device,
        is_shared: bool,
        timeout_s: float,
        purpose: str,
        guard: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._ranks, self._device, self._timeout_s, self._purpose = tuple(ranks), device, timeout_s, purpose
        self.backend = "nccl" if device.type == "cuda" and not is_shared else "gloo"
        self._is_staged = device.type == "cuda" and self.backend == "gloo"
        # A group counts its ranks in ascending order.
        self._order = sorted(range(len(self._ranks)), key=self._ranks.__getitem__)
        self._places = [self._order.index(rank) for rank in range(len(self._ranks))]
        self._group: Any = None
        # Left out of what torch.compile traces. As a decorator it would import the compiler with the package.
        self._broadcast_untraced: Callable[[Tensor, int], None] = torch.compiler.disable(self._broadcast)  # type: ignore[no-untyped-call]
        self._guard = guard

    def open(self) -> None:
        """Make the group. Collective over the ranks that take part."""
        self._group = lane(tuple(sorted(self._ranks)), self._purpose, self._timeout_s, self.backend)

    def gather(self, words: Tensor) -> Tensor:
        """Return the same tensor of every rank. [n] -> [S, n]."""
        given = self._out(words).contiguous()
        found = [torch.empty_like(given) for _ in self._ranks]
        with self._guard():
            dist.all_gather(found, given, group=self._group)
        return self._back(torch.stack([found[place] for place in self._places]))

    def swap(self, rows: Tensor, outgoing: Sequence[int], coming: Sequence[int]) -> Tensor:
        """Send each rank its rows (all-to-all).

        Args:
            rows: By receiver. [n, ...], contiguous.
            outgoing: Rows for each rank.
            coming: Rows from each rank.
        Returns:
            By sender. [m, ...].
        """
        sent = self._out(self._permuted(rows, outgoing, self._order))
        found = sent.new_empty((sum(coming), *sent.shape[1:]))
        got, given = ([counts[rank] for rank in self._order] for counts in (coming, outgoing))
        sent = sent.contiguous()
        with self._guard():
            dist.all_to_all_single(found, sent, got, given, group=self._group)
        return self._back(self._permuted(found, got, self._places))

    def broadcast(self, values: Tensor, source: int) -> None:
        """Broadcast the values of one rank, in place. Can be captured in a CUDA graph over NCCL."""
        self._broadcast_untraced(values, source)

    def _broadcast(self, values: Tensor, source: int) -> None:
        there = self._out(values)
        dist.broadcast(there, self._ranks[source], group=self._group)
        if there is not values:
            values.copy_(there)

    def _permuted(self, rows: Tensor, counts: Sequence[int], order: Sequence[int]) -> Tensor:
        there = [rank for rank in order if counts[rank]]
        if there == sorted(there):
            return rows
        parts = torch.split(rows, list(counts))
        return torch.cat([parts[rank] for rank in order])

    def _out(self, tensor: Tensor) -> Tensor:
        return tensor.cpu() if self._is_staged else tensor

    def _back(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device) if self._is_staged else tensor
