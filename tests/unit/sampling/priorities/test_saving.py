"""Priorities and reports that are exported, and go on alike where they are loaded."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from priority_cases import cut, report, stored
from store_support import StoreScene, check_whole

from deepspeed_gear.errors import StoreError
from deepspeed_gear.ops.records import LogEntry
from deepspeed_gear.replay import table_access
from deepspeed_gear.sampling.priority_log import NEVER
from deepspeed_gear.store.pins import SelectionPins


def busy(scenes: Any, unit: str) -> tuple[StoreScene, Any]:
    """Return a store with priorities, gone items, waiting changes, and reports that wait on two ranks."""
    scene = scenes(unit=unit, lag=1, alpha=lambda key: 0.9 - 0.1 * key, normalize="table", batch=40, depth=6)
    stream, (table, (other,)) = scene.streams[0], scene.attach(1)
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
    for key in (2, 3, 4):
        wanted.append(cut(stream, key).resolutions.clone())
    priorities = stream.masses.values.copy()
    with scene.table.lock:
        stream.masses.restore(slots, saved)
        stream.state.seek(*position)
    assert (stream.masses.reports.asked == NEVER).all()
    check_whole(scene.table, scene.streams)
    for key, resolutions in zip((2, 3, 4), wanted, strict=True):
        assert cut(stream, key).resolutions.equal(resolutions)
    assert (stream.masses.values == priorities).all()
    assert max(stored(stream, [(2, 3), (3, 9), (5, 0)])) == 15
    check_whole(scene.table, scene.streams)


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
    saved, ranks = stream.masses.export(np.arange(5)), len(stream.masses.reports.asked)
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
