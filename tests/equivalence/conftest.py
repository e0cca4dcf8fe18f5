"""The backends that must give the reference's bits, and what the tests compare them with."""

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import host_kernels
import pytest
import torch
from op_arguments import HOST_ONLY
from op_kit import REFERENCE
from torch import Tensor

from deepspeed_gear.ops import Ops, load_backend, toolchain
from deepspeed_gear.ops.backends import OP_NAMES


@pytest.fixture(scope="session")
def reference() -> Ops:
    return REFERENCE


@pytest.fixture(scope="session")
def cpu() -> Ops:
    return load_backend("cpu")


@pytest.fixture(scope="session", params=["reference", "cpu"])
def careful(request: pytest.FixtureRequest) -> Ops:
    """The backends that refuse a call before they write; a kernel ends where it is."""
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="session", params=["reference", "cpu", "kernels_on_host"])
def on_host(request: pytest.FixtureRequest) -> Ops:
    """The backends that may meet what they refuse: a kernel on a GPU would end all of
    its kernels.
    """
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="session")
def host_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The CUDA kernels and their binding, built for the CPU (`tests/host/cuda_runtime.h`)."""
    if toolchain.missing_tools():
        pytest.skip(", ".join(toolchain.missing_tools()))
    return host_kernels.library(tmp_path_factory)


@pytest.fixture(scope="session")
def kernels_on_host(host_library: Path) -> Ops:
    """The CUDA kernels and their binding, run by the CPU lane by lane."""
    torch.ops.load_library(host_library)
    cpu = load_backend("cpu")
    plain = {name: getattr(cpu, name) for name in OP_NAMES}  # of ops without kernels
    there = [name for name in OP_NAMES if hasattr(torch.ops.gear_on_host, name)]
    ops = plain | {name: getattr(torch.ops.gear_on_host, name).default for name in there}
    return Ops("kernels on the host", **ops, native=cpu.native)


@pytest.fixture
def launched(host_library: Path, kernels_on_host: Ops) -> Callable[[], list[int]]:
    """Give the blocks of each launch of kernels on the host since the last call; 0: a memset."""
    count = ctypes.CDLL(str(host_library)).gear_host_launched
    count.restype = ctypes.c_size_t
    count.argtypes = [ctypes.c_void_p, ctypes.c_size_t]

    def take() -> list[int]:
        blocks = (ctypes.c_uint * 1000)()
        return list(blocks[: count(blocks, len(blocks))])

    take()
    return take


KERNELS = ["kernels_on_host", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.fixture(scope="session", params=["cpu", *KERNELS])
def native(request: pytest.FixtureRequest) -> Ops:
    """Each backend but the reference; all take tensors in host memory."""
    return named(request)


@pytest.fixture(scope="session", params=KERNELS)
def kernels(request: pytest.FixtureRequest) -> Ops:
    """What runs the kernels: for sizes at which they differ and the reference is slow."""
    return named(request)


def named(request: pytest.FixtureRequest) -> Ops:
    if request.param == "cuda":
        return through_device(load_backend("cuda"), torch.device("cuda"))
    return request.getfixturevalue(request.param)


def through_device(ops: Ops, device: torch.device) -> Ops:
    """Give ops that move their tensors to a device, keep each one's alignment, and bring the
    results back.
    """

    def move(value: Any, moved: list[tuple[Tensor, Tensor]]) -> Any:
        if isinstance(value, (list, tuple)):
            return [move(v, moved) for v in value]
        if not isinstance(value, Tensor):
            return value
        shift = value.data_ptr() % 16
        buffer = torch.empty(
            shift + value.numel() * value.element_size(), dtype=torch.uint8, device=device
        )
        there = buffer[shift:].view(value.dtype).view(value.shape)
        there.copy_(value)
        moved.append((value, there))
        return there

    def wrap(op: Callable[..., None]) -> Callable[..., None]:
        def run(*arguments: Any) -> None:
            moved: list[tuple[Tensor, Tensor]] = []
            op(*(move(a, moved) for a in arguments))
            for here, there in moved:
                here.copy_(there)

        return run

    wrapped = {name: getattr(ops, name) for name in HOST_ONLY}
    wrapped |= {name: wrap(getattr(ops, name)) for name in OP_NAMES if name not in HOST_ONLY}
    return Ops(f"{ops.name} through {device}", **wrapped, native=ops.native)
