"""What statistics() tells about the draws, against plain loops over the batches themselves."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gear_support import SCHEMA, config_of, trajectory, write_dataset
from process_support import exit_status, in_child
from replay_support import filled, streams_of

from deepspeed_gear import Batch, Replay
from deepspeed_gear.ops.records import Resolution, Slot
from deepspeed_gear.sampling.sample_counts import sample_ages

LENGTHS = (1, 2, 5, 9, 14, 3)
STEPS = {"kind": "prioritized", "unit": "step", "beta": 1.0}


def replay_of(count: int = len(LENGTHS), **options: Any) -> Replay:
    section = {"batch_size": 16, "fields": {"code": {}}, "count_draws": True, **options}
    return filled(LENGTHS[:count], **section)


def items_of(batch: Batch, by_step: bool) -> list[tuple[int, ...]]:
    anchors = batch.anchor.tolist() if by_step else [0] * batch.num_samples
    return list(zip(batch.trajectory_id.tolist(), anchors, strict=True))


def effective(batch: Batch) -> float:
    weight = batch.is_weight.double()
    return float(weight.sum() ** 2 / (weight**2).sum() / len(weight))


@pytest.mark.parametrize(
    "sampler",
    [
        {"unit": "step"},
        {"unit": "trajectory"},
        {"unit": "step", "anchors": {"every": 2}},
        {"kind": "epoch", "unit": "step"},
        {"kind": "fifo", "unit": "step"},
        {"kind": "recent", "newest": 4},
        STEPS,
        {**STEPS, "unit": "trajectory", "normalize": None},
        {"kind": "top_k", "unit": "step"},
    ],
    ids=str,
)
def test_against_a_loop(sampler: dict[str, Any]) -> None:
    by_step = sampler["unit"] == "step" if "unit" in sampler else False
    drawn = Counter()
    batches = []
    with replay_of(sampler=sampler) as replay:
        for _ in range(7):
            batch = replay.sample().clone()
            batches.append(batch)
            drawn.update(items_of(batch, by_step))
            if sampler.get("kind") in ("prioritized", "top_k"):
                replay.update_priorities(batch, 0.25 + torch.rand(16) * 20)
        found = replay.statistics()
        newest = replay.take_metrics()
        last = batches[-streams_of(replay)["train"].spec.depth :]
        assert len(last) == 4
    assert found["effective_samples"] == pytest.approx(
        np.mean([effective(b) for b in last]), rel=1e-6
    )
    doubles = [1 - len(set(items_of(b, by_step))) / 16 for b in last]
    assert found["duplicates"] == pytest.approx(np.mean(doubles))
    assert newest["effective_samples"] == pytest.approx(effective(batch), rel=1e-6)
    assert newest["duplicates"] == pytest.approx(doubles[-1])
    assert newest["age"] == pytest.approx(float(5 - batch.trajectory_id.double().mean()))
    assert all(isinstance(value, float) for value in newest.values())
    table = found["drawn"]["main"]
    ages = 5 - torch.cat([b.trajectory_id for b in last])
    assert table["age"]["trajectories"] == {
        "mean": float(ages.double().mean()),
        "max": float(ages.max()),
    }
    assert table["age"]["batches"] == {"mean": 4.5, "max": 6.0}
    if sampler.get("kind") == "recent":
        items = [(number, 0) for number in range(2, 6)]
    elif by_step:
        every = sampler["anchors"]["every"] if "anchors" in sampler else 1
        items = [(n, step) for n, steps in enumerate(LENGTHS) for step in range(0, steps, every)]
    else:
        items = [(n, 0) for n in range(6)]
    counts = np.array([drawn[item] for item in items])
    assert counts.sum() == 7 * 16
    wanted = {"mean": counts.mean(), "max": counts.max(), "never": (counts == 0).mean()}
    assert table["draws"] == pytest.approx(wanted)


def test_histogram_of_priorities() -> None:
    with replay_of(sampler={**STEPS, "unit": "trajectory"}) as replay:
        replay.set_priorities(range(6), [0.0, 0.25, 0.26, 1.0, 1.9, 1000.0])
        replay.sample()
        found = replay.statistics()
        assert found["drawn"]["main"]["priorities"] == {-2: 2, 0: 2, 9: 1}
    for counts in (False, True):  # before the first batch
        with replay_of(sampler={"unit": "step"}, count_draws=counts) as replay:
            found = replay.statistics()
            assert found["effective_samples"] is found["duplicates"] is None
            assert found["drawn"]["main"] == {"age": None, "priorities": None, "draws": None}
            assert "age" not in replay.take_metrics()


def test_ages_in_global_batches() -> None:
    with replay_of(count=1, sampler={"kind": "lifo"}, batch_size=1) as replay:
        for number in range(1, 5):
            replay.sample()
            replay.sample()
            replay.add(trajectory(number, 3))
        replay.sample()
        age = replay.statistics()["drawn"]["main"]["age"]
        # Drawn: batch 5 of trajectory 2 (born at 4), 6 and 7 of 3 (6), 8 of 4 (8).
        assert age["batches"] == {"mean": 0.5, "max": 1.0}
        assert age["trajectories"] == {"mean": 1.0, "max": 2.0}


def test_ages_over_nodes() -> None:
    """A node knows the ages of the samples that it stores, by its own counter of ids."""
    slots = np.zeros((4, Slot.NUM_WORDS), np.int64)
    slots[:, Slot.GENERATION] = (5, 6, 7, 8)
    drawn = ((0, 5, 9), (3, 8, 15), (3, 7, 1), (4, 0, 14))  # slot, generation and id
    resolutions = np.zeros((len(drawn), Resolution.NUM_WORDS), np.int64)
    words = [Resolution.SLOT, Resolution.GENERATION, Resolution.ID]
    resolutions[:, words] = drawn
    # Node 1 of 2 has received 8 trajectories: 1, 3, ..., 15. The third one was evicted, and the
    # fourth lies on node 0.
    assert sample_ages(resolutions, slots, 8, 2).tolist() == [3, 0]
    assert sample_ages(resolutions, slots, 16, 1).tolist() == [6, 0, 14, 1]
    assert sample_ages(resolutions[3:], slots, 0, 2).tolist() == []


def test_a_new_trajectory_begins_with_no_draws() -> None:
    tables = {"main": {"capacity_steps": 14, "capacity_trajectories": 2}}
    with replay_of(count=0, tables=tables) as replay:
        replay.add(trajectory(0, 14))
        replay.sample()
        assert replay.statistics()["drawn"]["main"]["draws"]["max"] == 16
        replay.remove([0])
        for _ in range(5):
            with pytest.raises(Exception, match="must hold at least one item"):
                replay.sample()
        replay.add(trajectory(1, 14))
        replay.sample()
        assert replay.statistics()["drawn"]["main"]["draws"]["max"] == 16


def test_mixtures() -> None:
    tables = {name: {"capacity_steps": 100, "capacity_trajectories": 8} for name in "ab"}
    shares = {"kind": "mixture", "shares": {"a": 0.25, "b": 0.75}, "of": STEPS}
    section = config_of(
        tables=tables, sampler=shares, fields={"code": {}}, batch_size=16, count_draws=True
    )
    batches = []
    with Replay(section, schemas=dict.fromkeys("ab", SCHEMA)) as replay:
        for number, steps in enumerate(LENGTHS):
            replay.add(trajectory(number, steps), "ab"[number % 2])
        for _ in range(4):
            batches.append(replay.sample().clone())
            replay.update_priorities(batches[-1], 0.1 + torch.rand(16))
        found = replay.statistics()
    assert found["effective_samples"] == pytest.approx(
        np.mean([effective(b) for b in batches]), rel=1e-6
    )
    items = [
        set(zip(b.source.tolist(), b.trajectory_id.tolist(), b.anchor.tolist(), strict=True))
        for b in batches
    ]
    assert found["duplicates"] == pytest.approx(np.mean([1 - len(some) / 16 for some in items]))
    assert found["drawn"]["a"]["draws"]["mean"] == pytest.approx(16 / (1 + 5 + 14))
    assert found["drawn"]["b"]["draws"]["mean"] == pytest.approx(48 / (2 + 9 + 3))


def test_a_data_set_has_no_age_in_batches(tmp_path: Path) -> None:
    data = write_dataset(tmp_path / "d", LENGTHS)
    with Replay(config_of(data, batch_size=8, fields={"code": {}})) as replay:
        replay.sample()
        assert replay.statistics()["drawn"]["main"]["age"]["batches"] is None


def test_counts_are_saved_and_loaded(tmp_path: Path) -> None:
    with replay_of(sampler=STEPS) as replay:
        for number in (1, 3):
            replay.remove([number])
        for _ in range(4):
            replay.sample()
        state = replay.save(tmp_path)
        before = replay.statistics()["drawn"]
        assert before["main"]["draws"]["mean"] == 64 / 23
    with replay_of(count=0, sampler=STEPS) as replay:
        replay.load(tmp_path, state)
        assert replay.statistics()["drawn"]["main"]["draws"] == before["main"]["draws"]
    with replay_of(count=0, sampler=STEPS, count_draws=False) as replay:
        replay.load(tmp_path, state)
        replay.sample()
        state = replay.save(tmp_path / "again")
    with replay_of(count=0, sampler=STEPS) as replay:
        replay.load(tmp_path / "again", state)
        assert replay.statistics()["drawn"]["main"]["draws"]["max"] == 0


def test_processes_count_into_one_table() -> None:
    """A selection is counted by whoever makes it, whatever a dead process has left."""
    with replay_of() as replay:
        replay.sample()
        draws = streams_of(replay)["train"].state.counts
        child = in_child(lambda: draws.count(np.ones((1, 8), np.int64)))  # type: ignore[union-attr]
        assert exit_status(child) == 0
        assert replay.statistics()["drawn"]["main"]["draws"]["mean"] == 17 / 6
