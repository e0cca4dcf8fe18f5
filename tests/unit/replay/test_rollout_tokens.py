"""Rollout batches of a number of tokens: consecutive parts of the stream of items."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from rollout_support import filled, micros, responses, section

from deepspeed_gear import Replay
from deepspeed_gear.errors import NotReadyError
from deepspeed_gear.replay.rollout import Rollout


@pytest.mark.parametrize("tokens", [60, 149, 700])
@pytest.mark.parametrize("most", [5, 12])
def test_batches_of_tokens_divide_the_stream(tokens: int, most: int) -> None:
    size = {"trajectories": most, "tokens": tokens}
    replay, stored = filled(section(rollout=size, sampler={"kind": "epoch"}), count=97)
    with replay:
        batches: list[list[int]] = []
        while sum(map(len, batches)) < 90:
            rollout = replay.rollout()
            batches.append(rollout.trajectory_id.tolist())
            trained = [i for micro in micros(rollout) for i in micro.trajectory_id.tolist()]
            assert sorted(trained) == sorted(batches[-1])
    whole, _ = filled(section(rollout={"trajectories": most}, sampler={"kind": "epoch"}), count=97)
    with whole:
        stream = [i for _ in range(-(-97 // most) + 1) for i in whole.rollout().trajectory_id.tolist()]
    taken = [i for batch in batches for i in batch]
    assert taken == stream[: len(taken)]
    steps = {i: len(response["tokens"]) for i, response in stored.items()}
    for number, batch in enumerate(batches[:-1]):
        total = sum(steps[i] for i in batch)
        assert total <= tokens
        assert len(batch) == most or total + steps[batches[number + 1][0]] > tokens


def test_batches_of_tokens_have_whole_items_of_all_tables() -> None:
    """Groups stay whole, an item of more steps than a batch is one, tables keep their shares."""
    tables = dict.fromkeys("ab", section()["tables"]["responses"])
    mixture = {"kind": "mixture", "shares": {"a": 0.75, "b": 0.25}, "of": {"kind": "epoch"}}
    config = section(tables=tables, sampler=mixture, rollout={"trajectories": 16, "tokens": 400})
    with Replay(config) as replay:
        for name, count in (("a", 60), ("b", 20)):
            for response in responses(count, seed=count):
                replay.add(response, table=name)
        taken: dict[int, list[int]] = {0: [], 1: []}
        for _ in range(4):
            rollout = replay.rollout()
            assert rollout.num_tokens <= 400
            source = rollout._data.source
            assert abs((source == 1).mean() - 0.25) <= 1 / len(source)
            for table, ids in taken.items():
                ids += rollout.trajectory_id[torch.from_numpy(source == table)].tolist()
        assert all(len(ids) == len(set(ids)) for ids in taken.values())
    table = {**tables["a"], "group": {"column": "prompt", "size": 4}}
    grouped = section(
        tables={"a": table}, sampler={"kind": "fifo", "unit": "group"}, rollout={"groups": 3, "tokens": 120}
    )
    replay, _ = filled(grouped)
    with replay:
        for number in range(8):
            rollout = replay.rollout()
            lengths = np.bincount(rollout.group.numpy(), rollout.lengths.numpy())  # of each item
            assert sum(lengths) <= 120 or len(lengths) == 1
            assert len(rollout.lengths) == 4 * len(lengths)
            if number == 0:
                assert replay.can_sample()


@pytest.mark.parametrize("middle", [False, True])
def test_batches_of_tokens_continue(middle: bool, tmp_path: Path) -> None:
    config = section(rollout={"trajectories": 12, "tokens": 200, "minibatches": 2}, sampler={"kind": "fifo"})
    replay, _ = filled(config, count=90)

    def packs(rollout: Rollout) -> list[list[int]]:
        return [micro.trajectory_id.tolist() for micro in micros(rollout)]

    with replay:
        for _ in range(3):
            packs(replay.rollout())
        rollout, steps = replay.rollout(), []
        if middle:
            rollout.set("mine", torch.arange(rollout.num_trajectories))
            steps = iter(rollout)
            list(next(steps))
        else:
            packs(rollout)
        replay.save(tmp_path)
        rest = [micro.trajectory_id.tolist() for step in steps for micro in step]
        wanted = [rest, *(packs(replay.rollout()) for _ in range(3))]
    with Replay(config) as other:
        other.load(tmp_path)
        found = [packs(other.rollout()) for _ in range(4 if middle else 3)]
    assert found == wanted[0 if middle else 1 :]


def test_a_batch_of_tokens_waits_for_its_items() -> None:
    """A selection that is missing loses nothing of the one before it."""
    table = {**section()["tables"]["responses"], "max_times_sampled": 1}
    size = {"trajectories": 10, "tokens": 250}
    replay, _ = filled(section(tables={"responses": table}, rollout=size, timeout_s=0.5), count=10)
    with replay:
        count = 0
        while replay.can_sample():
            count += replay.rollout().num_items
        assert 0 < count < 10
        with pytest.raises(NotReadyError):
            replay.rollout()
        ids = [replay.add(response) for response in responses(30, seed=1)]
        assert replay.can_sample()
        rollout = replay.rollout()
        found = rollout.trajectory_id.tolist()
        assert found[-1] in ids
        assert found == list(range(found[0], found[-1] + 1))
        assert found[0] == count
