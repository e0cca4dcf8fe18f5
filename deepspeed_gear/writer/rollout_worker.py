"""RolloutWorker: leases prompts of a table's ledger, and commits the groups generated from them."""

from __future__ import annotations

import io
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

import deepspeed_gear.arguments as arguments
from deepspeed_gear.data.dataset import reopened
from deepspeed_gear.data.media import MediaItem
from deepspeed_gear.errors import ConfigError, DataError, LeaseExpiredError, undo_on_error
from deepspeed_gear.schema import Schema
from deepspeed_gear.store.process_bound import ProcessBound
from deepspeed_gear.store.prompt_ledger import REASON_BYTES, LeasedPrompt, PromptCount
from deepspeed_gear.store.records import Head, SlotRetention
from deepspeed_gear.timeouts import check_timeout, wait_until
from deepspeed_gear.writer.trajectory_writer import TrajectoryWriter

_POLL_S = 5e-3


class Lease:
    """A prompt that a rollout worker holds until it commits or fails it.

    Leases end in any order. One whose time has passed, or whose worker has ended, comes back: its prompt is
    leased again, and this one's `commit` raises LeaseExpiredError.

    Attributes:
        number: epoch * prompts + place in the epoch's order: the group's number. Never the same twice.
        prompt: The columns of the prompt, as `Dataset.trajectory`; views of the data set.
        version: Rollout batches that were trained at the lease: generate with weights of it or later.
        attempt: 1 for the first lease of this number.
        kept: Arrays that the lease before it has kept, by name. If there are some, `version` is that of the
            first lease that kept any: what is generated goes on with weights of it or later.
    """

    def __init__(self, worker: Any, lease: LeasedPrompt, prompt: dict[str, Any]) -> None:
        self._worker, self._lease, self.prompt = worker, lease, prompt
        self.number, self.version, self.attempt = lease.number, lease.version, lease.attempt
        self._ending = ""  # how this process has ended it
        self.kept: dict[str, np.ndarray] = {}
        if lease.kept:
            with np.load(io.BytesIO(lease.kept), allow_pickle=False) as arrays:
                self.kept = dict(arrays)

    def __repr__(self) -> str:
        return f"Lease(prompt {self.number}, version {self.version}, attempt {self.attempt})"

    def commit(self, trajectories: Sequence[Mapping[str, Any]]) -> list[int]:
        """Add the `group.size` trajectories of the group, all or none, and end the lease. Returns their ids.

        They are as `Replay.add` takes them; the group's column may be left out.

        Raises:
            LeaseExpiredError: The lease came back; nothing is added.
            DataError, StoreFullError, NotReadyError: As `Replay.add`; the lease goes on.
        """
        with self._named_ending():
            ids = list(self._worker._publish(self._lease, trajectories))
        self._ending = "it was committed"
        return ids

    def fail(self, reason: str = "failed", retry: bool = True) -> None:
        """End the lease without a group; its prompt is leased again, up to `prompts.attempts` times.

        Args:
            reason: Name under which the prompt is counted if it is dropped, of 32 bytes at most.
            retry: False: it is dropped now.
        Raises:
            LeaseExpiredError: The lease came back already.
        """
        if not isinstance(reason, str) or not 0 < len(reason.encode()) <= REASON_BYTES:
            rule = f"must be a name of 1 to {REASON_BYTES} bytes"
            raise ConfigError("reason", rule, reason, "reasons are counted by name: use a few short ones")
        with self._named_ending():
            self._worker._change("fail", self._lease, reason, bool(retry))
        self._ending = f"it was failed as {reason!r}"

    def keep(self, **arrays: Any) -> None:
        """Keep arrays for the next lease of the prompt, in place of those before, and renew this one.

        It has them, as `kept`, if this lease comes back: its worker has died, its time has passed, or it
        failed. So a rollout goes on turn by turn, with the weights of another version.

        Raises:
            DataError: They need more than `prompts.keep_bytes`, as an npz file; what was kept before stays.
            LeaseExpiredError: The lease came back.
        """
        name, file, most = f"what is kept of prompt {self.number}", io.BytesIO(), self._worker.keep_bytes
        for key, value in arrays.items():
            at, rule = f"{name}: {key}", "must be an array of numbers or text"
            with DataError.on(at, rule, TypeError, ValueError, RuntimeError):
                arrays[key] = np.asarray(value)
            if arrays[key].dtype.hasobject or key in ("file", "allow_pickle"):  # as options of `savez`
                raise DataError(at, f"{rule}, not named file or allow_pickle", type(value).__name__)
        np.savez(file, **arrays)
        data = file.getvalue() if arrays else b""
        if len(data) > most:
            raise DataError(name, f"must need at most prompts.keep_bytes = {most}", len(data), "raise it")
        with self._named_ending():
            self._worker._change("keep", self._lease, data)

    def heartbeat(self) -> None:
        """Begin the time, `prompts.lease_s`, anew; LeaseExpiredError: it came back, so stop generating."""
        with self._named_ending():
            self._worker._change("renew", self._lease)

    @contextmanager
    def _named_ending(self) -> Iterator[None]:
        """Name how this process has ended the lease, which the ledger may not know any more."""
        try:
            yield
        except LeaseExpiredError as error:
            if not self._ending:
                raise
            rule, remedy = f"must be held by this worker: {self._ending}", "end a lease once"
            raise LeaseExpiredError(error.name, rule, None, remedy) from None


