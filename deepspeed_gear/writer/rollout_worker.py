"""RolloutWorker: leases of prompts, commits of the groups generated from them, heartbeats."""

from __future__ import annotations

import io
import time
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from itertools import starmap
from pathlib import Path
from typing import Any

import numpy as np
import torch

import deepspeed_gear.arguments as arguments
from deepspeed_gear.data.dataset import reopened
from deepspeed_gear.errors import ConfigError, DataError, LeaseExpiredError, undo_on_error
from deepspeed_gear.sampling.conditions import Condition, admitted_prompts
from deepspeed_gear.store.process_bound import ProcessBound
from deepspeed_gear.store.prompt_ledger import LeaseRecord
from deepspeed_gear.store.prompt_spec import REASON_BYTES
from deepspeed_gear.timeouts import check_timeout, wait_until
from deepspeed_gear.writer.trajectory_writer import TrajectoryWriter

_POLL_S = 5e-3


class LeaseLedger(ProcessBound):
    """A table's prompt ledger as rollout workers use it, in this node's store or over a gateway.

    Methods that change a lease raise a LeaseExpiredError if it has ended.
    """

    @property
    @abstractmethod
    def keep_bytes(self) -> int:
        """How many bytes a lease may keep."""

    @abstractmethod
    def lease(self, count: int, timeout_s: float) -> list[tuple[LeaseRecord, dict[str, Any]]]:
        """Lease up to `count` prompts, each with its columns; wait while none is admitted."""

    @abstractmethod
    def renew(self, lease: LeaseRecord) -> None:
        """Begin the time of a lease anew."""

    @abstractmethod
    def keep(self, lease: LeaseRecord, data: bytes) -> None:
        """Keep at most `keep_bytes` for the next lease of the prompt, and renew this one."""

    @abstractmethod
    def commit(self, lease: LeaseRecord, members: Sequence[Any]) -> list[int]:
        """Add the group of a lease and end it; as `Lease.commit`."""

    @abstractmethod
    def fail(self, lease: LeaseRecord, reason: str, retry: bool) -> None:
        """End a lease without a group; as `Lease.fail`."""


def check_reason(reason: Any) -> None:
    """Raise a ConfigError unless a reason is a name under which dropped prompts can be counted."""
    if not isinstance(reason, str) or not 0 < len(reason.encode()) <= REASON_BYTES:
        rule = f"must be a name of 1 to {REASON_BYTES} bytes"
        raise ConfigError(
            "reason", rule, reason, "reasons are counted by name: use a few short ones"
        )


def check_kept(lease: LeaseRecord, data: bytes, most_bytes: int) -> None:
    """Raise a DataError if the data that a lease keeps need more than `most_bytes`."""
    if len(data) > most_bytes:
        rule = f"must need at most prompts.keep_bytes = {most_bytes}"
        remedy = "raise prompts.keep_bytes, or keep less"
        raise DataError(f"what is kept of prompt {lease.number}", rule, len(data), remedy)


