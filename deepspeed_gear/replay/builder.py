"""Parts of a replay, built in order: stores, failure detector, batch barrier, streams, assembler.

`ReplayParts.__init__` is the order; `release` ends the parts.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from deepspeed_gear.batching.hindsight import HindsightRelabelling
from deepspeed_gear.batching.prefetcher import Prefetcher
from deepspeed_gear.batching.transfer.cuda_streams import DeferredRelease
from deepspeed_gear.distributed.batch_barrier import BatchBarrier
from deepspeed_gear.distributed.control_plane import rendezvous
from deepspeed_gear.distributed.failure_detector import FailureDetector
from deepspeed_gear.distributed.node_channel import NodeChannel
from deepspeed_gear.errors import LostNodeError, PeerError, undo_on_error
from deepspeed_gear.plan.resolved_plan import Resolved
from deepspeed_gear.plan.table_resolution import ArrivalRoom
from deepspeed_gear.replay.batch_assembler import BatchAssembler
from deepspeed_gear.replay.node_stores import open_stores
from deepspeed_gear.replay.priority_updates import AsyncPriorityUpdates
from deepspeed_gear.row_exchange.device_transport import DeviceTransport
from deepspeed_gear.row_exchange.exchange_plan import ExchangePlan
from deepspeed_gear.row_exchange.resolution_exchange import (
    Goals,
    ResolutionExchange,
    ResolutionSender,
)
from deepspeed_gear.row_exchange.row_messages import RowExchange
from deepspeed_gear.row_exchange.trajectory_exchange import TrajectoryExchange
from deepspeed_gear.sampling.batch_sizes import TRAIN, Turns
from deepspeed_gear.sampling.batch_stream import BatchStream
from deepspeed_gear.sampling.rate_rounds import RateRounds
from deepspeed_gear.sampling.selection_rounds import SelectionRounds
from deepspeed_gear.sampling.selector import Selector
from deepspeed_gear.sampling.stream_state import StreamState
from deepspeed_gear.store.records import Peer
from deepspeed_gear.store.table import Table
from deepspeed_gear.timeouts import Context


@dataclass(frozen=True)
class SpreadTrajectories:
    """How packs get the trajectories of a table that several nodes hold."""

    plan: ExchangePlan
    room: ArrivalRoom  # for trajectories of a rollout batch that other nodes hold
    exchange: TrajectoryExchange | None  # sends their rows; None: another rank of this node does


class NodeLinks:
    """This rank's channels to other nodes, and the selectors of tables that several nodes hold.

    Empty with one node, and on ranks that do not communicate for their node.
    """

    def __init__(self, plan: Resolved, device: torch.device) -> None:
        self._plan = plan
        self._device = device
        # By whether for training: a pass over a split must not wait for a training selection.
        self._channels: dict[bool, NodeChannel] = {}
        self._transports: dict[bool, DeviceTransport] = {}
        self._training: list[Selector] = []  # selectors of the training streams
        self._taken: np.ndarray | float = 0.0  # sums at the last `take_metrics`
        self._means = dict[str, float]()  # that it has returned
        #: Of the tables of packed batches that several nodes hold, by name.
        self.trajectories: dict[str, SpreadTrajectories] = {}

    def selectors(
        self, states: Sequence[StreamState], goals: Goals, detector: FailureDetector | None
    ) -> dict[StreamState, Selector]:
        """Open the channels and return the selectors of streams that nodes select together.

        Collective. The selectors are on the leaders of nodes that hold such tables.

        Args:
            goals: Draws the achieved goals of samples.
        """
        plan = self._plan
        together = [state for state in states if state.spec.together]
        if plan.leads_shard and together:
            self._open_channels(detector)
        plan.control_plane.barrier()
        selectors: dict[StreamState, Selector] = {}
        # Streams of replicated tables come first, on every node.
        for state in sorted(states, key=lambda state: self._routes(state) is not None):
            routes = self._routes(state)
            if plan.config.pack is not None and routes is not None:
                self._spread(state, routes)
            if not self._channels or not state.spec.together:
                continue
            # Nodes select together from a replicated table for its priorities only: for training.
            trains = state.spec.name == TRAIN or routes is None
            channel = self._channels[trains]
            draws: ResolutionSender | ResolutionExchange | None = None
            if routes is not None and plan.config.pack is not None:
                draws = ResolutionSender(state, channel)
            elif routes is not None:
                rows = self._rows(state, routes, trains)
                draws = ResolutionExchange(state, routes, rows, goals, plan.config.verify_every)
            selectors[state] = Selector(state, SelectionRounds(state, channel), draws)
            if trains:
                self._training.append(selectors[state])
        return selectors

    def _open_channels(self, detector: FailureDetector | None) -> None:
        plan = self._plan
        order = plan.placement.order
        for trains, purpose in ((True, "train"), (False, "passes")):
            channel = NodeChannel(
                plan.topology, order, purpose, plan.config.timeout_s, plan.group, detector
            )
            self._channels[trains] = channel
            if plan.config.exchange != "host":
                self._transports[trains] = DeviceTransport(channel, self._device)

    def _routes(self, state: StreamState) -> ExchangePlan | None:
        return self._plan.tables[state.table.spec.name].exchange_plan

    def _spread(self, state: StreamState, routes: ExchangePlan) -> None:
        """Keep how packs get the trajectories of a stream's table from other nodes."""
        exchange = None
        if self._channels:
            exchange = TrajectoryExchange(self._rows(state, routes, trains=True))
        spread = SpreadTrajectories(routes, self._room(state), exchange)
        self.trajectories[state.table.spec.name] = spread

    def _room(self, state: StreamState) -> ArrivalRoom:
        return self._plan.tables[state.table.spec.name].rooms[state.spec.name]

    def _rows(self, state: StreamState, routes: ExchangePlan, trains: bool) -> RowExchange:
        room = self._room(state)
        n_step = self._plan.config.n_step
        rows = (room.first_row, room.num_rows)
        slots = (room.first_slot, room.num_slots)
        channel = self._channels[trains]
        transport = self._transports.get(trains)
        return RowExchange(channel, state.table, routes.needs, n_step, rows, slots, transport)

    def take_metrics(self) -> dict[str, float]:
        """Return means of the training selections since the last call, or of the period before.

        `late_ms.<node>` is the time that the first node to be ready waited for it. Empty on other
        ranks than those that communicate for their node.
        """
        if not self._training:
            return {}
        channel = self._channels[True]
        late = np.sum([selector.rounds.late_s for selector in self._training], axis=0)
        selections = sum(selector.rounds.num_selections for selector in self._training)
        now = np.array([*late, selections, channel.bytes_sent, channel.bytes_received], np.float64)
        *waits, made, sent, received = (now - self._taken).tolist()
        if made or not self._means:
            self._taken = now
            count = max(made, 1)
            self._means = {"sent_bytes": sent / count, "received_bytes": received / count}
            for node, wait in zip(channel.nodes, waits, strict=True):
                self._means[f"late_ms.{node}"] = 1e3 * wait / count
        return self._means

    def part(self) -> None:
        """Stop reporting lost nodes: this rank may wait for one that samples no further batch."""
        for channel in self._channels.values():
            channel.part()

    def leave(self) -> None:
        """Announce that this node selects no further batch until one is requested.

        Its prefetch thread has stopped.
        """
        if self._training and self._plan.config.prefetch > 0:
            self._training[0].rounds.leave()


