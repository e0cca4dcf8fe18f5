"""Fields of a batch, gathered in one pass into a ring of preallocated tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch.autograd.graph import increment_version
from torch.torch_version import TorchVersion

from deepspeed_gear.batching.batch import Batch, BatchLifetime, storages_of
from deepspeed_gear.batching.hindsight import GoalField, GoalRows
from deepspeed_gear.config import NStepConfig, ResolvedField
from deepspeed_gear.config.cross_checks import N_STEP_NAMES
from deepspeed_gear.data.dataset_statistics import ColumnStatistics
from deepspeed_gear.errors import ConfigError
from deepspeed_gear.ops import Ops
from deepspeed_gear.ops.gather_spec import GatherSpec, lower
from deepspeed_gear.ops.records import Align, Pad, Source
from deepspeed_gear.schema import DTYPES, Schema
from deepspeed_gear.store.table_spec import RETURN_TO_GO

SOURCES = {"T": Source.STEPS, "T+1": Source.STEPS_PLUS_ONE, "1": Source.TRAJECTORY}  # by a column's `rows`
COMPUTED = {"timestep": Source.TIMESTEP, "position": Source.POSITION}
ALIGNS = {"in_place": Align.IN_PLACE, "left": Align.LEFT, "right": Align.RIGHT}
PADS = {"zero": Pad.VALUE, "value": Pad.VALUE, "edge": Pad.EDGE}
#: Of the tensors that N_STEP_NAMES names.
N_STEP_DTYPES = (torch.float32, torch.float32, torch.int64)
PERIOD_ELEMENTS = 4096  # shift and gain are repeated up to this many elements, so that inner loops are long
LEAST_SPREAD = 2.0**9  # of normalised values, in units of the last place of their shift: off by 0.1% at most
_TAKES_MANY = TorchVersion(torch.__version__) >= "2.5"


def note_overwritten(tensors: Sequence[torch.Tensor]) -> None:
    """Increment tensors' versions, so that a backward pass that has saved their old values raises."""
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

    def gather_source(self, name: str) -> torch.Tensor:
        """Return the rows of a column. [rows or slots, *shape]."""
        ...


