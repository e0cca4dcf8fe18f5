"""The trajectories of a rollout batch: records, lengths, loss tokens, rows, and packs of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product, zip_longest
from typing import Any

import numpy as np
import torch

import deepspeed_gear.arguments as arguments
from deepspeed_gear.batching.gather import read_opaque
from deepspeed_gear.batching.loss_weights import loss_weights
from deepspeed_gear.batching.micro_batch import MicroBatch, PackLoss, PackMedia, PackShape, PackSources
from deepspeed_gear.batching.packing_plan import PackBudget, Prefixes, plan_packs
from deepspeed_gear.config import ResolvedField
from deepspeed_gear.config.options import AdvantageConfig, LossConfig, PackConfig, RolloutConfig
from deepspeed_gear.distributed.row_exchange.trajectory_places import Moves
from deepspeed_gear.distributed.topology import RankCoordinates
from deepspeed_gear.errors import ConfigError, DataError, FieldError, StoreError
from deepspeed_gear.ops import Ops
from deepspeed_gear.ops.constants import MOST_PACK_TOKENS
from deepspeed_gear.ops.records import GatherSpec, Resolution, Source, lower
from deepspeed_gear.replay.metrics import Metrics
from deepspeed_gear.replay.node_exchange import SpreadTrajectories
from deepspeed_gear.replay.table_part import RolloutSession, TablePart, item_numbers
from deepspeed_gear.schema import Column, Schema
from deepspeed_gear.store.native_rows import as_tensor

TARGETS, MASK = "\0targets", "\0mask"  # what is gathered and is no field of a micro batch
_STEPS = lower([GatherSpec(Source.STEPS)])
Fill = Callable[[MicroBatch, Mapping[str, torch.Tensor]], None]
Write = Callable[[str, MicroBatch, torch.Tensor], None]  # of a column's values


@dataclass(frozen=True)
class PackSettings:
    """How this rank's packs are made. Pure."""

    pack: PackConfig
    loss: LossConfig
    size: RolloutConfig
    keys: tuple[int, int]  # seed and 32-bit stream key of the shuffled orders
    place: RankCoordinates
    device: torch.device
    schema: Schema  # of the first table; all have the fields of a pack
    fields: tuple[ResolvedField, ...]
    opaque: tuple[ResolvedField, ...] = ()
    #: The column that tells the members of a group apart; None: each trajectory is one.
    member: str | None = None
    #: Returns the sum of a tensor over the ranks that share a sequence, with gradients; None: there is one.
    reduce: Callable[[torch.Tensor], torch.Tensor] | None = None

    @cached_property
    def token(self) -> str | None:
        """The name of the field with the tokens; None: there is none."""
        return next((f.name for f in self.fields if f.column is not None and f.column.role == "token"), None)

    @cached_property
    def media(self) -> str | None:
        """The name of the field with the numbers of media; None: there is none."""
        return next((f.name for f in self.fields if f.column is not None and f.column.role == "media"), None)

    @property
    def predicts(self) -> bool:
        """Whether columns stand where the token is predicted."""
        return self.schema.role("token") is not None

    def gathered(self) -> list[ResolvedField]:
        """Return the fields that packs are gathered with: those of a micro batch, and targets."""
        found = []
        for field in self.fields:  # tokens become int64, which every embedding takes
            is_token = field.column is not None and field.column.role == "token"
            unchanged = field.column is not None and field.dtype == field.column.dtype
            found.append(replace(field, dtype="int64") if is_token and unchanged else field)
        token = self.schema.role("token")
        if token is not None:
            found.append(ResolvedField(TARGETS, token, offset=1, dtype="int64"))
        return found


