"""Any shards of a saved table are the whole again, and hold what a store would have saved."""

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_gear.checkpoint import reshard
from deepspeed_gear.checkpoint.reshard import SavedGroups, SavedShard, ShardDivision
from deepspeed_gear.errors import StoreFullError
from deepspeed_gear.ops.constants import ANY_SLOT, SHARD_BITS, UNKNOWN
from deepspeed_gear.ops.records import (
    LogEntry,
    PriorityUpdate,
    Resolution,
    Slot,
    SlotState,
    UpdateCount,
)
from deepspeed_gear.store.group_spec import GroupCount
from deepspeed_gear.store.records import Head

BATCH = 5
LOG_ORDER = [PriorityUpdate.GENERATION, PriorityUpdate.SLOT, LogEntry.SAMPLE_NUMBER, LogEntry.BATCH]


def stored(random: np.random.Generator, count: int) -> np.ndarray:
    """Make records whose orders of slots, rows and ids are all different."""
    records = random.integers(0, 9, (count, Slot.NUM_WORDS))
    records[:, Slot.STATE] = np.where(
        random.random(count) < 0.8, SlotState.COMMITTED, SlotState.EVICTED
    )
    records[:, Slot.NUM_ROWS] = random.integers(1, 6, count)
    records[:, Slot.ID] = random.permutation(3 * count)[:count]
    order = random.permutation(count)
    records[order, Slot.FIRST_ROW] = 2 * np.cumsum(records[order, Slot.NUM_ROWS])  # with gaps
    return records


def content_of(
    random: np.random.Generator, records: np.ndarray, by_step: bool, cuts: int
) -> dict[str, Any]:
    """Make the content of a stream with priorities, as one store saves it."""
    count = len(records)
    items = int(records[:, Slot.NUM_ROWS].sum()) if by_step else len(records)
    log = random.integers(0, 9, (7 if count else 0, LogEntry.NUM_WORDS))
    log[:, PriorityUpdate.SLOT] = random.integers(0, max(count, 1), len(log))
    committed = np.nonzero(records[:, Slot.STATE] == SlotState.COMMITTED)[0]
    by_id = np.isin(log[:, PriorityUpdate.SLOT], committed) & (random.random(len(log)) < 0.4)
    log[:, LogEntry.SAMPLE_NUMBER] = np.where(by_id, LogEntry.BY_ID, 10 + np.arange(len(log)))
    log[by_id, PriorityUpdate.GENERATION] = records[log[by_id, PriorityUpdate.SLOT], Slot.ID]
    log[by_id, PriorityUpdate.SLOT] = -1
    heads = random.integers(0, 9, (cuts, Head.NUM_WORDS))
    heads[:, Head.NUMBER] = 4 + np.arange(cuts)
    heads[:, Head.COUNT] = random.integers(0, BATCH + 1, cuts) if count else 0
    ring = random.integers(0, 9, (cuts, BATCH, Resolution.NUM_WORDS))
    ring[..., Resolution.SLOT] = random.integers(0, max(count, 1), (cuts, BATCH))
    ring[np.arange(BATCH) >= heads[:, Head.COUNT, None]] = 0
    counts = random.integers(0, 9, UpdateCount.NUM_WORDS)
    return {
        "queued": random.integers(-1, 9, count),
        "bases": random.integers(0, 9, count),
        "priorities": random.random(items, np.float32),
        "draws": random.integers(0, 9, items).astype(np.int32),
        "counts": counts,
        "alpha": np.array([3]),
        "log": log[np.lexsort((log[:, LogEntry.SAMPLE_NUMBER], log[:, LogEntry.BATCH]))],
        "position": random.integers(0, 9, 11),
        "heads": heads,
        "ring": ring,
        "epochs": random.integers(0, 3, (cuts, BATCH)),
    }


def shards_of(
    whole: SavedShard, division: ShardDivision, count: int, by_step: bool
) -> list[SavedShard]:
    """Divide a whole into what the stores of several nodes save."""
    found = []
    for index in range(count):
        chosen = division.chosen(index)
        items = reshard.items_of(whole.slots, chosen) if by_step else None
        part = reshard.part_of(whole, "train", division, index, items)
        next_id = reshard.next_id_of(whole.next_id, index, count)
        found.append(
            SavedShard(reshard.packed(whole.slots[chosen]), None, next_id, {"train": part})
        )
    return found


def assert_same(one: SavedShard, other: SavedShard) -> None:
    """Compare content. Where rows lie does not matter; of reports the order of those of one item
    does.
    """
    words = [word for word in range(Slot.NUM_WORDS) if word != Slot.FIRST_ROW]
    np.testing.assert_array_equal(one.slots[:, words], other.slots[:, words])
    for name, array in one.streams["train"].items():
        pair = [array, other.streams["train"][name]]
        if name == "log":
            pair = [log[np.lexsort(log[:, LOG_ORDER].T)] for log in pair]
        np.testing.assert_array_equal(*pair, err_msg=name)


