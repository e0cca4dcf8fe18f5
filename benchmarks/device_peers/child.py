"""A system's process: makes its table, its calls in their forms, and times them by order.

python -m device_peers.child MODULE
"""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from dataclasses import asdict
from time import perf_counter
from typing import Any

import numpy as np
from conformance.check import MOST_DEVIATION, deviation
from peers.interface import Array, NotOfferedError
from peers.orders import carry_out
from speed import work as contents

from device_peers.interface import (
    ADD,
    ADD_AND_SAMPLE,
    ALL,
    ALPHA,
    EPOCHS,
    NUM_MINIBATCHES,
    SAMPLE,
    UPDATE,
    Call,
    Case,
    Table,
    numbers,
    wrong_rows,
)

HIGH = 8.0  # a priority that is looked for; new items have 1
MOST_DRAWS = 1 << 18  # that look for updated priorities
DRAWS_OF_AN_ITEM = 8  # on average, where draws are compared with masses
REPEATS = "a second call adds the rows of the first again"
LOST = "a second call writes over what the first one added"
SAME = "a second call draws the batch of the first again"


class Child:
    """Carries out the orders of `gpu_peers.py`."""

    def __init__(self, name: str) -> None:
        self.module = importlib.import_module(f"device_peers.{name}")
        self.table: Table | None = None
        self.case: Case | None = None
        self._calls: dict[tuple[str, str], Call] = {}
        self._compiler = ""
        self._next_number = 0

    def answer(self, order: dict[str, Any]) -> dict[str, Any]:
        """Carry out an order."""
        do = order.pop("do")
        if do == "version":
            return {"version": self._versions()}
        if do == "make":
            return self._make(**order)
        if do == "prepare":
            return self._prepare(**order)
        if do == "turn":
            return self._turn(**order)
        if do == "exact":
            return self._exact()
        raise ValueError(do)

    def _versions(self) -> str:
        """Name the versions of the system and of what it runs on."""
        package = self.module.PACKAGE
        found = [f"{package} {importlib.metadata.version(package)}"]
        found += [
            f"{base} {sys.modules[base].__version__}"
            for base in ("torch", "jax")
            if base in sys.modules and base != package
        ]
        return ", ".join(found)

    def _make(self, case: dict[str, Any], compiler: str) -> dict[str, Any]:
        """Fill a table; the one before is freed first."""
        if self.table is not None:
            self.table.close()
        self._calls.clear()
        self.table = None
        self.case = Case(**case)
        self._compiler = compiler
        self._next_number = self.case.items + self.case.added  # the first ones are given already
        self.table = self.module.make(self.case, compiler)
        return {"note": self.table.note}

    def _made(self) -> tuple[Table, Case]:
        if self.table is None or self.case is None:
            raise NotOfferedError
        return self.table, self.case

    def _prepare(self, form: str, work: str) -> dict[str, Any]:
        """Make a call, check what it does, and count what the host waits for."""
        table, _ = self._made()
        call = table.made(form, work)
        breaks = table.graph_breaks() if "compiled" in form else None
        problem = self._problem(work, call)
        self._calls[form, work] = call
        waits = table.host_waits(call)
        return {"wrong": problem, "host_waits": waits, "graph_breaks": breaks}

    def _problem(self, work: str, call: Call) -> str:
        """Return what is wrong with the results of a call, "" if nothing is."""
        problems = []
        if work in (ADD, ADD_AND_SAMPLE, ALL):
            problems.append(self._wrong_adds(call))
        if work in (SAMPLE, ADD_AND_SAMPLE, ALL, EPOCHS):
            problems.append(self._wrong_samples(call))
        if work in (UPDATE, ALL):
            problems.append(self._wrong_updates(work, call))
        return "; ".join(filter(None, problems))

    def _wrong_adds(self, call: Call) -> str:
        """Add twice, other transitions each time, and look for all of them in the table."""
        table, case = self._made()
        added = []
        for _ in range(2):
            fresh = np.arange(self._next_number, self._next_number + case.added)
            self._next_number += case.added
            table.offer(contents.transitions(fresh))
            call()
            added.append(fresh)
        stored = table.stored()
        has_first, has_second = (np.isin(fresh, stored).all() for fresh in added)
        if not has_second:
            return REPEATS
        return "" if has_first or case.rollout else LOST  # a roll-out replaces the one before

    def _wrong_samples(self, call: Call) -> str:
        """Draw twice; rows must be whole, and the batches differ."""
        table, case = self._made()
        drawn = []
        for _ in range(2):
            call()
            batch = table.batch()
            wrong = wrong_rows(case, batch)
            if wrong:
                return wrong
            drawn.append(numbers(batch))
        return SAME if np.array_equal(*drawn) else ""

    def _wrong_updates(self, work: str, call: Call) -> str:
        """Give a batch a high priority, and look for its items in later draws."""
        table, case = self._made()
        sample = table.made(table.plain, SAMPLE)
        table.report(np.full(case.batch, HIGH, np.float32))
        if work == UPDATE:
            sample()
        call()
        table.wait()
        high = np.unique(numbers(table.batch()))
        count = min(MOST_DRAWS, 64 * case.items) // case.batch + 1
        hits = 0
        for _ in range(count):
            sample()
            hits += int(np.isin(numbers(table.batch()), high).sum())
        table.report(1 - np.random.default_rng(1).random(case.batch, np.float32))
        mass = len(high) * HIGH**ALPHA
        with_it = count * case.batch * mass / (mass + case.items - len(high))
        without = count * case.batch * len(high) / case.items
        return "" if hits > (with_it + without) / 2 else "updated priorities change no draws"

    def _turn(self, form: str, work: str, block_s: float) -> dict[str, Any]:
        """Time calls for about so long; return us of one, and what the host needs to queue it."""
        table, _ = self._made()
        call = self._calls[form, work]
        one = block(table, call, 1)[0]
        count = int(min(2000, max(3, block_s / max(one, 1e-7))))
        if "sample" in work:
            count = -(-count // table.period) * table.period
        taken, queued = block(table, call, count)
        return {"us": taken / count * 1e6, "host_us": queued / count * 1e6, "calls": count}

    def _exact(self) -> dict[str, Any]:
        """Compare draws of a fresh table with the exact share of each item, after updates with
        known priorities.
        """
        self._make(asdict(self._made()[1]), self._compiler)
        table, case = self._made()
        if case.rollout:
            return self._each_once()
        sample = table.made(table.plain, SAMPLE)
        masses = np.ones(case.items)
        if case.prioritized:
            update = table.made(table.plain, UPDATE)
            for _ in range(case.items // case.batch + 1):
                sample()
                number = numbers(table.batch())
                priorities = (2.0 ** (number % 4)).astype(np.float32)
                table.report(priorities)
                update()
                masses[number] = priorities.astype(np.float64) ** ALPHA
        rounds = DRAWS_OF_AN_ITEM * case.items // case.batch
        if table.is_permutation:
            rounds = DRAWS_OF_AN_ITEM * table.period
        drawn: list[Array] = []
        for _ in range(rounds):
            sample()
            drawn.append(numbers(table.batch()))
        counts = np.bincount(np.concatenate(drawn), minlength=case.items)
        if table.is_permutation:
            often = counts[counts > 0]
            is_even = bool((often == DRAWS_OF_AN_ITEM).all())
            return {"draws": int(counts.sum()), "exact": is_even, "each_once": is_even}
        found = deviation(counts, masses)
        return {
            "draws": int(counts.sum()),
            "deviation": round(found, 2),
            "exact": bool(found < MOST_DEVIATION),
        }

    def _each_once(self) -> dict[str, Any]:
        """Look for each item of a roll-out once in every epoch, with its own columns."""
        table, case = self._made()
        drawn: list[Array] = []
        is_whole = True
        for _ in table.minibatches():
            batch = table.batch()
            is_whole = is_whole and not wrong_rows(case, batch)
            drawn.append(numbers(batch))
        epochs = [
            np.sort(np.concatenate(drawn[first : first + NUM_MINIBATCHES]))
            for first in range(0, len(drawn), NUM_MINIBATCHES)
        ]
        has_all = all(np.array_equal(epoch, np.arange(case.items)) for epoch in epochs)
        found = {"draws": case.batch * len(drawn), "each_once": has_all}
        # Of a shuffle in each epoch; the same minibatches again are a permutation, too.
        found["shuffles_each_epoch"] = not np.array_equal(drawn[0], drawn[NUM_MINIBATCHES])
        return {**found, "exact": has_all and is_whole}


def block(table: Table, call: Call, count: int) -> tuple[float, float]:
    """Return the seconds of so many calls, and those until the last one was queued."""
    table.wait()
    begin_s = perf_counter()
    for _ in range(count):
        call()
    queued_s = perf_counter() - begin_s
    table.wait()
    return perf_counter() - begin_s, queued_s


def main() -> None:
    """Answer orders."""
    carry_out(Child(sys.argv[1]).answer)


if __name__ == "__main__":
    main()
