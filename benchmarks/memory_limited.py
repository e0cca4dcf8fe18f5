"""Running a command with little memory."""

from __future__ import annotations

import os
import resource
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

_MOUNT = Path("/sys/fs/cgroup")


def run_limited(command: Sequence[str], limit_bytes: int) -> dict[str, Any]:
    """Run a command that may use so much memory, page cache of its files included where a cgroup can be made.

    Returns:
        `mechanism`: "cgroup v2", "cgroup v1", or "RLIMIT_DATA" (anonymous memory only: the kernel is then
        free to keep more file pages). Of a cgroup also `peak_bytes` and `limit_hits`, how often the limit
        made the kernel reclaim.
    Raises:
        CalledProcessError: The command failed, for example because it was killed for memory.
    """
    for version, make in (("cgroup v2", _cgroup_v2), ("cgroup v1", _cgroup_v1)):
        with suppress(OSError), make(limit_bytes) as group:
            subprocess.run(command, check=True, preexec_fn=lambda: _join(group))
            return {"mechanism": version, **_usage(group)}
    limit = (limit_bytes, limit_bytes)
    subprocess.run(command, check=True, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, limit))
    return {"mechanism": "RLIMIT_DATA"}


def _join(group: Path) -> None:
    (group / "cgroup.procs").write_text(str(os.getpid()))


@contextmanager
def _group(folder: Path, settings: dict[str, str]) -> Iterator[Path]:
    folder.mkdir()
    try:
        for name, value in settings.items():
            with suppress(FileNotFoundError):  # swap settings are absent where there is no swap accounting
                (folder / name).write_text(value)
        yield folder
    finally:
        _remove(folder)


def _cgroup_v2(limit_bytes: int) -> Any:
    if "memory" not in (_MOUNT / "cgroup.subtree_control").read_text().split():
        raise OSError("the memory controller is not delegated")
    settings = {"memory.max": str(limit_bytes), "memory.swap.max": "0"}
    return _group(_MOUNT / f"gear-bench-{os.getpid()}", settings)


def _cgroup_v1(limit_bytes: int) -> Any:
    settings = {"memory.limit_in_bytes": str(limit_bytes), "memory.swappiness": "0"}
    return _group(_MOUNT / "memory" / f"gear-bench-{os.getpid()}", settings)


def _usage(group: Path) -> dict[str, int]:
    if (group / "memory.max").exists():
        events = dict(line.split() for line in (group / "memory.events").read_text().splitlines())
        peak = group / "memory.peak"
        found = {"peak_bytes": int(peak.read_text())} if peak.exists() else {}
        return {**found, "limit_hits": int(events["max"])}
    return {
        "peak_bytes": int((group / "memory.max_usage_in_bytes").read_text()),
        "limit_hits": int((group / "memory.failcnt").read_text()),
    }


def _remove(group: Path) -> None:
    for _ in range(50):  # a group is busy until the kernel has reaped its last process
        try:
            group.rmdir()
            return
        except OSError:
            time.sleep(0.1)


def drop_from_cache(folder: Path) -> None:
    """Take files out of the page cache, so that whoever reads them next is charged for them."""
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            try:
                os.fsync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)
