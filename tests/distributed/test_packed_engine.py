"""Engines that train packed batches, and checkpoints in the middle of a rollout batch on other ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from batch_records import in_plan_order
from gear_support import shared_files
from rollout_support import section

WIDTH = 4  # ranks that packs are planned for


def results(out: Path, action: str, world: int) -> list[dict[str, Any]]:
    return [json.loads((out / f"{action}{world}.{rank}.json").read_text()) for rank in range(world)]


def test_a_rollout_batch_goes_on_on_other_ranks(ranks_run: Callable[..., str], tmp_path: Path) -> None:
    """Saved by two ranks after one of six steps: one and four ranks train the same packs and columns.

    The batch begins in the middle of a selection.
    """
    pack = {"tokens": 128, "pad": {"multiple": 16}, "plan_width": WIDTH}
    size = {"trajectories": 18, "tokens": 450, "minibatches": 3, "epochs": 2}
    gear = section(pack=pack, rollout=size, sampler={"kind": "epoch"}, timeout_s=60.0)
    task = {"gear": gear, "checkpoints": str(tmp_path / "checkpoints"), "out": str(tmp_path)}
    ranks_run("packed_resume.py", 2, {**task, "action": "save"})
    saved = results(tmp_path, "save", 2)
    wanted = in_plan_order([rank["steps"] for rank in saved])
    assert len(wanted) == 5
    assert all(len(packs) >= WIDTH and any(pack["ids"] for pack in packs) for packs in wanted)
    for world in (1, 4):
        ranks_run("packed_resume.py", world, {**task, "action": "load"})
        found = results(tmp_path, "load", world)
        assert {rank["first"] for rank in found} == {1}
        assert in_plan_order([rank["steps"] for rank in found]) == wanted  # ids and columns, to the bit
        assert {tuple(rank["following"]) for rank in found} == {tuple(saved[0]["following"])}
        for one, other in zip(found[0]["weights"], saved[0]["weights"], strict=True):
            assert np.array(one) == pytest.approx(np.array(other), abs=1e-6)  # sums in another order
    assert shared_files(gear["shared_memory"]["prefix"]) == []


def test_packed_steps_of_an_engine(ranks_run: Callable[..., str]) -> None:
    """Weights, `global_samples`, skipped steps, steps out of order, settings that are refused or named."""
    gear = section(timeout_s=60.0)
    del gear["rollout"]
    ranks_run("engine_packed.py", 2, gear)
    assert shared_files(gear["shared_memory"]["prefix"]) == []
