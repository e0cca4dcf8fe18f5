"""Streams of a replay, of a table or a mixture: passes, states that continue them, prefetched
batches.
"""

import itertools
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gear_support import SCHEMA, trajectory, wait_until, write_dataset
from replay_support import (
    LENGTHS,
    SPLIT,
    filled,
    offline,
    online,
    parts_of,
    same,
    split,
    streams_of,
    take,
)
from store_support import check_whole

from deepspeed_gear import Batch, Replay, Schema
from deepspeed_gear.data.splits import split_of
from deepspeed_gear.errors import CheckpointError, ConfigError, DataError, StoreError


def visited(replay: Replay, stream: str) -> list[tuple[int, int]]:
    found = []
    for batch in replay.iterator(stream):
        assert batch.is_weight.tolist() == batch.valid.float().tolist()
        found += map(
            tuple, torch.stack([batch.trajectory_id, batch.anchor], 1)[batch.valid].tolist()
        )
    return found


@pytest.mark.parametrize(
    ("kind", "unit"),
    [*itertools.product(("uniform", "epoch"), ("step", "trajectory")), ("length", "trajectory")],
)
def test_a_split_is_visited_once(data: Path, unit: str, kind: str) -> None:
    members = split_of(np.arange(40), SPLIT)
    with split(data, sampler={"kind": kind, "unit": unit}) as replay:
        state = replay.state_dict()
        for index, name in enumerate(sorted(SPLIT)):
            ids = np.nonzero(members == index + 1)[0].tolist()
            first = visited(replay, name)
            second = visited(replay, name)
            assert first == second
            replay.load_state_dict(state)
            assert visited(replay, name) == first
            if unit == "step":
                assert first == [(i, s) for i in ids for s in range(LENGTHS[i])]
            else:
                assert [i for i, _ in first] == ids
        trained = {i for batch in take(replay, 40) for i in batch.trajectory_id.tolist()}
        assert trained
        assert trained <= set(np.nonzero(members == 0)[0].tolist())


@pytest.mark.parametrize("prefetch", [0, 2])
def test_evaluation_does_not_disturb_training(data: Path, prefetch: int) -> None:
    with split(data) as plain, split(data, prefetch=prefetch) as replay:

        def check() -> None:
            ahead = itertools.islice(replay.iterator(), 3)
            assert all(same(plain.sample(), batch) for batch in ahead)

        check()
        visited(replay, "eval")
        check()
        left = replay.iterator("eval")
        next(left)
        check()
        visited(replay, "test")
        visited(replay, "eval")
        check()
        with pytest.raises(
            ConfigError, match="stream must be one of train, eval, test, got 'evil'"
        ):
            replay.iterator("evil")


@pytest.mark.parametrize("prefetch", [0, 3])
@pytest.mark.parametrize("kind", ["uniform", "epoch"])
def test_a_state_continues(data: Path, kind: str, prefetch: int) -> None:
    options = {"sampler": {"kind": kind, "unit": "step"}, "seed": 5}
    with offline(data, **options) as replay:
        wanted = take(replay, 30)
    with offline(data, prefetch=prefetch, **options) as replay:
        take(replay, 20)
        state = json.loads(json.dumps(replay.state_dict()))
        take(replay, 4)
        replay.load_state_dict(state)
        assert all(same(a, b) for a, b in zip(wanted[20:24], take(replay, 4), strict=True))
    with offline(data, **options, prefetch=3 - prefetch) as replay:
        replay.load_state_dict(state)
        assert replay.state_dict() == state
        assert all(same(a, b) for a, b in zip(wanted[20:], take(replay, 10), strict=True))


def test_a_state_counts_whole_global_batches(data: Path) -> None:
    options = {"micro_batch_size": 4, "batch_size": 12, "gradient_accumulation_steps": 3}
    with offline(data, **options) as replay:
        wanted = take(replay, 9)
        assert replay.state_dict()["train"]["main"]["batches"] == 3
        replay.sample()
        state = replay.state_dict()
        words = {"batches": 3, "samples": 36, "epoch": 0, "epoch_first": 0, "epoch_size": 0}
        assert state["train"] == {"main": words}
        again = replay.sample().clone()
        replay.load_state_dict(state)
        assert same(take(replay, 2)[1], again)
    with offline(data, batch_size=12) as replay:  # the same global batches in one piece
        replay.load_state_dict(state)
        take(replay, 1)
        assert replay.state_dict()["train"]["main"]["batches"] == 4
    assert [n for b in wanted for n in b.sample_number.tolist()] == [
        j for k in range(3) for m in range(3) for j in range(12 * k + m, 12 * k + 12, 3)
    ]


