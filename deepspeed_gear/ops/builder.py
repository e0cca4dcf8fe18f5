"""GEAR's op builders: `GearBuilder` for the CPU op, `GearCudaBuilder` for the kernels.

Two, because a machine with a GPU and no CUDA toolkit must not lose the CPU op with the kernels. Both are
DeepSpeed op builders; what they add is a name that holds a hash of everything the build depends on, a build
lock that dies with its process, and errors with a remedy.
"""

from __future__ import annotations

import functools
import importlib.machinery
import json
import os
import platform
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import torch

# From .builder: the package's own names are absent under a CPU accelerator.
from deepspeed.ops.op_builder.builder import CUDAOpBuilder, MissingCUDAException, installed_cuda_version
from deepspeed.ops.op_builder.cpu.builder import CPUOpBuilder

from ..errors import BuildError
from . import jit, toolchain

# No -ffast-math and no contraction: every backend gives the same bits. No -std: torch's headers decide it.
_CXX_FLAGS = ["-O3", "-ffp-contract=off", "-fvisibility=hidden", "-pthread", "-Wno-reorder"]
_CUDA_ARCHITECTURES = "8.0;9.0;10.0+PTX"


class _NativeOp(ABC):
    """What both builders share. Mixed into a DeepSpeed `OpBuilder`, whose `load` and `jit_load` it wraps."""

    NAME: ClassVar[str]
    #: Folders of `csrc` whose headers the op may include.
    FOLDERS: ClassVar[tuple[str, ...]]
    name: str
    jit_mode: bool

    def __init__(self, name: str | None = None) -> None:
        # OpBuilder's, which mypy does not see.
        super().__init__(name=name or self.NAME)  # type: ignore[call-arg]
        self.csrc = toolchain.csrc_root()

    def absolute_name(self) -> str:
        """Name the module that a prebuilt op has."""
        return f"deepspeed_gear.ops.{self.NAME}_op"

    def include_paths(self) -> list[str]:
        """Headers resolve as "common/x.h", "cpu/x.h"."""
        return [str(self.csrc)]

    @abstractmethod
    def sources(self) -> list[str]:
        """List the files to compile. Their stems must differ: torch names objects by them."""

    def missing(self) -> dict[str, str]:
        """List what a build lacks here: what is missing -> how to get it."""
        return toolchain.missing_tools()

    def is_compatible(self, verbose: bool = False) -> bool:
        """Tell whether the op can be built here; a reason is printed when `verbose`."""
        missing = self.missing()
        if missing and verbose:
            self.warning(f"{self.NAME}: {'; '.join(missing)}")  # type: ignore[attr-defined]
        return not missing

    def source_digest(self) -> str:
        """Hash every file that the compiler reads from `csrc`."""
        headers = (h for f in (".", *self.FOLDERS) for h in (self.csrc / f).glob("*.h"))
        return toolchain.digest_of(self.csrc, {*map(Path, self.sources()), *headers})

    def key_parts(self) -> dict[str, Any]:
        """Everything that decides what a JIT build gives."""
        return {
            **toolchain.abi(),
            "sources": self.source_digest(),
            "compiler": toolchain.compiler_version(),
            "flags": self.jit_flags(),
            "cpu": toolchain.cpu_features(),
        }

    def jit_flags(self) -> list[str]:
        """Flags of a build for this machine."""
        return [*_CXX_FLAGS, *(["-march=native"] if platform.machine() in ("x86_64", "aarch64") else [])]

    def jit_name(self) -> str:
        """Name the JIT build so that no other version of anything can be mistaken for it."""
        return f"{self.NAME}_{toolchain.short_key(self.key_parts())}"

    def load(self, verbose: bool = False, timeout_s: float = jit.BUILD_TIMEOUT_S) -> ModuleType:
        """Load the op: the process's own copy, else the prebuilt one, else one built just in time.

        Args:
            verbose: Show the compiler's output while it builds.
            timeout_s: How long to wait for another process that builds it.
        Raises:
            BuildError: It cannot be built or loaded; names what is missing and the remedy.
        """
        return jit.load_once(self.NAME, functools.partial(self._load, verbose, timeout_s))

    def _load(self, verbose: bool, timeout_s: float) -> ModuleType:
        op = self.registered_op()
        if op is not None:
            raise BuildError(
                "torch.ops.gear",
                "is registered already by another copy of deepspeed_gear in this process",
                op,
                "start a new process, and import deepspeed_gear from one place only",
            )
        prebuilt, _ = self.prebuilt()
        if prebuilt is not None:
            return jit.import_file(self.absolute_name(), prebuilt)
        name, parts = self.finished(), None
        if name is None:
            self.require_tools()
            name, parts = self.jit_name(), self.key_parts()
        return jit.build_or_import(name, functools.partial(self.jit_load, verbose), timeout_s, parts)

    def finished(self) -> str | None:
        """Name the JIT build that can be loaded as it is, None where one has to be made."""
        name = self.jit_name()
        return name if jit.is_built(name) else None

    def registered_op(self) -> str | None:
        """Name an op that exists before this builder loaded any; torch aborts if it is registered again."""
        return None

    def require_tools(self) -> None:
        """Check what a build needs.

        Raises:
            BuildError: Something is missing.
        """
        missing = self.missing()
        if missing:
            remedy = f"{' and '.join(missing.values())}, {toolchain.REFERENCE_REMEDY}"
            raise BuildError(
                f"the native op {self.NAME}", f"cannot be built: {', '.join(missing)}", remedy=remedy
            )

    def jit_load(self, verbose: bool = False) -> ModuleType:
        """Compile and import through DeepSpeed, under the name that holds the key.

        Raises:
            BuildError: It does not compile, or what was compiled cannot be loaded.
        """
        name = self.jit_name()
        self.name = name
        try:
            with toolchain.ninja_on_path():
                module: ModuleType = super().jit_load(verbose)  # type: ignore[misc]
                return module
        except ImportError as error:
            rule = f"was built in {jit.build_folder(name)} but cannot be loaded"
            raise BuildError(
                f"the native op {self.NAME}", rule, str(error), "remove that folder and try again"
            ) from error
        except (RuntimeError, OSError, subprocess.SubprocessError) as error:
            raise jit.compile_error(
                f"the native op {self.NAME}", str(error), jit.build_folder(name)
            ) from error
        finally:
            self.name = self.NAME

    def prebuilt(self) -> tuple[Path | None, str]:
        """Find the op that was built with the wheel.

        Returns:
            Its file, or None and why there is none or why it is not this process's.
        """
        folder = Path(__file__).resolve().parent
        stem = f"{self.NAME}_op"
        files = (folder / f"{stem}{suffix}" for suffix in importlib.machinery.EXTENSION_SUFFIXES)
        found = next((file for file in files if file.is_file()), None)
        if found is None:
            return None, "not prebuilt"
        try:
            record = json.loads((folder / f"{stem}.json").read_text())
        except (OSError, ValueError):
            return None, f"prebuilt, but {stem}.json beside it cannot be read"
        wanted = self.prebuilt_record()
        differing = [
            f"{k} {record.get(k)} instead of {wanted[k]}" for k in wanted if record.get(k) != wanted[k]
        ]
        return (None, f"prebuilt for {', '.join(differing)}") if differing else (found, "prebuilt")

    def prebuilt_record(self) -> dict[str, str]:
        """What is recorded beside a prebuilt op and must be equal where it is loaded."""
        return {**toolchain.abi(), "sources": self.source_digest()}


