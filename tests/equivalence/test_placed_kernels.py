"""Gatherers of a device whose kernels run on the host: what they read in place, and what is fetched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gear_support import SCHEMA, config_of, trajectory

from deepspeed_gear import Replay
from deepspeed_gear.batching.gather import Gatherer
from deepspeed_gear.batching.transfer.copy_engine import COPIES, DIRECT
from deepspeed_gear.batching.transfer.cuda_streams import HostStream
from deepspeed_gear.batching.transfer.device_gather import DeviceGatherer, FieldTransfer, Reach
from deepspeed_gear.config import NStepConfig
from deepspeed_gear.ops import Ops
from deepspeed_gear.ops.records import Slot

LENGTHS = (1, 4, 9, 30)
FIELDS: dict[str, Any] = {
    "observation": {"offset": -4, "length": 6, "align": "right", "scale": 0.5, "as": "engine"},
    "final": {"column": "observation", "offset": 2, "length": 9},
    "edge": {"column": "observation", "offset": -2, "length": 6, "pad": "edge"},
    "action": {"offset": -2, "length": 6, "align": "left", "pad": -1},
    "code": {"offset": -30, "length": 20},
    "terminated": {"offset": -3, "length": 5},
    "return_to_go": {"offset": -2, "length": 6},
    "timestep": {"offset": -2, "length": 6, "pad": "edge"},
    "next": {"column": "observation", "offset": "n_step", "length": 6},
    "reward": {},
    "task": {},
}
NAMES = ("observation", "action", "code", "reward", "terminated", "truncated", "task", "derived/return_to_go")


@pytest.mark.parametrize("way", [DIRECT, COPIES])
def test_kernels_give_the_batches_of_the_collector(kernels_on_host: Ops, way: str) -> None:
    section = config_of(fields=FIELDS, batch_size=2, n_step={"n": 3, "gamma": 0.9})
    with Replay(section, schemas={"main": SCHEMA}) as replay:
        for number, steps in enumerate(LENGTHS):
            replay.add(trajectory(number, steps, terminated=True))
        table = replay.tables["main"]
        first = [int(row) for row in table.slots[: len(LENGTHS), Slot.FIRST_ROW]]
        records = torch.tensor(
            [
                [slot, slot, 0, first[slot], steps, anchor, 1, 0]
                for slot, steps in enumerate(LENGTHS)
                for anchor in range(steps)
            ]
        )
        options: dict[str, Any] = {"fields": replay.fields, "table": table, "statistics": {}, "depth": 1}
        options |= {"n_step": NStepConfig(n=3, gamma=0.9), "num_samples": len(records), "threads": 1}
        options["engine_dtype"] = torch.bfloat16
        reach = Reach({name: table.gather_source(name) for name in NAMES})
        transfer = FieldTransfer(HostStream(), kernels_on_host, way, lambda name: True, True, 2)
        placed = DeviceGatherer(transfer, reach, **options)
        assert list(placed.ways.values()).count(way) >= 6
        plain = Gatherer(**options)
        for expected, got in zip(plain.gather(records), placed.gather(records), strict=True):
            assert expected.keys() == got.keys()
            assert all(torch.equal(got[name], expected[name]) for name in expected)
        assert placed.totals().tolist() == plain.totals().tolist()
