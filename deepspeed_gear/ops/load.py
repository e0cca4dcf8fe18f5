"""Load the native ops into this process."""

from __future__ import annotations

from types import ModuleType

from .builder import GearBuilder, GearCudaBuilder
from .jit import BUILD_TIMEOUT_S, loaded


def load_native(timeout_s: float = BUILD_TIMEOUT_S) -> ModuleType:
    """Load the CPU op: prebuilt with the wheel where that fits this torch, else built just in time.

    Registers `torch.ops.gear.*` and returns the module with the plain C functions. The first call on a node
    compiles (tens of seconds; the node's other processes wait for it), the next ones take milliseconds, a
    second one in the same process nothing. Needs no process group. Thread safe.

    Args:
        timeout_s: How long to wait for another process that builds it.
    Raises:
        BuildError: No compiler, a compile error, or a wait that was too long; names the remedy.
    """
    return GearBuilder().load(timeout_s=timeout_s)


def load_native_cuda(timeout_s: float = BUILD_TIMEOUT_S) -> ModuleType:
    """Load the CUDA kernels, after the CPU op whose schemas they implement.

    Args:
        timeout_s: How long to wait for another process that builds them.
    Raises:
        BuildError: torch has no CUDA, there is no device, or no finished build and no toolkit, or they do not
            compile.
    """
    builder = GearCudaBuilder()
    if loaded(builder.NAME) is None and builder.finished() is None:
        builder.require_tools()
    load_native(timeout_s)
    return builder.load(timeout_s=timeout_s)
