"""Kinds of parallelism over nodes: the batches of one process."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from cluster_support import Cluster
from gear_support import ROOT, lengths_of, prefix, shared_files, write_dataset
from parallel_checks import check_modes

LONG = pytest.mark.skipif(os.environ.get("GEAR_LONG_TESTS") != "1", reason="long: GEAR_LONG_TESTS=1")
PROGRAM = ROOT / "tests" / "distributed" / "programs" / "parallel_matrix.py"


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data set of the tests on one node."""
    return write_dataset(tmp_path_factory.mktemp("data") / "set", lengths_of(40), split={"eval": 0.3})


@pytest.mark.parametrize(
    ("modes", "nodes", "ranks"),
    [
        ("zero:3x4 pipe:2x2", 2, 2),
        pytest.param("tensor:2x2", 4, 1, marks=LONG),
        pytest.param("zero:3x4 pipe:2x2 pipe:2x1x2", 4, 1, marks=LONG),
        pytest.param("ulysses:2x2", 4, 1, marks=LONG),
        pytest.param("pipe:3", 3, 1, marks=LONG),
    ],
)
def test_the_same_batches_over_nodes(
    modes: str, nodes: int, ranks: int, cluster: Cluster, dataset: Path, tmp_path: Path
) -> None:
    def run(task: dict[str, Any]) -> str:
        (tmp_path / "task.json").write_text(json.dumps(task))
        given = f"@{tmp_path / 'task.json'}"
        return cluster.run_ranks(PROGRAM, given, nodes=nodes, ranks=ranks, timeout_s=280.0)

    check_modes(run, dataset, tmp_path, modes.split(), nodes * ranks)
    for node in range(nodes):
        assert shared_files(prefix(), cluster.shm(node)) == []
