"""The lock of a store: exclusion, death of its owner, work that was left unfinished,
the timeout.
"""

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import ModuleType

import numpy as np
import pytest
from gear_support import prefix, wait_until
from process_support import exit_status, in_child, kill

from deepspeed_gear.errors import DataError, StoreError
from deepspeed_gear.ops import load_backend
from deepspeed_gear.store.memory_layout import HEADER_BYTES, MUTEX_OFFSET
from deepspeed_gear.store.shared_memory import SHM, SharedMemory
from deepspeed_gear.store.store_lock import StoreLock


class Scene:
    """A lock in shared memory, with counters behind it and a count of this process's recoveries."""

    def __init__(self, native: ModuleType) -> None:
        self.native = native
        self.name = f"{prefix()}-lock"
        self.memory = SharedMemory.create(2 * HEADER_BYTES)
        self.recoveries = 0
        self.lock = self.make(self.memory)
        self.lock.initialise()
        self.memory.link(self.name)
        self.words = np.ndarray((8,), np.int64, buffer=self.memory.buffer, offset=HEADER_BYTES)

    @property
    def owner(self) -> int:
        """The process that holds the lock, or 0."""
        begin = np.frombuffer(self.memory.buffer, np.uint8).ctypes.data
        owner: int = self.native.mutex_owner(begin + MUTEX_OFFSET)
        return owner

    def make(self, memory: SharedMemory, timeout_s: float = 20.0) -> StoreLock:
        def recover() -> None:
            self.recoveries += 1

        return StoreLock(memory, self.native, timeout_s, recover)

    def in_child_holding(self) -> int:
        """Start a child that holds the lock until it is killed."""

        def hold() -> None:
            memory = SharedMemory.attach(self.name, 1)
            with self.make(memory):
                self.words[0] = os.getpid()
                signal.pause()

        child = in_child(hold)
        wait_until(lambda: self.words[0] == child, "locking")
        return child


@pytest.fixture
def scene() -> Iterator[Scene]:
    scene = Scene(load_backend("cpu").native)
    yield scene
    (SHM / scene.name).unlink(missing_ok=True)
    scene.memory.close()


def test_the_next_owner_recovers_after_a_kill(scene: Scene) -> None:
    kill(scene.in_child_holding())
    for _ in range(2):
        with scene.lock:
            assert scene.recoveries == 1
    child = scene.in_child_holding()
    threading.Timer(0.2, lambda: os.kill(child, signal.SIGKILL)).start()
    with scene.lock:  # which it has waited for
        assert scene.recoveries == 2
    assert exit_status(child) == -signal.SIGKILL


def test_a_kill_while_recovering_hands_the_duty_on(scene: Scene) -> None:
    kill(scene.in_child_holding())

    def die_recovering() -> None:
        memory = SharedMemory.attach(scene.name, 1)
        lock = StoreLock(memory, scene.native, 20.0, lambda: os.kill(os.getpid(), signal.SIGKILL))
        with lock:
            pass

    assert exit_status(in_child(die_recovering)) == -signal.SIGKILL
    with scene.lock:
        assert scene.recoveries == 1


def test_a_failed_recovery_is_tried_again(scene: Scene) -> None:
    kill(scene.in_child_holding())
    attempts = []

    def recover() -> None:
        attempts.append(len(attempts))
        if len(attempts) == 1:
            raise MemoryError

    lock = StoreLock(scene.memory, scene.native, 20.0, recover)
    with pytest.raises(MemoryError), lock:
        pass
    with lock:
        pass
    with lock:
        assert attempts == [0, 1]


@pytest.mark.parametrize(
    ("error", "recoveries"),
    [
        (KeyboardInterrupt(), 1),
        (ValueError("a bug"), 1),
        (StoreError("x", "y"), 0),
        (DataError("x", "y"), 0),
    ],
)
def test_what_leaves_work_unfinished(scene: Scene, error: BaseException, recoveries: int) -> None:
    with pytest.raises(type(error)), scene.lock:
        raise error
    for _ in range(2):
        with scene.lock:
            assert scene.recoveries == recoveries


def test_timeout_names_the_holder(scene: Scene) -> None:
    with scene.lock:  # the native part keeps this process's id, and a fork has one of its own
        pass
    child = scene.in_child_holding()
    assert scene.owner == child
    rule = r"must be free within 0.2 s \(gear.timeout_s\)"
    text = rf"the lock of {SHM / scene.name} {rule}, got 'held by process {child}'"
    with pytest.raises(StoreError, match=text), scene.make(scene.memory, 0.2):
        pass
    kill(child)
    with scene.lock:  # the failed attempt holds nothing
        pass


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_ends_a_wait(scene: Scene) -> None:
    child = scene.in_child_holding()
    threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt), scene.make(scene.memory, 3600.0):
        pass
    assert scene.owner in (0, child)
    kill(child)
    with scene.lock:
        assert scene.recoveries == 1


def test_a_stopped_holder_is_waited_for_and_then_named(scene: Scene) -> None:
    def hold() -> None:
        memory = SharedMemory.attach(scene.name, 1)
        for _ in range(2):
            with scene.make(memory):
                scene.words[0] += 1
                os.kill(os.getpid(), signal.SIGSTOP)
            wait_until(lambda: scene.words[1] == 1, "the parent's turn")

    child = in_child(hold)
    os.waitpid(child, os.WUNTRACED)
    threading.Timer(0.3, lambda: os.kill(child, signal.SIGCONT)).start()
    with scene.make(scene.memory, 20.0):
        assert scene.words[0] == 1
    scene.words[1] = 1
    os.waitpid(child, os.WUNTRACED)
    text = (
        rf"held by process {child}, which is stopped'; continue it \(kill -CONT {child}\) or end it"
    )
    with pytest.raises(StoreError, match=text), scene.make(scene.memory, 0.2):
        pass
    os.kill(child, signal.SIGCONT)
    with scene.lock:
        assert scene.words[0] == 2
        assert scene.recoveries == 0, "its work was whole"
    assert exit_status(child) == 0


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_owners_exclude_each_other(scene: Scene, kind: str) -> None:
    def count(lock: StoreLock) -> None:
        for _ in range(300):
            with lock:
                seen = int(scene.words[1])
                time.sleep(1e-5)  # others would run meanwhile
                scene.words[1] = seen + 1

    if kind == "threads":
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(count, [scene.lock] * 3))
    else:

        def attach(peer: int) -> None:
            count(scene.make(SharedMemory.attach(scene.name, peer)))

        children = [in_child(partial(attach, peer)) for peer in (1, 2, 3)]
        assert [exit_status(child) for child in children] == [0, 0, 0]
    assert scene.words[1] == 900
    assert scene.recoveries == 0


def test_an_interrupt_while_waiting_leaves_the_lock_free(scene: Scene) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    child = scene.in_child_holding()
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with (
            pytest.raises(KeyboardInterrupt),
            scene.make(scene.memory, 2.0),
        ):  # raised when the wait ends
            raise AssertionError("the wait was not interrupted")
    finally:
        signal.signal(signal.SIGALRM, before)
    kill(child)
    with scene.make(scene.memory, 1.0):
        assert scene.recoveries == 1, "of who was killed"
