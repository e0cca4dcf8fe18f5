"""Rows of packs: a rollout batch's trajectories, their places in a pack, gathered fields and media.

A rollout batch has `RolloutTrajectories`. Some of them make a pack, whose `PackShape` has the place
of each. `PackGatherer` copies their rows there, and `MediaReader` reads the media that rows name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from deepspeed_gear.batching.field_rows import SOURCES, FieldRows
from deepspeed_gear.batching.gather import FieldGroup
from deepspeed_gear.batching.prefixes import Prefixes
from deepspeed_gear.config import ResolvedField
from deepspeed_gear.config.resolved_field import fields_in
from deepspeed_gear.data.statistics.dataset_statistics import ColumnStatistics
from deepspeed_gear.errors import StoreError
from deepspeed_gear.ops import Ops
from deepspeed_gear.ops.conversion import convert
from deepspeed_gear.ops.records import GatherSpec, Resolution, Source, lower
from deepspeed_gear.schema import DTYPES
from deepspeed_gear.store.native_rows import as_tensor
from deepspeed_gear.store.table import Table

PADDING = -1  # the sequence of places that belong to no trajectory


class TableTrajectories(NamedTuple):
    """Trajectories of a rollout batch in one table, in the order of the selection."""

    # NUM_STEPS is at most the room of a pack. Trajectories that other nodes hold have neither slot
    # nor rows here. [n, 8], int64, contiguous.
    resolutions: torch.Tensor
    weights: torch.Tensor  # PER weights. [n], float32
    # shard << 32 | slot; the slot alone where each node holds all of the table. [n], int64.
    origins: torch.Tensor
    is_cut: torch.Tensor  # longer than a pack: only the first steps are trained. [n], bool


@dataclass(frozen=True)
class RolloutTrajectories:
    """Trajectories of a rollout batch, table by table. Immutable."""

    resolutions: torch.Tensor  # with the origin as slot, as priority updates have it. [n, 8], int64
    is_weight: np.ndarray  # [n], float32
    is_cut: np.ndarray  # [n], bool
    source: np.ndarray  # table. [n], int64
    row: np.ndarray  # index among the trajectories of its table. [n], int64
    lengths: np.ndarray  # steps. [n], int64
    starts: np.ndarray  # first place in a column: steps of those before it. [n], int64
    num_tokens: int  # steps of all
    has_neighbours: bool = True  # the trajectories of an item stand side by side

    @classmethod
    def of(
        cls, tables: Sequence[TableTrajectories], has_neighbours: bool = True
    ) -> RolloutTrajectories:
        """Return the trajectories of all tables, one table after the other."""
        resolutions = np.concatenate([table.resolutions.numpy() for table in tables])
        origins = np.concatenate([table.origins.numpy() for table in tables])
        resolutions[:, Resolution.SLOT] = origins
        resolutions[:, Resolution.ANCHOR] = 0
        counts = [len(table.weights) for table in tables]
        lengths = resolutions[:, Resolution.NUM_STEPS].copy()
        return cls(
            resolutions=torch.from_numpy(resolutions),
            is_weight=np.concatenate([table.weights.numpy() for table in tables]),
            is_cut=np.concatenate([table.is_cut.numpy() for table in tables]),
            # For tables of 2 and 3 trajectories, source is [0, 0, 1, 1, 1] and row [0, 1, 0, 1, 2].
            source=np.repeat(np.arange(len(tables)), counts),
            row=np.concatenate([np.arange(count) for count in counts]),
            lengths=lengths,
            starts=np.cumsum(lengths) - lengths,  # for lengths [2, 3] starts is [0, 2]
            num_tokens=int(lengths.sum()),
            has_neighbours=has_neighbours,
        )

    def __len__(self) -> int:
        """Return the number of trajectories."""
        return len(self.lengths)

    @cached_property
    def item(self) -> np.ndarray:
        """Item of each trajectory, from 0: the members of a group have one number. [n], int64."""
        numbers = self.resolutions[:, Resolution.SAMPLE_NUMBER].numpy()
        if not self.has_neighbours:
            return np.unique(numbers, return_inverse=True)[1].reshape(-1)
        return item_numbers(numbers, self.source)

    @property
    def num_items(self) -> int:
        return int(self.item.max(initial=-1)) + 1


def item_numbers(sample_numbers: np.ndarray, tables: np.ndarray | None = None) -> np.ndarray:
    """Return the number of each trajectory's item, from 0. [n], int64.

    Trajectories of one item are neighbours with equal sample numbers and, if `tables` are given, of
    one table: sample numbers [7, 7, 9] are the items [0, 0, 1].
    """
    is_first = np.ones(len(sample_numbers), bool)
    is_first[1:] = sample_numbers[1:] != sample_numbers[:-1]
    if tables is not None:
        is_first[1:] |= tables[1:] != tables[:-1]
    return np.cumsum(is_first) - 1


class SharedRows(NamedTuple):
    """Shared prompts: first steps of trajectories whose rows another one of their group holds."""

    steps: np.ndarray  # number of them; 0: the trajectory holds all of its steps. [n], int64
    first_row: np.ndarray  # first row of the trajectory that holds them. [n], int64

    @classmethod
    def none(cls, count: int) -> SharedRows:
        return cls(np.zeros(count, np.int64), np.zeros(count, np.int64))

    def of(self, which: Any) -> SharedRows:
        """Return the shared prompts of some trajectories: indices, a mask or a slice."""
        return SharedRows(self.steps[which], self.first_row[which])

    def runs(
        self, resolutions: torch.Tensor, places: torch.Tensor, skipped: np.ndarray
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the runs of rows that trajectories consist of.

        A trajectory with a shared prompt has two runs: the prompt's rows, held by another
        trajectory, and its own, which begin with the prompt's last token. The prompt's run has one
        row more, of that token, so that a field of offset 1 finds its value at the last place of
        the run. The own run, gathered later, writes the extra place.

        Args:
            resolutions: Those of trajectories with NUM_STEPS places; the first row is that of the
                own rows. [n, 8].
            places: First place of each trajectory. [n], int64.
            skipped: Number of first steps that have no places. [n], int64.
        Returns:
            Resolutions of the runs, [m, 8], and the place where each begins, [m].
        """
        own = resolutions.numpy().copy()
        begins = places.numpy()
        # A trajectory of 9 steps at place 20, of which 5 are shared and 2 of these skipped, has 7
        # places. The prompt's run has the places [20, 24), one more than the 3 left of the prompt;
        # its own run the places [23, 27).
        left = np.maximum(self.steps - skipped, 0)
        front = np.flatnonzero(left)
        prompts = own[front]
        prompts[:, Resolution.FIRST_ROW] = self.first_row[front] + skipped[front]
        prompts[:, Resolution.NUM_STEPS] = np.minimum(
            left[front] + 1, own[front, Resolution.NUM_STEPS]
        )
        own[:, Resolution.FIRST_ROW] += np.maximum(skipped - self.steps, 0)
        own[:, Resolution.NUM_STEPS] -= left
        rest = own[:, Resolution.NUM_STEPS] > 0  # False where a trajectory is cut in its prompt
        runs = np.concatenate([prompts, own[rest]])
        places_of_runs = np.concatenate([begins[front], (begins + left)[rest]])
        return torch.from_numpy(runs), torch.from_numpy(places_of_runs)


