"""A run that continues on a data set that has grown: the old rows are the first ones of the new."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gear_support import SCHEMA, STEP, trajectory, wait_until, write_dataset
from replay_support import offline, streams_of, take

from deepspeed_gear import CheckpointError, DatasetWriter
from deepspeed_gear.data.dataset import Dataset
from deepspeed_gear.store.records import Head

OLD = [3, 1, 7, 5, 2, 9, 4, 6]
NEW = [8, 2, 30, 1, 5]
FIELDS: dict[str, Any] = {"fields": {"code": {}}, "batch_size": 4}


def grow(data: Path) -> None:
    with DatasetWriter(data, SCHEMA, append=True) as writer:
        for number, steps in enumerate(NEW, len(OLD)):
            writer.add(trajectory(number, steps))


@pytest.mark.parametrize("unit", ["trajectory", "step"])
def test_random_samplers_draw_from_all_at_once(tmp_path: Path, unit: str) -> None:
    data = write_dataset(tmp_path / "data", OLD)
    options = {"sampler": {"kind": "uniform", "unit": unit}, **FIELDS}
    with offline(data, **options) as replay:
        take(replay, 3)
        state = replay.save(tmp_path / "save")
    grow(data)
    with offline(data, **options) as whole, offline(data, **options) as resumed:
        resumed.load(tmp_path / "save", state)
        for batch, other in zip(take(whole, 9)[3:], take(resumed, 6), strict=True):
            assert torch.equal(batch.trajectory_id, other.trajectory_id)
            assert torch.equal(batch["code"], other["code"])


@pytest.mark.parametrize("unit", ["trajectory", "step"])
def test_an_epoch_ends_with_the_old_items(tmp_path: Path, unit: str) -> None:
    data = write_dataset(tmp_path / "data", OLD)
    options = {"sampler": {"kind": "epoch", "unit": unit}, **FIELDS}
    size, num_new = (len(OLD), len(NEW)) if unit == "trajectory" else (sum(OLD), sum(NEW))
    with offline(data, **options) as replay:
        take(replay, 1)
        state = replay.save(tmp_path / "save")
        left = torch.cat([batch["code"] for batch in take(replay, -(-size // 4))]).flatten()[
            : size - 4
        ]
    grow(data)
    with offline(data, **options) as resumed:
        resumed.load(tmp_path / "save", state)
        batches = take(resumed, -(-(2 * size + num_new) // 4))
        codes = torch.cat([batch["code"] for batch in batches]).flatten()
        assert torch.equal(codes[: size - 4], left)
        if unit == "step":
            following = codes[size - 4 :][: size + num_new].unique()
            assert len(following) == size + num_new, "the next epoch has every item once"
        ids = torch.cat([batch.trajectory_id for batch in batches])
        assert set(ids[size - 4 :][: size + num_new].tolist()) == set(range(len(OLD) + len(NEW)))


@pytest.mark.parametrize(("unit", "prefetch"), [("trajectory", 0), ("step", 2)])
def test_new_items_get_their_first_priorities(tmp_path: Path, unit: str, prefetch: int) -> None:
    sampler = {"kind": "prioritized", "unit": unit, "alpha": 1.0}
    data = write_dataset(tmp_path / "data", OLD)
    options = {"sampler": sampler, "prefetch": prefetch, **FIELDS}
    with offline(data, **options) as replay:
        for _ in range(4):
            batch = replay.sample()
            replay.update_priorities(batch, batch.trajectory_id.float() + 2.5)
        stream = streams_of(replay)["train"].state
        wait_until(lambda: stream.words[Head.NUMBER] >= 4 + prefetch, "batches are selected ahead")
        state = replay.save(tmp_path / "save")
        ahead = take(replay, prefetch + 1)  # until the last update is applied
        values = stream.with_priorities.values.copy()
    grow(data)
    old = Dataset.open(data)
    with offline(data, **options) as resumed:
        resumed.load(tmp_path / "save", state)
        for batch, other in zip(take(resumed, prefetch), ahead, strict=False):
            assert torch.equal(batch.trajectory_id, other.trajectory_id)
        batches = take(resumed, 60)
        masses = streams_of(resumed)["train"].state.with_priorities
        np.testing.assert_array_equal(masses.values[: len(values)], values)
        new = masses.values[len(values) :]
        assert set(new[new > 0].tolist()) == {float(values.max())}
        assert masses.num_drawable == (len(old) if unit == "trajectory" else old.num_steps)
        drawn = torch.cat([batch.trajectory_id for batch in batches])
        assert (drawn >= len(OLD)).any()
        assert torch.equal(torch.cat([batch["code"] for batch in batches]).flatten() // STEP, drawn)
        resumed.save(tmp_path / "save")


def test_other_data_are_refused(tmp_path: Path) -> None:
    data = write_dataset(tmp_path / "data", OLD)
    with offline(data, **FIELDS) as replay:
        old = replay.save(tmp_path / "old")
    grow(data)
    with offline(data, **FIELDS) as replay:
        new = replay.save(tmp_path / "new")
    with offline(write_dataset(tmp_path / "same", OLD), **FIELDS) as replay:
        replay.load(tmp_path / "old", old)
        with pytest.raises(
            CheckpointError, match="or of what they have grown from by gear ingest --append"
        ):
            replay.load(tmp_path / "new", new)
