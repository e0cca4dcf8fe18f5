"""CPU time of a step that is added: of one environment or many, published or not, beside other buffers.

    python benchmarks/adding.py --json F [--quick]

One process and one thread, which adds and, in the last rows, samples in turns. Episodes have 20 or 200 steps,
those of different environments end at different times, and environments reset in the step after the last one.
The peers are a ring of NumPy arrays, as CleanRL and Stable-Baselines3 have one, and cpprb where it is
installed. The performance pages say what the columns mean.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
import torch
from support.report import Disturbance, document, print_table, write_json

from deepspeed_gear import Column, Replay, Schema, TransitionBuffer

LONGEST = 200  # steps of an episode
BATCH = 256
BLOCKS, BLOCK_STEPS = 30, 200
SMALL, WIDE = 4, 376  # elements of an observation
BOUNDS_US = {1: 8.0, 8: 8.0, 64: 15.0}  # of a step with small observations, by environments
FRAME_BOUND_US = 25.0
Row = dict[str, Any]


def schema_of(observation: tuple[int, ...], dtype: str) -> Schema:
    """Return the columns of transitions of one environment."""
    return Schema(
        [
            Column("observation", dtype, observation, "observation", "T+1"),
            Column("action", "float32", (1,), "action"),
            Column("reward", "float32", (), "reward"),
            Column("terminated", "bool", (), "terminated"),
            Column("truncated", "bool", (), "truncated"),
        ]
    )


class Steps:
    """What environments give, step by step; arrays are used again, as environments do."""

    def __init__(self, num_envs: int, observation: tuple[int, ...], dtype: str, length: int) -> None:
        random, self.num_envs, self.at = np.random.default_rng(0), num_envs, 0
        self.observations = [
            random.integers(0, 255, (num_envs, *observation)).astype(dtype) for _ in range(5)
        ]
        self.action = random.random((num_envs, 1), np.float32)
        self.reward = np.ones(num_envs)  # float64, as gymnasium's
        self.no = np.zeros(num_envs, bool)
        begun = random.integers(0, length, num_envs)
        self._truncated = [(begun + step) % length == 0 for step in range(length)]

    def next(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the observation before the step, the one after it, and which episodes are truncated."""
        self.at += 1
        before, after = (self.observations[n % 5] for n in (self.at - 1, self.at))
        return before, after, self._truncated[self.at % len(self._truncated)]


class NumpyRing:
    """The ring of CleanRL and Stable-Baselines3: arrays [capacity / N, N, ...]."""

    def __init__(self, steps: Steps, capacity: int) -> None:
        self._steps, self._size, self._at = steps, capacity // steps.num_envs, 0
        shapes = [
            steps.observations[0],
            steps.observations[0],
            steps.action,
            steps.reward,
            steps.no,
            steps.no,
        ]
        self._rings = [np.zeros((self._size, *rows.shape), rows.dtype) for rows in shapes]

    def step(self) -> None:
        before, after, truncated = self._steps.next()
        rows = before, after, self._steps.action, self._steps.reward, self._steps.no, truncated
        for ring, given in zip(self._rings, rows, strict=True):
            ring[self._at] = np.array(given)
        self._at = (self._at + 1) % self._size

    def sample(self) -> None:
        rows = np.random.randint(0, self._at, BATCH), np.random.randint(0, self._steps.num_envs, BATCH)
        for ring in self._rings:
            torch.as_tensor(ring[rows])


class Transitions:
    """gear's TransitionBuffer, which takes what the NumPy ring takes; each step can be sampled at once."""

    def __init__(self, steps: Steps, capacity: int) -> None:
        from gymnasium.spaces import Box

        rows = steps.observations[0]
        space = Box(0, 255, rows.shape[1:], rows.dtype.type)
        action = Box(0, 1, (1,), np.float32)
        self._steps = steps
        self._buffer = TransitionBuffer(
            capacity, space, action, n_envs=steps.num_envs, batch_size=BATCH, autoreset="next_step"
        )

    def step(self) -> None:
        before, after, truncated = self._steps.next()
        self._buffer.add(before, after, self._steps.action, self._steps.reward, self._steps.no, truncated)

    def sample(self) -> None:
        self._buffer.sample()

    def close(self) -> None:
        self._buffer.close()


class Cpprb:
    """cpprb's ReplayBuffer."""

    def __init__(self, steps: Steps, capacity: int) -> None:
        from cpprb import ReplayBuffer

        self._steps = steps
        rows = {"obs": steps.observations[0], "next_obs": steps.observations[0], "act": steps.action,
                "rew": steps.reward, "done": steps.no}  # fmt: skip
        shapes = {name: {"shape": x.shape[1:] or 1, "dtype": x.dtype} for name, x in rows.items()}
        self._buffer = ReplayBuffer(capacity, shapes)

    def step(self) -> None:
        before, after, truncated = self._steps.next()
        self._buffer.add(
            obs=before, next_obs=after, act=self._steps.action, rew=self._steps.reward, done=truncated
        )

    def sample(self) -> None:
        for rows in self._buffer.sample(BATCH).values():
            torch.as_tensor(rows)


