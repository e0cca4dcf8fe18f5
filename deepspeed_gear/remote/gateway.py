"""The gateway: a gRPC server that adds remote writers' trajectories to this node's store.

If the table has prompts, it leases them to remote rollout workers. It serves the weights of the
run's policy board to both.
"""

from __future__ import annotations

import base64
import hmac
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pyarrow as pa

import deepspeed_gear.arguments as arguments
from deepspeed_gear.data.trajectory_checks import as_stored
from deepspeed_gear.errors import (
    ConfigError,
    DataError,
    GearError,
    LeaseExpiredError,
    NotReadyError,
    SchemaError,
    StoreError,
    StoreFullError,
    error_to_json,
)
from deepspeed_gear.log import LOG
from deepspeed_gear.remote import gateway_messages
from deepspeed_gear.remote.board_downloads import BoardDownloads
from deepspeed_gear.remote.connection import check_plain, longest_call_s
from deepspeed_gear.remote.gateway_limits import (
    MOST_CONNECTIONS,
    MOST_WITHOUT_TOKEN,
    CallLimits,
    Connections,
    CountedLog,
    Peer,
    most_connections,
    server_options,
)
from deepspeed_gear.remote.gateway_messages import CHUNK_BYTES, MOST_CLIENT, NUM_LEASE_WORDS
from deepspeed_gear.schema import Schema
from deepspeed_gear.store.prompt_ledger import LeaseRecord
from deepspeed_gear.timeouts import check_timeout, wait_until
from deepspeed_gear.writer.group_members import by_member
from deepspeed_gear.writer.rollout_worker import LocalLedger, check_kept, check_reason
from deepspeed_gear.writer.trajectory_writer import TrajectoryWriter

Action = Callable[[Mapping[str, Any], pa.Buffer], dict[str, Any]]
Answer = Callable[[Iterator[bytes], grpc.ServicerContext], bytes]
Numbered = Sequence[tuple[int, Mapping[str, np.ndarray]]]
ANSWER_S = 1.0  # longest that a request waits for its trajectories to be added
MOST_WAITING = 32  # requests that wait at the same time; further ones are answered immediately
_POLL_S = 0.2  # interval of the checks whether the gateway is to end
_END_S = 3.0  # longest time for which it still answers, so that writers get the error of its end
_NUM_WORKERS = 2 * MOST_WAITING  # calls handled at once; half of them never wait for the table
_MOST_UNSENT = 32  # chunks of weights whose connections have not taken them yet
_CHUNKS_OF_CONNECTION = 4  # of these, as a sent one is counted for a moment
_MOST_CALLS = 1024  # including calls that wait for a worker; gRPC refuses more, and writers retry
_MOST_OF_SESSION = 4  # calls at once; a client makes one, and may have given up some
_MOST_SESSIONS = 1 << 16
_DECIDE = "what was not acknowledged may be stored or not; connect again, and decide"


def read_certificate(chain: str | Path, key: str | Path) -> grpc.ServerCredentials:
    """Read a TLS certificate chain and its private key, both PEM files."""
    with ConfigError.on(
        "TLS certificate and key", "must be readable PEM files", OSError, remedy="check the paths"
    ):
        return grpc.ssl_server_credentials([(Path(key).read_bytes(), Path(chain).read_bytes())])


