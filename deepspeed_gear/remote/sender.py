"""The sender of a remote writer: queues unacknowledged trajectories, sends them, and resumes after losses."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from deepspeed_gear.errors import GearError, LostNodeError, NotReadyError, PeerError, error_from_json
from deepspeed_gear.remote import gateway_messages
from deepspeed_gear.remote.connection import Connection, ConnectionLost, raise_error
from deepspeed_gear.schema import Schema

LOG = logging.getLogger("deepspeed_gear")
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.05, 2.0
_STOP_S = 2.0  # longest that the end of a process waits for a call
_LOOK_S = 0.1


@dataclass(frozen=True)
class SendOptions:
    """Options of sending trajectories.

    Args:
        batch_bytes: A batch is sent when it has so many bytes.
        linger_s: Or when its first trajectory has waited so long.
        buffer_bytes: Buffer of unacknowledged trajectories; `add` waits when it is full.
    """

    batch_bytes: int = 2 << 20
    linger_s: float = 0.05
    buffer_bytes: int = 64 << 20


class RetryPolicy:
    """Retries of lost calls: with ever longer pauses, until there was no answer for `timeout_s`.

    Args:
        what: Name of the server in the error.
        timeout_s: Longest time without an answer.
    """

    def __init__(self, what: str, timeout_s: float) -> None:
        self._what, self._timeout_s = what, timeout_s
        self.reset()

    def reset(self) -> None:
        """Reset pause and deadline after an answer."""
        self._pause_s = _FIRST_PAUSE_S
        self._until: float | None = None

    def wait(self, error: ConnectionLost, stopped: threading.Event) -> None:
        """Wait before the next attempt.

        Raises:
            LostNodeError: There was no answer for too long.
        """
        now = time.monotonic()
        self._until = now + self._timeout_s if self._until is None else self._until
        if now > self._until:
            rule = f"must answer within {self._timeout_s:g} s"
            raise LostNodeError(self._what, rule, None, f"does it run, and is the url right? {error}")
        stopped.wait(self._pause_s * random.uniform(0.5, 1.0))  # so that many writers do not retry at once
        self._pause_s = min(2 * self._pause_s, _LAST_PAUSE_S)


def end_session(line: Connection, who: Mapping[str, str]) -> None:
    """Close a writer's session with its gateway, if the gateway answers."""
    try:
        line.call("bye", who, _STOP_S)
    except (ConnectionLost, GearError):
        LOG.debug("a writer's session stays open until it expires: its last call had no answer")


class QueuedTrajectory(NamedTuple):
    """A trajectory that is not acknowledged: its number from 0, its columns, their bytes, when it came."""

    number: int
    arrays: Mapping[str, np.ndarray]
    num_bytes: int
    since: float  # as time.monotonic


