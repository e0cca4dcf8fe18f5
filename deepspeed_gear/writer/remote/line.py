"""One connection to a gateway after the other: calls with a deadline, each answered or lost as a whole."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import flight

from deepspeed_gear.errors import ConfigError, GearError, StoreError
from deepspeed_gear.schema import Schema
from deepspeed_gear.writer.remote import wire
from deepspeed_gear.writer.remote.outbox import Item
from deepspeed_gear.writer.remote.security import check_plain, check_token, parse_url, read_token

_LEAST_S = 3.0  # of a call: a gateway takes one to answer while its table holds back
_ANSWER_S, _BYTES_A_S = 10.0, 100_000  # a call takes so long, and its bytes at least have such a rate
# gRPC would share connections, and their pauses after failures, with the lines before; and it would go by the
# http_proxy of the environment, which is for the web.
_OPTIONS = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]


class Lost(Exception):
    """No answer: the connection was cut, or none can be made. What was sent may have arrived."""


class Line:
    """Calls to a gateway, over a connection that can be made anew.

    Thread safety: one thread at a time.

    Args:
        url: grpc://HOST:PORT or grpc+tls://HOST:PORT.
        token: The gateway's token, or the path of a file that holds it.
        ca: File with the certificates that sign the gateway's, in PEM; None: those of the machine.
        insecure: Admits other addresses than loopback without TLS.
    Raises:
        ConfigError: One of these is wrong.
    """

    def __init__(self, url: str, token: str | Path, ca: str | Path | None, insecure: bool) -> None:
        self.url = url
        has_tls, host = parse_url(url)
        if not has_tls:
            remedy = "use grpc+tls://, or insecure=True in a network that you trust"
            check_plain("url", host, insecure, remedy)
        text = check_token("token", token) if isinstance(token, str) else read_token(token)
        self._headers = [(b"authorization", f"Bearer {text}".encode())]
        self._roots = _read_roots(ca) if has_tls and ca is not None else None
        self._client: flight.FlightClient | None = None

    def call(
        self,
        action: str,
        header: Mapping[str, Any],
        most_s: float,
        schema: Schema | None = None,
        items: list[Item] | None = None,
    ) -> dict[str, Any]:
        """Call the gateway; it answers or the call is lost.

        Args:
            action: What it is to do.
            header: With which options.
            most_s: Longest that this may take, whatever there is to send.
            schema: Of what is sent along.
            items: What is sent along.
        Returns:
            The answer; `error` in it is one of the gateway, as JSON.
        Raises:
            Lost: There is no answer.
            StoreError: The token is wrong.
        """
        batch = None
        if items is not None and schema is not None:
            batch = wire.encode(schema, [(item.number, item.arrays) for item in items])
        message = wire.pack(header, batch)
        timeout_s = max(_LEAST_S, min(most_s, _ANSWER_S + message.size / _BYTES_A_S))
        options = flight.FlightCallOptions(timeout=timeout_s, headers=self._headers)
        try:
            if self._client is None:
                self._client = flight.FlightClient(
                    self.url, tls_root_certs=self._roots, generic_options=_OPTIONS
                )
            results = self._client.do_action(flight.Action(action, message), options)
            answer: dict[str, Any] = json.loads(b"".join(result.body.to_pybytes() for result in results))
        except flight.FlightUnauthenticatedError as error:
            remedy = "take the one in its --token-file"
            raise StoreError(f"token for {self.url}", "must be the gateway's", None, remedy) from error
        except (pa.ArrowException, OSError, ValueError) as error:
            self.hang_up()
            raise Lost(str(error)) from error
        return answer

    def hang_up(self) -> None:
        """End the connection; the next call makes another."""
        client, self._client = self._client, None
        if client is not None:
            with suppress(pa.ArrowException):  # it was broken
                client.close()


def raise_error(answer: Mapping[str, Any]) -> None:
    """Raise the error that an answer holds, if it holds one.

    Raises:
        GearError: Of the gateway.
    """
    if "error" in answer:
        error: GearError = wire.error_from_json(answer["error"])
        raise error


def _read_roots(path: str | Path) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"ca {path}", "must be a readable PEM file", None, str(error)) from error
