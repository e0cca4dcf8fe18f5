"""Batch admission: whether the rate limiter and `max_times_sampled` admit the next global batch.

One node decides by its own store. Several nodes send each other a `NodeRate`, from which all of
them compute the same answer, and divide what the rate limiter still admits to writers.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from deepspeed_gear.errors import EmptyTableError, NotReadyError, StoreError
from deepspeed_gear.ops.records import Resolution, Slot, SlotState
from deepspeed_gear.sampling.exclusions import summary_of
from deepspeed_gear.sampling.stream_spec import StreamSpec
from deepspeed_gear.sampling.sum_tree import ItemMasses
from deepspeed_gear.store.rate_limiter import divide, kept
from deepspeed_gear.store.records import Control, Head, Peer, Position, SlotRetention
from deepspeed_gear.store.retention import UNLIMITED
from deepspeed_gear.store.table import Table

MOST_ASKED = 8  # times as many groups as are missing, where few pass the conditions


class NothingToSampleError(StoreError):
    """Too few items can be drawn for a selection. Never leaves the stream, which may wait for
    items.
    """

    def final(self) -> StoreError:
        """Return the error of a stream that does not wait."""
        return StoreError(self.name, self.rule, self.value, self.remedy)


class ItemsHeld(NamedTuple):
    """What a store holds of a table's items."""

    draws: int  # how often they can be drawn, if each counts once where there is no limit
    size: int  # items held, where there is a rate limiter
    inserted: int  # items ever added, where there is a rate limiter
    passed: int = 0  # how many of the latest groups are complete
    failed: int = 0  # how many of them failed a condition
    room: int = 0  # complete groups that fit in beside those held


class LimiterWait:
    """Measures how long a stream of this process waits for its rate limiter. A prefetch thread
    waits without a limit for a batch not requested yet: the program may still add the items.
    """

    def __init__(self, timeout_s: float) -> None:
        self.total_s = 0.0
        self.timeout_s = timeout_s
        self.is_ahead = False  # the batch was not requested yet
        self._since: float | None = None

    def note(self, is_ahead: bool) -> bool:
        """Set and return whether the batch was not requested yet."""
        self.is_ahead = is_ahead
        return is_ahead

    def wait(self) -> None:
        """Begin or continue a wait."""
        self._since = self._since or time.monotonic()

    @property
    def waited_s(self) -> float:
        """Duration of the current wait, in seconds; 0 if there is none."""
        return 0.0 if self._since is None else time.monotonic() - self._since

    def end(self) -> None:
        if self._since is not None:
            self.total_s += time.monotonic() - self._since
            self._since = None


class NodeRate:
    """Words of a node's rate, sent to the other nodes: sizes, quota and samples of its
    shard.
    """

    SIZE: Final = 0
    INSERTED: Final = 1
    ADMITTED: Final = 2
    QUOTA: Final = 3
    WANTED: Final = 4
    LEFT: Final = 5  # samples that its trajectories still admit
    FEWEST: Final = 6  # draws after which its first trajectory may be used up
    GIVES_UP: Final = 7  # GaveUp, or 0
    TURN: Final = 8
    IS_FIXED: Final = 9  # its quota must not change now
    SAMPLED: Final = 10
    MAY_BE_FILLED: Final = 11  # a process of the node may add items
    COMES: Final = 12  # an item will be complete as time goes on, without any process that adds
    HELD: Final = 13  # with prompts: `PromptLedger.num_held`
    NUM_WORDS: Final = 14


class GaveUp:
    """Codes of why a node stops waiting for the rate limiter."""

    LATE: Final = 1  # it has waited for its timeout
    WRITES_HERE: Final = 2  # it would wait for items that it adds itself


