"""`gear doctor`: whether one machine, or all hosts of a hostfile, are fit to train together."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import resource
import shutil
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from deepspeed_gear.cli import ssh_hosts
from deepspeed_gear.errors import (
    ConfigError,
    DataError,
    GearError,
    PeerError,
    StoreError,
    show_bytes,
)
from deepspeed_gear.ops import stale_locks
from deepspeed_gear.timeouts import check_timeout

Facts = Mapping[str, Any]

MIN_SHM_BYTES = 1 << 30
MIN_OPEN_FILES = 1024
SHM = "/dev/shm"
_PACKAGES = ("torch", "deepspeed", "numpy", "pydantic")
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
    if not options.timeout > 0:
        raise ConfigError("--timeout", "must be positive", options.timeout, "leave it out for the default")
    check_timeout("--timeout", options.timeout)
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
    problems += problems_of(reports, hosts)
    if len(reports) > 1 and not options.no_network:
        print("gear: connecting each two hosts", file=sys.stderr, flush=True)
        problems += ssh_hosts.unreachable(list(reports), options.timeout)
    for line in (*registration_lines(reports), *(f"problem: {problem}" for problem in problems)):
        print(line)
    print(f"{len(problems)} problem{'' if len(problems) == 1 else 's'}")
    if options.json:
        found = {"hosts": reports, "problems": [parts_of(problem) for problem in problems]}
        try:
            Path(options.json).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            rule = "must be a writable file"
            raise DataError(options.json, rule, error.strerror, "choose another --json") from error
    return int(bool(problems))


def ask_all(
    hosts: Sequence[str], data: str | None, timeout_s: float
) -> tuple[dict[str, dict[str, Any]], list[GearError]]:
    """Run the probe on all hosts at once; a host that does not answer is an error in the second list."""
    probe = ["-m", "deepspeed_gear.cli.main", "doctor", "--node", *(["--data", data] if data else [])]

    def ask(host: str) -> dict[str, Any] | GearError:
        try:
            return read_answer(host, ssh_hosts.run_on(host, probe, timeout_s))
        except GearError as error:
            return error

    print(f"gear: examining {len(hosts)} hosts", file=sys.stderr, flush=True)
    with ThreadPoolExecutor(min(len(hosts), _MAX_CONNECTIONS)) as pool:
        answers = dict(zip(hosts, pool.map(ask, hosts), strict=True))
    reports = {host: answer for host, answer in answers.items() if not isinstance(answer, GearError)}
    return reports, [answer for answer in answers.values() if isinstance(answer, GearError)]


def read_answer(host: str, stdout: str) -> dict[str, Any]:
    """Return a host's report, found in its standard output among that of its shell and libraries."""
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


# ---- the facts of a machine ----------------------------------------------------------------------


def examine(data: str | None = None) -> dict[str, Any]:
    """Return the facts of this machine, JSON-able. Loads the native op, and builds it if need be.

    Args:
        data: Folder of a data set to open as well.
    """
    import torch

    from deepspeed_gear import __version__
    from deepspeed_gear.ops.native_op import CpuOp

    versions = {"python": platform.python_version(), "deepspeed_gear": __version__}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "none"
    versions["torch"], versions["CUDA of torch"] = torch.__version__, torch.version.cuda or "none"
    shm = shutil.disk_usage(SHM)
    locked, open_files = (
        None if (limit := resource.getrlimit(which)[0]) == resource.RLIM_INFINITY else limit
        for which in (resource.RLIMIT_MEMLOCK, resource.RLIMIT_NOFILE)
    )
    try:  # what this machine's name resolves to here; gloo uses it if no interface is set
        address = socket.gethostbyname(socket.gethostname())
    except OSError:
        address = ""
    boot_id, infiniband = Path("/proc/sys/kernel/random/boot_id"), Path("/sys/class/infiniband")
    facts = {
        "hostname": socket.gethostname(),
        "boot_id": boot_id.read_text().strip() if boot_id.exists() else "",
        "address": address,
        "gloo_interface": os.environ.get("GLOO_SOCKET_IFNAME", ""),
        "shm_bytes": shm.total,
        "shm_free_bytes": shm.free,
        "memlock_bytes": locked,
        "open_files": open_files,
        "infiniband": sorted(os.listdir(infiniband)) if infiniband.exists() else [],
        "versions": versions,
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "native_error": _native_error(),
        "native_sources": CpuOp().source_digest()[:16],
        "not_registered": _why_not_registered(),
        "gathering": _transfers(),
        "stale_locks": [parts_of(stale_locks.as_error(lock)) for lock in stale_locks.find()],
    }
    return {**facts, "data": _data(data)} if data else facts


