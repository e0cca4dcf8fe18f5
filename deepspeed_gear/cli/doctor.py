"""`gear doctor`: whether one machine, or all hosts of a hostfile, are fit to train together."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from deepspeed_gear.cli import doctor_report, ssh_hosts
from deepspeed_gear.cli.doctor_network import unreachable
from deepspeed_gear.cli.doctor_probe import examine, parts_of

from ..errors import ConfigError, DataError, GearError, PeerError
from ..timeouts import check_timeout

_MARK = "GEAR-NODE "
_HERE = "here"
_MAX_CONNECTIONS = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `gear doctor`."""
    parser.description = (
        "Check versions, native op, shared memory and limits of this machine; with --hostfile of all its "
        "hosts, over ssh, and whether each two of them reach each other. The exit status is 1 if there is "
        "a problem."
    )
    parser.add_argument("--hostfile", metavar="F", help="check the hosts of this file, as DeepSpeed reads it")
    parser.add_argument(
        "--data", metavar="PATH", help="also open this data set, which must be equal on all hosts"
    )
    parser.add_argument("--json", metavar="F", help="also write everything that was found to this file")
    parser.add_argument("--no-network", action="store_true", help="leave the network out")
    parser.add_argument(
        "--timeout",
        type=float,
        default=300.0,
        metavar="S",
        help="seconds for each host to answer; the first build of the native op counts (default: 300)",
    )
    parser.add_argument("--node", action="store_true", help=argparse.SUPPRESS)


def run(options: argparse.Namespace) -> int:
    """Check, print problems; the status is 1 if there is any problem.

    Raises:
        ConfigError: An option or the hostfile is wrong.
        DataError: The JSON file cannot be written.
    """
    _check(options)
    data = os.path.abspath(options.data) if options.data else None
    if options.node:
        print(_MARK + json.dumps(examine(data)))
        return 0
    problems: list[GearError] = []
    if options.hostfile is None:
        hosts = {_HERE: 0}
        reports: dict[str, dict[str, Any]] = {_HERE: examine(data)}
    else:
        hosts = ssh_hosts.read_hostfile(options.hostfile)
        reports, problems = ask_all(list(hosts), data, options.timeout)
    problems += doctor_report.problems_of(reports, hosts)
    if len(reports) > 1 and not options.no_network:
        _progress("connecting each two hosts")
        problems += unreachable(list(reports), options.timeout)
    _print(reports, problems)
    if options.json:
        _write(Path(options.json), reports, problems)
    return int(bool(problems))


def ask_all(
    hosts: Sequence[str], data: str | None, timeout_s: float
) -> tuple[dict[str, dict[str, Any]], list[GearError]]:
    """Run the probe on all hosts at once; a host that does not answer is an error in the second list."""

    def ask(host: str) -> dict[str, Any] | GearError:
        try:
            return ask_one(host, data, timeout_s)
        except GearError as error:
            return error

    _progress(f"examining {len(hosts)} hosts")
    with ThreadPoolExecutor(min(len(hosts), _MAX_CONNECTIONS)) as pool:
        answers = list(zip(hosts, pool.map(ask, hosts), strict=True))
    reports = {host: answer for host, answer in answers if not isinstance(answer, GearError)}
    return reports, [answer for _, answer in answers if isinstance(answer, GearError)]


def ask_one(host: str, data: str | None, timeout_s: float) -> dict[str, Any]:
    """Run the probe on a host and return its report.

    Raises:
        PeerError: It cannot be reached, or another program than `gear doctor` answers.
    """
    arguments = ["-m", "deepspeed_gear.cli.main", "doctor", "--node", *(["--data", data] if data else [])]
    return read_answer(host, ssh_hosts.run_on(host, arguments, timeout_s))


def read_answer(host: str, stdout: str) -> dict[str, Any]:
    """Find the report of a host in its standard output, among the output of its shell and libraries.

    Raises:
        PeerError: There is none.
    """
    line = next((line for line in stdout.splitlines() if line.startswith(_MARK)), None)
    if line is None:
        raise PeerError(
            f"host {host}",
            "must have a deepspeed_gear with gear doctor",
            stdout[-200:],
            "install this version there",
        )
    facts: dict[str, Any] = json.loads(line[len(_MARK) :])
    return facts


def _check(options: argparse.Namespace) -> None:
    if not options.timeout > 0:
        raise ConfigError("--timeout", "must be positive", options.timeout, "leave it out for the default")
    check_timeout("--timeout", options.timeout)


def _print(reports: Mapping[str, Any], problems: Sequence[GearError]) -> None:
    for line in doctor_report.registration_lines(reports):
        print(line)
    for problem in problems:
        print(f"problem: {problem}")
    print(f"{len(problems)} problem{'' if len(problems) == 1 else 's'}")


def _write(path: Path, reports: Mapping[str, Any], problems: Sequence[GearError]) -> None:
    found = {
        "hosts": reports,
        "problems": [parts_of(problem) for problem in problems],
    }
    try:
        path.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise DataError(
            str(path), "must be a writable file", error.strerror, "choose another --json"
        ) from error


def _progress(text: str) -> None:
    print(f"gear: {text}", file=sys.stderr, flush=True)
