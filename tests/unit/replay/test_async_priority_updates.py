"""Priorities that a device computes later: no process waits for them but those who need them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gear_support import config_of, lengths_of, wait_until, write_dataset
from replay_support import late_updates_of, streams_of

from deepspeed_gear import Batch, Replay
from deepspeed_gear.batching.transfer.cuda_streams import HostEvent
from deepspeed_gear.errors import DataError, ShapeError, StoreError
from deepspeed_gear.sampling.priority_log import NEVER, PriorityLog
from deepspeed_gear.sampling.priority_masses import PriorityMasses

SAMPLER = {"kind": "prioritized", "unit": "step", "alpha": 0.7, "beta": 0.5}


class Elsewhere(torch.Tensor):
    """A tensor that says that it is on a device."""

    is_cpu, is_cuda = False, True


class Device:
    """Computes what it was given when it is told to."""

    def __init__(self) -> None:
        self.given: list[HostEvent] = []
        self.taken: list[int] = []  # memory of the host
        self.timers: list[threading.Timer] = []

    def fetch(self, values: torch.Tensor) -> tuple[torch.Tensor, HostEvent]:
        self.given.append(HostEvent())
        host = values.as_subclass(torch.Tensor).clone()
        self.taken.append(id(host))
        return host, self.given[-1]

    def give_back(self, host: torch.Tensor) -> None:
        self.taken.remove(id(host))

    def finish(self) -> None:
        for event in self.given:
            event.finish()

    def later(self, delay_s: float, finish: Callable[[], None]) -> None:
        """Finish after a while; the fixture waits for it."""
        self.timers.append(threading.Timer(delay_s, finish))
        self.timers[-1].start()


def there(values: torch.Tensor) -> torch.Tensor:
    return values.as_subclass(Elsewhere)  # type: ignore[return-value]


def priorities(batch: Batch) -> torch.Tensor:
    return (batch.sample_number % 13 + 1).float() * (batch.anchor + 1)


def made(data: Path, device: Device | None = None, **options: Any) -> Replay:
    given = {"sampler": SAMPLER, "fields": {"code": {}}, "batch_size": 16, **options}
    replay = Replay(config_of(data, **given))
    if device is not None:
        late_updates_of(replay)._blocks = device
    return replay


def reported(replay: Replay) -> Batch:
    """Report the priorities of the next batch, which its device has yet to compute; return the batch."""
    batch = replay.sample()
    replay.update_priorities(batch, there(priorities(batch)))
    return batch


def log_of(replay: Replay) -> PriorityLog:
    masses = streams_of(replay)["train"].masses
    assert isinstance(masses, PriorityMasses)
    return masses.reports


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_dataset(tmp_path / "set", lengths_of(20))


@pytest.fixture
def device() -> Iterator[Device]:
    device = Device()
    yield device
    device.finish()
    for timer in device.timers:
        timer.join()
    wait_until(lambda: not device.taken, "the memory of all values is given back", 10.0)


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_late_reports_give_the_batches_of_early_ones(data: Path, device: Device, prefetch: int) -> None:
    with made(data, prefetch=prefetch) as early, made(data, device, prefetch=prefetch) as late:
        for _ in range(12):
            expected, batch = early.sample(), late.sample()
            assert torch.equal(batch.sample_number, expected.sample_number)
            assert torch.equal(batch.trajectory_id, expected.trajectory_id)
            assert torch.equal(batch.is_weight, expected.is_weight)
            early.update_priorities(expected, priorities(expected))
            late.update_priorities(batch, there(priorities(batch)))
            device.later(0.01, device.given[-1].finish)
        device.finish()


def test_neither_a_report_nor_the_batch_that_is_prepared_waits(data: Path, device: Device) -> None:
    with made(data, device, prefetch=2) as replay:
        reported(replay)
        reported(replay)  # who waited would wait for ever
        log = log_of(replay)
        assert log.asked[0] == 0, "others wait for what was promised for global batch 0"
        device.given[0].finish()
        wait_until(lambda: log.asked[0] != 0, "the report of global batch 0")
        assert log.asked[0] == 1
        device.finish()
        late_updates_of(replay).drain()
        assert log.asked[0] == 1
        replay.sample()
        assert log.asked[0] == 2


@pytest.mark.parametrize(("call", "delay_s"), [("close", 0.2), ("sample", 1.2)])
def test_what_needs_a_report_waits_for_it(data: Path, device: Device, call: str, delay_s: float) -> None:
    """Closing, and the selection, also where a device takes longer than the timeout."""
    with made(data, device, timeout_s=0.5) as replay:
        reported(replay)
        begin = time.monotonic()
        device.later(delay_s, device.finish)
        getattr(replay, call)()
        assert time.monotonic() - begin >= delay_s - 0.01


def test_what_is_wrong_is_raised_later_and_holds_nobody_up(data: Path, device: Device) -> None:
    with made(data) as early, made(data, device) as late:
        for replay in (early, late):
            replay.update_priorities(replay.sample(), torch.ones(16))
        batch = late.sample()
        values = priorities(batch)
        values[3] = torch.nan
        late.update_priorities(batch, there(values))
        device.finish()
        with pytest.raises(DataError, match="priority 3 must be finite and at least 0, got nan"):
            late_updates_of(late).drain()
        early.sample()
        assert torch.equal(early.sample().trajectory_id, late.sample().trajectory_id)


def test_more_than_the_log_holds_is_refused_at_once(data: Path, device: Device) -> None:
    with made(data, device) as replay:
        batch, masses = replay.sample(), streams_of(replay)["train"].masses
        assert isinstance(masses, PriorityMasses)
        for _ in range(masses.rule.log_size // 16):
            replay.update_priorities(batch, there(priorities(batch)))
        with pytest.raises(StoreError, match="must be at most"):
            replay.update_priorities(batch, there(priorities(batch)))
        device.finish()


def test_a_checkpoint_waits_for_what_was_reported(tmp_path: Path, data: Path, device: Device) -> None:
    with made(data, device) as replay, made(data) as other:
        reported(replay)
        device.later(0.2, device.finish)
        state = replay.save(tmp_path / "saved")
        other.load(tmp_path / "saved", state)
        assert torch.equal(other.sample().trajectory_id, replay.sample().trajectory_id)


def test_masks_are_refused_when_they_are_there(data: Path, device: Device) -> None:
    fields = {"code": {"offset": -3, "length": 4}, "reward": {"offset": 0, "length": 4}}
    with made(data, device, fields=fields) as replay:
        batch, values = replay.sample(), torch.ones(16, 4)
        replay.update_priorities(batch, there(values), mask=batch.mask["code"])
        device.finish()
        late_updates_of(replay).drain()
        replay.update_priorities(batch, there(values))
        nothing = batch.mask["code"].clone()
        nothing[5] = False
        replay.update_priorities(batch, there(values), mask=nothing)
        device.finish()
        texts = "given where fields of the same length have different", "of sample 5 must have a step that"
        for text in texts:
            with pytest.raises(ShapeError, match=f"mask (must be )?{text}"):
                late_updates_of(replay).drain()


def test_reports_that_come_after_a_batch_was_given_up_mend_the_next(data: Path, device: Device) -> None:
    with made(data, device, prefetch=1) as replay:
        batch = reported(replay)
        log_of(replay).give_up()
        device.finish()
        late_updates_of(replay).drain()
        assert log_of(replay).asked[0] == NEVER, "what is reported now is due at once"
        replay.set_priorities(batch.trajectory_id, torch.ones(16), batch.anchor)


def test_a_device_that_hangs_holds_nobody_up_for_ever(data: Path, device: Device) -> None:
    replay = made(data, device, timeout_s=0.3)
    reported(replay)
    begin = time.monotonic()
    replay.close()
    assert time.monotonic() - begin < 20
