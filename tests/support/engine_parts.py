"""What the tests of engines share: a small model, its engine's config, a record of what comes."""

import logging
from typing import Any

import numpy as np
import torch
from torch import nn

from deepspeed_gear import Batch

BATCH = 12  # samples of a global batch


class Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def ds_config(
    gear: dict[str, Any] | None = None,
    accumulation: int = 1,
    replicas: int | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Return a ds_config of BATCH samples per global batch; with `replicas` by the size of a micro
    batch.
    """
    section = {} if gear is None else {"gear": gear}
    sizes = {"train_batch_size": BATCH}
    if replicas is not None:
        sizes = {"train_micro_batch_size_per_gpu": BATCH // replicas // accumulation}
    return {
        **sizes,
        "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_force_ds_cpu_optimizer": False,
        **section,
        **options,
    }


class Model(nn.Module):
    """Predicts the action from the observation's window, normalised or not."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(inputs, 2)

    def forward(self, batch: Batch) -> torch.Tensor:
        observation = batch["observation"].flatten(1).to(self.layer.weight.dtype) / 1e4
        error = self.layer(observation) - batch["action"].to(self.layer.weight.dtype) / 1e4
        return error.square().mean()


def small_qwen() -> Any:
    """Return a language model of one layer and 64 tokens."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    return Qwen2ForCausalLM(Qwen2Config(vocab_size=64, **sizes, **heads))


def flat_weights(model: nn.Module) -> np.ndarray:
    """Return all weights, in float32 where the optimizer has them. Collective."""
    from deepspeed.utils import safe_get_full_fp32_param

    whole = [
        weight if (own := safe_get_full_fp32_param(weight)) is None else own
        for weight in model.parameters()
    ]
    return torch.cat([weight.detach().float().flatten() for weight in whole]).numpy()
