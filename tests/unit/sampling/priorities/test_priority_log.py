"""Reports from several processes: which of them a selection sees, and their log.

Their order: tests/property/test_priority_machine.py.
"""

import os
from typing import Any

import numpy as np
import pytest
from priority_cases import cut, handles, report, stored
from store_support import StoreScene, check_whole

from deepspeed_gear.errors import DataError, PeerError, StoreError
from deepspeed_gear.ops.records import LogEntry
from deepspeed_gear.replay import table_access
from deepspeed_gear.sampling.priority_log import NEVER
from deepspeed_gear.store.pins import SelectionPins

# ---- which reports a selection sees --------------------------------------------------------------


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_a_cut_sees_the_reports_of_batches_before_its_lag(scenes: Any, lag: int) -> None:
    stream = scenes(lag=lag, depth=8).streams[0]
    report(stream, [(2, 1)], 0.5)  # before anything was asked for
    for number in range(12):
        stream.state.ask(number)
        for ahead in range(number, number + lag + 1):  # as prefetching does
            stream.get(ahead)
        seen = number - 1  # the newest batch whose reports selection number + lag has seen
        assert stored(stream, [(2, 1)]) == [0.5 if seen < 0 else seen + 2]
        report(stream, [(2, 1)], number + 2)
        stream.release(number)


def test_a_cut_waits_until_all_have_asked_for_the_batch_behind_the_reports(scenes: Any) -> None:
    scene = scenes(lag=1, sizes={"timeout_s": 0.2}, depth=8)
    stream = scene.streams[0]
    table, (other,) = scene.attach(1)
    for each in (stream, other):
        each.state.ask(0)
    stream.get(0)
    stream.get(1)
    stream.state.ask(1)
    text = (
        rf"global batch 2 must have the priorities of all ranks in gear.timeout_s = 0.2 s, got "
        rf"'local rank 1 "
        rf"\(process {os.getpid()}\) has not requested the batch after them'; check why that "
        rf"rank stopped"
    )
    with pytest.raises(PeerError, match=text):
        stream.get(2)
    report(other, [(0, 0)], 4)  # of batch 0
    other.state.ask(1)
    stream.get(2)
    assert stored(stream, [(0, 0)]) == [4]
    table.close()
    stream.state.ask(2)
    stream.get(3)  # who has left is not waited for


def test_reports_for_what_is_gone_are_ignored_and_counted(scenes: Any) -> None:
    scene = scenes(lengths=[3, 4], sizes={"num_slots": 2})
    stream = scene.streams[0]
    cut(stream, 0)
    gone = handles(stream, [(0, 0), (0, 2), (1, 1)])
    table_access.remove(scene.table, [0])
    stream.masses.reports.add_items(gone, np.full(3, 9, np.float32), 0)
    scene.add(3)  # in the slot and the rows of the one that is gone
    cut(stream, 1)
    assert stored(stream, [(2, 0), (2, 2), (1, 1)]) == [1, 1, 9]
    assert stream.masses.statistics() == {
        "priorities_applied": 1,
        "priorities_ignored": 2,
        "priorities_clamped": 0,
        "priorities_applied_recent": 1,
        "priorities_clamped_recent": 0,
    }
    check_whole(scene.table, scene.streams)


# ---- the log -------------------------------------------------------------------------------------


def test_a_full_log_refuses_and_changes_nothing(scenes: Any) -> None:
    stream = scenes(log_size=7).streams[0]
    cut(stream, 0)
    report(stream, [(3, step) for step in range(5)], 2)
    text = (
        r"stream train: priorities must be at most 7 between two global batches on a rank, got "
        r"'5 wait, 3 "
        r"more'; report them in parts"
    )
    with pytest.raises(StoreError, match=text):
        report(stream, [(3, 0), (3, 1), (3, 8)], 3)
    report(stream, [(3, 5), (3, 6)], 4)
    cut(stream, 1)
    assert stored(stream, [(3, step) for step in range(9)]) == [2] * 5 + [4] * 2 + [1] * 2
    report(stream, [(3, step) for step in range(5)], 5)
    cut(stream, 2)
    report(stream, [(3, step) for step in range(4)], 6)  # round the end of the log
    cut(stream, 3)
    assert stored(stream, [(3, step) for step in range(7)]) == [6] * 4 + [5] + [4] * 2


