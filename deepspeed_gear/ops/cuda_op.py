"""The CUDA kernels without DeepSpeed: their sources, the library of a wheel, and what a device lacks."""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import torch

from ..errors import BuildError
from . import jit
from .native_op import NativeOp, existing

DRIVER = "libcuda.so.1"


class CudaOp(NativeOp):
    """The CUDA kernels of those ops that run on the device, and their bindings."""

    NAME = "gear_cuda"

    def sources(self) -> list[str]:
        """List the bindings for CUDA, and the kernels of every op."""
        return [*self.bindings(), *self.kernels()]

    def bindings(self) -> list[str]:
        """List the bindings, which the C++ compiler compiles."""
        return existing([self.csrc / "bindings" / "library_cuda.cpp"])

    def kernels(self) -> list[str]:
        """List the kernels, which nvcc compiles; they include nothing of torch."""
        return existing(sorted(self.csrc.glob("*/*.cu")))

    def fitting(self) -> tuple[Path | None, str]:
        """Find the kernels that were built with the wheel, if they are compiled for the devices here.

        Not part of `prebuilt`, because it initialises CUDA: a process that has done so must not fork, and
        `register` asks for what is prebuilt where DeepSpeed is imported.

        Returns:
            As `prebuilt`.
        """
        found, why = self.prebuilt()
        if found is None:
            return None, why
        architectures = json.loads(found.with_name(f"{self.NAME}_op.json").read_text())["architectures"]
        devices = {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}
        for major, minor in sorted(devices):
            if not covers(architectures, (major, minor)):
                return None, f"prebuilt for the architectures {architectures}, not for {major}.{minor}"
        return found, why

    def load_finished(self) -> ModuleType | None:
        """Import the prebuilt kernels, else a finished build; None where there is neither.

        The prebuilt ones load without a driver and with a torch that is built without CUDA, so that an image
        can be checked where it is made.
        """
        found, _ = self.fitting()
        if found is None:
            name = self.finished()
            return None if name is None else jit.import_built(name)
        with _lazy_binding():
            return jit.import_file(self.absolute_name(), found)


def covers(architectures: str, device: tuple[int, int]) -> bool:
    """Return whether kernels run on a device.

    Args:
        architectures: For which they are compiled, as in TORCH_CUDA_ARCH_LIST: "8.0;9.0+PTX".
        device: Compute capability: major, minor.
    """
    for architecture in architectures.split(";"):
        number, _, ptx = architecture.partition("+")
        major, minor = (int(part) for part in number.split("."))
        # Machine code runs on later devices of its major version, PTX is compiled for all later ones.
        if (major == device[0] and minor <= device[1]) or (ptx and (major, minor) <= device):
            return True
    return False


def missing_device() -> dict[str, str]:
    """List what kernels lack to run here: what is missing -> how to get it."""
    missing = {}
    try:
        ctypes.CDLL(DRIVER)
    except OSError as error:
        remedy = "install NVIDIA's driver, or start the container with its GPUs (docker run --gpus all)"
        missing[f"there is no driver ({error})"] = remedy
    if torch.version.cuda is None:
        missing[f"torch {torch.__version__} is built without CUDA"] = "install a CUDA build of torch"
    if not missing and not torch.cuda.is_available():
        missing["torch sees no CUDA device"] = "check nvidia-smi and CUDA_VISIBLE_DEVICES"
    return missing


def require_device() -> None:
    """Check that the kernels can run.

    Raises:
        BuildError: There is no driver, no CUDA in torch, or no device; names whether kernels are loaded.
    """
    missing = missing_device()
    if missing:
        module = jit.loaded(CudaOp.NAME)
        kernels = "no kernels are loaded" if module is None else f"kernels loaded from {module.__file__}"
        raise BuildError(
            "gear.backend",
            f"is cuda, which needs a driver, a CUDA build of torch and a GPU: {', '.join(missing)}",
            f"torch {torch.__version__}, CUDA {torch.version.cuda}, {kernels}",
            f'{" and ".join(missing.values())}, or set gear.backend to "cpu": the store, selection and '
            "collection run in host memory",
        )


@contextmanager
def _lazy_binding() -> Iterator[None]:
    """Resolve functions of a library at their first call: a torch without CUDA lacks its CUDA stream."""
    before = sys.getdlopenflags()
    sys.setdlopenflags(os.RTLD_LAZY | os.RTLD_LOCAL)
    try:
        yield
    finally:
        sys.setdlopenflags(before)
