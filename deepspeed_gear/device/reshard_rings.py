"""Deals the saved tables of the replicas of one run to the replicas of another number of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from deepspeed_gear.device.ring_table import RingTable
from deepspeed_gear.errors import CheckpointError
from deepspeed_gear.ops.records import OpenTrajectory, RingState, Slot, SlotState, UpdateCount
from deepspeed_gear.store.table_spec import RETURN_TO_GO

Content = Mapping[str, Tensor]
_DRAWABLE, _HIGHEST = (
    RingState.COUNTS + word for word in (UpdateCount.DRAWABLE, UpdateCount.HIGHEST_PRIORITY)
)
_COUNTED = (
    RingState.REFUSED,
    RingState.EMPTY,
    RingState.DROPPED,
    *(RingState.COUNTS + word for word in (UpdateCount.APPLIED, UpdateCount.STALE, UpdateCount.CLAMPED)),
)


def deal(
    table: RingTable, saved: Sequence[Content], replica: int, replicas: int
) -> tuple[dict[str, Tensor], int]:
    """Return one replica's content from saved tables of all, by name, in host memory, and how many are left
    out.

    Trajectories are dealt in turn, in the order of the global batch at which they were added, then of their
    ids, then of the saved replicas; those with environments to the environments. They get other ids, above
    all earlier ones. Open trajectories end. Where a table is too small, its oldest ones are left out, as if
    all had been added again. CheckpointError if a saved table has other columns or item states.
    """
    for number, content in enumerate(saved):
        _check(table, content, f"shard-{number}")
    every = [content["slots"].numpy() for content in saved]
    stored = [np.flatnonzero(records[:, Slot.STATE] == SlotState.COMMITTED) for records in every]
    slots = np.concatenate([records[which] for records, which in zip(every, stored, strict=True)])
    shard, places = np.repeat(np.arange(len(saved)), [len(which) for which in stored]), np.concatenate(stored)
    order = np.lexsort((shard, slots[:, Slot.ID], slots[:, Slot.BORN]))
    # Of 2 replicas with 3 environments, replica 0 gets the trajectories 0, 1, 2, 6, 7, 8, 12, ... by age.
    envs = max(table.num_envs, 1)
    dealt = np.arange(len(order)) % (replicas * envs)
    own = dealt // envs == replica
    kept, first_rows = _placed(table, slots[order[own], Slot.NUM_ROWS], dealt[own] % envs)
    num_left_out, order = int((~kept).sum()), order[own][kept]
    shard, places, slots = shard[order], places[order], slots[order]

    new = {name: torch.zeros_like(tensor, device="cpu") for name, tensor in table.content.items()}
    # Ids go on at a multiple of the slots, so that id modulo slots is the number of the slot.
    count, following = len(slots), max(int(content["state"][RingState.NEXT]) for content in saved)
    base = -(-following // table.num_slots) * table.num_slots
    records, ids = slots.copy(), base + np.arange(count)
    records[:, Slot.GENERATION], records[:, Slot.ID] = ids // table.num_slots, ids
    records[:, Slot.FIRST_ROW] = first_rows
    new["slots"][:count], new["begins"][:count] = torch.from_numpy(records), torch.from_numpy(first_rows)
    if table.num_envs:
        part, ends = table.num_rows // envs, np.zeros(envs, np.int64)
        np.maximum.at(ends, first_rows // part, first_rows % part + records[:, Slot.NUM_ROWS])
        new["opened"][:, OpenTrajectory.NEXT_ROW] = torch.from_numpy(ends)

    # Of what is copied: whether it has an entry of each row, not of each slot.
    copied = {"sums": table.items.by_row, "priorities": table.items.by_row, f"column/{RETURN_TO_GO}": True}
    copied |= {f"column/{column.name}": column.rows != "1" for column in table.schema}
    for number, source in enumerate(saved):
        to = np.flatnonzero(shard == number)
        rows = slots[to, Slot.NUM_ROWS]
        within = np.arange(rows.sum()) - np.repeat(np.cumsum(rows) - rows, rows)  # of 2 and 3: 0, 1, 0, 1, 2
        of_slots = torch.from_numpy(to), torch.from_numpy(places[to])
        of_rows = [
            torch.from_numpy(np.repeat(first, rows) + within)
            for first in (first_rows[to], slots[to, Slot.FIRST_ROW])
        ]
        for name, by_row in copied.items():
            if len(new[name]):
                there, here = of_rows if by_row else of_slots
                new[name][there] = source[name][here]
        for name in ("owners", "row_slots"):
            if len(new.get(name, ())):
                new[name][of_rows[0]] = torch.from_numpy(np.repeat(to, rows)).to(torch.int32)

    table.ops.tree_build_(new["sums"], table.num_items)
    if len(new["minima"]):
        table.ops.minima_build_(new["minima"], new["sums"], table.num_items)
    state, states = new["state"], torch.stack([content["state"] for content in saved])
    for word in _COUNTED if replica == 0 else ():  # those of the whole run are the first replica's
        state[word] = states[:, word].sum()
    for word in (RingState.BATCH, RingState.TOTAL, RingState.INITIAL, _HIGHEST):
        state[word] = states[:, word].max()
    # Sample i of a replica has number i * replicas + replica.
    state[RingState.SAMPLES] = -(-states[:, RingState.SAMPLES].sum() // replicas)
    state[_DRAWABLE] = torch.count_nonzero(new["sums"][: table.num_items])
    state[RingState.TAIL], state[RingState.NEXT] = base, base + count
    state[RingState.HEAD] = int(records[:, Slot.NUM_ROWS].sum())
    state[RingState.STEPS] = int(records[:, Slot.NUM_STEPS].sum())
    return new, num_left_out


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
            rule = "must be kept, or not, as in this config"
            raise CheckpointError(f"{name} of {where}", rule, len(values))


def _placed(table: RingTable, rows: np.ndarray, env: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return which trajectories fit, the newest ones of each part of the rows, and their first rows."""
    part = table.num_rows // max(table.num_envs, 1)
    kept = np.zeros(len(rows), bool)
    kept[max(0, len(rows) - (table.num_slots - table.num_envs)) :] = True
    first = np.zeros(len(rows), np.int64)
    for number in range(max(table.num_envs, 1)):
        which = np.flatnonzero(kept & (env == number))
        newer = np.cumsum(rows[which][::-1])[::-1]  # from each one to the newest: of 2, 1, 3 it is 6, 4, 3
        kept[which[newer > part]] = False
        which = which[newer <= part]
        first[which] = number * part + np.cumsum(rows[which]) - rows[which]
    return kept, first[kept]
