"""What a Replay is made of, and how all its ranks build it together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import deepspeed_gear.arguments as arguments
from deepspeed_gear.batching.batch_info import TRAIN, BatchInfo, Turns
from deepspeed_gear.batching.burn_in import BurnIn
from deepspeed_gear.batching.prefetcher import Prefetcher
from deepspeed_gear.batching.relabelling import HindsightRelabelling
from deepspeed_gear.config import GearConfig, ResolvedField, refuse_batch_sizes
from deepspeed_gear.data.dataset import Dataset
from deepspeed_gear.data.dataset_statistics import ColumnStatistics, statistics_of
from deepspeed_gear.distributed.batch_barrier import BatchBarrier
from deepspeed_gear.distributed.control_plane import ControlPlane
from deepspeed_gear.distributed.failure_detector import FailureDetector
from deepspeed_gear.distributed.read_needs import ReadNeeds, needs_of
from deepspeed_gear.distributed.shard_placement import ShardPlacement, place_tables
from deepspeed_gear.distributed.topology import RankCoordinates, Topology
from deepspeed_gear.errors import ConfigError
from deepspeed_gear.ops import Ops, load_backend
from deepspeed_gear.replay import config_resolution
from deepspeed_gear.replay.async_priority_updates import AsyncPriorityUpdates
from deepspeed_gear.replay.attach_stores import attach_tables
from deepspeed_gear.replay.batch_assembler import BatchAssembler
from deepspeed_gear.replay.node_setup import (
    NodeLinks,
    arrivals_by_table,
    connect,
    routes_by_table,
    status_of,
    watch_over,
)
from deepspeed_gear.replay.stream_specs import mixture_of, stream_specs, total_weight
from deepspeed_gear.sampling.batch_stream import BatchStream
from deepspeed_gear.sampling.mixture import Mixture
from deepspeed_gear.sampling.selection import StreamSpec
from deepspeed_gear.schema import Schema
from deepspeed_gear.store.table import Table
from deepspeed_gear.store.table_spec import TableSpec


@dataclass(frozen=True)
class ReplayPlan:
    """What all ranks have agreed on before there is a store."""

    exchange: ControlPlane
    config: GearConfig
    ops: Ops
    topology: Topology
    info: BatchInfo
    datasets: dict[str, Dataset]
    schemas: dict[str, Schema]
    fields: list[ResolvedField]
    needs: ReadNeeds
    placement: ShardPlacement
    group: Any = None

    @property
    def splits(self) -> dict[str, dict[str, float]]:
        """Split of each sampled table."""
        return {
            t: config_resolution.split_of(self.config, t, self.datasets) for t in self.config.sampled_tables
        }


@dataclass(frozen=True)
class ReplayParts:
    """The stores that this rank is attached to, and what reads them.

    Args:
        plan: What was agreed on.
        tables: By name.
        streams: Of each sampled table, by name.
        mixture: How many samples come from each table; None for one.
        status: Turns of ranks that train together; None where nobody waits for another.
        maker: What collects.
        links: To other nodes.
        watch: Over the ranks of all nodes; None for one node.
    """

    plan: ReplayPlan
    tables: dict[str, Table]
    streams: dict[str, dict[str, BatchStream]]
    mixture: Mixture | None
    status: BatchBarrier | None
    maker: BatchAssembler
    links: NodeLinks
    watch: FailureDetector | None

    def check(self) -> None:
        """Raise if a rank of any node is lost; called while this process waits for room or for a cut.

        It may wait for itself: for cuts that its device has read by now.

        Raises:
            LostNodeError: One is.
        """
        self.maker.settle()
        if self.watch is not None:
            self.watch.check()

    def explain(self, error: BaseException) -> None:
        """Tell the other ranks what ends this one, and this one which of them is lost."""
        if self.watch is not None:
            self.watch.explain(error)
        elif self.status is not None:
            self.status.explain(error)

    @property
    def train(self) -> list[BatchStream]:
        """The training stream of each sampled table."""
        return _train(self.plan.config, self.streams)

    @property
    def leads_shard(self) -> bool:
        """Whether this rank does for all of its node what is done to the node's shards."""
        topology = self.plan.topology
        return topology.leads_node and topology.node in self.plan.placement.order

    @property
    def leads_first_shard(self) -> bool:
        """Whether this rank does what one node does for all."""
        return self.leads_shard and self.plan.topology.node == self.plan.placement.order[0]

    @property
    def all_streams(self) -> list[BatchStream]:
        return [stream for streams in self.streams.values() for stream in streams.values()]

    def leave_inner_stage(self) -> None:
        """Let nobody wait for this rank's reading where it reads nothing."""
        if not self.plan.topology.place.reads:
            for stream in self.all_streams:
                stream.leave()


