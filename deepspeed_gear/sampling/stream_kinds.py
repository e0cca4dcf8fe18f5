"""The kinds of streams: what gives them their masses, and what they keep in the store."""

from __future__ import annotations

import torch

from deepspeed_gear.sampling.sample_counts import SampleCounts
from deepspeed_gear.sampling.samplers.age import AgeMasses
from deepspeed_gear.sampling.samplers.prioritized import PriorityMasses
from deepspeed_gear.sampling.selection import StreamSpec
from deepspeed_gear.sampling.sum_tree import ItemMasses
from deepspeed_gear.store.memory_layout import Region
from deepspeed_gear.store.table_spec import TableSpec

DRAWS, ORDERS, AGES = ("random", "stratified"), ("epoch", "pass"), ("oldest", "newest")  # beside "top"


def masses_of(spec: StreamSpec) -> type[ItemMasses]:
    """Return what gives a stream its masses."""
    if spec.priorities is not None:
        return PriorityMasses
    return AgeMasses if spec.kind in AGES or spec.rule.window is not None else ItemMasses


def stratify_(coordinates: torch.Tensor, total: int) -> None:
    """Move the j-th of B coordinates into the j-th of B equal parts: floor((j * total + c) / B), in place."""
    count = len(coordinates)
    whole, rest = divmod(total, count)
    j = torch.arange(count)
    torch.add(j * whole, (j * rest + coordinates) // count, out=coordinates)


def regions_of(spec: StreamSpec, table: TableSpec) -> list[Region]:
    """Return what a stream keeps in the store of a table."""
    masses = masses_of(spec).regions(spec, table.num_slots, table.num_rows, table.num_peers)
    pins = [] if table.dataset is not None else [Region(spec.at + "last_drawn", "int64", (table.num_slots,))]
    return [*spec.regions(table.num_peers), *masses, *SampleCounts.regions(spec, table), *pins]
