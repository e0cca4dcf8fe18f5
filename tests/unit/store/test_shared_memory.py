"""Shared memory: creation, attachment and its refusals, liveness, removal, reapers of names."""

import contextlib
import faulthandler
import fcntl
import gc
import logging
import math
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from gear_support import prefix, shared_files, wait_until
from process_support import exit_status, in_child, kill, reapers
from store_support import killed_at

from deepspeed_gear import PolicyBoard, TrajectoryWriter
from deepspeed_gear.errors import ConfigError, StoreError, StoreFullError, StoreGoneError
from deepspeed_gear.store.memory_layout import MAGIC
from deepspeed_gear.store.reaper import FLOCK, WHOLE
from deepspeed_gear.store.shared_memory import SHM, SharedMemory, remove_garbage, stores

SIZE = 3 * 4096


def make(name: str, reaped: bool = False) -> SharedMemory:
    memory = SharedMemory.create(SIZE)
    memory.buffer[: len(MAGIC)] = MAGIC
    memory.link(name, reaped)
    return memory


def child_with(name: str, peer: int | None = None, reaped: bool = False) -> int:
    """Start a child that makes the memory, or attaches to it, and waits for its end."""

    def hold() -> None:
        kept = make(name, reaped) if peer is None else SharedMemory.attach(name, peer)
        faulthandler.disable()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pause()
        kept.close()

    child = in_child(hold)
    wait_until((SHM / name).exists, "linking")
    return child


@pytest.fixture
def name() -> Iterator[str]:
    name = f"{prefix()}-memory"
    yield name
    (SHM / name).unlink(missing_ok=True)
    assert_nothing_is_left()


def assert_nothing_is_left() -> None:
    wait_until(lambda: not reapers(prefix()), "the end of the reapers")
    assert shared_files(prefix()) == []


def open_files() -> int:
    gc.collect()  # what earlier tests have dropped may hold files too
    return len(os.listdir("/proc/self/fd"))


def test_content_is_shared_once_it_is_linked(name: str) -> None:
    SharedMemory.create(SIZE).close()
    assert shared_files(prefix()) == []
    with_name = make(name)
    assert oct((SHM / name).stat().st_mode & 0o777) == "0o600"
    other = SharedMemory.attach(name, 1)
    with_name.buffer[100:105] = b"hello"
    assert other.buffer[100:105] == b"hello"
    assert other.num_bytes == SIZE
    with_name.close()
    assert (SHM / name).exists()
    view = memoryview(other.buffer)
    for _ in range(2):
        other.close()
    assert not (SHM / name).exists()
    assert view[0] == MAGIC[0]  # views outlive it


@pytest.mark.parametrize("wrong", ["", ".", "..", "../tmp/x", "/etc/passwd", "a/b", "a\0b"])
def test_names_stay_in_dev_shm(wrong: str) -> None:
    memory = SharedMemory.create(SIZE)
    tables = {"tables": {"main": {"writers": 1}}}
    calls: list[Callable[[], Any]] = [
        lambda: SharedMemory.attach(wrong, 1),
        lambda: memory.link(wrong),
        lambda: stores(wrong),
        lambda: remove_garbage(wrong),
        lambda: PolicyBoard.attach(name=wrong),
        lambda: TrajectoryWriter.attach({**tables, "shared_memory": {"prefix": wrong}}, wait_s=0),
    ]
    if wrong:
        calls.append(lambda: TrajectoryWriter.attach(name=wrong, wait_s=0))
    for call in calls:
        with pytest.raises(ConfigError, match="must be the name of a file without its folder"):
            call()
    memory.close()


@pytest.mark.parametrize("wrong", [-1.0, math.inf, math.nan, 1e10, 604_801, "60", True, None])
def test_timeouts_as_arguments_are_bounded(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"must be a number of seconds in \[0, 604800\]"):
        TrajectoryWriter.attach({}, wait_s=wrong)


def refused_link(path: Path) -> None:
    target = path.with_name(path.name + "-target")
    path.rename(target)
    path.symlink_to(target)


def refused_owner(path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a file to another user")
    os.chown(path, 12345, -1)


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (lambda path: path.chmod(0o644), r"must have mode 0600, got '0o644'"),
        (refused_link, r"must be an existing store, got 'Too many levels of symbolic links'"),
        (
            lambda path: (path.unlink(), path.mkdir()),
            r"must be an existing store, got 'Is a directory'",
        ),
        (Path.unlink, r"must be an existing store, got 'No such file or directory'"),
        (lambda path: (path.unlink(), os.mkfifo(path, 0o600)), r"must be a regular file"),
        (lambda path: os.truncate(path, 0), r"must be a gear store, got 'an empty file'"),
        (refused_owner, r"must belong to user 0, got 12345"),
    ],
)
def test_attach_refuses(name: str, spoil: Callable[[Path], Any], text: str) -> None:
    memory = make(name)
    path = SHM / name
    spoil(path)
    before = open_files()
    try:
        with pytest.raises(StoreError, match=text) as caught:
            SharedMemory.attach(name, 1)
        assert str(path) in str(caught.value)
        assert open_files() == before
    finally:
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        path.unlink(missing_ok=True)
        path.with_name(path.name + "-target").unlink(missing_ok=True)
        memory.close()


def test_a_place_is_taken_once(name: str) -> None:
    memory = make(name)
    other = SharedMemory.attach(name, 1)
    for peer in (0, 1):
        with pytest.raises(StoreError, match=rf"peer {peer} must be attached by one process only"):
            SharedMemory.attach(name, peer)
    other.close()
    SharedMemory.attach(name, 1).close()
    memory.close()


