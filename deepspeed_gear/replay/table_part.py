"""The trajectories of a rollout batch in one table: records, rows, and values that nodes join."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from deepspeed_gear.batching.gather import PackGatherer, SharedRows, steps_of
from deepspeed_gear.distributed.batch_barrier import BatchBarrier
from deepspeed_gear.distributed.control_plane import ControlPlane
from deepspeed_gear.distributed.row_exchange.trajectory_places import TrajectoryPlaces
from deepspeed_gear.errors import DataError
from deepspeed_gear.ops import Ops
from deepspeed_gear.ops.constants import SHARD_BITS
from deepspeed_gear.ops.records import Resolution
from deepspeed_gear.replay.node_exchange import SpreadTrajectories
from deepspeed_gear.store.records import SlotRetention
from deepspeed_gear.store.table import Table

StepObserver = Callable[[Any], None]  # takes a TrainStep
T = TypeVar("T")


@dataclass
class RolloutSession:
    """The ranks of a replay that train rollout batches together."""

    exchange: ControlPlane
    barrier: BatchBarrier | None  # of ranks that train together; None: they need not
    is_spread: bool  # nodes exchange rows: values of all trajectories are then collective
    divisor: Callable[[], float]  # returns the gradient divisor
    #: Called with each train step before its first micro batch; all ranks raise their errors.
    observers: list[StepObserver] = dataclasses.field(default_factory=list)

    def agree(self, action: Callable[[], T]) -> T:
        """Return what an action returns, after the ranks' batch barrier: an error is raised on all ranks."""
        if self.barrier is not None:
            return self.barrier.agree(action)
        if self.is_spread:  # nodes exchange rows: ranks must not use them before or after
            return self.exchange.agree("a rollout batch", action)
        return action()

    def agree_on(self, what: str, value: object, check: Callable[[], None] = lambda: None) -> None:
        """Where nodes exchange rows, run a check on all ranks, which raise unless they give one value."""
        if self.is_spread:
            self.agree(check)
            self.exchange.compare(what, value)


class Records(NamedTuple):
    #: Of at most as many steps as a pack has room for; of trajectories of other nodes without slot and rows.
    resolutions: torch.Tensor  # [n, 8], int64, contiguous
    weights: torch.Tensor  # PER weights. [n], float32
    origins: torch.Tensor  # shard << 32 | slot; the slot, where each node holds all of the table. [n], int64
    is_cut: torch.Tensor  # whether it is longer than a pack: only its first steps are trained. [n], bool


