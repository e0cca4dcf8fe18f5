"""Memory limits: cgroups of both versions, the machine's memory, missing files, and a
real refusal.
"""

import pytest

from deepspeed_gear.errors import StoreFullError
from deepspeed_gear.store import cgroup_limits
from deepspeed_gear.store.cgroup_limits import MemoryLimit, cgroup_folders, tightest
from deepspeed_gear.store.shared_memory import SharedMemory

MIB = 1 << 20
V2_MOUNT = "31 23 0:28 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
DOCKER_MOUNT = V2_MOUNT.replace(" / ", " /docker/x ")
V1_MOUNTS = (
    "30 25 0:27 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
    "31 25 0:28 / /sys/fs/cgroup/memory rw shared:9 master:1 - cgroup cgroup rw,memory\n"
)
UNLIMITED_V1 = "9223372036854771712\n"


def tightest_of(files: dict[str, str]) -> MemoryLimit:
    limit = tightest(files.get)
    assert limit is not None
    return limit


def meminfo(mib: int) -> str:
    lines = (
        "MemTotal: 99999999 kB",
        "MemFree: 1000 kB",
        f"MemAvailable:   {mib * 1024} kB",
        "HugePages: 0",
    )
    return "\n".join(lines) + "\n"


def test_version_2_along_all_parents() -> None:
    files = {
        "/proc/meminfo": meminfo(8000),
        "/proc/self/cgroup": "0::/job/step\n",
        "/proc/self/mountinfo": V2_MOUNT,
        "/sys/fs/cgroup/job/step/memory.max": "max\n",
        "/sys/fs/cgroup/job/step/memory.current": f"{50 * MIB}\n",
        "/sys/fs/cgroup/job/memory.max": f"{1000 * MIB}\n",
        "/sys/fs/cgroup/job/memory.current": f"{700 * MIB}\n",
        "/sys/fs/cgroup/job/memory.stat": f"anon 5\nactive_file {60 * MIB}\ninactive_file "
        f"{40 * MIB}\n",
    }
    limit = tightest_of(files)
    assert limit.name == "/sys/fs/cgroup/job/memory.max"
    assert limit.available == 400 * MIB
    assert limit.description == "limit 1000 MiB, used 700 MiB, of this 100 MiB page cache"
    files["/proc/meminfo"] = meminfo(399)
    limit = tightest_of(files)
    assert (limit.name, limit.available) == ("/proc/meminfo: MemAvailable", 399 * MIB)


def test_version_1_counts_the_childrens_page_cache() -> None:
    folder = "/sys/fs/cgroup/memory"
    files = {
        "/proc/self/cgroup": "9:name=systemd:/\n4:memory:/a/b\n3:cpu,cpuacct:/\n0::/\n",
        "/proc/self/mountinfo": V1_MOUNTS
        + V2_MOUNT.replace("/sys/fs/cgroup", "/sys/fs/cgroup/unified"),
        f"{folder}/a/b/memory.limit_in_bytes": f"{900 * MIB}\n",
        f"{folder}/a/b/memory.usage_in_bytes": f"{200 * MIB}\n",
        f"{folder}/a/b/memory.stat": f"active_file 1\ntotal_active_file 9\ntotal_inactive_file "
        f"{30 * MIB}\n",
        f"{folder}/a/memory.limit_in_bytes": UNLIMITED_V1,
        f"{folder}/a/memory.usage_in_bytes": f"{300 * MIB}\n",
        f"{folder}/memory.limit_in_bytes": UNLIMITED_V1,
        f"{folder}/memory.usage_in_bytes": f"{300 * MIB}\n",
    }
    limit = tightest_of(files)
    assert (limit.name, limit.available) == (f"{folder}/a/b/memory.limit_in_bytes", 730 * MIB + 9)


@pytest.mark.parametrize(
    ("cgroup", "mounts", "folders"),
    [
        ("0::/a/b\n", V2_MOUNT, ["/sys/fs/cgroup/a/b", "/sys/fs/cgroup/a", "/sys/fs/cgroup"]),
        ("0::/\n", V2_MOUNT, ["/sys/fs/cgroup"]),
        (
            "0::/../../other\n",
            V2_MOUNT,
            ["/sys/fs/cgroup"],
        ),  # above the root of its cgroup namespace
        ("0::/docker/x/in\n", DOCKER_MOUNT, ["/sys/fs/cgroup/in", "/sys/fs/cgroup"]),
        ("0::/elsewhere\n", DOCKER_MOUNT, ["/sys/fs/cgroup"]),
        (
            "0::/a\n",
            V2_MOUNT.replace("/sys/fs", r"/odd\040place"),
            ["/odd place/cgroup/a", "/odd place/cgroup"],
        ),
        ("4:memory:/\n", V2_MOUNT, []),
        ("0::/a\n", "broken line\n\n", []),
        (None, V2_MOUNT, []),
        ("0::/a\n", None, []),
    ],
)
def test_cgroup_folders(cgroup: str | None, mounts: str | None, folders: list[str]) -> None:
    assert [folder for _, folder in cgroup_folders(cgroup, mounts)] == folders


@pytest.mark.parametrize("missing", ["memory.max", "memory.current"])
def test_missing_files_are_no_limit(missing: str) -> None:
    files = {
        "/proc/self/cgroup": "0::/\n",
        "/proc/self/mountinfo": V2_MOUNT,
        "/sys/fs/cgroup/memory.max": "10\n",
        "/sys/fs/cgroup/memory.current": "20\n",
    }
    limit = tightest_of(files)
    assert limit.available == 0, "already above its limit"
    del files[f"/sys/fs/cgroup/{missing}"]
    assert tightest(files.get) is None
    assert tightest(lambda _: None) is None


def test_a_store_above_the_limit_is_refused_before_anything_is_allocated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = cgroup_limits.read_file
    monkeypatch.setattr(
        cgroup_limits,
        "read_file",
        lambda path: meminfo(10) if path == "/proc/meminfo" else real(path),
    )
    SharedMemory.create(4096).close()
    text = "MemAvailable must leave 11 MiB for a store, got '10 MiB .*lower the table's"
    with pytest.raises(StoreFullError, match=text):
        SharedMemory.create(11 * MIB)
