"""Sum tree of a stream: masses of its items, changes that wait, resolved draws, order of age.

Every change of a slot is appended to the table's log. The next selection queues their masses by the
rule and writes them to the tree, which never changes during a draw. After a death, or if more
changed than the log holds, it is compared with the slot table, which is authoritative.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import torch

from deepspeed_gear.ops.constants import FAN_OUT, MOST_TOTAL_BITS, tree_levels, tree_size
from deepspeed_gear.ops.philox import below, philox
from deepspeed_gear.ops.records import RandomPurpose, Resolution, Slot, SlotState
from deepspeed_gear.sampling.mass_rules import UNIT_CODES, WindowEdge
from deepspeed_gear.sampling.stream_spec import StreamSpec
from deepspeed_gear.store.memory_layout import Region
from deepspeed_gear.store.records import NOTHING, Control, SlotRetention
from deepspeed_gear.store.table import Table
from deepspeed_gear.store.table_spec import TableSpec


class TreeChanges:
    """Words of the mass changes that wait for a selection."""

    NUM_QUEUED: Final = 0
    # 1: the queue is being written to the tree; -1 - n: log entries up to n are.
    APPLYING: Final = 1
    ALPHA: Final = 2  # exponent of the priorities, Q62
    SEEN: Final = 3  # the table's Control.CHANGED up to which changes are queued
    BATCH: Final = 4  # global batch of the latest selection, from which the age of new items counts
    ERA: Final = 5  # `Decay.era` of the masses
    NUM_WORDS: Final = 8


class ItemMasses:
    """The sum tree of a stream, with one mass for each slot. Every method requires the lock, but
    `initialise` memory not linked yet. Functions `on_change` get the committed slots that may hold
    something new.
    """

    def __init__(
        self, spec: StreamSpec, table: Table, on_change: Sequence[Callable[[np.ndarray], None]] = ()
    ) -> None:
        self.spec = spec
        self.table = table
        self.ops = table.ops
        views = table.views
        self.num_items = self.count_items(spec, table.spec)
        self.words = views[spec.at + "changes"].data
        self._control: memoryview = table.control.data
        self._late = (
            table.spec.schema.late_bits(spec.rule.late) if table.spec.dataset is None else 0
        )
        self._groups = table.groups if spec.by_group else None
        self._on_change = on_change
        self.queued: np.ndarray = views[spec.at + "queued"]
        self._dirty: np.ndarray = views[spec.at + "dirty"]
        self.sums = torch.from_numpy(views[spec.at + "sums"])
        self.leaves: np.ndarray = views[spec.at + "sums"][: self.num_items]
        #: The rule's masses of the slots as of the tree. [slots], int64.
        self.applied = self.leaves
        #: Whether a second draw, keyed by the sample number, selects the anchor.
        self.draws_anchor = spec.rule.draws_anchor
        # The last level: one node's children.
        self._top: memoryview = views[spec.at + "sums"][-FAN_OUT:].data
        self._slots = torch.from_numpy(table.slots)
        self._log = torch.from_numpy(views["log"]) if "log" in views else None
        unit = UNIT_CODES["trajectory" if spec.rule.draws_anchor else "step"]
        self._how = (spec.rule.anchors.as_list(), unit, spec.seed, spec.random_key)
        self._plain_unit = None if self._late else spec.rule.plain_unit
        # The sums are modulo 2^64.
        self._may_wrap = spec.rule.has_weights and table.spec.dataset is None

    def native_words(self) -> dict[str, int]:
        """Return the numbers that the native `Stream` takes, beside the addresses of regions."""
        return {
            "num_items": self.num_items,
            "unit": self._how[1],
            "plain_unit": -1 if self._plain_unit is None or self._on_change else self._plain_unit,
            "has_priorities": 0,
        }

    @staticmethod
    def count_items(spec: StreamSpec, table: TableSpec) -> int:
        """Return the leaves of the tree: a row each where steps have priorities, else a
        slot each.
        """
        by_row = spec.priorities is not None and spec.rule.unit == "step"
        return table.num_rows if by_row else table.num_slots

    @classmethod
    def regions(cls, spec: StreamSpec, table: TableSpec) -> list[Region]:
        """Return the regions of a stream's masses in the store."""
        return [
            Region(spec.at + "changes", "int64", (TreeChanges.NUM_WORDS,)),
            Region(spec.at + "queued", "int64", (table.num_slots,)),
            Region(spec.at + "dirty", "int64", (table.num_slots,)),
            Region(spec.at + "sums", "int64", (tree_size(cls.count_items(spec, table)),)),
        ]

    def initialise(self) -> None:
        """Set the masses of the table's trajectories."""
        self.queued[:] = NOTHING
        if self._groups is not None:
            self._groups.update()
        self.words[TreeChanges.SEEN] = self._control[Control.CHANGED]
        slots = np.nonzero(self.table.slots[:, Slot.STATE] == SlotState.COMMITTED)[0]
        if self._plain_unit is None:
            self._set(slots, self.of(slots))
            self._build()
        else:  # NumPy takes ten times as long
            self._take(torch.from_numpy(slots), 0, len(slots), self._plain_unit)

    def of(self, slots: np.ndarray) -> np.ndarray:
        """Return the masses of committed slots by the rule; of leaders those of their groups. [n],
        int64.
        """
        if self._groups is None:
            at = np.arange(len(slots))
            chosen = slots
            steps = self.table.slots[slots, Slot.NUM_STEPS]
        else:
            at = np.nonzero(self._groups.is_leader(slots))[0]
            chosen = slots[at]
            steps = self._groups.steps(chosen)
        ids = self.table.slots[chosen, Slot.ID]
        masses = np.zeros(len(slots), np.int64)
        masses[at] = self.spec.rule.masses(ids, steps, lambda name: self.table.values(name, chosen))
        if self._groups is not None or not self._late:
            return masses
        present = self.table.views["retention"][slots, SlotRetention.PRESENT]
        return np.where(present & self._late == self._late, masses, 0)

    def take_changes(self) -> None:
        """Queue the slots of the table that changed since the last call."""
        if self._groups is not None:
            self._groups.update()
        seen = self.words[TreeChanges.SEEN]
        changed = self._control[Control.CHANGED]
        if seen == changed or self.table.spec.dataset is not None:
            return
        logged = self.table.extents.changed_since(seen)
        slots = self._differing() if logged is None else logged
        self.queue(slots, self._wanted(slots))
        self.words[TreeChanges.SEEN] = changed
        self._report_changed(logged)

    def _report_changed(self, slots: np.ndarray | None) -> None:
        """Call each `on_change` with those of the slots that are committed; None: of all slots."""
        if not self._on_change:
            return
        is_committed = self.table.slots[:, Slot.STATE] == SlotState.COMMITTED
        committed = np.nonzero(is_committed)[0] if slots is None else slots[is_committed[slots]]
        for call in self._on_change:
            call(committed)

    def will_have_mass(self) -> bool:
        """Return whether any slot has a mass after all waiting changes. Cost: one pass."""
        self.take_changes()
        return bool((np.where(self.queued != NOTHING, self.queued, self.applied) > 0).any())

    def _wanted(self, slots: np.ndarray) -> np.ndarray:
        """Return the masses of slots by their states and the rule. [n] -> [n], int64."""
        wanted = np.zeros(len(slots), np.int64)
        committed = self.table.slots[slots, Slot.STATE] == SlotState.COMMITTED
        wanted[committed] = self.of(slots[committed])
        return wanted

    def _differing(self) -> np.ndarray:
        """Return the slots whose masses, including queued ones, differ from the slot
        table's. [n].
        """
        effective = np.where(self.queued != NOTHING, self.queued, self.applied)
        return np.nonzero(effective != self._wanted(np.arange(len(effective))))[0]

    def queue(self, slots: np.ndarray, masses: np.ndarray) -> None:
        """Queue masses of different slots for the next selection; the last one of a slot wins. [n],
        int64.
        """
        new = slots[self.queued[slots] == NOTHING]
        count = self.words[TreeChanges.NUM_QUEUED]
        self._dirty[count : count + len(new)] = new
        self.queued[slots] = masses
        self.words[TreeChanges.NUM_QUEUED] = count + len(new)

    @property
    def waiting(self) -> bool:
        """Whether the next selection would change the tree."""
        return (
            self.words[TreeChanges.NUM_QUEUED] != 0
            or self.words[TreeChanges.SEEN] != self._control[Control.CHANGED]
            or (self._groups is not None and self._groups.waiting)
        )

    def apply(self, number: int) -> None:
        """Apply all changes that precede a global batch to the tree; `recover` repairs it after a
        death.
        """
        seen = self.words[TreeChanges.SEEN]
        changed = self._control[Control.CHANGED]
        unit = self._plain_unit
        log = self._log
        if self._on_change or self.words[TreeChanges.NUM_QUEUED]:
            log = None
        # Where the slot table alone determines the masses, one op writes those that have changed.
        # Faster than `len`.
        if unit is not None and log is not None and changed - seen <= log.size(0):
            if changed != seen:
                self._take(log, seen, changed, unit)
                self.words[TreeChanges.SEEN] = changed
            return
        self.take_changes()
        count = self.words[TreeChanges.NUM_QUEUED]
        if count == 0:
            return
        dirty = self._dirty[:count]
        self.words[TreeChanges.APPLYING] = 1
        self._set(dirty, self.queued[dirty])
        self.queued[dirty] = NOTHING
        self.words[TreeChanges.NUM_QUEUED] = 0
        self.words[TreeChanges.APPLYING] = 0

    def _take(self, log: torch.Tensor, seen: int, changed: int, unit: int) -> None:
        """Write the masses of the slots in entries [seen, changed) of the log to the tree."""
        self.ops.slot_masses_(self.sums, self._slots, log, seen, changed, self._how[0], unit)

    def recover(self) -> None:
        """Repair masses and queue after a process died inside a method."""
        waiting = np.nonzero(self.queued != NOTHING)[0]
        if self.words[TreeChanges.APPLYING]:  # each queued slot is in the tree or not: finish
            self._set(waiting, self.queued[waiting])
            self.queued[waiting] = NOTHING
            self.words[TreeChanges.NUM_QUEUED] = self.words[TreeChanges.APPLYING] = 0
        else:
            self._requeue()
        # Slots that were committed or retired without their change being queued, by the slot table.
        missed = self._differing()
        self.queue(missed, self._wanted(missed))
        self.words[TreeChanges.SEEN] = self._control[Control.CHANGED]
        self._build()
        self._report_changed(None)

    def take_out(self, slot: int) -> None:
        """Set a slot's mass to 0 at once; its next change sets a mass again."""
        self._set(np.array([slot]), np.zeros(1, np.int64))

    def _set(self, slots: np.ndarray, masses: np.ndarray) -> None:
        self.ops.tree_update_(
            self.sums, self.num_items, torch.from_numpy(slots), torch.from_numpy(masses)
        )

    def _build(self) -> None:
        self.ops.tree_build_(self.sums, self.num_items)

    @property
    def total(self) -> int:
        most = 1 << MOST_TOTAL_BITS
        may_wrap = self._may_wrap and int(self.leaves.max()) * len(self.leaves) >= most
        if may_wrap and (total := int(self.leaves.sum(dtype=np.float64))) >= most:
            return min(total, (1 << 63) - 1)
        # Plain integers: with cold caches a NumPy reduction costs 30 us.
        return sum(self._top.tolist())

    def resolve(self, rows: torch.Tensor, coordinates: torch.Tensor, first: int) -> None:
        """Write the resolutions of coordinates to rows, numbered from `first` on. [n, 8]; [n];
        int64.
        """
        self.ops.resolve_(rows, self.sums, self._slots, coordinates, *self._how, first)
        if self.spec.rule.has_weights and self.spec.rule.unit == "step":
            words = rows.numpy()  # the mass of one step
            words[:, Resolution.MASS] //= self.spec.rule.anchors.num_anchors(
                words[:, Resolution.NUM_STEPS]
            )

    def resolve_numbered(
        self, rows: torch.Tensor, coordinates: torch.Tensor, numbers: np.ndarray
    ) -> None:
        """Resolve coordinates as `resolve`, where sample numbers have gaps. [n], int64."""
        self.resolve(rows, coordinates, 0)
        words = rows.numpy()
        words[:, Resolution.SAMPLE_NUMBER] = numbers
        if self.draws_anchor:
            rule = self.spec.rule.anchors
            steps = words[:, Resolution.NUM_STEPS]
            unsigned = numbers.astype(np.uint64)
            purpose = np.array([[RandomPurpose.ANCHOR]], np.uint64)
            drawn = philox(self.spec.seed, unsigned, self.spec.random_key, purpose)
            index = below(tuple(quarter[0] for quarter in drawn), rule.num_anchors(steps))
            words[:, Resolution.ANCHOR] = rule.anchor_at(index, steps)

    def coordinates_of(self, items: torch.Tensor) -> torch.Tensor:
        """Return the first coordinate of each item. [n] -> [n], int64. Cost: 32
        additions a level.
        """
        coordinates = torch.zeros_like(items)
        nodes = items
        for offset, _ in tree_levels(self.num_items):
            first = nodes // FAN_OUT * FAN_OUT
            siblings = self.sums[offset + first[:, None] + torch.arange(FAN_OUT)]
            coordinates += (siblings * (torch.arange(FAN_OUT) < (nodes - first)[:, None])).sum(1)
            nodes = nodes // FAN_OUT
        return coordinates

    def export(self, slots: np.ndarray) -> dict[str, np.ndarray]:
        self.take_changes()
        return {"leaves": self.leaves[slots], "queued": self.queued[slots]}

    def restore(self, slots: np.ndarray, content: dict[str, np.ndarray]) -> None:
        """Restore masses that `export` returned; all other slots have none."""
        self.leaves[:] = 0
        self.queued[:] = NOTHING
        self.leaves[slots] = content["leaves"]
        self.queued[slots] = content["queued"]
        self._requeue()
        self._build()
        self.words[TreeChanges.SEEN] = self._control[Control.CHANGED]

    def _requeue(self) -> None:
        """Derive the list of queued slots from their masses."""
        waiting = np.nonzero(self.queued != NOTHING)[0]
        self._dirty[: len(waiting)] = waiting
        self.words[TreeChanges.NUM_QUEUED] = len(waiting)
        self.words[TreeChanges.APPLYING] = 0


