"""A table in the memory of one device: rings of rows and slots, added steps, removal, statistics.

It is private to the process. A trajectory never wraps around the end of the rows
(common/ring_layout.h), and the oldest ones are evicted. Tensors have fixed addresses, for CUDA
graphs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from deepspeed_gear.batching.field_rows import SOURCES
from deepspeed_gear.batching.transfer.cuda_streams import ALIGNMENT, Packing
from deepspeed_gear.data.compressed_rows import CompressedRows
from deepspeed_gear.data.dataset import Dataset
from deepspeed_gear.errors import ConfigError, SchemaError, undo_on_error
from deepspeed_gear.ops import Ops, kernel_faults
from deepspeed_gear.ops.constants import (
    HIGHEST_SO_FAR,
    MOST_INDICES,
    MOST_MASS_BITS,
    ONE_Q62,
    minima_size,
    tree_size,
)
from deepspeed_gear.ops.records import (
    MassUnit,
    OpenTrajectory,
    PlacedStep,
    PlacedTrajectory,
    RingState,
    Slot,
    SlotState,
    Source,
    UpdateCount,
)
from deepspeed_gear.sampling.mass_rules import UNIT_CODES
from deepspeed_gear.sampling.stream_spec import StreamSpec
from deepspeed_gear.schema import DTYPES, Schema
from deepspeed_gear.store.cuda_registration import CudaRuntime, Registration, as_device_tensor
from deepspeed_gear.store.native_rows import as_tensor
from deepspeed_gear.store.shared_memory import SharedMemory
from deepspeed_gear.store.table_spec import RETURN_TO_GO

_ONE = 0x3F800000  # bits of 1.0


@dataclass(frozen=True)
class ItemRule:
    """Items of a RingTable: slots or rows, and the rule of their masses."""

    by_row: bool  # each row is an item with a priority of its own
    has_priorities: bool
    has_minima: bool  # a tree of least masses is kept, to normalise PER weights by the table
    anchors: list[int]  # which steps are anchors, as `AnchorRule.as_list`
    unit: int  # unit of a mass (MassUnit)
    alpha: int = 0  # exponent of the priorities, Q62
    # Float32 bits of the first priority; HIGHEST_SO_FAR stands for 1 until a higher one was set.
    initial: int = HIGHEST_SO_FAR
    most_bits: int = MOST_MASS_BITS  # log2 of the largest mass
    by_epoch: bool = False  # batches are those of epochs, every item once in each

    @classmethod
    def of(cls, spec: StreamSpec) -> ItemRule:
        """Return the items of the stream that trains on a table."""
        rule = spec.rule
        priorities = spec.priorities
        unit = MassUnit.LENGTH if rule.by_length else UNIT_CODES[rule.unit]
        anchors = rule.anchors.as_list()
        if priorities is None:
            return cls(False, False, False, anchors, unit, by_epoch=spec.sampler.walks)
        alpha = int(priorities.alpha(0) * ONE_Q62)
        initial = HIGHEST_SO_FAR
        if priorities.initial is not None:
            initial = int(np.float32(priorities.initial).view(np.int32))
        by_row = rule.unit == "step"
        has_minima = priorities.normalize == "table"
        return cls(by_row, True, has_minima, anchors, unit, alpha, initial, priorities.most_bits)


@dataclass(frozen=True)
class RingTableSpec:
    """Sizes of a RingTable, and the state that it keeps for each item."""

    schema: Schema
    num_rows: int
    num_slots: int
    most_steps: int  # steps of the longest trajectory
    items: ItemRule
    return_to_go: bool  # whether the derived column is kept
    # Environments whose steps are added one by one, each with a part of the rows; 0: whole
    # trajectories are added.
    num_envs: int = 0
    # Name of the table in the config, if its rows lie in host memory.
    rows_on_host: str | None = None


class HostRows:
    """Columns in host memory that a device uses in place: zeros at first.

    On a CPU they are not registered with CUDA.

    Raises:
        ConfigError: The device cannot use all of the memory in place.
        StoreFullError: There is too little memory.
    """

    def __init__(
        self,
        sizes: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
        device: torch.device,
        at: str,
        runtime: CudaRuntime | None = None,
    ) -> None:
        self._device = device
        self._registration: Registration | None = None
        packing = Packing(list(sizes.values()))
        self._memory = SharedMemory.create(max(packing.num_bytes, ALIGNMENT))
        self.num_bytes = self._memory.num_bytes
        whole = torch.frombuffer(self._memory.buffer, dtype=torch.uint8)
        #: The columns as tensors of the host. [rows, *shape].
        self.on_host = dict(zip(sizes, packing.views(whole), strict=True))
        #: The same as tensors of the device.
        self.columns = self.on_host
        if device.type == "cpu" and runtime is None:
            return
        with undo_on_error(self.close):
            used = CudaRuntime(device) if runtime is None else runtime
            self._registration = Registration.of(self._memory, self.on_host, used)
            for name, why in self._registration.left_out.items():
                rule = f'must be "device" here: column {name} cannot be used in place: {why}'
                remedy = "lower capacity_steps until it fits the device"
                raise ConfigError(f"{at}.rows", rule, "host", remedy)
            if device.type == "cuda":
                self.columns = {
                    name: as_device_tensor(rows, device) for name, rows in self.on_host.items()
                }

    def wait(self) -> None:
        """Wait until the device has done its queued work, before the host uses rows."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def close(self) -> None:
        """Wait for the device and end its use of the memory. Safe to call twice.

        Views of the host stay valid.
        """
        if self._registration is not None:
            self.wait()
            self._registration.close()
            self._registration = None
        self._memory.close()


