"""Train step: the packed micro batches of one optimizer step on this rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from deepspeed_gear.batching.loss_weights import loss_weights
from deepspeed_gear.batching.micro_batch import MicroBatch
from deepspeed_gear.batching.packing_plan import PackBudget, PackingPlan, plan_packs
from deepspeed_gear.errors import PeerError, ShapeError, StoreError
from deepspeed_gear.ops import Ops
from deepspeed_gear.public_names import public_names
from deepspeed_gear.replay.rollout_data import RolloutData

Sum = Callable[[torch.Tensor], torch.Tensor]
NumberedFill = Callable[[int, MicroBatch, Mapping[str, torch.Tensor]], None]
INTERNAL = frozenset({"name", "packs"})  # used by other modules of this package, and by no program


class PackSequence:
    """The packs of some trajectories of a rollout batch on this rank: the same number on every rank.

    Args:
        data: The rollout batch.
        index: The trajectories. [n], int64.
        budget: Of a pack.
        ops: Of the host.
    """

    def __init__(self, data: RolloutData, index: np.ndarray, budget: PackBudget, ops: Ops) -> None:
        settings = data.settings
        self._data, self.index, self._budget = data, index, budget
        lengths = np.ascontiguousarray(data.lengths[index])
        plan = plan_packs(torch.from_numpy(lengths), budget, settings.width, ops)
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


@dataclass(frozen=True)
class StepHooks:
    """What a train step calls.

    Args:
        divisor: Returns what the framework divides the sum of all ranks' gradients by.
        sum_: Returns the sum of a tensor over all ranks. Collective.
        begun: Called before the first micro batch.
        check: Called before each of the others; raises if the rollout batch has ended.
        ended: Called after the last micro batch was used.
    """

    divisor: Callable[[], float]
    sum_: Sum
    begun: Callable[[TrainStep], None]
    check: Callable[[], None]
    ended: Callable[[TrainStep], None]


class TrainStep:
    """One optimizer step: an iterable of this rank's micro batches. Iterated once.

    Args:
        data: The rollout batch.
        index: The step's trajectories. [n], int64.
        number: Of the step in its rollout batch.
        ops: Of the host.
        hooks: What it calls.
    """

    def __init__(self, data: RolloutData, index: np.ndarray, number: int, ops: Ops, hooks: StepHooks) -> None:
        self._data, self._hooks = data, hooks
        self.number, self.index = number, index
        self.packs = PackSequence(data, index, data.settings.budget(), ops)
        loss, counts = data.settings.loss, data.counts[index]
        #: Loss tokens of the step, all ranks together.
        self.loss_tokens = int(counts.sum())
        weights = loss_weights(loss, counts, data.sequence[index], data.item[index])
        self._weights = np.zeros(len(data.lengths))
        # A trajectory may be in the batch several times, but each of its samples is another index.
        self._weights[index] = weights
        self._is_used = False

    def __len__(self) -> int:
        """Return the number of micro batches, the same on every rank."""
        return len(self.packs)

    def __repr__(self) -> str:
        return (
            f"TrainStep({self.number} of rollout batch {self._data.number}: {self.num_trajectories} "
            f"trajectories, {self.num_tokens} tokens, {len(self)} micro batches)"
        )

    def __dir__(self) -> list[str]:
        """Return the public names: what completion shows."""
        return public_names(super().__dir__(), INTERNAL)

    @property
    def name(self) -> str:
        """Its name in errors: the number, and that of the rollout batch (of `gear_step` each is one)."""
        return f"train step {self.number} of rollout batch {self._data.number}"

    @property
    def num_trajectories(self) -> int:
        """Trajectories of the step, all ranks together."""
        return len(self.index)

    @property
    def num_tokens(self) -> int:
        """Steps of the step's trajectories, all ranks together."""
        return int(self._data.lengths[self.index].sum())

    def __iter__(self) -> Iterator[MicroBatch]:
        """Yield this rank's micro batches.

        Raises:
            StoreError: They were used already, or the rollout batch has ended.
            PeerError: Another rank failed, died or ended.
        """
        if self._is_used:
            raise StoreError(self.name, "must be iterated once", None, "take the next step")
        self._is_used = True
        begin = time.perf_counter()
        self._hooks.begun(self)
        self._data.waited(time.perf_counter() - begin)
        divisor = self._hooks.divisor()
        for index, rows in zip(self.packs.packs, self.packs.rows, strict=True):
            yield self._data.pack(index, rows, self._weights, self.loss_tokens, divisor)
            self._hooks.check()  # the loop may be resumed after the batch has ended
        self._hooks.ended(self)

    def mean(self, **values: Sequence[torch.Tensor]) -> dict[str, float]:
        """Return means over the step as its loss is normalised, of all ranks.

        Collective: one all-reduce, and one copy from a device.

        `step.mean(kl=kls, clip=clips)` after the loop, where `kls` has `micro.sum(kl)` of each micro batch.

        Args:
            **values: Of each micro batch in their order: `micro.sum(x)`, []. The same names on every rank.
        Raises:
            ShapeError: Not one number for each micro batch.
            PeerError: Another rank has raised it.
        """
        fault = self._fault_of(values)
        sums = torch.zeros(len(values) + 1, dtype=torch.float64)  # the last: ranks with a fault
        if fault is not None:
            sums[-1] = 1
        elif self._data.settings.place.tensor_rank == 0 and values:
            every = [value.detach().reshape(()) for given in values.values() for value in given]
            # Together, so that a device is waited for once.
            stacked = torch.stack([value.to(every[0].device, torch.float64) for value in every])
            sums[:-1] = stacked.cpu().view(len(values), len(self)).sum(1)
        *total, faults = self._hooks.sum_(sums).tolist()
        if fault is not None:
            raise fault
        if faults:
            rule = f"must have a number for each of the {len(self)} micro batches"
            raise PeerError(f"{self.name}: {', '.join(values)}", rule, f"other numbers on {faults:.0f} ranks")
        return {name: value / self._hooks.divisor() for name, value in zip(values, total, strict=True)}

    def _fault_of(self, values: Mapping[str, Sequence[torch.Tensor]]) -> ShapeError | None:
        """Return the error of values that are not one number for each micro batch."""
        for name, given in values.items():
            if len(given) != len(self) or any(value.numel() != 1 for value in given):
                rule = f"must have a number for each of the {len(self)} micro batches"
                shapes = [list(value.shape) for value in given]
                return ShapeError(name, rule, shapes, f"collect micro.sum({name}) in the loop")
        return None


