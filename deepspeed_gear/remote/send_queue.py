"""The send queue of a remote writer: unacknowledged trajectories, in bounded memory."""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from deepspeed_gear.errors import GearError, NotReadyError

Arrays = Mapping[str, np.ndarray]
_LOOK_S = 0.1


@dataclass(frozen=True)
class QueuedTrajectory:
    """A trajectory that is not acknowledged.

    Args:
        number: Of this writer's trajectories, from 0.
        arrays: Its columns, which do not change any more.
        num_bytes: Of its columns.
        since: When it was queued, as time.monotonic.
    """

    number: int
    arrays: Arrays
    num_bytes: int
    since: float


class SendQueue:
    """Queue of unacknowledged trajectories, in order, so that they can be sent again.

    Thread safety: any thread puts; one thread takes batches and settles them.

    Args:
        most_bytes: Capacity; one trajectory fits in any case.
        timeout_s: Longest wait of `put` and `flush` while the gateway blocks.
    """

    def __init__(self, most_bytes: int, timeout_s: float) -> None:
        self._most_bytes, self._timeout_s = most_bytes, timeout_s
        self._items: deque[QueuedTrajectory] = deque()
        self._changed = threading.Condition()
        self._num_bytes = self._next = 0
        self._blocked_since: float | None = None  # since when the gateway answers, but adds nothing
        self._flushes = self._closed = False
        self._error: GearError | None = None
        self.waited_s = 0.0

    # ---- the side of the actor -------------------------------------------------------------------

    def put(self, arrays: Arrays, num_bytes: int) -> int:
        """Append a trajectory, waiting while the queue is full; return its number.

        Args:
            arrays: Its columns.
            num_bytes: Of them.
        Raises:
            NotReadyError: The gateway has blocked for too long; it is not appended.
            GearError: Nothing can be sent any more.
        """
        with self._changed:
            self._wait(lambda: self._error is not None or self._has_room(num_bytes))
            if self._error is not None:
                raise self._error
            item = QueuedTrajectory(self._next, arrays, num_bytes, time.monotonic())
            self._items.append(item)
            self._next += 1
            self._num_bytes += num_bytes
            self._changed.notify_all()
            return item.number

    def _has_room(self, num_bytes: int) -> bool:
        return not self._items or self._num_bytes + num_bytes <= self._most_bytes

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

    # ---- the side of the connection --------------------------------------------------------------

    def batch(self, most_bytes: int, linger_s: float, idle_s: float) -> list[QueuedTrajectory] | None:
        """Return the first trajectories that fit into a batch; they stay queued. Waits for at least one.

        Args:
            most_bytes: Of the batch, but at least one trajectory.
            linger_s: How long the first may wait for others.
            idle_s: Longest wait for the first.
        Returns:
            At least one; none if none has come in `idle_s`; None: the queue is closed.
        """
        with self._changed:
            until = time.monotonic() + idle_s
            while not self._closed:
                now = time.monotonic()
                if not self._items and now >= until:
                    return []
                left = self._items[0].since + linger_s - now if self._items else _LOOK_S
                if self._items and (self._flushes or self._num_bytes >= most_bytes or left <= 0):
                    return self._first(most_bytes)
                self._changed.wait(left)
            return None

    def _first(self, most_bytes: int) -> list[QueuedTrajectory]:
        found, total = [self._items[0]], self._items[0].num_bytes
        for item in itertools.islice(self._items, 1, None):
            total += item.num_bytes
            if total > most_bytes:
                break
            found.append(item)
        return found

    def settle(self, upto: int, is_busy: bool) -> None:
        """Remove the trajectories that the gateway has added or refused.

        Args:
            upto: All up to this number.
            is_busy: Whether the gateway blocks the following ones.
        """
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

    def fail(self, error: GearError) -> None:
        """End all waits, present and later ones, with an error."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def close(self) -> None:
        """Close the queue: `batch` returns None from now on."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