class Lease:
    """A prompt that a rollout worker holds until it commits or fails it.

    Leases end in any order. A lease comes back when its time has passed or its worker has ended:
    the prompt is then leased again, and `commit` of the old lease raises a LeaseExpiredError.

    Attributes:
        number: Number of the group, never given twice: epoch * prompts + place in the epoch's
            order. Of 100 prompts, the third of the second epoch has the number 102.
        prompt: The columns of the prompt, as `Dataset.trajectory`; views of the data set.
        version: Number of rollout batches that were trained at the lease: generate with weights of
            this version or later.
        attempt: 1 for the first lease of this number.
        index: Place of the prompt in its data set, the same in every epoch.
    """

    def __init__(self, ledger: LeaseLedger, lease: LeaseRecord, prompt: dict[str, Any]) -> None:
        self._ledger = ledger
        self._lease = lease
        self.prompt = prompt
        self.number = lease.number
        self.version = lease.version
        self.attempt = lease.attempt
        self.index = lease.place
        self._ending = ""  # how this process has ended it

    @cached_property
    def kept(self) -> dict[str, np.ndarray]:
        """Arrays by name that the previous lease of the prompt has kept.

        If there are any, `version` is that of the first lease that kept some: generation goes on
        with weights of that version or later.
        """
        if not self._lease.kept:
            return {}
        with np.load(io.BytesIO(self._lease.kept), allow_pickle=False) as arrays:
            return dict(arrays)

    def __repr__(self) -> str:
        return f"Lease(prompt {self.number}, version {self.version}, attempt {self.attempt})"

    def commit(
        self, members: Sequence[Mapping[str, Any] | Sequence[Mapping[str, Any]]]
    ) -> list[int]:
        """Add all trajectories of the group at once, and end the lease.

        Args:
            members: The `group.size` members of the group, or at least `group.min_size`. A member
                is a trajectory, as `Replay.add` takes it, or with `group.member` a list of one or
                several trajectories in their order. The columns of the group and of the member may
                be left out: the commit fills in the number of the prompt and the member's place.
        Returns:
            The ids of the trajectories, member by member.
        Raises:
            LeaseExpiredError: The lease came back; nothing is added.
            DataError, StoreFullError, NotReadyError: As `Replay.add`; nothing is added, and the
                lease goes on.
        """
        with self._named_ending():
            ids = self._ledger.commit(self._lease, members)
        self._ending = "it was committed"
        return ids

    def fail(self, reason: str = "failed", retry: bool = True) -> None:
        """End the lease without a group.

        The prompt is leased again, up to `prompts.attempts` times in total; then it is dropped.

        Args:
            reason: Name under which a dropped prompt is counted, of 32 bytes at most.
            retry: Whether the prompt may be leased again; False drops it now.
        Raises:
            LeaseExpiredError: The lease came back already.
        """
        check_reason(reason)
        with self._named_ending():
            self._ledger.fail(self._lease, reason, bool(retry))
        self._ending = f"it was failed as {reason!r}"

    def keep(self, **arrays: Any) -> None:
        """Keep arrays for the next lease of the prompt, and renew this lease.

        They replace the arrays that were kept before. If this lease comes back (its worker died,
        its time passed, or it failed), the next lease has them as `kept`: a rollout of several
        turns goes on, perhaps with weights of another version.

        Args:
            **arrays: Arrays of numbers or text, by name.
        Raises:
            DataError: They need more than `prompts.keep_bytes` as an npz file, or one is of
                another kind; the arrays kept before stay.
            LeaseExpiredError: The lease came back.
        """
        rule = "must be an array of numbers or text"
        for key, value in arrays.items():
            at = f"what is kept of prompt {self.number}: {key}"
            with DataError.on(
                at,
                rule,
                TypeError,
                ValueError,
                RuntimeError,
                remedy="convert it with numpy.asarray",
            ):
                arrays[key] = np.asarray(value)
            is_option = key in ("file", "allow_pickle")  # of `savez`, which would take it as such
            if arrays[key].dtype.hasobject or is_option:
                raise DataError(
                    at,
                    f"{rule}, not named file or allow_pickle",
                    type(value).__name__,
                    "give arrays of numbers or text, under other names",
                )
        file = io.BytesIO()
        np.savez(file, **arrays)
        data = file.getvalue() if arrays else b""
        check_kept(self._lease, data, self._ledger.keep_bytes)
        with self._named_ending():
            self._ledger.keep(self._lease, data)

    def heartbeat(self) -> None:
        """Renew the lease for another `prompts.lease_s` seconds.

        Raises:
            LeaseExpiredError: The lease came back; stop generating.
        """
        with self._named_ending():
            self._ledger.renew(self._lease)

    @contextmanager
    def _named_ending(self) -> Iterator[None]:
        """Name in errors how this process has ended the lease; the ledger may have forgotten it."""
        try:
            yield
        except LeaseExpiredError as error:
            if not self._ending:
                raise
            rule = f"must be held by this worker: {self._ending}"
            remedy = "end a lease once"
            raise LeaseExpiredError(error.name, rule, None, remedy) from None


