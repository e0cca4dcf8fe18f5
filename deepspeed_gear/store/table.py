"""Table: one node's part of it in a store; create, attach, read and write rows, commit, evict.

Columns lie in shared or mapped memory. A slot is reserved -> committed -> retired -> free; its
state word is the commit point, written last. All free slots and rows derive from the slot table.
"""

from __future__ import annotations

import os
import secrets
import weakref
from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np
import torch

from deepspeed_gear.data.dataset import Dataset
from deepspeed_gear.data.stored_values import as_numbers, no_values
from deepspeed_gear.errors import (
    ConfigError,
    StoreError,
    StoreFullError,
    differences,
    undo_on_error,
)
from deepspeed_gear.ops import Ops
from deepspeed_gear.ops.records import Slot, SlotState
from deepspeed_gear.schema import Column
from deepspeed_gear.store.fill_ledger import FillLedger
from deepspeed_gear.store.futex_events import FutexEvents
from deepspeed_gear.store.groups import TableGroups
from deepspeed_gear.store.kept_ledger import KeptLedger
from deepspeed_gear.store.media_pages import ItemNumbers, MediaPages
from deepspeed_gear.store.memory_layout import (
    Layout,
    Region,
    RunIdentity,
    read_header,
    write_header,
)
from deepspeed_gear.store.native_rows import as_tensor
from deepspeed_gear.store.native_store import native_store, row_arrays
from deepspeed_gear.store.prompt_ledger import LeaseRecord, PromptLedger
from deepspeed_gear.store.rate_limiter import RateLimiter
from deepspeed_gear.store.records import Control, Peer, Refusal, SharedPrompt, SlotRetention
from deepspeed_gear.store.row_allocator import RowAllocator, committed_at, look_up
from deepspeed_gear.store.shared_memory import SharedMemory, clean_command, is_held
from deepspeed_gear.store.store_lock import StoreLock
from deepspeed_gear.store.table_spec import RETURN_TO_GO, TableSpec, table_layout


