"""What pages take for granted, in small: data, tables and models. Hidden Python of pages imports
it.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gear_support import prefix
from torch import nn

import deepspeed_gear
from deepspeed_gear import Batch, DatasetWriter, Schema

COLUMNS = {  # of a table of CartPole
    "observation": {"dtype": "float32", "shape": [4], "role": "observation", "rows": "T+1"},
    "action": {"dtype": "int64", "role": "action"},
    "reward": {"dtype": "float32", "role": "reward"},
    "terminated": {"dtype": "bool", "role": "terminated"},
    "truncated": {"dtype": "bool", "role": "truncated"},
}


def write_hopper(path: str, trajectories: int = 40) -> None:
    """Write a data set with the columns of Hopper."""
    observation = {**COLUMNS["observation"], "shape": [11]}
    action = {"dtype": "float32", "shape": [3], "role": "action"}
    schema = Schema.from_json(
        {"columns": {**COLUMNS, "observation": observation, "action": action}}
    )
    random = np.random.default_rng(0)
    with DatasetWriter(path, schema) as writer:
        for number in range(trajectories):
            steps = 5 + number
            ends = np.arange(steps) == steps - 1
            writer.add(
                {
                    "observation": random.normal(3, 2, (steps + 1, 11)),
                    "action": random.uniform(-1, 1, (steps, 3)),
                    "reward": np.ones(steps),
                    "terminated": ends & (number % 2 == 0),
                    "truncated": ends & (number % 2 == 1),
                }
            )


class Model(nn.Module):
    """The action of each step, from its observation: of a batch of Hopper, or of observations
    alone.
    """

    def __init__(self, observation: int = 11, action: int = 3) -> None:
        super().__init__()
        self.layer = nn.Linear(observation, action)

    def forward(self, batch: Batch | torch.Tensor) -> torch.Tensor:
        observation = batch if isinstance(batch, torch.Tensor) else batch["observation"]
        return torch.as_tensor(self.layer(observation))


def trajectory(steps: int = 5, number: int = 0) -> dict[str, Any]:
    """Return a trajectory of COLUMNS that terminates."""
    return {
        "observation": np.full((steps + 1, 4), number, np.float32),
        "action": np.arange(steps) % 2,
        "reward": np.ones(steps, np.float32),
        "terminated": np.arange(steps) == steps - 1,
        "truncated": np.zeros(steps, bool),
    }


def section(**options: Any) -> dict[str, Any]:
    """Return a gear section of a table of CartPole; options are added."""
    table = {
        "capacity_steps": 2000,
        "max_length": 100,
        "writers": 2,
        "schema": {"columns": COLUMNS},
    }
    memory = {"prefix": prefix()}
    return {
        "batch_size": 8,
        "tables": {"main": table},
        "shared_memory": memory,
        "timeout_s": 20.0,
        **options,
    }


def adam(lr: float = 1e-2) -> dict[str, Any]:
    """Return an optimizer of a ds_config for which DeepSpeed builds nothing."""
    return {"type": "AdamW", "params": {"lr": lr, "torch_adam": True}}


def make_engine(model: nn.Module, gear: dict[str, Any], **options: Any) -> Any:
    """Return an engine with a replay, for a micro batch of 8; ds_config.json is its config."""
    gear = {key: value for key, value in gear.items() if key != "batch_size"}
    config = {"train_micro_batch_size_per_gpu": 8, "optimizer": adam(), "gear": gear}
    Path("ds_config.json").write_text(json.dumps(config))
    engine, *_ = deepspeed_gear.initialize(
        model=model, model_parameters=model.parameters(), config="ds_config.json", **options
    )
    return engine


def language_model() -> tuple[
    Any, Callable[[int], None], Callable[[torch.Tensor, Any], torch.Tensor]
]:
    """Make an engine whose table takes groups of four responses.

    Returns:
        The engine; what adds so many groups; the loss of each place. logits [1, N, V] -> [1, N].
    """
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=64, **sizes, **heads))
    columns = {
        "tokens": {"dtype": "int32", "role": "token"},
        "loss_mask": {"dtype": "bool", "role": "loss_mask"},
        "reward": {"dtype": "float32", "rows": "1"},
        "prompt_id": {"dtype": "int64", "rows": "1"},
    }
    table = {
        "capacity_trajectories": 256,
        "capacity_steps": 20_000,
        "max_length": 64,
        "remove": "fifo",
    }
    table |= {"max_times_sampled": 1, "group": {"column": "prompt_id", "size": 4}}
    gear = {
        "tables": {"rollouts": {**table, "schema": {"columns": columns}}},
        "sampler": {"kind": "fifo", "unit": "group"},
        "pack": {"tokens": 256},
        "rollout": {"groups": 8, "minibatches": 2},
        "loss": {"normalize": "token"},
    }
    config = {"train_micro_batch_size_per_gpu": 1, "managed_gradient_accumulation": False}
    config |= {"optimizer": adam(), "gear": gear}
    engine, *_ = deepspeed_gear.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    random = np.random.default_rng(0)
    numbers = iter(range(10_000))

    def generate(count: int) -> None:
        for group in [next(numbers) for _ in range(count)]:
            for _ in range(4):
                steps = int(random.integers(5, 20))
                columns = {
                    "tokens": random.integers(0, 64, steps),
                    "loss_mask": np.arange(steps) > 2,
                }
                engine.gear.add({**columns, "reward": random.random(), "prompt_id": group})

    def policy_loss(logits: torch.Tensor, micro: Any) -> torch.Tensor:
        loss = nn.functional.cross_entropy(logits[0].float(), micro.targets[0], reduction="none")[
            None
        ]
        return loss * torch.as_tensor(micro["advantage"])

    return engine, generate, policy_loss
