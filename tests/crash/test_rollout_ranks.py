"""A rank is killed, or slow, while the others are in a call of a rollout batch."""

import logging
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from group_support import GROUP, add_groups, section
from process_support import exit_status, in_child

from deepspeed_gear import Replay, timeouts
from deepspeed_gear.config import parse
from deepspeed_gear.distributed.topology import RankCoordinates
from deepspeed_gear.errors import PeerError
from deepspeed_gear.sampling.batch_sizes import BatchInfo

WORLD = 3
VICTIM = 2
CALLS = ("rollout", "items", "missing_groups", "forward", "step", "mean", "per_sequence", "save")


def calls(replay: Replay, call: str, is_victim: bool, folder: Path) -> None:
    """Make the calls of a training loop; the victim dies where the others are in the one that is
    named.
    """

    def die_at(name: str) -> None:
        if is_victim and name == call:
            time.sleep(0.3)  # the others wait by then
            os.kill(os.getpid(), signal.SIGKILL)

    die_at("missing_groups")
    replay.missing_groups()
    die_at("rollout")
    rollout = replay.rollout()
    for micro in rollout.forward("old"):
        die_at("forward")
        micro.fill(old=torch.zeros(micro["tokens"].shape))
    for step in rollout:
        die_at("step")
        sums = []
        for micro in step:
            die_at("per_sequence")
            sums.append(micro.sum(micro.per_sequence(micro["tokens"].float(), "mean")))
        die_at("mean")
        step.mean(x=sums)
    die_at("save")
    replay.save(folder / "saved")
    die_at("items")
    replay.rollout()  # no items are left, and an actor may add some


def generate(replay: Replay, is_slow: bool) -> None:
    """Fill the table as the documented loop does; a slow rank takes longer than gear.timeout_s."""
    number = 100 * is_slow
    while not replay.can_sample():
        for _ in range(replay.missing_groups()):
            time.sleep(1.2 * is_slow)
            add_groups(replay, [number])
            number += 1
    time.sleep(1.2 * is_slow)
    replay.rollout()


def train(
    folder: Path, call: str, rank: int, trains_together: bool, config: dict[str, Any]
) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=WORLD
    )
    sequence = WORLD if call == "per_sequence" else 1  # the ranks share sequences
    place = RankCoordinates(
        0 if sequence > 1 else rank, WORLD // sequence, rank % sequence, sequence
    )
    info = BatchInfo(1, 1, place.data_world) if trains_together else None
    replay = Replay(config, info=info, place=place)
    if rank == 0:
        add_groups(replay, range(4))
    dist.barrier()
    try:
        calls(replay, call, rank == VICTIM, folder)
    except PeerError as error:
        (folder / f"{call}-{rank}").write_text(str(error))


@pytest.mark.timeout(100)
@pytest.mark.parametrize(
    ("call", "has_barrier"), [*((call, True) for call in CALLS), ("mean", False)]
)
def test_a_killed_rank_is_named_on_all_others(call: str, has_barrier: bool, tmp_path: Path) -> None:
    """In its sums where ranks share no batch barrier."""
    config = section(GROUP, max_times_sampled=1, writers=1, timeout_s=60.0)
    config["pack"]["pad"]["multiple"] = 2 * WORLD
    children = [
        in_child(lambda r=r: train(tmp_path, call, r, has_barrier, config)) for r in range(WORLD)
    ]
    assert [exit_status(child) for child in children] == [0, 0, -signal.SIGKILL]
    for rank in range(VICTIM):
        text = (tmp_path / f"{call}-{rank}").read_text()
        assert f"rank {VICTIM} must run while" in text


@pytest.mark.timeout(100)
def test_a_rank_that_generates_for_longer_is_waited_for_and_logged(tmp_path: Path) -> None:
    config = section(GROUP, max_times_sampled=1, timeout_s=1.0)

    def run(rank: int) -> None:
        timeouts.LOG_EVERY_S = 0.5
        logging.basicConfig(filename=tmp_path / f"log-{rank}", force=True)
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/r", rank=rank, world_size=2)
        generate(Replay(config, info=BatchInfo(1, 1, 2)), is_slow=rank == 1)

    children = [in_child(lambda r=r: run(r)) for r in range(2)]
    assert [exit_status(child) for child in children] == [0, 0]
    lines = (tmp_path / "log-0").read_text().splitlines()
    assert sum("can_sample() or missing_groups() has waited" in line for line in lines) >= 2
    assert any(
        "gear: rank 0 has waited" in line for line in lines
    )  # at the batch barrier of rollout()
    assert all(line.endswith("s for rank 1") for line in lines if "has waited" in line)


def test_the_limit_of_generation_is_that_of_the_rate_limiter() -> None:
    limits: list[tuple[dict[str, Any], float]] = [({}, 600), ({"timeout_s": 700.0}, 700)]
    limits += [({"rate_limiter": {"min_size": 1, "timeout_s": 7200.0}}, 7200)]
    for options, limit in limits:
        assert parse(section(GROUP, **options)).rollout_timeout_s == limit
