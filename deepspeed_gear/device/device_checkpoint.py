"""Checkpoints of a DeviceReplay: position, contents, and dealing to another number of replicas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deepspeed_gear.checkpoint import checked_files, position, save_folders
from deepspeed_gear.device.ring_table import RingTable
from deepspeed_gear.errors import CheckpointError
from deepspeed_gear.log import LOG
from deepspeed_gear.ops import kernel_faults
from deepspeed_gear.ops.records import OpenTrajectory, RingState, Slot, SlotState, UpdateCount
from deepspeed_gear.plan.resolved_plan import Resolved
from deepspeed_gear.store.row_allocator import rows_of
from deepspeed_gear.store.table_spec import RETURN_TO_GO

FORMAT = 3
CONTENT = "content.pt"
Tables = Mapping[str, RingTable]
Content = Mapping[str, Tensor]
_DRAWABLE = RingState.COUNTS + UpdateCount.DRAWABLE
_HIGHEST = RingState.COUNTS + UpdateCount.HIGHEST_PRIORITY
#: Words of the state of epochs, and their names in a position.
_EPOCH_WORDS = (RingState.EPOCH, RingState.EPOCH_FIRST, RingState.EPOCH_SIZE)
_EPOCH_NAMES = ("epoch", "epoch_first", "epoch_size")
_COUNTED = [
    RingState.REFUSED,
    RingState.EMPTY,
    RingState.DROPPED,
    RingState.EPOCHS_CUT,
    RingState.COUNTS + UpdateCount.APPLIED,
    RingState.COUNTS + UpdateCount.STALE,
    RingState.COUNTS + UpdateCount.CLAMPED,
]


def position_of(
    plan: Resolved, tables: Tables, save: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the position, with `batches` and `samples` of each table. Waits for the device."""
    train = position.start(list(tables))
    for name, table in tables.items():
        with kernel_faults.named():
            state = table.state.tolist()
        train[name] |= {"batches": state[RingState.BATCH], "samples": state[RingState.SAMPLES]}
        if not table.items.by_epoch:
            continue
        if name in plan.datasets or plan.info.data_world == 1:
            train[name] |= zip(_EPOCH_NAMES, (state[word] for word in _EPOCH_WORDS), strict=True)
        else:
            # Replicas may be in different epochs. Each epoch has a sample at least, so that no
            # replica has used this number yet.
            train[name]["epoch"] = state[RingState.SAMPLES]
    return position.state_of(plan, {}, train, save)


def seek(plan: Resolved, tables: Tables, state: Mapping[str, Any]) -> None:
    """Continue at a position. One with another format, config or data set changes nothing."""
    position.check(state, plan)
    for name, words in position.of(state, tables).items():
        of = tables[name].state
        of[RingState.BATCH] = words["batches"]
        of[RingState.SAMPLES] = words["samples"]
        if tables[name].items.by_epoch:
            # The epoch goes on if the table has as many items as it had (`ring_epoch_`).
            for word, saved in zip(_EPOCH_WORDS, _EPOCH_NAMES, strict=True):
                of[word] = words[saved]
            of[RingState.EPOCH_NEXT] = of[RingState.NEXT]
            of[RingState.EPOCH_TAIL] = of[RingState.TAIL]
            of[RingState.EPOCH_STEPS] = of[RingState.STEPS]


def saved_names(plan: Resolved, name: str, table: RingTable) -> list[str]:
    """Return the names of the tensors to save: all except the columns of a data set."""
    return [
        key for key in table.content if not (name in plan.datasets and key.startswith("column/"))
    ]


