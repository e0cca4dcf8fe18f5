"""Replay: add and sample trajectories, report priorities, save and load."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch

import deepspeed_gear.arguments as arguments
from deepspeed_gear.batching.batch import Batch
from deepspeed_gear.batching.loss_weights import GradientDivisor
from deepspeed_gear.batching.micro_batch import MicroBatch
from deepspeed_gear.batching.transform import Transform
from deepspeed_gear.checkpoint import position
from deepspeed_gear.config import GearConfig
from deepspeed_gear.data.statistics.dataset_statistics import ColumnStatistics
from deepspeed_gear.distributed.topology import RankCoordinates
from deepspeed_gear.errors import ConfigError, StoreError
from deepspeed_gear.frameworks.gradient_divisor import gradient_divisor
from deepspeed_gear.plan.resolved_plan import resolve_plan
from deepspeed_gear.replay import replay_statistics
from deepspeed_gear.replay.batch_loader import BatchLoader, Evaluation
from deepspeed_gear.replay.can_sample import Readiness
from deepspeed_gear.replay.log_warnings import warnings_of
from deepspeed_gear.replay.metrics import Metrics, Progress
from deepspeed_gear.replay.normalizer import OnlineStatistics
from deepspeed_gear.replay.packed import table_forward
from deepspeed_gear.replay.packed.copied_items import copy_items
from deepspeed_gear.replay.packed.packing_check import check_packing
from deepspeed_gear.replay.packed.rollout import Rollout, TrainStep
from deepspeed_gear.replay.packed.rollout_loader import RolloutLoader
from deepspeed_gear.replay.priority_updates import Ids, PriorityReports
from deepspeed_gear.replay.replay_checkpoint import ReplayCheckpoint
from deepspeed_gear.replay.replay_parts import ReplayParts
from deepspeed_gear.replay.replay_tables import ReplayTables
from deepspeed_gear.sampling.batch_sizes import BatchInfo, Turns
from deepspeed_gear.schema import Schema
from deepspeed_gear.store.records import PROGRESS


class Replay(ReplayTables):
    """The replay system of a config, on the ranks of a process group.

    Construction, `iterator` of a split, `state_dict`, `load_state_dict`, `save`, `load` and `close`
    are collective. One thread per process uses a Replay; other processes of the node may add and
    sample at the same time.

    Args:
        config: The `gear` section, or a ds_config with one, whose batch sizes are those of an
            engine: a mapping, a GearConfig, or the path of a JSON file.
        process_group: Ranks that sample different parts of one global batch; None: all ranks.
        schemas: Schemas of tables that have a capacity and no schema in the config.
        info: Batch sizes where an engine decides them. The ranks then train together: if one fails,
            dies or ends early, the next `sample` of every rank raises.
        place: This rank's place in the grid; None: each rank is a replica.
        turns: When ranks that train together wait for each other: "micro", after each micro batch;
            "global", after the last one of a global batch; "schedule", before a pipeline's.
        engine_dtype: The dtype of fields with `"as": "engine"`.
        device: The device of the batches.
    Raises:
        ConfigError, DataError, StoreError, BuildError: On every rank; all resources are released.
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
            raise ConfigError(
                "turns", f"must be one of {', '.join(get_args(Turns))}", turns, "choose one of them"
            )
        plan = resolve_plan(config, process_group, schemas, info, place)
        parts = ReplayParts(plan, None if info is None else turns, engine_dtype, to)
        super().__init__(plan, parts, engine_dtype, to)
        # An exception that is being handled now is not the reason why this replay is closed.
        self._around = id(sys.exc_info()[1])
        words = self.tables[plan.config.sampled_tables[0]].views[PROGRESS][plan.topology.peer]
        self.metrics = Metrics(words, plan.topology.rank)
        self._priorities = PriorityReports(plan, parts.train, parts.late_updates)
        self._passes = Evaluation(parts)
        self._divisor = GradientDivisor(float(plan.topology.place.data_world))
        self._loader: BatchLoader | RolloutLoader
        if plan.config.pack is None:
            self._loader = BatchLoader(parts, self.metrics, turns)
        else:
            self._loader = RolloutLoader(parts, self.metrics, engine_dtype, to, self._divisor)
        self._checkpoint = ReplayCheckpoint(parts, self._loader, self._passes)
        # Each node's leader warns of its own store.
        self._warnings = warnings_of(parts.train if plan.topology.leads_node else [])
        self._readiness = Readiness(parts, self._loader)
        self._online_statistics = OnlineStatistics(parts.train[0])
        self._finalizer = weakref.finalize(self, parts.release)

    def _statistics_of_fields(self) -> Mapping[str, ColumnStatistics]:
        if not (self.config.normalizes_online and any(field.normalize for field in self.fields)):
            return super()._statistics_of_fields()
        self._check_reads()
        return self._online_statistics.newest()

    def _set_transform(self, transform: Transform | None) -> None:
        super()._set_transform(transform)
        self._parts.assembler.use(transform)

    def copy_items(
        self,
        rollout: Rollout,
        table: str,
        chosen: torch.Tensor | Sequence[bool] | None = None,
        priorities: torch.Tensor | Sequence[float] | None = None,
    ) -> int:
        """Copy items of a rollout batch to another table, from which a mixture samples them again.

        Collective. Each node copies the items that it holds. A table of groups leaves out a group
        whose number it already holds.

        Args:
            rollout: The rollout batch, which has not ended.
            table: Name of the table, whose columns are among those of the items' tables.
            chosen: Mask of the items to copy; None: all that do not come from this table.
                [num_items], bool.
            priorities: Priorities of the items, for a table that is sampled by priority.
                [num_items], finite, at least 0.
        Returns:
            Number of trajectories that this rank has added; one rank per node adds.
        Raises:
            ConfigError: There is no such table or column, or the table has no priorities.
            DataError, ShapeError: `chosen` or `priorities` do not fit; or a late column is absent.
            StoreFullError: Too few rows are free; earlier items are added.
            PeerError: Another rank failed.
        """
        self._check_open()
        rollout.check_open()
        columns = rollout.batch_columns

        def copy() -> int:
            target = self.store(table)
            if priorities is not None:
                self._priorities.masses_of(table)  # raises before anything is added
            add = partial(self.add, table=table)
            ids, values = copy_items(columns, target, add, chosen, priorities)
            if ids and values is not None:
                self._priorities.report_by_id(table, ids, values)
            return len(ids)

        return columns.context.agree(copy)

    def forward(
        self, *names: str, tokens: int | None = None, table: str | None = None
    ) -> Iterator[MicroBatch]:
        """Iterate over micro batches of the trajectories that lack late columns, to fill them.

        Collective. `for micro in replay.forward("ref_logp"): micro.fill(ref_logp=logp(micro))`.
        Each stored trajectory that lacks one of the columns is in one micro batch of one replica,
        without fields of late columns. All ranks get the same number of micro batches. `micro.fill`
        writes at once. Trajectories that are added meanwhile, or not filled as a rank raises or
        dies, come with the next call.

        With several nodes each fills the rows of its own store: its replicas share them,
        `micro.weight` counts only these, and the last micro batches are empty where other nodes
        have more.

        Args:
            *names: Late columns of numbers, with a row per step ("T") or trajectory.
            tokens: Most steps of a micro batch; None: `gear.pack.tokens`.
            table: As `add`.
        Raises:
            ConfigError: There is no such column or no `gear.pack`, or the ranks of a replica are on
                several nodes and so is the table.
            StoreError, PeerError: As `Rollout.forward`.
        """
        packed = self._packed()
        sampled = self.config.sampled_tables
        target = self.tables[self._table_name(table, sampled, sampled)]
        return table_forward.forward(target, names, tokens, packed)

    def sample(self) -> Batch:
        """Return this rank's next micro batch of the training stream.

        Returns:
            A Batch of `batch_info.micro` samples, on the Replay's device, with the fields and the
            part of the time axis that this rank needs. Its tensors are overwritten after
            max(2, accumulation) more calls; `clone` keeps them.
        Raises:
            StoreError: The sampler admits no item, the Replay is closed, or the rank is an inner
                stage of a pipeline.
            PeerError: Another rank of the node is too late; with an engine also: it failed, died or
                ended. The next call tries again.
            NotReadyError: The table's rate limiter admits no batch in time, or a table with writers
                holds no item to sample in time. It is raised at once if no other process can add
                items, and with an engine on all ranks. The next call tries again.
        """
        self._check_reads()
        if not isinstance(self._loader, BatchLoader):
            remedy = "use rollout() or step(), which return packed batches"
            raise ConfigError("gear.pack", "must not be given for sample()", None, remedy)
        batch = self._loader.next()
        self._warn()
        return batch

    def rollout(self) -> Rollout:
        """Select and return the next rollout batch; the one before it ends.

        Its rows are kept until the loop over its steps has ended, or the next one is requested.

        Raises:
            ConfigError: There is no `gear.pack`.
            CheckpointError: The run was resumed within a rollout batch, and its trajectories have
                other lengths.
            StoreError: As `sample`.
            PeerError: Another rank failed, died or ended.
            NotReadyError: Too few items come in time; raised at once if no other process can add
                any.
        """
        rollout = self._packed().next()
        self._warn()
        return rollout

    def step(self) -> TrainStep:
        """Select the next batch of `gear.batch`; return its one optimizer step of micro batches.

        Raises:
            ConfigError: There is no `gear.pack`, or `gear.rollout` instead of `gear.batch`.
            StoreError, PeerError, NotReadyError: As `rollout`.
        """
        step = self._packed().step()
        self._warn()
        return step

    def set_model(self, model: Any) -> None:
        """Set `gradient_divisor` to the divisor of a model's framework.

        Args:
            model: As `deepspeed_gear.gradient_divisor`.
        Raises:
            ConfigError: The parameters have no common divisor, or the framework is not supported.
        """
        self._divisor.set(gradient_divisor(model))

    @property
    def gradient_divisor(self) -> float:
        """Number by which the framework divides the sum of all ranks' gradients.

        Losses of packed batches are multiplied by it.
        """
        return self._divisor.value

    @gradient_divisor.setter
    def gradient_divisor(self, value: float) -> None:
        self._divisor.set(value)

    def check_packing(
        self, model: Any, attention: str | None = None, tolerance: float | None = None
    ) -> float:
        """Check that a model's logits for packed trajectories equal those of each one alone.

        Runs a pack of random tokens, as long as a micro batch, and its trajectories one by one,
        without gradients and dropout. With ZeRO 3 all ranks call it.

        Args:
            model: A causal language model of transformers, or an engine or another module around
                it.
            attention: Name of the attention for `MicroBatch.model_inputs`; None: the model's.
            tolerance: Largest admitted difference of a trajectory's logits, relative to their size
                (root mean squares); None: 1e-4 in float32, 0.03 in 16 bits. Check in float32 where
                you can.
        Returns:
            The largest difference.
        Raises:
            ConfigError: The logits differ, `model_inputs` refuses the model, or there is no
                `gear.pack`.
        """
        return check_packing(model, attention, tolerance, self._packed().context.settings)

    def observe_steps(self, begun: Callable[[TrainStep], None]) -> None:
        """Call `begun` before each train step's first micro batch; its error is raised on all."""
        self._packed().context.observers.append(begun)

    def _warn(self) -> None:
        for warning in self._warnings:
            warning.check()

    def _packed(self) -> RolloutLoader:
        self._check_reads()
        if not isinstance(self._loader, RolloutLoader):
            remedy = 'give "pack": {"tokens": ...}, or use sample()'
            raise ConfigError("gear.pack", "must be given for packed batches", None, remedy)
        return self._loader

    def can_sample(self) -> bool:
        """Return whether `sample` would return a batch now; equal on all ranks. Collective.

        For simulators in the training ranks: step them while this is False, then sample.
        """
        self._check_reads()
        answer = self._readiness.can_sample()
        self._warn()
        return answer

    def missing_groups(self, table: str | None = None) -> int:
        """Return how many groups this rank should generate for the next batch. Collective.

        `while not replay.can_sample(): generate(replay.missing_groups())`.

        The number is the groups of a batch (or those that the rate limiter requires) less those
        that can be sampled, divided among the replicas; a remainder goes to the first ones. The
        tensor and sequence ranks of a replica get the same number and generate together: one of
        them adds the responses. With a limit of draws, a group counts as often as it can still be
        drawn. Groups that fail a condition leave the table when they are complete, so the number
        is larger by the rate at which the latest 256 groups passed: at most 8 times as many, and
        no more than the table admits.

        Raises:
            ConfigError: The table has no groups.
            StoreError: The table holds a data set.
            PeerError: Another rank does not call in time.
        """
        self._check_reads()
        missing = self._readiness.missing_groups(self.store(table))
        self._warn()
        return missing

    def take_turn(self, action: Callable[[], None]) -> None:
        """Run an action and raise a rank's error on all; the next turn runs a failed one again."""
        self._check_open()
        barrier = self._parts.barrier
        if barrier is None or not isinstance(self._loader, BatchLoader):  # pipelines take no packs
            action()
        else:
            barrier.agree(action, self._loader.take_digest)

    def update_priorities(
        self,
        batch: Batch | MicroBatch | None,
        priorities: torch.Tensor | np.ndarray | Sequence[Any],
        mask: torch.Tensor | np.ndarray | Sequence[Any] | None = None,
    ) -> None:
        """Report the priorities of a batch's items, for example their TD errors.

        The selection of global batch n applies the updates that all ranks reported before they
        requested batch n - prefetch. If an item has several, the one with the highest sample number
        of the newest batch wins. Updates of evicted items are ignored, and counted in
        `statistics()`. One rank of each replica reports; the arguments of its other tensor,
        sequence and pipeline ranks are ignored.

        The call does not wait for priorities on a GPU: a thread reports them once they are
        computed, and selections that need them wait until then. A later call of this Replay raises
        errors in them.

        Args:
            batch: From `sample`, or a packed micro batch; may be None on a rank that reports
                nothing.
            priorities: [B], or [B, T] to be reduced over a window by `sampler.reduce`; for a packed
                micro batch one for each trajectory, [S]. Any real dtype and any device, finite, at
                least 0; lists and NumPy arrays are accepted.
            mask: Which steps count. None: the batch's mask of this shape without burn-in
                (`batch.learns`), or every step. [B, T], bool.
        Raises:
            ConfigError: The sampler has no priorities, or the batch is packed and items are groups.
            DataError: A priority is negative, infinite or NaN; nothing has changed.
            ShapeError: A shape does not fit the batch.
            StoreError: More updates wait than the priority log holds.
        """
        self._check_open()
        self._priorities.report(batch, priorities, mask)

    def set_priorities(
        self,
        ids: Ids,
        priorities: torch.Tensor | Sequence[float],
        steps: Ids | None = None,
        table: str | None = None,
    ) -> int:
        """Report priorities of items by id, after those of the batch that was requested last.

        Args:
            ids: Ids of trajectories. [n].
            priorities: [n], finite, at least 0.
            steps: The step of each trajectory, where the unit is a step. [n].
            table: As `add`.
        Returns:
            Number of the items that are stored and admitted by the sampler; others are ignored.
            Ids whose trajectories other nodes would hold count without a look at those nodes.
        Raises:
            ConfigError, DataError, ShapeError, StoreError: As `update_priorities`.
        """
        self._check_open()
        name = self.store(table).spec.name
        return self._priorities.report_by_id(
            name, ids, priorities, steps, self.topology.place.reports
        )

    def priorities(
        self, ids: Ids, steps: Ids | None = None, table: str | None = None
    ) -> torch.Tensor:
        """Return the priorities at the latest selection, 0 for evicted items. [n], float32."""
        self._check_open()
        return self._priorities.values_of(self.store(table).spec.name, ids, steps)

    @property
    def fingerprint(self) -> dict[str, str]:
        """Fingerprint of each table's data set."""
        self._check_open()
        return position.fingerprint(self._plan)

    def state_dict(self) -> dict[str, Any]:
        self._check_open()
        return self._checkpoint.state()

    def _save(self, folder: Path, kept: Mapping[str, Any] | None) -> dict[str, Any]:
        return self._checkpoint.save(folder, kept)

    def _load(self, state: Mapping[str, Any], folder: Path | None) -> Mapping[str, Any] | None:
        self._checkpoint.load(state, folder)
        return None if state.get("save") is None else dict(state)

    def take_metrics(self) -> dict[str, float]:
        """Return the metrics for DeepSpeed's monitor.

        - Means since the last call, per micro batch (times, bytes, padding fraction) or, for packed
          batches, per optimizer step. Without an optimizer step since then, they are those of the
          call before, with `train_steps` 0.
        - The part of the time that this rank waited for batches; by table, trajectories added and
          samples drawn per second, how full it is, and where the prompts of its ledger are.
        - The epoch, and effective samples, duplicates, age, priority and policy lag of the newest
          global batch.
        - With several ranks on this node that train together, on the node's leader: how late each
          rank was at the batch barriers.
        - With several nodes, on each node's leader: bytes per global batch, and how late each node
          was.
        - With a rate limiter: total seconds that this rank has waited for it.
        - With groups: the number held, ever rejected, and of trajectories that came too late.
        """
        self._check_open()
        return replay_statistics.metrics_of(self._parts, self.metrics)

    def total_progress(self) -> Progress:
        return replay_statistics.progress_of(self._parts, self.metrics, self._begin_s)

    def statistics(self) -> dict[str, Any]:
        """Return sizes of the store, statistics of the training stream, and times since last call.

        docs/how-to/statistics.md explains each entry. Cost: one pass over priorities and counters.
        """
        self._check_open()
        return replay_statistics.statistics_of(self._parts, self.metrics)

    def _check_reads(self) -> None:
        self._check_open()
        if not self.topology.place.reads:
            at = f"stage {self.topology.place.pipe_rank} of {self.topology.place.pipe_world}"
            raise StoreError(
                "a batch",
                "must be sampled on the first or last stage",
                at,
                "do not sample on the stages between; they get activations",
            )

    def close(self) -> None:
        """Stop the prefetch thread and detach; safe to call twice and at exit.

        If an exception is being handled, as when `finally` closes, the other ranks get it as the
        reason why this rank has ended. References of the program to a store, such as a column's
        tensor, stay valid and keep the store's memory.
        """
        if self._closed:
            return
        self._closed = True
        error = sys.exc_info()[1]
        if error is not None and id(error) != self._around:
            self._parts.explain(error)
        for writer in self._writers:
            writer.end_with_replay()
        for part in self._dependents:
            part.close()
        if isinstance(self._loader, RolloutLoader):
            self._loader.abandon()  # the program may still hold a loop over its steps
        self.metrics.end_publishing()
        self._finalizer()
        self._folder_locks.release()
        # Drop all references to the stores, so that their memory is freed.
        self.tables = {}
        self._warnings = []
        self._inserters = {}
        self._of_prompts = {}
        del self._parts, self._passes, self._loader, self._readiness, self._checkpoint
        del self._priorities, self._online_statistics
