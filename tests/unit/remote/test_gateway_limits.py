"""Clients that would keep others out of a gateway: idle connections, wrong tokens, calls that never
end.
"""

from __future__ import annotations

import re
import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import grpc
import pytest
from gear_support import wait_until
from remote_support import TOKEN, WRONG, assert_same, connect, section, served, stored, trajectory

from deepspeed_gear.errors import LostNodeError, StoreError
from deepspeed_gear.remote import gateway, gateway_limits, gateway_messages, gateway_sessions
from deepspeed_gear.remote.gateway_limits import CallLimits, CountedLog, Peer
from deepspeed_gear.remote.gateway_sessions import LeaseSessions, WriterSessions

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"  # and empty settings


def raw(port: int, sent: bytes, source: str = "127.0.0.1") -> socket.socket:
    """Open a connection that sends some bytes and no more."""
    one = socket.create_connection(("127.0.0.1", port), 20, (source, 0))
    one.sendall(sent)
    return one


def is_open(one: socket.socket) -> bool:
    one.setblocking(False)
    try:
        while one.recv(1 << 16):
            pass
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def slow_calls() -> bytes:
    """Return a connection's bytes of a hundred calls with the token whose messages never end."""

    def text(value: bytes) -> bytes:
        return bytes([len(value)]) + value

    names = {
        b":method": b"POST",
        b":scheme": b"http",
        b":path": f"/{gateway_messages.SERVICE}/put".encode(),
        b":authority": b"a",
        b"te": b"trailers",
        b"content-type": b"application/grpc",
        b"authorization": f"Bearer {TOKEN}".encode(),
    }
    header = b"".join(b"\0" + text(name) + text(value) for name, value in names.items())
    message = b"\0" + (60_000_000).to_bytes(4, "big") + b"x" * 100
    sent = PREFACE
    for number in range(1, 200, 2):
        for kind, flags, content in ((1, 4, header), (0, 0, message)):
            sent += (
                len(content).to_bytes(3, "big") + bytes([kind, flags]) + number.to_bytes(4, "big")
            )
            sent += content
    return sent


@contextmanager
def held(*sockets: socket.socket) -> Iterator[None]:
    with ExitStack() as stack:
        for one in sockets:
            stack.enter_context(one)
        yield


