"""Search for the store that a writer attaches to: by config, table, name of the run, or file."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import deepspeed_gear.arguments as arguments
from deepspeed_gear.config import expand, gear_config
from deepspeed_gear.errors import (
    ConfigError,
    StoreError,
    StoreGoneError,
    differences,
    undo_on_error,
)
from deepspeed_gear.ops.backends import load_library
from deepspeed_gear.schema import Schema
from deepspeed_gear.store.memory_layout import RunIdentity, read_header
from deepspeed_gear.store.shared_memory import (
    DEFAULT_PREFIX,
    SHM,
    SharedMemory,
    file_path,
    is_held,
    opened,
    opened_file,
)
from deepspeed_gear.store.table import Table
from deepspeed_gear.store.table_spec import TableSpec
from deepspeed_gear.store.writer_options import digest, filled
from deepspeed_gear.timeouts import check_timeout, wait_until

_POLL_S = 0.1  # time between two searches for a store
_OWN_CONFIG = "give this process the config of its run"
RUN_VARIABLE = "GEAR_RUN"
_MOST_LETTERS = 64


class WantedRun(NamedTuple):
    """The run that a process asks for by its config, an argument, or the environment.

    Attributes:
        section: The process's `gear` section; None: any options and schema.
        prefix: Prefix of the run's files in /dev/shm; None: any.
        names: Names and ids that the run must have; none: any run.
    """

    section: Mapping[str, Any] | None
    prefix: str | None
    names: list[str]

    @classmethod
    def read(cls, config: str | Path | Mapping[str, Any] | None, run: str | None) -> WantedRun:
        """Read the config; arguments as `TrajectoryWriter.attach`.

        Raises:
            ConfigError: The config or a name is wrong.
        """
        arguments.one_of("run", run, (str, type(None)), "a name")
        section: Mapping[str, Any] | None = None
        memory: Mapping[str, Any] = {}
        if config is not None:
            section = expand(_object("gear", gear_config.read(config)[0]))
            memory = _object("gear.shared_memory", section.get("shared_memory", {}))
        prefix: str | None = memory.get("prefix", DEFAULT_PREFIX)
        if not isinstance(prefix, str):
            raise ConfigError(
                "gear.shared_memory.prefix", "must be a string", prefix, 'for example "gear"'
            )
        names = run_names(memory.get("run"), run)
        if section is None and names:
            prefix = None  # a named run is found with any prefix
        return cls(section, prefix, names)


def attach_store(
    config: str | Path | Mapping[str, Any] | None,
    table: str | None,
    name: str | None,
    wait_s: float,
    run: str | None,
) -> tuple[Table, Mapping[str, Any]]:
    """Attach to the store of a table of this node; arguments as `TrajectoryWriter.attach`.

    Returns:
        The table, and the options that its writers need: "max_length"; "weight", the column of
        weights, which must be finite and >= 0; "timeout_s", the longest wait for the ranks.
    """
    for argument, given in (("table", table), ("name", name), ("run", run)):
        arguments.one_of(argument, given, (str, type(None)), "a name")
    check_timeout("wait_s", wait_s)
    wanted = WantedRun.read(config, run)
    section = wanted.section
    if section is not None:
        table = _writable_table(section, table)
    if name is not None:
        if run is not None:
            raise ConfigError(
                "name and run", "must not both be given", [name, run], "leave run out"
            )
        store = named_store(name)
        differences = [] if section is None else store.differences(section)
        if differences:
            raise _no_match(differences, f"{_OWN_CONFIG}; {store}: {', '.join(differences)}")
        return _open(store)
    search = _StoreSearch(section, wanted.prefix, table, wanted.names)
    attached = wait_until(search.attach, wait_s, _POLL_S)
    if attached is None:
        raise search.error(wait_s)
    return attached


def _writable_table(section: Mapping[str, Any], table: str | None) -> str | None:
    """Return the name of the table to write to; None selects the only one that takes writers."""
    tables = _object("gear.tables", section.get("tables", {}))
    writable = [
        str(n) for n, one in tables.items() if _object(f"gear.tables.{n}", one).get("writers")
    ]
    if table is None and len(writable) == 1:
        return writable[0]
    if table not in writable:
        rule = f"must be one of the tables that take writers: {', '.join(writable) or 'none'}"
        raise ConfigError("table", rule, table, "set gear.tables.<name>.writers")
    return table


@dataclass
class _StoreSearch:
    """Search of this node's stores for the only one that a writer may attach to.

    Candidates are stores with a living rank, whose run has the table, the options of `section`
    that concern writers, and every name or id of `runs`.

    Attributes:
        section: The writer's `gear` section; None: any options and schema.
        prefix: Prefix of the stores' files; None: any.
        table: Name of the table; None: any.
        runs: Names and ids that the run must have.
        mismatches: Of the latest attempt, each store that does not match, with the reasons; no
            name for a file that is no readable store.
    """

    section: Mapping[str, Any] | None
    prefix: str | None
    table: str | None
    runs: list[str]
    mismatches: list[tuple[str, list[str]]] = field(default_factory=list)

    def attach(self) -> tuple[Table, Mapping[str, Any]] | None:
        """Attach to the store that matches; None if there is none now.

        Raises:
            StoreError: Several match, or the store has its maximum of writers.
        """
        stores, unreadable = named_stores(self.prefix)
        self.mismatches = []
        matching = []
        for store in stores:
            reasons = self._reasons_against(store)
            if reasons:
                self.mismatches.append((str(store), reasons))
            else:
                matching.append(store)
        self.mismatches += [("", [reason]) for reason in unreadable]
        if len(matching) > 1:
            remedy = f"give run or set {RUN_VARIABLE} to a run's name or id, or give table"
            several = "; ".join(map(str, matching))
            raise StoreError("the store", "must be named where there are several", several, remedy)
        # The run may have ended since it was listed: then wait for the next one.
        with contextlib.suppress(StoreGoneError):
            return _open(matching[0]) if matching else None
        return None

    def _reasons_against(self, store: NamedStore) -> list[str]:
        """Return why a store does not match; empty if it matches."""
        if self.table not in (None, store.table):
            return [f"its table is not {self.table}"]
        for name in self.runs:
            if name not in (store.run.id, store.run.name):
                return [f"its run is not {name}"]
        return [] if self.section is None else store.differences(self.section)

    def error(self, wait_s: float) -> StoreError:
        """Return the error that no store matched within `wait_s` seconds."""
        if self.mismatches:
            listed = "; ".join(
                f"{store}: {', '.join(reasons)}" if store else reasons[0]
                for store, reasons in self.mismatches
            )
            remedy = f"{_OWN_CONFIG}, or start its ranks; found within {wait_s:g} s: {listed}"
            return _no_match(min((reasons for _, reasons in self.mismatches), key=len), remedy)
        of = [] if self.section is None else ["of this config"]
        of += [f"of run {name}" for name in self.runs]
        rule = ", ".join(["must be a store that takes writers", *of, f"within {wait_s:g} s"])
        files = f"{SHM}/{self.prefix or '*'}-*-{self.table or '*'}"
        return StoreError(files, rule, None, "start the ranks; set gear.tables.<name>.writers")


def _no_match(reasons: Sequence[str], remedy: str) -> StoreError:
    """Return the error that no store matches, by the reasons against the most similar store."""
    more = f", and {len(reasons) - 1} more differences" if len(reasons) > 1 else ""
    rule = "must match the config, run and table of this process"
    return StoreError("the run's store", rule, f"{reasons[0]}{more}", remedy)


def _open(store: NamedStore) -> tuple[Table, Mapping[str, Any]]:
    """Attach to a store as one of its writers; return the table and its writers' options.

    Raises:
        StoreGoneError: Its run has ended.
        StoreError: It has its maximum of writers.
    """
    memory = SharedMemory.attach_one_of(store.file, store.places)
    with undo_on_error(memory.close):
        layout, _ = read_header(memory.fd, str(memory.path))
        meaning = layout.meaning
        spec = TableSpec.of_capacity(str(meaning["table"]), meaning["schema"], meaning["sizes"])
        ops = load_library(meaning["library"])
        attached = Table(spec, memory, layout, ops, float(meaning["timeout_s"]))
        if not attached.has_living_rank:
            raise StoreGoneError(
                str(store), "must belong to a living run", None, "its ranks have ended"
            )
        with attached.lock:  # an earlier process with this index may have died while writing
            attached.extents.end_abandoned(memory.peer)
            assert attached.fills is not None
            attached.fills.release(memory.peer)
            if attached.ledger is not None:
                attached.ledger.release(memory.peer)
        attached.claim_peer(memory.peer)
        return attached, meaning["writing"]


def _object(name: str, value: object) -> Mapping[str, Any]:
    """Return a part of the config; raise a ConfigError unless it is a JSON object."""
    if not isinstance(value, Mapping):
        remedy = "give the ds_config or the gear section that the ranks have"
        raise ConfigError(name, "must be a JSON object", value, remedy)
    return value


# ---- stores that admit writers -------------------------------------------------------------------


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
        """Return the options of an actor's section that differ from the run's; empty: it fits."""
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
    """Return the store of a file; StoreError: it admits no writers, or its run has ended."""
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


# ---- names of runs -------------------------------------------------------------------------------


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
    """Return the name of a run that begins, "" without one.

    Raises:
        ConfigError: The config and the environment name different runs.
    """
    names = run_names(option)
    if len(names) > 1:
        rule = f"must be the run that {RUN_VARIABLE} names, where both are given"
        raise ConfigError(
            "gear.shared_memory.run", rule, " and ".join(names), "leave one of them out"
        )
    return names[0] if names else ""
