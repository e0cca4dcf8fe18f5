"""Row messages: rows that other nodes' samples read, encoded from the store, decoded to arrivals.

Sender and receiver compute the same layout from the samples' resolutions, so messages need not
describe it. Windows of samples that overlap, or whose item was drawn twice, are merged: a row is
sent once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import torch

from deepspeed_gear.batching.gather import N_STEP_DTYPES, NStepReturns
from deepspeed_gear.config.options import NStepConfig
from deepspeed_gear.distributed.node_channel import NodeChannel, message_of
from deepspeed_gear.errors import StoreError
from deepspeed_gear.ops.records import RowColumn, RowWindow
from deepspeed_gear.row_exchange.device_transport import DeviceTransport
from deepspeed_gear.store.native_rows import as_tensor
from deepspeed_gear.store.table import Table
from deepspeed_gear.store.table_spec import RETURN_TO_GO

WORD_BYTES = 8
FIRST_WORDS = 1024  # of the message buffer, before any message has been encoded


class WindowRead(NamedTuple):
    """The rows [anchor + first, anchor + end) of a column that one window of a sample reads."""

    column: str
    first: int
    end: int
    follows: bool = False  # the rows lie after the sample's n-step steps
    edge: bool = False  # the nearest row is read where the trajectory has none of them
    final_row: int = 0  # 1 if the column has T+1 rows
    # Of a column of achieved goals: a relabelled sample reads the row that was drawn.
    is_goal: bool = False


@dataclass(frozen=True)
class RowReads:
    """All rows that a replica's ranks on one node read of a sample."""

    # Rows of steps, at least one of each column that is read; then of goals.
    reads: tuple[WindowRead, ...]
    per_trajectory: tuple[str, ...] = ()  # columns of one row per trajectory


class RowLayout(NamedTuple):
    """The row reads as arguments of `encode_rows_` and `decode_rows_`."""

    names: tuple[str, ...]  # columns, those of steps first. [C]
    windows: torch.Tensor
    members: torch.Tensor
    columns: torch.Tensor


Window = tuple[int, int, int, int, int, int]  # words of `RowWindow` after the group


def layout_of(needs: Sequence[RowReads], row_bytes: Mapping[str, int]) -> RowLayout:
    of_steps: dict[str, dict[Window, list[int]]] = {}  # windows of each column, and who has them
    single: dict[str, list[int]] = {}
    for index, need in enumerate(needs):
        for column, first, end, follows, edge, final_row, is_goal in dict.fromkeys(need.reads):
            window = int(is_goal), first, end, int(follows), int(edge), final_row
            of_steps.setdefault(column, {}).setdefault(window, []).append(index)
        for column in need.per_trajectory:
            single.setdefault(column, []).append(index)
    # Columns that are read alike: a group.
    alike: dict[tuple[tuple[Window, tuple[int, ...]], ...], int] = {}
    columns = []
    for name, reads in of_steps.items():
        key = tuple((window, tuple(which)) for window, which in reads.items())
        columns.append((alike.setdefault(key, len(alike)), 0, row_bytes[name]))
    windows = [(group, *window) for key, group in alike.items() for window, _ in key]
    which = [list(indices) for key in alike for _, indices in key]
    for name, indices in single.items():
        columns.append((-1, len(which), row_bytes[name]))
        which.append(indices)
    members = torch.zeros(len(which), len(needs), dtype=torch.bool)
    for row, having in enumerate(which):
        members[row, having] = True
    return RowLayout(
        (*of_steps, *single),
        torch.tensor(windows, dtype=torch.int64).reshape(-1, RowWindow.NUM_WORDS),
        members,
        torch.tensor(columns, dtype=torch.int64).reshape(-1, RowColumn.NUM_WORDS),
    )


def most_rows(needs: Sequence[RowReads], longest: int, n: int) -> int:
    """Return the most rows from the first to the last one that a sample reads, edge
    rows included.
    """
    reads = [read for need in needs for read in need.reads]
    if not reads:
        return 1
    if any(read.is_goal for read in reads):
        return longest + 1
    first = min(read.first for read in reads)
    end = max(read.end + (n if read.follows else 0) for read in reads)
    # After the end the nearest rows of columns of T and of T+1 rows are two.
    differ = len({read.final_row for read in reads}) > 1
    return min(max(end - first, 1 + differ), longest + 1)


