"""`launch/multi_node.sh`: what it refuses, what it sends, and that nothing of a run is left."""

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from cluster_support import PROGRAMS, Cluster, Launch, rank_environment
from gear_support import ROOT, wait_until

SCRIPT = str(ROOT / "launch" / "multi_node.sh")
ENV = {"GLOO_SOCKET_IFNAME": "eth0"}


def refused(cluster: Cluster, *arguments: str, **env: str) -> str:
    """Run the script in node 0; it must end with 2. Return what it says."""
    done = cluster.call(0, SCRIPT, *arguments, env={**ENV, **env})
    assert done.returncode == 2, done.stdout + done.stderr
    return done.stderr


def start(cluster: Cluster, log: Path, *arguments: str) -> Launch:
    """Start the script in node 0."""
    return Launch(cluster, "", [SCRIPT, *arguments], {**rank_environment(), **ENV}, log)


def ranks_left(cluster: Cluster) -> list[int]:
    return [
        pid for node in range(cluster.num_nodes) for pid in cluster.pids(node, "deepspeed|programs")
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("node0 slots=2\nnode1\n", "line 2 must be 'HOST slots=NUMBER', got 'node1'"),
        ("# nobody\n\n", "must name a host"),
        (
            "node1 slots=08\nnode0 slots=0\n",
            "line 2 must have at least one slot, got 'node0 slots=0'; remove",
        ),
        ("node0 slots=1\nnode0 slots=1\n", "line 2 must name a host once, got node0 again"),
    ],
)
def test_a_wrong_hostfile_is_refused(
    cluster: Cluster, tmp_path: Path, text: str, message: str
) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text(text)
    assert message in refused(cluster, str(hostfile), "train.py")


def test_every_host_that_cannot_take_part_is_named(cluster: Cluster, tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text("node0 slots=1\nnode1 slots=1\nnode9 slots=1\nnode10 slots=1\n")
    said = refused(cluster, str(hostfile), str(PROGRAMS / "hello.py"))
    assert "host node9 must be reached by ssh without a password" in said
    assert "host node10 must be reached by ssh without a password" in said
    assert "host node0 must" not in said
    assert "host node1 must" not in said
    assert "host node1 must have the script nowhere.py" in refused(
        cluster, str(cluster.hostfile(2)), "nowhere.py"
    )


def test_a_host_that_takes_itself_for_loopback_is_named(cluster: Cluster, tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text("node0 slots=1\n10.77.0.2 slots=1\n")
    table = cluster.folder / "state" / "hosts"
    good = table.read_text()
    table.write_text(
        "127.0.1.1 node1\n" + good
    )  # in place: it is mounted over the nodes' /etc/hosts
    try:
        said = refused(cluster, str(hostfile), str(PROGRAMS / "hello.py"), GLOO_SOCKET_IFNAME="")
    finally:
        table.write_text(good)
    assert "host 10.77.0.2 must not resolve its own name (node1) to a loopback address" in said
    assert "host node0 must" not in said


def test_a_broken_deepspeed_env_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    env_file = tmp_path / "env"
    env_file.write_text("OMP_NUM_THREADS=1\n# comment\n")
    said = refused(cluster, str(cluster.hostfile(2)), "train.py", DS_ENV_FILE=str(env_file))
    assert "line 2 must be NAME=VALUE, got '# comment'" in said


def test_arguments_and_variables_arrive(cluster: Cluster, tmp_path: Path) -> None:
    env_file = tmp_path / "env"
    env_file.write_text("DS_ACCELERATOR=cpu\n")
    given = ["--x=1", "a b", '{"a":[1,"$HOME"]}', "50%h", "it's;", "", "*"]
    done = cluster.call(
        0, SCRIPT, str(cluster.hostfile(1)), str(PROGRAMS / "arguments.py"), *given,
        env={**ENV, "DS_ENV_FILE": str(env_file)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = re.findall("ARGUMENTS (.*)", done.stdout)
    assert json.loads(line) == given
    assert f"sending the variables of {env_file}" in done.stderr
    assert "OMP_NUM_THREADS is set here, but not in .deepspeed_env" in done.stderr


def test_a_failed_rank_ends_the_run_on_all_hosts(cluster: Cluster, tmp_path: Path) -> None:
    program = [str(PROGRAMS / "arguments.py"), "fail", str(tmp_path / "there")]
    run = start(cluster, tmp_path / "log", "--grace", "1", str(cluster.hostfile(2)), *program)
    assert run.wait(180) == 5, run.output()
    assert "ending the other hosts, 1 s after: pdsh@node0: node1: ssh exited" in run.output()
    assert "host node0: ended 2 processes" in run.output()
    wait_until(lambda: not ranks_left(cluster), "the end of the last rank")


def test_a_signal_ends_this_run_and_no_other(cluster: Cluster, tmp_path: Path) -> None:
    other = cluster.start("hello.py", "--stay", nodes=1)
    run = start(
        cluster, tmp_path / "log", str(cluster.hostfile(2)), str(PROGRAMS / "hello.py"), "--stay"
    )
    other.wait_for("PLACE")
    run.wait_for(r"PLACE[^\n]*\n(.*\n)*.*PLACE")
    (script,) = [
        pid for pid in cluster.pids(0, r"^bash .*multi_node\.sh") if parent_is_nsenter(pid)
    ]
    os.kill(script, signal.SIGTERM)
    run.wait(180)
    wait_until(lambda: "host node1: ended 2 processes" in run.output(), "the end of node1's ranks")
    # The shell that sshd started for a host's launcher lacks the mark; it ends after the launcher.
    wait_until(
        lambda: set(ranks_left(cluster)) == set(other.pids(0, "deepspeed|programs")),
        "the end of the run's shells",
    )
    assert len(other.pids(0, "deepspeed|programs")) >= 3  # runner, launcher, rank
    assert not list(cluster.shm(1).glob("deepspeed_allreduce_buffer_*"))


@pytest.mark.skipif(
    not shutil.which("mpirun") or importlib.util.find_spec("mpi4py") is None,
    reason="Open MPI's mpirun (apt-get install openmpi-bin) or mpi4py (pip install mpi4py) is "
    "missing",
)
def test_open_mpi(cluster: Cluster, tmp_path: Path) -> None:
    mpi = (
        "--launcher",
        "openmpi",
        "--launcher_args",
        "--allow-run-as-root --mca btl_tcp_if_include eth0",
    )
    hello = (str(cluster.hostfile(2, 2)), str(PROGRAMS / "hello.py"))
    run = start(cluster, tmp_path / "log", *mpi, *hello)
    assert run.wait(180) == 0, run.output()
    assert sorted(re.findall('"host": "(node.)".*"total": 10', run.output())) == sorted(
        ["node0", "node1"] * 2
    )
    run = start(cluster, tmp_path / "log", *mpi, *hello, "--stay")
    run.wait_for(r"(PLACE[^\n]*\n(.*\n)*.*){4}")
    (script,) = [
        pid for pid in cluster.pids(0, r"^bash .*multi_node\.sh") if parent_is_nsenter(pid)
    ]
    os.kill(script, signal.SIGTERM)
    assert run.wait(180)
    wait_until(lambda: not ranks_left(cluster), "the end of the last rank")


def parent_is_nsenter(pid: int) -> bool:
    """Tell a script from its subshells."""
    shown = subprocess.run(
        ["ps", "-o", "comm=", "-p", f"{parent(pid)}"], capture_output=True, text=True
    )
    return shown.stdout.strip() == "nsenter"


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
