"""Ranks that share sequences compute from their slices what one rank computes from whole packs."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from gear_support import shared_files
from process_support import call_on_ranks
from rollout_support import COUNT, filled, responses, section

from deepspeed_gear import MicroBatch, Replay
from deepspeed_gear.distributed.topology import RankCoordinates

COLUMNS = ("old", "by_token", "by_sequence")
VALUES = ("ratio", "gradient", *COLUMNS)
FLOAT32 = 2e-6  # of the largest one: sums over up to 60 tokens in another order


def values_of(micro: MicroBatch) -> torch.Tensor:
    """Return what a model gives for each place: it depends on the token and its position only."""
    return torch.sin(micro["tokens"].float() + 0.1 * micro.position_ids) + 0.1 * micro["logp"]


def trained(replay: Replay) -> dict[str, Any]:
    """Train a rollout batch; return this rank's values and gradients by place, and metrics by step.

    Places are [trajectory id, position], [n, 2].
    """
    rollout = replay.rollout()
    first = replay.gradient_divisor
    for micro in rollout.forward("old", tokens=160):
        micro.fill(old=values_of(micro))
    for name, over in (("by_token", "token"), ("by_sequence", "sequence")):
        rollout.set(name, rollout.column("old"))
        rollout.whiten(name, over=over)
    places = []
    found = []
    metrics = []
    for step in rollout:
        sums: dict[str, list[torch.Tensor]] = {"loss": [], "ratio": [], "one": []}
        for micro in step:
            x = values_of(micro).requires_grad_()
            ratio = torch.exp(micro.per_sequence(x - micro["logp"], "mean"))  # GSPO's
            loss = micro.sum(ratio * micro["by_token"] + 0.1 * micro.per_sequence(x, "sum") * x)
            (gradient,) = torch.autograd.grad(loss, x)
            for name, value in (
                ("loss", loss),
                ("ratio", micro.sum(ratio)),
                ("one", micro.sum(x * 0 + 1)),
            ):
                sums[name].append(value.detach())
            is_real = micro.sequence[0] >= 0
            ids = micro.trajectory_id[micro.sequence[0][is_real]]
            places.append(torch.stack([ids, micro.position_ids[0][is_real]], dim=1))
            columns = [micro[name] for name in COLUMNS]
            rows = torch.cat([ratio.detach(), gradient / first, *columns])
            found.append(rows.T[is_real])
        metrics.append(step.mean(**sums))
    return {
        "places": torch.cat(places).numpy(),
        "values": torch.cat(found).numpy(),
        "metrics": metrics,
    }


def on_slices(sections: dict[str, Any], sequence: int) -> dict[str, Any]:
    """Train a rollout batch of each section on ranks of which `sequence` share their sequences."""
    torch.set_num_threads(1)
    rank = dist.get_rank()
    found = {}
    data = rank // sequence
    world = dist.get_world_size() // sequence
    place = RankCoordinates(data, world, sequence_rank=rank % sequence, sequence_world=sequence)
    for name, config in sections.items():
        with Replay(config, place=place) as replay:
            for response in responses(COUNT) if rank == 0 else ():
                replay.add(response)
            dist.barrier()
            found[name] = trained(replay)
    return found


def by_place(ranks: list[dict[str, Any]]) -> tuple[np.ndarray, np.ndarray]:
    places, values = (np.concatenate([rank[key] for rank in ranks]) for key in ("places", "values"))
    order = np.lexsort((places[:, 1], places[:, 0]))
    return places[order], values[order]


@pytest.mark.parametrize("replicas", [1, 2])
def test_slices_are_those_of_one_rank(replicas: int) -> None:
    """Filled and whitened columns, means over sequences with their gradients, and
    metrics of steps.
    """
    size = {"trajectories": 30, "minibatches": 2}
    sections = {
        name: section(rollout=size, loss={"normalize": name}) for name in ("token", "sequence")
    }
    ran = call_on_ranks(2 * replicas, on_slices, sections, 2)
    for name, config in sections.items():
        assert shared_files(config["shared_memory"]["prefix"]) == []
        with filled(config) as replay:
            alone = trained(replay)
        ranks = [found[name] for found in ran]
        assert all(len(rank["places"]) for rank in ranks)
        (places, values) = by_place(ranks)
        wanted = by_place([alone])
        assert np.array_equal(places, wanted[0])  # every place once
        for kind, found, value in zip(VALUES, values.T, wanted[1].T, strict=True):
            assert np.abs(found - value).max() <= FLOAT32 * np.abs(value).max(), (name, kind)
        for rank in ranks:
            assert len(rank["metrics"]) == 2
            for found, value in zip(rank["metrics"], alone["metrics"], strict=True):
                assert found == pytest.approx(value, rel=FLOAT32)
                assert found["one"] == pytest.approx(1)
