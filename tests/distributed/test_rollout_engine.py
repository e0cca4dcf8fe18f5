"""GearRollout on ranks with divided parameters: each prompt once, and the whole model's
log-probabilities.
"""

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from engine_parts import small_qwen
from gear_support import prefix
from process_support import call_on_ranks

import deepspeed_gear
from deepspeed_gear import Column, DatasetWriter, Schema

SIZE = 2
GROUPS = 3
BATCHES = 2
pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        importlib.util.find_spec("transformers") is None, reason="the model is of transformers"
    ),
]


def test_ranks_with_divided_parameters_generate_together(tmp_path: Path) -> None:
    """No more than the 3 groups of a batch are open, and each of 2 ranks leases up to 2: one has
    fewer.
    """
    with DatasetWriter(
        tmp_path / "prompts", Schema([Column("tokens", "int32", role="token")])
    ) as writer:
        for number in range(20):
            writer.add({"tokens": np.arange(1, 3 + number % 3, dtype=np.int32)})
    found = call_on_ranks(2, rollouts, str(tmp_path / "prompts"), prefix(), timeout_s=240)
    for rank in found:
        assert rank["trained"] == sorted([*range(BATCHES * GROUPS)] * SIZE)
        assert rank["error"] < 1e-5
    leased = [sum(counts) for counts in zip(*(rank["leased"] for rank in found), strict=True)]
    assert sum(leased) >= BATCHES * GROUPS
    assert min(min(rank["leased"]) for rank in found) < 2


def rollouts(data: str, name: str) -> dict[str, Any]:
    """Train two rollout batches under ZeRO-3; return what this rank has leased and seen."""
    from deepspeed.runtime.rollout import HybridEngineRollout, SamplingConfig

    from deepspeed_gear.engine.rollout_engine import GearRollout

    columns = {
        "tokens": {"dtype": "int32", "role": "token"},
        "loss_mask": {"dtype": "bool", "role": "loss_mask"},
        "logp": {"dtype": "float32"},
        "reward": {"dtype": "float32", "rows": "1"},
        "prompt_id": {"dtype": "int64", "rows": "1"},
    }
    table = {
        "capacity_trajectories": 64,
        "capacity_steps": 4096,
        "max_length": 16,
        "max_times_sampled": 1,
    }
    table |= {"remove": "fifo", "writers": 4, "group": {"column": "prompt_id", "size": SIZE}}
    table |= {"prompts": {"data": data, "max_lag": 0}, "schema": {"columns": columns}}
    gear = {
        "tables": {"rollouts": table},
        "sampler": {"kind": "fifo", "unit": "group"},
        "pack": {"tokens": 32, "pad": {"multiple": 8}},
    }
    gear |= {"rollout": {"groups": GROUPS}, "shared_memory": {"prefix": name}}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "managed_gradient_accumulation": False,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_force_ds_cpu_optimizer": False,
        "gear": gear,
    }
    torch.manual_seed(0)
    model = small_qwen()
    engine, *_ = deepspeed_gear.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    torch.manual_seed(dist.get_rank())
    generator = HybridEngineRollout(engine, SimpleNamespace(pad_token_id=0, eos_token_id=63))
    rewards = lambda _, responses: [{"reward": 1.0} for _ in responses]  # noqa: E731
    worker = GearRollout(generator, engine.gear.rollout_worker(), rewards)
    sampling = SamplingConfig(max_new_tokens=3, n_samples_per_prompt=SIZE)
    leased = list[int]()
    trained = list[int]()
    errors = list[float]()
    for _ in range(BATCHES):
        while not engine.gear.can_sample():
            leased.append(worker.collect(2, sampling, timeout_s=0.1))
        rollout = engine.gear_rollout()
        trained += rollout.values("prompt_id").tolist()
        for step in rollout:
            for micro in step:
                logits = engine(**micro.model_inputs(engine)).logits.float()
                logp = -F.cross_entropy(logits[0], micro.targets[0], reduction="none")[None]
                if rollout.number == 0:  # later ones may be of an earlier policy
                    errors.append(float(((logp - micro["logp"]) * micro.loss_mask).abs().max()))
                engine.backward(micro.sum(-logp))
            engine.step()
    engine.destroy()
    return {"leased": leased, "trained": sorted(trained), "error": max(errors)}
