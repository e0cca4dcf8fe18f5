"""Builder of a replay: stores, failure detector, batch barrier, links, streams, assembler."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from deepspeed_gear.batching.hindsight import HindsightRelabelling
from deepspeed_gear.batching.prefetcher import Prefetcher
from deepspeed_gear.batching.transfer.cuda_streams import DeferredRelease
from deepspeed_gear.context import Context
from deepspeed_gear.distributed.batch_barrier import BatchBarrier
from deepspeed_gear.distributed.control_plane import rendezvous
from deepspeed_gear.distributed.failure_detector import FailureDetector
from deepspeed_gear.distributed.node_channel import NodeChannel
from deepspeed_gear.errors import LostNodeError, PeerError, undo_on_error
from deepspeed_gear.plan.resolved_plan import Resolved
from deepspeed_gear.replay.batch_assembler import BatchAssembler
from deepspeed_gear.replay.node_links import NodeLinks
from deepspeed_gear.replay.node_stores import open_stores
from deepspeed_gear.replay.priority_updates import AsyncPriorityUpdates
from deepspeed_gear.sampling.batch_info import TRAIN, Turns
from deepspeed_gear.sampling.batch_stream import BatchStream
from deepspeed_gear.sampling.rate_rounds import RateRounds
from deepspeed_gear.sampling.selector import Selector
from deepspeed_gear.sampling.stream_state import StreamState
from deepspeed_gear.store.records import Peer
from deepspeed_gear.store.table import Table


class ReplayParts:
    """The stores that this rank is attached to, and the parts that read them, until `release`.

    Construction is collective: an error is raised on every rank, after all resources are released.

    Args:
        plan: The resolved plan of the replay.
        turns: When ranks wait for each other; None: never.
        engine_dtype: The dtype of fields with `"as": "engine"`.
        device: The device of the batches.
    """

    assembler: (
        BatchAssembler  # the last part; absent where the building of one before it has failed
    )

    def __init__(
        self, plan: Resolved, turns: Turns | None, engine_dtype: torch.dtype, device: torch.device
    ) -> None:
        self.plan = plan
        stores = open_stores(plan)
        self.tables = stores.tables
        self._states = [state for of_table in stores.states.values() for state in of_table.values()]
        self.late_updates = AsyncPriorityUpdates(plan.config.timeout_s)
        self.releases = DeferredRelease()  # of selections that the device still reads
        self.prefetcher = Prefetcher[Any](
            plan.config.prefetch * plan.info.accumulation
        )  # of micro batches
        self.links = NodeLinks(plan, device)
        self.rates = RateRounds(plan.control_plane, plan.leads_shard)
        self.detector: FailureDetector | None = None  # over all nodes; None for one node
        self.barrier: BatchBarrier | None = None  # of ranks that train together
        #: Of each sampled table, by name.
        self.streams: dict[str, dict[str, BatchStream]] = {name: {} for name in stores.states}
        self.all_streams: list[BatchStream] = []
        with undo_on_error(self.release):
            # The words by which ranks wait for each other lie in the store of the first sampled
            # table.
            first = self.tables[plan.config.sampled_tables[0]]
            self.detector = _start_detector(plan, first)
            if turns is not None:
                self.barrier = _barrier(plan, first, turns, self.detector)
            #: Its check raises if a rank of any node is lost.
            self.context = self._context(self.detector)
            note_broken = None if self.detector is None else self.detector.note_broken
            plan.control_plane.watch(partial(_lost_rank, plan, first, self.detector), note_broken)
            relabelling = plan.control_plane.attempt("the fields", self._relabelling)
            selectors = self.links.selectors(stores.states, relabelling.draw, self.detector)
            num_items = self._count_items()
            self._make_streams(selectors, num_items)
            #: The training stream of each sampled table.
            self.train = [self.streams[table][TRAIN] for table in plan.config.sampled_tables]
            assemble = partial(
                BatchAssembler, plan, self.train, relabelling, engine_dtype, device, self.releases
            )
            self.assembler = plan.control_plane.attempt("the fields", assemble)
            self._set_quotas()
        self.leave_inner_stage()

    def _relabelling(self) -> HindsightRelabelling:
        plan = self.plan
        config = self.plan.config
        return HindsightRelabelling(
            config.hindsight, config.seed, plan.ops, plan.fields, plan.needs.fields
        )

    def _count_items(self) -> dict[StreamState, int]:
        """Count the items of all nodes for streams of tables on several nodes. Collective."""
        plan = self.plan
        spread = [state for state in self._states if state.table.spec.name in plan.placement.spread]
        own = [state.masses.total for state in spread] if plan.leads_shard else None
        of_nodes = [totals for totals in plan.control_plane.all_gather(own) if totals is not None]
        return {state: sum(totals[at] for totals in of_nodes) for at, state in enumerate(spread)}

    def _make_streams(
        self,
        selectors: Mapping[StreamState, Selector],
        num_items: Mapping[StreamState, int],
    ) -> None:
        """Make the batch streams of all tables.

        A stream without a selector here selects from this node alone, or follows the node's leader.
        """
        # The error of a rank ends the training stream's waits on all ranks that train together.
        training = self.context if self.barrier is None else self._context(self.barrier)
        for state in self._states:
            spec = state.spec
            context = training if spec.name == TRAIN else self.context
            selector = selectors.get(state)
            follows = spec.together and self.plan.holds_shard and selector is None
            stream = BatchStream(state, selector, context.check, follows, num_items.get(state))
            self.streams[state.table.spec.name][spec.name] = stream
            self.all_streams.append(stream)

    def _set_quotas(self) -> None:
        """Set the quotas of each node's writers. Collective.

        Numbers of a kept store are leased once a rank asks: it may load before.
        """
        plan = self.plan
        keeps = plan.config.shared_memory.keep
        streams = [stream for stream in self.all_streams if not (keeps and stream.table.ledger)]
        self.rates.set_quotas(streams)

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
    first = max(
        dead, key=lambda peer: int(peers[peer, Peer.LOST])
    )  # others may have ended because of it
    peers[first, Peer.LOST] = 1
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
