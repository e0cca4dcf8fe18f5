"""Replicas whose tables lie on their devices draw what one process draws from all trajectories.

device_shards.py CASES FOLDER: for each case a section, tensor ranks of a replica, and trajectories of each
replica by number and length, none where the section has a data set. Each replica adds its own; one process,
asked beside them, adds all in the order of the replicas. Global batches must be equal to the last bit.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from gear_support import SCHEMA, trajectory
from replay_support import topology_of

from deepspeed_gear import DeviceReplay
from deepspeed_gear.distributed.topology import RankCoordinates
from deepspeed_gear.errors import StoreError
from deepspeed_gear.ops.records import RingState, UpdateCount
from deepspeed_gear.sampling.batch_info import BatchInfo

GLOBAL_BATCHES = 6
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
DEVICE = os.environ.get("GEAR_TEST_DEVICE", "cpu")
alone = [dist.new_group([i]) for i in range(world)][rank]


def add(replay: DeviceReplay, numbers: list[tuple[int, int]]) -> None:
    most = replay.table.most_steps
    for number, steps in numbers:
        columns = {}
        for name, values in trajectory(number, steps, terminated=number % 2 == 0).items():
            rows = torch.from_numpy(np.asarray(values))
            padded = rows
            if SCHEMA[name].rows != "1":
                padded = torch.zeros(most + (SCHEMA[name].rows == "T+1"), *rows.shape[1:], dtype=rows.dtype)
                padded[: len(rows)] = rows
            columns[name] = padded[None].to(DEVICE)
        replay.add_(columns, torch.tensor([steps], device=DEVICE))


def priorities(batch: Any, turn: int, noise: float) -> torch.Tensor:
    """Values that follow from the samples alone; ranks that do not report may be wrong about them."""
    return (batch.sample_number * 7919 % 97 + turn + 1).float() * (batch.anchor + 1) + noise


def told(batch: Any) -> dict[str, torch.Tensor]:
    known = {
        "sample_number": batch.sample_number,
        "anchor": batch.anchor,
        "steps": batch.num_steps,
        "is_weight": batch.is_weight,
    }
    known |= {"probability": batch.probability} | {f"field.{name}": batch[name] for name in batch}
    known |= {f"mask.{name}": mask for name, mask in batch.mask.items()}
    return {name: values.cpu().clone() for name, values in known.items()}


def check_names(batch: Any, replicas: int) -> None:
    """Ids and handles say which replica holds a trajectory; its number does too."""
    holder = batch["task"].cpu() // 20
    assert torch.equal(batch.trajectory_id.cpu() % replicas, holder)
    assert torch.equal(batch.handle[:, 0].cpu(), holder)


def merged(parts: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Put the micro batches of all ranks together by sample number, each sample once."""
    every = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    order = np.unique(every["sample_number"].numpy(), return_index=True)[1]
    return {name: values[order] for name, values in every.items()}


def run(replay: DeviceReplay) -> list[list[dict[str, torch.Tensor]]]:
    """Return what the micro batches of some global batches hold."""
    found: list[list[dict[str, torch.Tensor]]] = []
    for turn in range(GLOBAL_BATCHES):
        found.append([])
        for _ in range(replay.batch_info.accumulation):
            batch = replay.sample()
            found[-1].append(told(batch))
            if batch.holders is not None:
                check_names(batch, replay.batch_info.data_world)
            if replay.config.item_sampler.has_priorities and turn != 3:  # no process has to report
                noise = 0.0 if topology_of(replay).place.reports else 100.0
                replay.update_priorities_(batch, priorities(batch, turn, noise))
    return found


def highest_of(replay: DeviceReplay) -> int:
    """Return the bits of the highest priority that the next global batch has seen."""
    for _ in range(replay.batch_info.accumulation):
        replay.sample()
    return int(replay.table.state[RingState.COUNTS + UpdateCount.HIGHEST_PRIORITY])


