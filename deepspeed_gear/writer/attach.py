"""How a process that only writes finds a store and attaches to it."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed_gear.arguments as arguments
from deepspeed_gear.errors import ConfigError, StoreError
from deepspeed_gear.ops.backends import load_library
from deepspeed_gear.store.layout import read_header
from deepspeed_gear.store.memory import SHM, SharedMemory, file_path, living
from deepspeed_gear.store.request_slots import is_request_file
from deepspeed_gear.store.spec import TableSpec, writer_places
from deepspeed_gear.store.table import Table
from deepspeed_gear.timeouts import check_timeout

_POLL_S = 0.1
DEFAULT_PREFIX = "gear"


@dataclass(frozen=True)
class Attached:
    """A table in a process that only writes.

    Args:
        table: Itself.
        max_length: Steps of the longest trajectory.
        weight: Per-trajectory column of weights, which must be weights.
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
) -> Attached:
    """Attach to the store of a table of this node.

    Args:
        config: The ds_config of the run, or its `gear` section: a file or a mapping. None: default names.
        table: Which table; None: the only one that takes writers.
        name: Of the store's file in /dev/shm, in place of both.
        wait_s: How long to wait for the ranks to make it.
    Raises:
        ConfigError: The config says of no such table that takes writers, or an argument is wrong.
        StoreError: There is no such store in time, there are several, or all places of writers are taken.
    """
    if isinstance(name, str) and "/" in name:
        raise ConfigError("name", "must be the name of a file in /dev/shm", name)
    for what, given in (("table", table), ("name", name)):
        arguments.one_of(what, given, (str, type(None)), "a name")
    check_timeout("wait_s", wait_s)
    found = name or _find(_prefix_of(config), _table_of(config, table), wait_s)
    memory = SharedMemory.attach_one_of(found, writer_places(file_path(found)))
    try:
        layout, _ = read_header(memory.buffer, memory.num_bytes, str(memory.path))
        meaning = layout.meaning
        spec = TableSpec.of_capacity(str(meaning["table"]), meaning["schema"], meaning["sizes"])
        ops = load_library(meaning["library"])
        attached = Table(spec, memory, layout, ops, float(meaning["timeout_s"]))
        with attached.lock:  # an earlier process in this place may have died without anybody noticing
            attached.unfinished.give_up(memory.peer)
        attached.claim_peer(memory.peer)
        told = meaning["writing"]
        return Attached(attached, told["max_length"], told["weight"], float(told["timeout_s"]))
    except BaseException:
        memory.close()
        raise


def _section(config: str | Path | Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(config, (str, Path)):
        try:
            config = json.loads(Path(config).read_text())
        except (OSError, ValueError) as error:
            raise ConfigError(f"config {config}", "must be a readable JSON file", None, str(error)) from error
    section = _object("the config", config)
    return _object("gear", section.get("gear", section))


def _object(name: str, value: object) -> Mapping[str, Any]:
    """Return a JSON object of the config.

    Raises:
        ConfigError: It is none.
    """
    if not isinstance(value, Mapping):
        remedy = "give the ds_config or the gear section that the ranks have"
        raise ConfigError(name, "must be a JSON object", value, remedy)
    return value


def _prefix_of(config: str | Path | Mapping[str, Any] | None) -> str:
    section = {} if config is None else _section(config)
    memory = _object("gear.shared_memory", section.get("shared_memory", {}))
    prefix = memory.get("prefix", DEFAULT_PREFIX)
    if not isinstance(prefix, str):
        raise ConfigError("gear.shared_memory.prefix", "must be a string", prefix)
    return prefix


def _table_of(config: str | Path | Mapping[str, Any] | None, table: str | None) -> str | None:
    if config is None:
        return table
    tables = _object("gear.tables", _section(config).get("tables", {}))
    known = [name for name, table in tables.items() if _object(f"gear.tables.{name}", table).get("writers")]
    if table is None and len(known) == 1:
        return str(known[0])
    if table not in known:
        rule = f"must be one of the tables that take writers: {', '.join(known) or 'none'}"
        raise ConfigError("table", rule, table, "set gear.tables.<name>.writers")
    return table


def _find(prefix: str, table: str | None, wait_s: float) -> str:
    """Return the name of the one living store of a prefix and a table; wait for it."""
    until = time.monotonic() + wait_s
    while True:
        names = [path.name for path in living(prefix) if _is_of(path.name, prefix, table)]
        if len(names) == 1:
            return names[0]
        if names:
            rule, remedy = "must be named where there are several", "give name, or table and another prefix"
            raise StoreError("the store", rule, names, remedy)
        if time.monotonic() > until:
            what = f"{SHM}/{prefix}-*-{table or '*'}"
            rule = f"must be a store that takes writers, within {wait_s:g} s"
            raise StoreError(what, rule, None, "start the ranks; set gear.tables.<name>.writers")
        time.sleep(_POLL_S)


def _is_of(name: str, prefix: str, table: str | None) -> bool:
    rest = name.removeprefix(f"{prefix}-")
    nonce, _, of = rest.partition("-")
    return len(nonce) == 32 and not is_request_file(of) and (table is None or of == table)
