"""Fields of a batch, gathered in one pass into a ring of preallocated tensors."""

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
from deepspeed_gear.batching.field_rows import SOURCES, FieldRows, Rows, affine, byte_rows
from deepspeed_gear.config import ResolvedField
from deepspeed_gear.config.cross_checks import N_STEP_NAMES
from deepspeed_gear.config.field_checks import ESTIMATED, read_fields
from deepspeed_gear.config.options import NStepConfig
from deepspeed_gear.data.compressed_rows import CompressedRows
from deepspeed_gear.data.dataset_statistics import ColumnStatistics, running_statistics
from deepspeed_gear.ops import Ops
from deepspeed_gear.ops.records import Align, Follows, GatherSpec, Pad, Resolution, lower
from deepspeed_gear.ops.windows import is_no_sample, rows_of
from deepspeed_gear.schema import Column

ALIGNS = {"in_place": Align.IN_PLACE, "left": Align.LEFT, "right": Align.RIGHT}
PADS = {"zero": Pad.VALUE, "value": Pad.VALUE, "edge": Pad.EDGE}
N_STEP_DTYPES = (torch.float32, torch.float32, torch.int64)  # of the tensors of N_STEP_NAMES
_REWARD = "\0reward"  # the input of an estimate whose mask is that of the window
_TAKES_MANY = TorchVersion(torch.__version__) >= "2.5"


def note_overwritten(tensors: Sequence[torch.Tensor]) -> None:
    """Increment tensors' versions, so that a backward pass that has saved their old
    values raises.
    """
    if _TAKES_MANY:
        increment_version(tensors)
        return
    for tensor in tensors:
        increment_version(tensor)


class FieldGroup:
    """Fields that one call of `gather_` gathers, `which` among all; its spec numbers their masks
    anew.
    """

    def __init__(
        self,
        which: list[int],
        specs: Sequence[GatherSpec] | Mapping[int, GatherSpec],
        rows: Sequence[FieldRows],
    ) -> None:
        self.which = which
        self.masks = [specs[i].mask for i in which if specs[i].mask >= 0]  # that they write
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
        records: torch.Tensor,
        steps: torch.Tensor | None,
        threads: int,
        order: torch.Tensor | None = None,
    ) -> None:
        """Gather the fields into the tensors of all fields; the other arguments are those of
        `gather_`.
        """
        if not self.which:
            return
        outs = [buffers.outs[i] for i in self.which]
        masks = [buffers.masks[i] for i in self.masks]
        converted = self.columns, self.shifts, self.gains
        given = records, steps, self.spec, self.pads, threads
        ops.gather_(outs, masks, counters, *converted, *given, order)


