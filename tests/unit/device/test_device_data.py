"""A data set in the memory of one device, here the host's: the batches of one in shared memory."""

from pathlib import Path

import pytest
import torch
from gear_support import STEP, config_of, lengths_of, write_dataset
from hopper_batches import digests, hopper_data
from ring_cases import PRIORITIZED, SAMPLERS, WINDOWS, assert_same, device_and_host, on_device

from deepspeed_gear import DeviceReplay
from deepspeed_gear.errors import ConfigError, DataError, StoreError


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("data") / "set", lengths_of(40), {"eval": 0.2})


@pytest.mark.parametrize(("accumulation", "rows"), [(1, "host"), (2, "device")])
@pytest.mark.parametrize("sampler", [*SAMPLERS, "top-k"])
def test_a_data_set_gives_the_batches_of_shared_memory(
    data: Path, sampler: str, accumulation: int, rows: str
) -> None:
    options = SAMPLERS.get(sampler) or {"kind": "top_k", "unit": "step"}
    section = config_of(data, sampler=options, fields=WINDOWS, batch_size=24, seed=5)
    section["gradient_accumulation_steps"] = accumulation
    torch.manual_seed(0)
    with device_and_host(on_device(section, rows=rows)) as both:
        for _ in range(20 * accumulation):
            batch = both.sample()
            if sampler == "top-k":
                both.report(torch.randint(0, 3, (batch.num_samples,)).float() + 0.5)
            elif both.device.config.item_sampler.has_priorities:
                both.report(torch.rand(batch.num_samples) * 3)
        assert len(both.device) == len(both.host)
        assert both.device.num_steps == both.host.num_steps


def test_the_hopper_job_has_the_same_batches_wherever_its_table_lies_and_by_every_way(
    tmp_path: Path,
) -> None:
    hopper = hopper_data(tmp_path)
    expected = digests("hopper.json", "cpu", hopper, 60)
    assert len(set(expected)) == 60
    assert not set(expected) & set(digests("hopper.json", "cpu", hopper, 60, seed=1))
    for way in ("direct", "staged"):
        assert digests("hopper.json", "cpu", hopper, 60, transfer={"way": way}) == expected, way
    assert digests("hopper_device.json", "cpu", hopper, 60) == expected


@pytest.mark.parametrize("sampler", ["uniform steps", "trajectories", "by the table"])
def test_a_pass_over_a_split_is_that_of_shared_memory(data: Path, sampler: str) -> None:
    section = config_of(data, sampler=SAMPLERS[sampler], fields=WINDOWS, batch_size=7, seed=5)
    with device_and_host(on_device(section)) as both:
        device = both.device
        host = both.host
        assert device.num_batches("eval") == host.num_batches("eval")
        for _ in range(2):
            for got, expected in zip(device.iterator("eval"), host.iterator("eval"), strict=True):
                assert_same(got, expected)
                assert torch.equal(got.valid, expected.valid)
                assert torch.equal(got.epoch, expected.epoch)
        both.sample()
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
            DataError, match=r"no clone or part, got 'Batch'; report the priorities of the"
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
        for change in (
            replay.clear,
            lambda: replay.add_({}),
            lambda: replay.fill_(torch.zeros(1), {}),
        ):
            with pytest.raises(StoreError, match="must not be changed"):
                change()
        batch = replay.sample()
        replay.update_priorities_(batch, torch.full((8,), 1e-60, dtype=torch.float64))
        items = replay.table.priorities[batch.resolutions[:, 3] + batch.anchor]
        assert bool((items > 0).all())
