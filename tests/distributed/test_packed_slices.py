"""Ranks that share sequences compute from their slices what one rank computes from whole packs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gear_support import load_script, shared_files
from process_support import PROGRAMS, run_ranks
from rollout_support import filled, section

VALUES = ("ratio", "gradient", "old", "by_token", "by_sequence")
FLOAT32 = 2e-6  # of the largest one: sums over up to 60 tokens in another order


def trained_alone(config: dict[str, Any]) -> dict[str, Any]:
    """Run the program's function in this process."""
    replay, _ = filled(config)
    with replay:
        found: dict[str, Any] = load_script(PROGRAMS / "packed_slices.py").trained(replay)
    return found


def by_place(places: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    order = np.lexsort((places[:, 1], places[:, 0]))
    return places[order], values[order]


@pytest.mark.parametrize("replicas", [1, 2])
def test_slices_are_those_of_one_rank(replicas: int, tmp_path: Path) -> None:
    """Filled and whitened columns, means over sequences with their gradients, and metrics of steps."""
    size = {"trajectories": 30, "minibatches": 2}
    sections = {name: section(rollout=size, loss={"normalize": name}) for name in ("token", "sequence")}
    task = {"sections": sections, "sequence": 2, "out": str(tmp_path)}
    run_ranks("packed_slices.py", 2 * replicas, json.dumps(task))
    for name, config in sections.items():
        assert shared_files(config["shared_memory"]["prefix"]) == []
        alone = trained_alone(config)
        files = [np.load(tmp_path / f"{name}.{rank}.npz") for rank in range(2 * replicas)]
        assert all(len(file["places"]) for file in files)
        whole = by_place(*(np.concatenate([file[key] for file in files]) for key in ("places", "values")))
        wanted = by_place(alone["places"], alone["values"])
        assert np.array_equal(whole[0], wanted[0])  # every place once
        for kind, found, value in zip(VALUES, whole[1].T, wanted[1].T, strict=True):
            assert np.abs(found - value).max() <= FLOAT32 * np.abs(value).max(), (name, kind)
        for rank in range(2 * replicas):
            metrics = json.loads((tmp_path / f"{name}.{rank}.json").read_text())
            assert len(metrics) == 2
            for found, value in zip(metrics, alone["metrics"], strict=True):
                assert found == pytest.approx(value, rel=FLOAT32)
                assert found["one"] == pytest.approx(1)