class RolloutWorker(ProcessBound):
    """Leases prompts and commits groups: `RolloutWorker.attach(...)`; in a rank `replay.rollout_worker()`.

    Thread safety: one thread at a time. A table's `writers` bounds the attached processes.
    """

    def __init__(self, writer: TrajectoryWriter) -> None:
        table, inserter = writer.parts
        if table.ledger is None:
            rule, remedy = "must be given for rollout workers", "use a TrajectoryWriter, or give the prompts"
            raise ConfigError(f"gear.tables.{table.spec.name}.prompts", rule, None, remedy)
        self._writer, self._table, self._inserter, self._ledger = writer, table, inserter, table.ledger
        self._spec, self._name = table.ledger.spec, f"table {table.spec.name}"
        #: The specification of the table.
        self.spec = table.spec
        #: How many bytes a lease may keep.
        self.keep_bytes = self._spec.keep_bytes
        #: The data set of the prompts.
        self.prompts = reopened(Path(self._spec.data), self._spec.fingerprint)
        self._position: np.ndarray = table.views["stream/train/position"]
        self._is_closed = False

    @classmethod
    def attach(cls, config: str | Path | Mapping[str, Any] | None = None, **options: Any) -> RolloutWorker:
        """Attach to the store of a run of this node; options and errors as of `TrajectoryWriter.attach`."""
        writer = TrajectoryWriter.attach(config, **options)
        with undo_on_error(writer.close):
            return cls(writer)

    def __repr__(self) -> str:
        return f"RolloutWorker({self._table.spec.name}: {self._spec.num_prompts:,} prompts)"

    def lease(self, count: int = 1, timeout_s: float = 60.0) -> list[Lease]:
        """Lease up to `count` prompts, those that came back first; wait while `prompts.max_lag` admits none.

        Args:
            timeout_s: Longest wait, in seconds; 0: none.
        Returns:
            1 to `count` leases; none after the timeout.
        Raises:
            StoreError: The worker is closed, or the run has ended.
        """
        wanted, timeout_s = arguments.count("count", count), check_timeout("timeout_s", timeout_s)
        self._writer.check_goes_on()

        def take() -> list[LeasedPrompt] | None:
            if self._spec.members and not self._table.has_living_rank:
                return None  # until the next job attaches to the store
            with self._table.lock:
                found = self._ledger.lease(wanted)
                if not found and self._table.groups is not None:
                    self._table.groups.update()  # those that fail `where` make room
                    found = self._ledger.lease(wanted)
                return found or None

        begin = time.monotonic_ns()
        taken = wait_until(take, timeout_s, _POLL_S, self._writer.check_goes_on)
        with self._table.lock:
            self._ledger.counts[PromptCount.WAITED_NS] += time.monotonic_ns() - begin
        with undo_on_error(lambda: self.release(taken or ())):  # a damaged row of the data set
            return [Lease(self, lease, self._prompt(lease.number)) for lease in taken or ()]

    def _prompt(self, number: int) -> dict[str, Any]:
        spec, index = self._spec, torch.empty(1, dtype=torch.int64)
        epoch, place = divmod(number, spec.num_prompts)
        self._table.ops.permute_(index, spec.seed, spec.key, epoch, place, spec.num_prompts)
        return self.prompts.trajectory(int(index))

    def _change(self, change: str, lease: LeasedPrompt, *more: Any) -> None:
        """Call a method of the ledger that changes a lease, with the lock held."""
        self._writer.check_goes_on()
        with self._table.lock:
            getattr(self._ledger, change)(lease, *more)

    def release(self, leases: Iterable[LeasedPrompt]) -> None:
        """Return leases as if this worker had ended; what has ended stays as it is."""
        with self._table.lock:
            self._ledger.release(self._table.memory.peer, [lease.token for lease in leases])

    def _publish(self, lease: LeasedPrompt, trajectories: Sequence[Mapping[str, Any]]) -> list[int]:
        """Add the group of a lease, as `Lease.commit`."""
        self._writer.check_goes_on()
        items, table, names = dict[int, MediaItem](), self._table, self._table.spec.schema.names
        group = table.spec.group
        assert group is not None
        assert table.shared_prompts is not None
        given = arguments.one_of("trajectories", trajectories, Sequence, "a list of trajectories")
        number = np.int64(lease.number)
        checked = [self._inserter.checked({group.column: number, **one}, items) for one in given]
        name, column = f"{self._name}: the group of prompt {lease.number}", names.index(group.column)
        for columns, _, _ in checked:
            self._inserter.check_finite(columns)
            if columns[column].item() != lease.number:
                rule, remedy = f"must have the prompt's number in {group.column}", "leave the column out"
                raise DataError(name, rule, columns[column].item(), remedy)
        if len(checked) != group.size:
            rule = f"must have {group.size} trajectories"
            raise DataError(name, rule, len(checked), "fail() it if it cannot be complete")
        slots, ids, version = list[int](), list[int](), lease.version
        groups = [columns for columns, _, _ in checked]
        prompt = _prompt_steps(table.spec.schema, groups) if table.spec.shares_prompts else 0

        def publish() -> None:
            for slot, (_, _, present) in zip(slots, checked, strict=True):
                ids.append(table.commit(slot, int(self._position[Head.KEY])))
                table.views["retention"][slot, SlotRetention.PRESENT : SlotRetention.OPEN] = present, version

        with undo_on_error(lambda: self._inserter.free(slots)):
            for columns, num_steps, _ in checked:
                shared = prompt if slots else 0  # the first one holds the prompt
                slots.append(self._inserter.reserve(num_steps - shared, leased=True))
                table.write(slots[-1], dict(zip(names, columns, strict=True)), before=shared)
            table.shared_prompts[slots[1:]] = prompt, slots[0]
            table.shared_prompts[slots[0]] = 0
            self._inserter.add_media(groups, items)
            with table.lock:
                self._ledger.commit(lease, publish, len(slots))
        return ids

    def close(self) -> None:
        """Return the leases that this process holds, and detach. Safe to call twice."""
        if not self._is_closed:
            self._is_closed = True
            with self._table.lock:
                self._ledger.release(self._table.memory.peer)
            self._writer.close()


def _prompt_steps(schema: Schema, trajectories: Sequence[list[np.ndarray]]) -> int:
    """Return with how many equal steps the trajectories of a group begin: all of their prompt but its last
    one, whose place predicts the first token of the loss. 0: their prompts differ. Columns in stored form.
    """
    first, mask = 1 << 62, schema.role("loss_mask")
    assert mask is not None
    number = schema.names.index(mask.name)
    for columns in trajectories:
        counts = columns[number].astype(bool, copy=False)
        at = int(counts.argmax())
        first = min(first, at if counts[at] else len(counts))
    for index, column in enumerate(schema):
        if column.rows != "1" and first > 1:
            prompt = trajectories[0][index][:first].tobytes()
            if any(columns[index][:first].tobytes() != prompt for columns in trajectories[1:]):
                return 0
    return max(first - 1, 0)
