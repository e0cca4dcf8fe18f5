"""Compare a user's calls of this checkout with those of another commit, in turns on one core.

    bash benchmarks/regressions.sh [COMMIT] [--only TEXT] [--json FILE]

The other commit's package lies in a git worktree below build/regressions. Both packages run the
benchmarks of this checkout, with the same interpreter and environment. Native ops are built in
torch's folder of extensions, where names hold a hash of their sources: neither side takes the
other's, and a commit that was built before is not built again.

In each round both sides start a new process, so that a lucky placement in memory does not last. For
each kind of work both make its content and take turns of a fraction of a second. A row's ratio is
the median over all neighbouring turns, this checkout's time divided by the other's; its range is
that of the medians of the rounds. A row is slower if its ratio is above the limit and every round's
median is above 1. Rows above the limit after the first rounds get as many rounds again.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from support.report import Disturbance, Row, document, print_table, say, write_json
from peers.environments import ROOT
from peers.orders import Child

from speed.run import Work
from speed.work import CALL, COMMIT, EPISODE

LIMIT = 1.05  # of a ratio
ROUNDS = 3
TURNS = 5  # of each side in a round, for each row
TURN_S = 0.1
BUILD_S = 1800.0  # the other commit's native op may have to be compiled
START = "first batch of a process"
WRITTEN = "to disk"
PARTS = {"add": "add of 64 responses", "pack": "pack of these", "train": "pack again, filled"}
UNKNOWN = 2  # exit status

#: Microseconds of neighbouring turns: the other commit's, this checkout's.
Pair = tuple[float, float]


class Figures(NamedTuple):
    """What was measured of one row: the pairs of each round, or why one side has none."""

    rounds: list[list[Pair]]
    missing: dict[str, str]


def plan() -> list[Work]:
    """Return what is timed in turns, besides the start of a process and writing to disk."""
    transitions = {"count": 500_000, "batch": 256}
    windows = {"count": 500_000, "batch": 128, "length": 20}
    adding = {"num_envs": 64, "capacity": 19_968, "beside": False}
    return [
        Work(CALL, "calls", {"capacity": 10_000}, between=True),
        Work("a step of 64 environments", "adding", adding, between=True),
        Work("a whole trajectory of 1,000", "whole", {"capacity": 20_000}),
        Work("uniform, B = 256", "transitions", {**transitions, "prioritized": False}, True),
        Work("prioritized, B = 256", "transitions", {**transitions, "prioritized": True}, True),
        Work("windows of 20, B = 128", "windows", windows),
        Work("4 stacked frames, B = 256", "frames", {"count": 8_000, "batch": 256, "length": 4}),
        Work(COMMIT, "leases", {"as_lists": False}, between=True),
        Work(COMMIT + ", lists", "leases", {"as_lists": True}),
        Work("rollouts", "rollouts", {"groups": 32, "step": 8}),
    ]


def ratio(rounds: Sequence[Sequence[Pair]]) -> Row:
    """Return times and ratio of a row, the range of its rounds, and whether it is slower."""
    pairs = np.array([pair for one in rounds for pair in one])
    medians = [float(np.median([ours / other for other, ours in one])) for one in rounds]
    middle = float(np.median(pairs[:, 1] / pairs[:, 0]))
    return {
        "other_us": round(float(np.median(pairs[:, 0])), 3),
        "us": round(float(np.median(pairs[:, 1])), 3),
        "ratio": round(middle, 4),
        "range": [round(min(medians), 4), round(max(medians), 4)],
        "slower": middle > LIMIT and min(medians) > 1,
    }


def verdict(name: str, found: Figures) -> Row:
    """Return the row of a name: a ratio, or which side cannot do it.

    What only the other commit can do is a regression, what only this checkout can do is none.
    """
    row: Row = {"row": name}
    if found.missing:
        failed = "this checkout" in found.missing and "the other commit" not in found.missing
        return {**row, "left out": found.missing, "slower": failed}
    return {**row, **ratio(found.rounds)}


def suspects(figures: dict[str, Figures]) -> list[str]:
    """Return the rows whose ratio is above the limit."""
    rows = [verdict(name, found) for name, found in figures.items()]
    return [row["row"] for row in rows if row.get("ratio", 0.0) > LIMIT]


def compared(measure: Callable[[str], Iterator[tuple[str, Any]]], count: int) -> dict[str, Figures]:
    """Measure some rounds, and as many again of the rows above the limit.

    Args:
        measure: Yields the rows of one round whose name is the given one, or all for "": their
            pairs, or by side what was in the way.
        count: Rounds.
    """
    figures: dict[str, Figures] = {}

    def take(only: str) -> None:
        for name, found in measure(only):
            row = figures.setdefault(name, Figures([], {}))
            row.missing.update(found) if isinstance(found, dict) else row.rounds.append(found)

    for _ in range(count):
        take("")
    for name in suspects(figures):
        say(f"{name}: above the limit, measured again")
        for _ in range(count):
            take(name)
    return figures


class Sides:
    """The processes of both sides.

    Args:
        other: The checkout of the other commit.
        core: That both run on.
    """

    def __init__(self, other: Path, core: int) -> None:
        self._folders = {"the other commit": other, "this checkout": ROOT}
        self._core = core
        self.children: dict[str, Child] = {}
        self._turn = 0

    def names(self) -> list[str]:
        """Return both sides; each is the first in turns."""
        self._turn += 1
        names = list(self._folders)
        return names if self._turn % 2 else names[::-1]

    def start(self, name: str) -> Child:
        """Start a new process of a side."""
        if name in self.children:
            self.children.pop(name).end()
        folder = self._folders[name]
        self.children[name] = Child(
            "speed.child", "gear", sys.executable, str(self._core), checkout=folder
        )
        return self.children[name]

    def order(self, do: str, **more: Any) -> dict[str, Row]:
        """Give both the same order; return the answers by side."""
        return {name: self.children[name].order(do, **more) for name in self.names()}

    def cpu_us(self, name: str) -> float:
        """Return the CPU time that a side's process has taken since it began."""
        text = Path(f"/proc/{self.children[name].process.pid}/stat").read_text()
        fields = text.rpartition(")")[2].split()
        ticks = int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK") * 1e6

    def check(self) -> None:
        """Raise unless each side runs its own package; build its native op if need be."""
        for name, folder in self._folders.items():
            answer = self.start(name).order("folder")
            if Path(answer.get("folder", "")).parent != folder:
                raise SystemExit(f"{name} must run the package in {folder}, it has: {answer}")
            say(f"{name}: {folder}")
            options = {"count": 10_000, "batch": 256, "prioritized": False}
            answer = self.children[name].order("transitions", options=options, seconds=BUILD_S)
            if "left out" in answer:
                raise SystemExit(f"{name} gives no batch: {answer['left out']}")

    def close(self) -> None:
        """End all processes."""
        for child in self.children.values():
            child.end()


