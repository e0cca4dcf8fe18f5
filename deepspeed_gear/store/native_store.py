"""Set-up of the native store of a table: eviction code, rate limiter, streams, addresses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from deepspeed_gear.schema import DTYPES
from deepspeed_gear.store.memory_layout import HOLDER_OFFSET, MUTEX_OFFSET, Layout
from deepspeed_gear.store.native_rows import ROWS_CODES, address, form_of
from deepspeed_gear.store.prompt_spec import PromptPart
from deepspeed_gear.store.records import EvictionCode, RateUnitCode
from deepspeed_gear.store.shared_memory import SharedMemory
from deepspeed_gear.store.table_spec import RETURN_TO_GO, TableSpec

_TRAIN_POSITION = "stream/train/position"
_LAST_DRAWN = "/last_drawn"
_POLICIES = {
    "none": EvictionCode.NONE,
    "fifo": EvictionCode.OLDEST,
    "lifo": EvictionCode.NEWEST,
    "uniform": EvictionCode.UNIFORM,
    "lowest_priority": EvictionCode.LOWEST_PRIORITY,
    "keep_best": EvictionCode.LOWEST_VALUE,
}
_RATE_UNITS = {
    "trajectory": RateUnitCode.TRAJECTORY,
    "step": RateUnitCode.STEP,
    "group": RateUnitCode.GROUP,
}


def native_store(
    native: ModuleType,
    spec: TableSpec,
    memory: SharedMemory,
    views: Mapping[str, np.ndarray],
    columns: Mapping[str, np.ndarray],
    arrays: Sequence[np.ndarray],
) -> Any:
    """Return the native `Store` of a table with a capacity: the gate for the process's writers.

    Args:
        native: The native module.
        spec: The table's specification, with its retention.
        memory: The store's memory, mapped for as long as the native store is used.
        views: The regions of the memory, those of the batch streams too.
        columns: The stored columns by name. [rows or slots, *shape].
        arrays: As `row_arrays`.
    """
    shard = spec.own_shard
    base = address(np.frombuffer(memory.buffer, np.uint8, 1))
    regions = ("control", "links", "log", "retention", "slots", "peers")
    words = {name: address(views[name]) for name in regions}
    for name in ("groups", "group_counts", "shared_prompts"):
        words[name] = _address(views.get(name))
    group = spec.group
    # Of a group without members all trajectories are admitted: those after `size` come too late.
    is_limited = group is not None and group.member is not None
    words |= {
        "mutex": base + MUTEX_OFFSET,
        "holder": base + HOLDER_OFFSET,
        "num_slots": spec.num_slots,
        "num_rows": spec.capacity_rows,
        "spare_rows": spec.spare_rows,
        "log_size": len(views["log"]),
        "id_index": shard.index,
        "id_count": shard.count,
        "peer": memory.peer,
        "most_trajectories": spec.retention.max_trajectories,
        "most_steps": spec.retention.max_steps,
        "position": _address(views.get(_TRAIN_POSITION)),
        "least_free_rows": spec.least_free_rows,
        "frees_in_parts": spec.prompts is not None and spec.prompts.is_kept,
        "group_column": 0 if group is None else spec.schema.names.index(group.column),
        "most_of_group": group.max_trajectories if group is not None and is_limited else 0,
    }
    store = native.Store(words=words)
    store.set_columns(
        [(address(columns[c.name]), ROWS_CODES[c.rows], form_of(native, c)) for c in spec.schema]
    )
    store.set_row_arrays([(address(array), array.strides[0]) for array in arrays])
    ends = [spec.schema.role(role) for role in ("terminated", "truncated")]
    store.set_ends(*(0 if column is None else address(columns[column.name]) for column in ends))
    if spec.normalized:
        _set_moments(store, spec, views)
    _set_eviction(store, spec)
    rate = spec.retention.rate_limiter
    if rate is not None:
        unit = _RATE_UNITS[rate.unit]
        store.set_rate(unit, rate.min_size, rate.samples_per_insert, rate.most)
    for name in views:
        if name.endswith(_LAST_DRAWN):
            store.add_stream(_stream_words(views, name.removesuffix(_LAST_DRAWN)))
    return store


def row_arrays(
    spec: TableSpec,
    layout: Layout,
    views: Mapping[str, np.ndarray],
    columns: Mapping[str, np.ndarray],
) -> list[np.ndarray]:
    """Return all that is stored by row, and moves with its trajectory: [rows, ...] each.

    They are the columns of steps, and the streams' priorities and draw counts of steps.
    """
    arrays = [columns[column.name] for column in spec.schema if column.rows != "1"]
    if spec.return_to_go and spec.schema.role("reward") is not None:
        arrays.append(columns[RETURN_TO_GO])
    meaning = layout.meaning
    for name, view in views.items():
        stream, _, part = name.rpartition("/")
        if part == "row_slots":
            arrays += [view, views[f"{stream}/priorities"]]
        elif part == "draws" and meaning[stream.removeprefix("stream/")].get("unit") == "step":
            arrays.append(view)
    return arrays


def trajectory_reader(
    native: ModuleType, spec: TableSpec, store: Any, most_steps: int | None
) -> Any:
    """Return the native `TrajectoryReader` of a table, which holds the address of its `store`.

    Args:
        native: The native module.
        spec: The table's specification.
        store: The native `Store` of the table.
        most_steps: Steps of the longest trajectory; None: no limit.
    """
    schema = spec.schema
    names = schema.names
    ends = {column.name for column in schema.end_columns}
    mask = schema.role("loss_mask")
    return native.TrajectoryReader(
        store=store.address,
        columns=[
            (
                column.name,
                schema.late_bits([column.name]),
                column.name in ends,
                PromptPart.STORED if spec.prompts is None else spec.prompts.part(column),
            )
            for column in schema
        ],
        most=most_steps or 0,
        group=-1 if spec.group is None else names.index(spec.group.column),
        mask=-1 if mask is None else names.index(mask.name),
        shares_prompts=spec.shares_prompts and mask is not None,
    )


def _address(region: np.ndarray | None) -> int:
    """Return where a region begins; 0: there is none, or it is empty."""
    return 0 if region is None or not region.size else address(region)


def _set_moments(store: Any, spec: TableSpec, views: Mapping[str, np.ndarray]) -> None:
    counted = []
    first = 0
    for column in spec.normalized_columns:
        index = spec.schema.names.index(column.name)
        counted.append((index, list(DTYPES).index(column.dtype), column.num_elements, first))
        first += column.num_elements
    store.set_moments(address(views["moments_head"]), address(views["moments"]), first, counted)


def _set_eviction(store: Any, spec: TableSpec) -> None:
    """Set the eviction policy: a class of the user's, and groups, are evicted by the caller."""
    retention = spec.retention
    code = _POLICIES.get(retention.eviction, EvictionCode.BY_CALLER)
    if spec.group is not None and code != EvictionCode.NONE:
        code = EvictionCode.BY_CALLER
    column = 0
    dtype = 0
    if retention.column is not None:
        column = spec.schema.names.index(retention.column)
        dtype = list(DTYPES).index(spec.schema[retention.column].dtype)
    store.set_eviction(code, column, dtype)


def _stream_words(views: Mapping[str, np.ndarray], stream: str) -> dict[str, int]:
    """Return the words of a batch stream, the prefix of its regions: what writers read of it."""
    priorities = views.get(f"{stream}/priorities")
    has_rows = f"{stream}/row_slots" in views  # its steps have the priorities
    # Items of an epoch stay until its end, unless it skips those that were evicted.
    holds = not has_rows and f"{stream}/walked" not in views
    return {
        "position": address(views[f"{stream}/position"]),
        "last_drawn": address(views[f"{stream}/last_drawn"]),
        "consumed": address(views[f"{stream}/consumed"]),
        "num_peers": len(views[f"{stream}/consumed"]),
        "held": address(views[f"{stream}/sums"]) if holds else 0,
        "priorities": _address(priorities),
        "generations": _address(views.get(f"{stream}/generations")),
        "sums": address(views[f"{stream}/sums"]) if has_rows else 0,
        "minima": _address(views.get(f"{stream}/minima")) if has_rows else 0,
        "counts": _address(views.get(f"{stream}/counts")),
        "num_items": 0 if priorities is None else len(priorities),
    }
