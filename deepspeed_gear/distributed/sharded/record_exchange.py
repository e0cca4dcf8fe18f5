"""Exchange of a selection's records where batches are packed: every node gets those of all trajectories."""

from __future__ import annotations

import numpy as np
import torch

from deepspeed_gear.distributed import node_messages
from deepspeed_gear.distributed.node_channel import NodeChannel
from deepspeed_gear.distributed.sharded.resolution_exchange import NodeSelection
from deepspeed_gear.ops.constants import SHARD_BITS
from deepspeed_gear.ops.records import Resolution
from deepspeed_gear.sampling.stream_state import StreamState

NO_ROW = -1  # first row of a trajectory that another node holds: gathering it is an error


class RecordExchange:
    """Sends the records of this node's trajectories to all other nodes; fills this node's ring.

    One thread at a time. No rows are sent: `TrajectoryExchange` sends those of the packs of a step.

    Args:
        state: Of the stream, in this node's part of the table.
        channel: To the other nodes.
    """

    def __init__(self, state: StreamState, channel: NodeChannel) -> None:
        self._state, self._channel = state, channel
        self.least_drawn = node_messages.MOST  # of the latest selection: the smallest mass
        self.num_records = 0  # of the latest selection

    def fill(self, selection: NodeSelection, own: np.ndarray, records: torch.Tensor) -> np.ndarray:
        """Exchange a selection: write the records of all its trajectories to the ring.

        Args:
            selection: The selection.
            own: Items that this node holds, ascending. [n], int64.
            records: Their resolutions; of groups those of the leaders. [n, 8], int64.
        Returns:
            The records of this node's trajectories. [m, 8], int64.
        """
        state, words = self._state, records.numpy()
        if state.spec.by_group:
            try:
                with state.table.lock:
                    words, item = state.members(words)
            except Exception as error:  # the other nodes wait for the records
                self._channel.abandon(error)
                raise
            own = own[item]
        item = self._exchange(selection.entry, own, words)
        if state.spec.by_group:
            epochs = state.drawn[selection.entry][1]
            state.entries[selection.entry][1][: len(item)] = epochs[torch.from_numpy(item)]
        return words

    def restore(self, selection: NodeSelection, own: np.ndarray, records: torch.Tensor) -> None:
        """Exchange a selection of a checkpoint, as `fill`.

        Args:
            selection: The selection.
            own: Its records that this node holds, ascending. [m], int64.
            records: They. [m, 8], int64.
        """
        self._exchange(selection.entry, own, records.numpy())

    def _exchange(self, entry: int, own: np.ndarray, words: np.ndarray) -> np.ndarray:
        """Write the records of all nodes to an entry of the ring.

        Args:
            entry: Of the ring.
            own: Place of each of this node's records in the selection; those of one group share it.
                [m], int64.
            words: They. [m, 8], int64.
        Returns:
            The places of all records. [count], int64, ascending.
        """
        try:
            found = self._channel.gather_ragged(np.concatenate([own[:, None], words], axis=1))
        except Exception as error:
            self._channel.abandon(error)
            raise
        every, state = np.concatenate(found), self._state
        shard = np.repeat(np.arange(len(found)), [len(rows) for rows in found])
        order = np.argsort(every[:, 0], kind="stable")
        places, records, shard = every[order, 0], every[order, 1:], shard[order]
        masses = records[:, Resolution.MASS]
        self.least_drawn, self.num_records = int(masses.min(initial=node_messages.MOST)), len(records)
        assert state.origins is not None
        origins = shard << SHARD_BITS | records[:, Resolution.SLOT]
        state.origins.numpy()[entry, : len(records)] = origins
        elsewhere = shard != self._channel.index
        records[elsewhere, Resolution.SLOT] = len(state.table.slots)
        records[elsewhere, Resolution.FIRST_ROW] = NO_ROW
        state.ring_words[entry, : len(records)] = records
        return np.asarray(places)
