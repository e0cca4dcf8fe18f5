"""Records and codes that Python and C++ share: slots, resolutions, fields, ring state.

Each is a class of words. A record is a row of an int64 array: `slots[slot, Slot.ID]`. `NUM_WORDS`
is the length of a row. A test compares the classes with the headers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, fields
from typing import Final


class Slot:
    """A row of the slot table: state, id and extent of a trajectory. Header: common/slot.h."""

    STATE: Final = 0
    GENERATION: Final = 1  # counted up by each reservation
    ID: Final = 2  # the trajectory id
    FIRST_ROW: Final = 3
    NUM_STEPS: Final = 4
    NUM_ROWS: Final = 5
    OWNER: Final = 6  # peer that has reserved it
    # In a table on a device, which no peer reserves, where draws are limited.
    TIMES_SAMPLED: Final = 6
    BORN: Final = 7  # global batch at which it was committed
    NUM_WORDS: Final = 8


class SlotState:
    """State of a slot; its word is the commit point."""

    FREE: Final = 0
    RESERVED: Final = 1
    COMMITTED: Final = 2
    EVICTED: Final = 3


class Resolution:
    """Record of a sample: slot, extent, anchor and mass of a draw. Header: common/slot.h."""

    ID: Final = 0
    SLOT: Final = 1
    GENERATION: Final = 2
    FIRST_ROW: Final = 3
    NUM_STEPS: Final = 4
    ANCHOR: Final = 5
    MASS: Final = 6
    SAMPLE_NUMBER: Final = 7
    NUM_WORDS: Final = 8
    # Id and slot of a record without a sample, which else is 0, but for the sample number.
    NO_SAMPLE: Final = -1


class MassUnit:
    """Unit of masses: items, or steps of a trajectory. Header: common/slot.h."""

    TRAJECTORY: Final = 0
    STEP: Final = 1
    LENGTH: Final = 2  # a trajectory with its number of steps as mass


class PriorityUpdate:
    """A new priority of an item; the item is ignored once its slot has another generation."""

    SLOT: Final = 0
    GENERATION: Final = 1
    ANCHOR: Final = 2
    PRIORITY: Final = 3


class LogEntry(PriorityUpdate):
    """A priority update that waits in a priority log."""

    BATCH: Final = 4  # global batch that it belongs to
    SAMPLE_NUMBER: Final = 5
    NUM_WORDS: Final = 6
    BY_ID: Final = 1 << 62  # sample number of an update by id: after all others


class UpdateCount:
    """Counts of priority updates by effect. Header: priorities/priorities.h."""

    APPLIED: Final = 0
    STALE: Final = 1  # ignored: evicted, or a step that is no anchor
    CLAMPED: Final = 2
    HIGHEST_PRIORITY: Final = 3  # float32 bits
    DRAWABLE: Final = 4  # items with a mass
    NUM_WORDS: Final = 5


class RandomPurpose:
    """Purpose of a random word: a part of the Philox counter. Header: common/philox.h."""

    COORDINATE: Final = 0
    ANCHOR: Final = 1
    PERMUTATION: Final = 2
    SPLIT: Final = 3
    TRANSFORM: Final = 4
    RELABELLING: Final = 5
    GOAL: Final = 6
    EVICTION: Final = 7  # drawn on the host only


class GoalStrategy:
    """Which rows of a trajectory may give a sample another goal. Header: select/select.h."""

    FUTURE: Final = 0
    FINAL: Final = 1
    EPISODE: Final = 2


class Source:
    """Source of a field's values. Header: gather/gather.h."""

    STEPS: Final = 0
    STEPS_PLUS_ONE: Final = 1
    TRAJECTORY: Final = 2
    TIMESTEP: Final = 3
    POSITION: Final = 4


class Follows:
    """What a window is placed after, besides the anchor. Header: gather/gather.h."""

    ANCHOR: Final = 0
    N_STEP: Final = 1  # the steps of the n-step return
    GOAL: Final = 2  # instead of the anchor the step of its goal; without one nothing is written


class Align:
    """Alignment of a window's real steps. Header: common/window.h."""

    IN_PLACE: Final = 0
    LEFT: Final = 1
    RIGHT: Final = 2


class Pad:
    """Contents of padding. Header: common/window.h."""

    VALUE: Final = 0
    EDGE: Final = 1


@dataclass(frozen=True)
class GatherSpec:
    """Specification of a gathered field: the words of `struct Field` (gather/gather.h)."""

    source: int  # `Source` of the rows
    offset: int = 0  # first step of the window, relative to the anchor
    length: int = 1  # steps of the window
    align: int = Align.IN_PLACE
    follows: int = Follows.ANCHOR
    pad: int = Pad.VALUE
    elements: int = 1  # elements of a row
    mask: int = -1  # index of the mask that it writes; -1: another field writes it, or none
    part_first: int = 0  # the rows of the window that are gathered
    part_count: int = 1


