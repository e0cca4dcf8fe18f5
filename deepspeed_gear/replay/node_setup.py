"""Streams whose table lies on several nodes: what this rank does for them."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from deepspeed_gear.batching.batch_info import TRAIN, Turns
from deepspeed_gear.config import GearConfig, ResolvedField
from deepspeed_gear.data.dataset import Dataset
from deepspeed_gear.distributed.batch_barrier import BatchBarrier
from deepspeed_gear.distributed.control_plane import ControlPlane, rendezvous
from deepspeed_gear.distributed.failure_detector import FailureDetector
from deepspeed_gear.distributed.node_channel import NodeChannel
from deepspeed_gear.distributed.row_exchange.device_transport import DeviceTransport
from deepspeed_gear.distributed.row_exchange.exchange_plan import ExchangePlan, routes_of
from deepspeed_gear.distributed.row_exchange.row_exchange import RowExchange, arrivals_of, most_rows
from deepspeed_gear.distributed.shard_placement import ShardPlacement
from deepspeed_gear.distributed.sharded.replicated_selector import ReplicatedSelector
from deepspeed_gear.distributed.sharded.resolution_exchange import Goals
from deepspeed_gear.distributed.sharded.selection_agreement import SelectionAgreement
from deepspeed_gear.distributed.sharded.sharded_selector import ShardedSelector
from deepspeed_gear.distributed.topology import Topology
from deepspeed_gear.errors import ConfigError
from deepspeed_gear.sampling.batch_stream import BatchStream
from deepspeed_gear.sampling.samplers.prioritized import PriorityMasses
from deepspeed_gear.sampling.selection import StreamSpec
from deepspeed_gear.schema import Schema
from deepspeed_gear.store.stream_records import Head
from deepspeed_gear.store.table import Table

EDGE = 2  # rows on both sides of the arrivals, so that what lies beside them is nobody's


@dataclass
class NodeLinks:
    """What this rank exchanges with other nodes; empty where nothing is, and on ranks that do not.

    Args:
        train: For the cuts of training streams, on the thread that prepares them.
        passes: For those of evaluation passes, on the main thread.
        selectors: Those of the training streams.
        prepares: Whether a thread makes cuts ahead of the program.
    """

    train: NodeChannel | None = None
    passes: NodeChannel | None = None
    selectors: list[SelectionAgreement] = field(default_factory=list)
    prepares: bool = False

    _taken: tuple[np.ndarray, int, int, int] | None = None

    def take_metrics(self) -> dict[str, float]:
        """Return what the exchanges of training batches were since the last call, per cut; nothing elsewhere.

        Returns:
            `sent_bytes`, `received_bytes`, and for each node `late_ms.<node>`: how long the first node to be
            ready waited for it.
        """
        if self.train is None or not self.selectors:
            return {}
        late = np.sum([selector.late_s for selector in self.selectors], axis=0)
        cuts = sum(selector.num_cuts for selector in self.selectors)
        now = late, cuts, self.train.bytes_sent, self.train.bytes_received
        before = self._taken or (np.zeros_like(late), 0, 0, 0)
        self._taken = late.copy(), cuts, self.train.bytes_sent, self.train.bytes_received
        waits, made, sent, received = (a - b for a, b in zip(now, before, strict=True))
        made = max(made, 1)
        found = {"sent_bytes": sent / made, "received_bytes": received / made}
        for node, wait in zip(self.train.nodes, waits.tolist(), strict=True):
            found[f"late_ms.{node}"] = 1e3 * wait / made
        return found

    def part(self) -> None:
        """Call no node lost from now on: this rank's thread may wait for one that takes no further batch."""
        for link in (self.train, self.passes):
            if link is not None:
                link.part()

    def leave(self) -> None:
        """Say that this node prepares no further batch; its thread has stopped."""
        if self.selectors and self.prepares:
            self.selectors[0].leave()


def routes_by_table(
    topology: Topology,
    placement: ShardPlacement,
    config: GearConfig,
    fields: Sequence[ResolvedField],
    schemas: Mapping[str, Schema],
) -> dict[str, ExchangePlan]:
    """Return who needs what of each sampled table that is spread over nodes."""
    return {
        name: routes_of(topology, placement.order, config, fields, schemas[name])
        for name in config.sampled_tables
        if name in placement.spread
    }


