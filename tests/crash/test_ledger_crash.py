"""Processes die at any instruction of the prompt ledger: the books close, and no group is torn."""

import os
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from gear_support import SCHEMA, trajectory
from ledger_support import check_epochs
from store_support import StoreScene, check_whole, every_death, stream_spec

from deepspeed_gear import Column, Schema
from deepspeed_gear.ops.records import Resolution, Slot, SlotState
from deepspeed_gear.store.group_spec import GroupCondition, GroupSpec
from deepspeed_gear.store.prompt_spec import Entry, EntryState, PromptCount, PromptSpec
from deepspeed_gear.store.records import NEVER_LATE, Head
from deepspeed_gear.store.retention import Retention

STRIDE = int(os.environ.get("GEAR_TEST_STRIDE", "67"))
FOREVER = 1 << 60
MOST = 5  # trajectories of a group
GROUP = GroupSpec(
    "task",
    3,
    member="member",
    min_size=1,
    where=(GroupCondition("task", "mean", None, 8.0),),
    max_trajectories=MOST,
)
PROMPTS = PromptSpec(
    "", "", 1000, groups=2, size=MOST, lease_s=600.0, attempts=3, max_lag=4, seed=0, random_key=0
)
MEMBERS = Schema([*SCHEMA, Column("member", "int64", rows="1")])


def scene(prompts: PromptSpec = PROMPTS) -> StoreScene:
    spec = stream_spec("fifo", "group", 2, most_trajectories=MOST)
    rules = {"retention": Retention(max_times_sampled=1), "group": GROUP, "prompts": prompts}
    found = StoreScene([spec], **rules, schema=MEMBERS)
    found.streams[0].state.ask(FOREVER)
    found.streams[0].state.consumed[1:] = NEVER_LATE  # only this process reads selections
    return found


def commit(table: Any, lease: Any) -> None:
    """Commit a group of `members_of` its number."""
    members = members_of(lease.number)
    with table.lock:
        slots = [table.extents.reserve(table.rows_for(3), 3) for _ in members]
    for slot, member in zip(slots, members, strict=True):
        own = {"task": np.int64(lease.number), "member": np.int64(member)}
        table.write(slot, {**trajectory(lease.number, 3), **own})
    with table.lock, table.ledger.committing(lease, slots):
        for slot in slots:
            table.commit(slot)


def members_of(number: int) -> list[int]:
    """Return the member of each trajectory of a group: one to three, of one or two each.

    Groups 0 to 3 have the members [0], [0, 0, 1], [0, 1, 1, 2] and [0, 0].
    """
    return [m for m in range(number % 3 + 1) for _ in range((number + m) % 2 + 1)]


def slots_of(*numbers: int) -> list[int]:
    """Return the number of each trajectory of groups."""
    return [number for number in numbers for _ in members_of(number)]


def lease(table: Any, count: int) -> list[Any]:
    with table.lock:
        return table.ledger.lease(count)  # type: ignore[no-any-return]


def drawn(table: Any, selection: Any) -> list[int]:
    """Return the number of each trajectory of a selection."""
    slots = selection.resolutions[: selection.head[Head.COUNT], Resolution.SLOT].numpy()
    return table.columns["task"][slots].tolist()  # type: ignore[no-any-return]


def check(table: Any, streams: Any) -> dict[str, Any]:
    """Check the books, and that each held number has a whole group and no other one has a
    trajectory.
    """
    check_whole(table, streams)
    with table.lock:
        table.groups.update()
        books = table.ledger.account.report()
        held = table.slots[:, Slot.STATE] == SlotState.COMMITTED
        numbers, counts = np.unique(table.columns["task"][: len(held)][held], return_counts=True)
    parts = [books[name] for name in ("trained", "training", "waiting", "leased", "returned")]
    assert books["issued"] == sum(parts) + sum(books["dropped"].values()), books
    assert min(parts) >= 0
    check_epochs([books])
    if table.spec.prompts.draws_once:
        check_drawn(table)
    assert counts.tolist() == [len(members_of(number)) for number in numbers.tolist()]
    assert len(numbers) == books["waiting"], (numbers, books)
    return books


