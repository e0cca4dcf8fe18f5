"""Windows of diffusion policy and ACT: their published rules, restated in NumPy, and the batches of
a data set.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deepspeed_gear import Column, DatasetWriter, Replay, Schema
from deepspeed_gear.sampling.mass_rules import AnchorRule

LENGTHS = (1, 6, 7, 8, 9, 16, 33)
OBSERVED = 2  # steps of observations up to the current one
HORIZON = 16  # steps of actions from the first observed one on
EXECUTED = 8  # of them from the current one on


def published_windows(lengths: tuple[int, ...]) -> list[tuple[int, list[int]]]:
    """Return the episode and the steps of each window, as diffusion policy's `create_indices` and
    `SequenceSampler` have them: the first and the last step are repeated as padding.
    """
    windows = []
    for episode, length in enumerate(lengths):
        pad_before = OBSERVED - 1
        pad_after = EXECUTED - 1
        for start in range(-pad_before, length - HORIZON + pad_after + 1):
            steps = np.arange(start, start + HORIZON).clip(0, length - 1)
            windows.append((episode, steps.tolist()))
    return windows


@pytest.fixture(scope="module")
def episodes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("robot") / "data"
    columns = [Column("state", "float32", (), "observation"), Column("action", "float32")]
    with DatasetWriter(path, Schema(columns)) as writer:
        for length in LENGTHS:
            writer.add({"state": np.arange(length), "action": np.arange(length)})
    return path


def items(data: Path, anchors: Any, fields: dict[str, Any]) -> list[dict[str, Any]]:
    """Return each item of an epoch: episode, anchor, and the values and the mask of each field."""
    config = {
        "batch_size": 1,
        "data": str(data),
        "sampler": {"kind": "epoch", "unit": "step", "anchors": anchors},
        "fields": fields,
    }
    drawn = []
    with Replay(config) as replay:
        while int((batch := replay.sample()).epoch[0]) == 0:
            item: dict[str, Any] = {name: batch[name][0].tolist() for name in fields}
            item |= {f"mask.{name}": batch.mask[name][0].tolist() for name in fields}
            drawn.append({**item, "episode": int(batch.trajectory_id), "anchor": int(batch.anchor)})
    return drawn


def test_the_windows_are_those_of_diffusion_policy(episodes: Path) -> None:
    chunk = {"offset": 1 - OBSERVED, "length": HORIZON, "pad": "edge"}
    fields = {"state": {"offset": 1 - OBSERVED, "length": OBSERVED, "pad": "edge"}, "action": chunk}
    for anchors in ({"pad_after": EXECUTED - 1}, {"pad_before": 1, "pad_after": EXECUTED - 1}):
        drawn = items(episodes, anchors, fields)
        windows = [(item["episode"], [int(step) for step in item["action"]]) for item in drawn]
        assert sorted(windows) == sorted(published_windows(LENGTHS))
        for item in drawn:
            assert item["state"] == item["action"][:OBSERVED]


def test_without_a_bound_every_step_is_an_item_as_in_act(episodes: Path) -> None:
    """ACT and LeRobot's `delta_timestamps` pad to any length; the mask is their `is_pad`."""
    drawn = items(episodes, "all", {"action": {"length": HORIZON}})
    assert len(drawn) == sum(LENGTHS)
    for item in drawn:
        left = LENGTHS[item["episode"]] - item["anchor"]
        assert item["mask.action"] == [step < left for step in range(HORIZON)]


@pytest.mark.parametrize("pad_before", [0, 1, 2, None])
@pytest.mark.parametrize("pad_after", [0, 1, 13, 14, None])
@pytest.mark.parametrize("every", [1, 3])
def test_anchors_have_at_most_so_much_padding(
    pad_before: int | None, pad_after: int | None, every: int
) -> None:
    windows = [(-2, 3, 0), (-1, HORIZON, 0), (1, 1, 1)]
    rule = AnchorRule.bounded(windows, pad_before, pad_after, every)
    for length in range(1, 40):
        steps = np.arange(length)
        before = np.max([-(steps + offset) for offset, _, _ in windows], 0)
        after = np.max(
            [steps + offset + size - length - extra for offset, size, extra in windows], 0
        )
        admitted = np.ones(length, bool)
        if pad_before is not None:
            admitted &= before <= pad_before
        if pad_after is not None:
            admitted &= after <= pad_after
        wanted = np.flatnonzero(admitted)[::every]
        count = int(rule.num_anchors(np.array([length]))[0])
        assert rule.anchor_at(np.arange(count), np.full(count, length)).tolist() == wanted.tolist()
        assert (
            np.flatnonzero(rule.admits(steps, np.full(length, length))).tolist() == wanted.tolist()
        )


def test_the_count_of_a_published_data_set() -> None:
    """50 episodes of 20,814 steps have 20,464 windows with padding of 7 steps."""
    rule = AnchorRule.bounded([(-1, OBSERVED, 0), (-1, HORIZON, 0)], 1, EXECUTED - 1)
    lengths = np.full(50, 416)
    lengths[:14] += 1
    assert lengths.sum() == 20_814
    assert rule.num_anchors(lengths).sum() == 20_464
