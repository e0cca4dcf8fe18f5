"""Row exchange between the devices of replicas: out of one's table, into the arrivals of the others."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from deepspeed_gear.config import NStepConfig
from deepspeed_gear.device.replica_agreement import ReplicaAgreement
from deepspeed_gear.device.ring_table import RingTable
from deepspeed_gear.distributed.row_exchange.row_messages import WORD_BYTES, most_rows
from deepspeed_gear.distributed.row_exchange.row_reads import RowReads, layout_of
from deepspeed_gear.ops.records import Resolution, RowSample

STEPS = Resolution.NUM_WORDS  # word of a sent record, after those of a resolution
TRAVELLING_WORDS = Resolution.NUM_WORDS + 1
_EDGE = 2  # unused rows on both sides of the arrivals: rows next to them belong to no trajectory


class SentRows(NamedTuple):
    """Own samples that other replicas train on, by receiver.

    Args:
        records: Resolutions, and steps of n-step returns. [n, 9], int64.
        receivers: Their replicas. [n], int64.
    """

    records: Tensor
    receivers: Tensor


class ReceivedRows(NamedTuple):
    """Samples of this rank that other replicas hold, by sender.

    Args:
        records: Resolutions with the sender's slots, and steps of n-step returns. [m, 9], int64.
        senders: Their replicas. [m], int64.
        which: Indices among the rank's samples. [m], int64.
    """

    records: Tensor
    senders: Tensor
    which: Tensor


class ArrivalBuffers:
    """Buffers for the rows of samples from other devices, after a table's own rows.

    Args:
        needs: What this rank reads of a sample.
        longest: Steps of the longest trajectory.
        n: Steps of n-step returns.
        num_samples: Of one global batch that this rank trains on.
    """

    def __init__(self, needs: RowReads, longest: int, n: int, num_samples: int) -> None:
        most = most_rows([needs], longest, n)
        self._first, self._rows, self._slots = most + _EDGE, num_samples * most, num_samples

    @property
    def size(self) -> tuple[int, int]:
        """Rows and slots."""
        return self._rows + 2 * self._first, self._slots

    def room(self, table: RingTable) -> list[int]:
        """Return the bounds of the buffers as `decode_rows_` takes them."""
        return [self._first, self._rows, 0, self._slots, table.num_rows, table.num_slots]


class DeviceRowExchange:
    """Moves the rows of one global batch between the devices. Waits for the device once, for their sizes.

    Args:
        table: Of this replica.
        needs: What this rank reads of a sample; the same for its twins in the other replicas.
        arrivals: The table's buffers for received rows.
        n_step: N-step returns, or None.
        peers: The ranks.
    """

    def __init__(
        self,
        table: RingTable,
        needs: RowReads,
        arrivals: ArrivalBuffers,
        n_step: NStepConfig | None,
        peers: ReplicaAgreement,
    ) -> None:
        self._table, self._ops, self._peers, self._arrivals = table, table.ops, peers, arrivals
        self._replicas = peers.place.data_world
        self._n_step = n_step if any(read.follows for read in needs.reads) else None
        names = dict.fromkeys([read.column for read in needs.reads] + list(needs.per_trajectory))
        layout = layout_of([needs], {name: _row_bytes(table.held(name)) for name in names})
        self._layout = [part.to(table.device) for part in (layout.windows, layout.members, layout.columns)]
        self._held = [_flat(table.held(name)) for name in layout.names]
        self._into = [_flat(table.arrivals(name)) for name in layout.names]
        self._heads = self._words(self._replicas)
        self._message = self._words(0)

    def _words(self, *size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.int64, device=self._table.device)

    def steps_of(self, records: Tensor) -> Tensor:
        """Return the steps of own records' n-step returns; 0 where no window follows them. [n], int64."""
        steps = self._words(len(records))
        if self._n_step is None or len(records) == 0:
            return steps
        table, n = self._table, self._n_step.n
        roles = [table.schema.role(role) for role in ("reward", "terminated", "truncated")]
        reward, terminated, truncated = (None if c is None else table.columns[c.name] for c in roles)
        returns, discount = torch.empty(2, len(records), device=table.device).unbind()
        powers = torch.ones(n + 1, dtype=torch.float64, device=table.device)
        self._ops.n_step_(returns, discount, steps, reward, terminated, truncated, powers, records, n)
        return steps

    def exchange(self, sent: SentRows, ring: Tensor, come: ReceivedRows, least: Tensor) -> int:
        """Send the rows of own samples that others train on, and receive those of this rank.

        Args:
            sent: Samples that others need.
            ring: Resolutions of this rank's samples; gets the places of their rows. [B, 8], int64.
            come: Samples that this rank receives.
            least: The least mass that this replica has drawn. [], int64.
        Returns:
            The least mass that any replica has drawn.
        """
        sizes, one = self._pack(sent), [1] * self._replicas
        received = self._peers.swap(torch.stack([sizes, least.expand_as(sizes)], 1), one, one)
        known: list[list[int]] = torch.cat([sizes[:, None], received], 1).tolist()  # waits for the device
        out, coming = ([-(-words[i] // WORD_BYTES) for words in known] for i in (0, 1))
        if sum(out) > len(self._message):
            self._message = self._words(1 << (sum(out) - 1).bit_length())
            self._pack(sent)
        found = self._peers.swap(self._message[: sum(out)], out, coming)
        self._unpack(ring, come, found, coming)
        return min(words[2] for words in known)

    def _pack(self, sent: SentRows) -> Tensor:
        """Encode rows into the message of each replica; return their bytes. [R], int64."""
        sizes = self._words(self._replicas)
        given = self._held, self._samples(*sent), *self._layout, self._heads, self._table.slots
        self._ops.encode_rows_(self._message, sizes, *given)
        return sizes

    def _unpack(self, ring: Tensor, come: ReceivedRows, found: Tensor, coming: list[int]) -> None:
        ends = [0, *accumulate(coming)]
        messages = [found[begin:end] for begin, end in pairwise(ends)]
        sizes, needed = self._words(self._replicas), self._words(2)
        samples = self._samples(come.records, come.senders)
        given = messages, come.which, samples, *self._layout, self._heads, self._arrivals.room(self._table)
        self._ops.decode_rows_(self._into, ring, sizes, needed, *given)

    def _samples(self, records: Tensor, replicas: Tensor) -> Tensor:
        """Return samples as records of the ops on rows (RowSample). [n, 7], int64."""
        samples = self._words(len(records), RowSample.NUM_WORDS)
        samples[:, RowSample.PEER] = replicas
        samples[:, RowSample.SLOT], samples[:, RowSample.NUM_STEPS] = (
            records[:, Resolution.SLOT],
            records[:, Resolution.NUM_STEPS],
        )
        samples[:, RowSample.ANCHOR], samples[:, RowSample.N_STEPS] = (
            records[:, Resolution.ANCHOR],
            records[:, STEPS],
        )
        samples[:, RowSample.GOAL] = -1
        return samples


def _flat(rows: Tensor) -> Tensor:
    return rows.reshape(-1).view(torch.uint8)


def _row_bytes(rows: Tensor) -> int:
    return rows[0].numel() * rows.element_size()
