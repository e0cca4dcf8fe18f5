"""Ctrl-C at places where Python ignores it, and what an interrupted command left."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_AGAIN_S = 0.02


@contextmanager
def repeated_interrupts() -> Iterator[None]:
    """Send SIGINT again if Python ignores its KeyboardInterrupt, and suppress the traceback.

    Python ignores exceptions in finalizers and callbacks of weak references, such as those of
    h5py's files.
    """
    before = sys.unraisablehook
    waiting = list[threading.Timer]()

    def send_again(unraisable: Any) -> None:
        if not issubclass(unraisable.exc_type, KeyboardInterrupt):
            before(unraisable)
            return
        timer = threading.Timer(_AGAIN_S, os.kill, (os.getpid(), signal.SIGINT))
        waiting.append(timer)
        timer.start()

    sys.unraisablehook = send_again
    try:
        yield
    finally:
        sys.unraisablehook = before
        for timer in waiting:
            timer.cancel()


def identity(path: str | None) -> tuple[int, ...] | None:
    """Return a value that differs between a path's current and later content; None if absent."""
    try:
        status = os.stat(path or "")
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_mtime_ns
