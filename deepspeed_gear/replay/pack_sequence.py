"""Pack sequence: how the trajectories of an optimizer step are divided over ranks and micro batches."""

from __future__ import annotations

import numpy as np
import torch

from deepspeed_gear.batching.packing_plan import PackBudget, PackingPlan, plan_packs
from deepspeed_gear.replay.rollout_data import RolloutData


class PackSequence:
    """The packs of some trajectories of a rollout batch on this rank: the same number on every rank.

    Args:
        data: The rollout batch.
        index: The trajectories. [n], int64.
        budget: Of a pack.
    """

    def __init__(self, data: RolloutData, index: np.ndarray, budget: PackBudget) -> None:
        settings = data.settings
        self._data, self.index, self._budget = data, index, budget
        lengths = np.ascontiguousarray(data.lengths[index])
        plan = plan_packs(torch.from_numpy(lengths), budget, settings.width, data.ops)
        self.plan: PackingPlan = plan
        per_rank = settings.width // settings.place.data_world
        #: The replica that trains each of the trajectories. [n], int64.
        self.replica: np.ndarray = plan.rank.numpy() // per_rank
        ranks = range(settings.place.data_rank * per_rank, (settings.place.data_rank + 1) * per_rank)
        rows = self._rows(lengths)
        packs = [plan.packs(rank) for rank in ranks]
        #: The trajectories of each of this rank's packs, and N of each.
        self.packs = [index[own[micro].numpy()] for micro in range(plan.num_micro) for own in packs]
        self.rows: list[int] = rows[:, ranks.start : ranks.stop].reshape(-1).tolist()

    def _rows(self, lengths: np.ndarray) -> np.ndarray:
        """Return N of every rank's packs, padding included. [K, width], int64.

        Args:
            lengths: Of the trajectories. [n], int64.
        """
        plan, pad = self.plan, self._data.settings.pack.pad
        if pad.to == "budget":
            return np.full((plan.num_micro, plan.width), self._budget.tokens)
        pack = (plan.micro * plan.width + plan.rank).numpy()
        tokens = np.bincount(pack, lengths, plan.num_micro * plan.width).astype(np.int64)  # exact: below 2^53
        rows = np.maximum(-(-tokens // pad.multiple), 1) * pad.multiple  # without trajectories the least
        rows = rows.reshape(plan.num_micro, plan.width)
        if pad.to == "step":
            rows = np.broadcast_to(rows.max(axis=1, keepdims=True), rows.shape)
        return np.asarray(rows)

    def __len__(self) -> int:
        return len(self.packs)

    @property
    def imbalance(self) -> float:
        """Cost of the slowest rank in each micro step, summed, / the mean over ranks, minus 1."""
        lengths = self._data.lengths[self.index].astype(np.float64)
        costs = self._budget.linear * lengths + self._budget.quadratic * lengths * lengths
        total, plan = costs.sum(), self.plan
        bins, replicas = (plan.micro * plan.width + plan.rank).numpy(), self._data.settings.place.data_world
        of_pack = np.bincount(bins, costs, plan.num_micro * plan.width)
        # With a plan for more ranks, a rank trains several packs of it, one after the other.
        slowest = of_pack.reshape(plan.num_micro, replicas, -1).max(axis=1).sum()
        return float(slowest * replicas / total - 1) if total else 0.0

    @property
    def fill_fraction(self) -> float:
        """Part of this rank's places that hold a trajectory's step."""
        tokens = sum(int(self._data.lengths[pack].sum()) for pack in self.packs)
        return tokens / max(sum(self.rows), 1)
