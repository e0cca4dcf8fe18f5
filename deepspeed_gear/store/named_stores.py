"""Named stores of a node: the tables that admit writers, and the runs that they belong to."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deepspeed_gear.errors import ConfigError, StoreError, StoreGoneError
from deepspeed_gear.schema import Schema
from deepspeed_gear.store.memory_layout import RunIdentity, read_meaning
from deepspeed_gear.store.shared_memory import SHM, file_path, is_held, opened, opened_file
from deepspeed_gear.store.writer_options import differences, digest, filled

RUN_VARIABLE = "GEAR_RUN"
_MOST_LETTERS = 64


@dataclass(frozen=True)
class NamedStore:
    """The store of a table that admits writers.

    Args:
        file: Its name in /dev/shm.
        table: Name of the table.
        run: The run that it belongs to.
        writing: What a process that only writes needs: defaults and options.
        schema: Of the table.
    """

    file: str
    table: str
    run: RunIdentity
    writing: Mapping[str, Any]
    schema: Schema

    def differences(self, section: Mapping[str, Any]) -> list[str]:
        """Return the options in which an actor's `gear` section differs from the run's; empty if it fits.

        Raises:
            SchemaError: The section's schema is wrong.
        """
        mine = filled(section, self.table, self.writing["defaults"], self.schema)
        return [] if digest(mine) == self.run.digest else differences(mine, self.writing["options"])

    def __str__(self) -> str:
        return f"run {self.run}, table {self.table} ({SHM / self.file})"


def named_stores(prefix: str) -> tuple[list[NamedStore], list[str]]:
    """Return this user's stores of a prefix that admit writers and have a living rank, and others' errors.

    Stores of runs that have ended are left out: writers may still be attached to them.

    Raises:
        StoreError: This process has too many files open.
    """
    found, others = [], []
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
    """Return the store of a file.

    Raises:
        ConfigError: The name could lead out of /dev/shm.
        StoreGoneError: It does not exist, or its run has ended.
        StoreError: It admits no writers, or is no store.
    """
    path = file_path(file)
    with opened_file(path) as fd:
        store = _store(fd, file)
        if store is None and not (read_meaning(fd, str(path))[0].get("sizes") or {}).get("num_writers"):
            rule, remedy = "must admit writers", "set gear.tables.<name>.writers"
            raise StoreError(str(path), rule, None, remedy)
    if store is None:
        raise StoreGoneError(str(path), "must belong to a living run", None, "its ranks have ended")
    return store


def _store(fd: int, file: str) -> NamedStore | None:
    """Return the store of an open file; None if it admits no writers or no rank is attached."""
    meaning, run = read_meaning(fd, str(SHM / file))
    sizes = meaning.get("sizes")
    if sizes is None or not sizes["num_writers"] or not is_held(fd, 0, sizes["num_peers"]):
        return None
    schema = Schema.from_json(meaning["schema"])
    return NamedStore(file, str(meaning["table"]), run, meaning["writing"], schema)


def run_names(option: str | None, given: str | None = None) -> list[str]:
    """Return the names and ids of the run that a process asks for; the run must have all. Empty: any run.

    Args:
        option: `gear.shared_memory.run`.
        given: As an argument, in place of the option and of the environment's GEAR_RUN.
    Raises:
        ConfigError: One cannot be a name.
    """
    sources = {"gear.shared_memory.run": option, RUN_VARIABLE: os.environ.get(RUN_VARIABLE)}
    named = {what: name for what, name in ({"run": given} if given else sources).items() if name}
    for what, name in named.items():
        if not is_run_name(name):
            rule = f"must be a name of at most {_MOST_LETTERS} letters, digits, '_' and '-'"
            raise ConfigError(what, rule, name)
    return sorted({*named.values()})


def new_run_name(option: str | None) -> str:
    """Return the name of a run that begins; "" without one.

    Args:
        option: `gear.shared_memory.run`.
    Raises:
        ConfigError: It cannot be a name, or config and environment name two runs.
    """
    names = run_names(option)
    if len(names) > 1:
        rule = f"must be the run that {RUN_VARIABLE} names, where both are given"
        raise ConfigError("gear.shared_memory.run", rule, " and ".join(names), "leave one of them out")
    return names[0] if names else ""


def is_run_name(name: str) -> bool:
    """Return whether a run may have this name."""
    letters = name.replace("_", "").replace("-", "")
    return 0 < len(name) <= _MOST_LETTERS and name.isascii() and (letters.isalnum() or not letters)
