"""TrajectoryWriter: attaches to the store of a running job, and adds trajectories to a table."""

from __future__ import annotations

import time
import weakref
from abc import abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, overload

from deepspeed_gear.data.episode_split import split_episodes
from deepspeed_gear.errors import StoreError, StoreGoneError
from deepspeed_gear.sampling.mass_rules import check_weight
from deepspeed_gear.store.late_columns import fill
from deepspeed_gear.store.shared_memory import is_kept
from deepspeed_gear.store.table import Table
from deepspeed_gear.timeouts import Context
from deepspeed_gear.writer.autoreset_modes import Autoreset, resolve
from deepspeed_gear.writer.inserter import Check, Inserter
from deepspeed_gear.writer.partial_publish import OpenTrajectory, OpenWriter, Publisher
from deepspeed_gear.writer.store_search import attach_store
from deepspeed_gear.writer.vector_writer import VectorWriter

_CHECK_S = 0.5  # shortest time between two checks that the run goes on


class WriterBase(OpenWriter):
    """Base of writers on a node of the table and of those on other machines.

    Attributes:
        table: Name of the table.
        schema: Columns of the table.
        max_length: Steps of the longest trajectory; None: as many as fit.
    """

    @abstractmethod
    def _check(self) -> None:
        """Raise a StoreError unless the writer is open and its run goes on."""

    @abstractmethod
    def _add(self, trajectory: Mapping[str, Any]) -> int:
        """Add one trajectory, as `add`."""

    @overload
    def add(
        self, trajectory: Mapping[str, Any], *, split_by_flags: Literal[False] = False
    ) -> int: ...
    @overload
    def add(
        self,
        trajectory: Mapping[str, Any],
        *,
        split_by_flags: Literal[True],
        final: Mapping[str, Any] | None = None,
    ) -> list[int]: ...
    def add(
        self,
        trajectory: Mapping[str, Any],
        *,
        split_by_flags: bool = False,
        final: Mapping[str, Any] | None = None,
    ) -> int | list[int]:
        """Add a whole trajectory, which the next selection may sample.

        A RemoteWriter sends a copy and returns before it is stored: a later call raises the errors
        of the gateway. It waits while its buffer is full.

        Args:
            trajectory: Column -> [T, *shape], [T+1, *shape] or [*shape], as the schema defines; or
                nested, as in `Replay.add`. A RemoteWriter needs late columns too: it cannot fill
                them later.
            split_by_flags: As `Replay.add`.
            final: As `Replay.add`.
        Returns:
            Its id, or a RemoteWriter's number for it; with `split_by_flags` those of all parts.
        Raises:
            DataError: It does not fit the schema, or has an end flag before its last step; nothing
                has changed.
            StoreFullError: Too few rows are free, and the table evicts nothing.
            NotReadyError: The ranks have not sampled in time, as the table's rate limiter requires.
            StoreError, LostNodeError: The run or the gateway has ended or does not answer.
        """
        self._check()
        if split_by_flags:
            name = f"table {self.table}"
            parts = split_episodes(name, self.schema, trajectory, final, self.max_length)
            return [self.add(part) for part in parts]
        return self._add(trajectory)

    def trajectory(self, **per_trajectory: Any) -> OpenTrajectory:
        """Begin a trajectory that is added at the end of a `with` block.

        After an exception nothing is added; published steps stay, marked as truncated.

        Args:
            **per_trajectory: Columns of one value per trajectory.
        """
        return OpenTrajectory(self, per_trajectory)

    def vector_writer(self, num_envs: Any, autoreset: Autoreset | None = None) -> VectorWriter:
        """Return a writer of the steps of many environments at once.

        Args:
            num_envs: Number of environments, N; or the environment itself, whose number and mode
                are read. A single environment has N = 1 and is reset by the program: "disabled".
            autoreset: When the environments reset, as gymnasium's AutoresetMode: "next_step",
                "same_step" or "disabled". Required if `num_envs` is a number.
        Raises:
            ConfigError: `num_envs` is neither a number nor an environment.
            DataError: No mode is given, or it is not the environment's.
        """
        return VectorWriter(self, *resolve(num_envs, autoreset))


