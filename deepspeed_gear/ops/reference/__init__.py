"""The meaning of every op, in plain PyTorch: slow, readable, and equal to the native ops to the last bit.

Read it in this order: `select` (draws, permutation, tree, resolutions), `collect` (windows and padding),
`convert` (dtypes), `returns` (sums of rewards). Tensors live on the CPU.
"""

from __future__ import annotations

from .checks import check_extents, check_rows
from .collect import FieldSpec, Span, bounds, gather_, window_rows
from .convert import arithmetic_dtype, convert, is_allowed
from .returns import n_step_, suffix_sum_
from .select import (
    anchor_at,
    coordinate,
    descend,
    draw_,
    num_anchors,
    permute_,
    philox,
    resolve_,
    tree_build_,
    tree_update_,
)

__all__ = [
    "FieldSpec",
    "Span",
    "anchor_at",
    "arithmetic_dtype",
    "bounds",
    "check_extents",
    "check_rows",
    "convert",
    "coordinate",
    "descend",
    "draw_",
    "gather_",
    "is_allowed",
    "n_step_",
    "num_anchors",
    "permute_",
    "philox",
    "resolve_",
    "suffix_sum_",
    "tree_build_",
    "tree_update_",
    "window_rows",
]
