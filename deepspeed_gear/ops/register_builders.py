"""Registration of GEAR's op builders with DeepSpeed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import deepspeed.ops.op_builder as op_builder
from deepspeed.accelerator import get_accelerator
from deepspeed.git_version_info import installed_ops
from deepspeed.ops.op_builder.all_ops import ALL_OPS

from deepspeed_gear.ops.builder import GearBuilder, GearCudaBuilder

BUILDERS: dict[str, type[GearBuilder] | type[GearCudaBuilder]] = {
    "GearBuilder": GearBuilder,
    "GearCudaBuilder": GearCudaBuilder,
}


def register() -> None:
    """Register the builders with the live accelerator, `deepspeed.ops.op_builder` and `ALL_OPS`.

    DeepSpeed has no entry point for external ops, so the accelerator's two lookups are wrapped. Idempotent;
    call it again after `set_accelerator`.
    """
    accelerator = get_accelerator()
    if not hasattr(accelerator.get_op_builder, "_gear_wrapped"):
        accelerator.get_op_builder = _known_first(accelerator.get_op_builder, lambda builder: builder)
        accelerator.create_op_builder = _known_first(accelerator.create_op_builder, lambda builder: builder())
    for name, builder in BUILDERS.items():
        setattr(op_builder, name, builder)
        if builder.NAME not in ALL_OPS:
            ALL_OPS[builder.NAME] = builder()
        installed_ops[builder.NAME] = ALL_OPS[builder.NAME].prebuilt()[0] is not None


def _known_first(lookup: Callable[[str], Any], give: Callable[[Any], Any]) -> Callable[[str], Any]:
    @functools.wraps(lookup)
    def wrapped(name: str) -> Any:
        builder = BUILDERS.get(name)
        return lookup(name) if builder is None else give(builder)

    wrapped._gear_wrapped = True  # type: ignore[attr-defined]
    return wrapped
