"""`gear doctor`: check that a machine, or all hosts of a hostfile, are fit to train together.

Shows and checks devices, driver, shared memory, limits, versions and native op; with --hostfile on
all hosts over ssh, and whether each two of them reach each other. The exit status is 1 if there is
a problem.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import resource
import shutil
import socket
import sys
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from deepspeed_gear import errors
from deepspeed_gear.cli import Options, grouped, ssh_hosts
from deepspeed_gear.errors import (
    ConfigError,
    DataError,
    GearError,
    PeerError,
    StoreError,
    show_bytes,
)
from deepspeed_gear.ops import stale_locks, toolchain
from deepspeed_gear.store.cgroup_limits import ENLARGE_SHM, read_file, tightest
from deepspeed_gear.store.shared_memory import SHM
from deepspeed_gear.timeouts import check_timeout

Facts = Mapping[str, Any]

MIN_SHM_BYTES = 1 << 30
MIN_OPEN_FILES = 1024
_CAP_IPC_LOCK = 1 << 14  # linux/capability.h
_PACKAGES = ("torch", "deepspeed", "numpy", "pydantic")
_MARK = "GEAR-NODE "
_HERE = "here"

_TIMEOUT = "seconds for each host to answer; the first build of the native op counts (default: 300)"
OPTIONS: Options = {
    "--hostfile F": "check the hosts of this file, as DeepSpeed reads it",
    "--data PATH": "also open this data set, which must be equal on all hosts",
    "--json F": "also write everything that was found to this file",
    "--no-network": "leave the network out",
    "--timeout S": (_TIMEOUT, {"type": float, "default": 300.0}),
    "--node": argparse.SUPPRESS,
}


def run(options: argparse.Namespace) -> int:
    """Examine one machine or all hosts, and print what was found; 1 if there is a problem."""
    if not options.timeout > 0:
        raise ConfigError(
            "--timeout", "must be positive", options.timeout, "leave it out for the default"
        )
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
        probe = [*ssh_hosts.GEAR, "doctor", "--node", *(["--data", data] if data else [])]
        print(f"gear: examining {len(hosts)} hosts", file=sys.stderr, flush=True)
        reports, problems = ssh_hosts.on_each(
            hosts, lambda host: read_answer(host, ssh_hosts.run_on(host, probe, options.timeout))
        )
    problems += problems_of(reports, hosts)
    if len(reports) > 1 and not options.no_network:
        print("gear: connecting each two hosts", file=sys.stderr, flush=True)
        problems += ssh_hosts.unreachable(list(reports), options.timeout)
    shown = (
        [(name, text, host) for name, text in summary(facts).items()]
        for host, facts in reports.items()
    )
    for lines in zip(*shown, strict=True):  # hosts with equal texts share a line
        for same in grouped(lines, lambda line: line[1]):
            print(f"{same[0][0]}: {', '.join(host for _, _, host in same)}: {same[0][1]}")
    for problem in problems:
        print(f"problem: {problem}")
    print(f"{len(problems)} problem{'' if len(problems) == 1 else 's'}")
    if options.json:
        report = {"hosts": reports, "problems": [*map(errors.error_to_json, problems)]}
        with DataError.on(
            options.json, "must be a writable file", OSError, remedy="choose another --json"
        ):
            Path(options.json).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return int(bool(problems))


def read_answer(host: str, stdout: str) -> dict[str, Any]:
    """Return a host's report.

    Its line is searched in the host's standard output, as shells and libraries print there as well.
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


