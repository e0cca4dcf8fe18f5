"""DeepSpeed's private names and version differences: supported engines, gradient settings.

No module but this one and engine_place.py uses private names of DeepSpeed.
tests/unit/frameworks/test_deepspeed_compat.py checks them against the installed version.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.utils import groups

from deepspeed_gear.errors import ConfigError
from deepspeed_gear.frameworks.engine_place import PIPELINE, is_pipeline, place_of

REQUIRED = (
    "train_micro_batch_size_per_gpu gradient_accumulation_steps is_gradient_accumulation_boundary "
    "zero_optimization_stage autotp_size save_checkpoint load_checkpoint "
    "load_universal_checkpoint destroy"
).split()
#: Method of an engine that updates the weights and counts samples, within `step`.
STEPPING = "_take_model_step"


def check_engine(engine: Any) -> None:
    """Raise a ConfigError unless an object is an engine without a schedule of its own."""
    name = type(engine).__name__
    missing = [method for method in REQUIRED if not callable(getattr(type(engine), method, None))]
    if missing:
        raise ConfigError(
            "engine", "must be a DeepSpeed engine", name, f"it lacks {', '.join(missing)}"
        )
    if name != PIPELINE and any(kind.__name__ == PIPELINE for kind in type(engine).__mro__):
        raise ConfigError(
            "engine", f"must be a {PIPELINE} or no pipeline", name, "use a PipelineModule"
        )


def wrap(engine: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace a method of one engine by `around(original, *args)`.

    The engine keeps its class, which DeepSpeed tests.
    """
    original = getattr(engine, name)

    @functools.wraps(original)
    def method(*arguments: Any, **options: Any) -> Any:
        return around(original, *arguments, **options)

    setattr(engine, name, method)


def accumulation_of(engine: Any) -> int:
    """Return a rank's micro batches per global batch.

    Raises:
        ConfigError: It is not a whole number, as where a parallelism was left out.
    """
    steps = engine.gradient_accumulation_steps()
    if steps != int(steps) or steps < 1:
        remedy = "give it and train_micro_batch_size_per_gpu, and leave train_batch_size out"
        raise ConfigError("gradient_accumulation_steps", "must be a whole number", steps, remedy)
    return int(steps)


def compute_dtype(engine: Any) -> torch.dtype:
    if engine.bfloat16_enabled():
        return torch.bfloat16
    return torch.float16 if engine.fp16_enabled() else torch.float32


def is_under_way(engine: Any) -> bool:
    """Return whether an engine has trained or loaded a position, rather than weights alone."""
    return engine.global_steps > 0 or engine.loaded_checkpoint_mp_world_size is not None


#: Method of an engine that waits for the files of its latest checkpoint.
COMMITTING = "_commit_decoupled_checkpoint"


def writes_in_background(engine: Any) -> bool:
    """Return whether a checkpoint's files are complete only after `COMMITTING`."""
    writer = getattr(engine, "checkpoint_engine", None)
    return hasattr(type(engine), COMMITTING) and writer is not None and bool(writer.is_decoupled())


def own_files(engine: Any, load_dir: Path, tag: str, only_weights: bool) -> list[Path]:
    """Return the files of a checkpoint that this rank reads.

    [] if the checkpoint has another number of replicas than the engine, or if that is not known.
    """
    files = model_states(load_dir / tag)
    if not files:
        return []
    try:
        # Mapped, so that weights are not read; and trusted, as DeepSpeed trusts it.
        saved = torch.load(files[0], map_location="cpu", mmap=True, weights_only=False)
        num_replicas = saved["dp_world_size"]
    except Exception:  # a torn file: DeepSpeed raises when it reads it
        return []
    if num_replicas != engine.seq_dp_world_size:
        return []
    paths = [engine._get_ckpt_name(str(load_dir), tag)]
    if engine.zero_optimization() and not only_weights and not engine.zero_nvme_offload_optimizer():
        paths.append(engine._get_zero_ckpt_name(str(load_dir), tag))
    return [Path(path) for path in paths]


def model_states(folder: Path) -> list[Path]:
    """List the files in the folder of a checkpoint's tag that hold client states."""
    patterns = ("mp_rank_*_model_states.pt", "zero_pp_rank_*_mp_rank_*_model_states.pt")
    return [path for pattern in patterns for path in sorted(folder.glob(pattern))]


