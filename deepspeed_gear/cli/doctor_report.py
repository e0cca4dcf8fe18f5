"""The tables and problems that `gear doctor` derives from the facts of each machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from deepspeed_gear.errors import ConfigError, DataError, GearError, PeerError, StoreError, show_bytes

Facts = Mapping[str, Any]

MIN_SHM_BYTES = 1 << 30
MIN_OPEN_FILES = 1024


def problems_of(reports: Mapping[str, Facts], slots: Mapping[str, int] | None = None) -> list[GearError]:
    """Return the problems of machines, each alone and compared with the others.

    Args:
        reports: Of `doctor_probe.examine`, by host.
        slots: Ranks on each host, where a hostfile names them.
    """
    found: list[GearError] = []
    for host, facts in reports.items():
        found += _alone(host, facts, len(reports) > 1)
        found += _slots(host, facts, (slots or {}).get(host, 0))
    found += _same_machine(reports)
    found += _differing_versions(reports)
    found += _differing_sources(reports)
    found += _data(reports)
    return found


def _alone(host: str, facts: Facts, has_peers: bool) -> Iterator[GearError]:
    native = [facts["native_error"]] if facts["native_error"] else []
    for error in [*native, *facts.get("stale_locks", [])]:
        yield GearError(
            f"host {host}: {error['name']}", error["rule"], error["value"] or None, error["remedy"]
        )
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


def _slots(host: str, facts: Facts, slots: int) -> Iterator[GearError]:
    if facts["gpus"] and slots > len(facts["gpus"]):
        yield ConfigError(
            f"slots of {host}",
            f"must be at most its {len(facts['gpus'])} GPUs",
            slots,
            "correct the hostfile",
        )


def _same_machine(reports: Mapping[str, Facts]) -> Iterator[GearError]:
    for hosts in _groups(reports, lambda facts: (facts["hostname"], facts["boot_id"])).values():
        if len(hosts) > 1:
            yield ConfigError(
                f"hosts {', '.join(hosts)}",
                "must be different machines",
                reports[hosts[0]]["hostname"],
                "name each machine once, with all its slots",
            )


def _differing_versions(reports: Mapping[str, Facts]) -> Iterator[GearError]:
    for package in packages_of(reports):
        groups = _groups(reports, lambda facts, package=package: facts["versions"].get(package, "none"))
        if len(groups) > 1:
            yield GearError(
                package,
                "must have the same version on all hosts",
                _show_groups(groups),
                "install the same environment everywhere",
            )


def _differing_sources(reports: Mapping[str, Facts]) -> Iterator[GearError]:
    groups = _groups(reports, lambda facts: facts["native_sources"])
    if len(groups) > 1:
        yield GearError(
            "the sources of the native op",
            "must be the same on all hosts",
            _show_groups(groups),
            "install the same commit of deepspeed_gear everywhere",
        )


def _data(reports: Mapping[str, Facts]) -> Iterator[GearError]:
    opened = {host: facts["data"] for host, facts in reports.items() if "data" in facts}
    for host, data in opened.items():
        if "error" in data:
            error = data["error"]
            yield DataError(
                f"host {host}: {error['name']}", error["rule"], error["value"] or None, error["remedy"]
            )
    whole = {host: data for host, data in opened.items() if "error" not in data}
    groups = _groups(whole, lambda data: data["fingerprint"][:16])
    if len(groups) > 1:
        yield DataError(
            "the data set's fingerprint",
            "must be the same on all hosts",
            _show_groups(groups),
            "copy the data set from one host to the others",
        )


def packages_of(reports: Mapping[str, Facts]) -> list[str]:
    """List every package whose version some machine reports."""
    return list(dict.fromkeys(package for facts in reports.values() for package in facts["versions"]))


def registration_lines(reports: Mapping[str, Facts]) -> list[str]:
    """Return, for each machine, how much of its shared memory CUDA can read in place, and why not more.

    For processes that run there: how much each has registered.
    """
    return [
        f"registration: {host}: {text}"
        for host, facts in reports.items()
        if "not_registered" in facts
        for text in (_registration(facts), *map(_gathering, facts.get("gathering", [])))
    ]


def _gathering(known: Mapping[str, Any]) -> str:
    """Return a line about the transfer of a process's batches to its device."""
    why = f"; not more: {known['why']}" if known["why"] else ""
    return (
        f"process {known['process']} gathers from table {known['table']} by the way {known['way']}, with "
        f"{show_bytes(known['registered_bytes'])} of {show_bytes(known['store_bytes'])} registered{why}"
    )


def _registration(facts: Facts) -> str:
    if facts["not_registered"]:
        return f"none can be registered, batches are staged: {facts['not_registered']}"
    limit = facts["memlock_bytes"]
    locked = "unlimited" if limit is None else show_bytes(limit)
    return (
        f"all of {show_bytes(facts['shm_bytes'])} may be registered, up to gear.transfer.register_bytes; "
        f'the limit of locked memory is {locked}; mapped files (data.load "mmap") are staged'
    )


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
