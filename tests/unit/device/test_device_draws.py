"""Top-k and limited draws of a table on a device, here the host's, against a table in
host memory.
"""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gear_support import SCHEMA, config_of, trajectory
from ring_cases import Pair, assert_same, device_and_host, stored_slots

from deepspeed_gear import DeviceReplay
from deepspeed_gear.errors import DataError, StoreError
from deepspeed_gear.ops.records import Slot

BATCH = 24
ROOM = {"capacity_steps": 4000, "max_length": 12, "capacity_trajectories": 300, "remove": "fifo"}
FIELDS = {"observation": {"offset": -2, "length": 4, "pad": "edge"}, "action": {}, "task": {}}
TRAJECTORIES = {"kind": "prioritized", "alpha": 0.7, "beta": {"linear": [0.2, 1.0, 5]}}
#: Sampler, and how often a trajectory may be drawn.
KINDS: dict[str, tuple[dict[str, Any], int]] = {
    "top-k steps": ({"kind": "top_k", "unit": "step", "anchors": {"every": 2}}, 0),
    "top-k trajectories": ({"kind": "top_k", "initial": 2.0}, 0),
    "top-k, twice": ({"kind": "top_k"}, 2),
    "uniform, three times": ({"kind": "uniform"}, 3),
    "by length, once": ({"kind": "length", "anchors": "end"}, 1),
    "by the batch": (TRAJECTORIES, 4),
    "by the table": ({**TRAJECTORIES, "normalize": "table"}, 4),
    "not normalized": ({**TRAJECTORIES, "normalize": None}, 4),
}


def section(kind: str, **options: Any) -> dict[str, Any]:
    sampler, most = KINDS[kind]
    table = {**ROOM, "placement": "device", "max_times_sampled": most}
    made = {
        "tables": {"main": table},
        "sampler": sampler,
        "fields": FIELDS,
        "batch_size": BATCH,
        "seed": 5,
    }
    return {**made, **options}


def add(both: Pair, numbers: range, *tables: str) -> None:
    for number in numbers:
        for table in tables or (None,):
            both.add(trajectory(number, 1 + number * 5 % 12), table)


def without_samples(device: DeviceReplay, accumulation: int) -> None:
    """Draw a global batch that cannot be filled, and go back: the table is as it was."""
    position = device.state_dict()
    content = device.export_table()["content"]["main"]
    for _ in range(accumulation):
        batch = device.sample()
        assert not batch.valid.any()
        assert not batch.is_weight.any()
    device.load_state_dict(position)
    for name, tensor in device.export_table()["content"]["main"].items():
        assert name == "state" or torch.equal(tensor, content[name]), name


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_batches_are_those_of_a_table_in_host_memory(
    kind: str, accumulation: int, tmp_path: Path
) -> None:
    """Until too few items or draws are left, and after more were added; some were removed
    meanwhile.
    """
    made = section(kind, gradient_accumulation_steps=accumulation)
    torch.manual_seed(0)
    most = KINDS[kind][1]
    num_empty = 0
    # 0: is not drawn again
    removed = torch.tensor([1, 2, 299])
    lowest = int(kind.startswith("top-k"))
    with device_and_host(made, {"main": SCHEMA}) as both:
        device = both.device
        host = both.host
        add(both, range(30))
        device.remove_(removed)
        host.remove(removed)
        for turn in range(12):
            if not host.can_sample():
                num_empty += 1
                without_samples(device, accumulation)
                add(both, range(30 * num_empty, 30 * num_empty + 30))
            for _ in range(accumulation):
                batch = both.sample()
                if device.config.item_sampler.has_priorities and turn < 11:
                    both.report(torch.randint(lowest, 9, (batch.num_samples,)).float())
            found = device.statistics()
            counts = host.statistics()
            assert (found["trajectories"], found["steps"]) == (len(host), host.num_steps)
        if most:
            assert num_empty > 0
            assert int(stored_slots(device)[:, Slot.TIMES_SAMPLED].max()) < most
        if device.config.item_sampler.has_priorities:
            names = ("priorities_applied", "priorities_ignored")
            assert [found[name] for name in names] == [counts[name] for name in names]
            assert (found["priorities_ignored"] > 0) == (most > 0)
        if num_empty:
            with pytest.raises(DataError, match="global batches without samples"):
                device.check()
        add(both, range(900, 960))
        state = device.save(tmp_path)
        with DeviceReplay(made, "cpu", schemas={"main": SCHEMA}) as other:  # counts go on
            other.load(tmp_path, state)
            assert_same(other.sample(), device.sample())


def test_a_mixture_of_limited_tables() -> None:
    """Each table counts its own draws."""
    made = section("by the batch")
    table = made["tables"]["main"]
    made["tables"] = {
        "once": {**table, "max_times_sampled": 1},
        "main": {**table, "max_times_sampled": 5},
    }
    made["sampler"] = {
        "kind": "mixture",
        "shares": {"once": 0.25, "main": 0.75},
        "of": TRAJECTORIES,
    }
    with device_and_host(made, dict.fromkeys(("once", "main"), SCHEMA)) as both:
        add(both, range(40), "once", "main")
        for _ in range(6):
            both.sample()
        assert both.device.statistics()["tables"]["once"]["trajectories"] == 40 - 6 * BATCH // 4


STEPS = 5
RANDOM_KINDS = [
    {"kind": "prioritized", "unit": "step", "beta": 0.4},
    {"kind": "prioritized", "unit": "trajectory", "normalize": "table"},
    {"kind": "top_k", "unit": "step"},
    {"kind": "top_k", "unit": "trajectory"},
    {"kind": "uniform", "unit": "step"},
    {"kind": "length"},
]


def small(sampler: dict[str, Any], seed: int, **options: Any) -> dict[str, Any]:
    table = {"capacity_steps": 2000, "max_length": STEPS, "remove": "fifo", "placement": "device"}
    table |= {"schema": {"columns": {"x": {"dtype": "int64"}}}, **options}
    return config_of(
        seed=seed, batch_size=3, sampler=sampler, fields={"x": {}}, tables={"main": table}
    )


@pytest.mark.parametrize("most", [None, 6], ids=["roomy", "evicting"])
@pytest.mark.parametrize("sampler", RANDOM_KINDS, ids=lambda s: f"{s['kind']} {s.get('unit', '')}")
def test_batches_are_equal_in_every_order_of_calls(
    sampler: dict[str, Any], most: int | None
) -> None:
    """Also after draws for which no item has a mass, which the host refuses and the
    device marks.
    """
    room = {} if most is None else {"capacity_trajectories": most}
    has_priorities = sampler["kind"] in ("prioritized", "top_k")
    num_compared = 0
    num_empty = 0
    calls = ["add", "add", "sample", "sample"] + has_priorities * ["report", "report", "zero"]
    for seed in range(8):
        choose = random.Random(seed)
        with device_and_host(small(sampler, seed, **room)) as both:
            has_batch = False
            number = 0
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
                    has_batch = False
                    got = both.device.sample()
                    try:
                        both.batches = got, both.host.sample()
                    except StoreError:
                        assert not got.valid.any()
                        num_empty += 1
                        continue
                    assert_same(*both.batches)
                    has_batch = True
                    num_compared = num_compared + 1
                elif has_batch:
                    values = torch.tensor([choose.choice([0.5, 1, 2, 7, 50]) for _ in range(3)])
                    both.report(values * (call == "report"))
                    has_batch = False
    assert num_compared > 50
    assert num_empty > 0 or most is not None or not has_priorities
