"""PriorityMasses: reports from several processes, their order, what a cut sees, and what is saved."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from gear_support import StoreScene, check_whole, priority_rule, stream_spec

from deepspeed_gear.errors import DataError, PeerError, StoreError
from deepspeed_gear.ops.constants import (
    APPLIED,
    BY_ID,
    CLAMPED,
    DRAWABLE,
    ONE_Q62,
    R_MASS,
    REPORT_NUMBER,
    STALE,
)
from deepspeed_gear.replay import content
from deepspeed_gear.selection.anchors import AnchorRule
from deepspeed_gear.selection.cut import DIVISOR, EXPONENT, NUMERATOR
from deepspeed_gear.selection.readers import Readers
from deepspeed_gear.selection.reports import NEVER
from deepspeed_gear.store.table import GENERATION

LENGTHS = [3, 1, 7, 33, 5]
ONE = 1 << 24  # the mass of priority 1
Item = tuple[int, int]


@pytest.fixture(params=["cpu", "reference"])
def scenes(request: pytest.FixtureRequest) -> Iterator[Any]:
    made: list[StoreScene] = []

    def make(*, unit: str = "step", lengths: Any = LENGTHS, sizes: Any = None, **options: Any) -> StoreScene:
        spec = {key: options.pop(key) for key in ("batch", "anchors", "split", "depth") if key in options}
        rule = priority_rule(**options)
        scene = StoreScene(
            request.param, [stream_spec(unit=unit, priorities=rule, **spec)], lengths, **(sizes or {})
        )
        made.append(scene)
        return scene

    yield make
    for scene in made:
        scene.close()


def handles(stream: Any, items: list[Item]) -> np.ndarray:
    """Return slot, generation and anchor of items. [n, 3]."""
    slots = stream.table.slots_of(np.array([number for number, _ in items]))
    return np.stack([slots, stream.table.slots[slots, GENERATION], [a for _, a in items]], axis=1)


def report(stream: Any, items: list[Item], priorities: Any, order: Any = BY_ID) -> None:
    values = np.broadcast_to(np.asarray(priorities, np.float32), len(items))
    stream.masses.reports.add_items(handles(stream, items), values, order)


def stored(stream: Any, items: list[Item]) -> list[float]:
    """Return the priorities that the latest cut has drawn with."""
    slots = stream.table.slots_of(np.array([number for number, _ in items]))
    if not stream.masses.by_step:
        return stream.masses.values[slots].tolist()
    rows = stream.table.slots[slots, 3] + [a for _, a in items]
    return stream.masses.values[rows].tolist()


def cut(stream: Any, key: int, *others: Any) -> Any:
    """Let every process ask for a global batch, and cut it."""
    for each in (stream, *others):
        each.masses.ask(key)
    made = stream.take(key)
    for each in (stream, *others):
        each.consume(key)
    return made


# ---- items come and go ---------------------------------------------------------------------------


@pytest.mark.parametrize("unit", ["step", "trajectory"])
def test_new_items_begin_at_the_highest_priority(scenes: Any, unit: str) -> None:
    scene = scenes(unit=unit)
    stream = scene.streams[0]
    cut(stream, 0)
    assert stored(stream, [(0, 0), (3, 0)]) == [1, 1]
    report(stream, [(0, 0), (1, 0)], [6.5, 0.25])
    cut(stream, 1)
    scene.add(2)
    assert stored(stream, [(5, 0)]) == [0]
    cut(stream, 2)
    assert stored(stream, [(5, 0), (0, 0), (1, 0), (2, 0)]) == [6.5, 6.5, 0.25, 1]
    report(stream, [(0, 0)], 0.1)
    cut(stream, 3)
    scene.add(1)
    cut(stream, 4)
    assert stored(stream, [(6, 0)]) == [6.5], "the highest that was ever reported"
    check_whole(scene.table, scene.streams)


def test_new_items_begin_at_the_given_priority(scenes: Any) -> None:
    scene = scenes(initial=0.5)
    stream = scene.streams[0]
    report(stream, [(0, 0)], 100)
    cut(stream, 0)
    scene.add(2)
    cut(stream, 1)
    assert stored(stream, [(0, 0), (0, 1), (5, 0)]) == [100, 0.5, 0.5]


@pytest.mark.parametrize("unit", ["step", "trajectory"])
def test_items_that_are_gone_have_no_mass(scenes: Any, unit: str) -> None:
    scene = scenes(unit=unit, batch=500)
    stream = scene.streams[0]
    assert set(cut(stream, 0).resolutions[:, 0].tolist()) == set(range(5))
    content.remove(scene.table, [1, 3])
    scene.add(4)
    assert set(cut(stream, 1).resolutions[:, 0].tolist()) == {0, 2, 4, 5}
    num_items = 4 if unit == "trajectory" else 3 + 7 + 5 + 4
    assert stream.masses.counts[DRAWABLE] == num_items
    assert stream.masses.total == num_items * ONE
    check_whole(scene.table, scene.streams)


def test_rows_that_are_used_again_have_only_their_new_items(scenes: Any) -> None:
    scene = scenes(lengths=[9, 9], sizes={"num_slots": 2, "num_rows": 20}, batch=100)
    stream = scene.streams[0]
    for round_ in range(6):
        key = 2 * round_
        cut(stream, key)
        report(stream, [(round_ + 1, 0)], 5)
        content.remove(scene.table, [round_])
        cut(stream, key + 1)
        scene.add(1 + round_)
        check_whole(scene.table, scene.streams)
    found = cut(stream, 12).resolutions
    assert set(found[:, 0].tolist()) == {6, 7}


@pytest.mark.parametrize("rule", [AnchorRule.every(3), AnchorRule.end(), AnchorRule(first=2, trim=1)])
def test_only_anchors_are_items(scenes: Any, rule: AnchorRule) -> None:
    scene = scenes(anchors=rule, batch=400)
    stream = scene.streams[0]
    found = cut(stream, 0).resolutions
    places = {
        (number, step)
        for number, steps in enumerate(LENGTHS)
        for step in range(steps)
        if rule.admits(np.array([step]), np.array([steps]))[0]
    }
    assert {(int(r[0]), int(r[5])) for r in found} == places
    assert stream.masses.counts[DRAWABLE] == len(places)
    check_whole(scene.table, scene.streams)


def test_an_item_of_priority_zero_is_not_drawn(scenes: Any) -> None:
    stream = scenes(unit="trajectory", batch=300).streams[0]
    report(stream, [(0, 0), (2, 0), (4, 0)], [0.0, -0.0, 0.0])
    assert set(cut(stream, 0).resolutions[:, 0].tolist()) == {1, 3}
    report(stream, [(0, 0)], 1e-30)
    cut(stream, 1)
    assert stream.masses.leaves[0] == 1


def test_no_priority_left_is_an_error_that_passes(scenes: Any) -> None:
    stream = scenes(unit="trajectory").streams[0]
    everything = [(number, 0) for number in range(5)]
    report(stream, everything, 0)
    stream.masses.ask(0)
    for _ in range(2):
        with pytest.raises(StoreError, match="must hold at least one item that the sampler admits"):
            stream.take(0)
    report(stream, everything[1:2], 3)  # belongs to batch 0, which cannot be made: nothing is left to draw
    with pytest.raises(StoreError, match="must hold at least one item"):
        stream.take(0)


# ---- which reports a cut sees --------------------------------------------------------------------


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_a_cut_sees_the_reports_of_batches_before_its_lag(scenes: Any, lag: int) -> None:
    stream = scenes(lag=lag, depth=8).streams[0]
    report(stream, [(2, 1)], 0.5)  # before anything was asked for
    for key in range(12):
        stream.masses.ask(key)
        for ahead in range(key, key + lag + 1):  # as prefetching does
            stream.take(ahead)
        seen = key - 1  # the newest batch whose reports cut key + lag has seen
        assert stored(stream, [(2, 1)]) == [0.5 if seen < 0 else seen + 2]
        report(stream, [(2, 1)], key + 2)
        stream.consume(key)


def test_a_cut_waits_until_all_have_asked_for_the_batch_behind_the_reports(scenes: Any) -> None:
    scene = scenes(lag=1, sizes={"timeout_s": 0.2}, depth=8)
    stream = scene.streams[0]
    table, (other,) = scene.attach(1)
    for each in (stream, other):
        each.masses.ask(0)
    stream.take(0)
    stream.take(1)
    stream.masses.ask(1)
    text = (
        rf"global batch 2 must have the priorities of all ranks in gear.timeout_s = 0.2 s, got 'local rank 1 "
        rf"\(process {os.getpid()}\) has not asked for the batch behind them'; look why that rank stopped"
    )
    with pytest.raises(PeerError, match=text):
        stream.take(2)
    report(other, [(0, 0)], 4)  # of batch 0
    other.masses.ask(1)
    stream.take(2)
    assert stored(stream, [(0, 0)]) == [4]
    table.close()
    stream.masses.ask(2)
    stream.take(3)  # who has left is not waited for


def test_reports_of_one_who_has_left_count(scenes: Any) -> None:
    scene = scenes()
    table, (other,) = scene.attach(1)
    report(other, [(0, 0)], 4)
    table.close()
    cut(scene.streams[0], 0)
    assert stored(scene.streams[0], [(0, 0)]) == [4]


# ---- their order ---------------------------------------------------------------------------------


def test_the_highest_sample_number_of_the_newest_batch_wins(scenes: Any) -> None:
    scene = scenes()
    first = scene.streams[0]
    table, (second,) = scene.attach(1)
    cut(first, 0, second)
    # in this order of time; batch 0, samples 3, 5, 4 and 2
    report(first, [(0, 0), (0, 1)], [13, 23], 3)
    report(second, [(0, 0), (0, 1)], [15, 25], 5)
    report(first, [(0, 0)], 14, 4)
    report(second, [(0, 2), (0, 0)], [32, 12], 2)
    cut(first, 1, second)
    assert stored(first, [(0, 0), (0, 1), (0, 2)]) == [15, 25, 32]
    report(first, [(0, 0)], 1, 0)  # batch 1
    cut(first, 2, second)
    assert stored(first, [(0, 0)]) == [1]
    table.close()


def test_reports_of_one_process_have_the_same_order(scenes: Any) -> None:
    """Micro batches of a rank interleave: samples 0, 2, 4, then 1, 3, 5."""
    stream = scenes().streams[0]
    cut(stream, 0)
    report(stream, [(0, 0), (0, 1), (0, 0)], [10, 12, 14], [0, 2, 4])
    report(stream, [(0, 0), (0, 1), (0, 2)], [11, 13, 15], [1, 3, 5])
    cut(stream, 1)
    assert stored(stream, [(0, 0), (0, 1), (0, 2)]) == [14, 13, 15]


def test_reports_by_id_come_behind_those_of_their_batch(scenes: Any) -> None:
    scene = scenes()
    first = scene.streams[0]
    table, (second,) = scene.attach(1)
    cut(first, 0, second)
    report(first, [(3, 0), (3, 1)], [50, 51])
    report(first, [(3, 0)], 7, 100)
    report(second, [(3, 1)], 8, 100)
    report(first, [(3, 2)], 1)
    report(second, [(3, 2)], 2)  # of the same batch by id: by rank
    report(second, [(4, 0)], 3)
    report(second, [(4, 0)], 4)  # of one rank: by time
    cut(first, 1, second)
    assert stored(first, [(3, 0), (3, 1), (3, 2), (4, 0)]) == [50, 51, 2, 4]
    report(second, [(3, 0)], 9, 0)
    cut(first, 2, second)
    assert stored(first, [(3, 0)]) == [9]
    table.close()


def test_reports_for_what_is_gone_are_ignored_and_counted(scenes: Any) -> None:
    scene = scenes(lengths=[3, 4], sizes={"num_slots": 2})
    stream = scene.streams[0]
    cut(stream, 0)
    gone = handles(stream, [(0, 0), (0, 2), (1, 1)])
    content.remove(scene.table, [0])
    stream.masses.reports.add_items(gone, np.full(3, 9, np.float32), 0)
    scene.add(3)  # in the slot and the rows of the one that is gone
    cut(stream, 1)
    assert stored(stream, [(2, 0), (2, 2), (1, 1)]) == [1, 1, 9]
    assert stream.masses.statistics() == {
        "priorities_applied": 1,
        "priorities_ignored": 2,
        "priorities_clamped": 0,
    }
    assert [int(stream.masses.counts[word]) for word in (APPLIED, STALE, CLAMPED)] == [1, 2, 0]
    check_whole(scene.table, scene.streams)


# ---- the log -------------------------------------------------------------------------------------


def test_the_log_goes_round(scenes: Any) -> None:
    stream = scenes(log_size=7).streams[0]
    everything = [(3, step) for step in range(33)]
    wanted, chance = [1.0] * 33, np.random.default_rng(0)
    for key in range(40):
        cut(stream, key)
        assert stored(stream, everything) == wanted
        chosen = chance.permutation(33)[: int(chance.integers(0, 8))]
        for part in np.array_split(chosen, 2):
            values = chance.integers(1, 100, len(part)).astype(np.float32)
            report(stream, [(3, int(step)) for step in part], values)
            for step, value in zip(part.tolist(), values.tolist(), strict=True):
                wanted[step] = value


def test_a_full_log_refuses_and_changes_nothing(scenes: Any) -> None:
    stream = scenes(log_size=7).streams[0]
    cut(stream, 0)
    report(stream, [(3, step) for step in range(5)], 2)
    text = (
        r"stream train: priorities must be at most 7 between two global batches on a rank, got '5 wait, 3 "
        r"more'; report them in parts"
    )
    with pytest.raises(StoreError, match=text):
        report(stream, [(3, 0), (3, 1), (3, 8)], 3)
    report(stream, [(3, 5), (3, 6)], 4)
    cut(stream, 1)
    assert stored(stream, [(3, step) for step in range(9)]) == [2] * 5 + [4] * 2 + [1] * 2
    report(stream, [(3, step) for step in range(7)], 5)


def test_no_reports_are_fine(scenes: Any) -> None:
    stream = scenes().streams[0]
    report(stream, [], [], np.empty(0, np.int64))
    cut(stream, 0)
    assert stream.masses.counts[APPLIED] == 0


@pytest.mark.parametrize("bad", [-1.0, -1e-45, float("inf"), float("-inf"), float("nan")])
def test_what_is_no_priority_is_refused_and_nothing_changes(scenes: Any, bad: float) -> None:
    stream = scenes().streams[0]
    with pytest.raises(
        DataError, match=r"priority 2 must be finite and at least 0, got .*nothing was changed"
    ):
        report(stream, [(0, 0), (0, 1), (0, 2)], [5, 5, bad])
    cut(stream, 0)
    assert stored(stream, [(0, 0), (0, 1), (0, 2)]) == [1, 1, 1]


# ---- masses and weights --------------------------------------------------------------------------


def powers(stream: Any, items: list[Item], alpha: float) -> np.ndarray:
    return np.array(stored(stream, items), np.float64) ** alpha


def test_a_change_of_alpha_computes_all_masses_again(scenes: Any) -> None:
    scene = scenes(alpha=lambda key: max(0.0, 1 - key / 4), normalize="table")
    stream = scene.streams[0]
    items = [(3, step) for step in range(33)]
    report(stream, items, np.random.default_rng(0).uniform(0.01, 50, 33))
    for key in range(7):
        cut(stream, key)
        check_whole(scene.table, scene.streams)
        rows = scene.table.slots[3, 3] + np.arange(33)
        wanted = powers(stream, items, max(0.0, 1 - key / 4)) * ONE
        assert np.abs(stream.masses.leaves[rows] - wanted).max() <= 1
        assert stream.masses.least == stream.masses.leaves[stream.masses.leaves > 0].min()


@pytest.mark.parametrize("unit", ["step", "trajectory"])
@pytest.mark.parametrize("normalize", ["batch", "table", None])
@pytest.mark.parametrize(("alpha", "beta"), [(0.6, 0.4), (1.0, 1.0), (0.3, 0.0)])
def test_weights_are_those_of_the_formula(
    scenes: Any, normalize: Any, unit: str, alpha: float, beta: float
) -> None:
    """(N * P(i)) ** -beta with P(i) = p_i ** alpha / sum, in float64; divided by the greatest one."""
    lengths = [3] * 12 if unit == "step" else [2] * 36  # 36 items: minima of two levels
    scene = scenes(unit=unit, lengths=lengths, alpha=alpha, beta=beta, normalize=normalize, batch=16)
    stream = scene.streams[0]
    items = [(n, a) for n, steps in enumerate(lengths) for a in range(steps if unit == "step" else 1)]
    report(stream, items, np.random.default_rng(1).uniform(0.5, 30, 36))
    report(stream, items[:5], 0)
    made = cut(stream, 0)
    weights = torch.empty(16)
    words = [int(made.head[word]) for word in (NUMERATOR, DIVISOR, EXPONENT)]
    scene.ops.importance_(weights, made.resolutions.contiguous(), *words)
    share = powers(stream, items, alpha) * np.array([p > 0 for p in stored(stream, items)])
    share /= share.sum()
    everything = (31 * share[5:]) ** -beta
    place = {item: i for i, item in enumerate(items)}
    drawn = [place[int(r[0]), int(r[5]) if unit == "step" else 0] for r in made.resolutions]
    wanted = (31 * share[drawn]) ** -beta
    if normalize is not None:
        wanted /= wanted.max() if normalize == "batch" else everything.max()
        assert weights.max() <= 1
    np.testing.assert_allclose(weights.numpy(), wanted, rtol=1e-6)


def test_beta_follows_its_schedule(scenes: Any) -> None:
    stream = scenes(beta=lambda key: key / 8).streams[0]
    assert [int(cut(stream, key).head[EXPONENT]) for key in range(9)] == [ONE_Q62 // 8 * k for k in range(9)]


def test_many_clamped_updates_are_an_error(scenes: Any) -> None:
    stream = scenes(alpha=1.0, log_size=10_000).streams[0]
    items = [(3, step) for step in range(33)] * 304
    values = np.ones(10_000, np.float32)
    values[:11] = 1e9
    updates = handles(stream, items[:33])
    stream.masses.reports.add_items(np.tile(updates, (304, 1))[:9_999], values[:9_999], 0)
    cut(stream, 0)  # too few to judge
    assert stream.masses.counts[CLAMPED] == 11
    report(stream, [(0, 0)], 1)
    stream.masses.ask(1)
    text = (
        r"stream train: priority \*\* alpha must lie in \[2\^-25, 2\^16\] for all but 0.1% of the updates, "
        r"got '11 of 10000 lie outside'; scale the priorities"
    )
    with pytest.raises(StoreError, match=text):
        stream.take(1)


# ---- saving --------------------------------------------------------------------------------------


def busy(scenes: Any, unit: str) -> tuple[StoreScene, Any]:
    """Return a store with priorities, gone items, waiting changes, and reports that wait on two ranks."""
    scene = scenes(unit=unit, lag=1, alpha=lambda key: 0.9 - 0.1 * key, normalize="table", batch=40, depth=6)
    stream, (table, (other,)) = scene.streams[0], scene.attach(1)
    report(stream, [(2, 3), (3, 9), (0, 0)], [7, 0.25, 3])
    cut(stream, 0, other)
    content.remove(scene.table, [1])
    cut(stream, 1, other)
    scene.add(6)
    content.remove(scene.table, [4])
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
        stream.seek(*position)
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
    content.remove(scene.table, [1, 4])
    with scene.table.lock:
        assert Readers(scene.table).pinned(np.array([1, 4])).tolist() == [False, False]
        scene.table.free(np.array([1, 4]))
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
    saved["log"][:, REPORT_NUMBER] = np.arange(4 * ranks)
    stream.masses.restore(np.arange(5), saved)
    np.testing.assert_array_equal(stream.masses.export(np.arange(5))["log"], saved["log"])
    saved["log"] = np.concatenate([saved["log"], saved["log"][-1:]])
    before = stream.masses.values.copy()
    with pytest.raises(StoreError, match=f"must be at most {4 * ranks}, got {4 * ranks + 1}"):
        stream.masses.restore(np.arange(5), saved)
    assert (stream.masses.values == before).all()


def test_the_resolutions_hold_the_masses(scenes: Any) -> None:
    stream = scenes(batch=300, alpha=1.0).streams[0]
    report(stream, [(3, step) for step in range(33)], np.arange(1, 34))
    made = cut(stream, 0).resolutions
    for number, anchor, mass in made[:, [0, 5, R_MASS]].tolist():
        assert mass == (anchor + 1 if number == 3 else 1) * ONE
