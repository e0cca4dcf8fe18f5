"""Rollout batches over sequence ranks, written by place. The test runs `trained` in one process too.

The last argument is a task: `sections` by name, `sequence`, the ranks that share a sequence, `out`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rollout_support import COUNT, responses

from deepspeed_gear import MicroBatch, Replay
from deepspeed_gear.distributed.topology import RankCoordinates

COLUMNS = ("old", "by_token", "by_sequence")


def values_of(micro: MicroBatch) -> torch.Tensor:
    """Return what a model gives for each place: it depends on the token and its position only."""
    return torch.sin(micro["tokens"].float() + 0.1 * micro.position_ids) + 0.1 * micro["logp"]


def trained(replay: Replay) -> dict[str, Any]:
    """Train a rollout batch; return this rank's values and gradients by place, and metrics by step.

    Places are [trajectory id, position], [n, 2].
    """
    rollout, first = replay.rollout(), replay.gradient_divisor
    for micro in rollout.forward("old", tokens=160):
        micro.fill(old=values_of(micro))
    for name, over in (("by_token", "token"), ("by_sequence", "sequence")):
        rollout.set(name, rollout.column("old"))
        rollout.whiten(name, over=over)
    places, found, metrics = [], [], []
    for step in rollout:
        sums: dict[str, list[torch.Tensor]] = {"loss": [], "ratio": [], "one": []}
        for micro in step:
            x = values_of(micro).requires_grad_()
            ratio = torch.exp(micro.per_sequence(x - micro["logp"], "mean"))  # GSPO's
            loss = micro.sum(ratio * micro["by_token"] + 0.1 * micro.per_sequence(x, "sum") * x)
            (gradient,) = torch.autograd.grad(loss, x)
            for name, value in (("loss", loss), ("ratio", micro.sum(ratio)), ("one", micro.sum(x * 0 + 1))):
                sums[name].append(value.detach())
            is_real = micro.sequence[0] >= 0
            ids = micro.trajectory_id[micro.sequence[0][is_real]]
            places.append(torch.stack([ids, micro.position_ids[0][is_real]], dim=1))
            columns = [micro[name] for name in COLUMNS]
            rows = torch.cat([ratio.detach(), gradient / first, *columns])
            found.append(rows.T[is_real])
        metrics.append(step.mean(**sums))
    return {"places": torch.cat(places).numpy(), "values": torch.cat(found).numpy(), "metrics": metrics}


def main() -> None:
    task = json.loads(sys.argv[-1])
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, sequence = dist.get_rank(), task["sequence"]
    place = RankCoordinates(
        data_rank=rank // sequence,
        data_world=dist.get_world_size() // sequence,
        sequence_rank=rank % sequence,
        sequence_world=sequence,
    )
    for name, section in task["sections"].items():
        with Replay(section, place=place) as replay:
            if rank == 0:
                for response in responses(COUNT):
                    replay.add(response)
            dist.barrier()
            found = trained(replay)
        out = Path(task["out"]) / f"{name}.{rank}"
        np.savez(f"{out}.npz", places=found["places"], values=found["values"])
        Path(f"{out}.json").write_text(json.dumps(found["metrics"]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
