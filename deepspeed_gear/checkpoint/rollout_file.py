"""Rollout file: columns of a rollout batch whose training is under way, beside a save's tables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from deepspeed_gear.checkpoint import checked_files, save_folders
from deepspeed_gear.errors import CheckpointError

_PREFIX = "rollout."
_SUFFIX = ".npz"


def write_rollout(
    folder: Path, save_id: str, columns: Mapping[str, torch.Tensor], kept: save_folders.State | None
) -> dict[str, str] | None:
    """Write the columns of a rollout batch beside the tables, and remove files of earlier saves.

    Args:
        folder: Folder of the save.
        save_id: Id of the save.
        columns: Columns of the rollout batch; empty: nothing is written.
        kept: State of the save whose file stays; None: unknown, so all files stay.
    Returns:
        The file's name and checksum for the state; None without columns.
    """
    known = ((kept or {}).get("rollout") or {}).get("columns") or {}
    for path in folder.glob(f"{_PREFIX}*{_SUFFIX}"):
        if kept is not None and path.name != known.get("file"):
            path.unlink(missing_ok=True)
    if not columns:
        return None
    path = folder / f"{_PREFIX}{save_id}{_SUFFIX}"
    arrays: dict[str, Any] = {name: column.numpy() for name, column in columns.items()}
    with path.open("wb") as file:
        np.savez(file, **arrays)
        file.flush()
        os.fsync(file.fileno())
    return {"file": path.name, "sha256": checked_files.sha256(path)}


def read_rollout(folder: Path, state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Read the columns of the rollout batch in which a state was saved; empty if in none."""
    rollout = state.get("rollout")
    if not rollout or not rollout.get("columns"):
        return {}
    at = "the rollout of the gear state"
    columns = checked_files.entry(rollout, "columns", dict, at)
    name = checked_files.entry(columns, "file", str, at)
    if Path(name).name != name:
        raise CheckpointError(at, "must name a file of its folder", name, checked_files.ANOTHER)
    digest = checked_files.entry(columns, "sha256", str, at)
    with (
        checked_files.open_checked(folder / name, digest) as file,
        np.load(file, allow_pickle=False) as arrays,
    ):
        return {column: torch.from_numpy(arrays[column]) for column in arrays.files}
