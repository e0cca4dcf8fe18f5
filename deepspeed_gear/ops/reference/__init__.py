"""The definition of every op, in plain PyTorch: slow, readable, and equal to the native ops bit for bit.

Read it in this order: `select` (draws, epochs, tree, resolutions, achieved goals), `priorities` (masses,
weights, the least mass, updates; their powers in `integers`), `gather` (windows, padding, packs), `packing`
(which trajectory goes into which pack), `convert` (dtypes), `returns` (sums of rewards), `encode_rows` (rows
between nodes), `sharded_draws` (draws and priorities between nodes), `ring_table` (a table in the memory of
one device, and a step of every environment, added to it).
Tensors live on the CPU.
"""

from __future__ import annotations

from .convert import arithmetic_dtype, convert, is_allowed
from .encode_rows import decode_rows_, encode_rows_
from .gather import copy_pieces_, gather_, pack_
from .packing import plan_packs_
from .priorities import (
    append_reports_,
    importance_,
    mass_,
    mass_of,
    minima_build_,
    minima_update_,
    prioritize_,
    resolve_rows_,
    slot_priorities_,
    top_k_,
)
from .returns import n_step_, suffix_sum_
from .ring_table import (
    ring_add_,
    ring_extend_,
    ring_remove_,
    ring_select_,
    ring_select_limited_,
    ring_top_k_,
    ring_update_,
    scatter_,
)
from .select import (
    coordinate,
    draw_,
    draw_goals_,
    permute_,
    philox,
    resolve_,
    slot_masses_,
    tree_build_,
    tree_update_,
)
from .sharded_draws import (
    assign_draws_,
    decode_draws_,
    decode_reports_,
    encode_draws_,
    encode_reports_,
)

__all__ = [
    "append_reports_",
    "arithmetic_dtype",
    "assign_draws_",
    "convert",
    "coordinate",
    "copy_pieces_",
    "decode_draws_",
    "decode_reports_",
    "decode_rows_",
    "draw_",
    "draw_goals_",
    "encode_draws_",
    "encode_reports_",
    "encode_rows_",
    "gather_",
    "importance_",
    "is_allowed",
    "mass_",
    "mass_of",
    "minima_build_",
    "minima_update_",
    "n_step_",
    "pack_",
    "permute_",
    "philox",
    "plan_packs_",
    "prioritize_",
    "resolve_",
    "resolve_rows_",
    "ring_add_",
    "ring_extend_",
    "ring_remove_",
    "ring_select_",
    "ring_select_limited_",
    "ring_top_k_",
    "ring_update_",
    "scatter_",
    "slot_masses_",
    "slot_priorities_",
    "suffix_sum_",
    "top_k_",
    "tree_build_",
    "tree_update_",
]
