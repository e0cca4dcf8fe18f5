"""RemoteWriter: adds trajectories from a machine without a store; its buffer and sending thread."""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate, islice, takewhile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import deepspeed_gear.arguments as arguments
from deepspeed_gear.data.media import MediaSpec
from deepspeed_gear.data.nested_columns import flatten
from deepspeed_gear.data.stored_values import check_finite
from deepspeed_gear.errors import (
    ConfigError,
    DataError,
    GearError,
    NotReadyError,
    PeerError,
    StoreError,
    error_from_json,
    show_bytes,
)
from deepspeed_gear.log import LOG
from deepspeed_gear.remote import gateway_messages
from deepspeed_gear.remote.connection import Connection, ConnectionLost, RetryPolicy
from deepspeed_gear.remote.gateway_messages import as_sent, encode, trajectory_bytes
from deepspeed_gear.schema import Schema
from deepspeed_gear.timeouts import check_timeout
from deepspeed_gear.writer.trajectory_writer import WriterBase

CALL_INTERVAL_S = 600.0  # of a writer that has nothing to send
_STOP_S = 2.0  # longest that the end of a process waits for a call
_LOOK_S = 0.1


@dataclass(frozen=True)
class SendOptions:
    """When a remote writer sends a batch of trajectories, and how much it buffers.

    Args:
        batch_bytes: A batch is sent once it has this many bytes.
        linger_s: It is also sent once its first trajectory has waited this long, in seconds.
        buffer_bytes: Size of the buffer of unacknowledged trajectories, in bytes; `add` waits while
            it is full.
    """

    batch_bytes: int = 2 << 20
    linger_s: float = 0.05
    buffer_bytes: int = 64 << 20


class QueuedTrajectory(NamedTuple):
    """A trajectory that is not acknowledged."""

    number: int  # from 0
    arrays: Mapping[str, np.ndarray]
    num_bytes: int
    since: float  # when it was queued, by time.monotonic


