"""Calibration of the transfer methods times the device of the table, which need not be the current one."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch

from deepspeed_gear.batching.transfer import calibration
from deepspeed_gear.batching.transfer.cuda_streams import HostStream

TABLES = torch.device("meta")  # stands for cuda:1: tensors of it can be made and multiplied anywhere


class TimingEvent:
    """A CUDA event that notes the stream of each of its records, as torch chooses it."""

    recorded: ClassVar[list[object]] = []

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: object = None) -> None:
        self.recorded.append(torch.cuda.current_stream() if stream is None else stream)

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, last: TimingEvent) -> float:
        return 2.0


@pytest.fixture
def current_device_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    def current_stream(device: Any = None) -> str:
        return f"stream of {device or 'cuda:0'}"

    monkeypatch.setattr(TimingEvent, "recorded", [])
    monkeypatch.setattr(torch.cuda, "Event", TimingEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)


@pytest.mark.usefixtures("current_device_is_another")
def test_products_are_timed_on_the_stream_that_runs_them() -> None:
    lane, gathered = HostStream(), list[torch.Tensor]()
    lane.device = TABLES
    records = torch.zeros(3, 8, dtype=torch.int64)
    timings = calibration.measure(gathered.append, records, lane)
    assert len(gathered) == 2 * calibration.ROUNDS
    assert timings.slowed == 0.0
    assert len(TimingEvent.recorded) == 2 * (1 + 2 * calibration.ROUNDS)
    assert set(TimingEvent.recorded) == {"stream of meta"}
