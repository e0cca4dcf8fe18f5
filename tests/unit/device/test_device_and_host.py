"""Random additions, reports, removals and draws: a table on a device and the same one in host memory."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from gear_support import config_of
from ring_cases import assert_same, device_and_host

from deepspeed_gear.errors import StoreError

STEPS = 5
KINDS = [
    {"kind": "prioritized", "unit": "step", "beta": 0.4},
    {"kind": "prioritized", "unit": "trajectory", "normalize": "table"},
    {"kind": "top_k", "unit": "step"},
    {"kind": "top_k", "unit": "trajectory"},
    {"kind": "uniform", "unit": "step"},
    {"kind": "length"},
]


def section(sampler: dict[str, Any], seed: int, **options: Any) -> dict[str, Any]:
    table = {"capacity_steps": 2000, "max_length": STEPS, "remove": "fifo", "placement": "device"}
    table |= {"schema": {"columns": {"x": {"dtype": "int64"}}}, **options}
    return config_of(seed=seed, batch_size=3, sampler=sampler, fields={"x": {}}, tables={"main": table})


@pytest.mark.parametrize("most", [None, 6], ids=["roomy", "evicting"])
@pytest.mark.parametrize("sampler", KINDS, ids=lambda s: f"{s['kind']} {s.get('unit', '')}")
def test_batches_are_equal_in_every_order_of_calls(sampler: dict[str, Any], most: int | None) -> None:
    """Also after draws for which no item has a mass, which the host refuses and the device marks."""
    room = {} if most is None else {"capacity_trajectories": most}
    has_priorities, num_compared, num_empty = sampler["kind"] in ("prioritized", "top_k"), 0, 0
    calls = ["add", "add", "sample", "sample"] + has_priorities * ["report", "report", "zero"]
    for seed in range(8):
        choose = random.Random(seed)
        with device_and_host(section(sampler, seed, **room)) as both:
            has_batch, number = False, 0
            for _ in range(60):
                call = choose.choice(calls + (["remove"] if most is None else []))
                if call == "add" or number == 0:
                    steps = choose.randint(1, STEPS)
                    both.device.add_({"x": torch.full((1, STEPS), number)}, torch.tensor([steps]))
                    both.host.add({"x": np.full(steps, number)})
                    number += 1
                elif call == "remove":
                    which = choose.randrange(number)
                    both.device.remove_(torch.tensor([which]))
                    both.host.remove([which])
                elif call == "sample":
                    has_batch, got = False, both.device.sample()
                    try:
                        both.batches = got, both.host.sample()
                    except StoreError:
                        assert not got.valid.any()
                        num_empty += 1
                        continue
                    assert_same(*both.batches)
                    has_batch, num_compared = True, num_compared + 1
                elif has_batch:
                    values = torch.tensor([choose.choice([0.5, 1, 2, 7, 50]) for _ in range(3)])
                    both.report(values * (call == "report"))
                    has_batch = False
    assert num_compared > 50
    assert num_empty > 0 or most is not None or not has_priorities
