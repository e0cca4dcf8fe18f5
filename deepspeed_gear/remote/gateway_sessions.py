"""Sessions of a gateway's clients: batches that are added exactly once, leases, and expiry."""

from __future__ import annotations

import base64
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import deepspeed_gear.arguments as arguments
from deepspeed_gear.data.stored_values import as_stored
from deepspeed_gear.errors import (
    ConfigError,
    DataError,
    GearError,
    LeaseExpiredError,
    NotReadyError,
    StoreError,
    StoreFullError,
    error_to_json,
)
from deepspeed_gear.log import LOG
from deepspeed_gear.remote import gateway_messages
from deepspeed_gear.remote.gateway_messages import NUM_LEASE_WORDS, SAME_VERSION
from deepspeed_gear.store.prompt_ledger import LeaseRecord
from deepspeed_gear.timeouts import check_timeout
from deepspeed_gear.writer.group_members import by_member
from deepspeed_gear.writer.rollout_worker import LocalLedger, check_kept, check_reason
from deepspeed_gear.writer.trajectory_writer import TrajectoryWriter

#: Trajectories of a writer: number, and columns in the stored form.
Numbered = Sequence[tuple[int, Mapping[str, np.ndarray]]]
ANSWER_S = 1.0  # longest that a request waits for its trajectories to be added
MOST_WAITING = 32  # requests that wait at the same time; further ones are answered immediately
RECONNECT = "what was not acknowledged may be stored or not; connect again, and decide"
_MOST_OF_SESSION = 4  # calls at once; a client makes one, and may have given up some
_MOST_SESSIONS = 1 << 16


@dataclass(eq=False)
class Session:
    """State of one remote writer or rollout worker."""

    grace_s: float  # the session ends without a call for so long
    # Of a writer. `upto` grows only after a commit or a refusal, so a trajectory that is sent twice
    # is added once.
    upto: int = -1  # all trajectories up to this number are committed or refused
    # Refusals that the writer has not acknowledged yet.
    refused: deque[tuple[int, dict[str, Any]]] = field(default_factory=deque)
    # Of a worker: its leases with their prompts, by the first NUM_LEASE_WORDS words, and number and
    # answer of its last call.
    leases: dict[tuple[Any, ...], tuple[LeaseRecord, dict[str, Any]]] = field(default_factory=dict)
    number: int = -1
    answer: dict[str, Any] = field(default_factory=dict)
    task: Future[Any] | None = None  # adds a writer's last batch, or a worker's group
    lock: threading.Lock = field(default_factory=threading.Lock)  # around the task and a call
    is_notified: bool = False  # whether an answer contained the error of the end
    called_at: float = field(default_factory=time.monotonic)
    _calls: threading.Semaphore = field(
        default_factory=lambda: threading.Semaphore(_MOST_OF_SESSION)
    )

    @contextmanager
    def call(self) -> Iterator[bool]:
        """Admit a call of the client for the block, unless too many of its calls run."""
        self.called_at = time.monotonic()
        is_admitted = self._calls.acquire(blocking=False)
        try:
            yield is_admitted
        finally:
            if is_admitted:
                self._calls.release()

    def refused_after(self, known: int) -> list[tuple[int, dict[str, Any]]]:
        """Return the refusals that the writer has not received yet; forget the others."""
        while self.refused and self.refused[0][0] <= known:
            self.refused.popleft()
        return list(self.refused)

    def is_busy(self, timeout_s: float) -> bool:
        """Return whether the last batch is still being added, after at most `timeout_s` seconds."""
        return self.task is not None and bool(wait([self.task], timeout_s).not_done)


