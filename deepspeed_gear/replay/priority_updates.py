"""Priority updates from training: for the items of a batch, or for items by id."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

import deepspeed_gear.arguments as arguments
from deepspeed_gear.batching import priority_reduction
from deepspeed_gear.batching.batch import Batch
from deepspeed_gear.batching.micro_batch import MicroBatch
from deepspeed_gear.batching.priority_reduction import float32_on_device
from deepspeed_gear.batching.transfer.cuda_streams import (
    refuse_capture,
)
from deepspeed_gear.config.sampler_options import PriorityOptions
from deepspeed_gear.data.splits import split_of
from deepspeed_gear.errors import ConfigError, DataError, ShapeError
from deepspeed_gear.ops.constants import ANY_SLOT, SHARD_BITS
from deepspeed_gear.ops.records import LogEntry, Resolution, Slot
from deepspeed_gear.plan.resolved_plan import Resolved
from deepspeed_gear.replay.async_priority_updates import AsyncPriorityUpdates, UpdatePart
from deepspeed_gear.sampling.batch_stream import BatchStream
from deepspeed_gear.sampling.priority_log import PriorityLog, check_priorities
from deepspeed_gear.sampling.priority_masses import PriorityMasses

Ids = Sequence[int] | torch.Tensor


class PriorityReports:
    """Priorities of a replay's tables: reported by batch or by id, and read back.

    Args:
        plan: The resolved plan of the replay.
        train: The training stream of each sampled table.
        late: Appends priorities once a GPU has computed them.
    """

    def __init__(
        self, plan: Resolved, train: Sequence[BatchStream], late: AsyncPriorityUpdates
    ) -> None:
        self._config = plan.config
        self._placement = plan.placement
        self._place = plan.topology.place
        self._late = late
        self._masses = {stream.table.spec.name: stream.state.priorities for stream in train}
        self._sampled = plan.config.sampled_tables
        # All samplers of a mixture reduce priorities in the same way.
        self._sampler = plan.config.sampler_of(self._sampled[0])
        # The only log, where a batch's samples all belong to it; None: see `_parts`.
        self._log: PriorityLog | None = None
        masses = self._masses.get(self._sampled[0])
        if masses is not None and len(self._sampled) == 1 and not masses.spec.rule.split:
            self._log = masses.reports if self._place.reports else None

    def masses_of(self, table: str) -> PriorityMasses:
        """Return the priorities of a table's items; raise a ConfigError if they have none."""
        masses = self._masses.get(table)
        if masses is None:
            rule = 'must be "prioritized" or "top_k" for priorities to be reported'
            raise ConfigError(
                "gear.sampler.kind",
                rule,
                self._config.sampler_of(table).kind,
                "choose such a sampler, or do not report priorities",
            )
        return masses

    def report(self, batch: object, priorities: object, mask: object) -> None:
        """Report the priorities of a batch; see `Replay.update_priorities`."""
        # Priorities in the form in which the log has them need one native call.
        if (
            self._log is not None
            and mask is None
            and isinstance(batch, Batch)
            and isinstance(priorities, Tensor)
            and priorities.is_cpu
        ):
            self._late.drain()
            if self._log.add_plain(batch.reported, priorities):
                return
        tables = [self.masses_of(table) for table in self._sampled]
        if not self._place.reports:
            return
        sampler = self._sampler
        assert isinstance(sampler, PriorityOptions)  # as the tables have priorities
        if not isinstance(batch, (Batch, MicroBatch)):
            rule = "must be from this replay's sample or iterator, or a micro batch of packs"
            raise DataError(
                "batch", rule, type(batch).__name__, "give the batch itself, as it was sampled"
            )
        counts = None if mask is None else arguments.tensor("mask", mask)
        if counts is not None and counts.dtype != torch.bool:
            raise DataError(
                "mask", "must be bool", str(counts.dtype), "convert it with mask.bool()"
            )
        given = arguments.tensor("priorities", priorities)
        if isinstance(batch, MicroBatch):
            unit = "group" if self._config.has_group_items else sampler.unit
            _check_packed(unit, batch, given, counts)
        if given.dim() == 2 and self._place.sequence_world > 1:
            rule = "must have shape [B] where ranks share the time axis"
            raise ShapeError(
                "priorities", rule, list(given.shape), "reduce them over the sequence ranks"
            )
        is_late = given.is_cuda
        if is_late:
            self._late.check()
            rule = "cannot be captured where the table is in host memory"
            refuse_capture("update_priorities", rule, "call it after the graph")
        else:
            self._late.drain()
        values, faults = _reduced(batch, given, counts, sampler)
        parts = _parts(tables, batch)
        if is_late:
            self._late.take(parts, float32_on_device(values), faults)
            return
        rounded = _rounded(values)
        if len(parts) > 1:  # nothing has changed if one of the tables raises
            check_priorities(rounded.numpy())
            for part in parts:
                part.reports.check_room(len(part.resolutions))
        for part in parts:
            part.reports.add(
                part.resolutions, rounded if part.which is None else rounded[part.which]
            )

    def report_by_id(
        self,
        table: str,
        ids: Ids,
        priorities: torch.Tensor | Sequence[float] | np.ndarray,
        steps: Ids | None = None,
        reports: bool = True,
    ) -> int:
        """Report priorities of a table's items by id; see `Replay.set_priorities`.

        Args:
            reports: Whether this rank reports for its replica.
        Returns:
            Number of the items that are stored and admitted by the sampler.
        """
        self._late.drain()
        masses = self.masses_of(table)
        numbers, anchors = _items(masses, ids, steps)
        given = arguments.tensor("priorities", priorities)
        if tuple(given.shape) != numbers.shape:
            raise ShapeError(
                "priorities",
                f"must have shape [{len(numbers)}]",
                list(given.shape),
                "give one priority for each id",
            )
        values = _rounded(given).numpy()
        check_priorities(values)
        with masses.table.lock:
            updates, known = masses.handles_of(numbers, anchors)
        shard = masses.table.spec.shard
        if table in self._placement.spread and shard is not None:
            # The slot's upper bits hold the shard: slot 5 of shard 2 is 2 << SHARD_BITS | 5. Slots
            # of other nodes are not known here: ANY_SLOT, with the id in place of the generation.
            shards = self._placement.shard_of(table, numbers)
            updates = updates.copy()
            updates[:, 0] |= shard.index << SHARD_BITS
            elsewhere = (shards >= 0) & (shards != shard.index)
            updates[elsewhere, 0] = shards[elsewhere] << SHARD_BITS | ANY_SLOT
            updates[elsewhere, 1] = numbers[elsewhere]
            known = known | elsewhere
        if reports:
            masses.reports.add_items(updates[known], values[known], LogEntry.BY_ID)
        return int(known.sum())

    def values_of(self, table: str, ids: Ids, steps: Ids | None) -> torch.Tensor:
        """Return priorities at the latest selection, 0 for evicted items. [n], float32."""
        masses = self.masses_of(table)
        numbers, anchors = _items(masses, ids, steps)
        priorities = np.zeros(len(numbers), np.float32)
        with masses.table.lock:
            updates, known = masses.handles_of(numbers, anchors)
            items = updates[known, 0]  # slots
            if masses.by_step:
                items = masses.table.slots[items, Slot.FIRST_ROW] + updates[known, 2]  # rows
            priorities[known] = masses.values[items]
        return torch.from_numpy(priorities)


