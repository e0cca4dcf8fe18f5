"""Batches on a device: kernels read each field in place, or the host stages it.

A ring entry is one allocation on the device. Staged fields lie at its front, with the same layout
as in pinned host memory, so that one copy transfers them. All work is enqueued on a transfer
stream; the process waits only for pinned memory that is still being copied, from `PINNED` batches
before.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from deepspeed_gear.batching.field_rows import Rows
from deepspeed_gear.batching.gather import (
    N_STEP_DTYPES,
    Buffers,
    FieldGroup,
    Gatherer,
    GatherOptions,
    NStepReturns,
)
from deepspeed_gear.batching.transfer.cuda_streams import Event, HostStream, Packing
from deepspeed_gear.config import ResolvedField
from deepspeed_gear.config.field_resolution import ESTIMATED
from deepspeed_gear.ops import Ops
from deepspeed_gear.ops.records import Resolution
from deepspeed_gear.schema import Column
from deepspeed_gear.store.table_spec import RETURN_TO_GO

DIRECT = "direct"
STAGED = "staged"
WAYS = (DIRECT, STAGED)  # in order of preference
# Batches that are staged at once: a bound for how many batches the host is ahead of the device.
PINNED = 4
# Blocks of one launch, for all its fields. PCIe 5 has 50 GB/s and 1.5 us latency, so 75 KB of reads
# must be in flight. 32 blocks of 256 threads with two vectors of 16 bytes a thread, as for short
# windows, have 256 KiB in flight, and more for long ones. At least 100 of an H200's 132
# multiprocessors stay free for other work.
_DIRECT_BLOCKS = 32
_NONE = torch.empty(0, 0)


def is_computed(field: ResolvedField) -> bool:
    """Return whether a field has no stored rows: time steps and positions."""
    return field.column is None and field.derived != "return_to_go"


def column_name(field: ResolvedField) -> str:
    """Return the name of the column that a field reads, unless it is computed."""
    return RETURN_TO_GO if field.column is None else field.column.name


@dataclass(frozen=True)
class FieldTransfer:
    """How the fields of a batch reach a device, the same for all tables of a mixture."""

    lane: HostStream
    ops: Ops  # ops for tensors of the device
    preferred: str  # the transfer method, where a field admits it
    # Whether the device reads a column in place, of every table that has it.
    is_reached: Callable[[str], bool]
    reaches_n_step: bool  # whether it reads the columns of n-step returns in place, of every table
    keep: int  # latest batches that their user may use

    def way(self, field: ResolvedField) -> str:
        """Return how a field is transferred: `DIRECT` or `STAGED`.

        Goals, which the host draws, and fields that the device cannot read are staged.
        """
        is_read = is_computed(field) or self.is_reached(column_name(field))
        is_drawn = field.hindsight is not None
        return (
            STAGED
            if self.preferred == STAGED or is_drawn or field.mask_only or not is_read
            else DIRECT
        )


@dataclass
class _Use:
    """Use of a batch that was handed over, until its ring entry is filled again."""

    consumer: Any  # stream of the user
    free: Event | None = None  # after the last use; None: the user may still use the batch


@dataclass
class _Slot:
    front: torch.Tensor  # the staged fields
    use: _Use | None = None  # use of its latest batch; None: that was not handed over


@dataclass
class _Pinned:
    flat: torch.Tensor
    buffers: Buffers
    copied: Event | None = None  # after the copy: it may be written again


class DeviceGatherer(Gatherer):
    """Gatherer of batches of fixed fields and size on a device.

    One thread gathers; another one may take batches.

    Args:
        transfer: How fields reach the device, equal for the gatherers of a mixture's tables.
        reached: Columns of the table that the device reads in place: tensors of the device by name.
        options: Fields and size of batches.
        table: The table.
        depth: Entries of the ring: one more than batches are prefetched and kept.
    """

    def __init__(
        self,
        transfer: FieldTransfer,
        reached: Mapping[str, torch.Tensor],
        options: GatherOptions,
        table: Rows,
        depth: int,
    ) -> None:
        self._transfer = transfer
        self._lane = transfer.lane
        self._reached = reached
        self._blocks = _DIRECT_BLOCKS if self._lane.device.type == "cuda" else options.threads
        self._slots: list[_Slot] = []
        self._pinned: deque[_Pinned] = deque()
        self._out: deque[_Use] = deque()
        # Guards `_out` and the state of slots: one thread gathers while another takes batches.
        self._lock = threading.Lock()
        self.made = 0  # index of the latest ring entry
        with self._lane.running():  # zeros are written before the stream gathers
            self._counters_there = torch.zeros(3, dtype=torch.int64, device=self._lane.device)
            self._counters_seen = self._lane.buffer(24).view(torch.int64)
            super().__init__(options, table, depth)

    def _groups(self) -> list[FieldGroup]:
        return [*super()._groups(), self._here, self._direct]

    def normalize_with(self, moments: np.ndarray, columns: Sequence[Column]) -> None:
        with self._lane.running():  # after the gathers of the batch before
            super().normalize_with(moments, columns)

    def totals(self) -> torch.Tensor:
        """Return the totals as of the latest batch that the device has gathered."""
        return self.counters + self._counters_seen

    def _divide(self, num_samples: int) -> None:
        transfer = self._transfer
        self._ways = [transfer.way(field) for field in self._fields]
        inputs = [i for i, field in enumerate(self._fields) if field.is_input]
        self._estimates_here = any(self._ways[i] == STAGED for i in inputs)
        for i in inputs if self._estimates_here else ():  # all of them in one place
            self._ways[i] = STAGED
        # The device computes n-step returns where it reads all columns and the host needs none.
        ways = zip(self._fields, self._ways, strict=True)
        is_followed = any(way == STAGED and field.offset == "n_step" for field, way in ways)
        is_there = transfer.preferred != STAGED and transfer.reaches_n_step and not is_followed
        self._n_step_there: NStepReturns | None = None
        if self._n_step is not None and is_there:
            self._n_step_there = NStepReturns(
                self._n_step, self._table, self._reached.__getitem__, self._lane.device
            )
            self._n_step_here = None
        chosen = {
            way: [i for i, of in enumerate(self._ways) if of == way] for way in set(self._ways)
        }
        plain = [i for i in chosen.get(STAGED, []) if self._rows[i].stored is None]
        self._here = self._group(plain, [rows.column for rows in self._rows])
        there = [self._there(i) for i in range(len(self._fields))]
        self._direct = self._group(chosen.get(DIRECT, []), there)
        self.reads_in_place = bool(self._direct.which) or self._n_step_there is not None
        written = {mask for i in chosen.get(STAGED, []) if (mask := self._specs[i].mask) >= 0}
        # Whether each tensor is staged, in the order of `_sizes`.
        self._is_staged = [way == STAGED for way in self._ways]
        self._is_staged += [mask in written for mask in range(len(self._mask_lengths))]
        self._is_staged += [self._n_step_there is None] * len(N_STEP_DTYPES) if self._n_step else []
        self._is_staged += [self._estimates_here] * len(ESTIMATED) if self._estimated else []

    def _there(self, index: int) -> torch.Tensor:
        """Return a field's column on the device; an empty tensor where it is not read there."""
        field = self._fields[index]
        if self._ways[index] == STAGED or is_computed(field):
            return torch.empty(0, dtype=torch.int64, device=self._lane.device)
        return self._reached[column_name(field)]

    def _group(self, which: list[int], columns: Sequence[torch.Tensor]) -> FieldGroup:
        """Return a group of fields that reads `columns`, one for each of all fields."""
        rows = []
        for i in which:
            known = self._rows[i]
            device = columns[which[0]].device
            shift = known.shift.to(device)
            gain = known.gain.to(device)
            rows.append(replace(known, column=columns[i], shift=shift, gain=gain))
        return FieldGroup(which, self._specs, rows)

    def buffers(self, num_samples: int) -> Buffers:
        sizes = self._sizes(num_samples)
        staged = [i for i, is_staged in enumerate(self._is_staged) if is_staged]
        placed = [i for i, is_staged in enumerate(self._is_staged) if not is_staged]
        front, rest = (Packing([sizes[i] for i in some]) for some in (staged, placed))
        size = front.num_bytes + rest.num_bytes
        flat = torch.zeros(size, dtype=torch.uint8, device=self._lane.device)
        views = [*front.views(flat), *rest.views(flat[front.num_bytes :])]
        self._slots.append(_Slot(flat[: front.num_bytes]))
        if len(self._pinned) < PINNED:
            pinned = self._lane.buffer(front.num_bytes)
            known = dict(zip(staged, front.views(pinned), strict=True))
            host = self._named([known.get(i, _NONE) for i in range(len(sizes))])
            self._pinned.append(_Pinned(pinned, host))
        known = dict(zip([*staged, *placed], views, strict=True))
        return self._named([known[i] for i in range(len(sizes))])

    def gather(
        self, resolutions: torch.Tensor, goal_step: torch.Tensor | None = None
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Gather a batch of one table, as `gather_from` does."""
        return self.gather_from([(self, resolutions, goal_step)])

    def gather_from(
        self, parts: Sequence[tuple[Gatherer, torch.Tensor, torch.Tensor | None]]
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Gather samples of resolutions on the host, by work enqueued on the transfer stream."""
        self.made = self._turn
        buffers = self._next()
        slot = self._slots[self.made]
        pinned = self._pinned[0]
        self._pinned.rotate(-1)
        some = []
        first = 0
        whole = len(parts) == 1
        for gatherer, resolutions, goals in parts:
            assert isinstance(gatherer, DeviceGatherer)
            end = first + len(resolutions)
            if end > first:
                host = pinned.buffers if whole else pinned.buffers.part(first, end)
                there = buffers if whole else buffers.part(first, end)
                some.append((gatherer, resolutions, goals, host, there))
            first = end
        with self._lane.running():
            self._reuse(slot)
            # The only wait of the host: until the copy of `PINNED` batches before has read the
            # pinned memory.
            if pinned.copied is not None:
                pinned.copied.synchronize()
            for gatherer, resolutions, goals, host, _ in some:
                gatherer.fill(host, resolutions, goals)
            if slot.front.numel():
                slot.front.copy_(pinned.flat, non_blocking=True)
                pinned.copied = self._lane.record()
            for gatherer, resolutions, _, _, there in some:
                gatherer.place(there, resolutions)
        return dict(buffers.tensors), dict(buffers.mask)

    def _reuse(self, slot: _Slot) -> None:
        """Make the transfer stream wait for the user of the entry's last batch.

        The host does not wait: kernels that overwrite the entry run after those that read it.
        """
        with self._lock:
            use = slot.use
            slot.use = None
        if use is None:
            return
        if use.free is not None:
            self._lane.wait(use.free)
        else:  # reused early, as batches were prefetched and dropped
            self._lane.wait_for(use.consumer)

    def hand_over(self, index: int) -> None:
        """Mark a ring entry as used from now on, and free the one of `keep` batches before.

        Called in the user's thread: the work on its stream so far includes all uses of older
        batches.
        """
        consumer, until_now = self._lane.consumer()
        use = _Use(consumer)
        with self._lock:
            self._slots[index].use = use
            self._out.append(use)
            while len(self._out) > self._transfer.keep:
                old = self._out.popleft()
                if old.consumer == consumer:
                    old.free = until_now

    def place(self, buffers: Buffers, resolutions: torch.Tensor) -> None:
        """Enqueue the device's gather of the fields that are not staged, from host resolutions."""
        if not self.reads_in_place:
            return
        (there,) = self._lane.bring([resolutions])
        order = None
        if self._direct.which:
            # Samples in the order of their rows: neighbours in memory are read in sequence. Sorted
            # where the resolutions lie: on the device, as a host takes 2 ms for 65,536 samples.
            order = torch.argsort(there[:, Resolution.FIRST_ROW] + there[:, Resolution.ANCHOR])
        ops = self._transfer.ops
        counters = self._counters_there
        steps = buffers.n_step[2] if self._n_step is not None else None
        if self._n_step_there is not None:
            steps = self._n_step_there.fill(ops, buffers.n_step, there)
        self._direct.run(ops, buffers, counters, there, steps, self._blocks, order)
        if self._estimated and not self._estimates_here:
            self._estimate(ops, buffers)
        self._counters_seen.copy_(counters, non_blocking=True)
