"""Streams of one replay: training, passes, epochs, states that continue them, and prefetched batches."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from gear_support import trajectory, write_dataset
from replay_support import LENGTHS, SPLIT, filled, offline, online, same, split, streams_of, take
from store_support import check_whole

from deepspeed_gear import Batch, Replay
from deepspeed_gear.data.splits import split_of
from deepspeed_gear.errors import CheckpointError, ConfigError, StoreError

# ---- streams -------------------------------------------------------------------------------------


def visited(replay: Replay, stream: str) -> list[tuple[int, int]]:
    found = []
    for batch in replay.iterator(stream):
        assert batch.is_weight.tolist() == batch.valid.float().tolist()
        found += map(tuple, torch.stack([batch.trajectory_id, batch.anchor], 1)[batch.valid].tolist())
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
            first, second = visited(replay, name), visited(replay, name)
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
            assert all(same(plain.sample(), replay.sample()) for _ in range(3))

        check()
        visited(replay, "eval")
        check()
        left = replay.iterator("eval")
        next(left)
        check()
        visited(replay, "test")
        visited(replay, "eval")
        check()


def test_streams_of_a_config(data: Path) -> None:
    text = "stream must be one of train, eval, test, got 'evil'"
    with split(data) as replay, split(data) as other:
        with pytest.raises(ConfigError, match=text):
            replay.iterator("evil")
        assert all(same(batch, other.sample()) for batch in itertools.islice(replay.iterator(), 3))


def test_epochs_over_accumulated_batches(data: Path) -> None:
    options = {"sampler": {"kind": "epoch", "unit": "step"}, "micro_batch_size": 5, "batch_size": 15}
    with offline(data, **options, gradient_accumulation_steps=3) as replay:
        found: dict[int, Counter[tuple[int, int]]] = {}
        for batch in take(replay, 3 * sum(LENGTHS) // 5):
            for e, i, a in torch.stack([batch.epoch, batch.trajectory_id, batch.anchor], 1).tolist():
                found.setdefault(e, Counter())[i, a] += 1
        assert found[0] == found[1] == Counter((i, s) for i, n in enumerate(LENGTHS) for s in range(n))
        assert replay.take_metrics()["epoch"] in (2.0, 3.0)


# ---- state ---------------------------------------------------------------------------------------


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
    with offline(other) as replay, pytest.raises(CheckpointError, match="use the data set that the"):
        replay.load_state_dict(state)


# ---- prefetch ------------------------------------------------------------------------------------


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


def test_an_error_of_a_transform_is_not_swallowed(data: Path) -> None:
    def transform(batch: Batch, keys: torch.Tensor) -> Batch:
        if 48 <= int(batch.sample_number[0]) < 64 and not failed:
            failed.append(1)
            raise ZeroDivisionError("the fourth batch")
        return batch

    failed: list[int] = []
    with offline(data) as plain, offline(data, prefetch=2) as replay:
        replay.transform = transform
        assert all(same(plain.sample(), replay.sample()) for _ in range(3))
        with pytest.raises(ZeroDivisionError, match="the fourth batch"):
            replay.sample()
        assert all(same(plain.sample(), replay.sample()) for _ in range(3))


def test_adding_while_batches_are_prepared() -> None:
    with online(prefetch=4, tables={"main": {"capacity_steps": 400, "capacity_trajectories": 20}}) as replay:
        for number in range(200):
            if len(replay) == 15:
                replay.remove([number - 15])
            replay.add(trajectory(number, 1 + number % 9))
            batch = replay.sample()
            assert torch.equal(batch["task"], batch.trajectory_id)
            assert torch.equal(batch["code"] // 1000, batch.trajectory_id)
        check_whole(replay.tables["main"], list(streams_of(replay).values()))


# ---- transform -----------------------------------------------------------------------------------


def test_a_transform_sees_keys_of_samples(data: Path) -> None:
    seen: list[torch.Tensor] = []

    def transform(batch: Batch, keys: torch.Tensor) -> Batch:
        seen.append(keys.clone())
        batch["noisy"] = batch["code"] + (keys % 7)[:, None]
        return batch

    with split(data) as replay:
        replay.transform = transform
        first = replay.sample()
        assert torch.equal(first["noisy"] - first["code"], (seen[0] % 7)[:, None].expand(-1, 4))
        replay.sample()
        next(replay.iterator("eval"))
        assert seen[0].dtype == torch.int64
        keys = torch.cat(seen)
        assert len(keys.unique()) == len(keys)
    with split(data, seed=1) as replay:
        replay.transform = transform
        replay.sample()
        assert not torch.equal(seen[-1], seen[0])
