"""The plan of a replay, resolved from config, data and ranks by named steps, equal on all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

import deepspeed_gear.arguments as arguments
from deepspeed_gear.config import (
    GearConfig,
    ResolvedField,
    batch_sizes,
    check_against,
    gear_config,
    parse,
    refuse_batch_sizes,
)
from deepspeed_gear.config.cross_checks import check_lengths, check_ranks
from deepspeed_gear.config.resolved_field import fields_in
from deepspeed_gear.config.resume_options import difference, shared_options
from deepspeed_gear.config.table_options import TableConfig
from deepspeed_gear.data.dataset import Dataset
from deepspeed_gear.data.statistics.dataset_statistics import ColumnStatistics, running_statistics
from deepspeed_gear.data.statistics.running_moments import Moment, moments_size
from deepspeed_gear.distributed.control_plane import ControlPlane
from deepspeed_gear.distributed.sequence_sum import check_process_group
from deepspeed_gear.distributed.shard_placement import ShardPlacement, place_tables
from deepspeed_gear.distributed.topology import RankCoordinates, Topology
from deepspeed_gear.errors import ConfigError, DataError, known_names
from deepspeed_gear.ops import Ops, load_backend
from deepspeed_gear.plan.arrival_rooms import ArrivalRoom, with_arrivals
from deepspeed_gear.plan.stream_resolution import (
    check_compressed,
    mixture_of,
    split_of,
    streams_of,
    weight_total,
)
from deepspeed_gear.plan.table_resolution import store_of, writing_of
from deepspeed_gear.plan.table_sizes import check_holds_batch
from deepspeed_gear.row_exchange.exchange_plan import (
    ExchangePlan,
    ReadNeeds,
    needs_of,
    plan_exchange,
)
from deepspeed_gear.sampling.batch_sizes import TRAIN, BatchInfo
from deepspeed_gear.sampling.mixture import Mixture
from deepspeed_gear.sampling.stream_spec import StreamSpec
from deepspeed_gear.schema import Schema
from deepspeed_gear.store.table_spec import TableSpec


@dataclass(frozen=True)
class ResolvedTable:
    """A table of a replay, from which its store, its streams and its exchange plan are made."""

    options: TableConfig
    schema: Schema
    dataset: Dataset | None  # this node's part of its data set; None: it has a capacity
    streams: Mapping[str, StreamSpec]  # by name; empty: it is not sampled
    store: TableSpec | None = None  # this node's store; None: the table lies on devices
    exchange_plan: ExchangePlan | None = None  # rows between nodes; None: none moves
    #: By stream: where rows of other nodes arrive in this node's store.
    rooms: Mapping[str, ArrivalRoom] = field(default_factory=dict)
    #: What processes that only write read of the config; empty for a data set.
    writing: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Resolved:
    """The plan of a replay, the same on all ranks before there is a store."""

    control_plane: ControlPlane
    config: GearConfig  # options that need no resolution
    ops: Ops
    topology: Topology
    info: BatchInfo
    datasets: Mapping[str, Dataset]  # this node's, by table
    schemas: Mapping[str, Schema]
    fields: Sequence[ResolvedField]  # fields of a whole batch
    needs: ReadNeeds  # fields that this rank reads of a batch
    placement: ShardPlacement
    mixture: Mixture | None  # numbers of samples from each sampled table; None: there is one
    tables: Mapping[str, ResolvedTable]

    @property
    def group(self) -> Any:
        """The process group whose ranks the topology counts; None for all."""
        return self.control_plane.process_group

    @property
    def holds_shard(self) -> bool:
        """Whether this rank's node holds a part of the spread tables."""
        return self.topology.node in self.placement.order

    @property
    def leads_shard(self) -> bool:
        """Whether this rank is the one of its node that changes the node's shards."""
        return self.topology.leads_node and self.holds_shard

    @property
    def leads_first_shard(self) -> bool:
        """Whether this rank is the one that acts once for the shards of all nodes."""
        return self.leads_shard and self.topology.node == self.placement.order[0]

    def statistics(self, fields: Sequence[ResolvedField]) -> Mapping[str, ColumnStatistics]:
        """Return the training split's statistics by column; {} if no field is normalised."""
        return self._statistics if any(field.normalize for field in fields) else {}

    @cached_property
    def _statistics(self) -> Mapping[str, ColumnStatistics]:
        store = self.tables[self.config.sampled_tables[0]].store
        if self.config.normalizes_online and store is not None:  # as long as nothing is selected
            columns = store.normalized_columns
            return running_statistics(np.zeros((Moment.NUM_WORDS, moments_size(columns))), columns)
        return statistics_of(self.config, self.datasets)


