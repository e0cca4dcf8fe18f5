"""Save folders: a save is written beside the one before, swapped atomically, and found by its id.

A save has a random id, which is in the manifests of its tables and in its state (the position). The
state also holds the SHA-256 of each manifest, and a manifest that of each of its files. A folder
holds for each table

    <table>/            the newest save
    <table>.partial/    a save that is being written; for a moment also the one before the newest
    <table>.old/        the save before the newest, until the next one begins
    <table>.older/      only if a process saves into a folder from which it has not loaded

and `position.json`, the state of the newest save. A program that stores states elsewhere does so
after the save has returned, so its state on disk may name the save before the newest: `find`
returns the folder of the save that a state names. docs/design/0007-checkpoints.md lists the state
of a folder after a kill at each point.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import shutil
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from deepspeed_gear.checkpoint.checked_files import (
    ANOTHER,
    entry,
    read_checked,
    read_json,
    readable,
    sha256,
    write_checked,
    writing,
)
from deepspeed_gear.distributed.control_plane import ControlPlane
from deepspeed_gear.errors import CheckpointError
from deepspeed_gear.file_system import swap_names, sync

MANIFEST = "manifest.json"
POSITION = "position.json"
_POSITION_FORMAT = 1
_NAMES = ("", ".old", ".partial", ".older")
_TOKEN = ".save-"  # prefix of a file that exists while the save of its id is written
_SHARED = "save to a file system that all nodes share, such as NFS or Lustre"
_MOST_RENAMES = 5  # lookups of a table's folder that a concurrent save may disturb
T = TypeVar("T")
State = Mapping[str, Any]


def save_of(state: State) -> Mapping[str, Any]:
    """Return the entry of a state that names its save.

    Raises:
        CheckpointError: The state names none, as one of `state_dict`, or the entry is malformed.
    """
    save = state.get("save")
    if save is None:
        remedy = "load the state that `save` returned; a state of `state_dict` belongs to no save"
        raise CheckpointError("the gear state", "must name a save", None, remedy)
    entry(save, "id", str, "the save of the gear state")
    for files in entry(save, "tables", dict, "the save of the gear state").values():
        if not isinstance(files, Mapping) or not files:
            rule = "must name the manifests of each table"
            raise CheckpointError("the save of the gear state", rule, files, ANOTHER)
    return dict(save)


def compare(states: Sequence[State]) -> None:
    """Raise a CheckpointError unless all ranks have the same state.

    An interrupted save may leave the ranks' own files different.
    """
    for rank, state in enumerate(states):
        if state != states[0]:
            rule = "must be the same on all ranks"
            ids = [
                None if one.get("save") is None else one["save"]["id"] for one in (states[0], state)
            ]
            remedy = f"a save was interrupted between the files of ranks 0 and {rank}: {ANOTHER}"
            raise CheckpointError("the gear state", rule, f"saves {ids}", remedy)


def begin(folder: Path, tables: Sequence[str], kept: State | None) -> None:
    """Create empty `.partial` folders, and remove saves that no state can name.

    One process calls it for all.

    Args:
        folder: Folder of saves.
        tables: Names of the tables.
        kept: State of the latest save in this folder that this run has loaded or made, which is
            never removed. None: there is none, and the newest two saves are kept.
    """
    make(folder)
    keep: dict[str, Path | None] = dict.fromkeys(tables)
    if kept is not None:
        for table in tables:
            with contextlib.suppress(CheckpointError):
                keep[table] = find(folder, table, kept["save"])
        if None not in keep.values() and newest_id(folder) != kept["save"]["id"]:
            # Before the save that it names is removed, `position.json` must name the kept one.
            write_position(folder, kept)
    for table, kept_at in keep.items():
        _, old, partial, older = versions = _versions(folder, table)
        if kept_at is not None:
            for path in versions:
                if path != kept_at:
                    _remove(path)
            if kept_at in (partial, older):
                os.rename(kept_at, old)
        elif not old.exists() and manifests_in(partial):
            # `publish` was interrupted between the swap of names and the rename to `.old`.
            os.rename(partial, old)
        else:
            _remove(partial)
        partial.mkdir()
    sync(folder)


def partial_of(folder: Path, table: str) -> Path:
    """Return the folder into which a table is written, between `begin` and `publish`."""
    return folder / f"{table}.partial"


def complete(part: Path, manifest: Mapping[str, Any], digests: Mapping[str, str]) -> str:
    """Write the manifest of a table's or shard's files, and fsync all of them.

    Args:
        part: Folder of the files.
        manifest: Entries of the manifest, besides the files.
        digests: SHA-256 of files that need not be read for it, by name.
    Returns:
        SHA-256 of the manifest.
    """
    files = {path.name: digests.get(path.name) or sha256(path) for path in sorted(part.iterdir())}
    content = json.dumps({**manifest, "files": files}, indent=1).encode()
    (part / MANIFEST).write_bytes(content)
    for path in part.iterdir():
        if path.stat().st_nlink == 1:  # a linked file belongs to a complete save: it is on the disk
            sync(path)
    sync(part)
    return hashlib.sha256(content).hexdigest()


def publish(folder: Path, tables: Sequence[str]) -> None:
    """Rename complete saves to their tables' names; those before become `.old`.

    One process calls it. At every point the folder holds the new save and the one before.
    """
    for table in tables:
        final, old, partial, older = _versions(folder, table)
        sync(partial)
        if final.exists():
            if old.exists():
                _remove(older)
                os.rename(old, older)
            if swap_names(partial, final):
                os.rename(partial, old)
            else:  # the file system cannot exchange names: `find` looks at all of them
                os.rename(final, old)
                os.rename(partial, final)
        else:
            os.rename(partial, final)
    sync(folder)


def write_position(folder: Path, state: State) -> None:
    """Write the state of a folder's newest save."""
    write_checked(folder / POSITION, _POSITION_FORMAT, "state", state)


