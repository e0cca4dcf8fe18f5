"""What the processes of `ingest.py` do: writers that add or step, memcpy beside them, and simulators."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import multiprocessing
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import support  # noqa: F401  # puts the checkout first
import numpy as np
import torch

from deepspeed_gear import Column, InferenceClient, InferenceLoader, Replay, Schema, TrajectoryWriter
from deepspeed_gear.store.shared_memory import living

STEPS_SCHEMA = [
    Column("observation", "float32", (11,), "observation"),
    Column("action", "float32", (3,), "action"),
    Column("reward", "float32", (), "reward"),
    Column("done", "bool", (), "terminated"),
]
W1 = Schema(STEPS_SCHEMA)
W2 = Schema([STEPS_SCHEMA[0], Column("next_observation", "float32", (11,)), *STEPS_SCHEMA[1:]])
POLICY_SCHEMA = Schema(
    [
        Column("observation", "float32", (17,), "observation", "T+1"),
        Column("action", "float32", (6,), "action"),
        Column("reward", "float32", (), "reward"),
        Column("terminated", "bool", (), "terminated"),
        Column("truncated", "bool", (), "truncated"),
    ]
)
EPISODE = 200  # steps of a simulator
STORE_STEPS = 2_000_000  # of W1: what memcpy writes to is as large
PREFIX = "gearbench"  # of the store's file
_BLOCK_S = 0.05
_KINDS = 4  # different trajectories, so that a source is not always in the cache of the last one


def section(schema_steps: int, length: int, **options: Any) -> dict[str, Any]:
    """Return the section of a table that lets the oldest go, for two writers."""
    table = {"capacity_steps": schema_steps, "writers": 4, "remove": "fifo", "max_length": length}
    return {
        "tables": {"main": table},
        "sampler": {"kind": "uniform", "unit": "step"},
        "fields": {"observation": {"offset": -19, "length": 20}},
        "shared_memory": {"prefix": PREFIX},
        **options,
    }


def trajectory(schema: Schema, steps: int, seed: int) -> dict[str, np.ndarray]:
    """Return a trajectory of random values."""
    random = np.random.default_rng(seed)
    found = {}
    for column in schema:
        values = random.standard_normal((steps, *column.shape), np.float32)
        found[column.name] = values.astype(column.numpy_dtype) if column.dtype == "float32" else values > 9
    return found


class Memcpy:
    """Copies of so many bytes, one after the other, into memory as large as a store."""

    def __init__(self, num_bytes: int) -> None:
        self._bytes = num_bytes
        self._ring = np.ones(max(STORE_STEPS * W1.row_bytes, num_bytes), np.uint8)  # every page is there
        self._sources = [np.full(num_bytes, seed, np.uint8) for seed in range(_KINDS)]
        self._slots, self._turn = len(self._ring) // num_bytes, 0
        self._base = self._ring.ctypes.data
        self._addresses = [source.ctypes.data for source in self._sources]

    def __call__(self) -> None:
        """Copy once."""
        at = self._base + self._turn % self._slots * self._bytes
        ctypes.memmove(at, self._addresses[self._turn % _KINDS], self._bytes)
        self._turn += 1


def rate_of(action: Callable[[], None], seconds: float = _BLOCK_S) -> float:
    """Return how often an action was done per second."""
    begin, count = time.perf_counter(), 0
    while True:
        for _ in range(8):
            action()
        count += 8
        spent = time.perf_counter() - begin
        if spent >= seconds:
            return count / spent


def adds(writer: TrajectoryWriter, steps: int, blocks: int) -> dict[str, float]:
    """Add whole trajectories, in turns with memcpy of as many bytes."""
    trajectories = [trajectory(W1, steps, seed) for seed in range(_KINDS)]
    num_bytes = sum(rows.nbytes for rows in trajectories[0].values())
    copy, turn = Memcpy(num_bytes), [0]

    def add() -> None:
        writer.add(trajectories[turn[0] % _KINDS])
        turn[0] += 1

    for action in (add, copy):
        rate_of(action, 0.5)
    pairs = [(rate_of(add), rate_of(copy)) for _ in range(blocks)]
    rates = np.array(pairs)
    ratio = float(np.median(rates[:, 0] / rates[:, 1]))
    gear, limit = np.median(rates, axis=0).tolist()
    return {"bytes": num_bytes, "adds_per_s": gear, "memcpys_per_s": limit, "ratio": ratio}


def steps(writer: TrajectoryWriter, num_envs: int, blocks: int, publish: bool = False) -> dict[str, float]:
    """Take steps of many environments at once, of W2's columns, with episodes of 1,000 steps."""
    vector, turn = writer.vector_writer(num_envs, "same_step"), [0]
    rows = [trajectory(W2, num_envs, seed) for seed in range(_KINDS)]
    none = np.zeros(num_envs, bool)
    ends = np.ones(num_envs, bool)
    vector.reset(observation=rows[0]["observation"])

    def step() -> None:
        turn[0] += 1
        given, is_last = rows[turn[0] % _KINDS], turn[0] % 1000 == 0
        given["done"] = ends if is_last else none
        final = {"observation": given["observation"]} if is_last else None
        vector.step(final=final, publish=publish, **given)

    rate_of(step, 0.5)
    return {"steps_per_s": num_envs * float(np.median([rate_of(step) for _ in range(blocks)]))}


