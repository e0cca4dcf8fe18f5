"""What pages take for granted, in small: data, tables and models. Hidden Python of pages imports
it.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from engine_parts import small_qwen
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
    model = small_qwen()
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


def prompts_run(**table: Any) -> dict[str, Any]:
    """Write the prompts and the ds_config.json of a run with rollout workers.

    Returns:
        Names for the blocks of a page: a small model and its config, what generates a group, and
        the loss.
    """
    from deepspeed_gear import Column, RolloutWorker

    model = small_qwen()
    prompts = Schema([Column("tokens", "int32", role="token"), Column("answer", "int64", rows="1")])
    with DatasetWriter("prompts", prompts, overwrite=True) as writer:
        for a in range(50):
            writer.add({"tokens": np.array([a, 10, a]), "answer": 2 * a})
    columns = {
        "tokens": {"dtype": "int32", "role": "token"},
        "loss_mask": {"dtype": "bool", "role": "loss_mask"},
        "logp": {"dtype": "float32"},
        "reward": {"dtype": "float32", "rows": "1"},
        "prompt_id": {"dtype": "int64", "rows": "1"},
    }
    options = {
        "capacity_trajectories": 16384,
        "capacity_steps": 200_000,
        "max_length": 1024,
        "remove": "fifo",
        "max_times_sampled": 1,
        "writers": 8,
        "group": {"column": "prompt_id", "size": 8},
        "prompts": {"data": "prompts", "max_lag": 2, "lease_s": 600, "attempts": 3},
        "schema": {"columns": columns},
        **table,
    }
    gear = {
        "tables": {"rollouts": options},
        "sampler": {"kind": "fifo", "unit": "group"},
        "pack": {"tokens": 4096},
        "rollout": {"groups": 2, "minibatches": 2},
        "shared_memory": {"prefix": prefix()},
    }
    config = {"train_micro_batch_size_per_gpu": 1, "managed_gradient_accumulation": False}
    config |= {"gradient_clipping": 1.0, "optimizer": adam(), "gear": gear}
    Path("ds_config.json").write_text(json.dumps(config))

    def generate(policy: Any, prompt: np.ndarray, count: int) -> list[np.ndarray]:
        return [np.append(prompt, np.full(n + 1, 7, np.int32)) for n in range(count)]

    def response(tokens: np.ndarray, prompt: np.ndarray, answer: int) -> dict[str, Any]:
        mask = np.arange(len(tokens)) >= len(prompt)
        one = {"tokens": tokens, "loss_mask": mask, "logp": -1.0 * mask}
        late = options["schema"]["columns"]["reward"].get("late", False)
        return one if late else {**one, "reward": float(len(tokens) % 3)}

    def loss_of(engine: Any, micro: Any) -> torch.Tensor:
        logits = engine(**micro.model_inputs(engine)).logits
        return torch.as_tensor(micro.sum(logits[0].float().mean(-1)[None]))

    def work(leases: int = 4) -> None:
        """Commit so many groups, as rollout workers do."""
        with RolloutWorker.attach("ds_config.json") as worker:
            for lease in worker.lease(leases, timeout_s=10):
                prompt = lease.prompt["tokens"]
                answer = lease.prompt["answer"]
                tokens_of_all = generate(None, prompt, count=8)
                lease.commit([response(tokens, prompt, answer) for tokens in tokens_of_all])

    names = {"model": model, "config": config, "generate": generate, "response": response}
    return {**names, "loss_of": loss_of, "work": work}
