"""Hosts of a hostfile, programs on them over ssh, and whether they reach each other.

Like gloo, the check of connections uses TCP and ports that the kernel chooses. `python -m
deepspeed_gear.cli.ssh_hosts serve TOKEN` listens and prints its port; `... ask TOKEN HOST:PORT ...`
connects to each and prints as JSON why a connection failed.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import select
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import TypeVar

from deepspeed_gear.errors import ConfigError, GearError, PeerError

# BatchMode: no prompt for a password or for trust in a key, which a launcher could not answer. A
# connection that is lost ends the command.
SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=5")
# Variables that the launch script exports as well, so that the probe has the environment of the
# ranks.
FORWARDED = (
    "DS_ACCELERATOR OMP_NUM_THREADS GLOO_SOCKET_IFNAME TORCH_EXTENSIONS_DIR PATH LD_LIBRARY_PATH "
    "CUDA_HOME CXX"
).split()
GEAR = ("-m", "deepspeed_gear.cli.main")  # the `gear` command, as arguments of the interpreter
_MODULE = ("-m", "deepspeed_gear.cli.ssh_hosts")
_CONNECT_S = 10.0
_IDLE_S = 60.0
T = TypeVar("T")
_LINE = re.compile(r"(\S+)\s+slots=(\d+)")


def read_hostfile(path: str | Path) -> dict[str, int]:
    """Read hosts and their slots in the order of the ranks, by DeepSpeed's rules."""
    with ConfigError.on(
        str(path),
        "must be a readable hostfile",
        OSError,
        remedy="copy configs/hostfile.example and name your hosts",
    ):
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    hosts: dict[str, int] = {}
    for number, line in enumerate(map(str.strip, lines), 1):
        if not line or line.startswith("#"):
            continue
        match = _LINE.match(line)
        where = f"{path}, line {number}"
        if match is None:
            raise ConfigError(where, "must be 'HOST slots=NUMBER'", line, "correct it")
        if match[1] in hosts:
            raise ConfigError(
                where, "must name a host once", match[1], "add up its slots in one line"
            )
        # DeepSpeed starts no rank on such a host, yet may wait for it if it is the first one.
        if int(match[2]) == 0:
            raise ConfigError(where, "must have at least one slot", line, "remove the line")
        hosts[match[1]] = int(match[2])
    if not hosts:
        raise ConfigError(str(path), "must name a host", None, "add a line 'HOST slots=NUMBER'")
    return hosts


def start_on(host: str, arguments: Sequence[str], timeout_s: float) -> subprocess.Popen[str]:
    """Start this interpreter on a host, in this folder and with the forwarded variables.

    It ends after `timeout_s` even if the connection is lost; the caller ends processes that it no
    longer needs.
    """
    path = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")]))
    settings = [
        f"PYTHONPATH={path}",
        *(f"{n}={os.environ[n]}" for n in FORWARDED if n in os.environ),
    ]
    command = ["timeout", "-k", "5", f"{timeout_s:g}", "env", *settings, sys.executable, *arguments]
    there = f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(command)}"
    null = subprocess.DEVNULL
    pipe = subprocess.PIPE
    return subprocess.Popen([*SSH, host, there], stdin=null, stdout=pipe, stderr=pipe, text=True)


def run_on(host: str, arguments: Sequence[str], timeout_s: float) -> str:
    """Run this interpreter on a host until it exits; return its standard output."""
    with start_on(host, arguments, timeout_s) as process:
        try:
            # The remote end has its own limit; this one is for a connection that hangs.
            stdout, stderr = process.communicate(timeout=timeout_s + 20)
        except subprocess.TimeoutExpired:
            process.kill()
            raise unanswered(host, timeout_s) from None
    if process.returncode in (124, 137):
        raise unanswered(host, timeout_s)
    if process.returncode:
        raise failed(host, stderr)
    return stdout


def on_each(
    hosts: Collection[str], act: Callable[[str], T]
) -> tuple[dict[str, T], list[GearError]]:
    """Call a function for all hosts at once; return results by host, and the errors of others."""

    def attempt(host: str) -> T | GearError:
        try:
            return act(host)
        except GearError as error:
            return error

    with ThreadPoolExecutor(max(1, len(hosts))) as pool:
        answers = dict(zip(hosts, pool.map(attempt, hosts), strict=True))
    results = {
        host: answer for host, answer in answers.items() if not isinstance(answer, GearError)
    }
    return results, [answer for answer in answers.values() if isinstance(answer, GearError)]


def unanswered(host: str, timeout_s: float) -> PeerError:
    """Return the error of a host that did not answer in time."""
    return PeerError(
        f"host {host}",
        f"must answer within {timeout_s:g} s",
        None,
        "look at what hangs there (ps, dmesg), or give a longer --timeout",
    )


def failed(host: str, stderr: str) -> PeerError:
    """Return the error of a program, or of ssh itself, that failed on a host."""
    lines = stderr.strip().splitlines() or ["nothing"]
    return PeerError(
        f"host {host}",
        "must run this interpreter over ssh, without a password",
        lines[-1],
        f"try: {' '.join(SSH[:3])} {host} {sys.executable} --version",
    )


def unreachable(hosts: Sequence[str], timeout_s: float) -> list[GearError]:
    """Connect each pair of hosts in both directions; return an error for each that fails.

    Every host listens, and connects to the others by their names in the hostfile. Cost: two ssh
    sessions per host, all at once.
    """
    token = secrets.token_hex(8)
    with ExitStack() as servers:

        def listen(host: str) -> str:
            server = servers.enter_context(start_on(host, [*_MODULE, "serve", token], timeout_s))
            servers.callback(server.kill)
            assert server.stdout is not None
            assert server.stderr is not None
            if not select.select([server.stdout], [], [], timeout_s)[0]:
                raise unanswered(host, timeout_s)
            port = server.stdout.readline().strip()
            if not port:
                raise failed(host, server.stderr.read())
            return port

        ports, problems = on_each(hosts, listen)

        def find_failures(host: str) -> list[GearError]:
            others = {
                f"{to.rpartition('@')[2]}:{port}": to for to, port in ports.items() if to != host
            }
            answer = run_on(host, [*_MODULE, "ask", token, *others], timeout_s)
            remedy = (
                "open the ports between the hosts; let both resolve its name to an address they "
                "reach"
            )
            failures: list[GearError] = []
            for address, why in json.loads(answer.splitlines()[-1]).items():
                port = address.rpartition(":")[2]
                failures.append(
                    PeerError(
                        f"host {others[address]}",
                        f"must be reached from host {host} on TCP port {port}",
                        why,
                        remedy,
                    )
                )
            return failures

        failures, unasked = on_each(ports, find_failures)
    return [*problems, *unasked, *chain.from_iterable(failures.values())]


def serve(token: str, idle_s: float = _IDLE_S) -> None:
    """Listen on a free port and print it; send the token over each connection.

    Ends after `idle_s` without a connection.
    """
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
    """Connect to every HOST:PORT; return the reason of each failure by address."""
    reasons: dict[str, str] = {}
    for address in addresses:
        host, _, port = address.rpartition(":")
        try:
            with socket.create_connection((host, int(port)), timeout=_CONNECT_S) as peer:
                answer = peer.recv(len(token), socket.MSG_WAITALL).decode(errors="replace")
        except OSError as error:
            reasons[address] = str(error)
        else:
            if answer != token:
                reasons[address] = "another program answers"
    return reasons


if __name__ == "__main__":
    command, given, *rest = sys.argv[1:]
    if command == "serve":
        serve(given)
    else:
        print(json.dumps(ask(given, rest)))
