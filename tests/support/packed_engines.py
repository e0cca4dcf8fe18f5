"""Engines that train packed batches, and their saves in the middle of a rollout batch, on any
ranks.
"""

from collections.abc import Iterator
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from rollout_support import responses
from torch import Tensor, nn

import deepspeed_gear
from deepspeed_gear import MicroBatch
from deepspeed_gear.replay.packed.rollout import Rollout, TrainStep

COUNT = 20  # responses of a rank, which adds its own
COLUMNS = ("old", "advantage")


class Scores(nn.Module):
    """A score for each token, from its embedding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(1000, 4)
        self.head = nn.Linear(4, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        return torch.tanh(self.head(self.embed(tokens)))[..., 0]


def engine_of(gear: dict[str, Any] | None, **options: Any) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "managed_gradient_accumulation": False,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gear": gear,
        **options,
    }
    config = {name: value for name, value in config.items() if value is not None}
    model = Scores()
    make = deepspeed.initialize if gear is None else deepspeed_gear.initialize
    return make(model=model, model_parameters=model.parameters(), config=config)[0]


def fill(engine: Any) -> None:
    for response in responses(COUNT, seed=dist.get_rank()):
        engine.gear.add(response)
    dist.barrier()


def scores_of(engine: Any, micro: MicroBatch) -> Tensor:
    return engine(micro["tokens"])


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
    """Train the steps that are left; return them, the weights, and the next rollout batch's
    trajectories.
    """
    first = rollout.steps_done
    steps = [train(engine, step) for step in left]
    weights = [parameter.tolist() for parameter in engine.module.parameters()]
    following = engine.gear_rollout().trajectory_id.tolist()
    engine.destroy()
    return {"first": first, "steps": steps, "weights": weights, "following": following}


def save(gear: dict[str, Any], folder: str) -> dict[str, Any]:
    """Save an engine after one step of a rollout batch, and go on; `gear` has a `plan_width`."""
    engine = engine_of(gear)
    fill(engine)
    engine.gear_rollout().close()
    assert engine.gear.state_dict()["rollout"]["first_item"] > 0
    rollout = engine.gear_rollout()
    for micro in rollout.forward("old"):
        micro.fill(old=scores_of(engine, micro).detach())
    rollout.advantages("dr_grpo", group="prompt")
    steps = iter(rollout)
    train(engine, next(steps))
    engine.save_checkpoint(folder)
    return go_on(engine, rollout, steps)


def load(gear: dict[str, Any], folder: str) -> dict[str, Any]:
    """Load what any ranks have saved, and go on."""
    engine = engine_of(gear)
    assert engine.load_checkpoint(folder)[0] is not None
    rollout = engine.gear_rollout()
    assert list(rollout.forward("old")) == []  # it was filled before the save
    return go_on(engine, rollout, iter(rollout))