class Gear:
    """A Replay, written to by a VectorWriter.

    Args:
        steps: What is added.
        capacity: Steps that the table holds.
        publish: Whether each step can be sampled at once.
        sampler: "prioritized", "uniform", or None where nothing samples.
    """

    def __init__(self, steps: Steps, capacity: int, publish: bool, sampler: str | None) -> None:
        self._steps, self._publish, self.sampler = steps, publish, sampler
        rows, room = steps.observations[0], capacity + LONGEST * steps.num_envs
        self.replay = Replay(
            {
                "batch_size": BATCH,
                "sampler": {"kind": sampler or "uniform", "unit": "step"},
                "tables": {"main": {"capacity_steps": room, "max_length": LONGEST, "remove": "fifo"}},
                "fields": {"observation": {"length": 2}, "action": {}, "reward": {}, "terminated": {}},
            },
            schemas={"main": schema_of(rows.shape[1:], rows.dtype.name)},
        )
        self._writer = self.replay.writer().vector_writer(steps.num_envs, "next_step")
        self._writer.reset(observation=steps.observations[0])
        self._priorities = torch.rand(BATCH)

    def step(self) -> None:
        _, after, truncated = self._steps.next()
        self._writer.step(
            publish=self._publish,
            observation=after,
            action=self._steps.action,
            reward=self._steps.reward,
            terminated=self._steps.no,
            truncated=truncated,
        )

    def sample(self) -> None:
        batch = self.replay.sample()
        if self.sampler == "prioritized":
            self.replay.update_priorities(batch, self._priorities)

    def close(self) -> None:
        self.replay.close()


def micros(action: Callable[[], None], count: int) -> float:
    """Return the CPU time of a call, us."""
    begun = process_time()
    for _ in range(count):
        action()
    return (process_time() - begun) / count * 1e6


def adds(case: str, steps: Callable[[], Steps], capacity: int, blocks: int, count: int) -> Iterator[Row]:
    """Measure every system in turns; a row of each, its ratio to the NumPy ring that of the same turns."""
    warm = min(2 * LONGEST, 2 * count) if blocks < BLOCKS else 2 * capacity // steps().num_envs
    systems: dict[str, Any] = {"numpy ring": NumpyRing(steps(), capacity)}
    if find_spec("cpprb") is not None:
        systems["cpprb"] = Cpprb(steps(), capacity)
    systems["gear"] = Gear(steps(), capacity, False, None)
    systems["gear, published"] = Gear(steps(), capacity, True, None)
    if find_spec("gymnasium") is not None:
        systems["gear, TransitionBuffer"] = Transitions(steps(), capacity)
    try:
        for system in systems.values():
            micros(system.step, warm)
        times = np.array([[micros(s.step, count) for s in systems.values()] for _ in range(blocks)])
    finally:
        for name, system in systems.items():
            if name.startswith("gear"):
                system.close()
    num_envs, elements = steps().num_envs, int(np.prod(steps().observations[0].shape[1:]))
    for name, column in zip(systems, times.T, strict=True):
        us = float(np.median(column))
        ratio = float(np.median(column / times[:, 0]))
        row = {"case": case, "system": name, "step_us": us, "x_ring": ratio}
        row["steps_per_s"] = num_envs / us * 1e6
        bound = {SMALL: BOUNDS_US[num_envs], WIDE: None}.get(elements, FRAME_BOUND_US)
        bound = bound if name.startswith("gear") else None
        yield row if bound is None else {**row, "bound": bound, "holds": us <= bound}


def beside(num_envs: int, blocks: int, count: int) -> Iterator[Row]:
    """Measure steps and batches of one process that does both in turns, as an off-policy algorithm does."""
    made: dict[str, tuple[str, Callable[[], Any]]] = {}
    for sampler in ("uniform", "prioritized"):
        case = f"{num_envs} environments and {sampler} batches of {BATCH}"
        if sampler == "uniform":
            made["numpy ring"] = case, lambda: NumpyRing(_few(num_envs), 100_000)
            if find_spec("cpprb") is not None:
                made["cpprb"] = case, lambda: Cpprb(_few(num_envs), 100_000)
            if find_spec("gymnasium") is not None:
                made["gear, TransitionBuffer"] = case, lambda: Transitions(_few(num_envs), 100_000)
        for publish in (False, True):
            name = f"gear{', published' * publish}, {sampler}"
            made[name] = case, lambda p=publish, s=sampler: Gear(_few(num_envs), 100_000, p, s)
    for name, (case, make) in made.items():
        system = make()
        try:
            micros(system.step, 20 * LONGEST)
            micros(system.sample, 50)
            step, sample = [], []
            for _ in range(blocks * count // 10):
                step.append(micros(system.step, 1))
                sample.append(micros(system.sample, 1))
        finally:
            if name.startswith("gear"):
                system.close()
        yield {
            "case": case,
            "system": name,
            "step_us": float(np.median(step)),
            "sample_us": float(np.median(sample)),
        }


def _few(num_envs: int) -> Steps:
    return Steps(num_envs, (SMALL,), "float32", LONGEST)


def run(quick: bool) -> list[Row]:
    """Return all rows."""
    blocks, count = (2, 20) if quick else (BLOCKS, BLOCK_STEPS)
    rows: list[Row] = []
    for num_envs in (1, 8, 64):
        for elements, length in ((SMALL, 20), (SMALL, 200), (WIDE, 20), (WIDE, 200)):
            case = f"{num_envs} environments, observation float32[{elements}], episodes of {length}"
            make = partial(Steps, num_envs, (elements,), "float32", length)
            rows += adds(case, make, 100_000 if elements == SMALL else 20_000, blocks, count)
            print(f"adding: {case}", file=sys.stderr, flush=True)
    frames = partial(Steps, 1, (84, 84), "uint8", LONGEST)
    rows += adds("1 environment, frame uint8[84, 84]", frames, 20_000, blocks, count)
    rows += beside(1, blocks, count)
    return rows


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that it runs")
    options = parser.parse_args()
    disturbance = Disturbance()
    rows = run(options.quick)
    columns = ("case", "system", "step_us", "x_ring", "steps_per_s", "sample_us", "bound", "holds")
    print_table(columns, [[row.get(column) for column in columns] for row in rows])
    if options.json is not None:
        write_json(options.json, document(disturbance, rows))


if __name__ == "__main__":
    main()