def resolve_plan(
    config: Mapping[str, Any] | GearConfig | str | Path,
    process_group: Any,
    schemas: Mapping[str, Schema] | None,
    info: BatchInfo | None,
    place: RankCoordinates | None,
    *,
    on_device: bool = False,
) -> Resolved:
    """Resolve the plan of a replay from its config, its data and its ranks. Collective.

    Each step is an action under a name, whose error is raised on every rank; `gear preview` prints
    the names. The order: the config and the ranks, the data and the fields, each table.

    Args:
        config: As `Replay`; a parsed section is not parsed again.
        process_group: As `Replay`; or a control plane that the caller has used before, with which
            the plan continues.
        schemas: As `Replay`.
        info: As `Replay`.
        place: As `Replay`.
        on_device: Whether tables must lie on devices.
    """
    arguments.one_of("info", info, (BatchInfo, type(None)), "a BatchInfo")
    arguments.one_of("place", place, (RankCoordinates, type(None)), "a RankCoordinates")
    control_plane = (
        process_group if isinstance(process_group, ControlPlane) else ControlPlane(process_group)
    )
    attempt = control_plane.attempt

    # The config and the ranks.
    options, ds_sizes = _read_config(control_plane, config)
    control_plane.allow(options.rollout_timeout_s)
    attempt("the gear section", lambda: _check_placement(options, on_device))
    ops = attempt("loading the ops", lambda: load_backend(options.backend))
    here = place or RankCoordinates(control_plane.rank, control_plane.world_size)
    topology = Topology.discover(control_plane, here)
    if options.pack is not None:
        attempt(
            "the process group", lambda: check_process_group(topology, control_plane.process_group)
        )
    sizes = attempt("the batch sizes", lambda: batch_info(options, topology, info, ds_sizes))
    _compare_node(control_plane, topology, options)

    # The data, and what batches read of them.
    datasets = open_data(control_plane, options)
    longest = {name: dataset.longest for name, dataset in datasets.items()}
    attempt("the data sets", lambda: check_lengths(options, longest))
    known = attempt("the schemas", lambda: schemas_of(options, datasets, schemas))
    fields = attempt("the fields", lambda: fields_of(options, known, datasets))
    needs = attempt("the fields", lambda: needs_of(here, options, fields))

    # Each table: which part of it a node holds, its streams, its store.
    placement = place_tables(control_plane, topology, options, datasets)
    attempt("the data sets", lambda: check_compressed(options, datasets, placement.spread))
    plan = Resolved(
        control_plane=control_plane,
        config=options,
        ops=ops,
        topology=topology,
        info=sizes,
        datasets=datasets,
        schemas=known,
        fields=fields,
        needs=needs,
        placement=placement,
        mixture=None,
        tables={},
    )
    # The streams and stores of tables follow from all that is resolved so far.
    weights = _sum_weights(plan)
    streams = attempt("the sampler", lambda: _streams(plan, weights))
    tables = attempt("the sizes of the tables", lambda: _tables(plan, streams))
    return replace(plan, mixture=mixture_of(options, sizes), tables=tables)


def _read_config(control_plane: ControlPlane, given: Any) -> tuple[GearConfig, dict[str, Any]]:
    """Parse the config on every rank and compare.

    Returns:
        The config, and the batch sizes of the ds_config around it.
    """
    section, sizes = control_plane.attempt("reading the config", lambda: gear_config.read(given))
    config = control_plane.attempt("the gear section", lambda: parse(section))
    others = control_plane.all_gather((shared_options(config), sizes))
    first, first_sizes = others[0]
    for rank, (other, other_sizes) in enumerate(others):
        differences = difference(first, other) if other != first else []
        if other_sizes != first_sizes:
            differences.append(f"batch sizes of the ds_config: {first_sizes} and {other_sizes}")
        if differences:
            given = f"rank 0 and rank {rank}: {'; '.join(differences)}"
            raise ConfigError(
                "the gear section",
                "must be the same on all ranks",
                given,
                "give all ranks one config file",
            )
    return config, sizes


