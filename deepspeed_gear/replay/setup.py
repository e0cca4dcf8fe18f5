"""From a config to attached tables: every step that ranks must agree on, in order."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepspeed_gear.config import (
    GearConfig,
    ResolvedField,
    TableConfig,
    batch_sizes,
    check_against,
    difference,
    parse,
)
from deepspeed_gear.errors import ConfigError, DataError
from deepspeed_gear.ops import Ops
from deepspeed_gear.parallel.exchange import Exchange
from deepspeed_gear.parallel.topology import Topology
from deepspeed_gear.replay.sizes import TRAIN, BatchInfo
from deepspeed_gear.replay.status import Status
from deepspeed_gear.schema import Schema
from deepspeed_gear.selection.cut import StreamSpec
from deepspeed_gear.selection.kinds import regions_of
from deepspeed_gear.selection.stream import Stream
from deepspeed_gear.store.dataset import Dataset
from deepspeed_gear.store.layout import Region
from deepspeed_gear.store.memory import remove_garbage
from deepspeed_gear.store.spec import TableSpec, table_layout
from deepspeed_gear.store.table import Table

STEPS_PER_SLOT, LEAST_SLOTS = 16, 1024  # trajectories of a table whose config does not say how many


def read_config(exchange: Exchange, section: Any) -> GearConfig:
    """Parse the config on every rank and compare. Collective.

    Raises:
        ConfigError: It is wrong, or differs between ranks.
    """
    config = exchange.agree("the gear section", lambda: parse(section))
    others = exchange.gather(config.to_json())
    for rank, other in enumerate(others):
        found = difference(parse(others[0]), parse(other)) if other != others[0] else []
        if found:
            raise ConfigError(
                "the gear section",
                "must be the same on all ranks",
                f"rank 0 and rank {rank}: {'; '.join(found)}",
            )
    return config


def compare_placement(exchange: Exchange, config: GearConfig) -> None:
    """Check that the ranks of the node use their common store in one way. Collective.

    Raises:
        ConfigError: Backend or `load` differ.
    """
    tables = config.resolved_tables.items()
    mine: dict[str, str] = {"gear.backend": "cpu" if config.backend == "auto" else config.backend}
    mine |= {f"gear.tables.{name}.data.load": t.data.load for name, t in tables if t.data is not None}
    for rank, other in enumerate(exchange.gather(mine)):
        for option, value in mine.items():
            if other.get(option) != value:
                raise ConfigError(
                    option,
                    "must be the same on all ranks of a node",
                    f"rank {exchange.rank}: {value}, rank {rank}: {other.get(option)}",
                )


def open_data(exchange: Exchange, config: GearConfig) -> dict[str, Dataset]:
    """Open the data sets on every rank and compare them. Collective.

    Raises:
        DataError: One is missing, broken, or not the same on all ranks.
    """
    tables = config.resolved_tables.items()
    data = exchange.agree(
        "opening the data sets",
        lambda: {name: Dataset.open(t.data.path) for name, t in tables if t.data is not None},
    )
    prints = {name: dataset.fingerprint for name, dataset in data.items()}
    for rank, other in enumerate(exchange.gather(prints)):
        for name, fingerprint in prints.items():
            if other[name] != fingerprint:
                raise DataError(
                    f"table {name}: {data[name].path}",
                    "must be the same data set on all ranks",
                    f"rank {exchange.rank}: {fingerprint[:12]}, rank {rank}: {other[name][:12]}",
                    "copy it again",
                )
    return data


def schemas_of(
    config: GearConfig, data: Mapping[str, Dataset], given: Mapping[str, Schema] | None
) -> dict[str, Schema]:
    """Return the schema of each table: of its data set, its config, or as the program gives it."""
    schemas: dict[str, Schema] = {}
    for name, table in config.resolved_tables.items():
        schema = data[name].schema if name in data else (table.schema or (given or {}).get(name))
        if schema is not None:
            schemas[name] = schema
    unknown = sorted(set(given or {}) - set(config.resolved_tables))
    if unknown:
        raise ConfigError("schemas", "must be of tables in the config", unknown[0])
    return schemas


def table_spec(
    name: str, table: TableConfig, schema: Schema, dataset: Dataset | None, return_to_go: bool, num_peers: int
) -> TableSpec:
    """Return the sizes of a table."""
    if dataset is not None:
        assert table.data is not None
        in_memory = table.data.load == "memory"
        return TableSpec(
            name, schema, len(dataset), dataset.num_rows, dataset, in_memory, return_to_go, num_peers
        )
    assert table.capacity_steps is not None
    steps = table.capacity_steps
    slots = table.capacity_trajectories or min(steps, max(LEAST_SLOTS, steps // STEPS_PER_SLOT))
    rows = steps + (slots if schema.has_final_row else 0)
    return TableSpec(name, schema, slots, rows, None, True, return_to_go, num_peers)


def table_specs(
    config: GearConfig,
    schemas: Mapping[str, Schema],
    datasets: Mapping[str, Dataset],
    fields: list[ResolvedField],
    num_peers: int,
) -> list[TableSpec]:
    """Return the sizes of all tables."""
    needed = any(field.derived == "return_to_go" for field in fields)
    returns = set(config.sampled_tables) if needed else set()
    return [
        table_spec(name, table, schemas[name], datasets.get(name), name in returns, num_peers)
        for name, table in config.resolved_tables.items()
    ]


@dataclass(frozen=True)
class StorePlan:
    """How the store of one table comes to be on every rank of a node."""

    spec: TableSpec
    streams: list[StreamSpec]
    meaning: dict[str, Any]
    file_name: str
    nonce: str
    more: list[Region]

    @property
    def extra(self) -> list[Region]:
        """What the streams and the ranks' status keep in the store."""
        streams = [region for stream in self.streams for region in regions_of(stream, self.spec)]
        return [*streams, *self.more]

    def create(self, ops: Ops, config: GearConfig) -> tuple[Table, list[Stream]]:
        """Make the store and give it its name."""
        huge_pages = config.shared_memory.huge_pages
        table = Table.create(
            self.spec, self.extra, self.meaning, self.nonce, ops, config.timeout_s, huge_pages
        )
        try:
            streams = [Stream(stream, table) for stream in self.streams]
            for stream in streams:
                stream.initialise()
            table.memory.link(self.file_name)
        except BaseException:
            table.close()
            raise
        return table, streams

    def attach(self, ops: Ops, config: GearConfig, peer: int) -> tuple[Table, list[Stream]]:
        """Attach to the store that the node's first rank has made."""
        layout = table_layout(self.spec, self.extra, self.meaning)
        table = Table.attach(self.spec, self.file_name, layout, self.nonce, peer, ops, config.timeout_s)
        return table, [Stream(stream, table) for stream in self.streams]


