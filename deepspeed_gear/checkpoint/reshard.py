"""Reshard: merge the saved shards of a table, and divide it into shards for other nodes.

A merged table lists its trajectories in stored order, shard by shard. Priority updates and samples
of selections refer to a trajectory by its position in this list. All functions are pure, so every
node computes the same division.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from deepspeed_gear.data.statistics import running_moments
from deepspeed_gear.distributed.shard_placement import shards_of
from deepspeed_gear.errors import StoreFullError
from deepspeed_gear.ops.constants import ANY_SLOT, SHARD_BITS, UNKNOWN
from deepspeed_gear.ops.records import LogEntry, PriorityUpdate, Resolution, Slot, UpdateCount
from deepspeed_gear.sampling.priority_log import without_slots
from deepspeed_gear.store import prompt_ledger
from deepspeed_gear.store.group_spec import GroupCount
from deepspeed_gear.store.records import Head
from deepspeed_gear.store.row_allocator import committed_at, look_up

T = TypeVar("T")
Content = dict[str, np.ndarray]  # arrays of a batch stream, named as `StreamState.export` does
# Names of a stream's arrays by their first axis: trajectories, or items of the sampler.
PER_SLOT = ("leaves", "queued", "bases", "born", "steps", "walked")
PER_ITEM = ("priorities", "draws")
OF_ALL = ("position", "newest_numbers")  # equal in all shards
SELECTION_NAMES = ("heads", "ring", "epochs", "numbers")


@dataclass(frozen=True)
class SavedGroups:
    """The groups of a saved table or shard.

    Attributes:
        records: Words of each trajectory's group, as `TableGroups.export`. [n, 3], int64.
        counts: Words of `GroupCount`. [16], int64.
        consumed: Numbers of the groups that have left the table, the oldest first. [m], int64.
    """

    records: np.ndarray
    counts: np.ndarray
    consumed: np.ndarray


@dataclass(frozen=True)
class SavedShard:
    """A saved shard of a table, or a merged table.

    Attributes:
        slots: Records of its trajectories; None: a data set's. [n, 8], int64.
        numbers: Their slots in the saved store; None: 0 to n - 1. [n], int64, ascending.
        next_id: The counter from which its ids are made.
        streams: Contents of its batch streams, by name.
        retention: Words of the trajectories; None: a data set's. [n, 4], int64.
        inserted: Number of trajectories and steps that were ever added.
        groups: Its groups; None: a table without groups.
        moments: Running moments of the normalised columns. [6, elements], float64.
        prompts: Arrays of `PromptLedger.export`; None: there was no ledger.
        shared_prompts: Steps of each trajectory that another one of its group holds; None: there
            was no ledger. [n], int64.
    """

    slots: np.ndarray | None
    numbers: np.ndarray | None
    next_id: int
    streams: dict[str, Content]
    retention: np.ndarray | None = None
    inserted: tuple[int, int] = (0, 0)
    groups: SavedGroups | None = None
    moments: np.ndarray | None = None
    prompts: Content | None = None
    shared_prompts: np.ndarray | None = None

    @property
    def num_slots(self) -> int:
        """Number of trajectories."""
        if self.slots is not None:
            return len(self.slots)
        return max((len(content["queued"]) for content in self.streams.values()), default=0)

    def positions_of(self, ids: np.ndarray) -> np.ndarray:
        """Return the positions of trajectory ids, -1 for those not stored. [n] -> [n], int64."""
        if self.slots is None:
            return np.where((ids >= 0) & (ids < self.num_slots), ids, -1)
        return committed_at(self.slots, ids)


@dataclass(frozen=True)
class ShardDivision:
    """Division of a table into shards.

    For the owners [1, 0, 1] the local positions are [0, 0, 1].

    Attributes:
        owner: Shard of each trajectory. [n], int64.
        local: Position of each trajectory in its shard, in the order of the table. [n], int64.
        numbers: Group number of each trajectory; None: the table has no groups. [n], int64.
    """

    owner: np.ndarray
    local: np.ndarray
    numbers: np.ndarray | None = None

    @classmethod
    def of(cls, owner: np.ndarray, numbers: np.ndarray | None = None) -> ShardDivision:
        """Make the division of given owners."""
        order = np.argsort(owner, kind="stable")
        ordered = owner[order]
        local = np.empty(len(owner), np.int64)
        local[order] = np.arange(len(owner)) - np.searchsorted(ordered, ordered)
        return cls(owner, local, numbers)

    def chosen(self, index: int) -> np.ndarray:
        """Return the positions in the table of a shard's trajectories, ascending. [m], int64."""
        return np.nonzero(self.owner == index)[0]


