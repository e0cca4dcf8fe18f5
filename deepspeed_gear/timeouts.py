"""Bounds of timeouts: every wait of the package ends, and no clock arithmetic overflows."""

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
    """Call a condition until it returns neither None nor False; return what it has returned last.
    It is called at least once, and once after the timeout; `check`, which raises where waiting is
    vain, before each pause.
    """
    until = time.monotonic() + timeout_s
    while (found := condition()) is None or found is False:
        if time.monotonic() > until:
            break
        if check is not None:
            check()
        time.sleep(pause_s)
    return found


def check_timeout(name: str, value: Any) -> float:
    """Return a timeout that was given as an argument: seconds in [0, `MOST_TIMEOUT_S`]; 0 does not
    wait.
    """
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= MOST_TIMEOUT_S:
        rule = f"must be a number of seconds in [0, {MOST_TIMEOUT_S}]"
        raise ConfigError(name, rule, value, "604800 s are 7 days")
    return float(value)
