"""Writers and readers at full speed on a small store: no batch may ever hold a torn row.

    export PYTHONPATH=$PWD:tests/support [GEAR_TORN_REMOVE=uniform] python
    tests/crash/programs/torn.py --seconds 60 [--kill | --stop 100]

Two ranks sample, four processes write, every second one step by step; all extents are reused over
and over; each row carries its step, the length and a checksum of its trajectory. With --kill the
writers are killed with SIGKILL: most after up to 60 calls, every fourth up to 0.2 s after its
start. With --stop so many times a writer is stopped with SIGSTOP for up to 3 s and continued; all
writers then still run at the end. It goes on until it has taken --seconds, --least-added
trajectories were added, --least-sampled samples were checked, --least-killed writers were killed
and all stops were made, however long a slow machine takes. At the end everything must be free, and
no process may hold the lock. Prints a line of JSON.
"""

import argparse
import ctypes
import mmap
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch.distributed as dist
from process_support import command_options, end_with, free_port

from deepspeed_gear import Column, Replay, Schema, TrajectoryWriter
from deepspeed_gear.store.memory_layout import HOLDER_OFFSET
from deepspeed_gear.store.records import Control

SCHEMA = Schema(
    [
        Column("mark", "int64", (4,), "observation", "T+1"),
        Column("again", "int64", (4,)),
        Column("key", "int64", rows="1"),
    ]
)
COLUMNS = {
    c.name: {"dtype": c.dtype, "shape": list(c.shape), "role": c.role, "rows": c.rows}
    for c in SCHEMA
}
WINDOW = 8
BATCH = 256
WRITERS = 4
MOST_STEPS = 60
ENVIRONMENTS = 3
MOST_CALLS = 60
MOST_STOP_S = 3.0
LEAST = ("least_added", "least_sampled", "least_killed")  # options
PREFIX = f"geartorn{os.environ.get('GEAR_TORN', '')}"
FIELDS = {
    "mark": {"offset": 1 - WINDOW, "length": WINDOW},
    "after": {"column": "mark", "offset": 1},
    "again": {"offset": 1 - WINDOW, "length": WINDOW},
    "key": {},
}
SECTION: dict[str, Any] = {
    "tables": {
        "main": {
            "capacity_steps": 3000,
            "capacity_trajectories": 120,
            "max_length": MOST_STEPS,
            "writers": WRITERS + 4,
            "remove": os.environ.get("GEAR_TORN_REMOVE", "fifo"),
        }
    },
    "sampler": {"kind": "uniform", "unit": "step"},
    "fields": FIELDS,
    "batch_size": BATCH,
    "shared_memory": {"prefix": PREFIX},
    "timeout_s": 30.0,
}
# What the processes of a run count, in memory that all share: calls of each writer's life, stops
# and kills.
COUNTS = np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), np.int64)
STOPS = WRITERS
KILLS = WRITERS + 1


