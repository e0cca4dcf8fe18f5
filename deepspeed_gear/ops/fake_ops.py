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
#: Ops of a table in the memory of one device: only through torch's dispatcher, so that they can be traced.
RING_NAMES = ("ring_add_", "ring_select_", "ring_update_", "scatter_")
#: Ops without kernels: what nodes tell each other about draws and reports. A few bytes a sample come out of
#: the host's store and go into the host's network, so that a device would only add two copies.
HOST_ONLY = (
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
        for name in (*OP_NAMES, *RING_NAMES):
            torch.library.register_fake(f"gear::{name}", _mutate_only)
        _registered = True


def _mutate_only(*_: object) -> None:
    """Change no shape, dtype or device: every op writes into tensors of its caller."""
