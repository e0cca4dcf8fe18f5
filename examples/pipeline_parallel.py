"""Train a Decision Transformer that is divided into the stages of a pipeline (DeepSpeed's
PipelineModule).

    gear ingest examples/data/hopper_expert.hdf5 data/hopper
    deepspeed --num_gpus 2 examples/pipeline_parallel.py

`gear.pipeline` in the config names the inputs of the first stage and the labels of the last one;
inner stages read nothing. Both ends get the same samples.
"""

from __future__ import annotations

from typing import Any

import deepspeed
import torch.distributed as dist
from common import (
    ACTION,
    OBSERVATION,
    arguments,
    config_of,
    context_of,
    masked_mean,
    report,
    squared_error,
)
from decision_transformer import Block, Embedding, Head, attention_mask
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import Tensor

import deepspeed_gear

STAGES = 2
BLOCKS = 2


class FirstLayer(Embedding):
    """Takes the fields of `gear.pipeline.inputs`, in its order."""

    def forward(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        observation, action, return_to_go, timestep, real = inputs
        fields = {
            "observation": observation,
            "action": action,
            "return_to_go": return_to_go,
            "timestep": timestep,
        }
        return super().forward(fields, real)[0], real


class MiddleLayer(Block):
    """Passes on the mask of real steps."""

    def forward(self, both: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, real = both
        return super().forward(x, attention_mask(real)), real


class LastLayer(Head):
    def forward(self, both: tuple[Tensor, Tensor]) -> Tensor:
        return super().forward(both[0])


def loss_of(predicted: Tensor, labels: tuple[Tensor, ...]) -> Tensor:
    """Return the loss from the fields of `gear.pipeline.labels`, in its order."""
    action, real, valid = labels
    return masked_mean(squared_error(predicted, action), real & valid[:, None])


def pipeline(config: dict[str, Any], seed: int) -> PipelineModule:
    """Return the part of the model that is this rank's: 2 stages, and half as many replicas as
    ranks.
    """
    layers = [
        LayerSpec(FirstLayer, OBSERVATION, ACTION, context_of(config)),
        *(LayerSpec(MiddleLayer) for _ in range(BLOCKS)),
        LayerSpec(LastLayer, ACTION),
    ]
    deepspeed.init_distributed()  # a PipelineModule needs the process group
    return PipelineModule(
        layers,
        num_stages=STAGES,
        loss_fn=loss_of,
        partition_method="uniform",
        seed_layers=True,  # the same weights for any number of stages
        base_seed=seed,
    )


def main() -> None:
    args = arguments(__doc__, "configs/pipeline_parallel.json")
    config, steps = config_of(args)
    model = pipeline(config, args.seed)
    engine, *_ = deepspeed_gear.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )

    def evaluate() -> float:
        held_out = engine.gear_iterator("eval")
        return float(engine.eval_batch(held_out, num_micro_batches=len(held_out)))

    def train() -> None:
        for _ in range(steps):
            engine.train_batch(data_iter=engine.gear_iterator())

    replicas = engine.gear.num_replicas
    report(evaluate, train, steps=steps, replicas=replicas)
    engine.destroy()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
