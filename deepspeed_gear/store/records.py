"""Words of a store's records in shared memory, one class each; in C++: store/store.h."""

from __future__ import annotations

from typing import Final


class Control:
    """Words of a store as a whole."""

    CHANGED: Final = 0  # slot changes ever
    NEXT_ID: Final = 1
    NUM_COMMITTED: Final = 2
    STEPS_COMMITTED: Final = 3
    ROVER: Final = 4  # extent where the last search for rows ended
    FREE_SLOT: Final = 5  # first of the free slots
    FREE_ROWS: Final = 6
    INSERTED: Final = 7  # trajectories ever committed
    STEPS_INSERTED: Final = 8
    RECOVERIES: Final = 9  # times that the store was repaired after a death
    SELECTING: Final = 10  # selections over several nodes that are under way
    POLICY_VERSION: Final = 11
    ROWS_HELD: Final = 12
    LOADS: Final = 13  # checkpoints loaded
    PENDING: Final = 16  # reserved and not committed; with the next one, read by rate limiters
    STEPS_PENDING: Final = 17
    QUOTA: Final = 18  # items that this node's writers may ever add, by the last round
    WANTED: Final = 19  # most items of an addition that the quota refused
    LISTENING: Final = 20  # whether a sampler waits for a change
    EVENT: Final = 21  # futex word that is incremented then
    MOVING: Final = 22  # slot + 1 of the extent that is moved; 0: none
    MOVE_FROM: Final = 23  # its old first row, its new one, and twice the rows that are done
    MOVE_TO: Final = 24
    MOVE_DONE: Final = 25
    SHORT_ROVER: Final = 26  # extent where the last search for rows of a moved extent ended
    NUM_WORDS: Final = 32


class MomentHead:
    """Words that select the valid copy of the running moments. Header: store/moments.h."""

    CURRENT: Final = 0
    STAGED: Final = 1  # 1 + the copy that holds a commit which is under way; 0: none
    SLOT: Final = 2  # of that commit: it has happened once the slot is committed with so many steps
    GENERATION: Final = 3
    STEPS: Final = 4
    NUM_WORDS: Final = 8


class SlotRetention:
    """Words of a slot that decide how long its trajectory stays."""

    TIMES_SAMPLED: Final = 0
    PRESENT: Final = 1  # bits of the late columns that were filled
    POLICY_VERSION: Final = 2  # oldest policy version of its steps
    OPEN: Final = 3  # whether it still grows
    NUM_WORDS: Final = 4


class FillClaim:
    """Words of a slot's late column: which process computes it, so that others take other ones."""

    ID: Final = 0  # of the trajectory, plus 1, written last; 0: there is none
    OWNER: Final = 1  # index of the process
    DEADLINE: Final = 2  # monotonic nanoseconds at which the claim ends
    # In the row after the slots: fills ever that were ignored since the column was there
    REPEATED: Final = 0
    NUM_WORDS: Final = 3


class SharedPrompt:
    """Words of a slot whose first steps another trajectory of its group holds."""

    STEPS: Final = 0  # so many; 0: it holds all of its steps
    SLOT: Final = 1  # of the one that holds them
    NUM_WORDS: Final = 2


class MediaPage:
    """Words of a page of media; of an item's first page also those from NUMBER on."""

    STATE: Final = 0  # a PageState
    NEXT: Final = 1  # the item's next page, plus 1; 0: it is the last one
    NUMBER: Final = 2  # of the item
    NUM_BYTES: Final = 3
    OWNER: Final = 4  # index of the process that writes it
    AGE: Final = 5  # grows with each addition
    DIGEST: Final = 6  # SHA-256 of the content, 4 words
    NUM_WORDS: Final = 10


class PageState:
    """States of a page of media."""

    FREE: Final = 0
    WRITING: Final = 1  # first page of an item that a process writes
    WHOLE: Final = 2  # first page of an item
    FOLLOWING: Final = 3  # another page of an item


class SlotLink:
    """Neighbours of a slot in the lists by address and by age."""

    BEFORE: Final = 0
    AFTER: Final = 1
    OLDER: Final = 2
    NEWER: Final = 3
    NUM_WORDS: Final = 4


class Growing:
    """Words of a trajectory that grows: its slot as reserved, and what is published of it."""

    SLOT: Final = 0  # -1: nothing is published
    GENERATION: Final = 1
    LOADS: Final = 2
    FIRST: Final = 3  # steps before the stored ones
    PUBLISHED: Final = 4
    ID: Final = 5  # of the stored trajectory
    LATEST_SLOT: Final = 6  # of the writer's latest published trajectory that has ended; -1: none
    LATEST_GENERATION: Final = 7
    NUM_WORDS: Final = 8


