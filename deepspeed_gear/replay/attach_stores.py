"""Create and attach a node's stores: one rank creates them, the others attach, then the names are removed."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deepspeed_gear.config import GearConfig, TableConfig
from deepspeed_gear.config.table_options import GroupConfig, RateLimiterConfig, VersionConfig
from deepspeed_gear.config.types import defaults_of
from deepspeed_gear.distributed.batch_barrier import BatchBarrier
from deepspeed_gear.distributed.control_plane import ControlPlane
from deepspeed_gear.distributed.failure_detector import FailureDetector
from deepspeed_gear.distributed.topology import Topology
from deepspeed_gear.ops import Ops
from deepspeed_gear.sampling.batch_info import TRAIN
from deepspeed_gear.sampling.stream_spec import StreamSpec
from deepspeed_gear.sampling.stream_state import StreamState, stream_regions
from deepspeed_gear.store.live_stores import new_run_name
from deepspeed_gear.store.memory_layout import Region, RunIdentity
from deepspeed_gear.store.shared_memory import remove_garbage
from deepspeed_gear.store.table import Table
from deepspeed_gear.store.table_spec import TableSpec, table_layout
from deepspeed_gear.store.writer_options import digest, options_of, with_schema

_DEFAULTS = {
    "table": defaults_of(TableConfig),
    "rate_limiter": defaults_of(RateLimiterConfig),
    "version": defaults_of(VersionConfig),
    "group": defaults_of(GroupConfig),
}
NUM_ANSWERS = 64  # of can_sample() in the ring: the most that a rank may be ahead of the slowest


@dataclass(frozen=True)
class StorePlan:
    """The plan of one table's store: how the ranks of a node create it or attach to it."""

    spec: TableSpec
    streams: list[StreamSpec]
    meaning: dict[str, Any]
    file_name: str
    run: RunIdentity
    more: list[Region]

    @property
    def extra(self) -> list[Region]:
        """Regions of the streams and of the ranks' status."""
        streams = [region for stream in self.streams for region in stream_regions(stream, self.spec)]
        return [*streams, *self.more]

    def create(self, ops: Ops, config: GearConfig) -> tuple[Table, list[StreamState]]:
        """Create the store and link its name."""
        huge_pages = config.shared_memory.huge_pages
        table = Table.create(self.spec, self.extra, self.meaning, self.run, ops, config.timeout_s, huge_pages)
        try:
            streams = [StreamState(stream, table) for stream in self.streams]
            for stream in streams:
                stream.initialise()
            table.memory.link(self.file_name, reaped=self.spec.num_writers > 0)
        except BaseException:
            table.close()
            raise
        return table, streams

    def attach(self, ops: Ops, config: GearConfig, peer: int) -> tuple[Table, list[StreamState]]:
        """Attach to the store that the node's first rank has created."""
        layout = table_layout(self.spec, self.extra, self.meaning)
        table = Table.attach(self.spec, self.file_name, layout, self.run.id, peer, ops, config.timeout_s)
        return table, [StreamState(stream, table) for stream in self.streams]


def attach_tables(
    exchange: ControlPlane,
    topology: Topology,
    config: GearConfig,
    ops: Ops,
    specs: list[TableSpec],
    streams: Mapping[str, list[StreamSpec]],
) -> tuple[dict[str, Table], dict[str, dict[str, StreamState]]]:
    """Create the node's stores on one rank and attach the others. Collective.

    The names are removed as soon as all ranks are attached: no failure after that leaves a file. A table that
    admits writers keeps its name, and has a reaper to remove it.

    Raises:
        StoreFullError: There is too little shared memory.
    """
    prefix = config.shared_memory.prefix
    named = exchange.agree("naming the run", lambda: new_run_name(config.shared_memory.run))
    run_id, named = exchange.broadcast((secrets.token_hex(16), named))
    if topology.leads_node:
        remove_garbage(prefix)
    tables: dict[str, Table] = {}
    mine: dict[str, dict[str, StreamState]] = {}
    try:
        for spec in specs:
            more: list[Region] = []
            if spec.name == config.sampled_tables[0]:
                more += BatchBarrier.regions(topology.num_peers)
                more += [
                    Region("questions/asked", "int64", (topology.num_peers,)),
                    Region("questions/answers", "int64", (NUM_ANSWERS, 2)),
                ]
                more += FailureDetector.regions(topology.num_peers) if topology.num_nodes > 1 else []
            fingerprint = getattr(spec.dataset, "fingerprint", "")
            train = {s.name: s.describe() for s in streams.get(spec.name, []) if s.name == TRAIN}
            settings = {
                "timeout_s": config.timeout_s,
                "backend": ops.name,
                "library": ops.native.__file__,
            }
            writing = writing_of(config, spec)
            plan = StorePlan(
                spec,
                streams.get(spec.name, []),
                {
                    "seed": config.seed,
                    "fingerprint": fingerprint,
                    **settings,
                    **train,
                    "writing": writing,
                },
                f"{prefix}-{run_id}-{spec.name}",
                RunIdentity(run_id, named, digest(writing["options"]) if writing else ""),
                more,
            )
            _open_store(exchange, topology, config, ops, plan, tables, mine)
    except BaseException:
        for table in tables.values():
            table.close()
        raise
    return tables, mine


def _open_store(
    exchange: ControlPlane,
    topology: Topology,
    config: GearConfig,
    ops: Ops,
    plan: StorePlan,
    tables: dict[str, Table],
    streams: dict[str, dict[str, StreamState]],
) -> None:
    name = plan.spec.name

    def keep(made: tuple[Table, list[StreamState]]) -> None:
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
    if topology.leads_node and not plan.spec.num_writers:
        tables[name].memory.unlink()


def writing_of(config: GearConfig, spec: TableSpec) -> dict[str, Any]:
    """Return the description of a table for processes that only write; empty for a data set."""
    if spec.dataset is not None:
        return {}
    table, sampler = config.resolved_tables[spec.name], config.item_sampler
    weight = sampler.weight_column
    timeout_s = config.timeout_s if table.rate_limiter is None else table.rate_limiter.timeout_s
    given = with_schema(table.model_dump(mode="json", by_alias=True), spec.schema)
    return {
        "max_length": table.max_length,
        "weight": weight,
        "timeout_s": timeout_s,
        "options": options_of(config.seed, spec.name, given),
        "defaults": {"seed": defaults_of(GearConfig)["seed"], **_DEFAULTS},
    }
