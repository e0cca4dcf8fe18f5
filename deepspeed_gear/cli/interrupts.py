"""Ctrl-C where Python cannot raise it, and what a command says of it."""

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
    """Send SIGINT again while Python ignores its KeyboardInterrupt, without the traceback that it
    prints.

    It is ignored in callbacks of weak references and in finalizers, such as those of h5py's files.
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
    """Return what tells a file or folder from another one at its place; None where
    there is none.
    """
    try:
        status = os.stat(path or "")
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_mtime_ns
