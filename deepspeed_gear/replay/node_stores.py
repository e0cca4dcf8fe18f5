"""The stores of a node: its leader makes one per table, and the other ranks attach to them."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from deepspeed_gear.distributed.batch_barrier import BatchBarrier
from deepspeed_gear.distributed.failure_detector import FailureDetector
from deepspeed_gear.errors import StoreError, show_bytes, undo_on_error
from deepspeed_gear.log import LOG
from deepspeed_gear.plan.resolved_plan import Resolved, ResolvedTable
from deepspeed_gear.sampling.batch_sizes import TRAIN
from deepspeed_gear.sampling.stream_spec import StreamSpec
from deepspeed_gear.sampling.stream_state import StreamState, stream_regions
from deepspeed_gear.store.cgroup_limits import read_file, tightest
from deepspeed_gear.store.kept_ledger import KeptLedger
from deepspeed_gear.store.memory_layout import Region, RunIdentity, read_header
from deepspeed_gear.store.records import PROGRESS, RankProgress
from deepspeed_gear.store.shared_memory import (
    clean_command,
    is_held,
    is_kept,
    opened,
    remove_garbage,
)
from deepspeed_gear.store.table import Table
from deepspeed_gear.store.table_spec import TableSpec, table_layout
from deepspeed_gear.store.writer_options import digest
from deepspeed_gear.writer.store_search import new_run_name

# Bytes that a rank requests from the disk before it copies them: 1 of 8 that are left.
_AHEAD_SHARE = 8
_LEAST_AHEAD_BYTES = 1 << 20
_MOST_AHEAD_BYTES = 256 << 20
NUM_ANSWERS = 64  # of can_sample() in the ring: the most that a rank may be ahead of the slowest


@dataclass(frozen=True)
class RunStart:
    """How this job begins its run; the same on all ranks, but for `has_kept`."""

    name: str  # of the run
    run_id: str  # that of the kept stores, or `job_id`
    job_id: str  # of this job alone: in the file names of stores that end with it
    continues: bool  # whether a node has a store that an earlier job of the run has kept
    has_kept: bool  # whether this rank leads a node that has one


@dataclass(frozen=True)
class StoreFile:
    """What a store of this node is made from, the same on all of its ranks."""

    spec: TableSpec
    streams: Mapping[str, StreamSpec]
    regions: list[Region]  # besides the table's own: of its streams, and of the ranks together
    meaning: dict[str, Any]  # equal in all processes that attach
    name: str
    run: RunIdentity
    keeps: bool  # whether it stays for the next job of its run


def open_stores(plan: Resolved) -> NodeStores:
    """Create the node's stores on one rank and attach the others. Collective.

    Names are removed as soon as all ranks are attached, so no failure after that leaves a file. A
    reaper removes that of a table with writers, later; a store that outlives its job keeps its
    name.
    """
    start = _decide_start(plan)
    if plan.topology.leads_node:
        remove_garbage(plan.config.shared_memory.prefix)
    stores = NodeStores(plan, start)
    with undo_on_error(stores.close):
        for table in plan.tables.values():
            stores.open(table)
        _advise(plan, stores.tables)
    return stores


class NodeStores:
    """The stores that this rank is attached to, and the states of their batch streams."""

    def __init__(self, plan: Resolved, start: RunStart) -> None:
        self._plan = plan
        self._start = start
        self.tables: dict[str, Table] = {}
        self.states: dict[str, dict[str, StreamState]] = {}  # by table and stream

    def open(self, table: ResolvedTable) -> None:
        """Open the store of a table: the node's leader creates it, others attach. Collective."""
        file = self._file_of(table)
        name = file.spec.name
        attempt = self._plan.control_plane.attempt
        attempt(f"creating the store of table {name}", partial(self._create, file))
        if file.keeps:  # after all nodes have theirs: nothing is retired for a job that is refused
            attempt(f"retiring the groups of table {name}", partial(self._begin_job, file))
        attempt(f"attaching to the store of table {name}", partial(self._attach, file))
        if self._plan.topology.leads_node and not file.spec.num_writers and not file.keeps:
            self.tables[name].memory.unlink()

    def close(self) -> None:
        for table in self.tables.values():
            table.close()

    def _file_of(self, table: ResolvedTable) -> StoreFile:
        """Return what the store of a table is made from."""
        config = self._plan.config
        ops = self._plan.ops
        start = self._start
        spec = table.store
        assert spec is not None
        regions = [
            region for stream in table.streams.values() for region in stream_regions(stream, spec)
        ]
        if spec.name == config.sampled_tables[0]:
            regions += self._regions_of_ranks()
        meaning = {
            "seed": config.seed,
            "fingerprint": getattr(spec.dataset, "fingerprint", ""),
            "timeout_s": config.timeout_s,
            "backend": ops.name,
            "library": ops.native.__file__,
            **{name: stream.describe() for name, stream in table.streams.items() if name == TRAIN},
            "writing": table.writing,
        }
        keeps = config.shared_memory.keep and spec.prompts is not None
        owner = start.run_id if keeps else start.job_id
        written = digest(table.writing["options"]) if table.writing else ""
        return StoreFile(
            spec=spec,
            streams=table.streams,
            regions=regions,
            meaning=meaning,
            name=f"{config.shared_memory.prefix}-{owner}-{spec.name}",
            run=RunIdentity(start.run_id, start.name, written),
            keeps=keeps,
        )

    def _regions_of_ranks(self) -> list[Region]:
        """Return the first sampled table's regions by which ranks wait for each other."""
        topology = self._plan.topology
        regions = [
            *BatchBarrier.regions(topology.num_peers),
            Region(PROGRESS, "float64", (topology.num_peers, RankProgress.NUM_WORDS)),
            Region("questions/asked", "int64", (topology.num_peers,)),
            Region("questions/answers", "int64", (NUM_ANSWERS, 2)),
        ]
        if topology.num_nodes > 1:
            regions += FailureDetector.regions(topology.num_peers)
        return regions

    def _create(self, file: StoreFile) -> None:
        """Create the store, or attach to a kept one of an earlier job; on the node's leader."""
        if not self._plan.topology.leads_node:
            return
        if file.keeps and self._start.has_kept:
            # Its streams begin with the job, in `_begin_job`.
            self.tables[file.spec.name] = self._attached(file, peer=0)
            return
        config = self._plan.config
        table = Table.create(
            file.spec,
            file.regions,
            file.meaning,
            file.run,
            self._plan.ops,
            config.timeout_s,
            config.shared_memory.huge_pages,
        )
        for state in self._add(file, table):
            state.initialise()
        # Only now has the file a name: no process attaches to a store that is not initialised.
        is_reaped = file.spec.num_writers > 0 and not file.keeps
        table.memory.link(file.name, reaped=is_reaped, kept=file.keeps)

    def _begin_job(self, file: StoreFile) -> None:
        """Retire what a run's earlier job has drawn, and restart its streams; on the leader."""
        if not self._plan.topology.leads_node or not self._start.continues:
            return
        table = self.tables[file.spec.name]
        with table.lock:
            assert isinstance(table.ledger, KeptLedger)
            table.ledger.begin([region.name for region in file.regions])
            # The other ranks attach after this; their entries are of the earlier job.
            table.peers[1 : self._plan.topology.num_peers] = 0
            made = self.states.get(file.spec.name)
            for state in self._add(file, table) if made is None else made.values():
                state.initialise()

    def _attach(self, file: StoreFile) -> None:
        """Attach to the store that the node's leader has made; on its other ranks."""
        topology = self._plan.topology
        if not topology.leads_node:
            self._add(file, self._attached(file, topology.peer))

    def _attached(self, file: StoreFile, peer: int) -> Table:
        layout = table_layout(file.spec, file.regions, file.meaning)
        timeout_s = self._plan.config.timeout_s
        return Table.attach(
            file.spec, file.name, layout, file.run.id, peer, self._plan.ops, timeout_s
        )

    def _add(self, file: StoreFile, table: Table) -> Iterable[StreamState]:
        """Keep a table until `close`, and return the new states of its streams."""
        name = file.spec.name
        self.tables[name] = table
        self.states[name] = {
            stream: StreamState(spec, table) for stream, spec in file.streams.items()
        }
        return self.states[name].values()


