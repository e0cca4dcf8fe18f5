"""Room for new trajectories: who goes, and who is waited for.

Random lengths under every policy: tests/property/test_compaction.py. Deaths:
tests/crash/test_crash.py.
"""

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gear_support import trajectory, wait_until
from process_support import in_child, kill
from store_support import StoreScene, check_whole, priority_rule, reserve, stream_spec

from deepspeed_gear import Replay
from deepspeed_gear.errors import ConfigError, NotReadyError, StoreFullError
from deepspeed_gear.ops.records import Slot, SlotState
from deepspeed_gear.store.records import Control, SlotRetention
from deepspeed_gear.store.retention import Retention
from deepspeed_gear.timeouts import Context
from deepspeed_gear.writer.inserter import Inserter

Make = Callable[..., StoreScene]


@pytest.fixture
def make(scenes: Any) -> Make:
    """Return what makes stores of 5 slots and 20 rows, of which this process alone is read."""

    def of(removal: Any = "fifo", specs: Any = (), **options: Any) -> StoreScene:
        kept = {k: options.pop(k) for k in list(options) if k in Retention.__dataclass_fields__}
        sizes = {"num_slots": 5, "num_rows": 20, **options}
        made: StoreScene = scenes(*specs, **sizes, retention=Retention(removal, **kept))
        return made

    return of


def inserter(scene: StoreScene, timeout_s: float = 0.05, **options: Any) -> Inserter:
    return Inserter(scene.table, Context(timeout_s=timeout_s), **options)


def add(scene: StoreScene, num_steps: int, by: Inserter | None = None, **columns: Any) -> int:
    scene.count += 1
    return (by or inserter(scene)).add({**trajectory(scene.count - 1, num_steps), **columns})


def ids(scene: StoreScene) -> list[int]:
    slots = scene.table.slots
    return sorted(slots[slots[:, Slot.STATE] == SlotState.COMMITTED, Slot.ID].tolist())


def take(scene: StoreScene, number: int) -> np.ndarray:
    """Return a copy of what a selection has drawn; the stream has no other reader. [B,
    8], int64.
    """
    stream = scene.streams[0]
    stream.state.ask(number)
    return np.array(stream.get(number).resolutions.numpy())


# ---- who goes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("removal", "options", "steps", "wanted"),
    [
        ("fifo", {}, [4, 4, 4, 9], [2, 3]),
        ("lifo", {}, [4, 4, 4, 9], [0, 1, 3]),
        ("fifo", {}, [1] * 7, [2, 3, 4, 5, 6]),  # slots are short
        ("fifo", {"num_slots": 9, "num_rows": 200, "max_steps": 8}, [4] * 5, [3, 4]),
        ("fifo", {"num_slots": 9, "num_rows": 200, "max_trajectories": 4}, [4] * 5, [1, 2, 3, 4]),
    ],
)
def test_who_goes_by_age(
    make: Make, removal: str, options: dict[str, int], steps: list[int], wanted: list[int]
) -> None:
    scene = make(removal, **options)
    for number, count in enumerate(steps):
        assert add(scene, count) == number
    assert ids(scene) == wanted


def test_anybody_goes_and_everybody_may(make: Make) -> None:
    gone: set[int] = set()
    scene = make("uniform", lengths=[4] * 4)
    for number in range(4, 60):
        before = ids(scene)
        add(scene, 4)
        went = sorted(set(before) - set(ids(scene)))
        assert len(went) == 1
        gone.add(before.index(went[0]))
        assert ids(scene)[-1] == number
    assert gone == {0, 1, 2, 3}


def test_the_worst_go_first(make: Make) -> None:
    scene = make("keep_best", column="task")
    for value in (5, 3, 3, 9):
        add(scene, 4, task=np.array(value))
    for wanted in ([0, 2, 3, 4], [0, 3, 4, 5], [3, 4, 5, 6]):
        add(scene, 4, task=np.array(8))
        assert ids(scene) == wanted


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64", "int16", "uint8"])
def test_nan_goes_before_every_number(dtype: str) -> None:
    columns = {"code": {"dtype": "int64"}, "value": {"dtype": dtype, "rows": "1"}}
    values = [1.0, -np.inf, np.nan, np.nan]
    wanted = [{0, 2, 3, 4}, {0, 3, 4, 5}, {0, 4, 5, 6}]  # as bad as NaN, and older
    if "float" in dtype:
        columns["value"]["allow_nan"] = True
    else:
        values = [1, 0, 0, 1]
        wanted = [{0, 2, 3, 4}, {0, 3, 4, 5}, {3, 4, 5, 6}]
    table = {
        "capacity_steps": 16,
        "remove": "keep_best",
        "keep_best": "value",
        "schema": {"columns": columns},
    }
    with Replay({"batch_size": 1, "tables": {"main": table}}) as replay:
        store = replay.tables["main"]
        for value in [*values, 1, 1, 1]:
            one = torch.tensor(value).to(getattr(torch, dtype))
            replay.add({"code": np.arange(4), "value": one})
            if store.control[Control.NEXT_ID] > 4:
                slots = store.slots[store.slots[:, Slot.STATE] == SlotState.COMMITTED]
                assert set(slots[:, Slot.ID].tolist()) == wanted.pop(0)