def agree_on(
    config: Mapping[str, Any] | GearConfig | str | Path,
    process_group: Any,
    schemas: Mapping[str, Schema] | None,
    info: BatchInfo | None,
    place: RankCoordinates | None,
) -> ReplayPlan:
    """Read config and data on every rank and compare. Collective; the arguments are those of `Replay`.

    Raises:
        ConfigError, DataError, BuildError: On every rank.
    """
    if schemas is not None:
        for name, schema in arguments.mapping("schemas", schemas, "table -> Schema").items():
            arguments.one_of(f"schemas: {name}", schema, Schema, "a Schema")
    arguments.one_of("info", info, (BatchInfo, type(None)), "a BatchInfo")
    arguments.one_of("place", place, (RankCoordinates, type(None)), "a RankCoordinates")
    exchange = ControlPlane(process_group)
    agree = exchange.agree
    checked = config_resolution.read_config(
        exchange, agree("reading the config", lambda: config_resolution.section_of(config))
    )
    ops = agree("loading the ops", lambda: load_backend(checked.backend))
    here = place or RankCoordinates(exchange.rank, exchange.world_size)
    topology = Topology.discover(exchange, here)
    sizes = info or agree("the batch sizes", lambda: config_resolution.batch_info(checked, here.data_world))
    if info is not None:
        agree("the batch sizes", lambda: refuse_batch_sizes(checked))
    config_resolution.compare_placement(exchange, topology, checked)
    datasets = config_resolution.open_data(exchange, checked)
    known = agree("the schemas", lambda: config_resolution.schemas_of(checked, datasets, schemas))
    fields = agree("the fields", lambda: config_resolution.fields_of(checked, known, datasets))
    needs = agree("the fields", lambda: needs_of(here, checked, fields))
    placement = place_tables(exchange, topology, checked, datasets)
    return ReplayPlan(
        exchange, checked, ops, topology, sizes, datasets, known, fields, needs, placement, process_group
    )


def refuse_device(plan: ReplayPlan) -> None:
    """Refuse a config of which a DeviceReplay is made.

    Raises:
        ConfigError: Its table lies on devices.
    """
    if plan.config.on_device:
        plan.exchange.close()
        at = f"gear.tables.{plan.config.sampled_tables[0]}.placement"
        raise ConfigError(at, 'must be "host" for a Replay', "device", "use DeviceReplay, or an engine")


def build(
    plan: ReplayPlan, turns: Turns | None, engine_dtype: torch.dtype, device: torch.device
) -> ReplayParts:
    """Create or attach the node's stores, and make what reads them. Collective.

    Args:
        plan: What was agreed on.
        turns: Where ranks wait for each other; None: nowhere.
        engine_dtype: What `"as": "engine"` means.
        device: Where batches go.
    Raises:
        ConfigError, StoreError: On every rank, before anything is left behind.
    """
    config, topology, exchange = plan.config, plan.topology, plan.exchange
    placement, datasets = plan.placement, plan.datasets
    mixture, splits = mixture_of(config, plan.info, plan.ops), plan.splits

    def streams_of(table: str) -> list[StreamSpec]:
        dataset, split = datasets.get(table), splits[table]
        num_shards = len(placement.order) if table in placement.spread else 1
        weight = weights.get(table)
        replicated = len(placement.order) > 1 and num_shards == 1
        num_items = config_resolution.num_items_of(config, table, plan.schemas[table], dataset)
        sizes = num_items, num_shards, weight, replicated
        return stream_specs(config, table, plan.fields, split, plan.info, dataset, mixture, *sizes)

    sampled = config.sampled_tables
    weights = _weights_of_parts(plan)
    wanted = exchange.agree("the sampler", lambda: {table: streams_of(table) for table in sampled})
    routes = exchange.agree(
        "the fields", lambda: routes_by_table(topology, placement, config, plan.fields, plan.schemas)
    )

    def sizes() -> list[TableSpec]:
        arrivals = arrivals_by_table(config, routes, wanted, datasets)
        num_peers, shards = topology.num_peers, placement.shards
        batches = {t: max(spec.batch for spec in of_table) for t, of_table in wanted.items()}
        more = num_peers, shards, arrivals, batches
        return config_resolution.table_specs(config, plan.schemas, datasets, plan.fields, *more)

    specs = exchange.agree("the sizes of the tables", sizes)
    tables, streams = attach_tables(exchange, topology, config, plan.ops, specs, wanted)
    status, links, watch = None, NodeLinks(), None
    made: list[BatchAssembler] = []  # also where another rank fails to make its own
    try:
        watch = watch_over(exchange, topology, tables[sampled[0]], config.timeout_s)
        if turns is not None:
            status = status_of(topology, tables[sampled[0]], turns, config, watch, plan.group)
        train = _train(config, streams)
        exchange.agree("the fields", lambda: made.append(_maker(plan, train, engine_dtype, device)))
        maker = made[0]
        links = connect(
            topology,
            exchange,
            placement,
            config,
            routes,
            streams,
            datasets,
            maker.relabelling.draw,
            plan.group,
            watch,
            device,
        )
    except BaseException:
        every = [stream for of_table in streams.values() for stream in of_table.values()]
        release([], every, tables, exchange, status, links, watch, made[0] if made else None)
        raise
    parts = ReplayParts(plan, tables, streams, mixture, status, maker, links, watch)
    for stream in parts.all_streams:
        stream.check = parts.check
        rate = config.resolved_tables[stream.table.spec.name].rate
        if stream.is_gated:
            stream.gate_wait.timeout_s = config.timeout_s if rate is None else rate.timeout_s
    if status is not None:
        for stream in train:
            stream.check = _both(maker.settle, status.check)
    parts.leave_inner_stage()
    return parts


