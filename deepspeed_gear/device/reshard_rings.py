"""Deals the saved tables of the replicas of one run to the replicas of another number of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from deepspeed_gear.device.ring_table import RingTable
from deepspeed_gear.errors import CheckpointError
from deepspeed_gear.ops.records import OpenTrajectory, RingState, Slot, SlotState, UpdateCount

Content = Mapping[str, Tensor]
_COUNTED = (
    RingState.REFUSED,
    RingState.EMPTY,
    RingState.DROPPED,
    *(RingState.COUNTS + word for word in (UpdateCount.APPLIED, UpdateCount.STALE, UpdateCount.CLAMPED)),
)


@dataclass(frozen=True)
class Dealt:
    """What a replica gets of the saved tables.

    Args:
        content: Of its table, by name, in host memory.
        num_left_out: Oldest trajectories that do not fit into its table.
    """

    content: dict[str, Tensor]
    num_left_out: int


def deal(table: RingTable, saved: Sequence[Content], replica: int, replicas: int) -> Dealt:
    """Return the trajectories of saved tables that one replica holds from then on.

    Trajectories are dealt in turn, in the order of the global batch at which they were added, then of their
    ids, then of the saved replicas; those with environments to the environments. They get other ids, above
    all earlier ones. Open trajectories end. Where a table is too small, its oldest ones are left out, as if
    all had been added again.

    Args:
        table: Of this replica; it does not change.
        saved: Of each replica of the save.
        replica: Number of this one.
    Raises:
        CheckpointError: A saved table has other columns, or other state of its items.
    """
    for number, content in enumerate(saved):
        _check(table, content, f"shard-{number}")
    shard, places, slots = _in_order_of_age(saved)
    envs = table.num_envs
    bins = replicas * max(envs, 1)
    dealt = np.arange(len(slots)) % bins
    own = np.flatnonzero(dealt // max(envs, 1) == replica)
    kept, first_rows = _placed(table, slots[own, Slot.NUM_ROWS], dealt[own] % max(envs, 1))
    own = own[kept]
    following = max(int(content["state"][RingState.NEXT]) for content in saved)
    base = -(-following // table.num_slots) * table.num_slots
    content = {name: torch.zeros_like(tensor, device="cpu") for name, tensor in table.content.items()}
    _write_slots(table, content, slots[own], first_rows, base)
    _copy_rows(table, content, saved, shard[own], places[own], slots[own])
    _finish(table, content, saved, base, replicas)
    if replica:
        for word in _COUNTED:  # those of the whole run are the first replica's
            content["state"][word] = 0
    return Dealt(content, len(dealt[dealt // max(envs, 1) == replica]) - len(own))


def _check(table: RingTable, content: Content, where: str) -> None:
    """Raise unless a saved table has the columns and the item state of this one."""
    wanted = set(table.content)
    if set(content) != wanted:
        differ = sorted(wanted ^ set(content))
        raise CheckpointError(f"the content of {where}", "must be that of a table of this config", differ[0])
    for name, values in content.items():
        held = table.content[name]
        if values.dtype != held.dtype or values.shape[1:] != held.shape[1:]:
            rule = f"must be {held.dtype} of rows {list(held.shape[1:])}, as in this config"
            shown = f"{values.dtype} of rows {list(values.shape[1:])}"
            raise CheckpointError(f"{name} of {where}", rule, shown)
        if name == "slots":
            stored = values[values[:, Slot.STATE] == SlotState.COMMITTED]
            longest = int(stored[:, Slot.NUM_STEPS].max()) if len(stored) else 0
            if longest > table.most_steps:
                rule = f"must hold trajectories of at most max_length ({table.most_steps}) steps"
                raise CheckpointError(f"slots of {where}", rule, longest, "raise max_length of the table")
        if name not in ("opened", "minima") and (len(values) == 0) != (len(held) == 0):
            raise CheckpointError(
                f"{name} of {where}", "must be kept, or not, as in this config", len(values)
            )


def _in_order_of_age(saved: Sequence[Content]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return saved replica, number of the slot there and slot of each stored trajectory. [n], [n], [n, 8]."""
    shards, places, slots = [], [], []
    for number, content in enumerate(saved):
        every = content["slots"].numpy()
        stored = np.flatnonzero(every[:, Slot.STATE] == SlotState.COMMITTED)
        shards.append(np.full(len(stored), number))
        places.append(stored)
        slots.append(every[stored])
    shard, place, slot = np.concatenate(shards), np.concatenate(places), np.concatenate(slots)
    order = np.lexsort((shard, slot[:, Slot.ID], slot[:, Slot.BORN]))
    return shard[order], place[order], slot[order]


