"""Run the cases against every system, each in its own environment; write results and the docs' table."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.report import Disturbance, document, write_json
from peers.environments import PEERS, ROOT, python_of
from speed import summary

from conformance.check import CASES
from conformance.run import CASE_S, LATE

BEGIN, END = "<!-- the table of results/conformance.json -->\n", "<!-- end of the table -->\n"
COMMAND = "bash benchmarks/conformance.sh"
MARKS = {
    "right": "right",
    "wrong": "**wrong**",
    "refused": "refused",
    "late": LATE,
    "not offered": "-",
    "absent": "",
}


def run_system(module: str, python: Path | str) -> dict[str, dict[str, Any]]:
    """Return the answers of a system; a process that dies or hangs is started again after the case."""
    path = [str(ROOT / "benchmarks"), *([str(ROOT)] if module == "gear" else [])]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path),
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
    }
    found: dict[str, dict[str, Any]] = {}
    while len(found) < len(CASES):
        left = [name for name in CASES if name not in found]
        command = [str(python), "-m", "conformance.run", module, *left]
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        running = _read(process, found) or left[0]
        if running in found:
            continue
        with suppress(subprocess.TimeoutExpired):  # where it has closed its output it is about to end
            process.wait(5)
        ended = process.poll()
        process.kill()
        how = ("late", LATE) if ended is None else ("wrong", f"the process ended with {ended}")
        found[running] = {"case": running, "kind": how[0], "text": how[1]}
    return found


def _read(process: subprocess.Popen[str], found: dict[str, dict[str, Any]]) -> str:
    """Collect answers until the process ends or a case takes too long; return the latest case."""
    assert process.stdout is not None
    running, until = "", time.monotonic() + 3 * CASE_S
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while time.monotonic() < until:
            if not selector.select(1.0):
                continue
            line = process.stdout.readline()
            if not line:
                break
            if not line.startswith("{"):
                continue
            answer = json.loads(line)
            running, until = answer["case"], time.monotonic() + CASE_S + 20
            if "kind" in answer:
                found[running] = answer
    return running


def table(rows: list[dict[str, Any]]) -> str:
    """Return the table of the docs: a row per case, a column per system."""
    names = list(dict.fromkeys(row["system"] for row in rows))
    kinds = {(row["system"], row["case"]): row["kind"] for row in rows}
    lines = ["| case | right is | after | " + " | ".join(names) + " |", "|---|---|---|" + "---|" * len(names)]
    for name, case in CASES.items():
        marks = [MARKS[kinds.get((system, name), "absent")] for system in names]
        lines.append(f"| {name} | {case.right} | {case.report} | " + " | ".join(marks) + " |")
    return "\n".join(lines) + "\n"


def report(name: str, version: str | None, cases: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Print what a system got wrong; return the rows of the result."""
    counts = Counter(one["kind"] for one in cases.values())
    print(f"{name} {version}: " + ", ".join(f"{count} {kind}" for kind, count in counts.items()), flush=True)
    for one in cases.values():
        if one["kind"] in ("wrong", "refused", "late"):
            print(f"  {one['kind']}: {one['case']}: {one['text']}", flush=True)
    return [
        {"system": name, "version": version, "case": one["case"], "kind": one["kind"], "text": one["text"]}
        for one in cases.values()
    ]


def main() -> None:
    """Run the systems that the arguments name, or all; the rows of others stay."""
    disturbance, out = Disturbance(), ROOT / "benchmarks" / "results" / "conformance.json"
    before = json.loads(out.read_text())["rows"] if out.exists() else []
    peers = {peer.module: peer for peer in PEERS if peer.has_cases}
    known = {"gear": "deepspeed_gear", **{module: peer.name for module, peer in peers.items()}}
    absent, wanted = {}, sys.argv[1:] or list(known)
    for module in wanted:
        if module not in known:
            sys.exit(f"{module}: must be one of {', '.join(known)}")
        python = python_of(peers[module]) if module in peers else Path(sys.executable)
        name = known[module]
        before = [row for row in before if row["system"] != name]
        if isinstance(python, str):
            absent[name] = python
            print(f"{name}: {python}")
            continue
        cases = run_system(module, python)
        version = next((one["version"] for one in cases.values() if "version" in one), None)
        before += report(name, version, cases)
    order = list(known.values())
    rows = sorted(before, key=lambda row: order.index(row["system"]))
    write_json(out, document(disturbance, rows, command=COMMAND, not_installed=absent))
    summary.write()
    page = ROOT / "docs" / "comparison.md"
    head, rest = page.read_text().split(BEGIN)
    page.write_text(head + BEGIN + table(rows) + END + rest.split(END)[1])


if __name__ == "__main__":
    main()
