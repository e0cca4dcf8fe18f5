"""Compaction: random lengths, every removal rule, and rows that say whose they are."""

from typing import Any

import numpy as np
import pytest
from gear_support import STEP, trajectory
from hypothesis import given, settings
from hypothesis import strategies as st
from store_support import StoreScene, check_whole, priority_rule, stream_spec

from deepspeed_gear.errors import NotReadyError
from deepspeed_gear.ops.records import Slot, SlotState
from deepspeed_gear.store.records import Control, Refusal, SlotRetention
from deepspeed_gear.store.retention import Retention
from deepspeed_gear.store.table_spec import RETURN_TO_GO, spare_rows_for
from deepspeed_gear.timeouts import Context
from deepspeed_gear.writer.inserter import Inserter

RULES = ("fifo", "lifo", "uniform", "lowest_priority", "keep_best")
LONGEST = 12


def scene_of(removal: Any = "uniform", **options: Any) -> StoreScene:
    """Make a store of 60 rows, of which this process alone is read."""
    column = "task" if removal == "keep_best" else None
    rule = priority_rule(initial=0.5, normalize="table", alpha=1.0)
    spec = stream_spec(batch=16, unit="step", priorities=rule, name="train")
    sizes = {"num_slots": 20, "num_rows": 60, "spare_rows": LONGEST + 1, **options}
    return StoreScene([spec], retention=Retention(removal, column), **sizes)


def inserter(scene: StoreScene) -> Inserter:
    return Inserter(scene.table, Context(timeout_s=0.0))


def priority_of(number: int, step: int) -> float:
    return 1.0 + number % 50 + step / 64


def check_rows(scene: StoreScene) -> None:
    """Every row, and what is derived from it, is of the trajectory that says to lie there."""
    table = scene.table
    for slot in np.nonzero(table.slots[:, Slot.STATE] == SlotState.COMMITTED)[0].tolist():
        number = int(table.slots[slot, Slot.ID])
        steps = int(table.slots[slot, Slot.NUM_STEPS])
        wanted = trajectory(number, steps)
        rows = table.rows(slot)
        assert all(np.array_equal(rows[name], wanted[name]) for name in rows), number
        first = int(table.slots[slot, Slot.FIRST_ROW])
        returns = wanted["reward"][::-1].cumsum()[::-1]
        assert np.array_equal(table.columns[RETURN_TO_GO][first : first + steps], returns)


def take(scene: StoreScene, key: int) -> np.ndarray:
    """Return what a selection draws, checked to be what is stored. [B, 8], int64."""
    stream = scene.streams[0]
    table = scene.table
    stream.state.ask(key)
    records = np.array(stream.get(key).resolutions.numpy())
    check_drawn(scene, records)
    assert (table.slots[records[:, 1], Slot.STATE] == SlotState.COMMITTED).all()
    return records


def check_drawn(scene: StoreScene, records: np.ndarray) -> None:
    codes = scene.table.columns["code"][records[:, 3] + records[:, 5]]
    assert (codes == records[:, 0] * STEP + records[:, 5]).all()


def set_priorities(scene: StoreScene, records: np.ndarray) -> dict[tuple[int, int], float]:
    """Report the priorities of what was drawn."""
    items = [(int(r[0]), int(r[5])) for r in records]
    values = np.array([priority_of(*item) for item in items], np.float32)
    scene.streams[0].masses.reports.add_items(records[:, [1, 2, 5]], values, np.arange(len(items)))
    return dict(zip(items, values.tolist(), strict=True))


def check_priorities(scene: StoreScene, known: dict[tuple[int, int], float]) -> None:
    """Each step has the priority that was reported for it, or the first one."""
    masses = scene.streams[0].masses
    table = scene.table
    for slot in np.nonzero(masses.applied * (table.slots[:, Slot.STATE] == SlotState.COMMITTED))[
        0
    ].tolist():
        number, first, steps = table.slots[slot, [Slot.ID, Slot.FIRST_ROW, Slot.NUM_STEPS]].tolist()
        wanted = [known.get((number, step), 0.5) for step in range(steps)]
        assert masses.values[first : first + steps].tolist() == wanted


