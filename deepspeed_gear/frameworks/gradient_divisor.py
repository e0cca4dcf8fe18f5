"""Gradient divisor: the number by which DeepSpeed, DDP or FSDP divides the ranks' gradients.

Losses l_1 .. l_n are those of the ranks that have one of their own: replicas times sequence ranks
(the tensor ranks of a replica share one). The weights are updated by the gradient of (l_1 + ... +
l_n) / divisor: losses that are multiplied by the divisor before `backward` are summed.

Sources: what DeepSpeed 0.19.8 and torch 2.13 do, measured by tests/distributed/test_gradients.py;
the table is in docs/design/0013-gradient-divisor.md. In their files: `runtime/engine.py`
(allreduce_bucket), `runtime/zero/stage_1_and_2.py` (average_tensor,
gradient_reduction_w_predivide), `runtime/zero/stage3.py` (__avg_scatter_grads,
__avg_scatter_contiguous_grads), `nn/parallel/distributed.py`, `distributed/fsdp/_init_utils.py`,
`distributed/fsdp/_fully_shard/_fsdp_collectives.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from deepspeed_gear.errors import ConfigError

if TYPE_CHECKING:
    from deepspeed_gear.frameworks.deepspeed_compat import GradientSettings

ZERO_OPTIMIZERS = ("DeepSpeedZeroOptimizer", "DeepSpeedZeroOptimizer_Stage3", "BF16_Optimizer")
# Names of torch's default_hooks that average as DistributedDataParallel does without a hook.
AVERAGING_HOOKS = ("allreduce_hook", "fp16_compress_hook", "bf16_compress_hook")


def gradient_divisor(model: Any) -> float:
    """Return the number that a model's framework divides the sum of all ranks' gradients by.

    Not collective. It holds as long as groups, hooks and divide factors stay as they are. The
    gradients of a plain module are summed by the program (`all_reduce` with SUM), so its divisor is
    1.

    Args:
        model: A DeepSpeed engine, a module in DistributedDataParallel or FSDP (1 or 2), or a plain
            module.
    Raises:
        ConfigError: The parameters have no common divisor, or the framework is not supported.
    """
    model = getattr(model, "_orig_mod", model)  # inside torch.compile's wrapper
    if "deepspeed" in sys.modules:
        from deepspeed_gear.frameworks import deepspeed_compat

        if deepspeed_compat.is_engine(model):
            return engine_divisor(deepspeed_compat.gradient_settings(model))
    if not isinstance(model, nn.Module):
        remedy = "give a DeepSpeed engine or a torch module"
        raise ConfigError(
            "model", "must belong to a supported framework", type(model).__name__, remedy
        )
    return _module_divisor(model)


def engine_divisor(settings: GradientSettings) -> float:
    """Return an engine's divisor; ConfigError if it has several, or none that is fixed."""
    _check_exact(settings)
    sizes = settings.group_sizes
    divisors = {_divisor_in(settings, size) * settings.losses / size for size in sizes}
    if settings.stage == 3 and not settings.fits_bucket:
        divisors |= {_scattered(settings, size) * settings.losses / size for size in sizes}
    if len(divisors) > 1:
        rule = (
            "must divide the gradients of all parameters by one number: parameters beyond it are "
            "averaged over sequence ranks, others are not"
        )
        remedy = 'leave "reduce_scatter" true, or raise it above the largest parameter'
        raise ConfigError("zero_optimization.reduce_bucket_size", rule, sorted(divisors), remedy)
    return divisors.pop() * settings.accumulation


def _divisor_in(settings: GradientSettings, size: int) -> float:
    """Return the divisor of the sum over a process group of `size` ranks."""
    by_replicas = size / settings.sequence
    predivide = settings.predivide
    if not settings.averages:
        return 1.0
    if settings.stage == 3:
        if settings.reduce_scatter or not settings.contiguous:
            return _scattered(settings, size)
        return by_replicas * (predivide if settings.postscales and predivide == size else 1.0)
    by_zero = settings.stage > 0 and settings.optimizer != "BF16_Optimizer"
    if by_zero and not settings.reduce_scatter and settings.postscales and predivide == size:
        return predivide  # DeepSpeed does not multiply the gradients by it again
    return by_replicas


def _scattered(settings: GradientSettings, size: int) -> float:
    """Return the divisor of ZeRO-3's reduce-scatter: the group, with its sequence ranks."""
    return size * (
        settings.predivide if settings.postscales and settings.predivide == size else 1.0
    )


class _Requirement(NamedTuple):
    """A rule for an engine's settings, and the error where it does not hold."""

    holds: bool
    name: str
    rule: str
    value: object
    remedy: str


def _check(requirements: Sequence[_Requirement]) -> None:
    """Raise the ConfigError of the first rule that does not hold."""
    for one in requirements:
        if not one.holds:
            raise ConfigError(one.name, one.rule, one.value, one.remedy)