class Sessions:
    """The sessions of a gateway's clients, and the one thread that adds what they send.

    At most one batch of each session is held: the next is accepted once the last has been added or
    refused. Trajectories that the table does not admit yet therefore stay with the writers.

    Thread safety: any thread may call any method.
    """

    def __init__(self, most_waiting: int = MOST_WAITING) -> None:
        self._waiting = threading.Semaphore(most_waiting)
        self.by_client: dict[str, Session] = {}  # by name of the client
        self._adder = ThreadPoolExecutor(1, "gear-add")
        self.error: GearError | None = None  # why nothing is added any more
        self.num_added = 0
        self.hello: dict[str, Any] = {}  # more of the answer to a client

    def open(self, client: str, grace_s: float = gateway_messages.SESSION_S) -> None:
        """Begin a session, or continue the existing one."""
        self.check()
        if len(self.by_client) >= _MOST_SESSIONS and client not in self.by_client:
            rule = f"must have at most {_MOST_SESSIONS} sessions"
            remedy = "close writers that are not used"
            raise StoreError("the gateway", rule, len(self.by_client), remedy)
        self.by_client.setdefault(client, Session(grace_s))

    def expire(self, after_s: float = gateway_messages.SESSION_S) -> int:
        """End the sessions of writers that have not called for a time; return how many.

        A session whose batch is still being added continues.
        """
        now = time.monotonic()
        ended = [
            client
            for client, session in list(self.by_client.items())
            if session.called_at < now - min(after_s, session.grace_s)
            and not (session.is_busy(0.0) or session.lock.locked())
        ]
        for client in ended:
            self.forget(client)
        if ended:
            LOG.info("gear serve: %d sessions have expired", len(ended))
        return len(ended)

    def forget(self, client: str) -> None:
        """End the session of a writer that has closed."""
        self.by_client.pop(client, None)

    def _wait(self, session: Session) -> tuple[bool, float]:
        """Return whether a session's task continues, and how many seconds its writer must wait."""
        may_wait = self._waiting.acquire(blocking=False)
        busy = session.is_busy(ANSWER_S if may_wait else 0.0)
        if may_wait:
            self._waiting.release()
        return busy, ANSWER_S if busy and not may_wait else 0.0

    def check(self) -> None:
        """Raise the error that ended the gateway, if it has ended."""
        if self.error is not None:
            raise self.error

    def end(self, error: GearError) -> None:
        """Stop adding; every later answer contains this error."""
        self.error = self.error or error

    @property
    def all_notified(self) -> bool:
        """Return whether every writer has been sent the error that ended the gateway."""
        return all(session.is_notified for session in list(self.by_client.values()))

    def close(self) -> None:
        """Wait for the trajectory that is being added. Call `end` first."""
        self._adder.shutdown()


class WriterSessions(Sessions):
    """Sessions of any number of writers, whose trajectories are added one after the other."""

    def __init__(
        self, add: Callable[[Mapping[str, Any]], int], most_waiting: int = MOST_WAITING
    ) -> None:
        super().__init__(most_waiting)
        self._add = add

    def put(self, client: str, known: int, trajectories: Numbered) -> dict[str, Any]:
        """Add a batch unless the last one is still waiting; answer after at most `ANSWER_S`.

        The numbers of the trajectories continue those of the last batch, or repeat some of them. A
        call without trajectories only requests the answer. The writer has received the refusals up
        to `known`; they are not sent again.

        Returns:
            The answer: `upto`; `busy` (a batch is being added); `refused`; `error`, if the gateway
            has ended; and `wait_s`, the seconds that the writer must wait before its next call.
            `wait_s` is 0 unless so many requests wait already that this one is answered at once.
        """
        session = self.by_client.get(client)
        if session is None:
            rule = f"must have called within {gateway_messages.SESSION_S:g} s, and not have closed"
            raise StoreError("the session of this remote writer", rule, None, RECONNECT)
        with session.call() as is_admitted:
            if is_admitted:
                return self._put(session, known, trajectories)
            return {"upto": session.upto, "busy": True, "refused": [], "wait_s": ANSWER_S}

    def _put(self, session: Session, known: int, trajectories: Numbered) -> dict[str, Any]:
        with session.lock:
            # A writer that has not received its refusals sends its batch again, and no other is
            # taken until then: a session never holds more refusals than a batch has trajectories.
            waits = session.is_busy(0.0) or session.refused_after(known)
            if trajectories and not waits and self.error is None:
                numbers = [number for number, _ in trajectories]
                follow = numbers == list(range(numbers[0], numbers[0] + len(numbers)))
                if not follow or not 0 <= numbers[0] <= session.upto + 1:
                    rule = f"must have consecutive numbers that continue after {session.upto}"
                    raise DataError(
                        "batch",
                        rule,
                        f"{len(numbers)} from {numbers[0]}",
                        "connect the remote writer again",
                    )
                session.task = self._adder.submit(self._add_all, session, trajectories)
        busy, wait_s = self._wait(session)
        upto = session.upto  # read first: its refusals are in the list by then
        refused = [entry for entry in session.refused_after(known) if entry[0] <= upto]
        answer = {"upto": upto, "busy": busy, "refused": refused, "wait_s": wait_s}
        if self.error is not None:
            answer["error"] = error_to_json(self.error)
            session.is_notified = True
        return answer

    def _add_all(self, session: Session, trajectories: Numbered) -> None:
        """Add or refuse each trajectory; wait while the table's rate limiter blocks."""
        try:
            for number, trajectory in trajectories:
                # A smaller number was added or refused already, before a connection was lost.
                while number > session.upto:
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
            self.end(
                StoreError("the gateway", "must be able to add trajectories", None, repr(error))
            )


