"""The backends that must give the reference's bits, and what the tests compare them with."""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from gear_support import ROOT
from op_cases import HOST_ONLY
from reference_ops import reference_ops
from torch import Tensor
from torch.utils.cpp_extension import TORCH_LIB_PATH, include_paths

from deepspeed_gear.ops import Ops, load_backend, toolchain
from deepspeed_gear.ops.backends import OP_NAMES

HOST = Path(__file__).resolve().parents[1] / "host"
CSRC = toolchain.csrc_root()


@pytest.fixture(scope="session")
def reference() -> Ops:
    return reference_ops()


@pytest.fixture(scope="session")
def cpu() -> Ops:
    return load_backend("cpu")


@pytest.fixture(params=["reference", "cpu"])
def careful(request: pytest.FixtureRequest) -> Ops:
    """The backends that name what they refuse; a kernel can only end."""
    ops: Ops = request.getfixturevalue(request.param)
    return ops


@pytest.fixture(scope="session")
def host_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The CUDA kernels and their binding, built for the CPU (`tests/host/cuda_runtime.h`).

    It is kept as long as the sources and what builds them are the same.
    """
    if toolchain.missing_tools():
        pytest.skip(", ".join(toolchain.missing_tools()))
    sources = [file for folder in (CSRC, HOST) for file in sorted(folder.rglob("*")) if file.is_file()]
    parts = [repr((toolchain.compiler_version(), torch.__version__)).encode()]
    parts += [file.read_bytes() for file in (*sources, Path(__file__))]
    name = f"kernels_on_host-{hashlib.sha256(b''.join(parts)).hexdigest()[:16]}.so"
    kept = ROOT / "build" / name
    if not kept.exists():
        made = build_kernels_for_host(tmp_path_factory.mktemp("kernels_on_host"))
        kept.parent.mkdir(exist_ok=True)
        part = kept.with_suffix(f".{os.getpid()}")
        shutil.copyfile(made, part)
        part.replace(kept)
    return kept


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
    count.restype, count.argtypes = ctypes.c_size_t, [ctypes.c_void_p, ctypes.c_size_t]

    def take() -> list[int]:
        blocks = (ctypes.c_uint * 1000)()
        return list(blocks[: count(blocks, len(blocks))])

    take()
    return take


@pytest.fixture(
    scope="session", params=["cpu", "kernels_on_host", *(["cuda"] if torch.cuda.is_available() else [])]
)
def native(request: pytest.FixtureRequest) -> Ops:
    """Each backend but the reference; all take tensors in host memory."""
    if request.param == "cuda":
        return through_device(load_backend("cuda"), torch.device("cuda"))
    ops: Ops = request.getfixturevalue(request.param)
    return ops


@pytest.fixture(scope="session")
def same_bits() -> Callable[[Tensor, Tensor], bool]:
    """Compare every bit: NaNs by their payload, and 0.0 differs from -0.0."""

    def compare(a: Tensor, b: Tensor) -> bool:
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bytes(a), _bytes(b))

    return compare


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().reshape(-1).view(torch.uint8)


def build_kernels_for_host(folder: Path) -> Path:
    """Compile the kernels with the host's compiler; only launches and the names of ops are rewritten."""
    launch = re.compile(
        r"([\w:]+(?:<[^<>;]*(?:<[^<>;]*>)?[^<>;]*>)?)\s*<<<(.+?), (\w+), 0, .+?>>>\((.*?)\);", re.DOTALL
    )
    for file in [*CSRC.glob("*/*.cu"), *CSRC.glob("*/*_cuda.h")]:
        text, launches = launch.subn(r"gear_host::Launch(\2, \3, [&] { \1(\4); });", file.read_text())
        assert launches == file.read_text().count("<<<")
        copy = folder / file.relative_to(CSRC).with_suffix(".h" if file.suffix == ".h" else ".cpp")
        copy.parent.mkdir(exist_ok=True)
        copy.write_text(text)
    stream = 'extern "C" int32_t aoti_torch_get_current_cuda_stream(int32_t, void**) { return 0; }\n'
    schemas = "TORCH_LIBRARY(gear_on_host, m) { GEAR_OPS(GEAR_DEFINE) GEAR_RING_OPS(GEAR_DEFINE) }\n"
    for file in (CSRC / "bindings").glob("library_cuda*.cpp"):
        binding = file.read_text()
        assert "TORCH_LIBRARY_IMPL(gear, CUDA, m)" in binding
        (folder / file.name).write_text(
            binding.replace("(gear, CUDA, m)", "(gear_on_host, CPU, m)")
            + (schemas + stream if file.name == "library_cuda.cpp" else "")
        )
    flags = [
        "-std=c++20",
        "-O1",
        "-ffp-contract=off",
        "-fPIC",
        "-U_FORTIFY_SOURCE",  # its longjmp refuses to go to another fiber
        "-DTORCH_EXTENSION_NAME=gear_on_host",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
    ]
    flags += [f"-I{folder}", f"-I{HOST}", f"-I{CSRC}", f"-I{sysconfig.get_path('include')}"]
    flags += [f"-isystem{path}" for path in include_paths("cpu")]
    sources = [*sorted(folder.glob("*.cpp")), *sorted(folder.glob("*/*.cpp"))]

    def run(*arguments: str) -> None:
        found = subprocess.run([*toolchain.compiler(), *arguments], capture_output=True, text=True)
        assert found.returncode == 0, found.stderr

    def compile_one(source: Path) -> str:
        target = folder / f"{source.parent.name}_{source.stem}.o"
        run(*flags, "-c", str(source), "-o", str(target))
        return str(target)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_one, sources))
    out = folder / "kernels_on_host.so"
    run("-shared", *objects, f"-L{TORCH_LIB_PATH}", "-ltorch", "-ltorch_cpu", "-lc10", "-o", str(out))
    return out


def through_device(ops: Ops, device: torch.device) -> Ops:
    """Give ops that move their tensors to a device, keep each one's alignment, and bring the results back."""

    def move(value: Any, moved: list[tuple[Tensor, Tensor]]) -> Any:
        if isinstance(value, (list, tuple)):
            return [move(v, moved) for v in value]
        if not isinstance(value, Tensor):
            return value
        shift = value.data_ptr() % 16
        buffer = torch.empty(shift + value.numel() * value.element_size(), dtype=torch.uint8, device=device)
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
