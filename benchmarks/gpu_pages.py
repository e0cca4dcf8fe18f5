"""What the pages say of runs on a GPU: tables, and whether kernels have changed since a run.

A claim stands beside a mark that names the commits of its runs:

    <!-- since fbb3db99 f9bd11ca -->The kernel sources have changed since.<!-- end since -->

The sentence is there if the kernel sources of the checkout are none of those that ran.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from support import ROOT, pages
from device_peers.environments import NAMES

from deepspeed_gear.ops.native_op import CudaOp

RESULTS = ROOT / "benchmarks" / "results"
MARK = re.compile(r"(<!-- since ((?:[0-9a-f]{8} ?)+) -->)(.*?)(<!-- end since -->)", re.DOTALL)
CHANGED = "The kernel sources have changed since."
PAGE = "docs/how-to/gpu-figures.md"
BEGIN = "<!-- the table of results/gpu_peers.json -->\n"
END = "<!-- end of the table -->\n"
NONE = "Not measured yet: no GPU has run `bash launch/test_gpu.sh D`.\n"
AGENTS = "<!-- the table of results/gpu_lean.json -->\n"
_TITLES = {"gear": "deepspeed_gear"}
Row = dict[str, Any]


# ---- whether kernels have changed ----------------------------------------------------------------


def runs(results: Path = RESULTS) -> dict[str, set[str]]:
    """Return the digests of the kernel sources that ran, by the first 8 digits of their commit."""
    found: dict[str, set[str]] = {}
    for path in sorted(results.glob("gpu*.json")):
        content = json.loads(path.read_text())
        for run in content.get("runs", [content]):
            found.setdefault(run["commit"][:8], set()).add(run["kernel_sources"])
    return found


def sentence(commits: Sequence[str], ran: dict[str, set[str]], digest: str) -> str:
    """Return the sentence of a claim; "" where one of its runs had the sources of the checkout.

    Args:
        commits: Of the claim's runs, 8 digits each.
        ran: From `runs`.
        digest: Of the checkout.
    Raises:
        KeyError: No result is of one of the commits.
    """
    return "" if any(digest in ran[commit] for commit in commits) else CHANGED


def marked(text: str, ran: dict[str, set[str]], digest: str) -> str:
    """Return a page whose marks have the right sentences."""

    def replaced(match: re.Match[str]) -> str:
        begin, commits, _, end = match.groups()
        return begin + sentence(commits.split(), ran, digest) + end

    return MARK.sub(replaced, text)


# ---- tables beside other systems -----------------------------------------------------------------


def peers_table(results: Path = RESULTS) -> str:
    """Return the table of gpu_peers.json, or that there is none yet."""
    path = results / "gpu_peers.json"
    return "".join(_peers(json.loads(path.read_text()))) if path.exists() else NONE


def _peers(content: Row) -> Iterator[str]:
    """Yield a row for each work: each system's fastest form that is right."""
    rows = content["rows"]
    systems = [name for name in NAMES if name in content["systems"]]
    yield "Microseconds of a call, in the fastest form that gives right results.\n\n"
    works = dict.fromkeys((r["case"], r["work"]) for r in rows if "form" in r)
    body = []
    for case, work in works:
        same = [r for r in rows if (r.get("case"), r["work"]) == (case, work)]
        cells = [_cell([r for r in same if r["system"] == name]) for name in systems]
        body.append([f"{case}: {work}", *cells])
    for row_case in dict.fromkeys(r["case"] for r in rows if r["work"] == "exactness"):
        same = {
            r["system"]: r for r in rows if (r.get("case"), r["work"]) == (row_case, "exactness")
        }
        body.append([f"{row_case}: draws fit the masses", *(_fits(same.get(n)) for n in systems)])
    yield from pages.table(["us", *(NAMES[name] for name in systems)], body)
    yield (
        '\nWithout a word: captured in a CUDA graph. "waits": the host waits for the device in '
        "each call, so that it cannot be captured. In brackets: deviation of the draws of each "
        "item from its exact share, in standard deviations.\n"
    )
    wrong = dict.fromkeys(
        f"- {NAMES[r['system']]}, {r['work']}, {r['form']}: {r.get('wrong') or r['left_out']}\n"
        for r in rows
        if "form" in r and (r.get("wrong") or r.get("left_out"))
    )
    absent = [f"- {NAMES[r['system']]}: {r['left_out']}\n" for r in rows if "case" not in r]
    if wrong or absent:
        yield "\nForms and systems without a time:\n\n"
        yield from [*wrong, *absent]
    yield _measured(content, dict.fromkeys(v for v in content["systems"].values() if v))


