"""A table in the memory of one device: columns, tree and state are tensors private to the process.

Rows and slots are rings (common/ring.h): a trajectory never wraps, and the oldest ones are evicted. All state
lies in tensors of fixed addresses, so that adding, drawing and updates can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

import deepspeed_gear.arguments as arguments
from deepspeed_gear.batching.gather import SOURCES
from deepspeed_gear.data.dataset import Dataset
from deepspeed_gear.data.trajectory_checks import ENDS_LAST
from deepspeed_gear.device.host_rows import HostRows, RowSize
from deepspeed_gear.errors import DataError, SchemaError, ShapeError
from deepspeed_gear.ops import Ops
from deepspeed_gear.ops.constants import MOST_MASS_BITS, minima_size, tree_size
from deepspeed_gear.ops.records import (
    MassUnit,
    OpenTrajectory,
    PlacedTrajectory,
    RingState,
    Slot,
    SlotState,
    UpdateCount,
)
from deepspeed_gear.schema import DTYPES, Schema
from deepspeed_gear.store.column_arrays import as_tensor
from deepspeed_gear.store.table_spec import RETURN_TO_GO

_ONE = 0x3F800000  # bits of 1.0
_PRIORITY_COUNTS = slice(RingState.COUNTS, RingState.COUNTS + 5)


@dataclass(frozen=True)
class RingTableSpec:
    """Sizes of a RingTable, and the state that it keeps of each item.

    Args:
        num_rows: Rows of the ring.
        most_steps: Of the longest trajectory.
        items_are_rows: Whether each row has a priority of its own.
        has_priorities: Whether items have priorities.
        has_minima: Whether the least mass of the table is kept.
        return_to_go: Whether the derived column is kept.
        num_envs: Environments whose steps are added one by one, each with a part of the rows; 0: whole
            trajectories are added.
        rows_on_host: Name of the table in the config, if its rows lie in host memory.
    """

    schema: Schema
    num_rows: int
    num_slots: int
    most_steps: int
    items_are_rows: bool
    has_priorities: bool
    has_minima: bool
    return_to_go: bool
    num_envs: int = 0
    rows_on_host: str | None = None


@dataclass(frozen=True)
class DatasetItems:
    """The items of a data set on a device, and their masses.

    Args:
        masses: Of its trajectories. [n], int64.
        admitted: Which rows are anchors, where items are rows. [rows], bool; None: items are slots.
        initial: Priority of the items; None: they have none.
        alpha: Exponent of the priorities, Q62.
        most_bits: log2 of the largest mass.
    """

    masses: np.ndarray
    admitted: np.ndarray | None
    initial: float | None
    alpha: int = 0
    most_bits: int = MOST_MASS_BITS


@dataclass(frozen=True)
class NewItems:
    """Mass rule of the items of added trajectories.

    Args:
        anchors: Which steps are anchors, as `AnchorRule.as_list`.
        unit: Unit of a mass (MassUnit).
        alpha: Exponent of the priorities, Q62.
        initial: Bits of the first priority, float32; or HIGHEST_SO_FAR.
        most_bits: log2 of the largest mass.
    """

    anchors: list[int]
    unit: int
    alpha: int
    initial: int
    most_bits: int


class RingTable:
    """Trajectories in the memory of one device. Not thread-safe; every call runs on the current stream.

    Cost: `num_bytes`; beside the columns 72 bytes a slot, 8.3 an item for the sums and 0.3 for the minima,
        4 for a priority, 4 a row where items are rows or environments add steps.
    """

    def __init__(self, spec: RingTableSpec, ops: Ops, device: torch.device) -> None:
        self.schema, self.ops, self.device = spec.schema, ops, device
        schema, num_rows, num_slots, most_steps = spec.schema, spec.num_rows, spec.num_slots, spec.most_steps
        items_are_rows = spec.items_are_rows
        self.num_rows, self.num_slots, self.most_steps = num_rows, num_slots, most_steps
        self.items_are_rows = items_are_rows
        self.shape = [num_rows, num_slots, int(schema.has_final_row), most_steps]
        self.num_items = num_rows if items_are_rows else num_slots
        self.num_envs = spec.num_envs

        def zeros(*size: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        sizes = {
            column.name: RowSize(
                (num_slots if column.rows == "1" else num_rows, *column.shape), DTYPES[column.dtype]
            )
            for column in schema
        }
        sizes[RETURN_TO_GO] = RowSize((num_rows if spec.return_to_go else 0,), torch.float32)
        #: Memory of the rows; None: it is the device's.
        self.host_rows = None if spec.rows_on_host is None else HostRows(sizes, device, spec.rows_on_host)
        held = (
            {name: zeros(*size.shape, dtype=size.dtype) for name, size in sizes.items()}
            if self.host_rows is None
            else dict(self.host_rows.columns)
        )
        self.columns = {column.name: held[column.name] for column in schema}
        self.returns_to_go = held[RETURN_TO_GO]
        reward = schema.role("reward")
        self._rewards = None if reward is None else self.columns[reward.name]
        self.state = zeros(RingState.NUM_WORDS)
        self.slots, self.begins = zeros(num_slots, Slot.NUM_WORDS), zeros(num_slots)
        self.sums = zeros(tree_size(self.num_items))
        self.minima = zeros(minima_size(self.num_items) if spec.has_minima else 0)
        self.priorities = zeros(self.num_items if spec.has_priorities else 0, dtype=torch.float32)
        self.row_slots = zeros(num_rows if items_are_rows else 0, dtype=torch.int32)
        #: Open trajectory of each environment (`OpenTrajectory`), and slot of each row.
        self.opened = zeros(spec.num_envs, OpenTrajectory.NUM_WORDS)
        has_owners = spec.num_envs > 0 and not items_are_rows
        self.owners = zeros(num_rows, dtype=torch.int32) if has_owners else self.row_slots
        self.state[RingState.COUNTS + UpdateCount.HIGHEST_PRIORITY] = self.state[RingState.INITIAL] = _ONE
        self._sources = [SOURCES[column.rows] for column in schema]
        for tensor in self.content.values():
            torch._dynamo.mark_static_address(tensor)  # "reduce-overhead" then mutates it in place

    @property
    def content(self) -> dict[str, Tensor]:
        """All tensors that change, by name."""
        return {
            **{f"column/{name}": column for name, column in self.columns.items()},
            "returns_to_go": self.returns_to_go,
            "state": self.state,
            "slots": self.slots,
            "begins": self.begins,
            "sums": self.sums,
            "minima": self.minima,
            "priorities": self.priorities,
            "row_slots": self.row_slots,
            **({"opened": self.opened} if self.num_envs else {}),
            **({} if self.owners is self.row_slots else {"owners": self.owners}),
        }

    @property
    def num_bytes(self) -> int:
        """Memory of the table on its device; without rows that lie in host memory."""
        tensors = [*self.content.values()]
        if self.host_rows is not None:
            rows = {*(f"column/{name}" for name in self.columns), "returns_to_go"}
            tensors = [tensor for name, tensor in self.content.items() if name not in rows]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def copied(self, names: Collection[str]) -> dict[str, Tensor]:
        """Return copies of some tensors of `content` in host memory, by name. Waits for the device."""
        content = self._with_host_rows(self.content)
        return {name: content[name].to("cpu", copy=True) for name in names}

    def overwrite(self, name: str, values: Tensor) -> None:
        """Copy values of the host into a tensor that changes; with rows on the host wait for the device."""
        self._with_host_rows({name: self.content[name]})[name].copy_(values)

    def _with_host_rows(self, content: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors, rows in host memory as tensors of the host."""
        if self.host_rows is None:
            return content
        self.host_rows.wait()
        on_host = {f"column/{name}": rows for name, rows in self.host_rows.on_host.items()}
        on_host["returns_to_go"] = self.host_rows.on_host[RETURN_TO_GO]
        return {name: on_host.get(name, tensor) for name, tensor in content.items()}

    def gather_source(self, name: str) -> Tensor:
        """Return the rows of a column, or of RETURN_TO_GO. [rows or slots, *shape]."""
        return self.returns_to_go if name == RETURN_TO_GO else self.columns[name]

    # ---- content ---------------------------------------------------------------------------------

    @classmethod
    def of_dataset(
        cls, dataset: Dataset, spec: RingTableSpec, items: DatasetItems, ops: Ops, device: torch.device
    ) -> RingTable:
        """Copy a data set to a device.

        Args:
            dataset: All of it, or this node's part.
            spec: As in the constructor.
            ops: As in the constructor.
        Raises:
            DataError: A file has changed since the data set was opened.
        """
        dataset.files.guard(ops.native)
        schema, lengths = dataset.schema, dataset.lengths
        final = int(schema.has_final_row)
        count, table = len(lengths), cls(spec, ops, device)
        records = np.zeros((count, Slot.NUM_WORDS), np.int64)
        records[:, Slot.STATE], records[:, Slot.ID] = SlotState.COMMITTED, np.arange(count) + dataset.first_id
        records[:, Slot.FIRST_ROW], records[:, Slot.NUM_STEPS] = dataset.first_rows, lengths
        records[:, Slot.NUM_ROWS] = lengths + final
        table.slots.copy_(torch.from_numpy(records))
        for column in schema:
            table.overwrite(f"column/{column.name}", as_tensor(dataset.columns[column.name], column.dtype))
        dataset.files.check()  # the copy is of the files that were opened, and of no later state of them
        if spec.return_to_go:
            reward = schema.role("reward")
            assert reward is not None
            extents = table.slots[:, [Slot.FIRST_ROW, Slot.NUM_STEPS]].contiguous()
            ops.suffix_sum_(table.returns_to_go, table.columns[reward.name], extents)
        table._weigh(items)
        table.state[RingState.NEXT], table.state[RingState.HEAD] = count, spec.num_rows
        table.state[RingState.STEPS] = int(lengths.sum())
        return table

    def _weigh(self, items: DatasetItems) -> None:
        """Set the masses of a data set's items."""
        leaves, masses = self.sums[: self.num_items], items.masses
        if items.initial is None:
            leaves.copy_(torch.from_numpy(masses))
        else:
            has_mass = masses > 0
            if items.admitted is not None:
                owners = np.repeat(np.arange(self.num_slots), self.slots[:, Slot.NUM_ROWS].cpu().numpy())
                self.row_slots.copy_(torch.from_numpy(owners.astype(np.int32)))
                has_mass = items.admitted & has_mass[owners]
            initial = np.where(has_mass, np.float32(items.initial), np.float32(0))
            self.priorities.copy_(torch.from_numpy(initial))
            self.ops.mass_(leaves, self.priorities, items.alpha, items.most_bits)
        self.ops.tree_build_(self.sums, self.num_items)
        if len(self.minima):
            self.ops.minima_build_(self.minima, self.sums, self.num_items)
        self.state[RingState.COUNTS + UpdateCount.DRAWABLE] = torch.count_nonzero(leaves)

    def check(self, columns: Mapping[str, Tensor], lengths: Tensor | None) -> tuple[int, int]:
        """Raise if columns cannot be added, from shapes and dtypes alone.

        Returns:
            Trajectories, and steps of each.
        Raises:
            SchemaError, ShapeError, DataError: A column is missing, unknown, or of another shape, dtype or
                device.
        """
        arguments.tensors("columns", columns)
        missing = [column.name for column in self.schema if column.name not in columns]
        unknown = [name for name in columns if name not in self.columns]
        if missing or unknown:
            name = (missing or unknown)[0]
            rule = "must be given" if missing else f"must be one of {', '.join(self.columns)}"
            raise SchemaError(f"column {name}", rule)
        count, steps = -1, -1
        for column in self.schema:
            given = columns[column.name]
            if given.device != self.state.device:
                raise DataError(f"column {column.name}", f"must be on {self.device}", str(given.device))
            if given.dtype != DTYPES[column.dtype]:
                raise SchemaError(f"column {column.name}", f"must be {column.dtype}", str(given.dtype))
            axes = 1 if column.rows == "1" else 2
            own = given.shape[1] - int(column.rows == "T+1") if axes == 2 and given.dim() > 1 else steps
            count, steps = given.shape[0] if count < 0 else count, own if steps < 0 else steps
            wrong = own != steps or given.dim() < axes or given.shape[axes:] != torch.Size(column.shape)
            if wrong or given.shape[0] != count:
                wanted = [count, steps + int(column.rows == "T+1")][:axes] + list(column.shape)
                raise ShapeError(f"column {column.name}", f"must be {wanted}", list(given.shape))
        if steps < 0:
            steps = self.most_steps
        if not 1 <= steps <= self.most_steps:
            raise ShapeError("steps", f"must be in [1, {self.most_steps}], the table's max_length", steps)
        most = min(self.num_slots, self.num_rows // (self.most_steps + self.shape[2]) - 1)
        if not 1 <= count <= most:
            raise ShapeError("trajectories", f"must be in [1, {most}], so that they fit at once", count)
        if lengths is not None:
            if not isinstance(lengths, torch.Tensor):
                raise DataError("lengths", "must be a tensor", type(lengths).__name__)
            arguments.dense("lengths", lengths)
        if lengths is not None and (lengths.shape != (count,) or lengths.dtype != torch.int64):
            raise ShapeError(
                "lengths", f"must be [{count}], int64", f"{list(lengths.shape)}, {lengths.dtype}"
            )
        return count, steps

    def without_inner_ends(
        self, columns: Mapping[str, Tensor], lengths: Tensor | None, steps: int
    ) -> Tensor | None:
        """Return the lengths of checked trajectories, -1 (refused) where an end flag precedes the last step.

        Args:
            columns: Of the trajectories. [E, T, *shape].
            lengths: Steps of each; None: all `steps`. [E], int64.
        Raises:
            DataError: There is such a flag, in host memory: a device is not waited for.
        """
        flags = [columns[column.name][:, :-1].bool() for column in self.schema.end_columns]
        if not flags or steps == 1:
            return lengths
        inner = flags[0] if len(flags) == 1 else flags[0] | flags[1]
        if lengths is not None:
            inner = inner & (torch.arange(1, steps, device=self.device) < lengths[:, None])
        has_inner = inner.any(1)
        if self.device.type == "cpu" and not torch.compiler.is_compiling() and bool(has_inner.any()):
            number, step = inner.nonzero()[0].tolist()
            names = " or ".join(column.name for column in self.schema.end_columns)
            remedy = "add each episode as a trajectory, or steps with num_envs and add_steps_"
            raise DataError(
                f"column {names}", ENDS_LAST, f"a flag at step {step} of trajectory {number}", remedy
            )
        kept = torch.full_like(has_inner, steps, dtype=torch.int64) if lengths is None else lengths
        return torch.where(has_inner, -1, kept)

    def as_trajectories(
        self, columns: Mapping[str, Tensor], following: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Return transitions as trajectories of one step. [E, *shape] -> [E, 1 or 2, *shape]."""
        named: dict[str, Tensor] = {}
        arguments.tensors("following", following)
        for name, values in arguments.tensors("columns", columns).items():
            rows = self.schema[name].rows if name in self.columns else "1"
            if rows == "T+1" and name in following:
                if following[name].shape != values.shape:
                    given = list(following[name].shape)
                    raise ShapeError(f"following: column {name}", f"must be {list(values.shape)}", given)
                named[name] = torch.stack([values, following[name]], 1)
            else:
                named[name] = values if rows == "1" else values.unsqueeze(1)
        return named

    def add_(
        self,
        columns: Mapping[str, Tensor],
        lengths: Tensor | None,
        count: int,
        steps: int,
        items: NewItems,
    ) -> None:
        """Add trajectories that `check` has checked. Mutates fixed tensors only."""
        # Made anew: a tensor that was made in a trace or a capture cannot be used outside of it.
        placed = torch.empty(count, PlacedTrajectory.NUM_WORDS, dtype=torch.int64, device=self.device)
        if lengths is None:
            lengths = torch.full((count,), steps, dtype=torch.int64, device=self.device)
        self.ops.ring_add_(
            self.state,
            self.slots,
            self.begins,
            self.sums,
            self.minima,
            self.priorities,
            self.row_slots,
            placed,
            lengths,
            items.anchors,
            self.shape,
            items.unit,
            items.alpha,
            items.initial,
            items.most_bits,
        )
        values = [columns[column.name].contiguous() for column in self.schema]
        self.ops.scatter_(list(self.columns.values()), values, placed, self._sources)
        if len(self.returns_to_go) and self._rewards is not None:
            extents = placed[:, 1:3].contiguous()  # 0 steps where nothing was added
            self.ops.suffix_sum_(self.returns_to_go, self._rewards, extents)

    def check_fill(self, ids: Tensor, columns: Mapping[str, Tensor]) -> None:
        """Raise if late columns do not fit.

        Raises:
            SchemaError, ShapeError, DataError: A column is unknown, others follow from it, or it has another
                dtype, shape or device.
        """
        for name, values in arguments.tensors("columns", columns).items():
            if name not in self.columns or values.dtype != self.columns[name].dtype:
                rule = "must be of the table, and of its dtype"
                raise SchemaError(f"column {name}", rule, str(values.dtype))
            column = self.schema[name]
            if column.role in ("reward", "terminated", "truncated"):
                raise SchemaError(f"column {name}", "must not come late", column.role)
            rows = [] if column.rows == "1" else [self.most_steps + int(column.rows == "T+1")]
            wanted = [len(ids), *rows, *column.shape]
            if list(values.shape) != wanted:
                raise ShapeError(f"column {name}", f"must be {wanted}", list(values.shape))
            if values.device != self.state.device:
                raise DataError(f"column {name}", f"must be on {self.device}", str(values.device))

    def fill_(self, ids: Tensor, columns: Mapping[str, Tensor]) -> None:
        """Write late columns of stored trajectories; ids of evicted ones are left out.

        Args:
            ids: [n], int64.
            columns: As checked by `check_fill`.
        """
        slots = torch.remainder(ids, self.num_slots)
        records = self.slots[slots]
        is_there = (records[:, Slot.ID] == ids) & (records[:, Slot.STATE] == SlotState.COMMITTED)
        slot = torch.where(is_there, slots, -1)
        placed = torch.stack([slot, records[:, Slot.FIRST_ROW], records[:, Slot.NUM_STEPS]], 1)
        targets = [self.columns[name] for name in columns]
        sources = [SOURCES[self.schema[name].rows] for name in columns]
        self.ops.scatter_(targets, [values.contiguous() for values in columns.values()], placed, sources)

    def remove_(self, ids: Tensor) -> None:
        """Remove trajectories: they are not drawn again, and their rows stay until they would be evicted.

        Args:
            ids: Those that are not stored are ignored. [n], int64.
        """
        removed = torch.empty_like(ids)
        unit = MassUnit.STEP if self.items_are_rows else MassUnit.TRAJECTORY
        known = (self.state, self.slots, self.sums, self.minima, self.priorities)
        self.ops.ring_remove_(*known, removed, ids.contiguous(), self.shape, unit)

    def num_trajectories(self) -> int:
        """Return the number of stored trajectories. Waits for the device."""
        return int((self.slots[:, Slot.STATE] == SlotState.COMMITTED).sum())

    def statistics(self) -> dict[str, int]:
        """Return sizes, and counts of updates. Waits for the device."""
        state = self.state.tolist()
        counts = state[RingState.COUNTS :]
        found = {
            "steps": state[RingState.STEPS],
            "trajectories": self.num_trajectories(),
            "added": state[RingState.NEXT],
            "global_batches": state[RingState.BATCH],
            "empty_batches": state[RingState.EMPTY],
            "refused": state[RingState.REFUSED],
            **({"dropped": state[RingState.DROPPED]} if self.num_envs else {}),
            "bytes": self.num_bytes,
            **({} if self.host_rows is None else {"host_bytes": self.host_rows.num_bytes}),
        }
        if len(self.priorities):
            found |= {
                "priorities_applied": counts[UpdateCount.APPLIED],
                "priorities_ignored": counts[UpdateCount.STALE],
                "priorities_clamped": counts[UpdateCount.CLAMPED],
                "items": counts[UpdateCount.DRAWABLE],
            }
        return found

    def priority_counts(self) -> tuple[int, int]:
        """Return how many priority updates were ever applied, and clamped. Waits for the device."""
        counts = self.state[RingState.COUNTS :].tolist()
        return counts[UpdateCount.APPLIED], counts[UpdateCount.CLAMPED]

    def close(self) -> None:
        """End the device's use of rows in host memory; safe to call twice."""
        if self.host_rows is not None:
            self.host_rows.close()

    def clear(self) -> None:
        """Remove all trajectories; ids continue."""
        counts, following = self.state[_PRIORITY_COUNTS].clone(), self.state[RingState.NEXT].clone()
        head = self.state[RingState.HEAD].clone()
        for name in ("slots", "sums", "minima", "priorities", "row_slots", "begins"):
            self.content[name].zero_()
        self.opened.zero_()
        counts[UpdateCount.DRAWABLE] = 0
        self.state[_PRIORITY_COUNTS] = counts
        self.state[RingState.NEXT], self.state[RingState.TAIL], self.state[RingState.HEAD] = (
            following,
            following,
            head,
        )
        self.state[RingState.STEPS] = 0
