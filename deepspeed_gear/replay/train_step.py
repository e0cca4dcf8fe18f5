"""Train step: the packed micro batches of one optimizer step on this rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from functools import partial

import numpy as np
import torch

from deepspeed_gear.batching.loss_weights import loss_weights
from deepspeed_gear.batching.micro_batch import MicroBatch
from deepspeed_gear.errors import PeerError, ShapeError, StoreError
from deepspeed_gear.public_names import public_names
from deepspeed_gear.replay.record_stream import RecordStream
from deepspeed_gear.replay.rollout_data import PackSequence, RolloutData
from deepspeed_gear.replay.rollout_nodes import BatchRows
from deepspeed_gear.replay.rollout_session import RolloutSession

NumberedFill = Callable[[int, MicroBatch, Mapping[str, torch.Tensor]], None]
INTERNAL = frozenset({"name", "packs"})  # used by other modules of this package, and by no program


class RolloutProgress:
    """How far a rollout batch is trained. It ends with its last step, or where the loop over them is left.

    Args:
        number: Of the rollout batch.
        num_steps: Of the whole batch.
        steps_done: Steps that were trained before, in a run that is resumed.
        records: The stream that the batch was taken from.
    """

    def __init__(self, number: int, num_steps: int, steps_done: int, records: RecordStream) -> None:
        self.number, self.num_steps, self.steps_done = number, num_steps, steps_done
        self._records, self._is_closed = records, False

    def check_open(self) -> None:
        """Raise if the batch has ended.

        Raises:
            StoreError: It has.
        """
        if self._is_closed:
            rule = "must not be used after its loop has ended, or the next one was requested"
            raise StoreError(
                f"rollout batch {self.number}", rule, None, "use its steps inside the loop over it"
            )

    def finish(self, step: int) -> None:
        """Count a step as trained; a save in the body of the last one resumes after the batch."""
        self.steps_done = step + 1
        if self.steps_done == self.num_steps:
            self.close()

    def close(self) -> None:
        """End the batch: its rows may be evicted, and the next one is selected next. Safe to call twice."""
        if not self._is_closed:
            self._is_closed = True
            self._records.consume()

    def abandon(self) -> None:
        """End the batch without consuming it, as where another position was loaded."""
        self._is_closed = True


class TrainStep:
    """One optimizer step: an iterable of this rank's micro batches. Iterated once.

    Args:
        data: The rollout batch.
        index: The step's trajectories. [n], int64.
        number: Of the step in its rollout batch.
        progress: Of the rollout batch.
        session: Of the ranks.
        rows: Of the rollout batch, on this node.
    """

    def __init__(
        self,
        data: RolloutData,
        index: np.ndarray,
        number: int,
        progress: RolloutProgress,
        session: RolloutSession,
        rows: BatchRows,
    ) -> None:
        self._data, self._progress, self._session, self._rows = data, progress, session, rows
        self.number, self.index = number, index
        self.packs = PackSequence(data, index, data.settings.budget())
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
        begin, data, packs = time.perf_counter(), self._data, self.packs
        self._session.agree(self._begin)
        if data.is_spread:
            self._session.compare(f"the train step of rollout batch {data.number}", self.number)
        self._rows.fetch(packs)
        data.metrics.gathered(time.perf_counter() - begin)
        divisor = self._session.divisor
        for index, rows in zip(packs.packs, packs.rows, strict=True):
            yield data.pack(index, rows, self._weights, self.loss_tokens, divisor)
            self._progress.check_open()  # the loop may be resumed after the batch has ended
        data.metrics.trained.add(
            self.num_trajectories, self.num_tokens, len(packs), packs.fill_fraction, packs.imbalance
        )
        self._progress.finish(self.number)

    def _begin(self) -> None:
        self._progress.check_open()
        for begun in self._session.observers:
            begun(self)

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
        *total, faults = self._session.sum(sums).tolist()
        if fault is not None:
            raise fault
        if faults:
            rule = f"must have a number for each of the {len(self)} micro batches"
            raise PeerError(f"{self.name}: {', '.join(values)}", rule, f"other numbers on {faults:.0f} ranks")
        return {name: value / self._session.divisor for name, value in zip(values, total, strict=True)}

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
    rows: BatchRows,
) -> Iterator[MicroBatch]:
    """Yield this rank's micro batches of the whole rollout batch, for values that are computed once.

    Args:
        data: The rollout batch.
        tokens: Of a micro batch; None: `gear.pack.tokens`.
        divisor: As in training.
        fill: Takes the number of a micro batch, and what it is filled with.
        rows: Of the rollout batch, on this node.
    """
    index = np.arange(len(data.lengths))
    packs = PackSequence(data, index, data.settings.budget(tokens))
    rows.fetch(packs)
    loss = data.settings.loss
    weights = loss_weights(loss, data.counts, data.sequence, data.item)
    for number, (chosen, most) in enumerate(zip(packs.packs, packs.rows, strict=True)):
        yield data.pack(chosen, most, weights, int(data.counts.sum()), divisor, partial(fill, number))


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
