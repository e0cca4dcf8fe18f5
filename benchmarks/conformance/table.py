"""Run the cases against every system, each in its own environment; write results and the tables of
docs/comparison-behaviour.md.

PYTHONPATH=benchmarks python benchmarks/conformance/table.py --page    writes the tables only
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support import pages
from support.report import Disturbance, Row, document, write_json
from peers.environments import PEERS, ROOT, interpreters
from peers.orders import ENDED, Child

from conformance.check import CASES
from conformance.run import CASE_S, LATE

PAGE = "docs/comparison-behaviour.md"
COUNTS = "<!-- the table of counts of results/conformance.json -->\n"
COUNTS_END = "<!-- end of the table -->\n"
BEGIN = "<!-- the tables of results/conformance.json -->\n"
END = "<!-- end of the tables -->\n"
RESULT = ROOT / "benchmarks" / "results" / "conformance.json"
COMMAND = "bash benchmarks/conformance.sh"
MARKS = {
    "right": "right",
    "wrong": "**wrong**",
    "refused": "refused",
    "late": LATE,
    "not offered": "-",
    "absent": "",
}
SUBJECTS = {
    "language": "Language models",
    "priorities": "Priorities",
    "ranks": "Ranks, workers and kills",
    "steps": "Steps, returns, full buffers and loads",
    "windows": "Windows",
}


def run_system(module: str, python: Path | str) -> tuple[str | None, list[Row]]:
    """Return the version of a system and its answers; one that dies or hangs is started again."""
    found: list[Row] = []
    child = version = None
    for name in CASES:
        if child is None or not child.is_alive:
            child = Child("conformance.run", module, python)
            version = child.order("version", 3 * CASE_S).get("version")
        answer = child.order("case", CASE_S + 20, case=name)
        if "left out" in answer:
            with suppress(
                subprocess.TimeoutExpired
            ):  # where it has closed its output it is about to end
                child.process.wait(5)
            ended = child.process.poll()
            is_late = answer["left out"] != ENDED
            how = ("late", LATE) if is_late else ("wrong", f"the process ended with {ended}")
            answer = {"case": name, "kind": how[0], "text": how[1]}
        found.append(answer)
    if child is not None:
        child.end()
    return version, found


def counts(rows: list[Row]) -> str:
    """Return the first table of the docs: a row per system, a column per kind of answer."""
    names = dict.fromkeys(row["system"] for row in rows)
    found = Counter((row["system"], row["kind"]) for row in rows)
    kinds = [kind for kind in MARKS if any(found[name, kind] for name in names)]
    kinds = [kind for kind in kinds if kind != "not offered"]
    body = []
    for name in names:
        numbers = [found[name, kind] for kind in kinds]
        body.append([name, *(str(number) for number in (sum(numbers), *numbers))])
    head = ["system", "cases it supports", *(MARKS[kind].strip("*") for kind in kinds)]
    return "".join(pages.table(head, body))


def linked(report: str) -> str:
    """Return the name of a report with a link to each issue or pull request in it."""
    return re.sub(r"([\w.-]+/[\w.-]+)#(\d+)", r"[\1#\2](https://github.com/\1/issues/\2)", report)


def tables(rows: list[Row]) -> str:
    """Return the tables of the docs, one per subject: a row per case, a column per system."""
    names = list(dict.fromkeys(row["system"] for row in rows))
    kinds = {(row["system"], row["case"]): row["kind"] for row in rows}
    subjects: dict[str, list[list[str]]] = {}
    for name, case in CASES.items():
        marks = [MARKS[kinds.get((system, name), "absent")] for system in names]
        subject = SUBJECTS[case.run.__module__.rpartition(".")[2]]
        subjects.setdefault(subject, []).append([name, case.right, linked(case.report), *marks])
    head = ["case", "expected behaviour", "from", *names]
    return "\n".join(
        f"### {subject}\n\n" + "".join(pages.table(head, body))
        for subject, body in subjects.items()
    )


def write(rows: list[Row]) -> None:
    """Write the tables into the page."""
    pages.replace(PAGE, COUNTS, COUNTS_END, counts(rows))
    pages.replace(PAGE, BEGIN, END, tables(rows))


def report(name: str, version: str | None, cases: list[Row]) -> list[Row]:
    """Print what a system got wrong; return the rows of the result."""
    counts = Counter(one["kind"] for one in cases)
    print(
        f"{name} {version}: " + ", ".join(f"{count} {kind}" for kind, count in counts.items()),
        flush=True,
    )
    for one in cases:
        if one["kind"] in ("wrong", "refused", "late"):
            print(f"  {one['kind']}: {one['case']}: {one['text']}", flush=True)
    return [{"system": name, "version": version, **one} for one in cases]


def main() -> None:
    """Run the systems that the arguments name, or all; the rows of others stay."""
    before = json.loads(RESULT.read_text())["rows"] if RESULT.exists() else []
    if sys.argv[1:] == ["--page"]:
        write(before)
        return
    disturbance = Disturbance()
    peers = {peer.module: peer.name for peer in PEERS if peer.has_cases}
    known = {"gear": "deepspeed_gear", **peers}
    wanted = sys.argv[1:] or list(known)
    for module in wanted:
        if module not in known:
            sys.exit(f"{module}: must be one of {', '.join(known)}")
    pythons, why = interpreters(wanted)
    absent = {known[module]: text for module, text in why.items()}
    rows = [row for row in before if row["system"] not in [known[module] for module in wanted]]
    for module, python in pythons.items():
        rows += report(known[module], *run_system(module, python))
    for name, text in absent.items():
        print(f"{name}: {text}")
    order = list(known.values())
    rows.sort(key=lambda row: order.index(row["system"]))
    write_json(RESULT, document(disturbance, rows, command=COMMAND, not_installed=absent))
    write(rows)


if __name__ == "__main__":
    main()
