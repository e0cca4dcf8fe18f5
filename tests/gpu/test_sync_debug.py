"""Steps on a GPU while torch raises an error at each of its own calls that waits for the device."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from device_steps import LIMITED, SAMPLERS, columns, section, step
from gear_support import config_of, lengths_of, write_dataset

from deepspeed_gear import DeviceReplay, Replay

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]
DEVICE = "cuda"


@contextlib.contextmanager
def no_waits() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_wait_is_an_error() -> None:
    numbers = torch.arange(9, device=DEVICE)
    with no_waits(), pytest.raises(RuntimeError, match="synchroniz"):
        numbers.sum().item()


@pytest.mark.parametrize("sampler", [*SAMPLERS, *LIMITED])
def test_a_step_of_a_device_table_waits_for_nothing(sampler: str) -> None:
    with DeviceReplay(section(sampler), DEVICE) as replay:
        batch = replay.new_batch()
        added = columns(0, DEVICE)
        for _ in range(3):
            step(replay, batch, added)
        replay.sample()  # allocates its ring of batches
        with no_waits():
            for _ in range(20):
                step(replay, batch, added)
                replay.sample()
        if sampler in SAMPLERS:  # else batches without samples are part of it
            replay.check()


def test_batches_of_host_memory_wait_for_nothing(tmp_path: Path) -> None:
    data = write_dataset(tmp_path / "set", lengths_of(30))
    section = config_of(data, sampler={"kind": "prioritized", "unit": "step"}, batch_size=24)
    with Replay(section, device=DEVICE) as replay:
        replay.sample()  # chooses the way
        with no_waits():
            for _ in range(20):
                batch = replay.sample()
                replay.update_priorities(batch, batch.is_weight)