class Sender:
    """Queue of unacknowledged trajectories in bounded memory, and the thread that sends them.

    They are sent in order, and one batch is under way at a time: the next is sent when the gateway
    has added or refused it. So a table that blocks fills the queue, and a resumed connection sends
    at most one batch again.

    Thread safety: any thread puts and flushes. One trajectory fits into batch and buffer in any
    case.
    """

    def __init__(
        self,
        line: Connection,
        schema: Schema,
        who: Mapping[str, str],
        options: SendOptions,
        timeout_s: float,
    ) -> None:
        self._line = line
        self._schema = schema
        self._options = options
        self._who = who  # gateway and client, in the header of every call
        self._timeout_s = timeout_s  # without any answer, and of a wait while the gateway blocks
        self._retries = RetryPolicy(line.url, timeout_s)
        # Whether the last batch is pending, or its state unknown: ask before the next is sent.
        self._asks = False
        self._upto = -1  # all trajectories up to this number are stored or refused
        self.refused: list[tuple[int, GearError]] = []
        self.num_lost = 0  # calls
        self.waited_s = 0.0  # waits of `put` and `flush`
        self._items: deque[QueuedTrajectory] = deque()
        self._num_bytes = 0  # bytes in the queue
        self._next = 0  # number of the next trajectory
        self._changed = threading.Condition()  # around the queue
        self._blocked_since: float | None = None  # since when the gateway answers, but adds nothing
        self._flushes = False  # whether a thread waits in `flush`: batches are sent at once
        self._error: GearError | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gear-send", daemon=True)
        self._thread.start()

    def put(self, arrays: Mapping[str, np.ndarray], num_bytes: int) -> int:
        """Append a trajectory's columns, which must not change later; return its number.

        Waits while the queue is full.
        """
        most = self._options.buffer_bytes
        with self._changed:
            self._wait(lambda: not self._items or self._num_bytes + num_bytes <= most)
            if self._error is not None:
                raise self._error
            item = QueuedTrajectory(self._next, arrays, num_bytes, time.monotonic())
            self._items.append(item)
            self._next += 1
            self._num_bytes += num_bytes
            self._changed.notify_all()
            return item.number

    def flush(self) -> None:
        """Wait until the queue is empty. Raises as `put`, but no error after the last answer."""
        with self._changed:
            self._flushes = True
            self._changed.notify_all()
            try:
                self._wait(lambda: not self._items)
            finally:
                self._flushes = False

    def _wait(self, is_done: Callable[[], bool]) -> None:
        """Wait, with `_changed` held; NotReadyError if the gateway blocks for `timeout_s`."""
        begin = time.monotonic()
        while not is_done():
            if self._error is not None:
                raise self._error
            blocked = self._blocked_since
            if blocked is not None and time.monotonic() - max(begin, blocked) > self._timeout_s:
                rule = f"must take trajectories within {self._timeout_s:g} s"
                remedy = "the table is full or its rate limiter blocks: sample, or raise timeout_s"
                raise NotReadyError("the gateway", rule, None, remedy)
            self._changed.wait(_LOOK_S)
        self.waited_s += time.monotonic() - begin

    @property
    def unacknowledged(self) -> range:
        """Numbers of the trajectories that are not acknowledged."""
        with self._changed:
            return range(self._next - len(self._items), self._next)

    def stop(self) -> None:
        """Stop sending. Safe to call twice."""
        with self._changed:
            self._stopped.set()
            self._changed.notify_all()
        self._thread.join(_STOP_S)
        if self._items and self._error is None:
            LOG.warning(
                "a remote writer was not closed: %d trajectories may be lost", len(self._items)
            )

    def _run(self) -> None:
        try:
            while (items := self._next_batch()) is not None:
                self._send(items)
            self._line.end_session(self._who)
        except GearError as error:
            left = self.unacknowledged
            remedy = error.remedy
            if left:
                numbers = f"{left.start} to {left.stop - 1}"
                text = f"trajectories {numbers} of this writer are not acknowledged"
                remedy = f"{remedy}; {text}" if remedy else text
            self._fail(type(error)(error.name, error.rule, error.value, remedy))
        except Exception as error:
            LOG.exception("a remote writer's thread failed")
            self._fail(
                PeerError(f"gateway {self._line.url}", "must be reachable", None, repr(error))
            )
        finally:
            self._line.hang_up()

    def _fail(self, error: GearError) -> None:
        """End all waits, present and later ones, with an error."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def _next_batch(self) -> list[QueuedTrajectory] | None:
        """Wait for trajectories; return the first ones that fit into a batch, which stay queued.

        Returns:
            Nothing if none has come in `CALL_INTERVAL_S`; None: the sender was stopped.
        """
        until = time.monotonic() + CALL_INTERVAL_S
        with self._changed:
            while not self._stopped.is_set():
                now = time.monotonic()
                if not self._items and now >= until:
                    return []
                left = (
                    self._items[0].since + self._options.linger_s - now if self._items else _LOOK_S
                )
                is_full = self._num_bytes >= self._options.batch_bytes
                if self._items and (self._flushes or is_full or left <= 0):
                    totals = accumulate(item.num_bytes for item in self._items)
                    count = sum(1 for _ in takewhile(self._options.batch_bytes.__ge__, totals))
                    return [*islice(self._items, max(1, count))]
                self._changed.wait(left)
        return None

    def _send(self, items: list[QueuedTrajectory]) -> None:
        """Send a batch, or ask for the state of the last one if it is not known.

        Without a batch the call keeps an idle writer's session.
        """
        header = {**self._who, "known": self._upto}
        batch = None
        if items and not self._asks:
            batch = encode(self._schema, [(item.number, item.arrays) for item in items])
        try:
            answer = self._line.call("put", header, self._timeout_s, batch)
        except ConnectionLost as lost:
            if items:  # without items the next batch will retry
                self._asks = True
                self.num_lost += 1
                self._settle(-1, is_busy=False)
                self._retries.wait(lost, self._stopped)
            return
        self._retries = RetryPolicy(self._line.url, self._timeout_s)
        if "upto" in answer:
            new = [entry for entry in answer["refused"] if entry[0] > self._upto]
            self.refused += [(number, error_from_json(parts)) for number, parts in new]
            self._upto = answer["upto"]
            self._asks = answer["busy"]
            self._settle(self._upto, answer["busy"])
        if "error" in answer:
            raise error_from_json(answer["error"])
        self._stopped.wait(answer["wait_s"])

    def _settle(self, upto: int, is_busy: bool) -> None:
        """Remove trajectories up to a number; note since when the gateway blocks the next ones."""
        with self._changed:
            has_advanced = False
            while self._items and self._items[0].number <= upto:
                self._num_bytes -= self._items.popleft().num_bytes
                has_advanced = True
            if has_advanced or not is_busy:
                self._blocked_since = None
            elif self._blocked_since is None:
                self._blocked_since = time.monotonic()
            self._changed.notify_all()


class RemoteWriter(WriterBase):
    """Adds trajectories to a table on another machine, through the gateway of `gear serve`.

    Differences from TrajectoryWriter:

    - `add` returns before the trajectory is stored, so a later call raises its error;
    - `add` returns the number of the trajectory in this writer, counted from 0, not its id.

    While the gateway runs, every trajectory is stored exactly once, even if connections are lost.
    If the gateway dies, an unacknowledged trajectory may or may not have been stored; none is
    stored twice or in part.

    Thread safety: one thread at a time; a background thread sends. After a fork, connect again.
    """

    def __init__(
        self, line: Connection, hello: Any, sending: SendOptions, timeout_s: float
    ) -> None:
        schema = Schema.from_json(hello["schema"])
        whole_fields = tuple(hello.get("whole_fields", ()))
        super().__init__(str(hello["table"]), schema, hello["max_length"], whole_fields)
        self._max_bytes = int(hello["max_message_bytes"])
        self._media = MediaSpec.of_json(self.schema, hello["media"])
        self._open = True
        self._num_raised = 0
        self._sender = Sender(line, self.schema, hello["who"], sending, timeout_s)
        self._finalizer = weakref.finalize(self, self._sender.stop)
        self.num_added = 0

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
        """Connect to a gateway; if it does not run yet, retry for up to `timeout_s`.

        Args:
            url: grpc+tls://HOST:PORT, or grpc://HOST:PORT without TLS.
            token: The gateway's token, or the Path of a file with mode 0600 that contains it.
            schema: Columns that this actor writes; None: those of the table.
            ca: Path of a PEM file with the root certificates for the gateway's certificate; None:
                those of the machine.
            timeout_s: Longest time without an answer, and longest wait while the gateway adds
                nothing because its table blocks, in seconds.
            insecure: Whether addresses other than loopback are allowed without TLS. The token is
                then sent unencrypted.
            sending: Size and delay of batches; None: the defaults.

        Returns:
            A connected writer.

        Raises:
            ConfigError: An argument is wrong, or the gateway accepts no batches of this size.
            StoreError: The token is wrong.
            SchemaError: The table has another schema; the error names the differences.
            LostNodeError: No gateway answers within `timeout_s`.
        """
        check_timeout("timeout_s", timeout_s)
        arguments.one_of("sending", sending, (SendOptions, type(None)), "SendOptions")
        sending = SendOptions() if sending is None else sending
        check_timeout("linger_s", sending.linger_s)
        batch_bytes = sending.batch_bytes
        arguments.one_of("schema", schema, (Schema, type(None)), "a Schema")
        most_bytes = gateway_messages.MOST_MAX_MESSAGE_BYTES
        if not 0 < batch_bytes <= most_bytes:
            raise ConfigError(
                "batch_bytes",
                f"must be in [1, {most_bytes}]",
                batch_bytes,
                "choose a value in this range",
            )
        line = Connection(url, token, ca, insecure)
        hello = line.begin_session(timeout_s, schema=None if schema is None else schema.to_json())
        if batch_bytes > hello["max_message_bytes"]:
            line.end_session(hello["who"])
            rule = f"must be at most {hello['max_message_bytes']}, the gateway's --max-message"
            raise ConfigError("batch_bytes", rule, batch_bytes, "lower it, or raise --max-message")
        return cls(line, hello, sending, timeout_s)

    @property
    def waited_s(self) -> float:
        """Total time that this writer has waited for the gateway, in seconds."""
        return self._sender.waited_s

    @property
    def unacknowledged(self) -> range:
        """Numbers of the trajectories that the gateway has not confirmed as stored."""
        return self._sender.unacknowledged

    @property
    def num_lost(self) -> int:
        """Number of calls that were repeated because their connection was lost."""
        return self._sender.num_lost

    def _add(self, trajectory: Mapping[str, Any]) -> int:
        name = f"table {self.table}"
        trajectory = flatten(f"{name}: trajectory", trajectory, frozenset(self.schema.names))
        remedy = "a remote writer cannot fill it later: add it, or write on a node of the table"
        arrays = as_sent(name, self.schema, self._media, trajectory, {}, late_remedy=remedy)
        check_finite(name, self.schema, arrays)
        num_bytes = trajectory_bytes(arrays)
        if num_bytes > self._max_bytes:
            rule = f"must have at most {show_bytes(self._max_bytes)}, the gateway's --max-message"
            remedy = "divide it, or raise --max-message"
            raise DataError(f"{name}: trajectory", rule, show_bytes(num_bytes), remedy)
        copies = {name: np.array(array, order="C") for name, array in arrays.items()}
        number = self._sender.put(copies, num_bytes)
        self.num_added += 1
        return number

    def flush(self) -> None:
        """Wait until all added trajectories are stored.

        Raises:
            DataError, StoreFullError, NotReadyError, StoreError, LostNodeError: As in `add`.
        """
        self._check()
        self._sender.flush()
        self._raise_refused()

    @property
    def refused(self) -> list[tuple[int, GearError]]:
        """Number and error of each trajectory that was refused."""
        return list(self._sender.refused)

    def _check(self) -> None:
        if not self._open:
            raise StoreError(f"writer of table {self.table}", "must be open", None, "it was closed")
        self._raise_refused()

    def _raise_refused(self) -> None:
        """Raise the first refusal that was not raised yet; later ones count as raised with it."""
        new = self.refused[self._num_raised :]
        if new:
            self._num_raised += len(new)
            number, error = new[0]
            more = f"{len(new) - 1} more were refused: see refused" if len(new) > 1 else ""
            remedy = "; ".join(filter(None, (error.remedy, more)))
            raise type(error)(f"trajectory {number}: {error.name}", error.rule, error.value, remedy)

    def close(self) -> None:
        """Flush and disconnect. Safe to call twice.

        Raises:
            DataError, StoreFullError, NotReadyError, StoreError, LostNodeError: As in `flush`.
        """
        if self._open:
            try:
                self.flush()
            finally:
                self._open = False
                self._finalizer()

    def __exit__(self, kind: type[BaseException] | None, error: Any, trace: Any) -> None:
        try:
            self.close()
        except GearError as second:
            if kind is None:
                raise
            LOG.warning("while a remote writer closed: %s", second)