@pytest.mark.parametrize("excess", [1, 1 << 40, 1 << 62, 1 << 80])
def test_full_memory_is_an_error_that_takes_nothing(excess: int) -> None:
    status = os.statvfs(SHM)
    size = (
        status.f_blocks * status.f_frsize + excess
    )  # more than all, whatever others give back meanwhile
    files = open_files()
    rule = (
        r"must have [\d.]+ \w+ free, got '[\d.]+ \w+ \(No space.*; docker run --shm-size; "
        r"Kubernetes: "
    )
    with pytest.raises(StoreFullError, match=rule):
        SharedMemory.create(size)
    wait_until(
        lambda: open_files() <= files, "no file that stays open"
    )  # other threads may have some
    after = os.statvfs(SHM)
    assert (
        abs(after.f_bavail - status.f_bavail) * status.f_frsize < 1 << 30
    )  # others use it as well


@pytest.mark.parametrize("huge_pages", [True, False])
def test_huge_pages_change_nothing_but_speed(name: str, huge_pages: bool) -> None:
    memory = SharedMemory.create(5 << 20, 0, huge_pages)
    memory.buffer[(5 << 20) - 1] = 9
    assert memory.buffer[(5 << 20) - 1] == 9
    assert 0 <= memory.huge_bytes <= 6 << 20
    assert os.fstat(memory.fd).st_blocks * 512 >= 5 << 20  # every page exists already
    memory.close()


def test_files_of_other_programs_are_not_ours(name: str) -> None:
    path = SHM / name
    path.write_bytes(b"somebody's data" * 500)
    path.chmod(0o600)
    assert stores(prefix()) == []
    assert remove_garbage(prefix()) == []
    foreign = SharedMemory.attach(name, 0)
    foreign.close()
    assert path.exists()
    assert remove_garbage("*") == []


def test_racing_removals_remove_once() -> None:
    ours = prefix()
    names = [f"{ours}-race{i}" for i in range(40)]

    def run() -> None:
        for name in names:
            make(name)
        signal.pause()

    child = in_child(run)
    wait_until(lambda: len(shared_files(ours)) == len(names), "linking")
    kill(child)
    assert remove_garbage(ours + "x") == []
    read, write = os.pipe()

    def remove() -> None:
        os.write(write, bytes([len(remove_garbage(ours))]))

    children = [in_child(remove) for _ in range(3)]
    assert [exit_status(child) for child in children] == [0, 0, 0]
    assert sum(os.read(read, 3)) == len(names)
    assert shared_files(ours) == []
    os.close(read)
    os.close(write)


# ---- reapers: a name goes however the last process ends ------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_the_name_goes_however_the_process_ends(name: str, number: int) -> None:
    child = child_with(name, reaped=True)
    (reaper,) = reapers(prefix())
    assert os.getsid(reaper) not in (os.getsid(0), os.getsid(child))
    assert (Path("/proc") / str(reaper) / "comm").read_text() == "gear-reaper\n"
    library = os.environ.get("LD_LIBRARY_PATH")
    environment = b"" if library is None else f"LD_LIBRARY_PATH={library}\0".encode()
    assert (Path("/proc") / str(reaper) / "environ").read_bytes() in (b"", environment)
    held = ["/dev/null"] * 3 + [str(SHM / name)]  # and nothing that it would keep alive
    opened = Path(f"/proc/{reaper}/fd")
    wait_until(
        lambda: sorted(os.readlink(file) for file in opened.iterdir()) == held, "opening the file"
    )
    for sent in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        os.kill(reaper, sent)
    os.kill(child, number)
    assert exit_status(child) == -number
    assert_nothing_is_left()


def test_the_name_stays_while_a_process_is_attached(name: str) -> None:
    rank = child_with(name, reaped=True)
    looking = SharedMemory.attach(name, 2)
    assert looking.is_alive(0)
    assert not looking.is_alive(1)
    writer = child_with(name, 1)
    wait_until(lambda: looking.is_alive(1), "attaching")
    kill(rank)
    assert not looking.is_alive(0)
    assert remove_garbage(prefix()) == []
    SharedMemory.attach(name, 3).close()  # a waiting reaper hinders none
    looking.close()
    assert shared_files(prefix()) == [name]
    kill(writer)
    assert_nothing_is_left()


def test_the_last_close_removes_the_name_itself(name: str) -> None:
    """Also where many processes close at once, and where views of the memory outlive it."""
    for _ in range(5):
        memory = make(name, reaped=True)
        view = memory.buffer[:1]
        others = [SharedMemory.attach(name, peer) for peer in range(1, 4)]
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(SharedMemory.close, [memory, *others]))
        assert shared_files(prefix()) == []
        wait_until(lambda: not reapers(prefix()), "the end of the reaper")
        assert view[0] == MAGIC[0]


def test_a_kill_at_any_line_leaves_nothing(name: str) -> None:
    line = 1
    while killed_at(line, lambda: make(name, reaped=True)):
        assert_nothing_is_left()
        line += 9  # most calls of the store have fewer lines
    assert line > 50, "too few places of death: the trace saw nothing"


def test_a_taken_name(name: str) -> None:
    first = make(name, reaped=True)
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
        memory = make(name, reaped=True)
    assert "no reaper can be started" in caplog.text
    assert "gear clean" in caplog.text
    assert shared_files(prefix()) == [name]
    memory.close()


def test_too_many_open_files_are_not_a_full_memory(name: str) -> None:
    memory = make(name, reaped=True)
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
        fcntl.fcntl(
            memory.fd, fcntl.F_OFD_SETLK, FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, 0, WHOLE, 0)
        )
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, WHOLE, 0))
        with pytest.raises(StoreGoneError, match="must belong to a living run; its run has ended"):
            SharedMemory.attach_one_of(name, range(1, 3))
    memory.close()
    (SHM / name).unlink()