def _check_placement(config: GearConfig, on_device: bool) -> None:
    """Raise a ConfigError unless the sampled tables lie where the replay's class needs them."""
    if config.on_device != on_device:
        at = f"gear.tables.{config.sampled_tables[0]}.placement"
        if on_device:
            raise ConfigError(at, 'must be "device" for a DeviceReplay', "host", "use Replay")
        raise ConfigError(
            at, 'must be "host" for a Replay', "device", "use DeviceReplay, or an engine"
        )


def _compare_node(control_plane: ControlPlane, topology: Topology, config: GearConfig) -> None:
    """Check that the ranks of a node have the same backend and `load`. Collective.

    They share a store.
    """
    tables = config.resolved_tables.items()
    mine: dict[str, str] = {"gear.backend": "cpu" if config.backend == "auto" else config.backend}
    mine |= {
        f"gear.tables.{name}.data.load": t.data.load for name, t in tables if t.data is not None
    }
    for rank, other in enumerate(control_plane.all_gather(mine)):
        for option, value in mine.items():
            if topology.nodes[rank] == topology.node and other.get(option) != value:
                given = f"rank {control_plane.rank}: {value}, rank {rank}: {other.get(option)}"
                raise ConfigError(
                    option,
                    "must be the same on all ranks of a node",
                    given,
                    "give the ranks of a node one config",
                )


def open_data(control_plane: ControlPlane, config: GearConfig) -> dict[str, Dataset]:
    """Open and compare the data sets on every rank. Collective.

    Nodes may have parts of one whole.

    Raises:
        DataError: A data set is missing or broken, or not of the same whole on all ranks.
    """
    tables = config.resolved_tables.items()
    data = control_plane.attempt(
        "opening the data sets",
        lambda: {name: Dataset.open(t.data.path) for name, t in tables if t.data is not None},
    )
    prints = {name: dataset.whole_fingerprint for name, dataset in data.items()}
    for rank, other in enumerate(control_plane.all_gather(prints)):
        for name, fingerprint in prints.items():
            if other[name] != fingerprint:
                rule = "must be the same data set on all ranks"
                given = (
                    f"rank {control_plane.rank}: {fingerprint[:12]}, "
                    f"rank {rank}: {other[name][:12]}"
                )
                remedy = "copy it again; nodes may have parts of one whole, of one `gear split`"
                raise DataError(f"table {name}: {data[name].path}", rule, given, remedy)
    return data


def _sum_weights(plan: Resolved) -> dict[str, float]:
    """Sum the item weights of each sampled data set over its parts on all nodes. Collective."""
    config = plan.config
    datasets = plan.datasets
    sampled = [name for name in config.sampled_tables if name in datasets]
    own = plan.control_plane.attempt(
        "the weights",
        lambda: {name: weight_total(config, plan.fields, name, datasets[name]) for name in sampled},
    )
    gathered = plan.control_plane.all_gather(own if plan.leads_shard else None)
    of_nodes = [weights for weights in gathered if weights is not None]
    return {
        name: total if datasets[name].part is None else sum(node[name] for node in of_nodes)
        for name, total in own.items()
    }


def _streams(plan: Resolved, weights: Mapping[str, float]) -> dict[str, dict[str, StreamSpec]]:
    """Return the batch streams of each sampled table, by table and stream.

    Args:
        weights: Sum of the item weights of each data set, over all nodes.
    """
    config = plan.config
    # Tables on devices have no shards: every replica samples from its own.
    placement = None if config.on_device else plan.placement
    return {
        name: streams_of(
            config,
            name,
            plan.schemas[name],
            plan.datasets.get(name),
            fields_in(plan.fields, plan.schemas[name]),
            plan.info,
            placement,
            weights.get(name, 0.0),
        )
        for name in config.sampled_tables
    }