@pytest.mark.parametrize("removal", RULES)
@settings(max_examples=12)
@given(data=st.data())
def test_rows_and_priorities_move_with_their_trajectory(removal: str, data: st.DataObject) -> None:
    spare_rows = data.draw(
        st.sampled_from([LONGEST + 1, 5, 2])
    )  # extents move as a whole, or in pieces
    with scene_of(removal, spare_rows=spare_rows) as scene:
        key = 0
        by = inserter(scene)
        known = dict[Any, float]()
        late: np.ndarray | None = None  # of a selection that is not consumed yet
        for steps in data.draw(st.lists(st.integers(1, LONGEST), min_size=20, max_size=40)):
            try:
                scene.count += 1
                by.add(trajectory(int(scene.table.control[1]), steps))
            except NotReadyError:
                assert late is not None
            check_rows(scene)
            if late is not None:
                check_drawn(scene, late)
            if data.draw(st.booleans()):
                if late is not None:
                    scene.streams[0].release(key - 1)
                late = take(scene, key)
                key = key + 1
                check_priorities(scene, known)
                known.update(set_priorities(scene, late))
            check_whole(scene.table, scene.streams)


@pytest.mark.parametrize(
    ("longest", "spare_rows", "least", "mean"),
    [(40, 41, 0.95, 0.95), (1199, 500, 0.65, 0.86), (1999, 500, 0.45, 0.78)],
)
@pytest.mark.parametrize("removal", RULES[:3])
def test_a_store_of_random_lengths_is_as_full_as_it_can_be(
    removal: str, longest: int, spare_rows: int, least: float, mean: float
) -> None:
    """If trajectories are evicted only until a new one fits, 90% are full, at least 70%; then 83%
    and 51%.
    """
    with scene_of(removal, num_slots=400, num_rows=4000, spare_rows=spare_rows) as scene:
        by = inserter(scene)
        levels = list[float]()
        count, first = (600, 300) if longest == 40 else (300, 50)
        for number, steps in enumerate(
            np.random.default_rng(0).integers(1, longest + 1, count).tolist()
        ):
            by.add(trajectory(number, steps))
            levels.append(1 - int(scene.table.control[Control.FREE_ROWS]) / 4000)
        assert min(levels[first:]) >= least
        assert np.mean(levels[first:]) >= mean
        check_rows(scene)
        check_whole(scene.table, [])


# ---- what is not moved ---------------------------------------------------------------------------


def scattered(**options: Any) -> StoreScene:
    """Make a store of 7 extents of 8 rows, with 8 free rows and gaps of 8 and 4: no run of 9."""
    scene = scene_of("uniform", **options)
    for _ in range(7):
        scene.add(7)
    with scene.table.lock:
        slot = int(scene.table.slots_of(np.array([2]))[0])
        scene.table.extents.retire(slot)
        scene.table.extents.free(slot)
    return scene


def test_moving_lets_nobody_go() -> None:
    with scattered() as scene:
        with scene.table.lock:
            slot = inserter(scene).evictor.reserve(10)
        assert scene.table.slots[slot, Slot.STATE] == SlotState.RESERVED
        assert scene.table.num_trajectories == 6
        check_rows(scene)
        check_whole(scene.table, scene.streams)


@pytest.mark.parametrize("why", ["open", "drawn", "reserved", "cutting"])
def test_what_must_stay_stays(why: str) -> None:
    scene = scattered()
    table = scene.table
    if why == "open":
        table.views["retention"][:, SlotRetention.OPEN] = 1
    elif why == "drawn":
        scene.streams[0].state.last_drawn[:] = 0
    elif why == "reserved":
        table.slots[table.slots[:, Slot.STATE] == SlotState.COMMITTED, Slot.STATE] = (
            SlotState.RESERVED
        )
    elif why == "cutting":
        table.control[Control.SELECTING] = 1
    before = table.slots.copy()
    with table.lock:
        assert table.extents.reserve(11, 10) == Refusal.SCATTERED
        assert not table.extents.handle.make_run(11)
    assert (table.slots == before).all()
    scene.close()


