"""How fast trajectories come in, against memcpy of as many bytes, and what that costs who samples.

    python benchmarks/ingest.py --json F [--quick] [--parts add ...]

One core per process: writers are actors that attach to the store of this process. The performance
pages say what the columns mean.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any

import numpy as np
import torch
from support.report import Report, Row, judge
from support.turns import median_us
from support.workloads import workload

from deepspeed_gear import (
    Column,
    InferenceClient,
    InferenceLoader,
    Replay,
    Schema,
    TrajectoryWriter,
)
from deepspeed_gear.store.records import Control
from deepspeed_gear.store.shared_memory import living

W1 = workload("W1").schema
POLICY_SCHEMA = Schema(
    [
        Column("observation", "float32", (17,), "observation", "T+1"),
        Column("action", "float32", (6,), "action"),
        Column("reward", "float32", (), "reward"),
        Column("terminated", "bool", (), "terminated"),
        Column("truncated", "bool", (), "truncated"),
    ]
)
# steps: 1.2 MB and 61 kB
BIG = 20_000
SMALL = 1_000
BOUNDS = {BIG: 0.6, SMALL: 0.25}
MOST_SLOWER = 1.3
LEAST_ACTIONS = 50_000.0
MOST_ROUND_TRIP_US = 100.0
EPISODE = 200  # steps of a simulator
STORE_STEPS = 2_000_000  # of W1: what memcpy writes to is as large
PREFIX = "gearbench"  # of the store's file
_BLOCK_S = 0.05
_KINDS = 4  # different trajectories, so that a source is not always in the cache of the last one


def table(length: int) -> Replay:
    """Make the store that actors write into; it lets the oldest go."""
    section = {
        "tables": {
            "main": {
                "capacity_steps": STORE_STEPS,
                "writers": 4,
                "remove": "fifo",
                "max_length": length,
            }
        },
        "sampler": {"kind": "uniform", "unit": "step"},
        "fields": {"observation": {"offset": -19, "length": 20}},
        "shared_memory": {"prefix": PREFIX},
        "batch_size": 256,
    }
    return Replay(section, schemas={"main": W1})


# ---- writers -------------------------------------------------------------------------------------


class Adds:
    """Whole trajectories that a writer adds, one after the other."""

    def __init__(self, writer: TrajectoryWriter, steps: int) -> None:
        self._writer = writer
        self._turn = 0
        self._trajectories = [_trajectory(steps, seed) for seed in range(_KINDS)]
        self.num_bytes = sum(rows.nbytes for rows in self._trajectories[0].values())

    def __call__(self) -> None:
        """Add one."""
        self._writer.add(self._trajectories[self._turn % _KINDS])
        self._turn += 1


def _trajectory(steps: int, seed: int) -> dict[str, np.ndarray]:
    """Return a trajectory of random values."""
    random = np.random.default_rng(seed)
    found = {}
    for column in W1:
        values = random.standard_normal((steps, *column.shape), np.float32)
        found[column.name] = values if column.dtype == "float32" else values > 9
    return found


class Memcpy:
    """Copies of so many bytes, one after the other, into memory as large as a store."""

    def __init__(self, num_bytes: int) -> None:
        self._bytes = num_bytes
        self._ring = np.ones(
            max(STORE_STEPS * W1.row_bytes, num_bytes), np.uint8
        )  # every page is there
        self._sources = [np.full(num_bytes, seed, np.uint8) for seed in range(_KINDS)]
        self._slots = len(self._ring) // num_bytes
        self._turn = 0
        self._base = self._ring.ctypes.data
        self._addresses = [source.ctypes.data for source in self._sources]

    def __call__(self) -> None:
        """Copy once."""
        at = self._base + self._turn % self._slots * self._bytes
        ctypes.memmove(at, self._addresses[self._turn % _KINDS], self._bytes)
        self._turn += 1


def rate_of(action: Callable[[], None], seconds: float = _BLOCK_S) -> float:
    """Return how often an action was done per second."""
    begin = time.perf_counter()
    count = 0
    while True:
        for _ in range(8):
            action()
        count += 8
        spent = time.perf_counter() - begin
        if spent >= seconds:
            return count / spent


def adds(writer: TrajectoryWriter, steps: int, blocks: int) -> Row:
    """Add whole trajectories, in turns with memcpy of as many bytes."""
    add = Adds(writer, steps)
    copy = Memcpy(add.num_bytes)
    for action in (add, copy):
        rate_of(action, 0.5)
    rates = np.array([(rate_of(add), rate_of(copy)) for _ in range(blocks)])
    ratio = float(np.median(rates[:, 0] / rates[:, 1]))
    gear, limit = np.median(rates, axis=0).tolist()
    return {"bytes": add.num_bytes, "adds_per_s": gear, "memcpys_per_s": limit, "ratio": ratio}


def loop(writer: TrajectoryWriter, steps: int, seconds: float) -> float:
    """Add at full speed for some seconds."""
    return rate_of(Adds(writer, steps), seconds)


def start(role: Callable[..., Any], *arguments: Any) -> Future[Any]:
    """Begin a writer's role in a process of its own, on the second core."""
    pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
    found = pool.submit(_attached, role, arguments)
    pool.shutdown(wait=False)  # its process ends with the role
    return found