def lower(specs: Iterable[GatherSpec]) -> list[int]:
    """Return the integers of an op's `spec`: one word for each attribute of each field."""
    return [int(word) for spec in specs for word in astuple(spec)]


def raised(words: Sequence[int]) -> list[GatherSpec]:
    """Return the field specifications of lowered integers."""
    size = len(fields(GatherSpec))
    return [GatherSpec(*words[at : at + size]) for at in range(0, len(words), size)]


class RowSample:
    """A sample of which another node needs rows. Header: rows/rows.h."""

    PEER: Final = 0
    NEED: Final = 1
    SLOT: Final = 2
    NUM_STEPS: Final = 3
    ANCHOR: Final = 4
    N_STEPS: Final = 5
    GOAL: Final = 6
    NUM_WORDS: Final = 7


class RowWindow:
    """Rows of a column group that a need reads. Header: rows/rows.h."""

    GROUP: Final = 0
    IS_GOAL: Final = 1
    FIRST: Final = 2
    END: Final = 3
    AFTER_N_STEP: Final = 4
    EDGE: Final = 5
    FINAL_ROW: Final = 6
    NUM_WORDS: Final = 7


class RowColumn:
    """A column of a message of rows. Header: rows/rows.h."""

    GROUP: Final = 0
    MEMBERS: Final = 1
    ROW_BYTES: Final = 2
    NUM_WORDS: Final = 3


class RingState:
    """State of a table in a device's memory. Header: common/ring_layout.h.

    Rows and trajectories are numbered for ever: in a ring of 10 rows, row 23 lies at 3. Words that
    are left out here belong to the kernels.
    """

    HEAD: Final = 0  # number of the row after the newest trajectory
    NEXT: Final = 1  # id of the next trajectory
    TAIL: Final = 2  # id of the oldest one that is stored
    SAMPLES: Final = 3  # sample number of the next global batch
    BATCH: Final = 4  # number of the next global batch
    TOTAL: Final = 5  # total mass that the latest one was drawn from
    STEPS: Final = 6  # steps that are stored
    REFUSED: Final = 7  # invalid lengths and priorities, which have changed nothing
    COUNTS: Final = 8  # the words of UpdateCount begin here
    EMPTY: Final = 14  # global batches without samples
    DROPPED: Final = 15  # steps of open trajectories that were evicted by the same call
    INITIAL: Final = 22  # highest priority so far when the latest batch was drawn, float32 bits
    EPOCH: Final = 23  # number of the latest epoch
    EPOCH_FIRST: Final = 24  # number of its first sample
    EPOCH_SIZE: Final = 25  # its items; 0: none has begun
    EPOCH_NEXT: Final = 26  # NEXT, TAIL and STEPS when a batch of it was last drawn
    EPOCH_TAIL: Final = 27
    EPOCH_STEPS: Final = 28
    EPOCHS_CUT: Final = 29  # epochs that ended early, because the table had changed
    NUM_WORDS: Final = 32


class OpenTrajectory:
    """The open trajectory of an environment, in a device's table. Header: common/open_steps.h."""

    NUM_STEPS: Final = 0  # 0: there is none
    ID: Final = 1
    NEXT_ROW: Final = 2  # row after the trajectory, counted from the environment's first row
    ENDED: Final = 3  # 1: the latest step was the last one of an episode
    NUM_WORDS: Final = 4


class PlacedStep:
    """A step that is added to the open trajectory of an environment."""

    SLOT: Final = 0  # -1: no step
    ROW: Final = 1
    NUM_STEPS: Final = 2  # 1: the step itself
    ID: Final = 3
    FIRST_ROW: Final = 4
    STEP: Final = 5  # its number in the trajectory; 0: it begins one
    NUM_WORDS: Final = 6


class PlacedTrajectory:
    """An added trajectory's place in a device's table. Header: common/ring_layout.h."""

    SLOT: Final = 0  # -1: it was not added
    FIRST_ROW: Final = 1
    NUM_STEPS: Final = 2
    ID: Final = 3
    BEGIN: Final = 4  # number of its first row, which lies at FIRST_ROW
    NUM_WORDS: Final = 5


class Normalize:
    """Divisor of PER weights: the largest of batch or table. Header: common/power.h."""

    NONE: Final = 0
    BATCH: Final = 1
    TABLE: Final = 2