def loop(writer: TrajectoryWriter, num_steps: int, seconds: float) -> dict[str, float]:
    """Add at full speed for some seconds."""
    trajectories, turn = [trajectory(W1, num_steps, seed) for seed in range(_KINDS)], [0]

    def add() -> None:
        writer.add(trajectories[turn[0] % _KINDS])
        turn[0] += 1

    return {"adds_per_s": rate_of(add, seconds)}


def peers(num_envs: int) -> dict[str, float]:
    """Return steps per second of other projects' buffers, those that are installed."""
    if importlib.util.find_spec("cpprb") is None:
        return {}
    from cpprb import ReplayBuffer

    shapes = {c.name: {"shape": c.shape or 1, "dtype": c.numpy_dtype} for c in W2}
    buffer = ReplayBuffer(200_000, shapes)
    rows, turn = [trajectory(W2, num_envs, seed) for seed in range(_KINDS)], [0]

    def step() -> None:
        turn[0] += 1
        buffer.add(**rows[turn[0] % _KINDS])

    rate_of(step, 0.5)
    return {"cpprb steps_per_s": num_envs * float(np.median([rate_of(step) for _ in range(20)]))}


ROLES: dict[str, Callable[..., dict[str, float]]] = {"adds": adds, "steps": steps, "loop": loop}


def simulate(config: dict[str, Any], num_envs: int, rounds: int, results: Any) -> None:
    """Run environments that cost nothing; put seconds per round, and of each wait for actions.

    Args:
        config: Of the run.
        num_envs: N.
        rounds: Steps of each environment that are measured; a quarter of them go before.
        results: Queue that gets the two.
    """
    observation, reward = np.zeros((num_envs, 17), np.float32), np.ones(num_envs, np.float32)
    going, ends, waits = np.zeros(num_envs, bool), np.ones(num_envs, bool), []
    with (
        TrajectoryWriter.attach(config) as writer,
        InferenceClient(writer, num_envs, "next_step") as simulators,
    ):
        simulators.reset(observation=observation)
        for i in range(rounds + rounds // 4):
            if i == rounds // 4:
                begun = time.perf_counter()
            asked = time.perf_counter()
            observation[:, 0] = simulators.act()["action"][:, 0]
            waits.append(time.perf_counter() - asked)
            truncated = ends if i % EPISODE == EPISODE - 1 else going
            simulators.step(observation=observation, reward=reward, terminated=going, truncated=truncated)
        results.put(((time.perf_counter() - begun) / rounds, waits[rounds // 4 :]))


def actions(num_envs: int, rounds: int) -> dict[str, float]:
    """Measure a closed loop: one process of simulators, one of a policy that only multiplies.

    Returns:
        Actions per second, the time of a round, and of the wait from `act` to its answer, in microseconds.
    """
    table = {"capacity_steps": 100_000, "writers": 4, "remove": "fifo"}
    config = {
        "shared_memory": {"prefix": PREFIX},
        "tables": {"main": table},
        "sampler": {"kind": "uniform", "unit": "step"},
        "fields": {"observation": {}, "action": {}},
        "batch_size": 8,
    }
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with (
        Replay(config, schemas={"main": POLICY_SCHEMA}) as replay,
        InferenceLoader(replay, num_envs, timeout=0.1) as loader,
    ):
        process = context.Process(target=simulate, args=(config, num_envs, rounds, results), daemon=True)
        process.start()
        weights = torch.full((17, 6), 0.01)
        for request in loader:
            if request:
                request.reply(action=request["observation"] @ weights)
            elif not results.empty() or not process.is_alive():
                break
        seconds, waits = results.get(timeout=10)
        process.join()
    return {
        "simulators": num_envs,
        "actions_per_s": num_envs / seconds,
        "round_us": seconds * 1e6,
        "wait_us_median": float(np.median(waits)) * 1e6,
        "wait_us_p95": float(np.percentile(waits, 95)) * 1e6,
    }


class Process:
    """A role in a process of its own, pinned to a core."""

    def __init__(self, role: str, *arguments: Any, core: int) -> None:
        call = json.dumps([role, core, arguments])
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), call], stdout=subprocess.PIPE, text=True
        )

    def result(self) -> dict[str, float]:
        """Wait for its result."""
        out, _ = self._process.communicate(timeout=120)
        if self._process.returncode:
            raise RuntimeError(f"a process of ingest.py ended with {self._process.returncode}")
        found: dict[str, float] = json.loads(out.splitlines()[-1])
        return found


def _work(call: str) -> None:
    import os

    role, core, arguments = json.loads(call)
    os.sched_setaffinity(0, {core})
    if role in ROLES:
        (store,) = living(PREFIX)  # of the process that has started this one
        with TrajectoryWriter.attach(name=store.name) as writer:
            found = ROLES[role](writer, *arguments)
    else:
        found = peers(*arguments)
    print(json.dumps(found))


if __name__ == "__main__":
    _work(sys.argv[1])