def _both(first: Callable[[], None], second: Callable[[], None]) -> Callable[[], None]:
    def both() -> None:
        first()
        second()

    return both


def _weights_of_parts(plan: ReplayPlan) -> dict[str, float]:
    """Return the sum of the weights of each table of which nodes have parts only. Collective."""
    config, topology = plan.config, plan.topology
    splits = plan.splits

    def mine() -> dict[str, float]:
        parts = {name: data for name, data in plan.datasets.items() if data.part is not None}
        sampled = {name: data for name, data in parts.items() if name in splits}
        return {name: total_weight(config, plan.fields, splits[name], sampled[name]) for name in sampled}

    found = plan.exchange.agree("the weights", mine)
    leads = topology.leads_node and topology.node in plan.placement.order
    of_nodes = [known for known in plan.exchange.gather(found if leads else None) if known is not None]
    return {name: sum(known[name] for known in of_nodes) for name in found}


def _train(config: GearConfig, streams: Mapping[str, Mapping[str, BatchStream]]) -> list[BatchStream]:
    return [streams[table][TRAIN] for table in config.sampled_tables]


def statistics_of_plan(plan: ReplayPlan, fields: Sequence[ResolvedField]) -> Mapping[str, ColumnStatistics]:
    """Return the statistics of the training split that fields are normalised with, where they are."""
    dataset = config_resolution.statistics_source(plan.config, plan.datasets)
    if dataset is None or not any(field.normalize for field in fields):
        return {}
    split = next(split for table, split in plan.splits.items() if table in plan.datasets)
    return dataset.statistics if dict(dataset.split) == split else statistics_of(dataset, split)


def _maker(
    plan: ReplayPlan, train: list[BatchStream], engine_dtype: torch.dtype, device: torch.device
) -> BatchAssembler:
    config, fields, mine = plan.config, plan.fields, plan.needs.fields
    return BatchAssembler(
        config,
        plan.needs,
        train,
        statistics_of_plan(plan, mine),
        plan.info,
        engine_dtype,
        device,
        HindsightRelabelling(config, fields, mine),
        BurnIn.of(config, fields, mine),
        int(plan.topology.num_nodes > 1),
    )


def release(
    prefetch: list[Prefetcher[Any]],
    streams: list[BatchStream],
    tables: dict[str, Table],
    exchange: ControlPlane,
    status: BatchBarrier | None,
    links: NodeLinks,
    watch: FailureDetector | None,
    maker: BatchAssembler | None,
    late: AsyncPriorityUpdates | None = None,
) -> None:
    """Stop what runs and detach from the stores."""
    links.part()
    if watch is not None:
        watch.part()
    try:
        if status is not None:
            status.end()
        if late is not None:
            late.close()
        for stream in streams:
            stream.stopped = True
        for prefetcher in prefetch:
            prefetcher.stop()
        links.leave()
    finally:  # an interrupt may end these waits
        if watch is not None:
            watch.end()
    if maker is not None:
        maker.close()
    for table in tables.values():
        table.close()
    exchange.close()
