"""Trajectory places: which nodes have the rows of a rollout batch's trajectories, and which move.

Pure: every rank computes the same from records and packing plan, so no message is needed for that.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from deepspeed_gear.ops.constants import SHARD_BITS
from deepspeed_gear.ops.records import RowSample

_SLOT = (1 << SHARD_BITS) - 1


@dataclass(frozen=True)
class Moves:
    """Trajectories whose rows move, and where they lie then."""

    outgoing: np.ndarray  # those that this node sends, by receiver: `RowSample`. [n, 7], int64
    incoming: np.ndarray  # those that it receives, by sender: `RowSample`. [m, 7], int64
    used: tuple[int, int]  # rows and slots of the arrivals that were used before
    samples: np.ndarray  # of the batch, those whose rows come. [k], int64
    # Of each of these, from the beginning of the stream's arrivals. [k], int64.
    first_row: np.ndarray
    slot: np.ndarray  # as `first_row`
    # Which nodes have the rows of which trajectories afterwards. [S, trajectories], bool.
    has: np.ndarray
    end: tuple[int, int]  # rows and slots of the arrivals that are used afterwards


class TrajectoryPlaces:
    """The nodes that have the rows of each trajectory of a rollout batch, of one table. `origins`
    of samples, shard << 32 | slot, may repeat, [n], int64; `copies_own`: a node's own rows must be
    copied, too.
    """

    def __init__(
        self,
        origins: np.ndarray,
        num_steps: np.ndarray,
        final_row: int,
        num_nodes: int,
        index: int,
        copies_own: bool,
    ) -> None:
        known, number = np.unique(origins, return_inverse=True)
        self._number = number.reshape(-1)  # of each sample's trajectory, by shard and slot
        self._owner = known >> SHARD_BITS
        self._slots = known & _SLOT
        # Of a trajectory that grows, a later sample has more steps; the rows before them are the
        # same.
        self._steps = np.zeros(len(known), np.int64)
        np.maximum.at(self._steps, self._number, num_steps)
        self._final_row = final_row
        self._index = index
        self._has = np.zeros((num_nodes, len(known)), bool)
        if not copies_own:
            self._has[self._owner, np.arange(len(known))] = True
        self._used = 0, 0

    def move(self, needed: np.ndarray) -> Moves | None:
        """Return the `needed` rows, [S, n], that a node lacks, or None; `moved` records
        the move.
        """
        wanted = np.zeros_like(self._has)
        for node, samples in enumerate(needed):
            wanted[node, self._number[samples]] = True
        wanted &= ~self._has
        if not wanted.any():
            return None
        to, sent = np.nonzero(wanted & (self._owner == self._index))
        coming = np.nonzero(wanted[self._index])[0]
        rows = self._steps[coming] + self._final_row
        row, slot = self._used
        begin = np.cumsum(rows) - rows
        # The place of each trajectory among those that come, else -1. Where trajectories 4 and 7
        # come with 3 and 2 rows, they have the places 0 and 1, and `begin` is [0, 3].
        place = np.full(self._has.shape[1], -1)
        place[coming] = np.arange(len(coming))
        of_samples = place[self._number]
        samples = np.nonzero(of_samples >= 0)[0]
        places = of_samples[samples]
        return Moves(
            self._samples(to, sent),
            self._samples(self._owner[coming], coming),
            self._used,
            samples,
            row + begin[places],
            slot + places,
            self._has | wanted,
            (row + int(rows.sum()), slot + len(coming)),
        )

    def moved(self, moves: Moves) -> None:
        """Record that rows have moved: those of the latest `move`."""
        self._has = moves.has
        self._used = moves.end

    def _samples(self, peer: np.ndarray, which: np.ndarray) -> np.ndarray:
        """Return the words of trajectories that are sent to, or come from, nodes. [n], [n] -> [n,
        7].
        """
        words = np.zeros((len(which), RowSample.NUM_WORDS), np.int64)
        words[:, RowSample.PEER] = peer
        words[:, RowSample.SLOT] = self._slots[which]
        words[:, RowSample.NUM_STEPS] = self._steps[which]
        words[:, RowSample.GOAL] = -1
        return words