@given(
    *(st.integers(0, 30), st.integers(2, 5), st.integers(2, 5)),
    *(st.booleans(), st.booleans(), st.integers(0, 3), st.integers(0, 1 << 31)),
)
def test_shards_are_the_whole_again_and_shards_of_shards_are_those_of_the_whole(
    size: int, before: int, count: int, by_step: bool, by_rows: bool, cuts: int, seed: int
) -> None:
    """Loaded on some nodes, saved there and loaded on others: what the first checkpoint gives
    these.
    """
    random = np.random.default_rng(seed)
    records = stored(random, size)
    content = content_of(random, records, by_step, cuts)
    whole = reshard.merge([SavedShard(records, None, 3 * size, {"train": content})])

    def divide(table: SavedShard, number: int) -> tuple[ShardDivision, list[SavedShard]]:
        division = reshard.divide("main", table, [(size, 1000)] * number, by_rows)
        return division, shards_of(table, division, number, by_step)

    division, parts = divide(whole, before)
    between = reshard.merge(parts)
    assert between.next_id >= whole.next_id
    if not by_rows:
        assert_same(whole, between)
        order = np.lexsort((records[:, Slot.FIRST_ROW], division.owner))  # rows follow shards
        np.testing.assert_array_equal(reshard.in_rows(between.slots), order)
    for direct, over in zip(divide(whole, count)[1], divide(between, count)[1], strict=True):
        if (
            by_rows
        ):  # slots stand in the order of shards: compare trajectories, in the order of rows
            a = reshard.in_rows(direct.slots)
            b = reshard.in_rows(over.slots)
            np.testing.assert_array_equal(direct.slots[a], over.slots[b])
            items = [reshard.items_of(one.slots, at) for one, at in ((direct, a), (over, b))]
            for name in ("priorities", "draws") if by_step else ():
                one = direct.streams["train"][name]
                other = over.streams["train"][name]
                np.testing.assert_array_equal(one[items[0]], other[items[1]])
        else:
            assert_same(direct, over)


def divided(count: int) -> tuple[SavedShard, ShardDivision, list[SavedShard]]:
    """Return a table of 12 trajectories and its shards."""
    random = np.random.default_rng(0)
    records = stored(random, 12)
    whole = reshard.merge(
        [SavedShard(records, None, 40, {"train": content_of(random, records, True, 3)})]
    )
    division = reshard.divide("main", whole, [(12, 1000)] * count)
    return whole, division, shards_of(whole, division, count, True)


def test_a_shard_names_slots_of_its_store_and_knows_its_own_samples_only() -> None:
    whole, division, shards = divided(3)
    train = whole.streams["train"]
    drawn = np.arange(BATCH) < train["heads"][:, Head.COUNT, None]
    for index, shard in enumerate(shards):
        content = shard.streams["train"]
        own = drawn & (reshard.owners_of(train, division) == index)
        assert (content["ring"][drawn & ~own][:, Resolution.ID] == UNKNOWN).all()
        slots = division.chosen(index)[content["ring"][own][:, Resolution.SLOT]]
        np.testing.assert_array_equal(slots, train["ring"][own][:, Resolution.SLOT])
        assert (content["log"][:, PriorityUpdate.SLOT] >> SHARD_BITS == index).all()
        assert shard.next_id * 3 + index >= 40
        highest = UpdateCount.HIGHEST_PRIORITY
        assert content["counts"][highest] == train["counts"][highest]
    applied = [int(shard.streams["train"]["counts"][UpdateCount.APPLIED]) for shard in shards]
    assert applied == [train["counts"][UpdateCount.APPLIED], 0, 0]
    assert sum(len(shard.streams["train"]["log"]) for shard in shards) == 7


def test_reports_of_other_shards_go_where_their_trajectories_went() -> None:
    """In a log of shard 0: a trajectory of shard 1, one by id, one that is gone, and its own."""

    def shard(ids: list[int], numbers: list[int], words: list[tuple[int, int, int]]) -> SavedShard:
        records = np.zeros((len(ids), Slot.NUM_WORDS), np.int64)
        records[:, Slot.STATE] = SlotState.COMMITTED
        records[:, Slot.ID] = ids
        records[:, Slot.NUM_ROWS] = 2
        records[:, Slot.FIRST_ROW] = 2 * np.arange(len(ids))
        content = content_of(np.random.default_rng(1), records, False, 0)
        content["log"] = np.zeros((len(words), LogEntry.NUM_WORDS), np.int64)
        for entry, (index, slot, generation) in zip(content["log"], words, strict=True):
            entry[PriorityUpdate.SLOT] = index << SHARD_BITS | slot
            entry[PriorityUpdate.GENERATION] = generation
            entry[LogEntry.SAMPLE_NUMBER] = LogEntry.BY_ID if slot == ANY_SLOT else slot
        return SavedShard(records, np.array(numbers), 5, {"train": content})

    first = shard([0, 2], [3, 7], [(1, 9, 1), (1, ANY_SLOT, 5), (1, 2, 1), (0, 7, 4)])
    whole = reshard.merge([first, shard([1, 3, 5], [0, 8, 9], [])])
    log = whole.streams["train"]["log"]
    assert log[:, [PriorityUpdate.SLOT, PriorityUpdate.GENERATION]].tolist() == [
        [0, -1],  # it is stale, but counts for the highest priority
        [1, 4],
        [4, 1],
        [-1, 5],
    ]
    division = ShardDivision.of(np.array([0, 0, 0, 0, 1]))
    parts = [reshard.part_of(whole, "train", division, index, None)["log"] for index in range(2)]
    assert (parts[0][:, PriorityUpdate.SLOT] & ANY_SLOT).tolist() == [0, 1]
    assert (parts[1][:, PriorityUpdate.SLOT] & ANY_SLOT).tolist() == [0, ANY_SLOT]
    assert whole.positions_of(np.array([5, 4, 2, -1])).tolist() == [4, -1, 1, -1]
    assert whole.positions_of(np.empty(0, np.int64)).tolist() == []


