"""Rate limiting of selections: a table's rate limiter, and how often its trajectories may be drawn."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from deepspeed_gear.errors import EmptyTableError, NotReadyError, StoreError
from deepspeed_gear.ops.records import Resolution, Slot, SlotState
from deepspeed_gear.sampling.exclusions import summary_of
from deepspeed_gear.sampling.stream_spec import StreamSpec
from deepspeed_gear.sampling.sum_tree import ItemMasses
from deepspeed_gear.store.pins import SelectionPins
from deepspeed_gear.store.records import Peer, SlotRetention
from deepspeed_gear.store.retention import UNLIMITED
from deepspeed_gear.store.stream_records import Head
from deepspeed_gear.store.table import Table

MOST_ASKED = 8  # times as many groups as are missing, where few pass the conditions


class NothingToSampleError(StoreError):
    """Too few items can be drawn for a selection. A stream to which other processes may add waits."""


class ItemsHeld(NamedTuple):
    """What a store holds of a table's items.

    Args:
        draws: How often they can be drawn, if each counts once where there is no limit.
        size: Items held, where there is a rate limiter.
        inserted: Items ever added, likewise.
        passed, failed: Of the latest groups how many are complete, and how many failed a condition.
        room: Complete groups that fit in beside those held.
    """

    draws: int
    size: int
    inserted: int
    passed: int = 0
    failed: int = 0
    room: int = 0


class SelectionLimiter:
    """Decides whether a global batch may be drawn. Every method requires the table's lock.

    Args:
        spec: The training stream.
        table: Its table, with a capacity.
        masses: The masses of its items.
        position: The stream's.
    """

    def __init__(self, spec: StreamSpec, table: Table, masses: ItemMasses, position: np.ndarray) -> None:
        self._spec, self._table, self._masses, self._position = spec, table, masses, position
        self.retention = table.spec.retention
        self.most = self.retention.max_times_sampled
        self._times: np.ndarray = table.views["retention"][:, SlotRetention.TIMES_SAMPLED]
        self._readers = SelectionPins(table)
        self._waits: np.ndarray = table.peers[: table.spec.num_peers, Peer.WAITS]
        self._seen = self._waits.copy()

    def begin_call(self) -> None:
        """Begin a call for a selection: ranks that wait on from here on count as waiting.

        One that has not looked again may be about to leave an earlier wait, whose error it has yet to read.
        """
        self._seen = self._waits.copy()

    @property
    def is_plain(self) -> bool:
        """Whether there is no limit: no rate limiter and no `max_times_sampled`."""
        return self.retention.rate_limiter is None and not self.most

    def is_open(self, count: int, exact: bool = True) -> bool:
        """Return whether `count` samples may be drawn; arguments as `left`."""
        rate = self.retention.rate_limiter
        size, inserted = (0, 0) if rate is None else self._table.counted(rate)[:2]
        return self.admits(size, inserted, self.sampled, count) and self.left(count, exact) >= count

    def admits(self, size: int, inserted: int, sampled: int, count: int) -> bool:
        """Return whether the rate limiter admits `count` samples; arguments as `RateLimiter.may_sample`."""
        rate = self.retention.rate_limiter
        return rate is None or rate.may_sample(size, inserted, sampled, count)

    @property
    def sampled(self) -> int:
        """Samples ever drawn."""
        return int(self._position[Head.SAMPLES])

    def left(self, count: int, exact: bool = True) -> int:
        """Return how many samples the table still admits, or `count` if at least so many.

        Args:
            count: Samples to draw.
            exact: Read all slots; else changes since the latest selection may be left out.
        """
        each_once = self._spec.sampler.each_once
        if not self.most and not each_once:
            has_mass = (self._masses.total > 0 and not exact) or self._masses.will_have_mass()
            return count if has_mass else 0
        drawable = self._drawable()
        return len(drawable) if each_once else int((self.most - self._times[drawable]).sum())

    def held(self) -> ItemsHeld:
        """Return what this store holds for `missing`. Cost: one pass over the slots."""
        drawable, rate = self._drawable(), self.retention.rate_limiter
        draws = int((self.most - self._times[drawable]).sum()) if self.most else len(drawable)
        size, inserted = (0, 0) if rate is None else self._table.counted(rate)[:2]
        groups = self._table.groups
        if groups is None:
            return ItemsHeld(draws, size, inserted)
        room = len(self._table.slots) // groups.spec.size - groups.statistics["complete"]
        return ItemsHeld(draws, size, inserted, *groups.recent, room)

    def missing(self, count: int, held: Sequence[ItemsHeld]) -> int:
        """Return how many items must be added before `count` different ones may be drawn.

        Items that are drawn several times without limit count once. Of groups it is how many must be made at
        the rate at which the latest ones passed the conditions: at most `MOST_ASKED` times as many, and no
        more than may be added.

        Args:
            count: Samples to draw.
            held: What each store of the table holds.
        """
        draws, size, inserted, passed, failed, room = (int(words) for words in np.sum(held, axis=0))
        missing, rate = max(count - draws, 0), self.retention.rate_limiter
        if rate is not None:
            missing = max(missing, rate.missing(size, inserted, self.sampled, count))
            if rate.holds_back:
                room = min(room, rate.room(size, inserted, self.sampled))
        at_rate = -(-missing * (passed + failed + 1) // (passed + 1))
        return max(missing, min(at_rate, MOST_ASKED * missing, room))

    def fewest(self) -> int:
        """Return the number of draws after which the first trajectory may be used up. Cost: one pass."""
        return int((self.most - self._times[self._drawable()]).min(initial=UNLIMITED))

    def _drawable(self) -> np.ndarray:
        if self._table.groups is not None:
            self._table.groups.update()
        committed = np.nonzero(self._table.slots[:, Slot.STATE] == SlotState.COMMITTED)[0]
        return np.asarray(committed[self._masses.of(committed) > 0])

    # ---- how often -------------------------------------------------------------------------------

    def num_admitted(self, slots: np.ndarray, counted: np.ndarray) -> int:
        """Return how many draws come before the first that uses up a trajectory; all if none does.

        Args:
            slots: The slots drawn, in order. [n], int64.
            counted: Draws of each slot in this selection so far. [slots], int64.
        """
        order = np.argsort(slots, kind="stable")
        ordered = slots[order]
        first = np.searchsorted(ordered, ordered, side="left")
        nth = np.empty(len(slots), np.int64)
        nth[order] = np.arange(len(slots)) - first + 1
        used_up = np.nonzero(self._times[slots] + counted[slots] + nth >= self.most)[0]
        return int(used_up[0]) if len(used_up) else len(slots)

    def count(self, records: np.ndarray) -> None:
        """Count the draws of each slot in a selection. [n, 8], int64."""
        np.add.at(self._times, records[:, Resolution.SLOT], 1)

    def evict_used_up(self) -> None:
        """Evict trajectories that were drawn `max_times_sampled` times."""
        committed = np.nonzero(self._table.slots[:, Slot.STATE] == SlotState.COMMITTED)[0]
        for slot in self._table.evict(committed[self._times[committed] >= self.most]).tolist():
            self._readers.forget(slot)

    @property
    def may_be_filled(self) -> bool:
        """Whether another process may add items while this one waits for them.

        It is one that only writes: attached, or with a limit of draws or rates one that may attach. With such
        a limit it may also be another rank that does not wait itself.
        """
        spec, table = self._table.spec, self._table
        if not self.is_plain and spec.num_writers:
            return True
        may = (table.peers[:, Peer.PID] != 0) & (table.peers[:, Peer.PID] != os.getpid())
        is_free = (self._waits == 0) | (self._waits == self._seen)
        may[: spec.num_peers] &= is_free & (not self.is_plain)
        return any(table.memory.is_alive(peer) for peer in np.nonzero(may)[0].tolist())

    def too_late(
        self, key: int, count: int, waited_s: float, size: str = "", is_empty: bool = False
    ) -> NotReadyError:
        """Return the error of a batch that cannot be drawn yet. Requires the table's lock.

        Args:
            key: Number of the global batch.
            count: Its samples.
            waited_s: How long the stream has waited; 0: it cannot wait.
            size: Text of what all nodes hold; "": this node holds the whole table.
            is_empty: Whether nothing can be sampled, though the rate limiter admits it.
        """
        held, remedy = summary_of(self._masses)
        within = f" within {round(waited_s, 1):g} s" if waited_s else " first"
        if is_empty or self.is_plain:
            rule = f"must hold what the sampler admits{within}, for the {count} samples of global batch {key}"
        else:
            limit = "max_times_sampled" if self.retention.rate_limiter is None else "rate limiter"
            needed = f"the {count} samples of global batch {key}"
            rule = f"must be filled{within}, as its {limit} requires, for {needed}"
        found = f"{size}; here {held}" if size else held
        if not remedy and not waited_s:
            remedy = "call can_sample() first, and add trajectories"
        elif not remedy:
            who = "actors run" if self._table.spec.num_writers else "other ranks add trajectories"
            remedy = f"check that the {who}"
        kind = EmptyTableError if is_empty else NotReadyError
        return kind(f"table {self._table.spec.name}", rule, found, remedy)


class LimiterWait:
    """Measures how long a stream of this process waits for its rate limiter.

    A prefetch thread waits without a limit for a batch that the program has not requested yet: the program
    may still add the items.
    """

    def __init__(self, timeout_s: float) -> None:
        self.total_s, self.timeout_s = 0.0, timeout_s
        self.is_ahead = False  # the batch was not requested yet
        self._since: float | None = None

    def note(self, is_ahead: bool) -> bool:
        """Set and return whether the batch was not requested yet."""
        self.is_ahead = is_ahead
        return is_ahead

    def wait(self) -> float:
        """Begin or continue a wait; return its duration so far, in seconds."""
        self._since = self._since or time.monotonic()
        return self.waited_s

    @property
    def waited_s(self) -> float:
        """Duration of the current wait, in seconds; 0 if there is none."""
        return 0.0 if self._since is None else time.monotonic() - self._since

    def end(self) -> None:
        """End the wait."""
        if self._since is not None:
            self.total_s += time.monotonic() - self._since
            self._since = None
