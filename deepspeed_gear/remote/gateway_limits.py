"""Limits of a gateway: connections and calls of each peer, and how long each may take.

gRPC accepts connections itself; its options bound their total number and their idle time. The
limits for each address are enforced here: on the sockets of this process before a connection has
shown the token, and on the calls that occupy workers afterwards.
"""

from __future__ import annotations

import os
import resource
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple
from urllib.parse import unquote

from deepspeed_gear.log import LOG

MOST_CONNECTIONS = 4096
TOKEN_S = 10.0  # within which a connection must show the token, after its handshake
MOST_WITHOUT_TOKEN = 256  # connections of an address that have not shown the token yet
MOST_OF_CONNECTION = 2  # calls at once; a writer makes one, and may have given up another
# Streams of a connection. gRPC refuses more without naming a cause, and counts some that have just
# ended: so this is far more than MOST_OF_CONNECTION.
_STREAMS = 100
_IDLE_S = 60.0  # a connection without calls is closed after it; a writer connects again by itself
_FILES = 128  # descriptors for everything else
_FORGET_S = 5.0  # after which a peer without a connection is forgotten
_SHOWN_ADDRESSES = 3
_LOG_S = 1.0


class Peer(NamedTuple):
    """The remote end of a connection."""

    address: str
    port: int

    @classmethod
    def of_grpc(cls, name: str) -> Peer:
        """Return the peer with a gRPC name such as ipv4:127.0.0.1:80 or ipv6:%5B::1%5D:80."""
        _, _, rest = unquote(name).partition(":")
        address, _, port = rest.rpartition(":")
        return cls.of_socket(address.strip("[]"), int(port) if port.isdigit() else 0)

    @classmethod
    def of_socket(cls, address: str, port: int) -> Peer:
        return cls(address.removeprefix("::ffff:"), port)  # IPv4 at a socket of both kinds


def raise_descriptor_limit() -> None:
    """Raise this process's limit of open files as far as its connections need and it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_CONNECTIONS + 2 * _FILES
    most = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def most_connections() -> int:
    """Return the number of connections that this process's limit of open files allows."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MOST_CONNECTIONS
    return max(1, min(MOST_CONNECTIONS, soft - len(os.listdir("/proc/self/fd")) - _FILES))


def server_options(connections: int) -> list[tuple[str, int]]:
    """Return the options of a gRPC server that bound its connections.

    Connections beyond the bound are closed at once.
    """
    return [
        ("grpc.max_allowed_incoming_connections", connections),
        ("grpc.server_handshake_timeout_ms", int(TOKEN_S * 1000)),
        ("grpc.http2.settings_timeout", int(TOKEN_S * 1000)),
        ("grpc.max_connection_idle_ms", int(_IDLE_S * 1000)),
        ("grpc.max_concurrent_streams", _STREAMS),
    ]


