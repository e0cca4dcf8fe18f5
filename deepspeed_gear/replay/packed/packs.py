"""Packs of a train step: which trajectories each holds, loss weights, reading of micro batches."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import nullcontext
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch

from deepspeed_gear.batching.field_rows import read_opaque
from deepspeed_gear.batching.loss_weights import (
    PackLoss,
    StepLoss,
    loss_weights,
    table_loss_weights,
)
from deepspeed_gear.batching.micro_batch import ForwardPass, MicroBatch, PackSources
from deepspeed_gear.batching.pack_rows import MediaReader, PackShape
from deepspeed_gear.batching.packing_plan import PlannedPacks, plan_step
from deepspeed_gear.batching.ragged_rows import RaggedReader
from deepspeed_gear.config import ResolvedField
from deepspeed_gear.ops.records import Resolution
from deepspeed_gear.replay.packed.rollout_columns import RolloutColumns
from deepspeed_gear.replay.packed.rollout_context import MASK, TARGETS
from deepspeed_gear.replay.packed.table_rows import TableRows
from deepspeed_gear.row_exchange.trajectory_places import Moves


class Packs:
    """Packs of trajectories whose loss is one mean: their plan, and the reader of micro batches.

    Every rank has the same number of packs.

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
        self._narrowed = columns.narrowed  # the mask that these packs are weighed with
        self._context = columns.context
        self._index = index
        place = columns.context.settings.place
        trajectories = columns.trajectories
        is_sorted = planned is not None
        if planned is None:
            options = columns.context.settings.pack
            options = options.model_copy(update={"tokens": tokens or options.tokens})
            common = columns.common_prefixes
            common = None if common is None else common.of(index)
            ops = columns.tables[0].table.ops
            planned = plan_step(trajectories.lengths[index], options, place.data_world, ops, common)
        self.planned = planned
        # The ranks of the plan that this rank stands for: with a plan for more ranks than there are
        # it trains several packs in each micro step. With 4 of the plan for 2 replicas, the second
        # replica has the ranks [2, 3].
        first = place.data_rank * planned.per_rank
        end = first + planned.per_rank
        of_ranks = [planned.plan.packs(rank) for rank in range(first, end)]
        chosen = [packs[step] for step in range(planned.plan.num_micro_steps) for packs in of_ranks]
        prefixes = planned.prefixes
        if prefixes is not None:
            order = prefixes.order()
            chosen = [pack[np.argsort(order[pack])] for pack in chosen]
        self._replica = planned.plan.rank // planned.per_rank  # that trains each trajectory. [n]
        #: Trajectories of each of this rank's packs, as indices into the rollout batch.
        self.indices = [index[pack] for pack in chosen]
        self._at: list[Any] = self.indices
        if is_sorted:  # then they are ranges: slices copy nothing
            self._at = [slice(at[0], at[-1] + 1) if len(at) else slice(0) for at in self.indices]
        #: Places of the trajectories in each pack.
        self.shapes: list[PackShape] = []
        every_rows = planned.rows[:, first:end].reshape(-1).tolist()
        for pack, at, rows in zip(chosen, self._at, every_rows, strict=True):
            shared = None if prefixes is None else prefixes.of(pack)
            # Sequence rank 1 of 2 has the places [4, 8) of a pack of 8.
            part = rows // place.sequence_world
            own = place.sequence_rank * part
            lengths = trajectories.lengths[at]
            self.shapes.append(PackShape(lengths, rows, own, own + part, shared))
        num_tokens = sum(shape.num_tokens for shape in self.shapes)
        #: Part of this rank's places that hold a step, and tokens that all ranks save by prefixes.
        self.fill_fraction = num_tokens / max(sum(shape.rows for shape in self.shapes), 1)
        self.shared_tokens = 0 if prefixes is None else int(prefixes.steps.sum())

    def __len__(self) -> int:
        return len(self.indices)

    @cached_property
    def loss(self) -> StepLoss:
        """Loss tokens and weights of all ranks' packs together. Collective over nodes."""
        columns = self._columns
        index = self._index
        counts = columns.counts[index]
        weights = np.zeros(len(columns.trajectories))
        # A trajectory may be in the batch several times, but each of its samples is another index.
        units = (columns.sequence[index], columns.trajectories.item[index])
        settings = self._context.settings
        if settings.table_losses:
            tables = columns.trajectories.source[index]
            weights[index] = table_loss_weights(settings.table_losses, counts, *units, tables)
        else:
            weights[index] = loss_weights(settings.loss, counts, *units)
        return StepLoss(int(counts.sum()), weights)

    def fetch(self) -> None:
        """Bring the rows of the packs to the nodes whose ranks read them. Collective, all ranks.

        Every rank has passed a batch barrier since it read packs of the rollout batch before.
        """
        trajectories = self._columns.trajectories
        moving: list[tuple[TableRows, Moves]] = []
        for number, rows in enumerate(self._columns.tables):
            is_own = trajectories.source[self._index] == number
            moves = rows.missing(trajectories.row[self._index[is_own]], self._replica[is_own])
            if moves is not None:
                moving.append((rows, moves))
        if not moving:
            return

        def exchange() -> None:
            sent = [rows.send(moves) for rows, moves in moving]
            for add_media in sent:  # after all rows: an error here is this node's own
                if add_media is not None:
                    add_media()

        self._context.agree(exchange)
        for rows, moves in moving:  # after an exchange that failed, the next one moves them all
            rows.arrived(moves)

    def forward(self, to_fill: ForwardPass) -> Iterator[MicroBatch]:
        """Iterate over this rank's micro batches, to fill them.

        Raises:
            StoreError: A micro batch was not filled; on all ranks.
        """
        for number in range(len(self)):
            yield self.read(number, to_fill)
        self._context.agree(partial(to_fill.check_filled, len(self)))

    def read(self, number: int, to_fill: ForwardPass | None = None) -> MicroBatch:
        """Read one of this rank's packs as a micro batch.

        Args:
            number: Index of the pack.
            to_fill: The pass that fills it; None: it is trained.
        Cost: each row is read once and written once.
        """
        begin = time.perf_counter()
        settings = self._context.settings
        columns = self._columns
        device = settings.device
        index = self.indices[number]
        at = self._at[number]
        shape = self.shapes[number]
        with columns.reading(at) as has_rows:
            tensors, per_trajectory, opaque = self._gather(index, at, shape)
            ragged = {one.name: self._ragged(one, index, has_rows) for one in settings.ragged}
        loss_mask = self._narrowed
        if MASK not in tensors and loss_mask is None:
            loss_mask = columns.stored_mask
        if columns.filled or loss_mask is not None:
            tensors.update(columns.packed(at, shape, loss_mask))
        mask = tensors.pop(MASK)
        targets = tensors.pop(TARGETS, None)
        if has_rows is not None and not has_rows.all():
            mask &= torch.from_numpy(shape.spread(has_rows))
        media = None
        name = settings.field_by_role.get("media")
        if name is not None:
            numbers = tensors[name][0, : shape.own_tokens].numpy()
            media = MediaReader([rows.table for rows in columns.tables], numbers, device)
        tensors.update(per_trajectory)
        made = {name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()}
        loss = PackLoss(
            host_mask=mask,
            mask=mask.to(device),
            shape=shape,
            index=index,
            step=self,
            divisor=self._context.divisor,
            ranks=settings.ranks,
            by=settings.loss.by,
        )
        micro = MicroBatch(
            made,
            None if targets is None else targets.to(device),
            shape,
            loss,
            PackSources(
                columns.trajectories,
                index,
                at,
                number=number,
                opaque=opaque,
                media=media,
                ragged=ragged,
                forward=to_fill,
                has_peers=settings.place.data_world > 1,
            ),
            settings.field_by_role.get("token"),
            device,
        )
        self._context.metrics.add(wait_s=time.perf_counter() - begin)
        return micro

    def _ragged(
        self, field: ResolvedField, index: np.ndarray, has_rows: np.ndarray | None
    ) -> RaggedReader:
        """Return the reader of a ragged column; it has read it where nothing pins the rows.

        Args:
            field: The field of the column.
            index: Trajectories of the pack. [S], int64.
            has_rows: Which trajectories still have rows, with the lock held. [S], bool; None: all,
                and the rollout batch keeps them.
        """
        tables = self._columns.tables
        trajectories = self._columns.trajectories
        assert field.column is not None
        source = trajectories.source[index]
        numbers = np.zeros(len(index), np.int64)
        for number, rows in enumerate(tables):
            own = source == number
            slots = rows.rows.numpy()[trajectories.row[index][own], Resolution.SLOT]
            numbers[own] = rows.table.gather_source(field.column.name).numpy()[slots]
        if has_rows is not None:
            numbers[~has_rows] = 0
        every = [rows.table for rows in tables]
        reader = RaggedReader(field.column, int(field.offset), every, source, numbers)
        if has_rows is not None:
            reader.fetch(nullcontext())
        return reader

    def _gather(
        self, index: np.ndarray, at: Any, shape: PackShape
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, list[Any]]]:
        """Gather a pack from each of its tables; `at` is `index`, or a slice of as many.

        Returns:
            Fields of steps, [1, rows, *shape]; of trajectories, [S, *shape]; and opaque ones.
        """
        tables = self._columns.tables
        trajectories = self._columns.trajectories
        fields = self._context.settings.opaque
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
            own_values = rows.gatherer.trajectory_values(resolutions)
            if len(tables) == 1:
                per_trajectory = own_values
            else:
                for name, values in own_values.items():
                    if name not in per_trajectory:
                        per_trajectory[name] = values.new_zeros(len(index), *values.shape[1:])
                    per_trajectory[name][own] = values
            for field in fields:
                assert field.column is not None
                read = read_opaque(rows.table, field.column, resolutions)
                for i, value in zip(np.arange(len(index))[own].tolist(), read, strict=True):
                    opaque[field.name][i] = value
        return steps, per_trajectory, opaque
