"""Specification of a table's groups: when one is complete, its conditions, and its words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from deepspeed_gear.store.group_conditions import GroupCondition


class SlotGroup:
    """Words of a slot in a table of groups; those from FIRST on: of a complete group's leader."""

    # Slot of the group's leader, plus 1; 0: the group is not complete; or REJECTED
    LEADER: Final = 0
    LEAVING: Final = 1  # its group is being evicted: 1, or REMOVED by the program
    TIME: Final = 2  # of its commit, or of its latest `fill`, in nanoseconds of the monotonic clock
    NEXT: Final = 3  # slot of the group's next trajectory, plus 1; 0: it is the last one
    FIRST: Final = 4  # slot of the group's first trajectory, plus 1
    COUNT: Final = 5  # trajectories
    STEPS: Final = 6  # of all of them
    NUMBER: Final = 7  # complete groups ever, up to this one
    DRAWN: Final = 8  # 1: a selection has drawn the group
    NUM_WORDS: Final = 9
    REJECTED: Final = -1  # a data set's group that fails a condition
    REMOVED: Final = 2


class GroupCount:
    """Words of the groups of a table."""

    SEEN: Final = 0  # the table's Control.CHANGED up to which groups are formed
    # Monotonic nanoseconds at which a group may be complete without all of its members
    DUE: Final = 1
    HELD: Final = 2  # complete groups
    INSERTED: Final = 3  # complete groups ever
    REJECTED: Final = 4  # groups ever that failed a condition
    OVERSIZED: Final = 5  # groups ever that had too many trajectories
    # Trajectories ever that were evicted since their group is complete without them:
    LATE: Final = 6  # they came when it was complete
    LATE_CONSUMED: Final = 7  # they came when it had left the table
    UNFILLED: Final = 8  # they lacked a late column when it became complete
    SURPLUS: Final = 9  # they were more than `size` when it became complete
    # Complete groups ever that were evicted before any selection drew them
    EVICTED_UNSAMPLED: Final = 10
    RECENT_PASSED: Final = 11  # of the latest groups, at most RECENT: those that are complete,
    RECENT_FAILED: Final = 12  # and those that failed a condition or were too large
    CONSUMED: Final = 13  # numbers ever written to the ring of groups that have left the table
    NUM_WORDS: Final = 16


RECENT: Final = 256  # groups
# Counts of `TableGroups.statistics`, in its order, beside the numbers of complete and incomplete
# groups.
_COUNTED = "rejected oversized late late_consumed unfilled surplus evicted_unsampled".split()
COUNTED: Final[dict[str, int]] = {name: getattr(GroupCount, name.upper()) for name in _COUNTED}


@dataclass(frozen=True)
class GroupSpec:
    """Groups of a table's trajectories."""

    column: str  # per-trajectory column of integers; the trajectories of a group have one value
    size: int  # members of a group
    # Per-trajectory column of integers, one for each member of a group; None: each trajectory is
    # a member.
    member: str | None = None
    late: tuple[str, ...] = ()  # late columns that a trajectory must have
    # Seconds after its latest commit or `fill` at which a group with `min_size` members is
    # complete.
    after_s: float | None = None  # None: never
    # Without `after_s`, a lease commits at least so many members, all that the group will have.
    min_size: int = 0
    where: tuple[GroupCondition, ...] = ()  # a group that fails one is evicted when it is complete
    max_trajectories: int = 0  # of a group
    # Groups that have left the table, at most, of which late trajectories are dropped
    remember: int = 0
