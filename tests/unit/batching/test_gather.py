"""The gatherer: shared masks, counters, constant statistics, an allocation-free ring."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from replay_support import filled

from deepspeed_gear import Replay
from deepspeed_gear.batching.gather import Gatherer
from deepspeed_gear.config import ResolvedField
from deepspeed_gear.config.options import NStepConfig
from deepspeed_gear.ops.records import Slot


@pytest.fixture
def make() -> Iterator[Any]:
    made: list[Replay] = []

    def replay(fields: dict[str, Any], lengths: tuple[int, ...] = (4, 9), **options: Any) -> Replay:
        made.append(filled(lengths, fields=fields, **options))
        return made[-1]

    yield replay
    for replay in made:
        replay.close()


PARTS = {
    "observation": {"offset": -4, "length": 6, "align": "right", "pad": "edge", "scale": 0.5},
    "action": {"offset": -2, "length": 6, "align": "left"},
    "code": {"offset": -2, "length": 6, "align": "left", "pad": -1},
    "return_to_go": {"offset": -2, "length": 6, "pad": "edge"},
    "timestep": {"offset": -2, "length": 6, "pad": "edge"},
    "position": {"offset": -2, "length": 6},
    "next": {"column": "observation", "offset": "n_step", "length": 6},
    "reward": {},
    "task": {},
}


@pytest.mark.parametrize("num_parts", [1, 2, 3, 6])
def test_parts_of_windows(make: Any, num_parts: int) -> None:
    """One behind the other they are the windows; equal parts share a mask; each counts its own rows."""
    n_step = {"n": 2, "gamma": 0.5}
    replay = make(PARTS, lengths=(1, 4, 9), n_step=n_step)
    table, config = replay.tables["main"], NStepConfig(**n_step)

    def gatherer(fields: list[ResolvedField]) -> Gatherer:
        return Gatherer(fields, table, {}, config, len(records), 1, torch.float32, 1)

    starts = [int(first) for first in table.slots[:3, Slot.FIRST_ROW]]
    samples = [(slot, anchor) for slot, steps in enumerate((1, 4, 9)) for anchor in range(steps)]
    records = torch.tensor(
        [[slot, slot, 0, starts[slot], (1, 4, 9)[slot], anchor, 0, 0] for slot, anchor in samples]
    )
    whole = gatherer(replay.fields)
    values, masks = whole.gather(records)
    count = 6 // num_parts
    found = []
    for first in range(0, 6, count):
        cut = [
            field if field.length is None else replace(field, part_first=first, part_length=count)
            for field in replay.fields
        ]
        part = gatherer(cut)
        found.append((*part.gather(records), part.counters))
        assert found[-1][1]["action"] is found[-1][1]["code"]
        num_real = sum(int(mask.sum()) for mask in found[-1][1].values())
        num_bytes = sum(found[-1][0][name].nbytes for name in PARTS)
        assert part.counters.tolist() == [num_real, len(records) * (7 * count + 2), num_bytes]
    for name, options in PARTS.items():
        for joined, expected in ((0, values), (1, masks)):
            parts = [each[joined][name] for each in found]
            if "length" in options:
                assert torch.equal(torch.cat(parts, dim=1), expected[name]), name
            else:
                assert all(torch.equal(part, expected[name]) for part in parts), name
    assert values["position"].tolist() == [list(range(6))] * len(records)


def test_equal_windows_share_a_mask_and_different_parts_none(make: Any) -> None:
    window = {"offset": -2, "length": 4}
    other = {"column": "code", "offset": -1, "length": 4}
    replay = make({"action": window, "code": window, "reward": window, "observation": window, "other": other})
    batch = replay.sample()
    assert batch.mask["action"] is batch.mask["code"]
    assert batch.mask["action"] is not batch.mask["other"]
    assert batch.mask["action"] is not batch.mask["observation"]  # one row more: another window
    action, code, reward, *_ = replay.fields
    halves = [replace(code, part_length=2), replace(reward, part_first=2, part_length=2)]
    fields = [action, *halves, replace(action, name="same", part_first=2, part_length=2)]
    gatherer = Gatherer(fields, replay.tables["main"], {}, None, 2, 1, torch.float32, 1)
    mask = gatherer.ring[0].mask
    assert [tuple(mask[field.name].shape) for field in fields] == [(2, 4), (2, 2), (2, 2), (2, 2)]
    assert mask["reward"] is mask["same"]
    assert mask["reward"] is not mask["code"]
    outside = [replace(code, part_first=3, part_length=2)]
    gatherer = Gatherer(outside, replay.tables["main"], {}, None, 1, 1, torch.float32, 1)
    with pytest.raises(RuntimeError, match="first and count must be a part of the window"):
        gatherer.gather(torch.tensor([[0, 0, 0, 0, 4, 0, 0, 0]]))


def test_counters_count_rows_and_bytes(make: Any) -> None:
    fields = {"code": {"offset": -3, "length": 5}, "task": {}}
    replay = make(fields)
    batches = [replay.sample().clone() for _ in range(4)]
    real = sum(int(b.mask["code"].sum()) + b.num_samples for b in batches)
    taken = replay.take_metrics()
    assert taken["bytes"] == 8 * 5 * 8 + 8 * 8
    assert taken["padding"] == pytest.approx(1 - real / (4 * 8 * 6))
    replay.sample()
    assert replay.take_metrics()["bytes"] == 8 * 5 * 8 + 8 * 8
