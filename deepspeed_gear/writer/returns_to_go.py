"""Returns-to-go of whole episodes: the late column that a writer fills when an episode ends."""

from __future__ import annotations

import numpy as np

from deepspeed_gear.data.stored_values import as_numbers
from deepspeed_gear.schema import Column
from deepspeed_gear.store.late_columns import fill
from deepspeed_gear.writer.inserter import Inserter


class ReturnsToGo:
    """Fills the late column of the role return_to_go at the end of each episode.

    An episode may be stored as several trajectories, so the return of a part needs the rewards of
    the parts after it. Sums are in float64 and added from the end, like those of the op that
    derives returns-to-go from whole trajectories: both have the same bits. One thread at a time.
    """

    def __init__(self, column: Column, reward: Column, inserter: Inserter) -> None:
        self.reward = reward
        self._name = column.name
        self._inserter = inserter
        # By environment, the parts of its episode: `Table.lineage`, id, rewards, evicted steps.
        self._stored: dict[int, list[tuple[str, int, np.ndarray, int]]] = {}

    def note(self, env: int, trajectory_id: int, rewards: np.ndarray, evicted: int = 0) -> None:
        """Note a stored part of an environment's episode; its first `evicted` steps are gone."""
        values = as_numbers(rewards, self.reward).astype(np.float64)
        lineage = self._inserter.table.lineage
        self._stored.setdefault(env, []).append((lineage, trajectory_id, values, evicted))

    def end(self, env: int) -> None:
        """Fill the returns-to-go of an ended episode; parts that were evicted are left out."""
        total = 0.0  # return of the parts after this one
        for lineage, number, rewards, evicted in reversed(self._stored.pop(env, [])):
            # For rewards [1, 2, 3] and total 10: cumsum of [10, 3, 2, 1] is [10, 13, 15, 16];
            # reversed without its first element that is [16, 15, 13].
            sums = np.cumsum(np.append(total, rewards[::-1]))[:0:-1]
            total = sums[0]
            columns = {self._name: sums[evicted:]}
            fill(self._inserter.table, number, columns, self._inserter.timeout_s, lineage)
