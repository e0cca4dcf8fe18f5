"""All use of DeepSpeed's private names and of what differs between its versions."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.utils import groups

from deepspeed_gear.errors import ConfigError

REQUIRED = (
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "is_gradient_accumulation_boundary",
    "save_checkpoint",
    "load_checkpoint",
    "destroy",
)


def check_engine(engine: Any) -> None:
    """Check that an object is an engine of a kind that is supported.

    Raises:
        ConfigError: It is none, or it uses tensor, pipeline or sequence parallelism.
    """
    missing = [name for name in REQUIRED if not callable(getattr(type(engine), name, None))]
    if missing:
        raise ConfigError(
            "engine", "must be a DeepSpeed engine", type(engine).__name__, f"it lacks {', '.join(missing)}"
        )
    if type(engine).__name__ == "PipelineEngine":
        raise ConfigError(
            "engine", "must be data-parallel", "PipelineEngine", "this version has no pipeline parallelism"
        )
    tensor = _world(groups, "get_tensor_model_parallel_world_size", "_get_model_parallel_world_size")
    sequence = _world(groups, "_get_sequence_parallel_world_size")
    for name, size in (("tensor", tensor), ("sequence", sequence)):
        if size > 1:
            raise ConfigError(
                "engine",
                "must be data-parallel",
                f"{name} parallelism of {size}",
                f"this version has no {name} parallelism",
            )


def _world(module: Any, *names: str) -> int:
    for name in names:
        function = getattr(module, name, None)
        if function is None:
            continue
        try:
            return int(function())
        except (AssertionError, RuntimeError, ValueError, AttributeError, TypeError):
            continue
    return 1


def data_rank(engine: Any) -> int:
    """Return the index of this rank's replica."""
    return int(groups._get_data_parallel_rank())


def data_world(engine: Any) -> int:
    """Return the number of replicas."""
    return int(groups._get_data_parallel_world_size())


def compute_dtype(engine: Any) -> torch.dtype:
    """Return the dtype that the engine computes in."""
    if engine.bfloat16_enabled():
        return torch.bfloat16
    return torch.float16 if engine.fp16_enabled() else torch.float32


def gear_section(engine: Any) -> Any:
    """Return the raw `gear` section of an engine's config, or None."""
    return engine.config.get("gear")


def write_events(engine: Any, events: list[tuple[str, float, int]]) -> None:
    """Write metrics to the monitors that the config enables; only rank 0 does."""
    monitor = getattr(engine, "monitor", None)
    if monitor is not None and getattr(monitor, "enabled", False) and engine.global_rank == 0:
        monitor.write_events(events)
