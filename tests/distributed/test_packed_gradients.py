"""The weights after a packed step are those of one process without packs, for each kind of training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from process_support import run_ranks

CASES: list[tuple[Any, int]] = [("token", 48), ("sequence", 120), ({"constant": 50.0}, 400), ("token", 400)]
KINDS = {1: ["zero2"], 2: ["ddp", "zero0", "zero1", "zero2", "zero3"], 4: ["zero1", "zero3"]}
# Float32 sums of about 700 tokens in another order: 700 * 2^-24 of the largest element.
BOUND = 4e-5


@pytest.mark.parametrize("world", KINDS)
def test_packed_steps_are_those_of_one_process(world: int, tmp_path: Path) -> None:
    task = {"kinds": KINDS[world], "cases": CASES, "out": str(tmp_path)}
    run_ranks("packed_gradients.py", world, json.dumps(task), timeout_s=280.0)
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(world)]
    assert len(ranks[0]) == len(KINDS[world]) * len(CASES)
    for found in zip(*ranks, strict=True):
        assert all(one["deviation"] < BOUND for one in found), found
        counts = np.array([one["counts"] for one in found])  # [ranks, K]: equally many on each
        if world > 1 and found[0]["tokens"] == 48:
            # What each token would weigh in a mean of means of micro batches: another gradient.
            of_means = counts.sum() / (counts.size * counts[counts > 0])
            assert of_means.max() / of_means.min() > 1.2