class RingTable:
    """Trajectories in the memory of one device. Not thread-safe; calls run on the current stream.

    Cost: `num_bytes`. Besides the columns that is 72 bytes per slot; per item 8.3 for the sums, 0.3
    for the minima and 4 for a priority; and 4 per row where items are rows or environments add
    steps.

    Raises:
        ConfigError: There are more rows or slots than 32 bits can number.
        SchemaError: Steps are added one by one, and a column of ends has another dtype than bool.
    """

    def __init__(self, spec: RingTableSpec, ops: Ops, device: torch.device) -> None:
        for what, count in (("rows", spec.num_rows), ("slots", spec.num_slots)):
            if count > MOST_INDICES:
                raise ConfigError(
                    f"the table on the device: {what}",
                    f"must be at most {MOST_INDICES}, because 32 bits number them",
                    count,
                    "lower capacity_steps or capacity_trajectories, divide the data set, or keep "
                    "the table in host memory",
                )
        self.schema = spec.schema
        self.items = spec.items
        self.ops = ops
        self.device = device
        self.compressed: dict[str, CompressedRows] = {}  # a data set with such columns is refused
        schema = spec.schema
        items = spec.items
        self.num_rows = spec.num_rows
        self.num_slots = spec.num_slots
        self.num_envs = spec.num_envs
        self.most_steps = spec.most_steps
        self.shape = [spec.num_rows, spec.num_slots, int(schema.has_final_row), spec.most_steps]
        self.num_items = spec.num_rows if items.by_row else spec.num_slots
        masses = (items.unit, items.alpha, items.initial, items.most_bits)
        self._item_rule = (items.anchors, self.shape, *masses)  # arguments of ops

        # Columns of ends, by role; a table of steps without one takes a flag named for the role.
        self._ends = {"terminated": "terminated", "truncated": "truncated"}
        for role in self._ends if self.num_envs else ():
            column = schema.role(role)
            if column is not None and column.dtype != "bool":
                rule = f"has role {role} and must be bool where steps are added one by one"
                raise SchemaError(f"column {column.name}", rule, column.dtype, "store it as bool")
            self._ends[role] = role if column is None else column.name

        def zeros(*size: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        sizes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        for column in schema:
            count = spec.num_slots if column.rows == "1" else spec.num_rows
            sizes[column.name] = ((count, *column.shape), DTYPES[column.dtype])
        sizes[RETURN_TO_GO] = ((spec.num_rows if spec.return_to_go else 0,), torch.float32)
        # Memory of the rows; None: they lie in the device's.
        self.host_rows = (
            None if spec.rows_on_host is None else HostRows(sizes, device, spec.rows_on_host)
        )
        if self.host_rows is None:
            held = {name: zeros(*shape, dtype=dtype) for name, (shape, dtype) in sizes.items()}
        else:
            held = dict(self.host_rows.columns)
        self.columns = {column.name: held[column.name] for column in schema}
        self.returns_to_go = held[RETURN_TO_GO]
        reward = schema.role("reward")
        self._rewards = None if reward is None else self.columns[reward.name]
        self.state = zeros(RingState.NUM_WORDS)
        self.slots = zeros(spec.num_slots, Slot.NUM_WORDS)
        # Number of each slot's first row (see RingState): it tells a wrapped row from an old one.
        self.begins = zeros(spec.num_slots)
        self.sums = zeros(tree_size(self.num_items))
        self.minima = zeros(minima_size(self.num_items) if items.has_minima else 0)
        self.priorities = zeros(self.num_items if items.has_priorities else 0, dtype=torch.float32)
        self.row_slots = zeros(spec.num_rows if items.by_row else 0, dtype=torch.int32)
        #: Open trajectory of each environment (`OpenTrajectory`), and slot of each row.
        self.opened = zeros(spec.num_envs, OpenTrajectory.NUM_WORDS)
        has_owners = spec.num_envs > 0 and not items.by_row
        self.owners = zeros(spec.num_rows, dtype=torch.int32) if has_owners else self.row_slots
        self.state[RingState.INITIAL] = _ONE
        self.state[RingState.COUNTS + UpdateCount.HIGHEST_PRIORITY] = _ONE
        truncated = schema.role("truncated") if self.num_envs else None
        self._truncations = (
            zeros(0, dtype=torch.bool) if truncated is None else self.columns[truncated.name]
        )
        #: All tensors that change, by name.
        self.content: dict[str, Tensor] = {f"column/{name}": rows for name, rows in held.items()}
        self.content |= {
            "state": self.state,
            "slots": self.slots,
            "begins": self.begins,
            "sums": self.sums,
            "minima": self.minima,
            "priorities": self.priorities,
            "row_slots": self.row_slots,
        }
        if self.num_envs > 0:
            self.content["opened"] = self.opened
        if has_owners:
            self.content["owners"] = self.owners
        on_host = {} if self.host_rows is None else self.host_rows.on_host
        self._on_host = {f"column/{name}": rows for name, rows in on_host.items()}
        for tensor in self.content.values():
            torch._dynamo.mark_static_address(tensor)  # "reduce-overhead" then mutates it in place

    @property
    def num_bytes(self) -> int:
        """Memory of the table on its device; without rows that lie in host memory."""
        return sum(
            tensor.nbytes for name, tensor in self.content.items() if name not in self._on_host
        )

    def copied(self, names: Collection[str]) -> dict[str, Tensor]:
        """Return copies of some tensors of `content` in host memory. Waits for the device."""
        if self.host_rows is not None:
            self.host_rows.wait()
        return {
            name: self._on_host.get(name, self.content[name]).to("cpu", copy=True) for name in names
        }

    def overwrite(self, name: str, values: Tensor) -> None:
        """Copy host values into a tensor of `content`, after the device's work on host rows."""
        if self.host_rows is not None:
            self.host_rows.wait()
        self._on_host.get(name, self.content[name]).copy_(values)

    def gather_source(self, name: str) -> Tensor:
        """Return the rows of a column, or of RETURN_TO_GO. [rows or slots, *shape]."""
        return self.returns_to_go if name == RETURN_TO_GO else self.columns[name]

    def load_(self, dataset: Dataset, masses: np.ndarray, admitted: np.ndarray | None) -> None:
        """Copy a data set, or this node's part of it, into the empty table.

        If a file of the data set has changed meanwhile, the table is closed and the error raised.

        Args:
            masses: Masses of the trajectories. [n], int64.
            admitted: Where items are rows, which rows are anchors. [rows], bool.
        """
        dataset.files.guard(self.ops.native)
        lengths = dataset.lengths
        count = len(dataset.lengths)
        items = self.items
        records = np.zeros((count, Slot.NUM_WORDS), np.int64)
        records[:, Slot.STATE] = SlotState.COMMITTED
        records[:, Slot.ID] = np.arange(count) + dataset.first_id
        records[:, Slot.FIRST_ROW] = dataset.first_rows
        records[:, Slot.NUM_STEPS] = lengths
        records[:, Slot.NUM_ROWS] = lengths + int(self.schema.has_final_row)
        self.slots.copy_(torch.from_numpy(records))
        for column in self.schema:
            self.overwrite(
                f"column/{column.name}", as_tensor(dataset.columns[column.name], column.dtype)
            )
        with undo_on_error(self.close):  # else rows in host memory would stay registered
            # After the copy: a file that was changed while it was read is an error.
            dataset.files.check()
        if len(self.returns_to_go) and self._rewards is not None:
            extents = self.slots[:, [Slot.FIRST_ROW, Slot.NUM_STEPS]].contiguous()
            self.ops.suffix_sum_(self.returns_to_go, self._rewards, extents)
        leaves = self.sums[: self.num_items]
        if not items.has_priorities:
            leaves.copy_(torch.from_numpy(masses))
        else:
            has_mass = masses > 0
            if admitted is not None:
                owners = np.repeat(np.arange(count), records[:, Slot.NUM_ROWS])
                self.row_slots.copy_(torch.from_numpy(owners.astype(np.int32)))
                has_mass = admitted & has_mass[owners]
            bits = _ONE if items.initial == HIGHEST_SO_FAR else items.initial
            initial = np.where(has_mass, np.int32(bits).view(np.float32), np.float32(0))
            self.priorities.copy_(torch.from_numpy(initial))
            self.ops.mass_(leaves, self.priorities, items.alpha, items.most_bits)
        self.ops.tree_build_(self.sums, self.num_items)
        if items.has_minima:
            self.ops.minima_build_(self.minima, self.sums, self.num_items)
        self.state[RingState.COUNTS + UpdateCount.DRAWABLE] = torch.count_nonzero(leaves)
        self.state[RingState.NEXT] = count
        self.state[RingState.HEAD] = self.num_rows
        self.state[RingState.STEPS] = int(lengths.sum())

    def add_(self, columns: Mapping[str, Tensor], lengths: Tensor, most_steps: int) -> None:
        """Add trajectories that `added_columns` has checked. Mutates fixed tensors only.

        Args:
            most_steps: Steps of the longest that `columns` have room for. How many rows are added
                at most, not how many the table admits, decides how the kernels are launched.
        """
        # Allocated by each call: a tensor of a trace or a capture cannot be used outside of it.
        placed = torch.empty(
            len(lengths), PlacedTrajectory.NUM_WORDS, dtype=torch.int64, device=self.device
        )
        known = (
            self.state,
            self.slots,
            self.begins,
            self.sums,
            self.minima,
            self.priorities,
            self.row_slots,
        )
        anchors, shape, *masses = self._item_rule
        self.ops.ring_add_(*known, placed, lengths, anchors, [*shape[:3], most_steps], *masses)
        self._scatter({name: columns[name] for name in self.columns}, placed)
        if len(self.returns_to_go) and self._rewards is not None:
            extents = placed[:, 1:3].contiguous()  # 0 steps where nothing was added
            self.ops.suffix_sum_(self.returns_to_go, self._rewards, extents)

    def fill_(self, ids: Tensor, columns: Mapping[str, Tensor]) -> None:
        """Write late columns that `added_columns` has checked; skips evicted trajectories."""
        slot, records = self._stored(ids)
        placed = torch.stack([slot, records[:, Slot.FIRST_ROW], records[:, Slot.NUM_STEPS]], 1)
        self._scatter(columns, placed)

    def _stored(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return slots of trajectories, -1 if not stored, and their records. [n], [n, 8]."""
        # A trajectory's slot is its id modulo the slots, as ids and slots are assigned in turn.
        slots = torch.remainder(ids, self.num_slots)
        records = self.slots[slots]
        is_stored = (records[:, Slot.ID] == ids) & (records[:, Slot.STATE] == SlotState.COMMITTED)
        return torch.where(is_stored, slots, -1), records

    def _scatter(self, columns: Mapping[str, Tensor], placed: Tensor) -> None:
        targets = [self.columns[name] for name in columns]
        sources = [SOURCES[self.schema[name].rows] for name in columns]
        self.ops.scatter_(
            targets, [values.contiguous() for values in columns.values()], placed, sources
        )

    def remove_(self, ids: Tensor) -> None:
        """Remove trajectories from sampling, where they are stored; rows stay until evicted."""
        unit = MassUnit.STEP if self.items.by_row else MassUnit.TRAJECTORY
        known = (self.state, self.slots, self.sums, self.minima, self.priorities)
        removed = torch.empty_like(ids)
        self.ops.ring_remove_(*known, removed, ids.contiguous(), self.shape, unit)
        if self.items.by_epoch:
            # Later additions may bring the steps back to what they were when the epoch was drawn.
            self.state[RingState.EPOCH_STEPS].masked_fill_((removed >= 0).any(), -1)

    def add_steps_(
        self,
        columns: Mapping[str, Tensor],
        following: Mapping[str, Tensor],
        mask: Tensor | None,
        mode: str,
    ) -> None:
        """Add a step that `added_columns` has checked to every environment's open trajectory."""
        # Allocated by each call: a tensor of a trace or a capture cannot be used outside of it.
        placed = torch.empty(
            self.num_envs, PlacedStep.NUM_WORDS, dtype=torch.int64, device=self.device
        )
        begun = torch.empty(self.num_envs, 3, dtype=torch.int64, device=self.device)
        known = (
            self.state,
            self.slots,
            self.opened,
            self.owners,
            self.sums,
            self.minima,
            self.priorities,
        )
        given = (columns[self._ends["terminated"]], columns.get(self._ends["truncated"]), mask)
        flags = [None if each is None else each.contiguous() for each in given]
        self.ops.ring_extend_(
            *known, placed, begun, self._truncations, *flags, *self._item_rule, mode == "next_step"
        )
        rows = {}
        once = {}
        for column in self.schema:
            values = columns[column.name]
            if column.rows == "1":
                once[column.name] = values
            elif column.rows == "T+1":
                rows[column.name] = torch.stack([values, following[column.name]], 1)
            else:
                rows[column.name] = values[:, None]
        self._scatter(rows, placed)
        if once:
            self._scatter(once, begun)

    def end_steps_(self, mask: Tensor | None = None) -> None:
        """End the open trajectories of all environments or of a mask; last steps are truncated."""
        steps = self.opened[:, OpenTrajectory.NUM_STEPS]
        which = torch.ones_like(steps, dtype=torch.bool) if mask is None else mask
        if len(self._truncations):
            slots, records = self._stored(self.opened[:, OpenTrajectory.ID])
            slot = torch.where(which & (steps > 0), slots, -1)
            last = torch.stack(
                [slot, records[:, Slot.FIRST_ROW] + steps - 1, torch.ones_like(slot)], 1
            )
            marks = torch.ones(len(slot), 1, dtype=torch.bool, device=self.device)
            self.ops.scatter_([self._truncations], [marks], last, [Source.STEPS])
        for word in (OpenTrajectory.NUM_STEPS, OpenTrajectory.ENDED):
            self.opened[:, word].masked_fill_(which, 0)

    def num_trajectories(self) -> int:
        """Return the number of stored trajectories. Waits for the device."""
        with kernel_faults.named():
            return int((self.slots[:, Slot.STATE] == SlotState.COMMITTED).sum())

    def statistics(self) -> dict[str, int]:
        """Return sizes, and counts of updates. Waits for the device."""
        with kernel_faults.named():
            state = self.state.tolist()
        counts = state[RingState.COUNTS :]
        statistics = {
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
        if self.items.has_priorities:
            statistics |= {
                "priorities_applied": counts[UpdateCount.APPLIED],
                "priorities_ignored": counts[UpdateCount.STALE],
                "priorities_clamped": counts[UpdateCount.CLAMPED],
                "items": counts[UpdateCount.DRAWABLE],
            }
        if self.items.by_epoch:
            statistics |= {
                "epochs_begun": state[RingState.EPOCH] + int(state[RingState.EPOCH_SIZE] > 0),
                "epochs_cut": state[RingState.EPOCHS_CUT],
            }
        return statistics

    def priority_counts(self) -> tuple[int, int]:
        """Return how many priority updates were ever applied, and clamped. Waits for the device."""
        with kernel_faults.named():
            counts = self.state[RingState.COUNTS :].tolist()
        return counts[UpdateCount.APPLIED], counts[UpdateCount.CLAMPED]

    def close(self) -> None:
        """End the device's use of rows in host memory; safe to call twice."""
        if self.host_rows is not None:
            self.host_rows.close()

    def clear(self) -> None:
        """Remove all trajectories; ids continue."""
        for name, tensor in self.content.items():
            if name != "state" and not name.startswith("column/"):
                tensor.zero_()
        self.state[RingState.TAIL] = self.state[RingState.NEXT]
        self.state[RingState.STEPS] = 0
        self.state[RingState.COUNTS + UpdateCount.DRAWABLE] = 0
