"""Builds a replay: stores, failure detector, batch barrier, channels, streams, assembler. Collective."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch

from deepspeed_gear.batching.hindsight import HindsightRelabelling
from deepspeed_gear.batching.prefetcher import Prefetcher
from deepspeed_gear.batching.transfer.cuda_streams import DeferredRelease
from deepspeed_gear.context import LOG, Context
from deepspeed_gear.distributed.batch_barrier import BatchBarrier
from deepspeed_gear.distributed.control_plane import rendezvous
from deepspeed_gear.distributed.failure_detector import FailureDetector
from deepspeed_gear.distributed.node_channel import NodeChannel
from deepspeed_gear.distributed.sharded_selection import agree_on_quotas
from deepspeed_gear.errors import LostNodeError, PeerError, StoreError, show_bytes, undo_on_error
from deepspeed_gear.plan.resolved_plan import Resolved
from deepspeed_gear.replay.batch_assembler import BatchAssembler
from deepspeed_gear.replay.node_exchange import NodeExchange
from deepspeed_gear.replay.priority_updates import AsyncPriorityUpdates
from deepspeed_gear.sampling.batch_info import TRAIN, Turns
from deepspeed_gear.sampling.batch_stream import BatchStream
from deepspeed_gear.sampling.stream_spec import StreamSpec
from deepspeed_gear.sampling.stream_state import StreamState, stream_regions
from deepspeed_gear.store.kept_ledger import KeptLedger
from deepspeed_gear.store.live_stores import new_run_name
from deepspeed_gear.store.memory_layout import Region, RunIdentity, read_header
from deepspeed_gear.store.memory_limits import read_file, tightest
from deepspeed_gear.store.records import Peer
from deepspeed_gear.store.shared_memory import is_held, is_kept, opened, remove_garbage
from deepspeed_gear.store.table import Table
from deepspeed_gear.store.table_spec import TableSpec, table_layout
from deepspeed_gear.store.writer_options import digest

NUM_ANSWERS = 64  # of can_sample() in the ring: the most that a rank may be ahead of the slowest


class ReplayParts:
    """The stores that this rank is attached to, and the parts that read them, until `release`. Collective. An
    error is raised on every rank, after all resources are released. `turns`: when ranks wait, None for never.
    """

    assembler: BatchAssembler  # the last part; absent where the building of one before it has failed

    def __init__(
        self, plan: Resolved, turns: Turns | None, engine_dtype: torch.dtype, device: torch.device
    ) -> None:
        self.plan, config, agree = plan, plan.config, plan.exchange.agree
        self.tables, states = _open_stores(plan)
        self._states = [state for of_table in states.values() for state in of_table.values()]
        self.late_updates = AsyncPriorityUpdates(config.timeout_s)
        self.releases = DeferredRelease()  # of selections that the device still reads
        self.prefetchers: list[Prefetcher[Any]] = []  # one, or none yet
        self.exchange = NodeExchange(plan, device)
        self.detector: FailureDetector | None = None  # over all nodes; None for one node
        self.barrier: BatchBarrier | None = None  # of ranks that train together
        #: Of each sampled table, by name.
        self.streams: dict[str, dict[str, BatchStream]] = {name: {} for name in states}
        self.all_streams: list[BatchStream] = []
        with undo_on_error(self.release):
            first = self.tables[config.sampled_tables[0]]
            self.detector = _start_detector(plan, first)
            if turns is not None:
                self.barrier = _barrier(plan, first, turns, self.detector)
            #: Its check raises if a rank of any node is lost.
            self.context = self._context(self.detector)
            plan.exchange.watch(partial(_lost_rank, plan, first, self.detector))
            goals = config.hindsight, config.seed, plan.ops, plan.fields, plan.needs.fields
            relabelling = agree("the fields", lambda: HindsightRelabelling(*goals))
            selectors = self.exchange.selectors(states, relabelling.draw, self.detector)
            spread_states = [s for s in self._states if s.table.spec.name in plan.placement.spread]
            own_totals = [state.masses.total for state in spread_states] if plan.leads_shard else None
            of_nodes = [totals for totals in plan.exchange.gather(own_totals) if totals is not None]
            num_items = {state: sum(node[at] for node in of_nodes) for at, state in enumerate(spread_states)}
            training = self.context if self.barrier is None else self._context(self.barrier)
            for state in self._states:
                spec, selector = state.spec, selectors.get(state)
                check = (training if spec.name == TRAIN else self.context).check
                follows = spec.together and plan.holds_shard and selector is None
                stream = BatchStream(state, selector, check, follows, num_items.get(state))
                self.streams[state.table.spec.name][spec.name] = stream
                self.all_streams.append(stream)
            #: The training stream of each sampled table.
            self.train = [self.streams[table][TRAIN] for table in config.sampled_tables]
            self.assembler = agree(
                "the fields",
                lambda: BatchAssembler(plan, self.train, relabelling, engine_dtype, device, self.releases),
            )
            # Numbers of a kept store are leased once a rank asks: it may load before.
            every, keeps = self.all_streams, config.shared_memory.keep
            streams = [one for one in every if not (keeps and one.table.ledger)]
            agree_on_quotas(plan.exchange, plan.leads_shard, streams)
        self.leave_inner_stage()

    def _context(self, failures: FailureDetector | BatchBarrier | None) -> Context:
        """Return the context of this rank; its check also releases selections that the device has read."""

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
        for prefetcher in self.prefetchers:
            for stream in self.train:
                stream.state.stop.set()  # it may wait for a rank that has stopped already
            prefetcher.stop()
            for stream in self.train:
                stream.state.stop.clear()
        self.releases.drain()  # a release after a seek would count for a later selection

    def leave_inner_stage(self) -> None:
        """Mark this rank as no reader of streams, if it is an inner stage."""
        if not self.plan.topology.place.reads:
            for stream in self.all_streams:
                stream.leave()

    def release(self) -> None:
        self.exchange.part()
        if self.detector is not None:
            self.detector.part()
        try:
            if self.barrier is not None:
                self.barrier.end()
            self.late_updates.close()
            for state in self._states:
                state.stop.set()
            for prefetcher in self.prefetchers:
                prefetcher.stop()
            self.prefetchers.clear()
            self.exchange.leave()
        finally:  # an interrupt may end these waits
            if self.detector is not None:
                self.detector.end()
        if hasattr(self, "assembler"):
            self.assembler.close()
        for table in self.tables.values():
            table.close()
        self.plan.exchange.close()


def _open_stores(plan: Resolved) -> tuple[dict[str, Table], dict[str, dict[str, StreamState]]]:
    """Create the node's stores on one rank and attach the others. Collective. Names are removed as soon as
    all are attached: no failure after that leaves a file; of a table with writers by a reaper, later; a store
    that outlives its job keeps its name.
    """
    config, topology, ops = plan.config, plan.topology, plan.ops
    memory, timeout_s, new = config.shared_memory, config.timeout_s, secrets.token_hex(16)
    named = plan.exchange.agree("naming the run", lambda: new_run_name(memory.run))
    of_ranks = plan.exchange.collect("the kept store", lambda: _kept(plan, named))
    kept, known = of_ranks[plan.exchange.rank], sorted({run.id for run in of_ranks if run is not None})
    if len(known) > 1:
        rule, remedy = "must be of one run on all nodes", "use `gear clean --kept` on each"
        raise StoreError(f"the kept stores of {memory.prefix}", rule, known, remedy)
    run_id, new, named = plan.exchange.broadcast(((known or [new])[0], new, named))
    if topology.leads_node:
        remove_garbage(memory.prefix)
    tables: dict[str, Table] = {}
    states: dict[str, dict[str, StreamState]] = {}

    def open_store(spec: TableSpec, of_table: list[StreamSpec], writing: dict[str, Any]) -> None:
        regions = [region for stream in of_table for region in stream_regions(stream, spec)]
        if spec.name == config.sampled_tables[0]:
            regions += [
                *BatchBarrier.regions(topology.num_peers),
                Region("questions/asked", "int64", (topology.num_peers,)),
                Region("questions/answers", "int64", (NUM_ANSWERS, 2)),
                *(FailureDetector.regions(topology.num_peers) if topology.num_nodes > 1 else []),
            ]
        meaning = {
            "seed": config.seed,
            "fingerprint": getattr(spec.dataset, "fingerprint", ""),
            "timeout_s": timeout_s,
            "backend": ops.name,
            "library": ops.native.__file__,
            **{stream.name: stream.describe() for stream in of_table if stream.name == TRAIN},
            "writing": writing,
        }
        keeps = memory.keep and spec.prompts is not None
        file = f"{memory.prefix}-{run_id if keeps else new}-{spec.name}"
        run = RunIdentity(run_id, named, digest(writing["options"]) if writing else "")

        def keep(table: Table) -> list[StreamState]:
            tables[spec.name] = table
            made = [StreamState(stream, table) for stream in of_table]
            states[spec.name] = {state.spec.name: state for state in made}
            return made

        def create() -> None:
            if topology.leads_node and not (keeps and kept):
                table = Table.create(spec, regions, meaning, run, ops, timeout_s, memory.huge_pages)
                for state in keep(table):
                    state.initialise()
                table.memory.link(file, reaped=spec.num_writers > 0 and not keeps, kept=keeps)
            elif kept and topology.leads_node:
                layout = table_layout(spec, regions, meaning)
                tables[spec.name] = Table.attach(spec, file, layout, run_id, 0, ops, timeout_s)

        def begin() -> None:
            if topology.leads_node and keeps and known:
                table = tables[spec.name]
                with table.lock:
                    assert isinstance(table.ledger, KeptLedger)
                    table.ledger.begin([region.name for region in regions])
                    table.peers[1 : topology.num_peers] = 0  # they attach after this
                    for state in states.get(spec.name, {}).values() or keep(table):
                        state.initialise()

        def attach() -> None:
            if not topology.leads_node:
                layout = table_layout(spec, regions, meaning)
                keep(Table.attach(spec, file, layout, run_id, topology.peer, ops, timeout_s))

        plan.exchange.agree(f"creating the store of table {spec.name}", create)
        if keeps:  # no node's store is refused
            plan.exchange.agree(f"retiring the groups of table {spec.name}", begin)
        plan.exchange.agree(f"attaching to the store of table {spec.name}", attach)
        if topology.leads_node and not spec.num_writers and not keeps:
            tables[spec.name].memory.unlink()

    try:
        for resolved in plan.tables.values():
            assert resolved.store is not None
            open_store(resolved.store, list(resolved.streams.values()), resolved.writing)
        _advise(tables.values())
    except BaseException:
        for table in tables.values():
            table.close()
        raise
    return tables, states


def _kept(plan: Resolved, name: str) -> RunIdentity | None:
    """Return the run of this name whose job has left its store; None: there is none."""
    memory, topology = plan.config.shared_memory, plan.topology
    if not memory.keep or not topology.leads_node:
        return None
    for path, fd in opened(memory.prefix):
        run = read_header(fd, str(path))[1] if is_kept(fd) else None
        if run is not None and run.name == name:
            if is_held(fd, 0, topology.num_peers):
                rule, remedy = "must have no living rank", "give each job a shared_memory.run of its own"
                raise StoreError(str(path), rule, None, remedy)
            return run
    return None


def _advise(tables: Iterable[Table]) -> None:
    """Read mapped data at random if they do not fit into the memory that is left to this process."""
    mapped = [table for table in tables if table.spec.dataset is not None and not table.spec.in_memory]
    num_bytes, limit = sum(a.nbytes for t in mapped for a in t.columns.values()), tightest(read_file)
    if limit is None or num_bytes <= limit.available:
        return
    for table in mapped:
        assert table.spec.dataset is not None
        table.spec.dataset.read_at_random()
    left = f"{show_bytes(limit.available)} are left ({limit.name})"
    LOG.info("gear: %s of data are read page by page: %s", show_bytes(num_bytes), left)


def _start_detector(plan: Resolved, table: Table) -> FailureDetector | None:
    """Start the failure detector if there are several nodes. Collective."""
    topology, timeout_s = plan.topology, plan.config.timeout_s
    if topology.num_nodes == 1:
        return None
    name = plan.exchange.broadcast(secrets.token_hex(8))

    def prepare() -> FailureDetector:
        store = rendezvous(timeout_s) if topology.leads_node else None
        return FailureDetector(table.memory, table.views, topology, store, name, timeout_s)

    detector = plan.exchange.agree("watching the ranks", prepare)
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
    ranks, peers = plan.topology.peers, table.peers
    dead = [peer for peer in range(len(ranks)) if not table.memory.is_alive(peer)]
    if not dead:
        return None
    first = max(dead, key=lambda peer: int(peers[peer, Peer.LOST]))  # others may have ended because of it
    peers[first, Peer.LOST] = 1
    process = f"process {int(peers[first, Peer.PID])} died, or closed its replay"
    return PeerError(f"rank {ranks[first]}", "must live as long as the others train", None, process)


def _barrier(plan: Resolved, table: Table, turns: Turns, detector: FailureDetector | None) -> BatchBarrier:
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
    early = only_readers and config.prefetch > 0
    return BatchBarrier(table, topology, only_readers, timeout_s, channel, over_nodes, early, detector)