def _check_exact(settings: GradientSettings) -> None:
    """Raise where gradients have no divisor, or are not reduced over all ranks."""
    used = settings.optimizer
    has_sequence = settings.sequence > 1
    is_predivided = settings.postscales and settings.predivide != 1.0
    reduces_sequence = settings.stage == 3 or (
        max(settings.group_sizes, default=0) >= settings.losses
    )
    _check(
        [
            _Requirement(
                not settings.is_pipeline,
                "engine",
                "must not be a pipeline: its schedule has a fixed number of micro batches",
                "PipelineEngine",
                "use tensor, sequence or data parallelism",
            ),
            _Requirement(
                not settings.is_compiled,
                "compile.deepcompile",
                "must be false: compiled graphs reduce gradients by themselves",
                True,
                "leave it out",
            ),
            _Requirement(
                settings.is_reduced,
                "optimizer",
                "must leave the reduction of gradients to DeepSpeed",
                used,
                "use one that is not a 1-bit optimizer",
            ),
            _Requirement(
                used != "zenflow" and (settings.stage == 0 or used in ZERO_OPTIMIZERS),
                "zero_optimization",
                "must use ZeRO's own optimizers",
                used,
                "give an optimizer, and leave zenflow, super_offload and MiCS out",
            ),
            _Requirement(
                not settings.is_quantized,
                "zero_optimization.zero_quantized_gradients",
                "must be false: gradients would be rounded to 4 bits",
                True,
                "leave it out",
            ),
            _Requirement(
                not settings.is_fp16 or settings.stage > 0,
                "zero_optimization.stage",
                "must be 1 or more with fp16: without ZeRO, DeepSpeed divides gradients by the "
                "loss scale and does not multiply the loss by it",
                0,
                "set it to 1",
            ),
            _Requirement(
                not (settings.has_sparse and settings.stage == 0 and is_predivided),
                "gradient_predivide_factor",
                "must be 1 with sparse embeddings, whose gradients it multiplies",
                settings.predivide,
                "leave it out",
            ),
            _Requirement(
                not (has_sequence and settings.has_experts),
                "model",
                "must not have experts with sequence parallelism, whose ranks DeepSpeed takes for "
                "tensor ranks",
                "MoE layers",
                "use one of both",
            ),
            _Requirement(
                not (has_sequence and used == "BF16_Optimizer"),
                "zero_optimization.stage",
                "must be 2 or 3 with bf16 weights, float32 sums and sequence parallelism: "
                "DeepSpeed's gradient norm fails",
                settings.stage,
                "set it to 2",
            ),
            _Requirement(
                not has_sequence or reduces_sequence,
                "mesh_param",
                "must be used with ZeRO-3: with others DeepSpeed does not reduce gradients over "
                "sequence ranks",
                f"stage {settings.stage}",
                "give mpu=parallel_state_sp instead",
            ),
            _Requirement(
                not any(size % settings.losses for size in settings.group_sizes),
                "gradients",
                f"must be reduced over the {settings.losses} ranks that have losses of their own",
                f"{list(settings.group_sizes)} ranks",
                "give initialize the mpu that the model was built for",
            ),
        ]
    )


def check_accumulation(settings: GradientSettings, pad: str) -> list[str]:
    """Check the settings for steps with a variable number of micro batches.

    Args:
        pad: `gear.pack.pad.to`.
    Returns:
        Defaults of DeepSpeed that change the result, for the log.
    Raises:
        ConfigError: A setting would change the loss or lose gradients.
    """
    short = {"bfloat16": "bf16", "float16": "fp16"}.get(settings.weights, settings.weights)
    _check(
        [
            _Requirement(
                not settings.is_managed,
                "managed_gradient_accumulation",
                "must be false with gear.pack: the number of micro batches differs from step to "
                "step",
                True,
                'add "managed_gradient_accumulation": false to the DeepSpeed config',
            ),
            _Requirement(
                settings.accumulation == 1,
                "gradient_accumulation_steps",
                "must be 1 with gear.pack: every loss would be divided by it",
                settings.accumulation,
                "set it to 1",
            ),
            _Requirement(
                settings.weights == "float32" or "grad_accum_dtype" in settings.given,
                "data_types.grad_accum_dtype",
                "must be given with gear.pack: the gradients of all micro batches of a step are "
                "summed in it",
                None,
                f'give "fp32" (ZeRO 1 to 3), or "{short}", which rounds after each micro batch',
            ),
            _Requirement(
                not (settings.has_experts and pad == "multiple"),
                "gear.pack.pad.to",
                'must be "step" or "budget" with MoE layers: their ranks exchange equal numbers '
                "of tokens",
                pad,
                'set it to "step"',
            ),
        ]
    )
    notes = []
    if settings.clipping > 0 and "gradient_clipping" not in settings.given:
        notes.append(
            f"gradient_clipping is {settings.clipping}, DeepSpeed's default; 0 turns it off"
        )
    if settings.sums != "float32":
        notes.append(f"gradients are summed in {settings.sums} (data_types.grad_accum_dtype)")
    if settings.messages != "float32" and "communication_data_type" not in settings.given:
        way = f"gradients are sent in {settings.messages}, the default for these weights"
        notes.append(f'{way}; "communication_data_type": "fp32" sends them unrounded')
    return notes


