"""Bandwidth and latency over one TCP connection, between each two hosts of a hostfile.

`python -m deepspeed_gear.cli.doctor_network serve TOKEN` listens and prints its port; `... ask HOST PORT
TOKEN BYTES` connects to it, measures both directions and prints the result as JSON.
"""

from __future__ import annotations

import json
import secrets
import select
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

from deepspeed_gear.cli import ssh_hosts
from deepspeed_gear.errors import GearError, PeerError

_MODULE = ("-m", "deepspeed_gear.cli.doctor_network")
_CHUNK_BYTES = 1 << 20
_PINGS = 200
_SILENCE_S = 20.0


@dataclass(frozen=True)
class Pair:
    """What was measured between two hosts.

    Args:
        first: A host.
        second: Another one; it has connected to the first.
        forth_bytes_per_s: From the first to the second.
        back_bytes_per_s: From the second to the first.
        round_trip_s: Median time of a byte that is sent back.
    """

    first: str
    second: str
    forth_bytes_per_s: float
    back_bytes_per_s: float
    round_trip_s: float

    def as_json(self) -> dict[str, object]:
        """Return it for `--json`."""
        return asdict(self)


def rounds(hosts: Sequence[str]) -> Iterator[list[tuple[str, str]]]:
    """Yield every pair of hosts once, in rounds in which no host is busy twice (the circle method)."""
    circle: list[str | None] = [*hosts, *([None] if len(hosts) % 2 else [])]
    half = len(circle) // 2
    for _ in range(len(circle) - 1):
        facing = zip(circle[:half], reversed(circle[half:]), strict=True)
        yield [(a, b) for a, b in facing if a is not None and b is not None]
        circle = [circle[0], circle[-1], *circle[1:-1]]


def measure_all(
    hosts: Sequence[str], num_bytes: int, timeout_s: float, progress: Callable[[str], None]
) -> tuple[list[Pair], list[GearError]]:
    """Measure every pair; what cannot be measured is an error in the second list."""
    found: list[Pair] = []
    problems: list[GearError] = []

    def one(pair: tuple[str, str]) -> None:
        try:
            found.append(measure(*pair, num_bytes, timeout_s))
        except GearError as error:
            problems.append(error)

    with ThreadPoolExecutor(max(1, len(hosts) // 2)) as pool:
        for number, pairs in enumerate(rounds(hosts), 1):
            progress(f"network, round {number} of {len(hosts) - 1 + len(hosts) % 2}")
            list(pool.map(one, pairs))
    order = {host: i for i, host in enumerate(hosts)}
    return sorted(found, key=lambda p: (order[p.first], order[p.second])), problems


def measure(first: str, second: str, num_bytes: int, timeout_s: float) -> Pair:
    """Measure between two hosts: one listens, the other connects to it by its name in the hostfile.

    Raises:
        PeerError: One of them cannot be reached by ssh, or not from the other one.
    """
    token = secrets.token_hex(8)
    with ssh_hosts.start_on(first, [*_MODULE, "serve", token], timeout_s) as server:
        try:
            port = _port_of(server, first, timeout_s)
            ask = [*_MODULE, "ask", first.rpartition("@")[2], port, token, str(num_bytes)]
            said = json.loads(ssh_hosts.run_on(second, ask, timeout_s).splitlines()[-1])
        finally:
            server.kill()
    if "error" in said:
        raise PeerError(
            f"host {first}",
            f"must be reached from host {second} on TCP port {port}",
            said["error"],
            "open the ports between the hosts, and let both resolve its name to an address that they reach",
        )
    return Pair(first, second, **said)


def _port_of(server: subprocess.Popen[str], host: str, timeout_s: float) -> str:
    assert server.stdout is not None
    assert server.stderr is not None
    if not select.select([server.stdout], [], [], timeout_s)[0]:
        raise ssh_hosts.unanswered(host, timeout_s)
    port = server.stdout.readline().strip()
    if not port:
        raise ssh_hosts.failed(host, server.stderr.read())
    return port


def serve(token: str) -> None:
    """Listen, print the port, and serve the one caller that knows the token.

    Raises:
        OSError: No peer connects, or the caller falls silent.
    """
    with socket.create_server(("", 0)) as listener:
        listener.settimeout(_SILENCE_S)
        print(listener.getsockname()[1], flush=True)
        while True:
            caller = _quick(listener.accept()[0])
            with caller:
                if _receive_exactly(caller, len(token)) != token.encode():
                    continue
                caller.sendall(b"!")
                num_bytes = int.from_bytes(_receive_exactly(caller, 8), "big")
                for _ in range(_PINGS):
                    caller.sendall(_receive_exactly(caller, 1))
                _receive(caller, num_bytes)
                caller.sendall(b"!")
                _send(caller, num_bytes)
                _receive_exactly(caller, 1)
                return


def ask(host: str, port: int, token: str, num_bytes: int) -> dict[str, float]:
    """Connect to `serve` and measure: seconds of a round trip, bytes per second both ways.

    Raises:
        OSError: No connection, or a silent one.
    """
    with _quick(socket.create_connection((host, port), timeout=_SILENCE_S)) as peer:
        peer.sendall(token.encode())
        _receive_exactly(peer, 1)
        peer.sendall(num_bytes.to_bytes(8, "big"))
        trips = []
        for _ in range(_PINGS):
            begun = time.perf_counter()
            peer.sendall(b"?")
            _receive_exactly(peer, 1)
            trips.append(time.perf_counter() - begun)
        begun = time.perf_counter()
        _send(peer, num_bytes)
        _receive_exactly(peer, 1)  # the last byte has arrived
        turned = time.perf_counter()
        _receive(peer, num_bytes)
        ended = time.perf_counter()
        peer.sendall(b"!")
    return {
        "back_bytes_per_s": num_bytes / (turned - begun),
        "forth_bytes_per_s": num_bytes / (ended - turned),
        "round_trip_s": statistics.median(trips),
    }


def _quick(connection: socket.socket) -> socket.socket:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.settimeout(_SILENCE_S)
    return connection


def _send(peer: socket.socket, num_bytes: int) -> None:
    chunk = memoryview(bytes(_CHUNK_BYTES))
    for left in range(num_bytes, 0, -_CHUNK_BYTES):
        peer.sendall(chunk[: min(left, _CHUNK_BYTES)])


def _receive(peer: socket.socket, num_bytes: int) -> None:
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    while num_bytes > 0:
        count = peer.recv_into(buffer[: min(num_bytes, _CHUNK_BYTES)])
        if count == 0:
            raise ConnectionError("the other end has gone")
        num_bytes -= count


def _receive_exactly(peer: socket.socket, num_bytes: int) -> bytes:
    parts = b""
    while len(parts) < num_bytes:
        part = peer.recv(num_bytes - len(parts))
        if not part:
            raise ConnectionError("the other end has gone")
        parts += part
    return parts


def main(arguments: Sequence[str]) -> None:
    """Be one end of a measurement."""
    if arguments[0] == "serve":
        serve(arguments[1])
        return
    host, port, token, num_bytes = arguments[1:]
    try:
        print(json.dumps(ask(host, int(port), token, int(num_bytes))))
    except OSError as error:
        print(json.dumps({"error": str(error)}))


if __name__ == "__main__":
    main(sys.argv[1:])
