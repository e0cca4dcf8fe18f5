"""A data set in the memory of one device, here the host's: the batches of one in shared memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gear_support import STEP, config_of, lengths_of, write_dataset
from ring_cases import PRIORITIZED, SAMPLERS, WINDOWS, assert_same, on_device
from torch import Tensor

from deepspeed_gear import DeviceReplay, Replay
from deepspeed_gear.errors import ConfigError, DataError, StoreError


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("data") / "set", lengths_of(40), {"eval": 0.2})


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_data_set_gives_the_batches_of_shared_memory(data: Path, sampler: str, accumulation: int) -> None:
    section = config_of(data, sampler=SAMPLERS[sampler], fields=WINDOWS, batch_size=24, seed=5)
    section["gradient_accumulation_steps"] = accumulation
    torch.manual_seed(0)
    with Replay(section) as host, DeviceReplay(on_device(section), "cpu") as device:
        for _ in range(20):
            for _ in range(accumulation):
                expected, got = host.sample(), device.sample()
                assert_same(got, expected)
                if "prioritized" in sampler or "table" in sampler or "normalized" in sampler:
                    values = torch.rand(got.num_samples) * 3
                    host.update_priorities(expected, values)
                    device.update_priorities_(got, values)
        assert len(device) == len(host)
        assert device.num_steps == host.num_steps


def test_a_transform_gets_the_keys_of_shared_memory(data: Path) -> None:
    section = config_of(data, sampler=SAMPLERS["uniform steps"], fields=WINDOWS, batch_size=8, seed=5)

    def transform(batch: Any, key: Tensor) -> Any:
        batch["noisy"] = batch["observation"] + (key % 7).float()[:, None, None]
        return batch

    with Replay(section) as host, DeviceReplay(on_device(section), "cpu") as device:
        plain = set(device.sample())
        host.sample()
        host.transform = device.transform = transform
        for _ in range(5):
            assert_same(device.sample(), host.sample())
        device.transform = None
        assert set(device.sample()) == plain


@pytest.mark.parametrize("sampler", ["uniform steps", "trajectories", "by the table"])
def test_a_pass_over_a_split_is_that_of_shared_memory(data: Path, sampler: str) -> None:
    section = config_of(data, sampler=SAMPLERS[sampler], fields=WINDOWS, batch_size=7, seed=5)
    with Replay(section) as host, DeviceReplay(on_device(section), "cpu") as device:
        assert device.num_batches("eval") == host.num_batches("eval")
        for _ in range(2):
            passes = zip(device.iterator("eval"), host.iterator("eval"), strict=True)
            for got, expected in passes:
                assert_same(got, expected)
                assert torch.equal(got.valid, expected.valid)
                assert torch.equal(got.epoch, expected.epoch)
        assert_same(device.sample(), host.sample())
        with pytest.raises(ConfigError, match="must be one of train, eval"):
            device.iterator("test")


def test_normalize_gives_the_bits_of_a_batch(data: Path) -> None:
    fields = {"observation": {"normalize": "mean_std"}, "code": {"scale": 0.5}}
    section = config_of(data, sampler=PRIORITIZED, fields=fields, batch_size=8)
    with DeviceReplay(on_device(section), "cpu") as replay:
        batch = replay.sample()
        assert repr(batch).startswith("Batch(8 samples on cpu; observation: float32[8, 3]")
        code = batch.trajectory_id * STEP + batch.anchor
        rows = torch.stack([code, code + 0.25, -code], 1)
        assert replay.normalize("observation", rows).equal(batch["observation"])
        assert replay.normalize("code", code).equal(batch["code"])
        part = batch[batch.trajectory_id > 3]
        for name in ("is_weight", "probability", "valid", "sample_index"):
            assert getattr(part, name).equal(getattr(batch, name)[batch.trajectory_id > 3]), name
        with pytest.raises(
            DataError, match=r"no clone or part, got 'Batch'; report the priorities of the whole"
        ):
            replay.update_priorities(part, torch.ones(part.num_samples))


def test_only_batches_of_the_training_stream_have_priorities(data: Path) -> None:
    section = on_device(config_of(data, sampler=PRIORITIZED, fields=WINDOWS, batch_size=8))
    with DeviceReplay(section, "cpu") as replay, DeviceReplay(section, "cpu") as other:
        state = replay.table.sums.clone()
        for batch in (next(replay.iterator("eval")), other.sample(), replay.sample().clone()):
            with pytest.raises(DataError, match="must be"):
                replay.update_priorities_(batch, torch.ones(8))
        assert torch.equal(replay.table.sums, state)
        for change in (replay.clear, lambda: replay.add_({}), lambda: replay.fill_(torch.zeros(1), {})):
            with pytest.raises(StoreError, match="must not be changed"):
                change()
        batch = replay.sample()
        replay.update_priorities_(batch, torch.full((8,), 1e-60, dtype=torch.float64))
        items = replay.table.priorities[batch.records[:, 3] + batch.anchor]
        assert bool((items > 0).all())
