"""Compile the CUDA kernels with nvcc alone: on a machine without a GPU, for a torch without CUDA too."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ..errors import BuildError
from . import toolchain
from .builder import GearCudaBuilder


def require_nvcc() -> Path:
    """Find the CUDA toolkit, and make torch and DeepSpeed use it.

    Raises:
        BuildError: There is none.
    """
    home = toolchain.hook_cuda_home()
    if home is None:
        raise BuildError(
            "the CUDA kernels of gear",
            "cannot be compiled: no CUDA toolkit (nvcc)",
            remedy="install a CUDA toolkit of torch's major version, and set CUDA_HOME to it",
        )
    return home


def nvcc_flags() -> list[str]:
    """Return the builder's flags for the architectures of TORCH_CUDA_ARCH_LIST, else for all supported ones.

    Sets TORCH_CUDA_ARCH_LIST to the architectures.
    """
    require_nvcc()
    builder = GearCudaBuilder()
    flags = [flag for flag in builder.nvcc_args() if not flag.startswith("--threads")]
    return [*flags, "-Xcompiler=-fPIC,-Wall,-fvisibility=hidden", f"-I{builder.csrc}"]


def compile_kernels(folder: Path, flags: Sequence[str]) -> list[str]:
    """Compile every kernel into a folder; objects that are there stay.

    Args:
        folder: Of the objects; one folder belongs to one version of sources, flags and toolkit.
        flags: From `nvcc_flags`.
    Returns:
        The objects.
    Raises:
        BuildError: A kernel does not compile.
    """
    nvcc = require_nvcc() / "bin" / "nvcc"
    folder.mkdir(parents=True, exist_ok=True)

    def compile_one(source: str) -> str:
        target = folder / f"{Path(source).stem}.cuda.o"
        if not target.is_file():
            part = target.with_suffix(f".{os.getpid()}.part")
            command = [str(nvcc), *flags, "-c", source, "-o", str(part)]
            run = subprocess.run(command, capture_output=True, text=True)
            if run.returncode != 0:
                raise BuildError(source, f"does not compile:\n{(run.stdout + run.stderr)[-4000:]}")
            part.replace(target)
        return str(target)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(compile_one, GearCudaBuilder().kernels()))


def static_runtime() -> Path:
    """Find the static CUDA runtime of the toolkit, which needs no library where the kernels are loaded.

    Raises:
        BuildError: The toolkit lacks it.
    """
    home = require_nvcc()
    for pattern in ("lib64", "lib", "targets/*/lib"):
        for found in sorted(home.glob(f"{pattern}/libcudart_static.a")):
            return found
    raise BuildError(
        str(home), "must have libcudart_static.a", remedy="install the toolkit's runtime (cudart)"
    )
