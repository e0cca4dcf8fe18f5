"""Messages of rows between nodes: encoded from this node's store, decoded into its arrivals."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
import torch

from deepspeed_gear.config import NStepConfig
from deepspeed_gear.distributed.row_exchange.row_reads import RowReads, layout_of
from deepspeed_gear.errors import StoreError
from deepspeed_gear.schema import Schema
from deepspeed_gear.store.column_arrays import as_tensor
from deepspeed_gear.store.table import Table
from deepspeed_gear.store.table_spec import RETURN_TO_GO

WORD_BYTES = 8
FIRST_WORDS = 1024  # of the message buffer, before any message has been encoded


def most_rows(needs: Sequence[RowReads], longest: int, n: int) -> int:
    """Return the most rows from the first to the last one that a sample reads, edge rows included.

    Args:
        longest: Steps of the longest trajectory.
        n: Steps of n-step returns.
    """
    reads = [read for need in needs for read in need.reads]
    if not reads:
        return 1
    first = min(read.first for read in reads)
    end = max(read.end + (n if read.follows else 0) for read in reads)
    goals = any(need.goals for need in needs)
    # After the end the nearest rows of columns of T and of T+1 rows are two.
    differ = len({read.final_row for read in reads}) > 1
    return longest + 1 if goals else min(max(end - first, 1 + differ), longest + 1)


def arrivals_of(num_samples: int, depth: int, most: int) -> tuple[int, int]:
    """Return the rows and slots of a stream's arrivals, where rows of other nodes are stored.

    Args:
        num_samples: Of a global batch, those that this node needs.
        depth: Selections that are kept.
        most: Rows that a sample reads.
    """
    return depth * num_samples * most, depth * num_samples


class RowMessages:
    """Encodes and decodes the rows of a stream's selections. One thread at a time.

    Args:
        num_nodes: How many nodes hold the table.
        needs: The rows that are read of samples, by index (see `ExchangePlan`).
        n_step: N-step returns, or None.
        rows: The first of this stream's arrival rows, and their number per selection.
    """

    def __init__(
        self,
        table: Table,
        num_nodes: int,
        needs: Sequence[RowReads],
        n_step: NStepConfig | None,
        rows: tuple[int, int],
        slots: tuple[int, int],
    ) -> None:
        self._table, self._ops = table, table.ops
        self._rows, self._slots = rows, slots
        follows = any(read.follows for need in needs for read in need.reads)
        self._n_step = n_step if follows else None
        self.has_steps = self._n_step is not None  # whether resolutions are sent with their n-step steps
        names = {read.column for need in needs for read in need.reads}
        names.update(name for need in needs for name in need.per_trajectory)
        names.update(goal for need in needs for goal, _ in need.goals)
        row_bytes = {name: table.columns[name][:1].nbytes or _row_bytes(table, name) for name in names}
        layout = layout_of(needs, row_bytes)
        self._layout = layout.windows, layout.members, layout.columns
        self._held = [_flat(table.columns[name]) for name in layout.names]
        self._arrivals = [_flat(table.arrivals[name]) for name in layout.names]
        self._slot_table = torch.from_numpy(table.slots)
        # Kept: fresh memory costs a fault a page, and fresh tensors a few us after a batch.
        self._message = np.empty(FIRST_WORDS, np.int64)
        sizes, needed = np.zeros(num_nodes, np.int64), np.zeros(2, np.int64)
        self._size_words, self._needed_words = sizes.data, needed.data
        self._sizes, self._needed = torch.from_numpy(sizes), torch.from_numpy(needed)
        self.takes_own = not table.gathers_own_rows

    def steps_of(self, records: torch.Tensor) -> torch.Tensor | None:
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
        return steps

    def encode(self, outgoing: torch.Tensor, heads: torch.Tensor) -> list[np.ndarray]:
        """Encode rows into messages.

        Args:
            outgoing: Samples of this node that others need, by receiver: `RowSample`. [n, 7], int64.
            heads: Bytes before the rows, whole words. [S], int64.
        Returns:
            The message for each node, whose head is to be filled; valid until the next call. [words] each.
        """
        given = self._held, outgoing, *self._layout, heads, self._slot_table
        self._ops.encode_rows_(torch.from_numpy(self._message), self._sizes, *given)
        sizes = zip(heads.tolist(), self._size_words, strict=True)
        ends = [0, *accumulate([(head + size + WORD_BYTES - 1) // WORD_BYTES for head, size in sizes])]
        if ends[-1] > len(self._message):
            self._message = np.empty(1 << (ends[-1] - 1).bit_length(), np.int64)
            self._ops.encode_rows_(torch.from_numpy(self._message), self._sizes, *given)
        encoded = self._message
        return [encoded[begin:end] for begin, end in pairwise(ends)]

    def decode(
        self,
        entry: int,
        ring: torch.Tensor,
        which: torch.Tensor,
        incoming: torch.Tensor,
        heads: torch.Tensor,
        messages: Sequence[np.ndarray],
        used: tuple[int, int] = (0, 0),
    ) -> None:
        """Decode rows of messages into the arrivals.

        Args:
            entry: The ring's entry whose arrivals are filled.
            ring: The entry; gets first row and slot of each incoming sample, as `Table.gathered` counts.
                [count, 8], int64.
            which: Indices of the incoming samples in it. [n], int64.
            incoming: Samples that this node needs, by sender: `RowSample`. [n, 7], int64.
            heads: Bytes before the rows. [S], int64.
            messages: Of each node. [words] each, int64.
            used: Rows and slots of the entry's arrivals that hold other samples, which come first.
        """
        first_row = self._rows[0] + entry * self._rows[1] + used[0]
        first_slot = self._slots[0] + entry * self._slots[1] + used[1]
        free = self._rows[1] - used[0], self._slots[1] - used[1]
        bounds = (first_row, free[0], first_slot, free[1], *self._table.first_arrival)
        received = [torch.from_numpy(message) for message in messages]
        samples = received, which, incoming, *self._layout, heads
        self._ops.decode_rows_(self._arrivals, ring, self._sizes, self._needed, *samples, bounds)
        num_rows, num_trajectories = self._needed_words
        if num_rows > free[0] or num_trajectories > free[1]:
            raise StoreError(
                f"table {self._table.spec.name}: arrivals",
                f"must fit into {free[0]} rows and {free[1]} slots",
                f"{num_rows} and {num_trajectories}",
                "this is a fault of gear: please report it",
            )


def _flat(rows: np.ndarray) -> torch.Tensor:
    return as_tensor(rows.reshape(-1).view(np.uint8))


def _row_bytes(table: Table, name: str) -> int:
    schema: Schema = table.spec.schema
    if name == RETURN_TO_GO:
        return 4
    column = schema[name]
    return int(np.prod(column.shape, dtype=np.int64)) * column.numpy_dtype.itemsize
