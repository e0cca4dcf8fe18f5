"""Train a Decision Transformer whose feed-forward layers are experts on different ranks
(DeepSpeed's MoE).

    gear ingest examples/data/hopper_expert.hdf5 data/hopper
    deepspeed --num_gpus 2 examples/expert_parallel.py

Experts are exchanged between data-parallel ranks, so the data do not change: each rank has its own
samples.
"""

from __future__ import annotations

import deepspeed
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
from decision_transformer import WIDTH, DecisionTransformer
from deepspeed.moe.layer import MoE
from torch import Tensor, nn

import deepspeed_gear
from deepspeed_gear import Batch

# of a layer; weight of the loss that spreads tokens over them
EXPERTS = 4
BALANCE = 0.01


class Experts(nn.Module):
    """A feed-forward layer with several experts, one of which each token uses."""

    def __init__(self, expert: nn.Module) -> None:
        super().__init__()
        ranks = dist.get_world_size()
        self.moe = MoE(WIDTH, expert, num_experts=EXPERTS, ep_size=ranks, k=1, use_rts=False)
        self.imbalance: Tensor | None = None  # of the last forward pass

    def forward(self, x: Tensor) -> Tensor:
        x, self.imbalance, _ = self.moe(x)
        return x


def main() -> None:
    args = arguments(__doc__, "configs/expert_parallel.json")
    config, steps = config_of(args)
    deepspeed.init_distributed()
    model = DecisionTransformer(OBSERVATION, ACTION, context_of(config))
    for block in model.blocks:
        block.mlp = Experts(block.mlp)
    engine, *_ = deepspeed_gear.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )

    def errors(batch: Batch) -> tuple[Tensor, Tensor]:
        real = batch.mask["action"]
        return squared_error(engine(batch, real), batch["action"]), real

    def train() -> None:
        for _ in range(steps * engine.gradient_accumulation_steps()):
            loss = masked_mean(*errors(engine.gear_sample()))
            engine.backward(loss + BALANCE * sum(block.mlp.imbalance for block in model.blocks))
            engine.step()

    replicas = engine.gear.num_replicas
    report(
        lambda: held_out_loss(engine, errors),
        train,
        steps=steps,
        replicas=replicas,
        experts=EXPERTS,
    )
    engine.destroy()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
