"""Several shards draw as one table does."""

from __future__ import annotations

import numpy as np
import op_wrappers
import pytest
import torch

from deepspeed_gear.sampling.priority_masses import merge_highest

SIZES = {1: [1000], 3: [1, 700, 299], 8: [33, 0, 32, 1, 400, 31, 500, 3]}


def parts_of(values: torch.Tensor, sizes: list[int]) -> list[torch.Tensor]:
    return list(torch.split(values, sizes))


@pytest.mark.parametrize("num_shards", SIZES)
@pytest.mark.parametrize("spread", [1, 40])
def test_draws_over_shards_are_those_of_one_table(num_shards: int, spread: int) -> None:
    sizes = SIZES[num_shards]
    masses = 2 ** torch.randint(0, spread, (1000,), generator=torch.Generator().manual_seed(0))
    masses[::7] = 0
    whole, shards = op_wrappers.tree(masses), [op_wrappers.tree(part) for part in parts_of(masses, sizes)]
    totals = [op_wrappers.tree_total(s, n) for s, n in zip(shards, sizes, strict=True)]
    coordinates = op_wrappers.draw(3, 1, 0, op_wrappers.tree_total(whole, 1000), 20_000)
    slots = torch.zeros(1000, 8, dtype=torch.int64)
    slots[:, 2], slots[:, 4] = torch.arange(1000), 1
    rule = (0, 0, 1, 1, 0)
    wanted = op_wrappers.resolve(whole, slots, coordinates, rule)[:, 0]
    found = torch.full_like(wanted, -1)
    for index, (sums, of_shard) in enumerate(zip(shards, parts_of(slots, sizes), strict=True)):
        shard, mine, part = op_wrappers.assign_draws(coordinates, torch.tensor(totals), index)
        assert torch.nonzero(shard == index)[:, 0].equal(mine)
        if len(part):
            found[mine] = op_wrappers.resolve(sums, of_shard.contiguous(), part, rule)[:, 0]
    assert found.equal(wanted)


@pytest.mark.parametrize("num_shards", SIZES)
@pytest.mark.parametrize("count", [1, 32, 33, 857, 858, 2000])
def test_top_k_over_shards_is_that_of_one_table(num_shards: int, count: int) -> None:
    sizes = SIZES[num_shards]
    priorities = torch.randint(0, 50, (1000,), generator=torch.Generator().manual_seed(1)).float()
    masses = torch.ones(1000, dtype=torch.int64)
    masses[::7] = 0
    starts = np.cumsum([0, *sizes])
    items = [
        op_wrappers.top_k(p, m, min(count, len(p)))
        for p, m in zip(parts_of(priorities, sizes), parts_of(masses, sizes), strict=True)
    ]
    every = np.concatenate([start + i[i >= 0].numpy() for start, i in zip(starts, items, strict=False)])
    found = every[merge_highest(priorities.numpy()[every], every, count)]
    wanted = op_wrappers.top_k(priorities, masses, count)
    assert found.tolist() == wanted[wanted >= 0].tolist()
