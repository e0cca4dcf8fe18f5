"""Episode returns: returns-to-go of whole episodes, a late column that is filled at their end."""

from __future__ import annotations

import numpy as np

from deepspeed_gear.data.trajectory_checks import as_numbers
from deepspeed_gear.schema import Column
from deepspeed_gear.store.late_columns import fill
from deepspeed_gear.writer.inserter import Inserter


class EpisodeReturns:
    """Fills the late column of the role return_to_go when an episode has ended. One thread.

    Sums are those of the op that derives them from whole trajectories: in float64, added from the
    end.
    """

    def __init__(self, column: Column, reward: Column, inserter: Inserter) -> None:
        self.reward = reward
        self._name = column.name
        self._inserter = inserter
        # Of each stored trajectory of an environment's episode: `Table.lineage`, id, and as `note`.
        self._stored: dict[int, list[tuple[str, int, np.ndarray, int]]] = {}

    def note(self, env: int, trajectory_id: int, rewards: np.ndarray, evicted: int = 0) -> None:
        """Note a trajectory of an environment's episode, whose first `evicted` steps are not
        stored.
        """
        values = as_numbers(rewards, self.reward).astype(np.float64)
        lineage = self._inserter.table.lineage
        self._stored.setdefault(env, []).append((lineage, trajectory_id, values, evicted))

    def end(self, env: int) -> None:
        """Fill the trajectories of an episode that has ended; those that were evicted
        are left out.
        """
        total = 0.0
        for lineage, number, rewards, evicted in reversed(self._stored.pop(env, [])):
            sums = np.cumsum(np.append(total, rewards[::-1]))[:0:-1]
            total = sums[0]
            columns = {self._name: sums[evicted:]}
            fill(self._inserter.table, number, columns, self._inserter.timeout_s, lineage)
