"""Transport of rows between nodes by their devices: NCCL between GPUs, which brings RDMA, else gloo."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from deepspeed_gear.distributed.control_plane import lane
from deepspeed_gear.distributed.node_channel import GRACE_S, NodeChannel

_LEAST_WORDS = 1 << 12  # of a buffer


class DeviceTransport:
    """Sends encoded rows after the messages of a channel, which hold their sizes.

    Every exchange is one collective of the ranks that exchange: it must have the same position among the
    collectives of training on every rank. So only the main thread may call it. On a GPU it runs on a CUDA
    stream of its own, beside the training step, and copies rows through pinned memory; the host waits for
    them, as it writes them to the store that all ranks of the node read.

    Args:
        channel: Between the nodes; its errors name the lost node.
    """

    def __init__(self, channel: NodeChannel, device: torch.device) -> None:
        self._channel, self._device = channel, device
        self._group: Any = None
        self._buffers: dict[str, torch.Tensor] = {}
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def open(self) -> None:
        """Make the group. Collective over the ranks that exchange."""
        backend = "nccl" if self._device.type == "cuda" else "gloo"
        timeout_s = self._channel.timeout_s + GRACE_S
        self._group = lane(tuple(sorted(self._channel.ranks)), "rows", timeout_s, backend)

    def exchange(self, messages: Sequence[np.ndarray], sizes: Sequence[int]) -> list[np.ndarray]:
        """Send each node its rows, and receive those of each. Collective.

        Args:
            messages: For each node, in the order of the channel. [words] each, int64.
            sizes: Words that come from each node.
        Returns:
            The words from each node; valid until the next call. [words] each, int64.
        Raises:
            LostNodeError: A node does not answer in time. (NCCL ends the process instead, as its own
                watchdog does.)
        """
        order = np.argsort(self._channel.ranks).tolist()  # of the group, whose ranks ascend
        out, coming = [len(messages[node]) for node in order], [sizes[node] for node in order]
        host = torch.device("cpu")
        sent, found = self._buffer("sent", sum(out), host), self._buffer("found", sum(coming), host)
        there, back = sent, found
        if self._stream is not None:
            there = self._buffer("sent there", len(sent), self._device)
            back = self._buffer("found there", len(found), self._device)
        if sum(out):
            torch.cat([torch.from_numpy(messages[node]) for node in order], out=sent)
        with self._channel.naming_lost_ranks(), torch.cuda.stream(self._stream):  # None: nothing is changed
            if self._stream is not None:
                there.copy_(sent, non_blocking=True)
            dist.all_to_all_single(back, there, coming, out, group=self._group)
            if self._stream is not None:
                found.copy_(back, non_blocking=True)
                self._stream.synchronize()
        ends = np.cumsum(coming)
        parts = np.split(found.numpy(), ends[:-1])
        received: list[np.ndarray] = [parts[0]] * len(order)
        for node, part in zip(order, parts, strict=True):
            received[node] = part
        self._channel.count_bytes(sent.nbytes, found.nbytes)
        return received

    def _buffer(self, name: str, words: int, device: torch.device) -> torch.Tensor:
        """Return a buffer that later exchanges use again; on the host it is pinned where there is a GPU."""
        if name not in self._buffers or len(self._buffers[name]) < words:
            size = 1 << max(words - 1, _LEAST_WORDS - 1).bit_length()
            pinned = device.type == "cpu" and self._device.type == "cuda"
            self._buffers[name] = torch.empty(size, dtype=torch.int64, device=device, pin_memory=pinned)
        return self._buffers[name][:words]