class TrajectoryWriter(WriterBase):
    """Adds trajectories to a table of this node's store.

    In an actor: `TrajectoryWriter.attach(...)`, which needs no DeepSpeed, CUDA or process group.
    In a rank: `replay.writer()`.

    Thread safety: one thread at a time. Up to the table's `writers` processes may write at the same
    time.

    Args:
        table: The table.
        inserter: Adds this process's trajectories to it.
        waiting_checks: Called while `add` waits; they raise to end the wait. Only for a writer
            that attached by itself, whose `close` detaches the table. None: the writer belongs to
            a rank's replay.
    """

    _internal = frozenset(
        "check_goes_on clients end_with_replay native parts publisher waiting_checks "
        "whole_fields".split()
    )

    publisher: Publisher

    def __init__(
        self,
        table: Table,
        inserter: Inserter,
        waiting_checks: list[Callable[[], None]] | None = None,
    ) -> None:
        spec = table.spec
        super().__init__(spec.name, spec.schema, inserter.max_length, spec.whole_fields)
        self.publisher = Publisher(inserter, self.check_goes_on)
        self.native = table.ops.native
        self._table = table
        self._inserter = inserter
        self._open = True
        self._is_attached = waiting_checks is not None
        self._looked = 0.0  # time of the latest check that the run goes on
        self._finalizer = weakref.finalize(self, table.close) if self._is_attached else None
        #: Inference clients that write through this writer, and are closed with it.
        self.clients: weakref.WeakSet[VectorWriter] = weakref.WeakSet()
        self.waiting_checks = [] if waiting_checks is None else waiting_checks
        self._num_whole = 0

    @classmethod
    def attach(
        cls,
        config: str | Path | Mapping[str, Any] | None = None,
        *,
        table: str | None = None,
        name: str | None = None,
        wait_s: float = 60.0,
        run: str | None = None,
        check: Callable[[], None] | None = None,
    ) -> TrajectoryWriter:
        """Attach to the store that the ranks of this node have created or will create.

        Args:
            config: The run's ds_config or `gear` section, a file or a mapping. Stores of another
                schema, capacity, removal, rate or seed are not candidates. None: any store of the
                named run, else any store of the default prefix.
            table: Name of the table; None: the only one that takes writers.
            name: Name of the store's file in /dev/shm, instead of a search. The file must exist
                and match `config`.
            wait_s: How long to wait for the store, in seconds.
            run: Name or id of the run (`Replay.run`), where several runs of one config are on this
                node. None: `gear.shared_memory.run`, else the environment's GEAR_RUN.
            check: Called during waits for ranks; raises to end the wait.
        Raises:
            ConfigError: No such table takes writers, another run is named, or an argument is
                wrong.
            StoreError: No store matches within `wait_s`, several do, or the store has its maximum
                of writers.
        """
        store, options = attach_store(config, table, name, wait_s, run)
        checks: tuple[Check, ...] = ()
        if options["weight"] is not None:
            checks = (partial(check_weight, f"table {store.spec.name}", options["weight"]),)
        waiting: list[Callable[[], None]] = [] if check is None else [check]

        def check_wait() -> None:
            for each in waiting:
                each()

        context = Context(timeout_s=float(options["timeout_s"]), check=check_wait)
        inserter = Inserter(store, context, options["max_length"], checks)
        writer = cls(store, inserter, waiting)
        # A wait for free rows also ends when the run does; the writer exists only now.
        waiting.append(partial(writer.check_goes_on, at_once=True))
        return writer

    def __repr__(self) -> str:
        end = "" if self._open else ", closed"
        return f"TrajectoryWriter({self.table}: {self.num_added:,} trajectories added{end})"

    @property
    def run(self) -> str:
        """Id of the run."""
        return self._table.run.id

    @property
    def parts(self) -> tuple[Table, Inserter]:
        """The table, and the inserter that adds to it."""
        return self._table, self._inserter

    @property
    def waited_s(self) -> float:
        """Total seconds that this writer has waited for ranks."""
        return self._inserter.evictor.waited_s

    def _add(self, trajectory: Mapping[str, Any]) -> int:
        number = self._inserter.add(trajectory)
        self._num_whole += 1
        return number

    @property
    def num_added(self) -> int:
        """Number of trajectories that this writer has added or published."""
        return self._num_whole + self.publisher.num_added

    def fill(self, trajectory_id: int, **columns: Any) -> None:
        """Write late columns of a stored trajectory, once; as `Replay.fill`.

        Raises:
            DataError, StoreError: As `Replay.fill`.
        """
        self.check_goes_on()
        fill(self._table, trajectory_id, columns, self._table.lock.timeout_s)

    def check_goes_on(self, at_once: bool = False) -> None:
        """Check that the writer is open, and that a rank is attached or the store is kept.

        Args:
            at_once: Look for the rank now; else only if the latest look was `_CHECK_S` ago.
        Raises:
            StoreError: The writer is closed; StoreGoneError: the ranks have ended.
        """
        if self._open and not self._is_attached:
            return  # called before every step of a rank's environments: costs one comparison
        name = f"table {self.table}"
        now = time.monotonic()
        if not self._open:
            remedy = "the writer was closed, by itself or with its Replay"
            raise StoreError(name, "must be open", None, remedy)
        if at_once or now - self._looked > _CHECK_S:
            self._looked = now
            if not self._table.has_living_rank and not is_kept(self._table.memory.fd):
                rule = "must belong to a living run"
                raise StoreGoneError(name, rule, None, "its ranks have ended")

    _check = check_goes_on

    def end_with_replay(self) -> None:
        """Close the writer together with its replay: later calls raise."""
        self._open = False

    def close(self) -> None:
        """Detach this writer and its clients; stored steps stay. Safe to call twice."""
        if self._open:
            self.publisher.close()
        self._open = False
        for client in self.clients:
            client.close()
        if self._finalizer is not None:
            self._finalizer()
