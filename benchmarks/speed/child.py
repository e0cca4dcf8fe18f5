"""One system in its own environment: takes orders as JSON lines, makes buffers, times itself in
turns.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter_ns
from typing import Any, NamedTuple

import numpy as np
from peers.interface import Array, NotOfferedError, Rows, System, fresh_priorities, load
from peers.orders import carry_out

from speed import contents, derived, work
from speed.leases import group
from speed.rollouts import RolloutJob
from speed.team import Team

CHECKED = 5  # batches that are compared with the data before the first turn
DERIVED_CHECKED = 40  # and with the definitions of what is derived


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


class Job:
    """What is done in turns, with a system's buffer."""

    bytes = 0.0  # of memory for each item
    latest: Any = None  # a loop holds a batch until the next one is there

    def __init__(self, system: System, kind: str, options: dict[str, Any]) -> None:
        self.turn = 0
        self.model = work.Model(self.model_rows(options))
        self.notes = dict[str, float]()
        self.made: Any = contents.made(system, kind, options)

    def model_rows(self, options: dict[str, Any]) -> int:
        """Return how many observations the model has that runs between two steps."""
        return 1

    def prepare(self, between: bool) -> None:
        """Do what comes before a step and is not timed: a model's work, where there is one."""
        if between:
            self.model()

    def step(self) -> None:
        """Do it once."""
        self.latest = self.made.sample()

    def close(self) -> None:
        """End it."""
        self.made.close()


class Sampled(Job):
    """Sampling, with an update of the priorities after each batch where there are any."""

    def __init__(
        self, kind: str, system: System, options: dict[str, Any], checked: int = CHECKED
    ) -> None:
        before = resident()
        super().__init__(system, kind, options)
        self.bytes = (resident() - before) / (self.made.count or options["count"])
        batch = options["batch"]
        length = options.get("length", 1)
        self.fresh = fresh_priorities(batch) if options.get("prioritized") else None
        for _ in range(checked):
            found = self.made.sample()
            work.check(self.made.rows(found), batch, length, options["count"])
            if self.fresh is not None:
                self.made.update(found, self.fresh[0])

    def model_rows(self, options: dict[str, Any]) -> int:
        return int(options["batch"])

    def step(self) -> None:
        super().step()
        if self.fresh is not None:
            self.turn += 1
            self.made.update(self.latest, self.fresh[self.turn % len(self.fresh)])


class Derived(Job):
    """Sampling, with what is derived."""

    def __init__(
        self,
        kind: str,
        check: Callable[[Rows, int, int], tuple[int, int]],
        system: System,
        options: dict[str, Any],
    ) -> None:
        super().__init__(system, kind, options)
        batch = options["batch"]
        count = options["count"]
        found = (self.made.rows(self.made.sample()) for _ in range(DERIVED_CHECKED))
        counts = np.array([check(rows, batch, count) for rows in found])
        share = float(counts[:, 1].sum() / max(1, counts[:, 0].sum()))
        self.notes = {"wrong_ends" if kind == "n_step" else "relabelled": round(share, 4)}
        if kind == "hindsight":
            assert abs(share - derived.RATIO) < 0.05, f"{share:.2f} of the goals are relabelled"


