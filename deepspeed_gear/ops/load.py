"""Load the native ops into this process."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import ModuleType

from ..errors import BuildError
from .jit import BUILD_TIMEOUT_S, load_once, loaded
from .native_op import CpuOp, CudaOp

#: Builds the kernels in a process of its own: two builds in one would share torch's and DeepSpeed's globals.
_BUILD_KERNELS = [sys.executable, "-c", "from deepspeed_gear.ops.load import build_kernels; build_kernels()"]
_building: list[subprocess.Popen[bytes]] = []  # kept, so that they are reaped


def load_native(timeout_s: float = BUILD_TIMEOUT_S, with_kernels: bool = False) -> ModuleType:
    """Load the CPU op: prebuilt with the wheel where that fits this torch, else built just in time.

    Registers `torch.ops.gear.*` and returns the module with the plain C functions. The first call on a node
    compiles (tens of seconds; the node's other processes wait for it), the next ones take milliseconds, a
    second one in the same process nothing. Needs no process group; DeepSpeed is imported only to compile.
    Thread safe.

    Args:
        timeout_s: How long to wait for another process that builds it.
        with_kernels: The CUDA kernels will be loaded too: where this process builds the op, another one
            builds them at the same time.
    Raises:
        BuildError: No compiler, a compile error, or a wait that was too long; names the remedy.
    """
    return load_once(CpuOp.NAME, partial(_load_cpu, timeout_s, with_kernels))


def _load_cpu(timeout_s: float, with_kernels: bool) -> ModuleType:
    module = CpuOp().load_finished()
    if module is not None:
        return module
    with _without_accelerator_warning():
        from .builder import GearBuilder
    return GearBuilder().load(timeout_s=timeout_s, beside=start_kernels if with_kernels else None)


def start_kernels() -> None:
    """Start the build of the kernels in another process. It holds their lock, so `load_native_cuda` waits.

    Its failure is no error here: `load_native_cuda` then builds them itself, and names what is wrong.
    """
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
    """Load the CUDA kernels, after the CPU op whose schemas they implement.

    Those of a wheel are loaded also where there is no driver; DeepSpeed is imported only for others.

    Args:
        timeout_s: How long to wait for another process that builds them.
    Raises:
        BuildError: They are not prebuilt, and torch has no CUDA, there is no device, or no finished build and
            no toolkit, or they do not compile.
    """
    op = CudaOp()
    if loaded(op.NAME) is None and op.fitting()[0] is not None:
        load_native(timeout_s)
        return load_once(op.NAME, partial(_load_prebuilt, op))
    with _without_accelerator_warning():
        from .builder import GearCudaBuilder
    builder = GearCudaBuilder()
    if loaded(builder.NAME) is None and builder.finished() is None:
        builder.require_tools()
    load_native(timeout_s, with_kernels=True)
    return builder.load(timeout_s=timeout_s)


def _load_prebuilt(op: CudaOp) -> ModuleType:
    module = op.load_finished()
    assert module is not None, "it is prebuilt"
    return module


@contextmanager
def _without_accelerator_warning() -> Iterator[None]:
    """Import DeepSpeed without its warning that it has found no GPU, which is irrelevant to a replay."""

    def is_other(record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith("Setting accelerator to CPU")

    logger = logging.getLogger("DeepSpeed")  # which DeepSpeed uses as it is
    logger.addFilter(is_other)
    try:
        yield
    finally:
        logger.removeFilter(is_other)
