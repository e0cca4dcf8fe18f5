"""Read-only access to the stores of running processes, and to those that are kept without any.

A store has no name once its ranks are attached, but /proc/PID/fd leads its user to the memory as
long as a process holds it. It is mapped read-only and no lock is taken, so a reader can neither
change nor block a run; it may read in the middle of a selection.
"""

from __future__ import annotations

import mmap
import os
import stat
import weakref
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from deepspeed_gear.errors import ConfigError, StoreError, StoreGoneError, differences
from deepspeed_gear.schema import Schema
from deepspeed_gear.store.memory_layout import MAGIC, Layout, RunIdentity, read_header
from deepspeed_gear.store.reaper import NAME as REAPER
from deepspeed_gear.store.shared_memory import SHM, file_path, is_held, is_kept, opened, opened_file
from deepspeed_gear.store.writer_options import digest, filled

_PROC = Path("/proc")


@dataclass(frozen=True)
class LiveStore:
    table: str  # its name
    processes: tuple[int, ...]  # ids of the processes attached to it; none: it is kept
    run: RunIdentity
    layout: Layout
    views: dict[str, np.ndarray]  # its regions, read-only; their contents change as the run goes on
    descriptor: int  # of its file, open for reading until this object is deleted

    def is_attached(self, peer: int) -> bool:
        """Return whether the process with an index is attached. Takes no lock: it only looks."""
        return is_held(self.descriptor, peer, 1)


def living_stores(process: int | None = None) -> list[LiveStore]:
    """Return the stores of this user's other processes and those that are kept, or those of one
    process.

    Raises:
        StoreError: The process does not exist, is another user's, or a store of it cannot be read.
    """
    if process is None:
        pids = [int(entry.name) for entry in _PROC.iterdir() if entry.name.isdigit()]
        processes = sorted(pid for pid in pids if pid != os.getpid())
    else:
        processes = [process]
    paths: dict[tuple[int, int], list[Path]] = {}  # /proc/PID/fd/N by the identity of the file
    for pid in processes:
        try:
            if process is None and (_PROC / str(pid) / "comm").read_text().rstrip("\n") == REAPER:
                continue
            for path in sorted((_PROC / str(pid) / "fd").iterdir()):
                with suppress(FileNotFoundError):  # closed in the meantime
                    if os.readlink(path).startswith(f"{SHM}/"):
                        status = path.stat()
                        if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
                            paths.setdefault((status.st_dev, status.st_ino), []).append(path)
        except OSError as error:  # it has ended, or belongs to another user
            if process is not None:
                rule = f"must be a running process of user {os.geteuid()}"
                raise StoreError(
                    f"process {pid}", rule, error.strerror, "name a process of a running job"
                ) from error
    for path, fd in opened(None) if process is None else ():
        if is_kept(fd):
            paths.setdefault((os.fstat(fd).st_dev, os.fstat(fd).st_ino), [path])
    stores = []
    for identity, candidates in paths.items():
        holders = tuple(
            dict.fromkeys(int(path.parts[2]) for path in candidates if path.parent != SHM)
        )
        for path in candidates:  # the first that is still open
            store = _open(path, identity, holders, strict=process is not None)
            if store is not None:
                stores.append(store)
                break
    return stores


def _open(
    path: Path, identity: tuple[int, int], holders: tuple[int, ...], strict: bool
) -> LiveStore | None:
    """Map a file read-only; None if it is no table, or the descriptor is another file's by now."""
    with suppress(OSError, *(() if strict else [StoreError])), open(path, "rb", 0) as file:
        status = os.fstat(file.fileno())
        is_same = (status.st_dev, status.st_ino) == identity
        if (
            is_same and file.read(len(MAGIC)) == MAGIC
        ):  # else another program's, or not initialised yet
            layout, run = read_header(
                file.fileno(), str(path)
            )  # StoreError: it is of another version
            name = layout.meaning.get("table")
            if name is not None:  # else a policy board, or places of simulators
                memory = mmap.mmap(file.fileno(), status.st_size, mmap.MAP_SHARED, mmap.PROT_READ)
                views = layout.views(memory)
                descriptor = os.dup(file.fileno())
                store = LiveStore(str(name), holders, run, layout, views, descriptor)
                weakref.finalize(store, os.close, descriptor)
                return store
    return None  # it was closed meanwhile, or this process may not map it


