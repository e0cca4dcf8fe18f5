"""Sessions of remote writers in a gateway, and the one thread that adds their trajectories."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np

from deepspeed_gear.errors import (
    DataError,
    GearError,
    NotReadyError,
    StoreError,
    StoreFullError,
    error_to_json,
)
from deepspeed_gear.remote.gateway_messages import SESSION_S

LOG = logging.getLogger("deepspeed_gear")
ANSWER_S = 1.0  # longest that a request waits for its trajectories to be added
MOST_WAITING = 32  # requests that wait at the same time; further ones are answered immediately
Numbered = Sequence[tuple[int, Mapping[str, np.ndarray]]]


class Session:
    """State of one remote writer.

    `upto` only grows, and only after a commit or a refusal: so a trajectory that is sent twice is added once.
    """

    def __init__(self) -> None:
        self.upto = -1  # all trajectories up to this number are committed or refused
        self.refused: deque[tuple[int, dict[str, Any]]] = deque()  # not acknowledged by the writer yet
        self.task: Future[None] | None = None  # adds the last batch
        self.lock = threading.Lock()  # around what reads and replaces the task
        self.is_notified = False  # whether an answer contained the error of the end
        self.called_at = time.monotonic()

    def refused_after(self, known: int) -> list[tuple[int, dict[str, Any]]]:
        """Return the refusals after the last that the writer has received; forget the others."""
        while self.refused and self.refused[0][0] <= known:
            self.refused.popleft()
        return list(self.refused)

    def is_busy(self, timeout_s: float) -> bool:
        """Return whether the last batch is still being added, after at most so long."""
        return self.task is not None and bool(wait([self.task], timeout_s).not_done)


class Sessions:
    """Adds batches of any number of writers, one after the other.

    At most one batch of each writer is held: the next is accepted when the last is added or refused, so
    trajectories that the table does not take yet stay with the writers.

    Thread safety: any thread may call anything; only one thread adds.

    Args:
        add: Adds a trajectory; as TrajectoryWriter.add.
        most_waiting: Requests that wait at once for their trajectories to be added.
    """

    def __init__(self, add: Callable[[Mapping[str, Any]], int], most_waiting: int = MOST_WAITING) -> None:
        self._add, self._waiting = add, threading.Semaphore(most_waiting)
        self._sessions: dict[str, Session] = {}
        self._adder = ThreadPoolExecutor(1, "gear-add")
        self.error: GearError | None = None  # why nothing is added any more
        self.num_added = 0

    # ---- writers ---------------------------------------------------------------------------------

    def open(self, client: str) -> None:
        """Begin a session; an existing one continues.

        Raises:
            GearError: The gateway ends.
        """
        if self.error is not None:
            raise self.error
        self._sessions.setdefault(client, Session())

    def expire(self, after_s: float = SESSION_S) -> int:
        """End the sessions whose writers have not called for some time; return how many.

        A session whose last batch is still being added continues.
        """
        before = time.monotonic() - after_s
        found = list(self._sessions.items())
        ended = [client for client, one in found if one.called_at < before and not one.is_busy(0.0)]
        for client in ended:
            self._sessions.pop(client, None)
        if ended:
            LOG.info("gear serve: %d sessions have expired", len(ended))
        return len(ended)

    def forget(self, client: str) -> None:
        """End the session of a writer that has closed."""
        self._sessions.pop(client, None)

    def put(self, client: str, known: int, trajectories: Numbered) -> dict[str, Any]:
        """Add a batch, unless the last one is still waiting; answer when it is added, or after `ANSWER_S`.

        Args:
            known: Number up to which the writer has received refusals: these are not sent again.
            trajectories: In the order of their numbers, which follow those of the last batch or repeat some.
        Raises:
            DataError: Numbers are left out.
            StoreError: There is no such session.
        """
        session = self._of(client)
        with session.lock:
            # A writer that has not received its refusals sends again; so their number is that of one batch.
            waits = session.is_busy(0.0) or session.refused_after(known)
            if not waits and self.error is None:
                numbers = [number for number, _ in trajectories]
                start = numbers[0] if numbers else 0
                follow = numbers == list(range(start, start + len(numbers)))
                if not follow or not 0 <= start <= session.upto + 1:
                    rule = f"must have consecutive numbers that continue after {session.upto}"
                    raise DataError("batch", rule, f"{len(numbers)} from {start}")
                session.task = self._adder.submit(self._add_all, session, trajectories)
        return self.ask(client, known)

    def ask(self, client: str, known: int) -> dict[str, Any]:
        """Return the answer: `upto`, `busy` (a batch is being added), `refused` ones, `error` of the end.

        `wait_s` is how long the writer must wait before it calls again: where too many requests wait here
        already, this one does not.

        Raises:
            StoreError: There is no such session.
        """
        session = self._of(client)
        if self._waiting.acquire(blocking=False):
            try:
                busy, wait_s = session.is_busy(ANSWER_S), 0.0
            finally:
                self._waiting.release()
        else:
            busy = session.is_busy(0.0)
            wait_s = ANSWER_S if busy else 0.0
        upto = session.upto  # read first: its refusals are in the list by then
        refused = [entry for entry in session.refused_after(known) if entry[0] <= upto]
        answer = {"upto": upto, "busy": busy, "refused": refused, "wait_s": wait_s}
        if self.error is not None:
            answer["error"], session.is_notified = error_to_json(self.error), True
        return answer

    def _of(self, client: str) -> Session:
        found = self._sessions.get(client)
        if found is None:
            rule = f"must have called within {SESSION_S:g} s, and not have closed"
            remedy = "what was not acknowledged may be stored or not; connect again, and decide"
            raise StoreError("the session of this remote writer", rule, None, remedy)
        found.called_at = time.monotonic()
        return found

    # ---- adding ----------------------------------------------------------------------------------

    def _add_all(self, session: Session, trajectories: Numbered) -> None:
        """Add or refuse each trajectory; wait while the table's rate limiter blocks."""
        try:
            for number, trajectory in trajectories:
                while number > session.upto:  # else it has arrived already, before a connection was lost
                    self.check()
                    try:
                        self._add(trajectory)
                        self.num_added += 1
                    except NotReadyError:
                        continue
                    except (DataError, StoreFullError) as error:
                        session.refused.append((number, error_to_json(error)))
                    session.upto = number
        except GearError as error:
            self.end(error)
        except Exception as error:  # whether it is stored is not known: no caller may assume either
            LOG.exception("a trajectory could not be added")
            self.end(StoreError("the gateway", "must be able to add trajectories", None, repr(error)))

    # ---- end -------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise what has ended the gateway."""
        if self.error is not None:
            raise self.error

    def end(self, error: GearError) -> None:
        """Add nothing any more; every later answer contains this error."""
        self.error = self.error or error

    @property
    def all_notified(self) -> bool:
        """Whether every writer has been sent the error of the end."""
        return all(session.is_notified for session in list(self._sessions.values()))

    def close(self) -> None:
        """Wait for the trajectory that is being added; `end` comes first."""
        self._adder.shutdown()
