"""A mixture of tables on a device, a data set and added steps as RLPD, against the same on the
host.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from gear_support import SCHEMA, lengths_of, trajectory, write_dataset
from ring_cases import assert_same, assert_traced, device_and_host, online, step_of, trajectories
from torch import Tensor

from deepspeed_gear import DeviceReplay
from deepspeed_gear.errors import CheckpointError, ConfigError, StoreError

ROOM = {"capacity_steps": 400, "max_length": 12, "capacity_trajectories": 60, "remove": "fifo"}
FIELDS = {
    "observation": {"offset": -2, "length": 4, "pad": "edge"},
    "next_observation": {"column": "observation", "offset": "n_step"},
    "action": {},
    "task": {},
}
SAMPLERS: dict[str, dict[str, Any]] = {
    "steps": {"unit": "step"},
    "stratified trajectories": {"kind": "uniform", "stratified": True},
    "prioritized": {"kind": "prioritized", "unit": "step", "beta": {"linear": [0.2, 1.0, 5]}},
    "by the table": {"kind": "prioritized", "unit": "step", "normalize": "table"},
    "epochs": {"kind": "epoch", "unit": "step"},
}


def section(
    data: Path, of: dict[str, Any], shares: dict[str, Any] | None = None, **options: Any
) -> dict[str, Any]:
    tables = {
        "offline": {"data": str(data), "placement": "device"},
        "online": {**ROOM, "placement": "device"},
    }
    sampler = {"kind": "mixture", "shares": shares or {"offline": 0.25, "online": 0.75}, "of": of}
    made = {
        "tables": tables,
        "sampler": sampler,
        "fields": FIELDS,
        "n_step": {"n": 3, "gamma": 0.9},
    }
    return {**made, "batch_size": 24, "seed": 5, **options}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("mixture") / "set", lengths_of(15, most=9))


def added(number: int, steps: int) -> dict[str, Any]:
    return trajectory(number, steps, terminated=number % 2 == 0)


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("sampler", list(SAMPLERS))
def test_batches_are_those_of_tables_in_host_memory(
    sampler: str, accumulation: int, data: Path
) -> None:
    made = section(data, SAMPLERS[sampler], gradient_accumulation_steps=accumulation)
    with device_and_host(made, {"online": SCHEMA}) as both:
        device = both.device
        host = both.host
        with pytest.raises(
            StoreError, match="the table online on the device must hold a trajectory"
        ):
            device.sample()
        for number in range(7):
            both.add(added(number, 2 + number), "online")
        for turn in range(5 * accumulation):
            both.sample()
            got, expected = both.batches
            for name in ("source", "sample_index", "epoch"):
                assert torch.equal(getattr(got, name), getattr(expected, name))
            if device.config.item_sampler.has_priorities and (
                accumulation == 1 or turn % 4
            ):  # of some parts
                both.report(torch.rand(got.num_samples) * 3)
        assert len(device) == len(host) == 22
        found = device.statistics()
        assert (
            found["steps"] == host.num_steps == sum(of["steps"] for of in found["tables"].values())
        )
        if device.config.item_sampler.has_priorities and accumulation == 1:
            host.sample()  # reports are applied by the next selection
            assert found["priorities_applied"] == host.statistics()["priorities_applied"]
        device.check()


def test_a_transform_gets_the_keys_of_each_table(data: Path) -> None:
    def transform(batch: Any, key: Tensor) -> Any:
        batch["noisy"] = batch["action"] + (key % 7).float()[:, None]
        return batch

    with device_and_host(section(data, {"unit": "step"}), {"online": SCHEMA}) as both:
        both.add(added(1, 5), "online")
        plain = set(both.sample())
        both.device.transform = both.host.transform = transform
        for _ in range(3):
            assert set(both.sample()) == plain | {"noisy"}
        both.device.transform = None
        assert set(both.device.sample()) == plain


def test_a_save_has_all_tables_and_goes_on(data: Path, tmp_path: Path) -> None:
    made = section(data, SAMPLERS["prioritized"])
    schemas = {"online": SCHEMA}
    with (
        DeviceReplay(made, "cpu", schemas=schemas) as replay,
        DeviceReplay(made, "cpu", schemas=schemas) as other,
    ):
        for number in range(5):
            columns = added(number, 3 + number)
            replay.add_({name: torch.as_tensor(values)[None] for name, values in columns.items()})
            batch = replay.sample()
            replay.update_priorities(batch, torch.rand(24))
        state = replay.save(tmp_path)
        exported = replay.export_table()
        expected = [replay.sample().clone() for _ in range(3)]
        other.load(tmp_path, state)
        for batch in expected:
            assert_same(other.sample(), batch)
        other.import_table(exported)
        assert_same(other.sample(), expected[0])
        other.load_state_dict(state)
        assert_same(other.sample(), expected[0])
        assert (tmp_path / "online" / "shard-0" / "content.pt").exists()
        assert (tmp_path / "offline" / "shard-0" / "content.pt").exists()
        with pytest.raises(CheckpointError, match="train must have the entry 'online'"):
            other.load_state_dict({**state, "train": {"offline": state["train"]["offline"]}})


def two_tables() -> dict[str, Any]:
    shares = {"kind": "mixture", "shares": {"a": 0.5, "b": 0.5}, "of": {"unit": "step"}}
    made = online(shares, table={"num_envs": 2, "capacity_steps": 60})
    table = made["tables"]["main"]
    made["tables"] = {"a": {**table, "num_envs": None}, "b": table}
    return made


def test_a_table_that_is_added_to_is_named_where_there_are_several() -> None:
    with DeviceReplay(two_tables(), "cpu") as replay:
        columns = trajectories(2, 4)
        with pytest.raises(
            ConfigError, match=r"table must be given where there are several.*one of a, b"
        ):
            replay.add_(columns)
        with pytest.raises(ConfigError, match="table must be one of a, b"):
            replay.add_(columns, table="c")
        replay.add_(columns, table="a")
        step = step_of(columns)
        replay.add_steps_(*step, table="b")
        with pytest.raises(StoreError, match=r"set gear.tables.a.num_envs"):
            replay.add_steps_(*step, table="a")
        assert {name: int(table.state[6]) for name, table in replay.tables.items()} == {
            "a": 8,
            "b": 2,
        }
        assert replay.sample().source.tolist() == [0] * 16 + [1] * 16
        replay.fill_(torch.tensor([0]), {"task": torch.tensor([77])}, table="b")
        assert 77 in replay.sample()["task"][16:].tolist()
        replay.clear(table="a")
        with pytest.raises(StoreError, match="the table a on the device must hold"):
            replay.sample()


def test_a_step_of_a_mixture_is_traced_without_a_break() -> None:
    def step(replay: DeviceReplay, batch: Any, columns: dict[str, Tensor]) -> Tensor:
        replay.add_(columns, table="a")
        replay.sample_(batch)
        return (batch["reward"] * batch.is_weight * batch.probability).sum()

    assert_traced(
        two_tables(),
        step,
        6,
        lambda replay: replay.add_steps_(*step_of(trajectories(2, 4)), table="b"),
    )


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (
            {"shares": {"a": {"linear": [0, 1, 9]}, "b": {"linear": [1, 0, 9]}}},
            "shares.a must be a number",
        ),
        ({"shares": {"a": 0.99, "b": 0.01}}, "shares.a must be a whole number of 32 samples"),
        ({"shares": {"a": 1.0, "b": 0.0}}, r"got 0.0; .*: use 0.03125 \(1 samples\)"),
        (
            {"shares": {"a": 1.0}},
            "tables.b.placement must be .host. for a table that is not sampled",
        ),
        ({"of": {"kind": "fifo"}}, "kind must be one of"),
    ],
)
def test_a_mixture_that_cannot_be_is_refused(change: dict[str, Any], match: str) -> None:
    made = two_tables()
    made["sampler"] |= change
    with pytest.raises(ConfigError, match=match):
        DeviceReplay(made, "cpu")