class ReplayParts:
    """The stores that this rank is attached to, and the parts that read them, until `release`.

    Construction is collective: an error is raised on every rank, after all resources are released.

    Args:
        plan: The resolved plan of the replay.
        turns: When ranks wait for each other; None: never.
        engine_dtype: The dtype of fields with `"as": "engine"`.
        device: The device of the batches.
    """

    assembler: BatchAssembler  # the last part; absent where the building of an earlier one failed

    def __init__(
        self, plan: Resolved, turns: Turns | None, engine_dtype: torch.dtype, device: torch.device
    ) -> None:
        self.plan = plan
        attempt = plan.control_plane.attempt
        config = plan.config
        sampled = config.sampled_tables

        # This node's stores, and the states of their batch streams in shared memory.
        stores = open_stores(plan)
        self.tables = stores.tables
        self._states = [state for streams in stores.states.values() for state in streams.values()]

        # What `release` ends, empty so far.
        self.late_updates = AsyncPriorityUpdates(config.timeout_s)
        self.releases = DeferredRelease()  # of selections that the device still reads
        micro_batches_ahead = config.prefetch * plan.info.accumulation
        self.prefetcher = Prefetcher[Any](micro_batches_ahead)
        self.links = NodeLinks(plan, device)
        self.detector: FailureDetector | None = None  # over all nodes; None for one node
        self.barrier: BatchBarrier | None = None  # of ranks that train together
        with undo_on_error(self.release):
            # Losses of ranks: the words by which ranks wait for each other lie in the store of the
            # first sampled table.
            first = self.tables[sampled[0]]
            self.detector = _start_detector(plan, first)
            if turns is not None:
                self.barrier = _barrier(plan, first, turns, self.detector)
            #: Its check raises if a rank of any node is lost.
            self.context = self._context(self.detector)
            note_broken = None if self.detector is None else self.detector.note_broken
            plan.control_plane.watch(partial(_lost_rank, plan, first, self.detector), note_broken)

            # Batch streams, which select together with other nodes where tables are on several.
            relabelling = attempt(
                "the fields",
                lambda: HindsightRelabelling(
                    config.hindsight, config.seed, plan.ops, plan.fields, plan.needs.fields
                ),
            )
            selectors = self.links.selectors(self._states, relabelling.draw, self.detector)
            #: By table and name.
            self.streams = self._make_streams(selectors, self._count_items())
            self.all_streams = [
                stream for streams in self.streams.values() for stream in streams.values()
            ]
            #: The training stream of each sampled table.
            self.train = [self.streams[table][TRAIN] for table in sampled]

            # The gathering of their samples into batches, and the quotas of writers.
            assemble = partial(
                BatchAssembler, plan, self.train, relabelling, engine_dtype, device, self.releases
            )
            self.assembler = attempt("the fields", assemble)
            self.rates = RateRounds(plan.control_plane, plan.leads_shard)
            # Numbers of a kept store are leased once a rank asks: it may load before.
            keeps = config.shared_memory.keep
            self.rates.set_quotas([s for s in self.all_streams if not (keeps and s.table.ledger)])
        self.leave_inner_stage()

    def _count_items(self) -> dict[StreamState, int]:
        """Count the items of all nodes for streams of tables on several nodes. Collective."""
        plan = self.plan
        spread = [state for state in self._states if state.table.spec.name in plan.placement.spread]
        own = [state.masses.total for state in spread] if plan.leads_shard else None
        of_nodes = [totals for totals in plan.control_plane.all_gather(own) if totals is not None]
        return {state: sum(totals[at] for totals in of_nodes) for at, state in enumerate(spread)}

    def _make_streams(
        self, selectors: Mapping[StreamState, Selector], num_items: Mapping[StreamState, int]
    ) -> dict[str, dict[str, BatchStream]]:
        """Return the batch streams of all tables, by table and name; {} of one that is not sampled.

        A stream without a selector here selects from this node alone, or follows the node's leader.
        """
        # The error of a rank ends the training stream's waits on all ranks that train together.
        training = self.context if self.barrier is None else self._context(self.barrier)
        streams: dict[str, dict[str, BatchStream]] = {name: {} for name in self.tables}
        for state in self._states:
            spec = state.spec
            context = training if spec.name == TRAIN else self.context
            selector = selectors.get(state)
            follows = spec.together and self.plan.holds_shard and selector is None
            stream = BatchStream(state, selector, context.check, follows, num_items.get(state))
            streams[state.table.spec.name][spec.name] = stream
        return streams

    def _context(self, failures: FailureDetector | BatchBarrier | None) -> Context:
        """Return the context of this rank.

        Its check raises if a rank is lost, and releases selections that the device has read.
        """

        def check() -> None:
            self.releases.settle()
            if failures is not None:
                failures.check()

        return Context(self.plan.config.timeout_s, check)

    def explain(self, error: BaseException) -> None:
        """Send the error that ends this rank to the others, and add to it which of them is lost."""
        failures = self.barrier if self.detector is None else self.detector
        if failures is not None:
            failures.explain(error)

    def stop_prefetching(self) -> None:
        """Stop the prefetch thread; the next batch that it has not made starts it again."""
        for stream in self.train:
            stream.state.stop.set()  # it may wait for a rank that has stopped already
        self.prefetcher.stop()
        for stream in self.train:
            stream.state.stop.clear()
        self.releases.drain()  # a release after a seek would count for a later selection

    def leave_inner_stage(self) -> None:
        """Mark this rank as no reader of streams, if it is an inner stage."""
        if not self.plan.topology.place.reads:
            for stream in self.all_streams:
                stream.leave()

    def release(self) -> None:
        """End the parts that wait for other ranks, then the assembler, and detach from the stores.

        Lost nodes are no longer reported from here on: other ranks may have ended already.
        """
        self.links.part()
        if self.detector is not None:
            self.detector.part()
        try:
            if self.barrier is not None:
                self.barrier.end()
            self.late_updates.close()
            for state in self._states:
                state.stop.set()
            self.prefetcher.end()
            self.links.leave()
        finally:  # an interrupt may end these waits
            if self.detector is not None:
                self.detector.end()
        if hasattr(self, "assembler"):
            self.assembler.close()
        for table in self.tables.values():
            table.close()
        self.plan.control_plane.close()