def agents_table(results: Path = RESULTS) -> str:
    """Return the table of gpu_lean.json, or that there is none yet."""
    path = results / "gpu_lean.json"
    return "".join(_agents(json.loads(path.read_text()))) if path.exists() else NONE


def _agents(content: Row) -> Iterator[str]:
    """Yield a row for each algorithm and its flags, and a column for each system."""
    rows = content["rows"]
    systems = list(dict.fromkeys(row["system"] for row in rows))
    yield "Steps of environments per second: median of the seeds, least and most.\n\n"
    body = []
    for algorithm in dict.fromkeys(row["algorithm"] for row in rows):
        own = {(row["system"], row["flags"]): row for row in rows if row["algorithm"] == algorithm}
        for flags in dict.fromkeys(row["flags"] for row in own.values()):
            cells = [_speed(own.get((system, flags))) for system in systems]
            body.append([f"{algorithm} `{flags}`" if flags else algorithm, *cells])
    yield from pages.table(["", *(_TITLES.get(system, system) for system in systems)], body)
    yield _measured(content, [f"{name} {version}" for name, version in content["peers"].items()])


def _speed(row: Row | None) -> str:
    if row is None:
        return "-"
    speeds = sorted(row["steps_per_s_by_seed"].values())
    return f"{row['steps_per_s']:,.0f} ({speeds[0]:,.0f} to {speeds[-1]:,.0f})"


def _measured(content: Row, versions: Iterable[str]) -> str:
    """Return the line below a table: card, commit, versions."""
    device = content["device"]
    commit = content["commit"][:8]
    listed = ", ".join(versions)
    return (
        f"\nOne {device['name']} (driver {device['driver']}), commit {commit}, "
        f"`bash launch/test_gpu.sh D`{'; ' if listed else ''}{listed}. "
        f"<!-- since {commit} --><!-- end since -->\n"
    )


def _cell(rows: Sequence[Row]) -> str:
    """Return the time of a system's fastest right form."""
    timed = [row for row in rows if "us" in row]
    if not timed:
        return "-"
    best = min(timed, key=lambda row: float(row["us"]))
    words = [] if best["form"] == "captured" else [best["form"]]
    words += ["waits"] if best.get("host_waits") else []
    us = best["us"]
    number = f"{us:,.0f}" if us >= 100 else f"{us:.1f}"
    return f"{number} {', '.join(words)}".strip()


def _fits(row: Row | None) -> str:
    if row is None or "exact" not in row:
        return "-"
    if "each_once" in row:
        same = (
            "" if row.get("shuffles_each_epoch", True) else "; the same minibatches in each epoch"
        )
        return f"each item once{same}" if row["exact"] else "**no**"
    return f"{'yes' if row['exact'] else '**no**'} ({row['deviation']:+.1f})"


def write() -> None:
    """Write the table, and the sentences of all pages."""
    pages.replace(PAGE, BEGIN, END, peers_table())
    pages.replace(PAGE, AGENTS, END, agents_table())
    ran = runs()
    digest = CudaOp().source_digest()
    listed = subprocess.check_output(["git", "ls-files", "*.md"], cwd=ROOT, text=True)
    for name in listed.split():
        path = ROOT / name
        text = path.read_text(encoding="utf-8")
        right = marked(text, ran, digest)
        if right != text:
            path.write_text(right, encoding="utf-8")


if __name__ == "__main__":
    write()