class Session:
    """State of one remote writer or rollout worker.

    `upto` grows only after a commit or a refusal, so a trajectory that is sent twice is added once.
    """

    def __init__(self, grace_s: float) -> None:
        self.grace_s = grace_s  # the session ends without a call for so long
        # Leases of a worker with their prompts, by the first NUM_LEASE_WORDS words.
        self.leases: dict[tuple[Any, ...], tuple[LeaseRecord, dict[str, Any]]] = {}
        # Number and answer of a worker's last call.
        self.number = -1
        self.answer = dict[str, Any]()
        self.upto = -1  # all trajectories up to this number are committed or refused
        # Refusals that the writer has not acknowledged yet.
        self.refused: deque[tuple[int, dict[str, Any]]] = deque()
        self.task: Future[Any] | None = None  # adds the last batch, or a worker's group
        self.lock = threading.Lock()  # around what reads and replaces the task; a worker's call
        self._calls = threading.Semaphore(_MOST_OF_SESSION)
        self.is_notified = False  # whether an answer contained the error of the end
        self.called_at = time.monotonic()

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
    """Adds the batches of any number of writers, one after the other.

    At most one batch of each writer is held: the next is accepted once the last has been added or
    refused. Trajectories that the table does not admit yet therefore stay with the writers.

    Thread safety: any thread may call any method; only one thread adds.
    """

    def __init__(
        self, add: Callable[[Mapping[str, Any]], int], most_waiting: int = MOST_WAITING
    ) -> None:
        self._add = add
        self._waiting = threading.Semaphore(most_waiting)
        self._sessions: dict[str, Session] = {}  # by name of the writer
        self._adder = ThreadPoolExecutor(1, "gear-add")
        self.error: GearError | None = None  # why nothing is added any more
        self.num_added = 0
        self.hello: dict[str, Any] = {}  # more of the answer to a client

    def open(self, client: str, grace_s: float = gateway_messages.SESSION_S) -> None:
        """Begin a session, or continue the existing one."""
        self.check()
        if len(self._sessions) >= _MOST_SESSIONS and client not in self._sessions:
            rule = f"must have at most {_MOST_SESSIONS} sessions"
            remedy = "close writers that are not used"
            raise StoreError("the gateway", rule, len(self._sessions), remedy)
        self._sessions.setdefault(client, Session(grace_s))

    def expire(self, after_s: float = gateway_messages.SESSION_S) -> int:
        """End the sessions of writers that have not called for a time; return how many.

        A session whose batch is still being added continues.
        """
        now = time.monotonic()
        ended = [
            client
            for client, session in list(self._sessions.items())
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
        self._sessions.pop(client, None)

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
        session = self._sessions.get(client)
        if session is None:
            rule = f"must have called within {gateway_messages.SESSION_S:g} s, and not have closed"
            raise StoreError("the session of this remote writer", rule, None, _DECIDE)
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

    def _wait(self, session: Session) -> tuple[bool, float]:
        """Return whether a session's task continues, and how many seconds its writer must wait."""
        may_wait = self._waiting.acquire(blocking=False)
        busy = session.is_busy(ANSWER_S if may_wait else 0.0)
        if may_wait:
            self._waiting.release()
        return busy, ANSWER_S if busy and not may_wait else 0.0

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
        return all(session.is_notified for session in list(self._sessions.values()))

    def close(self) -> None:
        """Wait for the trajectory that is being added. Call `end` first."""
        self._adder.shutdown()


class LeaseSessions(Sessions):
    """Leases prompts to any number of remote rollout workers, as one worker of this node.

    A lease belongs to a session and ends with it. If the store outlives its job, a later commit is
    treated like that of a local worker whose lease was returned. Commits are executed one after the
    other, all other calls immediately.
    """

    def __init__(self, writer: TrajectoryWriter, max_message_bytes: int) -> None:
        super().__init__(writer.add)
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
        self.hello = {"prompts": self._prompts.to_json(), "group": group and group.column}
        self.hello["member"] = group and group.member
        self.hello |= {"keep_bytes": kept, "run": self._origin}
        self.hello |= {"place": self._ledger.spec.column}
        most_bytes = sum(c.row_bytes * (1 if c.rows == "1" else most_steps) for c in self._prompts)
        self._most = max(1, max_message_bytes // (most_bytes + kept))  # leases of a call

    def forget(self, client: str) -> None:
        """End the session of a worker and return its leases to the ledger."""
        session = self._sessions.pop(client, None)
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
        session = self._sessions.get(client)
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
            if self._sessions.get(client) is not session:  # it has ended meanwhile
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
        most_s = ANSWER_S if len(self._sessions) <= MOST_WAITING // 2 else 0.0  # each polls
        count = min(arguments.count("count", call["count"]), self._most)
        wait_s = check_timeout("wait_s", min(float(call["wait_s"]), most_s))
        given = []
        for lease, prompt in self._ledger.lease(count, wait_s):
            key = lease[:NUM_LEASE_WORDS]
            session.leases[key] = (lease, prompt)
            given.append((*key, base64.b64encode(lease.kept).decode(), lease.place))
        return {"leases": given, "wait_s": min(0.01 * len(self._sessions), ANSWER_S)}

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
            raise DataError(
                "a call",
                "must lease, renew, keep, commit or fail",
                does,
                "use the same version of deepspeed_gear on both sides",
            )
        return []


class Gateway:
    """Server that adds trajectories of remote writers to a table, or leases its prompts.

    It also serves the versions of the policy board that the run has on this node.

    It runs its own threads and must be the only user of its writer. Port 0 takes a free port;
    `insecure` allows addresses other than loopback without TLS.

    Memory:

    - A call's message is received only after its token was checked, and at most `max_message_bytes`
      plus 1 MiB of it.
    - A session holds one batch or group that is to be added.
    - Calls that wait for a worker thread hold as much as gRPC's flow control admits.
    - Nothing is decompressed and no value is copied. The arrays of a call's trajectories count
      towards its bytes.
    - While weights are downloaded, two versions of them, and 32 chunks of 4 MiB that are being
      sent.
    """

    def __init__(
        self,
        writer: TrajectoryWriter,
        token: str,
        host: str = "127.0.0.1",
        port: int = 0,
        certificate: grpc.ServerCredentials | None = None,
        insecure: bool = False,
        max_message_bytes: int = gateway_messages.MAX_MESSAGE_BYTES,
    ) -> None:
        self.check(host, certificate, insecure, max_message_bytes)
        self._max_message_bytes = max_message_bytes
        self.table = writer.table
        self.run_id = writer.run
        self._writer = writer
        self._id = secrets.token_hex(16)
        ledger = writer.parts[0].ledger
        self.sessions = LeaseSessions(writer, max_message_bytes) if ledger else Sessions(writer.add)
        writer.waiting_checks.append(self.sessions.check)
        self._downloads = BoardDownloads(writer.run, self.sessions.check)
        actions = {"hello": self._hello, "put": self._put, "bye": self._bye}
        actions |= {"board": self._downloads.state, "weights": self._downloads.begin}
        self._workers = ThreadPoolExecutor(_NUM_WORKERS, "gear-serve")
        self._calls = CallLimits(_NUM_WORKERS, longest_call_s(max_message_bytes))
        self._unsent = CallLimits(
            _MOST_UNSENT, longest_call_s(CHUNK_BYTES), _CHUNKS_OF_CONNECTION, "unsent chunks"
        )
        answers: dict[str, Answer] = {"chunk": self.send_chunk}
        answers |= {name: partial(self.answer, action) for name, action in actions.items()}
        connections = most_connections()
        if connections < MOST_CONNECTIONS:
            LOG.warning("gear serve: at most %d connections, as `ulimit -n` allows", connections)
        self._server = grpc.server(
            self._workers,
            handlers=[_Calls(token, answers, self.refuse)],
            options=[
                *server_options(connections),
                (
                    "grpc.max_receive_message_length",
                    max_message_bytes + gateway_messages.SLACK_BYTES,
                ),
                # Writers compress nothing: so a small message cannot become a large one.
                ("grpc.per_message_decompression", 0),
                ("grpc.so_reuseport", 0),  # else two gateways could share a port
            ],
            maximum_concurrent_rpcs=_MOST_CALLS,
        )
        scheme = "grpc" if certificate is None else "grpc+tls"
        address = f"[{host}]" if ":" in host else host
        at = f"{address}:{port}"
        kinds = (RuntimeError, ValueError)
        remedy = "look in its log whether the port is taken, or the certificate not PEM"
        with ConfigError.on("gateway", f"must be able to listen at {at}", *kinds, remedy=remedy):
            if certificate is None:
                self.port = self._server.add_insecure_port(at)
            else:
                self.port = self._server.add_secure_port(at, certificate)
        self.url = f"{scheme}://{address}:{self.port}"
        self._connections = Connections(self.port, min(MOST_WITHOUT_TOKEN, -(-connections // 4)))
        self._wrong_tokens = CountedLog("gear serve: calls refused for a wrong token: %d, from %s")
        self._server.start()

    @staticmethod
    def check(
        host: str,
        certificate: grpc.ServerCredentials | None,
        insecure: bool,
        max_message_bytes: int = gateway_messages.MAX_MESSAGE_BYTES,
    ) -> None:
        """Check the arguments of a gateway before a store exists."""
        if certificate is None:
            remedy = "give --tls-cert and --tls-key, or --insecure in a network that you trust"
            check_plain("host", host, insecure, remedy)
        least = gateway_messages.LEAST_MAX_MESSAGE_BYTES
        most = gateway_messages.MOST_MAX_MESSAGE_BYTES
        if not least <= max_message_bytes <= most:
            rule = f"must be in [{least >> 20}, {most >> 20}] MiB"
            raise ConfigError(
                "--max-message", rule, max_message_bytes / (1 << 20), "choose a value in this range"
            )

    def run(self, is_over: Callable[[], bool] = lambda: False) -> GearError:
        """Serve until the run ends or `is_over` returns True; return why it ended."""
        while self.sessions.error is None:
            time.sleep(_POLL_S)
            try:
                self._writer.check_goes_on(at_once=True)
                self.sessions.expire()
                self._connections.look()
                self._calls.cancel_late()
                self._unsent.cancel_late()
                self._downloads.expire()
                self._flush_logs()
            except GearError as error:
                self.sessions.end(error)
            if is_over():
                self.sessions.end(
                    StoreError("the gateway", "must run", None, "its end was requested")
                )
        wait_until(lambda: self.sessions.all_notified, _END_S, 0.02)
        self.shutdown()
        self._writer.close()
        return self.sessions.error

    def _flush_logs(self, at_once: bool = False) -> None:
        limits = (self._connections.log, self._calls.log, self._unsent.log)
        for log in (self._wrong_tokens, *limits):
            log.flush(at_once)

    def shutdown(self) -> None:
        """Accept no more calls; end those that are not answered within 3 s. Safe to call twice."""
        self._server.stop(_END_S).wait()
        self._workers.shutdown()
        self._flush_logs(at_once=True)
        self._downloads.close()
        self.sessions.close()

    def _hello(self, header: Mapping[str, Any], _: pa.Buffer) -> dict[str, Any]:
        gateway_messages.check_version("remote writer", header.get("version"))
        if header.get("schema") is not None:
            own = Schema.from_json(header["schema"])
            differences = gateway_messages.differences(own, self._writer.schema)
            if differences:
                rule = f"must have the schema of table {self._writer.table}"
                raise SchemaError("remote writer", rule, None, "; ".join(differences))
        if ("grace_s" in header) != isinstance(self.sessions, LeaseSessions):
            name = f"gear.tables.{self._writer.table}.prompts"
            rule = "must be given for rollout workers only"
            remedy = "connect a RemoteRolloutWorker if there are prompts, else a RemoteWriter"
            raise ConfigError(name, rule, None, remedy)
        client = str(header.get("client"))
        if len(client) > MOST_CLIENT:
            rule = f"must have a name of at most {MOST_CLIENT} characters"
            raise StoreError("remote writer", rule, len(client), "use a shorter client name")
        self.sessions.open(client, float(header.get("grace_s", gateway_messages.SESSION_S)))
        media = self._writer.parts[0].spec.media
        return {
            **self.sessions.hello,
            "gateway": self._id,
            "table": self._writer.table,
            "schema": self._writer.schema.to_json(),
            "max_length": self._writer.max_length,
            "whole_fields": self._writer.whole_fields,
            "max_message_bytes": self._max_message_bytes,
            "media": media and Schema(media.columns).to_json(),
        }

    def _put(self, header: Mapping[str, Any], content: pa.Buffer) -> dict[str, Any]:
        given: Any = []
        if header.get("do") == "keep":
            given = content.to_pybytes()
        elif len(content):
            given = list(
                gateway_messages.decode(self._writer.schema, content, self._max_message_bytes)
            )
        if isinstance(self.sessions, LeaseSessions):
            client = str(header.get("client")) if header.get("gateway") == self._id else ""
            return self.sessions.work(client, header, given)
        return self.sessions.put(self._client(header), int(header.get("known", -1)), given)

    def _bye(self, header: Mapping[str, Any], _: pa.Buffer) -> dict[str, Any]:
        self.sessions.forget(self._client(header))
        return {}

    def _client(self, header: Mapping[str, Any]) -> str:
        """Return the name of a client that has connected to this gateway."""
        if header.get("gateway") != self._id:
            rule = "must be the one that this writer has connected to"
            raise StoreError("the gateway", rule, None, f"it was restarted: {_DECIDE}")
        return str(header.get("client"))

    def refuse(self, _: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        """Reject a call without the token, before its message is received."""
        self._wrong_tokens.note(Peer.of_grpc(context.peer()).address)
        context.abort(grpc.StatusCode.UNAUTHENTICATED, "the token is wrong")
        raise AssertionError("abort raises")

    def send_chunk(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        """Answer a call for a chunk of weights.

        The call has its place until the connection has taken the answer, which gRPC buffers.
        """
        unsent = self._unsent.begin(Peer.of_grpc(context.peer()), context.cancel)
        if isinstance(unsent, str):
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, unsent)
            raise AssertionError("abort raises")
        if not context.add_callback(partial(self._unsent.end, unsent)):
            self._unsent.end(unsent)  # the call has ended already
        return self.answer(self._downloads.chunk, messages, context)

    def answer(
        self, action: Action, messages: Iterator[bytes], context: grpc.ServicerContext
    ) -> bytes:
        """Receive a call's message and answer it, unless too many calls of its peer run."""
        peer = Peer.of_grpc(context.peer())
        self._connections.show_token(peer)
        call = self._calls.begin(peer, context.cancel)
        if isinstance(call, str):
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, call)
            raise AssertionError("abort raises")
        try:
            message = next(messages, None)  # None: the caller has ended the call
            return b"" if message is None else _answer(action, message)
        finally:
            self._calls.end(call)


def _answer(action: Action, message: bytes) -> bytes:
    """Answer a call; a GearError is part of the answer, as JSON."""
    try:
        answer = action(*gateway_messages.unpack(pa.py_buffer(message)))
    except GearError as error:
        answer = {"error": error_to_json(error)}
    except Exception as error:  # without an answer the writer would assume a lost connection
        LOG.exception("gear serve: a call failed")
        failed = StoreError(
            "the gateway", "must handle the call without an error", None, repr(error)
        )
        answer = {"error": error_to_json(failed)}
    return bytes(gateway_messages.pack(answer, answer.pop("content", None)))


class _Calls(grpc.GenericRpcHandler):
    """Handlers of calls by their actions.

    A call without the token ends before its message is received.
    """

    def __init__(self, token: str, answers: Mapping[str, Answer], refuse: Answer) -> None:
        self._wanted = f"Bearer {token}".encode()
        # A handler of unary requests would receive the message before it is called. These read it
        # themselves, after the token and the limits are checked.
        handler = grpc.stream_unary_rpc_method_handler
        self._handlers = {name: handler(answer) for name, answer in answers.items()}
        self._refuses = handler(refuse)

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        """Return the handler of a call: the refusing one unless its metadata have the token."""
        given = dict(details.invocation_metadata).get("authorization", "")
        if hmac.compare_digest(given.encode(), self._wanted):  # in constant time
            return self._handlers.get(details.method.removeprefix(f"/{gateway_messages.SERVICE}/"))
        return self._refuses