class LeaseSessions(Sessions):
    """Leases prompts to any number of remote rollout workers, as one worker of this node.

    A lease belongs to a session and ends with it. If the store outlives its job, a later commit is
    treated like that of a local worker whose lease was returned. Commits are executed one after the
    other, all other calls immediately.
    """

    def __init__(self, writer: TrajectoryWriter, max_message_bytes: int) -> None:
        super().__init__()
        self._ledger = LocalLedger(writer)
        group = writer.parts[0].spec.group
        most_steps = self._ledger.prompts.longest + 1
        kept = self._ledger.keep_bytes
        if kept > max_message_bytes:
            raise ConfigError(
                "--max-message",
                f"must hold prompts.keep_bytes = {kept}",
                max_message_bytes,
                "raise --max-message, or lower keep_bytes",
            )
        self._origin = f"{writer.run} {writer.table}"
        self._prompts = self._ledger.prompts.schema
        self._has_members = group is not None and group.member is not None
        self.hello = {
            "prompts": self._prompts.to_json(),
            "group": group and group.column,
            "member": group and group.member,
            "keep_bytes": kept,
            "run": self._origin,
            "place": self._ledger.spec.column,
        }
        most_bytes = sum(c.row_bytes * (1 if c.rows == "1" else most_steps) for c in self._prompts)
        self._most = max(1, max_message_bytes // (most_bytes + kept))  # leases of a call

    def forget(self, client: str) -> None:
        """End the session of a worker and return its leases to the ledger."""
        session = self.by_client.pop(client, None)
        if session is not None:
            self._release(session)

    def _release(self, session: Session) -> None:
        """Return the leases of a session that has ended."""
        self._ledger.release([lease for lease, _ in list(session.leases.values())])

    def work(self, client: str, call: Mapping[str, Any], content: Any) -> dict[str, Any]:
        """Execute a worker's call once, even if it is sent several times.

        Each new call has a higher `number`; a call without one only keeps the session alive.

        Returns:
            The answer. With `unknown`, there is no such session. With `busy`, the commit with this
            number has not ended: the worker must call again, without its `content`.
        """
        session = self.by_client.get(client)
        if session is None:
            return {"unknown": True}
        with session.call() as is_admitted:
            if is_admitted:
                return self._work(client, session, call, content)
            return {"busy": session.number, "wait_s": ANSWER_S}

    def _work(
        self, client: str, session: Session, call: Mapping[str, Any], content: Any
    ) -> dict[str, Any]:
        number = int(call.get("number", -1))
        with session.lock:
            busy, wait_s = self._wait(session)  # for a commit that the worker has given up
            if not busy and number > session.number:
                session.task = None
                session.answer = {}
                if call["do"] == "commit":
                    session.task = self._adder.submit(self._do, session, call, content)
                else:
                    session.answer = self._do(session, call, content)
                session.number = number
                busy, wait_s = self._wait(session)
            if busy:
                return {"busy": session.number, "wait_s": wait_s}
            if session.task is not None and number == session.number:
                session.answer = session.task.result()
            if self.by_client.get(client) is not session:  # it has ended meanwhile
                self._release(session)
            # A repeated number gets the stored answer. A smaller one belongs to a call that the
            # worker has given up: no thread waits for what it returns.
            if number < session.number or "leases" not in session.answer:
                return session.answer
            keys = [tuple(one[:NUM_LEASE_WORDS]) for one in session.answer["leases"]]
            prompts = [session.leases[key][1] for key in keys]
        columns = self._prompts
        rows = [{c.name: as_stored(one[c.name], c, "prompt") for c in columns} for one in prompts]
        content = gateway_messages.encode(columns, list(enumerate(rows)))
        return {**session.answer, "content": content}

    def _do(self, session: Session, call: Mapping[str, Any], content: Any) -> dict[str, Any]:
        """Execute a call and return its answer."""
        session.is_notified = self.error is not None
        self.check()
        if call["do"] == "lease":
            return self._lease(session, call)
        lease = gateway_messages.lease_of(call["lease"])
        key = lease[:NUM_LEASE_WORDS]
        if key in session.leases:
            lease = lease._replace(place=session.leases[key][0].place)
        else:
            self._check_other(lease)
        try:
            ids = self._change(lease, call, content)
        except LeaseExpiredError:
            session.leases.pop(key, None)
            raise
        if call["do"] in ("commit", "fail"):
            session.leases.pop(key, None)
        return {"ids": ids}

    def _lease(self, session: Session, call: Mapping[str, Any]) -> dict[str, Any]:
        """Lease prompts for a session."""
        most_s = ANSWER_S if len(self.by_client) <= MOST_WAITING // 2 else 0.0  # each polls
        count = min(arguments.count("count", call["count"]), self._most)
        wait_s = check_timeout("wait_s", min(float(call["wait_s"]), most_s))
        given = []
        for lease, prompt in self._ledger.lease(count, wait_s):
            key = lease[:NUM_LEASE_WORDS]
            session.leases[key] = (lease, prompt)
            given.append((*key, base64.b64encode(lease.kept).decode(), lease.place))
        return {"leases": given, "wait_s": min(0.01 * len(self.by_client), ANSWER_S)}

    def _check_other(self, lease: LeaseRecord) -> None:
        """Raise LeaseExpiredError for another session's lease, unless this kept store issued it."""
        spec = self._ledger.spec
        is_known = lease.origin == self._origin and lease.entry < spec.num_entries
        if not (spec.is_kept and is_known and lease.number % spec.num_stores == spec.store):
            self._ledger.refuse(lease)

    def _change(self, lease: LeaseRecord, call: Mapping[str, Any], content: Any) -> list[int]:
        """Change a lease by a call; return the ids of the group, if it commits one."""
        does = call["do"]
        if does == "commit":
            late = call["absent"]  # columns, by trajectory
            group: list[Any] = [
                {n: a for n, a in m.items() if n not in late[at]} for at, m in content
            ]
            if self._has_members:
                group = by_member(group, call.get("counts", ()))
            ids = self._ledger.commit(lease, group)
            self.num_added += len(ids)
            return ids
        if does == "keep":
            check_kept(lease, content, self._ledger.keep_bytes)
            self._ledger.keep(lease, content)
        elif does == "fail":
            reason, retry = call["more"]
            check_reason(reason)
            self._ledger.fail(lease, reason, bool(retry))
        elif does == "renew":
            self._ledger.renew(lease)
        else:
            raise DataError("a call", "must lease, renew, keep, commit or fail", does, SAME_VERSION)
        return []