@pytest.mark.parametrize("bad", [-1.0, -1e-45, float("inf"), float("-inf"), float("nan")])
def test_what_is_no_priority_is_refused_and_nothing_changes(scenes: Any, bad: float) -> None:
    stream = scenes().streams[0]
    with pytest.raises(
        DataError, match=r"priority 2 must be finite and at least 0, got .*nothing was changed"
    ):
        report(stream, [(0, 0), (0, 1), (0, 2)], [5, 5, bad])
    cut(stream, 0)
    assert stored(stream, [(0, 0), (0, 1), (0, 2)]) == [1, 1, 1]


# ---- saving --------------------------------------------------------------------------------------


def busy(scenes: Any, unit: str) -> tuple[StoreScene, Any]:
    """Return a store with priorities, gone items, waiting changes, and reports that wait on two
    ranks.
    """
    scene = scenes(
        unit=unit,
        lag=1,
        alpha=lambda number: 0.9 - 0.1 * number,
        normalize="table",
        batch=40,
        depth=6,
    )
    stream = scene.streams[0]
    (table, (other,)) = scene.attach(1)
    report(stream, [(2, 3), (3, 9), (0, 0)], [7, 0.25, 3])
    cut(stream, 0, other)
    table_access.remove(scene.table, [1])
    cut(stream, 1, other)
    scene.add(6)
    table_access.remove(scene.table, [4])
    report(other, [(2, 3), (5, 0)], [11, 12], 3)
    report(stream, [(2, 3), (5, 0)], [13, 14], 2)
    report(stream, [(3, 9)], [15])
    table.close()
    return scene, other


@pytest.mark.parametrize("unit", ["step", "trajectory"])
def test_what_is_exported_goes_on_alike(scenes: Any, unit: str) -> None:
    scene, _ = busy(scenes, unit)
    stream = scene.streams[0]
    slots = np.nonzero(scene.table.slots[:, 0] >= 2)[0]
    with scene.table.lock:
        saved = stream.masses.export(slots)
        position = [int(stream.position[word]) for word in range(5)]
    wanted = []
    for number in (2, 3, 4):
        wanted.append(cut(stream, number).resolutions.clone())
    priorities = stream.masses.values.copy()
    with scene.table.lock:
        stream.masses.restore(slots, saved)
        stream.state.seek(*position)
    assert (stream.masses.reports.asked == NEVER).all()
    check_whole(scene.table, scene.streams)
    for number, resolutions in zip((2, 3, 4), wanted, strict=True):
        assert cut(stream, number).resolutions.equal(resolutions)
    assert (stream.masses.values == priorities).all()
    assert max(stored(stream, [(2, 3), (3, 9), (5, 0)])) == 15
    check_whole(scene.table, scene.streams)


def test_reports_after_a_load_follow_those_that_wait(scenes: Any) -> None:
    stream = scenes(unit="trajectory", lag=1).streams[0]
    cut(stream, 0)
    cut(stream, 1)
    report(stream, [(0, 0)], 2)  # of batch 1, for selection 3
    stream.state.seek(2, 16, 0, 0, 0)
    report(stream, [(1, 0)], 3)
    for number, wanted in ((2, [1, 1]), (3, [2, 3])):
        cut(stream, number)
        assert stored(stream, [(0, 0), (1, 0)]) == wanted


