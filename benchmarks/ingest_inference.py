"""How fast simulators get their actions from a policy in another process, through shared memory.

python benchmarks/ingest_inference.py [simulators ...]
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import sys
import time
from typing import Any

import support  # noqa: F401  # puts the checkout first
import numpy as np
import torch

from deepspeed_gear import Column, Replay, Schema, TrajectoryWriter
from deepspeed_gear.actors.inference_client import InferenceClient
from deepspeed_gear.actors.inference_loader import InferenceLoader

SCHEMA = Schema(
    [
        Column("observation", "float32", (17,), "observation", "T+1"),
        Column("action", "float32", (6,), "action"),
        Column("reward", "float32", (), "reward"),
        Column("terminated", "bool", (), "terminated"),
        Column("truncated", "bool", (), "truncated"),
    ]
)
EPISODE = 200  # steps


def config_of(backend: str = "cpu") -> dict[str, Any]:
    """Return the gear section of a table that takes writers and keeps the newest 100,000 steps."""
    table = {"capacity_steps": 100_000, "writers": 4, "remove": "fifo"}
    return {
        "backend": backend,
        "shared_memory": {"prefix": f"bench-inference-{os.getpid()}"},
        "tables": {"main": table},
        "sampler": {"kind": "uniform", "unit": "step"},
        "fields": {"observation": {}, "action": {}},
        "batch_size": 8,
    }


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


def measure(num_envs: int, rounds: int = 4000, backend: str = "cpu") -> dict[str, float]:
    """Measure a closed loop: one process of simulators, one of a policy that only multiplies.

    Returns:
        Actions per second, and quantiles of the time from `act` to its answer in microseconds.
    """
    config = config_of(backend)
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with (
        Replay(config, schemas={"main": SCHEMA}) as replay,
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
    cuts = statistics.quantiles([wait * 1e6 for wait in waits], n=20)
    return {
        "simulators": num_envs,
        "actions_per_s": num_envs / seconds,
        "round_us": seconds * 1e6,
        "wait_us_median": cuts[9],
        "wait_us_p95": cuts[18],
    }


if __name__ == "__main__":
    for count in [int(argument) for argument in sys.argv[1:]] or [1, 64]:
        print(json.dumps(measure(count)))