def merge(shards: Sequence[SavedShard]) -> SavedShard:
    """Merge the shards of a table into one, with the rows of shard after shard.

    Slots in priority updates become positions in the merged table; those of updates by id are -1.
    """
    before = _before([shard.num_slots for shard in shards])
    streams = {
        name: _merge_stream([shard.streams[name] for shard in shards], shards, before)
        for name in shards[0].streams
    }
    # Shard i of S assigns the ids counter * S + i: the next one is above all of them.
    counters = [shard.next_id for shard in shards]
    given = [(count - 1) * len(shards) + i + 1 for i, count in enumerate(counters) if count > 0]
    slots = _merged(shards, "slots", _merge_slots)
    next_id = max(given, default=0)
    if slots is not None and len(slots):
        # An id is never assigned again, even if the counter is damaged.
        next_id = max(next_id, int(slots[:, Slot.ID].max()) + 1)
    return SavedShard(
        slots=slots,
        numbers=None,
        next_id=next_id,
        streams=streams,
        retention=_merged(shards, "retention", np.concatenate),
        inserted=(
            sum(shard.inserted[0] for shard in shards),
            sum(shard.inserted[1] for shard in shards),
        ),
        groups=_merged(shards, "groups", lambda every: _merge_groups(every, before)),
        moments=_merged(shards, "moments", running_moments.merge),
        prompts=_merged(shards, "prompts", prompt_ledger.merge),
        shared_prompts=_merged(shards, "shared_prompts", np.concatenate),
    )


def _merged(shards: Sequence[SavedShard], name: str, merge: Callable[[list[Any]], T]) -> T | None:
    """Merge an attribute of all shards; None if a shard has none."""
    every = [getattr(shard, name) for shard in shards]
    return None if any(one is None for one in every) else merge(every)


def packed(records: np.ndarray) -> np.ndarray:
    """Return slot records with extents one after the other, in the order of their rows. [n, 8].

    Extents (first row, number of rows) [[7, 2], [0, 3]] become [[3, 2], [0, 3]].
    """
    order = in_rows(records)
    num_rows = records[order, Slot.NUM_ROWS]
    result: np.ndarray = records.copy()
    result[order, Slot.FIRST_ROW] = np.cumsum(num_rows) - num_rows
    return result


def in_rows(records: np.ndarray) -> np.ndarray:
    """Return the order of slot records by first row, as in a sum tree over rows. [n], int64."""
    return np.argsort(records[:, Slot.FIRST_ROW], kind="stable")


def _merge_slots(every: Sequence[np.ndarray]) -> np.ndarray:
    records = np.concatenate(every)
    shard = np.repeat(np.arange(len(every)), [len(slots) for slots in every])
    records[:, Slot.FIRST_ROW] += shard << 40  # the rows of a shard come before those of the next
    return packed(records)


def _merge_groups(every: Sequence[SavedGroups], before: np.ndarray) -> SavedGroups:
    """Merge the groups of all shards; each group is in one shard."""
    # Word 0 of a record is the leader's position + 1; 0: the group is incomplete.
    records = np.concatenate([groups.records for groups in every])
    starts = np.repeat(before[:-1], [len(groups.records) for groups in every])
    records[:, 0] += np.where(records[:, 0] > 0, starts, 0)
    # By age, so that a ring of any size keeps the newest numbers of each shard: of [1, 2, 3] and
    # [8, 9] the order is 1, 2, 8, 3, 9.
    ages = np.concatenate([np.arange(len(groups.consumed))[::-1] for groups in every])
    consumed = np.concatenate([groups.consumed for groups in every])[
        np.argsort(-ages, kind="stable")
    ]
    return SavedGroups(records, np.sum([groups.counts for groups in every], axis=0), consumed)


def _merge_stream(
    contents: Sequence[Content], shards: Sequence[SavedShard], before: np.ndarray
) -> Content:
    """Merge a stream's contents; `before` has the number of trajectories before each shard."""
    if len(contents) == 1:
        return dict(contents[0])
    names = [
        name for name in (*PER_SLOT, *PER_ITEM) if all(name in content for content in contents)
    ]
    whole = {name: np.concatenate([content[name] for content in contents]) for name in names}
    whole |= {name: contents[0][name] for name in OF_ALL if name in contents[0]}
    whole.update(_merge_selections(contents, before))
    if "counts" in contents[0]:
        counts = np.sum([content["counts"] for content in contents], axis=0)
        highest = [int(content["counts"][UpdateCount.HIGHEST_PRIORITY]) for content in contents]
        counts[UpdateCount.HIGHEST_PRIORITY] = max(highest)
        whole["counts"] = counts
        whole["alpha"] = contents[0]["alpha"]
        log = np.concatenate([content["log"] for content in contents])
        shard = log[:, PriorityUpdate.SLOT] >> SHARD_BITS
        slot = log[:, PriorityUpdate.SLOT] & ANY_SLOT
        position = np.full(len(log), -1, np.int64)
        for index, one in enumerate(shards):
            of_it = np.nonzero(shard == index)[0]
            numbers = np.arange(one.num_slots) if one.numbers is None else one.numbers
            found = look_up(numbers, slot[of_it], np.arange(len(numbers)))
            position[of_it] = np.where(found < 0, -1, found + before[index])
        log[:, PriorityUpdate.SLOT] = position
        # Updates of evicted trajectories still count for the highest priority.
        known = (position >= 0) | (slot == ANY_SLOT)
        log = without_slots(log, known, np.arange(sum(one.num_slots for one in shards))[:1])
        whole["log"] = log[np.lexsort((log[:, LogEntry.SAMPLE_NUMBER], log[:, LogEntry.BATCH]))]
    return whole


