"""Attach a process that only writes: search for the store of a table, and attach to it."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import deepspeed_gear.arguments as arguments
from deepspeed_gear.config import ds_config
from deepspeed_gear.errors import ConfigError, StoreError, StoreGoneError, undo_on_error
from deepspeed_gear.ops.backends import load_library
from deepspeed_gear.store.live_stores import RUN_VARIABLE, NamedStore, named_store, named_stores, run_names
from deepspeed_gear.store.memory_layout import read_header
from deepspeed_gear.store.records import FillClaim
from deepspeed_gear.store.shared_memory import SHM, SharedMemory
from deepspeed_gear.store.table import Table
from deepspeed_gear.store.table_spec import TableSpec
from deepspeed_gear.timeouts import check_timeout, wait_until

_POLL_S = 0.1
DEFAULT_PREFIX = "gear"
_OWN_CONFIG = "give this process the config of its run"


def attach(
    config: str | Path | Mapping[str, Any] | None = None,
    table: str | None = None,
    name: str | None = None,
    wait_s: float = 60.0,
    run: str | None = None,
) -> tuple[Table, Mapping[str, Any]]:
    """Attach to the store of a table of a run of this node; arguments as `TrajectoryWriter.attach`.

    Candidates are stores with a living rank whose run has the table, the writers' options of `config` and the
    name or id `run`. This waits until there is one, also where a store is removed while it is opened. Without
    a config it has the default prefix, and any schema.

    Returns:
        The table, and what its writers need: "max_length"; "weight", the column of weights, which must be
        finite and >= 0; "timeout_s", the longest wait for the ranks.
    Raises:
        ConfigError: No such table admits writers, another run is named, or an argument is wrong.
        StoreError: There is no such store in time, there are several, or it has its maximum of writers.
    """
    for what, given in (("table", table), ("name", name), ("run", run)):
        arguments.one_of(what, given, (str, type(None)), "a name")
    check_timeout("wait_s", wait_s)
    section = None if config is None else _object("gear", ds_config.read(config)[0])
    memory = {} if section is None else _object("gear.shared_memory", section.get("shared_memory", {}))
    prefix = memory.get("prefix", DEFAULT_PREFIX)
    if not isinstance(prefix, str):
        raise ConfigError("gear.shared_memory.prefix", "must be a string", prefix)
    if section is not None:
        tables = _object("gear.tables", section.get("tables", {}))
        known = [str(n) for n, one in tables.items() if _object(f"gear.tables.{n}", one).get("writers")]
        if table is None and len(known) == 1:
            table = known[0]
        elif table not in known:
            rule = f"must be one of the tables that take writers: {', '.join(known) or 'none'}"
            raise ConfigError("table", rule, table, "set gear.tables.<name>.writers")
    runs = run_names(memory.get("run"), run)  # names and ids that the run must have
    if name is not None:
        if run is not None:
            raise ConfigError("name and run", "must not both be given", [name, run], "leave run out")
        store = named_store(name)
        options = [] if section is None else store.differences(section)
        if options:
            raise StoreError(str(store), "must be of a run of this config", ", ".join(options), _OWN_CONFIG)
        return _open(store)
    others: list[str] = []  # stores that do not match, and why

    def look() -> tuple[Table, Mapping[str, Any]] | None:
        """Attach to the one store that matches; None: there is none now."""
        found, foreign = named_stores(prefix)
        fitting = []
        others.clear()
        for store in found:
            missing = [name for name in runs if name not in (store.run.id, store.run.name)]
            if table not in (None, store.table):
                reasons = [f"its table is not {table}"]
            elif missing:
                reasons = [f"its run is not {missing[0]}"]
            else:
                reasons = [] if section is None else store.differences(section)
            if reasons:
                others.append(f"{store}: {', '.join(reasons)}")
            else:
                fitting.append(store)
        others.extend(foreign)
        if len(fitting) > 1:
            remedy = f"give run or set {RUN_VARIABLE} to a run's name or id, or give table"
            several = "; ".join(map(str, fitting))
            raise StoreError("the store", "must be named where there are several", several, remedy)
        with contextlib.suppress(StoreGoneError):  # its run has ended in the meantime: wait for the next
            return _open(fitting[0]) if fitting else None
        return None

    attached = wait_until(look, wait_s, _POLL_S)
    if attached is None:
        of = [] if section is None else ["of this config"]
        of += [f"of run {name}" for name in runs]
        rule = ", ".join(["must be a store that takes writers", *of, f"within {wait_s:g} s"])
        remedy = "start the ranks; set gear.tables.<name>.writers"
        if others:
            remedy = f"{_OWN_CONFIG}, or start its ranks"
        what = f"{SHM}/{prefix}-*-{table or '*'}"
        raise StoreError(what, rule, "; ".join(others) or None, remedy)
    return attached


def _open(store: NamedStore) -> tuple[Table, Mapping[str, Any]]:
    """Attach to a store; StoreGoneError: its run has ended."""
    memory = SharedMemory.attach_one_of(store.file, store.places)
    with undo_on_error(memory.close):
        layout, _ = read_header(memory.fd, str(memory.path))
        meaning = layout.meaning
        spec = TableSpec.of_capacity(str(meaning["table"]), meaning["schema"], meaning["sizes"])
        ops = load_library(meaning["library"])
        attached = Table(spec, memory, layout, ops, float(meaning["timeout_s"]))
        if not attached.has_living_rank:
            raise StoreGoneError(str(store), "must belong to a living run", None, "its ranks have ended")
        with attached.lock:  # an earlier process with this index may have died while writing
            attached.extents.end_abandoned(memory.peer)
            claims = attached.views["fill_claims"][:, :-1]
            claims[claims[:, :, FillClaim.OWNER] == memory.peer] = 0
            if attached.ledger is not None:
                attached.ledger.release(memory.peer)
        attached.claim_peer(memory.peer)
        return attached, meaning["writing"]


def _object(name: str, value: object) -> Mapping[str, Any]:
    """Return a JSON object of the config; raise unless it is one."""
    if not isinstance(value, Mapping):
        remedy = "give the ds_config or the gear section that the ranks have"
        raise ConfigError(name, "must be a JSON object", value, remedy)
    return value
