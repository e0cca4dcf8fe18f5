"""The lock of a store: a robust mutex with a timeout, and the repair after its owner's death."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import numpy as np

from deepspeed_gear.errors import DataError, StoreError
from deepspeed_gear.store.memory_layout import HOLDER_OFFSET, MUTEX_OFFSET
from deepspeed_gear.store.shared_memory import SharedMemory

_REFUSALS = (StoreError, DataError)  # raised before anything has changed
# Longest wait in native code for a lock: between two, Python runs the handlers of signals
TURN_S = 0.1


class LockResult:
    LOCKED: Final = 0
    OWNER_DIED: Final = 1
    TIMED_OUT: Final = 2


class StoreLock:
    """Guards everything in a store that is not a committed row. Not reentrant.

    It is a robust process-shared mutex (store/mutex.cpp). A word holds the owner's process id until
    its work is complete; an owner that died, or left by anything but a refusal (Ctrl-C, a bug),
    does not clear it, and the next owner calls `recover` with the lock held. An owner that is
    stopped (SIGSTOP) is alive, with its work half done: waiters raise an error with its process id
    after `timeout_s`, and Ctrl-C ends their wait.
    """

    def __init__(
        self,
        memory: SharedMemory,
        native: ModuleType,
        timeout_s: float,
        recover: Callable[[], None],
    ) -> None:
        self._memory = memory
        self._native = native
        self.timeout_s = timeout_s
        self._recover = recover
        holder = np.ndarray((1,), np.int64, buffer=memory.buffer, offset=HOLDER_OFFSET)
        self._holder = holder.data  # one word: a NumPy scalar takes three times as long
        self._address = holder.ctypes.data - HOLDER_OFFSET + MUTEX_OFFSET
        self._thread: int | None = None  # which thread of this process holds it
        self._pid = os.getpid()

    def initialise(self) -> None:
        """Set the lock up in new memory, before it is linked."""
        self._native.mutex_init(self._address)

    def __enter__(self) -> StoreLock:
        thread = threading.get_ident()
        try:
            is_held = (
                self._thread == thread and self._native.mutex_owner(self._address) == self._pid
            )
            if not is_held:  # else Ctrl-C interrupted its release
                lock = self._native.mutex_lock
                until = time.monotonic() + (left := self.timeout_s)
                while (
                    result := lock(self._address, min(left, TURN_S))
                ) == LockResult.TIMED_OUT and left > 0:
                    left = until - time.monotonic()
                if result == LockResult.OWNER_DIED:
                    self._native.mutex_consistent(self._address)
                elif result != LockResult.LOCKED:
                    raise self._failure(result)
            self._thread = thread
            left_unfinished = self._holder[0] != 0
            self._holder[0] = self._pid
            if left_unfinished:
                self._recover()
        except BaseException:
            self._native.mutex_consistent(self._address)  # Ctrl-C may have come before that above
            self._release()  # the next owner has the same duty
            raise
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None or isinstance(error, _REFUSALS):
            self._holder[0] = 0
        self._release()

    def _release(self) -> None:
        """Release the lock; without effect where another thread or process has it."""
        self._native.mutex_unlock(self._address)
        self._thread = None

    def _failure(self, result: int) -> StoreError:
        name = f"the lock of {self._memory.path}"
        if result != LockResult.TIMED_OUT:
            return StoreError(name, "must be usable", None, "start the run again")
        holder = int(self._holder[0])
        given = f"held by process {holder}"
        remedy = "check what that process does"
        with suppress(OSError):  # it has ended, or is in another pid namespace
            status = Path("/proc", str(holder), "stat").read_text()
            # Stopped by a signal or a terminal (T), or by a debugger (t).
            if status.rpartition(")")[2].split()[0] in ("T", "t"):
                given = f"{given}, which is stopped"
                remedy = f"continue it (kill -CONT {holder}) or end it"
        return StoreError(
            name, f"must be free within {self.timeout_s} s (gear.timeout_s)", given, remedy
        )