def _reduced(
    batch: Batch | MicroBatch, given: Tensor, counts: Tensor | None, sampler: PriorityOptions
) -> tuple[Tensor, Tensor]:
    """Reduce priorities to one for each sample.

    What a GPU has yet to compute is not read: its faults are raised once it is computed.

    Returns:
        The priorities, [B]; and, on a GPU, whether masks differ, and the number of the first sample
        without a step that counts, from 1, or 0: [2], float32.
    Raises:
        DataError, ShapeError: The shape does not fit, or, on the host, there is a fault.
    """
    values = given
    faults = given.new_zeros(2, dtype=torch.float32)
    if given.dim() == 2 and isinstance(batch, Batch):
        chosen, *others = priority_reduction.masks_of(batch, given, counts)
        differ = chosen.new_zeros(())
        for other in others:
            differ |= (other != chosen).any()
        if given.is_cuda:
            none_counts = ~chosen.any(1)
            empty = torch.where(none_counts.any(), none_counts.float().argmax() + 1, 0)
            faults = torch.stack([differ, empty]).float()
        elif differ:
            priority_reduction.refuse_masks()
        values = priority_reduction.reduce_steps(
            given, chosen, sampler.reduce, sampler.eta, is_checked=not given.is_cuda
        )
    count = batch.num_samples if isinstance(batch, Batch) else batch.num_trajectories
    if values.dim() != 1 or values.numel() != count:
        rule = f"must have shape [{count}], or [{count}, T]"
        raise ShapeError(
            "priorities",
            rule,
            list(given.shape),
            "give one priority for each sample, or for each step of it",
        )
    return values, faults


