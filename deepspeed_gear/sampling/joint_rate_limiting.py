"""The rate limiter of a table on several nodes: it admits a selection on all nodes or on none.

The exchange of records also sets the quota of each node's writers, so that together they keep the rate
(`store/rate_quotas.py`).
"""

from __future__ import annotations

from typing import Final

import numpy as np

from deepspeed_gear.errors import NotReadyError
from deepspeed_gear.sampling.rate_limiting import LimiterWait, SelectionLimiter
from deepspeed_gear.store.rate_quotas import divide, kept
from deepspeed_gear.store.records import Control
from deepspeed_gear.store.stream_records import Position
from deepspeed_gear.store.table import Table


class NodeRate:
    """Words of a node's rate record, sent to the other nodes: sizes, quota and samples of its shard."""

    SIZE: Final = 0
    INSERTED: Final = 1
    ADMITTED: Final = 2
    QUOTA: Final = 3
    WANTED: Final = 4
    LEFT: Final = 5  # samples that its trajectories still admit
    FEWEST: Final = 6  # draws after which its first trajectory may be used up
    GIVES_UP: Final = 7  # GaveUp, or 0
    TURN: Final = 8
    IS_FIXED: Final = 9  # its quota must not change now
    SAMPLED: Final = 10
    MAY_BE_FILLED: Final = 11  # a process of the node may add items
    COMES: Final = 12  # an item will be complete as time goes on, without any process that adds
    NUM_WORDS: Final = 13


class GaveUp:
    """Codes of why a node stops waiting for the rate limiter."""

    LATE: Final = 1  # it has waited for its timeout
    WRITES_HERE: Final = 2  # it would wait for items that it adds itself


