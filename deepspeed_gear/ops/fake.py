"""What `torch.compile` traces in place of the native ops: they return nothing, so it only takes arguments."""

from __future__ import annotations

import threading

import torch

OP_NAMES = (
    "draw_",
    "permute_",
    "tree_build_",
    "tree_update_",
    "slot_masses_",
    "resolve_",
    "resolve_rows_",
    "mass_",
    "importance_",
    "minima_build_",
    "minima_update_",
    "top_k_",
    "report_",
    "prioritize_",
    "suffix_sum_",
    "n_step_",
    "gather_",
    "pack_rows_",
    "unpack_rows_",
    "assign_draws_",
    "send_draws_",
    "take_draws_",
    "pack_reports_",
    "unpack_reports_",
    "copy_pieces_",
)
#: Ops of the host's store, which have no kernels.
HOST_ONLY = (
    "slot_masses_",
    "top_k_",
    "report_",
    "prioritize_",
    "pack_rows_",
    "unpack_rows_",
    "assign_draws_",
    "send_draws_",
    "take_draws_",
    "pack_reports_",
    "unpack_reports_",
)

_lock = threading.Lock()
_registered = False


def register() -> None:
    """Register the fake implementation of every op, once, after the native module is loaded. Thread safe."""
    global _registered
    with _lock:
        if _registered:
            return
        for name in OP_NAMES:
            torch.library.register_fake(f"gear::{name}", _mutate_only)
        _registered = True


def _mutate_only(*_: object) -> None:
    """Change no shape, dtype or device: every op writes into tensors of its caller."""
