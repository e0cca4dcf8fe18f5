"""Carries rows between nodes: out of this node's store, into the arrivals of others."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from deepspeed_gear.config import NStepConfig
from deepspeed_gear.errors import StoreError
from deepspeed_gear.parallel.link import Link
from deepspeed_gear.parallel.rows import RowNeeds, RowPlan, Samples, messages, plan_rows
from deepspeed_gear.schema import Schema
from deepspeed_gear.store.columns import as_tensor
from deepspeed_gear.store.spec import RETURN_TO_GO
from deepspeed_gear.store.table import FIRST_ROW, Table


def most_rows(needs: Sequence[RowNeeds], longest: int, n: int) -> int:
    """Return the most rows from the first to the last one that a sample reads, with room for their edges.

    Args:
        needs: What is read.
        longest: Steps of the longest trajectory.
        n: Steps of n-step returns.
    """
    reads = [read for need in needs for read in need.reads]
    if not reads:
        return 1
    first = min(read.first for read in reads)
    end = max(read.end + (n if read.follows else 0) for read in reads)
    goals = any(need.goals for need in needs)
    # Behind the end the nearest rows of columns of T and of T+1 rows are two.
    differ = len({read.final_row for read in reads}) > 1
    return longest + 1 if goals else min(max(end - first, 1 + differ), longest + 1)


def arrivals_of(num_samples: int, depth: int, most: int) -> tuple[int, int]:
    """Return the rows and slots of the arrivals of a stream.

    Args:
        num_samples: Of a global batch, those that this node needs.
        depth: Cuts that are kept.
        most: Rows that a sample reads.
    """
    return depth * num_samples * most, depth * num_samples


class Carrier:
    """Moves the rows of a stream's cuts. One thread at a time.

    Args:
        table: This node's part.
        link: To the other nodes.
        needs: What is read of samples, by index.
        n_step: N-step returns, or None.
        rows: The first of this stream's arrival rows, and how many a cut has.
        slots: Likewise.
    """

    def __init__(
        self,
        table: Table,
        link: Link,
        needs: Sequence[RowNeeds],
        n_step: NStepConfig | None,
        rows: tuple[int, int],
        slots: tuple[int, int],
    ) -> None:
        self._table, self._link, self._needs, self._ops = table, link, needs, table.ops
        self._rows, self._slots = rows, slots
        follows = any(read.follows for need in needs for read in need.reads)
        self._n_step = n_step if follows else None
        names = {read.column for need in needs for read in need.reads}
        names.update(name for need in needs for name in need.per_trajectory)
        names.update(goal for need in needs for goal, _ in need.goals)
        self._held = {name: _flat(table.held(name)) for name in names}
        self._arrivals = {name: _flat(table.arrivals(name)) for name in names}
        self._row_bytes = {name: table.held(name)[:1].nbytes or _row_bytes(table, name) for name in names}
        # Messages are kept: fresh memory costs a fault a page. They are gone when `carry` returns.
        self._packed = self._received = torch.empty(0, dtype=torch.uint8)
        self._to_send = self._packed, np.zeros(link.count, np.int64)
        self.takes_own = not table.collects_own_rows

    def steps_of(self, records: torch.Tensor) -> np.ndarray | None:
        """Return the steps of the n-step returns of this node's records, where windows follow them. [n]."""
        if self._n_step is None:
            return None
        schema, n = self._table.spec.schema, self._n_step.n
        columns = [schema.role(role) for role in ("reward", "terminated", "truncated")]
        reward, terminated, truncated = (None if c is None else self._table.tensor(c.name) for c in columns)
        count = len(records)
        returns, discount = torch.empty(count), torch.empty(count)
        steps, powers = torch.empty(count, dtype=torch.int64), torch.ones(n + 1, dtype=torch.float64)
        self._ops.n_step_(returns, discount, steps, reward, terminated, truncated, powers, records, n)
        return steps.numpy()

    def pack(self, outgoing: Samples) -> None:
        """Plan and pack rows; `carry` sends them.

        Args:
            outgoing: What others need of this node, by receiver.
        """
        self._to_send = self._pack(plan_rows(outgoing, self._needs), self._link.count)

    def carry(self, entry: int, incoming: Samples) -> tuple[np.ndarray, np.ndarray]:
        """Send what is packed, and receive rows.

        Args:
            entry: The ring's entry whose arrivals are filled.
            incoming: What this node needs, by sender.
        Returns:
            First row and slot of each incoming sample, as `Table.collected` counts them. [n] each, int64.
        """
        receive = plan_rows(incoming, self._needs)
        if receive.num_rows > self._rows[1] or len(receive.slot) > self._slots[1]:
            raise StoreError(
                f"table {self._table.spec.name}: arrivals",
                f"must fit into {self._rows[1]} rows and {self._slots[1]} slots",
                f"{receive.num_rows} and {len(receive.slot)}",
                "this is a fault of gear: please report it",
            )
        places, expected = messages(receive, self._row_bytes, self._link.count)
        received = self._received = _of_size(self._received, int(expected.sum()))
        packed, sizes = self._to_send
        self._link.swap(packed, sizes.tolist(), received, expected.tolist())
        first_row, first_slot = self._rows[0] + entry * self._rows[1], self._slots[0] + entry * self._slots[1]
        for name, pieces in places.items():
            row_bytes = self._row_bytes[name]
            if name in receive.rows:
                to = (first_row + receive.place[name]) * row_bytes
            else:
                to = (first_slot + receive.per_trajectory[name]) * row_bytes
            self._copy(self._arrivals[name], received, to, pieces.at, pieces.size)
        base_row, base_slot = self._table.first_arrival
        return base_row + first_row + receive.shift, base_slot + first_slot + receive.trajectory

    def _pack(self, plan: RowPlan, num_nodes: int) -> tuple[torch.Tensor, np.ndarray]:
        places, sizes = messages(plan, self._row_bytes, num_nodes)
        packed = self._packed = _of_size(self._packed, int(sizes.sum()))
        starts = self._table.slots[plan.slot, FIRST_ROW]
        for name, pieces in places.items():
            if name in plan.rows:
                owner, first, _ = plan.rows[name]
                source = (starts[owner] + first) * self._row_bytes[name]
            else:
                source = plan.slot[plan.per_trajectory[name]] * self._row_bytes[name]
            self._copy(packed, self._held[name], pieces.at, source, pieces.size)
        return packed, sizes

    def _copy(
        self, to: torch.Tensor, source: torch.Tensor, at: np.ndarray, first: np.ndarray, size: np.ndarray
    ) -> None:
        if len(size):
            pieces = np.empty((len(size), 3), np.int64)
            pieces[:, 0], pieces[:, 1], pieces[:, 2] = at, first, size
            self._ops.copy_rows_(to, source, torch.from_numpy(pieces))


def _of_size(buffer: torch.Tensor, size: int) -> torch.Tensor:
    """Return so many bytes, in a buffer's memory if they fit."""
    if size > buffer.untyped_storage().nbytes():
        return torch.empty(size, dtype=torch.uint8)
    return torch.as_strided(buffer, (size,), (1,))


def _flat(rows: np.ndarray) -> torch.Tensor:
    return as_tensor(rows.reshape(-1).view(np.uint8))


def _row_bytes(table: Table, name: str) -> int:
    schema: Schema = table.spec.schema
    if name == RETURN_TO_GO:
        return 4
    column = schema[name]
    return int(np.prod(column.shape, dtype=np.int64)) * column.numpy_dtype.itemsize