@dataclass
class Buffers:
    """The tensors of one ring entry."""

    outs: list[torch.Tensor]
    masks: list[torch.Tensor]
    n_step: list[torch.Tensor]  # return_n, discount, steps_n
    tensors: dict[str, torch.Tensor]
    mask: dict[str, torch.Tensor]
    all: list[torch.Tensor]
    storages: frozenset[int] | None = None  # of its tensors, computed at first use
    lifetime: BatchLifetime | None = None  # of its current values
    call: Any = None  # the native GatherCall into them
    address: int = 0  # of the call; 0: the op is called

    def part(self, first: int, end: int) -> Buffers:
        """Return the tensors of some samples of the batch."""

        def part_of(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
            return [tensor[first:end] for tensor in tensors]

        return Buffers(part_of(self.outs), part_of(self.masks), part_of(self.n_step), {}, {}, [])


class Gatherer:
    """Gathers batches of fixed fields and size. Not thread-safe.

    Args:
        fields: The fields of a batch.
        table: The source of the rows.
        statistics: Of the table's columns, where a field is normalised.
        n_step: n-step returns, or None.
        depth: Batches in the ring.
        engine_dtype: The dtype of `as: engine`.
        threads: Threads of one pass.
    """

    def __init__(
        self,
        fields: Sequence[ResolvedField],
        table: Rows,
        statistics: Mapping[str, ColumnStatistics],
        n_step: NStepConfig | None,
        num_samples: int,
        depth: int,
        engine_dtype: torch.dtype,
        threads: int,
    ) -> None:
        self._table, self._ops, self._threads = table, table.ops, threads
        self._gather_into: Any = self._ops.native.gather_into
        self._device = table.device
        self._fields = list(fields)
        self._n_step = n_step
        self.counters = torch.zeros(3, dtype=torch.int64, device=self._device)  # real rows, all rows, bytes
        self._columns: list[torch.Tensor] = []
        self._shifts: list[torch.Tensor] = []
        self._gains: list[torch.Tensor] = []
        self._pads: list[float] = []
        self._specs: list[GatherSpec] = []
        self._shapes: list[tuple[tuple[int, ...], torch.dtype]] = []
        self._mask_lengths: list[int | None] = []
        self._mask_of: dict[str, int] = {}
        self._goal_fields: list[GoalField] = []
        windows: dict[tuple[object, ...], int] = {}
        for field in self._fields:
            self._add(field, statistics, engine_dtype, windows)
        self._goals = (
            GoalRows(self._goal_fields, self._ops, num_samples, threads) if self._goal_fields else None
        )
        if n_step is not None:
            self._prepare_n_step(n_step)
        self._words = lower(self._specs)  # once: an integer at a time costs microseconds
        self._divide(num_samples)
        self.ring = [self.buffers(num_samples) for _ in range(depth)]
        self._turn = 0

    def _add(
        self,
        field: ResolvedField,
        statistics: Mapping[str, ColumnStatistics],
        engine_dtype: torch.dtype,
        windows: dict[tuple[object, ...], int],
    ) -> None:
        shape: tuple[int, ...] = ()
        if field.derived in COMPUTED:
            source = COMPUTED[field.derived]
            column = torch.empty(0, dtype=torch.int64, device=self._device)
        elif field.derived == "return_to_go":
            source, column = SOURCES["T"], self._table.gather_source(RETURN_TO_GO)
        else:
            assert field.column is not None
            source, column = SOURCES[field.column.rows], self._table.gather_source(field.column.name)
            shape = field.column.shape
        dtype = engine_dtype if field.dtype == "engine" else DTYPES[field.dtype]
        if field.mask_only and field.derived not in COMPUTED:
            column, shape, dtype = column.reshape(len(column), -1)[:, :0], (0,), column.dtype
        numbers = affine(field, statistics, shape)
        shift, gain = (part.to(self._device) for part in numbers)
        follows, offset = field.follows, field.first
        length, part = field.length or 1, field.collected_length
        count = part or 1
        own = field.name if field.hindsight is not None else None  # a relabelled goal is always real
        window = (source, offset, field.length, field.align, follows, field.part_first, part, own)
        mask = windows.setdefault(window, len(windows))
        if mask == len(self._mask_lengths):
            self._mask_lengths.append(part)
        self._mask_of[field.name] = mask
        elements = int(np.prod(shape, dtype=np.int64))
        writes = mask if list(self._mask_of.values()).count(mask) == 1 else -1
        self._specs.append(
            GatherSpec(
                source,
                offset,
                length,
                ALIGNS[field.align],
                int(follows),
                PADS[field.pad_kind],
                elements,
                writes,
                field.part_first,
                count,
            )
        )
        self._pads.append(float(field.pad_value) if field.pad_kind == "value" else 0.0)
        self._columns.append(column)
        self._shifts.append(shift)
        self._gains.append(gain)
        time = () if part is None else (part,)
        self._shapes.append(((*time, *shape), dtype))
        if field.hindsight is not None:
            achieved = self._table.gather_source(field.hindsight.name)
            if field.mask_only:
                achieved = achieved.reshape(len(achieved), -1)[:, :0]
            rows, out = SOURCES[field.hindsight.rows], len(self._shapes) - 1
            self._goal_fields.append(GoalField(out, mask, achieved, rows, shift, gain, shape, dtype))

    def _prepare_n_step(self, n_step: NStepConfig) -> None:
        schema = self._table.schema
        columns = {role: schema.role(role) for role in ("reward", "terminated", "truncated")}
        self._reward, self._terminated, self._truncated = (
            None if column is None else self._table.gather_source(column.name) for column in columns.values()
        )
        powers = [1.0]
        for _ in range(n_step.n):
            powers.append(powers[-1] * n_step.gamma)
        self._powers = torch.tensor(powers, dtype=torch.float64, device=self._device)

    def _divide(self, num_samples: int) -> None:
        """Divide the fields among calls, before buffers are allocated; here all in one call."""

    def totals(self) -> torch.Tensor:
        """Return the totals of real rows, all rows and bytes gathered. [3], int64."""
        return self.counters

    def buffers(self, num_samples: int) -> Buffers:
        """Allocate the tensors of a batch, with the native call that gathers into them."""

        def zeros(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=self._device)

        outs = [zeros(num_samples, *shape, dtype=dtype) for shape, dtype in self._shapes]
        masks = [
            zeros(num_samples, *(() if length is None else (length,)), dtype=torch.bool)
            for length in self._mask_lengths
        ]
        n_step: list[torch.Tensor] = []
        if self._n_step is not None:
            n_step = [zeros(num_samples, dtype=dtype) for dtype in N_STEP_DTYPES]
        buffers = self._named(outs, masks, n_step)
        if self._ops.is_direct and self._words:
            buffers.call = self._ops.native.GatherCall(
                outs=outs,
                masks=masks,
                counters=self.counters,
                columns=self._columns,
                shifts=self._shifts,
                gains=self._gains,
                spec=self._words,
                pad_values=self._pads,
                threads=self._threads,
                overwritten=buffers.all,
            )
            buffers.address = buffers.call.address
        return buffers

    def _named(
        self, outs: list[torch.Tensor], masks: list[torch.Tensor], n_step: list[torch.Tensor]
    ) -> Buffers:
        tensors = {f.name: out for f, out in zip(self._fields, outs, strict=True) if not f.mask_only}
        mask = {name: masks[index] for name, index in self._mask_of.items()}
        tensors.update(zip(N_STEP_NAMES if n_step else (), n_step, strict=True))
        return Buffers(outs, masks, n_step, tensors, mask, [*outs, *masks, *n_step])

    def gather(
        self, records: torch.Tensor, goal_step: torch.Tensor | None = None
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Gather the samples that records describe.

        Args:
            records: Resolutions. [B, 8], int64, contiguous.
            goal_step: Rows of the achieved goals of relabelled samples. [B], int64.
        Returns:
            Fields and masks by name: the next batch of the ring, which overwrites an older one.
        Cost: every real row is read once and written once; no allocation.
        """
        buffers = self._next()
        self.fill(buffers, records, goal_step)
        return dict(buffers.tensors), dict(buffers.mask)

    def gather_from(
        self, parts: Sequence[tuple[Gatherer, torch.Tensor, torch.Tensor | None]]
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Gather samples of several tables into one batch of this gatherer's ring.

        Args:
            parts: Gatherers of equal fields, each with the records of its table ([n, 8] each, B together)
                and their goals, as in `gather`.
        Returns:
            As `gather`; the samples in the order of the parts.
        """
        buffers, first = self._next(), 0
        if buffers.address:  # it fills whole batches only
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
        if not buffers.address:
            note_overwritten(buffers.all)
        return buffers

    def lend(self, batch: Batch) -> None:
        """Bind a batch of the tensors gathered last to its ring entry: it ends when that is filled again."""
        buffers = self._latest
        if buffers.storages is None:
            buffers.storages = storages_of(buffers.all)
        buffers.lifetime = BatchLifetime(buffers.storages)
        buffers.lifetime.bind(batch)

    def fill(self, buffers: Buffers, records: torch.Tensor, goal_step: torch.Tensor | None = None) -> None:
        """Gather the samples that records describe into a batch of the ring: only the ops."""
        steps = None
        if self._n_step is not None:
            returns, discount, steps = buffers.n_step
            self._ops.n_step_(
                returns,
                discount,
                steps,
                self._reward,
                self._terminated,
                self._truncated,
                self._powers,
                records,
                self._n_step.n,
            )
        if buffers.address:
            self._gather_into(buffers.address, records, steps)
        elif self._words:
            self._ops.gather_(
                buffers.outs,
                buffers.masks,
                self.counters,
                self._columns,
                self._shifts,
                self._gains,
                records,
                steps,
                self._words,
                self._pads,
                self._threads,
            )
        if self._goals is not None and goal_step is not None:
            self._goals.fill(buffers.outs, buffers.masks, self.counters, records, goal_step)


def affine(
    field: ResolvedField, statistics: Mapping[str, ColumnStatistics], shape: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return float64 shift and gain of (x - shift) * gain, repeated along the window; empty: the identity.

    Args:
        shape: Of a row of the column.
    Raises:
        ConfigError: The field is normalised, and its column has no statistics, or float64 does not hold its
            shift and gain.
    """
    if not field.is_converted:
        return torch.empty(0, dtype=torch.float64), torch.empty(0, dtype=torch.float64)
    if field.normalize is None:
        return torch.zeros(1, dtype=torch.float64), torch.full((1,), field.scale, dtype=torch.float64)
    assert field.column is not None
    at = f"gear.fields.{field.name}.normalize"
    if field.column.name not in statistics:
        rule, remedy = (
            "must be of a column with statistics",
            "use a data set made by `gear ingest`, or leave it out",
        )
        raise ConfigError(at, rule, field.column.name, remedy)
    known = statistics[field.column.name]
    low, high = np.asarray(known.min), np.asarray(known.max)
    mean, spread = np.asarray(known.mean), np.asarray(known.std)
    varies = low < high  # a constant element keeps its distances; one without a finite value is NaN
    if field.column.dtype == "int64":
        varies = varies | (np.abs(low) > 2.0**53)  # float64 has rounded differences away
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        if field.normalize == "min_max":
            mean, spread = low + (high - low) / 2, (high - low) / 2
        gain = field.scale / np.where(varies, spread, 1.0)
        holds = (spread >= LEAST_SPREAD * np.spacing(np.abs(mean))) & np.isfinite(gain)
        holds &= np.isfinite(1 / spread) & (1 / spread >= np.finfo(np.float64).tiny)
    wrong = np.argwhere(varies & ~holds)
    if len(wrong):
        element = tuple(wrong[0].tolist())
        rule = "must be of values with a spread from 1e-307 to 1e307 and above 2^-43 of their offset"
        value = (
            f"{known.min[element]} to {known.max[element]} in element {list(element)} of {field.column.name}"
        )
        raise ConfigError(at, rule, value, "store the column less an offset or in other units, or use scale")
    elements = int(np.prod(shape, dtype=np.int64))
    repeats = max(1, min(field.collected_length or 1, PERIOD_ELEMENTS // elements)) if elements > 1 else 1

    def tiled(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.tile(values.reshape(-1), repeats))

    return tiled(mean), tiled(gain)


@dataclass
class FieldGroup:
    """Fields that are gathered by one call of `gather_`.

    Args:
        masks: Numbers of the masks that they write.
        columns, shifts, gains, spec, pads: As of `gather_`; the spec numbers masks within the group.
    """

    which: list[int]
    masks: list[int]
    columns: list[torch.Tensor]
    shifts: list[torch.Tensor]
    gains: list[torch.Tensor]
    spec: list[int]
    pads: list[float]

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
        """Gather the fields.

        Args:
            ops: For the tensors' device.
            buffers: The tensors of all fields for the samples.
            counters: As of `gather_`, like the others.
            records: [B, 8], int64.
            steps: [B], int64.
            order: Order of the samples; affects only the time. [B], int64.
        """
        if not self.which:
            return
        outs = [buffers.outs[i] for i in self.which]
        masks = [buffers.masks[i] for i in self.masks]
        converted = self.columns, self.shifts, self.gains
        given = records, steps, self.spec, self.pads, threads
        ops.gather_(outs, masks, counters, *converted, *given, order)
