"""Load the native ops into this process."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from contextlib import suppress
from types import ModuleType
from typing import Any

from ..errors import BuildError
from .jit import BUILD_TIMEOUT_S, loaded
from .native_op import CpuOp, CudaOp

#: Builds the kernels in a process of its own: two builds in one would share torch's and DeepSpeed's globals.
_BUILD_KERNELS = [sys.executable, "-c", "from deepspeed_gear.ops.load import build_kernels; build_kernels()"]
_building: list[subprocess.Popen[bytes]] = []  # kept, so that they are reaped


def load_native(timeout_s: float = BUILD_TIMEOUT_S, with_kernels: bool = False) -> ModuleType:
    """Load the CPU op: prebuilt with the wheel where that fits this torch, else built just in time.

    Registers `torch.ops.gear.*` and returns the module with the plain C functions. The first call on a node
    compiles (tens of seconds; the node's other processes wait for it, at most `timeout_s`; `with_kernels`,
    another process builds the kernels at the same time), the next ones take milliseconds. Needs no process
    group; DeepSpeed is imported only to compile. Thread safe. BuildError names the remedy.
    """
    beside = start_kernels if with_kernels else None
    return CpuOp().load(timeout_s=timeout_s, beside=beside, builder=lambda: _builder("GearBuilder"))


def start_kernels() -> None:
    """Start a process that builds the kernels; `load_native_cuda` waits for it, and names its errors."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    null = subprocess.DEVNULL
    with suppress(OSError):
        _building.append(subprocess.Popen(_BUILD_KERNELS, env=env, stdin=null, stdout=null, stderr=null))


def build_kernels() -> None:
    """Build the kernels where they can be built, and are not; what goes wrong is left to who loads them."""
    from .builder import GearCudaBuilder

    builder = GearCudaBuilder()
    if not builder.missing():
        with suppress(BuildError):
            builder.load()


def load_native_cuda(timeout_s: float = BUILD_TIMEOUT_S) -> ModuleType:
    """Load the CUDA kernels, after the CPU op whose schemas they implement; as `load_native`. Those of a
    wheel are loaded also where there is no driver; DeepSpeed is imported only for others.
    """
    op = CudaOp()
    is_prebuilt = op.fitting()[0] is not None
    if not is_prebuilt:
        op = _builder("GearCudaBuilder")
        if loaded(op.NAME) is None and op.finished() is None:
            op.require_tools()
    load_native(timeout_s, with_kernels=not is_prebuilt)
    return op.load(timeout_s=timeout_s)


def _builder(name: str) -> Any:
    """Import DeepSpeed without its warning that it has found no GPU, which is irrelevant to a replay."""

    def is_other(record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith("Setting accelerator to CPU")

    logger = logging.getLogger("DeepSpeed")  # which DeepSpeed uses as it is
    logger.addFilter(is_other)
    try:
        from . import builder
    finally:
        logger.removeFilter(is_other)
    return getattr(builder, name)()