@pytest.mark.parametrize("unit", ["trajectory", "step"])
def test_the_lowest_priority_goes_first(make: Make, unit: str) -> None:
    spec = stream_spec(unit=unit, priorities=priority_rule(initial=1.0))
    scene = make("lowest_priority", [spec], lengths=[4] * 4)
    stream = scene.streams[0]
    take(scene, 0)
    stream.release(0)
    slots = scene.table.slots_of(np.arange(4))
    for number, priority in enumerate((2.0, 0.25, 0.25, 3.0)):
        slot = slots[number]
        row = scene.table.slots[slots[number], Slot.FIRST_ROW]
        stream.masses.values[slice(row, row + 4) if unit == "step" else slot] = priority
    for wanted in ([0, 2, 3, 4], [0, 3, 4, 5], [3, 4, 5, 6], [4, 5, 6, 7], [5, 6, 7, 8]):
        add(scene, 4)  # those that no selection has seen go last, the oldest of them first
        assert ids(scene) == wanted


def test_open_trajectories_stay(make: Make) -> None:
    scene = make("uniform", lengths=[4] * 4)
    scene.table.views["retention"][
        scene.table.slots_of(np.array([0, 1, 3])), SlotRetention.OPEN
    ] = 1
    add(scene, 4)
    assert ids(scene) == [0, 1, 3, 4]


@pytest.mark.parametrize(
    ("removal", "options", "steps"),
    [("none", {}, 16), ("fifo", {}, 20), ("fifo", {"max_steps": 10}, 11)],
)
def test_what_cannot_fit_is_refused(
    make: Make, removal: str, options: dict[str, int], steps: int
) -> None:
    scene = make(removal, lengths=[4], **options)
    with pytest.raises(StoreFullError, match=f"must have {steps + 1} free rows in a run, got"):
        add(scene, steps)
    assert removal != "none" or ids(scene) == [0]
    add(scene, 4)


# ---- who is waited for ---------------------------------------------------------------------------


def full_and_drawn(make: Make) -> StoreScene:
    """Two trajectories fill the store, and the selection 0 has drawn both."""
    scene = make("fifo", [stream_spec(batch=32)], lengths=[9, 9])
    drawn = scene.streams[0].get(0).resolutions[:, 0]
    assert set(drawn.tolist()) == {0, 1}
    return scene


def test_what_was_drawn_stays_until_it_is_consumed(make: Make) -> None:
    scene = full_and_drawn(make)
    before = scene.table.columns["code"].copy()
    with pytest.raises(
        NotReadyError, match=r"must have rows that no selection reads within 0\.05 s"
    ):
        add(scene, 9)
    assert ids(scene) == [1]  # one had to go, and no more than one
    assert (scene.table.slots[:, Slot.STATE] == SlotState.EVICTED).sum() == 1
    assert (scene.table.columns["code"] == before).all()
    scene.streams[0].release(0)
    add(scene, 9)
    assert ids(scene) == [1, 2]
    check_whole(scene.table, scene.streams)


def test_a_living_peer_is_waited_for_and_a_dead_one_is_not(make: Make) -> None:
    scene = full_and_drawn(make)

    def read() -> None:
        scene.attach(1)
        signal.pause()

    child = in_child(read)
    wait_until(lambda: scene.table.peers[1, 0] == child, "attaching")
    scene.streams[0].release(0)
    with pytest.raises(NotReadyError):
        add(scene, 9)
    kill(child)
    add(scene, 9)
    assert ids(scene) == [1, 2]


def test_what_is_being_written_counts(make: Make) -> None:
    """A writer waits for another one's commit rather than to pass the capacity, or to
    find no room.
    """
    scene = make("fifo", max_steps=10)
    table = scene.table
    with table.lock:
        slot = reserve(table, 8)
    with pytest.raises(NotReadyError, match="must have rows that no selection reads within"):
        add(scene, 5)
    table.write(slot, trajectory(0, 8))
    with table.lock:
        table.commit(slot)
    assert add(scene, 5) == 1
    assert ids(scene) == [1]


POLICY = """
from deepspeed_gear.ops.records import Slot
from deepspeed_gear.store.eviction import EvictLowest

class EvictShortest(EvictLowest):
    def values(self, table, pins, slots):
        return table.slots[slots, Slot.NUM_STEPS].astype(float)
"""


def test_a_policy_from_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_policy.py").write_text(POLICY)
    monkeypatch.syspath_prepend(str(tmp_path))
    columns = {"code": {"dtype": "int64"}}
    table = {
        "capacity_steps": 12,
        "remove": "my_policy:EvictShortest",
        "schema": {"columns": columns},
    }
    with Replay({"batch_size": 1, "tables": {"main": table}}) as replay:
        for steps in (4, 5, 2, 3):
            replay.add({"code": np.full(steps, steps)})
        assert sorted(len(found["code"]) for found in replay.read([0, 1, 3])) == [3, 4, 5]
    for name, rule in {
        "my_policy:Absent": "must name what can be imported",
        "json:JSONDecoder": "must name a subclass of EvictionPolicy",
        "oldest": 'must be "none", "fifo", .* or "module:Class"',
    }.items():
        with pytest.raises(ConfigError, match=rf"gear\.tables\.main\.remove {rule}, got '{name}'"):
            Replay({"batch_size": 1, "tables": {"main": {**table, "remove": name}}})
