"""Rows between nodes over the transport of their devices: NCCL between GPUs, which brings RDMA, else gloo."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from deepspeed_gear.distributed.control_plane import lane
from deepspeed_gear.distributed.node_channel import GRACE_S, NodeChannel

_LEAST_ROOM = 1 << 12  # words of a buffer


class DeviceTransport:
    """Carries packed rows after the messages of a channel, which say how many there are.

    Every exchange is one collective of the ranks that exchange: among the collectives of training it has its
    place in the program, the same on every rank. So only the main thread may call it. On a GPU it has a
    stream of its own, beside the training step, and rows go through pinned memory; the host waits for them,
    as it puts them where all ranks of the node read.

    Args:
        channel: Between the nodes; its errors name what is lost.
        device: Of this rank.
    """

    def __init__(self, channel: NodeChannel, device: torch.device) -> None:
        self._channel, self._device = channel, device
        self._group: Any = None
        self._rooms: dict[str, torch.Tensor] = {}
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def open(self) -> None:
        """Make the group. Collective over the ranks that exchange."""
        backend = "nccl" if self._device.type == "cuda" else "gloo"
        timeout_s = self._channel.timeout_s + GRACE_S
        self._group = lane(tuple(sorted(self._channel.ranks)), "rows", timeout_s, backend)

    def exchange(self, messages: Sequence[np.ndarray], sizes: Sequence[int]) -> list[np.ndarray]:
        """Send each node its rows. Collective.

        Args:
            messages: For each node, in the order of the channel. [words] each, int64.
            sizes: Words that come from each node.
        Returns:
            What has come from each node; gone with the next call. [words] each, int64.
        Raises:
            LostNodeError: A node does not answer in time. (NCCL ends the process instead, as its own
                watchdog does.)
        """
        order = np.argsort(self._channel.ranks).tolist()  # of the group, whose ranks ascend
        out, coming = [len(messages[node]) for node in order], [sizes[node] for node in order]
        sent, found = self._room("sent", sum(out)), self._room("found", sum(coming))
        if sum(out):
            torch.cat([torch.from_numpy(messages[node]) for node in order], out=sent)
        with self._channel.naming_the_lost(), torch.cuda.stream(self._stream):  # None: nothing is changed
            self._all_to_all(sent, found, coming, out)
        ends = np.cumsum(coming)
        parts = np.split(found.numpy(), ends[:-1])
        received: list[np.ndarray] = [parts[0]] * len(order)
        for node, part in zip(order, parts, strict=True):
            received[node] = part
        self._channel.count_bytes(sent.nbytes, found.nbytes)
        return received

    def _all_to_all(
        self, sent: torch.Tensor, found: torch.Tensor, coming: Sequence[int], out: Sequence[int]
    ) -> None:
        """Send words, and wait for those that come."""
        there, back = self._there("sent", sent), self._there("found", found)
        if self._stream is not None:
            there.copy_(sent, non_blocking=True)
        dist.all_to_all_single(back, there, list(coming), list(out), group=self._group)
        if self._stream is not None:
            found.copy_(back, non_blocking=True)
            self._stream.synchronize()

    def _room(self, name: str, words: int) -> torch.Tensor:
        """Return memory of the host, pinned where there is a GPU, that is kept for the next exchange."""
        return self._kept(name, words, torch.device("cpu"))[:words]

    def _there(self, name: str, words: torch.Tensor) -> torch.Tensor:
        """Return as much memory of the device; the host's own where that is the device."""
        if self._device.type == "cpu":
            return words
        return self._kept(f"{name} there", len(words), self._device)[: len(words)]

    def _kept(self, name: str, words: int, device: torch.device) -> torch.Tensor:
        if name not in self._rooms or len(self._rooms[name]) < words:
            size = 1 << max(words - 1, _LEAST_ROOM - 1).bit_length()
            pinned = device.type == "cpu" and self._device.type == "cuda"
            self._rooms[name] = torch.empty(size, dtype=torch.int64, device=device, pin_memory=pinned)
        return self._rooms[name]
