"""Specification of a table's prompts: options of the ledger, and the words of its records.

A prompt has a number, epoch * prompts + place in the epoch's order, which is also that of its
group. Of K stores, one on each node, store k issues the numbers n with n % K == k.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from deepspeed_gear.ops.constants import tree_size
from deepspeed_gear.schema import Column
from deepspeed_gear.store.memory_layout import Region

#: Counters of numbers that have left the ledger, the drawn ones first. The last one counts reasons
#: for which no other is left.
MOST_REASONS = 32
REASON_BYTES = 32
#: Epochs that have counters of their own: epoch e has row e % EPOCHS until a later one takes it.
EPOCHS = 4
#: First `Entry.STAMP`. All stamps are below 0, unlike deadlines.
FIRST_STAMP = -(1 << 62)


class Entry:
    """Words of an entry: a number that is leased, returned, or held until its group leaves."""

    STATE: Final = 0  # an EntryState, or EntryState.LEFT plus a counter
    NUMBER: Final = 1
    OWNER: Final = 2  # index of the process that holds the lease
    DEADLINE: Final = 3  # monotonic nanoseconds at which the lease returns
    STAMP: Final = DEADLINE  # of a complete group: its place among those of all stores, below 0
    VERSION: Final = 4  # rollout batches that were trained when it was leased
    ATTEMPT: Final = 5  # leases of the number, with this one
    TOKEN: Final = 6  # number of the lease among all leases
    MEMBERS: Final = 7  # trajectories that a commit under way publishes; 0: there is none
    KEPT: Final = 8  # twice the bytes that its leases have kept, plus which of two copies has them
    PROMPT: Final = 9  # which of the admitted prompts was drawn by `PromptMasses`; -1: none yet
    NUM_WORDS: Final = 10


class EntryState:
    """States of an entry."""

    FREE, LEASED, RETURNED, HELD, LEFT = range(5)  # LEFT: plus the counter


class PromptCount:
    """Words of a ledger."""

    ISSUED: Final = 0  # numbers ever leased, of those of the store
    LEASES: Final = 1  # leases ever
    RETURNS: Final = 2  # leases ever that came back
    REFUSED: Final = 3  # commits and heartbeats ever of leases that had expired
    LARGEST_LAG: Final = 4  # of the groups that were drawn
    SWEEPING: Final = 5  # 1: new counters are complete and replace the old ones
    WAITED_NS: Final = 6  # nanoseconds ever in which workers waited for a lease
    TRAINED: Final = 7  # of several stores: batches that all ranks have trained; -1: not known yet
    OTHERS: Final = 8  # of several stores: numbers that the others add to `PromptLedger._before`
    NUM_WORDS: Final = 9


class Progress:
    """Words that stores send to each other before a selection."""

    FIRST_OPEN: Final = 0  # the first number of the store that is open
    BATCHES: Final = 1  # that the ranks of its node have trained
    STORE: Final = 2
    TRAINED: Final = 3  # batches that all ranks of all nodes have trained, as far as known here
    DROPPED: Final = 4  # numbers ever that left without being drawn; after a load, summed by store
    STAMP: Final = 5  # the largest `Entry.STAMP` known here
    NUM_WORDS: Final = 6


class Left:
    """Counters of numbers that have left; names that programs give follow."""

    DRAWN, REJECTED, EVICTED, REMOVED, ENDED, EXPIRED, TOO_OLD = range(7)


FIXED_REASONS = (
    "drawn",
    "rejected",
    "evicted",
    "removed",
    "worker ended",
    "lease expired",
    "too old",
)
OTHER_REASON: Final = MOST_REASONS - 1


class PromptPart:
    """What a column of steps decides where two trajectories of a group begin alike."""

    IDENTITY: Final = 0  # whether their prompt is the same
    STORED: Final = 1  # whether an equal prompt is stored once
    UNREAD: Final = 2  # nothing: at a prompt that is stored once, the values of the first one stay


#: A column, its least and its largest value, and the values that it may have.
PromptCondition = tuple[str, int | float | None, int | float | None, tuple[int | float, ...] | None]


@dataclass(frozen=True)
class PromptSpec:
    """The prompts of a table, and how they are leased."""

    data: str  # folder of the data set, absolute; each of its trajectories is a prompt
    fingerprint: str
    num_prompts: int
    groups: int  # of a rollout batch
    size: int  # trajectories of a group, at most
    lease_s: float
    attempts: int
    max_lag: int
    seed: int  # with `random_key` of the order of each epoch
    random_key: int
    order: str = "lease"  # or "completion"
    late: str = "wait"  # or "drop"
    keep_bytes: int = 0  # that a lease may keep
    is_kept: bool = False  # whether the store outlives its job
    needs: bool = False  # whether a committed group waits for late columns
    where: tuple[PromptCondition, ...] = ()  # on columns of the data set; `num_prompts` pass them
    column: str | None = None  # of the table, which has the place of the prompt in the data set
    sampler: str = "epoch"  # or "prioritized", or "prioritized_epoch"
    shared_columns: tuple[str, ...] = ()  # whose values at the prompt nothing reads
    num_stores: int = 1
    store: int = 0  # index of this one

    @property
    def choice(self) -> dict[str, Any]:
        """The options, JSON-able, that decide with the data set which prompt a number is.

        Without those that have their defaults, as a checkpoint has it.
        """
        where = [
            [column, least, most, None if among is None else list(among)]
            for column, least, most, among in self.where
        ]
        sampler = {"sampler": self.sampler} if self.draws else {}
        return {**({"where": where} if where else {}), **sampler}

    def part(self, column: Column) -> int:
        """Return what a column of steps decides about sharing, a `PromptPart`."""
        if column.role in ("token", "media"):
            return PromptPart.IDENTITY
        return PromptPart.UNREAD if column.name in self.shared_columns else PromptPart.STORED

    @property
    def draws(self) -> bool:
        """Whether the prompt of a number is drawn by masses; else the number determines it."""
        return self.sampler != "epoch"

    @property
    def draws_once(self) -> bool:
        """Whether each prompt is drawn once an epoch, by masses."""
        return self.sampler == "prioritized_epoch"

    @property
    def is_joint(self) -> bool:
        """Whether the groups of several stores are in one order of completion."""
        return self.num_stores > 1 and self.order == "completion"

    def issued_below(self, number: int) -> int:
        """Return how many numbers of this store are below a number.

        Store 1 of 3 issues 1, 4, 7, ...: of these 2 are below 5, and 2 below 7.
        """
        return max(-(-(number - self.store) // self.num_stores), 0)

    @property
    def num_entries(self) -> int:
        """Most numbers that are leased, returned or held at once, by admission."""
        return (self.max_lag + 1) * self.groups

    def may_lease(self, before: int, trained: int) -> bool:
        """Return whether a number may be leased that comes after `before` others.

        Those, counted from the first of batch 0, are consumed first unless they are dropped. So its
        batch is at most `before // groups`; less the `trained` ones, that is its largest lag.
        """
        return before // self.groups <= trained + self.max_lag

    def regions(self) -> list[Region]:
        """Return the regions of the ledger in a store."""
        words = (4 + self.max_lag,)
        return [
            *([Region("life_words", "int64", words)] if self.is_kept else []),
            Region("prompt_entries", "int64", (self.num_entries, Entry.NUM_WORDS)),
            Region("prompt_counts", "int64", (PromptCount.NUM_WORDS,)),
            # The counters, and as they will be. Those of an epoch follow a word that is epoch + 1.
            Region("prompt_left", "int64", (2, MOST_REASONS)),
            Region("prompt_epochs", "int64", (2, EPOCHS, 1 + MOST_REASONS)),
            Region("prompt_reasons", f"S{REASON_BYTES}", (MOST_REASONS,)),
            Region("prompt_kept", "uint8", (self.num_entries, 2, self.keep_bytes)),
            *(self._mass_regions() if self.draws else []),
        ]

    def _mass_regions(self) -> list[Region]:
        """Return the regions of `PromptMasses` in a store."""
        each = (self.num_prompts,)
        return [
            Region("prompt_masses", "int64", each),
            *([Region("prompt_drawn", "int64", each)] if self.draws_once else []),
            Region("prompt_sums", "int64", (tree_size(self.num_prompts),)),
            Region("prompt_tree", "int64", (2,)),
        ]


def counter_of(reasons: np.ndarray, name: bytes) -> int:
    """Return the counter of a program's reason, which takes a free one if there is any."""
    for counter in range(len(FIXED_REASONS), OTHER_REASON):
        if reasons[counter] in (b"", name):
            reasons[counter] = name
            return counter
    return OTHER_REASON
