"""`gear clean`: stores of runs that have ended."""

from __future__ import annotations

import signal

import pytest
from gear_support import SCHEMA, config_of, prefix, shared_files, wait_until
from process_support import in_child, kill

from deepspeed_gear import Replay
from deepspeed_gear.cli.main import main
from deepspeed_gear.store.layout import MAGIC
from deepspeed_gear.store.memory import SharedMemory


def leave(name: str) -> None:
    memory = SharedMemory.create(4096)
    memory.buffer[: len(MAGIC)] = MAGIC
    memory.link(name)
    signal.pause()


def test_clean_removes_garbage_only(capsys: pytest.CaptureFixture[str]) -> None:
    ours = prefix()
    dead = in_child(lambda: leave(f"{ours}-dead"))
    living = in_child(lambda: leave(f"{ours}-living"))
    wait_until(lambda: len(shared_files(ours)) == 2, "linking")
    kill(dead)
    assert main(["clean", "--prefix", ours]) == 0
    assert capsys.readouterr().out == f"removed /dev/shm/{ours}-dead\n1 removed, 1 in use\n"
    assert shared_files(ours) == [f"{ours}-living"]
    kill(living)
    assert main(["clean", "--prefix", ours]) == 0
    assert shared_files(ours) == []


def test_the_next_run_cleans_as_well() -> None:
    ours = prefix()
    dead = in_child(lambda: leave(f"{ours}-dead"))
    wait_until(lambda: shared_files(ours), "linking")
    kill(dead)
    with Replay(config_of(batch_size=2), schemas={"main": SCHEMA}):
        assert shared_files(ours) == []
