"""Replay: add, sample, read, state."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar, get_args

import numpy as np
import torch

import deepspeed_gear.arguments as arguments
from deepspeed_gear.actors.inference_loader import InferenceLoader
from deepspeed_gear.batching.batch import Batch
from deepspeed_gear.batching.batch_info import TRAIN, BatchInfo, Turns
from deepspeed_gear.checkpoint import checkpoint
from deepspeed_gear.config import GearConfig
from deepspeed_gear.distributed.topology import RankCoordinates
from deepspeed_gear.errors import ConfigError, ShapeError, StoreError
from deepspeed_gear.replay import priority_updates, replay_statistics
from deepspeed_gear.replay.async_priority_updates import AsyncPriorityUpdates
from deepspeed_gear.replay.batch_assembler import Transform
from deepspeed_gear.replay.batch_loader import BatchLoader
from deepspeed_gear.replay.builder import agree_on, build, refuse_device, release
from deepspeed_gear.replay.can_sample import Readiness
from deepspeed_gear.replay.clamp_warnings import warnings_of
from deepspeed_gear.replay.evaluation import Evaluation
from deepspeed_gear.replay.metrics import Metrics
from deepspeed_gear.replay.tables import Tables
from deepspeed_gear.sampling.batch_stream import BatchStream
from deepspeed_gear.sampling.samplers.prioritized import PriorityMasses
from deepspeed_gear.schema import Schema

Ids = Sequence[int] | torch.Tensor
T = TypeVar("T")


class Replay(Tables):
    """The replay system of a config, on the ranks of a process group.

    Construction, `iterator` of a split, `state_dict`, `load_state_dict` and `close` are collective. One
    thread per process uses a Replay; other processes of the node may add and sample at the same time.

    Args:
        config: The `gear` section: a mapping, a GearConfig, or the path of a JSON file (a whole ds_config
            or the section alone).
        process_group: Ranks that sample different parts of one global batch; None for all.
        schemas: Schemas of the tables that have a capacity and no schema in the config.
        info: Batch sizes where an engine decides them. The ranks then train together: an error, a death or
            an early end of one is raised on all by their next `sample`.
        place: Where this rank sits; None: each rank is a replica.
        turns: Where ranks that train together wait for each other: behind each micro batch, behind the last
            one of a global batch, or where an engine calls `agree`.
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
        place: RankCoordinates | None = None,
        turns: Turns = "micro",
        engine_dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        to = arguments.device("device", device)
        arguments.one_of("engine_dtype", engine_dtype, torch.dtype, "a torch.dtype")
        if not isinstance(turns, str) or turns not in get_args(Turns):
            raise ConfigError("turns", f"must be one of {', '.join(get_args(Turns))}", turns)
        plan = agree_on(config, process_group, schemas, info, place)
        self.config, self.topology, self.batch_info = plan.config, plan.topology, plan.info
        refuse_device(plan)
        self.datasets, self.schemas, self.fields = plan.datasets, plan.schemas, plan.fields
        self.device = to
        parts = build(plan, None if info is None else turns, engine_dtype, self.device)
        self._parts, self._maker, self._train = parts, parts.maker, parts.train
        self.tables, self._streams = parts.tables, parts.streams
        self._place, self._closed = plan.topology.place, False
        self._around = id(sys.exc_info()[1])  # an error that is handled around this replay does not end it
        self._inserters = {}
        self._loaders: list[InferenceLoader] = []
        self._last_saves: dict[str, Mapping[str, Any]] = {}  # state of each folder's, loaded or made
        self._writers = weakref.WeakSet()
        self.metrics, self._late = Metrics(), AsyncPriorityUpdates(plan.config.timeout_s)
        self._passes = Evaluation(parts)
        self._feed = BatchLoader(
            plan.config,
            self._train,
            parts.mixture,
            parts.maker,
            plan.info,
            self._place.data_rank,
            plan.topology.rank == 0,
            self.metrics,
            None if turns == "schedule" else parts.status,
            "micro" if turns == "schedule" else turns,
            parts.check,
            self._late.check,
        )
        leads_node = plan.topology.leads_node  # each for its own store
        self._warnings = warnings_of(self._train) if leads_node else []
        self._questions = Readiness(parts, self.config.timeout_s, self._feed)
        self._finalizer = weakref.finalize(
            self,
            release,
            self._feed.prefetchers,
            parts.all_streams,
            parts.tables,
            plan.exchange,
            parts.status,
            parts.links,
            parts.watch,
            parts.maker,
            self._late,
        )

    @property
    def streams(self) -> dict[str, BatchStream]:
        """The streams of the first sampled table by name: "train", and one for each split."""
        self._check_open()
        return self._streams[self.config.sampled_tables[0]]

    @property
    def transform(self) -> Transform | None:
        """A program's own last step: (batch, key per sample [B] int64) -> batch; set it before sampling.

        The keys are random words that depend on seed, stream and sample number only, so what is derived from
        them is the same for any number of ranks. They are on the batch's device.
        """
        self._check_open()
        return self._maker.transform

    @transform.setter
    def transform(self, transform: Transform | None) -> None:
        self._check_open()
        self._maker.transform = None if transform is None else arguments.function("transform", transform)

    # ---- sampling --------------------------------------------------------------------------------

    def sample(self) -> Batch:
        """Return this rank's next micro batch of the training stream.

        Returns:
            A Batch of `batch_info.micro` samples, on the Replay's device, with the fields and the part of the
            time axis that this rank needs. It lives until `sample` is called max(2, accumulation) times more;
            `clone` keeps it.
        Raises:
            StoreError: No item is admitted by the sampler, the Replay is closed, or the rank is an inner
                stage of a pipeline.
            PeerError: Another rank of the node lags too far behind; with an engine also: it failed, died or
                ended. The next call tries again.
            NotReadyError: The table's rate admits no batch in time, or a table that takes writers holds
                nothing to sample in time; at once where no other process writes. With an engine on all
                ranks. The next call tries again.
        """
        self._check_reads()
        batch = self._feed.next()
        for warning in self._warnings:
            warning.check()
        return batch

    def can_sample(self) -> bool:
        """Return whether `sample` would return a batch now; the same answer on every rank. Collective.

        As where simulators run in the training ranks: collect while it is False, and sample once it is True.
        """
        self._check_reads()
        return self._questions.ask(self._feed.next_key)

    def agree(self, action: Callable[[], T]) -> T:
        """Take a turn of the ranks that an engine trains together; alone, only do it.

        Args:
            action: What this rank does; the next turn calls it again if this one fails.
        Raises:
            Exception: What `action` raised here.
            PeerError: Another rank failed, died, ended, or has not come in time.
        """
        self._check_open()
        arguments.function("action", action)
        status = self._parts.status
        return action() if status is None else status.agree(action, self._feed.take_digest)

    def __iter__(self) -> Iterator[Batch]:
        return self.iterator()

    def iterator(self, stream: str = TRAIN) -> Iterator[Batch]:
        """Return an iterator over batches: endless for training, one pass over every item for a split.

        All ranks iterate over a split together and get equally many batches; in the last ones `valid` is
        False, and `weight` 0, for samples that only fill up the batch.

        Raises:
            ConfigError: There is no such stream.
        """
        self._check_reads()
        arguments.one_of("stream", stream, str, "a name")
        return self._endless() if stream == TRAIN else self._passes.batches(stream, self._check_open)

    def num_batches(self, stream: str) -> int:
        """Return how many batches of each rank one pass over a split has.

        Raises:
            ConfigError: There is no such split.
        """
        self._check_open()
        return self._passes.num_batches(arguments.one_of("stream", stream, str, "a name"))

    def _endless(self) -> Iterator[Batch]:
        while True:
            yield self.sample()

    # ---- priorities ------------------------------------------------------------------------------

    def update_priorities(
        self,
        batch: Batch | None,
        priorities: torch.Tensor | np.ndarray | Sequence[Any],
        mask: torch.Tensor | np.ndarray | Sequence[Any] | None = None,
    ) -> None:
        """Report the priorities of a batch's items, as of their TD errors.

        The selection of global batch n sees what all ranks reported before they asked for batch
        n - prefetch. Of several reports of an item the one with the highest sample number of the newest batch
        wins. Items that are gone are ignored, and counted in `statistics()`. One rank of each replica
        reports: what its other tensor, sequence and pipeline ranks give is not looked at.

        Priorities on a GPU are not waited for: a thread reports them when they are computed, and until then
        cuts that need them wait. What is wrong with them is raised by a later call of this Replay.

        Args:
            batch: From `sample`; None is possible on a rank that reports nothing.
            priorities: [B], or [B, T] to be reduced over a window as `sampler.reduce` says; of any
                real dtype and any device, finite, at least 0; lists and NumPy arrays are taken too.
            mask: Which steps count. None: the batch's mask of this shape without steps that only warm up
                (`batch.learns`), or every step. [B, T], bool.
        Raises:
            ConfigError: The sampler has no priorities.
            DataError: A priority is negative, infinite or NaN; nothing has changed.
            ShapeError: A wrong shape.
            StoreError: More were reported than `sample` takes up.
        """
        self._check_open()
        masses = self._all_priorities
        if not self._place.reports:
            return
        priorities, mask = priority_updates.as_given(batch, priorities, mask)
        if priorities.dim() == 2 and self._place.sequence_world > 1:
            rule = "must have shape [B] where ranks share the time axis"
            raise ShapeError(
                "priorities", rule, list(priorities.shape), "reduce them over the sequence ranks"
            )
        assert batch is not None  # as_given has looked
        self._late.check()
        priority_updates.report(masses, self.config.item_sampler, batch, priorities, mask, self._late)

    def set_priorities(
        self,
        ids: Ids,
        priorities: torch.Tensor | Sequence[float],
        steps: Ids | None = None,
        table: str | None = None,
    ) -> int:
        """Report priorities of items by id; they count behind those of the batch that was asked for last.

        Args:
            ids: Trajectories. [n].
            priorities: [n], finite, at least 0.
            steps: Where the unit is a step: which step of each trajectory. [n].
            table: Which table of a mixture; None: the only sampled one.
        Returns:
            How many of the items are stored and admitted by the sampler; the others are ignored.
        Raises:
            ConfigError, DataError, ShapeError, StoreError: As `update_priorities`.
        """
        self._check_open()
        self._late.drain()
        report = self._place.reports
        return priority_updates.report_by_id(self._priorities(table), ids, priorities, steps, report)

    def priorities(self, ids: Ids, steps: Ids | None = None, table: str | None = None) -> torch.Tensor:
        """Return the priorities that the latest cut has drawn with, 0 for what is gone. [n], float32."""
        self._check_open()
        return priority_updates.priorities_of(self._priorities(table), ids, steps)

    @cached_property
    def _all_priorities(self) -> list[PriorityMasses]:
        return [self._priorities(table) for table in self.config.sampled_tables]

    def _priorities(self, table: str | None) -> PriorityMasses:
        name = self._table(table).spec.name
        masses = self._streams[name][TRAIN].masses if name in self._streams else None
        if not isinstance(masses, PriorityMasses):
            raise ConfigError(
                "gear.sampler.kind",
                'must be "prioritized" or "top_k" for priorities to be reported',
                self.config.item_sampler.kind,
            )
        return masses

    # ---- state -----------------------------------------------------------------------------------

    @property
    def fingerprint(self) -> dict[str, str]:
        """Fingerprint of each table's data set."""
        self._check_open()
        return checkpoint.fingerprint(self._parts)

    def state_dict(self) -> dict[str, Any]:
        """Return the position: whole global batches that were used, not those that were prefetched.

        Collective. Equal on all ranks; JSON-able. A global batch of which only some micro batches were used
        comes again.
        """
        self._check_open()
        return checkpoint.state_of(self._parts, self._feed, self._passes.begun)

    def save(self, folder: str | Path) -> dict[str, Any]:
        """Write what was added to tables, priorities and the position; return the position. Collective.

        The save is written beside the one that the folder holds, brought to the disk and exchanged with it;
        that one stays until the next save into the folder begins. Ended at any time, it leaves one of both to
        be loaded: by the state that was returned and kept elsewhere, or without one by the folder's own.

        Args:
            folder: Gets `position.json` and a folder for each table with a capacity or with priorities;
                other files in it stay as they are.
        Returns:
            `state_dict()`, with the id and the checksums of this save.
        Raises:
            CheckpointError: A file cannot be written; the save before this one stays.
        """
        self._check_open()
        path = arguments.folder("folder", folder)
        self._parts.plan.exchange.agree("what was reported", self._late.drain)
        at = os.path.realpath(path)
        kept = self._last_saves.get(at)
        state = checkpoint.save(self._parts, self._feed, self._passes.begun, Path(at), kept)
        self._last_saves[at] = state
        return state

    def load(self, folder: str | Path, state: Mapping[str, Any] | None = None) -> None:
        """Continue where `save` was called: replace what it has written. Collective.

        A batch from before must not report priorities afterwards: its trajectories may lie elsewhere.

        Args:
            folder: That of `save`.
            state: What that save has returned; None: that of the newest save of the folder.
        Raises:
            CheckpointError: A file is missing, changed or of another save than the state, or the state does
                not fit; nothing has changed.
            StoreFullError: A table is too small; nothing has changed.
        """
        self._check_open()
        at = Path(os.path.realpath(arguments.folder("folder", folder)))
        if state is not None:
            arguments.mapping("state", state, "give what save has returned")
        known = checkpoint.newest_state(self._parts, at) if state is None else state
        self._drain_and_check(known)
        loading = checkpoint.read(self._parts, at, known)
        self._passes.begun = checkpoint.go_on(self._parts, self._feed, known)
        checkpoint.replace(self._parts, loading)
        if known["save"] is not None:
            self._last_saves[str(at)] = dict(known)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where a state was taken, on any number of ranks; tables keep their content. Collective.

        Raises:
            CheckpointError: It is of another format, of other data or of options that select other samples.
        """
        self._check_open()
        arguments.mapping("state", state, "give what state_dict or save has returned")
        self._drain_and_check(state)
        self._passes.begun = checkpoint.go_on(self._parts, self._feed, state)

    def _drain_and_check(self, state: Mapping[str, Any]) -> None:
        self._parts.plan.exchange.agree("what was reported", self._late.drain)
        checkpoint.check(self._parts, state)

    def take_metrics(self) -> dict[str, float]:
        """Return what goes to DeepSpeed's monitor.

        Means per micro batch since the last call (times, bytes, padding fraction), the epoch, and effective
        samples, duplicates and age of the newest global batch. Over nodes, on the rank that exchanges for its
        node: bytes per global batch, and how late each node was. With a rate: the seconds that it has made
        this rank wait, in all.
        """
        self._check_open()
        taken = self.metrics.take(self._maker.counters)
        if any(stream.is_gated for stream in self._train):
            taken["rate_wait_s"] = sum(stream.gate_wait.total_s for stream in self._train)
        return {**taken, **self._parts.links.take_metrics(), **replay_statistics.of_last_batch(self._train)}

    def statistics(self) -> dict[str, Any]:
        """Return sizes of the store, how the training stream draws, and times since the last call.

        docs/how-to/statistics.md explains each entry. Cost: one pass over priorities and counters.
        """
        self._check_open()
        return {
            **replay_statistics.of_store(self._sampled),
            "batches": self.metrics.num_batches,
            "digest": self.metrics.digest,
            **replay_statistics.of_priorities(self._train),
            **self.take_metrics(),
            **replay_statistics.of_selection(self._train),
            **self._maker.describe(),
        }

    # ---- end -------------------------------------------------------------------------------------

    def _check_reads(self) -> None:
        self._check_open()
        if not self._place.reads:
            at = f"stage {self._place.pipe_rank} of {self._place.pipe_world}"
            raise StoreError("a batch", "must be asked for on the first or last stage", at)

    def close(self) -> None:
        """Stop the prefetch thread and detach; safe to call twice and at exit.

        An exception that is being handled, as where `finally` closes, is told to the other ranks as what ends
        this one. What the program still holds of a store (a column's tensor, say) stays valid, and keeps that
        store's memory until it is dropped.
        """
        if not self._closed:
            self._closed = True
            error = sys.exc_info()[1]
            if error is not None and id(error) != self._around:
                self._parts.explain(error)
            for writer in self._writers:
                writer.end_with_replay()
            for loader in self._loaders:
                loader.close()
            self._finalizer()
            self._let_go()

    def _let_go(self) -> None:
        """Drop what looks into the stores: their memory is free unless the program holds a part of it."""
        parts, feed = self._parts, self._feed
        self.__dict__.pop("_all_priorities", None)
        self.tables, self._streams, self._inserters, self._loaders, self._train = {}, {}, {}, [], []
        self._warnings = []
        del self._parts, self._maker, self._passes, self._feed, self._questions
        for hub in (*parts.all_streams, parts, feed):  # all else refers to these, and they to all else:
            vars(hub).clear()  # without this the memory would stay until the next collection of garbage

    def __enter__(self) -> Replay:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
