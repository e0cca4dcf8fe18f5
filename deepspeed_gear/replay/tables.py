"""What a Replay's tables hold: adding, writing while others sample, reading, removing."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, overload

import torch

import deepspeed_gear.arguments as arguments
from deepspeed_gear.actors.inference_loader import InferenceLoader, open_loader
from deepspeed_gear.config import GearConfig
from deepspeed_gear.errors import ConfigError, StoreError, StoreFullError
from deepspeed_gear.replay import policy_version, table_edits
from deepspeed_gear.replay.builder import ReplayParts
from deepspeed_gear.sampling.batch_stream import BatchStream
from deepspeed_gear.store.process_bound import ProcessBound
from deepspeed_gear.store.table import Table
from deepspeed_gear.writer.autoreset import Autoreset, resolve
from deepspeed_gear.writer.inserter import Inserter
from deepspeed_gear.writer.late_columns import fill
from deepspeed_gear.writer.trajectory_writer import TrajectoryWriter
from deepspeed_gear.writer.vector_writer import VectorWriter


class Tables(ProcessBound):
    """The tables of a Replay, which is made by `Replay`."""

    config: GearConfig
    tables: dict[str, Table]
    _parts: ReplayParts
    _streams: dict[str, dict[str, BatchStream]]
    _inserters: dict[str, Inserter]
    _loaders: list[InferenceLoader]
    _writers: weakref.WeakSet[TrajectoryWriter]
    device: torch.device
    _closed: bool

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError("the Replay", "must be open", None, "it was closed")

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
        maker, inserter = self._parts.maker, self._inserter(table)
        maker.settle()  # what the device has read makes room
        try:
            return inserter.add(trajectory)
        except StoreFullError:
            if not maker.drain():
                raise
            return inserter.add(trajectory)

    def set_version(self, version: int, table: str | None = None) -> None:
        """Say which version the learner's policy has now; steps that are too far behind go at the next cut.

        With `on_stale = "wait"` it waits until no actor's open trajectory would fall too far behind. Any rank
        may say it, each node's ranks for its own store.

        Raises:
            ConfigError: The table has no versions.
            NotReadyError: This process has such a trajectory open, or an actor has not ended it in time.
        """
        self._check_open()
        version = arguments.count("version", version, least=0)
        policy_version.set_version(self._table(table), version, self.config.timeout_s, self._parts.check)

    def fill(self, number: int, table: str | None = None, **columns: Any) -> None:
        """Write late columns of a stored trajectory, once: advantages, returns, log-probabilities.

        Args:
            number: Id of the trajectory.
            table: Which table; None for the sampled one.
            **columns: [T, *shape], [T+1, *shape] or [*shape], as the schema says.
        Raises:
            DataError: A column is not late, was written already, or does not fit; nothing has changed.
            StoreError: The trajectory is not stored on this node.
        """
        self._check_open()
        fill(self._table(table), number, columns, self.config.timeout_s)

    @overload
    def writer(self, envs: None = None, table: str | None = None) -> TrajectoryWriter: ...

    @overload
    def writer(
        self, envs: Any, table: str | None = None, autoreset: Autoreset | None = None
    ) -> VectorWriter: ...

    def writer(
        self, envs: Any = None, table: str | None = None, autoreset: Autoreset | None = None
    ) -> TrajectoryWriter | VectorWriter:
        """Return a writer for simulators in this process.

        Where a rank writes, `sample` never waits for items: it raises NotReadyError, and `can_sample` says
        whether it would.

        Args:
            envs: A number of environments, or an environment: what takes their steps; None: what takes
                trajectories.
            table: Which table; None for the sampled one.
            autoreset: As `TrajectoryWriter.vector`; with a number of environments it must be given.
        Raises:
            DataError: No autoreset mode is given, or not that of the environment.
            StoreError: The table holds a data set.
        """
        self._check_open()
        target = self._table(table)
        if envs is not None:
            resolve(envs, autoreset)  # raises before this process counts as one that writes
        for stream in self._streams.get(target.spec.name, {}).values():
            stream.collect()
        writer = TrajectoryWriter(target, self._inserter(table))
        self._writers.add(writer)
        return writer if envs is None else writer.vector(envs, autoreset)

    def inference_loader(
        self,
        batch_size: int,
        timeout: float | None = None,
        table: str | None = None,
        *,
        num_simulators: int | None = None,
        length: int | None = None,
        asks: Sequence[str] | None = None,
        answers: Sequence[str] | None = None,
    ) -> InferenceLoader:
        """Return the requests of this node's simulators for actions, in batches; `writer.simulators` asks.

        Args:
            batch_size: Requests at most.
            timeout: Seconds to wait for a batch to fill; None: until every simulator waits.
            table: Which table; None for the sampled one.
            num_simulators: Most that attach to this rank; None: twice the batch.
            length: Steps for which each has rows; None: the table's max_length, else 256.
            asks: Columns that the policy sees; None: the observations.
            answers: Columns that it gives; None: the actions.
        Raises:
            ConfigError, StoreError, StoreFullError: As `replay.inference.open_loader`.
        """
        self._check_open()
        places = num_simulators, length, asks, answers
        loader = open_loader(self._table(table), self.config, self.device, batch_size, timeout, *places)
        self._loaders.append(loader)
        return loader

    def _inserter(self, table: str | None) -> Inserter:
        target = self._table(table)
        name = target.spec.name
        if name not in self._inserters:
            options = self.config.resolved_tables[name]
            self._inserters[name] = table_edits.inserter_of(
                target, self._streams_of(target), options.max_length, self.config.timeout_s, self._parts.check
            )
        return self._inserters[name]

    def read(
        self, ids: Sequence[int] | torch.Tensor, table: str | None = None
    ) -> list[dict[str, torch.Tensor]]:
        """Return copies of whole trajectories: column -> [T, *shape], [T+1, *shape] or [*shape].

        A trajectory that was evicted, as one of a queue when it was sampled, can be read until its rows are
        freed: once all ranks have their batch, an addition by any process may do that where it needs room.

        Raises:
            StoreError: An id is not stored, or its rows were freed.
        """
        self._check_open()
        return table_edits.read(self._table(table), ids)

    def remove(self, ids: Sequence[int] | torch.Tensor, table: str | None = None) -> int:
        """Remove trajectories from the next cut on; ids that are not stored are ignored.

        Returns:
            How many were removed.
        Raises:
            StoreError: The table holds a data set.
        """
        self._check_open()
        target = self._table(table)
        return table_edits.remove(target, ids)

    def clear(self, table: str | None = None) -> None:
        """Remove everything from a table; an epoch that is under way ends.

        Raises:
            StoreError: The table holds a data set.
        """
        self._check_open()
        target = self._table(table)
        table_edits.clear(target, self._streams_of(target))

    def _table(self, name: str | None) -> Table:
        self._check_open()
        known = ", ".join(self.tables)
        if name is None and len(self.config.sampled_tables) > 1:
            raise ConfigError("table", "must be given where there are several", None, f"one of {known}")
        name = self.config.sampled_tables[0] if name is None else name
        if not isinstance(name, str) or name not in self.tables:
            raise ConfigError("table", f"must be one of {known}", name)
        return self.tables[name]

    def _streams_of(self, table: Table) -> list[BatchStream]:
        return list(self._streams[table.spec.name].values())

    @property
    def _sampled(self) -> list[Table]:
        self._check_open()
        return [self.tables[name] for name in self.config.sampled_tables]

    @property
    def run(self) -> str:
        """Id of the run, the same on all ranks: `run=` or GEAR_RUN of an actor that is to write into it."""
        return self._table(self.config.sampled_tables[0]).run.id

    def __len__(self) -> int:
        """Return the number of trajectories in this node's stores of the sampled tables."""
        return sum(table.num_trajectories for table in self._sampled)

    @property
    def num_steps(self) -> int:
        """Steps in this node's stores of the sampled tables."""
        return sum(table.num_steps for table in self._sampled)