def _native_error() -> dict[str, str] | None:
    from deepspeed_gear.ops.load import load_native

    try:
        load_native()
    except GearError as error:
        return parts_of(error)
    return None


def _why_not_registered() -> str:
    """Return why CUDA cannot read shared memory in place here; empty if it can."""
    from deepspeed_gear.store.cuda_registration import why_impossible

    try:
        return why_impossible()
    except (GearError, RuntimeError) as error:
        return str(error)


def _transfers() -> list[dict[str, Any]]:
    """Return the transfers of this user's running processes, one entry per table and process."""
    from deepspeed_gear.store.live_stores import living_stores
    from deepspeed_gear.store.records import Peer

    found = []
    for store in living_stores():
        peers, notes = store.views["peers"], store.views["transfer"]
        for peer, note in zip(peers.tolist(), notes, strict=False):
            if peer[Peer.REGISTERED] > 0 and peer[Peer.PID] in store.processes:
                way, _, why = note.tobytes().rstrip(b"\0").decode(errors="replace").partition("; ")
                sizes = {
                    "registered_bytes": peer[Peer.REGISTERED] - 1,
                    "store_bytes": store.layout.total_bytes,
                }
                found.append(
                    {"process": peer[Peer.PID], "table": store.table, "way": way, "why": why, **sizes}
                )
    return found


def _data(path: str) -> dict[str, Any]:
    from deepspeed_gear.data.dataset import Dataset

    try:
        dataset = Dataset.open(path)
    except GearError as error:
        return {"error": parts_of(error)}
    return {
        "fingerprint": dataset.whole_fingerprint,  # nodes may have parts of one whole
        "num_trajectories": len(dataset.lengths),
        "num_steps": int(dataset.lengths.sum()),
    }


# ---- problems ------------------------------------------------------------------------------------


def problems_of(reports: Mapping[str, Facts], slots: Mapping[str, int] | None = None) -> list[GearError]:
    """Return the problems of machines, each alone and compared with the others.

    Args:
        reports: Of `examine`, by host.
        slots: Ranks on each host, where a hostfile names them.
    """
    alone = (
        problem
        for host, facts in reports.items()
        for problem in _alone(host, facts, (slots or {}).get(host, 0), len(reports) > 1)
    )
    return [*alone, *_compared(reports)]


def _alone(host: str, facts: Facts, slots: int, has_peers: bool) -> Iterator[GearError]:
    native = [facts["native_error"]] if facts["native_error"] else []
    for error in [*native, *facts.get("stale_locks", [])]:
        yield _of_host(GearError, host, error)
    if facts["shm_free_bytes"] < MIN_SHM_BYTES:
        yield StoreError(
            f"host {host}: /dev/shm",
            f"must have {show_bytes(MIN_SHM_BYTES)} free",
            f"{show_bytes(facts['shm_free_bytes'])} of {show_bytes(facts['shm_bytes'])}",
            "run gear clean; else enlarge it: mount -o remount,size=50% /dev/shm, or docker run --shm-size",
        )
    if facts["open_files"] is not None and facts["open_files"] < MIN_OPEN_FILES:
        yield GearError(
            f"host {host}: the limit of open files",
            f"must be at least {MIN_OPEN_FILES}",
            facts["open_files"],
            "raise it: ulimit -n, or nofile in /etc/security/limits.conf",
        )
    if facts["infiniband"] and facts["memlock_bytes"] is not None:
        yield GearError(
            f"host {host}: the limit of locked memory",
            f"must be unlimited where there is InfiniBand ({', '.join(facts['infiniband'])})",
            show_bytes(facts["memlock_bytes"]),
            "raise it: memlock in /etc/security/limits.conf, or docker run --ulimit memlock=-1",
        )
    if has_peers and facts["address"].startswith("127.") and not facts["gloo_interface"]:
        yield PeerError(
            f"host {host}: its own name, {facts['hostname']},",
            "must not resolve to a loopback address there, which gloo would send to the other hosts",
            facts["address"],
            "correct its /etc/hosts, or set GLOO_SOCKET_IFNAME to its network interface",
        )
    if facts["gpus"] and slots > len(facts["gpus"]):
        rule = f"must be at most its {len(facts['gpus'])} GPUs"
        yield ConfigError(f"slots of {host}", rule, slots, "correct the hostfile")


