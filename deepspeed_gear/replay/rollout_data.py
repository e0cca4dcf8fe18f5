"""The trajectories of a rollout batch: their records, lengths and loss tokens, and the packs made of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from deepspeed_gear.batching.micro_batch import PADDING, MicroBatch, PackLoss, PackShape, PackSources
from deepspeed_gear.batching.pack_gather import PackGatherer, flags_of, read_opaque
from deepspeed_gear.batching.packing_plan import PackBudget, PackingPlan, plan_packs
from deepspeed_gear.config import ResolvedField
from deepspeed_gear.config.pack_options import LossConfig, PackConfig, room
from deepspeed_gear.distributed.topology import RankCoordinates
from deepspeed_gear.errors import ConfigError, DataError, FieldError
from deepspeed_gear.ops import Ops
from deepspeed_gear.ops.gather_spec import GatherSpec, lower
from deepspeed_gear.ops.records import Resolution, Source
from deepspeed_gear.replay.metrics import Metrics
from deepspeed_gear.schema import Column, Schema
from deepspeed_gear.store.records import SlotRetention
from deepspeed_gear.store.table import Table

TARGETS, FLAGS = "\0targets", "\0flags"  # fields of the gatherers that are none of a micro batch
Fill = Callable[[MicroBatch, Mapping[str, torch.Tensor]], None]


@dataclass(frozen=True)
class PackSettings:
    """How this rank's packs are made. Pure.

    Args:
        pack: Budget, cost and padding.
        device: Of the micro batches.
        schema: Of the tables, which all have the fields of a pack.
        member: The column that tells the members of a group apart; None: each trajectory is one.
        reduce: Returns the sum of a tensor over the ranks that share a sequence, with gradients; None: there
            is one.
    """

    pack: PackConfig
    loss: LossConfig
    place: RankCoordinates
    device: torch.device
    schema: Schema
    fields: tuple[ResolvedField, ...]
    opaque: tuple[ResolvedField, ...] = ()
    member: str | None = None
    reduce: Callable[[torch.Tensor], torch.Tensor] | None = None

    @property
    def token(self) -> str | None:
        """The name of the field with the tokens; None: there is none."""
        for field in self.fields:
            if field.column is not None and field.column.role == "token":
                return field.name
        return None

    @property
    def flags(self) -> str | None:
        """The column of the loss mask; None: every step counts."""
        column = self.schema.role("loss_mask")
        return None if column is None else column.name

    @property
    def predicts(self) -> bool:
        """Whether columns stand where the token is predicted."""
        return self.schema.role("token") is not None

    @property
    def width(self) -> int:
        """Ranks that packs are planned for."""
        return self.pack.plan_width or self.place.data_world

    def budget(self, tokens: int | None = None) -> PackBudget:
        """Return the budget of a pack; `tokens`: of another size."""
        pack = self.pack if tokens is None else self.pack.model_copy(update={"tokens": tokens})
        linear, quadratic = pack.cost
        return PackBudget(room(pack), linear, quadratic, pack.pad.multiple, pack.max_trajectories)

    def gathered(self) -> list[ResolvedField]:
        """Return the fields that packs are gathered with: those of a micro batch, targets and flags."""
        found = [self._named(field) for field in self.fields]
        token, flags = self.schema.role("token"), self.schema.role("loss_mask")
        if token is not None:
            found.append(ResolvedField(TARGETS, token, offset=1, dtype="int64"))
        if flags is not None:
            found.append(ResolvedField(FLAGS, flags, offset=int(self.predicts), dtype=flags.dtype))
        return found

    def _named(self, field: ResolvedField) -> ResolvedField:
        """Return the field; tokens are int64, which every embedding takes."""
        is_token = field.column is not None and field.column.role == "token"
        unchanged = is_token and field.column is not None and field.dtype == field.column.dtype
        return replace(field, dtype="int64") if unchanged else field


@dataclass(frozen=True)
class NodePart:
    """The part of a table's trajectories that this rank contributes where several nodes hold them.

    Args:
        origins: shard << 32 | slot of each trajectory of the batch. [n], int64.
        own: Those that this rank contributes. [m], int64.
        join: Returns the sum of bytes over all ranks: a whole array from arrays in which each rank has its
            part, and zeros elsewhere. Collective.
    """

    origins: np.ndarray
    own: np.ndarray
    join: Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class TablePart:
    """The trajectories of a rollout batch that come from one table.

    Args:
        records: Their resolutions; of trajectories of other nodes without slot and rows. [n, 8], int64,
            contiguous.
        weights: Their PER weights. [n], float32.
        nodes: What this rank contributes of them; None: each node holds all.
    """

    gatherer: PackGatherer
    table: Table
    records: torch.Tensor
    weights: torch.Tensor
    nodes: NodePart | None = None

    def values(self, name: str) -> np.ndarray:
        """Return a per-trajectory column's stored values. [n, *shape]."""
        if self.nodes is None:
            return _numpy(self.table.gather_source(name)[self.records[:, Resolution.SLOT]])
        stored, own = self.table.tensor(name), self.nodes.own
        found = torch.zeros(len(self.records), *stored.shape[1:], dtype=stored.dtype)
        found[torch.from_numpy(own)] = stored[self.records[torch.from_numpy(own), Resolution.SLOT]]
        bits = found.view(torch.int16) if found.dtype == torch.bfloat16 else found
        joined = torch.from_numpy(self.nodes.join(bits.numpy()))
        return _numpy(joined.view(torch.bfloat16) if found.dtype == torch.bfloat16 else joined)

    def flags(self, ops: Ops, name: str, offset: int) -> np.ndarray:
        """Return which steps have a flag that is not 0, as `flags_of`. [sum of their steps], bool."""
        if self.nodes is None:
            return flags_of(ops, self.table.gather_source(name), self.records, offset)
        lengths = self.records[:, Resolution.NUM_STEPS].numpy()
        is_own, found = np.zeros(len(lengths), bool), np.zeros(int(lengths.sum()), bool)
        is_own[self.nodes.own] = True
        records = self.records[torch.from_numpy(is_own)]
        found[np.repeat(is_own, lengths)] = flags_of(ops, self.table.tensor(name), records, offset)
        bits = self.nodes.join(np.packbits(found))
        return np.unpackbits(bits, count=len(found)).astype(bool)

    def opaque(self, column: Column, records: torch.Tensor) -> list[Any]:
        """Return an opaque column's values of trajectories whose rows are here."""
        return read_opaque(self.table, column, records)

    def check_filled(self, name: str) -> None:
        """Raise if a late column is read of a trajectory that does not have it yet. Collective over nodes.

        Raises:
            DataError: One of the trajectories lacks it.
        """
        bits = self.table.schema.late_bits([name])
        if not bits:
            return
        slots = self.records[:, Resolution.SLOT].numpy()
        if self.nodes is None:
            absent = self._lacks(slots, bits)
        else:
            absent = np.zeros(len(slots), bool)
            absent[self.nodes.own] = self._lacks(slots[self.nodes.own], bits)
            absent = self.nodes.join(absent)
        if absent.any():
            raise DataError(
                f"table {self.table.spec.name}: late column {name}",
                "must be filled before it is read",
                f"absent in {int(absent.sum())} of {len(slots)} trajectories",
                "name it in gear.fields or in needs of the table's group: then only trajectories that have "
                "it are sampled",
            )

    def _lacks(self, slots: np.ndarray, bits: int) -> np.ndarray:
        """Return which slots lack a late column. [n] -> [n], bool."""
        return np.asarray(self.table.views["retention"][slots, SlotRetention.PRESENT] & bits == 0)

    def reported(self) -> torch.Tensor:
        """Return the records with slots as priority updates have them. [n, 8], int64."""
        if self.nodes is None:
            return self.records
        records = self.records.clone()
        records[:, Resolution.SLOT] = torch.from_numpy(self.nodes.origins)
        return records


