"""The ops of a backend as they are: in place, positional, checked only against reading or writing outside."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

import torch

from deepspeed_gear.ops import fake_ops, jit, reference

from ..errors import BuildError, ConfigError

Op = Callable[..., None]
_ALL = (*fake_ops.OP_NAMES, *fake_ops.RING_NAMES)


@dataclass(frozen=True)
class Ops:
    """The ops of one backend: they write into tensors of the caller and return nothing.

    What they mean stands in `reference`, under the same names. Calls are thread safe as long as their outputs
    differ. `native` is the loaded module with the functions `mutex_*` of the stores, None for the reference.
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
    report_: Op
    prioritize_: Op
    suffix_sum_: Op
    n_step_: Op
    gather_: Op
    pack_rows_: Op
    unpack_rows_: Op
    assign_draws_: Op
    send_draws_: Op
    take_draws_: Op
    pack_reports_: Op
    unpack_reports_: Op
    ring_add_: Op
    ring_select_: Op
    ring_update_: Op
    scatter_: Op
    copy_pieces_: Op
    native: ModuleType | None = None

    def on_host(self) -> Ops:
        """Return the same ops for tensors in host memory, as plain functions.

        A call takes 0.3 us where one through torch's dispatcher takes 1.5, and 3 and more after a batch that
        has emptied the caches. `torch.compile` cannot trace them.
        """
        if self.native is None:
            return self
        return replace(self, **{op: getattr(self.native, op) for op in fake_ops.OP_NAMES})


def load_backend(name: str = "auto") -> Ops:
    """Load the ops of a backend.

    Args:
        name: "reference" (plain PyTorch, never compiles), "cpu" (C++), "cuda" (the kernels for tensors on a
            GPU, the C++ ops for those in host memory), or "auto" (the same as "cpu").
    Raises:
        ConfigError: There is no backend of this name.
        BuildError: The native op cannot be built or loaded, or CUDA is asked for where there is none.
    """
    if name == "reference":
        return Ops(name, **{op: getattr(reference, op) for op in _ALL})
    if name in ("auto", "cpu"):
        from .load import load_native

        return _native_ops("cpu", load_native())
    if name == "cuda":
        return _native_ops(name, _load_cuda())
    raise ConfigError("gear.backend", "must be auto, reference, cpu or cuda", name)


def load_library(library: str | None) -> Ops:
    """Load the native module that another process of the node has built; no builder, so no DeepSpeed.

    Args:
        library: File of the module; None for the reference.
    Raises:
        BuildError: It cannot be loaded.
    """
    if library is None:
        return load_backend("reference")
    path = Path(library)
    return _native_ops("cpu", jit.load_once("gear", lambda: jit.import_file(path.name.split(".")[0], path)))


def _native_ops(name: str, native: ModuleType) -> Ops:
    fake_ops.register()
    return Ops(name, **{op: getattr(torch.ops.gear, op).default for op in _ALL}, native=native)


def _load_cuda() -> ModuleType:
    if not torch.cuda.is_available():
        raise BuildError(
            "gear.backend",
            "is cuda, which needs a CUDA build of torch and a GPU that it sees",
            f"torch {torch.__version__}, CUDA {torch.version.cuda}",
            'set gear.backend to "cpu": the store, selection and collection run in host memory',
        )
    from .load import load_native, load_native_cuda

    load_native_cuda()
    return load_native()