def _tables(
    plan: Resolved, streams: Mapping[str, Mapping[str, StreamSpec]]
) -> dict[str, ResolvedTable]:
    """Return all tables with their streams; those on hosts with their stores."""
    tables = {}
    for name, options in plan.config.resolved_tables.items():
        dataset = plan.datasets.get(name)
        table = ResolvedTable(options, plan.schemas[name], dataset, streams.get(name, {}))
        tables[name] = table if plan.config.on_device else _with_store(plan, name, table)
    return tables


def _with_store(plan: Resolved, name: str, table: ResolvedTable) -> ResolvedTable:
    """Return a table with its store on this node, and its exchange of rows with other nodes."""
    config = plan.config
    placement = plan.placement
    streams = list(table.streams.values())
    shard = placement.shards.get(name)
    most = max((spec.batch for spec in streams), default=0)
    num_peers = plan.topology.num_peers
    fields = fields_in(plan.fields, table.schema) if streams else plan.fields
    store = store_of(config, name, table.schema, table.dataset, fields, num_peers, shard, most)
    if table.dataset is None and streams:
        count = 1 if shard is None else shard.count
        check_holds_batch(config, name, table.schema, table.streams[TRAIN], count)
    exchange_plan = None
    rooms = dict[str, ArrivalRoom]()
    if streams and name in placement.spread and plan.holds_shard:
        exchange_plan = plan_exchange(plan.topology, placement.order, config, fields, table.schema)
        store, rooms = with_arrivals(config, store, exchange_plan, streams)
    writing = writing_of(config, store)
    return replace(table, store=store, exchange_plan=exchange_plan, rooms=rooms, writing=writing)


def schemas_of(
    config: GearConfig, data: Mapping[str, Dataset], given: Mapping[str, Schema] | None
) -> dict[str, Schema]:
    """Return the schema of each table: from its data set, its config, or the program."""
    given = arguments.mapping("schemas", {} if given is None else given, "table -> Schema")
    schemas: dict[str, Schema] = {}
    for name, one in given.items():
        arguments.one_of(f"schemas: {name}", one, Schema, "a Schema")
    for name, table in config.resolved_tables.items():
        schema = data[name].schema if name in data else (table.schema or given.get(name))
        if schema is not None:
            schemas[name] = schema
    unknown = sorted(set(given) - set(config.resolved_tables))
    if unknown:
        raise ConfigError(
            "schemas",
            "must name tables of the config",
            unknown[0],
            known_names(unknown[0], config.resolved_tables),
        )
    return schemas


def fields_of(
    config: GearConfig, schemas: Mapping[str, Schema], data: Mapping[str, Dataset]
) -> list[ResolvedField]:
    """Check the config against the schemas and return the fields of a batch."""
    table = _statistics_table(config, data)
    return check_against(config, schemas, None if table is None else set(data[table].statistics))


def _statistics_table(config: GearConfig, data: Mapping[str, Dataset]) -> str | None:
    """Return the first sampled table with a data set, whose statistics normalise fields."""
    return next((table for table in config.sampled_tables if table in data), None)


def statistics_of(
    config: GearConfig, data: Mapping[str, Dataset]
) -> Mapping[str, ColumnStatistics]:
    """Return the statistics of the training split, {} without data.

    If the config has another split than the data set, that takes a pass over it.
    """
    table = _statistics_table(config, data)
    if table is None:
        return {}
    dataset = data[table]
    split = split_of(config, table, dataset)
    return dataset.statistics if dict(dataset.split) == split else dataset.statistics_for(split)


def batch_info(
    config: GearConfig, topology: Topology, given: BatchInfo | None, sizes: Mapping[str, Any]
) -> BatchInfo:
    """Return the sizes of a batch, from an engine, the ds_config, the config, or packing."""
    place = topology.place
    if config.pack is not None:
        check_ranks(config, place.data_world, place.sequence_world, place.pipe_world)
        size = config.rollout_size
        assert size is not None
        return BatchInfo.at(place, micro=1, accumulation=1, items=size.size)
    if given is not None or sizes:
        refuse_batch_sizes(config)
    if given is not None:
        return given
    return BatchInfo(*batch_sizes(config, sizes, place.data_world), place.data_world)
