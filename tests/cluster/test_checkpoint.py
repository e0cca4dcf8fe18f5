"""What some nodes have saved goes on on any number of them, with the batches that would have come."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cluster_support import PROGRAMS, Cluster, rank_environment
from gear_support import lengths_of, write_dataset
from process_support import environment
from warm_python import run_warm

LONG = os.environ.get("GEAR_LONG_TESTS") == "1"
pytestmark = pytest.mark.timeout(3600 if LONG else 900)  # of several launches, each with a limit of its own

PROGRAM = "checkpoint_nodes.py"
KILLS = PROGRAMS.parents[1] / "crash" / "programs" / "save_kills.py"
Found = dict[tuple[str, str], dict[str, Any]]  # by folder and case


def found_in(output: str, action: str) -> Found:
    """What the program has said of an action; pdsh puts the node before each line."""
    lines = [json.loads(line.partition("FOUND ")[2]) for line in output.splitlines() if "FOUND " in line]
    parts = [(*line.pop("action").split("="), line.pop("case"), line) for line in lines]
    return {(Path(folder).name, case): line for what, folder, case, line in parts if what == action}


@pytest.fixture(scope="module")
def outputs(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """One launch for each number of nodes, each with all cases; a shard is lost when all have loaded it."""
    folder = tmp_path_factory.mktemp("checkpoint")
    data, one, two = str(folder / "data"), folder / "one", folder / "two"
    write_dataset(folder / "data" / "a", lengths_of(40), split={"eval": 0.3})
    write_dataset(folder / "data" / "b", lengths_of(25))

    def alone(*arguments: str) -> str:
        done = run_warm(str(PROGRAMS / PROGRAM), data, *arguments, env=environment(), timeout_s=120.0)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return {
        "one": alone(f"save={one}"),
        "two": cluster.run_ranks(PROGRAM, data, f"save={two}", f"load={one}", nodes=2, timeout_s=300),
        "again": alone(f"load={two}"),
        "four": cluster.run_ranks(PROGRAM, data, f"load={two}", f"lose={two}", nodes=4, timeout_s=300),
    }


def test_two_nodes_go_on_as_one_process_does(outputs: dict[str, str]) -> None:
    alone, nodes = found_in(outputs["one"], "save"), found_in(outputs["two"], "save")
    assert len(alone) == len(nodes) == 13
    for (_, case), found in nodes.items():
        assert found["again"] == [found["behind"]] * 2, case
        if not case.startswith("changed"):  # where rows are freed and used again, their order is the node's
            assert found == alone["one", case], case


@pytest.mark.parametrize(
    ("saved", "loaded"), [("one", "two"), ("two", "four"), ("two", "again")], ids="1-2 2-4 2-1".split()
)
def test_any_number_of_nodes_goes_on(outputs: dict[str, str], saved: str, loaded: str) -> None:
    expected, nodes = found_in(outputs[saved], "save"), found_in(outputs[loaded], "load")
    assert len(nodes) == 13
    for key, found in nodes.items():
        assert found["behind"] == expected[key]["behind"], key
        assert found["passed"] == expected[key]["passed"], key


def test_a_shard_that_is_lost_is_named_on_all_ranks(outputs: dict[str, str]) -> None:
    lost = found_in(outputs["four"], "lose")
    assert len(lost) == 2
    for found in lost.values():
        changed, removed = found["said"]
        assert len(changed) == len(removed) == 4
        assert all("shard-1/stream.train.queued.npy must be as it was saved" in text for text in changed)
        assert all("CheckpointError" in text and "shard-1/manifest.json" in text for text in removed)
        assert found["goes_on"] == 2


def test_no_kill_of_two_nodes_loses_a_checkpoint(cluster: Cluster, tmp_path: Path) -> None:
    """The ranks save over one tag; the next ones load it, wherever DeepSpeed's own file of it is whole."""
    kills, env = 200 if LONG else 3, {**rank_environment(), "GLOO_SOCKET_IFNAME": "eth0"}
    common = ["engine", "--folder", str(tmp_path), "--kills", str(kills), "--master", "10.77.0.1"]
    command = [sys.executable, str(KILLS), *common, "--port", "21000"]
    nodes = [
        subprocess.Popen(
            cluster.command(node, *command, "--ranks", str(node)),
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node in range(2)
    ]
    outputs = [node.communicate(timeout=3500)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], "\n".join(outputs)
    found = json.loads(outputs[0].splitlines()[-1])
    assert (found["kills"], found["lost"]) == (kills, 0)
    assert found["loaded"] > 0
