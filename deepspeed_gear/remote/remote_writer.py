"""RemoteWriter: adds trajectories of actors on machines without a store, through a gateway."""

from __future__ import annotations

import logging
import threading
import uuid
import weakref
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, overload

import numpy as np

import deepspeed_gear.arguments as arguments
from deepspeed_gear.data.nested_columns import flatten
from deepspeed_gear.data.trajectory_checks import check_finite, check_trajectory, split_episodes
from deepspeed_gear.errors import ConfigError, DataError, GearError, StoreError, show_bytes
from deepspeed_gear.remote.connection import Connection, ConnectionLost, raise_error
from deepspeed_gear.remote.gateway_messages import MOST_MAX_MESSAGE_BYTES, VERSION, trajectory_bytes
from deepspeed_gear.remote.sender import RetryPolicy, Sender, SendOptions, end_session
from deepspeed_gear.schema import Schema
from deepspeed_gear.store.process_bound import ProcessBound
from deepspeed_gear.timeouts import check_timeout
from deepspeed_gear.writer.autoreset import Autoreset, resolve
from deepspeed_gear.writer.inserter import EpisodeLimit
from deepspeed_gear.writer.open_trajectory import OpenTrajectory
from deepspeed_gear.writer.vector_writer import VectorWriter

LOG = logging.getLogger("deepspeed_gear")