def write_save(
    control_plane: ControlPlane,
    folder: Path,
    tables: Sequence[str],
    kept: State | None,
    is_first: bool,
    write: Callable[[str], Mapping[str, Mapping[str, str]]],
    state_of: Callable[[dict[str, Any]], dict[str, Any]],
) -> dict[str, Any]:
    """Write a save: the tables, then the state that names it. Collective.

    Args:
        control_plane: The control plane of the ranks.
        folder: Folder of saves, which all nodes share.
        tables: Names of the tables.
        kept: As `begin`.
        is_first: Whether this rank begins and publishes for all: True on one rank.
        write: Writes this rank's files of the save of an id; returns the SHA-256 of their
            manifests, by table and by path within the table's folder.
        state_of: Makes the state of the id and the manifests; collective.
    Returns:
        The state, equal on all ranks.
    Raises:
        CheckpointError, PeerError: A file cannot be written, on this rank or on another one.
    """

    def attempt(action: Callable[[], T]) -> T:
        return control_plane.attempt("saving the tables", writing(folder)(action))

    def begin_save() -> None:
        if is_first:
            begin(folder, tables, kept)
            for token in folder.glob(f"{_TOKEN}*"):  # left by a save that was interrupted
                token.unlink(missing_ok=True)
            _token_of(folder, save_id).touch()

    def publish_save() -> None:
        publish(folder, tables)
        _token_of(folder, save_id).unlink(missing_ok=True)

    save_id: str = control_plane.broadcast(secrets.token_hex(16))
    attempt(begin_save)
    manifests: dict[str, dict[str, str]] = {name: {} for name in tables}
    for written in control_plane.all_gather(attempt(lambda: write(save_id))):
        for name, files in written.items():
            manifests[name].update(files)
    attempt(lambda: publish_save() if is_first else None)
    state = state_of({"id": save_id, "tables": manifests})
    attempt(lambda: write_position(folder, state) if is_first else None)
    return state


def check_shared(folder: Path, save_id: str) -> None:
    """Raise a CheckpointError unless this is the folder in which rank 0 has begun a save.

    Each rank that writes into the save calls it first.
    """
    if not _token_of(folder, save_id).exists():
        rule = (
            "must be one folder that all nodes share: rank 0 has begun a save in it, which is not "
            f"there on host {socket.gethostname()}"
        )
        remedy = f"{_SHARED}; the save before this one stays loadable"
        raise CheckpointError(str(folder), rule, None, remedy)


def _token_of(folder: Path, save_id: str) -> Path:
    return folder / f"{_TOKEN}{save_id}"


def make(folder: Path) -> None:
    """Create a folder and its missing parents, and fsync their names."""
    if not folder.is_dir():
        make(folder.parent)
        folder.mkdir(exist_ok=True)
        sync(folder.parent)


def _remove(path: Path) -> None:
    if path.exists():
        shutil.rmtree(path)


