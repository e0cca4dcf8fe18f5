"""The gatherer: equal windows share a mask, a part lies inside its window, and rows and bytes are
counted.
"""

from dataclasses import replace

import pytest
import torch
from replay_support import filled

from deepspeed_gear.batching.gather import Gatherer, GatherOptions


def test_equal_windows_share_a_mask_and_different_parts_none() -> None:
    window = {"offset": -2, "length": 4}
    other = {"column": "code", "offset": -1, "length": 4}
    fields = {
        "action": window,
        "code": window,
        "reward": window,
        "observation": window,
        "other": other,
    }
    with filled((4, 9), fields=fields) as replay:
        batch = replay.sample()
        assert batch.mask["action"] is batch.mask["code"]
        assert batch.mask["action"] is not batch.mask["other"]
        assert batch.mask["action"] is not batch.mask["observation"]  # one row more: another window
        action, code, reward, *_ = replay.fields
        halves = [replace(code, part_length=2), replace(reward, part_first=2, part_length=2)]
        fields = [action, *halves, replace(action, name="same", part_first=2, part_length=2)]
        gatherer = Gatherer(
            GatherOptions(fields, {}, None, 2, torch.float32, 1), replay.tables["main"], 1
        )
        mask = gatherer.ring[0].mask
        assert [tuple(mask[field.name].shape) for field in fields] == [
            (2, 4),
            (2, 2),
            (2, 2),
            (2, 2),
        ]
        assert mask["reward"] is mask["same"]
        assert mask["reward"] is not mask["code"]
        outside = [replace(code, part_first=3, part_length=2)]
        gatherer = Gatherer(
            GatherOptions(outside, {}, None, 1, torch.float32, 1), replay.tables["main"], 1
        )
        with pytest.raises(RuntimeError, match="first and count must be a part of the window"):
            gatherer.gather(torch.tensor([[0, 0, 0, 0, 4, 0, 0, 0]]))


def test_counters_count_rows_and_bytes() -> None:
    with filled((4, 9), fields={"code": {"offset": -3, "length": 5}, "task": {}}) as replay:
        batches = [replay.sample().clone() for _ in range(4)]
        real = sum(int(batch.mask["code"].sum()) + batch.num_samples for batch in batches)
        taken = replay.take_metrics()
        assert taken["bytes"] == 8 * 5 * 8 + 8 * 8
        assert taken["padding"] == pytest.approx(1 - real / (4 * 8 * 6))
        assert replay.take_metrics() == taken, "nothing was sampled since"
        replay.sample()
        assert replay.take_metrics()["bytes"] == 8 * 5 * 8 + 8 * 8
