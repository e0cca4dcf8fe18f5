"""Check that hosts of a hostfile reach each other over TCP, on ports that the kernel chooses, like gloo's.

`python -m deepspeed_gear.cli.doctor_network serve TOKEN` listens and prints its port; `... ask TOKEN
HOST:PORT ...` connects to each and prints as JSON why a connection failed.
"""

from __future__ import annotations

import json
import secrets
import select
import socket
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

from deepspeed_gear.cli import ssh_hosts
from deepspeed_gear.errors import GearError, PeerError

_MODULE = ("-m", "deepspeed_gear.cli.doctor_network")
_CONNECT_S = 10.0
_IDLE_S = 60.0


def unreachable(hosts: Sequence[str], timeout_s: float) -> list[GearError]:
    """Connect each two hosts, both ways; return an error for each that fails.

    Every host listens, and connects to the others by their names in the hostfile. Cost: two ssh sessions a
    host, all at once.
    """
    token = secrets.token_hex(8)
    problems: list[GearError] = []
    ports: dict[str, str] = {}
    with ExitStack() as servers, ThreadPoolExecutor(len(hosts)) as pool:

        def listen(host: str) -> str | GearError:
            server = servers.enter_context(ssh_hosts.start_on(host, [*_MODULE, "serve", token], timeout_s))
            servers.callback(server.kill)
            try:
                return _port_of(server, host, timeout_s)
            except GearError as error:
                return error

        for host, port in zip(hosts, pool.map(listen, hosts), strict=True):
            if isinstance(port, GearError):
                problems.append(port)
            else:
                ports[host] = port
        for found in pool.map(lambda host: _ask(host, ports, token, timeout_s), ports):
            problems += found
    return problems


def _ask(host: str, ports: dict[str, str], token: str, timeout_s: float) -> list[GearError]:
    others = {f"{other.rpartition('@')[2]}:{port}": other for other, port in ports.items() if other != host}
    try:
        answer = ssh_hosts.run_on(host, [*_MODULE, "ask", token, *others], timeout_s)
    except GearError as error:
        return [error]
    return [
        PeerError(
            f"host {others[address]}",
            f"must be reached from host {host} on TCP port {address.rpartition(':')[2]}",
            why,
            "open the ports between the hosts, and let both resolve its name to an address that they reach",
        )
        for address, why in json.loads(answer.splitlines()[-1]).items()
    ]


def _port_of(server: subprocess.Popen[str], host: str, timeout_s: float) -> str:
    assert server.stdout is not None
    assert server.stderr is not None
    if not select.select([server.stdout], [], [], timeout_s)[0]:
        raise ssh_hosts.unanswered(host, timeout_s)
    port = server.stdout.readline().strip()
    if not port:
        raise ssh_hosts.failed(host, server.stderr.read())
    return port


def serve(token: str, idle_s: float = _IDLE_S) -> None:
    """Listen, print the port, and answer each connection with the token; end after `idle_s` without one."""
    with socket.create_server(("", 0)) as listener:
        listener.settimeout(idle_s)
        print(listener.getsockname()[1], flush=True)
        while True:
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                return
            with connection:
                connection.sendall(token.encode())


def ask(token: str, addresses: Sequence[str]) -> dict[str, str]:
    """Connect to every HOST:PORT; return the reasons of failures by address."""
    failed: dict[str, str] = {}
    for address in addresses:
        host, _, port = address.rpartition(":")
        try:
            with socket.create_connection((host, int(port)), timeout=_CONNECT_S) as peer:
                answer = peer.recv(len(token), socket.MSG_WAITALL).decode(errors="replace")
        except OSError as error:
            failed[address] = str(error)
        else:
            if answer != token:
                failed[address] = "another program answers"
    return failed


if __name__ == "__main__":
    command, given, *rest = sys.argv[1:]
    if command == "serve":
        serve(given)
    else:
        print(json.dumps(ask(given, rest)))
