"""Exclusions: why trajectories cannot be sampled, counted from a store's regions, with remedies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from deepspeed_gear.data.splits import split_of
from deepspeed_gear.ops.records import Slot, SlotState
from deepspeed_gear.sampling.mass_rules import MassRule
from deepspeed_gear.store.group_spec import SlotGroup
from deepspeed_gear.store.records import SlotRetention

if TYPE_CHECKING:
    from deepspeed_gear.sampling.sum_tree import ItemMasses
    from deepspeed_gear.schema import Schema

Values = Callable[[str, np.ndarray], np.ndarray]  # column, slots [n] -> [n]


@dataclass(frozen=True)
class Exclusion:
    """Items that are excluded from sampling for one reason."""

    reason: str
    remedy: str
    trajectories: int  # where steps have priorities, of those with an excluded step
    steps: int  # of these trajectories, or those of priority 0

    def __str__(self) -> str:
        return f"{self.trajectories} trajectories ({self.steps} steps) {self.reason}"


def count_exclusions(
    rule: MassRule,
    schema: Schema,
    stream: str,
    views: Mapping[str, np.ndarray],
    values: Values | None,
) -> tuple[list[Exclusion], int]:
    """Count the items that a stream cannot draw, each trajectory under the first reason that holds.

    Returns reasons, in the order of the checks (for groups, those after the groups' own count
    leaders), and the leaves that the next selection adds, written since the latest one: steps where
    these have priorities, else trajectories or groups. `views` are the store's regions; `values`
    reads a column's values of slots. Cost: one pass over the slots; with priorities of steps one
    over the rows.
    """
    exclusions, left = _admitted(rule, schema, views, values)
    slots = views["slots"]
    sums = views[stream + "sums"]
    if stream + "priorities" not in views:
        # Without mass as of the latest selection, although the rule admits it.
        waits = sums[left] == 0
        if rule.window is not None:
            is_inside = views[stream + "queued"][left] > 0
            reason = "too old for the window of the sampler, or newer than the latest selection"
            _add(
                exclusions,
                slots,
                left[waits & ~is_inside],
                reason,
                "check sampler.newest and sampler.within",
            )
            waits &= is_inside
        return exclusions, int(waits.sum())
    is_current = views[stream + "generations"][left] == slots[left, Slot.GENERATION]
    is_known = is_current & (views[stream + "bases"][left] > 0)  # had a priority, 0 or above
    known = left[is_known]
    reason = "of priority 0"
    remedy = "report priorities above 0"
    if rule.unit != "step":
        _add(exclusions, slots, known[sums[known] == 0], reason, remedy)
        return exclusions, int((~is_known).sum())
    before = np.where(is_known, rule.anchors.num_anchors(views[stream + "steps"][left]), 0)
    now = rule.anchors.num_anchors(slots[left, Slot.NUM_STEPS])
    ends = np.append(0, np.cumsum(sums[: len(views[stream + "priorities"])] > 0))
    first = slots[known, Slot.FIRST_ROW]
    drawable = ends[first + slots[known, Slot.NUM_STEPS]] - ends[first]
    fewer = before[is_known] - drawable  # later steps are new
    if (fewer > 0).any():
        exclusions.append(
            Exclusion(reason, remedy, int((fewer > 0).sum()), int(fewer[fewer > 0].sum()))
        )
    return exclusions, int(np.maximum(now - before, 0).sum())


def _admitted(
    rule: MassRule, schema: Schema, views: Mapping[str, np.ndarray], values: Values | None
) -> tuple[list[Exclusion], np.ndarray]:
    """Return what the rule excludes, and the slots that it admits. [n], int64."""
    slots = views["slots"]
    exclusions: list[Exclusion] = []
    reserved = slots[:, Slot.STATE] == SlotState.RESERVED
    _add(
        exclusions,
        slots,
        np.nonzero(reserved)[0],
        "being written and not published",
        "commit or publish them",
    )
    left = np.nonzero(slots[:, Slot.STATE] == SlotState.COMMITTED)[0]

    def exclude(excluded: np.ndarray, reason: str, remedy: str) -> None:
        nonlocal left
        _add(exclusions, slots, left[excluded], reason, remedy)
        left = left[~excluded]

    if "retention" in views:
        for column in schema.late_columns:
            if column.name in rule.late:
                bit = schema.late_bits([column.name])
                absent = views["retention"][left, SlotRetention.PRESENT] & bit == 0
                remedy = f'write {column.name} with fill(), or leave it out of "fields"'
                exclude(absent, f"without the late column {column.name}", remedy)
    if "groups" in views and rule.unit == "group":
        leaders = views["groups"][left, SlotGroup.LEADER]
        exclude(
            leaders == 0, "of incomplete groups", "add the missing members, or set group.after_s"
        )
        leaders = leaders[leaders != 0]
        exclude(
            leaders == SlotGroup.REJECTED, "of groups outside of group.where", "check group.where"
        )
        left = left[views["groups"][left, SlotGroup.LEADER] == left + 1]
    if rule.split:
        other = split_of(slots[left, Slot.ID], rule.split) != rule.split_index
        exclude(other, "of another split", "lower the shares of data.split")
    for condition in rule.where:
        if values is not None:
            fails = ~condition.holds(values(condition.column, left))
            exclude(fails, f"outside of sampler.where.{condition.column}", "check sampler.where")
    short = rule.anchors.num_anchors(slots[left, Slot.NUM_STEPS]) == 0
    exclude(
        short, 'without an anchor (too short for the windows of "fields")', "check sampler.anchors"
    )
    if values is not None and rule.has_weights:
        ids, steps = slots[left][:, [Slot.ID, Slot.NUM_STEPS]].T
        masses = rule.masses(ids, steps, lambda name: values(name, left))
        exclude(masses == 0, "of weight or mass 0", "give weights, or masses, above 0")
    return exclusions, left


def _add(
    exclusions: list[Exclusion], slots: np.ndarray, which: np.ndarray, reason: str, remedy: str
) -> None:
    if len(which):
        exclusions.append(
            Exclusion(reason, remedy, len(which), int(slots[which, Slot.NUM_STEPS].sum()))
        )


def summary_of(masses: ItemMasses) -> tuple[str, str]:
    """Return a store's contents and exclusions as text, and the remedy of the largest. Requires the
    lock.
    """
    table = masses.table
    spec = masses.spec
    exclusions, _ = count_exclusions(
        spec.rule, table.spec.schema, spec.at, table.views, table.values
    )
    held = f"{table.num_trajectories} trajectories, {table.num_steps} steps held"
    remedy = max(exclusions, key=lambda one: one.steps).remedy if exclusions else ""
    return "; ".join([held, *map(str, exclusions)]), remedy