class RemoteWriter(ProcessBound):
    """Adds trajectories to a table of another machine, through the gateway that `gear serve` runs there.

    Differences from TrajectoryWriter: `add` returns before the trajectory is stored, so its error is raised
    by a later call; and it returns this writer's own number of the trajectory, from 0, in place of the id.

    Every trajectory is stored exactly once while the gateway lives, also if connections are lost. If the
    gateway dies, unacknowledged trajectories may be stored or not; none is stored twice or in part.

    Thread safety: one thread at a time; a thread of its own sends. After a fork, connect anew.
    """

    def __init__(
        self, line: Connection, hello: Mapping[str, Any], client: str, sending: SendOptions, timeout_s: float
    ) -> None:
        self.table, self.max_length = str(hello["table"]), hello["max_length"]
        self._limit = EpisodeLimit(self.max_length, tuple(hello.get("whole_fields", ())))
        self.schema = Schema.from_json(hello["schema"])
        self._max_bytes = int(hello["max_message_bytes"])
        self._open, self._num_raised = True, 0
        who = {"gateway": str(hello["gateway"]), "client": client}
        self._sender = Sender(line, self.schema, who, sending, timeout_s)
        self._finalizer = weakref.finalize(self, self._sender.stop)
        self.num_added = self.num_steps_added = 0

    @classmethod
    def connect(
        cls,
        url: str,
        *,
        token: str | Path,
        schema: Schema | None = None,
        ca: str | Path | None = None,
        timeout_s: float = 60.0,
        insecure: bool = False,
        sending: SendOptions | None = None,
    ) -> RemoteWriter:
        """Connect to a gateway that runs, or will run.

        Args:
            url: grpc+tls://HOST:PORT, or grpc://HOST:PORT without TLS.
            token: The gateway's token, or the Path of a file of mode 0600 that holds it.
            schema: Columns that this actor writes; None: those of the table.
            ca: File with the certificates that sign the gateway's; None: those of the machine.
            timeout_s: Longest time without an answer, and longest wait while the gateway blocks.
            insecure: Admits other addresses than loopback without TLS: the token is sent unencrypted.
            sending: How large batches are, and how long they wait; None: the defaults.
        Raises:
            ConfigError: An argument is wrong, or the gateway takes no batches of this size.
            StoreError: The token is wrong.
            SchemaError: The table has another schema; the error names the differences.
            LostNodeError: Nothing answers.
        """
        check_timeout("timeout_s", timeout_s)
        arguments.one_of("sending", sending, (SendOptions, type(None)), "SendOptions")
        sending = SendOptions() if sending is None else sending
        check_timeout("linger_s", sending.linger_s)
        batch_bytes = sending.batch_bytes
        arguments.one_of("url", url, str, "a string")
        arguments.one_of("token", token, (str, Path), "a string, or the Path of a file")
        arguments.one_of("ca", ca, (str, Path, type(None)), "a path")
        arguments.one_of("schema", schema, (Schema, type(None)), "a Schema")
        if not 0 < batch_bytes <= MOST_MAX_MESSAGE_BYTES:
            raise ConfigError("batch_bytes", f"must be in [1, {MOST_MAX_MESSAGE_BYTES}]", batch_bytes)
        line, client = Connection(url, token, ca, insecure), uuid.uuid4().hex
        header = {
            "version": VERSION,
            "client": client,
            "schema": None if schema is None else schema.to_json(),
        }
        retries, hello = RetryPolicy(f"gateway {url}", timeout_s), None
        while hello is None:
            try:
                hello = line.call("hello", header, timeout_s)
            except ConnectionLost as lost:
                retries.wait(lost, threading.Event())
        raise_error(hello)
        if batch_bytes > hello["max_message_bytes"]:
            end_session(line, {"gateway": str(hello["gateway"]), "client": client})
            line.hang_up()
            rule = f"must be at most {hello['max_message_bytes']}, the gateway's --max-message"
            raise ConfigError("batch_bytes", rule, batch_bytes, "lower it, or raise --max-message")
        return cls(line, hello, client, sending, timeout_s)

    @property
    def waited_s(self) -> float:
        """Seconds that this writer has waited for the gateway, in all."""
        return self._sender.waited_s

    @property
    def unacknowledged(self) -> range:
        """Numbers of the trajectories that are not known to be stored."""
        return self._sender.unacknowledged

    @property
    def num_lost(self) -> int:
        """Number of calls that were lost with their connection, and repeated."""
        return self._sender.num_lost

    # ---- adding ----------------------------------------------------------------------------------

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
        """Send a whole trajectory, which is copied; waits while the buffer is full.

        Args:
            trajectory: Column -> [T, *shape], [T+1, *shape] or [*shape], as the schema defines; or nested, as
                in `Replay.add`. Late columns too: nothing can be filled from here later.
            split_by_flags: As `Replay.add`.
            final: As `Replay.add`.
        Returns:
            Its number; with `split_by_flags` those of the parts.
        Raises:
            DataError: It does not fit the schema, or an earlier one was refused: see `refused`.
            StoreFullError: An earlier one found no free rows, and the table evicts nothing.
            NotReadyError: The gateway has blocked for too long; this trajectory is not added.
            StoreError, LostNodeError: The gateway has ended, was restarted or does not answer.
        """
        self._check()
        name = f"table {self.table}"
        trajectory = flatten(f"{name}: trajectory", trajectory, frozenset(self.schema.names))
        for column in self.schema.late_columns:
            if column.name not in trajectory:
                remedy = "a remote writer cannot fill it later: add it, or write on a node of the table"
                raise DataError(f"{name}: column {column.name}", "must be in every trajectory", None, remedy)
        if split_by_flags:
            parts = split_episodes(name, self.schema, trajectory, final, self.max_length)
            return [self.add(part) for part in parts]
        arrays, num_steps = check_trajectory(name, self.schema, trajectory)
        check_finite(name, self.schema, arrays)
        num_bytes = trajectory_bytes(arrays)
        if num_bytes > self._max_bytes:
            rule = f"must have at most {show_bytes(self._max_bytes)}, the gateway's --max-message"
            remedy = "divide it, or raise --max-message"
            raise DataError(f"{name}: trajectory", rule, show_bytes(num_bytes), remedy)
        number = self._sender.put(
            {name: np.array(array, order="C") for name, array in arrays.items()}, num_bytes
        )
        self.num_added += 1
        self.num_steps_added += num_steps
        return number

    def trajectory(self, **per_trajectory: Any) -> OpenTrajectory:
        """Begin a trajectory that is added at the end of a `with` block; an exception in it adds nothing.

        Args:
            **per_trajectory: Columns of one value per trajectory.
        """
        return OpenTrajectory(self.table, self.schema, self.add, per_trajectory)

    def vector_writer(self, num_envs: Any, autoreset: Autoreset | None = None) -> VectorWriter:
        """Return a VectorWriter of many environments; as `TrajectoryWriter.vector_writer`."""
        return VectorWriter(self.schema, self.add, *resolve(num_envs, autoreset), self._limit)

    def flush(self) -> None:
        """Wait until everything is stored.

        Raises:
            DataError, StoreFullError, NotReadyError, StoreError, LostNodeError: As `add`.
        """
        self._check()
        self._sender.flush()
        self._raise_refused()

    @property
    def refused(self) -> list[tuple[int, GearError]]:
        """Numbers of the trajectories that were refused, and why."""
        return list(self._sender.refused)

    def _check(self) -> None:
        if not self._open:
            raise StoreError(f"writer of table {self.table}", "must be open", None, "it was closed")
        self._raise_refused()

    def _raise_refused(self) -> None:
        """Raise the first refusal that was not raised yet; later ones count as raised with it."""
        found = self.refused[self._num_raised :]
        if found:
            self._num_raised += len(found)
            number, error = found[0]
            more = f"{len(found) - 1} more were refused: see refused" if len(found) > 1 else ""
            remedy = "; ".join(filter(None, (error.remedy, more)))
            raise type(error)(f"trajectory {number}: {error.name}", error.rule, error.value, remedy)

    # ---- end -------------------------------------------------------------------------------------

    def close(self) -> None:
        """Flush and disconnect. Safe to call twice.

        Raises:
            DataError, StoreFullError, NotReadyError, StoreError, LostNodeError: As `flush`.
        """
        if self._open:
            try:
                self.flush()
            finally:
                self._open = False
                self._finalizer()

    def __enter__(self) -> RemoteWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except GearError as second:
            if kind is None:
                raise
            LOG.warning("while a remote writer closed: %s", second)
