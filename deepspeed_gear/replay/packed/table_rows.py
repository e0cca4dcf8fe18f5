"""Rows of a rollout batch in one table: where they lie, on which nodes, and values read there."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import torch

from deepspeed_gear.batching.pack_rows import (
    PackGatherer,
    SharedRows,
    TableTrajectories,
    item_numbers,
    steps_of,
)
from deepspeed_gear.errors import DataError
from deepspeed_gear.ops.constants import SHARD_BITS
from deepspeed_gear.ops.records import Resolution
from deepspeed_gear.replay.node_links import SpreadTrajectories
from deepspeed_gear.replay.packed.rollout_context import RolloutContext
from deepspeed_gear.row_exchange.trajectory_places import Moves, TrajectoryPlaces
from deepspeed_gear.store.records import SlotRetention
from deepspeed_gear.store.table import Table


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
            plan = spread.exchange_plan
            shard = table.spec.shard
            assert shard is not None
            self._own = np.nonzero((origins >> SHARD_BITS == shard.index) & contributes)[0]
            self.copied = self._own
            # Which nodes have the rows of which trajectories. Every rank keeps the same account.
            self._places = TrajectoryPlaces(
                origins,
                np.maximum(self.rows[:, Resolution.NUM_STEPS].numpy() - shared, 1),
                plan.final_row,
                plan.num_nodes,
                plan.index,
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
        replica_nodes = self._spread.exchange_plan.replica_nodes
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