class LocalLedger(LeaseLedger):
    """The prompt ledger of a store of this node.

    Thread safety: one thread at a time commits; any thread calls the other methods.
    """

    def __init__(self, writer: TrajectoryWriter) -> None:
        table, inserter = writer.parts
        if table.ledger is None:
            rule = "must be given for rollout workers"
            remedy = "use a TrajectoryWriter, or give the prompts"
            raise ConfigError(f"gear.tables.{table.spec.name}.prompts", rule, None, remedy)
        self._writer = writer
        self._table = table
        self._inserter = inserter
        self._ledger = table.ledger
        self.spec = table.ledger.spec
        self.prompts = reopened(Path(self.spec.data), self.spec.fingerprint)
        #: Places of the prompts that `where` admits, ascending.
        self._admitted = admitted_prompts(self.prompts, starmap(Condition, self.spec.where))
        self._is_closed = False

    @property
    def keep_bytes(self) -> int:
        return self.spec.keep_bytes

    def lease(self, count: int, timeout_s: float) -> list[tuple[LeaseRecord, dict[str, Any]]]:
        self._writer.check_goes_on()
        begin = time.monotonic_ns()
        take = partial(self._take, count)
        leases = wait_until(take, timeout_s, _POLL_S, self._writer.check_goes_on) or []
        with self._table.lock:
            self._ledger.note_waited(time.monotonic_ns() - begin)
        if self._ledger.masses is None:
            leases = [lease._replace(place=self._place(lease.number)) for lease in leases]
        # A damaged row of the data set raises here: the prompts are leased again.
        with undo_on_error(partial(self.release, leases)):
            return [(lease, self.prompts.trajectory(lease.place)) for lease in leases]

    def _take(self, count: int) -> list[LeaseRecord] | None:
        """Lease up to `count` prompts now; None if none is admitted."""
        table = self._table
        if self.spec.is_kept and not table.has_living_rank:
            return None  # until the next job attaches to the store
        with table.lock:
            leases = self._ledger.lease(count)
            if not leases and table.groups is not None:
                table.groups.update()  # groups that fail `where` admit other prompts
                leases = self._ledger.lease(count)
            if self._ledger.masses is not None:
                drawn = [self._ledger.drawn(lease) for lease in leases]
                placed = zip(leases, self._admitted[drawn].tolist(), strict=True)
                leases = [lease._replace(place=place) for lease, place in placed]
        return leases or None

    def _place(self, number: int) -> int:
        """Return the place of a number's prompt in the data set, by its epoch's permutation."""
        spec = self.spec
        epoch, first = divmod(number, spec.num_prompts)
        index = torch.empty(1, dtype=torch.int64)
        self._table.ops.permute_(index, spec.seed, spec.random_key, epoch, first, spec.num_prompts)
        return int(self._admitted[int(index)])

    def renew(self, lease: LeaseRecord) -> None:
        self._writer.check_goes_on()
        with self._table.lock:
            self._ledger.renew(lease)

    def keep(self, lease: LeaseRecord, data: bytes) -> None:
        self._writer.check_goes_on()
        with self._table.lock:
            self._ledger.keep(lease, data)

    def fail(self, lease: LeaseRecord, reason: str, retry: bool) -> None:
        self._writer.check_goes_on()
        with self._table.lock:
            self._ledger.fail(lease, reason, retry)

    def refuse(self, lease: LeaseRecord) -> None:
        """Raise a LeaseExpiredError for a lease that is not held, and count the refusal."""
        self._writer.check_goes_on()
        with self._table.lock:
            self._ledger.own(lease._replace(entry=0, token=-1))  # no lease has this token

    def release(self, leases: Iterable[LeaseRecord]) -> None:
        """Return leases as if this worker had ended; leases that have ended stay so."""
        with self._table.lock:
            self._ledger.release(self._table.memory.peer, [lease.token for lease in leases])

    def commit(self, lease: LeaseRecord, members: Sequence[Any]) -> list[int]:
        self._writer.check_goes_on()
        return self._inserter.add_group(lease, members)

    def close(self) -> None:
        """Return the leases of this process, and close its writer. Safe to call twice."""
        if not self._is_closed:
            self._is_closed = True
            with self._table.lock:
                self._ledger.release(self._table.memory.peer)
            self._writer.close()


class LeaseWorker(ProcessBound):
    """Base of rollout workers on a node of the table and of those on other machines."""

    def __init__(self, ledger: LeaseLedger) -> None:
        self._ledger = ledger

    @property
    def keep_bytes(self) -> int:
        """How many bytes a lease may keep."""
        return self._ledger.keep_bytes

    def lease(self, count: int = 1, timeout_s: float = 60.0) -> list[Lease]:
        """Lease up to `count` prompts; prompts that came back are first.

        Waits while `prompts.max_lag` admits none. A RemoteRolloutWorker leases at most as many as
        fit into a message of `--max-message` bytes.

        Args:
            count: Maximum number of leases.
            timeout_s: Longest wait, in seconds; 0: none.
        Returns:
            1 to `count` leases; none after the timeout.
        Raises:
            StoreError: The worker is closed, or the run has ended.
            LostNodeError: The gateway does not answer.
        """
        wanted = arguments.count("count", count)
        timeout_s = check_timeout("timeout_s", timeout_s)
        return [Lease(self._ledger, *one) for one in self._ledger.lease(wanted, timeout_s)]

    def close(self) -> None:
        """Return the leases of this worker, and detach or disconnect. Safe to call twice."""
        self._ledger.close()


class RolloutWorker(LeaseWorker):
    """Leases prompts from a store of this node, and commits the groups generated from them.

    In a process of its own: `RolloutWorker.attach(...)`. In a rank: `replay.rollout_worker()`.

    Thread safety: one thread at a time. A table's `writers` limits the attached processes.

    Attributes:
        spec: The specification of the table.
        prompts: The data set of the prompts.
    """

    def __init__(self, writer: TrajectoryWriter) -> None:
        ledger = LocalLedger(writer)
        super().__init__(ledger)
        self.spec = writer.parts[0].spec
        self.prompts = ledger.prompts

    @classmethod
    def attach(
        cls, config: str | Path | Mapping[str, Any] | None = None, **options: Any
    ) -> RolloutWorker:
        """Attach to the store of a run of this node.

        Args:
            config: As `TrajectoryWriter.attach`.
            **options: As `TrajectoryWriter.attach`.
        Raises:
            ConfigError, StoreError: As `TrajectoryWriter.attach`; or the table has no prompts.
        """
        writer = TrajectoryWriter.attach(config, **options)
        with undo_on_error(writer.close):
            return cls(writer)

    def __repr__(self) -> str:
        return f"RolloutWorker({self.spec.name}: {len(self.prompts):,} prompts)"
