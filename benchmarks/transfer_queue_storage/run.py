"""TransferQueue 0.1.11 over this project's storage, in an environment of its own.

Its end-to-end tests run unchanged over this backend; then processes are killed; then this backend
and its own, in memory, take turns in one process.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support import ROOT
from support.report import Report, print_table
from peers.environments import Peer, python_of

HERE = Path(__file__).resolve().parent
PACKAGES = ("TransferQueue==0.1.11", "pytest>=8")
PEER = Peer("transfer_queue", "TransferQueue", PACKAGES, needs_torch=True, has_cases=False)
TESTS = ("test_kv_interface_e2e", "test_e2e_lifecycle_consistency", "test_checkpoint_e2e")
# Not of every backend: they name files that SimpleStorage alone writes into a checkpoint, or that
# it saves its storage against the wish of the caller.
OF_SIMPLE_STORAGE = (
    "test_load_raises_on_storage_unit_count_mismatch",
    "TestCheckpointRoundtrip and test_tensor_fields",
    "test_storage_saved_is_true",
)


def main() -> None:
    report = Report(__doc__)
    python = python_of(PEER)
    if isinstance(python, str):
        raise SystemExit(f"TransferQueue's environment: {python}")
    rows = [tests(python), *measured(python, "kills", report.options.quick)]
    print_table(
        ["killed", "samples", "lost"],
        [
            [f"{row['backend']}: {row['killed']}", row["samples"], row["lost"]]
            for row in rows
            if row["what"] == "kills"
        ],
    )
    print(flush=True)
    speeds = measured(python, "speed", report.options.quick)
    print_table(
        ["case", "call", "TransferQueue ms", "here ms", "here MB/s", "times"],
        [
            [
                row["case"],
                row["call"],
                row["theirs_ms"],
                row["ours_ms"],
                row["ours_mb_s"],
                row["ratio"],
            ]
            for row in speeds
        ],
    )
    command = " ".join(["bash benchmarks/transfer_queue.sh", *sys.argv[1:]])
    report.write([*rows, *speeds], command=command, packages=[*PACKAGES])
    report.meanwhile()


def surroundings(**more: str) -> dict[str, str]:
    paths = [str(ROOT), str(HERE)]
    own = {"PYTHONPATH": os.pathsep.join(paths), "RAY_AUTH_MODE": "disabled"}
    return os.environ | own | {"RAY_USAGE_STATS_ENABLED": "0"} | more


def tests(python: Path) -> dict[str, Any]:
    """Run TransferQueue's end-to-end tests, as they are installed, over this project's backend."""
    find = "import transfer_queue; print(transfer_queue.__path__[0])"
    found = subprocess.run([python, "-c", find], capture_output=True, text=True, check=True)
    folder = Path(found.stdout.split()[-1]).parent / "tests" / "e2e"
    files = [str(folder / f"{test}.py") for test in TESTS]
    plugins = ["-p", "no:cacheprovider", "-p", "gear_backend_plugin"]
    chosen = " and ".join(f"not ({one})" for one in OF_SIMPLE_STORAGE)
    command = [str(python), "-m", "pytest", "-q", *plugins, "-k", chosen, *files]
    ran = subprocess.run(
        command, env=surroundings(TQ_TEST_BACKEND="Gear"), capture_output=True, text=True
    )
    last = ran.stdout.strip().splitlines()[-1]
    counts = {kind: int(count) for count, kind in re.findall(r"(\d+) (\w+)", last)}
    failed = re.findall(r"^FAILED \S+?::(\S+)", ran.stdout, re.M)
    print("TransferQueue's own tests over this backend:", last, *failed, sep="\n  ", flush=True)
    kinds = ("passed", "failed", "skipped", "deselected")
    return {"what": "tests", "failures": failed} | {kind: counts.get(kind, 0) for kind in kinds}


def measured(python: Path, what: str, quick: bool) -> list[dict[str, Any]]:
    """Return the rows that a program of the environment prints."""
    command: Sequence[str] = [
        str(python),
        str(HERE / f"{what}.py"),
        *(["--quick"] if quick else []),
    ]
    ran = subprocess.run(command, env=surroundings(), stdout=subprocess.PIPE, text=True, check=True)
    lines = [line for line in ran.stdout.splitlines() if line.startswith("{")]
    return [{"what": what, **json.loads(line)} for line in lines]


if __name__ == "__main__":
    main()
