"""Columns of a rollout batch: what all its parts share, its rows in each table, and its columns.

The loader makes one `RolloutContext` for a rank and passes it down. A rollout batch has a
`TableRows` for each table, and one `RolloutColumns` over them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise, product
from typing import Any, TypeVar

import numpy as np
import torch

from deepspeed_gear.batching.loss_weights import GradientDivisor
from deepspeed_gear.batching.micro_batch import ForwardPass, MicroBatch
from deepspeed_gear.batching.pack_rows import (
    PackGatherer,
    PackShape,
    RolloutTrajectories,
    SharedRows,
    TableTrajectories,
    item_numbers,
    steps_of,
)
from deepspeed_gear.batching.prefixes import CommonPrefixes
from deepspeed_gear.config import ResolvedField
from deepspeed_gear.config.options import LossConfig, PackConfig, RolloutConfig
from deepspeed_gear.distributed.batch_barrier import BatchBarrier
from deepspeed_gear.distributed.control_plane import ControlPlane
from deepspeed_gear.distributed.sequence_sum import SequenceSum
from deepspeed_gear.distributed.topology import RankCoordinates
from deepspeed_gear.errors import ConfigError, DataError, FieldError
from deepspeed_gear.ops.constants import SHARD_BITS
from deepspeed_gear.ops.records import GatherSpec, Resolution, Source, lower
from deepspeed_gear.replay.builder import SpreadTrajectories
from deepspeed_gear.replay.log_warnings import EqualRewardsWarning, LossWarning
from deepspeed_gear.replay.metrics import Metrics
from deepspeed_gear.row_exchange.trajectory_places import Moves, TrajectoryPlaces
from deepspeed_gear.schema import Column, Schema
from deepspeed_gear.store.records import SlotRetention
from deepspeed_gear.store.table import Table

# Gathered with the fields of a pack, and returned as `targets` and `loss_mask` of a micro batch.
TARGETS = "\0targets"
MASK = "\0mask"
READ = "the columns of a rollout batch that are read"  # what ranks compare, in errors
# The narrowed loss mask among the saved columns of a rollout batch.
NARROWED = "gear.loss_mask"
StepObserver = Callable[[Any], None]  # takes a TrainStep
T = TypeVar("T")
_STEPS = lower([GatherSpec(Source.STEPS)])


@dataclass(frozen=True)
class PackSettings:
    """Settings of this rank's packs: config, fields, and the rank's place in its replica."""

    pack: PackConfig
    loss: LossConfig
    size: RolloutConfig
    random_keys: tuple[int, int]  # seed and random key of the shuffled orders
    place: RankCoordinates
    device: torch.device
    schema: Schema  # of the first table; all have the fields of a pack
    fields: tuple[ResolvedField, ...]
    opaque: tuple[ResolvedField, ...] = ()
    ragged: tuple[ResolvedField, ...] = ()
    member: str | None = None  # column that names a group's members; None: each trajectory is one
    # Weight and mean of each table of a mixture; empty: there is one mean over all.
    table_losses: tuple[tuple[float, LossConfig], ...] = ()
    ranks: SequenceSum | None = None  # sum over the ranks of one sequence; None: there is one

    @cached_property
    def field_by_role(self) -> dict[str | None, str]:
        """The first field of a column of each role: `field_by_role.get("token")`."""
        fields = reversed(self.fields)  # of fields of one role the first one is set last
        return {one.column.role: one.name for one in fields if one.column is not None}

    @property
    def predicts(self) -> bool:
        """Whether columns stand where the token is predicted."""
        return self.schema.role("token") is not None

    def gathered(self) -> list[ResolvedField]:
        """Return the fields that packs are gathered with: those of a micro batch, and targets."""
        gathered = []
        for one in self.fields:
            column = one.column
            if column is not None and column.role == "token" and one.dtype == column.dtype:
                one = replace(
                    one, dtype="int64"
                )  # the config names no type; all embeddings take it
            gathered.append(one)
        token = self.schema.role("token")
        if token is not None:
            gathered.append(ResolvedField(TARGETS, token, offset=1, dtype="int64"))
        return gathered


@dataclass(frozen=True)
class RolloutContext:
    """Context of a rank's rollout batches. Its loader makes it and passes it down."""

    settings: PackSettings
    control_plane: ControlPlane
    barrier: BatchBarrier | None  # None: ranks do not train together
    is_spread: bool  # nodes exchange rows, so reading values of all trajectories is collective
    divisor: GradientDivisor
    metrics: Metrics = field(default_factory=Metrics)
    loss_warning: LossWarning | None = None  # of rank 0
    rewards_warning: EqualRewardsWarning | None = None  # of rank 0
    #: Functions of an engine, called with each train step before its first micro batch. An error
    #: is raised on all ranks.
    observers: list[StepObserver] = field(default_factory=list)

    def agree(self, action: Callable[[], T]) -> T:
        """Run an action on all ranks and pass a barrier; return the result of this rank's action.

        An error of one rank is raised on all. No rank returns before all have run the action: so
        rows that it moves are not read before they are there, nor overwritten while they are read.
        A rank that neither trains with others nor exchanges rows just runs the action.
        """
        if self.barrier is not None:
            return self.barrier.agree(action)
        if self.is_spread:
            return self.control_plane.attempt("a rollout batch", action)
        return action()

    def check_same(
        self, what: str, value: object, check: Callable[[], None] = lambda: None
    ) -> None:
        """Raise PeerError unless all ranks give the same value, where nodes exchange rows.

        Args:
            what: Name of the value in errors.
            value: The value of this rank.
            check: Called first; its error is raised on all ranks.
        """
        if self.is_spread:
            self.agree(check)
            self.control_plane.compare(what, value)


