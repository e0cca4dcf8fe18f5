"""`gear doctor`: problems of machines from their facts, and connections between hosts."""

import io
import json
import threading
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.launcher.runner import fetch_hostfile, parse_inclusion_exclusion
from gear_support import lengths_of, wait_until, write_dataset

from deepspeed_gear.cli import doctor, ssh_hosts
from deepspeed_gear.cli.doctor import driver_version, examine, problems_of, read_answer, summary
from deepspeed_gear.cli.main import main
from deepspeed_gear.cli.ssh_hosts import read_hostfile
from deepspeed_gear.errors import BuildError, ConfigError, GearError, PeerError, error_to_json
from deepspeed_gear.store.cuda_registration import why_impossible

GOOD: dict[str, Any] = {
    "boot_id": "boot",
    "address": "10.0.0.1",
    "gloo_interface": "",
    "shm_bytes": 32 << 30,
    "shm_free_bytes": 31 << 30,
    "memlock_bytes": 8 << 20,
    "open_files": 1024,
    "memory_bytes": 1 << 40,
    "cpus": 64,
    "infiniband": [],
    "driver": "580.65.06",
    "gpus": ["H200"] * 8,
    "no_device": "",
    "versions": {"python": "3.11.7", "torch": "2.13.0", "CUDA of torch": "13.0"},
    "native_sources": "abc",
    "not_registered": "",
    "errors": [],
}


def machines(count: int = 3, **changes: Any) -> dict[str, dict[str, Any]]:
    """Return reports of good machines; `node1` has the changes."""
    found = {f"node{i}": {**GOOD, "hostname": f"node{i}"} for i in range(count)}
    found["node1"] |= changes
    return found


def messages(reports: dict[str, dict[str, Any]], slots: dict[str, int] | None = None) -> list[str]:
    return [str(problem) for problem in problems_of(reports, slots or {})]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shm_free_bytes": 64 << 20}, "host node1: /dev/shm must have 1 GiB free, got '64 MiB " "of 32 GiB'"),
        ({"gpus": [], "no_device": "old"}, "must see a device where there is a driver (580.65.06)"),
        ({"open_files": 256}, "host node1: the limit of open files must be at least 1024, got 256"),
        ({"infiniband": ["mlx5_0"]}, "host node1: the limit of locked memory must be unlimited"),
        ({"address": "127.0.1.1"}, "host node1: its own name, node1, must not resolve to a " "loopback address"),
        ({"hostname": "node0"}, "hosts node0, node1 must be different machines"),
        ({"native_sources": "xyz"}, "got 'abc on node0, node2; xyz on node1'"),
        ({"versions": GOOD["versions"] | {"torch": "2.4.0"}},
         "torch must be the same on all hosts, got '2.13.0 on node0, node2; 2.4.0 on node1'"),
        ({"versions": GOOD["versions"] | {"torch": "none"}}, "got '2.13.0 on node0, node2; none " "" "" "on node1'"),
        ({"errors": [error_to_json(GearError("the op", "must compile", None, "install g++"))]},
         "host node1: the op must compile; install g++"),
    ],
)  # fmt: skip
def test_each_problem_is_named(changes: dict[str, Any], message: str) -> None:
    (found,) = messages(machines(**changes))
    assert message in found
    assert "; " in found, "no remedy"


def test_what_is_no_problem() -> None:
    assert messages(machines(), {"node0": 8, "node1": 8, "node2": 8}) == []
    for changes in (
        {"address": "127.0.1.1", "gloo_interface": "eth0"},
        {"infiniband": ["mlx5_0"], "memlock_bytes": None},
        {"open_files": None},
        {"gpus": [], "no_device": "hidden", "driver": ""},  # a machine, or a container, for the CPU
    ):
        assert messages(machines(**changes)) == [], changes
    assert (
        messages({"here": {**GOOD, "hostname": "here", "address": "127.0.1.1"}}) == []
    )  # it has no peers


@pytest.mark.parametrize(
    ("capabilities", "uid_map", "wanted"),
    [
        ("00000000a80465fb", "0 0 4294967295", True),  # a container's, with IPC_LOCK
        ("00000000a80425fb", "0 0 4294967295", False),  # and without
        ("0000000000000000", "0 0 4294967295", False),  # another user than root
        ("000001ffffffffff", "0 100000 65536", False),  # root of a user namespace
        ("", "", False),
    ],
)
def test_the_limit_of_locked_memory_counts_without_its_capability(
    capabilities: str, uid_map: str, wanted: bool
) -> None:
    status = f"Name:\tpython\nCapPrm:\t000001ffffffffff\nCapEff:\t{capabilities}\nSeccomp:\t0\n"
    assert doctor.may_lock_any_amount(status, f"         {uid_map}\n") is wanted


def test_slots_are_compared_with_gpus() -> None:
    wanted = "slots of node0 must be at most its 8 GPUs, got 9; correct the hostfile"
    assert messages(machines(), {"node0": 9}) == [wanted]
    assert messages(machines(2, gpus=[]), {"node1": 9}) == []


def test_the_summary_has_devices_memory_and_limits() -> None:
    lines = summary({**GOOD, "gpus": ["H200", "H200", "L4"], "memlock_bytes": None})
    assert lines["devices"] == "2 x H200, 1 x L4; driver 580.65.06; torch 2.13.0"
    assert lines["shared memory"] == "31 GiB of 32 GiB free in /dev/shm; available memory 1 TiB"
    assert lines["limits"] == "open files 1024; locked memory unlimited; CPUs 64"
    nothing = {
        "gpus": [],
        "driver": "",
        "no_device": "no driver",
        "open_files": None,
        "memory_bytes": None,
    }
    lines = summary({**GOOD, **nothing})
    assert lines["devices"] == "none (no driver); driver none; torch 2.13.0"
    assert lines["shared memory"].endswith("available memory unknown")
    assert lines["limits"] == "open files unlimited; locked memory 8 MiB; CPUs 64"


