"""Builds a replay: creates or attaches the stores, then the parts that read them. Collective on all ranks.

The order of the parts: stores, failure detector, batch barrier, channels to other nodes, batch streams, batch
assembler. Each part gets the earlier ones as arguments.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from deepspeed_gear.batching.hindsight import HindsightRelabelling
from deepspeed_gear.batching.prefetcher import Prefetcher
from deepspeed_gear.batching.transfer.cuda_streams import DeferredRelease
from deepspeed_gear.context import Context
from deepspeed_gear.distributed import config_resolution
from deepspeed_gear.distributed.batch_barrier import BatchBarrier
from deepspeed_gear.distributed.control_plane import rendezvous
from deepspeed_gear.distributed.failure_detector import FailureDetector
from deepspeed_gear.distributed.node_channel import NodeChannel
from deepspeed_gear.distributed.quota_agreement import agree_on_quotas
from deepspeed_gear.distributed.replay_plan import ReplayPlan
from deepspeed_gear.distributed.topology import Topology
from deepspeed_gear.errors import LostNodeError, PeerError
from deepspeed_gear.replay.attach_stores import attach_tables
from deepspeed_gear.replay.batch_assembler import BatchAssembler
from deepspeed_gear.replay.node_exchange import NodeExchange, SpreadTables
from deepspeed_gear.replay.priority_updates import AsyncPriorityUpdates
from deepspeed_gear.sampling.batch_info import TRAIN, Turns
from deepspeed_gear.sampling.batch_stream import BatchStream
from deepspeed_gear.sampling.mixture import Mixture
from deepspeed_gear.sampling.stream_spec import (
    SampledTable,
    StreamSpec,
    mixture_of,
    stream_specs,
    weight_total,
)
from deepspeed_gear.sampling.stream_state import StreamState
from deepspeed_gear.store.records import Peer
from deepspeed_gear.store.table import Table
from deepspeed_gear.store.table_spec import TableSpec

Streams = dict[str, dict[str, BatchStream]]  # by table and name


@dataclass
class Resources:
    """Resources that a replay must release at its end, filled in while it is built.

    Args:
        plan: The plan that all ranks have agreed on.
        late_updates: Priority updates that a device has yet to compute.
        prefetchers: The prefetch thread, if it is running.
        detector: The failure detector over all nodes; None for one node.
        barrier: The batch barrier of ranks that train together; None without one.
        exchange: The exchanges with other nodes.
    """

    plan: ReplayPlan
    tables: dict[str, Table]
    states: list[StreamState]
    late_updates: AsyncPriorityUpdates
    prefetchers: list[Prefetcher[Any]] = field(default_factory=list)
    detector: FailureDetector | None = None
    barrier: BatchBarrier | None = None
    exchange: NodeExchange | None = None
    assembler: BatchAssembler | None = None

    def release(self) -> None:
        """Stop threads and channels, and detach from the stores."""
        if self.exchange is not None:
            self.exchange.part()
        if self.detector is not None:
            self.detector.part()
        try:
            if self.barrier is not None:
                self.barrier.end()
            self.late_updates.close()
            for state in self.states:
                state.stop.set()
            for prefetcher in self.prefetchers:
                prefetcher.stop()
            self.prefetchers.clear()
            if self.exchange is not None:
                self.exchange.leave()
        finally:  # an interrupt may end these waits
            if self.detector is not None:
                self.detector.end()
        if self.assembler is not None:
            self.assembler.close()
        for table in self.tables.values():
            table.close()
        self.plan.exchange.close()


@dataclass(frozen=True)
class ReplayParts:
    """The stores that this rank is attached to, and the parts that read them.

    Args:
        plan: The plan that all ranks have agreed on.
        context: Of this rank; its check raises if a rank of any node is lost.
        mixture: Numbers of samples from each table; None with one table.
        streams: Of each sampled table, by name.
        exchange: The exchanges with other nodes.
        releases: Deferred releases of selections that the device still reads.
        resources: Released at the end.
    """

    plan: ReplayPlan
    context: Context
    mixture: Mixture | None
    streams: Streams
    exchange: NodeExchange
    releases: DeferredRelease
    assembler: BatchAssembler
    resources: Resources

    @property
    def tables(self) -> dict[str, Table]:
        """The stores, by name of the table."""
        return self.resources.tables

    @property
    def barrier(self) -> BatchBarrier | None:
        """The batch barrier of ranks that train together; None without one."""
        return self.resources.barrier

    def explain(self, error: BaseException) -> None:
        """Send the error that ends this rank to the others, and add to it which of them is lost."""
        if self.resources.detector is not None:
            self.resources.detector.explain(error)
        elif self.barrier is not None:
            self.barrier.explain(error)

    @property
    def train(self) -> list[BatchStream]:
        """The training stream of each sampled table."""
        return [self.streams[table][TRAIN] for table in self.plan.config.sampled_tables]

    @property
    def all_streams(self) -> list[BatchStream]:
        return [stream for streams in self.streams.values() for stream in streams.values()]

    @property
    def prepares(self) -> bool:
        """Whether a prefetch thread is running."""
        return any(prefetcher.is_alive for prefetcher in self.resources.prefetchers)

    def stop_prefetching(self) -> None:
        """Stop the prefetch thread; the next batch starts another."""
        for prefetcher in self.resources.prefetchers:
            for stream in self.train:
                stream.state.stop.set()  # it may wait for a rank that has stopped already
            prefetcher.stop()
            for stream in self.train:
                stream.state.stop.clear()
        self.resources.prefetchers.clear()
        self.assembler.drain()  # a release after a seek would count for a later selection

    def leave_nodes(self) -> None:
        """Announce that this node selects no further batch until one is requested."""
        self.exchange.leave()

    def leave_inner_stage(self) -> None:
        """Mark this rank as no reader of streams, if it is an inner stage."""
        if not self.plan.topology.place.reads:
            for stream in self.all_streams:
                stream.leave()


def build(
    plan: ReplayPlan, turns: Turns | None, engine_dtype: torch.dtype, device: torch.device
) -> ReplayParts:
    """Create or attach the node's stores, and build the parts that read them. Collective.

    Args:
        plan: The plan that all ranks have agreed on.
        turns: When ranks wait for each other; None: never.
        engine_dtype: The dtype of `"as": "engine"`.
        device: The device of the batches.
    Raises:
        ConfigError, StoreError: On every rank; all resources are released.
    """
    config, topology, control_plane = plan.config, plan.topology, plan.exchange
    mixture = mixture_of(config, plan.info)
    specs = _agree_on_streams(plan, mixture)
    spread = control_plane.agree("the fields", lambda: SpreadTables(plan))
    sizes = control_plane.agree("the sizes of the tables", lambda: _table_specs(plan, specs, spread))
    tables, states = attach_tables(control_plane, topology, config, plan.ops, sizes, specs)
    every = [state for of_table in states.values() for state in of_table.values()]
    made = Resources(plan, tables, every, AsyncPriorityUpdates(config.timeout_s))
    try:
        first = tables[config.sampled_tables[0]]
        detector = made.detector = _start_detector(plan, first)
        barrier = made.barrier = None if turns is None else _barrier(plan, first, turns, detector)
        releases = DeferredRelease()
        context = _context(plan, detector, releases)
        control_plane.watch(partial(_lost_rank, first, topology, detector))
        relabelling = control_plane.agree(
            "the fields", lambda: HindsightRelabelling(config, plan.ops, plan.fields, plan.needs.fields)
        )
        exchange = made.exchange = NodeExchange(plan, detector, device)
        selectors = exchange.selectors(states, spread, relabelling.draw)
        totals = _totals_of_all(plan, states)
        training = context if barrier is None else _context(plan, barrier, releases)
        streams: Streams = {name: {} for name in states}
        for state in every:
            table, spec, selector = state.table.spec.name, state.spec, selectors.get(state)
            check = (training if spec.name == TRAIN else context).check
            follows = spec.together and plan.holds_shard and selector is None
            num_items = totals.get((table, spec.name))
            streams[table][spec.name] = BatchStream(state, selector, check, follows, num_items)
        train = [streams[table][TRAIN] for table in config.sampled_tables]
        assembler = made.assembler = control_plane.agree(
            "the fields",
            lambda: BatchAssembler(plan, train, relabelling, engine_dtype, device, releases),
        )
        agree_on_quotas(control_plane, plan.leads_shard, list(_flat(streams)))
    except BaseException:
        made.release()
        raise
    parts = ReplayParts(plan, context, mixture, streams, exchange, releases, assembler, made)
    parts.leave_inner_stage()
    return parts


def _flat(streams: Streams) -> list[BatchStream]:
    return [stream for of_table in streams.values() for stream in of_table.values()]


def _agree_on_streams(plan: ReplayPlan, mixture: Mixture | None) -> dict[str, list[StreamSpec]]:
    """Return the specs of each sampled table's streams. Collective."""
    weights, num_holders = _weight_totals(plan), len(plan.placement.order)

    def streams(name: str) -> list[StreamSpec]:
        dataset = plan.datasets.get(name)
        num_shards = num_holders if name in plan.placement.spread else 1
        table = SampledTable(
            name=name,
            split=plan.splits[name],
            dataset=dataset,
            num_items=config_resolution.num_items_of(plan.config, name, plan.schemas[name], dataset),
            num_shards=num_shards,
            weight_total=weights.get(name),
            replicated=num_holders > 1 and num_shards == 1,
        )
        return stream_specs(plan.config, table, plan.fields, plan.info, mixture)

    sampled = plan.config.sampled_tables
    return plan.exchange.agree("the sampler", lambda: {name: streams(name) for name in sampled})


