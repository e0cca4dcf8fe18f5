"""`gear inspect` of tables of groups: groups and lengths, saved and in a running process."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from gear_support import run_command
from group_support import GROUP, add, add_groups, check_groups, section, train

from deepspeed_gear import Replay
from deepspeed_gear.cli import inspect
from deepspeed_gear.cli.inspect_distribution import Distribution, of_living, of_saved
from deepspeed_gear.store.group_spec import COUNTED, GroupCount
from deepspeed_gear.store.live_stores import living_stores


def living(replay: Replay) -> Distribution:
    (found,) = (store for store in living_stores(os.getpid()) if store.run.id == replay.run)
    described = of_living(found)
    assert described is not None
    return described


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run_command(inspect, *arguments) == 0
    return capsys.readouterr().out


def numbers(complete: int, incomplete: int, **left_out: int) -> dict[str, int]:
    return {"complete": complete, "incomplete": incomplete, **dict.fromkeys(COUNTED, 0), **left_out}


@pytest.mark.parametrize("kind", ["fifo", "uniform", "prioritized"])
def test_groups_that_no_selection_has_seen(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A look at a run changes none of its words; groups that are complete are drawable."""
    with Replay(section(sampler={"kind": kind})) as replay:
        add_groups(replay, range(3), steps=5)
        add(replay, 9, steps=12)
        groups = train(replay).table.groups
        assert groups is not None
        before = groups.words.copy(), groups.counts.copy()
        found = living(replay)
        assert (groups.words == before[0]).all()
        assert (groups.counts == before[1]).all()
        assert groups.counts[GroupCount.HELD] == 0  # the process itself has formed none
        assert found.groups == numbers(3, 1)
        assert (found.summary()["drawable"], found.waiting) == (3, 3)
        assert found.excluded is not None
        assert [(one.trajectories, one.reason) for one in found.excluded] == [(1, "of incomplete groups")]
        replay.save(tmp_path / "first")
        saved = of_saved(tmp_path / "first" / "main")
        assert {**saved.summary(), "excluded": None} == {**found.summary(), "excluded": None}
        text = shown(capsys, str(tmp_path / "first"))
        for line in (
            "  lengths       min 5, 10% 5, 50% 5, 90% 5, max 12, mean 5.7",
            "  groups        3 complete, 1 incomplete",
            "  left out      0 groups rejected, 0 too large, 0 evicted unsampled",
            "  trajectories  0 late, 0 of groups that had left, 0 unfilled, 0 surplus",
            "  drawable      3 (3 added since the latest selection)",
        ):
            assert line in text.splitlines()
        add_groups(replay, [3])
        replay.rollout()  # of 4 groups
        add_groups(replay, [4, 5])
        found = living(replay)
        assert (len(found.masses), found.waiting, found.summary()["drawable"]) == (4, 2, 6)
        replay.save(tmp_path / "second")
        saved = of_saved(tmp_path / "second" / "main")
        assert (len(saved.masses), saved.waiting, saved.groups) == (4, 2, numbers(6, 1))
        check_groups(replay)


def test_rejected_oversized_and_late(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Counts of a look are those that the process finds at its next selection."""
    group = {**GROUP, "needs": ["reward"], "where": {"reward": {"std": {"min": 0.1}}}}
    with Replay(section(group=group)) as replay:
        for prompt in range(4):
            for member in range(3):
                number = add(replay, prompt, member, steps=2 + prompt)
                if prompt != 3:
                    replay.fill(number, reward=float(member) if prompt else 1.0)  # prompt 0: all are equal
        late = add(replay, 1, 3)
        replay.fill(late, reward=0.0)
        found = living(replay)
        assert found.groups == numbers(2, 1, rejected=1, surplus=1)
        assert sorted(found.lengths.tolist()) == [3, 3, 3, 4, 4, 4, 5, 5, 5]  # type: ignore[union-attr]
        assert found.groups == replay.statistics()["groups"]["main"]  # which forms them
        assert living(replay).groups == found.groups
        replay.save(tmp_path)
        assert of_saved(tmp_path / "main").groups == found.groups
        (table,) = json.loads(shown(capsys, str(tmp_path), "--json"))["tables"]
        assert table["groups"] == found.groups
        assert (table["length"]["min"], table["length"]["0.5"], table["length"]["max"]) == (3, 4, 5)
        stores = json.loads(shown(capsys, "--living", str(os.getpid()), "--json"))["stores"]
        (store,) = (one for one in stores if one["run"]["id"] == replay.run)
        assert store["distribution"]["groups"] == found.groups
        text = shown(capsys, "--living", str(os.getpid()))
        assert "  left out      1 groups rejected, 0 too large, 0 evicted unsampled\n" in text
        assert "  trajectories  0 late, 0 of groups that had left, 0 unfilled, 1 surplus\n" in text


def test_a_group_that_time_completes() -> None:
    group = {**GROUP, "after_s": 0.05, "min_size": 2}
    with Replay(section(group=group)) as replay:
        add_groups(replay, [0], size=2)
        time.sleep(0.06)
        found = living(replay)
        assert (found.groups, found.waiting) == (numbers(1, 0), 1)


def test_a_save_of_an_earlier_version(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its manifest does not name the column of groups."""
    with Replay(section()) as replay:
        add_groups(replay, range(2))
        add(replay, 9)
        replay.save(tmp_path)
    file = tmp_path / "main" / "manifest.json"
    manifest: dict[str, Any] = json.loads(file.read_text())
    del manifest["group"]
    file.write_text(json.dumps(manifest))
    found = of_saved(tmp_path / "main")
    assert found.groups == {**numbers(2, 0), "incomplete": None}
    assert "  groups        2 complete, not known incomplete\n" in shown(capsys, str(tmp_path / "main"))
