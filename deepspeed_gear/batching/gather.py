"""Gather: fields of a batch into a ring of preallocated tensors, n-step returns, and advantages."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, repeat
from typing import Any

import numpy as np
import torch
from torch.autograd.graph import increment_version
from torch.torch_version import TorchVersion

from deepspeed_gear.batching.batch import Batch, BatchLifetime, storage_of
from deepspeed_gear.batching.field_rows import SOURCES, FieldRows, Rows, byte_rows
from deepspeed_gear.batching.normalisation import shift_and_gain
from deepspeed_gear.config import ResolvedField
from deepspeed_gear.config.field_names import N_STEP_NAMES
from deepspeed_gear.config.field_resolution import ESTIMATED
from deepspeed_gear.config.options import NStepConfig
from deepspeed_gear.config.resolved_field import read_fields
from deepspeed_gear.data.compressed_rows import CompressedRows
from deepspeed_gear.data.statistics.dataset_statistics import ColumnStatistics, running_statistics
from deepspeed_gear.ops import Ops
from deepspeed_gear.ops.records import Align, Follows, GatherSpec, Pad, Resolution, lower
from deepspeed_gear.ops.windows import is_no_sample, rows_of
from deepspeed_gear.schema import Column

ALIGNS = {"in_place": Align.IN_PLACE, "left": Align.LEFT, "right": Align.RIGHT}
PADS = {"zero": Pad.VALUE, "value": Pad.VALUE, "edge": Pad.EDGE}
N_STEP_DTYPES = (torch.float32, torch.float32, torch.int64)  # as N_STEP_NAMES
_REWARD = "\0reward"  # the input of an estimate whose mask is that of the window
_TAKES_MANY = TorchVersion(torch.__version__) >= "2.5"


def note_overwritten(tensors: Sequence[torch.Tensor]) -> None:
    """Increment the versions of tensors: a backward pass that saved their old values raises."""
    if _TAKES_MANY:
        increment_version(tensors)
        return
    for tensor in tensors:
        increment_version(tensor)


class FieldGroup:
    """Fields that one call of the op `gather_` gathers.

    `which` are their indices among all fields. The spec of the group numbers the masks anew: for
    fields that write the masks 2 and 5, the call gets two masks, 0 and 1.
    """

    def __init__(
        self,
        which: list[int],
        specs: Sequence[GatherSpec] | Mapping[int, GatherSpec],
        rows: Sequence[FieldRows],
    ) -> None:
        self.which = which
        self.masks = [specs[i].mask for i in which if specs[i].mask >= 0]
        numbers = {-1: -1} | {mask: number for number, mask in enumerate(self.masks)}
        self.spec = lower(replace(specs[i], mask=numbers[specs[i].mask]) for i in which)
        self.columns = [row.column for row in rows]
        self.shifts = [row.shift for row in rows]
        self.gains = [row.gain for row in rows]
        self.pads = [row.pad for row in rows]

    def run(
        self,
        ops: Ops,
        buffers: Buffers,
        counters: torch.Tensor,
        resolutions: torch.Tensor,
        steps: torch.Tensor | None,
        threads: int,
        order: torch.Tensor | None = None,
    ) -> None:
        """Gather the fields into a ring entry; the other arguments are those of `gather_`."""
        if not self.which:
            return
        outs = [buffers.outs[i] for i in self.which]
        masks = [buffers.masks[i] for i in self.masks]
        converted = self.columns, self.shifts, self.gains
        given = resolutions, steps, self.spec, self.pads, threads
        ops.gather_(outs, masks, counters, *converted, *given, order)


class CompressedFields:
    """Fields of a compressed column, gathered from rows that are decoded once per batch.

    The op reads only the rows of windows. So a resolution whose first row is moved makes it read
    the decoded rows.
    """

    def __init__(
        self,
        stored: CompressedRows,
        specs: list[GatherSpec],
        rows: list[FieldRows],
        num_samples: int,
    ) -> None:
        self._stored = stored
        windows: dict[GatherSpec, list[int]] = {}
        for i, spec in enumerate(specs):
            if rows[i].stored is stored:
                windows.setdefault(replace(spec, mask=-1), []).append(i)
        column = rows[next(iter(windows.values()))[0]].column
        most = num_samples * sum(window.part_count for window in windows)
        decoded = column.new_empty(most, *column.shape[1:])
        self._bytes = decoded.view(-1).view(torch.uint8).numpy()
        self._groups = {
            window: FieldGroup(which, specs, [replace(rows[i], column=decoded) for i in which])
            for window, which in windows.items()
        }

    def decode(
        self, resolutions: torch.Tensor, steps: torch.Tensor | None
    ) -> list[tuple[FieldGroup, torch.Tensor]]:
        """Decode the rows of a batch; return each group with the resolutions to gather it with."""
        first = resolutions[:, Resolution.FIRST_ROW, None]
        is_sample = ~is_no_sample(resolutions)[:, None]
        begins = []  # the first row of each window that is read, if one is; by group
        read = []
        for window in self._groups:
            step, real = rows_of(window, resolutions, steps)
            begins.append(step[:, :1])
            read.append((first + step)[real | (is_sample & (window.pad == Pad.EDGE))])
        rows = torch.from_numpy(np.unique(torch.cat(read).numpy()))
        self._stored.decode(rows.numpy(), self._bytes)
        groups = []
        for group, begin in zip(self._groups.values(), begins, strict=True):
            # Of the decoded rows [5, 6, 7, 20, 21], row 20 is at place 3. If it is the second step
            # of its trajectory, the moved first row is 2: the op reads place 2 + 1.
            moved = resolutions.clone()
            places = torch.searchsorted(rows, first + begin) - begin
            moved[:, Resolution.FIRST_ROW] = places.squeeze(1)
            groups.append((group, moved))
        return groups


@dataclass
class Buffers:
    """Tensors of one ring entry."""

    outs: list[torch.Tensor]
    masks: list[torch.Tensor]
    n_step: list[torch.Tensor]  # those of N_STEP_NAMES, or none
    estimates: list[torch.Tensor]  # those of ESTIMATED, of whole windows, or none
    # Fields and masks of a batch by name, and all tensors; empty in a part of an entry.
    tensors: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    mask: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    all: list[torch.Tensor] = dataclasses.field(default_factory=list)
    lifetime: BatchLifetime | None = None  # lifetime of the batch in the entry
    # Native GatherCalls into the tensors, for fields and goals, and their addresses. None: the ops
    # are called instead, through torch.
    calls: list[Any] = dataclasses.field(default_factory=list)
    addresses: list[int] = dataclasses.field(default_factory=list)

    @cached_property
    def storages(self) -> frozenset[int]:
        return frozenset(
            storage for tensor in self.all if (storage := storage_of(tensor)) is not None
        )

    def part(self, first: int, end: int) -> Buffers:
        """Return the samples [first, end) of the entry, to gather one table's samples into."""

        def part(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
            return [tensor[first:end] for tensor in tensors]

        return Buffers(part(self.outs), part(self.masks), part(self.n_step), part(self.estimates))


def n_step_columns(table: Rows) -> list[str | None]:
    """Return the names of reward, terminated and truncated of a table; None for missing ones."""
    columns = [table.schema.role(role) for role in ("reward", "terminated", "truncated")]
    return [None if column is None else column.name for column in columns]


class NStepReturns:
    """n-step returns, discounts and numbers of steps, computed on the columns' device."""

    def __init__(
        self,
        config: NStepConfig,
        table: Rows,
        source: Callable[[str], torch.Tensor],
        device: torch.device,
    ) -> None:
        self._n = config.n
        self._columns = [None if name is None else source(name) for name in n_step_columns(table)]
        # gamma^0, ..., gamma^n by multiplication: a backend's `pow` may differ in the last bit.
        powers = list(accumulate(repeat(config.gamma, config.n), operator.mul, initial=1.0))
        self._powers = torch.tensor(powers, dtype=torch.float64, device=device)

    def fill(self, ops: Ops, outs: list[torch.Tensor], resolutions: torch.Tensor) -> torch.Tensor:
        """Overwrite the n-step tensors of a batch; return the numbers of steps. [B], int64."""
        ops.n_step_(*outs, *self._columns, self._powers, resolutions, self._n)
        return outs[2]


@dataclass(frozen=True)
class GatherOptions:
    """Fields and size of batches, the same for the gatherers of all tables of a batch."""

    fields: Sequence[ResolvedField]
    statistics: Mapping[str, ColumnStatistics]  # by column that fields are normalised by
    n_step: NStepConfig | None  # None: no n-step returns
    num_samples: int  # samples of a batch
    engine_dtype: torch.dtype  # dtype of fields whose dtype is "engine"
    threads: int  # threads of a native call; on a device blocks of a kernel


class Gatherer:
    """Gatherer of batches of fixed fields and size, with a ring of `depth` batches.

    A ring entry is written again after `depth` batches: that ends the batch in it, and increments
    the versions of its tensors, so that a late backward pass raises. Not thread-safe.
    """

    # Whether a device reads the store itself: then rows stay pinned until it has read them.
    reads_in_place = False

    def __init__(self, options: GatherOptions, table: Rows, depth: int) -> None:
        fields = options.fields
        num_samples = options.num_samples
        self._table = table
        self._ops = table.ops
        self._threads = options.threads
        self._gather_into: Any = self._ops.native.gather_into
        self._device = table.device
        self._of_batch = list(fields)
        self._fields = read_fields(fields)
        self._estimated = next((field for field in fields if field.inputs), None)
        self._estimates_here = self._estimated is not None  # computed by `fill`
        if (of := self._estimated) is not None:
            self._factors = list(of.factors)
            self._inputs = [
                None if field is None else self._fields.index(field) for field in of.inputs
            ]
        self._n_step = options.n_step
        self._n_step_here: NStepReturns | None = None  # computed by `fill`
        if self._n_step is not None:
            self._n_step_here = NStepReturns(self._n_step, table, table.gather_source, self._device)
        # Totals: real rows, all rows, bytes.
        self.counters = torch.zeros(3, dtype=torch.int64, device=self._device)
        self._rows = [
            FieldRows.of(field, table, options.statistics, options.engine_dtype)
            for field in self._fields
        ]
        self._specs: list[GatherSpec] = []
        # Shape and dtype of each field for one sample; steps of each mask, None: no time axis.
        self._shapes: list[tuple[tuple[int, ...], torch.dtype]] = []
        self._mask_lengths: list[int | None] = []
        self._mask_of: dict[str, int] = {}
        # Fields of equal windows share the mask that the first of them writes. A relabelled goal is
        # always real, and inputs of estimates may be gathered elsewhere than other fields: these
        # have masks of their own.
        windows: dict[tuple[object, ...], int] = {}
        goals: dict[int, GatherSpec] = {}
        goal_rows: list[FieldRows] = []
        for number, (field, rows) in enumerate(zip(self._fields, self._rows, strict=True)):
            own = "\0" if field.is_input else field.name if field.hindsight is not None else None
            part = field.gathered_length
            place = (field.first, field.length, field.align, field.follows, field.part_first, part)
            mask = windows.setdefault((rows.source, *place, own), len(windows))
            is_new = mask == len(self._mask_lengths)
            if is_new:
                self._mask_lengths.append(part)
            self._mask_of[field.name] = mask
            self._specs.append(
                GatherSpec(
                    rows.source,
                    offset=field.first,
                    length=field.length or 1,
                    align=ALIGNS[field.align],
                    follows=int(field.follows),
                    pad=PADS[field.pad_kind],
                    elements=rows.elements,
                    mask=mask if is_new else -1,
                    part_first=field.part_first,
                    part_count=part or 1,
                )
            )
            time_axis = () if part is None else (part,)
            self._shapes.append(((*time_axis, *rows.shape), rows.dtype))
            if field.hindsight is not None:
                achieved = table.gather_source(field.hindsight.name)
                if field.mask_only:
                    achieved = byte_rows(achieved, table)
                source = SOURCES[field.hindsight.rows]
                goal_rows.append(replace(rows, source=source, column=achieved, pad=0.0))
                goals[number] = GatherSpec(
                    source, follows=Follows.GOAL, elements=rows.elements, mask=mask
                )
        # The goals of relabelled samples, gathered over the fields' own ones.
        self._goals = FieldGroup(list(goals), goals, goal_rows) if goals else None
        plain = [i for i, rows in enumerate(self._rows) if rows.stored is None]
        self._all = self._here = FieldGroup(plain, self._specs, [self._rows[i] for i in plain])
        stored = dict.fromkeys(rows.stored for rows in self._rows if rows.stored is not None)
        self._compressed = [
            CompressedFields(c, self._specs, self._rows, num_samples) for c in stored
        ]
        self._moments: np.ndarray | None = None  # running moments that `normalize_with` has set
        # Whether `fill` makes one native call, of the resolutions alone.
        self._is_one_call = not (
            self._n_step or self._estimates_here or self._compressed or self._goals
        )
        self._divide(num_samples)
        self.ring = [self.buffers(num_samples) for _ in range(depth)]
        self._turn = 0

    def _divide(self, num_samples: int) -> None:
        """Divide the fields among calls before buffers are allocated; on a host all are in one."""

    def _groups(self) -> list[FieldGroup]:
        """Return the groups of fields that calls gather: all fields, and goals."""
        return [self._all] if self._goals is None else [self._all, self._goals]

    def normalize_with(self, moments: np.ndarray, columns: Sequence[Column]) -> None:
        """Normalise later batches with the running moments of columns.

        Shift and gain are overwritten in place, where native calls read them. Cost: a comparison;
        if the moments have changed, about 0.1 ms per field.

        Args:
            moments: As `running_statistics` reads them. [6, elements], float64.
            columns: The columns that fields are normalised by.
        """
        if self._moments is not None and np.array_equal(self._moments, moments):
            return
        self._moments = moments.copy()
        known = running_statistics(self._moments, columns)
        for number, (field, rows) in enumerate(zip(self._fields, self._rows, strict=True)):
            if field.normalize is None:
                continue
            shift, gain = shift_and_gain(field, known, rows.shape)
            for group in self._groups():
                if number in group.which:
                    at = group.which.index(number)
                    group.shifts[at].copy_(shift)
                    group.gains[at].copy_(gain)

    def totals(self) -> torch.Tensor:
        """Return the totals of real rows, all rows and bytes gathered. [3], int64."""
        return self.counters

    def buffers(self, num_samples: int) -> Buffers:
        """Allocate the tensors of a batch, with the native call that gathers into them."""
        buffers = self._named(
            [
                torch.zeros(size, dtype=dtype, device=self._device)
                for size, dtype in self._sizes(num_samples)
            ]
        )
        if self._ops.is_direct and self._all.which:
            overwritten = buffers.all  # the first call increments their versions
            for group in self._groups():
                call = self._ops.native.GatherCall(
                    outs=[buffers.outs[i] for i in group.which],
                    masks=[buffers.masks[i] for i in group.masks],
                    counters=self.counters,
                    columns=group.columns,
                    shifts=group.shifts,
                    gains=group.gains,
                    spec=group.spec,
                    pad_values=group.pads,
                    threads=self._threads,
                    overwritten=overwritten,
                )
                buffers.calls.append(call)
                overwritten = []
            buffers.addresses = [call.address for call in buffers.calls]
        return buffers

    def _sizes(self, num_samples: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Return the shape and dtype of each tensor: fields, masks, n-step returns, estimates."""
        outs = [((num_samples, *shape), dtype) for shape, dtype in self._shapes]
        masks = [
            (num_samples,) if length is None else (num_samples, length)
            for length in self._mask_lengths
        ]
        n_step = N_STEP_DTYPES if self._n_step else ()
        estimated = [] if self._estimated is None else [(num_samples, self._estimated.length or 1)]
        return [
            *outs,
            *((size, torch.bool) for size in masks),
            *(((num_samples,), dtype) for dtype in n_step),
            *((size, torch.float32) for size in estimated * len(ESTIMATED)),
        ]

    def _named(self, every: list[torch.Tensor]) -> Buffers:
        """Return a ring entry of the tensors of a batch, in the order of `_sizes`."""
        first = len(self._shapes)
        end = first + len(self._mask_lengths)
        last = end + (len(N_STEP_NAMES) if self._n_step else 0)
        outs = every[:first]
        masks = every[first:end]
        n_step = every[end:last]
        estimates = every[last:]
        known = {field.name: out for field, out in zip(self._fields, outs, strict=True)}
        tensors = {}
        mask = {}
        for field in self._of_batch:
            if not field.inputs:
                own = known[field.name]
                real = masks[self._mask_of[field.name]]
            else:  # windows are estimated whole, also where a rank has a part of them
                part = slice(field.part_first, field.part_first + (field.gathered_length or 1))
                own = estimates[ESTIMATED.index(str(field.derived))][:, part]
                real = masks[self._mask_of[_REWARD]][:, part]
                if not field.length:
                    own = own.squeeze(1)
                    real = real.squeeze(1)
            mask[field.name] = real
            if not field.mask_only:
                tensors[field.name] = own
        tensors.update(zip(N_STEP_NAMES if n_step else (), n_step, strict=True))
        return Buffers(outs, masks, n_step, estimates, tensors, mask, every)

    @property
    def upcoming_call(self) -> int:
        """Address of the native call that gathers the whole next batch; 0: more is to be done.

        The batch that its tensors held ends. `take_gathered` follows once the call was made.
        """
        if not self._is_one_call:
            return 0
        buffers = self._upcoming()
        return buffers.addresses[0] if buffers.addresses else 0

    def take_gathered(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Return fields and masks of the batch that `upcoming_call` has gathered, as `gather`."""
        buffers = self._latest = self.ring[self._turn]
        self._turn = (self._turn + 1) % len(self.ring)
        return buffers.tensors.copy(), buffers.mask.copy()

    def gather(
        self, resolutions: torch.Tensor, goal_step: torch.Tensor | None = None
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Gather samples into the next batch of the ring; return fields and masks by name.

        Args:
            resolutions: Resolutions. [B, 8], int64, contiguous.
            goal_step: Rows of the achieved goals of relabelled samples. [B], int64.
        Cost: every real row is read once and written once; no allocation.
        """
        buffers = self._next()
        self.fill(buffers, resolutions, goal_step)
        return buffers.tensors.copy(), buffers.mask.copy()

    def gather_from(
        self, parts: Sequence[tuple[Gatherer, torch.Tensor, torch.Tensor | None]]
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Gather samples of several tables into the next batch of this gatherer's ring.

        `parts` are gatherers of equal fields, each with the resolutions of its table ([n, 8], B
        together) and their goals, as in `gather`. Their samples follow each other in this order.
        """
        buffers = self._next()
        first = 0
        # Native calls fill whole batches only: `fill` calls the ops for parts.
        if buffers.addresses:
            note_overwritten(buffers.all)
        for gatherer, resolutions, goal_step in parts:
            end = first + len(resolutions)
            if end > first:
                gatherer.fill(buffers.part(first, end), resolutions, goal_step)
            first = end
        return buffers.tensors.copy(), buffers.mask.copy()

    def _upcoming(self) -> Buffers:
        """Return the next ring entry: the batch that it holds has ended."""
        buffers = self.ring[self._turn]
        if buffers.lifetime is not None:
            buffers.lifetime.end()
            buffers.lifetime = None
        return buffers

    def _next(self) -> Buffers:
        """Return the next ring entry, to be written."""
        buffers = self._latest = self._upcoming()
        self._turn = (self._turn + 1) % len(self.ring)
        if not buffers.addresses:
            note_overwritten(buffers.all)
        return buffers

    def lend(self, batch: Batch) -> None:
        """Bind a batch of the tensors gathered last to its ring entry, whose reuse ends it."""
        buffers = self._latest
        lifetime = BatchLifetime(buffers.storages)
        buffers.lifetime = lifetime
        lifetime.bind(batch)

    def fill(
        self, buffers: Buffers, resolutions: torch.Tensor, goal_step: torch.Tensor | None = None
    ) -> None:
        """Gather samples into a given batch of the ring: only the calls of ops."""
        n_step = self._n_step_here
        steps = None if n_step is None else n_step.fill(self._ops, buffers.n_step, resolutions)
        if buffers.addresses:
            self._gather_into(buffers.addresses[0], resolutions, steps)
        else:
            self._here.run(self._ops, buffers, self.counters, resolutions, steps, self._threads)
        for fields in self._compressed:
            for group, moved in fields.decode(resolutions, steps):
                group.run(self._ops, buffers, self.counters, moved, steps, self._threads)
        # Goals replace stored ones of the relabelled samples, so they come after the fields.
        if self._goals is not None and goal_step is not None:
            if buffers.addresses:
                self._gather_into(buffers.addresses[1], resolutions, goal_step)
            else:
                self._goals.run(
                    self._ops, buffers, self.counters, resolutions, goal_step, self._threads
                )
        if self._estimates_here:
            self._estimate(self._ops, buffers)

    def _estimate(self, ops: Ops, buffers: Buffers) -> None:
        """Overwrite advantages and value targets, from their inputs in the same buffers."""
        outs = [None if i is None else buffers.outs[i] for i in self._inputs]
        mask = buffers.masks[self._mask_of[_REWARD]]
        ops.advantages_(*buffers.estimates, *outs[:5], mask, *outs[5:], self._factors)