def attach_tables(
    exchange: Exchange,
    topology: Topology,
    config: GearConfig,
    ops: Ops,
    specs: list[TableSpec],
    streams: Mapping[str, list[StreamSpec]],
) -> tuple[dict[str, Table], dict[str, dict[str, Stream]]]:
    """Create the node's stores on one rank and attach the others. Collective.

    The names are taken away as soon as everybody is attached: whatever then happens, nothing stays behind.

    Raises:
        StoreFullError: There is no room in shared memory.
    """
    prefix = config.shared_memory.prefix
    nonce = exchange.broadcast(secrets.token_hex(16))
    if topology.leads_node:
        remove_garbage(prefix)
    tables: dict[str, Table] = {}
    mine: dict[str, dict[str, Stream]] = {}
    try:
        for spec in specs:
            more = Status.regions(topology.num_peers) if spec.name == config.sampled_tables[0] else []
            fingerprint = getattr(spec.dataset, "fingerprint", "")
            train = {s.name: s.describe() for s in streams.get(spec.name, []) if s.name == TRAIN}
            plan = StorePlan(
                spec,
                streams.get(spec.name, []),
                {"seed": config.seed, "backend": ops.name, "fingerprint": fingerprint, **train},
                f"{prefix}-{nonce}-{spec.name}",
                nonce,
                more,
            )
            _open_store(exchange, topology, config, ops, plan, tables, mine)
    except BaseException:
        for table in tables.values():
            table.close()
        raise
    return tables, mine


def _open_store(
    exchange: Exchange,
    topology: Topology,
    config: GearConfig,
    ops: Ops,
    plan: StorePlan,
    tables: dict[str, Table],
    streams: dict[str, dict[str, Stream]],
) -> None:
    name = plan.spec.name

    def keep(made: tuple[Table, list[Stream]]) -> None:
        tables[name] = made[0]
        streams[name] = {stream.spec.name: stream for stream in made[1]}

    def create() -> None:
        if topology.leads_node:
            keep(plan.create(ops, config))

    def attach() -> None:
        if not topology.leads_node:
            keep(plan.attach(ops, config, topology.peer))

    exchange.agree(f"creating the store of table {name}", create)
    exchange.agree(f"attaching to the store of table {name}", attach)
    if topology.leads_node:
        tables[name].memory.unlink()


def fields_of(
    config: GearConfig, schemas: Mapping[str, Schema], data: Mapping[str, Dataset]
) -> list[ResolvedField]:
    """Check the config against the schemas and return the fields of a batch."""
    dataset = statistics_source(config, data)
    return check_against(config, schemas, False if dataset is None else set(dataset.statistics))


def statistics_source(config: GearConfig, data: Mapping[str, Dataset]) -> Dataset | None:
    """Return the data set whose statistics normalise: that of the first sampled table that has one."""
    return next((data[table] for table in config.sampled_tables if table in data), None)


def section_of(config: Mapping[str, Any] | GearConfig | str | Path) -> Any:
    """Return the gear section of what the user gave."""
    if not isinstance(config, (str, Path)):
        return config
    try:
        loaded = json.loads(Path(config).read_text())
    except OSError as error:
        raise ConfigError("config", "must be a readable file", str(config), str(error.strerror)) from error
    except ValueError as error:
        raise ConfigError(f"config {config}", "must be JSON", None, str(error)) from error
    return loaded.get("gear", loaded) if isinstance(loaded, dict) else loaded


def batch_info(config: GearConfig, data_world: int) -> BatchInfo:
    """Return the batch sizes of a replay without an engine."""
    micro, _ = batch_sizes(config, data_world)
    return BatchInfo(micro, config.gradient_accumulation_steps, data_world)


def split_of(config: GearConfig, table: str, datasets: Mapping[str, Dataset]) -> dict[str, float]:
    """Return the split of a table: of the config, else the one that it was ingested with."""
    data = config.resolved_tables[table].data
    given = dict(data.split) if data is not None else {}
    return given or (dict(datasets[table].split) if table in datasets else {})