def _merge_selections(contents: Sequence[Content], before: np.ndarray) -> Content:
    """Merge the unused selections; drop all of them if a sample is missing.

    Each shard has saved the samples of its own trajectories; the others are UNKNOWN there.
    """
    orders = [np.argsort(content["heads"][:, Head.NUMBER]) for content in contents]
    contents = [
        {name: content[name][order] for name in SELECTION_NAMES if name in content}
        for content, order in zip(contents, orders, strict=True)
    ]
    first, *others = contents
    numbers = first["heads"][:, Head.NUMBER]
    if not all(np.array_equal(content["heads"][:, Head.NUMBER], numbers) for content in others):
        return {name: array[:0] for name, array in first.items()}
    ring = np.zeros_like(first["ring"])
    drawn = np.arange(ring.shape[1]) < first["heads"][:, Head.COUNT, None]
    known = ~drawn
    for content, start in zip(contents, before.tolist(), strict=False):
        own = drawn & (content["ring"][..., Resolution.ID] != UNKNOWN)
        ring[own] = content["ring"][own]
        ring[own, Resolution.SLOT] += start
        known |= own
    if not known.all():
        return {name: array[:0] for name, array in first.items()}
    return {**first, "ring": ring}


def _before(sizes: Sequence[int]) -> np.ndarray:
    """Return the sums of all sizes before each, and of all: [0, 2, 5] for [2, 3]."""
    return np.concatenate([[0], np.cumsum(np.asarray(sizes, np.int64))])


def divide(
    name: str,
    whole: SavedShard,
    room: Sequence[tuple[int, int]],
    by_rows: bool = False,
    numbers: np.ndarray | None = None,
) -> ShardDivision:
    """Divide a table with a capacity into contiguous parts, balanced in rows as far as they fit.

    Parts hold whole groups, in the order of the leaders, which have the masses: so the order of
    items stays. Incomplete groups come last.

    Args:
        name: Name of the table, for errors.
        whole: The merged table.
        room: Number of slots and rows of each shard.
        by_rows: Whether items are ordered by rows, as steps are; else by position.
        numbers: Group number of each trajectory; None: no groups. [n], int64.
    Raises:
        StoreFullError: The parts do not fit.
    """
    records = whole.slots
    assert records is not None
    units = np.argsort(in_rows(records)) if by_rows else np.arange(len(records))
    if numbers is not None and whole.groups is not None:
        leaders = whole.groups.records[:, 0] - 1
        incomplete = np.unique(numbers, return_inverse=True)[1].reshape(-1)
        units = np.where(leaders >= 0, leaders, len(records) + incomplete)
    # Number of each trajectory's unit, which is not divided: units [7, 3, 7] become [1, 0, 1].
    unit = np.unique(units, return_inverse=True)[1].reshape(-1)
    count = int(unit.max()) + 1 if len(unit) else 0
    slots_of = np.bincount(unit, minlength=count)
    rows_of = np.zeros(count, np.int64)
    np.add.at(rows_of, unit, records[:, Slot.NUM_ROWS])
    ends = (_before(slots_of.tolist()), _before(rows_of.tolist()))
    wanted = shards_of(rows_of, len(room))
    # First unit at which each part may begin at the earliest, so that this part and those after it
    # have room for the rest; computed from the end.
    starts = [count]
    for sizes in reversed(room):
        pairs = zip(ends, sizes, strict=True)
        least = [int(np.searchsorted(end, end[starts[0]] - size)) for end, size in pairs]
        starts.insert(0, max(0, *least))
    bounds = [0]  # the first unit of each part
    for index, sizes in enumerate(room):
        pairs = zip(ends, sizes, strict=True)
        most = [
            int(np.searchsorted(end, end[bounds[-1]] + size, side="right")) - 1
            for end, size in pairs
        ]
        if min(most) < starts[index + 1]:
            content = f"{ends[0][-1]} trajectories and {ends[1][-1]} rows of the checkpoint"
            kind = "trajectories" if numbers is None else "groups"
            rule = f"must hold the {content} in {len(room)} parts of whole {kind}"
            given = f"{[slots for slots, _ in room]} slots and {[rows for _, rows in room]} rows"
            raise StoreFullError(f"table {name}", rule, given, "raise its capacity")
        bounds.append(min(*most, max(int(wanted[index + 1]), starts[index + 1])))
    return ShardDivision.of(np.repeat(np.arange(len(room)), np.diff(bounds))[unit])