class AgeMasses(ItemMasses):
    """Masses in the order of age: the oldest and the newest items, and windows of the newest ones.

    A smaller id is older: ids follow arrival, or the stored order of a data set. What a window
    admits depends on all trajectories; a selection after a change computes all masses again (a sort
    of all trajectories).
    """

    def initialise(self) -> None:
        super().initialise()
        self.queue_window()
        super().apply(0)

    def apply(self, number: int) -> None:
        waiting = self.waiting
        self.take_changes()
        if waiting and self.spec.num_shards == 1:
            self.queue_window()
        super().apply(number)

    def contents(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]:
        """Return the committed slots, their masses by the rule, ids, items, and values of the
        window.
        """
        slots = np.nonzero(self.table.slots[:, Slot.STATE] == SlotState.COMMITTED)[0]
        masses = self.of(slots)
        rule = self.spec.rule
        counts = masses if rule.unit == "step" else (masses > 0).astype(np.int64)
        column = None if rule.window is None else rule.window.column
        values = None if column is None else self.table.values(column, slots)
        return slots, masses, self.table.slots[slots, Slot.ID], counts, values

    def queue_window(self, edge: WindowEdge | None = None) -> None:
        """Queue what enters or leaves the window (`edge` over all nodes, else this store's) after
        changes.
        """
        window = self.spec.rule.window
        if window is None:
            return
        slots, masses, ids, counts, values = self.contents()
        edge = window.edge(ids, counts, values) if edge is None else edge
        wanted = np.zeros(self.num_items, np.int64)
        wanted[slots] = np.where(window.admits(edge, ids, counts, values), masses, 0)
        changed = np.nonzero(np.where(self.queued >= 0, self.queued, self.leaves) != wanted)[0]
        self.queue(changed, wanted[changed])

    def ends(self, count: int, newest: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return age, mass and first coordinate of the oldest or newest trajectories, in order. [n]
        each.
        """
        slots = np.nonzero(self.leaves)[0]
        ledger = self.table.ledger
        ages = self.table.slots[:, Slot.ID]
        if ledger is None:
            slots = slots[np.argsort(ages[slots], kind="stable")]
        else:  # those of groups before the first number that is open
            slots = ledger.in_order(slots)
            ages = ledger.numbers
        slots = slots[::-1] if newest else slots
        slots = slots[: np.searchsorted(np.cumsum(self.leaves[slots]), count) + 1]
        first = self.coordinates_of(torch.from_numpy(slots.copy())).numpy()
        return ages[slots], self.leaves[slots], first


def items_of(masses: np.ndarray, first: np.ndarray, count: int, newest: bool) -> torch.Tensor:
    """Return coordinates of at most `count` items of trajectories, each one's last first if
    `newest`. [n].
    """
    # For masses [2, 3] that begin at [10, 4], 4 items are [10, 11, 4, 5]; newest [11, 10, 6, 5].
    index = np.arange(masses.sum()) - np.repeat(np.cumsum(masses) - masses, masses)
    index = np.repeat(masses, masses) - 1 - index if newest else index
    return torch.from_numpy((np.repeat(first, masses) + index)[:count])
