"""Exchange and Replay in a plain gloo group, without an engine: errors of all ranks, DDP, parts
of the world.
"""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from batch_records import Arrays, alone, assert_same, in_order, record, stacked
from gear_support import config_of, shared_files
from process_support import call_on_ranks
from torch.nn.parallel import DistributedDataParallel

from deepspeed_gear import Batch, Replay
from deepspeed_gear.distributed.control_plane import ControlPlane, rendezvous
from deepspeed_gear.engine import engine_checkpoint
from deepspeed_gear.errors import CheckpointError, DataError, PeerError


@pytest.fixture(scope="module")
def ran(
    dataset: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[dict[str, Arrays]], Arrays]:
    """Run four ranks, staged to a device; return what they see, and what one process sees."""
    section = config_of(dataset, batch_size=12, prefetch=1, sampler={"unit": "step"}, seed=9)
    staged = {**section, "transfer": {"way": "staged"}}
    found = call_on_ranks(4, in_a_group, staged, tmp_path_factory.mktemp("plain"))
    assert shared_files(section["shared_memory"]["prefix"]) == []
    return found, alone(section, 6, transform=with_words)


@pytest.mark.parametrize(
    ("name", "ranks"), [("all", [0, 1, 2, 3]), ("pair", [0, 1]), ("pair", [2, 3])]
)
def test_ranks_share_what_one_process_sees(
    ran: tuple[list[dict[str, Arrays]], Arrays], name: str, ranks: list[int]
) -> None:
    """Ids, anchors, rows and the words of a transform, for every number of ranks."""
    found, wanted = ran
    assert_same(in_order([found[rank][name] for rank in ranks]), wanted, name)


def with_words(batch: Batch, words: torch.Tensor) -> Batch:
    batch["word"] = words
    return batch


def in_a_group(section: dict[str, Any], folder: Path) -> dict[str, Arrays]:
    agreeing()
    failing()
    meeting()
    resuming(folder)
    return {"all": training(section), "pair": parts_of_the_world(section)}


def agreeing() -> None:
    """Many exchanges one after the other, at different times on each rank."""
    rank = dist.get_rank()
    world = dist.get_world_size()
    for round_ in range(8):
        control_plane = ControlPlane()
        time.sleep(0.02 * ((rank + round_) % 3))
        assert control_plane.all_gather((round_, rank)) == [(round_, r) for r in range(world)]
        assert control_plane.broadcast(f"from {rank}", source=world - 1) == f"from {world - 1}"
        control_plane.barrier()
        control_plane.close()


def failing() -> None:
    """An error on one rank is raised there as it is, and with its text on the others; then all go
    on.
    """
    rank = dist.get_rank()
    control_plane = ControlPlane()

    def action() -> int:
        if rank == 1:
            raise DataError("the file F", "must be there", None, "copy it")
        if rank == 2:
            raise ZeroDivisionError("a bug")
        return rank

    kind = {1: DataError, 2: ZeroDivisionError}.get(rank, PeerError)
    for _ in range(2):
        with pytest.raises(kind) as error:
            control_plane.attempt("looking at F", action)
        if kind is PeerError:
            text = "the file F must be there; copy it [raised on rank 1: looking at F]"
            assert str(error.value) == text
    assert control_plane.attempt("nothing", lambda: rank) == rank
    control_plane.close()


def meeting() -> None:
    """Keys in the store where ranks have met belong to this start of them, like those of torch's
    groups.
    """
    rank = dist.get_rank()
    world = dist.get_world_size()
    default = dist.distributed_c10d._get_default_store()
    connection = rendezvous(20.0)
    connection.set(f"gear/{rank}", "here")
    assert default.get(f"gear/{(rank + 1) % world}") == b"here"
    assert connection.get(f"gear/{(rank + 1) % world}") == b"here"
    dist.barrier()


def resuming(folder: Path) -> None:
    """A checkpoint of which one rank has no part is refused on all; none may wait for another in
    its load.
    """
    control_plane = ControlPlane()
    replay: Any = SimpleNamespace(control_plane=control_plane)  # the rest of it is not touched
    with pytest.raises(CheckpointError, match=r"got 'none on ranks \[1\]'"):
        engine_checkpoint.load(replay, folder, None if dist.get_rank() == 1 else {})
    control_plane.close()


def recorded(replay: Replay, count: int) -> Arrays:
    replay.transform = with_words
    return stacked([record(replay.sample()) for _ in range(count)])


def training(section: dict[str, Any]) -> Arrays:
    """DDP over all ranks; every rank has its own part of each global batch."""
    model = DistributedDataParallel(torch.nn.Linear(3, 2))
    with Replay(section) as replay:
        found = recorded(replay, 6)
        batch = replay.sample()
        (model(batch["observation"] / 1e5) - batch["action"] / 1e5).square().mean().backward()
    assert model.module.weight.grad is not None
    return found


def parts_of_the_world(section: dict[str, Any]) -> Arrays:
    """Two pairs, each with a Replay of its own."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    for _ in range(3):
        with Replay(section, process_group=pairs[dist.get_rank() // 2]) as replay:
            assert replay.num_replicas == 2
            found = recorded(replay, 6)
    return found
