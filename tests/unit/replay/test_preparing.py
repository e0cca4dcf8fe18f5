"""Batches that a thread prepares, and what a transform does to them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gear_support import trajectory
from replay_support import offline, online, same, split, streams_of, take
from store_support import check_whole

from deepspeed_gear import Batch
from deepspeed_gear.errors import StoreError

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
    with online(prefetch=2) as replay:
        for _ in range(2):
            with pytest.raises(StoreError, match="must hold at least one item"):
                replay.sample()
        replay.add(trajectory(0, 5))
        found = take(replay, 3)
    with online() as replay:
        replay.add(trajectory(0, 5))
        assert all(same(a, b) for a, b in zip(found, take(replay, 3), strict=True))


def test_an_error_of_a_transform_is_not_swallowed(data: Path) -> None:
    def transform(batch: Batch, keys: torch.Tensor) -> Batch:
        if 48 <= int(batch.sample_number[0]) < 64 and not failed:
            failed.append(1)
            raise ZeroDivisionError("the fourth batch")
        return batch

    failed: list[int] = []
    with offline(data) as replay:
        wanted = take(replay, 6)
    with offline(data, prefetch=2) as replay:
        replay.transform = transform
        found = take(replay, 3)
        with pytest.raises(ZeroDivisionError, match="the fourth batch"):
            replay.sample()
        found += take(replay, 3)
        assert all(same(a, b) for a, b in zip(wanted, found, strict=True))


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
