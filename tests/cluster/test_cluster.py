"""The pretend machines are as separate as machines are, and DeepSpeed's launcher runs over them."""

import json
import os
import signal
from typing import Any

from cluster_support import Cluster
from gear_support import SHM, wait_until


def places(output: str) -> dict[int, dict[str, Any]]:
    """What the ranks of hello.py have said, by rank; pdsh puts the node before each line."""
    found = [
        json.loads(line.partition("PLACE ")[2]) for line in output.splitlines() if "PLACE " in line
    ]
    return {place["rank"]: place for place in found}


def test_a_launch_over_two_nodes(cluster: Cluster) -> None:
    before = [cluster.sent_bytes(node) for node in range(3)]
    said = places(cluster.run("hello.py", nodes=2, ranks=2))
    assert [said[rank]["host"] for rank in range(4)] == ["node0", "node0", "node1", "node1"]
    assert {place["total"] for place in said.values()} == {10}
    devices = [said[rank]["shm"] for rank in range(4)]
    assert devices[0] == devices[1] != devices[2] == devices[3]
    assert os.stat(SHM).st_dev not in devices
    sent = [cluster.sent_bytes(node) - before[node] for node in range(3)]
    assert min(sent[:2]) > 1000 > sent[2]


def test_processes_of_a_node_can_be_found_and_killed(cluster: Cluster) -> None:
    launch = cluster.start("hello.py", "--stay", nodes=2, ranks=1)
    launch.wait_for(r"PLACE[^\n]*\n(.*\n)*.*PLACE")
    (rank,) = [pid for pid in launch.pids(1, r"hello\.py --local_rank=0") if pid in cluster.pids(1)]
    assert rank not in cluster.pids(0)
    os.kill(rank, signal.SIGKILL)
    wait_until(
        lambda: "node1: ssh exited with exit code" in launch.output(), "the end of node1's launcher"
    )
    assert launch.pids(0, "hello")
    launch.kill()
    assert not launch.pids(0)
    assert launch.poll() == -signal.SIGKILL


def test_a_pulled_cable_loses_what_is_sent(cluster: Cluster) -> None:
    ask = ("bash", "-c", "exec 3<>/dev/tcp/node1/22 && head -c 4 <&3")
    assert cluster.exec(0, *ask) == "SSH-"
    cluster.link(1, "down")
    assert cluster.call(0, "timeout", "1", *ask).returncode == 124
    cluster.link(1, "up")
    wait_until(lambda: cluster.call(0, "timeout", "1", *ask).returncode == 0, "an answer")
