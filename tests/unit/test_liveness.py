"""A process that is killed is dead for others, also while a child that it has forked lives."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from gear_support import SCHEMA, SHM, prefix
from process_support import in_child, kill

from deepspeed_gear import DatasetWriter, liveness
from deepspeed_gear.checkpoint.folder_locks import FolderLocks
from deepspeed_gear.errors import DataError
from deepspeed_gear.store.memory_layout import MAGIC
from deepspeed_gear.store.shared_memory import SharedMemory, remove_garbage


@contextmanager
def left_by_the_killed(hold: Callable[[], Any]) -> Iterator[None]:
    """Run `hold` in a process that forks a child and is killed; the child lives on inside the
    block.
    """
    read, write = os.pipe()

    def run() -> None:
        held = hold()
        child = os.fork()
        if child:
            os.write(write, child.to_bytes(4, "little"))
        signal.pause()
        del held

    parent = in_child(run)
    child = int.from_bytes(os.read(read, 4), "little")
    os.close(read)
    os.close(write)
    kill(parent)
    yield
    os.kill(child, signal.SIGKILL)


def test_what_the_killed_have_held_is_free(tmp_path: Path) -> None:
    """A store, the place of a data set's writer, and the folder of saves."""
    path = SHM / f"{prefix()}-forked"

    def make_store() -> SharedMemory:
        memory = SharedMemory.create(4096, 0)
        memory.buffer[: len(MAGIC)] = MAGIC
        memory.link(path.name)
        return memory

    def lock() -> FolderLocks:
        locks = FolderLocks()
        locks.acquire(tmp_path)
        return locks

    with left_by_the_killed(make_store):
        assert remove_garbage(prefix()) == [path]
    with left_by_the_killed(lambda: DatasetWriter(tmp_path / "set", SCHEMA)):
        DatasetWriter(tmp_path / "set", SCHEMA).discard()
        living = DatasetWriter(tmp_path / "set", SCHEMA)
        with pytest.raises(DataError, match="must have one writer at a time"):
            DatasetWriter(tmp_path / "set", SCHEMA)
        living.discard()
    with left_by_the_killed(lock):
        lock()


def test_a_child_keeps_the_number_and_the_files_of_its_own(tmp_path: Path) -> None:
    """Else the next file that a child opens would take the number, and be closed by its parent's
    object.
    """
    held, forgotten = (
        os.open(tmp_path / name, os.O_RDWR | os.O_CREAT) for name in ("held", "forgotten")
    )
    liveness.hold(held)
    liveness.forget(liveness.hold(forgotten))

    def check() -> None:
        assert os.fstat(held).st_rdev == os.stat(os.devnull).st_rdev
        assert os.fstat(forgotten).st_ino == (tmp_path / "forgotten").stat().st_ino
        liveness.release(held)

    child = in_child(check)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert os.fstat(held).st_ino == (tmp_path / "held").stat().st_ino
    liveness.release(held)
    os.close(forgotten)
