"""The gateway: an Arrow Flight server that adds to this node's store what remote writers send."""

from __future__ import annotations

import hmac
import json
import logging
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import flight

from deepspeed_gear.errors import ConfigError, DataError, GearError, SchemaError, StoreError
from deepspeed_gear.schema import Schema
from deepspeed_gear.writer.remote import wire
from deepspeed_gear.writer.remote.security import check_plain
from deepspeed_gear.writer.remote.sessions import Sessions, session_lost
from deepspeed_gear.writer.writer import TrajectoryWriter

LOG = logging.getLogger("deepspeed_gear")
_LOOK_S = 0.2  # how often it looks whether it is to end
_TELL_S = 3.0  # longest that it goes on answering, so that writers hear of the end


@dataclass(frozen=True)
class Certificate:
    """What proves a server's name, in PEM.

    Args:
        chain: The certificate, and those between it and the root.
        key: Its private key.
    """

    chain: bytes
    key: bytes

    @classmethod
    def read(cls, chain: str | Path, key: str | Path) -> Certificate:
        """Read both files.

        Raises:
            ConfigError: One cannot be read.
        """
        try:
            return cls(Path(chain).read_bytes(), Path(key).read_bytes())
        except OSError as error:
            rule = "must be readable PEM files"
            raise ConfigError("TLS certificate and key", rule, str(error)) from error


class Gateway(flight.FlightServerBase):
    """Serves one table; it answers from its construction on, in threads of its own.

    Args:
        writer: Attached to the table; the gateway is its only user.
        token: What every call must carry.
        host: Address to listen at.
        port: 0 takes a free one.
        certificate: For TLS; None: without.
        insecure: Admits other addresses than loopback without TLS.
    Raises:
        ConfigError: TLS is missing for this address, or the address cannot be used.
    """

    def __init__(
        self,
        writer: TrajectoryWriter,
        token: str,
        host: str = "127.0.0.1",
        port: int = 0,
        certificate: Certificate | None = None,
        insecure: bool = False,
    ) -> None:
        self.check(host, certificate, insecure)
        self.table, self.run_id = writer.table, writer.run
        self._writer, self.sessions, self._id = writer, Sessions(writer.add), secrets.token_hex(16)
        writer.check_while_waiting(self.sessions.check)
        self._actions = {"hello": self._hello, "put": self._put, "ask": self._ask, "bye": self._bye}
        scheme, address = "grpc" if certificate is None else "grpc+tls", f"[{host}]" if ":" in host else host
        try:
            super().__init__(
                f"{scheme}://{address}:{port}",
                tls_certificates=[(certificate.chain, certificate.key)] if certificate else None,
                middleware={"token": _Guard(token)},
            )
        except (pa.ArrowException, OSError) as error:
            remedy = "is the port taken, or the certificate not PEM? its log says"
            raise ConfigError("gateway", f"must be able to listen at {host}:{port}", None, remedy) from error
        self.url = f"{scheme}://{address}:{self.port}"

    @staticmethod
    def check(host: str, certificate: Certificate | None, insecure: bool) -> None:
        """Refuse to serve the network without TLS.

        Raises:
            ConfigError: It would, and nobody asked for it.
        """
        if certificate is None:
            remedy = "give --tls-cert and --tls-key, or --insecure in a network that you trust"
            check_plain("host", host, insecure, remedy)

    def run(self, is_over: Callable[[], bool] = lambda: False) -> GearError:
        """Serve until the run ends or somebody wants the end; return why it ended.

        Args:
            is_over: Whether the gateway is to end.
        """
        while self.sessions.error is None:
            time.sleep(_LOOK_S)
            try:
                self._writer.check_goes_on()
            except GearError as error:
                self.sessions.end(error)
            self.sessions.expire()
            if is_over():
                self.sessions.end(StoreError("the gateway", "must run", None, "it was told to end"))
        self.end(self.sessions.error)
        return self.sessions.error

    def end(self, error: GearError) -> None:
        """Tell the writers why nothing is added any more, and stop serving."""
        self.sessions.end(error)
        until = time.monotonic() + _TELL_S
        while not self.sessions.all_told and time.monotonic() < until:
            time.sleep(0.02)
        self.shutdown()
        self.sessions.close()
        self._writer.close()

    # ---- calls -----------------------------------------------------------------------------------

    def do_action(self, context: flight.ServerCallContext, action: flight.Action) -> list[bytes]:
        """Answer a call; an error of ours is in the answer, with its parts."""
        try:
            if action.body.size > wire.MOST_MESSAGE_BYTES:
                rule = f"must have at most {wire.MOST_MESSAGE_BYTES} bytes"
                raise DataError("message", rule, action.body.size, "lower batch_bytes, or cut the trajectory")
            handle = self._actions.get(action.type)
            if handle is None:
                raise StoreError("action", f"must be one of {', '.join(self._actions)}", action.type)
            answer = handle(*wire.unpack(action.body))
        except GearError as error:
            answer = {"error": wire.error_to_json(error)}
        except Exception as error:  # without an answer the writer would take it for a lost connection
            LOG.exception("gear serve: a call failed")
            failed = StoreError("the gateway", "must be able to do what it is asked", None, repr(error))
            answer = {"error": wire.error_to_json(failed)}
        return [json.dumps(answer).encode()]

    def _hello(self, header: Mapping[str, Any], _: pa.Buffer) -> dict[str, Any]:
        if header.get("version") != wire.VERSION:
            rule, remedy = (
                f"must speak version {wire.VERSION}",
                "install the same deepspeed_gear on both sides",
            )
            raise StoreError("remote writer", rule, header.get("version"), remedy)
        if header.get("schema") is not None:
            found = wire.differences(Schema.from_json(header["schema"]), self._writer.schema)
            if found:
                rule = f"must have the schema of table {self._writer.table}"
                raise SchemaError("remote writer", rule, None, "; ".join(found))
        self.sessions.open(str(header.get("client")))
        return {
            "gateway": self._id,
            "table": self._writer.table,
            "schema": self._writer.schema.to_json(),
            "max_length": self._writer.max_length,
        }

    def _put(self, header: Mapping[str, Any], content: pa.Buffer) -> dict[str, Any]:
        client, known = self._client(header)
        trajectories = list(wire.decode(self._writer.schema, wire.read_batch(content)))
        return self.sessions.put(client, known, trajectories)

    def _ask(self, header: Mapping[str, Any], _: pa.Buffer) -> dict[str, Any]:
        return self.sessions.ask(*self._client(header))

    def _bye(self, header: Mapping[str, Any], _: pa.Buffer) -> dict[str, Any]:
        self.sessions.forget(self._client(header)[0])
        return {}

    def _client(self, header: Mapping[str, Any]) -> tuple[str, int]:
        """Return who calls, and what it knows.

        Raises:
            StoreError: It has a session with another gateway.
        """
        if header.get("gateway") != self._id:
            raise session_lost()
        return str(header.get("client")), int(header.get("known", -1))


class _Guard(flight.ServerMiddlewareFactory):
    """Refuses calls without the token."""

    def __init__(self, token: str) -> None:
        super().__init__()
        self._wanted = f"Bearer {token}".encode()

    def start_call(self, info: flight.CallInfo, headers: Mapping[str, list[str | bytes]]) -> None:
        given = headers.get("authorization") or [""]
        text = given[0].encode() if isinstance(given[0], str) else given[0]
        if not hmac.compare_digest(text, self._wanted):  # takes as long wherever they differ
            LOG.warning("gear serve: refused a call with a wrong token")
            raise flight.FlightUnauthenticatedError("the token is wrong")
