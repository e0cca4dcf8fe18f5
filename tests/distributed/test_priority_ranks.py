"""Prioritized and relabelled runs: the same batches on any ranks, in any division, and after a
resume.
"""

import os
import random
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from batch_records import SAMPLES, Arrays, assert_same, in_order, record, stacked
from gear_support import SCHEMA, config_of, lengths_of, shared_files, trajectory, write_dataset
from process_support import call_on_ranks
from replay_support import Elsewhere, read_late, streams_of
from store_support import check_whole

from deepspeed_gear import Batch, Replay
from deepspeed_gear.batching.transfer.cuda_streams import HostEvent
from deepspeed_gear.errors import DataError, PeerError

GLOBAL_BATCH = 32
NUM_BATCHES = 30
SAVED = 13
SAMPLER = {
    "kind": "prioritized",
    "unit": "step",
    "alpha": {"linear": [0.9, 0.3, 25]},
    "alpha_every": 5,
    "beta": {"linear": [0.4, 1.0, 20]},
}
BY_TRAJECTORY = {**SAMPLER, "unit": "trajectory", "stratified": True, "normalize": "table"}
TOP = {"kind": "top_k", "unit": "step"}
FIELDS = {"code": {"offset": -2, "length": 3}, "observation": {}, "return_to_go": {}}
HINDSIGHT = {
    "hindsight": {},
    "fields": {"goal": {"column": "code", "hindsight": "code"}, "observation": {}},
}
PREFETCHES = (0, 2)
Ran = dict[int, list[dict[str, Arrays]]]  # by world: what each rank has seen of each case
pytestmark = pytest.mark.timeout(600)  # of three launches


def section(**options: Any) -> dict[str, Any]:
    tables = {"main": {"capacity_steps": 500, "capacity_trajectories": 24}}
    given = {
        "sampler": SAMPLER,
        "fields": FIELDS,
        "batch_size": GLOBAL_BATCH,
        "seed": 4,
        "tables": tables,
    }
    return config_of(**{**given, **options})


