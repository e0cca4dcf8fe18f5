"""Packing plan: which trajectory goes into which micro batch of which rank, balanced by cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, zip_longest

import numpy as np
import torch

import deepspeed_gear.arguments as arguments
from deepspeed_gear.batching.prefixes import CommonPrefixes, Prefixes
from deepspeed_gear.config.options import PackConfig
from deepspeed_gear.errors import ConfigError, DataError, ShapeError
from deepspeed_gear.ops import Ops
from deepspeed_gear.ops.constants import MOST_PACK_TOKENS, MOST_PACK_WIDTH, MOST_TOTAL_BITS


@dataclass(frozen=True)
class PackBudget:
    """Budget of a pack: tokens, trajectories, and what they cost. `PackConfig` checks the ranges.

    A trajectory of l tokens costs linear * l + quadratic * l * l, in any unit. With the hidden size
    h of a transformer, linear = 6 h and quadratic = 1 are in proportion to the operations of its
    layers.
    """

    tokens: int  #: N of a micro batch is at most this, padding included
    linear: int = 1
    quadratic: int = 0
    multiple: int = 1  #: N is a multiple of it
    trajectories: int = MOST_PACK_TOKENS  #: a pack holds at most so many: each has a token

    @property
    def room(self) -> int:
        """Tokens of trajectories that fit into a pack: the budget, rounded down to a multiple."""
        return self.tokens // self.multiple * self.multiple


@dataclass(frozen=True)
class PackingPlan:
    """Assignment of whole trajectories to packs: as many for every rank, the costliest first.

    Packs are not stored: for 2 ranks and the trajectories [0, 1, 2] with micro_step [0, 0, 1] and
    rank [0, 1, 0], rank 0 has the packs [0] and [2], and rank 1 the pack [1] and an empty one.
    """

    num_micro_steps: int  #: K: micro steps, in each of which every rank has a pack
    width: int  #: ranks that it was made for
    micro_step: np.ndarray  #: micro step of each trajectory, in [0, K). [n], int64
    rank: np.ndarray  #: rank of each trajectory, in [0, width). [n], int64

    def packs(self, rank: int) -> list[np.ndarray]:
        """Return the trajectories of each micro batch of a rank, ascending. K arrays [n], int64."""
        own = np.nonzero(self.rank == rank)[0]
        step = self.micro_step[own]
        ends = np.cumsum(np.bincount(step, minlength=self.num_micro_steps)).tolist()
        ordered = own[np.argsort(step, kind="stable")]
        return [ordered[first:end] for first, end in pairwise([0, *ends])]


def plan_packs(lengths: torch.Tensor, budget: PackBudget, width: int, ops: Ops) -> PackingPlan:
    """Plan the packs of a batch. A pure function: every rank computes the same plan.

    K is the number of micro batches of a rank. It is the least number that the tokens need, unless
    the trajectories are too long to fill the packs. It is never more than where the longest
    trajectory first goes into the emptiest pack, nor where every pack gets one trajectory per
    round. The cost of the costliest rank of each micro step, summed, is kept close to the mean over
    the ranks, and so are the costs of ranks over all micro steps. No pack is empty if n >= K *
    width; K is 0 if n is 0.

    Args:
        lengths: Tokens of each trajectory. [n], int64, in host memory.
        budget: What a pack may hold, as the section `gear.pack` admits it.
        width: Number of ranks, in [1, 2^20].
    Raises:
        ShapeError: `width` lies outside its range.
        DataError: A length is below 1 or above the budget, or all costs together are 2^62 or more.
    Cost: docs/design/0012-packed-batches.md; 1 ms for 4,096 trajectories and 64 ranks.
    """
    if not 1 <= width <= MOST_PACK_WIDTH:
        raise ShapeError(
            "width",
            f"must be in [1, {MOST_PACK_WIDTH}]",
            width,
            "use fewer replicas, or lower gear.pack.plan_width",
        )
    steps = lengths.numpy()
    shortest, longest = (int(steps.min()), int(steps.max())) if len(steps) else (1, 1)
    if shortest < 1:
        i = int(lengths.argmin())
        raise DataError(
            f"trajectory {i}",
            "must have at least 1 token to be packed",
            shortest,
            "leave empty trajectories out",
        )
    if longest > budget.room:
        i = int(lengths.argmax())
        rule = f"must have at most {budget.room} tokens, the budget of a pack"
        raise DataError(
            f"trajectory {i}", rule, longest, "raise gear.pack.tokens or truncate when writing"
        )
    # The exact sum is made in Python, and only if the bound from the longest one may be over.
    most = len(lengths) * (budget.linear + budget.quadratic * longest) * longest
    if most >= 1 << MOST_TOTAL_BITS:
        cost = sum(budget.linear * n + budget.quadratic * n * n for n in lengths.tolist())
        if cost >= 1 << MOST_TOTAL_BITS:
            raise DataError(
                "the cost of a batch", "must be below 2^62", cost, "divide gear.pack.cost"
            )
    micro_step = torch.empty(len(steps), dtype=torch.int64)
    rank = torch.empty_like(micro_step)
    num_micro_steps = torch.empty(1, dtype=torch.int64)
    budgets = (budget.room, budget.linear, budget.quadratic, width, budget.trajectories)
    ops.plan_packs_(micro_step, rank, num_micro_steps, lengths.contiguous(), *budgets)
    return PackingPlan(int(num_micro_steps), width, micro_step.numpy(), rank.numpy())


class PlannedPacks:
    """Plan of the packs of all replicas, with the rows and the cost of each pack. Pure.

    Replicas train on different samples; the ranks of one train on the same.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        pack: PackConfig,
        replicas: int,
        ops: Ops,
        prefixes: Prefixes | None = None,
    ) -> None:
        (linear, quadratic) = pack.cost
        most = pack.max_trajectories or MOST_PACK_TOKENS
        budget = PackBudget(pack.room, linear, quadratic, pack.pad.multiple, most)
        width = pack.plan_width or replicas
        self.prefixes = prefixes
        places = lengths
        squares = np.square(lengths.astype(np.float64))
        if prefixes is None:
            plan = plan_packs(torch.from_numpy(lengths.copy()), budget, width, ops)
        else:  # places of a prefix exist once, and attend to each other once
            places = lengths - prefixes.steps
            squares -= np.square(prefixes.steps.astype(np.float64))
            bundle = np.unique(prefixes.roots(), return_inverse=True)[1].reshape(-1)
            sizes = np.bincount(bundle, places).astype(np.int64)  # exact: below 2^53
            plan = plan_packs(torch.from_numpy(sizes), budget, width, ops)
            plan = replace(plan, micro_step=plan.micro_step[bundle], rank=plan.rank[bundle])
        self.plan = plan
        #: Packs of a replica in each micro step: with a plan for more ranks than there are, it
        #: trains several in turn.
        self.per_rank = width // replicas
        size = plan.num_micro_steps * width
        shape = (plan.num_micro_steps, width)
        # For a width of 2, micro steps [0, 1] and ranks [1, 0] are the packs [1, 2].
        bins = plan.micro_step * width + plan.rank
        costs = np.bincount(bins, linear * places + quadratic * squares, size)
        #: [K, replicas, per_rank], float64.
        self.costs = costs.reshape(plan.num_micro_steps, replicas, self.per_rank)
        tokens_of = np.bincount(bins, places, size).astype(np.int64)  # exact: below 2^53
        #: N of a pack without trajectories.
        self._least = budget.tokens if pack.pad.to == "budget" else budget.multiple
        rows = np.maximum(
            -(-tokens_of // budget.multiple).reshape(shape) * budget.multiple, self._least
        )
        if pack.pad.to == "step":
            rows = np.broadcast_to(rows.max(axis=1, keepdims=True), shape)
        #: N of every pack, padding included: without trajectories the least. [K, width], int64.
        self.rows: np.ndarray = rows

    def extend(self, longest: Sequence[Sequence[int]], pack: PackConfig) -> None:
        """Add empty packs at the end, up to the most micro steps that any rank's plan has.

        Args:
            longest: Largest N of each micro step of each rank's plan; nodes have different plans.
            pack: The section `gear.pack`. With packs padded to the step, they are as long as there.
        """
        most = np.array([max(rows) for rows in zip_longest(*longest, fillvalue=0)], np.int64)
        missing = len(most) - self.plan.num_micro_steps
        if missing:
            self.plan = replace(self.plan, num_micro_steps=len(most))
            self.rows = np.pad(self.rows, ((0, missing), (0, 0)), constant_values=self._least)
        if pack.pad.to == "step":
            self.rows = np.broadcast_to(most[:, None], self.rows.shape)

    def sort(self) -> np.ndarray:
        """Renumber trajectories so that packs are ranges of them; return their old numbers."""
        plan = self.plan
        packs = plan.rank * plan.num_micro_steps + plan.micro_step
        # NumPy sorts integers of up to 16 bits by radix, which is several times faster.
        least = np.min_scalar_type(plan.width * plan.num_micro_steps)
        order = np.argsort(packs.astype(least), kind="stable")
        self.plan = replace(plan, micro_step=plan.micro_step[order], rank=plan.rank[order])
        return order

    @property
    def imbalance(self) -> float:
        """Cost of the slowest rank per micro step, summed, over the mean of the ranks, minus 1."""
        total = self.costs.sum()
        return (
            float(self.costs.max(axis=1).sum() * self.costs.shape[1] / total - 1) if total else 0.0
        )


def plan_step(
    lengths: np.ndarray,
    pack: PackConfig,
    replicas: int,
    ops: Ops,
    common: CommonPrefixes | None = None,
) -> PlannedPacks:
    """Plan the packs of one optimizer step. A pure function: every rank makes the same plan.

    If trajectories share prefixes, several plans are made: with all trajectories of an item that
    can share in one pack, or half, a quarter, ... of them. The one of least cost is taken.

    Args:
        lengths: Steps of each trajectory. [n], int64.
        pack: The section `gear.pack`.
        replicas: Number of ranks that train on different samples.
        ops: Ops of the host.
        common: What trajectories have in common; None: they share nothing.
    """
    if common is None or not len(lengths):
        return PlannedPacks(lengths, pack, replicas, ops)
    size = common.longest_run
    sizes = [-(-size // 2**k) for k in range((size - 1).bit_length() + 1)]  # of 5: [5, 3, 2, 1]
    every = [common.share(lengths, size, pack.room) for size in sizes]
    plans = [PlannedPacks(lengths, pack, replicas, ops, prefixes) for prefixes in every]
    is_full = pack.pad.to == "budget"  # then all packs cost as much
    costs = [
        (is_full * plan.plan.num_micro_steps, plan.costs.max(axis=(1, 2)).sum()) for plan in plans
    ]
    return plans[costs.index(min(costs))]


def check_tokens(pack: PackConfig, lengths: np.ndarray, tokens: int | None) -> None:
    """Raise ConfigError unless micro batches of so many steps hold the longest trajectory.

    Args:
        pack: The section `gear.pack`.
        lengths: Steps of each trajectory. [n], int64.
        tokens: Most steps of a micro batch; None: `gear.pack.tokens`.
    """
    most = pack.tokens if tokens is None else arguments.count("tokens", tokens)
    if most > MOST_PACK_TOKENS:
        raise ConfigError(
            "forward: tokens", f"must be at most {MOST_PACK_TOKENS}", most, "lower it"
        )
    multiple = pack.pad.multiple
    longest = int(lengths.max(initial=1))
    if most // multiple * multiple < longest:
        rule = f"must hold the longest trajectory ({longest} steps) in multiples of {multiple}"
        raise ConfigError(
            "forward: tokens", rule, most, f"at least {-(-longest // multiple) * multiple}"
        )
