"""Ctrl-C in commands: raised once, also where Python ignores it; whether DEST was completed."""

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
def one_interrupt() -> Iterator[None]:
    """Raise KeyboardInterrupt once, and again only if Python has ignored it.

    Python ignores exceptions in finalizers and callbacks of weak references, such as those of
    h5py's files: SIGINT is sent again, and the traceback suppressed. Further signals have no
    effect, since they would stop the removal of what the command has made.
    """
    before = sys.unraisablehook
    waiting = list[threading.Timer]()
    is_raised = False

    def interrupt(number: int, frame: Any) -> None:
        nonlocal is_raised
        if not is_raised:
            is_raised = True
            raise KeyboardInterrupt

    def send_again(unraisable: Any) -> None:
        nonlocal is_raised
        if not issubclass(unraisable.exc_type, KeyboardInterrupt):
            before(unraisable)
            return
        is_raised = False
        timer = threading.Timer(_AGAIN_S, os.kill, (os.getpid(), signal.SIGINT))
        waiting.append(timer)
        timer.start()

    # Not where the signal is ignored, as in a shell's background, or has another handler.
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    takes = is_default and threading.current_thread() is threading.main_thread()
    sys.unraisablehook = send_again
    if takes:
        signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        if takes:
            signal.signal(signal.SIGINT, signal.default_int_handler)
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