@pytest.mark.parametrize(
    "text",
    [
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Thu Oct 19 18:56:32\nGCC "
        "version: 12",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  "
        "(dvs@host)\n",
    ],
)
def test_the_driver_is_found(text: str) -> None:
    assert driver_version(text) == "580.65.06"
    assert driver_version("") == ""


def test_data_sets_are_compared() -> None:
    reports = machines()
    for host in reports:
        reports[host]["data"] = {"fingerprint": "a" * 64, "num_trajectories": 5, "num_steps": 50}
    assert messages(reports) == []
    reports["node2"]["data"]["fingerprint"] = "b" * 64
    del reports["node1"]["data"]  # it cannot be opened there
    (differing,) = messages(reports)
    assert f"{'a' * 16} on node0; {'b' * 16} on node2" in differing


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_machine_without_cuda_says_so() -> None:
    assert why_impossible() in (
        f"torch {torch.__version__} is built without CUDA",
        "torch finds no CUDA device",
    )


def test_connections_are_tried_and_failures_named() -> None:
    shown = io.StringIO()
    with redirect_stdout(shown):
        server = threading.Thread(target=ssh_hosts.serve, args=("secret", 1.0), daemon=True)
        server.start()
        wait_until(lambda: shown.getvalue().endswith("\n"), "listening")
    here = f"127.0.0.1:{shown.getvalue().strip()}"
    assert ssh_hosts.ask("secret", [here]) == {}
    assert ssh_hosts.ask("public", [here]) == {here: "another program answers"}
    server.join()
    assert not server.is_alive()
    ((address, why),) = ssh_hosts.ask("secret", [here]).items()
    assert address == here
    assert "refused" in why


def test_the_hostfile_is_read_as_deepspeed_reads_it(checkout: Path, tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# all\n\n  node0 slots=2\nuser@node1\tslots=4 # more\n")
    for file in (path, checkout / "configs" / "hostfile.example"):
        hosts = read_hostfile(file)
        assert hosts == dict(fetch_hostfile(str(file)))
        assert list(hosts) == list(fetch_hostfile(str(file)))
    assert read_hostfile(path) == {"node0": 2, "user@node1": 4}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("node0 slots=1\nnode1 slot=1\n", "line 2 must be 'HOST slots=NUMBER', got 'node1 slot=1'"),
        ("node0 slots=1\nnode0 slots=2\n", "line 2 must name a host once, got 'node0'"),
        ("# none\n", "must name a host; "),
    ],
)
def test_a_wrong_hostfile_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "hosts"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_hostfile(path)
    with pytest.raises(ValueError, match="Hostfile"):
        fetch_hostfile(str(path))


def test_a_host_without_slots_is_refused(tmp_path: Path) -> None:
    """DeepSpeed takes it: it starts no rank there, and makes it the master where it is the first
    host.
    """
    path = tmp_path / "hosts"
    path.write_text("node0 slots=0\nnode1 slots=2\n")
    assert list(parse_inclusion_exclusion(fetch_hostfile(str(path)), "", "")["node0"]) == []
    with pytest.raises(
        ConfigError, match=r"line 1 must have at least one slot, got 'node0 slots=0'; remove"
    ):
        read_hostfile(path)


def test_a_missing_file_wrong_options_and_stale_locks_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["doctor", "--hostfile", str(tmp_path / "none")]) == 2
    assert "must be a readable hostfile" in capsys.readouterr().err
    assert main(["doctor", "--timeout", "0"]) == 2
    assert "--timeout must be positive, got 0" in capsys.readouterr().err
    lock = BuildError("/x/lock", "must be held", None, "rm it")
    monkeypatch.setattr("deepspeed_gear.ops.stale_locks.remove", lambda: [lock])
    assert main(["doctor", "--data", str(tmp_path / "none")]) == 1
    shown = capsys.readouterr().out
    assert "problem: host here: /x/lock must be held; rm it\n" in shown
    assert f"problem: host here: {tmp_path / 'none'} must " in shown


def test_deepspeed_reads_every_line_of_the_example_of_variables(checkout: Path) -> None:
    lines = (checkout / "configs" / "deepspeed_env.example").read_text().splitlines()
    pairs = [line.split("=", maxsplit=1) for line in lines]
    assert all(len(pair) == 2 and pair[0].isidentifier() for pair in pairs)


def test_an_answer_is_found_among_other_output() -> None:
    assert read_answer("a", 'Welcome!\nGEAR-NODE {"cores": 2}\nbye\n') == {"cores": 2}
    with pytest.raises(PeerError, match="host a must have a deepspeed_gear"):
        read_answer("a", "Welcome!\n")


def test_this_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_dataset(tmp_path / "set", lengths_of(12))
    to = tmp_path / "found.json"
    status = main(["doctor", "--data", str(data), "--json", str(to)])
    shown = capsys.readouterr().out
    found = json.loads(to.read_text())
    facts = found["hosts"]["here"]
    assert status == bool(found["problems"])
    assert facts["errors"] == []
    assert [line.partition(": here: ")[0] for line in shown.splitlines()[:4]] == list(
        summary(facts)
    )
    assert f"; torch {torch.__version__}\n" in shown
    assert facts["data"] == examine(str(data))["data"]
