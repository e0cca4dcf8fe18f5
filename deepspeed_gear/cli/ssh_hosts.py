"""Hosts of a hostfile, and programs on them over ssh."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from deepspeed_gear.errors import ConfigError, PeerError

# No prompt for a password or for trust in a key, since a launcher could not answer; a lost link ends it.
SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=5")
# Variables that the launch script exports as well, so that the probe has the environment of the ranks.
FORWARDED = (
    "DS_ACCELERATOR OMP_NUM_THREADS GLOO_SOCKET_IFNAME TORCH_EXTENSIONS_DIR "
    "PATH LD_LIBRARY_PATH CUDA_HOME CXX"
).split()
_LINE = re.compile(r"(\S+)\s+slots=(\d+)")


def read_hostfile(path: str | Path) -> dict[str, int]:
    """Read hosts and their slots, in the order of the ranks, by DeepSpeed's rules.

    Raises:
        ConfigError: The file is missing, empty, or a line of it is malformed or a repetition.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(
            str(path),
            "must be a readable hostfile",
            error.strerror,
            "copy configs/hostfile.example and name your hosts",
        ) from error
    hosts: dict[str, int] = {}
    for number, line in enumerate(map(str.strip, lines), 1):
        if not line or line.startswith("#"):
            continue
        match = _LINE.match(line)
        where = f"{path}, line {number}"
        if match is None:
            raise ConfigError(where, "must be 'HOST slots=NUMBER'", line, "correct it")
        if match[1] in hosts:
            raise ConfigError(where, "must name a host once", match[1], "add up its slots in one line")
        hosts[match[1]] = int(match[2])
    if not hosts:
        raise ConfigError(str(path), "must name a host", None, "add a line 'HOST slots=NUMBER'")
    return hosts


def remote_python(arguments: Sequence[str], timeout_s: float) -> str:
    """Return the shell command that runs this interpreter elsewhere, in this folder and with these settings.

    It ends after `timeout_s` even if the connection is lost.
    """
    path = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")]))
    settings = [f"PYTHONPATH={path}", *(f"{n}={os.environ[n]}" for n in FORWARDED if n in os.environ)]
    command = ["timeout", "-k", "5", f"{timeout_s:g}", "env", *settings, sys.executable, *arguments]
    return f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(command)}"


def start_on(host: str, arguments: Sequence[str], timeout_s: float) -> subprocess.Popen[str]:
    """Start this interpreter on a host; the caller ends what it no longer needs."""
    return subprocess.Popen(
        [*SSH, host, remote_python(arguments, timeout_s)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_on(host: str, arguments: Sequence[str], timeout_s: float) -> str:
    """Run this interpreter on a host to its end; return its stdout.

    Raises:
        PeerError: The host cannot be reached, the program fails there, or takes longer than `timeout_s`.
    """
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


def unanswered(host: str, timeout_s: float) -> PeerError:
    """Return the error of a host that is too slow."""
    return PeerError(
        f"host {host}",
        f"must answer within {timeout_s:g} s",
        None,
        "look at what hangs there (ps, dmesg), or give a longer --timeout",
    )


def failed(host: str, stderr: str) -> PeerError:
    """Return the error of a program, or an ssh, that failed on a host."""
    lines = stderr.strip().splitlines() or ["nothing"]
    return PeerError(
        f"host {host}",
        "must run this interpreter over ssh, without a password",
        lines[-1],
        f"try: {' '.join(SSH[:3])} {host} {sys.executable} --version",
    )
