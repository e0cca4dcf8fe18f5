"""TrajectoryWriter: adds the trajectories of actors to a table."""

from __future__ import annotations

import time
import weakref
from abc import abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, overload

from deepspeed_gear.context import Context
from deepspeed_gear.data.trajectory_checks import split_episodes
from deepspeed_gear.errors import StoreError
from deepspeed_gear.sampling.mass_rules import check_weight
from deepspeed_gear.store.shared_memory import is_kept
from deepspeed_gear.store.table import Table
from deepspeed_gear.writer.attach_writer import attach
from deepspeed_gear.writer.autoreset import Autoreset, resolve
from deepspeed_gear.writer.inserter import Inserter
from deepspeed_gear.writer.late_columns import fill
from deepspeed_gear.writer.partial_publish import OpenTrajectory, OpenWriter, Publisher
from deepspeed_gear.writer.vector_writer import VectorWriter

_CHECK_S = 0.5  # how often a writer checks that the run goes on


class WriterBase(OpenWriter):
    """What writers of a node of the table (TrajectoryWriter) and of other machines (RemoteWriter) share.

    Attributes:
        table: Name of the table.
        schema: Columns of the table.
        max_length: Steps of the longest trajectory; None: as many as fit.
    """

    @abstractmethod
    def _check(self) -> None:
        """Raise unless the writer is open, and what it writes to goes on."""

    @abstractmethod
    def _add(self, trajectory: Mapping[str, Any]) -> int:
        """Add one trajectory, as `add`."""

    @overload
    def add(self, trajectory: Mapping[str, Any], *, split_by_flags: Literal[False] = False) -> int: ...
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
        """Add a whole trajectory; batches from the next selection on may hold it.

        A RemoteWriter sends a copy of it and returns before it is stored: errors that the gateway finds are
        raised by a later call. It waits while its buffer is full.

        Args:
            trajectory: Column -> [T, *shape], [T+1, *shape] or [*shape], as the schema defines; or nested, as
                in `Replay.add`. A RemoteWriter must be given late columns too: it cannot fill them later.
            split_by_flags: As `Replay.add`.
            final: As `Replay.add`.
        Returns:
            Its id, of a RemoteWriter its number; with `split_by_flags` those of the parts.
        Raises:
            DataError: It does not fit the schema, or has an end flag before its last step; nothing has
                changed.
            StoreFullError: Too few rows are free, and the table evicts nothing.
            NotReadyError: The ranks have not sampled in time, as the table's rate limiter requires.
            StoreError, LostNodeError: The run or the gateway has ended, or does not answer.
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
            num_envs: N; or the environment, whose number and mode are read. A single environment has N = 1
                and is reset by the program: "disabled".
            autoreset: What the environments do after the last step of an episode, as gymnasium's
                AutoresetMode: "next_step", "same_step" or "disabled". With a number it must be given.
        Raises:
            DataError: No mode is given, or it is not the environment's.
        """
        return VectorWriter(self, *resolve(num_envs, autoreset))


class TrajectoryWriter(WriterBase):
    """Adds trajectories to a table of this node's store.

    In an actor: `TrajectoryWriter.attach(...)`; it needs no DeepSpeed, CUDA or process group. In a rank:
    `replay.writer()`.

    Thread safety: one thread at a time. Up to the table's `writers` processes may write at the same time.

    Args:
        waiting_checks: Of a writer that was attached by itself: called while `add` waits; they raise to end
            the wait. `close` detaches the table. None: writer and table belong to a rank's replay.
    """

    _internal = frozenset(
        "check_goes_on clients end_with_replay native parts publisher waiting_checks whole_fields".split()
    )

    publisher: Publisher

    def __init__(
        self, table: Table, inserter: Inserter, waiting_checks: list[Callable[[], None]] | None = None
    ) -> None:
        spec = table.spec
        super().__init__(spec.name, spec.schema, inserter.max_length, spec.whole_fields)
        self.publisher, self.native = Publisher(inserter, self.check_goes_on), table.ops.native
        self._table, self._inserter, self._open = table, inserter, True
        self._is_attached, self._looked = waiting_checks is not None, 0.0  # when it looked for the ranks
        self._finalizer = weakref.finalize(self, table.close) if self._is_attached else None
        #: What writes through this writer, and is closed with it.
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
        """Attach to the store that the ranks of this node have created, or will create.

        Args:
            config: The run's ds_config or `gear` section, a file or a mapping. Stores of another schema,
                capacity, removal, rate or seed are not candidates.
            table: Name of the table; None: the only one that admits writers.
            name: Of the store's file in /dev/shm, instead of a search. It must exist, and match `config`.
            wait_s: How long to wait for the store, in seconds.
            run: Name or id of the run (`Replay.run`), where several of one config run on this node. None:
                `gear.shared_memory.run`, else the environment's GEAR_RUN.
            check: Called during waits for ranks; raises to end the wait.
        Raises:
            ConfigError, StoreError: As `writer.attach.attach`.
        """
        of, options = attach(config, table, name, wait_s, run)
        weight = options["weight"]
        checks = () if weight is None else (partial(check_weight, f"table {of.spec.name}", weight),)
        waiting: list[Callable[[], None]] = [] if check is None else [check]

        def check_wait() -> None:
            for each in waiting:
                each()

        context = Context(timeout_s=float(options["timeout_s"]), check=check_wait)
        inserter = Inserter(of, context, options["max_length"], checks)
        writer = cls(of, inserter, waiting)
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
        """The table, and what adds to it."""
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
        """Raise a StoreError unless the writer is open, and a rank is attached or the store is kept.

        Unless `at_once`, it looks for the rank only if the last time was longer than `_CHECK_S` ago.
        """
        if self._open and not self._is_attached:
            return  # before every step, so it costs no more than a call
        name, now = f"table {self.table}", time.monotonic()
        if not self._open:
            remedy = "the writer was closed, by itself or with its Replay"
            raise StoreError(name, "must be open", None, remedy)
        if at_once or now - self._looked > _CHECK_S:
            self._looked = now
            if not self._table.has_living_rank and not is_kept(self._table.memory.fd):
                raise StoreError(name, "must belong to a living run", None, "its ranks have ended")

    _check = check_goes_on

    def end_with_replay(self) -> None:
        """Close the writer together with its replay: later calls raise."""
        self._open = False

    def close(self) -> None:
        """Detach this writer and its clients; added and published steps stay. Safe to call twice."""
        if self._open:
            self.publisher.close()
        self._open = False
        for client in self.clients:
            client.close()
        if self._finalizer is not None:
            self._finalizer()
