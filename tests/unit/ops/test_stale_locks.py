"""Locks of killed extension builds: removed if their holder is dead, and only then."""

import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from warm_python import PIPE, WarmProcess

from deepspeed_gear import file_system
from deepspeed_gear.ops import stale_locks

HOLDER = """
import sys, time
from torch.utils.file_baton import FileBaton
assert FileBaton(sys.argv[1]).try_acquire()
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture
def hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], WarmProcess]]:
    """Start a process that holds the lock of an extension as torch does; its age is an hour."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    lock = lock_of(tmp_path)
    started = []
    lock.parent.mkdir()

    def start() -> WarmProcess:
        holder = WarmProcess(["-c", HOLDER, str(lock)], os.environ, PIPE)
        started.append(holder)
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        os.utime(lock, (time.time() - 3600,) * 2)
        return holder

    yield start
    for holder in started:
        end(holder)


def end(holder: WarmProcess) -> None:
    holder.kill()
    holder.wait()
    assert holder.stdout is not None
    holder.stdout.close()


def lock_of(folder: Path) -> Path:
    return folder / "deepspeed_shm_comm" / "lock"


def test_the_lock_of_a_dead_build_is_removed(
    tmp_path: Path, hold: Callable[[], WarmProcess], caplog: pytest.LogCaptureFixture
) -> None:
    lock = lock_of(tmp_path)
    assert stale_locks.remove() == []
    holder = hold()
    assert stale_locks.remove() == []
    assert lock.exists(), "its holder lives"
    end(holder)
    made = lock.stat().st_mtime
    os.utime(lock)
    assert stale_locks.remove() == []
    assert lock.exists(), "it was just made"
    os.utime(lock, (made, made))
    assert stale_locks.remove() == []
    assert not lock.exists()
    (message,) = [record.getMessage() for record in caplog.records]
    assert re.fullmatch(f"gear: removed {lock}, made 36.. s ago by a build that has died", message)


@pytest.mark.parametrize("is_held", [False, True])
def test_a_lock_that_changes_hands_between_two_looks_stays(
    tmp_path: Path, hold: Callable[[], WarmProcess], monkeypatch: pytest.MonkeyPatch, is_held: bool
) -> None:
    """Another process removes the stale lock, and a third one builds, or closes its own a moment
    ago.
    """
    end(hold())

    def change_hands(seconds: float) -> None:
        lock_of(tmp_path).unlink()
        if is_held:
            hold()
        lock_of(tmp_path).touch()

    monkeypatch.setattr(stale_locks.time, "sleep", change_hands)
    assert stale_locks.remove() == []
    assert lock_of(tmp_path).exists()


@pytest.mark.parametrize("why", ["other machines may use its file system", "Invalid argument"])
def test_a_lock_whose_holder_cannot_be_seen_is_only_named(
    why: str,
    tmp_path: Path,
    hold: Callable[[], WarmProcess],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is on a file system of other machines, or on one without leases."""
    if why == "Invalid argument":
        monkeypatch.setattr(file_system.fcntl, "F_SETLEASE", -1)
    else:
        monkeypatch.setattr(stale_locks, "_LOCAL", frozenset())
    end(hold())
    lock = lock_of(tmp_path)
    (error,) = stale_locks.remove()
    assert lock.exists()
    pattern = (
        f"gear: {lock} must be held by a process that builds, got 'a lock of 36.. s, not "
        f"removed: .*"
    )
    (message,) = [record.getMessage() for record in caplog.records]
    assert re.fullmatch(f"{pattern}{why}.*'; rm {lock}, if no process builds", message)
    assert message == f"gear: {error}"
    os.utime(lock)
    assert stale_locks.remove() == [], "a build may take minutes"


def test_a_folder_that_cannot_be_made_has_no_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "file" / "below"))
    assert stale_locks.remove() == []
