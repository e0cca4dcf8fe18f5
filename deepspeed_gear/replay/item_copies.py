"""Copies of a rollout batch's items in another table, of which a mixture draws them again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import deepspeed_gear.arguments as arguments
from deepspeed_gear.errors import ConfigError, DataError, ShapeError
from deepspeed_gear.ops.records import Resolution
from deepspeed_gear.replay import table_access
from deepspeed_gear.replay.rollout_data import RolloutData
from deepspeed_gear.sampling.priority_log import check_priorities
from deepspeed_gear.store.records import SlotRetention
from deepspeed_gear.store.table import Table


def copy_items(
    data: RolloutData,
    target: Table,
    add: Callable[[dict[str, Any]], int],
    report: Callable[[list[int], np.ndarray], int] | None,
    chosen: object = None,
    priorities: object = None,
) -> int:
    """Add items to a table; see `Replay.copy_items`. `report` takes priorities by id. Collective over nodes.

    Nothing is added unless every item fits. Cost: of an addition for each.
    """
    of_target = np.zeros(data.num_items, bool)
    of_target[data.item[np.array([part.table is target for part in data.parts])[data.source]]] = True
    wanted = ~of_target if chosen is None else arguments.array("chosen", chosen)
    if wanted.dtype != bool or wanted.shape != of_target.shape:
        rule = f"must have shape [{data.num_items}], one bool for each item"
        raise ShapeError("chosen", rule, f"{wanted.dtype} {list(wanted.shape)}")
    name = target.spec.name
    if (wanted & of_target).any():
        at = int(np.nonzero(wanted & of_target)[0][0])
        raise DataError("chosen", f"must be items of other tables than {name}", at, "it is stored there")
    values = None if priorities is None else arguments.array("priorities", priorities)
    if values is not None and values.shape != of_target.shape:
        raise ShapeError("priorities", f"must have shape [{data.num_items}]", list(values.shape))
    if values is not None:
        with np.errstate(over="ignore"):
            check_priorities(values.astype(np.float32))
    names = [column.name for column in target.schema]
    for part in data.parts:
        if part.table is target:
            continue
        if unknown := [one for one in names if one not in part.table.schema]:
            rule = f"must be a column of table {part.table.spec.name}, whose items are copied"
            raise ConfigError(f"gear.tables.{name}.schema.columns.{unknown[0]}", rule)
        for column in part.table.schema.late_columns:
            if column.name in names and not target.schema[column.name].late:
                part.check_filled(column.name)
    ids, items, first = list[int](), list[int](), 0
    for part in data.parts:
        own, table, late = part.copied, part.table, part.table.schema.late_bits
        own = own[wanted[data.item[first + own]]]
        items.extend(data.item[first + own].tolist())
        first += len(part.rows)
        for record in part.records.resolutions[own].tolist():
            slot = record[Resolution.SLOT]  # the rollout batch keeps its rows
            trajectory = table_access.values(table, table.rows(slot))
            absent = ~int(table.views["retention"][slot, SlotRetention.PRESENT])
            ids.append(add({one: trajectory[one] for one in names if not late([one]) & absent}))
    if report is not None and values is not None and ids:
        report(ids, values[items])
    return len(ids)
