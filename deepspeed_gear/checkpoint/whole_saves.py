"""Whole saves of a replay that an error names in place of a damaged one (tags: `whole_tags.py`)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from deepspeed_gear.checkpoint import checked_files, rollout_file, save_folders
from deepspeed_gear.checkpoint.checked_files import ANOTHER
from deepspeed_gear.distributed.control_plane import ControlPlane
from deepspeed_gear.errors import CheckpointError, GearError, LostNodeError

T = TypeVar("T")


def name_others(control_plane: ControlPlane, load: Callable[[], T], others: Callable[[], str]) -> T:
    """Call `load`; if a file is missing or damaged, name other saves in every rank's error.

    Collective, as `load` is.

    Args:
        control_plane: The control plane of the ranks.
        load: Loads a save.
        others: Describes the saves that can be loaded instead; called on rank 0.
    """
    try:
        return load()
    except LostNodeError:
        raise
    except Exception as error:  # of any type: `load` raises on all ranks, so all come here
        is_damaged = any(control_plane.all_gather(ANOTHER in str(error)))
        named = ""
        if is_damaged and control_plane.rank == 0:
            with contextlib.suppress(OSError):  # the folder has vanished meanwhile
                named = others()
        named = control_plane.broadcast(named)
        if not named or not isinstance(error, GearError):
            raise
        kind, parts = error.__reduce__()
        longer = f"{ANOTHER}: {named}"
        texts = [one.replace(ANOTHER, longer) if isinstance(one, str) else one for one in parts]
        raise kind(*texts) from error


def others_in(folder: Path) -> str:
    """Describe the whole saves of a folder."""
    newest = save_folders.newest_id(folder)
    whole = whole_in(folder)
    if not whole:
        return f"no save in {folder} is whole"
    if newest in whole:
        return f"the newest save in {folder}, {newest}, is whole: load without a state"
    return f"the newest whole save in {folder} is {whole[0]}: load with the state that it returned"


def whole_in(folder: Path) -> list[str]:
    """Return the ids of the saves in a folder of which each table is whole, the newest first.

    Cost: reads all of their files.
    """
    versions = [path for path in folder.glob("*") if save_folders.manifests_in(path)]
    names = {save_folders.table_in(path) for path in versions}
    tables_of: dict[str, set[str]] = {}  # by id of the save
    for path in sorted(versions, key=lambda path: -path.stat().st_mtime_ns):
        for save_id in _whole_ids(path):
            tables_of.setdefault(save_id, set()).add(save_folders.table_in(path))
    return [save_id for save_id, tables in tables_of.items() if tables == names]


def is_whole(folder: Path) -> bool:
    """Return whether all files of a folder's newest save are unchanged. Cost: reads all of them."""
    with contextlib.suppress(CheckpointError):
        state = save_folders.read_position(folder)
        save = save_folders.save_of(state)
        of_save = [save_folders.find(folder, table, save) for table in save["tables"]]
        rollout_file.read_rollout(folder, state)
        return all(save["id"] in _whole_ids(path) for path in of_save)
    return False


def _whole_ids(folder: Path) -> set[str]:
    """Return the id of the save whose table is in a folder, or none if a file is not as saved."""
    ids = set[str]()
    counts = set[int]()
    manifests = save_folders.manifests_in(folder)
    with contextlib.suppress(CheckpointError):
        for path in manifests:
            manifest = checked_files.read_json(path)
            files = checked_files.entry(manifest, "files", dict, str(path))
            for name, digest in files.items():
                checked_files.open_checked(path.parent / name, digest).close()
            ids.add(checked_files.entry(manifest, "save", str, str(path)))
            shard = manifest.get("shard", {"count": manifest.get("replicas", 1)})
            at = f"{path}: shard"
            counts.add(checked_files.entry(shard, "count", int, at))
        if len(ids) == 1 and counts == {len(manifests)}:
            return ids
    return set()
