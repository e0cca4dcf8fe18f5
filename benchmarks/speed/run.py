"""Time every system at the same work, in turns on one core; write results/peers.json and the docs'
tables.

    bash benchmarks/peers.sh [--quick] [--only TEXT] [SYSTEM...]

It prints the tables of the page, and writes nothing unless all systems are measured.

A user's calls are timed in a tight loop, and again with a model's forward pass between them.

Each system lives in an environment and a process of its own. For each kind of work all of them are
filled, compare some batches with the data, and then take turns of a fraction of a second; a row is
the median of a system's turns.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from support.report import Disturbance, Row, document, write_json
from peers.environments import OWN, PEERS, ROOT, interpreters
from peers.orders import Child
from support.terminal import fitted

from speed.disk_rate import DiskRate
from speed.memory_group import MemoryGroups
from speed.rollouts import PARTS
from speed.table import tables, write
from speed.work import BETWEEN, CALL, COMMIT, EPISODE, trajectories

READERS = (
    "gear",
    "limit",
    "numpy_ring",
    "torchrl",
    "datasets",
    "streaming",
)  # what reads files at random
ONLY_READERS = ("datasets", "streaming")
TURNS = 5
TURN_S = 0.2
FIO = 2, 2.0  # runs before the turns and after them, and seconds of one
STARTS = 3  # the first may read from a disk what later ones find in memory
QUICK = (
    *OWN,
    "torchrl",
    "cpprb",
    "flashbax",
    "sb3",
)  # of a quick run: the others take minutes to start and fill
WAYS = {  # module in `trainers`: system, and what its user calls
    "gear": ("gear", "Replay, on the ranks of a gloo group"),
    "cpprb": ("cpprb", "MPPrioritizedReplayBuffer"),
    "torchrl_rpc": ("torchrl", "RemoteTensorDictReplayBuffer, its owner behind RPC"),
    "torchrl_ray": ("torchrl", "RayReplayBuffer"),
    "reverb": ("reverb", "one server, a client each"),
}
QUICK_ITEMS = 100_000
QUICK_WAYS = ("gear", "cpprb")  # the others take longer to start
TRAINERS = "trainers on one buffer"


class Work(NamedTuple):
    """One kind of work: its name in the tables, what a child does, and with what.

    `between`: it is timed again with a model's work between the calls, as a row of its own.
    """

    name: str
    do: str
    options: dict[str, Any]
    between: bool = False

    def forms(self) -> list[tuple[str, Row]]:
        """Return the names of its rows, each with what its turns are ordered with."""
        plain: tuple[str, Row] = self.name, {}
        return [plain, (self.name + BETWEEN, {"between": True})] if self.between else [plain]


def plan(quick: bool) -> list[Work]:
    """Return what is timed in turns."""
    items = 1_000_000
    windows = 2_000_000
    num_frames = 20_000
    capacity = 20_000
    batches = (256, 4096)
    lengths = (20, 100, EPISODE)
    vectors = (1, 8, 64)
    if quick:
        items = QUICK_ITEMS
        windows = 200_000
        num_frames = 4_000
        batches = (256,)
        lengths = (20, EPISODE)
        vectors = (1, 64)
    found = []
    for prioritized in (False, True):
        for batch in batches:
            name = f"{'prioritized' if prioritized else 'uniform'} transitions, B = {batch:,}"
            options = {"count": items, "batch": batch, "prioritized": prioritized}
            found.append(Work(name, "transitions", options, between=batch == batches[0]))
    for length in lengths:
        name = "whole trajectories" if length == EPISODE else f"windows of {length}"
        options = {"count": windows, "batch": 128, "length": length}
        found.append(Work(f"{name}, B = 128", "windows", options, between=length == lengths[0]))
    found.append(
        Work(
            "4 stacked frames, B = 256", "frames", {"count": num_frames, "batch": 256, "length": 4}
        )
    )
    found += [
        Work("3-step returns, B = 256", "n_step", {"count": items, "batch": 256}),
        Work("goals by hindsight, B = 256", "hindsight", {"count": items // 10, "batch": 256}),
    ]
    found.append(Work(CALL, "calls", {"capacity": capacity}, between=True))
    for beside in (False, True):
        for num_envs in vectors[:1] if quick and beside else vectors:
            name = f"a step of {num_envs} environment{'s' * (num_envs > 1)}"
            name += ", and a batch of 256" * beside
            options = {"num_envs": num_envs, "capacity": capacity // 64 * 64, "beside": beside}
            found.append(Work(name, "adding", options, between=num_envs == 64 and not beside))
    found.append(Work("a whole trajectory of 1,000", "whole", {"capacity": capacity}))
    for as_lists in (False, True):
        name = COMMIT + ", lists of Python numbers" * as_lists
        found.append(Work(name, "leases", {"as_lists": as_lists}, between=not as_lists))
    groups = 64 if quick else 512
    title = f"a step of {groups // 8} of {groups:,} groups of 8 responses"
    found.append(Work(title, "rollouts", {"groups": groups, "step": groups // 8}))
    return found


class Systems:
    """The processes of all systems; one that ended is started again for the next work."""

    def __init__(self, pythons: dict[str, Path | str], core: int) -> None:
        self._pythons = pythons
        self.core = core
        self._children: dict[str, Child] = {}

    def __getitem__(self, name: str) -> Child:
        if name not in self._children or not self._children[name].is_alive:
            self._children[name] = Child("speed.child", name, self._pythons[name], str(self.core))
        return self._children[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._pythons)

    def start(self, name: str) -> Child:
        """Return a process that has done nothing yet."""
        self.stop(name)
        return self[name]

    def stop(self, name: str) -> None:
        """End a process; the next work starts another."""
        if name in self._children:
            self._children.pop(name).end()

    def part(self, names: list[str]) -> Systems:
        """Return some of the systems, with the same processes."""
        found = Systems({name: self._pythons[name] for name in names}, self.core)
        found._children = self._children
        return found

    def close(self) -> None:
        """End all processes."""
        for child in self._children.values():
            child.end()


def take_turns(
    systems: Systems, ready: list[str], turns: int, **order: Any
) -> dict[str, list[Row]]:
    """Give some systems turns; return the answers of each."""
    found: dict[str, list[Row]] = {name: [] for name in ready}
    for _ in range(turns):
        for name in ready:
            found[name].append(systems[name].order("turn", **order))
    return found


def failure(answers: list[Row]) -> Row | None:
    """Return the first answer that says what was in the way."""
    return next((answer for answer in answers if "left out" in answer), None)


def spread(answers: list[Row], key: str, digits: int) -> Row:
    """Return the median and the quartiles of a number in some answers."""
    found = np.percentile([answer[key] for answer in answers], (25, 50, 75))
    low, middle, high = (round(float(value), digits) for value in found)
    return {key: middle, "quartiles": [low, high]}


def in_turns(systems: Systems, work: Work, turns: int, turn_s: float) -> Iterator[Row]:
    """Time a kind of work; yield a row for each system."""
    ready: dict[str, Row] = {}
    for name in systems:
        answer = systems[name].order(work.do, options=work.options)
        if "left out" in answer:
            yield {"work": work.name, "system": name, **answer}
            systems[name].order("end")
        else:
            ready[name] = answer
    forms = {
        title: take_turns(systems, list(ready), turns, options={}, turn_s=turn_s, **how)
        for title, how in work.forms()
    }
    for name in ready:
        systems[name].order("end")
    for title, times in forms.items():
        yield from _timed(work._replace(name=title), ready, times)


def _timed(work: Work, ready: dict[str, Row], times: dict[str, list[Row]]) -> Iterator[Row]:
    """Yield a row for each system from the answers to its turns, and to the order before them."""
    for name, answers in times.items():
        row: Row = {"work": work.name, "system": name}
        if (failed := failure(answers)) is not None:
            yield row | failed
            continue
        row |= spread(answers, "us", 2)
        if "gear" in times and failure(times["gear"]) is None:
            ratios = [
                one["us"] / ours["us"] for one, ours in zip(answers, times["gear"], strict=True)
            ]
            row["x_gear"] = round(float(np.median(ratios)), 3)
        if work.do == "rollouts":
            parts = {part: [answer["parts"][part] for answer in answers] for part in PARTS}
            row["parts_ms"] = {
                part: round(1e3 * float(np.median(s)), 1) for part, s in parts.items()
            }
            row["tokens_s"] = round(answers[0]["tokens"] / row["us"] * 1e6)
        if work.do == "larger":
            row["batches_s"] = round(1e6 / row["us"], 2)
            row["read_mb"] = round(
                float(np.median([one["read_bytes"] for one in answers])) / 1e6, 4
            )
        if work.do == "transitions":
            row["bytes_per_transition"] = round(ready[name]["bytes"], 1)
        yield row | ready[name].get("notes", {})


def trainers(
    pythons: dict[str, Any], core: int, quick: bool, turns: int, turn_s: float
) -> Iterator[Row]:
    """Time all ways of sharing in turns; yield a row for each, number of trainers and
    batch size.
    """
    wanted = [way for way in (QUICK_WAYS if quick else WAYS) if WAYS[way][0] in pythons]
    systems = Systems({f"trainers.{way}": pythons[WAYS[way][0]] for way in wanted}, core)
    with contextlib.closing(systems):
        ready: list[str] = []
        for name in systems:
            answer = systems[name].order(
                "trainers", options={"count": 100_000 if quick else 1_000_000}
            )
            if "left out" in answer:
                yield _trainers_row(name, **answer)
            else:
                ready.append(name)
        cases = [{"trainers": count, "batch": batch} for count in (2, 4) for batch in (256, 4096)]
        for case in cases[:: 2 if quick else 1]:
            found = take_turns(systems, ready, turns, options=case, turn_s=turn_s)
            for name, answers in found.items():
                row = failure(answers) or spread(answers, "batches_s", 1)
                if case["batch"] == 256 and "left out" not in row:
                    checked = systems[name].order("exact", options=case)
                    row |= {"unchecked": checked["left out"]} if "left out" in checked else checked
                yield _trainers_row(name, **case, **row)
        for name in ready:
            systems[name].order("end")


def _trainers_row(name: str, **found: Any) -> Row:
    system, title = WAYS[name.rpartition(".")[2]]
    work = (
        "{trainers} {0}, B = {batch:,}".format(TRAINERS, **found) if "batch" in found else TRAINERS
    )
    return {"work": work, "system": system, "way": title, **found}


def starts(systems: Systems, count: int) -> Iterator[Row]:
    """Time from the start of a process until its first batch of 100,000 transitions."""
    options = {"count": 100_000, "batch": 256, "prioritized": False}
    for name in systems:
        seconds: list[float] = []
        while len(seconds) < count:
            begun = time.monotonic()
            answer = systems.start(name).order("transitions", options=options)
            seconds.append(time.monotonic() - begun)
            systems[name].order("end")
            if "left out" in answer:
                break
        row = {"work": "start of a process until its first batch", "system": name}
        if answer.get("left out") != "not offered":
            yield row | (
                answer if "left out" in answer else {"s": round(float(np.median(seconds)), 2)}
            )


def on_disk(systems: Systems, quick: bool, only: str, turns: int, turn_s: float) -> Iterator[Row]:
    """Write trajectories, then read windows: of files in the page cache, and of more data than
    memory, beside `fio`.
    """
    core = systems.core
    count, limit, batch = (
        (500_000, 16, 8) if quick else (4_000_000, 48, 32)
    )  # one batch may take seconds
    size = f"{count * 61 / 1e9:.2g} GB"
    writing = f"to disk: {size} of trajectories"
    cached = {f"from disk: {steps:,} steps, B = 128": steps for steps in (20, EPISODE)}
    larger = f"from disk, {size} and {limit} MB of memory: 20 steps, B = {batch}"
    if not any(only in name for name in (writing, *cached, larger)):
        return
    with tempfile.TemporaryDirectory(prefix="peers-", dir=ROOT / "build") as folder:
        asked = {"count": count, "folder": folder}
        for name in systems:
            yield {"work": writing, "system": name, **systems[name].order("written", options=asked)}
        for title, length in cached.items():
            options = {**asked, "batch": 128, "length": length}
            yield from in_turns(systems, Work(title, "stored", options), turns, turn_s)
        try:
            groups = MemoryGroups([*systems, "fio"], limit << 20)
        except OSError as error:
            yield {"work": larger, "system": "gear", "left out": f"no control group: {error}"}
            return
        with contextlib.closing(groups), contextlib.closing(systems):
            # This project asks for the pages of each column of a batch at a time.
            queue_depth = batch * len(next(trajectories(1)))
            written = Path(folder, "gear" if "gear" in [*systems] else next(iter(systems)))
            disk = DiskRate(written, queue_depth, core, groups.folder / "fio")
            options = {**asked, "batch": batch, "length": 20, "group": str(groups.folder)}
            disk.run(*FIO)
            rows = list(in_turns(systems, Work(larger, "larger", options), turns, turn_s))
            disk.run(*FIO)
            for row in disk.rows(larger, rows):
                if "left out" in row and groups.has_killed(row["system"]):
                    row["left out"] = f"killed: needs more than {limit} MB"
                yield {**row, "read_ahead": _read_ahead(Path(folder))}


def _read_ahead(folder: Path) -> str:
    """Return how much the kernel reads around a page of this folder's device that a map
    faults on.
    """
    device = os.stat(folder).st_dev
    path = Path(f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb")
    return f"{path.read_text().strip()} KiB" if path.exists() else "an unknown amount"


def alone(systems: Systems, do: str, title: str, options: Row) -> Iterator[Row]:
    """Have each system do something once, in a fresh process."""
    for name in systems:
        offered = systems[name].order("offers", kind=do)
        if offered.get("offers"):
            answer = systems.start(name).order(do, options=options)
            systems.stop(name)
        else:
            answer = {"left out": offered.get("left out", "not offered")}
        yield {"work": title, "system": name, **answer}


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("systems", nargs="*", help="default: all that can be installed")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="small sizes, few turns, the systems that start fast: 3 minutes",
    )
    parser.add_argument("--only", default="", help="kinds of work whose name contains this")
    options = parser.parse_args()
    disturbance = Disturbance()
    core = max(os.sched_getaffinity(0))
    wanted = options.systems or (
        QUICK if options.quick else [*OWN, *(peer.module for peer in PEERS)]
    )
    pythons, absent = interpreters(wanted)
    rows: list[Row] = [
        {"work": "installation", "system": x, "left out": why} for x, why in absent.items()
    ]
    everything = Systems(pythons, core)
    systems = everything.part([name for name in pythons if name not in ONLY_READERS])
    readers = everything.part([name for name in READERS if name in pythons])

    def take(found: Iterator[Row]) -> None:
        for row in found:
            rows.append(row)
            print("peers:", json.dumps(row), file=sys.stderr, flush=True)

    try:
        if (
            options.only in "start of a process until its first batch"
        ):  # first: they are started anyway
            take(starts(systems, 1 if options.quick else STARTS))
        versions = {name: everything[name].order("version").get("version") for name in everything}
        turns, turn_s = (2, 0.05) if options.quick else (TURNS, TURN_S)
        for work in plan(options.quick):
            if options.only in work.name:
                take(in_turns(systems, work, turns, turn_s))
        if options.only in TRAINERS:
            take(trainers(pythons, core, options.quick, turns, turn_s))
        take(on_disk(readers, options.quick, options.only, turns, turn_s))
        with tempfile.TemporaryDirectory(prefix="peers-", dir=ROOT / "build") as folder:
            count = 95_000 if options.quick else 9_500_000
            title = f"save and restore {count * 105 / 1e9:.2g} GB of transitions"
            if options.only in title:
                take(alone(systems, "saved", title, {"count": count, "folder": folder}))
        bits = 20 if options.quick else 25
        title = f"never drawn of 2^{bits} equal items in 2^{bits} draws"
        if options.only in title:
            asked = {"count": 1 << bits, "batch": 1 << 15, "seconds": 90}
            take(alone(systems, "never drawn", title, asked))
    finally:
        everything.close()
    sizes = {"items": QUICK_ITEMS} if options.quick else {}
    content = document(
        disturbance, rows, command="bash benchmarks/peers.sh", systems=versions, **sizes
    )
    if not (options.quick or options.only or options.systems):
        out = ROOT / "benchmarks" / "results" / "peers.json"
        write_json(out, content)
        write(out)
    print(fitted(tables(content)))


if __name__ == "__main__":
    main()