def arrivals_by_table(
    config: GearConfig,
    routes: Mapping[str, ExchangePlan],
    specs: Mapping[str, Sequence[StreamSpec]],
    datasets: Mapping[str, Dataset],
) -> dict[str, tuple[int, int]]:
    """Return rows and slots for what other nodes send, by table.

    Raises:
        ConfigError: Trajectories may have any length, and goals are drawn from all of their steps.
    """
    found = {}
    for name, route in routes.items():
        if route.index < 0:
            continue
        most, rows, slots = _most(config, route, name, datasets), 0, 0
        for spec in specs[name]:
            more = arrivals_of(route.most_wanted(spec.batch), spec.depth, most)
            rows, slots = rows + more[0], slots + more[1]
        found[name] = rows + 2 * (most + EDGE), slots
    return found


def _most(config: GearConfig, route: ExchangePlan, name: str, datasets: Mapping[str, Dataset]) -> int:
    n = 0 if config.n_step is None else config.n_step.n
    table = config.resolved_tables[name]
    longest = datasets[name].longest if name in datasets else table.max_length
    if longest is None:
        if any(need.goals for need in route.needs):
            rule = "must be given where goals are relabelled on several nodes"
            raise ConfigError(f"gear.tables.{name}.max_length", rule, None)
        longest = table.capacity_steps or 0
    return most_rows(route.needs, longest, n)


def connect(
    topology: Topology,
    exchange: ControlPlane,
    placement: ShardPlacement,
    config: GearConfig,
    routes: Mapping[str, ExchangePlan],
    streams: Mapping[str, Mapping[str, BatchStream]],
    datasets: Mapping[str, Dataset],
    goals: Goals,
    group: Any,
    watch: FailureDetector | None,
    device: torch.device,
) -> NodeLinks:
    """Let the streams of spread tables be cut by all nodes together. Collective.

    Args:
        topology: Where the ranks sit.
        exchange: Between all ranks.
        placement: Which node holds what.
        config: The config.
        routes: Who needs what, by table.
        streams: By table and name.
        datasets: As this node has them.
        goals: Draws the achieved goals of samples.
        group: Whose ranks the topology counts; None for all.
        watch: Over all ranks.
        device: Of this rank, whose transport takes rows where the config wants it.
    """
    links = NodeLinks(prepares=config.prefetch > 0)
    freights: dict[str, DeviceTransport | None] = {}
    every = [stream for of_table in streams.values() for stream in of_table.values()]
    together = topology.node in placement.order and any(stream.spec.together for stream in every)
    leads = topology.leads_node and together
    if leads:
        links.train = NodeChannel(topology, placement.order, "train", config.timeout_s, group)
        links.passes = NodeChannel(topology, placement.order, "passes", config.timeout_s, group)
        for purpose, made in (("train", links.train), ("passes", links.passes)):
            _open(made, watch)
            freights[purpose] = _freight(config, made, device)
    exchange.barrier()
    for stream in every:  # of replicated tables
        if together and stream.spec.together and stream.spec.num_shards == 1:
            stream.follows = not leads
            if links.train is not None:
                links.selectors.append(ReplicatedSelector(stream, links.train))
                stream.selector = links.selectors[-1]
    for name, route in routes.items():
        if route.index < 0:
            continue
        most = _most(config, route, name, datasets)
        row, slot = most + EDGE, 0
        for stream in streams[name].values():
            spec, wanted = stream.spec, route.most_wanted(stream.spec.batch)
            if isinstance(stream.masses, PriorityMasses):
                stream.masses.shard_of = partial(placement.shard_of, name)
            stream.follows = not leads
            link = links.train if spec.name == TRAIN else links.passes
            if link is not None:
                room = (row, wanted * most), (slot, wanted)
                carrier = RowExchange(stream.table, route.num_nodes, route.needs, config.n_step, *room)
                freight = freights["train" if spec.name == TRAIN else "passes"]
                selector = ShardedSelector(stream, link, route, carrier, goals, config.verify_every, freight)
                stream.selector = selector
                if spec.name == TRAIN:
                    links.selectors.append(selector)
            row, slot = row + spec.depth * wanted * most, slot + spec.depth * wanted
    _know_totals(exchange, topology, placement, streams)
    share_out(exchange, leads, every)
    return links


