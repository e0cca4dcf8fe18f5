"""Batches from host memory to a device: neither `sample` nor `update_priorities` waits for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from device_stub import DEVICE, DeviceStub, DeviceTensor
from gear_support import SCHEMA, config_of, trajectory
from torch import Tensor

from deepspeed_gear import Replay
from deepspeed_gear.batching.transfer.copy_engine import STAGED, WAYS
from deepspeed_gear.batching.transfer.cuda_streams import Event, HostEvent, HostStream
from deepspeed_gear.ops import load_backend
from deepspeed_gear.replay import batch_assembler, device_transfer, priority_updates

WINDOW = {"offset": -2, "length": 5}
FIELDS = {
    "observation": {**WINDOW, "pad": "edge", "scale": 0.5},
    "action": WINDOW,
    "next": {"column": "observation", "offset": "n_step", "length": 3},
    "reward": WINDOW,
    "task": {},
    "timestep": WINDOW,
    "return_to_go": WINDOW,
}


class Lane(HostStream):
    """The stub's stream: its work is done at once."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device


class Runtime:
    """Registers memory of the host with the stub, which needs no registration."""

    def __init__(self, device: torch.device) -> None:
        assert device == DEVICE

    def reads_host_addresses(self) -> bool:
        return True

    def register(self, begin: int, num_bytes: int) -> int:
        return 0

    def unregister(self, begin: int) -> int:
        return 0


class Blocks:
    """Memory of the host for reported priorities."""

    def fetch(self, values: Tensor) -> tuple[Tensor, Event]:
        event, host = HostEvent(), torch.empty(len(values))
        host.copy_(values, non_blocking=True)
        event.finish()
        return host, event

    def give_back(self, host: Tensor) -> None:
        pass


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_assembler, "is_wanted", lambda config, device: True)
    monkeypatch.setattr(device_transfer, "lane_of", Lane)
    monkeypatch.setattr(device_transfer, "CudaRuntime", Runtime)
    monkeypatch.setattr(device_transfer, "as_device_tensor", lambda column, device: DeviceTensor(column))
    monkeypatch.setattr(device_transfer.DeviceTransfer, "_kernels", lambda self, config: load_backend("cpu"))
    monkeypatch.setattr(priority_updates, "PinnedBlocks", Blocks)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("steps", [False, True])
def test_sample_and_update(way: str, steps: bool) -> None:
    options: dict[str, Any] = {"fields": FIELDS, "batch_size": 8, "n_step": {"n": 3, "gamma": 0.9}}
    sampler = {"kind": "prioritized", "unit": "step"}
    section = config_of(**options, sampler=sampler, transfer={"way": way, "calibrate": False})
    with DeviceStub() as stub, Replay(section, schemas={"main": SCHEMA}, device=DEVICE) as replay:
        for number, length in enumerate([1, 4, 9, 20]):
            replay.add(trajectory(number, length, terminated=number % 2 == 0))
        assert replay.statistics()["transfer"]["way"] == way
        for turn in range(12):
            stub.waits.clear()
            batch = replay.sample()
            assert all(isinstance(batch[name], DeviceTensor) for name in batch)
            values = batch["reward"] if steps else batch["reward"].sum(1)
            mask = batch.mask["reward"] if steps else None
            replay.update_priorities(batch, values.abs() + 0.5, mask)
            assert stub.waits == [], turn
        # Samples are sorted by address on the device, where kernels read rows in their order.
        assert stub.elements.get("sort", 0) == (0 if way == STAGED else 8)