class Stepped(Job):
    """Steps of N environments, added one by one; with `beside`, a batch of 256 after each."""

    def __init__(self, system: System, options: dict[str, Any]) -> None:
        self.beside = options.pop("beside")
        super().__init__(system, "adding", options)
        num_envs = options["num_envs"]
        capacity = options["capacity"]
        self.steps = work.environment_steps(num_envs)
        for _ in range(2 * work.LONGEST):
            self.made.add(next(self.steps))
        held = self.made.held()
        given = min(2 * work.LONGEST * num_envs, capacity)
        most_open = work.LONGEST * num_envs  # a system may hold back the steps of open episodes
        assert given - most_open <= held <= 1.5 * capacity, f"holds {held} of {given} transitions"
        for _ in range(max(0, capacity // num_envs - 2 * work.LONGEST)):
            self.made.add(next(self.steps))

    def step(self) -> None:
        self.made.add(next(self.steps))
        if self.beside:
            super().step()


class Called(Job):
    """Steps of one environment, each added as a program has it after gymnasium's `step`."""

    def __init__(self, system: System, options: dict[str, Any]) -> None:
        super().__init__(system, "calls", options)
        self.calls = work.calls()
        capacity = options["capacity"]
        for _ in range(2 * capacity):
            self.prepare(False)
            self.step()
        held = self.made.held()
        assert 0.9 * capacity <= held <= 1.5 * capacity, f"holds {held} of {capacity} transitions"

    def prepare(self, between: bool) -> None:
        self.call = next(self.calls)
        super().prepare(between)

    def step(self) -> None:
        self.made.add_call(*self.call)


class Trajectories(Job):
    """Whole trajectories, added one by one."""

    def __init__(self, system: System, options: dict[str, Any]) -> None:
        super().__init__(system, "whole", options)
        self.rows = list(work.trajectories(64))
        for _ in range(2 * options["capacity"] // work.EPISODE):
            self.step()

    def step(self) -> None:
        self.turn += 1
        self.made.add(self.rows[self.turn % len(self.rows)])


class Leased(Job):
    """Groups of responses that a rollout worker commits, each under a lease of its prompt.

    A step is one commit. Leases are taken, and committed groups are consumed, between the steps.
    """

    GROUPS = 64  # of a rollout batch

    def __init__(self, system: System, options: dict[str, Any]) -> None:
        super().__init__(system, "leases", {"groups": self.GROUPS})
        self.leases: list[Any] = []
        self.group = group(as_lists=options["as_lists"])
        for _ in range(2 * self.GROUPS):
            self.prepare(False)
            self.step()
        self.made.check(self.group)

    def prepare(self, between: bool) -> None:
        if not self.leases:
            self.made.consume()
            self.leases = self.made.lease(self.GROUPS)
        super().prepare(between)

    def step(self) -> None:
        self.made.commit(self.leases.pop(), self.group)


def saved(system: System, options: dict[str, Any]) -> dict[str, Any]:
    """Save `count` transitions, and restore them into a buffer that holds few; return seconds and
    bytes.
    """
    asked = {"batch": 256, "count": options["count"], "prioritized": False}
    folder = Path(tempfile.mkdtemp(prefix="peers-", dir=options["folder"]))
    try:
        made = contents.made(system, "transitions", asked)
        begun = perf_counter_ns()
        made.save(folder)
        save_s = (perf_counter_ns() - begun) / 1e9
        made.close()
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        fresh = contents.made(system, "transitions", {**asked, "fill": 10 * work.EPISODE})
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


def written(system: System, options: dict[str, Any]) -> dict[str, Any]:
    """Write trajectories in the system's own format; return seconds, what makes the numbers
    included.
    """
    folder = _folder(system, options)
    folder.mkdir()
    begun = perf_counter_ns()
    system.own["write"](options["count"], folder)
    seconds = (perf_counter_ns() - begun) / 1e9
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return {"write_s": round(seconds, 4), "bytes": size}


def stored(system: System, options: dict[str, Any]) -> Sampled:
    """Open what was written."""
    return Sampled("stored", system, {**options, "folder": _folder(system, options)})


def larger(system: System, options: dict[str, Any]) -> Sampled:
    """Open what was written, none of it in the page cache, as a member of the system's control
    group.
    """
    # a page that is mapped stays; what the process holds and does not use would be free of charge
    resident()
    for path in _folder(system, options).rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file)
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    (_folder(system, {"folder": options.pop("group")}) / "cgroup.procs").write_text("0")
    kind = "read" if "read" in system.own else "stored"
    return Sampled(kind, system, {**options, "folder": _folder(system, options)}, checked=1)


def _folder(system: System, options: dict[str, Any]) -> Path:
    return Path(options["folder"], system.name)


def never_drawn(system: System, options: dict[str, Any]) -> dict[str, Any]:
    """Draw as many samples as there are items of equal priority; return the share that was never
    drawn.
    """
    asked = {name: options[name] for name in ("count", "batch")}
    made = contents.made(system, "numbered", asked)
    counts = np.zeros(options["count"], np.uint8)
    begun = time.monotonic()
    for done in range(0, options["count"], options["batch"]):
        numbers = made.rows(made.sample())["number"].reshape(-1)
        np.minimum(counts, 254, out=counts)
        np.add.at(counts, numbers, 1) if len(numbers) < 1000 else _count(counts, numbers)
        if time.monotonic() - begun > options["seconds"]:
            raise NotOfferedError(f"{done + options['batch']:,} draws in {options['seconds']} s")
    made.close()
    return {"never": float((counts == 0).mean()), "expected": float(np.exp(-1))}


def _count(counts: Array, numbers: Array) -> None:
    items, times = np.unique(numbers, return_counts=True)
    counts[items] = np.minimum(counts[items].astype(np.int64) + times, 255)


def block(job: Job, seconds: float, between: bool) -> dict[str, Any]:
    """Run steps for so long; return how many they were, and the median wall time of one, us.

    With `between`, a model runs before each of them, whose time does not count.
    """
    prepare = job.prepare
    step = job.step
    times: list[int] = []
    until = perf_counter_ns() + int(seconds * 1e9)
    while True:
        prepare(between)
        begun = perf_counter_ns()
        step()
        now = perf_counter_ns()
        times.append(now - begun)
        if now > until and (len(times) >= 3 or now - begun > 1e9):
            break
    return {"us": float(np.median(times)) / 1e3, "steps": len(times)}


class Kind(NamedTuple):
    """A kind of work: what a system must offer for it, and what makes a job or an answer of it.

    A job has `bytes`, `close()`, and `step()` for turns or a `block(seconds)` of its own.
    """

    offered: str
    make: Callable[[Any, dict[str, Any]], Any]


KINDS = {
    **{kind: Kind(kind, partial(Sampled, kind)) for kind in ("transitions", "windows", "frames")},
    "n_step": Kind("n_step", partial(Derived, "n_step", derived.check_returns)),
    "hindsight": Kind("hindsight", partial(Derived, "hindsight", derived.check_goals)),
    "adding": Kind("adding", Stepped),
    "calls": Kind("calls", Called),
    "whole": Kind("whole", Trajectories),
    "leases": Kind("leases", Leased),
    "rollouts": Kind("rollouts", RolloutJob),
    "saved": Kind("transitions", saved),
    "written": Kind("write", written),
    "stored": Kind("stored", stored),
    "larger": Kind("stored", larger),
    "never drawn": Kind("numbered", never_drawn),
}


class Child:
    """Carries out the orders of `run.py`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.job = None

    def answer(self, order: dict[str, Any]) -> dict[str, Any]:
        if order["do"] == "folder":  # of the package that is timed
            package = importlib.import_module(load(self._name).package)
            return {"folder": str(Path(package.__file__ or "").parent)}
        if order["do"] == "version":
            return {"version": load(self._name).version()}
        if order["do"] == "offers":
            return {"offers": load(self._name).offers(KINDS[order["kind"]].offered)}
        if order["do"] == "turn":
            own = [
                one for one in (self.job, getattr(self.job, "made", None)) if hasattr(one, "block")
            ]
            before = read_bytes()
            between = order.get("between", False)
            if own:
                model = {"model": self.job.model} if between else {}
                found = own[0].block(order["turn_s"], **order["options"], **model)
            else:
                found = block(self.job, order["turn_s"], between)
            return {**found, "read_bytes": (read_bytes() - before) / found.get("steps", 1)}
        if order["do"] == "exact":
            return dict(self.job.exact(**order["options"]))
        if order["do"] == "end":
            job, self.job = self.job, None
            if job is not None:
                job.close()
            return {}
        if order["do"] == "trainers":
            found: Any = Team(importlib.import_module(f"speed.{self._name}"), order["options"])
        else:
            kind = KINDS[order["do"]]
            system = load(self._name)
            if not system.offers(kind.offered):
                raise NotOfferedError
            found = kind.make(system, order["options"])
        if isinstance(found, dict):
            return found
        self.job = found
        return {"bytes": found.bytes, "notes": getattr(found, "notes", {})}


def main() -> None:
    """Answer orders on one core."""
    os.sched_setaffinity(0, {int(sys.argv[2])})
    carry_out(Child(sys.argv[1]).answer)


if __name__ == "__main__":
    main()
