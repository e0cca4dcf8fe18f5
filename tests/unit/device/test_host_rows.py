"""Tables on a device whose rows lie in host memory: the same batches; memory that cannot be registered."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from gear_support import config_of, lengths_of, write_dataset
from ring_cases import PRIORITIZED, SAMPLERS, assert_same, online, trajectories

from deepspeed_gear import DeviceReplay
from deepspeed_gear.device.host_rows import HostRows, RowSize
from deepspeed_gear.errors import ConfigError, StoreFullError

CPU = torch.device("cpu")
SIZES = {
    "a": RowSize((33, 7), torch.uint8),
    "b": RowSize((5, 3), torch.float32),
    "none": RowSize((0, 4), torch.float64),
    "c": RowSize((100_000,), torch.bfloat16),
}


class Registers:
    """The calls of a runtime, which may fail from the n-th on."""

    def __init__(self, fails_at: int = 1 << 30, reads: bool = True) -> None:
        self.fails_at, self.reads = fails_at, reads
        self.held: dict[int, int] = {}
        self.num_calls = 0

    def reads_host_addresses(self) -> bool:
        return self.reads

    def register(self, begin: int, num_bytes: int) -> int:
        self.num_calls += 1
        if self.num_calls > self.fails_at:
            return 2
        self.held[begin] = num_bytes
        return 0

    def unregister(self, begin: int) -> int:
        del self.held[begin]
        return 0

    def clear_error(self) -> None:
        pass

    def text(self, error: int) -> str:
        return f"error {error}"


def with_rows(made: dict[str, Any], where: str) -> dict[str, Any]:
    made = copy.deepcopy(made)
    made["tables"]["main"]["rows"] = where
    return made


@pytest.mark.parametrize("num_envs", [None, 3])
@pytest.mark.parametrize("sampler", list(SAMPLERS))
def test_batches_are_those_of_rows_on_the_device(sampler: str, num_envs: int | None, tmp_path: Path) -> None:
    made = online(SAMPLERS[sampler], seed=4)
    if num_envs is not None:
        del made["fields"]["return_to_go"]
        made["tables"]["main"]["num_envs"] = num_envs
    with (
        DeviceReplay(with_rows(made, "host"), "cpu") as host,
        DeviceReplay(with_rows(made, "device"), "cpu") as device,
    ):
        for turn in range(25):
            columns = trajectories(3, 4, 3 * turn)
            row = {name: values if name == "task" else values[:, 0] for name, values in columns.items()}
            for replay in (host, device):
                if num_envs is None:
                    replay.add_(columns)
                else:
                    replay.add_steps_(row, {"observation": columns["observation"][:, 1]})
            got, expected = host.sample(), device.sample()
            assert_same(got, expected)
            if host.config.item_sampler.has_priorities:
                for replay, batch in ((host, got), (device, expected)):
                    replay.update_priorities(batch, torch.ones(32) * (1 + turn % 3))
        found, plain = host.statistics(), device.statistics()
        assert found["bytes"] < plain["bytes"] < found["bytes"] + found["host_bytes"]
        assert "host_bytes" not in plain
        host.save(tmp_path / "host")
        device.load(tmp_path / "host")  # where rows lie is no part of the content
        assert_same(device.sample(), host.sample())
        device.save(tmp_path / "device")
        host.clear()
        host.load(tmp_path / "device")
        assert_same(host.sample(), device.sample())


def test_a_data_set_may_lie_in_host_memory(tmp_path: Path) -> None:
    data = write_dataset(tmp_path / "data", lengths_of(20))
    made = config_of(sampler=PRIORITIZED, fields={"observation": {"length": 4}, "task": {}}, batch_size=32)
    made["tables"] = {"main": {"data": str(data), "placement": "device"}}
    with (
        DeviceReplay(with_rows(made, "host"), "cpu") as host,
        DeviceReplay(with_rows(made, "device"), "cpu") as device,
    ):
        for _ in range(3):
            assert_same(host.sample(), device.sample())


def test_all_columns_are_registered_and_begin_with_zeros() -> None:
    runtime = Registers()
    rows = HostRows(SIZES, CPU, "gear.tables.main", runtime)
    for name, size in SIZES.items():
        column = rows.columns[name]
        assert (tuple(column.shape), column.dtype) == (size.shape, size.dtype)
        assert not column.any()
        if column.numel():
            assert column.data_ptr() % 128 == 0
            begin, end = column.data_ptr(), column.data_ptr() + column.nbytes
            assert any(at <= begin and end <= at + held for at, held in runtime.held.items())
    view = rows.columns["b"]
    rows.close()
    rows.close()
    assert runtime.held == {}
    assert not view.fill_(1.0).isnan().any()


@pytest.mark.parametrize(
    ("runtime", "match"),
    [
        (Registers(fails_at=0), r"main\.rows must be \"device\" here: column a .* failed: error 2"),
        (Registers(reads=False), "column a cannot be used in place: the device does not read"),
    ],
)
def test_memory_that_cannot_be_registered_is_an_error(runtime: Registers, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        HostRows(SIZES, CPU, "gear.tables.main", runtime)
    assert runtime.held == {}


def test_more_rows_than_the_host_has_are_an_error_before_anything_is_allocated() -> None:
    with pytest.raises(StoreFullError):
        HostRows({"a": RowSize((1 << 50,), torch.uint8)}, CPU, "gear.tables.main")


def test_rows_of_a_table_in_host_memory_are_not_placed() -> None:
    made = with_rows(online(), "host")
    made["tables"]["main"]["placement"] = "host"
    with pytest.raises(ConfigError, match=r"main\.rows must not be given for a table in host memory"):
        DeviceReplay(made, "cpu")
