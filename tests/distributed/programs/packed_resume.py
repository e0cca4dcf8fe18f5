"""Save an engine in the middle of a rollout batch and go on, or load it on other ranks and go on.

The last argument is a task: `action`, "save" or "load"; `gear`, a section with `plan_width`; `checkpoints`;
`out`. Each rank writes the packs that it trains after the save, with columns of the rollout batch; the first
one also the weights at the end and the trajectories of the next rollout batch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import torch.distributed as dist
from engine_packed import engine_of, fill, scores_of
from engine_parts import task

from deepspeed_gear.replay.rollout import Rollout, TrainStep

COLUMNS = ("old", "advantage")


def train(engine: Any, step: Any) -> list[dict[str, Any]]:
    """Train a step; return its packs."""
    packs = []
    for micro in step:
        loss = micro.sum(scores_of(engine, micro) * (micro["advantage"] + micro["old"]))
        engine.backward(loss)
        pack = {name: micro[name].tolist() for name in COLUMNS}
        packs.append({"ids": micro.trajectory_id.tolist(), **pack})
    engine.step()
    return packs


def go_on(engine: Any, rollout: Rollout, left: Iterator[TrainStep]) -> dict[str, Any]:
    """Train the steps that are left."""
    first = rollout.steps_done
    steps = [train(engine, step) for step in left]
    weights = [parameter.tolist() for parameter in engine.module.parameters()]
    following = engine.gear_rollout().trajectory_id.tolist()
    return {"first": first, "steps": steps, "weights": weights, "following": following}


def save(given: dict[str, Any], engine: Any) -> dict[str, Any]:
    fill(engine)
    engine.gear_rollout().close()
    assert engine.gear.state_dict()["rollout"]["first_item"] > 0
    rollout = engine.gear_rollout()
    for micro in rollout.forward("old"):
        micro.fill(old=scores_of(engine, micro).detach())
    rollout.advantages("dr_grpo", group="prompt")
    steps = iter(rollout)
    train(engine, next(steps))
    engine.save_checkpoint(given["checkpoints"])
    return go_on(engine, rollout, steps)


def load(given: dict[str, Any], engine: Any) -> dict[str, Any]:
    assert engine.load_checkpoint(given["checkpoints"])[0] is not None
    rollout = engine.gear_rollout()
    assert list(rollout.forward("old")) == []  # it was filled before the save
    return go_on(engine, rollout, iter(rollout))


if __name__ == "__main__":
    deepspeed.init_distributed()
    wanted = task()
    made = engine_of(wanted["gear"])
    found = {"save": save, "load": load}[wanted["action"]](wanted, made)
    rank, world = dist.get_rank(), dist.get_world_size()
    (Path(wanted["out"]) / f"{wanted['action']}{world}.{rank}.json").write_text(json.dumps(found))
    made.destroy()
    dist.destroy_process_group()