class JointSelectionLimiter:
    """The rate limiter over all nodes, in one process of each. Every method requires the table's lock.

    Args:
        table: This node's part of its table.
        limiter: The limiter of this node's part.
        position: Of the stream.
        waiting: Measures this process's wait for the rate limiter.
    """

    def __init__(
        self, table: Table, limiter: SelectionLimiter, position: np.ndarray, waiting: LimiterWait
    ) -> None:
        shard, rate = table.spec.shard, limiter.retention.rate_limiter
        assert shard is not None
        self.index = shard.index
        self._table, self._limiter, self._position, self._waiting = table, limiter, position, waiting
        self._rate = rate
        self._divides = rate is not None and rate.holds_back
        self._is_open = True  # by the records received last
        self._turn, self._admitted = 0, 0
        self.fewest = 0  # draws after which the first trajectory of any node may be used up

    def record(self, count: int, fixed: bool = False, exact: bool = False) -> np.ndarray:
        """Return this node's rate record, and reduce its quota to the part that it keeps in the exchange.

        Args:
            count: Samples to draw.
            fixed: Change nothing: another thread of this process may be in a selection. Then no process may
                `apply`.
            exact: As `SelectionLimiter.left`.
        Returns:
            [NodeRate.NUM_WORDS], int64.
        """
        words, control = np.zeros(NodeRate.NUM_WORDS, np.int64), self._table.control
        self._turn += 1
        words[NodeRate.TURN], words[NodeRate.IS_FIXED], words[NodeRate.SAMPLED] = (
            self._turn,
            fixed,
            self._limiter.sampled,
        )
        words[NodeRate.LEFT] = self._limiter.left(count, exact)
        if self._limiter.most:
            words[NodeRate.FEWEST] = self._limiter.fewest()
        if self._waiting.waited_s > self._waiting.timeout_s:
            words[NodeRate.GIVES_UP] = GaveUp.LATE
        elif self._position[Position.WRITES] and not self._waiting.is_ahead:
            words[NodeRate.GIVES_UP] = GaveUp.WRITES_HERE
        if self._table.groups is not None:
            words[NodeRate.COMES] = self._table.groups.waits_for_time
        if not self._limiter.is_plain or not words[NodeRate.LEFT]:
            words[NodeRate.MAY_BE_FILLED] = self._waiting.is_ahead or self._limiter.may_be_filled
        if self._rate is None:
            return words
        if control[Control.PENDING] and not self._is_open:  # slots of dead processes must not block writers
            self._table.unfinished.end_abandoned()
        words[NodeRate.SIZE], words[NodeRate.INSERTED], pending = self._rate.counted(control)
        admitted = int(words[NodeRate.INSERTED]) + pending
        words[NodeRate.ADMITTED] = admitted
        if self._divides:
            quota = max(admitted, int(control[Control.QUOTA]))
            words[NodeRate.QUOTA] = quota if fixed else kept(admitted, quota, not self._is_open)
            words[NodeRate.WANTED] = max(int(control[Control.WANTED]), int(admitted > self._admitted))
            if not fixed:
                control[Control.QUOTA], control[Control.WANTED] = words[NodeRate.QUOTA], 0
                self._admitted = admitted
        return words

    def is_open(self, records: np.ndarray, count: int) -> bool:
        """Return whether all nodes together may draw `count` samples; equal on all nodes.

        Args:
            records: Each node's record, in the order of shards. [S, NodeRate.NUM_WORDS], int64.
            count: Samples to draw.
        """
        size, inserted, left = records[:, [NodeRate.SIZE, NodeRate.INSERTED, NodeRate.LEFT]].sum(0).tolist()
        sampled = int(records[0, NodeRate.SAMPLED])
        return self._limiter.admits(size, inserted, sampled, count) and left >= count

    @staticmethod
    def is_fixed(records: np.ndarray) -> bool:
        """Return whether a node's record is fixed, so that no node may `apply`; argument as `is_open`."""
        return bool(records[:, NodeRate.IS_FIXED].any())

    def apply(self, records: np.ndarray, count: int) -> bool:
        """Add this node's part of the pool to its quota; return `is_open`. Arguments as there."""
        if self._divides:
            self._table.control[Control.QUOTA] = records[self.index, NodeRate.QUOTA] + self._share(records)
        self._is_open = self.is_open(records, count)
        self.fewest = int(records[:, NodeRate.FEWEST].min())
        return self._is_open

    def _share(self, records: np.ndarray) -> int:
        assert self._rate is not None
        size, inserted, admitted, quota = (
            records[:, [NodeRate.SIZE, NodeRate.INSERTED, NodeRate.ADMITTED, NodeRate.QUOTA]].sum(0).tolist()
        )
        room = self._rate.room(size + admitted - inserted, admitted, int(records[0, NodeRate.SAMPLED]))
        parts = divide(
            max(0, admitted + room - quota),
            records[:, NodeRate.WANTED].tolist(),
            int(records[0, NodeRate.TURN]),
        )
        return parts[self.index]

    def given_up(self, records: np.ndarray, key: int, count: int) -> NotReadyError | None:
        """Return the error that all nodes raise if one of them stops waiting for the rate limiter."""
        why = int(records[:, NodeRate.GIVES_UP].max())
        if not records[:, NodeRate.MAY_BE_FILLED].any():
            why = why or GaveUp.WRITES_HERE
        if why == GaveUp.WRITES_HERE and records[:, NodeRate.COMES].any():
            why = GaveUp.LATE if (records[:, NodeRate.GIVES_UP] == GaveUp.LATE).any() else 0
        if not why:
            return None
        waited_s = self._waiting.timeout_s if why == GaveUp.LATE else 0.0
        is_empty = self._limiter.is_plain
        return self._limiter.too_late(key, count, waited_s, self._held(records), is_empty)

    def _held(self, records: np.ndarray) -> str:
        size, inserted, left = records[:, [NodeRate.SIZE, NodeRate.INSERTED, NodeRate.LEFT]].sum(0).tolist()
        unit = "items" if self._rate is None else f"{self._rate.unit}s"
        return f"{size} {unit} held by all nodes, {inserted} ever added, good for {left} samples"
