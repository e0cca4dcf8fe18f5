"""The version of the learner's policy, and waiting for actors that are far behind it."""

from __future__ import annotations

import time
from collections.abc import Callable

from deepspeed_gear.errors import ConfigError, NotReadyError
from deepspeed_gear.sampling.staleness import Staleness
from deepspeed_gear.store.records import Control, Peer
from deepspeed_gear.store.table import Table

_POLL_S = 500e-6


def set_version(table: Table, version: int, timeout_s: float, check: Callable[[], None]) -> None:
    """Set the policy version of a node's store; it never falls.

    Args:
        table: With versions.
        version: The new one.
        timeout_s: Longest wait for open trajectories.
        check: Called while it waits; raises to end the wait.
    Raises:
        ConfigError: The table has no versions.
        NotReadyError: This process has an open trajectory that is too old, or another one for too long.
    """
    name, life = f"table {table.spec.name}", table.spec.life
    if life.version_column is None:
        rule, remedy = "must have versions", f"set gear.tables.{table.spec.name}.version"
        raise ConfigError(name, rule, None, remedy)
    staleness, until = Staleness(table), time.monotonic() + timeout_s
    while True:
        with table.lock:
            behind = staleness.open_behind(version) if life.waits else []
            if not behind:
                table.control[Control.POLICY_VERSION] = max(
                    int(table.control[Control.POLICY_VERSION]), version
                )
                return
            processes = [int(table.peers[peer, Peer.PID]) for peer in behind]
        rule = f"must have no open trajectory more than {life.max_lag} versions behind {version}"
        if table.memory.peer in behind:
            raise NotReadyError(name, rule, None, "end this process's own trajectories first")
        if time.monotonic() > until:
            raise NotReadyError(name, f"{rule}, within {timeout_s:g} s", processes, "look at these actors")
        check()
        time.sleep(_POLL_S)
