"""Members of a lease's group: lists of their trajectories, and the check of the group's size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

import deepspeed_gear.arguments as arguments
from deepspeed_gear.errors import DataError
from deepspeed_gear.store.group_spec import GroupSpec


def listed_trajectories(
    name: str, members: Any, column: str | None
) -> tuple[Sequence[Mapping[str, Any]], list[int]]:
    """List the trajectories of members one after the other, each with the place of its member.

    Args:
        name: Name of the group, for errors.
        members: For each member a trajectory or, with a `column`, a list of trajectories.
        column: Column of members, which gets the places 0, 1, ...; None: each member is one
            trajectory, which stays as it is.
    Returns:
        The trajectories, and how many each member has.
    Raises:
        ConfigError: `members` is no list.
        DataError: A member has no trajectory, one that is no mapping, or another place; or a list
            of them where there is no `column`.
    """
    given = arguments.one_of("members", members, Sequence, "a list of a group's members")
    if column is None:
        for place, member in enumerate(given):
            if isinstance(member, (list, tuple)):
                rule = "must be one trajectory: the table's groups have no member column"
                remedy = "name the column as group.member, and give group.max_trajectories"
                raise DataError(f"{name}: member {place}", rule, "a list", remedy)
        return given, [1] * len(given)
    trajectories = []
    counts = []
    for place, member in enumerate(given):
        at = f"{name}: member {place}"
        own = [member] if isinstance(member, Mapping) else member
        if not isinstance(own, Sequence) or not len(own):
            rule = "must be a trajectory, or a list with at least one"
            value = "an empty list" if isinstance(own, Sequence) else type(own).__name__
            raise DataError(at, rule, value, "leave a member out that has none")
        for one in own:
            remedy = "give rows by column; trajectories_from_turns makes trajectories of turns"
            columns = arguments.mapping(f"{at}: trajectory", one, remedy)
            if not np.array_equal(columns.get(column, place), place):
                rule = f"must have its place in the group in {column}"
                raise DataError(at, rule, columns[column], "leave the column out")
            trajectories.append({**columns, column: place})
        counts.append(len(own))
    return trajectories, counts


def by_member(trajectories: Sequence[Any], counts: Any) -> list[Sequence[Any]]:
    """Divide the trajectories of a group by member, given how many each has; DataError."""
    name = "the trajectories of members"
    numbers = arguments.integers(name, counts).tolist()
    if min(numbers, default=1) < 1 or sum(numbers) != len(trajectories):
        rule = f"must be counts above 0 whose sum is {len(trajectories)}"
        remedy = "use the same version of deepspeed_gear on both sides"
        raise DataError(name, rule, str(numbers[:8]), remedy)
    ends = np.cumsum(numbers).tolist()
    return [trajectories[end - count : end] for end, count in zip(ends, numbers, strict=True)]


def check_group_size(name: str, group: GroupSpec, num_members: int, num_trajectories: int) -> None:
    """Raise a DataError unless a group that a lease commits has as many members as it must have."""
    least = group.min_size or group.size
    if not least <= num_members <= group.size:
        rule = f"must have {group.size} members"
        if least < group.size:
            rule = f"must have {least} (group.min_size) to {group.size} members"
        remedy = "commit as many as group.size"
        if num_members < least:
            remedy = "lower group.min_size, or fail() the lease"
            if not group.min_size:
                remedy = "give group.min_size to commit fewer, or fail() the lease"
        raise DataError(name, rule, num_members, remedy)
    if num_trajectories > group.max_trajectories:
        rule = f"must have at most group.max_trajectories = {group.max_trajectories} trajectories"
        raise DataError(name, rule, num_trajectories, "raise it, or commit fewer")
