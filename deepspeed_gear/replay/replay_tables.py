"""The tables of a Replay: add, fill, read and remove trajectories; set priorities of prompts."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, overload

import numpy as np
import torch

import deepspeed_gear.arguments as arguments
from deepspeed_gear.errors import StoreFullError
from deepspeed_gear.plan.resolved_plan import Resolved
from deepspeed_gear.replay import table_access
from deepspeed_gear.replay.priority_updates import Ids
from deepspeed_gear.replay.prompt_priorities import PromptPriorities
from deepspeed_gear.replay.replay_base import ReplayBase
from deepspeed_gear.replay.replay_parts import ReplayParts
from deepspeed_gear.replay.table_access import inserter_of
from deepspeed_gear.store.late_columns import fill
from deepspeed_gear.store.table import Table
from deepspeed_gear.writer.autoreset_modes import Autoreset, resolve
from deepspeed_gear.writer.inserter import Inserter
from deepspeed_gear.writer.rollout_worker import RolloutWorker
from deepspeed_gear.writer.trajectory_writer import TrajectoryWriter
from deepspeed_gear.writer.vector_writer import VectorWriter


class ReplayTables(ReplayBase):
    """Base of Replay: the tables in this node's stores, and the calls on them."""

    def __init__(
        self, plan: Resolved, parts: ReplayParts, engine_dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(plan, device, engine_dtype)
        self.schemas = plan.schemas
        self.fields = plan.fields
        self._parts = parts
        self.tables = parts.tables
        # By the table's name as calls give it; None: the only sampled one, as in `store`.
        self._inserters: dict[str | None, Inserter] = {}
        self._writers: weakref.WeakSet[TrajectoryWriter] = weakref.WeakSet()
        self._dependents: weakref.WeakSet[Any] = weakref.WeakSet()
        self._of_prompts: dict[str, PromptPriorities] = {}

    def _inserter(self, table: str | None) -> Inserter:
        """Return the inserter of a table, which all writers of this process share."""
        self._check_open()
        known = self._inserters.get(table) if table is None or isinstance(table, str) else None
        if known is not None:
            return known
        target = self.store(table)
        name = target.spec.name
        if name not in self._inserters:
            streams = self._parts.streams[name].values()
            max_length = self.config.resolved_tables[name].max_length
            context = replace(self._parts.context, timeout_s=self.config.items_timeout_s(name))
            self._inserters[name] = inserter_of(target, streams, max_length, context)
        self._inserters[table] = self._inserters[name]
        return self._inserters[name]

    @overload
    def add(
        self,
        trajectory: Mapping[str, Any],
        table: str | None = None,
        *,
        split_by_flags: Literal[False] = False,
    ) -> int: ...
    @overload
    def add(
        self,
        trajectory: Mapping[str, Any],
        table: str | None = None,
        *,
        split_by_flags: Literal[True],
        final: Mapping[str, Any] | None = None,
    ) -> list[int]: ...
    def add(
        self,
        trajectory: Mapping[str, Any],
        table: str | None = None,
        *,
        split_by_flags: bool = False,
        final: Mapping[str, Any] | None = None,
    ) -> int | list[int]:
        """Add a trajectory, which the next selection may sample.

        Args:
            trajectory: Column -> array: [T, *shape], [T+1, *shape] or [*shape], as the schema
                defines. Columns with dots in their names may come nested, here, in writers and in
                `fill`: {"observation": {"a": x, "b": (y, z)}} is `observation.a`, `observation.b.0`
                and `observation.b.1`.
            table: Name of the table, here and in the other calls; None: the only one that is
                sampled.
            split_by_flags: Whether it holds several episodes, such as a rollout with resets inside.
                It is divided after each step with an end flag, and every part is a trajectory.
                Columns of one value per trajectory are copied to every part, except those of the
                roles return and length, which are computed for each.
            final: With `split_by_flags`, the state after each step, for columns of T+1 rows:
                [T, *shape], or T objects as gymnasium's `final_obs`. Only rows where a part ends
                inside are read. Required where an episode is truncated inside, as the next row is
                the next episode's. After a terminated step the state before it takes the place,
                from which no target bootstraps.
        Returns:
            Its id; with `split_by_flags` the ids of all parts.
        Raises:
            DataError: It does not fit the schema, or has an end flag before its last step; nothing
                has changed.
            StoreFullError: Too few rows are free; with `split_by_flags` earlier parts stay.
        """
        inserter = self._inserter(table)
        if not split_by_flags:
            return self._add(inserter, trajectory)
        return [self._add(inserter, part) for part in inserter.split(trajectory, final)]

    def _add(self, inserter: Inserter, trajectory: Mapping[str, Any]) -> int:
        """Add a trajectory; return its id. A full table is tried again once the device has read."""
        releases = self._parts.releases
        releases.settle()
        try:
            return inserter.add(trajectory)
        except StoreFullError:
            # Rows of selections that the device was reading may be free now.
            if not releases.drain():
                raise
            return inserter.add(trajectory)

    def set_policy_version(self, version: int, table: str | None = None) -> None:
        """Set the version of the learner's policy; the next selection evicts stale trajectories.

        With `on_stale = "wait"` this waits until no actor's open trajectory would exceed the lag.
        Any rank may call it; the version applies to the store of its node.

        Raises:
            ConfigError: The table has no column of policy versions.
            NotReadyError: This process has such a trajectory open, or an actor has not ended its
                own in time.
        """
        self._check_open()
        version = arguments.count("version", version, least=0)
        table_access.set_policy_version(self.store(table), version, self._parts.context)

    def fill(self, trajectory_id: int, table: str | None = None, **columns: Any) -> None:
        """Write late columns of a stored trajectory, once: advantages, returns, log-probabilities.

        Args:
            trajectory_id: Id of the trajectory.
            table: As `add`.
            **columns: [T, *shape], [T+1, *shape] or [*shape], as the schema defines.
        Raises:
            DataError: A column is not late, is already written, or does not fit; nothing has
                changed.
            StoreError: The trajectory is not stored on this node.
        """
        fill(self.store(table), trajectory_id, columns, self.config.timeout_s)

    def writer(self, table: str | None = None) -> TrajectoryWriter:
        """Return a writer of trajectories for simulators in this process.

        If a rank writes, `sample` never waits for items but raises NotReadyError, which
        `can_sample` predicts.

        Raises:
            StoreError: The table holds a data set.
        """
        target = self.store(table)
        for stream in self._parts.streams[target.spec.name].values():
            stream.note_writer()  # a selection must not wait for items that this process would add
        writer = TrajectoryWriter(target, self._inserter(table))
        self._writers.add(writer)
        return writer

    def rollout_worker(self, table: str | None = None) -> RolloutWorker:
        """Return a rollout worker in this process; as with `writer`, `rollout` then never waits.

        Args:
            table: Name of the table; None: the one with prompts.
        Raises:
            ConfigError: The table has no prompts.
        """
        return RolloutWorker(self.writer(self._prompt_table(table)))

    def vector_writer(
        self, num_envs: Any, autoreset: Autoreset | None = None, table: str | None = None
    ) -> VectorWriter:
        """Return a writer of the steps of many environments at once; as `writer().vector_writer`.

        Args:
            num_envs: Number of environments, or the environment itself.
            autoreset: As `TrajectoryWriter.vector_writer`; required with a number.
            table: As `add`.
        Raises:
            DataError: No autoreset mode is given, or it is not the environment's.
            StoreError: The table holds a data set.
        """
        self.store(table)
        resolve(num_envs, autoreset)  # raises before this process counts as a writer
        return self.writer(table).vector_writer(num_envs, autoreset)

    def store(self, table: str | None = None) -> Table:
        """Return this node's store of a table; None: the only one that is sampled.

        Raises:
            ConfigError: There is no such table, or the name must be given.
        """
        self._check_open()
        return self.tables[self._table_name(table, self.tables, self.config.sampled_tables)]

    def close_with(self, part: Any) -> None:
        """Close an object that uses this replay's stores together with this replay."""
        self._dependents.add(part)

    def read(self, ids: Ids, table: str | None = None) -> list[dict[str, Any]]:
        """Copy whole trajectories.

        An evicted trajectory, such as a sampled one of a queue, can be read until its rows are
        freed. Once all ranks have their batch, any process that adds and needs rows may free them.

        Returns:
            For each id, column -> [T, *shape], [T+1, *shape] or [*shape]. The value of an opaque
            column is bytes or a JSON value; None for a late one that is not filled.
        Raises:
            StoreError: An id is not stored, or its rows were freed.
        """
        return table_access.read(self.store(table), ids)

    def remove(self, ids: Ids, table: str | None = None) -> int:
        """Evict trajectories before the next selection; ids that are not stored are ignored.

        In a table with groups, the whole groups of these trajectories are evicted.

        Returns:
            Number of evicted trajectories.
        Raises:
            StoreError: The table holds a data set.
        """
        return table_access.remove(self.store(table), ids)

    def clear(self, table: str | None = None) -> None:
        """Evict all trajectories of a table; the current epoch ends.

        Raises:
            StoreError: The table holds a data set.
        """
        target = self.store(table)
        table_access.clear(target, self._parts.streams[target.spec.name].values())

    def set_prompt_priorities(
        self,
        prompts: torch.Tensor | np.ndarray | Sequence[int],
        priorities: torch.Tensor | np.ndarray | Sequence[float],
        table: str | None = None,
    ) -> None:
        """Set the priorities by which prompts are drawn from the next lease on. Collective.

        Each rank gives those of its own prompts, perhaps none. Of a prompt that several ranks give,
        the last rank's counts; prompts that no rank gives keep theirs. On several nodes, all draw
        by the same priorities.

        Args:
            prompts: Places in the data set of prompts, as `lease.index`. [n], int.
            priorities: [n], finite, at least 0; rounded to multiples of 2^-24, to at least one of
                them above 0. A prompt of priority 0 is never drawn.
            table: Name of the table; None: the one with prompts.
        Raises:
            ConfigError: `prompts.sampler` has no priorities.
            DataError, ShapeError: A prompt is not in the data set or fails `prompts.where`, or a
                priority is not admitted; nothing has changed.
        """
        self._prompt_priorities(table).set(prompts, priorities)

    def prompt_priorities(self, table: str | None = None) -> torch.Tensor:
        """Return the priorities of the prompts of the data set, in order. [prompts], float32.

        Those that `prompts.where` leaves out have 0.
        """
        return self._prompt_priorities(table).values()

    def _prompt_priorities(self, table: str | None) -> PromptPriorities:
        target = self.store(self._prompt_table(table))
        name = target.spec.name
        if name not in self._of_prompts:
            plan = self._plan
            self._of_prompts[name] = PromptPriorities(target, plan.control_plane, plan.leads_shard)
        return self._of_prompts[name]

    def _prompt_table(self, table: str | None) -> str | None:
        """Return the name of a table; of None, that of the first table with prompts, if any."""
        with_prompts = (name for name, one in self.tables.items() if one.ledger is not None)
        return next(with_prompts, None) if table is None else table

    @property
    def run(self) -> str:
        """Id of the run, equal on all ranks: pass it to actors as `run` or GEAR_RUN."""
        return self.store(self.config.sampled_tables[0]).run.id

    def __len__(self) -> int:
        """Return the number of trajectories in this node's stores of the sampled tables."""
        self._check_open()
        return sum(stream.table.num_trajectories for stream in self._parts.train)

    @property
    def num_steps(self) -> int:
        """Number of steps in this node's stores of sampled tables; a shared prompt counts once."""
        self._check_open()
        return sum(stream.table.num_steps for stream in self._parts.train)