class SelectionLimiter:
    """Decides whether a global batch may be drawn of a table with a capacity. Every method requires
    the lock.

    Over several nodes, one process of each sends its `rate`; `rates` are those of all
    nodes, in the order of shards. [S, NodeRate.NUM_WORDS], int64; with prompts `PromptLedger.due`
    follows.
    """

    def __init__(
        self,
        spec: StreamSpec,
        table: Table,
        masses: ItemMasses,
        position: np.ndarray,
        wait: LimiterWait,
    ) -> None:
        self._spec = spec
        self._table = table
        self._masses = masses
        self._position = position
        self._wait = wait
        retention = table.spec.retention
        self._rate = retention.rate_limiter
        self.most = retention.max_times_sampled
        #: Whether there is no limit: no rate limiter and no `max_times_sampled`.
        self.is_plain = self._rate is None and not self.most
        self.index = 0 if table.spec.shard is None else table.spec.shard.index
        self._was_open = True  # by the rates received last
        self.writes_here = False  # whether this process also writes
        #: Whether too few items had a mass in the last selection that was begun.
        self.was_empty = False
        self._turn = 0
        self._admitted = 0
        self.fewest = 0  # draws after which the first trajectory of any node may be used up
        self._times: np.ndarray = table.views["retention"][:, SlotRetention.TIMES_SAMPLED]
        self._waits: np.ndarray = table.peers[: table.spec.num_peers, Peer.WAITS]
        self._seen = self._waits.copy()

    def begin_call(self) -> None:
        """Begin a call for a selection: ranks that wait on from here count as waiting; one that has
        not looked again may be about to leave an earlier wait, with an error that it has yet to
        read.
        """
        self._seen = self._waits.copy()

    def is_open(self, count: int, exact: bool = True) -> bool:
        """Return whether this store alone admits `count` samples; arguments as `left`."""
        return self._admits(*self._counted(), self.left(count, exact), count)

    def _admits(self, size: int, inserted: int, left: int, count: int) -> bool:
        """Return whether `count` samples may be drawn of what one store holds, or all together."""
        rate = self._rate
        by_rate = rate is None or rate.may_sample(size, inserted, self._sampled, count)
        return by_rate and left >= count

    def _counted(self) -> tuple[int, int]:
        return (0, 0) if self._rate is None else self._table.counted(self._rate)[:2]

    @property
    def _sampled(self) -> int:
        return int(self._position[Head.SAMPLES])

    def left(self, count: int, exact: bool = True) -> int:
        """Return samples still admitted, at most `count`; `exact`: with changes since the last
        selection.
        """
        each_once = self._spec.sampler.each_once
        if not self.most and not each_once:
            has_mass = (self._masses.total > 0 and not exact) or self._masses.will_have_mass()
            return count if has_mass else 0
        drawable = self._drawable()
        return len(drawable) if each_once else int((self.most - self._times[drawable]).sum())

    def held(self) -> ItemsHeld:
        """Return what this store holds for `missing`. Cost: one pass over the slots."""
        drawable = self._drawable()
        groups = self._table.groups
        draws = int((self.most - self._times[drawable]).sum()) if self.most else len(drawable)
        if groups is None:
            return ItemsHeld(draws, *self._counted())
        room = len(self._table.slots) // groups.spec.size - groups.statistics["complete"]
        return ItemsHeld(draws, *self._counted(), *groups.recent, room)

    def missing(self, count: int, held: Sequence[ItemsHeld]) -> int:
        """Return how many items must be added before `count` different ones may be drawn.

        Items drawn repeatedly count once. Of groups: how many must be made at the rate at which the
        latest passed, at most `MOST_ASKED` times as many, and as may be added. `held` is of each
        store.
        """
        draws, size, inserted, passed, failed, room = (int(words) for words in np.sum(held, axis=0))
        missing = max(count - draws, 0)
        rate = self._rate
        if rate is not None:
            missing = max(missing, rate.missing(size, inserted, self._sampled, count))
            if rate.holds_back:
                room = min(room, rate.room(size, inserted, self._sampled))
        at_rate = -(-missing * (passed + failed + 1) // (passed + 1))
        return max(missing, min(at_rate, MOST_ASKED * missing, room))

    def _drawable(self) -> np.ndarray:
        if self._table.groups is not None:
            self._table.groups.update()
        committed = np.nonzero(self._table.slots[:, Slot.STATE] == SlotState.COMMITTED)[0]
        drawable = np.asarray(committed[self._masses.of(committed) > 0])
        return drawable if self._table.ledger is None else self._table.ledger.in_order(drawable)

    def num_admitted(self, slots: np.ndarray, counted: np.ndarray) -> int:
        """Return how many draws, of slots [n], come before the first that uses up a trajectory,
        after the `counted` draws of each slot. [slots].
        """
        # Slots [3, 5, 3, 3] are the draws number [1, 1, 2, 3] of their trajectories: where these
        # admit 2 draws, the third one uses a trajectory up, and 2 come before it.
        order = np.argsort(slots, kind="stable")
        ordered = slots[order]
        first = np.searchsorted(ordered, ordered, side="left")
        nth = np.empty(len(slots), np.int64)
        nth[order] = np.arange(len(slots)) - first + 1
        used_up = np.nonzero(self._times[slots] + counted[slots] + nth >= self.most)[0]
        return int(used_up[0]) if len(used_up) else len(slots)

    def draws_left(self, counted: np.ndarray) -> int:
        """Return how many draws items with a mass admit after the `counted` ones of each slot.
        [slots].
        """
        return int((self.most - self._times - counted)[self._masses.leaves > 0].sum())

    def count(self, resolutions: np.ndarray) -> None:
        np.add.at(self._times, resolutions[:, Resolution.SLOT], 1)

    def evict_used_up(self) -> None:
        committed = np.nonzero(self._table.slots[:, Slot.STATE] == SlotState.COMMITTED)[0]
        self._table.evict(committed[self._times[committed] >= self.most])

    @property
    def may_be_filled(self) -> bool:
        """Whether another process may add items while this one waits: one that only writes
        (attached; with a limit of draws or rates, one that may attach), or a rank that does not
        wait itself.
        """
        spec = self._table.spec
        table = self._table
        if not self.is_plain and spec.num_writers:
            return True
        may = (table.peers[:, Peer.PID] != 0) & (table.peers[:, Peer.PID] != os.getpid())
        is_free = (self._waits == 0) | (self._waits == self._seen)
        may[: spec.num_peers] &= is_free & (not self.is_plain)
        return any(table.memory.is_alive(peer) for peer in np.nonzero(may)[0].tolist())

    def too_late(
        self, number: int, count: int, waited_s: float, size: str = "", is_empty: bool = False
    ) -> NotReadyError:
        """Return the error of a batch that cannot be drawn yet; a stream that waited 0 s cannot
        wait. `size`: what all nodes hold ("": this one holds all); `is_empty`: nothing can be
        sampled.
        """
        held, remedy = summary_of(self._masses)
        within = f" within {round(waited_s, 1):g} s" if waited_s else " first"
        if is_empty or self.is_plain:
            rule = (
                f"must hold what the sampler admits{within}, for the {count} samples of "
                f"global batch {number}"
            )
        else:
            limit = "max_times_sampled" if self._rate is None else "rate limiter"
            needed = f"the {count} samples of global batch {number}"
            rule = f"must be filled{within}, as its {limit} requires, for {needed}"
        shown = f"{size}; here {held}" if size else held
        if self._table.ledger is not None:
            now = "; prompts: {waiting} complete, {leased} leased, {returned} returned, "
            now += "{incomplete} incomplete"
            shown += now.format(**self._table.ledger.account.report())
            remedy = (
                "check the rollout workers, of every node: batches wait for what was leased first"
            )
        if not remedy and not waited_s:
            remedy = "call can_sample() first, and add trajectories"
        elif not remedy:
            who = "actors run" if self._table.spec.num_writers else "other ranks add trajectories"
            remedy = f"check that the {who}"
        kind = EmptyTableError if is_empty else NotReadyError
        return kind(f"table {self._table.spec.name}", rule, shown, remedy)

    def note_writer(self) -> None:
        """Note that this process also writes: it must not wait for items that it would add itself.

        Over nodes, none of its node's processes waits then.
        """
        self.writes_here = True
        if self._spec.num_shards > 1:
            self._position[Position.WRITES] = 1

    def waiting_rate(self, count: int) -> np.ndarray:
        """Return the rate of this store alone, in which nothing is shared out, for `given_up`."""
        return self._new_rate(count, exact=False)[None]

    def rate(self, count: int, fixed: bool = False, exact: bool = False) -> np.ndarray:
        """Return this node's rate, and keep a part of its quota for the exchange. If `fixed`
        nothing changes, as a thread may be in a selection, and no process may `apply`. `exact` as
        `left`.
        """
        control = self._table.control
        ledger = self._table.ledger
        words = self._new_rate(count, exact)
        if ledger is not None and ledger.spec.is_joint:
            words = np.concatenate([words, ledger.due(self._drawable())])
        self._turn += 1
        words[NodeRate.TURN] = self._turn
        words[NodeRate.IS_FIXED] = fixed
        if self._rate is None:
            return words
        # Slots of dead processes must not block writers.
        if control[Control.PENDING] and not self._was_open:
            self._table.extents.end_abandoned()
        words[NodeRate.SIZE], words[NodeRate.INSERTED], pending = self._table.counted(self._rate)
        admitted = int(words[NodeRate.INSERTED]) + pending
        words[NodeRate.ADMITTED] = admitted
        if self._rate.holds_back:
            quota = max(admitted, int(control[Control.QUOTA]))
            words[NodeRate.QUOTA] = quota if fixed else kept(admitted, quota, not self._was_open)
            words[NodeRate.WANTED] = max(
                int(control[Control.WANTED]), int(admitted > self._admitted)
            )
            if not fixed:
                control[Control.QUOTA] = words[NodeRate.QUOTA]
                control[Control.WANTED] = 0
                self._admitted = admitted
        return words

    def _new_rate(self, count: int, exact: bool) -> np.ndarray:
        """Return a rate with the samples that are left, and of why a wait may end."""
        ledger = self._table.ledger
        words = np.zeros(NodeRate.NUM_WORDS, np.int64)
        words[NodeRate.SAMPLED] = self._sampled
        words[NodeRate.LEFT] = self.left(count, exact)
        if self.most:
            words[NodeRate.FEWEST] = (self.most - self._times[self._drawable()]).min(
                initial=UNLIMITED
            )
        if self._wait.waited_s > self._wait.timeout_s:
            words[NodeRate.GIVES_UP] = GaveUp.LATE
        elif (self.writes_here or self._position[Position.WRITES]) and not self._wait.is_ahead:
            words[NodeRate.GIVES_UP] = GaveUp.WRITES_HERE
        if self._table.groups is not None:
            words[NodeRate.COMES] = self._table.groups.waits_for_time
        if ledger is not None:
            words[NodeRate.HELD] = ledger.num_held
        if not self.is_plain or self.was_empty or not words[NodeRate.LEFT]:
            words[NodeRate.MAY_BE_FILLED] = self._wait.is_ahead or self.may_be_filled
        return words

    def progress(self) -> np.ndarray:
        """Return the ledger's progress, with the groups that are complete by now.
        [Progress.NUM_WORDS].
        """
        assert self._table.ledger is not None
        assert self._table.groups is not None
        # A group whose last column was filled has no leader before, and is open.
        self._table.groups.update()
        return self._table.ledger.progress()

    def are_open(self, rates: np.ndarray, count: int) -> bool:
        """Return whether all nodes together admit `count` samples; equal on all nodes."""
        size, inserted, left = (
            rates[:, [NodeRate.SIZE, NodeRate.INSERTED, NodeRate.LEFT]].sum(0).tolist()
        )
        ledger = self._table.ledger
        may_draw = ledger is None or ledger.admits(rates[:, NodeRate.NUM_WORDS :])
        return may_draw and self._admits(size, inserted, left, count)

    def apply(self, rates: np.ndarray, count: int) -> bool:
        """Take what the others hold: add this node's part of the pool to its quota. Return
        `are_open`.
        """
        if self._rate is not None and self._rate.holds_back:
            words = [NodeRate.SIZE, NodeRate.INSERTED, NodeRate.ADMITTED, NodeRate.QUOTA]
            size, inserted, admitted, quota = rates[:, words].sum(0).tolist()
            sampled, turn = rates[0, [NodeRate.SAMPLED, NodeRate.TURN]].tolist()
            pool = max(
                0, admitted + self._rate.room(size + admitted - inserted, admitted, sampled) - quota
            )
            share = divide(pool, rates[:, NodeRate.WANTED].tolist(), turn)[self.index]
            self._table.control[Control.QUOTA] = rates[self.index, NodeRate.QUOTA] + share
        self._was_open = self.are_open(rates, count)
        if self._table.ledger is not None:
            held = rates[:, NodeRate.HELD]
            is_drawn = self._was_open and self._table.control[Control.SELECTING] > 0
            self._table.ledger.note_others(int(held.sum() - held[self.index]), is_drawn)
        self.fewest = int(rates[:, NodeRate.FEWEST].min())
        return self._was_open

    def note_empty(self) -> None:
        """Note that too few items had a mass in the selection that was begun."""
        self.was_empty = True

    def given_up(self, rates: np.ndarray, number: int, count: int) -> NotReadyError | None:
        """Return the error of a batch that is not admitted, if a wait for it would have no end:
        the timeout is over, or no other process of any node may add items. All nodes raise it.
        """
        was_empty, self.was_empty = self.was_empty, False
        why = int(rates[:, NodeRate.GIVES_UP].max())
        if not rates[:, NodeRate.MAY_BE_FILLED].any():
            why = why or GaveUp.WRITES_HERE
        if why == GaveUp.WRITES_HERE and rates[:, NodeRate.COMES].any():
            why = GaveUp.LATE if (rates[:, NodeRate.GIVES_UP] == GaveUp.LATE).any() else 0
        if not why:
            return None
        waited_s = self._wait.timeout_s if why == GaveUp.LATE else 0.0
        held = ""
        if len(rates) > 1:
            words = [NodeRate.SIZE, NodeRate.INSERTED, NodeRate.LEFT]
            size, inserted, left = rates[:, words].sum(0).tolist()
            unit = "items" if self._rate is None else f"{self._rate.unit}s"
            held = f"{size} {unit} held by all nodes, {inserted} ever added"
            held += f", good for {left} samples"
        return self.too_late(number, count, waited_s, held, is_empty=self.is_plain or was_empty)