class RolloutData:
    """The trajectories of a rollout batch, in the order of the selection, table by table."""

    def __init__(
        self,
        parts: Sequence[TablePart],
        settings: PackSettings,
        ops: Ops,
        session: RolloutSession,
        number: int = 0,
        metrics: Metrics | None = None,
    ) -> None:
        self.parts, self.settings, self.ops, self.number = parts, settings, ops, number
        self.session, self.metrics = session, Metrics() if metrics is None else metrics
        self.has_rows: np.ndarray | None = None  # trajectories of a pack in the making that were not evicted
        records = np.concatenate([part.records.resolutions.numpy() for part in parts])
        # As priority updates have the slots.
        records[:, Resolution.SLOT] = np.concatenate([part.records.origins.numpy() for part in parts])
        records[:, Resolution.ANCHOR] = 0
        self.records = torch.from_numpy(records)
        self.is_weight = np.concatenate([part.records.weights.numpy() for part in parts])
        # For tables of 2 and 3 trajectories, source is [0, 0, 1, 1, 1] and row [0, 1, 0, 1, 2].
        self.source = np.repeat(np.arange(len(parts)), [len(part.rows) for part in parts])
        self._row = np.concatenate([np.arange(len(part.rows)) for part in parts])
        self.lengths = records[:, Resolution.NUM_STEPS].copy()
        self.starts = np.cumsum(self.lengths) - self.lengths  # for lengths [2, 3] starts is [0, 2]
        self.num_tokens = int(self.lengths.sum())
        #: Columns of this rollout batch only, at predicting places. [num_tokens] each.
        self.columns: dict[str, torch.Tensor] = {}

    @cached_property
    def item(self) -> np.ndarray:
        """Item of each trajectory: those of one group have one number, in the order of the selection."""
        return item_numbers(self.records[:, Resolution.SAMPLE_NUMBER].numpy(), self.source)

    @property
    def num_items(self) -> int:
        return int(self.item.max(initial=-1)) + 1

    @cached_property
    def mask(self) -> np.ndarray:
        """Which steps count in the loss, at predicting places, one trajectory after the other. [tokens]."""
        predicts, schema = self.settings.predicts, self.settings.schema
        tokens, flags = schema.role("token"), schema.role("loss_mask")
        if tokens is not None:
            for part in self.parts:
                part.check_filled(tokens.name)
        if flags is not None:
            own = [part.steps(self.ops, flags.name, int(predicts), as_flags=True) for part in self.parts]
            return own[0] if len(own) == 1 else np.concatenate(own)
        mask = np.ones(self.num_tokens, bool)
        if predicts:
            mask[self.starts + self.lengths - 1] = False
        return mask

    @cached_property
    def counts(self) -> np.ndarray:
        """Loss tokens of each trajectory. [n], int64."""
        if not len(self.lengths):
            return np.zeros(0, np.int64)
        return np.add.reduceat(self.mask.view(np.uint8), self.starts, dtype=np.int32).astype(np.int64)

    @cached_property
    def prompts(self) -> Prefixes | None:
        """Steps of each trajectory before its first loss place, and the first trajectory of its item with as
        many, and equal tokens up to that place. None: prompts are not shared. Collective over nodes.
        """
        token = self.settings.schema.role("token")
        if self.settings.pack.prefix == "own" or token is None or not len(self.lengths):
            return None
        actions = np.append(self.mask.nonzero()[0], self.num_tokens)
        rows = np.minimum(actions[np.searchsorted(actions, self.starts)] - self.starts, self.lengths - 1)
        of_tables = [np.nonzero(self.source == number)[0] for number in range(len(self.parts))]
        leaders = [
            own[part.leaders(self.ops, rows[own] + 1, self.item[own])]
            for part, own in zip(self.parts, of_tables, strict=True)
        ]
        return Prefixes(rows, np.concatenate(leaders))

    @cached_property
    def sequence(self) -> np.ndarray:
        """The sequence of each trajectory for the loss: itself, or its member. [n], int64."""
        if self.settings.loss.by == "trajectory" or self.settings.member is None:
            return np.arange(len(self.lengths))
        pairs = np.stack([self.item, self.values(self.settings.member).astype(np.int64)], axis=1)
        return np.unique(pairs, axis=0, return_inverse=True)[1].reshape(-1)

    def check_values(self, *names: str) -> None:
        """Raise ConfigError unless every table has per-trajectory columns."""
        for name, part in product(names, self.parts):
            schema = part.table.schema
            if name not in schema or schema[name].rows != "1":
                known = ", ".join(column.name for column in schema.trajectory_columns) or "none"
                rule = f"must be a column of table {part.table.spec.name} with one value per trajectory"
                raise ConfigError(f"column {name!r}", rule, None, f"there are: {known}")

    def values(self, name: str) -> np.ndarray:
        """Return a per-trajectory column's stored values. [n, *shape]. Collective over nodes."""
        self.check_values(name)
        return np.concatenate([part.values(name) for part in self.parts])

    def _column(self, name: str) -> tuple[Column, int]:
        """Return the column of numbers per step that micro batches have by a name, and its offset."""
        fields = {field.name: field for field in self.settings.fields}
        column = fields[name].column if name in fields else None
        if column is None and all(name in part.table.schema for part in self.parts):
            column = self.settings.schema[name]
        if column is None or column.rows == "1" or column.shape:
            rule = "must be filled or set before, or be a column with one number per step"
            raise ConfigError(f"column {name!r}", rule, None, f"filled: {', '.join(self.columns) or 'none'}")
        follows = int(self.settings.predicts and column.rows == "T")
        return column, int(fields[name].offset) if name in fields else follows

    def places(self, name: str, later: int = 0) -> np.ndarray:
        """Return values where micro batches have them, or so many steps later. [num_tokens], float64.

        `name` is of a column of this rollout batch, a per-step field or column. Collective over nodes.
        """
        if name in self.columns:
            return self.columns[name].double().numpy()
        column, offset = self._column(name)
        return np.concatenate([part.steps(self.ops, column.name, offset + later) for part in self.parts])

    def estimate(self, options: AdvantageConfig, reward: str) -> np.ndarray:
        """Estimate advantages and value targets by the op `advantages_`. [2, num_tokens], float32.

        A place of the loss mask is an action, the others take no time: after an action comes the next one of
        the trajectory, or its end; a reward at another place is added to that of the action before it.
        Collective over nodes.

        Raises:
            ConfigError: There is no such column.
            DataError: A late column is absent, or a trajectory that was not terminated has no value after it.
        """
        schema, actions, last = self.settings.schema, self.mask.nonzero()[0], self.starts + self.lengths - 1
        found = np.zeros((2, self.num_tokens), np.float32)
        owner = np.repeat(np.arange(len(last)), self.lengths)
        of = owner[actions]
        is_last = np.append(of[1:] != of[:-1], True)[: len(of)]
        ends = np.ones(len(last), bool)  # without flags trajectories are whole
        for role in ("truncated", "terminated"):
            if (flag := schema.role(role)) is not None:
                flags = [part.steps(self.ops, flag.name, 0, as_flags=True) for part in self.parts]
                ends = np.concatenate(flags)[last] == (role == "terminated")
        ends &= ~np.concatenate([part.records.is_cut.numpy() for part in self.parts])
        if reward not in self.columns and reward in schema and schema[reward].rows == "1":
            rewards = np.zeros(self.num_tokens)
            rewards[last] = self.values(reward)
        else:
            rewards = self.places(reward)
        value, is_own = self.places(options.value), options.value in self.columns
        column, offset = (None, 0) if is_own else self._column(options.value)
        if options.next_value is not None:
            after = self.places(options.next_value)
        elif column is not None and column.rows == "T+1":
            after = self.places(options.value, 1)
        elif self.settings.predicts and offset == 0:  # the last place is that of the last token
            after = value
        elif ends.all():
            after = np.zeros(self.num_tokens)
        else:
            rule = "must have the value of the state after trajectories that were not terminated"
            remedy = "name the column of the values after each step as next_value"
            raise DataError(f"column {options.value!r}", rule, f"{(~ends).sum()} of {len(ends)}", remedy)
        names = options.log_prob, options.behaviour_log_prob
        logs = [None if name is None else self.places(name)[actions] for name in names]
        if len(actions):
            latest = np.cumsum(self.mask) - 1  # for the mask [0, 1, 0, 1] the actions [-1, 0, 0, 1]
            follows = (latest >= 0) & (of[latest] == owner)
            summed = np.bincount(latest[follows], rewards[follows], len(actions))
            following = np.where(is_last, after[last[of]], np.roll(value[actions], -1))
            given = [summed, value[actions], following, is_last & ends[of], is_last, is_last | True]
            outs = torch.zeros(2, 1, len(actions))
            inputs = [None if x is None else torch.from_numpy(x)[None] for x in (*given, *logs)]
            self.ops.advantages_(*outs, *inputs, list(options.factors))
            found[:, actions] = outs[:, 0]
        return found

    def fetch(self, packs: PackSequence) -> None:
        """Bring the rows of packs to the nodes whose ranks gather them. Collective over all ranks.

        Every rank has passed a batch barrier since it gathered from the rollout batch before.
        """
        moving: list[tuple[TablePart, SpreadTrajectories, Moves]] = []
        for number, part in enumerate(self.parts):
            if part.spread is None:
                continue
            replica_nodes, is_its = part.spread.plan.replica_nodes, self.source[packs.index] == number
            needed = np.zeros((len(replica_nodes), len(part.rows)), bool)  # [S, n]
            needed[:, self._row[packs.index[is_its]]] = replica_nodes[:, packs.replica[is_its]]
            moves = part.places.move(part.with_holders(needed))
            if moves is not None:  # on all ranks alike
                moving.append((part, part.spread, moves))
        if not moving:
            return

        def exchange() -> None:
            exchanges = [
                (spread.exchange, moves) for _, spread, moves in moving if spread.exchange is not None
            ]
            for add_media in [exchange.send(moves) for exchange, moves in exchanges]:
                add_media()

        self.session.agree(exchange)
        for part, spread, moves in moving:  # after an exchange that failed, the next one moves them all
            part.places.moved(moves)
            room, (row, slot), rows = spread.room, part.table.first_arrival, part.rows.numpy()
            rows[moves.samples, Resolution.FIRST_ROW] = row + room.first_row + moves.first_row
            rows[moves.samples, Resolution.SLOT] = slot + room.first_slot + moves.slot
            part.locate()

    def pack(self, packs: PackSequence, number: int, fill: Fill | None = None) -> MicroBatch:
        begin, settings, device = time.perf_counter(), self.settings, self.settings.device
        index, at, shape = packs.packs[number], packs.at[number], packs.shapes[number]
        tensors = self.parts[0].gatherer.outputs(shape.end - shape.first, shape.own_tokens)
        per_trajectory: dict[str, torch.Tensor] = {}
        opaque: dict[str, list[Any]] = {field.name: [None] * len(index) for field in settings.opaque}
        for number, table in enumerate(self.parts):
            # Those of the table in the pack.
            own: Any = np.nonzero(self.source[index] == number)[0] if len(self.parts) > 1 else slice(None)
            rows_at = self._row[index][own] if len(self.parts) > 1 else at
            records = torch.from_numpy(table.rows.numpy()[rows_at])
            shared = None if table.shared is None else table.shared.of(rows_at)
            table.gatherer.gather(tensors, *shape.runs(records, own, shared), shape.first)
            for name, field_rows in table.gatherer.per_trajectory.items():
                values = field_rows.of_trajectories(records)
                if name not in per_trajectory:
                    per_trajectory[name] = values.new_zeros(len(index), *values.shape[1:])
                per_trajectory[name][own] = values
            for field in settings.opaque:
                assert field.column is not None
                read = read_opaque(table.table, field.column, records)
                for i, value in zip(np.arange(len(index))[own].tolist(), read, strict=True):
                    opaque[field.name][i] = value
        if self.columns or MASK not in tensors:
            tensors.update(self._own_columns(at, shape, MASK not in tensors))
        mask, targets = tensors.pop(MASK), tensors.pop(TARGETS, None)
        if self.has_rows is not None and not self.has_rows.all():
            mask &= torch.from_numpy(shape.spread(self.has_rows))

        def weigh() -> tuple[torch.Tensor, float]:
            spread = torch.from_numpy(shape.spread(packs.loss[1][index].astype(np.float32)))
            share = int(np.count_nonzero(mask.numpy())) / max(packs.loss[0], 1)
            return spread.mul_(mask[0]).to(device), share

        read_media: Callable[[], PackMedia] | None = None
        if settings.media is not None:
            read_media = partial(self._read_media, tensors[settings.media][0, : shape.own_tokens].numpy())
        tensors.update(per_trajectory)
        made = {name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()}
        targets = None if targets is None else targets.to(device)
        loss = PackLoss(mask.to(device), weigh, self.session.divisor, settings.reduce, settings.loss.by)
        sources = PackSources(index, self, at, fill, opaque, read_media)
        micro = MicroBatch(made, targets, shape, loss, sources, settings.token, device)
        self.metrics.add(wait_s=time.perf_counter() - begin)
        return micro

    def _read_media(self, numbers: np.ndarray) -> PackMedia:
        """Read the media that places name, from the stores of this node. [places], int64."""
        place = np.flatnonzero(numbers)
        every, item = np.unique(numbers[place], return_inverse=True)
        stores = [part.table.media for part in self.parts if part.table.media is not None]
        rows = dict[int, dict[str, np.ndarray]]()
        for media, table in ((part.table.media, part.table) for part in self.parts):
            found = {} if media is None else media.contents(every[~np.isin(every, list(rows))], table.lock)
            rows.update((number, stores[0].spec.rows(content)) for number, content in found.items())
        if len(rows) < len(every):
            rule, remedy = "must be read while its rollout batch is trained", "read micro.media in the loop"
            raise StoreError("micro.media", rule, None, remedy)
        device = self.settings.device
        columns, counts = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
        for column in stores[0].spec.columns:
            parts = [rows[number][column.name] for number in every.tolist()]
            counts[column.name] = torch.tensor([len(part) for part in parts], dtype=torch.int64)
            whole = np.concatenate([np.empty((0, *column.shape), column.numpy_dtype), *parts])
            columns[column.name] = as_tensor(whole, column.dtype).to(device, non_blocking=True)
        at = torch.from_numpy(place).to(device)
        return PackMedia(columns, counts, at, torch.from_numpy(item.reshape(-1)))

    def forward(self, packs: PackSequence, names: Sequence[str], write: Write) -> Iterator[MicroBatch]:
        """Yield this rank's packs to be filled with columns, which `write` takes; StoreError: one was not."""
        filled: dict[str, set[int]] = {name: set() for name in names}  # numbers of micro batches

        def fill(number: int, micro: MicroBatch, columns: Mapping[str, torch.Tensor]) -> None:
            for name, values in columns.items():
                if name not in filled:
                    rule = f"must be one of those that forward names ({', '.join(names)})"
                    raise FieldError(f"column {name!r}", rule)
                write(name, micro, values)
                filled[name].add(number)

        for number in range(len(packs)):
            yield self.pack(packs, number, partial(fill, number))

        def check_filled() -> None:
            for name, numbers in filled.items():
                if len(numbers) != len(packs):
                    at, rule = f"column {name!r}", f"must be filled in each of the {len(packs)} micro batches"
                    remedy = f"call micro.fill({name}=...) in the loop"
                    raise StoreError(f"forward: {at}", rule, len(numbers), remedy)

        self.session.agree(check_filled)

    def _own_columns(self, at: Any, shape: PackShape, with_mask: bool) -> dict[str, torch.Tensor]:
        """Gather the columns of this rollout batch only, and the loss mask as MASK. [1, rows] each."""
        rows, mask = shape.end - shape.first, {MASK: torch.from_numpy(self.mask)} if with_mask else {}
        buffers = {**mask, **self.columns}
        outs = {name: torch.zeros(1, rows, dtype=buffer.dtype) for name, buffer in buffers.items()}
        if len(shape.lengths):
            records = self.records[at].clone()
            records[:, Resolution.FIRST_ROW] = torch.from_numpy(self.starts[at])
            into, columns, none = list(outs.values()), list(buffers.values()), [torch.empty(0)] * len(outs)
            spec, pads = _STEPS * len(outs), [0.0] * len(outs)
            self.ops.pack_(into, columns, none, none, *shape.runs(records), spec, pads, shape.first, rows)
        return outs

    def set_column(self, name: str, values: np.ndarray) -> None:
        """Set a column of this rollout batch: a value of each trajectory, [n], or place, [num_tokens]."""
        self.check_names([name])
        per_place = np.repeat(values, self.lengths) if len(values) == len(self.lengths) else values
        self.columns[name] = torch.from_numpy(np.ascontiguousarray(per_place, np.float32))

    def check_names(self, names: Sequence[str]) -> None:
        """Raise if a field of the config has one of the names."""
        for name in {field.name for field in self.settings.fields}.intersection(names):
            rule = "must not be named like a field of gear.fields"
            raise FieldError(f"column {name!r}", rule, None, "choose another name, or leave the field out")

    def write(self, column: torch.Tensor, micro: MicroBatch, values: torch.Tensor) -> None:
        """Write values of this rank's places of a pack, [rows of this rank], to a column, [num_tokens]."""
        shape, given = micro.pack_shape, values.detach().to("cpu", torch.float32)
        begins = np.maximum(shape.first - shape.starts, 0)  # this rank's first place of each trajectory
        whole, at = self.starts[micro.index.numpy()], 0
        to = whole + begins if shape.prefixes is None else whole + shape.prefixes.steps
        for start, size in zip(to.tolist(), shape.sizes.tolist(), strict=False):  # padding is the last size
            column[start : start + size] = given[at : at + size]
            at += size
        if shape.prefixes is not None:
            for start, steps, leader in zip(whole, *shape.prefixes, strict=True):
                column[start : start + steps] = column[whole[leader] : whole[leader] + steps]


