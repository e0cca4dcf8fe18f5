"""Lease: work that a process holds until it commits it, gives it back, dies, or its time has
passed.

A ledger of a store (`prompt_ledger.py`, `fill_ledger.py`) keeps the process that holds each lease,
and a deadline. Nothing happens when a process dies or a deadline passes: the ledger looks for both
before it leases the work again.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from deepspeed_gear.store.shared_memory import SharedMemory


class LeaseRecord(NamedTuple):
    """A lease of a prompt, or of a trajectory that lacks a late column, as its ledger has issued
    it.
    """

    entry: int  # where the ledger keeps it: the entry of a prompt, the slot of a trajectory
    token: int  # differs from other leases of the entry: its number among the leases of all prompts
    number: int  # what is leased: the number of a prompt, the id of a trajectory
    version: int = 0  # of a prompt: rollout batches that were trained when it was leased
    attempt: int = 1  # of a prompt: leases of it, with this one
    kept: bytes = b""  # of a prompt: what the leases before have kept
    origin: str = ""  # where it counts: run and table if remote, `Table.lineage` of a trajectory
    num_steps: int = 0  # of a trajectory


def ended(
    owners: np.ndarray, deadlines: np.ndarray, memory: SharedMemory, now_ns: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return which leases have ended with their process, and which have passed their deadline.

    Args:
        owners: Index of the process that holds each lease. [n], int64.
        deadlines: Monotonic nanoseconds at which each lease ends. [n], int64.
        memory: Memory of the store, whose locks show which processes are alive.
        now_ns: Monotonic nanoseconds.
    Returns:
        Two masks; a lease may be in both. [n] and [n], bool.
    Cost: a system call for each process that holds some.
    """
    dead = [owner for owner in set(owners.tolist()) if not memory.is_alive(owner)]
    return np.isin(owners, dead), deadlines < now_ns