class CountedLog:
    """Log of an event that clients can cause at any rate: at most one line per second.

    Args:
        text: The line, with the places of the count and of the addresses.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._counts = Counter[str]()
        self._lock = threading.Lock()
        self._logged_at = -_LOG_S

    def note(self, address: str) -> None:
        """Count an event of an address, and log the events so far if a second has passed."""
        with self._lock:
            self._counts[address] += 1
        self.flush()

    def flush(self, at_once: bool = False) -> None:
        """Log the events since the last line, unless that is less than a second ago."""
        now = time.monotonic()
        with self._lock:
            if not self._counts or (now < self._logged_at + _LOG_S and not at_once):
                return
            counts = self._counts
            self._counts = Counter()
            self._logged_at = now
        shown = [
            f"{address} ({count:,})" for address, count in counts.most_common(_SHOWN_ADDRESSES)
        ]
        if len(counts) > len(shown):
            shown.append(f"{len(counts) - len(shown):,} other addresses")
        LOG.warning(self._text, counts.total(), ", ".join(shown))


@dataclass(eq=False)
class Call:
    """A call that occupies a place."""

    peer: Peer
    cancel: Callable[[], object]
    since: float


class CallLimits:
    """Limits for calls of peers that have the token: how many may occupy places, and how long.

    A place is a worker, or room for an answer. An address may occupy three times as many places as
    are free: one address alone 3/4 of them, two addresses 3/7 each. So some places are always free
    for a further address.

    Thread safety: any thread may call any method.

    Args:
        num_places: Number of places.
        longest_s: A call that has its place for longer is cancelled.
        most_of_connection: Most calls of one connection at once.
        places: What the places are, for errors.
    """

    def __init__(
        self,
        num_places: int,
        longest_s: float,
        most_of_connection: int = MOST_OF_CONNECTION,
        places: str = "workers",
    ) -> None:
        self.num_places = num_places
        self._longest_s = longest_s
        self._most_of_connection = most_of_connection
        self._places = places
        self._calls = set[Call]()
        self._lock = threading.Lock()
        self.log = CountedLog(
            "gear serve: calls refused beyond the share of an address: %d, from %s"
        )

    @property
    def num_calls(self) -> int:
        """Number of calls that have a place."""
        return len(self._calls)

    def begin(self, peer: Peer, cancel: Callable[[], object]) -> Call | str:
        """Admit a call, or return the reason for its refusal, with the remedy."""
        with self._lock:
            free = self.num_places - len(self._calls)
            of_address = sum(call.peer.address == peer.address for call in self._calls)
            of_connection = sum(call.peer == peer for call in self._calls)
            reason = None
            if of_connection >= self._most_of_connection:
                most = self._most_of_connection
                reason = f"a connection must have at most {most} calls at once; await answers"
            elif of_address >= 3 * free:
                reason = (
                    f"{peer.address} must leave {self._places} of the gateway to other addresses: "
                    f"it has {of_address} calls of {len(self._calls)}, and {free} {self._places} "
                    "are free; start fewer writers there, or another gateway"
                )
            if reason is None:
                call = Call(peer, cancel, time.monotonic())
                self._calls.add(call)
                return call
        self.log.note(peer.address)
        return reason

    def end(self, call: Call) -> None:
        """Free the place of a call."""
        with self._lock:
            self._calls.discard(call)

    def cancel_late(self) -> None:
        """Cancel calls that take longer than a writer waits for the largest message."""
        before = time.monotonic() - self._longest_s
        with self._lock:
            late = [call for call in self._calls if call.since < before]
        for call in late:
            call.cancel()


class Connections:
    """The accepted connections of a gateway's port; closes those that do not show the token.

    Thread safety: one thread calls `look`; any thread may call the other methods.
    """

    def __init__(self, port: int, most_without_token: int) -> None:
        self._port = port
        self._most = most_without_token
        # By link of the descriptor, which differs between sockets that use one number: the peer
        # (None: no connection of the port), and when it was first seen.
        self._known = dict[str, tuple[Peer | None, float]]()
        self._shown = dict[Peer, float]()  # peers that have shown the token, and when they did last
        self._lock = threading.Lock()
        self.log = CountedLog(
            "gear serve: connections closed that have not shown the token: %d, of %s; an address "
            f"may have {most_without_token} of them at once, for {TOKEN_S:g} s each"
        )

    def show_token(self, peer: Peer) -> None:
        """Record that a peer has shown the token."""
        with self._lock:
            self._shown[peer] = time.monotonic()

    def look(self) -> None:
        """Close connections without a token: old ones, and the oldest of an address with many.

        Cost: a system call for each descriptor of the process.
        """
        now = time.monotonic()
        known = dict[str, tuple[Peer | None, float]]()
        numbers = dict[str, int]()
        try:
            names = os.listdir("/proc/self/fd")
        except OSError:  # no descriptor is free: the next look may have one
            return
        for name in names:
            link = _link(int(name))
            if link.startswith("socket:"):
                number = int(name)
                known[link] = self._known.get(link) or (self._peer(number, link), now)
                numbers[link] = number
        self._known = known
        peers = {peer for peer, _ in known.values()}
        with self._lock:
            gone = [
                peer
                for peer, at in self._shown.items()
                if peer not in peers and at < now - _FORGET_S
            ]
            for peer in gone:
                del self._shown[peer]
            shown = set(self._shown)
        waiting = [
            (since, peer, link)
            for link, (peer, since) in known.items()
            if peer is not None and peer not in shown
        ]
        waiting.sort(reverse=True)  # the newest first
        kept = Counter[str]()
        for since, peer, link in waiting:
            if kept[peer.address] < self._most and now < since + TOKEN_S:
                kept[peer.address] += 1
            elif _shut_down(numbers[link], link):
                self.log.note(peer.address)

    def _peer(self, number: int, link: str) -> Peer | None:
        """Return the peer of a descriptor; None if it is not a connection to the port."""
        with suppress(OSError), _same_socket(number, link) as one:
            if (
                one.family in (socket.AF_INET, socket.AF_INET6)
                and one.getsockname()[1] == self._port
            ):
                return Peer.of_socket(*one.getpeername()[:2])  # OSError: it is the listener
        return None


def _link(number: int) -> str:
    """Return the link of a descriptor of this process, "" if it was closed meanwhile."""
    with suppress(OSError):
        return os.readlink(f"/proc/self/fd/{number}")
    return ""


def _same_socket(number: int, link: str) -> socket.socket:
    """Return gRPC's socket of a descriptor.

    Raises:
        OSError: It was closed, and its number may be another's.
    """
    copy = os.dup(number)
    if _link(copy) != link:
        os.close(copy)
        raise OSError("the descriptor was closed")
    return socket.socket(fileno=copy)


def _shut_down(number: int, link: str) -> bool:
    """End a connection as if its peer had ended it, so that gRPC closes it."""
    with suppress(OSError), _same_socket(number, link) as one:
        one.shutdown(socket.SHUT_RDWR)
        return True
    return False
