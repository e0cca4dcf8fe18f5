"""The facts of one machine that `gear doctor` collects."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import shutil
import socket
from pathlib import Path
from typing import Any

from deepspeed_gear.errors import GearError
from deepspeed_gear.ops import stale_locks

SHM = "/dev/shm"
_PACKAGES = ("torch", "deepspeed", "numpy", "pydantic")


def examine(data: str | None = None) -> dict[str, Any]:
    """Return the facts of this machine, JSON-able. Loads the native op, and builds it if need be.

    Args:
        data: Folder of a data set to open as well.
    """
    facts = {
        "hostname": socket.gethostname(),
        "boot_id": _text("/proc/sys/kernel/random/boot_id"),
        "address": _own_address(),
        "gloo_interface": os.environ.get("GLOO_SOCKET_IFNAME", ""),
        **_shm(),
        **_limits(),
        "infiniband": _names("/sys/class/infiniband"),
        **_torch(),
        **_native(),
        "not_registered": _why_not_registered(),
        "gathering": _gathering(),
        "stale_locks": [parts_of(stale_locks.as_error(lock)) for lock in stale_locks.find()],
    }
    return {**facts, "data": _data(data)} if data else facts


def _shm() -> dict[str, Any]:
    shm = shutil.disk_usage(SHM)
    return {"shm_bytes": shm.total, "shm_free_bytes": shm.free}


def _limits() -> dict[str, Any]:
    def soft(which: int) -> int | None:
        limit = resource.getrlimit(which)[0]
        return None if limit == resource.RLIM_INFINITY else limit

    return {"memlock_bytes": soft(resource.RLIMIT_MEMLOCK), "open_files": soft(resource.RLIMIT_NOFILE)}


def _torch() -> dict[str, Any]:
    import torch

    from deepspeed_gear import __version__

    versions = {"python": platform.python_version(), "deepspeed_gear": __version__}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "none"
    versions["torch"] = torch.__version__
    versions["CUDA of torch"] = torch.version.cuda or "none"
    count = torch.cuda.device_count()
    return {"versions": versions, "gpus": [torch.cuda.get_device_name(i) for i in range(count)]}


def _native() -> dict[str, Any]:
    from deepspeed_gear.ops.load import load_native
    from deepspeed_gear.ops.native_op import CpuOp

    failure = None
    try:
        load_native()
    except GearError as error:
        failure = parts_of(error)
    return {"native_error": failure, "native_sources": CpuOp().source_digest()[:16]}


def _why_not_registered() -> str:
    """Return why CUDA cannot read shared memory in place here; empty if it can."""
    from deepspeed_gear.store.cuda_registration import why_impossible

    try:
        return why_impossible()
    except (GearError, RuntimeError) as error:
        return str(error)


def _gathering() -> list[dict[str, Any]]:
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


def parts_of(error: GearError) -> dict[str, str]:
    """Return an error's parts, JSON-able."""
    value = "" if error.value is None else str(error.value)
    return {"name": error.name, "rule": error.rule, "value": value, "remedy": error.remedy}


def _own_address() -> str:
    """Return the address that this machine's name resolves to here; gloo uses it if no interface is set."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return ""


def _text(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _names(path: str) -> list[str]:
    try:
        return sorted(os.listdir(path))
    except OSError:
        return []
