"""Device transport: sends encoded rows between the nodes' GPUs by NCCL, not by the node channel."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

from deepspeed_gear.batching.transfer.cuda_streams import lane_of
from deepspeed_gear.distributed.control_plane import purpose_group
from deepspeed_gear.distributed.node_channel import GRACE_S, NodeChannel

_LEAST_WORDS = 1 << 12  # of a buffer


class DeviceTransport:
    """Sends encoded rows by NCCL (which brings RDMA) or gloo, after a channel's messages with their
    sizes.

    An exchange is one collective, in the same place among those of training on every rank: main
    thread only. On a GPU it runs on a CUDA stream of its own, through pinned memory; the host waits
    for the rows, which it writes to the store that all ranks of the node read.
    """

    def __init__(self, channel: NodeChannel, device: torch.device) -> None:
        self._channel = channel
        self._device = device
        backend = "nccl" if device.type == "cuda" else "gloo"
        self._group = purpose_group(
            tuple(sorted(channel.ranks)), "rows", channel.timeout_s + GRACE_S, backend
        )
        self._buffers: dict[str, torch.Tensor] = {}
        self._stream = lane_of(device)

    def exchange(self, messages: Sequence[np.ndarray], sizes: Sequence[int]) -> list[np.ndarray]:
        """Send each node its rows; return those of each, [words], until the next call. Collective.

        In the order of the channel's nodes. LostNodeError: a node does not answer in time (with
        NCCL its watchdog ends the process instead).
        """
        order = np.argsort(self._channel.ranks).tolist()  # of the group, whose ranks ascend
        out = [len(messages[node]) for node in order]
        coming = [sizes[node] for node in order]
        host = torch.device("cpu")
        sent = self._buffer("sent", sum(out), host)
        arrived = self._buffer("arrived", sum(coming), host)
        there = sent
        back = arrived
        is_on_device = self._device.type != "cpu"
        if is_on_device:
            with self._stream.running():
                # Allocated on the stream that uses them: of another stream's pool torch's allocator
                # returns memory that this other stream may still be reading and writing.
                there = self._buffer("sent there", len(sent), self._device)
                back = self._buffer("arrived there", len(arrived), self._device)
        if sum(out):
            torch.cat([torch.from_numpy(messages[node]) for node in order], out=sent)
        with self._channel.naming_lost_ranks(), self._stream.running():
            if is_on_device:
                there.copy_(sent, non_blocking=True)
            dist.all_to_all_single(back, there, coming, out, group=self._group)
            if is_on_device:
                arrived.copy_(back, non_blocking=True)
                self._stream.record().synchronize()
        parts = np.split(arrived.numpy(), np.cumsum(coming)[:-1])
        received: list[np.ndarray] = [parts[0]] * len(order)
        for node, part in zip(order, parts, strict=True):
            received[node] = part
        self._channel.count_bytes(sent.nbytes, arrived.nbytes)
        return received

    def _buffer(self, name: str, words: int, device: torch.device) -> torch.Tensor:
        """Return a buffer that later exchanges use again; on the host it is pinned where there is a
        GPU.
        """
        if name not in self._buffers or len(self._buffers[name]) < words:
            size = 1 << max(words - 1, _LEAST_WORDS - 1).bit_length()
            pinned = device.type == "cpu" and self._device.type == "cuda"
            self._buffers[name] = torch.empty(
                size, dtype=torch.int64, device=device, pin_memory=pinned
            )
        return self._buffers[name][:words]