def _weight_totals(plan: ReplayPlan) -> dict[str, float]:
    """Return the sum of the weights of each table that is spread over nodes. Collective."""
    splits = plan.splits

    def mine() -> dict[str, float]:
        parts = {name: data for name, data in plan.datasets.items() if data.part is not None}
        sampled = {name: data for name, data in parts.items() if name in splits}
        return {
            name: weight_total(plan.config, plan.fields, splits[name], data) for name, data in sampled.items()
        }

    found = plan.exchange.agree("the weights", mine)
    of_nodes = [
        known for known in plan.exchange.gather(found if plan.leads_shard else None) if known is not None
    ]
    return {name: sum(known[name] for known in of_nodes) for name in found}


def _table_specs(
    plan: ReplayPlan, specs: Mapping[str, list[StreamSpec]], spread: SpreadTables
) -> list[TableSpec]:
    batches = {table: max(spec.batch for spec in of_table) for table, of_table in specs.items()}
    found = config_resolution.table_specs(
        plan.config,
        plan.schemas,
        plan.datasets,
        plan.fields,
        plan.topology.num_peers,
        plan.placement.shards,
        batches,
    )
    for spec in found:
        if spec.dataset is None and spec.name in specs:
            count = 1 if spec.shard is None else spec.shard.count
            train = next(stream for stream in specs[spec.name] if stream.name == TRAIN)
            config_resolution.check_holds_batch(plan.config, spec.name, spec.schema, train, count)
    arrivals = spread.arrivals(specs, {spec.name: (spec.num_rows, spec.num_slots) for spec in found})
    return [
        replace(spec, arrival_rows=rows, arrival_slots=slots)
        for spec in found
        for rows, slots in [arrivals.get(spec.name, (0, 0))]
    ]


