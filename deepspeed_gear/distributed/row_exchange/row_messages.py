"""Rows between nodes: those that samples read, encoded from this node's store, decoded into its arrivals.

Sender and receiver compute the same layout from the samples' resolutions, so messages need not describe it.
Windows of samples that overlap, or whose item was drawn twice, are merged: a row is sent once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import torch

from deepspeed_gear.config import NStepConfig
from deepspeed_gear.distributed.node_channel import NodeChannel, message_of
from deepspeed_gear.distributed.row_exchange.device_transport import DeviceTransport
from deepspeed_gear.errors import StoreError
from deepspeed_gear.ops.records import RowColumn, RowWindow
from deepspeed_gear.store.column_arrays import as_tensor
from deepspeed_gear.store.table import Table
from deepspeed_gear.store.table_spec import RETURN_TO_GO

WORD_BYTES = 8
FIRST_WORDS = 1024  # of the message buffer, before any message has been encoded


@dataclass(frozen=True)
class WindowRead:
    """The rows of a column that one window of a sample reads.

    Args:
        first, end: From the anchor on: rows [anchor + first, anchor + end) that the trajectory has.
        follows: They lie after the sample's n-step steps.
        edge: The nearest row is read where the trajectory has none of them.
        final_row: 1 if the column has T+1 rows.
    """

    column: str
    first: int
    end: int
    follows: bool = False
    edge: bool = False
    final_row: int = 0


@dataclass(frozen=True)
class RowReads:
    """All rows that a replica's ranks on one node read of a sample.

    Args:
        reads: Rows of steps, at least one of each column that is read.
        per_trajectory: Columns of one row per trajectory.
        goals: Columns of achieved goals, of which relabelled samples read the row that was drawn, with their
            `final_row`.
    """

    reads: tuple[WindowRead, ...]
    per_trajectory: tuple[str, ...] = ()
    goals: tuple[tuple[str, int], ...] = ()


class RowLayout(NamedTuple):
    """The row reads as arguments of the ops.

    Args:
        names: Columns, those of steps first. [C].
        windows, members, columns: Defined in `ops/reference/encode_rows.py`.
    """

    names: tuple[str, ...]
    windows: torch.Tensor
    members: torch.Tensor
    columns: torch.Tensor


Window = tuple[int, int, int, int, int, int]  # is_goal, first, end, follows, edge, final_row


def layout_of(needs: Sequence[RowReads], row_bytes: Mapping[str, int]) -> RowLayout:
    """Return the layout of row reads for the ops.

    Args:
        needs: The rows that are read of a sample, by index.
        row_bytes: Bytes of a row of each column.
    """
    of_steps: dict[str, dict[Window, dict[int, None]]] = {}  # windows of each column, and who has them
    single: dict[str, list[int]] = {}
    for index, need in enumerate(needs):
        its_reads: list[tuple[str, Window]] = [
            (read.column, (0, read.first, read.end, int(read.follows), int(read.edge), read.final_row))
            for read in need.reads
        ]
        its_reads += [(column, (1, 0, 1, 0, 0, final_row)) for column, final_row in need.goals]
        for column, window in its_reads:
            of_steps.setdefault(column, {}).setdefault(window, {})[index] = None
        for column in need.per_trajectory:
            single.setdefault(column, []).append(index)
    alike: dict[tuple[tuple[Window, tuple[int, ...]], ...], int] = {}  # columns that are read alike: a group
    columns = []
    for name, reads in of_steps.items():
        key = tuple((window, tuple(which)) for window, which in reads.items())
        columns.append((alike.setdefault(key, len(alike)), 0, row_bytes[name]))
    windows = [(group, *window) for key, group in alike.items() for window, _ in key]
    which: list[tuple[int, ...]] = [indices for key in alike for _, indices in key]
    for name, indices in single.items():
        columns.append((-1, len(which), row_bytes[name]))
        which.append(tuple(indices))
    members = torch.zeros(len(which), len(needs), dtype=torch.bool)
    for row, having in enumerate(which):
        members[row, list(having)] = True
    return RowLayout(
        (*of_steps, *single),
        torch.tensor(windows, dtype=torch.int64).reshape(-1, RowWindow.NUM_WORDS),
        members,
        torch.tensor(columns, dtype=torch.int64).reshape(-1, RowColumn.NUM_WORDS),
    )


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
        row_bytes = {name: table.columns[name][:1].nbytes for name in names}
        for name in (name for name, num_bytes in row_bytes.items() if not num_bytes):  # it holds no row yet
            row_bytes[name] = 4 if name == RETURN_TO_GO else table.spec.schema[name].row_bytes
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


class RowExchange:
    """Exchanges rows of one stream, after other words: in the messages of a channel, or by the devices.

    One thread at a time.

    Args:
        channel: To the other nodes.
        messages: Encodes the rows that other nodes read, and decodes theirs.
        transport: Sends the rows, after messages with their sizes; None: the messages contain them.
    """

    def __init__(
        self, channel: NodeChannel, messages: RowMessages, transport: DeviceTransport | None = None
    ) -> None:
        self.channel, self.messages, self._transport = channel, messages, transport
        words = np.zeros(channel.count, np.int64)  # written word by word, as in `ResolutionExchange`
        self._heads, self._head_words = torch.from_numpy(words), words.data
        self._outgoing: list[np.ndarray] = []  # for the transport
        self._sizes: list[int] = []  # of what it gets from each node

    def send(self, head: np.ndarray, parts: Sequence[np.ndarray], outgoing: torch.Tensor) -> list[np.ndarray]:
        """Send each node words and rows; return the words of each, maybe with its rows after them.

        Args:
            head: Words for all nodes. [n], int64.
            parts: More words for each node. [m] each, int64.
            outgoing: Samples of this node that others need, by receiver: `RowSample`. [k, 7], int64.
        """
        if self._transport is None:
            for node, part in enumerate(parts):
                self._head_words[node] = WORD_BYTES * (1 + len(head) + part.size)
            messages = self.messages.encode(outgoing, self._heads)
            for message, part in zip(messages, parts, strict=True):
                end = 1 + len(head)
                message[1:end] = head
                message[end : end + part.size] = part
            return self.channel.begin(messages)()
        for node in range(len(parts)):
            self._head_words[node] = 0
        self._outgoing = self.messages.encode(outgoing, self._heads)
        sized = [np.concatenate([[len(rows)], head]) for rows in self._outgoing]
        received = self.channel.begin([message_of(*both) for both in zip(sized, parts, strict=True)])()
        self._sizes = [int(words[0]) for words in received]
        return [words[1:] for words in received]

    def fill(
        self,
        entry: int,
        ring: torch.Tensor,
        which: torch.Tensor,
        incoming: torch.Tensor,
        received: Sequence[np.ndarray],
        sizes: Sequence[int],
        used: tuple[int, int] = (0, 0),
    ) -> None:
        """Receive the rows into the arrivals, as `RowMessages.decode`.

        Args:
            received: What `send` has returned.
            sizes: Words before the rows of each node in it. [S].
        """
        if self._transport is not None:
            received = self._transport.exchange(self._outgoing, self._sizes)
        for node, size in enumerate(sizes):
            self._head_words[node] = 0 if self._transport is not None else WORD_BYTES * size
        self.messages.decode(entry, ring, which, incoming, self._heads, received, used)
