"""Prompt ledgers of several stores under faults: batches in one order, within the lag, one account.

The stores are driven by the machines of `ledger_machines.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ledger_machines import Machine, Resharding, Successors
from ledger_stores import WORKERS, NodeStore, exchange

from deepspeed_gear.ops.records import SlotState
from deepspeed_gear.store import prompt_ledger
from deepspeed_gear.store.prompt_ledger import LeaseRecord
from deepspeed_gear.store.prompt_spec import Left, PromptCount
from deepspeed_gear.store.records import Head

LEASE_S = 6.0


def driven(
    kind: type[Machine], count: int, turns: int, monkeypatch: pytest.MonkeyPatch, **how: Any
) -> Counter[str]:
    """Drive four machines; return how often what happened in all of them."""
    counts = Counter[str]()
    how["lease_s"] = LEASE_S if how["order"] == "lease" else 300.0  # slow ones are to be due
    for seed in range(4):
        machine = kind(100 * count + seed, count, **how, needs=seed % 2 > 0)
        clock = SimpleNamespace(monotonic_ns=lambda machine=machine: int(machine.now * 1e9))
        monkeypatch.setattr(prompt_ledger, "time", clock)
        machine.drive(turns)
        assert len(machine.trained) == len({*machine.trained} - machine.gone)
        assert machine.trained == sorted(machine.trained) or not machine.by_lease
        dropped = [store.ledger.account.report()["dropped"] for store in machine.stores]
        counts["too old"] += sum(one.get("too old", 0) for one in dropped)
        counts += machine.counts
    return counts


CASES = [  # groups, max_lag, order, late
    (1, 0, "lease", "wait"),
    (4, 1, "lease", "wait"),
    (5, 3, "lease", "wait"),
    (5, 3, "completion", "wait"),
    (5, 3, "completion", "drop"),
]


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize(("groups", "max_lag", "order", "late"), [*CASES, (7, 0, "lease", "wait")])
def test_stores_share_an_order_a_lag_and_an_account(
    count: int, groups: int, max_lag: int, order: str, late: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    how = {"groups": groups, "max_lag": max_lag, "order": order, "late": late}
    counts = driven(Resharding, count, 500 if order == "lease" else 850, monkeypatch, **how)
    assert min(counts["exact"], counts["loads"]) > 0, counts
    assert counts["torn"] > 0 or max_lag == 0, counts
    assert counts["expired"] > 0 or groups == 1, counts
    assert counts["waits"] > 0 or groups == 1 or late == "drop", counts
    assert counts["first"] > 0 or order == "lease", counts
    assert (counts["too old"] > 0) == (late == "drop"), counts


@pytest.mark.parametrize(
    ("sampler", "count", "groups", "max_lag", "order"),
    [
        ("prioritized", 1, 4, 1, "lease"),
        ("prioritized", 3, 5, 3, "lease"),
        ("prioritized", 2, 5, 3, "completion"),
        ("prioritized_epoch", 1, 4, 1, "lease"),
        ("prioritized_epoch", 2, 4, 1, "lease"),
        ("prioritized_epoch", 3, 5, 3, "completion"),
    ],
)
def test_a_number_keeps_the_prompt_that_was_drawn(
    sampler: str,
    count: int,
    groups: int,
    max_lag: int,
    order: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However masses change, through deaths and loads; an epoch draws each prompt once."""
    how = {"groups": groups, "max_lag": max_lag, "order": order, "late": "wait"}
    turns = 500 if order == "lease" else 850
    counts = driven(Resharding, count, turns, monkeypatch, **how, sampler=sampler)
    assert min(counts["expired"], counts["loads"]) > 0, counts
    assert (counts["drawn again"] > 0) == (sampler == "prioritized_epoch"), counts


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize(
    ("groups", "max_lag", "order", "late"), [*CASES, (4, 1, "completion", "wait")]
)
def test_jobs_go_on_in_the_stores_of_those_before(
    count: int, groups: int, max_lag: int, order: str, late: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    how = {"groups": groups, "max_lag": max_lag, "order": order, "late": late}
    counts = driven(Successors, count, 450, monkeypatch, **how)
    names = ["expired", "found", "from before", "lost", "loads", "torn"]
    if order == "completion" and max_lag == 3:  # elsewhere few are older than a lease
        names.append("older")
    assert min(counts[name] for name in names) > 0 or groups == 1, counts


def agree(stores: Sequence[NodeStore], known: Sequence[np.ndarray]) -> None:
    """Let stores take what all of them have told."""
    for store in stores:
        store.ledger.take_progress(np.stack(known))


def test_a_store_that_is_told_late_leases_nothing_for_a_batch_that_is_full() -> None:
    """What one store knows to be trained, the others know before that store's groups are drawn."""
    how = {"groups": 2, "max_lag": 1, "order": "completion", "late": "wait", "lease_s": LEASE_S}
    one, other = stores = [NodeStore(index, 2, 2, **how) for index in range(2)]
    for store in stores:
        store.memory.peer = WORKERS[0]

    def commit(store: NodeStore, leases: list[LeaseRecord]) -> list[int]:
        for lease in leases:
            slot = int(store.slots_in(SlotState.FREE)[0])
            with store.ledger.committing(lease, [slot]):
                store.write(slot, lease.number, SlotState.COMMITTED, -1, 1, lease.version)
            store.update()
        return [lease.number for lease in leases]

    agree(stores, [store.ledger.progress() for store in stores])
    slow = one.ledger.lease(2)
    assert (commit(one, slow[:1]), commit(other, other.ledger.lease(1))) == ([0], [1])
    for number, store in enumerate(stores):
        store.position[Head.NUMBER] = 1
        store.leave(number, Left.DRAWN)
    of_other = other.ledger.progress()  # and then the batch ends
    for store in stores:
        store.consumed += 1
    one.ledger.note_trained(1)
    assert commit(one, slow[1:] + one.ledger.lease(1)) == [2, 4]
    agree(stores, [one.ledger.progress(), of_other])
    slots = [store.ledger.in_order(store.complete) for store in stores]
    due = np.stack([store.ledger.due(at) for store, at in zip(stores, slots, strict=True)])
    assert one.ledger.admits(due)
    assert one.numbers[slots[0]].tolist() == [2, 4]  # batch 1
    assert [(lease.number, lease.version) for lease in other.ledger.lease(1)] == [(3, 1)]


@pytest.mark.parametrize("case", ["shares", "an exchange", "more are trained", "too old", "begun"])
def test_stores_divide_what_may_be_older_than_a_lease(case: str) -> None:
    """Two stores have groups of version 0, of which two fit into the next batch."""
    how = {"groups": 2, "max_lag": 2, "order": "completion", "late": "wait", "lease_s": 1.0}
    stores = [NodeStore(index, 2, 5, outlives=True, needs=True, **how) for index in range(2)]
    selected = 3 if case == "too old" else 2
    for store in stores:
        store.position[Head.NUMBER] = selected
        store.consumed[:] = 1 if case == "more are trained" else 2
        for number in range(2 * selected + store.spec.store, 2 * selected + 6, 2):
            store.write(number // 2, number, SlotState.EVICTED, -1, 1, 0)
        store.ledger.note_sizes(store.slots_in(SlotState.EVICTED))
        store.ledger.counts[PromptCount.ISSUED] = selected
        store.views["prompt_left"][0, Left.DRAWN] = selected
        store.views["life_words"][1] = 99
        if case == "begun":
            store.ledger.begin()
    agree(stores, [store.ledger.progress() for store in stores])
    if case == "begun":  # nothing is leased before the second exchange
        assert not any(store.ledger.lease(1) for store in stores)

    def each(call: Callable[[NodeStore], Any]) -> list[Any]:
        return [call(store) for store in stores]

    exchange(stores, each, lambda store: store.ledger.progress(), False)
    for store in stores:
        if case == "an exchange":
            store.ledger.progress()
        elif case == "more are trained":
            store.ledger.note_trained(2)
        store.ledger.update()
        assert len(store.slots_in(SlotState.COMMITTED)) == (case == "shares")
        assert len(store.ledger.lease(1)) == 1  # by a worker: never waits
