"""One system in its own environment: takes orders as JSON lines, makes buffers, times itself in turns."""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import resource
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter_ns
from typing import Any, NamedTuple

import numpy as np

from speed import work
from speed.derived import Derived, check_goals, check_returns
from speed.rollouts import RolloutJob
from speed.team import Team
from speed.work import Adding, Batches, NotOfferedError

CHECKED = 5  # batches that are compared with the data before the first turn


def read_bytes() -> int:
    """Return the bytes that this process has had read from disk."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["read_bytes"])


def resident() -> int:
    """Return the bytes of memory that this process uses, shared memory included.

    What earlier jobs have left is freed first: the next one would get it for nothing.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


class Sampled:
    """Sampling, with an update of the priorities after each batch where there are any."""

    def __init__(self, kind: str, module: Any, options: dict[str, Any], checked: int = CHECKED) -> None:
        before = resident()
        self.made: Batches = getattr(module, kind)(**options)
        self.bytes = (resident() - before) / getattr(self.made, "count", options["count"])
        batch, length = options["batch"], options.get("length", 1)
        self.fresh = work.fresh_priorities(batch) if options.get("prioritized") else None
        self.turn = 0
        self.latest: Any = None
        for _ in range(checked):
            found = self.made.sample()
            work.check(self.made.rows(found), batch, length, options["count"])
            if self.fresh is not None:
                self.made.update(found, self.fresh[0])

    def step(self) -> None:
        self.latest = self.made.sample()  # a loop holds a batch until the next one is there
        if self.fresh is not None:
            self.turn += 1
            self.made.update(self.latest, self.fresh[self.turn % len(self.fresh)])

    def close(self) -> None:
        self.made.close()