def _decide_start(plan: Resolved) -> RunStart:
    """Decide for all ranks how this job begins its run: with kept stores or new ones."""
    control_plane = plan.control_plane
    memory = plan.config.shared_memory
    name = control_plane.attempt("naming the run", lambda: new_run_name(memory.run))
    kept = control_plane.all_results("the kept store", lambda: _kept_run(plan, name))
    known = sorted({run.id for run in kept if run is not None})
    if len(known) > 1:
        rule = "must belong to one run on all nodes"
        remedy = f"use {clean_command(memory.prefix)} on each, or once with --hostfile"
        raise StoreError(f"the kept stores of {memory.prefix}", rule, known, remedy)
    job_id = secrets.token_hex(16)
    run_id = known[0] if known else job_id
    run_id, job_id, name = control_plane.broadcast((run_id, job_id, name))
    return RunStart(
        name, run_id, job_id, continues=bool(known), has_kept=kept[control_plane.rank] is not None
    )


def _kept_run(plan: Resolved, name: str) -> RunIdentity | None:
    """Return the run of this name whose job has left its store; None: there is none."""
    memory = plan.config.shared_memory
    topology = plan.topology
    if not memory.keep or not topology.leads_node:
        return None
    for path, fd in opened(memory.prefix):
        run = read_header(fd, str(path))[1] if is_kept(fd) else None
        if run is not None and run.name == name:
            if is_held(fd, 0, topology.num_peers):
                rule = "must not be in use by a running rank"
                remedy = "give each job a shared_memory.run of its own"
                raise StoreError(str(path), rule, None, remedy)
            return run
    return None


def _advise(plan: Resolved, tables: Mapping[str, Table]) -> None:
    """Have mapped data read page by page and ahead where they exceed this process's memory."""
    mapped = {
        name: table
        for name, table in tables.items()
        if table.spec.dataset is not None and not table.spec.in_memory
    }
    num_bytes = sum(a.nbytes for t in mapped.values() for a in t.columns.values())
    limit = tightest(read_file)
    is_larger = limit is not None and num_bytes > limit.available
    most_bytes = _MOST_AHEAD_BYTES
    if limit is not None:
        share = limit.available // (_AHEAD_SHARE * plan.topology.num_peers)
        most_bytes = min(most_bytes, max(_LEAST_AHEAD_BYTES, share))
    for name, table in mapped.items():
        assert table.spec.dataset is not None
        if is_larger:
            table.spec.dataset.read_at_random()
        source = plan.config.resolved_tables[name].data
        wanted = None if source is None else source.read_ahead
        if is_larger if wanted is None else wanted:
            table.read_ahead(most_bytes, plan.info.data_world)
    if limit is not None and is_larger:
        left = f"{show_bytes(limit.available)} are left ({limit.name})"
        LOG.info("gear: %s of data are read page by page: %s", show_bytes(num_bytes), left)