def read_position(folder: Path) -> dict[str, Any]:
    """Return the state of the newest save of a folder."""
    return read_checked(folder / POSITION, _POSITION_FORMAT, "state")


def is_replaced(folder: Path, state: State) -> bool:
    """Return whether the newest save of a folder is not the one that a state names."""
    named = newest_id(folder)
    return named is not None and named != (state.get("save") or {}).get("id")


def while_renamed(folder: Path, read: Callable[[], T]) -> T:
    """Call `read`; try again if another process's save has renamed tables' folders meanwhile.

    Renamed folders have the names of other saves, so a file may be missing or of another save.
    """
    for _ in range(_MOST_RENAMES):
        before = _changed_at(folder)
        try:
            return read()
        except CheckpointError:
            if _changed_at(folder) == before:
                raise
    return read()


def find(folder: Path, table: str, save: Mapping[str, Any]) -> Path:
    """Return the folder of a table in a save: `<table>/` or one next to it.

    Called within `while_renamed`.

    Args:
        folder: Folder of saves.
        table: Name of the table.
        save: The entry that `save_of` returned.
    Raises:
        CheckpointError: No folder holds that save of the table, or its manifests have changed.
    """
    files = save["tables"].get(table)
    save_id = save["id"]
    if files is None:
        rule = f"must name a save of table {table}"
        remedy = "use the tables of the run that saved it"
        raise CheckpointError("the gear state", rule, list(save["tables"]), remedy)
    if not folder.is_dir():
        host = socket.gethostname()
        rule = f"must be a folder that every rank can read; there is none on host {host}"
        remedy = f"look at the path; over several nodes {_SHARED}, or copy the folder to each"
        raise CheckpointError(str(folder), rule, None, remedy)
    problems: list[CheckpointError] = []
    saves = {}  # id of the save by the folder's name
    for path in _versions(folder, table):
        ids: list[str] = []
        for manifest in manifests_in(path):
            with contextlib.suppress(CheckpointError):
                one = read_json(manifest).get("save")
                ids += [one] if isinstance(one, str) else []
        if ids:
            saves[path.name] = min(ids)
        if save_id not in ids:
            continue
        try:
            for name, digest in files.items():
                at = path / name
                with readable(at):
                    if sha256(at) != digest:
                        raise CheckpointError(str(at), "must be as it was saved", None, ANOTHER)
            return path
        except CheckpointError as error:
            problems.append(error)
    if problems:
        raise problems[0]
    if not saves:
        read_json(folder / table / next(iter(files)))  # its error names the missing file
    remedy = "load the state that was returned by the save of these tables, or another checkpoint"
    named = newest_id(folder)
    if named not in (None, save_id):
        remedy += f"; without a state, load takes the newest, {named}"
    raise CheckpointError(
        str(folder / table), f"must hold the save {save_id} of the state", saves, remedy
    )


def _changed_at(folder: Path) -> int:
    """Return when a name in a folder was last changed, such as by another process's save."""
    with contextlib.suppress(OSError):
        return folder.stat().st_mtime_ns
    return 0


def newest_tables(folder: Path) -> list[Path]:
    """Return the folders of the tables of a folder's newest save; [] if the save has no table."""
    if not (folder / POSITION).is_file():
        named = [path for path in folder.glob("*") if path.suffix not in _NAMES[1:]]
        return sorted(path for path in named if manifests_in(path))
    save = read_position(folder).get("save")
    if save is None:
        return []
    return while_renamed(
        folder, lambda: [find(folder, table, save) for table in sorted(save["tables"])]
    )


def table_in(folder: Path) -> str:
    """Return the name of the table that a folder holds: "main" for main/ and main.old/."""
    return folder.stem if folder.suffix in _NAMES[1:] else folder.name


def newest_id(folder: Path) -> str | None:
    """Return the id of the save that `position.json` names, if it names one."""
    with contextlib.suppress(CheckpointError):
        return str(save_of(read_position(folder))["id"])
    return None


def _versions(folder: Path, table: str) -> tuple[Path, ...]:
    return tuple(folder / (table + name) for name in _NAMES)


def manifests_in(folder: Path) -> list[Path]:
    """Return the manifest of a table's folder, or those of its shards; empty if it has none."""
    own = folder / MANIFEST
    with contextlib.suppress(OSError):
        return [own] if own.is_file() else sorted(folder.glob(f"shard-*/{MANIFEST}"))
    return []
