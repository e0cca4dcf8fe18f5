"""The native ops: their sources, flags and keys, and the prebuilt op or build that fits here.

It works without DeepSpeed, which `op_builders` needs to compile them: importing DeepSpeed warns
where there is no GPU.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.machinery
import json
import os
import platform
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import torch

from deepspeed_gear.errors import BuildError
from deepspeed_gear.log import LOG
from deepspeed_gear.ops import jit, toolchain

# No -ffast-math and no contraction: every backend gives the same bits. No -std: torch's headers
# decide it.
CXX_FLAGS = ["-O3", "-ffp-contract=off", "-fvisibility=hidden", "-pthread", "-Wno-reorder"]
DRIVER = "libcuda.so.1"
_NOT_PREBUILT = "not prebuilt"


class NativeOp(ABC):
    """A native op: its sources, the key of its builds, and the builds that fit this process."""

    NAME: ClassVar[str]
    INSTEAD: ClassVar[str] = "install a wheel that has the op"  # remedy other than building it
    # Ends of the stems of headers that the op does not include: their changes need no new build.
    OTHER_HEADERS: ClassVar[tuple[str, ...]] = ()

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)  # `op_builders` mixes this class into DeepSpeed's op builders
        self.csrc = toolchain.csrc_root()

    def absolute_name(self) -> str:
        """Return the name of the extension module that is prebuilt with a wheel."""
        return f"deepspeed_gear.ops.{self.NAME}_op"

    @abstractmethod
    def sources(self) -> list[str]:
        """List the files to compile. Their stems must differ: torch names objects by them."""

    def missing(self) -> dict[str, str]:
        """List the missing requirements of a build, each with its remedy."""
        return toolchain.missing_tools()

    def source_digest(self) -> str:
        """Hash the names and bytes of the files that the compiler reads from `csrc`."""
        headers = (h for h in self.csrc.rglob("*.h") if not h.stem.endswith(self.OTHER_HEADERS))
        digest = hashlib.sha256()
        for file in sorted({*map(Path, self.sources()), *headers}):
            data = file.read_bytes()
            digest.update(f"{file.relative_to(self.csrc).as_posix()} {len(data)}\n".encode())
            digest.update(data)
        return digest.hexdigest()

    def key_parts(self) -> dict[str, Any]:
        """Return everything that a JIT build depends on, for the hash in its name."""
        return {
            **toolchain.abi(),
            "sources": self.source_digest(),
            "compiler": toolchain.compiler_version(),
            "deepspeed": toolchain.installed_version("deepspeed"),  # its builder adds flags
            "flags": self.jit_flags(),
            "cpu": toolchain.cpu_features(),
        }

    def jit_flags(self) -> list[str]:
        """Return the compiler's flags for a build on the machine that runs it."""
        has_native = platform.machine() in ("x86_64", "aarch64")
        return [*CXX_FLAGS, *(["-march=native"] if has_native else [])]

    def jit_name(self) -> str:
        """Return the name of the JIT build, with a hash of everything that it depends on."""
        return f"{self.NAME}_{toolchain.short_key(self.key_parts())}"

    def load(
        self,
        verbose: bool = False,
        timeout_s: float = jit.BUILD_TIMEOUT_S,
        beside: Callable[[], None] | None = None,
        builder: Callable[[], Any] | None = None,
    ) -> ModuleType:
        """Load the op: the process's own copy, else the prebuilt one, else one by `builder`.

        `beside` is called in the one process that builds it, before it compiles.
        """

        def load() -> ModuleType:
            if (module := self.load_finished()) is not None:
                return module
            compiler: Any = self if builder is None else builder()
            compiler.require_tools()

            def build() -> ModuleType:
                if beside is not None:
                    beside()
                module: ModuleType = compiler.jit_load(verbose)
                return module

            return jit.build_or_import(compiler.jit_name(), build, timeout_s)

        return jit.load_once(self.NAME, load)

    def load_finished(self) -> ModuleType | None:
        """Import the prebuilt op, else a finished build; None where there is neither.

        The log names a prebuilt op that does not fit this process, and why.
        """
        prebuilt, why = self.fitting()
        if prebuilt is not None:
            try:
                return jit.import_file(self.absolute_name(), prebuilt)
            except BuildError as error:
                # A wheel may come from a machine with a newer C library than this one.
                if not isinstance(error.__cause__, ImportError):
                    raise
                why = f"prebuilt, but cannot be loaded: {error.__cause__}"
        if why != _NOT_PREBUILT:
            LOG.warning("the native op %s is %s; a build for this process is used", self.NAME, why)
        name = self.finished()
        return None if name is None else jit.import_built(name)

    def load_existing(self) -> ModuleType | None:
        """Load the op without building it; None where neither a prebuilt op nor a build exists."""
        with suppress(BuildError):
            return jit.load_once(self.NAME, self.load_finished)
        return None

    def finished(self) -> str | None:
        """Return the name of the JIT build that can be loaded, None where one has to be made."""
        name = self.jit_name()
        return None if jit.built_library(name) is None else name

    def require_tools(self) -> None:
        """Raise BuildError if the op cannot be built here, with all that is missing."""
        missing = self.missing()
        if missing:
            remedy = f"{' and '.join(missing.values())}, or {self.INSTEAD}"
            rule = f"is {self.fitting()[1]}, and cannot be built: {', '.join(missing)}"
            raise BuildError(f"the native op {self.NAME}", rule, remedy=remedy)

    def prebuilt(self) -> tuple[Path | None, str]:
        """Return the op file that was built with the wheel; None and why if it does not fit."""
        folder = Path(__file__).resolve().parent
        stem = f"{self.NAME}_op"
        files = (folder / f"{stem}{suffix}" for suffix in importlib.machinery.EXTENSION_SUFFIXES)
        library = next((file for file in files if file.is_file()), None)
        if library is None:
            return None, _NOT_PREBUILT
        try:
            facts = json.loads((folder / f"{stem}.json").read_text())
        except (OSError, ValueError):
            return None, f"prebuilt, but {stem}.json beside it cannot be read"
        differing = [
            f"{key} {facts.get(key)} instead of {value}"
            for key, value in self.prebuilt_facts().items()
            if facts.get(key) != value
        ]
        if differing:
            return None, f"prebuilt for {', '.join(differing)}"
        return library, "prebuilt"

    def fitting(self) -> tuple[Path | None, str]:
        """Return the prebuilt op as `prebuilt` does, if it also fits the devices here."""
        return self.prebuilt()

    def prebuilt_facts(self) -> dict[str, str]:
        """Return the facts beside a prebuilt op, which must be equal where it is loaded."""
        versions = {**toolchain.abi(), "torch": toolchain.release(str(torch.__version__))}
        return {**versions, "sources": self.source_digest()}