def _placed(table: RingTable, rows: np.ndarray, env: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return which trajectories fit, the newest ones of each part of the rows, and their first rows."""
    part = table.num_rows // max(table.num_envs, 1)
    kept = np.zeros(len(rows), bool)
    kept[max(0, len(rows) - (table.num_slots - table.num_envs)) :] = True
    first = np.zeros(len(rows), np.int64)
    for number in range(max(table.num_envs, 1)):
        which = np.flatnonzero(kept & (env == number))
        newer = np.cumsum(rows[which][::-1])[::-1]  # rows from each one to the newest
        kept[which[newer > part]] = False
        which = which[newer <= part]
        first[which] = number * part + np.cumsum(rows[which]) - rows[which]
    return kept, first[kept]


def _write_slots(
    table: RingTable, content: dict[str, Tensor], slots: np.ndarray, first_rows: np.ndarray, base: int
) -> None:
    count = len(slots)
    ids = base + np.arange(count)
    records = slots.copy()
    records[:, Slot.GENERATION], records[:, Slot.ID] = ids // table.num_slots, ids
    records[:, Slot.FIRST_ROW] = first_rows
    content["slots"][:count] = torch.from_numpy(records)
    content["begins"][:count] = torch.from_numpy(first_rows)
    if table.num_envs:
        part = table.num_rows // table.num_envs
        ends = np.zeros(table.num_envs, np.int64)
        np.maximum.at(ends, first_rows // part, first_rows % part + records[:, Slot.NUM_ROWS])
        content["opened"][:, OpenTrajectory.NEXT_ROW] = torch.from_numpy(ends)


def _copy_rows(
    table: RingTable,
    content: dict[str, Tensor],
    saved: Sequence[Content],
    shard: np.ndarray,
    places: np.ndarray,
    slots: np.ndarray,
) -> None:
    """Copy the rows, the masses and the priorities of the trajectories in the first slots."""
    by_slot = {f"column/{column.name}" for column in table.schema if column.rows == "1"}
    owners = [name for name in ("owners", "row_slots") if len(content.get(name, ()))]
    copied = [f"column/{name}" for name in table.columns] + ["returns_to_go", "priorities"]
    first_rows = content["slots"][:, Slot.FIRST_ROW].numpy()
    for number, source in enumerate(saved):
        to = np.flatnonzero(shard == number)
        rows = slots[to, Slot.NUM_ROWS]
        within = np.arange(rows.sum()) - np.repeat(np.cumsum(rows) - rows, rows)
        row_to = torch.from_numpy(np.repeat(first_rows[to], rows) + within)
        row_from = torch.from_numpy(np.repeat(slots[to, Slot.FIRST_ROW], rows) + within)
        slot_to, slot_from = torch.from_numpy(to), torch.from_numpy(places[to])
        items = (row_to, row_from) if table.items_are_rows else (slot_to, slot_from)
        for name in copied:
            if len(content[name]) == 0:
                continue
            per_item = items if name == "priorities" else (row_to, row_from)
            there, here = (slot_to, slot_from) if name in by_slot else per_item
            content[name][there] = source[name][here]
        content["sums"][items[0]] = source["sums"][items[1]]
        for name in owners:
            content[name][row_to] = torch.from_numpy(np.repeat(to, rows)).to(torch.int32)


def _finish(
    table: RingTable,
    content: dict[str, Tensor],
    saved: Sequence[Content],
    base: int,
    replicas: int,
) -> None:
    """Set the nodes above the masses, and the state."""
    ops, state, slots = table.ops, content["state"], content["slots"]
    stored = slots[slots[:, Slot.STATE] == SlotState.COMMITTED]
    ops.tree_build_(content["sums"], table.num_items)
    if len(content["minima"]):
        ops.minima_build_(content["minima"], content["sums"], table.num_items)
    states = torch.stack([each["state"] for each in saved])
    for word in _COUNTED:
        state[word] = states[:, word].sum()
    for word in (RingState.BATCH, RingState.TOTAL):
        state[word] = states[:, word].max()
    # Sample i of a replica has number i * replicas + replica.
    state[RingState.SAMPLES] = -(-states[:, RingState.SAMPLES].sum() // replicas)
    for word in (RingState.INITIAL, RingState.COUNTS + UpdateCount.HIGHEST_PRIORITY):
        state[word] = states[:, word].max()
    state[RingState.COUNTS + UpdateCount.DRAWABLE] = torch.count_nonzero(content["sums"][: table.num_items])
    state[RingState.TAIL], state[RingState.NEXT] = base, base + len(stored)
    state[RingState.HEAD] = stored[:, Slot.NUM_ROWS].sum()
    state[RingState.STEPS] = stored[:, Slot.NUM_STEPS].sum()