@dataclass(frozen=True)
class GradientSettings:
    """Settings of an engine that decide what it does with the gradients of losses."""

    optimizer: str  # class name of the engine's optimizer, or "zenflow"
    stage: int
    losses: int  # ranks with a loss of their own: replicas times sequence ranks
    sequence: int  # sequence ranks of a replica
    group_sizes: tuple[int, ...]  # ranks of the groups that reduce gradients; ZeRO-3 has several
    averages: bool = True  # whether `gradient_allreduce_op` is the mean
    postscales: bool = True  # whether `prescale_gradients` is off
    predivide: float = 1.0  # `gradient_predivide_factor`
    reduce_scatter: bool = True
    contiguous: bool = True  # `contiguous_gradients`
    fits_bucket: bool = True  # whether every parameter fits into `reduce_bucket_size`
    accumulation: int = 1  # divisor of a loss in `backward`
    is_managed: bool = False  # `managed_gradient_accumulation`
    is_pipeline: bool = False
    has_experts: bool = False
    has_sparse: bool = False  # whether an embedding has sparse gradients
    is_reduced: bool = True  # whether the engine reduces gradients, and not the optimizer
    is_quantized: bool = False
    is_compiled: bool = False
    is_fp16: bool = False  # whether losses are scaled
    weights: str = "float32"  # dtype of the weights
    sums: str = "float32"  # dtype of gradients that are accumulated
    messages: str = "float32"  # dtype of gradients on their way between ranks
    given: frozenset[str] = frozenset()  # options of `gradient_settings` that the config has
    clipping: float = 0.0  # `gradient_clipping`


def is_engine(model: Any) -> bool:
    return any(kind.__name__ == "DeepSpeedEngine" for kind in type(model).__mro__)


def gradient_settings(engine: Any) -> GradientSettings:
    """Read the settings of an engine that decide about gradients."""
    place = place_of(engine)
    config = engine.config
    weights, sums = engine.get_data_types()
    options = {**config, **(config.get("data_types") or {})}
    names = ("grad_accum_dtype", "communication_data_type", "gradient_clipping")
    trained = [parameter for parameter in engine.module.parameters() if parameter.requires_grad]
    largest = max((getattr(one, "ds_numel", one.numel()) for one in trained), default=0)
    return GradientSettings(
        optimizer="zenflow"
        if engine.zenflow_config() is not None
        else type(engine.optimizer).__name__,
        stage=int(engine.zero_optimization_stage()),
        losses=place.data_world * place.sequence_world,
        sequence=int(engine.sequence_parallel_size),
        group_sizes=_group_sizes(engine, trained),
        averages=bool(engine.gradient_average),
        postscales=bool(engine.postscale_gradients()),
        predivide=float(engine.gradient_predivide_factor()),
        reduce_scatter=bool(engine.zero_reduce_scatter()),
        contiguous=bool(engine.zero_contiguous_gradients()),
        fits_bucket=largest <= int(engine.zero_reduce_bucket_size()),
        accumulation=accumulation_of(engine),
        is_managed=bool(engine.managed_gradient_accumulation()),
        is_pipeline=is_pipeline(engine),
        has_experts=bool(engine.has_moe_layers),
        has_sparse=any(
            getattr(layer, "sparse", False) is True for layer in engine.module.modules()
        ),
        is_reduced=bool(engine.enable_backward_allreduce) or dist.get_world_size() == 1,
        is_quantized=bool(engine.zero_quantized_gradients()),
        is_compiled=bool(engine.is_deepcompile_enabled()),
        is_fp16=bool(engine.fp16_enabled()),
        weights=_name(weights),
        sums=_name(sums),
        messages=_name(engine.communication_data_type),
        given=frozenset(name for name in names if options.get(name) is not None),
        clipping=float(engine.gradient_clipping() or 0.0),
    )


def _group_sizes(engine: Any, trained: list[torch.nn.Parameter]) -> tuple[int, ...]:
    if is_pipeline(engine):
        return ()
    if engine.zero_optimization_stage() < 3:
        own = getattr(engine.optimizer, "dp_process_group", None)
        # ZeRO 0 asks for its group at each reduction.
        return (dist.get_world_size(own or groups._get_sequence_data_parallel_group()),)
    group = engine.optimizer.dp_process_group
    return tuple(
        sorted({dist.get_world_size(getattr(one, "ds_process_group", group)) for one in trained})
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def pending_backwards(engine: Any) -> int:
    """Return the calls of `backward` since the last `step`, without managed accumulation."""
    return int(engine._unmanaged_backward_count)