def mix(key: np.ndarray, step: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """Return a checksum of each row. [...], int64, each."""
    key, step, steps = (words.astype(np.uint64) for words in (key, step, steps))
    words = (
        key * np.uint64(0x9E3779B97F4A7C15)
        ^ step * np.uint64(0x2545F4914F6CDD1D)
        ^ steps << np.uint64(50)
    )
    return np.asarray((words >> np.uint64(1)).astype(np.int64))


def rows(key: int, steps: int) -> dict[str, np.ndarray]:
    """Return a trajectory whose rows say which they are."""
    step = np.arange(steps + 1)
    mixed = mix(np.full(steps + 1, key), step, np.full(steps + 1, steps))
    mark = np.stack([np.full(steps + 1, key), step, np.full(steps + 1, steps), mixed], axis=1)
    return {"mark": mark, "again": mark[:-1].copy(), "key": np.int64(key)}


def wrong(batch: Any) -> int:
    """Return how many samples of a batch are not what was added."""
    key = batch["key"].numpy()[:, None]
    bad = np.zeros(len(key), bool)
    for name in ("mark", "again"):
        found = batch[name].numpy()
        real = batch.mask[name].numpy()
        step = found[..., 1]
        steps = found[..., 2]
        mixed = mix(np.broadcast_to(key, step.shape), step, steps)
        good = (found[..., 0] == key) & (found[..., 3] == mixed) & (steps == steps[:, -1:])
        good &= step - step[:, -1:] == np.arange(1 - WINDOW, 1)
        bad |= (real & ~good).any(1)
    after = batch["after"].numpy()
    bad |= (after[:, 0] != key[:, 0]) | (after[:, 1] != batch["mark"].numpy()[:, -1, 1] + 1)
    return int(bad.sum())


FORK = multiprocessing.get_context("fork")
Child = tuple[multiprocessing.process.BaseProcess, Connection]


def start(function: Callable[..., None], *arguments: Any) -> Child:
    """Run a function in a forked child, with a pipe to this process as its first argument."""

    def run_in_child(*given: Any) -> None:
        ctypes.CDLL(None).prctl(
            1, signal.SIGKILL
        )  # PR_SET_PDEATHSIG: it does not outlive this process
        function(*given)

    ours, theirs = FORK.Pipe()
    child = FORK.Process(target=run_in_child, args=(theirs, *arguments))
    child.start()
    theirs.close()
    return child, ours


def read(pipe: Connection, rank: int, wanted: argparse.Namespace) -> None:
    """Sample until enough was done, then see that nothing is lost. A rank."""
    os.environ["RANK"] = str(rank)
    dist.init_process_group("gloo")
    found = {"samples": 0, "wrong": 0}
    with Replay(SECTION, schemas={"main": SCHEMA}) as replay:
        table = replay.tables["main"]
        while replay.num_steps < 1000:
            time.sleep(0.01)
        until = time.monotonic() + wanted.seconds
        going = [True]
        while going[0]:
            for _ in range(50):
                batch = replay.sample()
                found["samples"] += len(batch["key"])
                found["wrong"] += wrong(batch)
            going = [
                time.monotonic() < until
                or table.control[Control.INSERTED] < wanted.least_added
                or 2 * found["samples"] < wanted.least_sampled
                or COUNTS[STOPS] < wanted.stop
                or COUNTS[KILLS] < wanted.least_killed
            ]
            dist.broadcast_object_list(going, 0)
        found["added"] = int(table.control[Control.INSERTED])
        if rank == 0:
            pipe.send("done")
            pipe.recv()  # the writers are ended now
            replay.clear()
            replay.add(rows(1, MOST_STEPS))  # frees what dead writers held
            replay.clear()
            with table.lock:
                found["lost_rows"] = table.spec.capacity_rows - int(
                    table.control[Control.FREE_ROWS]
                )
                found["used_slots"] = int((table.slots[:, 0] != 0).sum())
        dist.barrier()
    pipe.send(found)


def write(number: int, seed: int) -> None:
    """Add at full speed until this process is killed."""
    random = np.random.default_rng(seed)
    with TrajectoryWriter.attach(SECTION, wait_s=60) as writer:
        while True:
            writer.add(rows(int(random.integers(1 << 40)), int(random.integers(1, MOST_STEPS + 1))))
            COUNTS[number] += 1


def marks(key: np.ndarray, step: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """Return a row of each environment. [N, 4], int64."""
    return np.stack([key, step, steps, mix(key, step, steps)], axis=1)


def write_steps(number: int, seed: int) -> None:
    """Publish steps of environments at full speed until this process is killed; some episodes are
    cut.
    """
    random = np.random.default_rng(seed)
    with TrajectoryWriter.attach(SECTION, wait_s=60) as writer:
        vector = writer.vector_writer(ENVIRONMENTS, "disabled")
        key, step, steps = np.zeros((3, ENVIRONMENTS), np.int64)
        ended = np.ones(ENVIRONMENTS, bool)
        while True:
            if ended.any():
                key[ended] = random.integers(1 << 40, size=int(ended.sum()))
                steps[ended] = random.integers(1, MOST_STEPS + 10, size=int(ended.sum()))
                step[ended] = 0
                vector.reset(ended, mark=marks(key, step, steps), key=key)
            before = marks(key, step, steps)
            step += 1
            ended = step == steps
            vector.step(publish=True, mark=marks(key, step, steps), again=before, terminated=ended)
            COUNTS[number] += 1


def stop_and_continue(children: list[int], count: int, is_over: list[int]) -> dict[str, int]:
    """Stop one busy writer after the other, and continue it in time; count those that held the
    lock.
    """
    held = 0
    random = np.random.default_rng(count)
    writer = TrajectoryWriter.attach(SECTION, wait_s=60)
    holder = np.ndarray((1,), np.int64, buffer=writer.parts[0].memory.buffer, offset=HOLDER_OFFSET)
    while COUNTS[STOPS] < count and not is_over:
        number = int(random.integers(len(children)))
        calls = COUNTS[:WRITERS].sum()
        most = int(random.integers(100))
        while COUNTS[:WRITERS].sum() < calls + most and not is_over:
            time.sleep(0.01)  # what has waited for the last one gets its turn
        os.kill(children[number], signal.SIGSTOP)
        time.sleep(0.02)
        held += int(holder[0]) == children[number]
        time.sleep(random.uniform(0, MOST_STOP_S))
        os.kill(children[number], signal.SIGCONT)
        COUNTS[STOPS] += 1
    writer.close()
    return {"stops": int(COUNTS[STOPS]), "held": held}


def host(pipe: Connection, wanted: argparse.Namespace) -> None:
    """Keep writers going as forked children; with `kill` a child's life has a length by calls or by
    time.
    """
    random = np.random.default_rng(11)
    children: list[int] = [0] * WRITERS
    ends: list[tuple[float, float]] = [
        (0, 0)
    ] * WRITERS  # calls, and a time, of which the first ends a life
    stop: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
    TrajectoryWriter.attach(SECTION, wait_s=60).close()  # so that children have everything loaded
    count = 0
    found = {}
    while not stop:
        for number in [number for number, child in enumerate(children) if not child]:
            count += 1
            COUNTS[number] = 0
            child = os.fork()
            if child == 0:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                ctypes.CDLL(None).prctl(1, signal.SIGKILL)
                try:
                    (write_steps if number % 2 else write)(number, count + os.getpid() * 1000)
                except Exception as error:  # the run has ended
                    print(f"a writer has ended: {error}", file=sys.stderr)
                os._exit(1)
            children[number] = child
            ends[number] = random.integers(1, MOST_CALLS), np.inf
            if count % 4 == 0:  # this one may die while it attaches
                ends[number] = np.inf, time.monotonic() + random.uniform(0, 0.2)
        if wanted.stop and not found:
            found = stop_and_continue(children, wanted.stop, stop)
        time.sleep(0.002)
        for number, (calls, until) in enumerate(ends):
            child = children[number]
            ended, _ = os.waitpid(child, os.WNOHANG)
            if ended == 0 and wanted.kill and (COUNTS[number] >= calls or time.monotonic() > until):
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                ended = child
                COUNTS[KILLS] += 1
            if ended:
                children[number] = 0
    for child in filter(None, children):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    pipe.send({"writers": count, **found})


def run(options: argparse.Namespace) -> dict[str, int]:
    """Run readers and writers; return what they found."""
    os.environ.update(WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    ranks = [start(read, rank, options) for rank in range(2)]
    writers = start(host, options)
    try:
        assert ranks[0][1].recv() == "done"
        writers[0].terminate()
        said = writers[1].recv()
        ranks[0][1].send("the writers are ended")
        results = [pipe.recv() for _, pipe in ranks]
    finally:
        for process, _ in (*ranks, writers):
            process.kill()
            process.join()
    found = {key: sum(result.get(key, 0) for result in results) for key in results[0]}
    return {**found, "added": results[0]["added"], **said}


if __name__ == "__main__":
    found = run(command_options(__doc__, "kill", seconds=60.0, stop=0, **dict.fromkeys(LEAST, 0)))
    end_with(found, "wrong", "lost_rows", "used_slots")
