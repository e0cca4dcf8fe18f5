"""Record of a checkpoint's tag, written when all ranks have written their files.

`latest` names a tag only after its record. DeepSpeed writes `latest` before its last barrier: if a
rank died in its own save, `latest` would name a checkpoint without that rank's files, and no
restart could load it. The record has the size of every file of the tag except the replay's, so it
does not depend on the ZeRO stage or the kind of engine.
"""

from __future__ import annotations

import contextlib
import os
from functools import partial
from pathlib import Path
from typing import Any

from deepspeed_gear.checkpoint import save_folders, whole_saves
from deepspeed_gear.checkpoint.save_folders import ANOTHER
from deepspeed_gear.distributed.control_plane import ControlPlane
from deepspeed_gear.errors import CheckpointError
from deepspeed_gear.file_system import sync
from deepspeed_gear.frameworks import deepspeed_compat

TABLES = "gear"  # the replay's folder in a tag's folder
LATEST = "latest"
RECORD = "whole.json"  # in TABLES
_FORMAT = 1
_OPTIMIZER = "optim_states.pt"  # ending of the names of files without weights
Sizes = dict[str, int]  # bytes of each file, by its path within the tag's folder


def begin(exchange: ControlPlane, folder: Path) -> None:
    """Remove the record of a tag before the tag is written. Collective."""

    def remove() -> None:
        if exchange.rank == 0:
            with save_folders.writing(folder):
                _record_of(folder).unlink(missing_ok=True)

    exchange.agree("beginning the checkpoint", remove)


def finish(
    exchange: ControlPlane, save_dir: Path, tag: str, leads_node: bool, save_latest: bool
) -> None:
    """Record a tag as whole after every rank has written its files. Collective.

    Args:
        exchange: The control plane of the ranks.
        save_dir: Folder of tags.
        tag: The tag.
        leads_node: Whether this rank fsyncs the files of its node: True on one rank per node.
        save_latest: Whether `latest` names the tag afterwards.
    """
    folder = save_dir / tag

    def written() -> Sizes:
        with save_folders.writing(folder):
            return _synced(folder) if leads_node else {}

    of_ranks = exchange.collect("writing the checkpoint", written)

    def name() -> None:
        with save_folders.writing(save_dir):
            if exchange.rank == 0:
                save_folders.make(folder / TABLES)
                sizes = {
                    path: size for of_rank in of_ranks for path, size in sorted(of_rank.items())
                }
                save_folders.write_checked(_record_of(folder), _FORMAT, "files", sizes)
                if save_latest:
                    save_folders.write_atomically(save_dir / LATEST, tag)

    exchange.agree("writing `latest`", name)


def check(
    exchange: ControlPlane,
    load_dir: Path,
    tag: str | None,
    leads_node: bool,
    only_weights: bool,
    engine: Any,
) -> None:
    """Check that a tag is there and has all its files. Collective.

    A tag without a record, as plain DeepSpeed or an interrupted save leaves it, must have the files
    that the ranks themselves read.

    Args:
        exchange: The control plane of the ranks.
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
        if exchange.rank:
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
        return named, _recorded(load_dir / named)

    def look() -> None:
        named, recorded = exchange.collect(what, read)[0]
        if named is None:
            return
        folder = load_dir / named
        if not recorded:
            exchange.agree(what, partial(_check_own, engine, load_dir, named, only_weights))
        of_ranks = exchange.collect(what, lambda: _sizes(folder) if leads_node and recorded else {})
        there = {path: size for of_rank in of_ranks for path, size in of_rank.items()}
        for path, size in recorded.items():
            is_read = not (only_weights and path.endswith(_OPTIMIZER))
            if is_read and there.get(path) != size:
                found = f"{there[path]} bytes" if path in there else "no such file"
                remedy = f"{ANOTHER}; if it was changed on purpose, remove {_record_of(folder)}"
                raise CheckpointError(str(folder / path), f"must have {size} bytes", found, remedy)

    whole_saves.name_others(exchange, look, partial(others_in, load_dir))


def _check_own(engine: Any, load_dir: Path, tag: str, only_weights: bool) -> None:
    """Raise a CheckpointError if a file that this rank reads is missing."""
    for path in deepspeed_compat.own_files(engine, load_dir, tag, only_weights):
        if not path.exists():
            rule = "must be there, as this rank reads it: a save of the tag was interrupted"
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
    records = [path for path in load_dir.glob(f"*/{TABLES}/{RECORD}") if path.is_file()]
    for record in sorted(records, key=lambda path: -path.stat().st_mtime_ns):
        folder = record.parents[1]
        with contextlib.suppress(CheckpointError, OSError):
            sizes = _sizes(folder)
            recorded = _recorded(folder)
            is_there = all(sizes.get(path) == size for path, size in recorded.items())
            has_tables = (record.parent / save_folders.POSITION).exists()
            if is_there and (not has_tables or whole_saves.is_whole(record.parent)):
                return folder.name
    return None


def _record_of(folder: Path) -> Path:
    return folder / TABLES / RECORD


def _recorded(folder: Path) -> Sizes:
    """Return the files of a tag's record; empty if it has no record."""
    if not _record_of(folder).exists():
        return {}
    files = save_folders.read_checked(_record_of(folder), _FORMAT, "files")
    return {path: save_folders.entry(files, path, int, str(_record_of(folder))) for path in files}


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
