"""Waits for other processes: bounds of timeouts, polling, failure check, the log of long waits.

Every wait of the package ends, and no arithmetic on clocks overflows.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from deepspeed_gear.errors import ConfigError
from deepspeed_gear.log import LOG

#: Longest timeout in seconds, 7 days: far below what `timespec`, gloo's milliseconds, Python's
#: locks and nanoseconds in 64 bits can hold.
MOST_TIMEOUT_S = 604_800
DEFAULT_TIMEOUT_S = 600.0
LOG_EVERY_S = 30.0  # of a wait

T = TypeVar("T")


def wait_until(
    condition: Callable[[], T],
    timeout_s: float,
    pause_s: float,
    check: Callable[[], None] | None = None,
) -> T:
    """Poll a condition until it returns something other than None or False; return its last result.

    The condition is called at least once, even with a timeout of 0.

    Args:
        pause_s: Sleep between two calls, in seconds.
        check: Called before each sleep; it raises if the condition can no longer come true.
    """
    until = time.monotonic() + timeout_s
    while (result := condition()) is None or result is False:
        if time.monotonic() > until:
            break
        if check is not None:
            check()
        time.sleep(pause_s)
    return result


def check_timeout(name: str, value: Any) -> float:
    """Return a timeout in seconds, in [0, `MOST_TIMEOUT_S`]; 0 means not to wait."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= MOST_TIMEOUT_S:
        raise ConfigError(
            name,
            f"must be a number of seconds in [0, {MOST_TIMEOUT_S}]",
            value,
            "604800 s are 7 days",
        )
    return float(value)


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