def _freight(config: GearConfig, link: NodeChannel, device: torch.device) -> DeviceTransport | None:
    if config.exchange == "host":
        return None
    freight = DeviceTransport(link, device)
    freight.open()
    return freight


def _know_totals(
    exchange: ControlPlane,
    topology: Topology,
    placement: ShardPlacement,
    streams: Mapping[str, Mapping[str, BatchStream]],
) -> None:
    """Tell every rank how many items the passes over splits have, all nodes together. Collective."""
    mine = {
        (name, stream.spec.name): stream.masses.total
        for name in placement.spread & set(streams)
        for stream in streams[name].values()
    }
    leads = topology.leads_node and topology.node in placement.order
    found = exchange.gather(mine if leads else None)
    for name, stream_name in mine:
        totals = [known[name, stream_name] for known in found if known is not None]
        streams[name][stream_name].num_items_of_all = sum(totals)


def watch_over(
    exchange: ControlPlane, topology: Topology, table: Table, timeout_s: float
) -> FailureDetector | None:
    """Begin to watch the ranks where there are several nodes. Collective."""
    if topology.num_nodes == 1:
        return None
    name = exchange.broadcast(secrets.token_hex(8))

    def prepare() -> FailureDetector:
        store = rendezvous(timeout_s) if topology.leads_node else None
        watch = FailureDetector(table.memory, table.views, topology, store, name, timeout_s)
        watch.prepare()
        return watch

    watch = exchange.agree("watching the ranks", prepare)
    watch.start()
    return watch


def _open(link: NodeChannel, watch: FailureDetector | None) -> None:
    link.open()
    if watch is not None:
        link.check, link.check_ended, link.note = watch.check, watch.check_ended, watch.note


def status_of(
    topology: Topology,
    table: Table,
    turns: Turns,
    config: GearConfig,
    watch: FailureDetector | None,
    group: Any,
) -> BatchBarrier:
    """Return the turns of the ranks. Collective over the leaders of nodes.

    Args:
        topology: Where the ranks sit.
        table: Whose store holds their words.
        turns: Where they wait for each other.
        config: The config.
        watch: Over all ranks; None for one node.
        group: Whose ranks the topology counts; None for all.
    """
    only_readers, timeout_s = turns != "schedule", config.timeout_s
    if watch is None:
        return BatchBarrier(table, topology, only_readers, timeout_s)
    order = topology.holders if only_readers else list(range(topology.num_nodes))
    link = None
    over_nodes = len(order) > 1 and topology.node in order
    if over_nodes and topology.leads_node:
        link = NodeChannel(topology, order, "turns", timeout_s, group)
        _open(link, watch)
    early = only_readers and config.prefetch > 0
    return BatchBarrier(table, topology, only_readers, timeout_s, link, over_nodes, early, watch)


def share_out(exchange: ControlPlane, leads: bool, streams: Sequence[BatchStream]) -> None:
    """Agree how far the writers of each node may go where nodes keep a rate together. Collective."""
    together = [stream for stream in streams if stream.joint is not None]
    for stream in together:
        meet(exchange, leads, stream, int(stream.position[Head.KEY]))
    if together:
        exchange.barrier()  # behind it ranks may write


def meet(exchange: ControlPlane, leads: bool, stream: BatchStream, key: int, fixed: bool = False) -> bool:
    """Let all nodes that hold a table look at its gate, beside their cuts. Collective over all ranks.

    Args:
        exchange: Between all ranks.
        leads: Whether this rank does for all of its node what is done to the node's shards.
        stream: The training stream, with a gate of all nodes.
        key: Of the global batch that is asked for.
        fixed: Whether another thread of this rank may be in a cut.
    Returns:
        Whether the batch was cut already, or could be cut now; the same on every rank.
    """
    joint, count = stream.joint, stream.count_of(key)
    assert joint is not None
    mine = None
    if leads:
        with stream.table.lock:
            mine = joint.index, stream.prepare(key), joint.say(count, fixed, exact=True)
    found = sorted((one for one in exchange.gather(mine) if one is not None), key=lambda one: one[0])
    said = np.stack([words for _, _, words in found])
    alone = leads and not joint.is_fixed(said)
    with stream.table.lock:
        is_open = joint.hear(said, count) if alone else joint.is_open(said, count)
    return is_open or any(was_cut for _, was_cut, _ in found)
