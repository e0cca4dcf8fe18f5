"""Trainers that share a prioritized buffer: processes of one system, which a job starts, times and
checks.

A way of sharing is a file in `trainers/`, with a class `Shared` for the process that starts the
trainers, and a class `Trainer` for theirs. It runs in the environment of its system.
"""

from __future__ import annotations

import importlib
import math
import multiprocessing
import os
import traceback
from abc import ABC, abstractmethod
from time import perf_counter
from typing import Any

import numpy as np
from conformance.check import MOST_DEVIATION, deviation
from peers.interface import Array, Buffer, NotOfferedError, fresh_priorities

from speed import work

MOST = 4  # trainers
ITEMS = 1000  # of the table with known priorities
SHARES = 2.0 ** (np.arange(ITEMS) % 4)  # priorities, by number: four classes; alpha is 1
DRAWS = 25_600  # of all trainers together, from that table
LIMIT_S = 100  # of one order
LARGE = 1e4  # a priority that hides all others
Row = dict[str, Any]


class Shared:
    """What trainers share, in the process that starts them; made for so many trainers and
    transitions.

    `given` goes to each of them, pickled.
    """

    given: Any = None

    def join(self) -> None:
        """Take part in what the trainers do at their start."""

    def close(self) -> None:
        """End it, after the trainers."""


class Trainer(ABC):
    """One trainer."""

    @abstractmethod
    def open(self, is_timed: bool, trainers: int, batch: int) -> Buffer:
        """Return what this trainer takes batches of; the first `trainers` of all call it at once.

        Args:
            is_timed: The transitions, alpha 0.6; else ITEMS numbers with the priorities SHARES,
                alpha 1.
            batch: Samples of one trainer.
        """

    def close(self) -> None:  # noqa: B027  (most need none)
        """End it."""


class _Member:
    """Carries out orders in a trainer's process; a buffer goes by what it was opened with."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._opened: dict[Any, Buffer] = {}
        self._last: Any = None

    def open(self, key: Any, count: int) -> None:
        made = self._opened[key] = self._trainer.open(*key)
        if key[0]:
            for _ in range(3):
                found = made.sample()
                work.check(made.rows(found), key[2], 1, count)
                made.update(found, fresh_priorities(key[2], 1)[0])

    def run(self, key: Any, steps: int) -> tuple[float, float]:
        made = self._opened[key]
        fresh = fresh_priorities(key[2])
        begun = perf_counter()
        for step in range(steps):
            made.update(made.sample(), fresh[step % len(fresh)])
        return begun, perf_counter()

    def draw(self, key: Any, batches: int) -> Array:
        made = self._opened[key]
        counts = np.zeros(ITEMS, np.int64)
        for _ in range(batches):
            self._last = made.sample()
            counts += np.bincount(made.rows(self._last)["number"].reshape(-1), minlength=ITEMS)
        return counts

    def enlarge(self, key: Any) -> None:
        self._opened[key].update(self._last, np.full(key[2], LARGE, np.float32))

    def close(self) -> None:
        self._trainer.close()


def _serve(name: str, rank: int, processes: int, given: Any, pipe: Any) -> None:
    member = _Member(importlib.import_module(name).Trainer(rank, processes, given))
    while True:
        order, *arguments = pipe.recv()
        try:
            pipe.send((None, getattr(member, order)(*arguments)))
        except Exception as error:
            traceback.print_exc()
            kind = "" if isinstance(error, NotOfferedError) else f"{type(error).__name__}: "
            pipe.send((f"{kind}{error}", None))
        if order == "close":
            return


class Team:
    """MOST trainers of one way; a turn is that of the first ones of them."""

    bytes = 0

    def __init__(self, module: Any, options: Row) -> None:
        os.sched_setaffinity(0, range(os.cpu_count() or 1))  # all systems use all cores here
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([module.__name__])
        self._count = options["count"]
        self._shared: Shared = module.Shared(MOST, self._count)
        self._steps: dict[Any, int] = {}
        self._pipes = []
        self._members = []
        for rank in range(MOST):
            pipe, theirs = context.Pipe()
            arguments = (module.__name__, rank, MOST, self._shared.given, theirs)
            self._members.append(context.Process(target=_serve, args=arguments, daemon=True))
            self._members[-1].start()
            theirs.close()
            self._pipes.append(pipe)
        self._shared.join()

    def _all(self, count: int, order: str, *arguments: Any) -> list[Any]:
        """Have the first trainers do something at once; return what each returns."""
        for pipe in self._pipes[:count]:
            pipe.send((order, *arguments))
        if not all(pipe.poll(LIMIT_S) for pipe in self._pipes[:count]):
            for member in self._members:
                member.kill()
            raise NotOfferedError(f"trainers took over {LIMIT_S} s")
        answers = [pipe.recv() for pipe in self._pipes[:count]]
        errors = [error for error, _ in answers if error]
        if errors:
            raise NotOfferedError(errors[0])
        return [answer for _, answer in answers]

    def block(self, seconds: float, trainers: int, batch: int) -> Row:
        """Take batches and update their priorities for so long; each trainer does as many as the
        others.
        """
        key = (True, trainers, batch)
        if key not in self._steps:
            self._all(trainers, "open", key, self._count)
            self._steps[key] = max(3, int(10 * seconds / self._time(key, 10)))
        return {"batches_s": trainers * self._steps[key] / self._time(key, self._steps[key])}

    def _time(self, key: Any, steps: int) -> float:
        times = self._all(key[1], "run", key, steps)
        return float(max(end for _, end in times) - min(begun for begun, _ in times))

    def exact(self, trainers: int, batch: int) -> Row:
        """Compare the draws of all trainers with the priorities, then look for the updates of the
        first one.

        Returns:
            Deviation of the chi-square statistic in standard deviations, its p value, and the share
            of the items with a new, LARGE priority in the next batch of the others, at least.
        """
        key = (False, trainers, batch)
        self._all(trainers, "open", key, self._count)
        counts = np.sum(self._all(trainers, "draw", key, DRAWS // batch // trainers), axis=0)
        found = deviation(counts, SHARES)
        taken = self._all(trainers, "draw", key, 1)
        self._all(1, "enlarge", key)
        after = self._all(trainers, "draw", key, 1)
        seen = [float(counts[taken[0] > 0].sum() / counts.sum()) for counts in after[1:]]
        p = math.erfc(found / 2**0.5) / 2
        return {"deviation": found, "p": p, "exact": found < MOST_DEVIATION, "seen": min(seen)}

    def close(self) -> None:
        """End the trainers."""
        for pipe in self._pipes:
            pipe.send(("close",))
        for member in self._members:
            member.join(20)
            if member.is_alive():
                member.kill()
        self._shared.close()