def _check_packed(unit: str, micro: MicroBatch, priorities: Tensor, mask: Tensor | None) -> None:
    """Raise unless priorities are one for each trajectory of a micro batch, and these are items."""
    if unit == "group":
        rule = (
            'must be "trajectory" for priorities of a micro batch, which may hold a part of a group'
        )
        remedy = (
            "report those of whole groups, each by one of its trajectories: "
            "set_priorities(ids, priorities)"
        )
        raise ConfigError("gear.sampler.unit", rule, unit, remedy)
    if priorities.shape != (micro.num_trajectories,):
        rule = f"must have shape [{micro.num_trajectories}], one for each trajectory"
        raise ShapeError(
            "priorities",
            rule,
            list(priorities.shape),
            "give one priority for each trajectory of the micro batch",
        )
    if mask is not None:
        raise ShapeError(
            "mask",
            "must not be given with a micro batch of packs",
            list(mask.shape),
            "reduce the priorities to one for each trajectory first",
        )


def _parts(tables: Sequence[PriorityMasses], batch: Batch | MicroBatch) -> list[UpdatePart]:
    """Divide a batch's samples among the tables of a mixture.

    Raises:
        DataError: The batch is of a pass over a split. Its priorities would make items of the split
            sampled for training.
    """
    resolutions = batch.reported
    if not resolutions.is_cpu:
        resolutions = resolutions.cpu()
    parts = [UpdatePart(tables[0].reports, resolutions)]
    if len(tables) > 1:
        assert batch.host_source is not None
        which = [torch.nonzero(batch.host_source == index)[:, 0] for index in range(len(tables))]
        parts = [
            UpdatePart(t.reports, resolutions[own], own)
            for t, own in zip(tables, which, strict=True)
        ]
    for masses, part in zip(tables, parts, strict=True):
        rule = masses.spec.rule
        if not rule.split:
            continue
        ids = part.resolutions[:, Resolution.ID].numpy()
        if (split_of(ids, rule.split) != rule.split_index).any():
            raise DataError(
                "batch", "must be from the training stream", None, "nothing was changed"
            )
    return parts


def _rounded(given: Tensor) -> Tensor:
    """Convert priorities to float32 in host memory; positive ones stay above 0.

    Raises:
        DataError: A float64 priority is not valid, or too large for float32.
    """
    if given.dtype == torch.float32 and given.is_cpu:
        return given.contiguous()  # without a call of torch's dispatcher
    given = given.to("cpu")
    rounded = float32_on_device(given)
    if given.dtype == torch.float64:
        check_priorities(given.numpy())
        check_priorities(rounded.numpy())
    return rounded


def _items(masses: PriorityMasses, ids: Ids, steps: Ids | None) -> tuple[np.ndarray, np.ndarray]:
    """Check the items of a call; return ids and steps (0 for whole trajectories). [n] each."""
    numbers = arguments.integers("ids", ids)
    if masses.by_step != (steps is not None):
        rule = "must not be given, as an item is a trajectory"
        if masses.by_step:
            rule = "must be given, as an item is a step"
        raise ShapeError(
            "steps",
            rule,
            None,
            "give the step of each item" if masses.by_step else "leave steps out",
        )
    anchors = np.zeros_like(numbers) if steps is None else arguments.integers("steps", steps)
    if anchors.shape != numbers.shape:
        raise ShapeError(
            "steps",
            f"must have shape [{len(numbers)}]",
            list(anchors.shape),
            "give one step for each id",
        )
    return numbers, anchors
