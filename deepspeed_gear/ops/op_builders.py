"""DeepSpeed's op builders for the CPU op and the kernels: flags, nvcc, architectures, wheels.

`GearBuilder` for the CPU op, `GearCudaBuilder` for the kernels: two, because a machine with a GPU
and no CUDA toolkit must not lose the CPU op with the kernels.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

# From .builder: the package's own names are absent under a CPU accelerator.
from deepspeed.ops.op_builder.builder import (
    CUDAOpBuilder,
    MissingCUDAException,
    installed_cuda_version,
)
from deepspeed.ops.op_builder.cpu.builder import CPUOpBuilder

from deepspeed_gear.errors import BuildError
from deepspeed_gear.ops import jit, toolchain
from deepspeed_gear.ops.native_op import CXX_FLAGS, CpuOp, CudaOp, NativeOp

_CUDA_ARCHITECTURES = "8.0;9.0;10.0+PTX"
#: Flags of DeepSpeed that begin so are left out: fast-math, and switches of half types.
_DROPPED_FLAGS = ("--use_fast_math", "-D__CUDA_NO", "-U__CUDA_NO")
PORTABLE_FLAGS = [*CXX_FLAGS, "-mtune=generic"]  # for a wheel
_NVCC_FLAGS = ["--fmad=false", "-lineinfo"]
#: What nvcc and the choice of architectures read from the environment.
_NVCC_VARIABLES = ("TORCH_CUDA_ARCH_LIST", "NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")


class _DeepSpeedOp(NativeOp):
    """Base of both builders, mixed into a DeepSpeed `OpBuilder`.

    It wraps the `load` and `jit_load` of that class.
    """

    name: str
    jit_mode: bool

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name=name or self.NAME)

    def include_paths(self) -> list[str]:
        """Return the folder in which headers such as "common/x.h" and "gather/gather.h" lie."""
        return [str(self.csrc)]

    def extra_ldflags(self) -> list[str]:
        """Return linker flags with the shared C++ runtime, the one that torch uses.

        With a runtime of its own in the op, an exception that torch catches would end the process;
        some compilers link such a one without being asked.
        """
        flags: list[str] = super().extra_ldflags()  # type: ignore[misc]
        # The compiler prints a path, or the bare name if it has no such file.
        paths = toolchain.output([*toolchain.compiler(), "-print-file-name=libstdc++.so.6"])[:1]
        return [*flags, *filter(os.path.isabs, paths)]

    def is_compatible(self, verbose: bool = False) -> bool:
        missing = self.missing()
        if missing and verbose:
            self.warning(f"{self.NAME}: {'; '.join(missing)}")  # type: ignore[attr-defined]
        return not missing

    def jit_load(self, verbose: bool = False) -> ModuleType:
        """Compile and import through DeepSpeed, under the name with the key; else BuildError."""
        what = f"the native op {self.NAME}"
        folder = jit.build_folder(self.jit_name())
        self.name = folder.name
        rule = f"was built in {folder} but cannot be loaded"
        remedy = "remove that folder and try again"
        with toolchain.ninja_on_path(), BuildError.on(what, rule, ImportError, remedy=remedy):
            try:
                module: ModuleType = super().jit_load(verbose)  # type: ignore[misc]
            except (RuntimeError, OSError, subprocess.SubprocessError) as error:
                lines = [line.strip() for line in str(error).splitlines() if line.strip()]
                is_error = re.compile(r"\berror\b[: ]|undefined reference|cannot find -l").search
                shown = "\n  ".join(([*filter(is_error, lines)] or lines[-5:])[:5])
                remedy = "correct what the compiler names (build.ninja there has the commands)"
                rule = f"failed to compile in {folder}:\n  {shown}\n"
                raise BuildError(what, rule, remedy=remedy) from error
            finally:
                self.name = self.NAME
        return module

    def cxx_args(self) -> list[str]:
        """Return flags for this machine in a JIT build, portable ones in a wheel.

        DeepSpeed's own flags would add -g.
        """
        return self.jit_flags() if self.jit_mode else [*PORTABLE_FLAGS]


class GearBuilder(_DeepSpeedOp, CpuOp, CPUOpBuilder):
    """Builds the CPU op: the store, selection and gather."""

    BUILD_VAR = "DS_BUILD_GEAR"


class GearCudaBuilder(_DeepSpeedOp, CudaOp, CUDAOpBuilder):
    """Builds the CUDA kernels, and registers them beside the CPU op's."""

    BUILD_VAR = "DS_BUILD_GEAR_CUDA"

    def missing(self) -> dict[str, str]:
        """List what the CPU op lacks, and a CUDA torch, a device, and a toolkit that fits torch.

        A toolkit fits if its major version is that of torch: minor versions are compatible, and
        torch's own check only warns of them.
        """
        missing = super().missing()
        cuda = torch.version.cuda
        if cuda is None:
            lack = f"torch {torch.__version__} is built without CUDA"
            return {lack: "install a CUDA build of torch", **missing}
        remedy = f"install the CUDA {cuda} toolkit"
        if not torch.cuda.is_available():
            missing["torch finds no CUDA device"] = "check the driver and CUDA_VISIBLE_DEVICES"
        if toolchain.hook_cuda_home() is None:
            return {**missing, "no CUDA toolkit (nvcc)": f"{remedy}, set CUDA_HOME"}
        try:
            major, minor = installed_cuda_version(self.NAME)
        except MissingCUDAException as error:
            return {**missing, " ".join(str(error).split()): remedy}
        if str(major) != cuda.partition(".")[0]:
            missing[f"toolkit {major}.{minor} is not for torch's CUDA {cuda}"] = remedy
        return missing

    def finished(self) -> str | None:
        """Return the name of a finished build, None where there is none or no device for it."""
        return super().finished() if torch.cuda.is_available() else None

    def key_parts(self) -> dict[str, Any]:
        """Return the CPU op's parts of the key, and CUDA compiler, flags and devices."""
        home = toolchain.cuda_home()
        nvcc = toolchain.nvcc_version(home)
        devices = sorted(
            {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}
        )
        return {
            **super().key_parts(),
            "nvcc_flags": {
                "added": _NVCC_FLAGS,
                "dropped": _DROPPED_FLAGS,
            },  # DeepSpeed's: by its version
            "devices": devices,
            "toolkit": f"{home} {nvcc}",
            "environment": {name: os.environ.get(name, "") for name in _NVCC_VARIABLES},
        }

    def nvcc_args(self) -> list[str]:
        """Return DeepSpeed's flags without fast-math, half switches and fused multiply-add."""
        kept = [
            flag for flag in super().nvcc_args() if flag and not flag.startswith(_DROPPED_FLAGS)
        ]
        return [*kept, *_NVCC_FLAGS]

    def compute_capability_args(self, cross_compile_archs: str | None = None) -> list[str]:
        """Return flags for the architectures of TORCH_CUDA_ARCH_LIST, or for all supported ones.

        DeepSpeed's defaults begin at 6.0, which CUDA 13 cannot build; and it cannot read "9.0a" or
        "10.0f", whose additional instructions no kernel here uses.
        """
        given = os.environ.get("TORCH_CUDA_ARCH_LIST", "").replace(" ", ";").strip(";")
        if not given:
            cross_compile_archs = cross_compile_archs or _CUDA_ARCHITECTURES
        else:
            plain = re.sub(r"(\d)[af](?=[;+]|$)", r"\1", given)
            if not re.fullmatch(r"(\d+\.\d+(\+PTX)?;*)+", plain):
                remedy = 'unset it, or name capabilities as in "8.0;9.0+PTX"'
                raise BuildError(
                    "TORCH_CUDA_ARCH_LIST", "must list compute capabilities", given, remedy
                )
            os.environ["TORCH_CUDA_ARCH_LIST"] = self._jit_arch_list = plain
        args: list[str] = super().compute_capability_args(cross_compile_archs)
        return args

    def builder(self) -> Any:
        """Describe the bindings to setuptools, linked with the kernels, which nvcc compiles.

        torch may have no CUDA, so the bindings use only its host headers. The CUDA runtime is
        static with hidden names, so that it is not mixed with torch's.
        """
        from torch.utils.cpp_extension import CppExtension

        runtime = static_runtime()
        # libtorch.so needs libtorch_cuda.so where torch has CUDA; a function of it is looked up
        # lazily.
        libraries = ["-Wl,-z,lazy", "-Wl,--no-as-needed", "-ltorch", "-lrt", "-ldl", "-lpthread"]
        return CppExtension(  # type: ignore[no-untyped-call]
            self.absolute_name(),
            self.bindings(),
            include_dirs=self.include_paths(),
            extra_compile_args={"cxx": [*PORTABLE_FLAGS]},
            extra_objects=[str(runtime)],
            extra_link_args=[f"-Wl,--exclude-libs,{runtime.name}", *libraries],
        )