def examine(data: str | None = None) -> dict[str, Any]:
    """Return facts about this machine, and a data set in a folder, as JSON values.

    Loads the native op, and builds it if need be.
    """
    import torch

    from deepspeed_gear import __version__
    from deepspeed_gear.data.dataset import Dataset
    from deepspeed_gear.ops.backends import load_native
    from deepspeed_gear.ops.native_op import CpuOp
    from deepspeed_gear.store.cuda_registration import why_impossible

    versions = {"python": platform.python_version(), "deepspeed_gear": __version__}
    versions |= {package: toolchain.installed_version(package) or "none" for package in _PACKAGES}
    versions |= {"torch": torch.__version__, "CUDA of torch": torch.version.cuda or "none"}
    shm = shutil.disk_usage(SHM)
    locked, open_files = (
        None if (limit := resource.getrlimit(which)[0]) == resource.RLIM_INFINITY else limit
        for which in (resource.RLIMIT_MEMLOCK, resource.RLIMIT_NOFILE)
    )
    try:  # gloo connects to the address of this machine's name if no interface is set
        address = socket.gethostbyname(socket.gethostname())
    except OSError:
        address = ""
    failures: list[GearError] = [*stale_locks.remove()]
    try:
        load_native()
    except GearError as error:
        failures.append(error)
    try:
        not_registered = why_impossible()
    except (GearError, RuntimeError) as error:
        not_registered = str(error)
    no_device = ""
    try:
        torch.cuda.current_device()
    except (AssertionError, RuntimeError) as error:
        no_device = str(error).splitlines()[0]
    if may_lock_any_amount(
        read_file("/proc/self/status") or "", read_file("/proc/self/uid_map") or ""
    ):
        locked = None
    memory = tightest(read_file)
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    infiniband = Path("/sys/class/infiniband")
    facts: dict[str, Any] = {
        "hostname": socket.gethostname(),
        "boot_id": boot_id.read_text().strip() if boot_id.exists() else "",
        "address": address,
        "gloo_interface": os.environ.get("GLOO_SOCKET_IFNAME", ""),
        "shm_bytes": shm.total,
        "shm_free_bytes": shm.free,
        # Within the limits of a container or job.
        "memory_bytes": memory.available if memory else None,
        "cpus": len(os.sched_getaffinity(0)),
        "memlock_bytes": locked,
        "open_files": open_files,
        "infiniband": sorted(os.listdir(infiniband)) if infiniband.exists() else [],
        "versions": versions,
        "driver": driver_version(read_file("/proc/driver/nvidia/version") or ""),  # of the host
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "no_device": no_device,  # why CUDA cannot be used; "": it can
        "native_sources": CpuOp().source_digest()[:16],
        "not_registered": not_registered,  # why CUDA cannot read shared memory in place; "": it can
    }
    if data:
        try:
            dataset = Dataset.open(data)
            facts["data"] = {
                "fingerprint": dataset.whole_fingerprint,  # nodes may have parts of one data set
                "num_trajectories": len(dataset),
                "num_steps": dataset.num_steps,
            }
        except GearError as error:
            failures.append(error)
    return facts | {"errors": [*map(errors.error_to_json, failures)]}


def driver_version(text: str) -> str:
    """Return the version in "... Kernel Module for x86_64  580.65.06  Release"; "" without one."""
    match = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)\s", text)
    return match[1] if match else ""


def may_lock_any_amount(status: str, uid_map: str) -> bool:
    """Return whether a process may lock memory beyond its limit.

    It may with CAP_IPC_LOCK, as with `capabilities: {add: [IPC_LOCK]}` in a pod that runs as root.
    Inside a user namespace the capability has no effect.

    Args:
        status: Content of /proc/self/status, with the capabilities.
        uid_map: Content of /proc/self/uid_map, which maps all ids only outside of user namespaces.
    """
    effective = re.search(r"^CapEff:\s*([0-9a-f]+)$", status, re.MULTILINE)
    is_outermost = uid_map.split() == ["0", "0", "4294967295"]
    return is_outermost and effective is not None and bool(int(effective[1], 16) & _CAP_IPC_LOCK)


def summary(facts: Facts) -> dict[str, str]:
    """Describe a machine's devices, driver, memory and limits: line of `gear doctor` by name."""
    gpus = [f"{len(same)} x {same[0]}" for same in grouped(facts["gpus"], str)]
    devices = ", ".join(gpus) or f"none ({facts['no_device']})"
    shm_free = show_bytes(facts["shm_free_bytes"])
    shm = show_bytes(facts["shm_bytes"])
    open_files = facts["open_files"] or "unlimited"
    memory, locked = (
        none if facts[name] is None else show_bytes(facts[name])
        for name, none in (("memory_bytes", "unknown"), ("memlock_bytes", "unlimited"))
    )
    registration = f"none can be registered, batches are staged: {facts['not_registered']}"
    if not facts["not_registered"]:
        registration = f"all of {shm} may be registered, up to gear.transfer.register_bytes"
    return {
        "devices": f"{devices}; driver {facts['driver'] or 'none'}; torch "
        f"{facts['versions']['torch']}",
        "shared memory": f"{shm_free} of {shm} free in {SHM}; available memory {memory}",
        "limits": f"open files {open_files}; locked memory {locked}; CPUs {facts['cpus']}",
        "registration": registration,
    }


def problems_of(reports: Mapping[str, Facts], slots: Mapping[str, int]) -> list[GearError]:
    """Return the problems of the examined machines, of each alone and between them.

    Args:
        slots: Ranks by host, from a hostfile; 0: not known.
    """
    alone = (_alone(host, of, slots.get(host, 0), len(reports) > 1) for host, of in reports.items())
    return [*chain.from_iterable(alone), *_compared(reports)]


