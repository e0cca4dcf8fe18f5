"""The meaning of every op, in plain PyTorch: slow, readable, and equal to the native ops to the last bit.

Read it in this order: `select` (draws, permutation, tree, resolutions), `priorities` (masses, weights, the
least mass, updates; their powers in `power`), `gather` (windows and padding), `convert` (dtypes), `returns`
(sums of rewards), `rows` (which rows travel, and where to), `draws` (what nodes tell each other), `ring`
(a table in the memory of one device). Tensors live on the CPU.
"""

from __future__ import annotations

from deepspeed_gear.ops.reference.encode_rows import pack_rows_, unpack_rows_
from deepspeed_gear.ops.reference.gather import Span, bounds, check_windows, gather_, window_rows
from deepspeed_gear.ops.reference.ring_table import ring_add_, ring_select_, ring_update_, scatter_
from deepspeed_gear.ops.reference.sharded_draws import (
    assign_draws_,
    pack_reports_,
    send_draws_,
    take_draws_,
    unpack_reports_,
)

from .checks import check_extents, check_order, check_rows
from .convert import arithmetic_dtype, convert, is_allowed
from .copies import copy_pieces_
from .priorities import (
    importance_,
    mass_,
    mass_of,
    minima_build_,
    minima_update_,
    order_of,
    prioritize_,
    report_,
    resolve_rows_,
    top_k_,
)
from .returns import n_step_, n_step_reads, suffix_sum_
from .select import (
    anchor_at,
    check_coordinates,
    check_items,
    coordinate,
    descend,
    draw_,
    num_anchors,
    permute_,
    philox,
    resolve_,
    slot_masses_,
    tree_build_,
    tree_update_,
)

__all__ = [
    "Span",
    "anchor_at",
    "arithmetic_dtype",
    "assign_draws_",
    "bounds",
    "check_coordinates",
    "check_extents",
    "check_items",
    "check_order",
    "check_rows",
    "check_windows",
    "convert",
    "coordinate",
    "copy_pieces_",
    "descend",
    "draw_",
    "gather_",
    "importance_",
    "is_allowed",
    "mass_",
    "mass_of",
    "minima_build_",
    "minima_update_",
    "n_step_",
    "n_step_reads",
    "num_anchors",
    "order_of",
    "pack_reports_",
    "pack_rows_",
    "permute_",
    "philox",
    "prioritize_",
    "report_",
    "resolve_",
    "resolve_rows_",
    "ring_add_",
    "ring_select_",
    "ring_update_",
    "scatter_",
    "send_draws_",
    "suffix_sum_",
    "take_draws_",
    "top_k_",
    "tree_build_",
    "slot_masses_",
    "tree_update_",
    "unpack_reports_",
    "unpack_rows_",
    "window_rows",
]
