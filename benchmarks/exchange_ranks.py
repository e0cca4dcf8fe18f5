"""What the nodes of `exchange.py` do: functions for a rank of every node, which return what JSON keeps."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from support.nodes import FIRST_ADDRESS, on_wire
from support.transitions import ALPHA, BETA, fresh_priorities
from support.workloads import Workload, workload
from torch.distributed import rpc

from deepspeed_gear import Column, Replay, Schema
from deepspeed_gear.distributed.node_channel import NodeChannel

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
        self.ids = {self.replay.add(load.make(number)) for number in range(rank * part, (rank + 1) * part)}
        dist.barrier()
        channel = channel_of(self.replay)
        assert channel is not None, "this rank exchanges nothing: the ranks are on one node"
        self.link = channel
        self._selector = self.replay._parts.exchange._training[0]

    def watch(self) -> Watch:
        """Measure the exchange of rows from now on."""
        return Watch(
            self._selector._exchange._row_messages, self.replay._parts.streams["main"]["train"], self.link
        )


def channel_of(replay: Replay) -> NodeChannel | None:
    """Return what the training streams of this node leader send through; None on one node."""
    return replay._parts.exchange._channels.get(True)


class Watch:
    """Times the latest exchange of rows and the latest selection, and knows what was exchanged.

    Args:
        rows: What encodes and decodes them.
        stream: Whose selections they are.
        link: The node channel that sends them, after the resolutions of their samples.
    """

    def __init__(self, rows: Any, stream: Any, link: Any) -> None:
        self.carry_s = self.select_s = self.swap_s = 0.0
        self.sizes: list[int] = []
        self.expected: list[int] = []
        spent = {"encode": 0.0, "decode": 0.0, "_select_together": 0.0}

        def timed(owner: Any, name: str) -> None:
            work = getattr(owner, name)

            def run(*arguments: Any) -> Any:
                begin = time.perf_counter()
                found = work(*arguments)
                spent[name] = time.perf_counter() - begin
                self.carry_s = spent["encode"] + self.swap_s + spent["decode"]
                self.select_s = spent["_select_together"]
                return found

            setattr(owner, name, run)

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

        for owner, name in ((rows, "encode"), (rows, "decode"), (stream, "_select_together")):
            timed(owner, name)
        link.begin = timed_begin


# ---- bare exchanges ------------------------------------------------------------------------------


def at_once(
    group: Any, to: torch.Tensor, sizes: list[int], source: torch.Tensor, expected: list[int]
) -> None:
    """Exchange by one all_to_all_single."""
    dist.all_to_all_single(source, to, expected, sizes, group=group)


def in_pairs(
    group: Any, to: torch.Tensor, sizes: list[int], source: torch.Tensor, expected: list[int]
) -> None:
    """Exchange by isend and irecv with every other node."""
    tos, sources = to.split(sizes), source.split(expected)
    rank, world = dist.get_rank(), dist.get_world_size()
    peers = [(rank + i) % world for i in range(1, world)]
    works = [dist.irecv(sources[peer], peer, group=group) for peer in peers]
    works += [dist.isend(tos[peer], peer, group=group) for peer in peers]
    for work in works:
        work.wait()


BARE: dict[str, Callable[..., None]] = {
    "all_to_all_single": at_once,
    "isend, irecv": in_pairs,
}


def messages(size: int, turns: int) -> dict[str, list[float]]:
    """Return the seconds of each exchange of equal messages, kind by kind in turns."""
    world, group = dist.get_world_size(), dist.new_group(backend="gloo")
    sizes = [size] * world
    sizes[dist.get_rank()] = 0  # what stays on a node does not count
    to, source = torch.zeros(sum(sizes), dtype=torch.uint8), torch.zeros(sum(sizes), dtype=torch.uint8)
    times: dict[str, list[float]] = {name: [] for name in BARE}
    for turn in range(_WARM_UP + turns):
        for name, exchange in BARE.items():
            dist.barrier()
            begin = time.perf_counter()
            exchange(group, to, sizes, source, sizes)
            if turn >= _WARM_UP:
                times[name].append(time.perf_counter() - begin)
    return times


# ---- bandwidth -----------------------------------------------------------------------------------


def bandwidth(name: str, window: str, batch: int, turns: int, scale: float) -> dict[str, Any]:
    """Take batches, and exchange as many bytes as each of them did barely, in turns.

    Returns:
        Seconds of each turn by kind, and the bytes that were received.
    """
    load = workload(name, scale)
    shared, group = Shared(load, uniform(load, window, batch)), dist.new_group(backend="gloo")
    watch = shared.watch()
    times: dict[str, list[float]] = {key: [] for key in ("carry", "swap", "cut", *BARE)}
    received: list[int] = []
    room = torch.zeros(2, 1, dtype=torch.uint8)
    for turn in range(_WARM_UP + turns):
        dist.barrier()
        shared.replay.sample()
        found = {"carry": watch.carry_s, "swap": watch.swap_s, "cut": watch.select_s}
        most = max(sum(watch.sizes), sum(watch.expected))
        if room.shape[1] < most:
            room = torch.zeros(2, most, dtype=torch.uint8)
        to, source = room[0, : sum(watch.sizes)], room[1, : sum(watch.expected)]
        for kind, exchange in BARE.items():
            dist.barrier()
            begin = time.perf_counter()
            exchange(group, to, watch.sizes, source, watch.expected)
            found[kind] = time.perf_counter() - begin
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
            init_method=f"tcp://{FIRST_ADDRESS}:{_RPC_PORT}", _transports=["uv"]
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
    found: dict[str, Any] = {"gear 0": [], "gear 2": [], "owner": [], "cut": []}
    selections = _times_of_selections(gears[0])
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
    found["cut"] = {name: float(np.median(times)) for name, times in selections.items()}
    found["exchanges"] = link.num_exchanges / ((blocks + 1) * steps)
    client.close()
    for gear in gears.values():
        gear.replay.close()
    return found


def _times_of_selections(shared: Shared) -> dict[str, list[float]]:
    """Time the selections from now on, their exchanges, and what is done between these. Seconds."""
    times: dict[str, list[float]] = {"cut": [], "exchanges": []}
    link, stream = shared.link, shared.replay._parts.streams["main"]["train"]
    begin_exchange, select = link.begin, stream._select_together
    spent = [0.0]

    def timed_begin(*arguments: Any) -> Callable[[], list[np.ndarray]]:
        begin = time.perf_counter()
        wait = begin_exchange(*arguments)
        spent[0] += time.perf_counter() - begin

        def timed_wait() -> list[np.ndarray]:
            begin = time.perf_counter()
            found: list[np.ndarray] = wait()
            spent[0] += time.perf_counter() - begin
            return found

        return timed_wait

    def timed_select(*arguments: Any) -> None:
        spent[0], begin = 0.0, time.perf_counter()
        select(*arguments)
        times["cut"].append(time.perf_counter() - begin)
        times["exchanges"].append(spent[0])

    link.begin, stream._select_together = timed_begin, timed_select  # type: ignore[method-assign]
    return times


# ---- bytes ---------------------------------------------------------------------------------------


def traffic(name: str, window: str, batch: int, steps: int, scale: float) -> dict[str, float]:
    """Count what batches put on the wire, and what they must: per step."""
    load = workload(name, scale)
    shared = Shared(load, uniform(load, window, batch))
    length = load.window(window)[1]
    rows = remote = 0
    counted = {"sent": 0, "tx_bytes": 0}
    for _ in range(_WARM_UP):
        shared.replay.sample()
    for _ in range(steps):
        dist.barrier()
        time.sleep(0.01)  # until the barrier's last packets are through
        before = {"sent": shared.link.bytes_sent, **on_wire()}
        taken = shared.replay.sample()
        time.sleep(0.01)
        after = {"sent": shared.link.bytes_sent, **on_wire()}
        counted = {key: counted[key] + after[key] - before[key] for key in counted}
        ids, anchors = taken.trajectory_id.tolist(), taken.anchor.tolist()
        last = 0 if window == "whole" else 1 - length
        there = [(i, a + last) for i, a in zip(ids, anchors, strict=True) if i not in shared.ids]
        remote += len(there)
        rows += len({(i, first + step) for i, first in there for step in range(length)})
    shared.replay.close()
    needed = rows * load.schema.row_bytes
    return {"sent": counted["sent"], "wire": counted["tx_bytes"], "needed": needed, "remote": remote}


def batches(name: str, window: str, batch: int, steps: int, scale: float) -> dict[str, float]:
    """Time batches of a rank, and count what its node sends for each."""
    load, world = workload(name, scale), dist.get_world_size()
    with Replay(uniform(load, window, batch), schemas={"main": load.schema}) as replay:
        for number in range(dist.get_rank(), load.num_trajectories, world):
            replay.add(load.make(number))
        link = channel_of(replay)
        times, before = [], 0
        for step in range(_WARM_UP + steps):
            dist.barrier()
            begin = time.perf_counter()
            replay.sample()
            times.append(time.perf_counter() - begin)
            if step == _WARM_UP - 1 and link is not None:
                before = link.bytes_sent
        sent = 0 if link is None else (link.bytes_sent - before) / steps
    return {"sample_ms": 1e3 * float(np.median(times[_WARM_UP:])), "sent": sent}


def selection(num_items: int, batch: int, steps: int) -> dict[str, float]:
    """Count what the selection of prioritized batches sends, whatever the rows: per step."""
    length = max(1, num_items // 100)
    schema = Schema([Column("value", "float32", (), "observation")])
    load = Workload(
        "items", schema, 100, length, lambda number: {"value": np.full(length, number, np.float32)}
    )
    shared = Shared(load, prioritized(load, dist.get_world_size() * batch))
    watch, fresh = shared.watch(), torch.from_numpy(fresh_priorities(batch)).unbind()
    rows = before = 0
    for turn in range(_WARM_UP + steps):
        if turn == _WARM_UP:
            rows, before = 0, shared.link.bytes_sent
        shared.replay.update_priorities(shared.replay.sample(), fresh[turn % len(fresh)])
        rows += sum(watch.sizes) - watch.sizes[dist.get_rank()]
    sent = shared.link.bytes_sent - before - rows
    shared.replay.close()
    return {"sent": sent / steps, "rows": rows / steps}


# ---- training ------------------------------------------------------------------------------------


def training(data: str, config_path: str, steps: int, prefetch: int) -> dict[str, float]:
    """Train the Decision Transformer of examples/hopper.py; return what a step takes."""
    import copy

    import hopper
    from common import shorten_history
    from decision_transformer import DecisionTransformer

    import deepspeed_gear

    config = json.loads(Path(config_path).read_text())
    del config["tensorboard"]
    config["gear"].update(data={"path": data}, prefetch=prefetch)
    torch.manual_seed(0)
    model = DecisionTransformer(
        observation_size=11,
        action_size=3,
        context=config["gear"]["fields"]["action"]["length"],
        has_goal=False,
        sees_return=True,
    )
    average = copy.deepcopy(model)
    engine, *_ = deepspeed_gear.initialize(model=model, model_parameters=model.parameters(), config=config)
    engine.gear.transform = shorten_history
    record, last = hopper.Record(), steps + _WARM_UP
    hopper.train(engine, average, record, _WARM_UP, last, lambda: None)
    engine.gear.take_metrics()
    begin = time.perf_counter()
    hopper.train(engine, average, record, last, last, lambda: None)
    step_ms = (time.perf_counter() - begin) / steps * 1e3
    metrics = engine.gear.take_metrics()
    num_nodes = engine.gear._topology.num_nodes
    engine.destroy()
    return {
        "step_ms": step_ms,
        "wait_ms": metrics["wait_ms"],
        "sample_ms": metrics["sample_ms"],
        "nodes": num_nodes,
        "batch": config["train_batch_size"] // dist.get_world_size(),
        "parameters": sum(p.numel() for p in average.parameters()),
    }
