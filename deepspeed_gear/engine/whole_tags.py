"""Whole tags of an engine: the list of a tag's files, `latest`, and whole tags that errors name.

The list is written after all files of the tag, and then `latest` names the tag.

DeepSpeed writes `latest` before its last barrier: if a rank died in its own save, `latest` would
name a checkpoint without that rank's files, and no restart could load it. The list has the size of
every file of the tag except the replay's, so it does not depend on the ZeRO stage or the kind of
engine.
"""

from __future__ import annotations

import contextlib
import os
from functools import partial
from pathlib import Path
from typing import Any

from deepspeed_gear.checkpoint import checked_files, save_folders, whole_saves
from deepspeed_gear.checkpoint.checked_files import ANOTHER
from deepspeed_gear.distributed.control_plane import ControlPlane
from deepspeed_gear.errors import CheckpointError
from deepspeed_gear.file_system import sync
from deepspeed_gear.frameworks import deepspeed_compat

TABLES = "gear"  # the replay's folder in a tag's folder
LATEST = "latest"
FILE_LIST = "whole.json"  # in TABLES
_FORMAT = 1
_OPTIMIZER = "optim_states.pt"  # ending of the names of files without weights
Sizes = dict[str, int]  # bytes of each file, by its path within the tag's folder


def begin(control_plane: ControlPlane, folder: Path) -> None:
    """Remove the list of a tag's files before the tag is written. Collective."""

    def remove() -> None:
        if control_plane.rank == 0:
            with checked_files.writing(folder):
                _list_of(folder).unlink(missing_ok=True)

    control_plane.attempt("beginning the checkpoint", remove)


def finish(
    control_plane: ControlPlane, save_dir: Path, tag: str, leads_node: bool, save_latest: bool
) -> None:
    """List the files of a tag after every rank has written its own. Collective.

    Args:
        control_plane: The control plane of the ranks.
        save_dir: Folder of tags.
        tag: The tag.
        leads_node: Whether this rank fsyncs the files of its node: True on one rank per node.
        save_latest: Whether `latest` names the tag afterwards.
    """
    folder = save_dir / tag

    def written() -> Sizes:
        with checked_files.writing(folder):
            return _synced(folder) if leads_node else {}

    of_ranks = control_plane.all_results("writing the checkpoint", written)

    def name() -> None:
        with checked_files.writing(save_dir):
            if control_plane.rank == 0:
                save_folders.make(folder / TABLES)
                sizes = {
                    path: size for of_rank in of_ranks for path, size in sorted(of_rank.items())
                }
                checked_files.write_checked(_list_of(folder), _FORMAT, "files", sizes)
                if save_latest:
                    checked_files.write_atomically(save_dir / LATEST, tag)

    control_plane.attempt("writing `latest`", name)


def check(
    control_plane: ControlPlane,
    load_dir: Path,
    tag: str | None,
    leads_node: bool,
    only_weights: bool,
    engine: Any,
) -> None:
    """Check that a tag is there and has all its files. Collective.

    A tag without a list, as plain DeepSpeed or an interrupted save leaves it, must have the files
    that the ranks themselves read.

    Args:
        control_plane: The control plane of the ranks.
        load_dir: Folder of tags.
        tag: The tag; None: the one that `latest` names.
        leads_node: Whether this rank looks for the files of its node: True on one rank per node.
        only_weights: Whether files without weights may be missing.
        engine: The engine that loads the tag.
    Raises:
        CheckpointError: The tag or a file is missing, or a file has another size.
    """
    what = "loading the checkpoint"

    def read() -> tuple[str | None, Sizes]:
        if control_plane.rank:
            return None, {}
        named = tag
        if named is None:
            with contextlib.suppress(FileNotFoundError):  # DeepSpeed warns, and loads nothing
                named = (load_dir / LATEST).read_text().strip()
        if named is None:
            return None, {}
        if not (load_dir / named).is_dir():
            rule = "must be the folder of a checkpoint" + (
                ", which `latest` names" if tag is None else ""
            )
            raise CheckpointError(str(load_dir / named), rule, None, ANOTHER)
        return named, _listed(load_dir / named)

    def look() -> None:
        named, listed = control_plane.all_results(what, read)[0]
        if named is None:
            return
        folder = load_dir / named
        if not listed:
            control_plane.attempt(what, partial(_check_own, engine, load_dir, named, only_weights))
        of_ranks = control_plane.all_results(
            what, lambda: _sizes(folder) if leads_node and listed else {}
        )
        there = {path: size for of_rank in of_ranks for path, size in of_rank.items()}
        for path, size in listed.items():
            is_read = not (only_weights and path.endswith(_OPTIMIZER))
            if is_read and there.get(path) != size:
                found = f"{there[path]} bytes" if path in there else "no such file"
                remedy = f"{ANOTHER}; if it was changed on purpose, remove {_list_of(folder)}"
                raise CheckpointError(str(folder / path), f"must have {size} bytes", found, remedy)

    whole_saves.name_others(control_plane, look, partial(others_in, load_dir))


