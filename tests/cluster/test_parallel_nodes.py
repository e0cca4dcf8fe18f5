"""Kinds of parallelism over nodes: the batches of one process."""

import functools
import os
from pathlib import Path

import pytest
from cluster_support import Cluster
from gear_support import prefix, shared_files
from parallel_checks import check_modes

LONG = pytest.mark.skipif(
    os.environ.get("GEAR_LONG_TESTS") != "1", reason="long: GEAR_LONG_TESTS=1"
)


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
    call = functools.partial(cluster.call_ranks, nodes=nodes, ranks=ranks, timeout_s=280.0)
    check_modes(call, dataset, tmp_path, modes.split())
    for node in range(nodes):
        assert shared_files(prefix(), cluster.shm(node)) == []