@given(
    st.lists(st.integers(1, 9), max_size=25),
    st.integers(1, 4),
    st.integers(0, 12),
    st.integers(0, 40),
)
def test_a_table_is_divided_wherever_whole_trajectories_fit(
    rows: list[int], count: int, slots: int, most: int
) -> None:
    records = np.zeros((len(rows), Slot.NUM_WORDS), np.int64)
    records[:, Slot.NUM_ROWS] = rows
    records[:, Slot.FIRST_ROW] = np.cumsum(rows) - rows
    # as many as fit into each, one after the other
    used = 0
    filled = 0
    shards = 1
    for length in rows:
        if used + 1 > slots or filled + length > most:
            used = 0
            filled = 0
            shards = shards + 1
        used = used + 1
        filled = filled + length
        if slots < 1 or length > most:  # it fits nowhere
            shards = count + 1
    try:
        whole = SavedShard(records, None, 0, {})
        division = reshard.divide("main", whole, [(slots, most)] * count, by_rows=True)
    except StoreFullError:
        assert shards > count
        return
    assert shards <= count
    assert (np.diff(division.owner) >= 0).all()
    for index in range(count):
        chosen = division.chosen(index)
        assert len(chosen) <= slots
        assert records[chosen, Slot.NUM_ROWS].sum() <= most


def test_cuts_are_dropped_where_a_shard_has_lost_its_samples() -> None:
    _, _, shards = divided(2)
    for name in ("heads", "ring", "epochs"):
        shards[1].streams["train"][name] = shards[1].streams["train"][name][:0]
    assert len(reshard.merge(shards).streams["train"]["heads"]) == 0


@given(st.integers(0, 30), st.integers(1, 4), st.integers(1, 4), st.integers(0, 1 << 31))
def test_groups_stay_whole_and_in_order(size: int, before: int, count: int, seed: int) -> None:
    """On any shards, and on others after them: leaders, counts of groups, the order of leaders."""
    random = np.random.default_rng(seed)
    records = stored(random, size)
    numbers = random.integers(0, 8, size)
    groups = np.zeros((size, 2), np.int64)
    for number in range(6):  # the others are not complete
        members = np.nonzero(numbers == number)[0]
        if len(members):
            groups[members, 0] = members[records[members, Slot.ID].argmax()] + 1
            groups[groups[members, 0] - 1, 1] = 10 + number
    held = int((groups[:, 0] - 1 == np.arange(size)).sum())
    counts = np.zeros(GroupCount.NUM_WORDS, np.int64)
    counts[[GroupCount.HELD, GroupCount.INSERTED, GroupCount.LATE]] = held, held + 5, 3
    whole = SavedShard(
        records, None, 0, {}, groups=SavedGroups(groups, counts, np.empty(0, np.int64))
    )
    order = leaders_of(whole)
    for parts in (before, count):
        division = reshard.divide("main", whole, [(size, 1000)] * parts, numbers=numbers)
        for number in range(8):
            assert len(set(division.owner[numbers == number].tolist())) <= 1
        shards = []
        for index in range(parts):
            chosen = division.chosen(index)
            groups_of = reshard.groups_of(whole, division, index)
            slots = reshard.packed(whole.slots[chosen])
            shards.append(SavedShard(slots, None, 0, {}, groups=groups_of))
            own = groups_of.records
            leads = own[:, 0] - 1 == np.arange(len(own))
            assert groups_of.counts[GroupCount.INSERTED] >= own[leads, 1].max(initial=0)
            assert len(set(own[leads, 1].tolist())) == leads.sum()
        numbers = numbers[np.argsort(division.owner, kind="stable")]
        whole = reshard.merge(shards)
        assert leaders_of(whole) == order
        words = [GroupCount.INSERTED, GroupCount.LATE]
        assert whole.groups.counts[words].tolist() == [held + 5, 3]


def leaders_of(shard: SavedShard) -> list[int]:
    """Return the ids of the leaders of complete groups, in stored order; check their
    trajectories.
    """
    leaders = shard.groups.records[:, 0] - 1
    formed = np.nonzero(leaders >= 0)[0]
    assert (leaders[leaders[formed]] == leaders[formed]).all()
    return [int(shard.slots[at, Slot.ID]) for at in np.unique(leaders[formed])]