def _alone(host: str, facts: Facts, slots: int, has_peers: bool) -> Iterator[GearError]:
    for parts in facts.get("errors", []):  # of stale locks, the op and the data set
        yield errors.error_from_json({**parts, "name": f"host {host}: {parts['name']}"})
    if facts["shm_free_bytes"] < MIN_SHM_BYTES:
        free = f"{show_bytes(facts['shm_free_bytes'])} of {show_bytes(facts['shm_bytes'])}"
        yield StoreError(
            f"host {host}: {SHM}",
            f"must have {show_bytes(MIN_SHM_BYTES)} free",
            free,
            f"run gear clean; else {ENLARGE_SHM}",
        )
    if facts["driver"] and facts["no_device"] and facts["versions"]["CUDA of torch"] != "none":
        name = f"host {host}: torch {facts['versions']['torch']}"
        yield GearError(
            name,
            f"must see a device where there is a driver ({facts['driver']})",
            facts["no_device"],
            "try nvidia-smi; start a container with its GPUs (docker run --gpus all), correct "
            "CUDA_VISIBLE_DEVICES, or install a driver that has torch's release of CUDA",
        )
    if facts["open_files"] is not None and facts["open_files"] < MIN_OPEN_FILES:
        name = f"host {host}: the limit of open files"
        yield GearError(
            name,
            f"must be at least {MIN_OPEN_FILES}",
            facts["open_files"],
            "raise it: ulimit -n, or nofile in /etc/security/limits.conf",
        )
    if facts["infiniband"] and facts["memlock_bytes"] is not None:
        locked = show_bytes(facts["memlock_bytes"])
        yield GearError(
            f"host {host}: the limit of locked memory",
            f"must be unlimited where there is InfiniBand ({', '.join(facts['infiniband'])})",
            locked,
            "raise it: memlock in /etc/security/limits.conf, docker run --ulimit memlock=-1, or "
            "the capability IPC_LOCK of a pod that runs as root",
        )
    if has_peers and facts["address"].startswith("127.") and not facts["gloo_interface"]:
        yield PeerError(
            f"host {host}: its own name, {facts['hostname']},",
            "must not resolve to a loopback address there, which gloo would send to other hosts",
            facts["address"],
            "correct its /etc/hosts, or set GLOO_SOCKET_IFNAME to its network interface",
        )
    if facts["gpus"] and slots > len(facts["gpus"]):
        yield ConfigError(
            f"slots of {host}",
            f"must be at most its {len(facts['gpus'])} GPUs",
            slots,
            "correct the hostfile",
        )


def _compared(reports: Mapping[str, Facts]) -> Iterator[GearError]:
    for hosts in grouped(
        reports, lambda host: (reports[host]["hostname"], reports[host]["boot_id"])
    ):
        if len(hosts) > 1:
            name = f"hosts {', '.join(hosts)}"
            known = reports[hosts[0]]["hostname"]
            yield ConfigError(
                name,
                "must be different machines",
                known,
                "name each machine once, with all its slots",
            )
    versions = {host: facts["versions"] for host, facts in reports.items()}
    remedy = "install the same environment everywhere"
    for package in dict.fromkeys(package for each in versions.values() for package in each):
        known = {host: each.get(package, "none") for host, each in versions.items()}
        yield from _differences(GearError, package, known, remedy)
    sources = {host: facts["native_sources"] for host, facts in reports.items()}
    remedy = "install the same commit of deepspeed_gear everywhere"
    yield from _differences(GearError, "the sources of the native op", sources, remedy)
    opened = {host: facts.get("data", {}) for host, facts in reports.items()}
    fingerprints = {
        host: data["fingerprint"][:16] for host, data in opened.items() if "fingerprint" in data
    }
    remedy = "copy the data set from one host to the others"
    yield from _differences(DataError, "the data set's fingerprint", fingerprints, remedy)


def _differences(
    kind: type[GearError], name: str, values: Mapping[str, str], remedy: str
) -> Iterator[GearError]:
    """Yield an error if hosts differ, such as "2.4 on node0, node1; 2.5 on node2"."""
    groups = grouped(values, values.__getitem__)
    if len(groups) > 1:
        more = [f" and {len(hosts) - 3} more" if len(hosts) > 3 else "" for hosts in groups]
        pairs = zip(groups, more, strict=True)
        shown = [f"{values[hosts[0]]} on {', '.join(hosts[:3])}{rest}" for hosts, rest in pairs]
        yield kind(name, "must be the same on all hosts", "; ".join(shown), remedy)
