"""Replay: add, sample, read, state."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from deepspeed_gear.collection.batch import Batch
from deepspeed_gear.collection.prefetch import Prefetcher
from deepspeed_gear.config import GearConfig, refuse_batch_sizes
from deepspeed_gear.errors import ConfigError, StoreError
from deepspeed_gear.ops import load_backend
from deepspeed_gear.parallel.exchange import Exchange
from deepspeed_gear.parallel.topology import Topology
from deepspeed_gear.replay import content, feedback, position, setup, snapshot
from deepspeed_gear.replay.maker import BatchMaker, Transform
from deepspeed_gear.replay.metrics import Metrics
from deepspeed_gear.replay.samplers import stream_specs
from deepspeed_gear.replay.sizes import TRAIN, BatchInfo
from deepspeed_gear.schema import Schema
from deepspeed_gear.selection.cut import EPOCH, EPOCH_SIZE, PASS_SHIFT
from deepspeed_gear.selection.priorities import PriorityMasses
from deepspeed_gear.selection.stream import Stream
from deepspeed_gear.store.statistics import statistics_of
from deepspeed_gear.store.table import Table

Ids = Sequence[int] | torch.Tensor


class Replay:
    """The replay system of a config, on the ranks of a process group.

    Construction, `iterator` of a split, `state_dict`, `load_state_dict` and `close` are collective. One
    thread per process uses a Replay; other processes of the node may add and sample at the same time.

    Args:
        config: The `gear` section: a mapping, a GearConfig, or the path of a JSON file (a whole ds_config
            or the section alone).
        process_group: Ranks that sample different parts of one global batch; None for all.
        schemas: Schemas of the tables that have a capacity and no schema in the config.
        info: Batch sizes where an engine decides them.
        data_rank: Index of this rank's replica; None for the rank.
        engine_dtype: What `"as": "engine"` means.
        device: Where batches go.
    Raises:
        ConfigError, DataError, StoreError, BuildError: On every rank, before anything is left behind.
    """

    def __init__(
        self,
        config: Mapping[str, Any] | GearConfig | str | Path,
        process_group: Any = None,
        schemas: Mapping[str, Schema] | None = None,
        *,
        info: BatchInfo | None = None,
        data_rank: int | None = None,
        engine_dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self._exchange = Exchange(process_group)
        exchange = self._exchange
        self._closed = False
        self.config = setup.read_config(
            exchange, exchange.agree("reading the config", lambda: setup.section_of(config))
        )
        ops = exchange.agree("loading the ops", lambda: load_backend(self.config.backend))
        data_world = exchange.world_size if info is None else info.data_world
        rank = exchange.rank if data_rank is None else data_rank
        self.topology = Topology.discover(exchange, rank, data_world)
        self.batch_info = info or exchange.agree(
            "the batch sizes", lambda: setup.batch_info(self.config, data_world)
        )
        if info is not None:
            exchange.agree("the batch sizes", lambda: refuse_batch_sizes(self.config))
        setup.compare_placement(exchange, self.config)
        self.datasets = setup.open_data(exchange, self.config)
        self.schemas = exchange.agree(
            "the schemas", lambda: setup.schemas_of(self.config, self.datasets, schemas)
        )
        self.fields = exchange.agree(
            "the fields", lambda: setup.fields_of(self.config, self.schemas, self.datasets)
        )
        self.device = torch.device(device)
        self._split = setup.split_of_sampled(self.config, self.datasets)
        self._attach(ops)
        try:
            self._maker = exchange.agree("the fields", lambda: self._make_maker(engine_dtype))
        except BaseException:
            _release([], self.streams, self.tables, exchange)
            raise
        self.metrics = Metrics()
        self._passes: dict[str, int] = {}
        self._prefetcher: Prefetcher[tuple[Batch, np.ndarray]] | None = None
        self._used = 0  # micro batches of the training stream that the user has had
        self._head: np.ndarray | None = None  # of the last global batch that was used; None: see _position
        self._position = position.start()
        self._start = 0  # global batch at which the numbering of micro batches begins
        self._finalizer = weakref.finalize(
            self, _release, self._prefetch_cell, self.streams, self.tables, exchange
        )

    def _attach(self, ops: Any) -> None:
        config, peers = self.config, self.topology.num_peers
        specs = setup.table_specs(config, self.schemas, self.datasets, self.fields, peers)
        dataset = self.datasets.get(config.sampled_table)
        streams = self._exchange.agree(
            "the sampler",
            lambda: stream_specs(config, self.fields, self._split, self.batch_info, dataset),
        )
        self.tables, self.streams = setup.attach_tables(
            self._exchange, self.topology, config, ops, specs, streams
        )
        self._prefetch_cell: list[Prefetcher[tuple[Batch, np.ndarray]]] = []

    def _make_maker(self, engine_dtype: torch.dtype) -> BatchMaker:
        name = self.config.sampled_table
        dataset, statistics = self.datasets.get(name), {}
        if dataset is not None and any(field.normalize for field in self.fields):
            same = dict(dataset.split) == self._split
            statistics = dataset.statistics if same else statistics_of(dataset, self._split)
        table, info = self.tables[name], self.batch_info
        return BatchMaker(self.config, self.fields, table, statistics, info, engine_dtype, self.device)

    @property
    def transform(self) -> Transform | None:
        """A program's own last step: (batch, key per sample [B] int64) -> batch; set it before sampling.

        The keys are random words that depend on seed, stream and sample number only, so what is derived from
        them is the same for any number of ranks.
        """
        return self._maker.transform

    @transform.setter
    def transform(self, transform: Transform | None) -> None:
        self._maker.transform = transform

    # ---- sampling --------------------------------------------------------------------------------

    def sample(self) -> Batch:
        """Return this rank's next micro batch of the training stream.

        Returns:
            A Batch of `batch_info.micro` samples, on the Replay's device. Its tensors are reused after
            max(2, accumulation) further calls; `clone` keeps them.
        Raises:
            StoreError: No item is admitted by the sampler, or the Replay is closed.
            PeerError: Another rank of the node lags too far behind.
        """
        self._check_open()
        begin = time.perf_counter()
        step, micro = divmod(self._used, self.batch_info.accumulation)
        if micro == 0:
            self.streams[TRAIN].masses.ask(self._start + step)
        if self.config.prefetch:
            if self._prefetcher is None:
                self._start_prefetch()
            assert self._prefetcher is not None
            try:
                batch, head = self._prefetcher.get()
            except Exception:
                self._stop_prefetch()  # its thread has ended; the next call begins again with this batch
                raise
        else:
            batch, head = self._produce(self._used)
        self._used += 1
        if self._used % self.batch_info.accumulation == 0:
            self._head = head
        self.metrics.waited(time.perf_counter() - begin, int(head[EPOCH]))
        return batch

    def __iter__(self) -> Iterator[Batch]:
        return self.iterator()

    def iterator(self, stream: str = TRAIN) -> Iterator[Batch]:
        """Return an iterator over batches: endless for training, one pass over every item for a split.

        All ranks iterate over a split together and get equally many batches; in the last ones `valid` is
        False, and `weight` 0, for samples that only fill up the batch.

        Raises:
            ConfigError: There is no such stream.
        """
        if stream == TRAIN:
            return self._endless()
        if stream not in self.streams:
            raise ConfigError(
                "stream", f"must be one of {', '.join(self.streams)}", stream, "give gear.data.split"
            )
        return self._pass(stream)

    def _endless(self) -> Iterator[Batch]:
        while True:
            yield self.sample()

    def _pass(self, name: str) -> Iterator[Batch]:
        stream = self.streams[name]
        number = self._passes.get(name, 0)
        self._passes[name] = number + 1
        index, num_batches = 0, 1
        while index < num_batches:
            self._check_open()
            cut = stream.take(number << PASS_SHIFT | index)
            size = int(cut.head[EPOCH_SIZE])
            num_batches = -(-size // stream.spec.batch)
            yield self._maker.make(stream, cut, self.topology.data_rank, self.topology.data_world, size)
            index += 1

    def _produce(self, index: int) -> tuple[Batch, np.ndarray]:
        """Make this rank's micro batch number `index` since the start or the last resume."""
        begin = time.perf_counter()
        info, stream = self.batch_info, self.streams[TRAIN]
        step, micro = divmod(index, info.accumulation)
        cut = stream.take(self._start + step)
        head = cut.head.copy()
        part = micro * info.data_world + self.topology.data_rank
        batch = self._maker.make(stream, cut, part, info.num_micro, None, micro == info.accumulation - 1)
        self.metrics.produced(time.perf_counter() - begin)
        return batch, head

    def _start_prefetch(self) -> None:
        first, depth = self._used, self.config.prefetch * self.batch_info.accumulation
        self._prefetcher = Prefetcher(lambda i: self._produce(first + i), depth)
        self._prefetch_cell[:] = [self._prefetcher]

    def _stop_prefetch(self) -> None:
        if self._prefetcher is not None:
            self.streams[TRAIN].stopped = True  # it may wait for a rank that has stopped before it
            self._prefetcher.stop()
            self.streams[TRAIN].stopped = False
        self._prefetcher = None
        self._prefetch_cell.clear()

    # ---- priorities ------------------------------------------------------------------------------

    def update_priorities(
        self, batch: Batch, priorities: torch.Tensor, mask: torch.Tensor | None = None
    ) -> None:
        """Report the priorities of a batch's items, as of their TD errors.

        The selection of global batch n sees what all ranks reported before they asked for batch
        n - prefetch. Of several reports of an item the one with the highest sample number of the newest batch
        wins. Items that are gone are ignored, and counted in `statistics()`.

        Args:
            batch: From `sample`.
            priorities: [B], or [B, T] to be reduced over a window as `sampler.reduce` says; of any
                floating dtype and device, finite, at least 0.
            mask: Which steps count. None: the batch's mask of this shape, or every step. [B, T], bool.
        Raises:
            ConfigError: The sampler has no priorities.
            DataError: A priority is negative, infinite or NaN; nothing has changed.
            ShapeError: A wrong shape.
            StoreError: More were reported than `sample` takes up.
        """
        self._check_open()
        feedback.report(self._priorities(), self.config.sampler, batch, priorities, mask)

    def set_priorities(
        self, ids: Ids, priorities: torch.Tensor | Sequence[float], steps: Ids | None = None
    ) -> int:
        """Report priorities of items by id; they count behind those of the batch that was asked for last.

        Args:
            ids: Trajectories. [n].
            priorities: [n], finite, at least 0.
            steps: Where the unit is a step: which step of each trajectory. [n].
        Returns:
            How many of the items are stored and admitted by the sampler; the others are ignored.
        Raises:
            ConfigError, DataError, ShapeError, StoreError: As `update_priorities`.
        """
        self._check_open()
        return feedback.report_by_id(self._priorities(), ids, priorities, steps)

    def priorities(self, ids: Ids, steps: Ids | None = None) -> torch.Tensor:
        """Return the priorities that the latest cut has drawn with, 0 for what is gone. [n], float32."""
        self._check_open()
        return feedback.priorities_of(self._priorities(), ids, steps)

    def _priorities(self) -> PriorityMasses:
        masses = self.streams[TRAIN].masses
        if not isinstance(masses, PriorityMasses):
            raise ConfigError(
                "gear.sampler.kind",
                'must be "prioritized" or "top_k" for priorities to be reported',
                self.config.sampler.kind,
            )
        return masses

    # ---- content ---------------------------------------------------------------------------------

    def add(self, trajectory: Mapping[str, Any], table: str | None = None) -> int:
        """Store a trajectory; batches from the next cut on may hold it.

        Args:
            trajectory: Column -> array: [T, *shape], [T+1, *shape] or [*shape], as the schema says.
            table: Which table; None for the sampled one.
        Returns:
            Its id.
        Raises:
            DataError: It does not fit the schema; nothing has changed.
            StoreFullError: There is no room.
        """
        self._check_open()
        target = self._table(table)
        max_length = self.config.resolved_tables[target.spec.name].max_length
        return content.add(target, self._streams_of(target), trajectory, max_length)

    def read(
        self, ids: Sequence[int] | torch.Tensor, table: str | None = None
    ) -> list[dict[str, torch.Tensor]]:
        """Return copies of whole trajectories: column -> [T, *shape], [T+1, *shape] or [*shape].

        Raises:
            StoreError: An id is not stored.
        """
        self._check_open()
        return content.read(self._table(table), ids)

    def remove(self, ids: Sequence[int] | torch.Tensor, table: str | None = None) -> int:
        """Remove trajectories from the next cut on; ids that are not stored are ignored.

        Returns:
            How many were removed.
        Raises:
            StoreError: The table holds a data set.
        """
        self._check_open()
        target = self._table(table)
        return content.remove(target, self._streams_of(target), ids)

    def clear(self, table: str | None = None) -> None:
        """Remove everything from a table; an epoch that is under way ends.

        Raises:
            StoreError: The table holds a data set.
        """
        self._check_open()
        target = self._table(table)
        content.clear(target, self._streams_of(target))

    def _table(self, name: str | None) -> Table:
        name = name or self.config.sampled_table
        if name not in self.tables:
            raise ConfigError("table", f"must be one of {', '.join(self.tables)}", name)
        return self.tables[name]

    def _streams_of(self, table: Table) -> list[Stream]:
        return [stream for stream in self.streams.values() if stream.table is table]

    def __len__(self) -> int:
        """Return the number of trajectories in the sampled table."""
        return self._table(None).num_trajectories

    @property
    def num_steps(self) -> int:
        """Steps in the sampled table."""
        return self._table(None).num_steps

    # ---- state -----------------------------------------------------------------------------------

    @property
    def fingerprint(self) -> dict[str, str]:
        """Fingerprint of each table's data set."""
        return {name: dataset.fingerprint for name, dataset in self.datasets.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the position: whole global batches that were used, not those that were prefetched.

        Equal on all ranks; JSON-able. A global batch of which only some micro batches were used comes again.
        """
        self._check_open()
        return position.state_of(self.config, self.fingerprint, self._passes, self._where())

    def _where(self) -> dict[str, int]:
        return self._position if self._head is None else position.after(self._head)

    def save(self, folder: str | Path) -> dict[str, Any]:
        """Write what was added to tables with a capacity, and return the position. Collective.

        Args:
            folder: Gets a folder per table with a capacity; none if there is no such table.
        Returns:
            `state_dict()`.
        """
        self._check_open()

        def write() -> None:
            for name, table in self._changing_tables().items():
                streams = self._streams_of(table)
                with table.lock:
                    snapshot.save_table(table, streams, Path(folder) / name, self._where()["batches"])

        self._exchange.agree("saving the tables", write if self.topology.leads_node else lambda: None)
        return self.state_dict()

    def load(self, folder: str | Path, state: Mapping[str, Any]) -> None:
        """Continue where `save` was called: replace the content of tables with a capacity. Collective.

        Raises:
            CheckpointError: A file is missing or changed, or the state does not fit.
            StoreFullError: A table is too small.
        """
        self.load_state_dict(state)

        def read() -> None:
            for name, table in self._changing_tables().items():
                streams = self._streams_of(table)
                with table.lock:
                    snapshot.load_table(table, streams, Path(folder) / name, self._where()["batches"])

        self._exchange.agree("loading the tables", read if self.topology.leads_node else lambda: None)

    def _changing_tables(self) -> dict[str, Table]:
        """Return the tables whose content or priorities are not in the data set."""
        kept = {s.table.spec.name for s in self.streams.values() if s.spec.priorities is not None}
        return {
            name: table for name, table in self.tables.items() if table.spec.dataset is None or name in kept
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where a state was taken, on any number of ranks; tables keep their content. Collective.

        Raises:
            CheckpointError: It is of another format, of other data or of options that select other samples.
        """
        self._check_open()
        self._exchange.agree(
            "loading the state", lambda: position.check(state, self.config, self.fingerprint)
        )
        self._stop_prefetch()
        self._exchange.barrier()
        self._head = None
        self._position = {name: int(state["train"][name]) for name in position.WORDS}
        self._passes = {name: int(count) for name, count in state["passes"].items()}
        if self.topology.leads_node:
            for name, stream in self.streams.items():
                start = (self._passes.get(name, 0) << PASS_SHIFT, 0, 0, 0, 0)
                with stream.table.lock:
                    stream.seek(*(self._position.values() if name == TRAIN else start))
        self._exchange.barrier()
        self._start, self._used = self._position["batches"], 0

    def take_metrics(self) -> dict[str, float]:
        """Return means per micro batch since the last call: times, bytes, padding fraction, epoch."""
        return self.metrics.take(self._maker.counters)

    def statistics(self) -> dict[str, Any]:
        """Return sizes and times: of the store, and of the batches since the last call."""
        self._check_open()
        table = self._table(None)
        return {
            "trajectories": len(self),
            "steps": self.num_steps,
            "store_bytes": table.memory.num_bytes,
            "huge_bytes": table.memory.huge_bytes,
            "payload_bytes": self.num_steps * table.spec.schema.row_bytes,
            "batches": self.metrics.num_batches,
            **self._priority_statistics(),
            **self.take_metrics(),
        }

    def _priority_statistics(self) -> dict[str, int]:
        masses = self.streams[TRAIN].masses
        return masses.statistics() if isinstance(masses, PriorityMasses) else {}

    # ---- end -------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError("the Replay", "must be open", None, "it was closed")

    def close(self) -> None:
        """Stop the prefetch thread and detach; safe to call twice and at exit."""
        if not self._closed:
            self._closed = True
            self._finalizer()

    def __enter__(self) -> Replay:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _release(
    prefetch: list[Prefetcher[Any]], streams: dict[str, Stream], tables: dict[str, Table], exchange: Exchange
) -> None:
    for stream in streams.values():
        stream.stopped = True
    for prefetcher in prefetch:
        prefetcher.stop()
    for table in tables.values():
        table.close()
    exchange.close()
