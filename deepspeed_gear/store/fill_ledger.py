"""Fill ledger: leases of trajectories that lack a late column, so that no two workers fill one.

`SlotRetention.PRESENT` alone records what is filled. So a lease only keeps processes from the same
work: there is nothing to recover, and two processes that compute the same rows cost time only.
"""

from __future__ import annotations

import time

import numpy as np

from deepspeed_gear.ops.records import Resolution
from deepspeed_gear.store.prompt_ledger import LeaseRecord
from deepspeed_gear.store.records import FillClaim
from deepspeed_gear.store.row_allocator import have_ended
from deepspeed_gear.store.shared_memory import SharedMemory


class FillLedger:
    """The leases of a store's late columns. Every method requires the table's lock.

    A lease is a `FillClaim` of a column and a slot. It counts while its id is that of the
    trajectory in the slot, its process is alive and its time has not passed. `late` is the index of
    a column among the late ones.
    """

    def __init__(self, claims: np.ndarray, memory: SharedMemory) -> None:
        self._claims = claims  # [late columns, slots + 1, FillClaim.NUM_WORDS]
        self._memory = memory

    def lease(self, late: int, lacking: np.ndarray, count: int, lease_ns: int) -> list[LeaseRecord]:
        """Lease the first trajectories whose column no other process computes.

        Args:
            late: The column.
            lacking: What lacks it, as `late_columns.absent`. [n, Resolution.NUM_WORDS], int64.
            count: Most leases.
            lease_ns: Nanoseconds after which another process may lease them.
        """
        now = time.monotonic_ns()
        claims = self._claims[late]
        slots = lacking[:, Resolution.SLOT]
        held = np.flatnonzero(claims[slots, FillClaim.ID] == lacking[:, Resolution.ID] + 1)
        is_free = np.ones(len(lacking), bool)
        is_free[held] = have_ended(claims[slots[held], FillClaim.OWNER], self._memory)
        is_free[held] |= claims[slots[held], FillClaim.DEADLINE] < now
        chosen = lacking[is_free][:count]
        # The id comes last, so that a death in between leaves no claim of a trajectory that had
        # none.
        at = chosen[:, Resolution.SLOT]
        claims[at, FillClaim.OWNER] = self._memory.peer
        claims[at, FillClaim.DEADLINE] = now + lease_ns
        claims[at, FillClaim.ID] = chosen[:, Resolution.ID] + 1
        words = chosen[:, [Resolution.SLOT, Resolution.ID, Resolution.NUM_STEPS]].tolist()
        return [LeaseRecord(slot, number, number, num_steps=steps) for slot, number, steps in words]

    def release(self, peer: int) -> None:
        """Return the leases of a process whose index another one has now."""
        claims = self._claims[:, :-1]
        claims[claims[:, :, FillClaim.OWNER] == peer] = 0

    def clear(self) -> None:
        """End all leases: ids may be given again, and a process that holds one may live on."""
        self._claims[:, :-1] = 0

    def count_repeated(self, late: int, num: int) -> None:
        """Count fills that were ignored, as the trajectories had the column."""
        self._claims[late, -1, FillClaim.REPEATED] += num

    def num_repeated(self, late: int) -> int:
        """Return how many fills of a column were ever ignored."""
        return int(self._claims[late, -1, FillClaim.REPEATED])