def _check_own(engine: Any, load_dir: Path, tag: str, only_weights: bool) -> None:
    """Raise a CheckpointError if a file that this rank reads is missing."""
    for path in deepspeed_compat.own_files(engine, load_dir, tag, only_weights):
        if not path.exists():
            rule = "must exist, as this rank reads it: a save of this tag was interrupted"
            raise CheckpointError(str(path), rule, None, ANOTHER)


def others_in(load_dir: Path) -> str:
    """Return the remedy of a broken tag: the newest whole one in its folder."""
    tag = newest(load_dir)
    if tag is None:
        return f"no tag in {load_dir} is known to be whole"
    return (
        f"the newest whole one in {load_dir} is {tag}: load_checkpoint({str(load_dir)!r}, "
        f"tag={tag!r})"
    )


def newest(load_dir: Path) -> str | None:
    """Return the newest whole tag of a folder: all files are there, and the tables are unchanged.

    Cost: reads the replay's tables of each tag until one is whole.
    """
    lists = [path for path in load_dir.glob(f"*/{TABLES}/{FILE_LIST}") if path.is_file()]
    for file_list in sorted(lists, key=lambda path: -path.stat().st_mtime_ns):
        folder = file_list.parents[1]
        with contextlib.suppress(CheckpointError, OSError):
            sizes = _sizes(folder)
            listed = _listed(folder)
            is_there = all(sizes.get(path) == size for path, size in listed.items())
            has_tables = (file_list.parent / save_folders.POSITION).exists()
            if is_there and (not has_tables or whole_saves.is_whole(file_list.parent)):
                return folder.name
    return None


def _list_of(folder: Path) -> Path:
    return folder / TABLES / FILE_LIST


def _listed(folder: Path) -> Sizes:
    """Return the files of a tag's list; empty if it has none."""
    if not _list_of(folder).exists():
        return {}
    files = checked_files.read_checked(_list_of(folder), _FORMAT, "files")
    return {path: checked_files.entry(files, path, int, str(_list_of(folder))) for path in files}


def _sizes(folder: Path) -> Sizes:
    """Return the sizes of a tag's files, without those of the replay."""
    sizes = {}
    for at, folders, files in os.walk(folder):
        if Path(at) == folder:
            folders[:] = [name for name in folders if name != TABLES]
        for name in files:
            path = Path(at) / name
            sizes[str(path.relative_to(folder))] = path.stat().st_size
    return sizes


def _synced(folder: Path) -> Sizes:
    """Fsync a tag's files and the names in its folders; return their sizes."""
    sizes = _sizes(folder)
    for path in sizes:
        sync(folder / path)
    # A file's parents are relative to the tag's folder, so the last one, ".", is that folder.
    folders = {folder / parent for path in sizes for parent in Path(path).parents}
    for at in sorted(folders | {folder.parent}):
        sync(at)
    return sizes
