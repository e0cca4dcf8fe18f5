"""Checkpoints of a DeviceReplay: its position and content, in memory and in a checkpoint's folder."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepspeed_gear.checkpoint import position, save_folders
from deepspeed_gear.context import LOG
from deepspeed_gear.device import reshard_rings
from deepspeed_gear.device.ring_table import RingTable
from deepspeed_gear.distributed.resolved_plan import Resolved
from deepspeed_gear.errors import CheckpointError
from deepspeed_gear.ops.records import OpenTrajectory, RingState

FORMAT = 3
CONTENT = "content.pt"
Tables = Mapping[str, RingTable]


def position_of(plan: Resolved, tables: Tables, save: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the position, as of a Replay: `batches` and `samples` of each table. Waits for the device."""
    train = position.start(list(tables))
    for name, table in tables.items():
        state = table.state.tolist()
        train[name] |= {"batches": state[RingState.BATCH], "samples": state[RingState.SAMPLES]}
    return position.state_of(plan, {}, train, save)


def seek(plan: Resolved, tables: Tables, state: Mapping[str, Any]) -> None:
    """Continue at a position; where it is of another format, config or data set, nothing changes."""
    position.check(state, plan)
    for name, words in position.of(state, list(tables)).items():
        of = tables[name].state
        of[RingState.BATCH], of[RingState.SAMPLES] = words["batches"], words["samples"]


def saved_content(plan: Resolved, name: str, table: RingTable) -> dict[str, Tensor]:
    """Return copies in host memory of the tensors that are saved: all but the columns of a data set."""
    has_data = name in plan.datasets
    return table.copied([key for key in table.content if not (has_data and key.startswith("column/"))])


def restore(plan: Resolved, tables: Tables, content: Any) -> None:
    """Copy what `saved_content` returned of each table into its tensors; if one does not fit, nothing."""
    for name, table in tables.items():
        saved = save_folders.entry(content, name, dict, "the saved content")
        for key in saved.keys() | table.content.keys():
            held, values = table.content.get(key), saved.get(key)
            if values is None and name in plan.datasets and key.startswith("column/"):
                continue
            if held is None or not isinstance(values, Tensor):
                rule = "must be that of a table of this config"
                raise CheckpointError(f"the saved content of table {name}", rule, key)
            if held.shape != values.shape:
                rule = "must be of a table of this size"
                raise CheckpointError(f"{key} of the saved table {name}", rule, list(values.shape))
    for name, table in tables.items():
        for key, values in content[name].items():
            table.overwrite(key, values)
        for word in (OpenTrajectory.NUM_STEPS, OpenTrajectory.ENDED):
            table.opened[:, word] = 0  # the environments are at other steps


def save(plan: Resolved, tables: Tables, folder: Path, kept: save_folders.State | None) -> dict[str, Any]:
    """Write each replica's tables into a folder; return the position, which names the save. Collective.
    `kept` is the state of the save that this replay has loaded or made last there, None if none.
    """

    def write(save_id: str) -> dict[str, dict[str, str]]:
        written = {}
        for name, table in tables.items() if _leads(plan) else ():
            part = save_folders.partial_of(folder, name) / f"shard-{plan.topology.place.data_rank}"
            part.mkdir()
            torch.save(saved_content(plan, name, table), part / CONTENT)
            manifest = {"format": FORMAT, "save": save_id, "replicas": plan.info.data_world}
            digest = save_folders.complete(part, manifest, {})
            written[name] = {f"{part.name}/{save_folders.MANIFEST}": digest}
        return written

    state, is_first = partial(position_of, plan, tables), plan.topology.rank == 0
    return save_folders.write_save(plan.exchange, folder, list(tables), kept, is_first, write, state)


def load(plan: Resolved, tables: Tables, folder: Path, state: save_folders.State) -> dict[str, Any]:
    """Continue where `save` was called, on any number of replicas; return that save's state. Collective.

    On another number the trajectories are dealt anew (`deal`; rank 0 logs what does not fit); of a data set's
    priorities, replica r gets those of saved replica r modulo their number.
    """
    exchange, what = plan.exchange, "loading the table on the device"
    replica, replicas = plan.topology.place.data_rank, plan.info.data_world

    def read() -> tuple[dict[str, dict[str, Tensor]], dict[str, int]]:
        save, content, left_out = save_folders.save_of(state), {}, {}
        for name, table in tables.items():
            of_save = save_folders.find(folder, name, save)
            count = len(save["tables"][name])
            left_out[name] = 0
            if count == replicas or name in plan.datasets:
                content[name] = _read(of_save / f"shard-{replica % count}")
                of = content[name]["state"]
                of[RingState.SAMPLES] = -(-of[RingState.SAMPLES] * count // replicas)
            else:
                saved = [_read(of_save / f"shard-{number}") for number in range(count)]
                content[name], left_out[name] = reshard_rings.deal(table, saved, replica, replicas)
        return content, left_out

    exchange.agree(what, lambda: position.check(state, plan))
    save_folders.compare(exchange.gather(state))
    content, left_out = exchange.agree(what, read)
    every = exchange.gather(left_out if _leads(plan) else {})
    for name in tables if plan.topology.rank == 0 else ():
        if count := sum(of_rank.get(name, 0) for of_rank in every):
            LOG.warning(
                f"gear.tables.{name}: {count} of the oldest trajectories of {folder} do not fit into "
                f"{replicas} replicas and were left out; raise capacity_steps to keep them"
            )
    exchange.agree(what, lambda: restore(plan, tables, content))
    return dict(state)


def _read(part: Path) -> dict[str, Tensor]:
    path = part / save_folders.MANIFEST
    files = save_folders.entry(save_folders.read_versioned(path, FORMAT), "files", dict, str(path))
    with save_folders.open_checked(part / CONTENT, files.get(CONTENT)) as file:
        content: dict[str, Tensor] = torch.load(save_folders.link_of(file), weights_only=True, mmap=True)
    return content


def _leads(plan: Resolved) -> bool:
    place = plan.topology.place
    return place.tensor_rank == place.sequence_rank == place.pipe_rank == 0
