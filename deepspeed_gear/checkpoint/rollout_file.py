"""Rollout file: the columns of a rollout batch whose training is under way, in the folder of a save."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from deepspeed_gear.checkpoint.save_folders import entry, open_checked, sha256
from deepspeed_gear.errors import CheckpointError

_PREFIX, _SUFFIX = "rollout.", ".npz"


def write(folder: Path, save_id: str, columns: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Write columns beside the tables; return the file's name and checksum for the state."""
    path = folder / f"{_PREFIX}{save_id}{_SUFFIX}"
    arrays: dict[str, Any] = {name: column.numpy() for name, column in columns.items()}
    with path.open("wb") as file:
        np.savez(file, **arrays)
        file.flush()
        os.fsync(file.fileno())
    return {"file": path.name, "sha256": sha256(path)}


def remove_others(folder: Path, kept: Mapping[str, Any] | None) -> None:
    """Remove the columns of earlier saves than the one that is kept."""
    known = ((kept or {}).get("rollout") or {}).get("columns") or {}
    for path in folder.glob(f"{_PREFIX}*{_SUFFIX}"):
        if path.name != known.get("file"):
            path.unlink(missing_ok=True)


def read(folder: Path, state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Read the columns of the rollout batch that a state was saved in.

    Raises:
        CheckpointError: The file is missing or changed.
    """
    rollout = state.get("rollout")
    if not rollout or not rollout.get("columns"):
        return {}
    at = "the rollout of the gear state"
    columns = entry(rollout, "columns", dict, at)
    name = entry(columns, "file", str, at)
    if Path(name).name != name:
        raise CheckpointError(at, "must name a file of its folder", name)
    with (
        open_checked(folder / name, entry(columns, "sha256", str, at)) as file,
        np.load(file, allow_pickle=False) as found,
    ):
        return {column: torch.from_numpy(found[column]) for column in found.files}