def check_drawn(table: Any) -> None:
    """Check that an epoch has drawn as many prompts as it has issued numbers, each once."""
    ledger = table.ledger
    with table.lock:
        issued = int(ledger.counts[PromptCount.ISSUED])
        entries = ledger.entries[ledger.entries[:, Entry.STATE] != EntryState.FREE]
        drawn = table.views["prompt_drawn"].copy()
    size = table.spec.prompts.num_prompts
    epoch = issued // size
    assert (drawn == epoch + 1).sum() == issued % size, (drawn, issued)
    assert (drawn >= epoch).all()
    of_epochs = entries[:, Entry.NUMBER] // size * size + entries[:, Entry.PROMPT]
    assert len({*of_epochs.tolist()}) == len(entries), entries
    assert (drawn[entries[:, Entry.PROMPT]] > entries[:, Entry.NUMBER] // size).all()


DRAWN = replace(PROMPTS, sampler="prioritized_epoch", num_prompts=7)  # 7 begins an epoch


@pytest.mark.parametrize(
    ("part", "prompts"),
    [
        ("leases", PROMPTS),
        ("commits", PROMPTS),
        ("selections", PROMPTS),
        ("leases", DRAWN),
        ("commits", DRAWN),
    ],
)
def test_death_at_any_line(part: str, prompts: PromptSpec) -> None:
    """Of a worker that leases, commits and fails, and of one that commits, and evicts for what is
    drawn.
    """

    def make() -> StoreScene:
        found = scene(prompts)
        for one in lease(found.table, 4):
            commit(found.table, one)
        return found

    def act(table: Any, streams: Any) -> None:
        if part == "selections":
            streams[0].get(0)
            return
        held = lease(table, 6)  # 4 to 9: 9 fails the condition
        if part == "leases":
            with table.lock:
                table.ledger.fail(held[0], "no answer", retry=True)
                table.ledger.fail(held[1], "too long", retry=False)
                table.ledger.renew(held[2])
            lease(table, 1)
            return
        for one in reversed(held):
            commit(table, one)
        with table.lock:
            table.groups.update()

    for found in every_death(make, act, STRIDE):
        table = found.table
        streams = found.streams
        with table.lock:
            table.ledger.reclaim()
        books = check(table, streams)
        assert books["leased"] == 0
        for one in lease(table, books["returned"]):
            commit(table, one)
        check(table, streams)
        selection = streams[0].get(0)  # in the order of leases
        # A rank that dies in a selection, after it has counted the draws, ends the run.
        lost = 2 if part == "selections" and drawn(table, selection)[0] else 0
        assert drawn(table, selection) == slots_of(lost, lost + 1)
        streams[0].release(0)
        assert check(table, streams)["trained"] == 2 + lost


def test_death_while_groups_are_dropped_for_their_age() -> None:
    """Two groups that are complete, and too old for the next batch."""

    def make() -> StoreScene:
        found = scene(replace(PROMPTS, max_lag=1, order="completion", late="drop"))
        table = found.table
        (stream,) = found.streams
        slow = lease(table, 4)
        for batch, leases in enumerate((slow[:2], None)):
            for one in leases or lease(table, 2):
                commit(table, one)
            stream.get(batch)
            stream.release(batch)
        for one in (*slow[2:], *lease(table, 2)):
            commit(table, one)
        return found

    for found in every_death(make, lambda _, streams: streams[0].get(2), STRIDE):
        table = found.table
        (stream,) = found.streams
        with table.lock:
            table.ledger.reclaim()
            room = table.ledger.lease(4)
        for one in room:
            commit(table, one)
        numbers = drawn(table, stream.get(2))
        assert numbers in (slots_of(6, 7), slots_of(8, 9))  # the first two may be lost, as above
        stream.release(2)
        assert check(table, [stream])["dropped"]["too old"] == 2


def cleared(table: Any) -> list[str]:
    return [name for name in table.views if name.startswith("stream/")]


def test_a_start_that_dies_at_any_line_begins_anew() -> None:
    """Of a job in a store that is kept, which has groups that wait and one that was drawn."""

    def make() -> StoreScene:
        found = scene(replace(PROMPTS, is_kept=True))
        for one in lease(found.table, 6)[:5]:
            commit(found.table, one)
        found.streams[0].get(0)
        found.streams[0].release(0)
        return found

    def act(table: Any, streams: Any) -> None:
        with table.lock:
            table.ledger.begin(cleared(table))
            streams[0].state.initialise()
        lease(table, 2)

    for found in every_death(make, act, STRIDE):
        table = found.table
        streams = found.streams
        table.recoveries.clear()  # as of a worker, which has no streams
        check(table, [])
        with table.lock:
            table.ledger.begin(cleared(table))
            streams[0].state.initialise()
        assert check(table, streams)["issued"] == 0
        assert [one.number for one in lease(table, 1)] == [5]
        assert check(table, streams)["waiting"] == 5
