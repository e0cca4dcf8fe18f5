"""Group forecast: the groups of a store as its next selection will form them, computed on copies.

Groups are formed when a process selects or evicts. A reader of a running process's store, which changes
nothing, would find complete groups that are not formed yet.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from deepspeed_gear.ops.records import Slot, SlotState
from deepspeed_gear.schema import Schema
from deepspeed_gear.store.group_spec import GroupSpec
from deepspeed_gear.store.groups import TableGroups

_CHANGED = ("slots", "groups", "group_counts", "consumed_groups", "retention", "control")


class _CopiedExtents:
    """Stands in for a table's extents: evictions change the copied slots only."""

    def __init__(self, slots: np.ndarray) -> None:
        self._slots = slots

    def changed_since(self, seen: int) -> None:
        """Every slot may have changed."""
        del seen

    def retire(self, slot: int) -> None:
        self._slots[slot, Slot.STATE] = SlotState.EVICTED

    def note(self, slot: int) -> None:
        """No stream reads the copies."""


def forecast_groups(
    name: str, spec: GroupSpec, schema: Schema, views: Mapping[str, np.ndarray]
) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """Form the groups of a store on copies of its words.

    Args:
        views: The regions of the store, with the columns; they are only read.
    Returns:
        The regions, those that groups change as copies, and the counts of `TableGroups.statistics`.
    Cost: a pass over the slots, and a sort of the trajectories of groups that are not formed.
    """
    found = {**views, **{region: np.array(views[region]) for region in _CHANGED}}
    columns = {column.name: views[f"column/{column.name}"] for column in schema}
    extents = _CopiedExtents(found["slots"])
    groups = TableGroups(name, spec, schema, found, columns, extents)  # type: ignore[arg-type]
    groups.update()
    return found, groups.statistics