def missing(answers: dict[str, Row]) -> dict[str, str]:
    """Return what was in the way, by side."""
    return {name: one["left out"] for name, one in answers.items() if "left out" in one}


class Measurement:
    """The rounds of all rows.

    Args:
        sides: Their processes.
        only: Rows whose name contains this.
    """

    def __init__(self, sides: Sides, only: str) -> None:
        self._sides = sides
        self._only = only

    def round(self, name: str) -> Iterator[tuple[str, Any]]:
        """Yield the rows of a round; of the given name, or all that were asked for."""

        def is_wanted(row: str) -> bool:
            return row == name if name else self._only in row

        started = list(self._start())
        if is_wanted(START):
            yield from started
        if is_wanted(WRITTEN):
            yield from self._written()
        for work in plan():
            forms = work.forms()
            if work.do == "rollouts":
                forms = [(f"rollouts: {title}", {}) for title in PARTS.values()]
            if any(is_wanted(title) for title, _ in forms):
                rows = self._parts(work) if work.do == "rollouts" else self._turns(work)
                yield from ((title, found) for title, found in rows if is_wanted(title))

    def _start(self) -> Iterator[tuple[str, Any]]:
        """Yield the CPU time of new processes until their first batch."""
        options = {"count": 100_000, "batch": 256, "prioritized": False}
        us: dict[str, float] = {}
        answers: dict[str, Row] = {}
        for name in self._sides.names():
            answers[name] = self._sides.start(name).order("transitions", options=options)
            us[name] = self._sides.cpu_us(name)
        yield START, missing(answers) or [_pair(us)]
        self._sides.order("end")

    def _written(self) -> Iterator[tuple[str, Any]]:
        pairs: list[Pair] = []
        for _ in range(TURNS):
            with tempfile.TemporaryDirectory(prefix="regressions-") as folder:
                us: dict[str, float] = {}
                answers: dict[str, Row] = {}
                for name in self._sides.names():
                    place = Path(folder, name.replace(" ", "-"))
                    place.mkdir()
                    options = {"count": 50 * EPISODE, "folder": str(place)}
                    answers[name] = self._sides.children[name].order("written", options=options)
                    us[name] = answers[name].get("write_s", 0.0) * 1e6
            if failed := missing(answers):
                yield WRITTEN, failed
                return
            pairs.append(_pair(us))
        yield WRITTEN, pairs

    def _turns(self, work: Work) -> Iterator[tuple[str, Any]]:
        failed = missing(self._sides.order(work.do, options=work.options))
        for title, how in work.forms():
            pairs: list[Pair] = []
            for _ in range(0 if failed else TURNS):
                answers = self._sides.order("turn", options={}, turn_s=TURN_S, **how)
                failed |= missing(answers)
                if not failed:
                    pairs.append(_pair({name: one["us"] for name, one in answers.items()}))
            yield title, failed or pairs
        self._sides.order("end")

    def _parts(self, work: Work) -> Iterator[tuple[str, Any]]:
        """Yield the parts of the rollouts' turns, each as a row."""
        failed = missing(self._sides.order(work.do, options=work.options))
        pairs: dict[str, list[Pair]] = {part: [] for part in PARTS}
        for _ in range(0 if failed else 3 * TURNS):
            answers = self._sides.order("turn", options={}, turn_s=TURN_S)
            failed |= missing(answers)
            for part in () if failed else PARTS:
                us = {name: one["parts"][part] * 1e6 for name, one in answers.items()}
                pairs[part].append(_pair(us))
        for part, title in PARTS.items():
            yield f"rollouts: {title}", failed or pairs[part]
        self._sides.order("end")