def check_compiled(replay: DeviceReplay) -> None:
    """`torch.compile` leaves out what ranks say to each other, and gives the same batch."""
    state, out = replay.export_table(), replay.new_batch()
    replay.sample_(out)
    expected = told(out)
    replay.import_table(state)
    torch.compile(replay.sample_, backend="eager")(out)
    assert all(torch.equal(values, expected[name]) for name, values in told(out).items())
    replay.import_table(state)


def check_clear_is_refused(replay: DeviceReplay) -> None:
    """Others may train on the rest of a global batch, and what was reported may be theirs."""
    replay.sample()
    with pytest.raises(StoreError, match="must be taken between two global batches"):
        replay.clear()
    for _ in range(replay.batch_info.accumulation - 1):
        replay.sample()


def check_going_on(replay: DeviceReplay, folder: str) -> None:
    """What was saved goes on as it would have gone on."""
    state = replay.save(folder)
    expected = run(replay)
    replay.load(folder, state)
    for before, after in zip(expected, run(replay), strict=True):
        for one, other in zip(before, after, strict=True):
            assert all(torch.equal(one[name], other[name]) for name in one)


def check_case(case: dict[str, Any]) -> None:
    section, tensor, added = case["section"], case["tensor"], case["added"]
    replicas, accumulation = world // tensor, section["gradient_accumulation_steps"]
    prioritized = section["sampler"]["kind"] in ("prioritized", "top_k")
    at = world - 1 - rank if tensor > 1 else rank  # places need not follow ranks
    place = RankCoordinates(at // tensor, replicas, at % tensor, tensor)
    sizes = {key: section.pop(key) for key in ("batch_size", "gradient_accumulation_steps")}
    micro = sizes["batch_size"] // (accumulation * replicas)
    info = BatchInfo(micro, accumulation, replicas, tensor)
    options = {"schemas": None if added is None else {"main": SCHEMA}}
    with DeviceReplay(section, DEVICE, info=info, place=place, **options) as replay:
        if added is not None:
            add(replay, added[place.data_rank])
        parts, state = run(replay), replay.statistics()
        highest = highest_of(replay)
        check_compiled(replay)
        if added is not None and accumulation > 1:
            check_clear_is_refused(replay)
        check_going_on(replay, sys.argv[2])
        steps = replay.num_steps
    gathered: list[Any] = [None] * world
    dist.all_gather_object(gathered, (place.data_rank, parts, state, highest))
    held: list[Any] = [None] * world
    dist.all_gather_object(held, steps if place.tensor_rank == 0 else 0)
    one_info = BatchInfo(micro * replicas, accumulation, 1)
    with DeviceReplay(section, DEVICE, process_group=alone, info=one_info, **options) as one:
        if added is not None:
            add(one, [pair for of_replica in added for pair in of_replica])
        expected = run(one)
        if prioritized and added is not None:
            items = sum(known["items"] for _, _, known, _ in gathered) // tensor
            assert items == one.statistics()["items"], (items, one.statistics())
            assert {known for *_, known in gathered} == {highest_of(one)}, "what is added next begins with it"
        one.load(sys.argv[2])  # what all replicas have saved, on one
        assert one.num_steps == (sum(held) if added is not None else steps)
        one.sample()
    dist.barrier()  # the next case saves into the folder
    for turn in range(GLOBAL_BATCHES):
        got = merged([part for _, of_rank, _, _ in gathered for part in of_rank[turn]])
        want = merged(expected[turn])
        for name, values in want.items():
            assert torch.equal(values, got[name]), (case, turn, name, values, got[name])
    for replica, of_rank, _, _ in gathered:  # tensor ranks have the same
        first = next(other for its, other, _, _ in gathered if its == replica)
        for turn in range(GLOBAL_BATCHES):
            for mine, theirs in zip(of_rank[turn], first[turn], strict=True):
                assert all(torch.equal(mine[name], theirs[name]) for name in mine)


for case in json.loads(sys.argv[1]):
    check_case(case)
print("done", flush=True)
dist.destroy_process_group()
