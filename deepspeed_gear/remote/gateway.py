"""The gRPC server of `gear serve`: its calls, their token and TLS, and its end with the run.

It adds remote writers' trajectories to a table of this node's store. If the table has prompts, it
leases them to remote rollout workers instead. Both get the weights of the run's policy board.
"""

from __future__ import annotations

import hmac
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import grpc
import pyarrow as pa

from deepspeed_gear.errors import ConfigError, GearError, SchemaError, StoreError, error_to_json
from deepspeed_gear.log import LOG
from deepspeed_gear.remote import gateway_messages
from deepspeed_gear.remote.board_downloads import BoardDownloads
from deepspeed_gear.remote.connection import check_plain, longest_call_s
from deepspeed_gear.remote.gateway_limits import (
    MOST_CONNECTIONS,
    MOST_WITHOUT_TOKEN,
    Call,
    CallLimits,
    Connections,
    CountedLog,
    Peer,
    most_connections,
    server_options,
)
from deepspeed_gear.remote.gateway_messages import CHUNK_BYTES, client_name
from deepspeed_gear.remote.gateway_sessions import (
    MOST_WAITING,
    RECONNECT,
    LeaseSessions,
    WriterSessions,
)
from deepspeed_gear.schema import Schema
from deepspeed_gear.timeouts import wait_until
from deepspeed_gear.writer.trajectory_writer import TrajectoryWriter

Action = Callable[[Mapping[str, Any], pa.Buffer], dict[str, Any]]
Answer = Callable[[Iterator[bytes], grpc.ServicerContext], bytes]
_POLL_S = 0.2  # interval of the checks whether the gateway is to end
_END_S = 3.0  # longest time for which it still answers, so that writers get the error of its end
_NUM_WORKERS = 2 * MOST_WAITING  # calls handled at once; half of them never wait for the table
_MOST_UNSENT = 32  # chunks of weights whose connections have not taken them yet
_CHUNKS_OF_CONNECTION = 4  # of these, as a sent one is counted for a moment
_MOST_CALLS = 1024  # including calls that wait for a worker; gRPC refuses more, and writers retry


def read_certificate(chain: str | Path, key: str | Path) -> grpc.ServerCredentials:
    """Read a TLS certificate chain and its private key, both PEM files."""
    with ConfigError.on(
        "TLS certificate and key", "must be readable PEM files", OSError, remedy="check the paths"
    ):
        return grpc.ssl_server_credentials([(Path(key).read_bytes(), Path(chain).read_bytes())])


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
        self.sessions: WriterSessions | LeaseSessions = WriterSessions(writer.add)
        if writer.parts[0].ledger is not None:
            self.sessions = LeaseSessions(writer, max_message_bytes)
        writer.waiting_checks.append(self.sessions.check)
        self._downloads = BoardDownloads(writer.run, self.sessions.check)
        actions = {"hello": self._hello, "put": self._put, "bye": self._bye}
        actions |= {"board": self._downloads.state, "weights": self._downloads.begin}
        self._workers = ThreadPoolExecutor(_NUM_WORKERS, "gear-serve")
        self.calls = CallLimits(_NUM_WORKERS, longest_call_s(max_message_bytes))
        self.unsent = CallLimits(
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
                self.calls.cancel_late()
                self.unsent.cancel_late()
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
        for log in (self._wrong_tokens, self._connections.log, self.calls.log, self.unsent.log):
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
        client = client_name("remote writer", header)
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
            raise StoreError("the gateway", rule, None, f"it was restarted: {RECONNECT}")
        return str(header.get("client"))

    def refuse(self, _: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        """Reject a call without the token, before its message is received."""
        self._wrong_tokens.note(Peer.of_grpc(context.peer()).address)
        _abort(context, grpc.StatusCode.UNAUTHENTICATED, "the token is wrong")

    def send_chunk(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        """Answer a call for a chunk of weights.

        The call has its place until the connection has taken the answer, which gRPC buffers.
        """
        unsent = _begin(self.unsent, context)
        if not context.add_callback(partial(self.unsent.end, unsent)):
            self.unsent.end(unsent)  # the call has ended already
        return self.answer(self._downloads.chunk, messages, context)

    def answer(
        self, action: Action, messages: Iterator[bytes], context: grpc.ServicerContext
    ) -> bytes:
        """Receive a call's message and answer it, unless too many calls of its peer run."""
        self._connections.show_token(Peer.of_grpc(context.peer()))
        call = _begin(self.calls, context)
        try:
            message = next(messages, None)  # None: the caller has ended the call
            return b"" if message is None else _answer(action, message)
        finally:
            self.calls.end(call)


def _begin(limits: CallLimits, context: grpc.ServicerContext) -> Call:
    """Give a call its place, or end it with the reason for its refusal."""
    call = limits.begin(Peer.of_grpc(context.peer()), context.cancel)
    if isinstance(call, str):
        _abort(context, grpc.StatusCode.RESOURCE_EXHAUSTED, call)
    return call


def _abort(context: grpc.ServicerContext, code: grpc.StatusCode, text: str) -> NoReturn:
    context.abort(code, text)
    raise AssertionError("abort raises")


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
