"""`gear clean`: stores of runs that have ended."""

import mmap
import os
import signal
from pathlib import Path

import pytest
from gear_support import SCHEMA, SHM, config_of, prefix, shared_files, wait_until
from process_support import in_child, kill

from deepspeed_gear import Replay
from deepspeed_gear.cli import ssh_hosts
from deepspeed_gear.cli.main import main
from deepspeed_gear.errors import PeerError
from deepspeed_gear.store.memory_layout import MAGIC
from deepspeed_gear.store.shared_memory import SharedMemory


def leave(name: str) -> None:
    memory = SharedMemory.create(4096)
    memory.buffer[: len(MAGIC)] = MAGIC
    memory.link(name)
    signal.pause()


def test_clean_removes_garbage_only(capsys: pytest.CaptureFixture[str]) -> None:
    """So does the next run."""
    ours = prefix()
    dead = in_child(lambda: leave(f"{ours}-dead"))
    living = in_child(lambda: leave(f"{ours}-living"))
    try:
        wait_until(lambda: len(shared_files(ours)) == 2, "linking")
        kill(dead)
        assert main(["clean", "--prefix", ours]) == 0
        lines = capsys.readouterr().out.splitlines()
        # Launches of other tests may have left buffers meanwhile.
        found = [
            line
            for line in lines
            if "deepspeed_allreduce" not in line and "DeepSpeed's" not in line
        ]
        assert found == [f"removed /dev/shm/{ours}-dead", "1 removed, 1 in use"]
        assert shared_files(ours) == [f"{ours}-living"]
    finally:
        kill(living)
    with Replay(config_of(batch_size=2), schemas={"main": SCHEMA}):
        assert shared_files(ours) == []


def test_clean_on_the_hosts_of_a_hostfile(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them, each with the same options; one that fails is named. `tests/cluster`
    uses ssh.
    """
    asked = dict[str, list[str]]()

    def run_on(host: str, arguments: list[str], timeout_s: float) -> str:
        asked[host] = arguments
        if host == "node1":
            raise PeerError(
                f"host {host}", "must run this interpreter over ssh, without a password"
            )
        return "removed /dev/shm/mine-1\n1 removed, 0 in use\n"

    monkeypatch.setattr(ssh_hosts, "run_on", run_on)
    hosts = tmp_path / "hosts"
    hosts.write_text("node0 slots=1\nnode1 slots=1\nnode2 slots=1\n")
    assert main(["clean", "--kept", "--prefix", "mine", "--hostfile", str(hosts)]) == 2
    found = capsys.readouterr()
    lines = [
        f"{host}: {line}"
        for host in ("node0", "node2")
        for line in run_on(host, [], 0.0).splitlines()
    ]
    assert found.out.splitlines() == lines
    assert "error: host node1 must run this interpreter" in found.err
    assert asked["node1"][2:] == ["clean", "--prefix", "mine", "--kept"]


def test_buffers_that_deepspeed_leaves(capsys: pytest.CaptureFixture[str]) -> None:
    """Those that a process maps, or holds open, stay; so do other users'."""
    names = [
        f"deepspeed_allreduce_buffer_{os.getuid()}_127.0.0.1_{os.getpid()}_{rank}"
        for rank in range(4)
    ]
    paths = [SHM / name for name in names]
    for path in paths:
        path.write_bytes(bytes(4096))
    foreign = SHM / names[3].replace(f"_{os.getuid()}_", f"_{os.getuid() + 1}_", 1)
    paths[3].rename(foreign)

    def use() -> None:
        with paths[0].open("rb+") as file:
            mapped = mmap.mmap(file.fileno(), 4096)
        with paths[1].open("rb"):
            (SHM / f"{ours}-ready").touch()
            signal.pause()
        mapped.close()

    ours = prefix()
    child = in_child(use)
    try:
        wait_until(lambda: shared_files(ours), "mapping")
        assert main(["clean", "--prefix", ours]) == 0
        assert [path.exists() for path in [*paths, foreign]] == [True, True, False, False, True]
        assert f"removed {paths[2]}\n" in capsys.readouterr().out
        kill(child)
        assert main(["clean", "--prefix", ours]) == 0
        assert f"removed {paths[0]}\nremoved {paths[1]}\n" in capsys.readouterr().out
        assert not any(path.exists() for path in paths)
    finally:
        for path in (foreign, SHM / f"{ours}-ready", *paths):
            path.unlink(missing_ok=True)