def check_tokens(pack: PackConfig, lengths: np.ndarray, tokens: int | None) -> None:
    """Raise ConfigError unless micro batches of so many steps hold the longest trajectory."""
    most = pack.tokens if tokens is None else arguments.count("tokens", tokens)
    multiple, longest = pack.pad.multiple, int(lengths.max(initial=1))
    if most // multiple * multiple < longest:
        rule = f"must hold the longest trajectory ({longest} steps) in multiples of {multiple}"
        raise ConfigError("forward: tokens", rule, most, f"at least {-(-longest // multiple) * multiple}")


class PlannedPacks:
    """The packs of all replicas (ranks that train on different samples): rows and costs of each. Pure."""

    def __init__(
        self, lengths: np.ndarray, pack: PackConfig, replicas: int, ops: Ops, prefixes: Prefixes | None = None
    ) -> None:
        (linear, quadratic), most = pack.cost, pack.max_trajectories or MOST_PACK_TOKENS
        budget = PackBudget(pack.room, linear, quadratic, pack.pad.multiple, most)
        width = pack.plan_width or replicas
        self.prefixes, places = prefixes, lengths
        squares = np.square(lengths.astype(np.float64))
        if prefixes is None:
            plan = plan_packs(torch.from_numpy(lengths.copy()), budget, width, ops)
        else:  # whose steps attend to each other once
            places = lengths - prefixes.steps
            squares -= np.square(prefixes.steps.astype(np.float64))
            bundle = np.unique(prefixes.leader, return_inverse=True)[1].reshape(-1)
            sizes = np.bincount(bundle, places).astype(np.int64)  # exact: below 2^53
            plan = plan_packs(torch.from_numpy(sizes), budget, width, ops)
            plan = replace(plan, micro=plan.micro[bundle], rank=plan.rank[bundle])
        self.plan = plan
        #: Packs of a replica in each micro step: with a plan for more ranks it trains several in turn.
        self.per_rank = width // replicas
        size, shape = plan.num_micro * width, (plan.num_micro, width)
        # For a width of 2, micro steps [0, 1] and ranks [1, 0] are the packs [1, 2].
        bins = plan.micro * width + plan.rank
        costs = np.bincount(bins, linear * places + quadratic * squares, size)
        #: [K, replicas, per_rank], float64.
        self.costs = costs.reshape(plan.num_micro, replicas, self.per_rank)
        tokens_of = np.bincount(bins, places, size).astype(np.int64)  # exact: below 2^53
        #: N of a pack without trajectories.
        self._least = budget.tokens if pack.pad.to == "budget" else budget.multiple
        rows = np.maximum(-(-tokens_of // budget.multiple).reshape(shape) * budget.multiple, self._least)
        if pack.pad.to == "step":
            rows = np.broadcast_to(rows.max(axis=1, keepdims=True), shape)
        #: N of every pack, padding included: without trajectories the least. [K, width], int64.
        self.rows: np.ndarray = rows

    def extend(self, longest: Sequence[Sequence[int]], pack: PackConfig) -> None:
        """Add packs without trajectories at the end, for as many micro steps as any plan has.

        `longest` has the largest N of each micro step, of the plan of each rank: of another node another one.
        With packs padded to the step, they are as long as there.
        """
        most = np.array([max(rows) for rows in zip_longest(*longest, fillvalue=0)], np.int64)
        missing, num_micro = len(most) - self.plan.num_micro, len(most)
        if missing:
            self.plan = replace(self.plan, num_micro=num_micro)
            self.rows = np.pad(self.rows, ((0, missing), (0, 0)), constant_values=self._least)
        if pack.pad.to == "step":
            self.rows = np.broadcast_to(most[:, None], self.rows.shape)

    def sort(self) -> np.ndarray:
        """Renumber the trajectories by rank and micro step, so that packs are ranges; return their order."""
        plan = self.plan
        packs = plan.rank * plan.num_micro + plan.micro
        least = np.min_scalar_type(plan.width * plan.num_micro)  # of 16 bits: sorted by radix
        order = np.argsort(packs.astype(least), kind="stable")
        self.plan = replace(plan, micro=plan.micro[order], rank=plan.rank[order])
        return order

    @property
    def imbalance(self) -> float:
        """Cost of the slowest rank in each micro step, summed, / the mean over ranks, minus 1."""
        total, replicas = self.costs.sum(), self.costs.shape[1]
        return float(self.costs.max(axis=1).sum() * replicas / total - 1) if total else 0.0


class PackSequence:
    """The packs of trajectories, `index`, whose loss is one mean; equally many on every rank."""

    def __init__(
        self, data: RolloutData, index: np.ndarray, tokens: int | None, planned: PlannedPacks | None = None
    ) -> None:
        place, is_sorted = data.settings.place, planned is not None
        self.planned = planned = planned or self._plan(data, index, tokens)
        first, end = place.data_rank * planned.per_rank, (place.data_rank + 1) * planned.per_rank
        packs, prefixes = [planned.plan.packs(rank) for rank in range(first, end)], planned.prefixes
        self.data, self.index = data, index
        #: The replica that trains each of the trajectories. [n], int64.
        self.replica = planned.plan.rank // planned.per_rank
        chosen = [own[micro] for micro in range(planned.plan.num_micro) for own in packs]
        #: The trajectories of each of this rank's packs.
        self.packs = [index[pack] for pack in chosen]
        #: The same; of a sorted plan as slices, which copy nothing.
        self.at: list[Any] = self.packs
        if is_sorted:
            self.at = [slice(own[0], own[-1] + 1) if len(own) else slice(0) for own in self.packs]
        self.shapes, every = list[PackShape](), planned.rows[:, first:end].reshape(-1).tolist()
        for pack, at, rows in zip(chosen, self.at, every, strict=True):
            part, shared = rows // place.sequence_world, None if prefixes is None else prefixes.of(pack)
            own = place.sequence_rank * part
            self.shapes.append(PackShape(data.lengths[at], rows, own, own + part, shared))
        num_tokens = sum(shape.num_tokens for shape in self.shapes)
        #: Part of this rank's places that hold a step, and tokens that all ranks save by prefixes.
        self.fill_fraction = num_tokens / max(sum(shape.rows for shape in self.shapes), 1)
        self.shared_tokens = 0 if prefixes is None else int(prefixes.steps.sum())

    @staticmethod
    def _plan(data: RolloutData, index: np.ndarray, tokens: int | None) -> PlannedPacks:
        """Plan the packs; where prompts are shared, by as many members of a group at once as cost least."""
        pack, lengths = data.settings.pack, data.lengths[index]
        pack = pack.model_copy(update={"tokens": tokens or pack.tokens})
        planned = partial(PlannedPacks, lengths, pack, data.settings.place.data_world, data.ops)
        if data.prompts is None or not len(index):
            return planned()
        prompts = data.prompts.of(index)
        size = int(np.bincount(prompts.leader).max())
        sizes = [-(-size // 2**k) for k in range((size - 1).bit_length() + 1)]  # of 5: [5, 3, 2, 1]
        plans = [planned(prompts.bundled(lengths, size, pack.room)) for size in sizes]
        is_full = pack.pad.to == "budget"  # then all packs cost as much
        costs = [(is_full * plan.plan.num_micro, plan.costs.max(axis=(1, 2)).sum()) for plan in plans]
        return plans[costs.index(min(costs))]

    @cached_property
    def loss(self) -> tuple[int, np.ndarray]:
        """Loss tokens of all ranks, and the weight of those of each trajectory, [n], float64. Collective."""
        data, index, weights = self.data, self.index, np.zeros(len(self.data.lengths))
        how, counts = data.settings.loss, data.counts[index]
        # A trajectory may be in the batch several times, but each of its samples is another index.
        weights[index] = loss_weights(how, counts, data.sequence[index], data.item[index])
        return int(counts.sum()), weights

    def __len__(self) -> int:
        return len(self.packs)
