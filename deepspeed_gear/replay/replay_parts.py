"""Parts of a replay, built in order: stores, failure detector, batch barrier, streams, assembler.

`ReplayParts.__init__` is the order; `release` ends the parts.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from functools import partial
from typing import Any

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
from deepspeed_gear.replay.async_priority_updates import AsyncPriorityUpdates
from deepspeed_gear.replay.batch_assembler import BatchAssembler
from deepspeed_gear.replay.node_links import NodeLinks
from deepspeed_gear.replay.node_stores import open_stores
from deepspeed_gear.sampling.batch_sizes import TRAIN, Turns
from deepspeed_gear.sampling.batch_stream import BatchStream
from deepspeed_gear.sampling.rate_rounds import RateRounds
from deepspeed_gear.sampling.selector import Selector
from deepspeed_gear.sampling.stream_state import StreamState
from deepspeed_gear.store.records import Peer
from deepspeed_gear.store.table import Table
from deepspeed_gear.timeouts import Context


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
        table,
        topology,
        only_readers,
        timeout_s,
        channel=channel,
        over_nodes=over_nodes,
        early=early,
        detector=detector,
    )