def restore(plan: Resolved, tables: Tables, content: Any) -> None:
    """Copy saved tensors (`saved_names`) into the tables; if one does not fit, copy none."""
    for name, table in tables.items():
        saved = checked_files.entry(content, name, dict, "the saved content")
        _check_content(table, saved, f"table {name}", saved_names(plan, name, table))
        for key, values in saved.items():
            if table.content[key].shape != values.shape:
                rule = "must have the size of this config's table"
                raise CheckpointError(
                    f"{key} of the saved table {name}",
                    rule,
                    list(values.shape),
                    "load it with the capacity and num_envs that it was saved with",
                )
    for name, table in tables.items():
        for key, values in content[name].items():
            table.overwrite(key, values)
        for word in (OpenTrajectory.NUM_STEPS, OpenTrajectory.ENDED):
            table.opened[:, word] = 0  # the environments are at other steps


def save(
    plan: Resolved, tables: Tables, folder: Path, kept: save_folders.State | None
) -> dict[str, Any]:
    """Write each replica's tables into a folder. Collective.

    Args:
        kept: State of the save that this replay has loaded or made last in the folder; None: none.
    Returns:
        The position, which names the save.
    """

    def write(save_id: str) -> dict[str, dict[str, str]]:
        written = {}
        for name, table in tables.items() if _leads(plan) else ():
            save_folders.check_shared(folder, save_id)
            part = save_folders.partial_of(folder, name) / f"shard-{plan.topology.place.data_rank}"
            part.mkdir()
            torch.save(table.copied(saved_names(plan, name, table)), part / CONTENT)
            manifest = {"format": FORMAT, "save": save_id, "replicas": plan.info.data_world}
            digest = save_folders.complete(part, manifest, {})
            written[name] = {f"{part.name}/{save_folders.MANIFEST}": digest}
        return written

    state = partial(position_of, plan, tables)
    is_first = plan.topology.rank == 0
    return save_folders.write_save(
        plan.control_plane, folder, list(tables), kept, is_first, write, state
    )