def forward_packs(
    data: RolloutData,
    tokens: int | None,
    divisor: float,
    fill: NumberedFill,
    ops: Ops,
    fetch: Callable[[PackSequence], None],
) -> Iterator[MicroBatch]:
    """Yield this rank's micro batches of the whole rollout batch, for values that are computed once.

    Args:
        data: The rollout batch.
        tokens: Of a micro batch; None: `gear.pack.tokens`.
        divisor: As in training.
        fill: Takes the number of a micro batch, and what it is filled with.
        ops: Of the host.
        fetch: Called before the first one, so that the rows of this rank's packs are on its node.
    """
    index = np.arange(len(data.lengths))
    packs = PackSequence(data, index, data.settings.budget(tokens), ops)
    fetch(packs)
    loss = data.settings.loss
    weights = loss_weights(loss, data.counts, data.sequence, data.item)
    for number, (chosen, rows) in enumerate(zip(packs.packs, packs.rows, strict=True)):
        yield data.pack(chosen, rows, weights, int(data.counts.sum()), divisor, partial(fill, number))


def check_filled(filled: Mapping[str, Set[int]], count: int) -> None:
    """Raise unless every micro batch was filled.

    Args:
        filled: By column, the numbers of the micro batches that were.
        count: Of the micro batches.
    Raises:
        StoreError: One was not.
    """
    for name, numbers in filled.items():
        if len(numbers) != count:
            raise StoreError(
                f"rollout.forward: column {name!r}",
                f"must be filled in each of the {count} micro batches",
                len(numbers),
                f"call micro.fill({name}=...) in the loop",
            )