@pytest.mark.parametrize("sent", [b"", PREFACE], ids=["silent", "settings"])
def test_idle_connections_without_a_token_keep_nobody_out(
    sent: bytes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """More than gRPC admits at once: those of the address without a token are closed,
    up to a few.
    """
    monkeypatch.setattr(gateway, "most_connections", lambda: 40)
    monkeypatch.setattr(gateway_limits, "TOKEN_S", 600.0)
    with served(section()) as (replay, server), connect(server.url) as first:
        with held(*(idle := [raw(server.port, sent) for _ in range(120)])):
            wait_until(lambda: sum(map(is_open, idle)) <= 10, "the end of idle connections")
            assert sum(map(is_open, idle)) > 0
            with connect(server.url) as writer:
                writer.add(trajectory(0))
            first.add(trajectory(1))
            first.flush()
        assert first.num_lost == 0
        assert_same(stored(replay), range(2))
    lines = [text for text in caplog.messages if "have not shown the token" in text]
    assert "of 127.0.0.1 (" in lines[0]
    assert "an address may have 10 of them at once, for 600 s each" in lines[0]


def test_a_connection_shows_the_token_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    with served(section()) as (_, server), connect(server.url) as writer:
        monkeypatch.setattr(gateway_limits, "TOKEN_S", 0.0)  # of later connections, too
        for _ in range(2):
            with held(one := raw(server.port, PREFACE)):
                wait_until(lambda: not is_open(one), "the end of a connection without a token")
            writer.add(trajectory(0))
            writer.flush()
        assert writer.num_lost == 0


def test_wrong_tokens_make_a_line_in_an_interval(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one at once, all others of the interval with their count; here at the end of the
    gateway.
    """
    monkeypatch.setattr(gateway_limits, "_LOG_S", 3600.0)
    options = [("grpc.enable_http_proxy", 0)]
    with (
        served(section()) as (_, server),
        grpc.insecure_channel(f"127.0.0.1:{server.port}", options) as channel,
    ):
        call = channel.unary_unary(f"/{gateway_messages.SERVICE}/put")
        for _ in range(200):
            with pytest.raises(grpc.RpcError, match="UNAUTHENTICATED"):
                call(b"", timeout=20, metadata=[("authorization", f"Bearer {WRONG}")])
    found = [
        re.search(r"a wrong token: (\d+), from 127.0.0.1 \(", text) for text in caplog.messages
    ]
    counts = [int(one[1]) for one in found if one]
    assert sum(counts) == 200
    assert len(counts) == 2


def test_calls_that_never_end_leave_workers_to_other_addresses(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with served(section()) as (replay, server):
        calls = server.calls
        with held(*(raw(server.port, slow_calls(), "127.0.0.2") for _ in range(60))):
            wait_until(lambda: calls.num_calls == 48, "the share of an address")
            with connect(server.url) as writer:
                writer.add(trajectory(0))
            monkeypatch.setattr(calls, "_longest_s", 0.0)
            wait_until(lambda: not calls.num_calls, "the end of calls that take too long")
        assert_same(stored(replay), range(1))
    assert any("beyond the share of an address" in text for text in caplog.messages)


def test_one_connection_of_many_calls_leaves_workers_to_its_address() -> None:
    with served(section()) as (replay, server):
        with held(*(raw(server.port, slow_calls()) for _ in range(10))):
            wait_until(lambda: server.calls.num_calls == 20, "two calls of each connection")
            with connect(server.url) as writer:
                writer.add(trajectory(0))
        assert_same(stored(replay), range(1))


def test_a_refused_call_names_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    with served(section()) as (_, server):
        monkeypatch.setattr(server.calls, "num_places", 0)
        text = (
            r"log name a limit\? RESOURCE_EXHAUSTED: 127.0.0.1 must leave workers .* start "
            r"fewer writers"
        )
        with pytest.raises(LostNodeError, match=text):
            connect(server.url, timeout_s=0.1)


def test_addresses_share_the_workers() -> None:
    def fill(address: str) -> int:
        count = 0
        while not isinstance(limits.begin(Peer(address, count), lambda: None), str):
            count += 1
        return count

    limits = CallLimits(64, 60.0)
    assert [fill(address) for address in ("a", "b", "c")] == [48, 12, 3]
    limits = CallLimits(64, 60.0)
    kept = [limits.begin(Peer("a", 1), lambda: None) for _ in range(3)]
    assert kept[2] == "a connection must have at most 2 calls at once; await answers"
    assert not isinstance(kept[0], str)
    limits.end(kept[0])
    assert not isinstance(limits.begin(Peer("a", 1), lambda: None), str)


@pytest.mark.parametrize(
    ("name", "peer"),
    [
        ("ipv4:10.0.0.1:80", ("10.0.0.1", 80)),
        ("ipv6:%5B::1%5D:80", ("::1", 80)),
        ("ipv6:[fe80::1%25eth0]:80", ("fe80::1%eth0", 80)),
        ("ipv6:[::ffff:10.0.0.1]:80", ("10.0.0.1", 80)),
        ("unix:", ("", 0)),
    ],
)
def test_peers_have_the_names_of_sockets(name: str, peer: tuple[str, int]) -> None:
    assert Peer.of_grpc(name) == peer


def test_a_client_with_too_many_calls_is_answered_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_sessions, "_MOST_OF_SESSION", 0)
    sessions = WriterSessions(lambda _: 0)
    sessions.open("a")
    answer = sessions.put("a", -1, [(0, {})])
    assert answer == {"upto": -1, "busy": True, "refused": [], "wait_s": 1.0}
    of_worker: Any = sessions  # the same of rollout workers
    assert LeaseSessions.work(of_worker, "a", {"number": 1}, b"") == {"busy": -1, "wait_s": 1.0}
    monkeypatch.setattr(gateway_sessions, "_MOST_SESSIONS", 1)
    sessions.open("a")
    with pytest.raises(
        StoreError, match="the gateway must have at most 1 sessions, got 1; close writers"
    ):
        sessions.open("b")
    sessions.close()


def test_the_limit_of_open_files_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (300, hard))
        assert gateway_limits.most_connections() < 300 - 128
        gateway_limits.raise_descriptor_limit()
        raised = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert raised == (4352 if hard == resource.RLIM_INFINITY else min(hard, 4352), hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_log_counts_addresses(caplog: pytest.LogCaptureFixture) -> None:
    log = CountedLog("it: %d, from %s")
    for address in "aabbbcccdefg":
        log.note(address)
    log.flush(at_once=True)
    log.flush(at_once=True)
    assert caplog.messages == [
        "it: 1, from a (1)",
        "it: 11, from b (3), c (3), a (1), 4 other addresses",
    ]


def test_a_gateway_without_a_free_descriptor_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: str) -> list[str]:
        raise OSError(24, "Too many open files")

    with served(section()) as (replay, server), monkeypatch.context() as patch:
        patch.setattr("deepspeed_gear.remote.gateway_limits.os.listdir", fail)
        server._connections.look()
        with connect(server.url) as writer:
            writer.add(trajectory(0))
        assert len(replay) == 1
