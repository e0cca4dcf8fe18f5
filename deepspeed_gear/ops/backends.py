"""The ops of a backend: which native op is loaded, whether it is built, and its fakes for torch.

Ops write in place and take positional arguments. They are checked only against accesses outside of
their tensors.
"""

from __future__ import annotations

import functools
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from deepspeed_gear.errors import BuildError, ConfigError
from deepspeed_gear.ops import jit, kernel_faults, native_op

Op = Callable[..., None]
_LEAST_BYTES = 1 << 20  # for which an existing build is loaded
#: Command of a process that builds the kernels: two builds in one process would share the globals
#: of torch and DeepSpeed.
_BUILD_KERNELS = [sys.executable, "-c", f"from {__name__} import build_kernels; build_kernels()"]
_building: list[subprocess.Popen[bytes]] = []  # kept, so that they are reaped


@dataclass(frozen=True)
class Ops:
    """The ops of one backend: they write into tensors of the caller and return nothing.

    `reference` defines those with several implementations under the same names;
    ops/csrc/bindings/op_table.h has the schemas of all. Thread safe as long as outputs differ.
    `native` is the loaded module, with store, writers and streams in C++.
    """

    name: str
    draw_: Op
    permute_: Op
    tree_build_: Op
    tree_update_: Op
    slot_masses_: Op
    resolve_: Op
    resolve_rows_: Op
    mass_: Op
    importance_: Op
    minima_build_: Op
    minima_update_: Op
    top_k_: Op
    append_reports_: Op
    prioritize_: Op
    slot_priorities_: Op
    suffix_sum_: Op
    n_step_: Op
    advantages_: Op
    gather_: Op
    encode_rows_: Op
    decode_rows_: Op
    draw_goals_: Op
    pack_: Op
    plan_packs_: Op
    assign_draws_: Op
    encode_draws_: Op
    decode_draws_: Op
    encode_reports_: Op
    decode_reports_: Op
    ring_add_: Op
    ring_extend_: Op
    ring_remove_: Op
    ring_select_: Op
    ring_select_limited_: Op
    ring_top_k_: Op
    ring_epoch_: Op
    ring_update_: Op
    scatter_: Op
    native: ModuleType
    is_direct: bool = False  # plain functions for host memory, which `torch.compile` cannot trace

    def on_host(self) -> Ops:
        """Return the ops for host memory as plain functions, which `torch.compile` cannot trace.

        A call takes 0.3 us; through torch's dispatcher 1.5, and more after a batch that has emptied
        the caches.
        """
        direct = {op: getattr(self.native, op) for op in OP_NAMES if hasattr(self.native, op)}
        return replace(self, **direct, is_direct=True)


OP_NAMES = tuple(field.name for field in fields(Ops) if field.name.endswith("_"))
_fakes_lock = threading.Lock()
_fakes = set[str]()


def load_backend(name: str = "auto") -> Ops:
    """Load the ops of a backend.

    "cpu" is C++; "cuda" the kernels for tensors on a GPU, with the C++ ops for those in host
    memory; "auto" is "cpu" that, where there is a GPU, has the kernels built at the same time.
    ConfigError: no such backend. BuildError: it cannot be built or loaded, or CUDA is asked for
    where there is none.
    """
    if name in ("auto", "cpu"):
        # With a GPU, "auto" has the kernels built now, and loads them once batches are to go there.
        with_kernels = name == "auto" and torch.cuda.is_available()
        return _native_ops("cpu", load_native(with_kernels=with_kernels))
    if name == "cuda":
        if native_op.CudaOp().fitting()[0] is not None:  # first: the error is then of the driver
            load_native_cuda()
        native_op.require_device()
        load_native_cuda()
        return _native_ops(name, load_native())
    raise ConfigError("gear.backend", "must be auto, cpu or cuda", name, "leave it out for auto")


def load_library(library: str) -> Ops:
    """Load a native module's file that another process of the node built, without DeepSpeed."""
    path = Path(library)
    module = jit.load_once("gear", lambda: jit.import_file(path.name.split(".")[0], path))
    return _native_ops("cpu", module)


def _native_ops(name: str, native: ModuleType) -> Ops:
    """Return the ops of the loaded module; registers their fakes for `torch.compile` once."""
    with _fakes_lock:
        for op in sorted({*OP_NAMES} - _fakes):
            # Every op writes into tensors of its caller: no shape, dtype or device changes.
            torch.library.register_fake(f"gear::{op}", lambda *_: None)
            _fakes.add(op)
    return Ops(name, **{op: getattr(torch.ops.gear, op).default for op in OP_NAMES}, native=native)


def load_native(timeout_s: float = jit.BUILD_TIMEOUT_S, with_kernels: bool = False) -> ModuleType:
    """Load the CPU op: prebuilt with the wheel where that fits this torch, else built just in time.

    Registers `torch.ops.gear.*` and returns the module with the plain C functions. The first call
    on a node compiles (tens of seconds; the node's other processes wait for it, at most
    `timeout_s`; `with_kernels`, another process builds the kernels at the same time), the next ones
    take milliseconds. Needs no process group; DeepSpeed is imported only to compile. Thread safe.
    BuildError names the remedy.
    """
    beside = start_kernels if with_kernels else None
    return native_op.CpuOp().load(
        timeout_s=timeout_s, beside=beside, builder=lambda: _builder("GearBuilder")
    )


def existing_native(num_bytes: int) -> ModuleType | None:
    """Return the CPU op if it is loaded, or can be without a build; None otherwise.

    For work that Python does as well, with the same result: writing a data set builds nothing.

    Args:
        num_bytes: Bytes to work on. Finding and loading a build takes longer than NumPy takes for
            less than 1 MiB.
    """
    loaded = jit.loaded(native_op.CpuOp.NAME)
    if loaded is not None or num_bytes < _LEAST_BYTES:
        return loaded
    return _existing_build()


@functools.cache
def _existing_build() -> ModuleType | None:
    return native_op.CpuOp().load_existing()


def start_kernels() -> None:
    """Start a process that builds the kernels.

    `load_native_cuda` waits for it, and reports its errors.
    """
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    null = subprocess.DEVNULL
    with suppress(OSError):
        _building.append(
            subprocess.Popen(_BUILD_KERNELS, env=env, stdin=null, stdout=null, stderr=null)
        )


def build_kernels() -> None:
    """Build the kernels if they can be built; errors are left to the process that loads them."""
    builder = _builder("GearCudaBuilder")
    if not builder.missing():
        with suppress(BuildError):
            builder.load()


def load_native_cuda() -> ModuleType:
    """Load the CUDA kernels, after the CPU op whose schemas they implement; see `load_native`.

    Kernels of a wheel are also loaded without a driver. DeepSpeed is imported only to compile.
    """
    op = native_op.CudaOp()
    is_prebuilt = op.fitting()[0] is not None
    if not is_prebuilt:
        op = _builder("GearCudaBuilder")
        if jit.loaded(op.NAME) is None and op.finished() is None:
            op.require_tools()
    load_native(with_kernels=not is_prebuilt)
    module = op.load()
    kernel_faults.report_at_exit()
    return module


def _builder(name: str) -> Any:
    """Import DeepSpeed and return a builder.

    DeepSpeed's warning that it found no GPU is filtered: it does not matter to a replay.
    """

    def is_other(record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith("Setting accelerator to CPU")

    logger = logging.getLogger("DeepSpeed")
    logger.addFilter(is_other)
    try:
        from deepspeed_gear.ops import op_builders
    finally:
        logger.removeFilter(is_other)
    return op_builders.BUILDERS[name]()