def test_exported_reports_for_what_is_gone_change_nothing(scenes: Any) -> None:
    """Slots 1 and 4 are free when the table is saved, and another trajectory gets their places."""
    scene = scenes(unit="trajectory", lengths=[2] * 5, sizes={"num_slots": 5})
    stream = scene.streams[0]
    cut(stream, 0)
    report(stream, [(1, 0), (4, 0), (3, 0)], [50, 60, 70])
    table_access.remove(scene.table, [1, 4])
    with scene.table.lock:
        assert SelectionPins(scene.table).pinned(np.array([1, 4])).tolist() == [False, False]
        for slot in (1, 4):
            scene.table.extents.free(slot)
        slots = np.array([0, 2, 3])
        saved = stream.masses.export(slots)
        stream.masses.restore(slots, saved)
    cut(stream, 1)
    assert stored(stream, [(0, 0), (2, 0), (3, 0)]) == [1, 1, 70]
    assert set(stream.masses.values.tolist()) == {0, 1, 70}


def test_saved_reports_fill_the_logs_of_all_ranks_and_more_are_refused(scenes: Any) -> None:
    """A checkpoint of many ranks may be loaded where there are few."""
    scene = scenes(log_size=4)
    stream = scene.streams[0]
    report(stream, [(0, 0), (0, 1), (0, 2), (1, 0)], 2)
    saved = stream.masses.export(np.arange(5))
    ranks = len(stream.masses.reports.asked)
    assert ranks > 1
    saved["log"] = np.concatenate([saved["log"]] * ranks)
    saved["log"][:, LogEntry.SAMPLE_NUMBER] = np.arange(4 * ranks)
    stream.masses.restore(np.arange(5), saved)
    np.testing.assert_array_equal(stream.masses.export(np.arange(5))["log"], saved["log"])
    saved["log"] = np.concatenate([saved["log"], saved["log"][-1:]])
    before = stream.masses.values.copy()
    with pytest.raises(StoreError, match=f"must be at most {4 * ranks}, got {4 * ranks + 1}"):
        stream.masses.restore(np.arange(5), saved)
    assert (stream.masses.values == before).all()


def test_saved_reports_of_several_ranks_are_in_the_order_of_batches(scenes: Any) -> None:
    """They are dealt out to the logs in it, so that each selection takes those that are due."""
    scene = scenes(lag=3)
    stream = scene.streams[0]
    table, (other,) = scene.attach(1)
    for batch in range(2):
        for each in (stream, other):
            each.state.ask(batch)
            report(each, [(2, 1), (0, 0)][: batch + 1], 5)
    saved = stream.masses.export(np.arange(5))
    assert saved["log"][:, LogEntry.BATCH].tolist() == [0, 0, 1, 1, 1, 1]
    stream.masses.restore(np.arange(5), saved)
    reports = stream.masses.reports
    for number, count in ((3, 0), (4, 2), (5, 6)):
        assert sum(len(entries) for _, entries in reports.due(number)) == count
    table.close()


def test_a_withdrawn_request_counts_reports_for_the_batch_that_was_not_made(scenes: Any) -> None:
    scene = scenes(depth=8)
    stream = scene.streams[0]
    table, (other,) = scene.attach(1)
    log = stream.state.reports
    for number in (0, 1):
        for each in (stream, other):
            each.request(number)
        if number == 0:
            report(stream, [(2, 1)], 5)
            stream.get(0)
            stream.release(0)
    for _ in range(2):
        stream.withdraw()  # batch 1 was not ready
    assert [log.asked[table.memory.peer], log.late(1)] == [1, [0]], "the others wait for it"
    stream.request(1)
    stream.withdraw()
    report(stream, [(0, 0)], 3)
    stream.request(1)
    other.get(1)
    assert stored(stream, [(2, 1), (0, 0)]) == [5, 3]
    stream.withdraw()  # another process has made batch 1: later reports are of it
    report(stream, [(0, 0)], 4)
    assert log.waiting()[:, LogEntry.BATCH].tolist() == [1]
    log.restart(2)
    stream.request(2)
    stream.withdraw()
    assert log.asked[0] == NEVER, "a load forgets requests"
    table.close()
