"""Bounds of timeouts, and the polling wait.

Every wait of the package ends, and no arithmetic on clocks overflows.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

from deepspeed_gear.errors import ConfigError

#: Longest timeout in seconds, 7 days: far below what `timespec`, gloo's milliseconds, Python's
#: locks and nanoseconds in 64 bits can hold.
MOST_TIMEOUT_S = 604_800
DEFAULT_TIMEOUT_S = 600.0

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
