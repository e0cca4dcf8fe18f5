"""Steps per second into a Reverb table: a process of `ingest.py`, of an interpreter that has Reverb.

Reverb's TensorFlow and this project's NumPy do not fit into one environment: `ingest.py --reverb-python`.
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np
import reverb

SHAPES = {"observation": (11,), "next_observation": (11,), "action": (3,), "reward": (), "done": ()}
MOST_PENDING = 1000


def main(num_envs: int, seconds: float) -> None:
    """Write steps of many environments, each step an item, and print the rate as JSON."""
    table = reverb.Table(
        "main",
        reverb.selectors.Uniform(),
        reverb.selectors.Fifo(),
        max_size=200_000,
        rate_limiter=reverb.rate_limiters.MinSize(1),
    )
    server = reverb.Server([table])
    client = reverb.Client(f"localhost:{server.port}")
    writers = [client.trajectory_writer(num_keep_alive_refs=1) for _ in range(num_envs)]
    random = np.random.default_rng(0)
    rows = [{name: random.random(shape, np.float32) for name, shape in SHAPES.items()} for _ in range(4)]

    def step(turn: int) -> None:
        for writer in writers:
            writer.append(rows[turn % len(rows)])
            writer.create_item("main", 1.0, {name: writer.history[name][-1] for name in SHAPES})
            writer.flush(MOST_PENDING)

    begin, count = time.perf_counter(), 0
    while time.perf_counter() - begin < seconds:
        step(count)
        count += 1
    for writer in writers:
        writer.flush()
    rate = num_envs * count / (time.perf_counter() - begin)
    for writer in writers:
        writer.close()
    server.stop()
    print(json.dumps({"reverb steps_per_s": rate}))


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