BUILDERS = {builder.__name__: builder for builder in (GearBuilder, GearCudaBuilder)}


def register() -> None:
    """Register the builders with DeepSpeed: accelerator, `deepspeed.ops.op_builder`, `ALL_OPS`.

    DeepSpeed has no entry point for external ops, so two lookups of the accelerator are wrapped.
    Idempotent; call it again after `set_accelerator`.
    """
    import deepspeed.ops.op_builder as op_builder
    from deepspeed.accelerator import get_accelerator
    from deepspeed.git_version_info import installed_ops
    from deepspeed.ops.op_builder.all_ops import ALL_OPS

    accelerator = get_accelerator()
    if not hasattr(accelerator.get_op_builder, "_gear_wrapped"):
        accelerator.get_op_builder = _known_first(
            accelerator.get_op_builder, lambda builder: builder
        )
        accelerator.create_op_builder = _known_first(
            accelerator.create_op_builder, lambda builder: builder()
        )
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


def require_nvcc() -> Path:
    """Find the CUDA toolkit and make torch and DeepSpeed use it; BuildError without one."""
    home = toolchain.hook_cuda_home()
    if home is None:
        remedy = "install a CUDA toolkit of torch's major version, and set CUDA_HOME to it"
        rule = "cannot be compiled: no CUDA toolkit (nvcc)"
        raise BuildError("the CUDA kernels of gear", rule, remedy=remedy)
    return home


