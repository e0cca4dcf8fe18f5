"""What stands beside gear on a device: plain torch, TorchRL, and a kernel of one thread per 64 bytes."""

from __future__ import annotations

import ctypes
import functools
import importlib
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor

from deepspeed_gear.ops import toolchain

ALPHA, BETA, EPSILON = 0.6, 0.4, 1e-3
SOURCE = Path(__file__).with_name("gpu_thread_gather.cu")


def has_nvcc() -> bool:
    """Tell whether the baseline's kernel can be compiled here."""
    return toolchain.cuda_home() is not None


def compile_kernel(target: Path, *flags: str) -> None:
    """Compile the baseline's kernel to a shared library.

    Raises:
        RuntimeError: There is no nvcc.
        subprocess.CalledProcessError: It does not compile.
    """
    home = toolchain.cuda_home()
    if home is None:
        raise RuntimeError("nvcc must be found for the kernel of one thread per 64 bytes; set CUDA_HOME")
    options = ["-O3", "-std=c++17", "-shared", "-cudart=static", "-Xcompiler=-fPIC,-Wall", *flags]
    subprocess.run([home / "bin" / "nvcc", *options, "-o", target, SOURCE], check=True)


@functools.cache
def _kernel(architecture: str) -> Callable[..., int]:
    with tempfile.TemporaryDirectory(prefix="gear-baseline-") as folder:
        target = Path(folder) / "thread_gather.so"
        compile_kernel(target, f"-arch={architecture}")
        function = ctypes.CDLL(str(target)).GatherByThreads  # stays mapped after its file is gone
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    function.argtypes, function.restype = [pointer, pointer, number, number, pointer, pointer], ctypes.c_int
    return function  # type: ignore[no-any-return]


def gather_by_threads(table: Tensor, first_rows: Tensor, out: Tensor) -> None:
    """Copy windows of rows of 64 bytes on the current stream.

    Args:
        table: [rows, 64 bytes], on the GPU.
        first_rows: Of each window. [B], int64.
        out: [B, T, 64 bytes].
    Raises:
        RuntimeError: There is no nvcc, or the launch failed.
    """
    major, minor = torch.cuda.get_device_capability(table.device)
    pointers = table.data_ptr(), first_rows.data_ptr(), *out.shape[:2], out.data_ptr()
    stream = torch.cuda.current_stream(table.device).cuda_stream
    error = _kernel(f"sm_{major}{minor}")(*pointers, stream)
    if error:
        raise RuntimeError(f"the kernel of one thread per 64 bytes gave CUDA error {error}")


class TorchPrioritized:
    """A prioritized buffer in plain torch, without a wait: a sum over all masses, and a search in it.

    Args:
        columns: On the device. [N, ...] each.
        count: B.
    """

    def __init__(self, columns: Mapping[str, Tensor], count: int) -> None:
        self.columns, self.count = columns, count
        first = next(iter(columns.values()))
        self.masses = torch.ones(len(first), device=first.device)
        self.out: dict[str, Tensor] = {}

    def step(self, priorities: Tensor) -> None:
        """Draw a batch with its weights, and set its priorities. [B]."""
        sums = self.masses.cumsum(0, dtype=torch.float64)
        points = torch.rand(self.count, dtype=torch.float64, device=sums.device) * sums[-1]
        items = torch.searchsorted(sums, points).clamp_(max=len(sums) - 1)
        self.out = {name: column.index_select(0, items) for name, column in self.columns.items()}
        weights = (self.masses[items] / sums[-1] * len(sums)) ** -BETA
        self.out["weight"] = weights / weights.max()
        self.masses.index_copy_(0, items, (priorities + EPSILON) ** ALPHA)


def _check_torchrl() -> None:
    """Load the part of TorchRL that is compiled, without which it imports but has no prioritized buffer."""
    try:
        importlib.import_module("torchrl._torchrl")
    except ImportError as error:
        rule = "does not load, so it is built for another torch (docs/how-to/gpu.md: versions that fit)"
        raise ImportError(f"torchrl {version('torchrl')} with torch {torch.__version__} {rule}") from error


def torchrl_step(columns: Mapping[str, Tensor], count: int, priorities: Tensor) -> Callable[[], None]:
    """Return a step of TorchRL's prioritized buffer with its storage on the device: sample and update.

    Raises:
        ImportError: TorchRL is not installed, or is built for another torch.
    """
    _check_torchrl()
    from tensordict import TensorDict
    from torchrl.data import LazyTensorStorage, TensorDictPrioritizedReplayBuffer

    first = next(iter(columns.values()))
    size, device = len(first), first.device
    storage = LazyTensorStorage(size, device=device)
    options = {"alpha": ALPHA, "beta": BETA, "eps": EPSILON, "priority_key": "td_error"}
    buffer = TensorDictPrioritizedReplayBuffer(storage=storage, batch_size=count, **options)
    content = {**columns, "td_error": torch.ones(size, device=device)}
    buffer.extend(TensorDict(content, batch_size=[size], device=device))

    def step() -> None:
        batch = buffer.sample()
        batch.set("td_error", priorities)
        buffer.update_tensordict_priority(batch)

    return step
