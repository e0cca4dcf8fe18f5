"""What a DeviceReplay is continued from: in memory, and in a folder of a checkpoint."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from deepspeed_gear.errors import CheckpointError, DataError
from deepspeed_gear.ops.constants import (
    APPLIED,
    CLAMPED,
    DRAWABLE,
    RING_BATCH,
    RING_COUNTS,
    RING_EMPTY,
    RING_NEXT,
    RING_REFUSED,
    RING_STEPS,
    RING_TAIL,
    STALE,
)
from deepspeed_gear.replay.parts import Plan
from deepspeed_gear.store.ring_table import RingTable

FORMAT = 1
_CHUNK = 1 << 24


def statistics_of(table: RingTable, has_priorities: bool) -> dict[str, int]:
    """Return sizes of a table, and what updates did. Waits for the device."""
    state = table.state.tolist()
    counts = state[RING_COUNTS:]
    found = {
        "steps": state[RING_STEPS],
        "trajectories": state[RING_NEXT] - state[RING_TAIL],
        "added": state[RING_NEXT],
        "global_batches": state[RING_BATCH],
        "empty_batches": state[RING_EMPTY],
        "refused": state[RING_REFUSED],
        "bytes": table.num_bytes,
    }
    if has_priorities:
        words = {"applied": APPLIED, "ignored": STALE, "clamped": CLAMPED}
        found |= {f"priorities_{name}": counts[word] for name, word in words.items()}
        found["items"] = counts[DRAWABLE]
    return found


def check_drawn(table: RingTable) -> None:
    """Refuse a table from which a global batch without samples was drawn. Waits for the device.

    Raises:
        DataError: There was one.
    """
    empty = int(table.state[RING_EMPTY])
    if empty:
        rule = "must have an item with a mass whenever a batch is drawn"
        remedy = (
            "add trajectories that have an anchor before sample_, and report priorities above 0; "
            "batch.valid and batch.weight tell which samples there are"
        )
        raise DataError("the table on the device", rule, f"{empty} global batches without samples", remedy)


def state_of(plan: Plan, table: RingTable) -> dict[str, Any]:
    """Return the content of a table and what it is of, in host memory."""
    content = {name: tensor.to("cpu", copy=True) for name, tensor in _content(plan, table).items()}
    return {**_facts(plan), "content": content}


def restore(plan: Plan, table: RingTable, state: Mapping[str, Any]) -> None:
    """Copy a state into the tensors of a table.

    Raises:
        CheckpointError: It is of another format, config, size or data set; nothing has changed.
    """
    for name, here in _facts(plan).items():
        if state.get(name) != here:
            raise CheckpointError(f"the state's {name}", "must be that of this config", state.get(name))
    wanted = set(_content(plan, table))
    if set(state["content"]) != wanted:
        differ = sorted(wanted ^ set(state["content"]))
        raise CheckpointError("the state's content", "must be that of a table of this config", differ[0])
    for name, values in state["content"].items():
        if name not in table.content or table.content[name].shape != values.shape:
            size = list(values.shape)
            raise CheckpointError(f"the state's {name}", "must be of a table of this size", size)
    for name, values in state["content"].items():
        table.content[name].copy_(values)


def save(plan: Plan, table: RingTable, folder: Path) -> dict[str, Any]:
    """Write each replica's table into a folder; return what `load` needs, equal on all ranks. Collective.

    Raises:
        CheckpointError: A file cannot be written, on every rank.
    """

    def write() -> dict[str, str]:
        if not _leads(plan):
            return {}
        path, partial = _file(plan, folder), _file(plan, folder).with_suffix(".partial")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            torch.save(state_of(plan, table), partial)
            with partial.open("rb+") as file:
                os.fsync(file.fileno())
            digest = _digest(partial)
            partial.replace(path)
        except OSError as error:
            raise CheckpointError(str(path), "must be writable", None, str(error.strerror)) from error
        return {path.name: digest}

    mine = plan.exchange.agree("saving the table on the device", write)
    files = {name: digest for part in plan.exchange.gather(mine) for name, digest in part.items()}
    return {**_facts(plan), "files": files}


def load(plan: Plan, table: RingTable, folder: Path, state: Mapping[str, Any]) -> None:
    """Continue where `save` was called, on as many replicas. Collective.

    Raises:
        CheckpointError: A file is missing or changed, or does not fit; on every rank.
    """

    def read() -> Mapping[str, Any]:
        path, files = _file(plan, folder), state.get("files", {})
        if len(files) != plan.info.data_world:
            rule = f"must be of {plan.info.data_world} replicas, as this run"
            raise CheckpointError(str(folder), rule, len(files), "start as many replicas as before")
        if not path.is_file():
            raise CheckpointError(str(path), "must be there", None, "copy the whole folder of the checkpoint")
        if _digest(path) != files.get(path.name):
            raise CheckpointError(str(path), "must be as it was written", "another checksum")
        known: Mapping[str, Any] = torch.load(path, weights_only=True)
        return known

    known = plan.exchange.agree("loading the table on the device", read)
    plan.exchange.agree("loading the table on the device", lambda: restore(plan, table, known))


def _content(plan: Plan, table: RingTable) -> dict[str, torch.Tensor]:
    """Return what is kept of a table; a data set's columns are on disk."""
    stays = "column/" if plan.datasets else "\0"
    return {name: tensor for name, tensor in table.content.items() if not name.startswith(stays)}


def _facts(plan: Plan) -> dict[str, Any]:
    prints = {name: dataset.fingerprint for name, dataset in plan.datasets.items()}
    return {"format": FORMAT, "digest": plan.config.resume_digest, "fingerprints": prints}


def _leads(plan: Plan) -> bool:
    place = plan.topology.place
    return place.tensor_rank == place.sequence_rank == place.pipe_rank == 0


def _file(plan: Plan, folder: Path) -> Path:
    return folder / f"device-{plan.topology.place.data_rank}.pt"


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
