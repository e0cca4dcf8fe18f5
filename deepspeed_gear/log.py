"""Timeout and failure check of the waits on other processes, and the log of long waits."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from deepspeed_gear.timeouts import DEFAULT_TIMEOUT_S

LOG = logging.getLogger("deepspeed_gear")
LOG_EVERY_S = 30.0


class WaitLog:
    """Clock of one wait for other ranks, which logs every 30 s which ranks are missing."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._begin = time.monotonic()
        self._next = LOG_EVERY_S

    def note(self, who: Callable[[], str]) -> float:
        """Return the seconds waited so far, and log the wait when the next 30 s are over.

        Args:
            who: Names the missing ranks. It returns "" where another rank of the node logs them.
        """
        waited = time.monotonic() - self._begin
        if waited >= self._next:
            self._next += LOG_EVERY_S
            if named := who():
                LOG.warning("gear: %s has waited %.0f s for %s", self._what, waited, named)
        return waited


def no_check() -> None:
    """Return at once: the failure check of a process that waits for no other."""


@dataclass(frozen=True)
class Context:
    """How the parts of a replay wait: passed to them at construction.

    Args:
        timeout_s: Longest wait for another process, in seconds.
        check: Called while this rank waits, from any thread. Raises if the wait cannot end: another
            rank or node is lost, or has failed.
    """

    timeout_s: float = DEFAULT_TIMEOUT_S
    check: Callable[[], None] = no_check