class Table:
    """A table in this process: one process of a node `create`s it, others `attach`.

    Methods that change or read slots require `lock` where stated; rows of a reserved slot are its
    owner's, of a committed one constant.
    """

    def __init__(
        self, spec: TableSpec, memory: SharedMemory, layout: Layout, ops: Ops, timeout_s: float
    ) -> None:
        self.spec = spec
        self.memory = memory
        self.layout = layout
        self.ops = ops.on_host()
        self.schema = spec.schema
        self.device = torch.device("cpu")
        views = layout.views(memory.buffer)
        self.views = views
        self.control: np.ndarray = views["control"]
        self.peers: np.ndarray = views["peers"]
        self.slots: np.ndarray = views["slots"]
        if spec.dataset is not None:
            spec.dataset.files.guard(ops.native)
        # By the names of columns, and the derived one as RETURN_TO_GO. In memory, arrivals lie
        # after the store's own rows, in one region. A mapped data set is read-only, so its arrivals
        # have separate regions. A row is written by one process only, before others read it.
        #: The store's own rows. [num_rows or num_slots, *shape].
        self.columns: dict[str, np.ndarray] = {}
        #: Writable rows for what arrives from other nodes. [arrival_rows or arrival_slots, *shape].
        self.arrivals: dict[str, np.ndarray] = {}
        self._gathered = {
            c.name: views[f"column/{c.name}"] if spec.in_memory else _part_of(spec, c)
            for c in spec.schema
            if c.name not in spec.compressed
        }
        if spec.return_to_go:
            self._gathered[RETURN_TO_GO] = views[RETURN_TO_GO]
        per_trajectory = {column.name for column in spec.schema if column.rows == "1"}
        for name, region in self._gathered.items():
            end = len(region)
            if spec.in_memory:
                end = spec.num_slots if name in per_trajectory else spec.num_rows
            self.columns[name] = region[:end]
            self.arrivals[name] = region[end:]
            if spec.has_arrivals and not spec.in_memory:
                self.arrivals[name] = self._gathered[name] = views[f"arrival/{name}"]
        #: Row and slot of the first arrival in what `gather_source` returns.
        self.first_arrival = (spec.num_rows, spec.num_slots) if spec.in_memory else (0, 0)
        #: Whether the store's own rows are in what `gather_source` returns; else they must be
        #: copied too.
        self.gathers_own_rows = spec.in_memory or not spec.has_arrivals
        self.compressed = spec.compressed
        # Compressed columns are indexed as arrays.
        self.columns |= cast("Mapping[str, np.ndarray]", self.compressed)
        #: From a part of this process to its next one, whose rows are read ahead; 0: none are.
        self.parts_ahead = 0
        #: Called with the lock held after the death of its owner: they rebuild derived state.
        self.recoveries: list[Callable[[], None]] = []
        self._token = secrets.token_hex(8)
        itself: Table = weakref.proxy(self)  # its parts must not keep it and its memory alive
        self.lock = StoreLock(memory, ops.native, timeout_s, lambda: itself._recover())
        if spec.dataset is None:
            arrays = row_arrays(spec, layout, views, self.columns)
            native = native_store(ops.native, spec, memory, views, self.columns, arrays)
            self.extents = RowAllocator(native, spec, memory, views)
        #: `SharedPrompt` of each slot that is not free; None: the table has no prompts. [slots, 2],
        #: int64.
        self.shared_prompts: np.ndarray | None = views.get("shared_prompts")
        #: Leases of its late columns; None: it holds a data set.
        self.fills: FillLedger | None = None
        if spec.dataset is None:
            self.fills = FillLedger(views["fill_claims"], memory)
        self.media: MediaPages | None = None
        if spec.media is not None:
            numbers = {
                one: ItemNumbers(self.columns[one], self.arrivals[one], one in per_trajectory)
                for one in spec.media.names
            }
            self.media = MediaPages(spec.name, spec.media, memory, views, numbers)
        self.groups: TableGroups | None = None
        self.ledger: PromptLedger | None = None
        if spec.group is not None:
            if spec.prompts is not None:
                given = spec.prompts, views, self.columns[spec.group.column], memory
                is_kept = spec.prompts.is_kept
                self.ledger = KeptLedger(*given, self.extents) if is_kept else PromptLedger(*given)
            extents = self.extents if spec.dataset is None else None
            self.groups = TableGroups(
                spec.name, spec.group, spec.schema, views, self.columns, extents, self.ledger
            )
        # The next change of a slot notifies it if a sampler waits.
        word = self.control[Control.EVENT : Control.EVENT + 1].view(np.uint32)
        self.events = FutexEvents(word.reshape(1, 2), ops.native)

    @classmethod
    def create(
        cls,
        spec: TableSpec,
        extra: list[Region],
        meaning: dict[str, Any],
        run: RunIdentity,
        ops: Ops,
        timeout_s: float,
        huge_pages: bool = True,
    ) -> Table:
        """Create the node's store of a table, not yet linked, and load its data set.

        `extra` are regions of streams; `meaning` must be equal in all processes. StoreFullError:
        there is too little memory.
        """
        layout = table_layout(spec, extra, meaning)
        memory = SharedMemory.create(layout.total_bytes, 0, huge_pages)
        with undo_on_error(memory.close):
            table = cls(spec, memory, layout, ops, timeout_s)
            table.lock.initialise()
            if spec.dataset is None:
                table.extents.rebuild()
                if table.ledger is not None and table.ledger.masses is not None:
                    table.ledger.masses.initialise()
            else:
                table._fill(spec.dataset)
            write_header(memory.buffer, layout, run)
            table.claim_peer(0)
            return table

    @classmethod
    def attach(
        cls,
        spec: TableSpec,
        name: str,
        expected: Layout,
        run_id: str,
        peer: int,
        ops: Ops,
        timeout_s: float,
    ) -> Table:
        """Attach to a store that another process of the node has created.

        Raises:
            StoreError: There is no store of this user or this run.
            ConfigError: Its layout differs.
        """
        memory = SharedMemory.attach(name, peer)
        with undo_on_error(memory.close):
            layout, found = read_header(memory.fd, str(memory.path))
            if found.id != run_id:
                raise StoreError(
                    str(memory.path),
                    f"must belong to run {run_id}",
                    found.id,
                    "start all ranks of the run again, or attach with its own run id",
                )
            if layout.digest != expected.digest:
                differing = differences(expected.meaning, layout.meaning, "store") or [
                    layout.description
                ]
                rule = "must have the layout that this process expects"
                remedy = f"use {clean_command(name.removesuffix(f'-{run_id}-{spec.name}'))}"
                raise ConfigError(str(memory.path), rule, "; ".join(differing), remedy)
            table = cls(spec, memory, layout, ops, timeout_s)
            table.claim_peer(peer)
            return table

    def claim_peer(self, peer: int) -> None:
        """Record this process's id at its index, for error texts."""
        self.peers[peer, [Peer.OLDEST_OPEN, Peer.WAITS, Peer.LOST]] = 0
        self.peers[peer, Peer.PID] = os.getpid()
        if self.media is not None:
            with self.lock:
                self.media.abandon()

    def read_ahead(self, most_bytes: int, parts: int) -> None:
        """Request the rows of batches from the disk before they are copied; of a mapped data set.

        Args:
            most_bytes: Bytes that one gather may request before it copies them.
            parts: From a part of a global batch that this process gathers to its next one.
        """
        assert self.spec.dataset is not None
        self.spec.dataset.files.read_ahead(self.ops.native, most_bytes)
        for rows in self.compressed.values():
            rows.read_ahead()
        self.parts_ahead = parts

    def note_oldest_open(self, version: int) -> None:
        """Record the oldest policy version of this process's open trajectories; -1: none is open.

        The word is the version + 1: 0, of new shared memory, is no open trajectory.
        """
        self.peers[self.memory.peer, Peer.OLDEST_OPEN] = version + 1

    def note_lost(self, peer: int) -> None:
        """Mark a process that died first: others may have ended because of it."""
        self.peers[peer, Peer.LOST] = 1

    @property
    def has_living_rank(self) -> bool:
        """Whether a rank is attached; a store without one belongs to a run that has ended."""
        own = self.memory.peer
        count = self.spec.num_peers
        return (own < count and self.memory.is_alive(own)) or is_held(self.memory.fd, 0, count)

    @property
    def is_selecting(self) -> bool:
        """Whether a selection over several nodes is under way, of a job whose ranks live."""
        return bool(self.control[Control.SELECTING]) and self.has_living_rank

    @property
    def run(self) -> RunIdentity:
        return read_header(self.memory.fd, str(self.memory.path))[1]

    def tensor(self, name: str) -> torch.Tensor:
        """Return a column as a tensor over the store itself. [rows, *shape]; never write to it."""
        return as_tensor(self.columns[name], self.spec.schema[name].stored_dtype)

    def gather_source(self, name: str) -> torch.Tensor:
        """Return rows to gather from, of a column or RETURN_TO_GO; never write to them. [n, ...].

        In memory the store's rows, then the arrivals; of a mapped data set its rows or, where the
        table has arrivals, these only; of a compressed column none. KeyError: there is none, or it
        is not kept.
        """
        if name in self.compressed:  # its rows are decoded
            return torch.empty(
                0, *self.compressed[name].shape[1:], dtype=self.spec.schema[name].torch_dtype
            )
        dtype = "float32" if name == RETURN_TO_GO else self.spec.schema[name].stored_dtype
        return as_tensor(self._gathered[name], dtype)

    def values(self, name: str, slots: np.ndarray) -> np.ndarray:
        """Return a per-trajectory column's values as numbers, bfloat16 as float32. [n, *shape]."""
        return as_numbers(self.columns[name][slots], self.spec.schema[name])

    @property
    def num_trajectories(self) -> int:
        return int(self.control[Control.NUM_COMMITTED])

    @property
    def num_steps(self) -> int:
        return int(self.control[Control.STEPS_COMMITTED])

    def counted(self, rate: RateLimiter) -> tuple[int, int, int]:
        """Return the items held, ever added, and reserved but not committed. Requires the lock."""
        return rate.counted(self.control) if self.groups is None else self.groups.counted()

    def slots_of(self, ids: np.ndarray) -> np.ndarray:
        """Return each id's slot, -1: not stored. Requires the lock; one pass over the slots."""
        if self.spec.dataset is not None:
            at = np.asarray(ids, np.int64) - self.spec.first_id
            held = (at >= 0) & (at < len(self.slots))
            held[held] = self.slots[at[held], Slot.STATE] == SlotState.COMMITTED
            return np.where(held, at, -1)
        if len(ids) == 1:
            is_committed = self.slots[:, Slot.STATE] == SlotState.COMMITTED
            at = np.nonzero(is_committed & (self.slots[:, Slot.ID] == ids[0]))[0]
            return at if len(at) else np.array([-1])
        return committed_at(self.slots, ids)

    def shared_prompt(self, slot: int) -> tuple[int, int]:
        """Return how many first steps another trajectory holds, and the slot of that one."""
        if self.shared_prompts is None:
            return 0, slot
        steps, holder = self.shared_prompts[slot].tolist()
        return steps, holder

    def num_steps_of(self, slots: np.ndarray) -> np.ndarray:
        """Return the steps of trajectories, with those that others hold. [n] -> [n], int64."""
        own = self.slots[slots, Slot.NUM_STEPS]
        more = 0 if self.shared_prompts is None else self.shared_prompts[slots, SharedPrompt.STEPS]
        return np.asarray(own + more)

    def restore_shared_prompts(self, slots: np.ndarray, steps: np.ndarray) -> None:
        """Set how many first steps others hold of trajectories that a checkpoint has restored.

        Their columns are there already, by which the groups are known. [n] each, int64.
        """
        if self.shared_prompts is not None and self.groups is not None:
            ids = self.slots[slots, Slot.ID]
            holders = holders_of(self.groups.numbers(slots), steps, ids)
            self.shared_prompts[slots] = np.stack([steps, slots[holders]], axis=1)

    def share_prompt(self, slots: np.ndarray, steps: np.ndarray) -> None:
        """Let the first of a group's reserved slots hold `steps` of each. [n] each, int64."""
        assert self.shared_prompts is not None
        self.shared_prompts[slots, SharedPrompt.STEPS] = steps
        self.shared_prompts[slots, SharedPrompt.SLOT] = slots[0]
        self.shared_prompts[slots[0]] = 0

    def own_rows(self, slot: int) -> dict[str, np.ndarray]:
        """Return views of the rows that a trajectory itself holds, by column."""
        first = int(self.slots[slot, Slot.FIRST_ROW])
        end = first + int(self.slots[slot, Slot.NUM_STEPS])
        at: dict[str, Any] = {"1": slot, "T": slice(first, end), "T+1": slice(first, end + 1)}
        return {
            column.name: self.columns[column.name][at[column.rows], ...]
            for column in self.spec.schema
        }

    def rows(self, slot: int) -> dict[str, np.ndarray]:
        """Return a trajectory's rows: views, or copies where another one holds the first ones."""
        own = self.own_rows(slot)
        (steps, holder) = self.shared_prompt(slot)
        if steps:
            for name, rows in self.own_rows(holder).items():
                if self.spec.schema[name].rows != "1":
                    own[name] = np.concatenate([rows[:steps], own[name]])
        return own

    def rows_for(self, num_steps: int) -> int:
        return num_steps + (1 if self.spec.schema.has_final_row else 0)

    def full(self, refusal: int, num_steps: int) -> StoreFullError:
        """Return the error of a trajectory for which no slot or run of rows is free."""
        name = f"table {self.spec.name}"
        if refusal == Refusal.NO_SLOT:
            rule = f"must have a free slot of {len(self.slots)}"
            remedy = "raise capacity_trajectories"
            return StoreFullError(name, rule, None, remedy)
        rule = f"must have {self.rows_for(num_steps)} free rows in a run"
        given = (
            f"{int(self.control[Control.FREE_ROWS])} free, longest run {self.extents.longest_run}"
        )
        remedy = "raise capacity_steps, remove trajectories, or set remove to evict old ones"
        return StoreFullError(name, rule, given, remedy)

    def write(
        self,
        slot: int,
        columns: Mapping[str, Any],
        known: int = 0,
        end: int | None = None,
        before: int = 0,
    ) -> None:
        """Write rows that no process reads yet, of this process's reserved slot or of an open one.

        Of a reserved slot no lock is needed.

        `columns` hold all rows, in arrays or lists; late ones may be left out. Written are the
        steps from `known` to `end` (None: the slot's); `before` of those in `columns` come before
        the slot's first one.
        """
        at = int(self.slots[slot, Slot.FIRST_ROW])
        steps = int(self.slots[slot, Slot.NUM_STEPS])
        for column in self.spec.schema:
            stored = self.columns[column.name]
            rows = columns.get(column.name) if column.late else columns[column.name]
            if column.rows == "1":
                if known == 0:
                    stored[slot, ...] = no_values(column, 0) if rows is None else rows
                continue
            more = int(column.rows == "T+1")
            first = known + (more if known else 0)
            last = (steps if end is None else end) + more
            stored[at + first : at + last] = (
                0 if rows is None else rows[before + first : before + last]
            )
        if self.spec.return_to_go:
            self._derive_returns(np.array([[at, steps]], np.int64))

    def _fill(self, dataset: Dataset) -> None:
        """Fill slots and columns from a data set in one pass; DataError: a file has changed."""
        spec = self.spec
        slots = self.slots
        held = self.spec.held
        first_rows = dataset.first_rows[held] - dataset.row_of(held.start)
        lengths = dataset.lengths[held]
        slots[:, Slot.GENERATION] = 1
        slots[:, Slot.ID] = np.arange(held.start, held.stop) + dataset.first_id
        slots[:, Slot.FIRST_ROW] = first_rows
        slots[:, Slot.NUM_STEPS] = lengths
        slots[:, Slot.NUM_ROWS] = lengths + int(dataset.schema.has_final_row)
        if spec.in_memory:
            for column in (column for column in dataset.schema if column.name in self._gathered):
                np.copyto(self.columns[column.name], _part_of(spec, column))
            dataset.files.check()  # the files have not changed during the copy
        slots[:, Slot.STATE] = SlotState.COMMITTED
        self.control[Control.NEXT_ID] = dataset.num_trajectories_of_whole
        self.control[Control.NUM_COMMITTED] = len(slots)
        self.control[Control.STEPS_COMMITTED] = int(lengths.sum())
        self._derive_returns(np.stack([first_rows, lengths], axis=1))

    def _derive_returns(self, extents: np.ndarray) -> None:
        """Compute returns-to-go of extents: first row, steps. [n, 2]. Cost: a pass over rewards."""
        reward = self.spec.schema.role("reward")
        if self.spec.return_to_go and reward is not None:
            returns = torch.from_numpy(self.columns[RETURN_TO_GO])
            self.ops.suffix_sum_(returns, self.tensor(reward.name), torch.from_numpy(extents))

    def commit(self, slot: int, born: int = 0, present: int = 0) -> int:
        """Publish a reserved slot; return its id. Requires the lock.

        Args:
            slot: The slot.
            born: Number of the global batch that is selected next.
            present: Bits of the late columns that the trajectory has.
        """
        record = self.slots[slot]
        assert record[Slot.STATE] == SlotState.RESERVED, record
        return self.extents.commit(
            slot, int(record[Slot.NUM_STEPS]), int(record[Slot.NUM_ROWS]), born, present
        )

    def commit_group(self, lease: LeaseRecord, slots: np.ndarray, present: np.ndarray) -> list[int]:
        """Publish the reserved slots of a lease's group for the next batch, and end the lease.

        Args:
            lease: What the group was generated for; its version is the policy version of the group.
            slots: Of the trajectories, in their order. [n], int64.
            present: Bits of the late columns that each one has. [n], int64.
        Returns:
            Their ids.
        Raises:
            LeaseExpiredError: The lease has ended; nothing is published.
        Requires the lock.
        """
        assert self.ledger is not None
        store = self.extents.handle.address
        born = self.ledger.num_selected
        with self.ledger.committing(lease, slots):
            native = self.ops.native
            ids: list[int] = native.group_commit(store, slots, present, lease.version, born)
        return ids

    def late_present(self, slot: int) -> int:
        """Return the bits of the late columns that a trajectory has. Requires the lock."""
        return int(self.views["retention"][slot, SlotRetention.PRESENT])

    def raise_policy_version(self, version: int) -> None:
        """Set the version of the learner's policy, which never decreases. Requires the lock."""
        known = int(self.control[Control.POLICY_VERSION])
        self.control[Control.POLICY_VERSION] = max(known, version)

    def evict(self, slots: np.ndarray, removed: bool = False) -> np.ndarray:
        """Evict distinct committed trajectories, and with them their groups; return all slots.

        [n] -> [m]. `removed` as in `TableGroups.evict`. Requires the lock.
        """
        if self.groups is not None:
            if not removed:
                self.groups.update()  # so that those that are complete by now are counted as such
            return self.groups.evict(slots, removed)
        for slot in slots.tolist():
            self.extents.retire(slot)
        return slots

    @property
    def lineage(self) -> str:
        """A name that lasts as long as no id is given again, which a load of a checkpoint ends."""
        return f"{self._token}.{self.control[Control.LOADS]}"

    def restored(self, next_id: int) -> None:
        """Rebuild derived state after a load has replaced slots and rows. Requires the lock.

        `next_id`: number of the next trajectory.
        """
        # Before an id is given again: see `lineage`
        self.control[[Control.LOADS, Control.CHANGED]] += 1
        self.control[Control.NEXT_ID] = next_id
        if self.spec.dataset is None:
            self.extents.rebuild()
            assert self.fills is not None
            self.fills.clear()
        used = self.slots[self.slots[:, Slot.STATE] != SlotState.FREE]
        self._derive_returns(np.ascontiguousarray(used[:, [Slot.FIRST_ROW, Slot.NUM_STEPS]]))

    def _recover(self) -> None:
        self.control[Control.RECOVERIES] += 1
        if self.spec.dataset is None:
            self.extents.recover()
            if self.ledger is not None:
                self.ledger.recover(self.extents.retire)
            if self.groups is not None:
                self.groups.recover()
            if self.media is not None:
                self.media.recover()
        for recover in self.recoveries:
            recover()

    def close(self) -> None:
        """Detach; the last process removes the store."""
        self.memory.close()
        self.recoveries.clear()  # of streams, which refer to it


def holders_of(numbers: np.ndarray, steps: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Return which trajectory holds the prompt of each one. [n] each -> indices [n], int64.

    It is the first of its group, by number, that shares no steps; of groups without shared steps
    any.
    """
    whole = np.flatnonzero(steps == 0)
    whole = whole[np.lexsort((ids[whole], numbers[whole]))]
    known, first = np.unique(numbers[whole], return_index=True)
    return np.asarray(look_up(known, numbers, whole[first]).clip(0))


def _part_of(spec: TableSpec, column: Column) -> np.ndarray:
    """Return a store's slice of the mapped file of a column, from the store's row 0 on."""
    assert spec.dataset is not None
    whole = spec.dataset.columns[column.name]
    if column.rows == "1":
        return whole[spec.held]
    first = spec.dataset.row_of(spec.held.start)
    return whole[first : first + spec.num_rows]