def groups_of(whole: SavedShard, division: ShardDivision, index: int) -> SavedGroups:
    """Return the groups of a shard.

    Complete groups that have left the table count as inserted in the first shard.
    """
    assert whole.groups is not None
    records = whole.groups.records
    every = whole.groups.counts
    chosen = division.chosen(index)
    leads = records[:, 0] - 1 == np.arange(len(records))
    own = records[chosen].copy()
    held = int(leads[chosen].sum())
    is_formed = own[:, 0] > 0
    own[is_formed, 0] = division.local[own[is_formed, 0] - 1] + 1
    counts = every.copy() if index == 0 else np.zeros_like(every)
    gone = int(every[GroupCount.INSERTED]) - int(leads.sum())
    counts[GroupCount.INSERTED] = held + (max(gone, 0) if index == 0 else 0)
    numbers = own[leads[chosen], 1]
    own[leads[chosen], 1] = counts[GroupCount.INSERTED] - held + 1 + np.argsort(np.argsort(numbers))
    return SavedGroups(own, counts, whole.groups.consumed)


def items_of(records: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Return the indices of the rows of `chosen` trajectories among all rows. [m], int64.

    For trajectories of 2, 3 and 1 rows and chosen [0, 2] the indices are [0, 1, 5].
    """
    before = _before(records[:, Slot.NUM_ROWS].tolist())
    rows = records[chosen, Slot.NUM_ROWS]
    inside = np.arange(int(rows.sum())) - np.repeat(np.cumsum(rows) - rows, rows)
    return np.asarray(np.repeat(before[chosen], rows) + inside)


def next_id_of(next_id: int, index: int, count: int) -> int:
    """Return the counter from which shard `index` of `count` makes ids of `next_id` or more.

    Counter c makes the id c * count + index: for id 7 in shard 0 of 2 the counter is 4 (id 8).
    """
    return max(0, -(-(next_id - index) // count))


def part_of(
    whole: SavedShard,
    name: str,
    division: ShardDivision,
    index: int,
    items: np.ndarray | slice | None,
) -> Content:
    """Return the content of a stream for a shard, whose trajectories are in slots 0 to m - 1.

    Args:
        whole: The merged table.
        name: Name of the stream.
        division: Division of the table.
        index: The shard.
        items: Indices of its items where items are steps; None: items are trajectories.
    """
    content = whole.streams[name]
    chosen = division.chosen(index)
    part = {key: content[key][chosen] for key in PER_SLOT if key in content}
    which = chosen if items is None else items
    part.update({key: content[key][which] for key in PER_ITEM if key in content})
    part |= {name: content[name] for name in (*OF_ALL, *SELECTION_NAMES) if name in content}
    ring = part["ring"] = content["ring"].copy()
    drawn = np.arange(ring.shape[1]) < content["heads"][:, Head.COUNT, None]
    owner = owners_of(content, division)
    own = drawn & (owner == index)
    others = drawn & (owner != index)
    ring[own, Resolution.SLOT] = division.local[ring[own, Resolution.SLOT]]
    ring[others] = 0
    ring[others, Resolution.ID] = UNKNOWN
    if "counts" in content:
        highest = content["counts"][UpdateCount.HIGHEST_PRIORITY]
        part["counts"] = (
            content["counts"].copy() if index == 0 else np.zeros_like(content["counts"])
        )
        part["counts"][UpdateCount.HIGHEST_PRIORITY] = highest
        part["alpha"] = content["alpha"]
        # The priority updates of the shard's own trajectories: those of one item stay in order.
        log = content["log"].copy()
        by_id = log[:, PriorityUpdate.SLOT] < 0
        position = np.where(by_id, -1, log[:, PriorityUpdate.SLOT])
        position[by_id] = whole.positions_of(log[by_id, PriorityUpdate.GENERATION])
        known = position >= 0
        slot = np.where(by_id[known], ANY_SLOT, division.local[position[known]])
        log[known, PriorityUpdate.SLOT] = index << SHARD_BITS | slot
        own = known.copy()
        own[known] = division.owner[position[known]] == index
        part["log"] = log[own]
    return part


def owners_of(content: Content, division: ShardDivision) -> np.ndarray:
    """Return the shard of each sample of the unused selections. [selections, batch], int64."""
    if not len(division.owner):
        return np.zeros(content["ring"].shape[:2], np.int64)
    return np.asarray(division.owner[content["ring"][..., Resolution.SLOT]])