def _compared(reports: Mapping[str, Facts]) -> Iterator[GearError]:
    for hosts in _groups(reports, lambda facts: (facts["hostname"], facts["boot_id"])).values():
        if len(hosts) > 1:
            name, known = f"hosts {', '.join(hosts)}", reports[hosts[0]]["hostname"]
            remedy = "name each machine once, with all its slots"
            yield ConfigError(name, "must be different machines", known, remedy)
    packages = dict.fromkeys(package for facts in reports.values() for package in facts["versions"])
    for package in packages:
        groups = _groups(reports, lambda facts, package=package: facts["versions"].get(package, "none"))
        if len(groups) > 1:
            rule, remedy = (
                "must have the same version on all hosts",
                "install the same environment everywhere",
            )
            yield GearError(package, rule, _show_groups(groups), remedy)
    groups = _groups(reports, lambda facts: facts["native_sources"])
    if len(groups) > 1:
        name, remedy = "the sources of the native op", "install the same commit of deepspeed_gear everywhere"
        yield GearError(name, "must be the same on all hosts", _show_groups(groups), remedy)
    opened = {host: facts["data"] for host, facts in reports.items() if "data" in facts}
    for host, data in opened.items():
        if "error" in data:
            yield _of_host(DataError, host, data["error"])
    whole = {host: data for host, data in opened.items() if "error" not in data}
    groups = _groups(whole, lambda data: data["fingerprint"][:16])
    if len(groups) > 1:
        name, remedy = "the data set's fingerprint", "copy the data set from one host to the others"
        yield DataError(name, "must be the same on all hosts", _show_groups(groups), remedy)


def parts_of(error: GearError) -> dict[str, str]:
    """Return an error's parts, JSON-able."""
    value = "" if error.value is None else str(error.value)
    return {"name": error.name, "rule": error.rule, "value": value, "remedy": error.remedy}


def _of_host(kind: type[GearError], host: str, parts: Mapping[str, str]) -> GearError:
    """Return the error of a host from its parts."""
    return kind(f"host {host}: {parts['name']}", parts["rule"], parts["value"] or None, parts["remedy"])


def registration_lines(reports: Mapping[str, Facts]) -> list[str]:
    """Return, for each machine, how much of its shared memory CUDA can read in place, and why not more.

    For processes that run there: how much each has registered.
    """
    lines = []
    for host, facts in reports.items():
        limit = facts["memlock_bytes"]
        text = f"none can be registered, batches are staged: {facts['not_registered']}"
        if not facts["not_registered"]:
            text = (
                f"all of {show_bytes(facts['shm_bytes'])} may be registered, up to "
                "gear.transfer.register_bytes; the limit of locked memory is "
                f"{'unlimited' if limit is None else show_bytes(limit)}; "
                'mapped files (data.load "mmap") are staged'
            )
        lines.append(f"registration: {host}: {text}")
        for known in facts.get("gathering", []):
            why = f"; not more: {known['why']}" if known["why"] else ""
            lines.append(
                f"registration: {host}: process {known['process']} gathers from table {known['table']} "
                f"by the way {known['way']}, with {show_bytes(known['registered_bytes'])} of "
                f"{show_bytes(known['store_bytes'])} registered{why}"
            )
    return lines


def _groups(items: Mapping[str, Any], key: Any) -> dict[Any, list[str]]:
    """Group hosts by what `key` makes of their items."""
    groups: dict[Any, list[str]] = {}
    for host, item in items.items():
        groups.setdefault(key(item), []).append(host)
    return groups


def _show_groups(groups: Mapping[str, Sequence[str]]) -> str:
    """Name up to three hosts of each group: "2.4 on node0, node1; 2.5 on node2"."""
    return "; ".join(
        f"{value} on {', '.join(hosts[:3])}" + (f" and {len(hosts) - 3} more" if len(hosts) > 3 else "")
        for value, hosts in groups.items()
    )