@dataclass
class PackShape:
    """Shape of a pack: where its trajectories lie, and which of its places this rank has.

    For lengths [2, 3] and N of 8, starts is [0, 2], ends [2, 5] and bounds [0, 2, 5, 8]: padding is
    a sequence of its own. A rank with the places [4, 8) has sizes [0, 1, 3].
    """

    lengths: np.ndarray  # steps of each trajectory, in the order of the pack. [S], int64.
    rows: int  # N, padding included
    # The places of this rank: all, or the slice of a sequence rank.
    first: int
    end: int
    # Shared prefixes; the trajectories stand in the order of `Prefixes.order`. None:
    # `gear.pack.prefix` is "own".
    prefixes: Prefixes | None = None

    def __post_init__(self) -> None:
        places = self.lengths if self.prefixes is None else self.lengths - self.prefixes.steps
        #: The place after the last one of each trajectory, and its first place. [S], int64.
        self.ends: np.ndarray = places.cumsum()
        self.starts: np.ndarray = self.ends - places
        self.num_tokens = int(self.ends[-1]) if len(places) else 0
        self.own_tokens = min(max(self.num_tokens - self.first, 0), self.end - self.first)

    @cached_property
    def bounds(self) -> np.ndarray:
        """First place of each sequence, of which padding is one, and N. [sequences + 1], int32."""
        last = [self.rows] if self.num_tokens < self.rows else []
        return np.concatenate([[0], self.ends, last]).astype(np.int32)

    @cached_property
    def sizes(self) -> np.ndarray:
        """Number of this rank's places in each sequence. [sequences], int64."""
        return np.diff(np.clip(self.bounds.astype(np.int64), self.first, self.end))

    def spread(self, values: np.ndarray) -> np.ndarray:
        """Return each trajectory's value at this rank's places of it, 0 elsewhere.

        Args:
            values: One value per trajectory. [S].
        Returns:
            [end - first].
        """
        spread = np.zeros(self.end - self.first, values.dtype)
        own = values.repeat(self.sizes[: len(values)])
        spread[: len(own)] = own
        return spread

    def owners(self) -> np.ndarray:
        """Return the trajectory of each place of this rank, else PADDING. [end - first], int64."""
        numbers: np.ndarray = np.arange(len(self.sizes))
        numbers[len(self.lengths) :] = PADDING
        return np.asarray(numbers.repeat(self.sizes))

    def seen_until(self) -> np.ndarray:
        """Return the place after the last one that attends to each place of the pack. [N], int64.

        A place is seen from itself and from all places after it up to there. For trajectories of 4
        and 5 steps that share 3, the places are [0, 4) and [4, 6), and the result is
        [6, 6, 6, 4, 6, 6].
        """
        until = self.bounds[1:].astype(np.int64).repeat(np.diff(self.bounds))
        if self.prefixes is None:
            return np.asarray(until)
        (steps, leader) = (values.tolist() for values in self.prefixes)
        begins = self.starts.tolist()
        # End of each trajectory and of all that share with it, which follow it.
        ends = self.ends.tolist()
        for i in reversed(range(len(ends))):
            ends[leader[i]] = max(ends[leader[i]], ends[i])
        # Of those that share with a trajectory, a later one shares fewer steps, and ends later.
        for i, of in enumerate(leader):
            if of != i:
                until[begins[of] : begins[of] + steps[i] - steps[of]] = ends[i]
        return np.asarray(until)

    def places(self, number: int) -> np.ndarray:
        """Return the places of a trajectory's steps, with those of its prefix, ascending."""
        parts = [np.arange(self.starts[number], self.ends[number])]
        if self.prefixes is not None:
            (steps, leader) = self.prefixes
            while leader[number] != number:
                end = self.starts[leader[number]] + steps[number] - steps[leader[number]]
                number = int(leader[number])
                parts.append(np.arange(self.starts[number], end))
        return np.concatenate(parts[::-1])

    def positions(self) -> np.ndarray:
        """Return each place's position in its sequence. [end - first], int64.

        Positions of padding restart at the length of the longest trajectory, so that padding makes
        no rotary embedding longer.
        """
        begins = self.bounds[:-1].astype(np.int64)
        if self.prefixes is not None:
            begins[: len(self.lengths)] -= self.prefixes.steps
        places = np.arange(self.first, self.end) - begins.repeat(self.sizes)
        return np.asarray(places % self.lengths.max(initial=1))

    def runs(
        self, resolutions: torch.Tensor, which: Any = slice(None), shared: SharedRows | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the runs of rows that have places in the pack.

        Args:
            resolutions: Those of the trajectories. [n, 8], int64.
            which: The trajectories, as an index into those of the pack.
            shared: Rows of shared prompts; None: every trajectory has all of its rows.
        Returns:
            Resolutions of the runs, [m, 8], and the place where each begins, [m].
        """
        places = torch.from_numpy(self.starts[which])
        if self.prefixes is None and shared is None:
            return resolutions, places
        skipped = np.zeros(len(resolutions), np.int64)
        if self.prefixes is not None:
            skipped = self.prefixes.steps[which]
            resolutions = resolutions.clone()
            resolutions[:, Resolution.NUM_STEPS] -= torch.from_numpy(skipped)
        return (shared or SharedRows.none(len(resolutions))).runs(resolutions, places, skipped)


class _AbsentField(NamedTuple):
    """Field of packs whose column a table does not have."""

    name: str
    by_step: bool
    shape: tuple[int, ...]
    dtype: torch.dtype
    value: int | float  # in the table's trajectories
    pad: torch.Tensor  # at places of no trajectory. [1], of `dtype`

    @classmethod
    def of(cls, field: ResolvedField, engine_dtype: torch.dtype) -> _AbsentField:
        assert field.column is not None
        assert field.absent is not None
        dtype = engine_dtype if field.dtype == "engine" else DTYPES[field.dtype]
        pad = field.pad_value if field.pad_kind == "value" else 0
        return cls(
            name=field.name,
            by_step=field.column.rows != "1",
            shape=field.column.shape,
            dtype=dtype,
            value=field.absent,
            pad=torch.full((1,), pad, dtype=dtype),
        )


def _as_numpy(values: torch.Tensor) -> np.ndarray:
    """View values as an array; those of bfloat16, which NumPy lacks, as the bits in uint16."""
    return (values.view(torch.uint16) if values.dtype == torch.bfloat16 else values).numpy()


def _as_torch(array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """View what `_as_numpy` returned as a tensor of a dtype."""
    values = torch.from_numpy(array)
    return values.view(dtype) if dtype == torch.bfloat16 else values


class PackGatherer:
    """Gathers the fields of packs from one table. Not thread-safe."""

    def __init__(
        self,
        fields: Sequence[ResolvedField],
        table: Table,
        statistics: Mapping[str, ColumnStatistics],
        engine_dtype: torch.dtype,
    ) -> None:
        self._ops = table.ops
        stored = fields_in(fields, table.schema)
        every = {
            field.name: FieldRows.of(field, table, statistics, engine_dtype) for field in stored
        }
        # Fields whose column the table does not have, with a row per step and per trajectory.
        absent = [_AbsentField.of(field, engine_dtype) for field in fields if field not in stored]
        self._absent_steps = [one for one in absent if one.by_step]
        self._absent_values = [one for one in absent if not one.by_step]
        self._per_trajectory = {
            name: row for name, row in every.items() if row.source == Source.TRAJECTORY
        }
        # Rows of those that are copied as they are: NumPy indexes them in a third of torch's time.
        self._copied: dict[str, np.ndarray] = {}
        for name, row in self._per_trajectory.items():
            if row.column.dtype == row.dtype and not len(row.gain):
                self._copied[name] = _as_numpy(row.column)
        self.fields = [field for field in stored if field.name not in self._per_trajectory]
        rows = [every[field.name] for field in self.fields]
        specs = [
            GatherSpec(row.source, int(field.offset), elements=row.elements)
            for field, row in zip(self.fields, rows, strict=True)
        ]
        self._group = FieldGroup(list(range(len(rows))), specs, rows)
        pads = [torch.full((1,), row.pad, dtype=row.dtype) for row in rows]
        # Name, shape of a row, dtype and padding of each per-step field.
        self._outputs = [
            (field.name, row.shape, row.dtype, _as_numpy(pad))
            for field, row, pad in zip(self.fields, rows, pads, strict=True)
        ]
        self._outputs += [
            (one.name, one.shape, one.dtype, _as_numpy(one.pad)) for one in self._absent_steps
        ]

    def outputs(self, rows: int, end: int) -> dict[str, torch.Tensor]:
        """Allocate a tensor for every per-step field of a pack, [1, rows, *shape].

        Only the padding, which begins at place `end`, is filled in.
        """
        outs = {}
        for name, shape, dtype, pad in self._outputs:
            array = np.empty((1, rows, *shape), pad.dtype)  # torch takes three times as long
            array[:, end:] = pad
            outs[name] = _as_torch(array, dtype)
        return outs

    def gather(
        self,
        outs: Mapping[str, torch.Tensor],
        resolutions: torch.Tensor,
        places: torch.Tensor,
        first: int,
    ) -> None:
        """Gather the per-step fields of the places [first, first + rows) of a pack.

        Args:
            outs: The pack's tensor of every per-step field. [1, rows, *shape].
            resolutions: Runs of rows of this table, as `PackShape.runs` returns them. [m, 8],
                int64, contiguous.
            places: Place in the pack where each run begins. [m], int64.
            first: First place that `outs` holds: above 0 in the slice of a sequence rank.
        Cost: every row is read once and written once.
        """
        if self._absent_steps:
            self._write_absent(outs, resolutions, places, first)
        if not self.fields or not resolutions.size(0):
            return
        group = self._group
        into = [outs[field.name] for field in self.fields]
        converted = group.columns, group.shifts, group.gains
        self._ops.pack_(
            into, *converted, resolutions, places, group.spec, group.pads, first, into[0].size(1)
        )

    def _write_absent(
        self,
        outs: Mapping[str, torch.Tensor],
        resolutions: torch.Tensor,
        places: torch.Tensor,
        first: int,
    ) -> None:
        """Write the fields that the table does not have, at all places of runs; as `gather`."""
        rows = outs[self._absent_steps[0].name].size(1)
        begins = (places - first).clamp(0, rows)
        ends = (places + resolutions[:, Resolution.NUM_STEPS] - first).clamp(0, rows)
        for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
            for one in self._absent_steps:
                outs[one.name][:, begin:end] = one.value

    def trajectory_values(self, resolutions: torch.Tensor) -> dict[str, torch.Tensor]:
        """Gather the per-trajectory fields of trajectories, [S, 8]. Field -> [S, *shape]."""
        gathered = {}
        slots = resolutions[:, Resolution.SLOT]
        for name, rows in self._per_trajectory.items():
            if name in self._copied:
                gathered[name] = _as_torch(self._copied[name][slots.numpy()], rows.dtype)
                continue
            values = rows.column[slots]
            shift_and_gain = (rows.shift, rows.gain) if len(rows.gain) else ()
            flat = values.reshape(values.size(0), rows.elements)
            gathered[name] = convert(flat, rows.dtype, *shift_and_gain).view(values.shape)
        for one in self._absent_values:
            shape = (len(slots), *one.shape)
            gathered[one.name] = torch.full(shape, one.value, dtype=one.dtype)
        return gathered


def steps_of(
    ops: Ops,
    column: torch.Tensor,
    resolutions: torch.Tensor,
    offset: int,
    rows: str,
    dtype: torch.dtype,
    shared: SharedRows | None = None,
) -> np.ndarray:
    """Return a column's values at the steps of trajectories, one trajectory after the other.

    Args:
        ops: Ops of the column's device.
        column: The rows of the column.
        resolutions: Resolutions. [n, 8], int64.
        offset: A step has the value of the row that is so many rows later, or 0 after the last one.
        rows: Rows of the column per trajectory: "T" or "T+1".
        dtype: Type of the result.
        shared: Rows of shared prompts; None: every trajectory has all of its rows.
    Returns:
        [steps of all], of `dtype`.
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


@dataclass(frozen=True)
class PackMedia:
    """Media that the places of a pack name, each item once.

    Attributes:
        columns: Rows of each media column, item after item. [rows, *shape], on the device.
        counts: Rows of each item, by column. [items], int64, in host memory.
        place: The places of this rank that name an item, ascending. [names], int64, on the device.
        item: The item that each of them names. [names], int64, in host memory.
    """

    columns: dict[str, torch.Tensor]
    counts: dict[str, torch.Tensor]
    place: torch.Tensor
    item: torch.Tensor

    def per_place(self) -> dict[str, torch.Tensor]:
        """Return the rows of items place after place. [rows, *shape].

        An item that two places name is there twice, as in the output of transformers' processors.
        """
        per_place = {}
        for name, rows in self.columns.items():
            parts = torch.split(rows, self.counts[name].tolist())
            per_place[name] = torch.cat([rows[:0], *(parts[item] for item in self.item.tolist())])
        return per_place


@dataclass(frozen=True)
class MediaReader:
    """Reader of the media of a pack, while its rollout batch keeps the rows."""

    tables: Sequence[Table]
    numbers: np.ndarray  # item that each of this rank's places names; 0: none. [places], int64
    device: torch.device

    def read(self) -> PackMedia:
        """Read each item of media once, from the stores of this node.

        Raises:
            StoreError: The rollout batch has ended, and an item has left the stores.
        """
        place = np.flatnonzero(self.numbers)
        every, item = np.unique(self.numbers[place], return_inverse=True)
        specs = [table.media.spec for table in self.tables if table.media is not None]
        spec = next(spec for spec in specs if spec.column is not None)
        rows: dict[int, dict[str, np.ndarray]] = {}
        for table in self.tables:
            if table.media is None:
                continue
            missing = every[~np.isin(every, list(rows))]
            for number, content in table.media.contents(missing, table.lock).items():
                rows[number] = table.media.spec.rows(content)
        if len(rows) < len(every):
            rule = "must be read while its rollout batch is trained"
            remedy = "read micro.media in the loop"
            raise StoreError("micro.media", rule, None, remedy)
        columns: dict[str, torch.Tensor] = {}
        counts: dict[str, torch.Tensor] = {}
        for column in spec.media_columns:
            parts = [rows[number][column.name] for number in every.tolist()]
            counts[column.name] = torch.tensor([len(part) for part in parts], dtype=torch.int64)
            whole = np.concatenate([np.empty((0, *column.shape), column.numpy_dtype), *parts])
            columns[column.name] = as_tensor(whole, column.dtype).to(self.device, non_blocking=True)
        at = torch.from_numpy(place).to(self.device)
        return PackMedia(columns, counts, at, torch.from_numpy(item.reshape(-1)))
