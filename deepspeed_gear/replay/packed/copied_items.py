"""Copies items of a rollout batch to another table, from which a mixture samples them again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import deepspeed_gear.arguments as arguments
from deepspeed_gear.errors import (
    ConfigError,
    DataError,
    ShapeError,
)
from deepspeed_gear.ops.records import Resolution
from deepspeed_gear.replay.packed.rollout_columns import RolloutColumns
from deepspeed_gear.replay.table_access import item_values, values
from deepspeed_gear.sampling.priority_log import check_priorities
from deepspeed_gear.store.records import SlotRetention
from deepspeed_gear.store.table import Table


def copy_items(
    columns: RolloutColumns,
    target: Table,
    add: Callable[[dict[str, Any]], int],
    chosen: object,
    priorities: object,
) -> tuple[list[int], np.ndarray | None]:
    """Add items of a rollout batch to a table; see `Replay.copy_items`. Collective over nodes.

    Nothing is added unless every item fits.

    Args:
        columns: Columns of the rollout batch.
        target: The table.
        add: Adds a trajectory to it; returns the id.
        chosen: As `Replay.copy_items`.
        priorities: As `Replay.copy_items`.
    Returns:
        Ids of the trajectories that this rank has added; and the priority of each, if there are
        `priorities`. [added], float.
    Cost: an addition for each trajectory.
    """
    trajectories = columns.trajectories
    wanted = _items_to_copy(columns, target, chosen)
    given = None if priorities is None else arguments.array("priorities", priorities)
    if given is not None:
        if given.shape != wanted.shape:
            rule = f"must have shape [{trajectories.num_items}]"
            remedy = "give one priority for each item of the rollout batch"
            raise ShapeError("priorities", rule, list(given.shape), remedy)
        with np.errstate(over="ignore"):
            check_priorities(given.astype(np.float32))
    _check_has_columns(columns, target, wanted)
    names = target.schema.names
    ids = list[int]()
    items = list[int]()
    first = 0  # of the trajectories of a table, among those of all tables
    for rows in columns.tables:
        table = rows.table
        own = rows.copied
        own = own[wanted[trajectories.item[first + own]]]
        items.extend(trajectories.item[first + own].tolist())
        first += len(rows.rows)
        for record in rows.trajectories.resolutions[own].tolist():
            slot = record[Resolution.SLOT]  # the rollout batch keeps its rows
            stored = table.rows(slot)
            trajectory = values(table, stored, item_values(table, stored, table.lock))
            absent = ~int(table.views["retention"][slot, SlotRetention.PRESENT])
            late = table.schema.late_bits
            ids.append(add({one: trajectory[one] for one in names if not late([one]) & absent}))
    return ids, None if given is None else given[items]


def _items_to_copy(columns: RolloutColumns, target: Table, chosen: object) -> np.ndarray:
    """Return the mask of the items to copy to a table: those chosen, or all of other tables.

    Returns:
        [num_items], bool.
    Raises:
        ShapeError, DataError: The mask does not fit, or chooses an item of the table itself.
    """
    trajectories = columns.trajectories
    is_target = np.array([rows.table is target for rows in columns.tables])
    of_target = np.zeros(trajectories.num_items, bool)
    of_target[trajectories.item[is_target[trajectories.source]]] = True
    if chosen is None:
        return ~of_target
    wanted = arguments.array("chosen", chosen)
    if wanted.dtype != bool or wanted.shape != of_target.shape:
        rule = f"must have shape [{trajectories.num_items}], one bool for each item"
        remedy = "give one bool for each item of the rollout batch"
        raise ShapeError("chosen", rule, f"{wanted.dtype} {list(wanted.shape)}", remedy)
    if (wanted & of_target).any():
        rule = f"must be items of other tables than {target.spec.name}"
        at = int(np.nonzero(wanted & of_target)[0][0])
        raise DataError("chosen", rule, at, "it is stored there")
    return wanted


def _check_has_columns(columns: RolloutColumns, target: Table, wanted: np.ndarray) -> None:
    """Raise unless the tables of wanted items have the columns of a table, filled.

    Args:
        wanted: As `_items_to_copy` returns it. [num_items], bool.
    """
    names = target.schema.names
    trajectories = columns.trajectories
    for number, rows in enumerate(columns.tables):
        if rows.table is target:
            continue
        unknown = [name for name in names if name not in rows.table.schema]
        if unknown and not wanted[trajectories.item[trajectories.source == number]].any():
            continue
        if unknown:
            rule = f"must be a column of table {rows.table.spec.name}, whose items are copied"
            at = f"gear.tables.{target.spec.name}.schema.columns.{unknown[0]}"
            remedy = "add the column to that table, or leave it out of this one"
            raise ConfigError(at, rule, remedy=remedy)
        for column in rows.table.schema.late_columns:
            if column.name in names and not target.schema[column.name].late:
                rows.check_filled(column.name)
