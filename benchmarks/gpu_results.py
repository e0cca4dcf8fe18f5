"""Take the results of launch/test_gpu.sh into the checkout, and write what the pages say of them.

    python benchmarks/gpu_results.py FOLDER            # into benchmarks/results, and the pages
    python benchmarks/gpu_results.py FOLDER --to DIR   # into another folder; no page changes
    python benchmarks/gpu_results.py                   # the pages only, after kernels have changed

FOLDER is that of `--out`. A file that a run did not make stays as it was. Each file names its
commit, its card and the digest of the kernel sources that ran.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import gpu_pages
from support.report import Row, write_json
from gpu_pages import RESULTS

#: By name of the result: the files of the stages whose rows it has.
FILES = {
    "gpu": (
        "figures-of-device-tables.json",
        "rows-that-kernels-read-in-host-memory.json",
    ),
    "gpu_peers": ("gpu_peers.json",),
    "gpu_lean": ("gpu_lean.json",),
}
STAGES = "gpu_stages"


class ResultsError(Exception):
    """Results that cannot be taken."""


def collected(folder: Path) -> dict[str, Row]:
    """Return the results of a folder by their names.

    Raises:
        ResultsError: There is none, they are of a dry run, or of several commits.
    """
    found = {}
    for name, files in FILES.items():
        parts = [json.loads(path.read_text()) for file in files if (path := folder / file).exists()]
        if parts:
            found[name] = merged(name, parts)
    if not found:
        raise ResultsError(f"{folder} has no results: run launch/test_gpu.sh with --out {folder}")
    records = [json.loads(path.read_text()) for path in sorted(folder.glob("stage-*.json"))]
    if records:
        found[STAGES] = stages(records, next(iter(found.values())))
    return found


def merged(name: str, parts: list[Row]) -> Row:
    """Return one result of several files, with the rows of all of them."""
    for part in parts:
        if part.get("smoke") or part["device"]["name"] == "cpu":
            raise ResultsError(f"{name} is of a run without a GPU: its numbers mean nothing")
    for key in ("commit", "kernel_sources"):
        if len({part[key] for part in parts}) > 1:
            raise ResultsError(f"{name} must be of one {key}: run its stages again")
    rows = [row for part in parts for row in part["rows"]]
    command = "; ".join(part["command"] for part in parts)
    return {**parts[0], "command": command, "rows": rows}


def stages(records: list[Row], ran: Row) -> Row:
    """Return what ran and how it ended.

    Args:
        records: `stage-*.json`.
        ran: A result of the same run.
    """
    steps = [
        {
            "stage": record["stage"],
            "step": step["name"],
            "exit_code": step["rc"],
            "seconds": step.get("seconds"),
            "last_line": step.get("skipped") or last_line(step["tail"]),
        }
        for record in records
        for step in record["steps"]
    ]
    names = " ".join(record["stage"] for record in records)
    run = {
        "command": f"bash launch/test_gpu.sh {names}",
        "commit": ran["commit"],
        "kernel_sources": ran["kernel_sources"],
        "steps": steps,
    }
    facts = {key: ran[key] for key in ("date", "machine", "device", "versions")}
    return {**facts, "runs": [run]}


def last_line(text: str) -> str:
    """Return the last line of a step's output."""
    lines = text.strip().splitlines()
    return lines[-1] if lines else ""


def write(results: dict[str, Row], to: Path) -> None:
    """Write results; earlier runs of the stages stay in their record."""
    to.mkdir(parents=True, exist_ok=True)
    for name, content in results.items():
        path = to / f"{name}.json"
        if name != STAGES:
            write_json(path, content)
            continue
        if path.exists():
            own = content["runs"][0]["commit"]
            before = json.loads(path.read_text())["runs"]
            content["runs"][:0] = [run for run in before if run["commit"] != own]
        path.write_text(json.dumps(content, indent=1) + "\n")


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, nargs="?", help="of --out of launch/test_gpu.sh")
    parser.add_argument("--to", type=Path, default=RESULTS, help="benchmarks/results")
    options = parser.parse_args()
    if options.folder is not None:
        try:
            write(collected(options.folder), options.to)
        except ResultsError as error:
            print(f"gpu_results.py: error: {error}", file=sys.stderr)
            sys.exit(2)
    if options.to == RESULTS:
        gpu_pages.write()


if __name__ == "__main__":
    main()