class GearBuilder(_NativeOp, CPUOpBuilder):
    """Builds the CPU op: the store's arithmetic, selection and collection in C++."""

    BUILD_VAR = "DS_BUILD_GEAR"
    NAME = "gear"
    FOLDERS = ("bindings", "common", "cpu")

    def sources(self) -> list[str]:
        """List the bindings and everything in `csrc/cpu`."""
        folder = self.csrc / "bindings"
        more = sorted(set(folder.glob("library_*.cpp")) - set(folder.glob("library_cuda*.cpp")))
        bindings = [folder / "library.cpp", *more, folder / "module.cpp"]
        return _existing([*bindings, *sorted((self.csrc / "cpu").glob("*.cpp"))])

    def cxx_args(self) -> list[str]:
        """Flags for this machine in a JIT build, portable ones in a wheel; CPUOpBuilder's would add -g."""
        return self.jit_flags() if self.jit_mode else [*_CXX_FLAGS, "-mtune=generic"]

    def registered_op(self) -> str | None:
        """Name an op of the namespace `gear`, whose schemas this library defines."""
        return next((n for n in torch._C._dispatch_get_all_op_names() if n.startswith("gear::")), None)


class GearCudaBuilder(_NativeOp, CUDAOpBuilder):
    """Builds the CUDA kernels of those ops that run on the device, and registers them beside the CPU op's."""

    BUILD_VAR = "DS_BUILD_GEAR_CUDA"
    NAME = "gear_cuda"
    FOLDERS = ("bindings", "common", "cpu", "cuda")

    def sources(self) -> list[str]:
        """List the bindings and everything in `csrc/cuda`."""
        cuda = self.csrc / "cuda"
        return _existing(
            [
                self.csrc / "bindings" / "library_cuda.cpp",
                *sorted((self.csrc / "bindings").glob("library_cuda_*.cpp")),
                *sorted(cuda.glob("*.cpp")),
                *sorted(cuda.glob("*.cu")),
            ]
        )

    def missing(self) -> dict[str, str]:
        """Add to the CPU op's needs: a CUDA torch, a device, and a toolkit of torch's major version.

        Minor versions of one major version work together; torch's own check warns of them and goes on.
        """
        missing = super().missing()
        if torch.version.cuda is None:
            return {
                f"torch {torch.__version__} is built without CUDA": "install a CUDA build of torch",
                **missing,
            }
        if not torch.cuda.is_available():
            missing["torch sees no CUDA device"] = "check the driver and CUDA_VISIBLE_DEVICES"
        if toolchain.hook_cuda_home() is None:
            return {
                **missing,
                "no CUDA toolkit (nvcc)": f"install the CUDA {torch.version.cuda} toolkit, set CUDA_HOME",
            }
        remedy = f"install the CUDA {torch.version.cuda} toolkit"
        try:
            major, minor = installed_cuda_version(self.NAME)
        except MissingCUDAException as error:
            return {**missing, " ".join(str(error).split()): remedy}
        if str(major) != torch.version.cuda.partition(".")[0]:
            missing[f"toolkit {major}.{minor} is not for torch's CUDA {torch.version.cuda}"] = remedy
        return missing

    def require_tools(self) -> None:
        """Check what a build needs; the remedy of a machine without CUDA is the CPU op, not the reference.

        Raises:
            BuildError: Something is missing.
        """
        missing = self.missing()
        if missing:
            remedy = f'{" and ".join(missing.values())}, or set gear.backend to "cpu"'
            raise BuildError(
                "the CUDA kernels of gear", f"cannot be built: {', '.join(missing)}", remedy=remedy
            )

    def finished(self) -> str | None:
        """Where there is no toolkit, name the build of another one that agrees in all else.

        So nodes without nvcc load what a node that has it left in a folder that they share.
        """
        if not torch.cuda.is_available():
            return None
        if toolchain.hook_cuda_home() is not None:
            return super().finished()
        return jit.built_like(self.NAME, {k: v for k, v in self.key_parts().items() if k != "toolkit"})

    def jit_name(self) -> str:
        """Name the JIT build; where there is no toolkit, the one that can be loaded, if any."""
        without = self.finished() if toolchain.cuda_home() is None else None
        return without or super().jit_name()

    def key_parts(self) -> dict[str, Any]:
        """Add the CUDA compiler and the architectures of the devices."""
        home = toolchain.cuda_home()
        nvcc = toolchain.nvcc_version(home)
        devices = sorted({torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())})
        return {**super().key_parts(), "toolkit": f"{home} {nvcc}", "devices": devices}

    def cxx_args(self) -> list[str]:
        """Flags of the host side, as the CPU op's."""
        return self.jit_flags()

    def nvcc_args(self) -> list[str]:
        """DeepSpeed's flags without fast-math and its switches of half types; no fused multiply-add."""
        drop = ("--use_fast_math", "-D__CUDA_NO", "-U__CUDA_NO")
        kept = [flag for flag in super().nvcc_args() if flag and not flag.startswith(drop)]
        return [*kept, "--fmad=false", "-lineinfo"]

    def compute_capability_args(self, cross_compile_archs: str | None = None) -> list[str]:
        """Name architectures that CUDA 13 still builds, where DeepSpeed's defaults begin at 6.0."""
        if not os.environ.get("TORCH_CUDA_ARCH_LIST"):
            cross_compile_archs = cross_compile_archs or _CUDA_ARCHITECTURES
        args: list[str] = super().compute_capability_args(cross_compile_archs)
        return args


def _existing(files: Iterable[Path]) -> list[str]:
    """Check that the sources lie where they are expected.

    Raises:
        BuildError: One is missing: the installation is damaged.
    """
    listed = [*files]
    for file in listed:
        if not file.is_file():
            raise BuildError(str(file), "must exist", remedy="install deepspeed_gear again")
    return [str(file) for file in listed]