def _module_divisor(module: nn.Module) -> float:
    if isinstance(module, DistributedDataParallel):
        return _ddp_divisor(module)
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel):
        return _fsdp_divisor(module, fsdp.FullyShardedDataParallel.fsdp_modules(module))
    if fsdp is not None and isinstance(module, getattr(fsdp, "FSDPModule", ())):
        return _fully_shard_divisor(module)
    replicated = sys.modules.get("torch.distributed._composable.replicate")
    kinds = [(fsdp, "FullyShardedDataParallel"), (fsdp, "FSDPModule"), (replicated, "DDP")]
    known = tuple(getattr(source, name) for source, name in kinds if hasattr(source, name))
    wrapped = [
        name
        for name, part in module.named_modules()
        if isinstance(part, (DistributedDataParallel, *known))
    ]
    if wrapped:
        remedy = "wrap the whole module, or give the part that is trained"
        raise ConfigError(
            "model", "must be wrapped as a whole", f"only {', '.join(wrapped)}", remedy
        )
    return 1.0


def _ddp_divisor(module: DistributedDataParallel) -> float:
    """Return DDP's divisor: the ranks of its group, also with torch's averaging hooks."""
    for hook, _ in getattr(module, "_comm_hooks", ()):
        is_torchs = getattr(hook, "__module__", "").endswith("ddp_comm_hooks.default_hooks")
        if not is_torchs or hook.__name__ not in AVERAGING_HOOKS:
            _refuse_hook("DistributedDataParallel", getattr(hook, "__name__", repr(hook)))
    ignored: set[str] = getattr(module, "parameters_to_ignore", set())
    _check_reduced(module.module, lambda name, _: name not in ignored)
    return float(dist.get_world_size(module.process_group))


def _fsdp_divisor(module: Any, parts: list[Any]) -> float:
    """Return FSDP 1's divisor: the product of its factors before and after the reduction."""
    divisors = set()
    for part in parts:
        if part._comm_hook is not None:
            _refuse_hook("FSDP", getattr(part._comm_hook, "__name__", repr(part._comm_hook)))
        divisors.add(part._gradient_predivide_factor * part._gradient_postdivide_factor)
    ignored = {id(parameter) for parameter in module._ignored_params}
    _check_reduced(module, lambda _, parameter: id(parameter) not in ignored)
    return _only(divisors)


def _fully_shard_divisor(module: nn.Module) -> float:
    """Return FSDP 2's divisor: its `set_gradient_divide_factor`, else the ranks of its mesh."""
    from torch.distributed.tensor import DTensor

    divisors: set[float] = set()
    for part in module.modules():
        state_of: Any = getattr(part, "_get_fsdp_state", lambda: None)
        state = state_of()
        # Older versions of torch have a single group.
        single = getattr(state, "_fsdp_param_group", None)
        for group in filter(None, getattr(state, "_fsdp_param_groups", None) or [single]):
            if not hasattr(group, "gradient_divide_factor"):
                rule = "must have set_gradient_divide_factor for FSDP 2"
                raise ConfigError("torch", rule, torch.__version__, "update it")
            if group._all_reduce_hook is not None:
                _refuse_hook("FSDP", "set_all_reduce_hook")
            factor = group.gradient_divide_factor
            mesh = group.mesh_info
            ranks = getattr(mesh, "shard_mesh_size", 1) * getattr(mesh, "replicate_mesh_size", 1)
            divisors.add(float(ranks if factor is None else factor))
    _check_reduced(module, lambda _, parameter: isinstance(parameter, DTensor))
    return _only(divisors)


def _refuse_hook(framework: str, name: str) -> None:
    rule = (
        f"must be without a communication hook, except torch's {', '.join(AVERAGING_HOOKS)} of DDP"
    )
    raise ConfigError(
        framework,
        rule,
        name,
        "use a supported framework: how this one divides gradients is unknown",
    )


def _check_reduced(module: Any, is_reduced: Callable[[str, nn.Parameter], bool]) -> None:
    """Raise unless all trained parameters are reduced."""
    trained = [(name, one) for name, one in module.named_parameters() if one.requires_grad]
    if names := [name for name, one in trained if not is_reduced(name, one)]:
        rule = "must all be reduced over the ranks"
        raise ConfigError(
            "trained parameters", rule, f"not {', '.join(names)}", "freeze these, or wrap them"
        )


def _only(divisors: set[float]) -> float:
    if len(divisors) != 1:
        rule = "must be divided by one number in all parts of the model"
        remedy = "wrap all parts with the same mesh and factor"
        raise ConfigError("gradients", rule, sorted(divisors), remedy)
    return float(divisors.pop())
