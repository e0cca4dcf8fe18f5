"""`gear doctor` over the hosts of a hostfile."""

import json
import shutil
import sys
from pathlib import Path

from cluster_support import Cluster
from gear_support import lengths_of, prefix, write_dataset

from deepspeed_gear.store.memory_layout import MAGIC

GEAR = (sys.executable, "-m", "deepspeed_gear.cli.main", "doctor")


def test_two_nodes_and_their_network(cluster: Cluster, tmp_path: Path) -> None:
    data = write_dataset(tmp_path / "set", lengths_of(12))
    to = tmp_path / "found.json"
    hostfile = str(cluster.hostfile(2))
    done = cluster.call(0, *GEAR, "--hostfile", hostfile, "--data", str(data), "--json", str(to))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "connecting each two hosts" in done.stderr
    assert done.stdout.endswith("0 problems\n")
    found = json.loads(to.read_text())
    assert [facts["hostname"] for facts in found["hosts"].values()] == ["node0", "node1"]
    assert [facts["address"] for facts in found["hosts"].values()] == ["10.77.0.1", "10.77.0.2"]
    assert [facts["data"]["num_trajectories"] for facts in found["hosts"].values()] == [12, 12]
    assert found["problems"] == []


def test_clean_removes_stores_of_all_nodes(cluster: Cluster) -> None:
    left = [cluster.shm(node) / f"{prefix()}-left" for node in range(2)]
    for path in left:
        path.write_bytes(MAGIC + bytes(4096))
    command = (*GEAR[:-1], "clean", "--prefix", prefix(), "--hostfile", str(cluster.hostfile(2)))
    done = cluster.call(0, *command)
    assert done.returncode == 0, done.stdout + done.stderr
    for node in range(2):
        assert f"node{node}: removed /dev/shm/{prefix()}-left" in done.stdout
    assert not any(path.exists() for path in left)


def test_what_is_wrong_on_one_node_is_named(cluster: Cluster, tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text(
        "".join(f"{host} slots=1\n" for host in ("node0", "node1", "10.77.0.2", "node9"))
    )
    data = cluster.shm(0) / "set"
    try:
        write_dataset(data, lengths_of(5))
        done = cluster.call(
            0, *GEAR, "--hostfile", str(hostfile), "--data", "/dev/shm/set", "--no-network"
        )
    finally:
        shutil.rmtree(data, ignore_errors=True)
    assert done.returncode == 1, done.stdout + done.stderr
    problems = [line for line in done.stdout.splitlines() if line.startswith("problem: ")]
    assert "host node9 must run this interpreter over ssh" in problems[0]
    assert any("hosts node1, 10.77.0.2 must be different machines" in line for line in problems)
    assert any(
        "host node1: /dev/shm/set must be the folder of a data set" in line for line in problems
    )
    assert not any("host node0" in line for line in problems)
    assert len(problems) == 4
