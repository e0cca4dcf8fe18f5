"""Columns of a rollout batch: its rows in each table, stored columns, and filled ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from itertools import product
from typing import Any, Protocol

import numpy as np
import torch

from deepspeed_gear.batching.micro_batch import MicroBatch
from deepspeed_gear.batching.pack_gather import PackGatherer, SharedRows, steps_of
from deepspeed_gear.batching.packing_plan import Prefixes
from deepspeed_gear.batching.rollout_trajectories import (
    RolloutTrajectories,
    TableTrajectories,
    item_numbers,
)
from deepspeed_gear.config.options import AdvantageConfig
from deepspeed_gear.errors import ConfigError, DataError, FieldError
from deepspeed_gear.ops.constants import SHARD_BITS
from deepspeed_gear.ops.records import Resolution
from deepspeed_gear.replay.builder import SpreadTrajectories
from deepspeed_gear.replay.rollout_context import RolloutContext
from deepspeed_gear.row_exchange.trajectory_places import Moves, TrajectoryPlaces
from deepspeed_gear.schema import Column
from deepspeed_gear.store.records import SlotRetention
from deepspeed_gear.store.table import Table


class RowAccess(Protocol):
    """Keeps rows of trajectories in place while they are read."""

    def reading(self, at: Any) -> AbstractContextManager[np.ndarray | None]:
        """Return a context in which the rows of some trajectories may be read.

        Args:
            at: The trajectories: indices or a slice.
        Returns:
            The context gives which of them still have rows, [n], bool; None: all have.
        """


class PinnedRows:
    """Access to rows that a selection pins: they stay until the rollout batch ends."""

    _none = nullcontext(None)

    def reading(self, at: Any) -> AbstractContextManager[np.ndarray | None]:
        return self._none


class TableRows:
    """The rows of a rollout batch in one table: where they lie, and values read from them.

    Where nodes exchange rows, one rank of each node contributes the values of the trajectories that
    the node holds, and reading is collective.
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
        #: Resolutions by which rows are gathered: rows of other nodes lie where `arrived` has put
        #: them.
        self.rows = torch.from_numpy(trajectories.resolutions.numpy().copy())
        # The trajectories whose values this rank contributes. [m], int64.
        self._own = np.arange(len(self.rows))
        #: Those of which this rank makes copies, for its node. [k], int64.
        self.copied = self._own[: len(self.rows) if contributes else 0]
        #: The prompts that other trajectories hold; None: each holds all of its steps.
        self.shared: SharedRows | None = None
        shared = self.rows[:, [Resolution.ANCHOR, Resolution.NUM_STEPS]].numpy().min(axis=1)
        shared *= table.shared_prompts is not None
        if shared.any():
            item = item_numbers(self.rows[:, Resolution.SAMPLE_NUMBER].numpy())
            holders = np.flatnonzero(shared == 0)
            first = np.zeros(int(item[-1]) + 1, np.int64)
            first[item[holders]] = holders
            # The trajectory of each one's group that holds the prompt. For the items [0, 0, 1, 1]
            # with holders 0 and 2, the holder of each is [0, 0, 2, 2].
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
        """Find the rows of shared prompts again, after rows have moved."""
        if self.shared is not None:
            self.shared.first_row[:] = self.rows.numpy()[self._holders, Resolution.FIRST_ROW]

    def missing(self, index: np.ndarray, replica: np.ndarray) -> Moves | None:
        """Return the rows that nodes need and lack; None: there are none, on all ranks alike.

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
        """Account for rows that all nodes have received."""
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
        found = np.zeros(int(lengths.sum()), own.dtype)
        # For lengths [2, 3] of which the second is own, the steps [0, 0, 1, 1, 1] are.
        found[np.repeat(is_own, lengths)] = own
        if not as_flags:
            return self._join(found)
        return np.unpackbits(self._join(np.packbits(found)), count=len(found)).astype(bool)

    def leaders(self, rows: np.ndarray, items: np.ndarray) -> np.ndarray:
        """Return for each trajectory the first one of its item that begins with the same prompt.

        A prompt is the same if it has as many rows, and equal tokens and media. Collective over
        nodes; the trajectories of an item are on one node.

        Args:
            rows: Number of first rows that make the prompt, at least 1. [n], int64.
            items: Item of each trajectory. [n], int64.
        Returns:
            [n], int64; a trajectory without an earlier equal one is its own leader.
        """
        own = self._own
        rows = rows[own]
        begins = np.cumsum(rows) - rows  # for rows [2, 3] begins is [0, 2]
        ops = self.table.ops
        given = (0, "T", torch.int64)
        resolutions = self.trajectories.resolutions[torch.from_numpy(own)]
        resolutions[:, Resolution.NUM_STEPS] = torch.from_numpy(rows)
        shared = SharedRows.none(len(own)) if self.shared is None else self.shared.of(own)
        known = [
            self.table.tensor(c.name) for c in self.table.schema if c.role in ("token", "media")
        ]
        tokens = np.array([steps_of(ops, column, resolutions, *given, shared) for column in known])
        factors = 2 * (np.arange(tokens.shape[1]) - begins.repeat(rows)) + 1
        sums = np.add.reduceat(tokens.sum(0) * factors * factors, begins)  # of equal tokens equal
        keys = items[own], rows, sums
        _, first, number = np.unique(
            np.stack(keys, axis=1), axis=0, return_index=True, return_inverse=True
        )
        leader = first[number.reshape(-1)]
        resolutions[:, Resolution.FIRST_ROW] = resolutions[
            torch.from_numpy(leader), Resolution.FIRST_ROW
        ]
        shared = shared.of(leader)
        others = np.array([steps_of(ops, column, resolutions, *given, shared) for column in known])
        is_equal = np.logical_and.reduceat((tokens == others).all(0), begins)
        return self._joined(own[np.where(is_equal, leader, np.arange(len(own)))])

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
    """The columns of a rollout batch: stored ones, its loss mask, and those that the program fills.

    Reading stored columns is collective over nodes.

    Args:
        tables: Rows of the rollout batch in each table.
        context: Context of the rank's rollout batches.
        access: Keeps rows in place while they are read; None: a selection pins them.
        has_neighbours: Whether the trajectories of an item are side by side.
    """

    def __init__(
        self,
        tables: Sequence[TableRows],
        context: RolloutContext,
        access: RowAccess | None = None,
        has_neighbours: bool = True,
    ) -> None:
        self.tables = tables
        self.context = context
        self.access: RowAccess = PinnedRows() if access is None else access
        self.trajectories = RolloutTrajectories.of(
            [rows.trajectories for rows in tables], has_neighbours
        )
        #: Columns of this rollout batch only, at predicting places. [num_tokens] each.
        self.filled: dict[str, torch.Tensor] = {}

    @cached_property
    def mask(self) -> np.ndarray:
        """Mask of the steps that count in the loss, at predicting places. [num_tokens], bool."""
        with self.access.reading(slice(None)) as has_rows:
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
    def prompts(self) -> Prefixes | None:
        """Prompt of each trajectory: its steps before the first loss place, and their leader.

        The leader is the first trajectory of its item with an equal prompt. None: prompts are not
        shared. Collective over nodes.
        """
        token = self.context.settings.schema.role("token")
        if (
            self.context.settings.pack.prefix == "own"
            or token is None
            or not len(self.trajectories)
        ):
            return None
        trajectories = self.trajectories
        actions = np.append(self.mask.nonzero()[0], trajectories.num_tokens)
        first_action = actions[np.searchsorted(actions, trajectories.starts)]
        shared = np.minimum(first_action - trajectories.starts, trajectories.lengths - 1)
        leaders = []
        for number, rows in enumerate(self.tables):
            own = np.nonzero(trajectories.source == number)[0]
            leaders.append(own[rows.leaders(shared[own] + 1, trajectories.item[own])])
        return Prefixes(shared, np.concatenate(leaders))

    @cached_property
    def sequence(self) -> np.ndarray:
        """The sequence of each trajectory for the loss: itself, or its member. [n], int64."""
        member = self.context.settings.member
        if self.context.settings.loss.by == "trajectory" or member is None:
            return np.arange(len(self.trajectories))
        pairs = np.stack([self.trajectories.item, self.values(member).astype(np.int64)], axis=1)
        return np.unique(pairs, axis=0, return_inverse=True)[1].reshape(-1)

    def check_values(self, *names: str) -> None:
        """Raise ConfigError unless every table has per-trajectory columns."""
        for name, rows in product(names, self.tables):
            schema = rows.table.schema
            if name not in schema or schema[name].rows != "1":
                known = ", ".join(column.name for column in schema.trajectory_columns) or "none"
                rule = (
                    f"must be a column of table {rows.table.spec.name} with one value per "
                    f"trajectory"
                )
                raise ConfigError(f"column {name!r}", rule, None, f"there are: {known}")

    def values(self, name: str) -> np.ndarray:
        """Return a per-trajectory column's stored values. [n, *shape]. Collective over nodes."""
        self.check_values(name)
        return np.concatenate([rows.values(name) for rows in self.tables])

    def _column(self, name: str) -> tuple[Column, int]:
        """Return the column of numbers per step that micro batches have by a name; its offset."""
        fields = {field.name: field for field in self.context.settings.fields}
        column = fields[name].column if name in fields else None
        if column is None and all(name in rows.table.schema for rows in self.tables):
            column = self.context.settings.schema[name]
        if column is None or column.rows == "1" or column.shape:
            rule = "must be filled or set before, or be a column with one number per step"
            raise ConfigError(
                f"column {name!r}", rule, None, f"filled: {', '.join(self.filled) or 'none'}"
            )
        follows = int(self.context.settings.predicts and column.rows == "T")
        return column, int(fields[name].offset) if name in fields else follows

    def places(self, name: str, later: int = 0) -> np.ndarray:
        """Return a column's values at the places of micro batches. [num_tokens], float64.

        Collective over nodes.

        Args:
            name: A column of this rollout batch, or a field or column with a number per step.
            later: Number of steps after the place.
        """
        if name in self.filled:
            return self.filled[name].double().numpy()
        column, offset = self._column(name)
        return np.concatenate([rows.steps(column.name, offset + later) for rows in self.tables])

    def estimate(self, options: AdvantageConfig, reward: str) -> np.ndarray:
        """Estimate advantages and value targets by the op `advantages_`. [2, num_tokens], float32.

        A place of the loss mask is an action, the others take no time: after an action comes the
        next one of the trajectory, or its end; a reward at another place is added to that of the
        action before it. Collective over nodes.

        Raises:
            ConfigError: There is no such column.
            DataError: A late column is absent, or a trajectory that was not terminated has no value
                after it.
        """
        trajectories = self.trajectories
        found = np.zeros((2, trajectories.num_tokens), np.float32)
        rewards = self._rewards(reward)
        value = self.places(options.value)
        ends = self._ends()
        after = self._values_after(options, value, ends)
        actions = self.mask.nonzero()[0]
        names = options.log_prob, options.behaviour_log_prob
        logs = [None if name is None else self.places(name)[actions] for name in names]
        if not len(actions):
            return found
        owner = np.repeat(np.arange(len(trajectories)), trajectories.lengths)
        of = owner[actions]
        is_last = np.append(of[1:] != of[:-1], True)
        latest = np.cumsum(self.mask) - 1  # for the mask [0, 1, 0, 1] the actions [-1, 0, 0, 1]
        follows = (latest >= 0) & (of[latest] == owner)
        summed = np.bincount(latest[follows], rewards[follows], len(actions))
        last = trajectories.starts + trajectories.lengths - 1
        following = np.where(is_last, after[last[of]], np.roll(value[actions], -1))
        given = [summed, value[actions], following, is_last & ends[of], is_last, is_last | True]
        inputs = [None if x is None else torch.from_numpy(x)[None] for x in (*given, *logs)]
        outs = torch.zeros(2, 1, len(actions))
        self.tables[0].table.ops.advantages_(*outs, *inputs, list(options.factors))
        found[:, actions] = outs[:, 0]
        return found

    def _rewards(self, name: str) -> np.ndarray:
        """Return the reward of each place; a trajectory's reward is at its last. [num_tokens]."""
        schema = self.context.settings.schema
        trajectories = self.trajectories
        if name in self.filled or name not in schema or schema[name].rows != "1":
            return self.places(name)
        rewards: np.ndarray = np.zeros(trajectories.num_tokens)
        rewards[trajectories.starts + trajectories.lengths - 1] = self.values(name)
        return rewards

    def _ends(self) -> np.ndarray:
        """Return a mask of trajectories that were terminated: no value follows. [n], bool."""
        last = self.trajectories.starts + self.trajectories.lengths - 1
        ends = np.ones(len(last), bool)  # without flags trajectories are whole
        for role in ("truncated", "terminated"):
            flag = self.context.settings.schema.role(role)
            if flag is not None:
                flags = [rows.steps(flag.name, 0, as_flags=True) for rows in self.tables]
                ends = np.concatenate(flags)[last] == (role == "terminated")
        return np.asarray(ends & ~self.trajectories.is_cut)

    def _values_after(
        self, options: AdvantageConfig, value: np.ndarray, ends: np.ndarray
    ) -> np.ndarray:
        """Return the value of the state after each place; only last places are used. [num_tokens].

        Args:
            options: The columns of values.
            value: The value at each place. [num_tokens].
            ends: Mask of trajectories that need no value. [n], bool.
        """
        column = None
        offset = 0
        if options.value not in self.filled:
            column, offset = self._column(options.value)
        if options.next_value is not None:
            return self.places(options.next_value)
        if column is not None and column.rows == "T+1":
            return self.places(options.value, 1)
        if self.context.settings.predicts and offset == 0:
            return value  # the last place is that of the last token: its value follows all actions
        if ends.all():
            return np.zeros(len(value))
        rule = "must have the value of the state after trajectories that were not terminated"
        remedy = "name the column of the values after each step as next_value"
        raise DataError(
            f"column {options.value!r}", rule, f"{(~ends).sum()} of {len(ends)}", remedy
        )

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
        for name in {field.name for field in self.context.settings.fields}.intersection(names):
            rule = "must not be named like a field of gear.fields"
            raise FieldError(
                f"column {name!r}", rule, None, "choose another name, or leave the field out"
            )

    def write(self, column: torch.Tensor, micro: MicroBatch, values: torch.Tensor) -> None:
        """Write values of this rank's places of a pack to a column of the rollout batch.

        Args:
            column: The column. [num_tokens], float32.
            micro: The micro batch that was made of the pack.
            values: Values of this rank's places. [rows of this rank].
        """
        shape = micro.pack_shape
        given = values.detach().to("cpu", torch.float32)
        # This rank's first place within each trajectory: of a slice that begins at row 5, a
        # trajectory that starts at row 3 has place 2 first.
        begins = np.maximum(shape.first - shape.starts, 0)
        whole = self.trajectories.starts[micro.index.numpy()]
        to = whole + begins if shape.prefixes is None else whole + shape.prefixes.steps
        at = 0
        # Not strict: the last size is that of the padding.
        for start, size in zip(to.tolist(), shape.sizes.tolist(), strict=False):
            column[start : start + size] = given[at : at + size]
            at += size
        if shape.prefixes is not None:
            for start, steps, leader in zip(whole, *shape.prefixes, strict=True):
                column[start : start + steps] = column[whole[leader] : whole[leader] + steps]
