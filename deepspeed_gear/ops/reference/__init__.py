"""The definition of every op, in plain PyTorch: slow, readable, and equal to the native ops bit for bit.

Read it in this order: `select` (draws, epochs, tree, resolutions, achieved goals), `priorities` (masses,
weights, the least mass, updates; their powers in `integers`), `gather` (windows, padding, packs), `packing`
(which trajectory goes into which pack), `convert` (dtypes), `returns` (sums of rewards), `encode_rows` (rows
between nodes), `sharded_draws` (draws and priorities between nodes), `ring_table` (a table in the memory of
one device, and a step of every environment, added to it).
Tensors live on the CPU.
"""

from __future__ import annotations

from .convert import is_allowed as is_allowed
from .encode_rows import decode_rows_ as decode_rows_
from .encode_rows import encode_rows_ as encode_rows_
from .gather import copy_pieces_ as copy_pieces_
from .gather import gather_ as gather_
from .gather import pack_ as pack_
from .packing import plan_packs_ as plan_packs_
from .priorities import append_reports_ as append_reports_
from .priorities import importance_ as importance_
from .priorities import mass_ as mass_
from .priorities import mass_of as mass_of
from .priorities import minima_build_ as minima_build_
from .priorities import minima_update_ as minima_update_
from .priorities import prioritize_ as prioritize_
from .priorities import resolve_rows_ as resolve_rows_
from .priorities import slot_priorities_ as slot_priorities_
from .priorities import top_k_ as top_k_
from .returns import n_step_ as n_step_
from .returns import suffix_sum_ as suffix_sum_
from .ring_table import ring_add_ as ring_add_
from .ring_table import ring_extend_ as ring_extend_
from .ring_table import ring_remove_ as ring_remove_
from .ring_table import ring_select_ as ring_select_
from .ring_table import ring_select_limited_ as ring_select_limited_
from .ring_table import ring_top_k_ as ring_top_k_
from .ring_table import ring_update_ as ring_update_
from .ring_table import scatter_ as scatter_
from .select import coordinate as coordinate
from .select import draw_ as draw_
from .select import draw_goals_ as draw_goals_
from .select import permute_ as permute_
from .select import philox as philox
from .select import resolve_ as resolve_
from .select import slot_masses_ as slot_masses_
from .select import tree_build_ as tree_build_
from .select import tree_update_ as tree_update_
from .sharded_draws import assign_draws_ as assign_draws_
from .sharded_draws import decode_draws_ as decode_draws_
from .sharded_draws import decode_reports_ as decode_reports_
from .sharded_draws import encode_draws_ as encode_draws_
from .sharded_draws import encode_reports_ as encode_reports_
