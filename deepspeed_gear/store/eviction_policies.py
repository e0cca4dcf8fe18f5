"""Eviction policies: which trajectory is evicted when a table is full. One class each, found by their names.

A policy from outside of the package is named by "module:Class" (`gear.tables.<name>.remove`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np

from deepspeed_gear.config.schedules import imported
from deepspeed_gear.errors import ConfigError
from deepspeed_gear.ops.philox import below, philox
from deepspeed_gear.ops.records import RandomPurpose, Slot, SlotState
from deepspeed_gear.store.pins import SelectionPins
from deepspeed_gear.store.records import Control, EvictionCode, SlotRetention
from deepspeed_gear.store.retention import Retention
from deepspeed_gear.store.table import Table


class EvictionPolicy(ABC):
    """Chooses the trajectory to evict when too few rows or slots are free for a new one.

    In a table of groups the whole group of that trajectory is evicted.

    Args:
        retention: The table's.
    """

    evicts: ClassVar[bool] = True
    code: ClassVar[int] = EvictionCode.BY_CALLER  # what the native module does without calling `victim`

    def __init__(self, retention: Retention) -> None:
        self.retention = retention

    @abstractmethod
    def victim(self, table: Table, pins: SelectionPins) -> int:
        """Return the committed slot to evict next, -1 if there is none. Called with the lock held."""


class NoEviction(EvictionPolicy):
    """Adding to a full table is an error."""

    evicts = False
    code = EvictionCode.NONE

    def victim(self, table: Table, pins: SelectionPins) -> int:
        return -1


class EvictOldest(EvictionPolicy):
    """First in, first out."""

    code = EvictionCode.OLDEST

    def victim(self, table: Table, pins: SelectionPins) -> int:
        assert table.extents is not None
        return table.extents.oldest()


class EvictNewest(EvictionPolicy):
    """Last in, first out; of groups the newest complete one, as the newest may still be added to."""

    code = EvictionCode.NEWEST

    def victim(self, table: Table, pins: SelectionPins) -> int:
        assert table.extents is not None
        if table.groups is not None:
            held = np.nonzero(table.slots[:, Slot.STATE] == SlotState.COMMITTED)[0]
            leaders = held[table.groups.is_leader(held)]
            if len(leaders):
                return int(leaders[table.slots[leaders, Slot.ID].argmax()])
        return table.extents.newest()


class EvictByChoice(EvictionPolicy):
    """Base of policies that choose among all trajectories that are complete (not open)."""

    def victim(self, table: Table, pins: SelectionPins) -> int:
        slots = np.nonzero(table.slots[:, Slot.STATE] == SlotState.COMMITTED)[0]
        slots = slots[table.views["retention"][slots, SlotRetention.OPEN] == 0]
        return int(slots[self.choose(table, pins, slots)]) if len(slots) else -1

    @abstractmethod
    def choose(self, table: Table, pins: SelectionPins, slots: np.ndarray) -> int:
        """Return an index into slots. [n], int64, at least one."""


class EvictUniform(EvictByChoice):
    """Each trajectory or group with the same probability, keyed by the next id: runs are reproducible."""

    def choose(self, table: Table, pins: SelectionPins, slots: np.ndarray) -> int:
        which = np.arange(len(slots))
        if table.groups is not None:  # the newest trajectory of each group
            ids = table.slots[slots, Slot.ID]
            which = np.nonzero(table.groups.highest(slots, ids) == ids)[0]
        number = np.array([table.control[Control.NEXT_ID]], np.uint64)
        words = philox(0, number, 0, np.array([[RandomPurpose.EVICTION]], np.uint64))
        return int(which[below(tuple(quarter[0] for quarter in words), np.array([len(which)]))[0]])


class EvictLowest(EvictByChoice):
    """Base of policies that evict the lowest value; of equal ones the lowest id.

    A group has the highest value of its trajectories.
    """

    def choose(self, table: Table, pins: SelectionPins, slots: np.ndarray) -> int:
        values = self.values(table, pins, slots)
        if table.groups is not None:
            values = table.groups.highest(slots, values)
        return int(np.lexsort((table.slots[slots, Slot.ID], values))[0])

    @abstractmethod
    def values(self, table: Table, pins: SelectionPins, slots: np.ndarray) -> np.ndarray:
        """Return the value of each trajectory. [n], float64."""


class EvictLowestPriority(EvictLowest):
    """The trajectory whose highest priority is the lowest; incomplete groups, which have none, last."""

    def values(self, table: Table, pins: SelectionPins, slots: np.ndarray) -> np.ndarray:
        found = pins.highest_priorities(slots)
        if table.groups is not None:
            found[~table.groups.is_complete(slots)] = np.inf
        return found


class KeepBest(EvictLowest):
    """The lowest value of a per-trajectory column; NaN is lower than all."""

    def values(self, table: Table, pins: SelectionPins, slots: np.ndarray) -> np.ndarray:
        assert self.retention.column is not None
        values = np.asarray(table.values(self.retention.column, slots), np.float64)
        return np.where(np.isnan(values), -np.inf, values)


POLICIES: dict[str, type[EvictionPolicy]] = {
    "none": NoEviction,
    "fifo": EvictOldest,
    "lifo": EvictNewest,
    "uniform": EvictUniform,
    "lowest_priority": EvictLowestPriority,
    "keep_best": KeepBest,
}


def policy_class(name: str, option: str = "remove") -> type[EvictionPolicy]:
    """Return the class of an eviction policy.

    Args:
        name: A key of `POLICIES`, or "module:Class".
        option: Its name in errors.
    Raises:
        ConfigError: A class from outside cannot be imported, or is no EvictionPolicy.
    """
    if ":" not in name:
        return POLICIES[name]
    found = imported(name, option)
    if not (isinstance(found, type) and issubclass(found, EvictionPolicy)):
        raise ConfigError(option, "must name a subclass of EvictionPolicy", name)
    return found


def policy_of(retention: Retention) -> EvictionPolicy:
    """Return the eviction policy of a table; raises as `policy_class`."""
    return policy_class(retention.eviction)(retention)