class TablePart:
    """A rollout batch's trajectories of one table; of rows that nodes exchange, one rank of each gives."""

    def __init__(
        self,
        gatherer: PackGatherer,
        table: Table,
        records: Records,
        session: RolloutSession,
        spread: SpreadTrajectories | None = None,
        contributes: bool = True,
    ) -> None:
        self.gatherer, self.table, self.records, self.spread = gatherer, table, records, spread
        self._session = session
        #: Records by which rows are gathered: those of other nodes lie where `fetch` has put the rows.
        self.rows = torch.from_numpy(records.resolutions.numpy().copy())
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
            self._holders = first[item]  # the trajectory of each one's group that holds all of its steps
            self.shared = SharedRows(shared, np.zeros_like(shared))
            self.locate()
        if spread is not None:
            origins, routes, shard = records.origins.numpy(), spread.plan, table.spec.shard
            assert shard is not None
            self._own = np.nonzero((origins >> SHARD_BITS == shard.index) & contributes)[0]
            self.copied = self._own
            #: Which nodes have the rows of which trajectories. Every rank keeps the same account.
            steps, copies_own = self.rows[:, Resolution.NUM_STEPS].numpy(), not table.gathers_own_rows
            steps = np.maximum(steps - shared, 1)
            nodes = routes.final_row, routes.num_nodes, routes.index
            self.places = TrajectoryPlaces(origins, steps, *nodes, copies_own)
        self._slots: np.ndarray = records.resolutions.numpy()[self._own, Resolution.SLOT]

    def locate(self) -> None:
        """Find the rows of shared prompts again, after rows have moved."""
        if self.shared is not None:
            self.shared.first_row[:] = self.rows.numpy()[self._holders, Resolution.FIRST_ROW]

    def with_holders(self, needed: np.ndarray) -> np.ndarray:
        """Return which trajectories must be where some are needed: also those that hold their prompts. Of
        each node, [S, n], bool.
        """
        if self.shared is not None:
            for of_node in needed:
                of_node[self._holders[of_node & (self.shared.steps > 0)]] = True
        return needed

    def _join(self, values: np.ndarray) -> np.ndarray:
        """Return the sum of the bytes of arrays over all ranks, of which one has each byte. Collective."""
        flat = torch.from_numpy(np.ascontiguousarray(values).reshape(-1).view(np.uint8))
        return self._session.exchange.sum(flat).numpy().view(values.dtype).reshape(values.shape)

    def _joined(self, values: np.ndarray) -> np.ndarray:
        """Return values of all trajectories from those that each rank contributes. [m, ...] -> [n, ...]."""
        if self.spread is None:
            return values
        whole = np.zeros((len(self.rows), *values.shape[1:]), values.dtype)
        whole[self._own] = values
        return self._join(whole)

    def values(self, name: str) -> np.ndarray:
        """Return a per-trajectory column's stored values, bfloat16 as float32. [n, *shape]."""
        self.check_filled(name)
        return self._joined(self.table.values(name, self._slots))

    def steps(self, ops: Ops, name: str, offset: int, as_flags: bool = False) -> np.ndarray:
        """Return the values of a column's steps, float64, or which are not 0, bool. [sum of their steps]."""
        self.check_filled(name)
        column, records = self.table.schema[name], self.records.resolutions
        given = offset, column.rows, torch.bool if as_flags and column.dtype == "bool" else torch.float64
        lengths, is_own = records[:, Resolution.NUM_STEPS].numpy(), np.zeros(len(records), bool)
        is_own[self._own] = True
        if self.spread is not None:
            records = records[torch.from_numpy(is_own)]
        shared = None if self.shared is None else self.shared.of(self._own)
        own = steps_of(ops, self.table.tensor(name), records, *given, shared)
        own = own.astype(bool, copy=False) if as_flags else own
        if self.spread is None:
            return own
        found = np.zeros(int(lengths.sum()), own.dtype)
        # For lengths [2, 3] of which the second is own, the steps [0, 0, 1, 1, 1] are.
        found[np.repeat(is_own, lengths)] = own
        if not as_flags:
            return self._join(found)
        return np.unpackbits(self._join(np.packbits(found)), count=len(found)).astype(bool)

    def leaders(self, ops: Ops, rows: np.ndarray, items: np.ndarray) -> np.ndarray:
        """Return the first trajectory of each one's item with as many first `rows`, at least 1, with equal
        tokens and media. [n], int64. Collective over nodes: the trajectories of an item lie on one.
        """
        own, rows, given = self._own, rows[self._own], (0, "T", torch.int64)
        records, begins = self.records.resolutions[torch.from_numpy(own)], np.cumsum(rows) - rows
        records[:, Resolution.NUM_STEPS] = torch.from_numpy(rows)
        shared = SharedRows.none(len(own)) if self.shared is None else self.shared.of(own)
        known = [self.table.tensor(c.name) for c in self.table.schema if c.role in ("token", "media")]
        tokens = np.array([steps_of(ops, column, records, *given, shared) for column in known])
        factors = 2 * (np.arange(tokens.shape[1]) - begins.repeat(rows)) + 1
        sums = np.add.reduceat(tokens.sum(0) * factors * factors, begins)  # of equal tokens equal
        keys = items[own], rows, sums
        _, first, number = np.unique(np.stack(keys, axis=1), axis=0, return_index=True, return_inverse=True)
        leader = first[number.reshape(-1)]
        records[:, Resolution.FIRST_ROW] = records[torch.from_numpy(leader), Resolution.FIRST_ROW]
        shared = shared.of(leader)
        others = np.array([steps_of(ops, column, records, *given, shared) for column in known])
        is_equal = np.logical_and.reduceat((tokens == others).all(0), begins)
        return self._joined(own[np.where(is_equal, leader, np.arange(len(own)))])

    def check_filled(self, name: str) -> None:
        """Raise DataError if a late column is absent in one of the trajectories. Collective over nodes."""
        bits = self.table.schema.late_bits([name])
        if not bits:
            return
        present = self.table.views["retention"][self._slots, SlotRetention.PRESENT] & bits
        absent = self._joined(np.asarray(present == 0))
        if absent.any():
            at, found = f"table {self.table.spec.name}: late column {name}", int(absent.sum())
            remedy = "name it in gear.fields or in needs of the table's group: others are not sampled then"
            value = f"absent in {found} of {len(absent)} trajectories"
            raise DataError(at, "must be filled before it is read", value, remedy)


def item_numbers(sample_numbers: np.ndarray, tables: np.ndarray | None = None) -> np.ndarray:
    """Return the number of each trajectory's item, from 0. Trajectories of one item are neighbours, of equal
    sample numbers and, where there are several, of one table. [n] -> [n], int64.
    """
    is_first = np.ones(len(sample_numbers), bool)
    is_first[1:] = sample_numbers[1:] != sample_numbers[:-1]
    if tables is not None:
        is_first[1:] |= tables[1:] != tables[:-1]
    return np.cumsum(is_first) - 1