def _pair(us: dict[str, float]) -> Pair:
    return us["the other commit"], us["this checkout"]


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def resolve(name: str | None) -> str:
    """Return the hash of a commit, by default that of the last tag, else of the commit before.

    Raises:
        SystemExit: There is no such commit; status 2.
    """
    try:
        if name is None:
            tags = _git("tag", "--merged", "HEAD", "--sort=-creatordate").split()
            is_changed = _git("status", "--porcelain", "--", "deepspeed_gear", "ops")
            name = tags[0] if tags else "HEAD" if is_changed else "HEAD~1"
        return _git("rev-parse", "--verify", "--end-of-options", f"{name}^{{commit}}")
    except subprocess.CalledProcessError:
        print(
            f"regressions: COMMIT must be a commit, branch or tag of {ROOT}, got {name!r}; "
            "git log names commits",
            file=sys.stderr,
        )
        raise SystemExit(UNKNOWN) from None


def checkout(commit: str) -> Path:
    """Return a worktree of a commit below build/regressions, which stays there for the next run."""
    folder = ROOT / "build" / "regressions" / commit[:12]
    if not (folder / "deepspeed_gear").is_dir():
        _git("worktree", "prune")
        _git("worktree", "add", "--force", "--detach", str(folder), commit)
    return folder


def table(rows: Sequence[Row], commit: str) -> None:
    """Print the rows under their columns."""
    heads = ("row", f"{commit[:8]}, us", "this checkout, us", "ratio", "rounds", "")
    cells = []
    for row in rows:
        words = "SLOWER" if row["slower"] else ""
        if "left out" in row:
            why = "; ".join(f"{side}: {text}" for side, text in row["left out"].items())
            cells.append([row["row"], None, None, None, why, words])
            continue
        low, high = row["range"]
        between = f"{low:.2f} to {high:.2f}"
        cells.append([row["row"], row["other_us"], row["us"], row["ratio"], between, words])
    print_table(heads, cells)


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(
        prog="regressions.sh",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "commit",
        nargs="?",
        help="default: the last tag, else the commit before this checkout's state",
    )
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"default: {ROUNDS}")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    options = parser.parse_args()
    commit = resolve(options.commit)
    disturbance = Disturbance()
    sides = Sides(checkout(commit), max(os.sched_getaffinity(0)))
    try:
        sides.check()
        figures = compared(Measurement(sides, options.only).round, options.rounds)
    finally:
        sides.close()
    rows = [verdict(name, found) for name, found in figures.items()]
    table(rows, commit)
    if options.json is not None:
        arguments = " ".join(sys.argv[1:])
        command = f"bash benchmarks/regressions.sh {arguments}"
        write_json(options.json, document(disturbance, rows, command=command, other_commit=commit))
    taken = disturbance.taken()
    print(f"\nmeanwhile others used {taken['other_cores']} cores")
    slower = [row["row"] for row in rows if row["slower"]]
    if slower:
        print(f"more than {LIMIT - 1:.0%} slower than {commit[:12]}: {'; '.join(slower)}")
    raise SystemExit(bool(slower))


if __name__ == "__main__":
    main()