def test_a_table_that_lets_nobody_go_has_no_spare_rows() -> None:
    assert spare_rows_for(Retention(), 1000, 50) == 0
    assert [spare_rows_for(Retention("fifo"), 1000, longest) for longest in (50, 300, None)] == [
        50,
        125,
        125,
    ]
    with scattered(spare_rows=0) as scene, scene.table.lock:
        assert not scene.table.extents.handle.make_run(11)


# ---- which extents -------------------------------------------------------------------------------


CHEAP = 4  # so many rows may move for each one of the run


def laid_out(gaps: list[int], lengths: list[int], can_move: list[bool]) -> StoreScene:
    """Make a store of extents, in turn with gaps; those that cannot move are open."""
    num_rows = sum(gaps) + sum(lengths)
    sizes = {"num_slots": 2 * len(gaps), "num_rows": num_rows, "spare_rows": 4}
    scene = StoreScene([], retention=Retention("fifo"), **sizes)
    extents = scene.table.extents
    between: list[int] = []
    with scene.table.lock:
        for i, gap in enumerate(gaps):
            if gap:
                between.append(extents.reserve(gap, 1))
            if i == len(lengths):
                continue
            slot = extents.reserve(lengths[i], lengths[i] - 1)
            first = extents.slots[slot, Slot.FIRST_ROW]
            scene.table.columns["code"][first : first + lengths[i]] = slot
            extents.commit(slot, lengths[i] - 1, lengths[i], 0, 0)
            extents.retention[slot, SlotRetention.OPEN] = not can_move[i]
        for slot in between:
            extents.free(slot)
    return scene


@settings(max_examples=60)
@given(
    gaps=st.lists(st.integers(0, 6), min_size=1, max_size=9),
    wanted=st.integers(1, 20),
    data=st.data(),
)
def test_the_cheapest_run_is_made(gaps: list[int], wanted: int, data: st.DataObject) -> None:
    """Of neighbouring gaps that suffice: the first cheap ones, else the cheapest."""
    between = len(gaps) - 1
    lengths = data.draw(st.lists(st.integers(2, 9), min_size=between, max_size=between))
    can_move = data.draw(st.lists(st.booleans(), min_size=between, max_size=between))
    if sum(gaps) + sum(lengths) == 0:
        return
    costs = {
        (i, j): sum(lengths[i:j])
        for i in range(len(gaps))
        for j in range(i, len(gaps))
        if sum(gaps[i : j + 1]) >= wanted and all(can_move[i:j])
    }
    ends = {i: min(j for first, j in costs if first == i) for i, _ in costs}
    cheap = [i for i in sorted(ends) if costs[i, ends[i]] <= CHEAP * wanted]
    first = cheap[0] if cheap else min(ends, key=lambda i: (costs[i, ends[i]], i), default=None)
    with laid_out(gaps, lengths, can_move) as scene:
        table = scene.table
        extents = scene.table.extents
        before = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        places = np.cumsum(gaps, dtype=np.int64)[:-1] + before[:-1]
        if first is not None and sum(gaps) - wanted >= table.spec.least_free_rows:
            moved = range(first, ends[first])
            places[moved.start : moved.stop] -= np.cumsum(
                gaps[moved.start : moved.stop], dtype=np.int64
            )
        else:
            first = None
        with table.lock:
            assert extents.handle.make_run(wanted) == (first is not None)
            held = extents.slots[extents.slots[:, Slot.STATE] == SlotState.COMMITTED]
            held = held[held[:, Slot.ID].argsort()]
            assert held[:, Slot.FIRST_ROW].tolist() == places.tolist()
            slots = table.slots_of(held[:, Slot.ID])
            for slot, record in zip(slots.tolist(), held, strict=True):
                rows = slice(record[Slot.FIRST_ROW], record[Slot.FIRST_ROW] + record[Slot.NUM_ROWS])
                assert (table.columns["code"][rows] == slot).all()
            extents.retention[:, SlotRetention.OPEN] = 0
            assert first is None or extents.reserve(wanted, 1) >= 0