def test_states_of_other_runs_are_refused(data: Path, tmp_path: Path) -> None:
    with offline(data) as replay, offline(data) as plain:
        state = replay.state_dict()
        for change, text in (
            ({"format": 99}, "the gear state must have format 2, got 99"),
            ({"data": {"main": "0123"}}, "the gear state must be of the data that this run reads"),
        ):
            with pytest.raises(CheckpointError, match=text):
                replay.load_state_dict({**state, **change})
        assert same(replay.sample(), plain.sample())  # nothing has changed
    for change in ({"seed": 1}, {"sampler": {"kind": "length"}}, {"fields": {"code": {}}}):
        text = "the gear state must be of the same seed, tables, sampler, fields and n_step"
        with offline(data, **change) as replay, pytest.raises(CheckpointError, match=text):
            replay.load_state_dict(state)
    other = write_dataset(tmp_path / "other", LENGTHS[:-1])
    with (
        offline(other) as replay,
        pytest.raises(CheckpointError, match="use the data set that the"),
    ):
        replay.load_state_dict(state)


@pytest.mark.parametrize("accumulation", [1, 3])
def test_prefetched_batches_are_the_same(data: Path, accumulation: int) -> None:
    options = {"micro_batch_size": 4, "gradient_accumulation_steps": accumulation}
    options["batch_size"] = 4 * accumulation
    with offline(data, **options) as plain, offline(data, **options, prefetch=3) as ahead:
        for _ in range(30):
            assert same(plain.sample(), ahead.sample())
            assert plain.state_dict()["train"] == ahead.state_dict()["train"]


def test_an_error_of_the_thread_reaches_sample() -> None:
    with online(prefetch=2) as replay, filled([5]) as plain:
        for _ in range(2):
            with pytest.raises(StoreError, match="must hold at least one item"):
                replay.sample()
        replay.add(trajectory(0, 5))
        assert all(same(replay.sample(), plain.sample()) for _ in range(3))


def test_prepared_batches_outlive_a_pause() -> None:
    """As of a save over several nodes: their rows are free, and hold other trajectories by then."""
    tables = {"main": {"capacity_steps": 40, "capacity_trajectories": 8, "remove": "fifo"}}
    with filled([5] * 8, prefetch=2, tables=tables) as replay:
        replay.sample()
        consumed = streams_of(replay)["train"].state.consumed
        wait_until(lambda: consumed[0] == 4, "preparing")
        for number in range(8, 16):
            replay.add(trajectory(number, 5))
        parts_of(replay).stop_prefetching()
        for _ in range(5):
            batch = replay.sample()
            assert torch.equal(batch["task"], batch.trajectory_id)


