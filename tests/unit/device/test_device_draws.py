"""Top-k and limited draws of a table on a device, here the host's, against a table in host memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gear_support import SCHEMA, trajectory
from ring_cases import Pair, assert_same, device_and_host, online, trajectories

from deepspeed_gear import DeviceReplay
from deepspeed_gear.errors import DataError
from deepspeed_gear.ops.records import Slot, SlotState

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
    made = {"tables": {"main": table}, "sampler": sampler, "fields": FIELDS, "batch_size": BATCH, "seed": 5}
    return {**made, **options}


def add(both: Pair, numbers: range, *tables: str) -> None:
    for number in numbers:
        for table in tables or (None,):
            both.add(trajectory(number, 1 + number * 5 % 12), table)


def without_samples(device: DeviceReplay, accumulation: int) -> None:
    """Draw a global batch that cannot be filled, and go back: the table is as it was."""
    position, content = device.state_dict(), device.export_table()["content"]["main"]
    for _ in range(accumulation):
        batch = device.sample()
        assert not batch.valid.any()
        assert not batch.is_weight.any()
    device.load_state_dict(position)
    for name, tensor in device.export_table()["content"]["main"].items():
        assert name == "state" or torch.equal(tensor, content[name]), name


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_batches_are_those_of_a_table_in_host_memory(kind: str, accumulation: int) -> None:
    """Until too few items or draws are left, and after more were added; some were removed meanwhile."""
    made = section(kind, gradient_accumulation_steps=accumulation)
    torch.manual_seed(0)
    most, num_empty = KINDS[kind][1], 0
    removed, lowest = torch.tensor([1, 2, 299]), int(kind.startswith("top-k"))  # 0: is not drawn again
    with device_and_host(made, {"main": SCHEMA}) as both:
        device, host = both.device, both.host
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
            found, counts = device.statistics(), host.statistics()
            assert (found["trajectories"], found["steps"]) == (len(host), host.num_steps)
        if most:
            assert num_empty > 0
            stored = device.table.slots[device.table.slots[:, Slot.STATE] == SlotState.COMMITTED]
            assert int(stored[:, Slot.TIMES_SAMPLED].max()) < most
        if device.config.item_sampler.has_priorities:
            names = ("priorities_applied", "priorities_ignored")
            assert [found[name] for name in names] == [counts[name] for name in names]
            assert (found["priorities_ignored"] > 0) == (most > 0)
        if num_empty:
            with pytest.raises(DataError, match="global batches without samples"):
                device.check()


def test_a_mixture_of_limited_tables() -> None:
    """Each table counts its own draws."""
    made = section("by the batch")
    table = made["tables"]["main"]
    made["tables"] = {"once": {**table, "max_times_sampled": 1}, "main": {**table, "max_times_sampled": 5}}
    made["sampler"] = {"kind": "mixture", "shares": {"once": 0.25, "main": 0.75}, "of": TRAJECTORIES}
    with device_and_host(made, dict.fromkeys(("once", "main"), SCHEMA)) as both:
        add(both, range(40), "once", "main")
        for _ in range(6):
            both.sample()
        assert both.device.statistics()["tables"]["once"]["trajectories"] == 40 - 6 * BATCH // 4


@pytest.mark.parametrize("kind", ["top-k, twice", "by the table"])
def test_counts_go_on_from_a_checkpoint(kind: str, tmp_path: Path) -> None:
    made, schemas = section(kind), {"main": SCHEMA}
    with device_and_host(made, schemas) as both:
        add(both, range(60))
        for _ in range(2):
            both.sample()
        state = both.device.save(tmp_path)
        with DeviceReplay(made, "cpu", schemas=schemas) as other:
            other.load(tmp_path, state)
            assert_same(other.sample(), both.host.sample())


def test_a_slot_that_is_used_again_begins_with_no_draws() -> None:
    """The ring evicts what was drawn in part, over and over; none is drawn more often than it may."""
    made = online({"kind": "uniform"}, table={"max_times_sampled": 2}, batch_size=8)
    times: dict[int, int] = {}
    with DeviceReplay(made, "cpu") as replay:
        for turn in range(40):
            replay.add_(trajectories(6, 1 + turn % 6, 6 * turn))
            for number in replay.sample()["task"].tolist():
                times[number] = times.get(number, 0) + 1
            stored = replay.table.slots[replay.table.slots[:, Slot.STATE] == SlotState.COMMITTED]
            assert all(
                times.get(slot[Slot.ID], 0) == slot[Slot.TIMES_SAMPLED] < 2 for slot in stored.tolist()
            )
        replay.check()
        assert int(replay.table.state[0]) > 5 * replay.table.num_rows
    assert set(times.values()) == {1, 2}