def load(plan: Resolved, tables: Tables, folder: Path, state: save_folders.State) -> dict[str, Any]:
    """Continue where `save` was called, on any number of replicas. Collective.

    On another number of replicas the trajectories are dealt anew (`deal`); rank 0 logs how many do
    not fit. Of a data set's priorities, replica r gets those of saved replica r modulo their
    number.

    Returns:
        The state of that save.
    """
    control_plane = plan.control_plane
    what = "loading the table on the device"
    replica = plan.topology.place.data_rank
    replicas = plan.info.data_world

    def read() -> tuple[dict[str, dict[str, Tensor]], dict[str, int]]:
        save = save_folders.save_of(state)
        content = {}
        left_out = {}
        for name, table in tables.items():
            of_save = save_folders.find(folder, name, save)
            count = len(save["tables"][name])
            left_out[name] = 0
            if count == replicas or name in plan.datasets:
                content[name] = _read(of_save / f"shard-{replica % count}")
                of = content[name]["state"]
                if not table.items.by_epoch or name not in plan.datasets:
                    of[RingState.SAMPLES] = -(-of[RingState.SAMPLES] * count // replicas)
            else:
                saved = [_read(of_save / f"shard-{number}") for number in range(count)]
                content[name], left_out[name] = deal(table, saved, replica, replicas)
        return content, left_out

    control_plane.attempt(what, lambda: position.check(state, plan))
    save_folders.compare(control_plane.all_gather(state))
    content, left_out = control_plane.attempt(
        what, lambda: save_folders.while_renamed(folder, read)
    )
    every = control_plane.all_gather(left_out if _leads(plan) else {})
    for name in tables if plan.topology.rank == 0 else ():
        if count := sum(of_rank.get(name, 0) for of_rank in every):
            LOG.warning(
                f"gear.tables.{name}: {count} of the oldest trajectories of {folder} do not fit "
                f"into {replicas} replicas and were left out; raise capacity_steps to keep them"
            )
    control_plane.attempt(what, lambda: restore(plan, tables, content))
    return dict(state)


def _read(part: Path) -> dict[str, Tensor]:
    path = part / save_folders.MANIFEST
    files = checked_files.entry(
        checked_files.read_versioned(path, FORMAT), "files", dict, str(path)
    )
    with checked_files.open_checked(part / CONTENT, files.get(CONTENT)) as file:
        content: dict[str, Tensor] = torch.load(
            checked_files.link_of(file), weights_only=True, mmap=True
        )
    return content


def _leads(plan: Resolved) -> bool:
    place = plan.topology.place
    return place.tensor_rank == place.sequence_rank == place.pipe_rank == 0


def deal(
    table: RingTable, saved: Sequence[Content], replica: int, replicas: int
) -> tuple[dict[str, Tensor], int]:
    """Return one replica's content from the saved tables of all replicas.

    Trajectories are ordered by the global batch at which they were added, then by id, then by saved
    replica, and dealt in turn: to replicas, or with environments to the environments of all
    replicas. They get new ids, above all earlier ones. Open trajectories end. If the table is too
    small, the oldest ones are left out, as if all had been added again.

    Returns:
        Tensors by name, in host memory, and the number of trajectories that are left out.
    Raises:
        CheckpointError: A saved table has other columns or item states.
    """
    for number, content in enumerate(saved):
        _check_content(table, content, f"shard-{number}", list(table.content))
    every = [content["slots"].numpy() for content in saved]
    stored = [np.flatnonzero(records[:, Slot.STATE] == SlotState.COMMITTED) for records in every]
    slots = np.concatenate([records[which] for records, which in zip(every, stored, strict=True)])
    shard = np.repeat(np.arange(len(saved)), [len(which) for which in stored])
    places = np.concatenate(stored)
    order = np.lexsort((shard, slots[:, Slot.ID], slots[:, Slot.BORN]))
    # With 2 replicas of 3 environments, replica 0 gets the trajectories 0, 1, 2, 6, 7, 8, 12, ...,
    # the oldest first.
    envs = max(table.num_envs, 1)
    dealt = np.arange(len(order)) % (replicas * envs)
    own = dealt // envs == replica
    kept, first_rows = _placed(table, slots[order[own], Slot.NUM_ROWS], dealt[own] % envs)
    num_left_out = int((~kept).sum())
    order = order[own][kept]
    shard = shard[order]
    places = places[order]
    slots = slots[order]
    new = {name: torch.zeros_like(tensor, device="cpu") for name, tensor in table.content.items()}
    # Ids go on at a multiple of the slots, so that id modulo slots is the number of the slot.
    count = len(slots)
    following = max(int(content["state"][RingState.NEXT]) for content in saved)
    base = -(-following // table.num_slots) * table.num_slots
    records = slots.copy()
    ids = base + np.arange(count)
    records[:, Slot.GENERATION] = ids // table.num_slots
    records[:, Slot.ID] = ids
    records[:, Slot.FIRST_ROW] = first_rows
    new["slots"][:count] = torch.from_numpy(records)
    new["begins"][:count] = torch.from_numpy(first_rows)
    if table.num_envs:
        part = table.num_rows // envs
        ends = np.zeros(envs, np.int64)
        np.maximum.at(ends, first_rows // part, first_rows % part + records[:, Slot.NUM_ROWS])
        new["opened"][:, OpenTrajectory.NEXT_ROW] = torch.from_numpy(ends)

    # The tensors to copy: True where they have an entry for each row, False for each slot.
    copied = {
        "sums": table.items.by_row,
        "priorities": table.items.by_row,
        f"column/{RETURN_TO_GO}": True,
    }
    copied |= {f"column/{column.name}": column.rows != "1" for column in table.schema}
    for number, source in enumerate(saved):
        to = np.flatnonzero(shard == number)
        (new_rows, _, owner) = rows_of(records[to])
        (old_rows, _, _) = rows_of(slots[to])
        of_slots = (torch.from_numpy(to), torch.from_numpy(places[to]))
        of_rows = (torch.from_numpy(new_rows), torch.from_numpy(old_rows))
        for name, by_row in copied.items():
            if len(new[name]):
                there, here = of_rows if by_row else of_slots
                new[name][there] = source[name][here]
        for name in ("owners", "row_slots"):
            if len(new.get(name, ())):
                new[name][of_rows[0]] = torch.from_numpy(to[owner]).to(torch.int32)

    table.ops.tree_build_(new["sums"], table.num_items)
    if len(new["minima"]):
        table.ops.minima_build_(new["minima"], new["sums"], table.num_items)
    state = new["state"]
    states = torch.stack([content["state"] for content in saved])
    for word in _COUNTED if replica == 0 else ():  # those of the whole run are the first replica's
        state[word] = states[:, word].sum()
    for word in (RingState.BATCH, RingState.TOTAL, RingState.INITIAL, _HIGHEST):
        state[word] = states[:, word].max()
    # Sample i of a replica has number i * replicas + replica.
    state[RingState.SAMPLES] = -(-states[:, RingState.SAMPLES].sum() // replicas)
    # Epoch e of a replica has the key e * replicas + replica.
    begun = states[:, RingState.EPOCH] + (states[:, RingState.EPOCH_SIZE] > 0)
    state[RingState.EPOCH] = -(-begun.max() * len(saved) // replicas)
    state[_DRAWABLE] = torch.count_nonzero(new["sums"][: table.num_items])
    state[RingState.TAIL] = base
    state[RingState.NEXT] = base + count
    state[RingState.HEAD] = int(records[:, Slot.NUM_ROWS].sum())
    state[RingState.STEPS] = int(records[:, Slot.NUM_STEPS].sum())
    return new, num_left_out


def _check_content(table: RingTable, content: Content, where: str, wanted: Sequence[str]) -> None:
    """Raise unless a saved table has the columns and the item state of this one."""
    tensors = {name for name, values in content.items() if isinstance(values, Tensor)}
    if differ := sorted({*wanted, *content} - (tensors & {*wanted})):
        rule = "must have the tensors of this config's table"
        raise CheckpointError(
            f"the content of {where}",
            rule,
            differ[0],
            "load it with the tables and sampler that it was saved with",
        )
    for name, values in content.items():
        held = table.content[name]
        if values.dtype != held.dtype or values.shape[1:] != held.shape[1:]:
            rule = f"must be {held.dtype} of rows {list(held.shape[1:])}, as in this config"
            shown = f"{values.dtype} of rows {list(values.shape[1:])}"
            raise CheckpointError(
                f"{name} of {where}", rule, shown, "load it with the schema that it was saved with"
            )
        if name == "slots":
            stored = values[values[:, Slot.STATE] == SlotState.COMMITTED]
            longest = int(stored[:, Slot.NUM_STEPS].max()) if len(stored) else 0
            if longest > table.most_steps:
                rule = f"must hold trajectories of at most max_length ({table.most_steps}) steps"
                raise CheckpointError(
                    f"slots of {where}", rule, longest, "raise max_length of the table"
                )
        if name not in ("opened", "minima") and (len(values) == 0) != (len(held) == 0):
            rule = "must be kept, or not, as in this config"
            raise CheckpointError(
                f"{name} of {where}",
                rule,
                len(values),
                "load it with the options that it was saved with",
            )


def _placed(table: RingTable, rows: np.ndarray, env: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return which trajectories fit, and the first rows of these.

    Of each environment's part of the rows, the newest ones are kept.
    """
    part = table.num_rows // max(table.num_envs, 1)
    kept = np.zeros(len(rows), bool)
    kept[max(0, len(rows) - (table.num_slots - table.num_envs)) :] = True
    first = np.zeros(len(rows), np.int64)
    for number in range(max(table.num_envs, 1)):
        which = np.flatnonzero(kept & (env == number))
        # Rows from each trajectory to the newest one: for rows [2, 1, 3] newer is [6, 4, 3].
        newer = np.cumsum(rows[which][::-1])[::-1]
        kept[which[newer > part]] = False
        which = which[newer <= part]
        first[which] = number * part + np.cumsum(rows[which]) - rows[which]
    return kept, first[kept]
