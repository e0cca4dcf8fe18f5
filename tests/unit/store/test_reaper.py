"""Reapers: they remove a file's name however the last process ends, and nothing of them is left."""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import logging
import os
import resource
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from gear_support import prefix, shared_files, wait_until
from process_support import exit_status, in_child, reapers
from store_support import killed_at

from deepspeed_gear.errors import StoreError, StoreGoneError
from deepspeed_gear.store.memory_layout import MAGIC
from deepspeed_gear.store.reaper import FLOCK, WHOLE
from deepspeed_gear.store.shared_memory import SHM, SharedMemory, remove_garbage

SIZE = 3 * 4096


@pytest.fixture
def name() -> Iterator[str]:
    name = f"{prefix()}-reaped"
    yield name
    (SHM / name).unlink(missing_ok=True)
    assert_nothing_is_left()


def assert_nothing_is_left() -> None:
    wait_until(lambda: not reapers(prefix()), "the end of the reapers")
    assert shared_files(prefix()) == []


def make(name: str) -> SharedMemory:
    memory = SharedMemory.create(SIZE)
    memory.buffer[: len(MAGIC)] = MAGIC
    memory.link(name, reaped=True)
    return memory


def hold(name: str) -> None:
    made = make(name)
    faulthandler.disable()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pause()
    made.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_the_name_goes_however_the_process_ends(name: str, number: int) -> None:
    child = in_child(lambda: hold(name))
    wait_until((SHM / name).exists, "linking")
    (reaper,) = reapers(prefix())
    assert os.getsid(reaper) not in (os.getsid(0), os.getsid(child))
    assert (Path("/proc") / str(reaper) / "comm").read_text() == "gear-reaper\n"
    assert (Path("/proc") / str(reaper) / "environ").read_bytes() in (b"", _library())
    held = ["/dev/null"] * 3 + [str(SHM / name)]  # and nothing that it would keep alive
    wait_until(lambda: open_files(reaper) == held, "opening the file")
    for sent in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(reaper, sent)
    os.kill(child, number)
    assert exit_status(child) == -number
    assert_nothing_is_left()


def open_files(process: int) -> list[str]:
    return sorted(os.readlink(entry) for entry in Path(f"/proc/{process}/fd").iterdir())


def _library() -> bytes:
    value = os.environ.get("LD_LIBRARY_PATH")
    return b"" if value is None else f"LD_LIBRARY_PATH={value}\0".encode()


def test_the_name_stays_while_a_process_is_attached(name: str) -> None:
    def write() -> None:
        SharedMemory.attach(name, 1)
        signal.pause()

    rank = in_child(lambda: hold(name))
    wait_until((SHM / name).exists, "linking")
    looking = SharedMemory.attach(name, 2)
    writer = in_child(write)
    wait_until(lambda: looking.is_alive(1), "attaching")
    os.kill(rank, signal.SIGKILL)
    exit_status(rank)
    assert not looking.is_alive(0)
    SharedMemory.attach(name, 3).close()  # a waiting reaper hinders none
    looking.close()
    assert shared_files(prefix()) == [name]
    os.kill(writer, signal.SIGKILL)
    exit_status(writer)
    assert_nothing_is_left()


def test_the_last_close_removes_the_name_itself(name: str) -> None:
    """Also where many processes close at once, and where views of the memory outlive it."""
    for _ in range(20):
        memory = make(name)
        view = memory.buffer[:1]
        others = [SharedMemory.attach(name, peer) for peer in range(1, 4)]
        threads = [threading.Thread(target=one.close) for one in (memory, *others)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert shared_files(prefix()) == []
        wait_until(lambda: not reapers(prefix()), "the end of the reaper")
        assert view[0] == MAGIC[0]


def test_a_kill_at_any_line_leaves_nothing(name: str) -> None:
    line = 1
    while killed_at(line, lambda: make(name)):
        assert_nothing_is_left()
        line += 9  # most calls of the store have fewer lines
    assert line > 50, "too few places of death: the trace saw nothing"


def test_a_taken_name(name: str) -> None:
    first = make(name)
    second = SharedMemory.create(SIZE)
    with pytest.raises(FileExistsError):
        second.link(name, reaped=True)
    second.close()
    wait_until(lambda: len(reapers(prefix())) == 1, "the end of the second reaper")
    assert shared_files(prefix()) == [name]
    first.close()


@pytest.mark.parametrize("program", ["/nonexistent", "/bin/false"])
def test_where_no_reaper_can_be_started(
    name: str, program: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "executable", program)
    with caplog.at_level(logging.WARNING, "deepspeed_gear"):
        memory = make(name)
    assert "no reaper can be started" in caplog.text
    assert "gear clean" in caplog.text
    assert shared_files(prefix()) == [name]
    memory.close()


def test_too_many_open_files_are_not_a_full_memory(name: str) -> None:
    memory = make(name)
    most, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = r"must be opened, got 'Too many open files'; raise the limit of open files"
    held: list[int] = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (512, limit))
        with contextlib.suppress(OSError):
            while True:
                held.append(os.open(os.devnull, os.O_RDONLY))
        for action in (
            lambda: SharedMemory.create(SIZE),
            lambda: SharedMemory.attach(name, 1),
            lambda: remove_garbage(prefix()),
        ):
            with pytest.raises(StoreError, match=text):
                action()
        os.close(held.pop())
        with pytest.raises(StoreError, match=text):
            SharedMemory.create(SIZE)  # its file can be opened, its map not
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, limit))
        for fd in held:
            os.close(fd)
        memory.close()


def test_attaching_to_what_is_being_removed(name: str) -> None:
    """The lock of who removes a store is not taken for that of a process with this index."""
    memory = SharedMemory.create(SIZE)
    memory.link(name)
    with open(SHM / name, "rb+") as file:
        fcntl.fcntl(memory.fd, fcntl.F_OFD_SETLK, FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, 0, WHOLE, 0))
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, WHOLE, 0))
        with pytest.raises(StoreGoneError, match="must belong to a living run; its run has ended"):
            SharedMemory.attach_one_of(name, range(1, 3))
    memory.close()
    (SHM / name).unlink()
