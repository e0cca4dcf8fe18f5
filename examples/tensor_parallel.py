"""Train a Decision Transformer whose linear layers are split over tensor ranks (DeepSpeed's
AutoTP).

    gear ingest examples/data/hopper_expert.hdf5 data/hopper
    deepspeed --num_gpus 2 examples/tensor_parallel.py

The tensor ranks of a replica hold slices of the same layers, so they need the same samples: each
gathers them from the store, nothing is broadcast. With 4 ranks there are 2 replicas with different
samples.

`tensor_parallel` in the config lists the layers that are split. The model's `qkv` is fused, rows of
all queries, then keys, then values: "shape": [3, -1] splits each of the three, so that a tensor
rank holds whole heads.
"""

from __future__ import annotations

import torch.distributed as dist
from common import (
    ACTION,
    OBSERVATION,
    arguments,
    config_of,
    context_of,
    held_out_loss,
    masked_mean,
    report,
    squared_error,
)
from decision_transformer import DecisionTransformer
from torch import Tensor

import deepspeed_gear
from deepspeed_gear import Batch


def main() -> None:
    args = arguments(__doc__, "configs/tensor_parallel.json")
    config, steps = config_of(args)
    model = DecisionTransformer(OBSERVATION, ACTION, context_of(config))
    engine, *_ = deepspeed_gear.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )

    def errors(batch: Batch) -> tuple[Tensor, Tensor]:
        real = batch.mask["action"]
        return squared_error(engine(batch, real), batch["action"]), real

    def train() -> None:
        for _ in range(steps * engine.gradient_accumulation_steps()):
            loss = masked_mean(*errors(engine.gear_sample()))
            engine.backward(loss)
            engine.step()

    replicas = engine.gear.num_replicas
    report(lambda: held_out_loss(engine, errors), train, steps=steps, replicas=replicas)
    engine.destroy()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