class CompressedFields:
    """Fields of a compressed column: a batch's rows are decoded, each once, and gathered from
    there. The op reads only the rows of windows, so a resolution with another first row makes it
    read the decoded rows.
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
        self, records: torch.Tensor, steps: torch.Tensor | None
    ) -> list[tuple[FieldGroup, torch.Tensor]]:
        """Decode the rows of a batch; return groups, and the records that they are
        gathered with.
        """
        first = records[:, Resolution.FIRST_ROW, None]
        is_sample = ~is_no_sample(records)[:, None]
        windows = []
        read = []
        given = []
        for window, group in self._groups.items():
            step, real = rows_of(window, records, steps)
            windows.append(
                (group, step[:, :1])
            )  # the first row of the window that is read, if one is
            read.append((first + step)[real | (is_sample & (window.pad == Pad.EDGE))])
        rows = torch.from_numpy(np.unique(torch.cat(read).numpy()))
        self._stored.decode(rows.numpy(), self._bytes)
        for group, begin in windows:
            moved = (
                records.clone()
            )  # of rows [5, 6, 7, 20, 21] a window that begins at row 20 is at place 3
            moved[:, Resolution.FIRST_ROW] = (
                torch.searchsorted(rows, first + begin) - begin
            ).squeeze(1)
            given.append((group, moved))
        return given


@dataclass
class Buffers:
    """The tensors of one ring entry."""

    outs: list[torch.Tensor]
    masks: list[torch.Tensor] = dataclasses.field(default_factory=list)
    n_step: list[torch.Tensor] = dataclasses.field(
        default_factory=list
    )  # return_n, discount, steps_n
    estimates: list[torch.Tensor] = dataclasses.field(
        default_factory=list
    )  # as ESTIMATED: whole windows
    # Of a whole batch, by name and all together.
    tensors: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    mask: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    all: list[torch.Tensor] = dataclasses.field(default_factory=list)
    lifetime: BatchLifetime | None = None  # of its current values
    calls: list[Any] = dataclasses.field(
        default_factory=list
    )  # native GatherCalls into them: fields, goals
    addresses: list[int] = dataclasses.field(
        default_factory=list
    )  # of the calls; empty: ops are called

    @cached_property
    def storages(self) -> frozenset[int]:
        return frozenset(
            storage for tensor in self.all if (storage := storage_of(tensor)) is not None
        )

    def part(self, first: int, end: int) -> Buffers:
        outs, masks, n_step, estimates = (
            [tensor[first:end] for tensor in tensors]
            for tensors in (self.outs, self.masks, self.n_step, self.estimates)
        )
        return Buffers(outs, masks, n_step, estimates)


def n_step_columns(table: Rows) -> list[str | None]:
    """Return the names of reward, terminated and truncated of a table; None for missing ones."""
    found = [table.schema.role(role) for role in ("reward", "terminated", "truncated")]
    return [None if column is None else column.name for column in found]


class NStepReturns:
    """Computes n-step returns, discounts and numbers of steps, on the device of the columns in
    `source`.
    """

    def __init__(
        self,
        config: NStepConfig,
        table: Rows,
        source: Callable[[str], torch.Tensor],
        device: torch.device,
    ) -> None:
        self._n = config.n
        self._columns = [None if name is None else source(name) for name in n_step_columns(table)]
        powers = list(accumulate(repeat(config.gamma, config.n), operator.mul, initial=1.0))
        self._powers = torch.tensor(powers, dtype=torch.float64, device=device)

    def fill(self, ops: Ops, outs: list[torch.Tensor], records: torch.Tensor) -> torch.Tensor:
        """Overwrite the n-step tensors of a batch; return the numbers of steps. [B], int64."""
        ops.n_step_(*outs, *self._columns, self._powers, records, self._n)
        return outs[2]


@dataclass(frozen=True)
class GatherOptions:
    """The fields and the size of batches: the same for the gatherers of all tables that they come
    from.
    """

    fields: Sequence[ResolvedField]
    statistics: Mapping[
        str, ColumnStatistics
    ]  # by column, of those that fields are normalised with
    n_step: NStepConfig | None  # None: no n-step returns
    num_samples: int  # of a batch
    engine_dtype: torch.dtype  # of fields whose dtype is that of the engine
    threads: int  # of the native calls; on a device the blocks of a kernel


class Gatherer:
    """Gathers batches of fixed fields and size, into a ring of `depth` batches. Not thread-safe."""

    reads_in_place = (
        False  # whether a device reads the store itself; then rows stay pinned until it has
    )

    def __init__(self, options: GatherOptions, table: Rows, depth: int) -> None:
        fields = options.fields
        n_step = options.n_step
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
        self._n_step = n_step
        self._n_step_here: NStepReturns | None = None  # computed by `fill`
        if n_step is not None:
            self._n_step_here = NStepReturns(n_step, table, table.gather_source, self._device)
        self.counters = torch.zeros(
            3, dtype=torch.int64, device=self._device
        )  # real rows, all rows, bytes
        self._rows = [
            FieldRows.of(field, table, options.statistics, options.engine_dtype)
            for field in self._fields
        ]
        self._specs: list[GatherSpec] = []
        self._shapes: list[
            tuple[tuple[int, ...], torch.dtype]
        ] = []  # of each field's part of a sample
        self._mask_lengths: list[int | None] = []
        self._mask_of: dict[str, int] = {}
        # Fields of equal windows share the mask that the first of them writes.
        windows: dict[tuple[object, ...], int] = {}
        goals: dict[int, GatherSpec] = {}
        goal_rows: list[FieldRows] = []
        for number, (field, rows) in enumerate(zip(self._fields, self._rows, strict=True)):
            own = (
                field.name if field.hindsight is not None else None
            )  # a relabelled goal is always real
            if field.is_input:  # they may be gathered elsewhere than others
                own = "\0"
            part = field.collected_length
            place = field.first, field.length, field.align, field.follows, field.part_first, part
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
            self._shapes.append(((*(() if part is None else (part,)), *rows.shape), rows.dtype))
            if field.hindsight is not None:
                achieved = table.gather_source(field.hindsight.name)
                if field.mask_only:
                    achieved = byte_rows(achieved, table)
                source = SOURCES[field.hindsight.rows]
                goal_rows.append(replace(rows, source=source, column=achieved, pad=0.0))
                goals[number] = GatherSpec(
                    source, follows=Follows.GOAL, elements=rows.elements, mask=mask
                )
        #: The goals of relabelled samples.
        self._goals = FieldGroup(list(goals), goals, goal_rows) if goals else None
        plain = [i for i, rows in enumerate(self._rows) if rows.stored is None]
        self._all = self._here = FieldGroup(plain, self._specs, [self._rows[i] for i in plain])
        stored = dict.fromkeys(rows.stored for rows in self._rows if rows.stored is not None)
        self._compressed = [
            CompressedFields(c, self._specs, self._rows, num_samples) for c in stored
        ]
        self._numbers: np.ndarray | None = None  # running moments that `normalize_with` has set
        self._divide(num_samples)
        self.ring = [self.buffers(num_samples) for _ in range(depth)]
        self._turn = 0

    def _divide(self, num_samples: int) -> None:
        """Divide the fields among calls, before buffers are allocated; here all in one call."""

    def _groups(self) -> list[FieldGroup]:
        return [self._all] if self._goals is None else [self._all, self._goals]

    def normalize_with(self, moments: np.ndarray, columns: Sequence[Column]) -> None:
        """Normalise batches from now on with the running moments of columns. [6, elements],
        float64.

        Shift and gain are overwritten in place, where native calls read them. Cost: a comparison;
        where they have changed, about 0.1 ms a field.
        """
        if self._numbers is not None and np.array_equal(self._numbers, moments):
            return
        self._numbers = moments.copy()
        known = running_statistics(self._numbers, columns)
        for number, (field, rows) in enumerate(zip(self._fields, self._rows, strict=True)):
            if field.normalize is None:
                continue
            shift, gain = affine(field, known, rows.shape)
            for group in (group for group in self._groups() if number in group.which):
                at = group.which.index(number)
                group.shifts[at].copy_(shift)
                group.gains[at].copy_(gain)

    def totals(self) -> torch.Tensor:
        """Return the totals of real rows, all rows and bytes gathered. [3], int64."""
        return self.counters

    def buffers(self, num_samples: int) -> Buffers:
        """Allocate the tensors of a batch, with the native call that gathers into them."""
        sizes = self._sizes(num_samples)
        buffers = self._named(
            [torch.zeros(size, dtype=dtype, device=self._device) for size, dtype in sizes]
        )
        if self._ops.is_direct and self._all.which:
            overwritten = buffers.all  # the first call increments their versions
            for group in [self._all] if self._goals is None else [self._all, self._goals]:
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
        """Return shape and dtype of every field, mask and n-step return of a batch, in
        this order.
        """
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
        first = len(self._shapes)
        end = len(self._shapes) + len(self._mask_lengths)
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
                part = slice(field.part_first, field.part_first + (field.collected_length or 1))
                whole = (
                    estimates[ESTIMATED.index(str(field.derived))],
                    masks[self._mask_of[_REWARD]],
                )
                own, real = (x[:, part] if field.length else x[:, part].squeeze(1) for x in whole)
            mask[field.name] = real
            if not field.mask_only:
                tensors[field.name] = own
        tensors.update(zip(N_STEP_NAMES if n_step else (), n_step, strict=True))
        return Buffers(outs, masks, n_step, estimates, tensors, mask, every)

    def gather(
        self, records: torch.Tensor, goal_step: torch.Tensor | None = None
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Gather the samples that records describe into the next batch of the ring: fields and
        masks by name.

        Args:
            records: Resolutions. [B, 8], int64, contiguous.
            goal_step: Rows of the achieved goals of relabelled samples. [B], int64.
        Cost: every real row is read once and written once; no allocation.
        """
        buffers = self._next()
        self.fill(buffers, records, goal_step)
        return dict(buffers.tensors), dict(buffers.mask)

    def gather_from(
        self, parts: Sequence[tuple[Gatherer, torch.Tensor, torch.Tensor | None]]
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Gather samples of tables into one batch of this gatherer's ring, in the order of the
        parts.

        These are gatherers of equal fields, each with the records of its table ([n, 8], B together)
        and their goals, as in `gather`.
        """
        buffers = self._next()
        first = 0
        if buffers.addresses:  # they fill whole batches only
            note_overwritten(buffers.all)
        for gatherer, records, goal_step in parts:
            end = first + len(records)
            if end > first:
                gatherer.fill(buffers.part(first, end), records, goal_step)
            first = end
        return dict(buffers.tensors), dict(buffers.mask)

    def _next(self) -> Buffers:
        buffers = self._latest = self.ring[self._turn]
        self._turn = (self._turn + 1) % len(self.ring)
        if buffers.lifetime is not None:
            buffers.lifetime.end()
            buffers.lifetime = None
        if not buffers.addresses:
            note_overwritten(buffers.all)
        return buffers

    def lend(self, batch: Batch) -> None:
        """Bind a batch of the tensors gathered last to its ring entry: it ends when that is filled
        again.
        """
        self._latest.lifetime = BatchLifetime(self._latest.storages)
        self._latest.lifetime.bind(batch)

    def fill(
        self, buffers: Buffers, records: torch.Tensor, goal_step: torch.Tensor | None = None
    ) -> None:
        """Gather the samples that records describe into a batch of the ring: only the ops."""
        n_step = self._n_step_here
        steps = None if n_step is None else n_step.fill(self._ops, buffers.n_step, records)
        if buffers.addresses:
            self._gather_into(buffers.addresses[0], records, steps)
        else:
            self._here.run(self._ops, buffers, self.counters, records, steps, self._threads)
        for fields in self._compressed:
            for group, moved in fields.decode(records, steps):
                group.run(self._ops, buffers, self.counters, moved, steps, self._threads)
        if self._goals is not None and goal_step is not None:
            if buffers.addresses:
                self._gather_into(buffers.addresses[1], records, goal_step)
            else:
                self._goals.run(
                    self._ops, buffers, self.counters, records, goal_step, self._threads
                )
        if self._estimates_here:
            self._estimate(self._ops, buffers)

    def _estimate(self, ops: Ops, buffers: Buffers) -> None:
        """Overwrite advantages and value targets, from their inputs in the same buffers."""
        outs = [None if i is None else buffers.outs[i] for i in self._inputs]
        mask = buffers.masks[self._mask_of[_REWARD]]
        ops.advantages_(*buffers.estimates, *outs[:5], mask, *outs[5:], self._factors)
