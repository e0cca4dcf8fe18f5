"""Groups of a table: when one is complete or rejected, its members, and its eviction as a whole.

A complete group is represented by its leader, the trajectory with the highest id at the moment when
the group became complete: a stream gives it the mass of the group and its other trajectories none.
Words of the slots record the leader and the order of a group's trajectories. Any process brings
them up to date (`update`) from the table's log of changes, and logs the leaders of new groups, so
that all streams give them their masses.

Order of writes, so that a process may die at any instruction: the words of a group, the leader in
those of its other trajectories, and last in those of the leader (the commit point). A group that is
evicted is marked before the first of its trajectories is retired. `recover` finishes what was
begun.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Final

import numpy as np

from deepspeed_gear.data.stored_values import as_numbers
from deepspeed_gear.errors import DataError
from deepspeed_gear.ops.records import Slot, SlotState
from deepspeed_gear.schema import Schema
from deepspeed_gear.store.group_spec import COUNTED, RECENT, GroupCount, GroupSpec, SlotGroup
from deepspeed_gear.store.prompt_ledger import PromptLedger
from deepspeed_gear.store.prompt_spec import Left
from deepspeed_gear.store.records import Control, SharedPrompt, SlotRetention
from deepspeed_gear.store.row_allocator import RowAllocator, distinct

NEVER: Final = 1 << 62


class TableGroups:
    """The groups of a table; without `extents` those of a data set, which never change.

    All methods require the lock.
    """

    def __init__(
        self,
        name: str,
        spec: GroupSpec,
        schema: Schema,
        views: Mapping[str, np.ndarray],
        columns: Mapping[str, np.ndarray],
        extents: RowAllocator | None,
        ledger: PromptLedger | None = None,
    ) -> None:
        self.spec = spec
        self._name = name
        self._extents = extents
        self._ledger = ledger
        self.words: np.ndarray = views["groups"]
        self.counts: np.ndarray = views["group_counts"]
        self._count_words: memoryview = self.counts.data
        self._ring: np.ndarray = views["consumed_groups"]
        self._slots: np.ndarray = views["slots"]
        self._shared = views.get("shared_prompts")
        self._control: memoryview = views["control"].data
        self._present: np.ndarray | None = None
        self._late = 0
        if extents is not None and spec.late:
            self._present = views["retention"][:, SlotRetention.PRESENT]
            self._late = schema.late_bits(spec.late)
        self._numbers: np.ndarray = columns[spec.column]
        self._members = None if spec.member is None else columns[spec.member]
        self._conditions = [(one, columns[one.column], schema[one.column]) for one in spec.where]
        self._is_kept = False

    def numbers(self, slots: np.ndarray) -> np.ndarray:
        """Return the group's number of each slot. [n] -> [n], int64."""
        return np.asarray(self._numbers[slots].astype(np.int64))

    def is_complete(self, slots: np.ndarray) -> np.ndarray:
        """Return which slots belong to a complete group. [n] -> [n], bool."""
        return np.asarray(self.words[slots, SlotGroup.LEADER] > 0)

    def is_leader(self, slots: np.ndarray) -> np.ndarray:
        """Return which slots lead a complete group. [n] -> [n], bool."""
        return np.asarray(self.words[slots, SlotGroup.LEADER] == slots + 1)

    def items(self, slots: np.ndarray) -> np.ndarray:
        """Return each slot's item in trees: its leader, or itself. [n] -> [n], int64."""
        leaders = self.words[slots, SlotGroup.LEADER]
        return np.where(leaders > 0, leaders - 1, slots)

    def steps(self, leaders: np.ndarray) -> np.ndarray:
        """Return the steps of all trajectories of each leader's group. [n] -> [n], int64."""
        return np.asarray(self.words[leaders, SlotGroup.STEPS])

    def trajectories(self, leaders: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the slots of groups, in order by member and id, and the index of each's leader:
        [n] -> [m], int64. Cost: a pass over the leaders for each trajectory of the largest group.
        """
        counts = self.words[leaders, SlotGroup.COUNT]
        begins = np.cumsum(counts) - counts
        found = np.empty(int(counts.sum()), np.int64)
        at = self.words[leaders, SlotGroup.FIRST] - 1
        left = np.arange(len(leaders))
        for index in range(int(counts.max(initial=0))):
            going_on = counts[left] > index
            left = left[going_on]
            at = at[going_on]
            found[begins[left] + index] = at
            at = self.words[at, SlotGroup.NEXT] - 1
        return found, np.repeat(np.arange(len(leaders)), counts)

    def whole(self, slots: np.ndarray) -> np.ndarray:
        """Return the committed slots of the groups of slots, complete or not. [n] -> [m], int64."""
        return self._of_numbers(distinct(self.numbers(slots)))[0]

    def highest(self, slots: np.ndarray, values: np.ndarray) -> np.ndarray:
        """Return for each slot the highest of the given values in its group. [n], [n] -> [n]."""
        numbers = self.numbers(slots)
        order = np.argsort(numbers, kind="stable")
        begins = _begins(numbers[order])
        found = np.empty_like(values)
        found[order] = np.repeat(
            np.maximum.reduceat(values[order], begins), _sizes(begins, len(order))
        )
        return found

    @property
    def statistics(self) -> dict[str, int]:
        """Return how many groups are held and were left out. Cost: one pass over the slots."""
        words = self._count_words
        return {
            "complete": words[GroupCount.HELD],
            "incomplete": len(distinct(self.numbers(self._incomplete()))),
            **{name: words[word] for name, word in COUNTED.items()},
        }

    def counted(self) -> tuple[int, int, int]:
        """Return the groups held, ever complete, and at most completed by additions under way."""
        self.update()
        words = self._count_words
        return words[GroupCount.HELD], words[GroupCount.INSERTED], self._control[Control.PENDING]

    def _incomplete(self) -> np.ndarray:
        is_held = self._slots[:, Slot.STATE] == SlotState.COMMITTED
        return np.nonzero(is_held & (self.words[:, SlotGroup.LEADER] == 0))[0]

    def _of_numbers(self, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the committed slots of groups, and for each the index of its group in `wanted`."""
        slots = np.nonzero(self._slots[:, Slot.STATE] == SlotState.COMMITTED)[0]
        numbers = self.numbers(slots)
        at = np.minimum(np.searchsorted(wanted, numbers), len(wanted) - 1)
        is_in = wanted[at] == numbers
        return slots[is_in], at[is_in]

    def check_room(self, slot: int) -> None:
        """Raise if the group of a written slot has `max_trajectories` already."""
        if self.spec.member is None:  # what comes after `size` is late
            return
        number = self.numbers(np.array([slot]))
        most = self.spec.max_trajectories
        count = len(self._of_numbers(number)[0])
        if count >= most:
            rule = f"must have at most group.max_trajectories = {most} trajectories"
            name = f"table {self._name}: group {int(number[0])} of column {self.spec.column}"
            raise DataError(
                name, rule, count + 1, "raise it; remove() of one trajectory evicts the group"
            )

    def note_time(self, slot: int | np.ndarray) -> None:
        """Restart `after_s` of the group of a slot, or of several: it gets a late column."""
        self.words[slot, SlotGroup.TIME] = time.monotonic_ns()

    def note_drawn(self, leaders: np.ndarray) -> None:
        """Mark the groups of leaders as drawn by a selection. [n], int64."""
        self.words[leaders, SlotGroup.DRAWN] = 1

    @property
    def waiting(self) -> bool:
        """Whether `update` may change something, now or as time goes on."""
        seen = self._count_words[GroupCount.SEEN]
        return bool(seen != self._control[Control.CHANGED] or self.waits_for_time)

    @property
    def waits_for_time(self) -> bool:
        """Whether time alone will complete a group without more of its members, as of `update`."""
        return bool(self._count_words[GroupCount.DUE] != NEVER)

    def update(self) -> None:
        """Form complete groups; evict those that fail a condition, and late trajectories. Cost:
        after commits or fills a pass over the slots, and a sort of the trajectories of these
        groups.
        """
        words = self._count_words
        changed = self._control[Control.CHANGED]
        now = time.monotonic_ns()
        seen = words[GroupCount.SEEN]
        is_due = now >= words[GroupCount.DUE]
        if self._is_kept or (seen == changed and not is_due):
            return
        log = None if is_due else self._extents
        slots = None if log is None else log.changed_since(seen)
        if slots is None:
            words[GroupCount.DUE] = NEVER
            waiting = self._incomplete()
        else:
            is_held = self._slots[slots, Slot.STATE] == SlotState.COMMITTED
            waiting = slots[is_held & (self.words[slots, SlotGroup.LEADER] == 0)]
        if len(waiting):
            wanted = distinct(self.numbers(waiting))
            members, group = self._of_numbers(wanted)
            has_leader = self.words[members, SlotGroup.LEADER] != 0
            is_formed = np.zeros(len(wanted), bool)
            is_formed[group[has_leader]] = True
            has_left = ~is_formed & self._is_consumed(wanted)
            self._drop(members[is_formed[group] & ~has_leader], GroupCount.LATE)
            self._drop(members[has_left[group]], GroupCount.LATE_CONSUMED)
            self._form(members[~(is_formed | has_left)[group]], now)
        words[GroupCount.SEEN] = self._control[Control.CHANGED]

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Bring the groups up to date, and form none until the end: for a save of the table."""
        self.update()
        self._is_kept = True
        try:
            yield
        finally:
            self._is_kept = False

    def _form(self, slots: np.ndarray, now: int) -> None:
        """Form those groups of slots that are complete; no slot has a leader. [n], int64."""
        if not len(slots):
            return
        ids = self._slots[slots, Slot.ID]
        numbers = self.numbers(slots)
        members = self._members_of(slots)
        order = np.lexsort((ids, members, numbers))
        slots = slots[order]
        ids = ids[order]
        numbers = numbers[order]
        members = members[order]
        # Of the groups [7, 7, 7, 8] with the members [0, 0, 1, 0], the members begin at the slots
        # [0, 2, 3] and the groups at [0, 3], which are the members `first` = [0, 2].
        of_member = _begins(numbers, members)
        of_group = _begins(numbers)
        first = np.searchsorted(of_member, of_group)
        num_members = _sizes(first, len(of_member))
        has_late = np.ones(len(slots), bool)
        if self._present is not None:
            has_late = self._present[slots] & self._late == self._late
        is_ready = np.logical_and.reduceat(has_late, of_member)
        num_ready = np.add.reduceat(is_ready.astype(np.int64), first)
        latest = np.maximum.reduceat(self.words[slots, SlotGroup.TIME], of_group)
        is_complete = num_ready >= self.spec.size
        if self.spec.after_s is not None:  # some are complete without all members, others will be
            due = latest + int(self.spec.after_s * 1e9)
            enough = num_ready >= self.spec.min_size
            next_due = int(due[enough & ~is_complete & (due > now)].min(initial=NEVER))
            self._count_words[GroupCount.DUE] = min(self._count_words[GroupCount.DUE], next_due)
            is_complete |= enough & (due <= now)
        elif self.spec.min_size:  # a lease has committed all of its members
            is_complete = num_ready == num_members

        group = np.repeat(np.arange(len(first)), num_members)  # of each member
        # Within each group those that are ready come first, in the order of their ids.
        order = np.lexsort((ids[of_member], ~is_ready, group))
        rank = np.empty(len(order), np.int64)
        rank[order] = np.arange(len(order)) - first[group[order]]
        of_each = _sizes(of_member, len(slots))
        is_in = np.repeat(is_complete[group] & is_ready & (rank < self.spec.size), of_each)
        is_out = np.repeat(is_complete[group], of_each) & ~is_in
        is_filled = np.repeat(is_ready, of_each)
        self._drop(slots[is_out & ~is_filled], GroupCount.UNFILLED)
        self._drop(slots[is_out & is_filled], GroupCount.SURPLUS)
        if is_in.any():
            self._accept(slots[is_in], numbers[is_in], members[is_in])

    def _members_of(self, slots: np.ndarray) -> np.ndarray:
        """Return the member of each slot: without a column of members its id. [n], int64."""
        if self._members is None:
            return np.asarray(self._slots[slots, Slot.ID])
        return np.asarray(self._members[slots].astype(np.int64))

    def _accept(self, slots: np.ndarray, numbers: np.ndarray, members: np.ndarray) -> None:
        """Form complete groups or evict those that fail a condition.

        `slots`, `numbers` and `members` are sorted by group, member and id. [n], int64.
        """
        begins = _begins(numbers)
        counts = _sizes(begins, len(slots))
        is_small = counts <= self.spec.max_trajectories
        of_member = _begins(numbers, members)
        passes = np.ones(len(begins), bool)
        last = slots[np.append(of_member[1:], len(slots)) - 1]  # of each member
        first = np.searchsorted(of_member, begins)
        sizes = _sizes(first, len(of_member))
        for condition, values, column in self._conditions:
            passes &= condition.holds(as_numbers(values[last], column), first, sizes)
        self.counts[GroupCount.OVERSIZED] += np.count_nonzero(~is_small)
        self.counts[GroupCount.REJECTED] += np.count_nonzero(is_small & ~passes)
        passes &= is_small
        num_passed = int(np.count_nonzero(passes))
        # The older ones count half as much whenever there are more than RECENT.
        recent = [GroupCount.RECENT_PASSED, GroupCount.RECENT_FAILED]
        latest = self.counts[recent] + (num_passed, len(passes) - num_passed)
        while latest.sum() > RECENT:
            latest //= 2
        self.counts[recent] = latest
        stays = np.repeat(passes, counts)
        self._remember(distinct(numbers[~stays]))
        if self._ledger is not None:
            self._ledger.leave(numbers[~stays], Left.REJECTED)
        if self._extents is None:
            self.words[slots[~stays], SlotGroup.LEADER] = SlotGroup.REJECTED
        else:
            self.words[slots[~stays], SlotGroup.LEAVING] = 1
            self._evict(slots[~stays])
        if not stays.any():
            return
        leaders = self._link(slots[stays], numbers[stays])
        self.counts[[GroupCount.HELD, GroupCount.INSERTED]] += len(leaders)
        if self._extents is not None:
            for leader in leaders.tolist():
                self._extents.note(leader)

    @property
    def recent(self) -> tuple[int, int]:
        """How many of the latest groups are complete, and how many failed a condition or size."""
        return self._count_words[GroupCount.RECENT_PASSED], self._count_words[
            GroupCount.RECENT_FAILED
        ]

    def _link(self, slots: np.ndarray, groups: np.ndarray) -> np.ndarray:
        """Write the words of groups, of slots group by group, [n]; return the leaders. [groups]."""
        begins = _begins(groups)
        ends = np.append(begins[1:], len(slots))
        counts = _sizes(begins, len(slots))
        index = np.repeat(np.arange(len(begins)), counts)
        leaders = slots[np.lexsort((self._slots[slots, Slot.ID], index))[ends - 1]]
        following = np.append(slots[1:] + 1, 0)
        following[ends - 1] = 0
        words = self.words
        words[slots, SlotGroup.NEXT] = following
        words[leaders, SlotGroup.FIRST] = slots[begins] + 1
        words[leaders, SlotGroup.COUNT] = counts
        steps = self._slots[slots, Slot.NUM_STEPS]
        if self._shared is not None:
            steps = steps + self._shared[slots, SharedPrompt.STEPS]
        words[leaders, SlotGroup.STEPS] = np.add.reduceat(steps, begins)
        words[leaders, SlotGroup.NUMBER] = (
            self.counts[GroupCount.INSERTED] + 1 + np.arange(len(leaders))
        )
        others = slots != leaders[index]
        words[slots[others], SlotGroup.LEADER] = leaders[index[others]] + 1
        words[leaders, SlotGroup.LEADER] = leaders + 1  # the commit points
        return np.asarray(leaders)

    def evict(self, slots: np.ndarray, removed: bool = False) -> np.ndarray:
        """Evict the whole groups of committed slots; return the evicted slots. [n] -> [m].

        `removed`: the program removes them, and may add groups of the same numbers again.
        """
        members = self.whole(slots) if len(slots) else slots
        leaders = members[self.is_leader(members)]
        self.words[members, SlotGroup.LEAVING] = SlotGroup.REMOVED if removed else 1
        if not removed:
            self._remember(self.numbers(leaders))
        if self._ledger is not None:
            self._ledger.leave(
                self.numbers(leaders[self.words[leaders, SlotGroup.DRAWN] > 0]), Left.DRAWN
            )
            self._ledger.leave(self.numbers(members), Left.REMOVED if removed else Left.EVICTED)
        self._evict(members)
        if not removed:
            unsampled = np.count_nonzero(self.words[leaders, SlotGroup.DRAWN] == 0)
            self.counts[GroupCount.EVICTED_UNSAMPLED] += unsampled
        return members

    def _evict(self, slots: np.ndarray) -> None:
        """Evict whole groups, or trajectories of none; a data set keeps them. [n], int64."""
        if self._extents is not None:
            self.counts[GroupCount.HELD] -= np.count_nonzero(self.is_leader(slots))
            for slot in slots.tolist():
                self._extents.retire(slot)

    def _drop(self, slots: np.ndarray, word: int) -> None:
        """Count and evict trajectories whose group is complete without them."""
        self.counts[word] += len(slots)
        self._evict(slots)

    @property
    def consumed(self) -> np.ndarray:
        """Remembered numbers of groups that have left the table, the oldest first. [n], int64."""
        count = self._count_words[GroupCount.CONSUMED]
        size = len(self._ring)
        return self._ring.copy()[:count] if count <= size else np.roll(self._ring, -(count % size))

    def _is_consumed(self, wanted: np.ndarray) -> np.ndarray:
        """Return which numbers are remembered, of groups that have left. [n], int64 -> [n]."""
        known = self._ring[: self._count_words[GroupCount.CONSUMED]]
        return np.isin(wanted, known[np.isin(known, wanted)])

    def _remember(self, numbers: np.ndarray) -> None:
        """Write the numbers of groups that leave to the ring, unless they are there. [n], int64."""
        if not len(self._ring):
            return
        numbers = numbers[~self._is_consumed(numbers)][-len(self._ring) :]
        count = self._count_words[GroupCount.CONSUMED]
        self._ring[(count + np.arange(len(numbers))) % len(self._ring)] = numbers
        self._count_words[GroupCount.CONSUMED] = count + len(numbers)

    def forget(self) -> None:
        """Forget the groups that have left the table: any number may be added again."""
        self._count_words[GroupCount.CONSUMED] = 0

    def recover(self) -> None:
        """Finish evictions and groups that a dead process has begun; count the groups again."""
        words = self.words
        is_held = self._slots[:, Slot.STATE] == SlotState.COMMITTED
        for removed in (True, False):
            is_marked = words[:, SlotGroup.LEAVING] == (SlotGroup.REMOVED if removed else 1)
            self.evict(np.nonzero(is_held & is_marked)[0], removed)
            is_held = self._slots[:, Slot.STATE] == SlotState.COMMITTED
        known = np.nonzero(is_held & (words[:, SlotGroup.LEADER] > 0))[0]
        leaders = words[known, SlotGroup.LEADER] - 1
        words[known[~self.is_leader(leaders)], SlotGroup.LEADER] = 0
        self._count()
        self._count_words[GroupCount.DUE] = 0
        self.update()

    def _count(self) -> None:
        slots = np.nonzero(self._slots[:, Slot.STATE] == SlotState.COMMITTED)[0]
        leaders = slots[self.is_leader(slots)]
        self.counts[GroupCount.HELD] = len(leaders)
        newest = self.words[leaders, SlotGroup.NUMBER].max(initial=0)
        self.counts[GroupCount.INSERTED] = max(self.counts[GroupCount.INSERTED], newest)

    def export(self, slots: np.ndarray) -> np.ndarray:
        """Return leaders' positions plus 1, SlotGroup.NUMBER and DRAWN. [n] -> [n, 3], int64."""
        leaders = self.words[slots, SlotGroup.LEADER] - 1
        at = np.minimum(np.searchsorted(slots, leaders), max(len(slots) - 1, 0))
        is_saved = (leaders >= 0) & (slots[at] == leaders) if len(slots) else np.zeros(0, bool)
        words = self.words[slots][:, [SlotGroup.NUMBER, SlotGroup.DRAWN]]
        return np.concatenate([np.where(is_saved, at + 1, 0)[:, None], words], axis=1)

    def restore(self, saved: np.ndarray, counts: np.ndarray, consumed: np.ndarray) -> None:
        """Restore groups of a checkpoint; the table's first n slots are already restored.

        Args:
            saved: As `export`. [n, 3], int64.
            counts: Words of `GroupCount`. [16], int64.
            consumed: Numbers of left groups, the oldest first. [m], int64.
        """
        self.words[:] = 0
        self.words[:, SlotGroup.TIME] = time.monotonic_ns()
        slots = np.nonzero(saved[:, 0])[0]
        if len(slots):
            groups = saved[slots, 0]
            ids = self._slots[slots, Slot.ID]
            order = np.lexsort((ids, self._members_of(slots), groups))
            leaders = self._link(slots[order], groups[order])
            self.words[leaders, SlotGroup.NUMBER] = saved[leaders, 1]
            self.words[leaders, SlotGroup.DRAWN] = saved[leaders, 2]
        self.counts[:] = counts
        self.forget()
        self._remember(consumed)
        self._count()
        # Streams are restored after this: what has changed since is formed before their next
        # selection.
        self._count_words[GroupCount.SEEN] = self._control[Control.CHANGED]
        self._count_words[GroupCount.DUE] = 0


_CHANGED = ("slots", "groups", "group_counts", "consumed_groups", "retention", "control")


def forecast_groups(
    name: str, spec: GroupSpec, schema: Schema, views: Mapping[str, np.ndarray]
) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """Form the groups of a running store on copies, as its next selection will; changes nothing.

    Returns the store's regions, those that groups change as copies, and the counts of
    `TableGroups.statistics`. Cost: a pass over the slots, and a sort of the trajectories of groups
    that are not formed.
    """
    found = {**views, **{region: np.array(views[region]) for region in _CHANGED}}
    columns = {column.name: views[f"column/{column.name}"] for column in schema}
    # Evictions change the copied slots only; every slot may have changed, and no stream reads the
    # log.
    extents: Any = SimpleNamespace(
        changed_since=lambda seen: None,
        note=lambda slot: None,
        retire=lambda slot: found["slots"][:, Slot.STATE].put(slot, SlotState.EVICTED),
    )
    groups = TableGroups(name, spec, schema, found, columns, extents)
    groups.update()
    return found, groups.statistics


def _begins(*keys: np.ndarray) -> np.ndarray:
    """Return where runs of equal keys begin. [n] each, n > 0 -> [m], int64."""
    differ = np.logical_or.reduce([key[1:] != key[:-1] for key in keys])
    return np.nonzero(np.append(True, differ))[0]


def _sizes(begins: np.ndarray, end: int) -> np.ndarray:
    """Return the lengths of runs from where they begin. [m] -> [m], int64."""
    return np.diff(np.append(begins, end))
