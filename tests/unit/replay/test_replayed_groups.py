"""Groups that are trained again: mixtures of a table with prompts and a table of copies."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from group_support import add_groups
from ledger_support import SIZE, check_books, ledger_section, responses, write_prompts
from rollout_support import micros

from deepspeed_gear import ConfigError, DataError, Replay, Rollout, RolloutWorker, ShapeError


def replayed_section(data: Path, **sampler: Any) -> dict[str, Any]:
    """Return a section whose batches have 2 fresh groups and, once there are some, 2 that are drawn
    again.
    """
    section = ledger_section(data, {"max_lag": 1}, groups=4)
    main = section["tables"]["main"]
    again = {
        name: value
        for name, value in main.items()
        if name not in ("prompts", "max_times_sampled", "writers")
    }
    section["tables"]["again"] = {**again, "max_times_sampled": 3}
    kind = {
        "kind": "prioritized",
        "unit": "group",
        "initial": 1.0,
        "alpha": 1.0,
        "decay": 4.0,
        **sampler,
    }
    shares = {"main": 0.5, "again": 0.5}
    of = {"kind": "fifo", "unit": "group"}
    section["sampler"] = {
        "kind": "mixture",
        "shares": shares,
        "of": of,
        "by_table": {"again": kind},
    }
    return section


def generate(worker: RolloutWorker, count: int) -> None:
    for lease in worker.lease(count, timeout_s=0):
        lease.commit(responses(lease))


def groups_of(rollout: Rollout) -> list[tuple[int, int]]:
    """Return the table of each item, and its number."""
    numbers = rollout.values("prompt").numpy()
    first = np.unique(rollout.group.numpy(), return_index=True)[1]
    return list(zip(rollout.table.tolist(), numbers[first].tolist(), strict=True))


def train(rollout: Rollout) -> None:
    micros(rollout)


def test_fresh_groups_do_not_wait_for_replayed_ones(tmp_path: Path) -> None:
    """Batches have the fresh groups of the ledger's order; copies come as soon as there
    are some.
    """
    data = write_prompts(tmp_path / "prompts", 20)
    again = []
    with Replay(replayed_section(data)) as replay, replay.rollout_worker() as worker:
        for number in range(6):
            generate(worker, 4)
            assert replay.can_sample()
            rollout = replay.rollout()
            found = groups_of(rollout)
            assert [prompt for table, prompt in found if table == 0] == [2 * number, 2 * number + 1]
            again.append([prompt for table, prompt in found if table == 1])
            assert replay.copy_items(rollout, "again") == 2 * SIZE
            assert replay.copy_items(rollout, "again", [False] * len(found)) == 0
            train(rollout)
        assert again[0] == []
        assert all(len(one) == 2 and max(one) < 2 * n for n, one in enumerate(again) if n)
        assert check_books(replay)["trained"] == 12
        counts = np.bincount([prompt for one in again for prompt in one])
        assert counts.max() <= 3  # `max_times_sampled`
        state = replay.save(tmp_path / "saved")
        rest = []
        for _ in range(4):
            generate(worker, 4)
            rollout = replay.rollout()
            rest.append(groups_of(rollout))
            train(rollout)
    with Replay(replayed_section(data)) as replay:
        replay.load(tmp_path / "saved")
        with replay.rollout_worker() as worker:
            for expected in rest:
                generate(worker, 4)
                rollout = replay.rollout()
                assert groups_of(rollout) == expected
                train(rollout)
    assert state


def test_copies_have_the_rows_and_the_given_priorities(tmp_path: Path) -> None:
    data = write_prompts(tmp_path / "prompts", 20)
    with Replay(replayed_section(data)) as replay, replay.rollout_worker() as worker:
        generate(worker, 4)
        rollout = replay.rollout()
        ids = rollout.trajectory_id.tolist()
        whole = replay.read(ids, "main")
        with pytest.raises(ShapeError, match=r"chosen.*must have shape \[2\]"):
            replay.copy_items(rollout, "again", torch.ones(3, dtype=torch.bool))
        with pytest.raises(DataError, match="priorit"):
            replay.copy_items(rollout, "again", priorities=[1.0, -1.0])
        with pytest.raises(ConfigError, match="priorities to be reported"):
            replay.copy_items(rollout, "main", [False, False], [1.0, 1.0])
        with pytest.raises(ConfigError, match="must be one of main, again"):
            replay.copy_items(rollout, "elsewhere")
        assert len(replay.store("again").slots_of(np.array(ids))) == 4
        assert replay.store("again").num_trajectories == 0
        replay.copy_items(rollout, "again", [False, True], [5.0, 7.0])
        copies = [
            one
            for one in range(100)
            if (replay.store("again").slots_of(np.array([one])) >= 0).all()
        ]
        for one, copy in zip(whole[SIZE:], replay.read(copies, "again"), strict=True):
            assert all(
                torch.equal(one[name], copy[name])
                for name in ("tokens", "prompt", "sample", "weight")
            )
        train(rollout)
        generate(worker, 4)
        rollout = replay.rollout()
        assert groups_of(rollout) == [(0, 2), (0, 3), (1, 1), (1, 1)]
        assert replay.priorities(copies[-1:], table="again").tolist() == [7.0]
        with pytest.raises(DataError, match="must be items of other tables than again"):
            replay.copy_items(rollout, "again", [True] * 4)
        train(rollout)


def test_configs_that_are_refused(tmp_path: Path) -> None:
    data = write_prompts(tmp_path / "prompts", 20)
    wrong: list[tuple[dict[str, Any], str]] = [
        (
            {"shares": {"main": 0.3, "again": 0.7}},
            r"sampler.shares.main must be a number that makes whole groups of the 4",
        ),
        (
            {"by_table": {"main": {"kind": "lifo", "unit": "group"}}},
            "prompts must not be given unless its sampler is",
        ),
        (
            {"by_table": {"other": {"kind": "fifo", "unit": "group"}}},
            "by_table must name tables of gear.sampler.shares",
        ),
        (
            {"of": {"kind": "prioritized", "unit": "group", "reduce": "max"}},
            "by_table must have one reduce and eta in all samplers",
        ),
        (
            {"by_table": {"again": {"kind": "fifo"}}},
            r"again\.group must not be given unless the table is sampled with sampler\.unit",
        ),
    ]
    for change, match in wrong:
        section = replayed_section(data)
        section["sampler"].update(change)
        with pytest.raises(ConfigError, match=match):
            Replay(section)


def test_other_tables_still_wait(tmp_path: Path) -> None:
    """Without prompts a mixture of groups waits for all of its tables."""
    section = replayed_section(write_prompts(tmp_path / "prompts", 20))
    del section["tables"]["main"]["prompts"], section["tables"]["main"]["writers"]
    with Replay(section) as replay:
        add_groups(replay, range(2), SIZE, table="main")
        assert not replay.can_sample()
        add_groups(replay, range(2), SIZE, table="again")
        assert replay.can_sample()
