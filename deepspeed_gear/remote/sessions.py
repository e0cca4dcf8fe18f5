"""What each remote writer has sent, and the one thread that adds all of it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np

from deepspeed_gear.errors import DataError, GearError, NotReadyError, StoreError, StoreFullError
from deepspeed_gear.remote.gateway_messages import SESSION_S, error_to_json

LOG = logging.getLogger("deepspeed_gear")
ANSWER_S = 1.0  # longest that a request waits for its trajectories to be added
MOST_WAITING = 32  # requests that wait at once; the others are answered at once
Numbered = Sequence[tuple[int, Mapping[str, np.ndarray]]]


class Session:
    """What is known of one writer.

    `upto` only grows, and only after a commit or a refusal: that makes a number that comes again harmless.
    """

    def __init__(self) -> None:
        self.upto = -1  # all trajectories up to this number are committed or refused
        self.refused: list[tuple[int, dict[str, Any]]] = []  # which the writer has not heard of yet
        self.task: Future[None] | None = None  # adds the last batch
        self.lock = threading.Lock()  # around what reads and replaces the task
        self.is_told = False  # of the end
        self.called_at = time.monotonic()

    def is_busy(self, timeout_s: float) -> bool:
        """Return whether the last batch is still being added, after at most so long."""
        return self.task is not None and bool(wait([self.task], timeout_s).not_done)


class Sessions:
    """Takes batches of any number of writers, and adds them one after the other.

    Of a writer at most one batch is held: the next is taken when the last is dealt with, so that what the
    table holds back stays with the writers.

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
        """Begin a session; one that is there goes on.

        Raises:
            GearError: The gateway ends.
        """
        if self.error is not None:
            raise self.error
        self._sessions.setdefault(client, Session())

    def expire(self, after_s: float = SESSION_S) -> int:
        """End the sessions whose writers have not called for some time; return how many.

        A session whose last batch is still being added goes on.
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
        """Add a batch, unless the last one is still waiting; answer when it is added, or after a moment.

        Args:
            client: The sender.
            known: What the writer has heard of: up to here refusals need not be told again.
            trajectories: In the order of their numbers, which go on where the last ended, or begin earlier.
        Raises:
            DataError: Numbers are left out.
            StoreError: There is no such session.
        """
        session = self._of(client)
        with session.lock:
            if not session.is_busy(0.0) and self.error is None:
                _check_numbers([number for number, _ in trajectories], session.upto)
                session.task = self._adder.submit(self._add_all, session, trajectories)
        return self.ask(client, known)

    def ask(self, client: str, known: int) -> dict[str, Any]:
        """Answer `upto`, whether more is `busy`, which were `refused`, and the `error` of the end.

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
        while session.refused and session.refused[0][0] <= known:
            session.refused.pop(0)
        upto = session.upto  # first: its refusals are in the list
        refused = [entry for entry in session.refused if entry[0] <= upto]
        answer = {"upto": upto, "busy": busy, "refused": refused, "wait_s": wait_s}
        if self.error is not None:
            answer["error"], session.is_told = error_to_json(self.error), True
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
        try:
            for number, trajectory in trajectories:
                if number > session.upto:  # else it has arrived before a connection was lost
                    self._add_one(session, number, trajectory)
        except GearError as error:
            self.end(error)
        except Exception as error:  # whether it is stored is not known: no caller may assume either
            LOG.exception("a trajectory could not be added")
            self.end(StoreError("the gateway", "must add what it gets", None, repr(error)))

    def _add_one(self, session: Session, number: int, trajectory: Mapping[str, Any]) -> None:
        """Add a trajectory or refuse it; wait as long as the table's rate limiter holds it back.

        Raises:
            GearError: Nothing can be added any more.
        """
        while True:
            self.check()
            try:
                self._add(trajectory)
                self.num_added += 1
                break
            except NotReadyError:
                continue
            except (DataError, StoreFullError) as error:
                session.refused.append((number, error_to_json(error)))
                break
        session.upto = number

    # ---- end -------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise what has ended the gateway."""
        if self.error is not None:
            raise self.error

    def end(self, error: GearError) -> None:
        """Add nothing any more; every answer from now on says why."""
        self.error = self.error or error

    @property
    def all_told(self) -> bool:
        """Whether every writer has heard of the end."""
        return all(session.is_told for session in list(self._sessions.values()))

    def close(self) -> None:
        """Wait for the trajectory that is being added; `end` comes first."""
        self._adder.shutdown()


def _check_numbers(numbers: Sequence[int], upto: int) -> None:
    start = numbers[0] if numbers else 0
    if list(numbers) != list(range(start, start + len(numbers))) or not 0 <= start <= upto + 1:
        rule = f"must have numbers that go on after {upto}"
        raise DataError("batch", rule, f"{len(numbers)} from {start}")


def session_lost() -> StoreError:
    """Return the error of a writer whose session is not this gateway's."""
    rule = "must be the one that this writer has connected to"
    remedy = "it was restarted: what was not acknowledged may be stored or not; connect again, and decide"
    return StoreError("the gateway", rule, None, remedy)