class CpuOp(NativeOp):
    """The CPU op: the store, selection and gather in C++."""

    NAME = "gear"
    OTHER_HEADERS = ("_cuda",)

    def sources(self) -> list[str]:
        """List the bindings, and the C++ sources of every op and of the store.

        They are compiled in this order: those that take longest come first, so that a machine with
        few cores does not wait for one of them at the end.
        """
        folder = self.csrc / "bindings"
        first = [folder / "module.cpp", folder / "library.cpp"]
        rest = sorted(
            file
            for file in {*self.csrc.glob("*/*.cpp")} - {*first}
            if not file.stem.endswith(self.OTHER_HEADERS)
        )
        return existing([*first, *rest])

    def load_finished(self) -> ModuleType | None:
        """Import the op; BuildError if another copy of the package has registered its ops."""
        # torch would abort the process when the ops are registered again.
        ops = [op for op in torch._C._dispatch_get_all_op_names() if op.startswith("gear::")]
        if ops:
            rule = "is registered already by another copy of deepspeed_gear in this process"
            remedy = "start a new process, and import deepspeed_gear from one place only"
            raise BuildError("torch.ops.gear", rule, ops[0], remedy)
        return super().load_finished()


class CudaOp(NativeOp):
    """The CUDA kernels of those ops that run on the device, and their bindings."""

    NAME = "gear_cuda"
    INSTEAD = 'set gear.backend to "cpu"'

    def sources(self) -> list[str]:
        return [*self.bindings(), *self.kernels()]

    def bindings(self) -> list[str]:
        """List the bindings, which the C++ compiler compiles."""
        return existing([self.csrc / "bindings" / "library_cuda.cpp"])

    def kernels(self) -> list[str]:
        """List the kernels, which nvcc compiles; they include nothing of torch."""
        return existing(sorted(self.csrc.glob("*/*.cu")))

    def fitting(self) -> tuple[Path | None, str]:
        """Find prebuilt kernels that are compiled for the devices here.

        It initialises CUDA, after which a process must not fork; so `register` calls only
        `prebuilt`.
        """
        library, why = self.prebuilt()
        if library is None:
            return None, why
        record = json.loads(library.with_name(f"{self.NAME}_op.json").read_text())
        built_for = record["architectures"]
        devices = {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}
        for major, minor in sorted(devices):
            if not covers(built_for, (major, minor)):
                return None, f"prebuilt for the architectures {built_for}, not for {major}.{minor}"
        return library, why

    def load_finished(self) -> ModuleType | None:
        """Import prebuilt kernels, which need no driver, else a finished build; None without."""
        # Functions resolve at their first call: a torch without CUDA lacks its CUDA stream.
        before = sys.getdlopenflags()
        sys.setdlopenflags(os.RTLD_LAZY | os.RTLD_LOCAL)
        try:
            return super().load_finished()
        finally:
            sys.setdlopenflags(before)


