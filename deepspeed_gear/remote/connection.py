"""A client's connection to a gateway: its token and TLS, deadlines, and retries of lost calls."""

from __future__ import annotations

import ipaddress
import os
import random
import ssl
import stat
import threading
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc
import pyarrow as pa

import deepspeed_gear.arguments as arguments
from deepspeed_gear.errors import ConfigError, GearError, LostNodeError, StoreError, error_from_json
from deepspeed_gear.log import LOG
from deepspeed_gear.remote import gateway_messages

_LEAST_S = 3.0  # shortest deadline of a call: a gateway answers after 1 s while its table blocks
_ANSWER_S = 10.0  # longest time of a call, besides that for its bytes
_BYTES_A_S = 100_000  # least rate of the bytes
_END_S = 2.0  # longest time of the call that ends a session
_FIRST_PAUSE_S = 0.05
_LAST_PAUSE_S = 2.0
# Without these gRPC shares connections, and their pauses after failures, with earlier channels, and
# uses the environment's http_proxy, which is for the web. Answers may have any length, as they hold
# every refusal.
_OPTIONS = [
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", -1),
]
# Root certificates of the machine: gRPC's Python package would use its own ones instead.
_MACHINE_ROOTS = (
    "/etc/ssl/certs/ca-certificates.crt",  # Debian, Ubuntu, Arch
    "/etc/pki/tls/certs/ca-bundle.crt",  # Fedora, RHEL
    "/etc/ssl/ca-bundle.pem",  # openSUSE
    "/etc/ssl/cert.pem",  # Alpine
)


def longest_call_s(num_bytes: int) -> float:
    """Return the deadline of a call whose messages have `num_bytes`, in seconds."""
    return _ANSWER_S + num_bytes / _BYTES_A_S


class ConnectionLost(Exception):
    """A call has no answer: there is no connection. The request may have arrived."""


class RetryPolicy:
    """Retries of lost calls, with growing pauses, until `timeout_s` pass without an answer."""

    def __init__(self, url: str, timeout_s: float) -> None:
        self._url = url
        self._timeout_s = timeout_s
        self._pause_s = _FIRST_PAUSE_S
        self._until: float | None = None  # begins with the first loss

    def wait(self, error: ConnectionLost, stopped: threading.Event) -> None:
        """Pause before the next attempt, or raise LostNodeError once the time is over."""
        now = time.monotonic()
        self._until = now + self._timeout_s if self._until is None else self._until
        if now > self._until:
            rule = f"must answer within {self._timeout_s:g} s"
            remedy = f"does it run, is the url right, and does its log name a limit? {error}"
            raise LostNodeError(f"gateway {self._url}", rule, None, remedy)
        # Random, so that many writers do not retry at the same time.
        stopped.wait(self._pause_s * random.uniform(0.5, 1.0))
        self._pause_s = min(2 * self._pause_s, _LAST_PAUSE_S)


