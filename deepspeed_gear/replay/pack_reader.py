"""Packs of a rollout batch: their plan for this rank, and the reader of their micro batches."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch

import deepspeed_gear.arguments as arguments
from deepspeed_gear.batching.field_rows import read_opaque
from deepspeed_gear.batching.loss_weights import StepLoss, loss_weights
from deepspeed_gear.batching.micro_batch import (
    ForwardPass,
    MicroBatch,
    PackLoss,
    PackShape,
    PackSources,
)
from deepspeed_gear.batching.pack_media import MediaReader
from deepspeed_gear.batching.packing_plan import PlannedPacks
from deepspeed_gear.config.options import PackConfig
from deepspeed_gear.errors import ConfigError
from deepspeed_gear.ops.records import GatherSpec, Resolution, Source, lower
from deepspeed_gear.replay.rollout_columns import RolloutColumns, TableRows
from deepspeed_gear.replay.rollout_context import MASK, TARGETS
from deepspeed_gear.row_exchange.trajectory_places import Moves

_STEPS = lower([GatherSpec(Source.STEPS)])


def check_tokens(pack: PackConfig, lengths: np.ndarray, tokens: int | None) -> None:
    """Raise ConfigError unless micro batches of so many steps hold the longest trajectory."""
    most = pack.tokens if tokens is None else arguments.count("tokens", tokens)
    multiple = pack.pad.multiple
    longest = int(lengths.max(initial=1))
    if most // multiple * multiple < longest:
        rule = f"must hold the longest trajectory ({longest} steps) in multiples of {multiple}"
        raise ConfigError(
            "forward: tokens", rule, most, f"at least {-(-longest // multiple) * multiple}"
        )


class PackSequence:
    """The packs of trajectories whose loss is one mean; every rank has the same number of packs.

    Args:
        columns: Columns of the rollout batch.
        index: The trajectories. [n], int64.
        tokens: Most steps of a pack; None: `gear.pack.tokens`.
        planned: A plan of trajectories that are sorted by pack; None: one is made here.
    """

    def __init__(
        self,
        columns: RolloutColumns,
        index: np.ndarray,
        tokens: int | None,
        planned: PlannedPacks | None = None,
    ) -> None:
        self._columns = columns
        self.index = index
        place = columns.context.settings.place
        is_sorted = planned is not None
        self.planned = planned = planned or _plan(columns, index, tokens)
        # With a plan for more ranks this one trains several packs in each micro step: [first, end).
        first = place.data_rank * planned.per_rank
        end = (place.data_rank + 1) * planned.per_rank
        of_ranks = [planned.plan.packs(rank) for rank in range(first, end)]
        chosen = [packs[step] for step in range(planned.plan.num_micro_steps) for packs in of_ranks]
        #: The replica that trains each of the trajectories. [n], int64.
        self.replica = planned.plan.rank // planned.per_rank
        #: The trajectories of each of this rank's packs.
        self.packs = [index[pack] for pack in chosen]
        #: The same; of a sorted plan as slices, which copy nothing.
        self.at: list[Any] = self.packs
        if is_sorted:
            self.at = [slice(own[0], own[-1] + 1) if len(own) else slice(0) for own in self.packs]
        #: Where the trajectories of each pack stand, and the slice of a sequence rank.
        self.shapes: list[PackShape] = []
        prefixes = planned.prefixes
        every_rows = planned.rows[:, first:end].reshape(-1).tolist()
        for pack, at, rows in zip(chosen, self.at, every_rows, strict=True):
            shared = None if prefixes is None else prefixes.of(pack)
            part = rows // place.sequence_world
            own = place.sequence_rank * part
            lengths = columns.trajectories.lengths[at]
            self.shapes.append(PackShape(lengths, rows, own, own + part, shared))
        num_tokens = sum(shape.num_tokens for shape in self.shapes)
        #: Part of this rank's places that hold a step, and tokens that all ranks save by prefixes.
        self.fill_fraction = num_tokens / max(sum(shape.rows for shape in self.shapes), 1)
        self.shared_tokens = 0 if prefixes is None else int(prefixes.steps.sum())

    @cached_property
    def loss(self) -> StepLoss:
        """The loss of all ranks' packs together. Collective over nodes."""
        columns = self._columns
        index = self.index
        options = columns.context.settings.loss
        counts = columns.counts[index]
        weights = np.zeros(len(columns.trajectories))
        # A trajectory may be in the batch several times, but each of its samples is another index.
        sequences = columns.sequence[index]
        items = columns.trajectories.item[index]
        weights[index] = loss_weights(options, counts, sequences, items)
        return StepLoss(int(counts.sum()), weights)

    def __len__(self) -> int:
        return len(self.packs)


