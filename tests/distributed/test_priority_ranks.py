"""Prioritized and relabelled runs: the same batches on any ranks, in any division, and after a resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from batch_records import Arrays, assert_same, in_order
from gear_support import config_of, lengths_of, shared_files, write_dataset
from process_support import run_ranks

GLOBAL_BATCH, NUM_BATCHES, SAVED = 32, 30, 13
SAMPLER = {
    "kind": "prioritized",
    "unit": "step",
    "alpha": {"linear": [0.9, 0.3, 25]},
    "alpha_every": 5,
    "beta": {"linear": [0.4, 1.0, 20]},
}
BY_TRAJECTORY = {**SAMPLER, "unit": "trajectory", "stratified": True, "normalize": "table"}
TOP = {"kind": "top_k", "unit": "step"}
FIELDS = {"code": {"offset": -2, "length": 3}, "observation": {}, "return_to_go": {}}
HINDSIGHT = {"hindsight": {}, "fields": {"goal": {"column": "code", "hindsight": "code"}, "observation": {}}}
PREFETCHES = (0, 2)


def section(**options: Any) -> dict[str, Any]:
    tables = {"main": {"capacity_steps": 500, "capacity_trajectories": 24}}
    given = {"sampler": SAMPLER, "fields": FIELDS, "batch_size": GLOBAL_BATCH, "seed": 4, "tables": tables}
    return config_of(**{**given, **options})


def cases(folder: Path, world: int) -> dict[str, Any]:
    """Return what a group of ranks runs: two save what one and four go on with; they report late, too."""
    changing: dict[str, Any] = {"last": NUM_BATCHES, "changes": True}
    accumulated = section(gradient_accumulation_steps=4)
    found: dict[str, Any] = {
        "plain": {"section": section(), **changing},
        "accumulated": {"section": accumulated, **changing},
        "ahead": {"section": section(prefetch=2), "last": NUM_BATCHES},
        "trajectories": {"section": section(sampler=BY_TRAJECTORY), **changing},
        "top": {"section": section(sampler=TOP), **changing},
        "relabelled": {"section": section(sampler={"unit": "step"}, **HINDSIGHT), "last": 5},
    }
    for prefetch in PREFETCHES:
        where = str(folder / f"saved.{prefetch}")
        action = {"save": where} if world == 2 else {"load": where}
        resumed = {"section": section(prefetch=prefetch), "first": SAVED, "last": NUM_BATCHES}
        found[f"resumed.{prefetch}"] = {**resumed, **action}
    if world == 2:
        found["stopping"] = {"section": section(timeout_s=3.0), "last": 0}
        sampler = {"kind": "prioritized", "unit": "step", "alpha": 0.7, "beta": 0.5}
        options = {"sampler": sampler, "fields": {"code": {}}, "batch_size": 16}
        data = write_dataset(folder / "set", lengths_of(20))
        found["late"] = {
            "sections": [
                config_of(data, **options, prefetch=prefetch, gradient_accumulation_steps=accumulation)
                for prefetch in PREFETCHES
                for accumulation in (1, 2)
            ]
        }
    return found


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run all cases on two ranks, then on one and on four; return where they wrote."""
    folder = tmp_path_factory.mktemp("ranks")
    for world in (2, 1, 4):
        run_ranks("priority_ranks.py", world, str(folder), json.dumps(cases(folder, world)))
        assert shared_files(section()["shared_memory"]["prefix"]) == []
    return folder


def batches(folder: Path, name: str, world: int) -> Arrays:
    """Return the global batches of a run. [batches, B, ...] by name."""
    parts = [dict(np.load(folder / f"{name}.{world}.{rank}.npz")) for rank in range(world)]
    return in_order(parts, GLOBAL_BATCH)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["plain", "accumulated"])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_whole_run_is_the_same_in_every_division(ran: Path, name: str, world: int) -> None:
    assert_same(batches(ran, name, world), batches(ran, "plain", 1))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["ahead", "trajectories", "top", "relabelled"])
@pytest.mark.parametrize("world", [2, 4])
def test_a_run_is_the_same_on_any_number_of_ranks(ran: Path, name: str, world: int) -> None:
    """With a lag, by trajectory and stratified, the highest priorities, and goals by hindsight."""
    assert_same(batches(ran, name, world), batches(ran, name, 1))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("prefetch", PREFETCHES)
@pytest.mark.parametrize("world", [1, 4])
def test_a_resumed_run_has_the_batches_that_would_have_come(ran: Path, prefetch: int, world: int) -> None:
    name = f"resumed.{prefetch}"
    wanted = batches(ran, name, 2)
    assert wanted["sample_number"][:, 0].tolist() == [GLOBAL_BATCH * key for key in range(SAVED, NUM_BATCHES)]
    assert_same(batches(ran, name, world), wanted)


def test_the_runs_show_something(ran: Path) -> None:
    """Priorities concentrate and change, the lag is seen, and so are items that come and go."""
    plain, ahead = batches(ran, "plain", 1), batches(ran, "ahead", 1)
    assert set(plain) >= {"trajectory_id", "anchor", "probability", "is_weight", "code", "return_to_go"}
    assert (plain["probability"][0] == plain["probability"][0, 0]).all()
    assert plain["probability"][20].max() > 5 * plain["probability"][20].min()
    assert plain["is_weight"].max() == 1
    assert plain["is_weight"].min() < 0.3
    duplicates = [
        len(set(zip(*pair, strict=True))) < GLOBAL_BATCH
        for pair in zip(plain["trajectory_id"], plain["anchor"], strict=True)
    ]
    assert sum(duplicates) > 5
    assert (plain["trajectory_id"][:10] < 24).all()
    assert (plain["trajectory_id"][10:] >= 24).any()
    assert not np.isin(plain["trajectory_id"][10:], [0, 3, 5, 8]).any()
    differ = (plain["trajectory_id"] != ahead["trajectory_id"]).any(axis=1)
    assert not differ[0]
    assert differ[1:].all(), "a lag of two changes nothing"
    assert np.array_equal(ahead["probability"][1], ahead["probability"][0]), "seen too early"
    top = batches(ran, "top", 1)
    for ids, anchors in zip(top["trajectory_id"], top["anchor"], strict=True):
        assert len(set(zip(ids, anchors, strict=True))) == GLOBAL_BATCH
    goals = batches(ran, "relabelled", 1)
    is_relabelled = goals["goal_step"] >= 0
    assert 0 < is_relabelled.sum() < is_relabelled.size
    assert (goals["goal"][is_relabelled] % 1000 == goals["goal_step"][is_relabelled]).all()
