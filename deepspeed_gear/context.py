"""The context of a rank: its place, its timeout, and the failure check. A frozen value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from deepspeed_gear.timeouts import DEFAULT_TIMEOUT_S


def no_check() -> None:
    """Return at once: the failure check of a process that waits for no other."""


@dataclass(frozen=True)
class Context:
    """The rank of a replay: passed to the parts of the replay at construction.

    Args:
        rank: Of the process group.
        world_size: Its ranks.
        node: Of this rank.
        num_nodes: Of the process group.
        timeout_s: Longest wait for another process, in seconds.
        check: Called while this rank waits, from any thread. Raises if the wait cannot end: another rank or
            node is lost, or has failed.
    """

    rank: int = 0
    world_size: int = 1
    node: int = 0
    num_nodes: int = 1
    timeout_s: float = DEFAULT_TIMEOUT_S
    check: Callable[[], None] = no_check