def _plan(columns: RolloutColumns, index: np.ndarray, tokens: int | None) -> PlannedPacks:
    """Plan the packs.

    If prompts are shared, several plans are made, with all, half, a quarter, ... of the members of
    a group in one pack; the one of least cost is taken.
    """
    settings = columns.context.settings
    lengths = columns.trajectories.lengths[index]
    pack = settings.pack.model_copy(update={"tokens": tokens or settings.pack.tokens})
    ops = columns.tables[0].table.ops
    planned = partial(PlannedPacks, lengths, pack, settings.place.data_world, ops)
    if columns.prompts is None or not len(index):
        return planned()
    prompts = columns.prompts.of(index)
    size = int(np.bincount(prompts.leader).max())
    sizes = [-(-size // 2**k) for k in range((size - 1).bit_length() + 1)]  # of 5: [5, 3, 2, 1]
    plans = [planned(prompts.bundled(lengths, size, pack.room)) for size in sizes]
    is_full = pack.pad.to == "budget"  # then all packs cost as much
    costs = [
        (is_full * plan.plan.num_micro_steps, plan.costs.max(axis=(1, 2)).sum()) for plan in plans
    ]
    return plans[costs.index(min(costs))]


@dataclass
class _Gathered:
    """The fields of a pack as gathered from its tables."""

    steps: dict[str, torch.Tensor]  # fields of steps. [1, rows, *shape]
    trajectories: dict[str, torch.Tensor]  # fields of trajectories. [S, *shape]
    opaque: dict[str, list[Any]]


class PackReader:
    """Reads the packs of a rollout batch: rows into micro batches."""

    def __init__(self, columns: RolloutColumns) -> None:
        self.columns = columns
        self.context = columns.context

    def fetch(self, packs: PackSequence) -> None:
        """Bring the rows of packs to the nodes whose ranks gather them. Collective over all ranks.

        Every rank has passed a batch barrier since it gathered from the rollout batch before.
        """
        trajectories = self.columns.trajectories
        moving: list[tuple[TableRows, Moves]] = []
        for number, rows in enumerate(self.columns.tables):
            is_own = trajectories.source[packs.index] == number
            moves = rows.missing(trajectories.row[packs.index[is_own]], packs.replica[is_own])
            if moves is not None:
                moving.append((rows, moves))
        if not moving:
            return

        def exchange() -> None:
            sent = [rows.send(moves) for rows, moves in moving]
            for add_media in sent:  # after all rows: an error here is this node's own
                if add_media is not None:
                    add_media()

        self.context.agree(exchange)
        for rows, moves in moving:  # after an exchange that failed, the next one moves them all
            rows.arrived(moves)

    def forward(self, packs: PackSequence, to_fill: ForwardPass) -> Iterator[MicroBatch]:
        """Iterate over this rank's micro batches, to fill them.

        Raises:
            StoreError: A micro batch was not filled; on all ranks.
        """
        for number in range(len(packs)):
            yield self.read(packs, number, to_fill)
        self.context.agree(to_fill.check_filled)

    def read(
        self, packs: PackSequence, number: int, to_fill: ForwardPass | None = None
    ) -> MicroBatch:
        """Read one of this rank's packs.

        Args:
            packs: The packs.
            number: Which of them.
            to_fill: The pass that fills it; None: it is trained.
        Cost: each row is read once and written once.
        """
        begin = time.perf_counter()
        settings = self.context.settings
        columns = self.columns
        device = settings.device
        index = packs.packs[number]
        at = packs.at[number]
        shape = packs.shapes[number]
        with columns.access.reading(at) as has_rows:
            gathered = self._gather(index, at, shape)
        tensors = gathered.steps
        if columns.filled or MASK not in tensors:
            tensors.update(self._own_columns(at, shape, MASK not in tensors))
        mask = tensors.pop(MASK)
        targets = tensors.pop(TARGETS, None)
        if has_rows is not None and not has_rows.all():
            mask &= torch.from_numpy(shape.spread(has_rows))
        media = None
        if settings.media is not None:
            numbers = tensors[settings.media][0, : shape.own_tokens].numpy()
            media = MediaReader([rows.table for rows in columns.tables], numbers, device)
        tensors.update(gathered.trajectories)
        made = {name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()}
        targets = None if targets is None else targets.to(device)
        divisor = self.context.divisor
        by = settings.loss.by
        loss = PackLoss(mask, mask.to(device), shape, index, packs, divisor, settings.ranks, by)
        sources = PackSources(
            columns.trajectories, index, at, number, gathered.opaque, media, to_fill
        )
        micro = MicroBatch(made, targets, shape, loss, sources, settings.token, device)
        self.context.metrics.add(wait_s=time.perf_counter() - begin)
        return micro

    def _gather(self, index: np.ndarray, at: Any, shape: PackShape) -> _Gathered:
        """Gather a pack from each of its tables; `at` is `index`, or a slice of as many."""
        tables = self.columns.tables
        trajectories = self.columns.trajectories
        fields = self.context.settings.opaque
        steps = tables[0].gatherer.outputs(shape.end - shape.first, shape.own_tokens)
        per_trajectory: dict[str, torch.Tensor] = {}
        opaque: dict[str, list[Any]] = {field.name: [None] * len(index) for field in fields}
        for number, rows in enumerate(tables):
            own: Any = slice(None)  # the trajectories of the pack that lie in this table
            rows_at = at
            if len(tables) > 1:
                own = np.nonzero(trajectories.source[index] == number)[0]
                rows_at = trajectories.row[index][own]
            resolutions = torch.from_numpy(rows.rows.numpy()[rows_at])
            shared = None if rows.shared is None else rows.shared.of(rows_at)
            rows.gatherer.gather(steps, *shape.runs(resolutions, own, shared), shape.first)
            for name, field_rows in rows.gatherer.per_trajectory.items():
                values = field_rows.of_trajectories(resolutions)
                if name not in per_trajectory:
                    per_trajectory[name] = values.new_zeros(len(index), *values.shape[1:])
                per_trajectory[name][own] = values
            for field in fields:
                assert field.column is not None
                read = read_opaque(rows.table, field.column, resolutions)
                for i, value in zip(np.arange(len(index))[own].tolist(), read, strict=True):
                    opaque[field.name][i] = value
        return _Gathered(steps, per_trajectory, opaque)

    def _own_columns(self, at: Any, shape: PackShape, with_mask: bool) -> dict[str, torch.Tensor]:
        """Gather the filled columns of this rollout batch, and with `with_mask` the loss mask.

        Returns:
            Column (MASK for the loss mask) -> [1, rows].
        """
        columns = self.columns
        rows = shape.end - shape.first
        buffers = dict(columns.filled)
        if with_mask:
            buffers[MASK] = torch.from_numpy(columns.mask)
        outs = {name: torch.zeros(1, rows, dtype=buffer.dtype) for name, buffer in buffers.items()}
        if not len(shape.lengths):
            return outs
        # A column is one buffer, trajectory by trajectory: the first row of each is its start.
        resolutions = columns.trajectories.resolutions[at].clone()
        resolutions[:, Resolution.FIRST_ROW] = torch.from_numpy(columns.trajectories.starts[at])
        none = [torch.empty(0)] * len(outs)
        pads = [0.0] * len(outs)
        into = list(outs.values())
        values = list(buffers.values())
        spec = _STEPS * len(outs)
        ops = columns.tables[0].table.ops
        runs = shape.runs(resolutions)
        ops.pack_(into, values, none, none, *runs, spec, pads, shape.first, rows)
        return outs