class TableRows:
    """Rows of a rollout batch in one table: where they lie, and values read from them.

    Where nodes exchange rows, reading is collective: one rank of each node contributes the values
    of the trajectories that the node holds.
    """

    def __init__(
        self,
        gatherer: PackGatherer,
        table: Table,
        trajectories: TableTrajectories,
        context: RolloutContext,
        spread: SpreadTrajectories | None = None,
        contributes: bool = True,
    ) -> None:
        self.gatherer = gatherer
        self.table = table
        self.trajectories = trajectories
        self._spread = spread
        self._context = context
        #: Resolutions that rows are gathered by. [n, 8]. Those of other nodes' rows are set when
        #: the rows arrive.
        self.rows = torch.from_numpy(trajectories.resolutions.numpy().copy())
        # The trajectories whose values this rank contributes. [m], int64.
        self._own = np.arange(len(self.rows))
        #: Those of which this rank makes copies, for its node. [k], int64.
        self.copied = self._own[: len(self.rows) if contributes else 0]
        #: The prompts that other trajectories hold; None: each holds all of its steps.
        self.shared: SharedRows | None = None
        # Whole trajectories have no anchor: the word holds the number of first steps whose rows
        # another trajectory of the group has. A trajectory may be cut within them.
        shared = self.rows[:, [Resolution.ANCHOR, Resolution.NUM_STEPS]].numpy().min(axis=1)
        shared *= table.shared_prompts is not None
        if shared.any():
            item = item_numbers(self.rows[:, Resolution.SAMPLE_NUMBER].numpy())
            whole = np.flatnonzero(shared == 0)[::-1]
            first = np.zeros(int(item[-1]) + 1, np.int64)
            first[item[whole]] = whole
            # The trajectory of each one's group that holds the prompt: the first one, which shares
            # none. For the items [0, 0, 0, 1, 1] of which [0, 2, 3] share none, the holder of each
            # is [0, 0, 0, 3, 3].
            self._holders = first[item]
            self.shared = SharedRows(shared, np.zeros_like(shared))
            self._locate()
        if spread is not None:
            origins = trajectories.origins.numpy()
            routes = spread.plan
            shard = table.spec.shard
            assert shard is not None
            self._own = np.nonzero((origins >> SHARD_BITS == shard.index) & contributes)[0]
            self.copied = self._own
            # Which nodes have the rows of which trajectories. Every rank keeps the same account.
            self._places = TrajectoryPlaces(
                origins,
                np.maximum(self.rows[:, Resolution.NUM_STEPS].numpy() - shared, 1),
                routes.final_row,
                routes.num_nodes,
                routes.index,
                copies_own=not table.gathers_own_rows,
            )
        self._slots: np.ndarray = trajectories.resolutions.numpy()[self._own, Resolution.SLOT]

    def _locate(self) -> None:
        """Set the first rows of shared prompts, which may have moved."""
        if self.shared is not None:
            self.shared.first_row[:] = self.rows.numpy()[self._holders, Resolution.FIRST_ROW]

    def missing(self, index: np.ndarray, replica: np.ndarray) -> Moves | None:
        """Return the rows that nodes need and lack; None, on all ranks alike: there are none.

        Args:
            index: The trajectories that are trained, of this table. [m], int64.
            replica: The replica that trains each of them. [m], int64.
        """
        if self._spread is None:
            return None
        replica_nodes = self._spread.plan.replica_nodes
        needed = np.zeros((len(replica_nodes), len(self.rows)), bool)  # [S, n]
        needed[:, index] = replica_nodes[:, replica]
        if self.shared is not None:  # also the trajectories that hold their prompts
            for of_node in needed:
                of_node[self._holders[of_node & (self.shared.steps > 0)]] = True
        return self._places.move(needed)

    def send(self, moves: Moves) -> Callable[[], None] | None:
        """Exchange missing rows with the other nodes; return what adds their media to the store.

        Collective over the node leaders; None: another rank of this node sends.
        """
        assert self._spread is not None
        return None if self._spread.exchange is None else self._spread.exchange.send(moves)

    def arrived(self, moves: Moves) -> None:
        """Record where rows lie that all nodes have received."""
        assert self._spread is not None
        self._places.moved(moves)
        room = self._spread.room
        first_row, first_slot = self.table.first_arrival
        rows = self.rows.numpy()
        rows[moves.samples, Resolution.FIRST_ROW] = first_row + room.first_row + moves.first_row
        rows[moves.samples, Resolution.SLOT] = first_slot + room.first_slot + moves.slot
        self._locate()

    def _join(self, values: np.ndarray) -> np.ndarray:
        """Sum the bytes of arrays over all ranks, of which one has each byte. Collective."""
        flat = torch.from_numpy(np.ascontiguousarray(values).reshape(-1).view(np.uint8))
        return (
            self._context.control_plane.sum(flat).numpy().view(values.dtype).reshape(values.shape)
        )

    def _joined(self, values: np.ndarray) -> np.ndarray:
        """Join the values that all ranks contribute. [m, ...] -> [n, ...]. Collective."""
        if self._spread is None:
            return values
        whole = np.zeros((len(self.rows), *values.shape[1:]), values.dtype)
        whole[self._own] = values
        return self._join(whole)

    def values(self, name: str) -> np.ndarray:
        """Return a per-trajectory column's stored values, bfloat16 as float32. [n, *shape]."""
        self.check_filled(name)
        return self._joined(self.table.values(name, self._slots))

    def steps(self, name: str, offset: int, as_flags: bool = False) -> np.ndarray:
        """Return a column's values of all steps, trajectory by trajectory. [sum of their steps].

        Args:
            name: Name of the column.
            offset: Step t has the value of step t + offset.
            as_flags: Whether to return which values are not 0, bool; else float64.
        """
        self.check_filled(name)
        column = self.table.schema[name]
        lengths = self.trajectories.resolutions[:, Resolution.NUM_STEPS].numpy()
        dtype = torch.bool if as_flags and column.dtype == "bool" else torch.float64
        resolutions = self.rows
        if self._spread is not None:  # in `rows` own ones may lie where their copies are
            resolutions = self.trajectories.resolutions[torch.from_numpy(self._own)]
        shared = None if self.shared is None else self.shared.of(self._own)
        values = self.table.tensor(name)
        own = steps_of(self.table.ops, values, resolutions, offset, column.rows, dtype, shared)
        own = own.astype(bool, copy=False) if as_flags else own
        if self._spread is None:
            return own
        is_own = np.zeros(len(lengths), bool)
        is_own[self._own] = True
        steps = np.zeros(int(lengths.sum()), own.dtype)
        # For lengths [2, 3] of which the second is own, the mask is [0, 0, 1, 1, 1].
        steps[np.repeat(is_own, lengths)] = own
        if not as_flags:
            return self._join(steps)
        return np.unpackbits(self._join(np.packbits(steps)), count=len(steps)).astype(bool)

    def sorted_prefixes(self, rows: np.ndarray, items: np.ndarray) -> np.ndarray:
        """Sort the trajectories of each item by their tokens and media, and compare neighbours.

        Collective over nodes; the trajectories of an item are on one node.

        Args:
            rows: Number of first rows that are compared, at least 1. [n], int64.
            items: Item of each trajectory. [n], int64.
        Returns:
            By trajectory, its place in the order of its item, and how many of its first rows are
            equal to those of the one before it there: 0 for the first one. [n, 2], int64.
        Cost: two copies of the rows, of 4 bytes for int32 tokens without media; the n trajectories
            of an item are compared n log n times.
        """
        own = self._own
        items = items[own]
        rows = rows[own]
        resolutions = self.trajectories.resolutions[torch.from_numpy(own)]
        resolutions[:, Resolution.NUM_STEPS] = torch.from_numpy(rows)
        shared = None if self.shared is None else self.shared.of(own)
        names = [c.name for c in self.table.schema if c.role in ("token", "media")]
        tensors = [self.table.tensor(name) for name in names]
        is_narrow = all(one.dtype == torch.int32 for one in tensors)
        dtype = torch.int32 if is_narrow else torch.int64
        columns = [
            steps_of(self.table.ops, one, resolutions, 0, "T", dtype, shared) for one in tensors
        ]
        # Token and media of a row side by side: sequences of bytes have the same common prefixes.
        values = columns[0] if len(columns) == 1 else np.stack(columns, axis=1).reshape(-1)
        ends = np.cumsum(rows) * len(columns)
        parts = np.split(values, ends)[:-1]
        keys = [(item, part.tobytes()) for item, part in zip(items.tolist(), parts, strict=True)]
        order = sorted(range(len(keys)), key=keys.__getitem__)
        found = np.zeros((len(keys), 2), np.int64)
        for before, after in pairwise(order):
            if items[before] == items[after]:
                most = min(len(parts[before]), len(parts[after]))
                differs = parts[before][:most] != parts[after][:most]
                equal = int(differs.argmax()) if differs.any() else most
                found[after] = (found[before, 0] + 1, equal // len(columns))
        return self._joined(found)

    def check_filled(self, name: str) -> None:
        """Raise a DataError if a trajectory lacks a late column. Collective over nodes."""
        bits = self.table.schema.late_bits([name])
        if not bits:
            return
        present = self.table.views["retention"][self._slots, SlotRetention.PRESENT] & bits
        absent = self._joined(np.asarray(present == 0))
        if absent.any():
            at = f"table {self.table.spec.name}: late column {name}"
            remedy = (
                "name it in gear.fields or in needs of the table's group: others are not "
                "sampled then"
            )
            value = f"absent in {int(absent.sum())} of {len(absent)} trajectories"
            raise DataError(at, "must be filled before it is read", value, remedy)


class RolloutColumns:
    """Columns of a rollout batch: stored ones, its loss mask, and those that the program fills.

    A selection pins the rows, which stay until the rollout batch ends. Reading stored columns is
    collective over nodes.

    Args:
        tables: Rows of the rollout batch in each table.
        context: Context of the rank's rollout batches.
        has_neighbours: Whether the trajectories of an item are side by side.
    """

    def __init__(
        self,
        tables: Sequence[TableRows],
        context: RolloutContext,
        has_neighbours: bool = True,
    ) -> None:
        self.tables = tables
        self.context = context
        self.trajectories = RolloutTrajectories.of(
            [rows.trajectories for rows in tables], has_neighbours
        )
        #: Columns of this rollout batch only, at predicting places. [num_tokens] each.
        self.filled: dict[str, torch.Tensor] = {}
        #: The loss mask after `narrow`; None: the stored one. [num_tokens], bool. It is replaced,
        #: never written to, so that packs keep the one that they are weighed with.
        self.narrowed: np.ndarray | None = None

    def reading(self, at: Any) -> AbstractContextManager[np.ndarray | None]:
        """Return a context in which rows of trajectories stay in place.

        Args:
            at: The trajectories: indices or a slice.
        Returns:
            The context gives which of them still have rows, [n], bool; None: all have.
        """
        return nullcontext()

    @property
    def mask(self) -> np.ndarray:
        """Mask of the steps that count in the loss, at predicting places. [num_tokens], bool.

        Collective over nodes.
        """
        return self.stored_mask if self.narrowed is None else self.narrowed

    @property
    def num_rejected(self) -> int:
        """Number of loss tokens of the whole batch that `narrow` has taken out."""
        return 0 if self.narrowed is None else int(self.stored_mask.sum() - self.narrowed.sum())

    def narrow(self, keep: np.ndarray) -> None:
        """Take places out of the loss mask; packs stay as they are planned. Collective over nodes.

        Args:
            keep: The places that stay. [num_tokens], bool.
        """
        self.narrowed = self.mask & keep
        self.__dict__.pop("counts", None)  # cached, of the mask before

    def saved(self) -> dict[str, torch.Tensor]:
        """Return what a checkpoint has of these columns, by name. [num_tokens] each."""
        if self.narrowed is None:
            return dict(self.filled)
        return {**self.filled, NARROWED: torch.from_numpy(self.narrowed)}

    def restore(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Set the columns that a checkpoint has. Collective over nodes."""
        self.filled.update({name: column for name, column in saved.items() if name != NARROWED})
        if NARROWED in saved:
            self.narrow(saved[NARROWED].numpy())

    @cached_property
    def stored_mask(self) -> np.ndarray:
        """The loss mask of the tables, at predicting places. [num_tokens], bool."""
        with self.reading(slice(None)) as has_rows:
            mask = self._read_mask()
        if has_rows is not None:  # what was evicted does not count
            mask = mask & has_rows.repeat(self.trajectories.lengths)
        return mask

    def _read_mask(self) -> np.ndarray:
        predicts = self.context.settings.predicts
        schema = self.context.settings.schema
        tokens = schema.role("token")
        flags = schema.role("loss_mask")
        if tokens is not None:
            for rows in self.tables:
                rows.check_filled(tokens.name)
        if flags is not None:
            own = [rows.steps(flags.name, int(predicts), as_flags=True) for rows in self.tables]
            return own[0] if len(own) == 1 else np.concatenate(own)
        mask = np.ones(self.trajectories.num_tokens, bool)
        if predicts:
            mask[self.trajectories.starts + self.trajectories.lengths - 1] = False
        return mask

    @cached_property
    def counts(self) -> np.ndarray:
        """Number of loss tokens of each trajectory. [n], int64."""
        if not len(self.trajectories):
            return np.zeros(0, np.int64)
        flags = self.mask.view(np.uint8)
        return np.add.reduceat(flags, self.trajectories.starts, dtype=np.int32).astype(np.int64)

    @cached_property
    def common_prefixes(self) -> CommonPrefixes | None:
        """First steps that the trajectories of an item have in common.

        A trajectory may share its steps before the first loss place. None: prefixes are not shared.
        A narrowed loss mask changes nothing. Collective over nodes.
        """
        token = self.context.settings.schema.role("token")
        if (
            self.context.settings.pack.prefix == "own"
            or token is None
            or not len(self.trajectories)
        ):
            return None
        trajectories = self.trajectories
        item = trajectories.item
        actions = np.append(self.stored_mask.nonzero()[0], trajectories.num_tokens)
        first_action = actions[np.searchsorted(actions, trajectories.starts)]
        bound = np.minimum(first_action - trajectories.starts, trajectories.lengths - 1)
        # Nothing after the largest bound of an item, and the token that is predicted there, counts.
        most = np.zeros(trajectories.num_items, np.int64)
        np.maximum.at(most, item, bound)
        compared = np.minimum(trajectories.lengths, most[item] + 1)
        found = np.zeros((len(trajectories), 2), np.int64)
        for number, rows in enumerate(self.tables):
            own = np.nonzero(trajectories.source == number)[0]
            found[own] = rows.sorted_prefixes(compared[own], item[own])
        order = np.lexsort((found[:, 0], item))
        return CommonPrefixes(order, found[order, 1], bound)

    @cached_property
    def sequence(self) -> np.ndarray:
        """The sequence of each trajectory for the loss: itself, or its member. [n], int64."""
        member = self.context.settings.member
        if self.context.settings.loss.by == "trajectory" or member is None:
            return np.arange(len(self.trajectories))
        members = self.values_or_zero(member).astype(np.int64)
        pairs = np.stack([self.trajectories.item, members], axis=1)
        return np.unique(pairs, axis=0, return_inverse=True)[1].reshape(-1)

    def check_values(self, *names: str, where: str | None = None) -> None:
        """Raise ConfigError unless every table has per-trajectory columns.

        Args:
            *names: The columns.
            where: Only tables with this column must have them, if there is such a table.
        """
        tables = [rows for rows in self.tables if where is None or where in rows.table.schema]
        for name, rows in product(names, tables or self.tables):
            schema = rows.table.schema
            single = [c.name for c in schema.trajectory_columns if not c.is_ragged]
            if name not in single:
                known = ", ".join(single) or "none"
                rule = (
                    f"must be a column of table {rows.table.spec.name} with one value per "
                    f"trajectory"
                )
                remedy = f"there are: {known}"
                if name in schema:
                    remedy = f"rollout.column({name!r}) has one number per step; {remedy}"
                raise ConfigError(f"column {name!r}", rule, None, remedy)

    def values(self, name: str) -> np.ndarray:
        """Return a per-trajectory column's stored values. [n, *shape]. Collective over nodes."""
        self.check_values(name)
        return np.concatenate([rows.values(name) for rows in self.tables])

    def values_or_zero(self, name: str) -> np.ndarray:
        """Return as `values`, with 0 in tables without the column; one of them has it."""
        counts = [len(rows.rows) for rows in self.tables]
        known = [rows.values(name) if name in rows.table.schema else None for rows in self.tables]
        like = next(values for values in known if values is not None)
        return np.concatenate(
            [
                np.zeros((count, *like.shape[1:]), like.dtype) if values is None else values
                for count, values in zip(counts, known, strict=True)
            ]
        )

    def has_column(self, name: str) -> np.ndarray:
        """Return which trajectories are of tables with a stored column. [n], bool."""
        has = np.array([name in rows.table.schema for rows in self.tables])
        return np.asarray(has[self.trajectories.source])

    def step_column(self, name: str) -> tuple[Column, int]:
        """Return the column of numbers per step that micro batches have by a name; its offset.

        Raises:
            ConfigError: There is no such column.
        """
        settings = self.context.settings
        field = next((field for field in settings.fields if field.name == name), None)
        column = None if field is None else field.column
        if column is None and all(name in rows.table.schema for rows in self.tables):
            column = settings.schema[name]
        if column is None or column.rows == "1" or column.shape:
            rule = "must be filled or set before, or be a column with one number per step"
            raise ConfigError(f"column {name!r}", rule, None, self._other_columns(name))
        if field is not None:
            return column, int(field.offset)
        return column, int(settings.predicts and column.rows == "T")

    def _other_columns(self, name: str) -> str:
        """Return the remedy for a name that is no column of numbers per step."""
        schemas = [rows.table.schema for rows in self.tables]
        if all(name in schema and schema[name].rows == "1" for schema in schemas):
            return f"rollout.values({name!r}) has its value per trajectory"
        fields = [one.name for one in self.context.settings.fields]
        schema = self.context.settings.schema
        stored = [one.name for one in schema if one.rows != "1" and not one.shape]
        known = ", ".join(sorted({*fields, *stored, *self.filled}))
        remedy = f'fill it in rollout.forward("{name}"), or set it with rollout.set'
        return f"{remedy}; there are: {known}"

    def places(self, name: str, later: int = 0, admits_absent: bool = False) -> np.ndarray:
        """Return a column's values at the places of micro batches. [num_tokens], float64.

        Collective over nodes.

        Args:
            name: A column that was filled or set, or a field or column with a number per step.
            later: Number of steps after the place.
            admits_absent: Whether tables may lack the column of a field with the option `absent`.
        Raises:
            ConfigError: There is no such column, or a table lacks it.
        """
        if name in self.filled:
            return self.filled[name].double().numpy()
        column, offset = self.step_column(name)
        absent = self.absent_value(name) if admits_absent else None
        parts = []
        for rows in self.tables:
            if column.name in rows.table.schema:
                parts.append(rows.steps(column.name, offset + later))
                continue
            if absent is None:
                rule = f"must be a column of table {rows.table.spec.name}, too, or be filled or set"
                raise ConfigError(f"column {name!r}", rule, None, "set it with rollout.set")
            num_steps = int(rows.rows[:, Resolution.NUM_STEPS].sum())
            parts.append(np.full(num_steps, float(absent)))
        return np.concatenate(parts)

    def absent_value(self, name: str) -> int | float | None:
        """Return a field's value in tables without its column; None: all tables must have it."""
        fields = self.context.settings.fields
        return next((field.absent for field in fields if field.name == name), None)

    def set_column(self, name: str, values: np.ndarray) -> None:
        """Set a column of this rollout batch.

        Args:
            name: Name of the column.
            values: One value per trajectory, [n], or per place, [num_tokens].
        """
        self.check_names([name])
        lengths = self.trajectories.lengths
        per_place = np.repeat(values, lengths) if len(values) == len(lengths) else values
        self.filled[name] = torch.from_numpy(np.ascontiguousarray(per_place, np.float32))

    def check_names(self, names: Sequence[str]) -> None:
        """Raise a FieldError if a field of the config has one of the names."""
        for name in {one.name for one in self.context.settings.fields}.intersection(names):
            rule = "must not be named like a field of gear.fields"
            raise FieldError(
                f"column {name!r}", rule, None, "choose another name, or leave the field out"
            )

    def packed(
        self, at: Any, shape: PackShape, loss_mask: np.ndarray | None
    ) -> dict[str, torch.Tensor]:
        """Gather the filled columns into a pack, and the loss mask if it is given.

        Args:
            at: The trajectories of the pack: indices or a slice.
            shape: Places of the trajectories in the pack.
            loss_mask: The loss mask of the whole rollout batch, where it is no field of the pack
                or is narrowed. [num_tokens], bool.
        Returns:
            Column (MASK for the loss mask) -> [1, rows].
        """
        rows = shape.end - shape.first
        buffers = dict(self.filled)
        if loss_mask is not None:
            buffers[MASK] = torch.from_numpy(loss_mask)
        outs = dict[str, torch.Tensor]()
        for name, buffer in buffers.items():
            array = np.empty((1, rows), buffer.numpy().dtype)
            array[:, shape.own_tokens :] = 0  # the padding: all other places are written below
            outs[name] = torch.from_numpy(array)
        if not len(shape.lengths):
            return outs
        # A column is one buffer, trajectory by trajectory: the first row of each is its start.
        first_rows = self.trajectories.resolutions.numpy()[at].copy()
        first_rows[:, Resolution.FIRST_ROW] = self.trajectories.starts[at]
        resolutions = torch.from_numpy(first_rows)
        none = [torch.empty(0)] * len(outs)
        self.tables[0].table.ops.pack_(
            list(outs.values()),
            list(buffers.values()),
            none,
            none,
            *shape.runs(resolutions),
            _STEPS * len(outs),
            [0.0] * len(outs),
            shape.first,
            rows,
        )
        return outs


class FilledColumns(ForwardPass):
    """Columns of a rollout batch that a forward pass fills; a rank has the values of its places."""

    def __init__(self, names: Sequence[str], columns: RolloutColumns) -> None:
        super().__init__(names)
        self._context = columns.context
        self._trajectories = columns.trajectories
        self._own = {name: torch.zeros(columns.trajectories.num_tokens) for name in names}

    def write(self, name: str, micro: MicroBatch, values: Any) -> None:
        column = self._own[name].numpy()  # NumPy copies a slice in a tenth of torch's time
        given = micro.flat(name, values).detach().to("cpu", torch.float32).numpy()
        shape = micro.pack_shape
        # This rank's first place within each trajectory: of a slice that begins at row 5, a
        # trajectory that starts at row 3 has place 2 first.
        begins = np.maximum(shape.first - shape.starts, 0)
        whole = self._trajectories.starts[micro.index.numpy()]
        to = whole + begins if shape.prefixes is None else whole + shape.prefixes.steps
        at = 0
        # Not strict: the last size is that of the padding.
        for start, size in zip(to.tolist(), shape.sizes.tolist(), strict=False):
            column[start : start + size] = given[at : at + size]
            at += size
        if shape.prefixes is not None:  # values of a prefix are those of its leader
            for start, steps, leader in zip(whole, *shape.prefixes, strict=True):
                column[start : start + steps] = column[whole[leader] : whole[leader] + steps]

    def of_all_ranks(self) -> dict[str, torch.Tensor]:
        """Return the whole columns, [num_tokens] each. Collective."""
        whole = dict[str, torch.Tensor]()
        for name, values in self._own.items():
            # Every place is filled on one replica; its tensor ranks have equal values, so only the
            # first of them adds to the sum.
            if self._context.settings.place.tensor_rank != 0:
                values.zero_()
            whole[name] = self._context.control_plane.sum(values)
        return whole