class Connection:
    """Calls to a gateway, over a connection that is made again after a loss.

    A call is either answered or lost, never in part.

    Thread safety: one thread at a time.
    """

    def __init__(self, url: str, token: Any, ca: Any = None, insecure: bool = False) -> None:
        self.url = arguments.one_of("url", url, str, "a string")
        arguments.one_of("token", token, (str, Path), "a string, or the Path of a file")
        arguments.one_of("ca", ca, (str, Path, type(None)), "a path")
        try:
            parts = urlsplit(url)
            is_known = parts.scheme in ("grpc", "grpc+tls") and parts.hostname and parts.port
        except ValueError:  # such as a port that is no number
            is_known = None
        if not is_known or parts.path or parts.query or parts.username:
            raise ConfigError(
                "url",
                "must be grpc://HOST:PORT or grpc+tls://HOST:PORT",
                url,
                "for example grpc://10.0.0.1:50051",
            )
        has_tls = parts.scheme == "grpc+tls"
        if not has_tls:
            remedy = "use grpc+tls://, or insecure=True in a network that you trust"
            check_plain("url", str(parts.hostname), insecure, remedy)
        text = check_token("token", token) if isinstance(token, str) else read_token(token)
        self._metadata = (("authorization", f"Bearer {text}"),)
        self._credentials = grpc.ssl_channel_credentials(_read_roots(ca)) if has_tls else None
        self._target = f"dns:///{parts.netloc}"  # so that gRPC does not parse a host as a scheme
        self._channel: grpc.Channel | None = None

    def call(
        self,
        action: str,
        header: Mapping[str, Any],
        most_s: float,
        batch: Any = None,
        answer_bytes: int = 0,
    ) -> dict[str, Any]:
        """Call an action of the gateway and return its answer.

        Args:
            action: Name of the action.
            header: Arguments of the action, as JSON values.
            most_s: Longest time of the call for any size of its messages, in seconds.
            batch: Record batch of `encode`, or bytes.
            answer_bytes: Size of a large answer, in bytes.

        Returns:
            The answer. `error` is an error of the gateway; `content` has the bytes of prompts, or
            of a part of a board's weights.

        Raises:
            StoreError: The token is wrong, or the gateway does not have this action.
            ConnectionLost: There is no answer.
        """
        message = gateway_messages.pack(header, batch).to_pybytes()
        timeout_s = max(_LEAST_S, min(most_s, longest_call_s(len(message) + answer_bytes)))
        try:
            if self._channel is None and self._credentials is None:
                self._channel = grpc.insecure_channel(self._target, _OPTIONS)
            elif self._channel is None:
                self._channel = grpc.secure_channel(self._target, self._credentials, _OPTIONS)
            call = self._channel.unary_unary(f"/{gateway_messages.SERVICE}/{action}")
            received = call(message, timeout=timeout_s, metadata=self._metadata)
            answer, content = gateway_messages.unpack(pa.py_buffer(received), len(received))
        except grpc.RpcError as error:
            self.hang_up()
            if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                remedy = "take the one in its --token-file"
                raise StoreError(
                    f"token for {self.url}", "must match the gateway's token", None, remedy
                ) from error
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                rule = "must have this call"
                remedy = "install the same deepspeed_gear on both sides"
                raise StoreError(f"gateway {self.url}", rule, None, remedy) from error
            raise ConnectionLost(f"{error.code().name}: {error.details()}") from error
        except ValueError as error:  # no JSON: the server is no gateway
            self.hang_up()
            raise ConnectionLost(str(error)) from error
        return {**answer, "content": content}

    def call_again(
        self,
        action: str,
        header: Mapping[str, Any],
        timeout_s: float,
        batch: Any = None,
        answer_bytes: int = 0,
    ) -> dict[str, Any]:
        """Call until there is an answer, and return it. For the arguments see `call`.

        Raises:
            GearError: The answer contains this error.
            LostNodeError: There was no answer for `timeout_s` seconds.
        """
        retries = RetryPolicy(self.url, timeout_s)
        while True:
            try:
                answer = self.call(action, header, timeout_s, batch, answer_bytes)
            except ConnectionLost as lost:
                retries.wait(lost, threading.Event())
                continue
            if "error" in answer:
                raise error_from_json(answer["error"])
            return answer

    def begin_session(self, timeout_s: float, **header: Any) -> dict[str, Any]:
        """Begin a session of a writer or rollout worker.

        Args:
            timeout_s: As in `call_again`.
            **header: Further entries of the header.

        Returns:
            The gateway's answer, with `who`, which the headers of later calls must contain.
        """
        header |= {"version": gateway_messages.VERSION, "client": uuid.uuid4().hex}
        hello = self.call_again("hello", header, timeout_s)
        return {**hello, "who": {"gateway": str(hello["gateway"]), "client": header["client"]}}

    def end_session(self, who: Mapping[str, str]) -> None:
        """End a session (if the gateway answers) and the connection."""
        try:
            self.call("bye", who, _END_S)
        except (ConnectionLost, GearError):
            LOG.debug("the session stays open until it expires: its last call had no answer")
        self.hang_up()

    def hang_up(self) -> None:
        """End the connection; the next call makes another."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None


def _read_roots(path: str | Path | None) -> bytes:
    """Read root certificates; None: those of the machine."""
    if path is None:
        files = (ssl.get_default_verify_paths().cafile, *_MACHINE_ROOTS)  # first: SSL_CERT_FILE
        path = next((file for file in files if file and os.path.isfile(file)), None)
    if path is None:
        remedy = "give ca, or set SSL_CERT_FILE"
        raise ConfigError(
            "ca", "must be given on a machine without root certificates", None, remedy
        )
    with ConfigError.on(
        f"ca {path}",
        "must be a readable PEM file",
        OSError,
        remedy="give the certificate of the gateway's authority as a PEM file",
    ):
        return Path(path).read_bytes()


LEAST_TOKEN = 16
_MAKE = "make one: (umask 077; openssl rand -hex 32 > FILE)"


def read_token(path: str | Path) -> str:
    """Read a token from a file that only its owner can read."""
    name = f"token file {path}"
    kinds = (OSError, ValueError)
    is_readable = ConfigError.on(name, "must be a readable text file", *kinds, remedy=_MAKE)
    with is_readable, open(path, encoding="ascii") as file:
        status = os.fstat(file.fileno())
        token = file.read().strip()
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        mode = oct(stat.S_IMODE(status.st_mode))
        raise ConfigError(
            name, "must be a file of this user with mode 0600", mode, f"chmod 600 {path}"
        )
    return check_token(name, token)


def check_token(name: str, token: str) -> str:
    """Return a token if it may be sent in the header of a call; else raise ConfigError."""
    if len(token) < LEAST_TOKEN or not token.isascii() or not token.isprintable() or " " in token:
        rule = f"must hold a token of at least {LEAST_TOKEN} printable ASCII characters"
        raise ConfigError(name, rule, None, _MAKE)
    return token


def check_plain(name: str, host: str, insecure: bool, remedy: str) -> None:
    """Raise ConfigError for a connection without TLS to another machine, unless `insecure`."""
    try:
        is_loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:  # no address: any other name than localhost may be another machine's
        is_loopback = host == "localhost"
    if not insecure and not is_loopback:
        raise ConfigError(name, "must be a loopback address without TLS", host, remedy)