def _totals_of_all(
    plan: ReplayPlan, states: Mapping[str, Mapping[str, StreamState]]
) -> dict[tuple[str, str], int]:
    """Return the number of items of spread streams over all nodes, by table and stream. Collective."""
    mine = {
        (name, state.spec.name): state.masses.total
        for name in plan.placement.spread & set(states)
        for state in states[name].values()
    }
    found = plan.exchange.gather(mine if plan.leads_shard else None)
    return {key: sum(known[key] for known in found if known is not None) for key in mine}


def _context(
    plan: ReplayPlan, failures: FailureDetector | BatchBarrier | None, releases: DeferredRelease
) -> Context:
    """Return the context of this rank; its check also releases selections that the device has read."""

    def check() -> None:
        releases.settle()
        if failures is not None:
            failures.check()

    topology = plan.topology
    where = topology.rank, topology.world_size, topology.node, topology.num_nodes
    return Context(*where, timeout_s=plan.config.timeout_s, check=check)


def _start_detector(plan: ReplayPlan, table: Table) -> FailureDetector | None:
    """Start the failure detector if there are several nodes. Collective."""
    topology, timeout_s = plan.topology, plan.config.timeout_s
    if topology.num_nodes == 1:
        return None
    name = plan.exchange.broadcast(secrets.token_hex(8))

    def prepare() -> FailureDetector:
        store = rendezvous(timeout_s) if topology.leads_node else None
        detector = FailureDetector(table.memory, table.views, topology, store, name, timeout_s)
        detector.prepare()
        return detector

    detector = plan.exchange.agree("watching the ranks", prepare)
    detector.start()
    return detector


def _lost_rank(table: Table, topology: Topology, detector: FailureDetector | None) -> PeerError | None:
    """Return the error of a rank that takes part in no collective any more; None: there is none."""
    if detector is not None:
        try:
            detector.check()
        except LostNodeError as error:
            return error
        return None
    ranks, peers = topology.peers, table.peers
    dead = [peer for peer in range(len(ranks)) if not table.memory.is_alive(peer)]
    if not dead:
        return None
    first = max(dead, key=lambda peer: int(peers[peer, Peer.LOST]))  # others may have ended because of it
    peers[first, Peer.LOST] = 1
    process = f"process {int(peers[first, Peer.PID])} died, or closed its replay"
    return PeerError(f"rank {ranks[first]}", "must live as long as the others train", None, process)


def _barrier(plan: ReplayPlan, table: Table, turns: Turns, detector: FailureDetector | None) -> BatchBarrier:
    """Return the batch barrier of the ranks. Collective over the leaders of nodes."""
    topology, config = plan.topology, plan.config
    # Between two barriers of rollout batches a rank may generate, or compute rewards.
    timeout_s = config.timeout_s if config.pack is None else config.rollout_timeout_s
    only_readers = turns != "schedule"
    if detector is None:
        return BatchBarrier(table, topology, only_readers, timeout_s)
    order = topology.holders if only_readers else list(range(topology.num_nodes))
    channel = None
    over_nodes = len(order) > 1 and topology.node in order
    if over_nodes and topology.leads_node:
        channel = NodeChannel(topology, order, "turns", timeout_s, plan.group, detector)
        channel.open()
    early = only_readers and config.prefetch > 0
    return BatchBarrier(table, topology, only_readers, timeout_s, channel, over_nodes, early, detector)