class Sender:
    """Queue of unacknowledged trajectories, in bounded memory, and the thread that sends them in order.

    One batch is under way at a time: the next is sent when the gateway has added or refused it. So a table
    that blocks fills the queue, and a resumed connection sends at most one batch again.

    Thread safety: any thread puts and flushes.

    Args:
        line: Connection to the gateway.
        who: Gateway and client, in the header of every call.
        options: Sizes and delays; one trajectory fits into batch and buffer in any case.
        timeout_s: Longest time without any answer, and longest wait of `put` and `flush` while the gateway
            blocks.
    """

    def __init__(
        self, line: Connection, schema: Schema, who: Mapping[str, str], options: SendOptions, timeout_s: float
    ) -> None:
        self._line, self._schema, self._who = line, schema, who
        self._options, self._timeout_s = options, timeout_s
        self._retries = RetryPolicy(f"gateway {line.url}", timeout_s)
        self._asks = False  # the last batch is pending, or its state unknown: ask before the next is sent
        self._upto = -1
        self.refused: list[tuple[int, GearError]] = []
        self.num_lost = 0  # calls
        self.waited_s = 0.0  # of `put` and `flush`
        self._items: deque[QueuedTrajectory] = deque()
        self._num_bytes = self._next = 0
        self._changed = threading.Condition()  # around the queue
        self._blocked_since: float | None = None  # since when the gateway answers, but adds nothing
        self._flushes = False
        self._error: GearError | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gear-send", daemon=True)
        self._thread.start()

    # ---- the side of the actor -------------------------------------------------------------------

    def put(self, arrays: Mapping[str, np.ndarray], num_bytes: int) -> int:
        """Append a trajectory, waiting while the queue is full; return its number.

        Args:
            arrays: Its columns, which do not change any more.
            num_bytes: Of them.
        Raises:
            NotReadyError: The gateway has blocked for too long; it is not appended.
            GearError: Nothing can be sent any more.
        """
        most = self._options.buffer_bytes
        with self._changed:
            self._wait(
                lambda: self._error is not None or not self._items or self._num_bytes + num_bytes <= most
            )
            if self._error is not None:
                raise self._error
            item = QueuedTrajectory(self._next, arrays, num_bytes, time.monotonic())
            self._items.append(item)
            self._next += 1
            self._num_bytes += num_bytes
            self._changed.notify_all()
            return item.number

    def flush(self) -> None:
        """Wait until the queue is empty; raises as `put`, but no error that comes after the last answer."""
        with self._changed:
            self._flushes = True
            self._changed.notify_all()
            try:
                self._wait(lambda: not self._items)
            finally:
                self._flushes = False

    def _wait(self, is_done: Callable[[], bool]) -> None:
        begin = time.monotonic()
        while not is_done():
            if self._error is not None:
                raise self._error
            now = time.monotonic()
            if self._blocked_since is not None and now - max(begin, self._blocked_since) > self._timeout_s:
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
        """Send nothing any more; safe to call twice."""
        with self._changed:
            self._stopped.set()
            self._changed.notify_all()
        self._thread.join(_STOP_S)

    # ---- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while (items := self._next_batch()) is not None:
                self._send(items)
            end_session(self._line, self._who)
        except GearError as error:
            left, remedy = self.unacknowledged, error.remedy
            if left:
                text = f"trajectories {left.start} to {left.stop - 1} of this writer are not acknowledged"
                remedy = f"{remedy}; {text}" if remedy else text
            self._fail(type(error)(error.name, error.rule, error.value, remedy))
        except Exception as error:
            LOG.exception("a remote writer's thread failed")
            self._fail(PeerError(f"gateway {self._line.url}", "must be reachable", None, repr(error)))
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
            Nothing if none has come in `IDLE_S`; None: the sender was stopped.
        """
        until = time.monotonic() + gateway_messages.IDLE_S
        with self._changed:
            while not self._stopped.is_set():
                now = time.monotonic()
                if not self._items and now >= until:
                    return []
                left = self._items[0].since + self._options.linger_s - now if self._items else _LOOK_S
                if self._items and (
                    self._flushes or self._num_bytes >= self._options.batch_bytes or left <= 0
                ):
                    batch: list[QueuedTrajectory] = []
                    total = 0
                    for item in self._items:
                        total += item.num_bytes
                        if batch and total > self._options.batch_bytes:
                            break
                        batch.append(item)
                    return batch
                self._changed.wait(left)
        return None

    def _send(self, items: list[QueuedTrajectory]) -> None:
        """Send a batch; without one, or while the state of the last one is not known, ask for that.

        So an idle writer's session does not expire.

        Raises:
            GearError: The gateway ends, is another, or has not answered for too long.
        """
        header, batch = {**self._who, "known": self._upto}, None
        if items and not self._asks:
            batch = gateway_messages.encode(self._schema, [(item.number, item.arrays) for item in items])
        try:
            answer = self._line.call("ask" if batch is None else "put", header, self._timeout_s, batch)
        except ConnectionLost as lost:
            if items:  # else the next batch retries
                self._asks = True
                self.num_lost += 1
                self._settle(-1, is_busy=False)
                self._retries.wait(lost, self._stopped)
            return
        self._retries.reset()
        if "upto" in answer:
            new = [entry for entry in answer["refused"] if entry[0] > self._upto]
            self.refused += [(number, error_from_json(parts)) for number, parts in new]
            self._upto, self._asks = answer["upto"], answer["busy"]
            self._settle(self._upto, answer["busy"])
        raise_error(answer)
        self._stopped.wait(answer["wait_s"])

    def _settle(self, upto: int, is_busy: bool) -> None:
        """Remove the trajectories up to a number; note whether the gateway blocks the following ones."""
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
