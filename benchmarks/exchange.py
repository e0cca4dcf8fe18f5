"""What a replay over several nodes costs: rows, and prioritized batches.

    python benchmarks/exchange.py --json F [--quick] [--parts bandwidth ...]

Needs root: the nodes are namespaces of this machine with virtual links (tests/cluster/cluster.sh),
which this command brings up and takes down. Whatever is compared runs on the same links in turns.
The performance pages say what the columns mean.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from support.nodes import Nodes, address, nodes, why_no_nodes
from support.report import Report, Row, judge
from support.workloads import PRIORITIZED, Workload, workload
from peers.interface import fresh_priorities
from torch.distributed import rpc

from deepspeed_gear import Replay
from deepspeed_gear.sampling.batch_sizes import TRAIN

LEAST_RATE = 0.9
LEAST_SPEEDUP = 3.0
LAUNCHES = (
    5  # a launch may have its threads on the cores in one way or another: the median of several
)
# Workload, window and samples of each rank.
CASES = (
    ("W1", "whole", 64),
    ("W1", "20", 512),
    ("W1", "1", 256),
    ("W1", "1", 4096),
    ("W3", "frames", 64),
)
QUICK_CASES = (CASES[1], CASES[-1])  # a launch each
_WARM_UP = 20
_RPC_PORT = 31999


# ---- on a node: stores ---------------------------------------------------------------------------


class Shared:
    """A Replay over all nodes, each of which adds its part of a workload. Collective.

    Args:
        load: The workload.
        section: The gear section.
    """

    def __init__(self, load: Workload, section: dict[str, Any]) -> None:
        self.replay = Replay(section, schemas={"main": load.schema})
        rank = dist.get_rank()
        world = dist.get_world_size()
        part = load.num_trajectories // world
        for number in range(rank * part, (rank + 1) * part):
            self.replay.add(load.make(number))
        dist.barrier()
        link = self.replay._parts.links._links.get(TRAIN)
        assert link is not None, "this rank exchanges nothing: the ranks are on one node"
        self.link = link.channel

    def watch(self) -> Watch:
        """Measure the exchange of rows from now on."""
        selector = self.replay._parts.links._training[0]
        return Watch(selector._exchange._rows, self.link)


class Watch:
    """Times the latest exchange of rows, and counts the bytes exchanged.

    Args:
        rows: What encodes and decodes them.
        link: The node channel that sends them, after the resolutions of their samples.
    """

    def __init__(self, rows: Any, link: Any) -> None:
        self.carry_s = self.swap_s = 0.0
        self.sizes: list[int] = []
        self.expected: list[int] = []
        spent = {"encode": 0.0, "fill": 0.0}

        def timed(name: str) -> None:
            work = getattr(rows, name)

            def run(*arguments: Any) -> Any:
                begin = time.perf_counter()
                found = work(*arguments)
                spent[name] = time.perf_counter() - begin
                self.carry_s = spent["encode"] + self.swap_s + spent["fill"]
                return found

            setattr(rows, name, run)

        begin_exchange = link.begin

        def timed_begin(messages: Sequence[np.ndarray]) -> Any:
            begin = time.perf_counter()
            wait = begin_exchange(messages)
            begun_s = time.perf_counter() - begin
            self.sizes = [
                0 if node == link.index else part.nbytes for node, part in enumerate(messages)
            ]

            def timed_wait() -> list[np.ndarray]:
                begin = time.perf_counter()
                found = wait()
                self.swap_s = begun_s + time.perf_counter() - begin
                sizes = [8 + part.nbytes for part in found]
                self.expected = [
                    0 if node == link.index else size for node, size in enumerate(sizes)
                ]
                return found

            return timed_wait

        for name in ("encode", "fill"):
            timed(name)
        link.begin = timed_begin


# ---- on a node: bandwidth ------------------------------------------------------------------------


def bandwidth_of(name: str, window: str, batch: int, turns: int, scale: float) -> dict[str, Any]:
    """Take batches, and exchange as many bytes as each of them did barely, in turns.

    Returns:
        Seconds of each turn by kind, and the bytes that were received.
    """
    load = workload(name, scale)
    section = load.section(window, dist.get_world_size() * batch)
    section["sampler"]["kind"] = "uniform"
    shared = Shared(load, section)
    group = dist.new_group(backend="gloo")
    watch = shared.watch()
    times: dict[str, list[float]] = {key: [] for key in ("carry", "swap", "bare")}
    received: list[int] = []
    room = torch.zeros(2, 1, dtype=torch.uint8)
    for turn in range(_WARM_UP + turns):
        dist.barrier()
        shared.replay.sample()
        found = {"carry": watch.carry_s, "swap": watch.swap_s}
        most = max(sum(watch.sizes), sum(watch.expected))
        if room.shape[1] < most:
            room = torch.zeros(2, most, dtype=torch.uint8)
        to = room[0, : sum(watch.sizes)]
        source = room[1, : sum(watch.expected)]
        dist.barrier()
        begin = time.perf_counter()
        dist.all_to_all_single(source, to, watch.expected, watch.sizes, group=group)
        found["bare"] = time.perf_counter() - begin
        if turn >= _WARM_UP:
            for kind, seconds in found.items():
                times[kind].append(seconds)
            received.append(sum(watch.expected))
    shared.replay.close()
    return {"times": times, "received": received}


# ---- on a node: prioritized batches --------------------------------------------------------------


class Owner:
    """One process's prioritized buffer, which answers requests one at a time: a Replay of that
    process alone.

    Args:
        load: What it holds.
        batch: Samples of a request.
        group: Of this process alone.
    """

    here: Owner  # where requests find it

    def __init__(self, load: Workload, batch: int, group: Any) -> None:
        self._lock = threading.Lock()
        self._replay = Replay(load.steps_section(batch, PRIORITIZED), group, {"main": load.schema})
        for trajectory in load.trajectories():
            self._replay.add(trajectory)
        self._reports = self._replay._priorities.masses_of("main").reports

    def sample(self) -> tuple[dict[str, torch.Tensor], torch.Tensor | None, torch.Tensor]:
        """Return a batch: its fields, its weights, and what its update needs."""
        with self._lock:
            batch = self._replay.sample()
            return (
                {name: value.clone() for name, value in batch.items()},
                batch.is_weight,
                batch.reported,
            )

    def update(self, reported: torch.Tensor, priorities: torch.Tensor) -> None:
        """Take new priorities."""
        with self._lock:
            self._reports.add(reported, priorities)


def owner_sample() -> Any:
    """Answer a request for a batch."""
    return Owner.here.sample()


def owner_update(reported: torch.Tensor, priorities: torch.Tensor) -> None:
    """Answer a request to update priorities."""
    Owner.here.update(reported, priorities)


class Client:
    """Takes batches of the owner on node 0. Collective."""

    def __init__(self, load: Workload, batch: int) -> None:
        rank = dist.get_rank()
        world = dist.get_world_size()
        options = rpc.TensorPipeRpcBackendOptions(
            init_method=f"tcp://{address(0)}:{_RPC_PORT}", _transports=["uv"]
        )
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world, rpc_backend_options=options)
        alone = dist.new_group([0], backend="gloo")
        if rank == 0:
            Owner.here = Owner(load, batch, alone)
        dist.barrier()
        self._update: Any = None
        self._fresh = torch.from_numpy(fresh_priorities(batch)).unbind()

    def step(self, turn: int) -> None:
        """Take a batch, and send its new priorities without waiting for an answer, but for the one
        before.
        """
        _, _, reported = rpc.rpc_sync("worker0", owner_sample)
        if self._update is not None:
            self._update.wait()
        self._update = rpc.rpc_async(
            "worker0", owner_update, (reported, self._fresh[turn % len(self._fresh)])
        )

    def close(self) -> None:
        """End the requests of all ranks."""
        dist.barrier()
        rpc.shutdown()


def prioritized_of(
    batch: int, blocks: int, steps: int, block_s: float, scale: float
) -> dict[str, Any]:
    """Take prioritized batches and update them, of gear and of one owner, in turns.

    Returns:
        Of each block: gear's batches a second of all ranks by prefetch, and this rank's of the
        owner; gear's exchanges and bytes a step.
    """
    load = workload("W1", scale)
    world = dist.get_world_size()
    gears = {
        p: Shared(load, load.steps_section(world * batch, PRIORITIZED, prefetch=p)) for p in (0, 2)
    }
    client = Client(load, batch)
    fresh = torch.from_numpy(fresh_priorities(batch)).unbind()
    found: dict[str, Any] = {"gear 0": [], "gear 2": [], "owner": []}
    for block in range(blocks + 1):
        for prefetch, gear in gears.items():
            dist.barrier()
            begin = time.perf_counter()
            for turn in range(steps):
                gear.replay.update_priorities(gear.replay.sample(), fresh[turn % len(fresh)])
            dist.barrier()
            if block:
                found[f"gear {prefetch}"].append(world * steps / (time.perf_counter() - begin))
        dist.barrier()
        begin = time.perf_counter()
        count = 0
        while time.perf_counter() - begin < block_s:
            client.step(count)
            count += 1
        if block:
            found["owner"].append(count / (time.perf_counter() - begin))
        dist.barrier()
    link = gears[0].link
    found["exchanges"] = link.num_rounds / ((blocks + 1) * steps)
    client.close()
    for gear in gears.values():
        gear.replay.close()
    return found


# ---- the driver ----------------------------------------------------------------------------------


def slowest(found: list[dict[str, list[float]]], kind: str) -> float:
    """Return the median over turns of the seconds until the last rank had done."""
    return float(np.median(np.max([rank[kind] for rank in found], axis=0)))


def bandwidth(run: Nodes, quick: bool) -> Iterator[Row]:
    """Compare the exchange of rows with bare exchanges of as many bytes."""
    for name, window, batch in QUICK_CASES if quick else CASES:
        arguments = (name, window, 8, 5, 0.01) if quick else (name, window, batch, 100, 0.1)
        launches = [
            run.run("exchange:bandwidth_of", *arguments, count=2)
            for _ in range(1 if quick else LAUNCHES)
        ]
        size = float(np.median(np.max([rank["received"] for rank in launches[0]], axis=0)))
        times = [[rank["times"] for rank in found] for found in launches]
        of_launch = [{kind: 1e3 * slowest(one, kind) for kind in one[0]} for one in times]
        ms = {kind: float(np.median([one[kind] for one in of_launch])) for kind in of_launch[0]}
        ratios = [one["bare"] / one["carry"] for one in of_launch]
        row = {"what": "bandwidth", "workload": name, "window": window, "B": batch, "bytes": size}
        row |= {f"{kind}_ms": ms[kind] for kind in ("carry", "swap", "bare")}
        row |= {"mb_per_s": size / ms["carry"] / 1e3, "bare_mb_per_s": size / ms["bare"] / 1e3}
        ratio = float(np.median(ratios))
        row |= {"least": min(ratios), "most": max(ratios)}
        yield judge(row, ratio, LEAST_RATE, ratio >= LEAST_RATE)


def prioritized(run: Nodes, quick: bool) -> Iterator[Row]:
    """Compare prioritized batches and their updates with those of one owner that is
    asked over RPC.
    """
    arguments = (32, 1, 10, 0.1, 0.01) if quick else (256, 25, 400, 1.0, 0.1)
    found = run.run("exchange:prioritized_of", *arguments, count=2)
    blocks = np.array([rank["owner"] for rank in found])
    owner = float(np.median(blocks.sum(0)))
    together = float(np.median(len(found) * blocks.min(0)))
    case = {"what": "prioritized", "B": arguments[0]}
    yield {**case, "system": "one owner, RPC", "batches_per_s": owner, "in_step_per_s": together}
    for prefetch in (0, 2):
        rate = float(np.median(found[0][f"gear {prefetch}"]))
        ratios = np.array(found[0][f"gear {prefetch}"]) / blocks.sum(0)
        ratio = float(np.median(ratios))
        row = {**case, "least": float(ratios.min()), "most": float(ratios.max())}
        row |= {
            "system": f"gear, prefetch {prefetch}",
            "batches_per_s": rate,
            "in_step_per_s": rate,
        }
        judge(row, ratio, LEAST_SPEEDUP, ratio >= LEAST_SPEEDUP)
        yield row if prefetch else {**row, "num_rounds": found[0]["exchanges"]}


PARTS = {"bandwidth": bandwidth, "prioritized": prioritized}


def main() -> None:
    """Run from the command line."""
    report = Report(__doc__, parts=(tuple(PARTS), "only some of it"))
    reason = why_no_nodes()
    if reason is not None:
        sys.exit(f"exchange.py: no nodes can be made on this machine: {reason}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("exchange.py: ended"))  # takes the nodes down
    with nodes(2) as run:
        report.in_parts({part: partial(PARTS[part], run) for part in report.options.parts})


if __name__ == "__main__":
    main()