class Stepped:
    """Steps of N environments, added one by one; with `beside`, a batch of 256 after each."""

    def __init__(self, module: Any, options: dict[str, Any]) -> None:
        self.beside = options.pop("beside")
        self.made: Adding = module.adding(**options)
        self.steps = work.environment_steps(options["num_envs"])
        self.bytes, self.latest = 0, None
        num_envs, capacity = options["num_envs"], options["capacity"]
        for _ in range(2 * work.LONGEST):
            self.made.add(next(self.steps))
        held, given = self.made.held(), min(2 * work.LONGEST * num_envs, capacity)
        most_open = work.LONGEST * num_envs  # a system may hold back the steps of open episodes
        assert given - most_open <= held <= 1.5 * capacity, f"holds {held} of {given} transitions"
        for _ in range(max(0, capacity // num_envs - 2 * work.LONGEST)):
            self.made.add(next(self.steps))

    def step(self) -> None:
        self.made.add(next(self.steps))
        if self.beside:
            self.latest = self.made.sample()

    def close(self) -> None:
        self.made.close()


class Trajectories:
    """Whole trajectories, added one by one."""

    def __init__(self, module: Any, options: dict[str, Any]) -> None:
        self.bytes = 0
        self.rows = list(work.trajectories(64))
        self.add: Callable[[work.Rows], None]
        self.add, self.end = module.whole(**options)
        self.turn = 0
        for _ in range(2 * options["capacity"] // work.EPISODE):
            self.step()

    def step(self) -> None:
        self.turn += 1
        self.add(self.rows[self.turn % len(self.rows)])

    def close(self) -> None:
        self.end()


def saved(module: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Save `count` transitions, and restore them into a buffer that holds few; return seconds and bytes."""
    asked = {"batch": 256, "count": options["count"], "prioritized": False}
    folder = Path(tempfile.mkdtemp(prefix="peers-", dir=options["folder"]))
    try:
        made = module.transitions(**asked)
        begun = perf_counter_ns()
        made.save(folder)
        save_s = (perf_counter_ns() - begun) / 1e9
        made.close()
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        fresh = module.transitions(**asked, fill=10 * work.EPISODE)
        begun = perf_counter_ns()
        fresh.load(folder)
        load_s = (perf_counter_ns() - begun) / 1e9
        numbers = fresh.rows(fresh.sample())
        work.check(numbers, 256, 1, asked["count"])
        assert numbers["reward"].max() > 10 * work.EPISODE, "the content was not restored"
        fresh.close()
    finally:
        shutil.rmtree(folder)
    return {"save_s": save_s, "load_s": load_s, "bytes": size}


def written(module: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Write trajectories in the system's own format; return seconds, what makes the numbers included."""
    folder = _own(module, options)
    folder.mkdir()
    begun = perf_counter_ns()
    module.write(options["count"], folder)
    seconds = (perf_counter_ns() - begun) / 1e9
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return {"write_s": round(seconds, 2), "bytes": size}


def stored(module: Any, options: dict[str, Any]) -> Sampled:
    """Open what was written."""
    return Sampled("stored", module, {**options, "folder": _own(module, options)})


def larger(module: Any, options: dict[str, Any]) -> Sampled:
    """Open what was written, none of it in the page cache, as a member of the system's control group."""
    resident()  # a page that is mapped stays; what the process holds and does not use would be free of charge
    for path in _own(module, options).rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file)
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    (_own(module, {"folder": options.pop("group")}) / "cgroup.procs").write_text("0")
    kind = "read" if hasattr(module, "read") else "stored"
    return Sampled(kind, module, {**options, "folder": _own(module, options)}, checked=1)


def _own(module: Any, options: dict[str, Any]) -> Path:
    return Path(options["folder"], module.__name__.rpartition(".")[2])


def never_drawn(module: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Draw as many samples as there are items of equal priority; return the share that was never drawn."""
    draw, close = module.numbered(options["count"], options["batch"])
    counts = np.zeros(options["count"], np.uint8)
    begun = time.monotonic()
    for done in range(0, options["count"], options["batch"]):
        numbers = draw()
        np.minimum(counts, 254, out=counts)
        np.add.at(counts, numbers, 1) if len(numbers) < 1000 else _count(counts, numbers)
        if time.monotonic() - begun > options["seconds"]:
            raise NotOfferedError(f"{done + options['batch']:,} draws in {options['seconds']} s")
    close()
    return {"never": float((counts == 0).mean()), "expected": float(np.exp(-1))}


def _count(counts: work.Array, numbers: work.Array) -> None:
    items, times = np.unique(numbers, return_counts=True)
    counts[items] = np.minimum(counts[items].astype(np.int64) + times, 255)


def block(step: Callable[[], None], seconds: float) -> dict[str, Any]:
    """Run steps for so long; return the median time of one, us of wall time and the thread's CPU time."""
    times: list[int] = []
    until = perf_counter_ns() + int(seconds * 1e9)
    cpu = time.process_time_ns()
    while True:
        begun = perf_counter_ns()
        step()
        now = perf_counter_ns()
        times.append(now - begun)
        if now > until and (len(times) >= 3 or now - begun > 1e9):
            break
    cpu = time.process_time_ns() - cpu
    return {"us": float(np.median(times)) / 1e3, "steps": len(times), "cpu_us": cpu / len(times) / 1e3}


class Kind(NamedTuple):
    """A kind of work: the function that a system's file has for it, and what makes a job or an answer of it.

    A job has `bytes`, `close()`, and `step()` for turns or a `block(seconds)` of its own.
    """

    function: str
    make: Callable[[Any, dict[str, Any]], Any]


KINDS = {
    **{kind: Kind(kind, partial(Sampled, kind)) for kind in ("transitions", "windows", "frames")},
    "n_step": Kind("n_step", partial(Derived, "n_step", check_returns)),
    "hindsight": Kind("hindsight", partial(Derived, "hindsight", check_goals)),
    "adding": Kind("adding", Stepped),
    "whole": Kind("whole", Trajectories),
    "rollouts": Kind("rollouts", RolloutJob),
    "saved": Kind("transitions", saved),
    "written": Kind("write", written),
    "stored": Kind("stored", stored),
    "larger": Kind("stored", larger),
    "never drawn": Kind("numbered", never_drawn),
    "trainers": Kind("share", Team),
}


class Child:
    """Carries out the orders of `run.py`."""

    def __init__(self, name: str) -> None:
        self.module = importlib.import_module(f"speed.{name}" if "." in name else f"speed.systems.{name}")
        self.job: Any = None

    def answer(self, order: dict[str, Any]) -> dict[str, Any]:
        if order["do"] == "version":
            return {"version": self.module.version()}
        if order["do"] == "offers":
            return {"offers": hasattr(self.module, KINDS[order["kind"]].function)}
        if order["do"] == "turn":
            own = [one for one in (self.job, getattr(self.job, "made", None)) if hasattr(one, "block")]
            before = read_bytes()
            if own:
                found = own[0].block(order["turn_s"], **order["options"])
            else:
                found = block(self.job.step, order["turn_s"])
            return {**found, "read_bytes": (read_bytes() - before) / found.get("steps", 1)}
        if order["do"] == "exact":
            return dict(self.job.exact(**order["options"]))
        if order["do"] == "end":
            job, self.job = self.job, None
            if job is not None:
                job.close()
            return {}
        kind = KINDS[order["do"]]
        if not hasattr(self.module, kind.function):
            raise NotOfferedError
        found = kind.make(self.module, order["options"])
        if isinstance(found, dict):
            return found
        self.job = found
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {"bytes": found.bytes, "peak": peak, "notes": getattr(found, "notes", {})}


def main() -> None:
    """Answer orders from stdin; what libraries print goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    os.sched_setaffinity(0, {int(sys.argv[2])})
    child = Child(sys.argv[1])
    for line in sys.stdin:
        try:
            answer = child.answer(json.loads(line))
        except NotOfferedError as error:
            answer = {"left out": str(error) or "not offered"}
        except Exception as error:
            traceback.print_exc()
            answer = {
                "left out": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[
                    :200
                ]
            }
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
