"""Priority updates of tables on devices from which all replicas draw together."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from deepspeed_gear.batching.transfer.cuda_streams import copied_together, refuse_capture
from deepspeed_gear.device.device_batch import DeviceBatch
from deepspeed_gear.device.replica_agreement import ReplicaAgreement, by_replica
from deepspeed_gear.device.ring_selection import RingSelection
from deepspeed_gear.ops.constants import SHARD_BITS
from deepspeed_gear.ops.records import Resolution

# Words of a record in an update; the bits of the priority follow them.
_SENT_WORDS = [Resolution.SLOT, Resolution.GENERATION, Resolution.ANCHOR, Resolution.SAMPLE_NUMBER]
_SLOT_MASK = (1 << SHARD_BITS) - 1


class _Reported(NamedTuple):
    words: Tensor  # [B, 5], int64
    holders: np.ndarray | None  # the replica of each; None: all have them


class JointPriorities:
    """Priority updates of a global batch from all ranks, applied on every replica that holds the items.

    The reporting rank of a replica sends them to all ranks of the holders, so that tensor ranks stay equal.
    They take effect before the next selection, by sample number; of equal items the last wins.

    Args:
        selection: Of this replica's table.
        peers: The ranks.
    """

    def __init__(self, selection: RingSelection, peers: ReplicaAgreement) -> None:
        self._selection, self._peers = selection, peers
        self._waiting: list[_Reported] = []
        # Left out of what torch.compile traces. As a decorator it would import the compiler with the package.
        self._take_untraced: Callable[[DeviceBatch, Tensor], None] = torch.compiler.disable(self._take)  # type: ignore[no-untyped-call]
        self._exchange_untraced: Callable[[], None] = torch.compiler.disable(self._exchange)  # type: ignore[no-untyped-call]

    def take(self, batch: DeviceBatch, values: Tensor) -> None:
        """Add the priorities of a micro batch. [B], float32."""
        self._take_untraced(batch, values)

    def _take(self, batch: DeviceBatch, values: Tensor) -> None:
        if not self._peers.place.reports:
            return
        # A list as an index would be copied to the device, and waited for.
        slot, *rest = (batch.records[:, word] for word in _SENT_WORDS)
        if batch.holders is not None:
            slot = batch.origin & _SLOT_MASK
        words = torch.stack([slot, *rest, values.view(torch.int32).long()], 1)
        self._waiting.append(_Reported(words, batch.holders))

    def apply(self) -> None:
        """Exchange the priority updates of all ranks, and apply them. Collective.

        Raises:
            LostNodeError: A rank does not answer in time.
            StoreError: The CUDA stream is captured: messages between ranks cannot be in a graph.
        """
        self._exchange_untraced()

    def _exchange(self) -> None:
        rule = "cannot be captured where several replicas draw from one distribution"
        refuse_capture("sampling", rule, 'sample before the graph, or use "scope": "shard"')
        words, outgoing = self._sorted()
        coming = self._peers.share_words(outgoing)
        if self._selection.is_prioritized:  # as on all ranks
            self._apply(self._peers.share_rows(words, outgoing, coming))

    def forget(self) -> None:
        """Drop the pending updates."""
        self._waiting.clear()

    def _sorted(self) -> tuple[Tensor, list[int]]:
        """Return the pending updates, sorted by receiving replica, and their number for each."""
        waiting, replicas = self._waiting, self._peers.place.data_world
        self._waiting = []
        if not waiting:
            device = self._selection.table.device
            return torch.empty(0, len(_SENT_WORDS) + 1, dtype=torch.int64, device=device), [0] * replicas
        words = torch.cat([reported.words for reported in waiting])
        holders = [reported.holders for reported in waiting if reported.holders is not None]
        if not holders:
            return words.repeat(replicas, 1), [len(words)] * replicas
        every = np.concatenate(holders)
        (order,) = copied_together([torch.from_numpy(by_replica(every))], words.device)
        return words[order], np.bincount(every, minlength=replicas).tolist()

    def _apply(self, words: Tensor) -> None:
        if len(words) == 0:
            return
        words = words[torch.sort(words[:, _SENT_WORDS.index(Resolution.SAMPLE_NUMBER)], stable=True).indices]
        records = torch.zeros(len(words), Resolution.NUM_WORDS, dtype=torch.int64, device=words.device)
        for place, word in enumerate(_SENT_WORDS):
            records[:, word] = words[:, place]
        self._selection.update_(records, words[:, -1].to(torch.int32).view(torch.float32))