def nvcc_flags() -> list[str]:
    """Return nvcc's flags, for TORCH_CUDA_ARCH_LIST or, if unset, all supported architectures."""
    require_nvcc()
    builder = GearCudaBuilder()
    flags = [flag for flag in builder.nvcc_args() if not flag.startswith("--threads")]
    return [*flags, "-Xcompiler=-fPIC,-Wall,-fvisibility=hidden", f"-I{builder.csrc}"]


def compile_kernels(folder: Path, flags: Sequence[str]) -> list[str]:
    """Compile the kernels that are not in a folder yet; return all object files."""
    nvcc = require_nvcc() / "bin" / "nvcc"
    folder.mkdir(parents=True, exist_ok=True)

    def compile_one(source: str) -> str:
        target = folder / f"{Path(source).stem}.cuda.o"
        if not target.is_file():
            part = target.with_suffix(f".{os.getpid()}.part")
            command = [str(nvcc), *flags, "-c", source, "-o", str(part)]
            run = subprocess.run(command, capture_output=True, text=True)
            if run.returncode != 0:
                raise BuildError(
                    source,
                    f"does not compile:\n{(run.stdout + run.stderr)[-4000:]}",
                    remedy="install a compiler and CUDA toolkit that this torch supports",
                )
            part.replace(target)
        return str(target)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(compile_one, GearCudaBuilder().kernels()))


def static_runtime() -> Path:
    """Find the toolkit's static CUDA runtime, with which kernels need no library at run time."""
    home = require_nvcc()
    for pattern in ("lib64", "lib", "targets/*/lib"):
        for library in sorted(home.glob(f"{pattern}/libcudart_static.a")):
            return library
    remedy = "install the toolkit's runtime (cudart)"
    raise BuildError(str(home), "must have libcudart_static.a", remedy=remedy)