RUN_VARIABLE = "GEAR_RUN"
_MOST_LETTERS = 64


@dataclass(frozen=True)
class NamedStore:
    """The store of a table that admits writers."""

    file: str  # its name in /dev/shm
    table: str  # name of the table
    run: RunIdentity
    writing: Mapping[str, Any]  # what a process that only writes needs: defaults and options
    schema: Schema
    places: range  # indices for processes that only write

    def differences(self, section: Mapping[str, Any]) -> list[str]:
        """Return the options in which an actor's `gear` section differs from the run's; empty if it
        fits.
        """
        mine = filled(section, self.table, self.writing["defaults"], self.schema)
        return [] if digest(mine) == self.run.digest else differences(mine, self.writing["options"])

    def __str__(self) -> str:
        return f"run {self.run}, table {self.table} ({SHM / self.file})"


def named_stores(prefix: str | None) -> tuple[list[NamedStore], list[str]]:
    """Return this user's stores that admit writers and have a living rank, and others' errors.

    `prefix`: of their names; None: any.

    Stores of runs that have ended are left out: writers may still be attached to them.
    """
    found = []
    others = []
    for path, fd in opened(prefix):
        try:
            store = _store(fd, path.name)
        except StoreError as error:  # of another version
            if is_held(fd, 0, 0):
                others.append(str(error))
            continue
        if store is not None:
            found.append(store)
    return found, others


def named_store(file: str) -> NamedStore:
    """Return the store of a file; raise a StoreError if it admits no writers, or its
    run has ended.
    """
    path = file_path(file)
    with opened_file(path) as fd:
        store = _store(fd, file)
        if store is None and not read_header(fd, str(path))[0].meaning.get("sizes", {}).get(
            "num_writers"
        ):
            raise StoreError(
                str(path), "must admit writers", None, "set gear.tables.<name>.writers"
            )
    if store is None:
        raise StoreGoneError(str(path), "must belong to a living run", None, "its ranks have ended")
    return store


def _store(fd: int, file: str) -> NamedStore | None:
    """Return the store of an open file; None if it admits no writers or no rank is attached."""
    layout, run = read_header(fd, str(SHM / file))
    meaning = layout.meaning
    sizes = meaning.get("sizes")
    if sizes is None or not sizes["num_writers"] or not is_held(fd, 0, sizes["num_peers"]):
        return None
    schema = Schema.from_json(meaning["schema"])
    places = range(sizes["num_peers"], sizes["num_peers"] + sizes["num_writers"])
    return NamedStore(file, str(meaning["table"]), run, meaning["writing"], schema, places)


def run_names(option: str | None, given: str | None = None) -> list[str]:
    """Return the names and ids of the run that a process asks for; the run must have all. Empty:
    any run.

    An argument (`given`) takes the place of the option and of the environment's GEAR_RUN.

    Raises:
        ConfigError: One cannot be a name.
    """
    sources = {"gear.shared_memory.run": option, RUN_VARIABLE: os.environ.get(RUN_VARIABLE)}
    named = {what: name for what, name in ({"run": given} if given else sources).items() if name}
    for what, name in named.items():
        letters = name.replace("_", "").replace("-", "")
        if (
            len(name) > _MOST_LETTERS
            or not name.isascii()
            or not (letters.isalnum() or not letters)
        ):
            rule = f"must be a name of at most {_MOST_LETTERS} letters, digits, '_' and '-'"
            raise ConfigError(what, rule, name, "choose another name")
    return sorted({*named.values()})


def new_run_name(option: str | None) -> str:
    """Return the name of a run that begins, "" without one; ConfigError: config and environment
    differ.
    """
    names = run_names(option)
    if len(names) > 1:
        rule = f"must be the run that {RUN_VARIABLE} names, where both are given"
        raise ConfigError(
            "gear.shared_memory.run", rule, " and ".join(names), "leave one of them out"
        )
    return names[0] if names else ""