def existing(files: Iterable[Path]) -> list[str]:
    """Return the paths of sources; BuildError if one is missing from the installation."""
    listed = [*files]
    for file in listed:
        if not file.is_file():
            raise BuildError(str(file), "must exist", remedy="install deepspeed_gear again")
    return [str(file) for file in listed]


def covers(architectures: str, device: tuple[int, int]) -> bool:
    """Return whether kernels for `architectures` ("8.0;9.0+PTX") run on a device.

    Args:
        device: Major and minor compute capability.
    """
    for architecture in architectures.split(";"):
        number, _, ptx = architecture.partition("+")
        major, minor = (int(part) for part in number.split("."))
        # Machine code runs on later devices of its major version: 8.0 on 8.6, not on 9.0. PTX is
        # compiled for all later devices.
        if (major == device[0] and minor <= device[1]) or (ptx and (major, minor) <= device):
            return True
    return False


def require_device() -> None:
    """Raise BuildError without a driver, a CUDA build of torch, or a device for kernels."""
    missing = {}  # missing requirement -> remedy
    try:
        ctypes.CDLL(DRIVER)
    except OSError as error:
        remedy = "install NVIDIA's driver, or give the container its GPUs (docker run --gpus all)"
        missing[f"there is no driver ({error})"] = remedy
    if torch.version.cuda is None:
        lack = f"torch {torch.__version__} is built without CUDA"
        missing[lack] = "install a CUDA build of torch"
    if not missing and not torch.cuda.is_available():
        missing["torch finds no CUDA device"] = "check nvidia-smi and CUDA_VISIBLE_DEVICES"
    if missing:
        module = jit.loaded(CudaOp.NAME)
        kernels = "no kernels are loaded"
        if module is not None:
            kernels = f"kernels loaded from {module.__file__}"
        needs = "a driver, a CUDA build of torch and a GPU"
        rule = f"is cuda, which needs {needs}: {', '.join(missing)}"
        value = f"torch {torch.__version__}, CUDA {torch.version.cuda}, {kernels}"
        host = 'set gear.backend to "cpu": the store, selection and gather run in host memory'
        remedy = f"{' and '.join(missing.values())}, or {host}"
        raise BuildError("gear.backend", rule, value, remedy)
