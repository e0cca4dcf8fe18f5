"""Tables on a device whose rows lie in host memory: the same batches; memory that cannot be
registered.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ring_cases import SAMPLERS, add_some, assert_same, online, trajectories

from deepspeed_gear import DeviceReplay
from deepspeed_gear.device.ring_table import HostRows
from deepspeed_gear.errors import ConfigError, StoreFullError

CPU = torch.device("cpu")
SIZES = {
    "a": ((33, 7), torch.uint8),
    "b": ((5, 3), torch.float32),
    "none": ((0, 4), torch.float64),
    "c": ((100_000,), torch.bfloat16),
}


def runtime_of(error: int = 0, reads: bool = True) -> Any:
    """The calls of a runtime, which may fail; `held` is what is registered."""
    held: dict[int, int] = {}

    def register(begin: int, num_bytes: int) -> int:
        held.update({} if error else {begin: num_bytes})
        return error

    calls = {"register": register, "unregister": lambda begin: int(held.pop(begin) == 0)}
    calls |= {
        "reads_host_addresses": lambda: reads,
        "clear_error": lambda: None,
        "text": "error {}".format,
    }
    return SimpleNamespace(held=held, **calls)


@pytest.mark.parametrize("num_envs", [None, 3])
@pytest.mark.parametrize("sampler", list(SAMPLERS))
def test_batches_are_those_of_rows_on_the_device(
    sampler: str, num_envs: int | None, tmp_path: Path
) -> None:
    table = {} if num_envs is None else {"num_envs": num_envs}
    both = [
        online(SAMPLERS[sampler], seed=4, table={**table, "rows": rows})
        for rows in ("host", "device")
    ]
    with DeviceReplay(both[0], "cpu") as host, DeviceReplay(both[1], "cpu") as device:
        for turn in range(25):
            for replay in (host, device):
                add_some(replay, trajectories(3, 4, 3 * turn))
            got = host.sample()
            expected = device.sample()
            assert_same(got, expected)
            if host.config.item_sampler.has_priorities:
                for replay, batch in ((host, got), (device, expected)):
                    replay.update_priorities(batch, torch.ones(32) * (1 + turn % 3))
        found = host.statistics()
        plain = device.statistics()
        assert found["bytes"] < plain["bytes"] < found["bytes"] + found["host_bytes"]
        assert "host_bytes" not in plain
        host.save(tmp_path / "host")
        device.load(tmp_path / "host")  # where rows lie is no part of the content
        assert_same(device.sample(), host.sample())
        device.save(tmp_path / "device")
        host.clear()
        host.load(tmp_path / "device")
        assert_same(host.sample(), device.sample())


def test_all_columns_are_registered_and_begin_with_zeros() -> None:
    runtime = runtime_of()
    rows = HostRows(SIZES, CPU, "gear.tables.main", runtime)
    for name, (shape, dtype) in SIZES.items():
        column = rows.columns[name]
        assert (tuple(column.shape), column.dtype) == (shape, dtype)
        assert not column.any()
        if column.numel():
            assert column.data_ptr() % 128 == 0
            begin = column.data_ptr()
            end = column.data_ptr() + column.nbytes
            registered = (range(at, at + held) for at, held in runtime.held.items())
            inside = [range(max(begin, one.start), min(end, one.stop)) for one in registered]
            assert sum(map(len, inside)) == column.nbytes  # no page is registered twice
    view = rows.columns["b"]
    rows.close()
    rows.close()
    assert runtime.held == {}
    assert not view.fill_(1.0).isnan().any()


@pytest.mark.parametrize(
    ("runtime", "match"),
    [
        (runtime_of(error=2), r"main\.rows must be \"device\" here: column a .* failed: error 2"),
        (runtime_of(reads=False), "column a cannot be used in place: the device does not read"),
    ],
)
def test_memory_that_cannot_be_registered_is_an_error(runtime: Any, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        HostRows(SIZES, CPU, "gear.tables.main", runtime)
    assert runtime.held == {}
    with pytest.raises(StoreFullError):
        HostRows({"a": ((1 << 50,), torch.uint8)}, CPU, "gear.tables.main")
