"""Kinds of parallelism over nodes, by `deepspeed --hostfile` over pdsh: the batches of one process."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from batch_records import Arrays
from cluster_support import Cluster
from gear_support import ROOT, lengths_of, shared_files, write_dataset
from parallel_checks import (
    BATCH,
    CASES,
    MODES,
    STEPS,
    batches_alone,
    check_case,
    digest_of,
    read,
    section,
)

LONG = pytest.mark.skipif(os.environ.get("GEAR_LONG_TESTS") != "1", reason="long: GEAR_LONG_TESTS=1")
PROGRAM = ROOT / "tests" / "distributed" / "programs" / "parallel_matrix.py"


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data set of the tests on one node."""
    return write_dataset(tmp_path_factory.mktemp("data") / "set", lengths_of(40), split={"eval": 0.3})


@pytest.fixture(scope="module")
def alone(dataset: Path) -> dict[str, Arrays]:
    return batches_alone(dataset)


@pytest.mark.parametrize(
    ("modes", "nodes", "ranks"),
    [
        (["zero:3x4", "pipe:2x2"], 2, 2),
        pytest.param(["tensor:2x2"], 4, 1, marks=LONG),
        pytest.param(["zero:3x4", "pipe:2x2", "pipe:2x1x2"], 4, 1, marks=LONG),
        pytest.param(["ulysses:2x2"], 4, 1, marks=LONG),
        pytest.param(["pipe:3"], 3, 1, marks=LONG),
    ],
    ids=lambda value: " then ".join(value) if isinstance(value, list) else str(value),
)
def test_the_same_batches_over_nodes(
    modes: list[str],
    nodes: int,
    ranks: int,
    cluster: Cluster,
    dataset: Path,
    alone: dict[str, Arrays],
    tmp_path: Path,
) -> None:
    gear, replicas = section(dataset), {mode: MODES[mode][1] for mode in modes}
    task = {
        "gear": gear,
        "cases": CASES,
        "steps": STEPS,
        "out": str(tmp_path),
        "modes": replicas,
    }
    wanted = tmp_path / "task.json"
    wanted.write_text(json.dumps(task))
    output = cluster.run_ranks(PROGRAM, f"@{wanted}", nodes=nodes, ranks=ranks, timeout_s=280.0)
    assert output.count(f"gear: global batch {BATCH} = ") == len(modes) * len(CASES)
    for node in range(nodes):
        assert shared_files(gear["shared_memory"]["prefix"], cluster.shm(node)) == []
    for mode in modes:
        for case, whole in alone.items():
            found = read(tmp_path / mode.replace(":", "."), case, nodes * ranks)
            check_case(found, case, whole, replicas[mode], digest_of(dataset, case, whole))
