"""Masses from priorities of trajectories or steps: applies reports, derives sum and min tree.

A leaf is a slot, or a row where items are steps. Priorities are authoritative: masses and trees are
derived from them. A selection applies the priority log.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from deepspeed_gear.ops.constants import FAN_OUT, ONE_Q62, minima_size
from deepspeed_gear.ops.records import PriorityUpdate, Slot, SlotState, UpdateCount
from deepspeed_gear.sampling.mass_rules import NORMALIZE_CODES, UNIT_CODES
from deepspeed_gear.sampling.priority_log import PriorityLog, without_slots
from deepspeed_gear.sampling.stream_spec import StreamSpec
from deepspeed_gear.sampling.sum_tree import ItemMasses, TreeChanges
from deepspeed_gear.store.memory_layout import Region
from deepspeed_gear.store.records import NOTHING, Control
from deepspeed_gear.store.row_allocator import distinct, is_among, rows_of
from deepspeed_gear.store.step_priorities import repair_step_priorities
from deepspeed_gear.store.table import Table
from deepspeed_gear.store.table_spec import TableSpec

MOST_MASS = np.iinfo(np.int64).max
_ONE = float(ONE_Q62)  # an exact product with an int converts it each time
WINDOW = 256  # latest global batches whose clamped updates are counted separately


class PriorityMasses(ItemMasses):
    """A mass for each trajectory or step: priority ** alpha in units of 2^-24. Process safety: as
    `ItemMasses`. Source: Schaul et al., "Prioritized Experience Replay", ICLR 2016.
    """

    def __init__(
        self, spec: StreamSpec, table: Table, on_change: Sequence[Callable[[np.ndarray], None]] = ()
    ) -> None:
        super().__init__(spec, table, on_change)
        assert spec.priorities is not None
        self.rule = spec.priorities
        views = table.views
        at = spec.at
        self.values: np.ndarray = views[at + "priorities"]
        self.counts: np.ndarray = views[at + "counts"]
        self.by_step = spec.rule.unit == "step"
        self._row_slots = views[at + "row_slots"] if self.by_step else np.empty(0, np.int32)
        self._bases: np.ndarray = views[at + "bases"]
        self.applied = self._bases
        self.draws_anchor = spec.rule.draws_anchor and not self.by_step
        self._generations: np.ndarray = views[at + "generations"]  # of trajectories with a priority
        #: The global batch from which each slot's age counts; None: priorities do not decay.
        self._born: np.ndarray | None = views.get(at + "born")
        if self._born is not None:
            self._plain_unit = None  # the native op computes no ages
        # Each slot's steps with a priority.
        self._steps: np.ndarray | None = views.get(at + "steps")
        self.reports = PriorityLog(spec, table)
        keeps_minima = self.rule.normalize == "table" and minima_size(self.num_items) > 0
        self._minima = torch.from_numpy(
            views[at + "minima"] if keeps_minima else np.empty(0, np.int64)
        )
        self._values = torch.from_numpy(self.values)
        self._trees = self.sums, self._minima, self._values, torch.from_numpy(self.counts)
        self._count_words: memoryview = self.counts.data
        self._row_slots_tensor = torch.from_numpy(self._row_slots)
        self._unit = UNIT_CODES[spec.rule.unit]
        steps = np.empty(0, np.int64) if self._steps is None else self._steps
        known = (torch.from_numpy(words) for words in (self._bases, self._generations, steps))
        self._slot_words = *known, self._row_slots_tensor
        initial = self.rule.initial
        # Its bits.
        self._fixed_initial = None if initial is None else int(np.float32(initial).view(np.int32))
        self._window: np.ndarray = views[at + "window"]
        self._window_words: memoryview = self._window.data

    def native_words(self) -> dict[str, int]:
        return {
            **super().native_words(),
            "has_priorities": 1,
            "reports_size": self.rule.log_size,
            "window_size": WINDOW,
            "lag": self.rule.lag,
            "update_unit": self._unit,
            "initial": -1 if self._fixed_initial is None else self._fixed_initial,
            "most_bits": self.rule.most_bits,
            "normalize": NORMALIZE_CODES[self.rule.normalize],
        }

    @classmethod
    def regions(cls, spec: StreamSpec, table: TableSpec) -> list[Region]:
        rule = spec.priorities
        items = cls.count_items(spec, table)
        num_slots = table.num_slots
        assert rule is not None
        regions = [
            Region(spec.at + "priorities", "float32", (items,)),
            Region(spec.at + "counts", "int64", (UpdateCount.NUM_WORDS,)),
            Region(spec.at + "window", "int64", (WINDOW, 2)),
            Region(spec.at + "bases", "int64", (num_slots,)),
            Region(spec.at + "generations", "int64", (num_slots,)),
            *PriorityLog.regions(spec, table.num_peers),
        ]
        if rule.decay is not None:
            regions.append(Region(spec.at + "born", "int64", (num_slots,)))
        if spec.rule.unit == "step":
            regions.append(Region(spec.at + "row_slots", "int32", (items,)))
            regions.append(Region(spec.at + "steps", "int64", (num_slots,)))
        if rule.normalize == "table" and minima_size(items):
            regions.append(Region(spec.at + "minima", "int64", (minima_size(items),)))
        return [*super().regions(spec, table), *regions]

    def initialise(self) -> None:
        self.reports.initialise()
        self.words[TreeChanges.ALPHA] = self.alpha_at(0)
        self.counts[UpdateCount.HIGHEST_PRIORITY] = np.ones(1, np.float32).view(np.int32)[0]
        super().initialise()

    def restart(self, number: int) -> None:
        """Reset the requests of all processes, after a checkpoint at `number` was loaded."""
        self.reports.restart(number)
        self._window[:] = 0

    waiting = True  # reports may come at any time

    def apply(self, number: int) -> None:
        due = self.reports.due(number)
        self.apply_reports(number, [entries for _, entries in due])
        if due:
            self.reports.take(due)

    def apply_reports(self, number: int, reports: list[np.ndarray]) -> None:
        """Write queued changes of slots to the tree, then priority updates in any order. [n, 6]
        each.
        """
        self.words[TreeChanges.BATCH] = number
        super().apply(number)
        era = 0 if self.rule.decay is None else number // self.rule.decay.era_batches
        for word, value in ((TreeChanges.ALPHA, self.alpha_at(number)), (TreeChanges.ERA, era)):
            if value != self.words[word]:
                self.words[word] = value
                self._build()
        counts = self._count_words
        window = self._window_words
        at = number % WINDOW
        if not reports:
            window[at, 0] = window[at, 1] = 0
            return
        applied = counts[UpdateCount.APPLIED]
        clamped = counts[UpdateCount.CLAMPED]
        known = self._of_leaders(reports[0] if len(reports) == 1 else np.concatenate(reports))
        given = (
            self._slots,
            torch.from_numpy(known),
            self._how[0],
            self.words[TreeChanges.ALPHA],
            self._unit,
        )
        self.ops.prioritize_(*self._trees, *given, self.rule.most_bits)
        if self._born is not None:  # the items that are stored, each once
            slots = known[:, PriorityUpdate.SLOT]
            anchors = known[:, PriorityUpdate.ANCHOR]
            records = self.table.slots[slots]
            is_stored = (slots >= 0) & (
                records[:, Slot.GENERATION] == known[:, PriorityUpdate.GENERATION]
            )
            items = records[:, Slot.FIRST_ROW] + anchors if self.by_step else slots
            self._set_masses(distinct(items[is_stored & (anchors < records[:, Slot.NUM_STEPS])]))
        window[at, 0] = counts[UpdateCount.APPLIED] - applied
        window[at, 1] = counts[UpdateCount.CLAMPED] - clamped

    def _of_leaders(self, reports: np.ndarray) -> np.ndarray:
        """Return reports in which those of a group's trajectories are of its leader.
        [n, 6], int64.
        """
        if self._groups is None:
            return reports
        slots = reports[:, PriorityUpdate.SLOT]
        of_leaders = reports.copy()
        records = self.table.slots[slots]
        is_current = records[:, Slot.GENERATION] == reports[:, PriorityUpdate.GENERATION]
        moved = np.nonzero(is_current & (records[:, Slot.STATE] == SlotState.COMMITTED))[0]
        leaders = self._groups.items(slots[moved])
        of_leaders[moved, PriorityUpdate.SLOT] = leaders
        of_leaders[moved, PriorityUpdate.GENERATION] = self.table.slots[leaders, Slot.GENERATION]
        return np.asarray(of_leaders)

    def recover(self) -> None:
        self.reports.recover()
        repair_step_priorities(self.table, self.spec.at.rstrip("/"))
        if self.words[TreeChanges.APPLYING] < 0:  # a slot is done or to be done again: finish
            changed = -1 - self.words[TreeChanges.APPLYING]
            assert self._log is not None
            assert self._plain_unit is not None
            self._take(self._log, self.words[TreeChanges.SEEN], changed, self._plain_unit)
            self.words[TreeChanges.SEEN] = changed
        super().recover()

    def alpha_at(self, number: int) -> int:
        """Return the exponent of the priorities of a global batch, Q62."""
        return int(self.rule.alpha(number) * _ONE)  # exact: a power of two

    def known_reports(self, reports: np.ndarray) -> np.ndarray:
        """Replace ids (slot -1, id for generation) by handles; drop items of other stores. [n, 6],
        int64.
        """
        by_id = reports[:, PriorityUpdate.SLOT] < 0
        if not by_id.any():
            return reports
        ids, anchors = reports[by_id][:, [PriorityUpdate.GENERATION, PriorityUpdate.ANCHOR]].T
        updates, known = self.handles_of(ids, anchors)
        by_handle = reports.copy()
        by_handle[by_id, : PriorityUpdate.ANCHOR + 1] = updates
        keep = ~by_id
        keep[by_id] = known
        return np.asarray(by_handle[keep])

    def handles_of(self, ids: np.ndarray, anchors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return slot, generation and anchor of items by ids and, of steps, anchors, and which can
        be drawn: [n] -> [n, 3], int64, and [n], bool. Any trajectory of a group names its leader.
        """
        slots = self.table.slots_of(ids)
        known = slots >= 0
        if self._groups is not None:
            self._groups.update()
            slots = np.where(known, self._groups.items(slots), -1)
        records = self.table.slots[slots]
        known[known] &= self.of(slots[known]) > 0
        if self.by_step:
            known &= self.spec.rule.anchors.admits(anchors, records[:, Slot.NUM_STEPS]) & (
                anchors >= 0
            )
        return np.stack([slots, records[:, Slot.GENERATION], anchors], axis=1), known

    def _set(self, slots: np.ndarray, masses: np.ndarray) -> None:
        """Set the first priority of new items, and clear that of evicted ones; of slots already
        free, whose rows may be another trajectory's, the process that freed them has cleared it.
        """
        if self.by_step and self.table.spec.dataset is None:
            there = is_among(
                self.table.slots[slots, Slot.STATE], (SlotState.COMMITTED, SlotState.EVICTED)
            )
            self._bases[slots[~there]] = 0
            slots = slots[there]
            masses = masses[there]
        known = self._generations[slots] == self.table.slots[slots, Slot.GENERATION]
        differ = ~known | ((self._bases[slots] > 0) != (masses > 0))  # others keep their priorities
        if self._born is not None:
            self._born[slots[differ]] = self.words[TreeChanges.BATCH]
        items, admitted = self._items_of(slots[differ], masses[differ])
        self._set_items(items, np.where(admitted, self._initial, np.float32(0)))
        if self._steps is not None:
            longer = (
                ~differ
                & (masses > 0)
                & (self._steps[slots] != self.table.slots[slots, Slot.NUM_STEPS])
            )
            if longer.any():  # open trajectories have grown: other steps keep their priorities
                records = self.table.slots[slots[longer]]
                admits = self.spec.rule.anchors.admits
                items, steps, owner = rows_of(records)
                now = admits(steps, records[owner, Slot.NUM_STEPS])
                before = admits(steps, self._steps[slots[longer]][owner])
                self._set_items(items[now & ~before], self._initial)
                self._set_items(items[before & ~now], np.zeros((), np.float32))
            self._steps[slots] = self.table.slots[slots, Slot.NUM_STEPS]
        self._bases[slots] = masses
        self._generations[slots] = self.table.slots[slots, Slot.GENERATION]

    def _take(self, log: torch.Tensor, seen: int, changed: int, unit: int) -> None:
        self.words[TreeChanges.APPLYING] = -1 - changed
        given = self._slots, log, seen, changed, self._how[0], unit, self._initial_bits
        exponents = self.words[TreeChanges.ALPHA], self.rule.most_bits
        self.ops.slot_priorities_(*self._trees, *self._slot_words, *given, *exponents)
        self.words[TreeChanges.APPLYING] = 0

    def _set_items(self, items: np.ndarray, priorities: np.ndarray) -> None:
        self.values[items] = priorities
        self._set_masses(items)

    def _set_masses(self, items: np.ndarray) -> None:
        """Derive the masses of items from their priorities. [n], int64, each once."""
        new = torch.empty(len(items), dtype=torch.int64)
        decayed = torch.from_numpy(self._decayed(items))
        self.ops.mass_(new, decayed, self.words[TreeChanges.ALPHA], self.rule.most_bits)
        before = np.count_nonzero(self.leaves[items])
        changed = torch.from_numpy(items)
        self.ops.tree_update_(self.sums, self.num_items, changed, new)
        if len(self._minima):
            self.ops.minima_update_(self._minima, self.sums, self.num_items, changed)
        self.counts[UpdateCount.DRAWABLE] += np.count_nonzero(new.numpy()) - before

    def _decayed(self, items: np.ndarray | slice) -> np.ndarray:
        """Return the priorities of items as they count now. [n], float32."""
        values = self.values[items]
        if self._born is None or self.rule.decay is None:
            return values
        slots = self._row_slots if self.by_step else np.arange(self.num_items)
        return self.rule.decay.decayed(
            values, self._born[slots[items]], self.words[TreeChanges.ERA]
        )

    def _differing(self) -> np.ndarray:
        differing = super()._differing()
        records = self.table.slots
        unqueued = self.queued == NOTHING
        other = records[:, Slot.GENERATION] != self._generations
        if self._steps is not None:
            other |= records[:, Slot.NUM_STEPS] != self._steps
        other &= unqueued & (self._bases != 0)
        return distinct(np.append(differing, np.nonzero(other)[0]))

    def _items_of(self, slots: np.ndarray, bases: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return all items of slots, and which of them may be drawn. [m], int64, and [m], bool."""
        if not self.by_step:
            return np.ascontiguousarray(slots), bases > 0
        records = self.table.slots[slots]
        items, steps, owner = rows_of(records)
        self._row_slots[items] = slots[owner]
        admitted = self.spec.rule.anchors.admits(steps, records[owner, Slot.NUM_STEPS])
        return items, admitted & (bases[owner] > 0)

    @property
    def _initial_bits(self) -> int:
        """The float32 bits of the priority of new items."""
        fixed = self._fixed_initial
        return self._count_words[UpdateCount.HIGHEST_PRIORITY] if fixed is None else fixed

    @property
    def _initial(self) -> np.ndarray:
        """The priority of new items. [], float32."""
        return np.array(self._initial_bits, np.int32).view(np.float32)

    def _build(self) -> None:
        leaves = self.sums[: self.num_items]
        values = torch.from_numpy(self._decayed(slice(None)))
        self.ops.mass_(leaves, values, self.words[TreeChanges.ALPHA], self.rule.most_bits)
        self.ops.tree_build_(self.sums, self.num_items)
        if len(self._minima):
            self.ops.minima_build_(self._minima, self.sums, self.num_items)
        self.counts[UpdateCount.DRAWABLE] = np.count_nonzero(self.leaves)

    def resolve(self, rows: torch.Tensor, coordinates: torch.Tensor, first: int) -> None:
        if not self.by_step:
            super().resolve(rows, coordinates, first)
            return
        self.ops.resolve_rows_(
            rows, self.sums, self._slots, self._row_slots_tensor, coordinates, first
        )

    def highest_items(self, count: int) -> torch.Tensor:
        """Return the items of highest priority, equal ones by their trajectories; or fewer. [n]."""
        items = torch.empty(count, dtype=torch.int64)
        self.ops.top_k_(items, self._values, self.sums)
        items = items[items >= 0]
        if self.table.spec.dataset is not None or not len(items):
            return items
        # In a table with a capacity a newer trajectory may lie before an older one: of all items
        # with the least priority among those found, the ones of the lowest ids are taken.
        highest = items.numpy()
        values = self.values
        least = values[highest[-1]]
        equal = np.nonzero((values == least) & (self.leaves > 0))[0]
        above = highest[values[highest] > least]
        ids = self.ids_of(equal)
        wanted = len(highest) - len(above)
        equal = equal[ids <= np.partition(ids, wanted - 1)[wanted - 1]]
        every = np.concatenate([above, equal])
        order = np.lexsort((every, self.ids_of(every), -values[every]))
        return torch.from_numpy(every[order][: len(highest)])

    def ids_of(self, items: np.ndarray) -> np.ndarray:
        """Return the trajectories of items. [n] -> [n], int64."""
        slots = self._row_slots[items] if self.by_step else items
        return np.asarray(self.table.slots[slots, Slot.ID])

    @property
    def least(self) -> int:
        """The smallest mass that is not 0; 0 if there is none."""
        top = self._minima[-FAN_OUT:].numpy() if len(self._minima) else self.leaves
        return int(top[top > 0].min(initial=MOST_MASS)) if top.any() else 0

    @property
    def num_drawable(self) -> int:
        return self._count_words[UpdateCount.DRAWABLE]

    def beta_at(self, number: int) -> int:
        """Return the exponent of the importance weights of a global batch, Q62."""
        return int(self.rule.beta(number) * _ONE)

    def priority_counts(self) -> tuple[int, int]:
        """Return how many updates were ever applied, and clamped to the smallest or the largest
        mass.
        """
        return self._count_words[UpdateCount.APPLIED], self._count_words[UpdateCount.CLAMPED]

    def recent(self) -> tuple[int, int]:
        """Return how many updates the latest `WINDOW` global batches applied, and clamped."""
        applied, clamped = self._window.sum(0).tolist()
        return applied, clamped

    def statistics(self) -> dict[str, int]:
        """Return how many updates were applied, ignored because their item was evicted, and
        clamped.
        """
        counts = self._count_words
        (applied, clamped) = self.recent()
        return {
            "priorities_applied": counts[UpdateCount.APPLIED],
            "priorities_ignored": counts[UpdateCount.STALE],
            "priorities_clamped": counts[UpdateCount.CLAMPED],
            "priorities_applied_recent": applied,
            "priorities_clamped_recent": clamped,
        }

    def export(self, slots: np.ndarray) -> dict[str, np.ndarray]:
        self.take_changes()
        known = self._generations[slots] == self.table.slots[slots, Slot.GENERATION]
        bases = np.where(known, self._bases[slots], 0)  # else they are an earlier trajectory's
        items, _ = self._items_of(slots, bases)
        log = self.reports.waiting()
        if self.spec.num_shards == 1:  # else they may be of any shard
            log = without_slots(log, np.isin(log[:, PriorityUpdate.SLOT], slots), slots[:1])
            log[:, PriorityUpdate.SLOT] = np.searchsorted(slots, log[:, PriorityUpdate.SLOT])
        return {
            "priorities": self.values[items],
            "bases": bases,
            **({} if self._steps is None else {"steps": self._steps[slots]}),
            **({} if self._born is None else {"born": self._born[slots]}),
            "queued": self.queued[slots],
            "counts": self.counts.copy(),
            "alpha": np.array([self.words[TreeChanges.ALPHA]]),
            "log": log,
        }

    def restore(self, slots: np.ndarray, content: dict[str, np.ndarray]) -> None:
        log = content["log"].copy()
        if self.spec.num_shards == 1:
            by_id = log[:, PriorityUpdate.SLOT] < 0
            log[~by_id, PriorityUpdate.SLOT] = slots[log[~by_id, PriorityUpdate.SLOT]]
            log = self.known_reports(log)
        self.reports.restore(log)  # first: it raises where they do not fit
        self.values[:] = 0
        self.queued[:] = -1
        self._bases[:] = 0
        items, admitted = self._items_of(slots, content["bases"])
        # Where a slot has no mass, they are an earlier trajectory's.
        self.values[items] = np.where(admitted, content["priorities"], 0)
        self._bases[slots] = content["bases"]
        self.queued[slots] = content["queued"]
        self._generations[slots] = self.table.slots[slots, Slot.GENERATION]
        if self._steps is not None:
            self._steps[slots] = content["steps"]
        if self._born is not None:
            self._born[slots] = content.get("born", 0)
        self.counts[:] = content["counts"]
        self.words[TreeChanges.ALPHA] = int(content["alpha"][0])
        self._requeue()
        self._build()
        self.words[TreeChanges.SEEN] = self._control[Control.CHANGED]