class StepCount:
    """Words of a writer of many environments, which its native call changes too."""

    STEPS_TAKEN: Final = 0
    WHOLE_ADDED: Final = 1  # trajectories that the native call has stored whole
    BEGUN: Final = 2  # trajectories whose first steps it has published
    NUM_COMPLETED: Final = 3  # of these, not taken yet
    NUM_WORDS: Final = 4


class Refusal:
    """Codes of why rows could not be reserved or committed; the native path returns them."""

    NO_SLOT: Final = -1
    NO_ROWS: Final = -2
    SCATTERED: Final = -3  # enough rows are free, but no run is long enough
    PINNED: Final = -4  # the trajectory to evict is still read
    RATE_LIMITED: Final = -5  # too many items were added for the samples drawn
    LOCK_TIMEOUT: Final = -6
    LOCK_BROKEN: Final = -7
    MUST_RECOVER: Final = -8  # a process died inside the store: the next lock in Python repairs it
    NOT_FINITE: Final = -9  # a column holds NaN or an infinity and must not
    NEEDS_VICTIM: Final = -10  # the caller must evict one: policies in Python, and groups
    NEEDS_RELEASE: Final = -11  # the caller must release what dead processes hold
    GROUP_FULL: Final = -12  # the group has its most trajectories


class EvictionCode:
    """Codes of the eviction policies of the native store: `Removal`."""

    NONE: Final = 0
    OLDEST: Final = 1
    NEWEST: Final = 2
    BY_CALLER: Final = 3  # it returns Refusal.NEEDS_VICTIM where one must be evicted
    UNIFORM: Final = 4
    LOWEST_PRIORITY: Final = 5
    LOWEST_VALUE: Final = 6


class RateUnitCode:
    """Codes of the unit of a rate limiter: `RateUnit`."""

    TRAJECTORY: Final = 0
    STEP: Final = 1
    GROUP: Final = 2


class Peer:
    """Words of an attached process."""

    PID: Final = 0
    OLDEST_OPEN: Final = 1  # oldest policy version of its open trajectories, plus 1
    # How often its call has looked for items and waits on, adding none; 0: it does not wait
    WAITS: Final = 3
    LOST: Final = 4  # 1: another rank was waiting for it when it died
    NUM_WORDS: Final = 8


PROGRESS: Final = "ranks/progress"  # region of the ranks' words, in the first sampled table


class RankProgress:
    """Words of a rank, float64: what its program has taken so far, for readers outside the job.

    Only the rank itself writes them, and no process of the job reads them.
    """

    RANK: Final = 0  # number of the rank in the whole job
    BEGUN_S: Final = 1  # when its replay was made, by the monotonic clock; 0: it is not yet
    RETURNED_S: Final = 2  # when it took its latest batch, likewise; 0: none
    BATCHES: Final = 3  # micro batches or, with packs, rollout batches that it took
    WAIT_S: Final = 4  # seconds that it waited for these
    MADE: Final = 5  # micro batches of windows that it gathered
    GATHER_S: Final = 6  # seconds that this took
    STEPS: Final = 7  # optimizer steps of packed batches; with these, of all ranks together:
    TRAJECTORIES: Final = 8
    TOKENS: Final = 9
    NUM_WORDS: Final = 16


NOTHING: Final = -1  # the number of an empty ring entry
NEVER_LATE: Final = 1 << 62  # the word of a process that reads no selections


class Head:
    """Words of a selection: the position after it, and the inputs of its PER weights."""

    NUMBER: Final = 0  # number of the global batch; in an evaluation pass, pass << 32 | batch
    SAMPLES: Final = 1  # samples before the next one
    EPOCH: Final = 2
    EPOCH_FIRST: Final = 3  # sample number at which the epoch began
    EPOCH_SIZE: Final = 4
    TOTAL: Final = 5  # sum of all masses
    COUNT: Final = 6  # resolutions: samples, or the trajectories of sampled groups
    FILLERS: Final = 7  # samples beyond the end of a pass
    SKIPPED: Final = 8  # in epochs: items ever that were evicted before their turn
    NUMERATOR: Final = 8  # of the weights of a selection with priorities
    DIVISOR: Final = 9
    EXPONENT: Final = 10
    NUM_SET: Final = 11  # words that a selection sets
    NUM_WORDS: Final = 16


class Position(Head):
    """Words of a batch stream's position: its latest head's, with the next NUMBER, and more."""

    # 0, or 1 + samples of the next selection that were resolved before its epoch ended
    DONE: Final = 11
    AHEAD: Final = 12  # global batch whose draws are in its ring entry before it is selected
    RECOVERED: Final = 13  # RECOVERIES of the store when this stream was last repaired
    # Over nodes: a process of this node writes too, and must not wait for itself
    WRITES: Final = 14
    LIMITED: Final = 15  # over nodes: the rate limiter refuses the next selection
