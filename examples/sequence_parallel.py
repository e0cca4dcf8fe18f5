"""Train a Decision Transformer on windows that are divided along the time axis (DeepSpeed-Ulysses).

    gear ingest examples/data/hopper_expert.hdf5 data/hopper
    deepspeed --num_gpus 2 examples/sequence_parallel.py

The sequence ranks of a replica have the same samples; each gathers its own slice of every window. A
step's predecessor may lie on another rank, so the actions before are a separate field, one step
earlier, and `{"derived": "position"}` gives the places of a slice in the window. With 4 ranks there
are 2 replicas.
"""

from __future__ import annotations

import deepspeed
import torch
import torch.distributed as dist
from common import (
    ACTION,
    OBSERVATION,
    arguments,
    config_of,
    context_of,
    held_out_loss,
    report,
    squared_error,
)
from decision_transformer import DecisionTransformer
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.sequence.layer import DistributedAttention
from torch import Tensor, nn

import deepspeed_gear
from deepspeed_gear import Batch

SLICES = 2


class Ulysses(nn.Module):
    """Exchanges steps for heads, so that each sequence rank attends over all steps of
    some heads.
    """

    def __init__(self, attend: nn.Module, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.attend = DistributedAttention(attend, group, scatter_idx=2, gather_idx=1)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, allowed: Tensor) -> Tensor:
        return self.attend(query, key, value, 0, None, allowed)  # 0: the axis of samples


def of_whole_window(mask: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the slices of all sequence ranks, one after the other. [B, T], bool."""
    slices = [torch.empty_like(mask) for _ in range(SLICES)]
    dist.all_gather(slices, mask.contiguous(), group=group)
    return torch.cat(slices, 1)


def main() -> None:
    args = arguments(__doc__, "configs/sequence_parallel.json")
    config, steps = config_of(args)
    deepspeed.init_distributed()
    parallel_state_sp.initialize_sequence_parallel(SLICES)
    group = parallel_state_sp.get_sequence_parallel_group()
    model = DecisionTransformer(OBSERVATION, ACTION, context_of(config))
    for block in model.blocks:
        block.attend = Ulysses(block.attend, group)
    engine, *_ = deepspeed_gear.initialize(
        model=model, model_parameters=model.parameters(), config=config, mpu=parallel_state_sp
    )

    def errors(batch: Batch) -> tuple[Tensor, Tensor]:
        real = of_whole_window(batch.mask["action"], group)  # the keys that attention may use
        return squared_error(engine(batch, real), batch["action"]), batch.mask["action"]

    def train() -> None:
        for _ in range(steps * engine.gradient_accumulation_steps()):
            batch = engine.gear_sample()
            error, real = errors(batch)
            count = real.sum()
            dist.all_reduce(count, group=group)  # of real steps: slices may hold fewer or none
            loss = (error * real).sum() / count  # sequence ranks are summed, except by ZeRO-3
            engine.backward(loss)
            engine.step()

    replicas = engine.gear.num_replicas
    report(lambda: held_out_loss(engine, errors), train, steps=steps, replicas=replicas)
    engine.destroy()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