def cases(folder: Path, world: int) -> dict[str, Any]:
    """Return what a group of ranks runs: two save what one and four go on with; they report late,
    too.
    """
    changing: dict[str, Any] = {"last": NUM_BATCHES, "changes": True}
    accumulated = section(gradient_accumulation_steps=4)
    found: dict[str, Any] = {
        "plain": {"section": section(), **changing},
        "accumulated": {"section": accumulated, **changing},
        "ahead": {"section": section(prefetch=2), "last": NUM_BATCHES},
        "trajectories": {"section": section(sampler=BY_TRAJECTORY), **changing},
        "top": {"section": section(sampler=TOP), **changing},
        "relabelled": {"section": section(sampler={"unit": "step"}, **HINDSIGHT), "last": 5},
    }
    for prefetch in PREFETCHES:
        where = str(folder / f"saved.{prefetch}")
        action = {"save": where} if world == 2 else {"load": where}
        resumed = {"section": section(prefetch=prefetch), "first": SAVED, "last": NUM_BATCHES}
        found[f"resumed.{prefetch}"] = {**resumed, **action}
    if world == 2:
        found["stopping"] = {"section": section(timeout_s=3.0), "last": 0}
        sampler = {"kind": "prioritized", "unit": "step", "alpha": 0.7, "beta": 0.5}
        options = {"sampler": sampler, "fields": {"code": {}}, "batch_size": 16}
        data = write_dataset(folder / "set", lengths_of(20))
        found["late"] = {
            "sections": [
                config_of(
                    data, **options, prefetch=prefetch, gradient_accumulation_steps=accumulation
                )
                for prefetch in PREFETCHES
                for accumulation in (1, 2)
            ]
        }
    return found


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Run all cases on two ranks, then on one and on four; return what each rank has seen."""
    folder = tmp_path_factory.mktemp("ranks")
    found = {}
    for world in (2, 1, 4):
        found[world] = call_on_ranks(world, run_cases, cases(folder, world))
        assert shared_files(section()["shared_memory"]["prefix"]) == []
    return found


def batches(ran: Ran, name: str, world: int) -> Arrays:
    """Return the global batches of a run. [batches, B, ...] by name."""
    return in_order([of_rank[name] for of_rank in ran[world]], GLOBAL_BATCH)


@pytest.mark.parametrize(
    ("name", "like", "world"),
    [
        *(("plain", "plain", world) for world in (2, 4)),
        *(("accumulated", "plain", world) for world in (1, 2, 4)),
        *(
            (name, name, world)
            for name in ("ahead", "trajectories", "top", "relabelled")
            for world in (2, 4)
        ),
    ],
)
def test_a_run_is_the_same_in_every_division(ran: Ran, name: str, like: str, world: int) -> None:
    """With a lag, by trajectory and stratified, the highest priorities, and goals by hindsight,
    too.
    """
    assert_same(batches(ran, name, world), batches(ran, like, 1))


@pytest.mark.parametrize("prefetch", PREFETCHES)
@pytest.mark.parametrize("world", [1, 4])
def test_a_resumed_run_has_the_batches_that_would_have_come(
    ran: Ran, prefetch: int, world: int
) -> None:
    name = f"resumed.{prefetch}"
    wanted = batches(ran, name, 2)
    assert wanted["sample_number"][:, 0].tolist() == [
        GLOBAL_BATCH * key for key in range(SAVED, NUM_BATCHES)
    ]
    assert_same(batches(ran, name, world), wanted)


def test_the_runs_show_something(ran: Ran) -> None:
    """Priorities concentrate and change, the lag is seen, and so are items that come and go."""
    plain = batches(ran, "plain", 1)
    ahead = batches(ran, "ahead", 1)
    assert set(plain) >= {
        "trajectory_id",
        "anchor",
        "probability",
        "is_weight",
        "code",
        "return_to_go",
    }
    assert (plain["probability"][0] == plain["probability"][0, 0]).all()
    assert plain["probability"][20].max() > 5 * plain["probability"][20].min()
    assert plain["is_weight"].max() == 1
    assert plain["is_weight"].min() < 0.3
    duplicates = [
        len(set(zip(*pair, strict=True))) < GLOBAL_BATCH
        for pair in zip(plain["trajectory_id"], plain["anchor"], strict=True)
    ]
    assert sum(duplicates) > 5
    assert (plain["trajectory_id"][:10] < 24).all()
    assert (plain["trajectory_id"][10:] >= 24).any()
    assert not np.isin(plain["trajectory_id"][10:], [0, 3, 5, 8]).any()
    differ = (plain["trajectory_id"] != ahead["trajectory_id"]).any(axis=1)
    assert not differ[0]
    assert differ[1:].all(), "a lag of two changes nothing"
    assert np.array_equal(ahead["probability"][1], ahead["probability"][0]), "seen too early"
    top = batches(ran, "top", 1)
    for ids, anchors in zip(top["trajectory_id"], top["anchor"], strict=True):
        assert len(set(zip(ids, anchors, strict=True))) == GLOBAL_BATCH
    goals = batches(ran, "relabelled", 1)
    is_relabelled = goals["goal_step"] >= 0
    assert 0 < is_relabelled.sum() < is_relabelled.size
    assert (goals["goal"][is_relabelled] % 1000 == goals["goal_step"][is_relabelled]).all()


# ---- on each rank --------------------------------------------------------------------------------

LENGTHS = [1 + 7 * number % 23 for number in range(24)]
NAMES = (*SAMPLES, "probability", "is_weight", "epoch", "num_steps", "goal_step")
CHANGES = 9  # the global batch after which trajectories come and go


def run_cases(cases: dict[str, Any]) -> dict[str, Arrays]:
    """Run each case to its end; return what this rank has seen. Its reports depend on the sample
    alone.
    """
    found = {}
    for name, case in cases.items():
        if name == "stopping":
            stopping(case)
        elif name == "late":
            reporting_late(case["sections"])
        else:
            found[name] = running(case)
    return found


def made(section: dict[str, Any]) -> Replay:
    replay = Replay(section, schemas={"main": SCHEMA})
    if dist.get_rank() == 0:
        for number, steps in enumerate(LENGTHS):
            replay.add(trajectory(number, steps))
    dist.barrier()
    return replay


def priorities(batch: Batch) -> torch.Tensor:
    """Depend on item and sample number: of an item that was drawn twice the last report
    must win.
    """
    word = (batch.trajectory_id * 7919 + batch.anchor * 104729 + batch.sample_number * 31) % 1009
    return (word + 1).double().pow(2) / 1e5


def run(replay: Replay, first: int, last: int, changes: bool) -> Arrays:
    rows = []
    reports = replay.config.sampler.kind != "uniform"
    rank = dist.get_rank()
    world = dist.get_world_size()
    for step in range(first, last):
        for _ in range(replay.batch_info.accumulation):
            batch = replay.sample()
            rows.append(record(batch, NAMES))
            if rank == world - 1 and step + 1 == SAVED:
                time.sleep(0.2)  # the first rank saves already: it must wait for this report
            if reports:
                replay.update_priorities(batch, priorities(batch))
        if reports and step % 4 == 1 and rank == step // 4 % world:
            replay.set_priorities(
                [step], [float(step)], [0] if replay.config.sampler.unit == "step" else None
            )
        if changes and step == CHANGES:
            change(replay)
    return stacked(rows) if rows else {}


def change(replay: Replay) -> None:
    """Remove and add between two batches, in places that were used before; on one rank."""
    dist.barrier()
    if dist.get_rank() == 0:
        replay.remove([0, 3, 5, 8])
        for number in range(24, 28):
            replay.add(trajectory(number, LENGTHS[number % 9] + 2))
    dist.barrier()


def stopping(case: dict[str, Any]) -> None:
    """Rank 1 asks for nothing more: rank 0 gets an error that names it."""
    with made(case["section"]) as replay:
        for _ in range(3):
            replay.update_priorities(replay.sample(), torch.ones(replay.batch_info.micro))
        pids: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(pids, os.getpid())
        if dist.get_rank() == 0:
            text = rf"local rank 1 \(process {pids[1]}\) has not requested the batch"
            with pytest.raises(PeerError, match=f"{text} after them"):
                [replay.sample() for _ in range(20)]
        dist.barrier()


def running(case: dict[str, Any]) -> Arrays:
    first = case.get("first", 0)
    last = case["last"]
    with made(case["section"]) as replay:
        if "load" in case:
            replay.load(case["load"])
        if "save" in case:
            run(replay, 0, first, case.get("changes", False))
            replay.save(case["save"])
        found = run(replay, first, last, case.get("changes", False))
        dist.barrier()
        if dist.get_rank() == 0:
            check_whole(replay.tables["main"], list(streams_of(replay).values()))
        dist.barrier()
    return found


class Later:
    """Memory of the host to which values come after some time."""

    def fetch(self, values: torch.Tensor) -> tuple[torch.Tensor, HostEvent]:
        event = HostEvent()
        threading.Timer(random.random() * 0.02, event.finish).start()
        return values.as_subclass(torch.Tensor).clone(), event

    def give_back(self, host: torch.Tensor) -> None: ...


def batches_of(section: dict[str, Any], is_late: bool) -> list[list[int]]:
    """Return what a rank sees whose device computes priorities late, or early."""
    found = []
    rank = dist.get_rank()
    with Replay(section) as replay:
        read_late(replay, Later())
        for turn in range(20):
            batch = replay.sample()
            found.append(batch.sample_number.tolist() + batch.trajectory_id.tolist())
            values = (batch.sample_number % 13 + 1).float() * (batch.anchor + 1)
            if (turn + rank) % 5 != 4:  # no process has to report
                replay.update_priorities(
                    batch, values.as_subclass(Elsewhere) if is_late else values
                )
    dist.barrier()
    return found


def reporting_late(sections: list[dict[str, Any]]) -> None:
    """Late reports give the batches of early ones, and errors on all ranks."""
    rank = dist.get_rank()
    random.seed(rank)
    for section in sections:
        assert batches_of(section, True) == batches_of(section, False), section
    with Replay(sections[0]) as replay:
        read_late(replay, Later())
        batch = replay.sample()
        values = torch.full((batch.num_samples,), torch.nan if rank == 1 else 1.0)
        replay.update_priorities(batch, values.as_subclass(Elsewhere))
        wrong = pytest.raises(
            DataError if rank == 1 else PeerError, match="priority 0 must be finite"
        )
        with tempfile.TemporaryDirectory() as where, wrong:
            replay.save(where)
        replay.sample()
    dist.barrier()
