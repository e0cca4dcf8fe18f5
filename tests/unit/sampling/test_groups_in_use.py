"""Groups of data sets, in mixtures with fresh ones, and in rollout batches and their packs."""

from pathlib import Path

import numpy as np
import pytest
import torch
from group_support import (
    COLUMNS,
    GROUP,
    add,
    add_groups,
    check_groups,
    drawn,
    section,
    stored,
    take,
    train,
)

from deepspeed_gear import (
    ConfigError,
    DataError,
    DatasetWriter,
    NotReadyError,
    Replay,
    Schema,
    StoreError,
)

MEMBERS = {**GROUP, "member": "sample", "max_trajectories": 8}


def write_groups(path: Path, count: int, size: int = 3) -> Path:
    columns = {name: column for name, column in COLUMNS.items() if name != "reward"}
    with DatasetWriter(path, Schema.from_json({"columns": columns})) as writer:
        for number in range(count):
            for sample in range(size):
                tokens = np.full(2 + number, number, np.int32)
                writer.add(
                    {"tokens": tokens, "prompt": number, "sample": sample, "weight": float(sample)}
                )
    return path


@pytest.mark.parametrize("load", ["mmap", "memory"])
def test_groups_of_a_data_set(tmp_path: Path, load: str) -> None:
    """A group of equal weights fails the condition, and one that lacks a member is incomplete."""
    path = write_groups(tmp_path / "set", 5)
    config = section(GROUP, {"kind": "epoch"}, batch={"groups": 5})
    config["tables"] = {"main": {"data": {"path": str(path), "load": load}, "group": dict(GROUP)}}
    with Replay(config) as replay:
        assert sorted(take(train(replay), 0)) == [[3 * n, 3 * n + 1, 3 * n + 2] for n in range(5)]
        with pytest.raises(StoreError, match="read-only"):
            replay.missing_groups()
    config["tables"]["main"]["group"]["size"] = 2
    config["tables"]["main"]["group"]["where"] = {"weight": {"std": {"min": 1.0}}}
    wrong = pytest.raises(StoreError, match=r"10 trajectories .* of groups outside of group.where")
    with Replay(config) as replay, wrong:
        train(replay).get(0)


def test_fresh_and_replayed_groups(tmp_path: Path) -> None:
    """A mixture of a table that is added to and a data set: whole groups of both, in
    their shares.
    """
    path = write_groups(tmp_path / "set", 6, size=2)
    config = section(GROUP, batch={"groups": 8})
    config["tables"]["old"] = {"data": str(path), "group": {"column": "prompt", "size": 2}}
    config["sampler"] = {
        "kind": "mixture",
        "shares": {"main": 0.75, "old": 0.25},
        "of": {"unit": "group"},
    }
    with Replay(config) as replay:
        assert replay.missing_groups("main") == 6
        groups = add_groups(replay, range(7), table="main")
        for number in range(3):
            fresh, old = (take(train(replay, name), number) for name in ("main", "old"))
            assert len(fresh) == 6
            assert len(old) == 2
            assert all(ids in groups.values() for ids in fresh)
            assert all(ids[1] == ids[0] + 1 and ids[0] % 2 == 0 for ids in old)


def test_rollouts_of_groups() -> None:
    """`Replay.rollout` trains every trajectory of each group, and advantages compare the members of
    one.
    """
    config = section(MEMBERS, batch={"groups": 4})
    config["fields"]["reward"] = {}
    with Replay(config) as replay:
        for prompt in range(4):
            for sample in (0, 1, 1, 2):
                replay.fill(add(replay, prompt, sample), reward=float(sample))
        rollout = replay.rollout()
        assert rollout.num_items == 4
        assert rollout.num_trajectories == 16
        found = rollout.advantages("dr_grpo", reward="reward").reshape(4, 4)
        assert torch.equal(
            found, torch.tensor([[-1.0, 0.0, 0.0, 1.0]]).expand(4, 4).to(found.dtype)
        )
        seen = [n for step in rollout for micro in step for n in micro.trajectory_id.tolist()]
        assert sorted(seen) == sorted(stored(replay))


def test_members_of_several_trajectories_have_no_mean_in_a_pack() -> None:
    config = section(MEMBERS, batch={"groups": 1}, loss={"normalize": "sequence", "by": "member"})
    with Replay(config) as replay:
        for sample in (0, 1, 1, 2):
            add(replay, 0, sample)
        micro = next(iter(replay.step()))
        with pytest.raises(
            ConfigError, match=r'loss\.by must be "trajectory" for micro.per_sequence'
        ):
            micro.per_sequence(micro["tokens"].float())


def test_priorities_of_a_micro_batch_are_none_of_groups() -> None:
    with Replay(section(GROUP, {"kind": "prioritized"}, batch={"groups": 1})) as replay:
        (ids,) = add_groups(replay, [4]).values()
        micro = next(iter(replay.step()))
        with pytest.raises(ConfigError, match=r"set_priorities\(ids, priorities\)"):
            replay.update_priorities(micro, torch.ones(3))
        assert replay.set_priorities(ids[:1], [2.0]) == 1


def test_late_columns_that_are_absent_are_not_read_as_zeros() -> None:
    """A late column that neither fields nor needs name may be absent in a batch."""
    with Replay(section(GROUP, batch={"groups": 2})) as replay:
        groups = add_groups(replay, range(2))
        for number in groups[0]:
            replay.fill(number, reward=1.0)
        rollout = replay.rollout()
        for read in (rollout.advantages, lambda: rollout.values("reward")):
            with pytest.raises(
                DataError, match=r"column reward must be filled .*absent in 3 of 6 tr"
            ):
                read()
        for number in groups[1]:
            replay.fill(number, reward=2.0)
        assert rollout.values("reward").tolist() == [1, 1, 1, 2, 2, 2]


def test_drawn_groups_keep_their_rows_until_they_are_released() -> None:
    config = section(GROUP, batch={"groups": 2}, remove="fifo", rate_limiter={"timeout_s": 1.0})
    config["tables"]["main"].update(capacity_trajectories=9, capacity_steps=27, max_length=3)
    with Replay(config) as replay:
        groups = add_groups(replay, range(3))
        selection = train(replay).get(0)
        assert drawn(selection) == [groups[0], groups[1]]
        with pytest.raises(NotReadyError, match="no selection reads"):
            add_groups(replay, range(3, 5))
        train(replay).release(0)
        add_groups(replay, [5])
        check_groups(replay)