class RolloutData:
    """The trajectories of a rollout batch, in the order of the selection, table by table.

    Args:
        settings: How packs are made.
        number: Of the rollout batch.
        metrics: Counts and times; None: its own.
    """

    def __init__(
        self,
        parts: Sequence[TablePart],
        settings: PackSettings,
        ops: Ops,
        number: int = 0,
        metrics: Metrics | None = None,
    ) -> None:
        self.settings, self.ops, self.number = settings, ops, number
        self.metrics = Metrics() if metrics is None else metrics
        most = room(settings.pack)
        self.parts = [replace(part, records=_clipped(part.records, most)) for part in parts]
        self.records = torch.cat([part.reported() for part in self.parts])
        #: Whether several nodes hold a table together: values of all trajectories are then collective.
        self.is_spread = any(part.nodes is not None for part in self.parts)
        # Where rows are gathered from: with trajectories of other nodes once their rows have come.
        self._places = [part.records if part.nodes is None else part.records.clone() for part in self.parts]
        self._is_weight = torch.cat([part.weights for part in self.parts])
        self.source = np.repeat(np.arange(len(parts)), [len(part.records) for part in self.parts])
        self._row = np.concatenate([np.arange(len(part.records)) for part in self.parts])
        self.lengths: np.ndarray = self.records[:, Resolution.NUM_STEPS].numpy()
        self.starts = np.cumsum(self.lengths) - self.lengths
        #: Item of each trajectory: those of one group have one number, in the order of the selection.
        self.item = item_numbers(self.records[:, Resolution.SAMPLE_NUMBER].numpy(), self.source)
        #: Columns of this rollout batch only, at predicting places. [num_tokens] each.
        self.columns: dict[str, torch.Tensor] = {}

    @property
    def num_items(self) -> int:
        return int(self.item[-1]) + 1 if len(self.item) else 0

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())

    @cached_property
    def mask(self) -> np.ndarray:
        """Which steps count in the loss, at predicting places, one trajectory after the other. [tokens].

        Raises:
            DataError: A late column of tokens or of the loss mask is absent in a trajectory.
        """
        settings = self.settings
        roles = settings.schema.role("token"), settings.schema.role("loss_mask")
        for column in (one for one in roles if one is not None):
            for part in self.parts:
                part.check_filled(column.name)
        if settings.flags is not None:
            offset, name = int(settings.predicts), settings.flags
            return np.concatenate([part.flags(self.ops, name, offset) for part in self.parts])
        mask = np.ones(self.num_tokens, bool)
        if settings.predicts:
            mask[self.starts + self.lengths - 1] = False
        return mask

    @cached_property
    def counts(self) -> np.ndarray:
        """Loss tokens of each trajectory. [n], int64."""
        if not len(self.lengths):
            return np.zeros(0, np.int64)
        return np.add.reduceat(self.mask, self.starts, dtype=np.int64)

    @cached_property
    def member(self) -> np.ndarray:
        """The member of its group that each trajectory belongs to. [n], int64."""
        if self.settings.member is None:
            return np.arange(len(self.lengths))
        return self.values(self.settings.member).astype(np.int64)

    @cached_property
    def sequence(self) -> np.ndarray:
        """The sequence of each trajectory for the loss: itself, or its member. [n], int64."""
        if self.settings.loss.by == "trajectory":
            return np.arange(len(self.lengths))
        pairs = np.stack([self.item, self.member], axis=1)
        return np.unique(pairs, axis=0, return_inverse=True)[1].reshape(-1)

    def check_values(self, name: str) -> None:
        """Raise unless every table has a per-trajectory column.

        Raises:
            ConfigError: A table has no such column, or it has a row per step.
        """
        for part in self.parts:
            schema = part.table.schema
            if name not in schema or schema[name].rows != "1":
                known = ", ".join(column.name for column in schema.trajectory_columns) or "none"
                rule = f"must be a column of table {part.table.spec.name} with one value per trajectory"
                raise ConfigError(f"column {name!r}", rule, None, f"there are: {known}")

    def values(self, name: str) -> np.ndarray:
        """Return a per-trajectory column's stored values. [n, *shape]. Collective over nodes.

        Raises:
            ConfigError: As `check_values`.
            DataError: It is late, and a trajectory does not have it yet.
        """
        self.check_values(name)
        for part in self.parts:
            part.check_filled(name)
        return np.concatenate([part.values(name) for part in self.parts])

    def place(self, number: int, which: np.ndarray, first_row: np.ndarray, slot: np.ndarray) -> None:
        """Set where rows of trajectories lie that have come from other nodes.

        Args:
            which: The trajectories, as indices among those of the table. [k], int64.
            first_row: Of each, in what the table's batches are gathered from. [k], int64.
            slot: Likewise. [k], int64.
        """
        places = self._places[number].numpy()
        places[which, Resolution.FIRST_ROW], places[which, Resolution.SLOT] = first_row, slot

    def of_table(self, number: int, index: np.ndarray) -> np.ndarray:
        """Return which of the trajectories come from a table, as indices among its own. [n] -> [m], int64."""
        return np.asarray(self._row[index[self.source[index] == number]])

    # ---- packs -----------------------------------------------------------------------------------

    def pack(
        self,
        index: np.ndarray,
        rows: int,
        weights: np.ndarray,
        loss_tokens: int,
        divisor: float,
        fill: Fill | None = None,
    ) -> MicroBatch:
        """Gather this rank's part of a pack.

        Args:
            index: Its trajectories. [S], int64.
            weights: The loss weight of the tokens of every trajectory of the batch. [n], float64.
            loss_tokens: Of the whole optimizer step.
            divisor: What the framework divides by.
            fill: Takes columns that are filled.
        """
        begin, settings, place = time.perf_counter(), self.settings, self.settings.place
        part = rows // place.sequence_world
        first = place.sequence_rank * part
        shape = PackShape(self.lengths[index], rows, first, first + part)
        which = torch.from_numpy(index)
        records = self.records[which]
        gathered = self._places[0][which] if self.is_spread and len(self.parts) == 1 else records
        tensors, per_trajectory = self._gather(index, gathered, shape)
        mask, device = self._mask_of(tensors, shape), settings.device
        token_weights = torch.from_numpy(shape.spread(weights[index].astype(np.float32))).mul_(mask)
        share = int(np.count_nonzero(mask.numpy())) / max(loss_tokens, 1)
        targets = tensors.pop(TARGETS, None)
        tensors.pop(FLAGS, None)
        tensors.update(self._own_columns(index, shape))
        made = {name: tensor.to(device, non_blocking=True)[None] for name, tensor in tensors.items()}
        for name, tensor in per_trajectory.items():
            made[name] = tensor.to(device, non_blocking=True)
        micro = MicroBatch(
            made,
            None if targets is None else targets.to(device)[None],
            shape,
            PackLoss(
                mask.to(device), token_weights.to(device), share, divisor, settings.reduce, settings.loss.by
            ),
            PackSources(
                which,
                records,
                torch.from_numpy(self.source[index]),
                torch.from_numpy(self.item[index]),
                self._is_weight[which],
                fill,
                self._opaque(index),
            ),
            settings.token,
            device,
        )
        self.metrics.gathered(time.perf_counter() - begin)
        return micro

    def _gather(
        self, index: np.ndarray, records: torch.Tensor, shape: PackShape
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Gather the per-step and the per-trajectory fields of a pack from the tables."""
        first = self.parts[0].gatherer
        outs, places = first.outputs(shape.end - shape.first), torch.from_numpy(shape.starts)
        if len(self.parts) == 1:
            first.gather(outs, records, places, shape.first)
            whole = first.per_trajectory(records)
        else:
            whole = self._gather_mixed(index, outs, places, shape)
        end = min(max(shape.num_tokens - shape.first, 0), shape.end - shape.first)
        first.finish(outs, end)
        return outs, whole

    def _gather_mixed(
        self, index: np.ndarray, outs: dict[str, torch.Tensor], places: torch.Tensor, shape: PackShape
    ) -> dict[str, torch.Tensor]:
        """Gather the rows of a pack from several tables; return the per-trajectory fields."""
        sources = self.source[index]
        whole: dict[str, torch.Tensor] = {}
        for number, part in enumerate(self.parts):
            own = torch.from_numpy(np.nonzero(sources == number)[0])
            if not own.numel():
                continue
            records = self._places[number][torch.from_numpy(self._row[index])[own]]
            part.gatherer.gather(outs, records, places[own], shape.first)
            for name, values in part.gatherer.per_trajectory(records).items():
                if name not in whole:
                    whole[name] = values.new_zeros(len(index), *values.shape[1:])
                whole[name][own] = values
        if not len(index):
            whole = self.parts[0].gatherer.per_trajectory(self.records[:0])
        return whole

    def _opaque(self, index: np.ndarray) -> dict[str, list[Any]]:
        """Return the opaque fields of trajectories, as lists."""
        found: dict[str, list[Any]] = {}
        for field in self.settings.opaque:
            assert field.column is not None
            values: list[Any] = [None] * len(index)
            for number, part in enumerate(self.parts):
                own = np.nonzero(self.source[index] == number)[0]
                records = self._places[number][torch.from_numpy(self._row[index[own]])]
                for place, value in zip(own.tolist(), part.opaque(field.column, records), strict=True):
                    values[place] = value
            found[field.name] = values
        return found

    def _mask_of(self, tensors: Mapping[str, torch.Tensor], shape: PackShape) -> torch.Tensor:
        """Return which places of this rank count in the loss. [rows], bool."""
        if FLAGS in tensors:
            return tensors[FLAGS] != 0  # padding is 0
        counted = np.zeros(shape.end - shape.first, bool)
        counted[: max(shape.num_tokens - shape.first, 0)] = True
        if self.settings.predicts:
            last = np.cumsum(shape.lengths) - 1 - shape.first
            counted[last[(last >= 0) & (last < len(counted))]] = False
        return torch.from_numpy(counted)

    def _own_columns(self, index: np.ndarray, shape: PackShape) -> dict[str, torch.Tensor]:
        """Gather the columns of this rollout batch only."""
        if not self.columns:
            return {}
        rows, names = shape.end - shape.first, list(self.columns)
        buffers = [self.columns[name] for name in names]
        outs = [torch.zeros(rows, dtype=buffer.dtype) for buffer in buffers]
        if len(index):
            records = self.records[torch.from_numpy(index)]
            records[:, Resolution.FIRST_ROW] = torch.from_numpy(self.starts[index])
            none = [torch.empty(0)] * len(names)
            spec, pads = lower([GatherSpec(Source.STEPS)] * len(names)), [0.0] * len(names)
            places = torch.from_numpy(shape.starts)
            self.ops.pack_(outs, buffers, none, none, records, places, spec, pads, shape.first, rows)
        return dict(zip(names, outs, strict=True))

    # ---- columns of this rollout batch -------------------------------------------------------------

    def set_column(self, name: str, values: np.ndarray) -> None:
        """Set a column of this rollout batch: a value for each trajectory, or for each place.

        Args:
            name: Its name in micro batches.
            values: [n], or [num_tokens].
        Raises:
            FieldError: Another field has the name.
        """
        self.check_name(name)
        per_place = np.repeat(values, self.lengths) if len(values) == len(self.lengths) else values
        self.columns[name] = torch.from_numpy(np.ascontiguousarray(per_place, np.float32))

    def check_name(self, name: str) -> None:
        """Raise if a field of the config has a name."""
        if name in [field.name for field in self.settings.fields]:
            rule = "must not be named like a field of gear.fields"
            raise FieldError(f"column {name!r}", rule, None, "choose another name, or leave the field out")

    def write(self, column: torch.Tensor, micro: MicroBatch, values: torch.Tensor) -> None:
        """Write values of this rank's places of a pack, [rows of this rank], to a column, [num_tokens]."""
        place = self.settings.place
        index = micro.index.numpy()
        rows = micro.loss_mask.numel()
        first = place.sequence_rank * rows
        shape = PackShape(self.lengths[index], rows * place.sequence_world, first, first + rows)
        owners = shape.owners()
        is_real = owners != PADDING
        to = self.starts[index][owners[is_real]] + shape.positions()[is_real]
        given = values.detach().to("cpu", torch.float32)[torch.from_numpy(is_real)]
        column[torch.from_numpy(to)] = given


def _numpy(values: torch.Tensor) -> np.ndarray:
    """Return values as an array, bfloat16 as float32."""
    return np.asarray((values.float() if values.dtype == torch.bfloat16 else values).numpy())


def _clipped(records: torch.Tensor, most: int) -> torch.Tensor:
    """Return records of at most so many steps; their first steps are trained."""
    if records.size(0) and int(records[:, Resolution.NUM_STEPS].max()) > most:
        records = records.clone()
        records[:, Resolution.NUM_STEPS].clamp_(max=most)
    return records


def item_numbers(sample_numbers: np.ndarray, tables: np.ndarray | None = None) -> np.ndarray:
    """Return the number of each trajectory's item, from 0.

    Args:
        sample_numbers: Of trajectories; those of one item are equal and neighbours. [n].
        tables: Which table each is of; None: of one. [n].
    Returns:
        [n], int64.
    """
    is_first = np.ones(len(sample_numbers), bool)
    is_first[1:] = sample_numbers[1:] != sample_numbers[:-1]
    if tables is not None:
        is_first[1:] |= tables[1:] != tables[:-1]
    return np.cumsum(is_first) - 1


class PackSequence:
    """The packs of some trajectories of a rollout batch on this rank: the same number on every rank.

    Args:
        index: The trajectories. [n], int64.
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