def _attached(role: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    os.sched_setaffinity(0, {1})
    (store,) = living(PREFIX)  # of the process that has started this one
    with TrajectoryWriter.attach(name=store.name) as writer:
        return role(writer, *arguments)


def whole(quick: bool) -> Iterator[Row]:
    """Add whole trajectories from one process."""
    for steps, bound in BOUNDS.items():
        with table(steps):
            found = start(adds, steps, 3 if quick else 40).result()
        row = {"what": "add", **found, "mb_per_s": found["adds_per_s"] * found["bytes"] / 1e6}
        yield judge(row, found["ratio"], bound, found["ratio"] >= bound)


def reader(quick: bool) -> Iterator[Row]:
    """Sample while another process writes at full speed."""
    seconds = 0.5 if quick else 4.0
    with table(SMALL) as replay:
        os.sched_setaffinity(0, {0})
        start(loop, SMALL, 1.0).result()
        ratios = []
        quiet = 0.0
        busy = 0.0
        for _ in range(1 if quick else 5):
            quiet = median_us(replay.sample, 400)
            writer = start(loop, SMALL, seconds)
            _wait_for_writing(replay)
            busy = median_us(replay.sample, 400)
            writer.result()
            ratios.append(busy / quiet)
        os.sched_setaffinity(0, {0, 1})
    ratio = float(np.median(ratios))
    row: Row = {"what": "reader", "quiet_us": quiet, "busy_us": busy}
    yield judge(row, ratio, MOST_SLOWER, ratio < MOST_SLOWER)


def _wait_for_writing(replay: Replay) -> None:
    control = replay.tables["main"].control
    until = time.monotonic() + 20
    newest = int(control[Control.NEXT_ID])
    while int(control[Control.NEXT_ID]) == newest and time.monotonic() < until:
        time.sleep(0.01)


# ---- simulators ----------------------------------------------------------------------------------


def simulate(config: dict[str, Any], num_envs: int, rounds: int, results: Any) -> None:
    """Run environments that cost nothing; put seconds per round, and of each wait for actions.

    Args:
        config: Of the run.
        num_envs: N.
        rounds: Steps of each environment that are measured; a quarter of them go before.
        results: Queue that gets the two.
    """
    observation = np.zeros((num_envs, 17), np.float32)
    reward = np.ones(num_envs, np.float32)
    going = np.zeros(num_envs, bool)
    ends = np.ones(num_envs, bool)
    waits = []
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
            simulators.step(
                observation=observation, reward=reward, terminated=going, truncated=truncated
            )
        results.put(((time.perf_counter() - begun) / rounds, waits[rounds // 4 :]))


def actions(num_envs: int, rounds: int) -> Row:
    """Measure a closed loop: one process of simulators, one of a policy that only multiplies.

    Returns:
        Actions per second, the time of a round, and of the wait from `act` to its answer, in
        microseconds.
    """
    config = {
        "shared_memory": {"prefix": PREFIX},
        "tables": {"main": {"capacity_steps": 100_000, "writers": 4, "remove": "fifo"}},
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
        process = context.Process(
            target=simulate, args=(config, num_envs, rounds, results), daemon=True
        )
        process.start()
        weights = torch.full((17, 6), 0.01)
        for request in loader:
            if request:
                request.reply(action=request["observation"] @ weights)
            elif not results.empty() or not process.is_alive():
                break
        seconds, waits = results.get(timeout=120)
        process.join()
    return {
        "what": "inference",
        "simulators": num_envs,
        "actions_per_s": num_envs / seconds,
        "round_us": seconds * 1e6,
        "wait_us_median": float(np.median(waits)) * 1e6,
        "wait_us_p95": float(np.percentile(waits, 95)) * 1e6,
    }


def inference(quick: bool) -> Iterator[Row]:
    """Closed loops of simulators and a policy of one multiplication, in two processes."""
    many, one = (actions(num_envs, 100 if quick else 4000) for num_envs in (64, 1))
    rate = many["actions_per_s"]
    wait = one["wait_us_median"]
    yield judge(many, rate, LEAST_ACTIONS, rate >= LEAST_ACTIONS)
    yield judge(one, wait, MOST_ROUND_TRIP_US, wait <= MOST_ROUND_TRIP_US)


PARTS = {"inference": inference, "add": whole, "reader": reader}


def main() -> None:
    """Run from the command line."""
    report = Report(__doc__, parts=(tuple(PARTS), "only some of it"))
    report.in_parts({part: PARTS[part] for part in report.options.parts})


if __name__ == "__main__":
    main()
