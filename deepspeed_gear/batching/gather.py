"""Fields of a batch, gathered in one pass into a ring of preallocated tensors, and packs of
trajectories.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, repeat
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch.autograd.graph import increment_version
from torch.torch_version import TorchVersion

from deepspeed_gear.batching.batch import Batch, BatchLifetime, storage_of
from deepspeed_gear.config import ResolvedField
from deepspeed_gear.config.cross_checks import N_STEP_NAMES
from deepspeed_gear.config.field_checks import ESTIMATED, read_fields
from deepspeed_gear.config.options import NStepConfig
from deepspeed_gear.data.compressed_rows import CompressedRows
from deepspeed_gear.data.dataset_statistics import (
    LEAST_SPREAD,
    ColumnStatistics,
    running_statistics,
)
from deepspeed_gear.data.opaque_rows import decode
from deepspeed_gear.errors import ConfigError
from deepspeed_gear.ops import Ops
from deepspeed_gear.ops.conversion import convert
from deepspeed_gear.ops.records import Align, Follows, GatherSpec, Pad, Resolution, Source, lower
from deepspeed_gear.ops.windows import is_no_sample, rows_of
from deepspeed_gear.schema import DTYPES, Column, Schema
from deepspeed_gear.store.table import Table
from deepspeed_gear.store.table_spec import RETURN_TO_GO

SOURCES = {
    "T": Source.STEPS,
    "T+1": Source.STEPS_PLUS_ONE,
    "1": Source.TRAJECTORY,
}  # by a column's `rows`
COMPUTED = {"timestep": Source.TIMESTEP, "position": Source.POSITION}
ALIGNS = {"in_place": Align.IN_PLACE, "left": Align.LEFT, "right": Align.RIGHT}
PADS = {"zero": Pad.VALUE, "value": Pad.VALUE, "edge": Pad.EDGE}
#: Of the tensors that N_STEP_NAMES names.
N_STEP_DTYPES = (torch.float32, torch.float32, torch.int64)
PERIOD_ELEMENTS = (
    4096  # shift and gain are repeated up to this many elements, so that inner loops are long
)
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


class Rows(Protocol):
    """Source of batches: a Table, or a RingTable on a device."""

    @property
    def ops(self) -> Ops: ...

    @property
    def schema(self) -> Schema: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def compressed(self) -> Mapping[str, CompressedRows]: ...

    def gather_source(self, name: str) -> torch.Tensor:
        """Return the rows of a column, of a compressed one none. [rows or slots, *shape]."""
        ...


@dataclass(frozen=True)
class FieldRows:
    """The rows that a field reads, and their conversion: (x - shift) * gain, as `dtype`."""

    source: int  # the op's code for the rows
    column: torch.Tensor  # [rows or slots, *shape]; empty where the op computes the field
    shape: tuple[int, ...]
    dtype: torch.dtype
    # As `affine` returns them, on the column's device.
    shift: torch.Tensor
    gain: torch.Tensor
    pad: float  # value of the rows outside of the trajectory
    stored: CompressedRows | None = None  # what the rows are decoded from

    @classmethod
    def of(
        cls,
        field: ResolvedField,
        table: Rows,
        statistics: Mapping[str, ColumnStatistics],
        engine_dtype: torch.dtype,
    ) -> FieldRows:
        shape: tuple[int, ...] = ()
        stored = None if field.column is None else table.compressed.get(field.column.name)
        if field.derived in COMPUTED:
            source = COMPUTED[field.derived]
            column = torch.empty(0, dtype=torch.int64, device=table.device)
        elif field.derived == "return_to_go":
            source = SOURCES["T"]
            column = table.gather_source(RETURN_TO_GO)
        else:
            assert field.column is not None
            source = SOURCES[field.column.rows]
            column = table.gather_source(field.column.name)
            shape = field.column.shape
        dtype = engine_dtype if field.dtype == "engine" else DTYPES[field.dtype]
        if field.mask_only and field.derived not in COMPUTED:
            column, stored = _bytes_for(stored or column, table), None
            shape = (1,)
            dtype = torch.uint8
        shift, gain = (part.to(table.device) for part in affine(field, statistics, shape))
        pad = float(field.pad_value) if field.pad_kind == "value" else 0.0
        return cls(source, column, shape, dtype, shift, gain, pad, stored)

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    def of_trajectories(self, resolutions: torch.Tensor) -> torch.Tensor:
        """Return a per-trajectory field of resolutions, [S, 8], int64. [S, *shape]."""
        values = self.column[resolutions[:, Resolution.SLOT]]
        numbers = (self.shift, self.gain) if len(self.gain) else ()
        flat = values.reshape(values.size(0), self.elements)
        return convert(flat, self.dtype, *numbers).view(values.shape)


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
        resolutions: torch.Tensor,
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
        given = resolutions, steps, self.spec, self.pads, threads
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
        self, resolutions: torch.Tensor, steps: torch.Tensor | None
    ) -> list[tuple[FieldGroup, torch.Tensor]]:
        """Decode the rows of a batch; return groups, and the resolutions that they are
        gathered with.
        """
        first = resolutions[:, Resolution.FIRST_ROW, None]
        is_sample = ~is_no_sample(resolutions)[:, None]
        windows = []
        read = []
        given = []
        for window, group in self._groups.items():
            step, real = rows_of(window, resolutions, steps)
            windows.append(
                (group, step[:, :1])
            )  # the first row of the window that is read, if one is
            read.append((first + step)[real | (is_sample & (window.pad == Pad.EDGE))])
        rows = torch.from_numpy(np.unique(torch.cat(read).numpy()))
        self._stored.decode(rows.numpy(), self._bytes)
        for group, begin in windows:
            moved = (
                resolutions.clone()
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

    def fill(self, ops: Ops, outs: list[torch.Tensor], resolutions: torch.Tensor) -> torch.Tensor:
        """Overwrite the n-step tensors of a batch; return the numbers of steps. [B], int64."""
        ops.n_step_(*outs, *self._columns, self._powers, resolutions, self._n)
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
            part = field.gathered_length
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
                    achieved = _bytes_for(achieved, table)
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
                part = slice(field.part_first, field.part_first + (field.gathered_length or 1))
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
        self, resolutions: torch.Tensor, goal_step: torch.Tensor | None = None
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Gather the samples that resolutions describe into the next batch of the ring: fields and
        masks by name.

        Args:
            resolutions: Resolutions. [B, 8], int64, contiguous.
            goal_step: Rows of the achieved goals of relabelled samples. [B], int64.
        Cost: every real row is read once and written once; no allocation.
        """
        buffers = self._next()
        self.fill(buffers, resolutions, goal_step)
        return dict(buffers.tensors), dict(buffers.mask)

    def gather_from(
        self, parts: Sequence[tuple[Gatherer, torch.Tensor, torch.Tensor | None]]
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Gather samples of tables into one batch of this gatherer's ring, in the order of the
        parts.

        These are gatherers of equal fields, each with the resolutions of its table ([n, 8], B
        together) and their goals, as in `gather`.
        """
        buffers = self._next()
        first = 0
        if buffers.addresses:  # they fill whole batches only
            note_overwritten(buffers.all)
        for gatherer, resolutions, goal_step in parts:
            end = first + len(resolutions)
            if end > first:
                gatherer.fill(buffers.part(first, end), resolutions, goal_step)
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
        self, buffers: Buffers, resolutions: torch.Tensor, goal_step: torch.Tensor | None = None
    ) -> None:
        """Gather the samples that resolutions describe into a batch of the ring: only the ops."""
        n_step = self._n_step_here
        steps = None if n_step is None else n_step.fill(self._ops, buffers.n_step, resolutions)
        if buffers.addresses:
            self._gather_into(buffers.addresses[0], resolutions, steps)
        else:
            self._here.run(self._ops, buffers, self.counters, resolutions, steps, self._threads)
        for fields in self._compressed:
            for group, moved in fields.decode(resolutions, steps):
                group.run(self._ops, buffers, self.counters, moved, steps, self._threads)
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


def _bytes_for(rows: Sized, table: Rows) -> torch.Tensor:
    """Return a byte for each row, in place of a column of which only the mask is
    wanted. [rows, 1].
    """
    return torch.zeros(len(rows), 1, dtype=torch.uint8, device=table.device)


def affine(
    field: ResolvedField, statistics: Mapping[str, ColumnStatistics], shape: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return float64 shift and gain of (x - shift) * gain, repeated along the window; empty: the
    identity. ConfigError if the field is normalised without statistics, or float64 does not hold
    them.
    """
    if not field.is_converted:
        return torch.empty(0, dtype=torch.float64), torch.empty(0, dtype=torch.float64)
    if field.normalize is None:
        return torch.zeros(1, dtype=torch.float64), torch.full(
            (1,), field.scale, dtype=torch.float64
        )
    assert field.column is not None
    at = f"gear.fields.{field.name}.normalize"
    if field.column.name not in statistics:
        remedy = "use a data set made by `gear ingest`, or leave it out"
        raise ConfigError(at, "must be of a column with statistics", field.column.name, remedy)
    known = statistics[field.column.name]
    numbers = (known.min, known.max, known.mean, known.std)
    low, high, mean, spread = (np.broadcast_to(x, field.column.shape) for x in numbers)
    varies = low < high  # a constant element keeps its distances; one without a finite value is NaN
    if field.column.dtype == "int64":
        varies = varies | (np.abs(low) > 2.0**53)  # float64 has rounded differences away
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        if field.normalize == "min_max":
            mean = low + (high - low) / 2
            spread = (high - low) / 2
        gain = field.scale / np.where(varies, spread, 1.0)
        holds = (spread >= LEAST_SPREAD * np.spacing(np.abs(mean))) & np.isfinite(gain)
        holds &= np.isfinite(1 / spread) & (1 / spread >= np.finfo(np.float64).tiny)
    wrong = np.argwhere(varies & ~holds)
    if len(wrong):
        element = tuple(wrong[0].tolist())
        rule = (
            "must be of values with a spread from 1e-307 to 1e307 and above 2^-43 of their offset"
        )
        place = f"in element {list(element)} of {field.column.name}"
        value = f"{low[element]} to {high[element]} {place}"
        raise ConfigError(
            at, rule, value, "store the column less an offset or in other units, or use scale"
        )
    elements = int(np.prod(shape, dtype=np.int64))
    repeats = (
        max(1, min(field.gathered_length or 1, PERIOD_ELEMENTS // elements)) if elements > 1 else 1
    )

    def tiled(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.tile(values.reshape(-1), repeats))

    return tiled(mean), tiled(gain)


class PackGatherer:
    """Gathers packs from one table. Not thread-safe."""

    def __init__(
        self,
        fields: Sequence[ResolvedField],
        table: Table,
        statistics: Mapping[str, ColumnStatistics],
        engine_dtype: torch.dtype,
    ) -> None:
        self._ops = table.ops
        every = {
            field.name: FieldRows.of(field, table, statistics, engine_dtype) for field in fields
        }
        self.per_trajectory = {
            name: row for name, row in every.items() if row.source == Source.TRAJECTORY
        }
        self.fields = [field for field in fields if field.name not in self.per_trajectory]
        rows = [every[field.name] for field in self.fields]
        specs = [
            GatherSpec(row.source, int(field.offset), elements=row.elements)
            for field, row in zip(self.fields, rows, strict=True)
        ]
        self._group = FieldGroup(list(range(len(rows))), specs, rows)
        self._outputs: list[tuple[str, tuple[int, ...], np.ndarray, bool]] = []  # with its padding
        for field, row in zip(self.fields, rows, strict=True):
            pad = torch.full((1,), row.pad, dtype=row.dtype)
            are_bits = row.dtype == torch.bfloat16
            pad = pad.view(torch.uint16) if are_bits else pad  # as NumPy has it
            self._outputs.append((field.name, row.shape, pad.numpy(), are_bits))

    def outputs(self, rows: int, end: int) -> dict[str, torch.Tensor]:
        """Return new tensors of every per-step field, padded from `end` on, else undefined. [1,
        rows].
        """
        outs = {}
        for name, shape, pad, are_bits in self._outputs:
            array = np.empty((1, rows, *shape), pad.dtype)  # torch takes three times as long
            array[:, end:] = pad
            out = torch.from_numpy(array)
            outs[name] = out.view(torch.bfloat16) if are_bits else out
        return outs

    def gather(
        self,
        outs: Mapping[str, torch.Tensor],
        resolutions: torch.Tensor,
        places: torch.Tensor,
        first: int,
    ) -> None:
        """Write the places [first, first + rows) of a pack.

        Args:
            outs: Of every per-step field. [1, rows, *shape].
            resolutions: Resolutions of this table's trajectories in the pack. [S, 8], int64,
                contiguous.
            places: Where each begins in the pack. [S], int64.
        Cost: every row is read once and written once.
        """
        if not self.fields or not resolutions.size(0):
            return
        group = self._group
        into = [outs[field.name] for field in self.fields]
        converted = group.columns, group.shifts, group.gains
        self._ops.pack_(
            into, *converted, resolutions, places, group.spec, group.pads, first, into[0].size(1)
        )


class SharedRows(NamedTuple):
    """Where the first steps of trajectories are that others of their groups hold."""

    steps: np.ndarray  # so many; 0: it holds all of its steps. [n], int64
    first_row: np.ndarray  # of the one that holds them. [n], int64

    @classmethod
    def none(cls, count: int) -> SharedRows:
        return cls(np.zeros(count, np.int64), np.zeros(count, np.int64))

    def of(self, which: Any) -> SharedRows:
        """Return those of some trajectories."""
        return SharedRows(self.steps[which], self.first_row[which])

    def runs(
        self, resolutions: torch.Tensor, places: torch.Tensor, skipped: np.ndarray
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the resolutions of all runs of rows, [m, 8], and where each begins, [m], of
        trajectories with NUM_STEPS places, [n, 8], at `places`, [n], whose first row is that of
        their own rows.

        The first `skipped` steps, [n], have no places. A prompt's run has one row more, at a place
        that the own run writes after it: so a place at its end reads the step after its own.
        """
        own = resolutions.numpy().copy()
        at = places.numpy()
        front = np.flatnonzero(self.steps > skipped)
        # places of the prompt
        before = own[front]
        left = np.maximum(self.steps - skipped, 0)
        before[:, Resolution.FIRST_ROW] = self.first_row[front] + skipped[front]
        before[:, Resolution.NUM_STEPS] = np.minimum(
            left[front] + 1, own[front, Resolution.NUM_STEPS]
        )
        own[:, Resolution.FIRST_ROW] += np.maximum(skipped - self.steps, 0)
        own[:, Resolution.NUM_STEPS] -= left
        rest = (
            own[:, Resolution.NUM_STEPS] > 0
        )  # none of a trajectory that is cut within its prompt
        runs = np.concatenate([before, own[rest]]), np.concatenate([at[front], (at + left)[rest]])
        return torch.from_numpy(runs[0]), torch.from_numpy(runs[1])


def steps_of(
    ops: Ops,
    column: torch.Tensor,
    resolutions: torch.Tensor,
    offset: int,
    rows: str,
    dtype: torch.dtype,
    shared: SharedRows | None = None,
) -> np.ndarray:
    """Return a column's values at the steps of trajectories, one after the other. [steps], of a
    `dtype`.

    A place holds the value of the row that is `offset` later, or 0; `rows` of the column is "T" or
    "T+1".
    """
    lengths = resolutions[:, Resolution.NUM_STEPS]
    out = torch.empty(int(lengths.sum()), dtype=dtype)
    places = torch.cumsum(lengths, 0) - lengths
    none = torch.empty(0)
    if shared is not None:
        resolutions, places = shared.runs(resolutions, places, np.zeros(len(resolutions), np.int64))
    spec = lower([GatherSpec(SOURCES[rows], offset)])
    if out.numel():
        ops.pack_([out], [column], [none], [none], resolutions, places, spec, [0.0], 0, out.numel())
    return out.numpy()


def read_opaque(table: Table, column: Column, resolutions: torch.Tensor) -> list[Any]:
    """Return the values of an opaque column of the trajectories that resolutions describe: bytes,
    or JSON values.

    The selection of the resolutions must be pinned: call it where the samples' rows are gathered.
    Rows of other nodes must have arrived, as they do where a field of the config names the column.

    Args:
        resolutions: Resolutions. [n, 8], int64, in host memory.
    Cost: a copy and, of JSON, a parse for each record, in Python.
    """
    rows = table.gather_source(column.name).numpy()
    name = f"table {table.spec.name}: column {column.name}"
    return [decode(rows[slot], column, name) for slot in resolutions[:, Resolution.SLOT].tolist()]
