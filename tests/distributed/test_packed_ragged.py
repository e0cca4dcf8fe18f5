"""Ragged columns over ranks: passes fill them, and packs have the values that one rank has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from process_support import call_on_ranks
from ragged_tables import MAX, ragged_section
from rollout_support import COUNT, responses

from deepspeed_gear import MicroBatch, Ragged, Replay
from deepspeed_gear.distributed.topology import RankCoordinates

NAMES = ("ids", "logs")
Found = dict[tuple[int, int], list[list[float]]]


def of_places(micro: MicroBatch) -> dict[str, Ragged]:
    """Return what a teacher gives: at each place some values that depend on its token only."""
    tokens = micro["tokens"][0].long()
    counts = torch.where(micro.sequence[0] >= 0, tokens % 7 * (tokens % 3), 0).clamp(max=MAX)
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    owner = torch.arange(len(tokens)).repeat_interleave(counts)
    place = torch.arange(len(owner)) - offsets[:-1][owner]
    ids = (tokens[owner] * 100 + place).int()
    return {"ids": Ragged(ids, offsets), "logs": Ragged(-(place % 16).float(), offsets)}


def filled_and_read(replay: Replay) -> tuple[Found, Found]:
    """Fill the columns of all trajectories; return the values of this rank's places, and of all
    steps as they are stored. By trajectory and step.
    """
    for micro in replay.forward(*NAMES, tokens=160):
        micro.fill(**of_places(micro))
    rollout = replay.rollout()
    seen: Found = {}
    for step in rollout:
        for micro in step:
            values = [micro.ragged(name) for name in NAMES]
            numbers = micro.trajectory_id.tolist()
            positions = micro.position_ids[0].tolist()
            for place, owner in enumerate(micro.sequence[0].tolist()):
                if owner >= 0:
                    key = numbers[owner], positions[place]
                    seen[key] = [one[place].tolist() for one in values]
    stored: Found = {}
    for number, one in enumerate(replay.read(range(COUNT))):
        for at in range(len(one["tokens"])):
            stored[number, at] = [one[name][at].tolist() for name in NAMES]
    return seen, stored


def on_ranks(config: dict[str, Any], sequence: int) -> tuple[Found, Found]:
    """Fill and read on ranks of which `sequence` share their sequences."""
    torch.set_num_threads(1)
    rank = dist.get_rank()
    world = dist.get_world_size() // sequence
    place = RankCoordinates(
        rank // sequence, world, sequence_rank=rank % sequence, sequence_world=sequence
    )
    with Replay(config, place=place) as replay:
        for response in responses(COUNT) if rank == 0 else ():
            replay.add(response)
        dist.barrier()
        found = filled_and_read(replay)
        dist.barrier()
    return found


@pytest.mark.parametrize("sequence", [1, 2])
def test_two_ranks_fill_and_read_what_one_does(sequence: int) -> None:
    options = {"rollout": {"trajectories": 30, "minibatches": 2}}
    with Replay(ragged_section(late=True, **options)) as replay:
        for response in responses(COUNT):
            replay.add(response)
        seen, stored = filled_and_read(replay)
    assert any(ids for ids, _ in stored.values())
    assert all(stored[number, 0] == [[], []] for number in range(COUNT)), "predicted by no place"
    ran = call_on_ranks(2, on_ranks, ragged_section(late=True, **options), sequence)
    together: Found = {}
    for own, there in ran:
        assert there == stored
        assert own
        assert not own.keys() & together.keys(), "every place is on one rank"
        together |= own
    assert together == seen
