"""What the nodes of `exchange.py` do: functions for a rank of every node, which return what JSON keeps."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from support.nodes import address
from support.transitions import ALPHA, BETA, fresh_priorities
from support.workloads import Workload, workload
from torch.distributed import rpc

from deepspeed_gear import Replay

_WARM_UP = 20
_RPC_PORT = 31999

# ---- stores --------------------------------------------------------------------------------------


def uniform(load: Workload, window: str, batch: int, **options: Any) -> dict[str, Any]:
    """Return the section of uniform batches of windows; `batch` samples on each rank."""
    section = load.section(window, dist.get_world_size() * batch, **options)
    section["sampler"]["kind"] = "uniform"
    return section


def prioritized(load: Workload, batch: int, prefetch: int = 0) -> dict[str, Any]:
    """Return the section of prioritized batches of single steps."""
    section = load.section("1", batch, prefetch=prefetch)
    section["sampler"] = {"kind": "prioritized", "unit": "step", "alpha": ALPHA, "beta": BETA}
    section["fields"] = {column.name: {"offset": 0} for column in load.schema}
    return section


class Shared:
    """A Replay over all nodes, each of which adds its part of a workload. Collective.

    Args:
        load: The workload.
        section: The gear section.
    """

    def __init__(self, load: Workload, section: dict[str, Any]) -> None:
        self.replay = Replay(section, schemas={"main": load.schema})
        rank, world = dist.get_rank(), dist.get_world_size()
        part = load.num_trajectories // world
        for number in range(rank * part, (rank + 1) * part):
            self.replay.add(load.make(number))
        dist.barrier()
        channel = self.replay._parts.exchange._channels.get(True)
        assert channel is not None, "this rank exchanges nothing: the ranks are on one node"
        self.link = channel

    def watch(self) -> Watch:
        """Measure the exchange of rows from now on."""
        selector = self.replay._parts.exchange._training[0]
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
            self.sizes = [0 if node == link.index else part.nbytes for node, part in enumerate(messages)]

            def timed_wait() -> list[np.ndarray]:
                begin = time.perf_counter()
                found = wait()
                self.swap_s = begun_s + time.perf_counter() - begin
                sizes = [8 + part.nbytes for part in found]
                self.expected = [0 if node == link.index else size for node, size in enumerate(sizes)]
                return found

            return timed_wait

        for name in ("encode", "fill"):
            timed(name)
        link.begin = timed_begin


# ---- bandwidth -----------------------------------------------------------------------------------


def bandwidth(name: str, window: str, batch: int, turns: int, scale: float) -> dict[str, Any]:
    """Take batches, and exchange as many bytes as each of them did barely, in turns.

    Returns:
        Seconds of each turn by kind, and the bytes that were received.
    """
    load = workload(name, scale)
    shared, group = Shared(load, uniform(load, window, batch)), dist.new_group(backend="gloo")
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
        to, source = room[0, : sum(watch.sizes)], room[1, : sum(watch.expected)]
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


# ---- prioritized batches -------------------------------------------------------------------------


class Owner:
    """One process's prioritized buffer, which answers requests one at a time: a Replay of that process alone.

    Args:
        load: What it holds.
        batch: Samples of a request.
        group: Of this process alone.
    """

    here: Owner  # where requests find it

    def __init__(self, load: Workload, batch: int, group: Any) -> None:
        self._lock = threading.Lock()
        self._replay = Replay(prioritized(load, batch), group, {"main": load.schema})
        for trajectory in load.trajectories():
            self._replay.add(trajectory)
        self._reports = self._replay._all_priorities[0].reports

    def sample(self) -> tuple[dict[str, torch.Tensor], torch.Tensor | None, torch.Tensor]:
        """Return a batch: its fields, its weights, and what its update needs."""
        with self._lock:
            batch = self._replay.sample()
            return {name: value.clone() for name, value in batch.items()}, batch.is_weight, batch.reported

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
        rank, world = dist.get_rank(), dist.get_world_size()
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
        """Take a batch, and send its new priorities without waiting for an answer, but for the one before."""
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


def prioritized_batches(batch: int, blocks: int, steps: int, block_s: float, scale: float) -> dict[str, Any]:
    """Take prioritized batches and update them, of gear and of one owner, in turns.

    Returns:
        Of each block: gear's batches a second of all ranks by prefetch, and this rank's of the owner; gear's
        exchanges and bytes a step.
    """
    load, world = workload("W1", scale), dist.get_world_size()
    gears = {p: Shared(load, prioritized(load, world * batch, p)) for p in (0, 2)}
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
        begin, count = time.perf_counter(), 0
        while time.perf_counter() - begin < block_s:
            client.step(count)
            count += 1
        if block:
            found["owner"].append(count / (time.perf_counter() - begin))
        dist.barrier()
    link = gears[0].link
    found["exchanges"] = link.num_exchanges / ((blocks + 1) * steps)
    client.close()
    for gear in gears.values():
        gear.replay.close()
    return found
