"""Rollout batches as parts of the stream of items: of a number of tokens, and resumed in the middle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rollout_support import TABLE, filled, micros, responses, section

from deepspeed_gear import Replay
from deepspeed_gear.errors import CheckpointError, NotReadyError
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
    tables = dict.fromkeys("ab", TABLE)
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
    table = {"a": {**TABLE, "group": {"column": "prompt", "size": 4}}}
    size = {"groups": 3, "tokens": 120}
    replay, _ = filled(section(tables=table, sampler={"kind": "fifo", "unit": "group"}, rollout=size))
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
    table = {**TABLE, "max_times_sampled": 1}
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


# ---- resumed in the middle -------------------------------------------------------------------------


def trained(rollout: Rollout) -> list[list[tuple[Any, ...]]]:
    """What each of the steps that are left trains."""
    return [
        [(m.trajectory_id.tolist(), m["old"].tolist(), m["advantage"].tolist()) for m in step]
        for step in rollout
    ]


@pytest.mark.parametrize("steps_done", [0, 1, 3])
@pytest.mark.parametrize("kind", ["fifo", "uniform", "epoch"])
def test_a_rollout_is_resumed_between_minibatches(kind: str, steps_done: int, tmp_path: Path) -> None:
    size = {"trajectories": 12, "minibatches": 2, "epochs": 2}
    config = section(sampler={"kind": kind}, rollout=size)
    with filled(config)[0] as replay:
        list(replay.rollout())
        rollout = replay.rollout()
        for micro in rollout.forward("old"):
            micro.fill(old=micro["logp"] * torch.rand(1))
        rollout.advantages("dr_grpo")
        steps = iter(rollout)
        for _ in range(steps_done):
            list(next(steps))
        position = replay.state_dict()
        replay.save(tmp_path)
        replay.add(responses(1)[0])
        wanted = trained(rollout), replay.rollout().trajectory_id.tolist()
        with pytest.raises(CheckpointError, match="must be loaded from the folder of its save"):
            replay.load_state_dict(position)
    with Replay(config) as other:
        other.load(tmp_path)
        other.add(responses(1)[0])
        resumed = other.rollout()
        assert resumed.steps_done == steps_done
        assert list(resumed.forward("old")) == []
        assert (trained(resumed), other.rollout().trajectory_id.tolist()) == wanted
        other.save(tmp_path / "between")
        assert not list((tmp_path / "between").glob("rollout.*"))
    longer, text = section(sampler={"kind": kind}, rollout={**size, "epochs": 3}), "size of this config"
    with Replay(longer) as other, pytest.raises(CheckpointError, match=text):
        other.load(tmp_path)


def test_a_rollout_is_not_resumed_with_other_lengths(tmp_path: Path) -> None:
    """Truncated to another length, the columns would belong to other tokens."""
    pack = {"tokens": 48, "pad": {"multiple": 16}, "too_long": "truncate"}
    config = section(pack=pack, rollout={"trajectories": 12, "minibatches": 2})
    with filled(config)[0] as replay:
        rollout = replay.rollout()
        rollout.advantages("dr_grpo")
        number = rollout.num_tokens
        replay.save(tmp_path)
    with Replay({**config, "pack": {**pack, "tokens": 32}}) as other:
        other.load(tmp_path)
        with pytest.raises(CheckpointError, match=f"must have the {number} steps with which it was saved"):
            other.rollout()
    with Replay({**config, "pack": {**pack, "plan_width": 3}}) as other:
        other.load(tmp_path)
        assert other.rollout().num_tokens == number


def test_a_save_in_the_last_step_resumes_after_the_rollout_batch(tmp_path: Path) -> None:
    config = section(sampler={"kind": "epoch"}, rollout={"trajectories": 8, "minibatches": 2})
    with filled(config)[0] as replay:
        for step in replay.rollout():
            for micro in step:
                assert micro.num_tokens
            replay.save(tmp_path)  # of each step: the last one stays
        wanted = replay.rollout().trajectory_id.tolist()
    with Replay(config) as other:
        other.load(tmp_path)
        resumed = other.rollout()
        assert (len(list(resumed)), resumed.trajectory_id.tolist()) == (2, wanted)
