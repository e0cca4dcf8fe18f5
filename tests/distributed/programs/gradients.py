"""Gradients of ranks in one launch: what frameworks divide them by, and those of packed micro batches.

The last argument is a task: `packed`, the cases of packed_gradients.py; `divisors`, cases that train a step
with unequal, weighted losses, whose weights are compared with those of one process; `out`, the folder of each
rank's results. Those of a divisor are its value and the largest error relative to the largest gradient of a
parameter, or the refusal. tests/support/gradient_cases.py has all cases.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import deepspeed
import packed_gradients
import torch
import torch.distributed as dist
from deepspeed.sequence.layer import DistributedAttention
from torch import Tensor, nn
from trainers import EngineTrainer, ModuleTrainer, Weights

from deepspeed_gear.distributed.gradient_divisor import gradient_divisor
from deepspeed_gear.errors import ConfigError

NUM_MICRO = 3
WORDS, WIDTH, HEADS = 11, 8, 2


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attend to all places. [1, N, heads, width] each."""
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    return nn.functional.scaled_dot_product_attention(query, key, value).transpose(1, 2)


class Model(nn.Module):
    """Token logits from tokens, [N] -> [N, WORDS]; about 750 parameters.

    Args:
        group: The sequence ranks of whose N a rank has a slice; None: it has all.
    """

    def __init__(self, group: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.qkv = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, 24)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.up, self.down, self.head = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH), nn.Linear(WIDTH, WORDS)
        self.attention: Any = attend
        if group is not None:
            whole = DistributedAttention(attend, group, scatter_idx=2, gather_idx=1)
            self.attention = lambda *qkv: whole(*qkv, 0)  # 0: the axis of samples

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        query, key, value = self.qkv(x).view(1, len(x), 3, HEADS, WIDTH // HEADS).unbind(2)
        x = x + self.mix(self.attention(query, key, value).reshape(len(x), WIDTH))
        return self.head(x + self.down(torch.tanh(self.up(x))))


def micro_batch(replica: int, micro: int, part: slice = slice(None)) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, targets and loss weights; the length differs between replicas and micro batches."""
    words = torch.Generator().manual_seed(1000 * replica + micro)
    count = 4 * (1 + (2 * replica + micro) % 3)
    tokens, targets = torch.randint(0, WORDS, (2, count), generator=words)
    return tokens[part], targets[part], torch.rand(count, generator=words)[part]


def loss_sum(model: Any, replica: int, micro: int, divisor: float, part: slice = slice(None)) -> Tensor:
    """Return a micro batch's part of the summed loss."""
    tokens, targets, weights = micro_batch(replica, micro, part)
    losses = nn.functional.cross_entropy(model(tokens).float(), targets, reduction="none")
    return (losses * weights).sum() * divisor


def wanted_gradients(replicas: int, dtype: torch.dtype) -> Weights:
    """Return the gradient of the sum of all losses, by one process. The summands are added in float64."""
    model = Model().to(dtype)
    sums = {name: torch.zeros_like(one, dtype=torch.float64) for name, one in model.named_parameters()}
    for replica in range(replicas):
        for micro in range(NUM_MICRO):
            model.zero_grad()
            loss_sum(model, replica, micro, 1.0).backward()
            for name, parameter in model.named_parameters():
                sums[name] += parameter.grad.double()
    return sums


def largest_error(before: Weights, after: Weights, wanted: Weights) -> float:
    """Return the largest error of a change by SGD with rate 1, as part of a parameter's largest gradient."""
    assert before.keys() == wanted.keys()
    errors = {
        name: float(
            (start.double() - after[name].double() - wanted[name]).abs().max() / wanted[name].abs().max()
        )
        for name, start in before.items()
    }
    return max(errors.values())


def tensor_slice(name: str, whole: Tensor, own: Tensor, rank: int, world: int) -> Tensor:
    """Return the part of a gradient that a tensor rank has."""
    if whole.shape == own.shape:
        return whole
    axis = 1 if name.startswith("down") else 0
    return whole.chunk(world, axis)[rank]


def outcome(case: dict[str, Any]) -> dict[str, Any]:
    """Train one step; return the divisor and the error."""
    trainer: Any
    if case["kind"] == "deepspeed":
        trainer = EngineTrainer(Model, case)
    else:
        trainer = ModuleTrainer(Model, ("", ["up"]), case["kind"], **case["options"])
    try:
        divisor, before = gradient_divisor(trainer.trained), trainer.weights()
        sequence, tensor = case.get("sequence", 1) * case.get("mesh", [1, 1])[1], case.get("tensor", 1)
        replica, place = divmod(dist.get_rank(), sequence * tensor)
        for micro in range(NUM_MICRO):
            count = len(micro_batch(replica, micro)[0]) // sequence
            part = slice(place * count, (place + 1) * count) if sequence > 1 else slice(None)
            given = trainer.trained, replica, micro, divisor, part
            trainer.backward(lambda given=given: loss_sum(*given), micro == NUM_MICRO - 1)
        trainer.step()
        dtype = next(iter(before.values())).dtype
        wanted = wanted_gradients(dist.get_world_size() // (sequence * tensor), dtype)
        wanted = {name: tensor_slice(name, one, before[name], place, tensor) for name, one in wanted.items()}
        return {"divisor": divisor, "error": largest_error(before, trainer.weights(), wanted)}
    except ConfigError as error:
        return {"refused": str(error)}
    finally:
        trainer.close()


if __name__ == "__main__":
    task = json.loads(sys.argv[-1])
    deepspeed.init_distributed("gloo")
    torch.set_num_threads(1)
    found = {
        "packed": packed_gradients.outcomes(task["packed"]),
        "divisors": {name: outcome(case) for name, case in task["divisors"].items()},
    }
    (Path(task["out"]) / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