def _start_detector(plan: Resolved, table: Table) -> FailureDetector | None:
    """Start the failure detector if there are several nodes. Collective."""
    topology = plan.topology
    timeout_s = plan.config.timeout_s
    if topology.num_nodes == 1:
        return None
    name = plan.control_plane.broadcast(secrets.token_hex(8))

    def prepare() -> FailureDetector:
        store = rendezvous(timeout_s) if topology.leads_node else None
        return FailureDetector(table.memory, table.views, topology, store, name, timeout_s)

    detector = plan.control_plane.attempt("watching the ranks", prepare)
    detector.start()
    return detector


def _lost_rank(plan: Resolved, table: Table, detector: FailureDetector | None) -> PeerError | None:
    """Return the error of a rank that takes part in no collective any more; None: there is none."""
    if detector is not None:
        try:
            detector.check()
        except LostNodeError as error:
            return error
        return None
    ranks = plan.topology.peers
    peers = table.peers
    dead = [peer for peer in range(len(ranks)) if not table.memory.is_alive(peer)]
    if not dead:
        return None
    # The rank that is marked as lost was the first.
    first = max(dead, key=lambda peer: int(peers[peer, Peer.LOST]))
    table.note_lost(first)
    process = f"process {int(peers[first, Peer.PID])} died, or closed its replay"
    return PeerError(f"rank {ranks[first]}", "must run while the others train", None, process)


def _barrier(
    plan: Resolved, table: Table, turns: Turns, detector: FailureDetector | None
) -> BatchBarrier:
    """Return the batch barrier of the ranks. Collective over the leaders of nodes."""
    topology = plan.topology
    config = plan.config
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
    early = only_readers and config.prefetch > 0
    return BatchBarrier(
        table, topology, only_readers, timeout_s, channel, over_nodes, early, detector
    )