def test_adding_while_batches_are_prepared() -> None:
    with online(
        prefetch=4, tables={"main": {"capacity_steps": 400, "capacity_trajectories": 20}}
    ) as replay:
        for number in range(200):
            if len(replay) == 15:
                replay.remove([number - 15])
            replay.add(trajectory(number, 1 + number % 9))
            batch = replay.sample()
            assert torch.equal(batch["task"], batch.trajectory_id)
            assert torch.equal(batch["code"] // 1000, batch.trajectory_id)
        check_whole(replay.tables["main"], list(streams_of(replay).values()))


def test_a_transform_gets_a_word_for_each_sample(data: Path) -> None:
    seen: list[torch.Tensor] = []

    def transform(batch: Batch, words: torch.Tensor) -> Batch:
        seen.append(words.clone())
        batch["noisy"] = batch["code"] + (words % 7)[:, None]
        return batch

    with split(data) as replay, split(data, seed=1) as other:
        replay.transform = other.transform = transform
        first = replay.sample()
        assert torch.equal(first["noisy"] - first["code"], (seen[0] % 7)[:, None].expand(-1, 4))
        replay.sample()
        next(replay.iterator("eval"))
        other.sample()
    words = torch.cat(seen)
    assert words.dtype == torch.int64
    assert len(words.unique()) == len(words)


# ---- several tables ------------------------------------------------------------------------------

STEPS = {"kind": "prioritized", "unit": "step"}
ROOM = {"capacity_steps": 1000, "capacity_trajectories": 50}


def mixture(
    of: dict[str, Any], shares: dict[str, Any] | None = None, **options: Any
) -> dict[str, Any]:
    sampler = {"kind": "mixture", "shares": shares or {"a": 0.25, "b": 0.75}, "of": of}
    return {"tables": {"a": ROOM, "b": ROOM}, "sampler": sampler, "batch_size": 16, **options}


def mixed(config: dict[str, Any], num_trajectories: int = 10) -> Replay:
    replay = Replay(config, schemas={"a": SCHEMA, "b": SCHEMA})
    for offset, table in ((0, "a"), (100, "b")):
        for number in range(num_trajectories):
            replay.add(trajectory(offset + number, 1 + number), table)
    return replay


def test_rows_come_from_the_named_table() -> None:
    with mixed(mixture({"unit": "step"})) as replay:
        assert len(replay) == 20
        for _ in range(5):
            batch = replay.sample()
            assert batch.source.tolist() == [0] * 4 + [1] * 12
            assert (batch["task"] == batch.trajectory_id + 100 * batch.source).all()
            assert batch.probability.tolist() == pytest.approx([0.25 / 55] * 4 + [0.75 / 55] * 12)


@pytest.mark.parametrize("prefetch", [0, 3])
def test_a_share_below_one_sample_is_drawn(prefetch: int) -> None:
    """Probabilities are those of the share, which a schedule changes."""
    shares = {"a": {"linear": [0.0, 0.05, 40]}, "b": {"linear": [1.0, 0.95, 40]}}
    with mixed(mixture({"unit": "step"}, shares, prefetch=prefetch)) as replay:
        batches = [replay.sample().clone() for _ in range(60)]
    known = np.minimum(np.arange(60) / 40, 1.0) * 0.05
    drawn = np.cumsum([int((batch.source == 0).sum()) for batch in batches])
    assert (np.abs(drawn - 16 * np.cumsum(known)) < 1).all()
    assert drawn[-1] > 10
    of_table = torch.tensor([known[30], 1 - known[30]], dtype=torch.float64)
    assert torch.allclose(batches[30].probability, of_table[batches[30].source] / 55)


def test_epochs_visit_each_item_of_each_table_once() -> None:
    with mixed(mixture({"kind": "epoch"}, gradient_accumulation_steps=4)) as replay:
        seen: Counter[tuple[int, int, int]] = Counter()
        for _ in range(100):
            batch = replay.sample()
            seen.update(
                map(
                    tuple, torch.stack([batch.source, batch.epoch, batch.trajectory_id], 1).tolist()
                )
            )
        assert replay.take_metrics()["epoch"] in (9.0, 10.0)  # of the first table
    assert set(seen.values()) == {1}
    for place in ((0, 0), (1, 28)):
        assert sum((source, epoch) == place for source, epoch, _ in seen) == 10


@pytest.mark.parametrize("in_parts", [False, True])
def test_priorities_go_to_the_tables_they_are_of(in_parts: bool) -> None:
    with mixed(mixture(STEPS)) as replay:
        batch = replay.sample()
        values = 1 + batch.source + batch.trajectory_id.float()
        bad = torch.where(torch.arange(16) == 15, -1, values + 9)
        with pytest.raises(
            DataError, match="must be finite and at least 0"
        ):  # of one table: changes none
            replay.update_priorities(batch, bad)
        parts = (
            [batch[batch.source == 1], Batch.cat([batch[2:4], batch[:2]])] if in_parts else [batch]
        )
        for part in parts:
            replay.update_priorities(part, values[part.sample_index])
        replay.sample()
        for table, name in enumerate("ab"):
            mine = batch[batch.source == table]
            found = replay.priorities(mine.trajectory_id, mine.anchor, name)
            assert (found == values[batch.source == table]).all()
        assert replay.statistics()["priorities_applied"] == 16
        with pytest.raises(ConfigError, match="table must be given where there are several"):
            replay.priorities([0], [0])


def test_an_empty_table_matters_when_it_has_a_share() -> None:
    shares = {"a": lambda number: 0.5 * (number >= 2), "b": lambda number: 1 - 0.5 * (number >= 2)}
    with mixed(mixture({}, shares), 0) as replay:
        replay.add(trajectory(0, 3), "b")
        for _ in range(2):
            assert replay.sample().source.unique().tolist() == [1]
        with pytest.raises(
            StoreError, match="table a must hold at least one item that the sampler admits"
        ):
            replay.sample()
        replay.add(trajectory(0, 3), "a")
        assert replay.sample().source.tolist() == [0] * 8 + [1] * 8


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_checkpoint_continues_all_tables(tmp_path: Path, prefetch: int) -> None:
    def follow(replay: Replay, count: int) -> list[list[int]]:
        found = []
        for _ in range(count):
            batch = replay.sample()
            found.append((1000 * batch.source + 100 * batch.trajectory_id + batch.anchor).tolist())
            replay.update_priorities(batch, 1 + (batch.trajectory_id * 7 + batch.anchor) % 5)
        return found

    config = mixture(STEPS, {"a": 0.05, "b": 0.95}, prefetch=prefetch)
    with mixed(config) as replay, mixed(config, 0) as loaded:
        follow(replay, 5)
        loaded.load(tmp_path, replay.save(tmp_path))
        assert follow(loaded, 6) == follow(replay, 6)


def test_tables_must_agree_in_what_is_read() -> None:
    other = Schema([replace(SCHEMA["observation"], dtype="float64"), *list(SCHEMA)[1:]])
    with pytest.raises(
        ConfigError, match=r"fields\.observation must have the same column in tables a and b"
    ):
        Replay(mixture({}), schemas={"a": SCHEMA, "b": other})
    with Replay(mixture({}, fields={"reward": {}}), schemas={"a": SCHEMA, "b": other}) as replay:
        assert [field.name for field in replay.fields] == ["reward"]


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_a_failed_transform_comes_again_within_a_global_batch(prefetch: int) -> None:
    calls = [0]

    def transform(batch: Batch, _: torch.Tensor) -> Batch:
        calls[0] += 1
        if calls[0] == 2:
            raise ValueError("not this time")
        return batch

    config = mixture(STEPS, gradient_accumulation_steps=4, timeout_s=5.0)
    with mixed(config) as plain, mixed({**config, "prefetch": prefetch}) as replay:
        replay.transform = transform
        assert same(replay.sample(), plain.sample())
        with pytest.raises(ValueError, match="not this time"):
            replay.sample()
        assert all(same(replay.sample(), plain.sample()) for _ in range(7))