class RowExchange:
    """Exchanges a stream's rows between nodes, after other words, by the channel or `transport`.
    One thread. `rows` and `slots`: the first of the stream's arrival rows and slots, and their
    numbers per selection.
    """

    def __init__(
        self,
        channel: NodeChannel,
        table: Table,
        needs: Sequence[RowReads],
        n_step: NStepConfig | None,
        rows: tuple[int, int],
        slots: tuple[int, int],
        transport: DeviceTransport | None = None,
    ) -> None:
        self.channel = channel
        self._transport = transport
        self.table = table
        self._ops = table.ops
        self._rows = rows
        self._slots = slots
        reads = [read for need in needs for read in need.reads]
        self._n_step: NStepReturns | None = None
        if n_step is not None and any(read.follows for read in reads):
            self._n_step = NStepReturns(n_step, table, table.tensor, table.device)
        #: Whether resolutions are sent with the steps of their n-step returns.
        self.has_steps = self._n_step is not None
        #: Whether a node's own rows are copied to its arrivals, too.
        self.takes_own = not table.gathers_own_rows
        row_bytes = {column.name: column.row_bytes for column in table.schema} | {RETURN_TO_GO: 4}
        layout = layout_of(needs, row_bytes)
        self.names = layout.names
        self._layout = layout.windows, layout.members, layout.columns
        self._held = [_flat(table.columns[name]) for name in layout.names]
        self._arrivals = [_flat(table.arrivals[name]) for name in layout.names]
        self._slot_table = torch.from_numpy(table.slots)
        # Kept: fresh memory costs a fault a page, and fresh tensors a few us after a batch. Words
        # of NumPy arrays are written one by one, as in `ResolutionExchange`.
        self._message = np.empty(FIRST_WORDS, np.int64)
        sizes, heads = np.zeros((2, channel.count), np.int64)
        needed = np.zeros(2, np.int64)
        self._sizes, self._heads, self._needed = map(torch.from_numpy, (sizes, heads, needed))
        self._size_words = sizes.data
        self._head_words = heads.data
        self._needed_words = needed.data
        self._outgoing: list[np.ndarray] = []  # for the transport
        self._coming: list[int] = []  # words that it gets from each node

    def steps_of(self, resolutions: torch.Tensor) -> torch.Tensor | None:
        """Return the steps of the n-step returns of this node's resolutions, if windows follow.

        [n].
        """
        if self._n_step is None:
            return None
        values = [torch.empty(len(resolutions), dtype=dtype) for dtype in N_STEP_DTYPES]
        return self._n_step.fill(self._ops, values, resolutions)

    def send(
        self, head: np.ndarray, parts: Sequence[np.ndarray], outgoing: torch.Tensor
    ) -> list[np.ndarray]:
        """Send each node `head`, its words of `parts` and the rows of `outgoing` (`RowSample` by
        receiver, [k, 7]); return the words of each, with its rows after them unless devices send
        these.
        """
        if self._transport is None:
            messages = self.encode(outgoing, [1 + len(head) + part.size for part in parts])
            for message, part in zip(messages, parts, strict=True):
                end = 1 + len(head)
                message[1:end] = head
                message[end : end + part.size] = part
            return self.channel.begin(messages)()
        self._outgoing = self.encode(outgoing, [0] * len(parts))
        sized = [np.concatenate([[len(rows)], head]) for rows in self._outgoing]
        received = self.channel.begin(
            [message_of(*both) for both in zip(sized, parts, strict=True)]
        )()
        self._coming = [int(words[0]) for words in received]
        return [words[1:] for words in received]

    def encode(self, outgoing: torch.Tensor, heads: Sequence[int]) -> list[np.ndarray]:
        """Encode rows for each node after a head of so many words, to be filled; until the next
        call.
        """
        for node, head in enumerate(heads):
            self._head_words[node] = WORD_BYTES * head
        given = self._held, outgoing, *self._layout, self._heads, self._slot_table
        self._ops.encode_rows_(torch.from_numpy(self._message), self._sizes, *given)
        sizes = zip(heads, self._size_words, strict=True)
        ends = [
            0,
            *accumulate([head + (size + WORD_BYTES - 1) // WORD_BYTES for head, size in sizes]),
        ]
        if ends[-1] > len(self._message):
            self._message = np.empty(1 << (ends[-1] - 1).bit_length(), np.int64)
            self._ops.encode_rows_(torch.from_numpy(self._message), self._sizes, *given)
        return [self._message[begin:end] for begin, end in pairwise(ends)]

    def fill(
        self,
        entry: int,
        ring: torch.Tensor,
        which: torch.Tensor,
        incoming: torch.Tensor,
        received: Sequence[np.ndarray],
        heads: Sequence[int],
        used: tuple[int, int] = (0, 0),
    ) -> None:
        """Receive the rows of `incoming` (`RowSample` by sender, [n, 7]) into the arrivals, after
        `used` rows and slots. The ring's entry, [count, 8], gets the first row and slot of each at
        the indices `which`, [n]. `received` is what `send` has returned, with so many words before
        the rows of a node: `heads`.
        """
        if self._transport is not None:
            received = self._transport.exchange(self._outgoing, self._coming)
            heads = [0] * len(heads)
        for node, head in enumerate(heads):
            self._head_words[node] = WORD_BYTES * head
        first_row = self._rows[0] + entry * self._rows[1] + used[0]
        first_slot = self._slots[0] + entry * self._slots[1] + used[1]
        free = self._rows[1] - used[0], self._slots[1] - used[1]
        bounds = (first_row, free[0], first_slot, free[1], *self.table.first_arrival)
        samples = (
            [torch.from_numpy(words) for words in received],
            which,
            incoming,
            *self._layout,
            self._heads,
        )
        self._ops.decode_rows_(self._arrivals, ring, self._sizes, self._needed, *samples, bounds)
        num_rows, num_trajectories = self._needed_words
        if num_rows > free[0] or num_trajectories > free[1]:
            rule = f"must fit into {free[0]} rows and {free[1]} slots"
            given = f"{num_rows} and {num_trajectories}"
            remedy = "this is a fault of gear: please report it"
            raise StoreError(f"table {self.table.spec.name}: arrivals", rule, given, remedy)


def _flat(rows: np.ndarray) -> torch.Tensor:
    return as_tensor(rows.reshape(-1).view(np.uint8))
