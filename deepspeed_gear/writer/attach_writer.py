"""Attach a process that only writes: search for the store of a table, and attach to it."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed_gear.arguments as arguments
from deepspeed_gear.config import ds_config
from deepspeed_gear.errors import ConfigError, StoreError, StoreGoneError
from deepspeed_gear.ops.backends import load_library
from deepspeed_gear.store.live_stores import RUN_VARIABLE, NamedStore, named_store, named_stores, run_names
from deepspeed_gear.store.memory_layout import read_header
from deepspeed_gear.store.shared_memory import SHM, SharedMemory
from deepspeed_gear.store.table import Table
from deepspeed_gear.store.table_spec import TableSpec
from deepspeed_gear.timeouts import check_timeout, wait_until

_POLL_S = 0.1
DEFAULT_PREFIX = "gear"
_OWN_CONFIG = "give this process the config of its run"


@dataclass(frozen=True)
class Attached:
    """A table in a process that only writes.

    Args:
        max_length: Steps of the longest trajectory.
        weight: Per-trajectory column of weights, which must be finite and >= 0.
        timeout_s: Longest wait for the ranks.
    """

    table: Table
    max_length: int | None
    weight: str | None
    timeout_s: float


def attach(
    config: str | Path | Mapping[str, Any] | None = None,
    table: str | None = None,
    name: str | None = None,
    wait_s: float = 60.0,
    run: str | None = None,
) -> Attached:
    """Attach to the store of a table of a run of this node.

    Candidates are stores with a living rank whose run has the table, the writers' options of `config` (see
    `store.writer_options`) and the name or id `run`. This waits until there is one, also where a store is
    removed while it is opened.

    Args:
        config: The ds_config of the run, or its `gear` section: a file or a mapping. None: default names, and
            any schema.
        table: Name of the table; None: the only one that admits writers.
        name: Of the store's file in /dev/shm, instead of a search. It must exist, and match `config`.
        wait_s: How long to wait for the ranks to create it.
        run: Name or id of the run. None: `gear.shared_memory.run`, else the environment's GEAR_RUN, else the
            only run that matches.
    Raises:
        ConfigError: The config has no such table that admits writers, or names another run; or an argument
            is wrong.
        StoreError: There is no such store in time, there are several, or it has its maximum of writers.
    """
    for what, given in (("table", table), ("name", name), ("run", run)):
        arguments.one_of(what, given, (str, type(None)), "a name")
    check_timeout("wait_s", wait_s)
    search = _Search.of(config, table, run)
    if name is not None:
        if run is not None:
            raise ConfigError("name and run", "must not both be given", [name, run], "leave run out")
        return _open(search.fitting(name))
    others: Any = None

    def look() -> Attached | None:
        nonlocal others
        store, others = search.look()
        if store is not None:
            with contextlib.suppress(StoreGoneError):  # its run has ended in the meantime: wait for the next
                return _open(store)
        return None

    attached = wait_until(look, wait_s, _POLL_S)
    if attached is None:
        raise search.not_found(wait_s, others)
    return attached


def _open(store: NamedStore) -> Attached:
    """Attach to a store.

    Raises:
        StoreGoneError: Its run has ended.
        StoreError: It has its maximum of writers.
    """
    memory = SharedMemory.attach_one_of(store.file, store.places)
    try:
        layout, _ = read_header(memory.buffer, memory.num_bytes, str(memory.path))
        meaning = layout.meaning
        spec = TableSpec.of_capacity(str(meaning["table"]), meaning["schema"], meaning["sizes"])
        ops = load_library(meaning["library"])
        attached = Table(spec, memory, layout, ops, float(meaning["timeout_s"]))
        if not attached.has_living_rank:
            raise StoreGoneError(str(store), "must belong to a living run", None, "its ranks have ended")
        with attached.lock:  # an earlier process with this index may have died while writing
            attached.extents.give_up(memory.peer)
        attached.claim_peer(memory.peer)
        options = meaning["writing"]
        return Attached(attached, options["max_length"], options["weight"], float(options["timeout_s"]))
    except BaseException:
        memory.close()
        raise


@dataclass(frozen=True)
class _Search:
    """A search for the store of a writer, among candidates in /dev/shm.

    Args:
        section: The `gear` section; None: any store of the prefix.
        prefix: Of the file's name.
        table: Name of the table; None: any.
        runs: Names and ids that the run must have; empty: any run.
    """

    section: Mapping[str, Any] | None
    prefix: str
    table: str | None
    runs: Sequence[str]

    @classmethod
    def of(cls, config: str | Path | Mapping[str, Any] | None, table: str | None, run: str | None) -> _Search:
        section = None if config is None else _object("gear", ds_config.read(config)[0])
        memory = {} if section is None else _object("gear.shared_memory", section.get("shared_memory", {}))
        prefix = memory.get("prefix", DEFAULT_PREFIX)
        if not isinstance(prefix, str):
            raise ConfigError("gear.shared_memory.prefix", "must be a string", prefix)
        return cls(section, prefix, _table_of(section, table), run_names(memory.get("run"), run))

    def look(self) -> tuple[NamedStore | None, list[str]]:
        """Return the one store that matches, or None, and why the others do not.

        Raises:
            StoreError: Several match.
        """
        fitting, others = [], []
        found, foreign = named_stores(self.prefix)
        for store in found:
            missing = [name for name in self.runs if name not in (store.run.id, store.run.name)]
            if self.table not in (None, store.table):
                reasons = [f"its table is not {self.table}"]
            elif missing:
                reasons = [f"its run is not {missing[0]}"]
            else:
                reasons = [] if self.section is None else store.differences(self.section)
            if reasons:
                others.append(f"{store}: {', '.join(reasons)}")
            else:
                fitting.append(store)
        if len(fitting) > 1:
            remedy = f"give run or set {RUN_VARIABLE} to a run's name or id, or give table"
            several = "; ".join(map(str, fitting))
            raise StoreError("the store", "must be named where there are several", several, remedy)
        return (fitting[0] if fitting else None), others + foreign

    def fitting(self, file: str) -> NamedStore:
        """Return the store of a file; raise unless it matches.

        Raises:
            StoreError: It does not match, or cannot be attached to.
        """
        store = named_store(file)
        options = [] if self.section is None else store.differences(self.section)
        if options:
            raise StoreError(str(store), "must be of a run of this config", ", ".join(options), _OWN_CONFIG)
        return store

    def not_found(self, wait_s: float, others: list[str]) -> StoreError:
        """Return the error of a search without a result."""
        what = f"{SHM}/{self.prefix}-*-{self.table or '*'}"
        of = [] if self.section is None else ["of this config"]
        of += [f"of run {name}" for name in self.runs]
        rule = ", ".join(["must be a store that takes writers", *of, f"within {wait_s:g} s"])
        remedy = "start the ranks; set gear.tables.<name>.writers"
        if others:
            remedy = f"{_OWN_CONFIG}, or start its ranks"
        return StoreError(what, rule, "; ".join(others) or None, remedy)


def _object(name: str, value: object) -> Mapping[str, Any]:
    """Return a JSON object of the config; raise unless it is one."""
    if not isinstance(value, Mapping):
        remedy = "give the ds_config or the gear section that the ranks have"
        raise ConfigError(name, "must be a JSON object", value, remedy)
    return value


def _table_of(section: Mapping[str, Any] | None, table: str | None) -> str | None:
    if section is None:
        return table
    tables = _object("gear.tables", section.get("tables", {}))
    known = [name for name, given in tables.items() if _object(f"gear.tables.{name}", given).get("writers")]
    if table is None and len(known) == 1:
        return str(known[0])
    if table not in known:
        rule = f"must be one of the tables that take writers: {', '.join(known) or 'none'}"
        raise ConfigError("table", rule, table, "set gear.tables.<name>.writers")
    return table
