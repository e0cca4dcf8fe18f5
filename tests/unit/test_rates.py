"""Rates, queues and how often a trajectory may be drawn, through a Replay."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import numpy as np
import pytest

from deepspeed_gear import Column, Replay, Schema
from deepspeed_gear.errors import ConfigError, NotReadyError

SCHEMA = Schema([Column("observation", "float32", (2,), "observation", "T+1"), Column("which", "int64")])


def trajectory(number: int, steps: int = 3) -> dict[str, Any]:
    observation = np.full((steps + 1, 2), number, np.float32)
    return {"observation": observation, "which": np.full(steps, number, np.int64)}


def replay(batch: int = 1, sampler: str = "uniform", **table: Any) -> Replay:
    options = {"capacity_steps": 300, "capacity_trajectories": 40, **table}
    section = {
        "tables": {"main": options},
        "sampler": {"kind": sampler},
        "fields": {"which": {}},
        "batch_size": batch,
        "timeout_s": 5.0,
    }
    return Replay(section, schemas={"main": SCHEMA})


def numbers(batch: Any) -> list[int]:
    found: list[int] = batch["which"].tolist()
    return found


@pytest.mark.parametrize("batch", [1, 2, 5, 10])
def test_each_is_drawn_as_often_as_it_may_be(batch: int) -> None:
    """Two times five items: exactly ten draws, whatever the batch; then all of them are gone."""
    with replay(batch, max_times_sampled=2) as found:
        for number in range(5):
            found.add(trajectory(number))
        drawn: Counter[int] = Counter()
        for _ in range(10 // batch):
            assert found.can_sample()
            drawn.update(numbers(found.sample()))
        assert drawn == dict.fromkeys(range(5), 2)
        assert not found.can_sample()
        assert len(found) == 0
        found.writer()
        with pytest.raises(NotReadyError, match=r"ask can_sample\(\) first"):
            found.sample()
        for number in range(5, 10):
            found.add(trajectory(number))
        assert set(numbers(found.sample())) <= set(range(5, 10))


def test_one_draw_is_like_many() -> None:
    """A cut of many samples draws what cuts of one sample draw, though items go in between."""

    def drawn(batch: int) -> list[int]:
        with replay(batch, max_times_sampled=3) as found:
            for number in range(8):
                found.add(trajectory(number))
            return [number for _ in range(24 // batch) for number in numbers(found.sample())]

    assert drawn(1) == drawn(4) == drawn(24)


def test_a_queue_gives_each_once_in_order() -> None:
    with replay(2, "fifo", rate={"queue": 6}) as found:
        for number in range(6):
            found.add(trajectory(number))
        with pytest.raises(NotReadyError, match="sample, or raise"):  # this process samples: it must not wait
            found.add(trajectory(6))
        assert numbers(found.sample()) == [0, 1]
        found.add(trajectory(6))
        found.add(trajectory(7))
        with pytest.raises(NotReadyError):
            found.add(trajectory(8))
        assert [numbers(found.sample()) for _ in range(3)] == [[2, 3], [4, 5], [6, 7]]
        assert not found.can_sample()
        found.add(trajectory(8))
        assert not found.can_sample(), "a batch needs two"
        found.add(trajectory(9))
        assert numbers(found.sample()) == [8, 9]


def test_the_rate_is_kept_on_both_sides() -> None:
    """One item, two samples, give or take 6, from 4 items on."""
    rate = {"min_size": 4, "samples_per_insert": 2.0, "error_buffer": 6.0}
    with replay(2, rate=rate) as found:
        for number in range(3):
            found.add(trajectory(number))
            assert not found.can_sample()
        found.add(trajectory(3))
        for _ in range(3):  # 4 * 2 - S >= 8 - 6
            assert found.can_sample()
            found.sample()
        assert not found.can_sample()
        added = 0
        while True:
            try:
                found.add(trajectory(added + 4))
            except NotReadyError:
                break
            added += 1
        assert (added + 4) * 2 - 6 == 14  # at most 8 + 6
        assert found.can_sample()


def test_the_longest_gets_through_with_the_least_buffer() -> None:
    """One item of `min_size` is missing, and who adds has nothing but the longest trajectories."""
    section: dict[str, Any] = {
        "tables": {"main": {"capacity_steps": 300, "max_length": 20}},
        "sampler": {"kind": "uniform", "unit": "step"},
        "fields": {"which": {}},
        "batch_size": 2,
    }
    rate = {"min_size": 10, "samples_per_insert": 1.0}
    section["tables"]["main"]["rate"] = {**rate, "error_buffer": 18.9}
    with pytest.raises(ConfigError, match="must be at least 19"):
        Replay(section, schemas={"main": SCHEMA})
    section["tables"]["main"]["rate"] = {**rate, "error_buffer": 19.0}
    with Replay(section, schemas={"main": SCHEMA}) as found:
        found.add(trajectory(0, 9))
        found.add(trajectory(1, 20))
        assert found.can_sample()


def test_fewer_than_the_least_block_again() -> None:
    with replay(rate={"min_size": 3}) as found:
        ids = [found.add(trajectory(number)) for number in range(3)]
        found.sample()
        found.remove(ids[:1])
        assert not found.can_sample()
        found.add(trajectory(9))
        assert found.can_sample()


def test_who_waits_goes_on_when_items_come() -> None:
    with replay(rate={"min_size": 2, "timeout_s": 10.0}) as found:
        found.add(trajectory(0))
        adder = threading.Timer(1.0, lambda: found.add(trajectory(1)))
        adder.start()
        found.sample()
        adder.join()
        assert found.streams["train"].gate_wait.total_s > 0.2


def test_a_wait_ends_with_an_error() -> None:
    with replay(rate={"min_size": 2, "timeout_s": 0.2}) as found:
        found.add(trajectory(0))
        with pytest.raises(NotReadyError, match=r"must be filled within 0\.2"):
            found.sample()
        found.add(trajectory(1))
        found.sample()


@pytest.mark.parametrize("kind", ["rate", "times"])
def test_a_restart_keeps_the_counters(kind: str, tmp_path: Any) -> None:
    rate = {"min_size": 2, "samples_per_insert": 2.0, "error_buffer": 3.0}
    options: dict[str, Any] = {"rate": rate} if kind == "rate" else {"max_times_sampled": 2}

    def rest(found: Replay) -> list[int]:
        drawn = []
        while found.can_sample():
            drawn += numbers(found.sample())
        return drawn

    with replay(**options) as first:
        for number in range(3):
            first.add(trajectory(number))
        first.sample()
        first.sample()
        state = first.save(tmp_path / "saved")
        wanted = rest(first)
    assert len(wanted) == {"rate": 3, "times": 4}[kind]
    with replay(**options) as second:
        second.load(tmp_path / "saved", state)
        assert rest(second) == wanted


@pytest.mark.parametrize(
    ("sampler", "table", "text"),
    [
        ("uniform", {"rate": {"queue": 4}}, 'needs sampler.kind = "fifo"'),
        ("fifo", {"rate": {"queue": 1}}, "must be at least a global batch"),
        ("fifo", {"rate": {"queue": 9, "min_size": 3}}, "rate.min_size must not be given together with"),
        ("uniform", {"rate": {"error_buffer": 3.0}}, "must not be given without"),
        ("uniform", {"rate": {"samples_per_insert": 0.0}}, "samples_per_insert must be a finite number > 0"),
        ("uniform", {"rate": {"samples_per_insert": 4.0, "error_buffer": 2.9}}, "must be at least 3"),
        ("uniform", {"rate": {"min_size": 41}}, "must be at most what the table holds"),
        ("uniform", {"remove": "keep_best"}, 'must be given with remove = "keep_best"'),
        ("uniform", {"keep_best": "which"}, 'must be given with remove = "keep_best"'),
        ("uniform", {"remove": "lowest_priority"}, "without priorities"),
    ],
)
def test_wrong_options_are_refused(sampler: str, table: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        replay(2, sampler, **table)
