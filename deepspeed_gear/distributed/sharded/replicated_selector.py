"""Selection where every node holds the whole table: nodes exchange reported priorities, but no rows."""

from __future__ import annotations

import numpy as np
import torch

from deepspeed_gear.distributed.node_channel import NodeChannel
from deepspeed_gear.distributed.sharded.selection_agreement import SelectionAgreement
from deepspeed_gear.ops.records import LogEntry
from deepspeed_gear.sampling.priority_masses import PriorityMasses
from deepspeed_gear.sampling.selector import LocalSelector
from deepspeed_gear.sampling.stream_state import StreamState


class ReplicatedSelector(SelectionAgreement):
    """Selects from a store that stays equal to those of all other nodes. One thread at a time.

    Args:
        state: Of the stream in this node's store, with priorities.
        channel: To the other nodes.
    """

    def __init__(self, state: StreamState, channel: NodeChannel) -> None:
        super().__init__(state, channel)
        self._here = LocalSelector(state)
        self._reports = np.empty((0, LogEntry.NUM_WORDS), np.int64)
        self._received: list[np.ndarray] = []  # reports of all nodes

    @property
    def _priorities(self) -> PriorityMasses:
        return self.state.with_priorities

    def begin(self, key: int, entry: int, count: int) -> bool:
        self._key = key
        error: Exception | None = None
        try:
            with self._table.lock:
                self._due = self._priorities.reports.due(key)
                self._reports = np.concatenate([self._reports[:0], *(rows for _, rows in self._due)])
        except Exception as caught:
            error = caught
        received = self._exchange_status(error, self.state.stop.is_set(), [self._reports] * self._num_nodes)
        self.num_selections += 1
        self._received = [words.reshape(-1, LogEntry.NUM_WORDS) for words in received]
        return True

    def apply(self, key: int) -> int:
        def change() -> None:
            self._priorities.apply_reports(key, [rows for rows in self._received if len(rows)])
            if self._due:
                self._priorities.reports.take(self._due)

        self._apply_together(change)
        return self.total

    def resolve(self, rows: torch.Tensor, done: int, coordinates: torch.Tensor, first: int) -> None:
        with self._table.lock:
            self._here.resolve(rows, done, coordinates, first)

    def finish(self, key: int, entry: int, count: int) -> int:
        with self._table.lock:
            return self._here.finish(key, entry, count)

    def highest(self, count: int) -> torch.Tensor:
        with self._table.lock:
            return self._here.highest(count)
