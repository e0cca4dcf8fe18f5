"""No hot path of a table on a device waits for the device, or for another replica."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import device_steps
import pytest
import torch
from device_stub import DEVICE, DeviceStub, held, on_device
from gear_support import config_of, lengths_of, write_dataset
from torch import Tensor

from deepspeed_gear import DeviceReplay
from deepspeed_gear.distributed.topology import RankCoordinates, Topology
from deepspeed_gear.errors import ConfigError
from deepspeed_gear.replay import device_replay
from deepspeed_gear.sampling.batch_sizes import BatchInfo

REPLICAS = 2
STEPS = 4


Replicate = Callable[[int], None]


@pytest.fixture
def replicate(monkeypatch: pytest.MonkeyPatch) -> Replicate:
    """A function that makes the next replays those of one of several replicas."""
    resolve = device_replay.resolve_plan

    def become(replica: int) -> None:
        def plan_of(*arguments: Any, **options: Any) -> Any:
            plan = resolve(*arguments, **options)
            places = tuple(RankCoordinates(number, REPLICAS) for number in range(REPLICAS))
            topology = Topology(replica, places, (0,) * REPLICAS)
            info = BatchInfo(plan.info.micro // REPLICAS, plan.info.accumulation, REPLICAS)
            return dataclasses.replace(plan, topology=topology, info=info)

        monkeypatch.setattr(device_replay, "resolve_plan", plan_of)

    return become


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_replay, "usable_device", torch.device)
    monkeypatch.setattr(device_replay, "ops_for_device", lambda config, ops, device: ops)


def columns(turn: int) -> dict[str, Tensor]:
    return {name: on_device(values) for name, values in device_steps.columns(turn, "cpu").items()}


def waits_of(section: dict[str, Any], first: int = 0) -> list[str]:
    """Take steps of all that a training loop calls; return where they waited."""
    with DeviceStub() as stub, DeviceReplay(section, DEVICE) as replay:
        batches = [replay.new_batch() for _ in range(replay.batch_info.accumulation)]
        added = [columns(first + turn) for turn in range(STEPS)]
        lengths = on_device(torch.tensor([4, 0, 1, 2, 3, 4, 4, 4]))
        following = {"observation": added[0]["observation"][:, 1]}
        row = {name: values[:, 0] for name, values in added[0].items()}
        mask = on_device(torch.tensor([True, False] * (device_steps.ENVS // 2)))
        stub.waits.clear()
        for turn in range(STEPS):
            if replay.table.num_envs:
                replay.end_steps_(mask)
                replay.add_steps_(
                    row, following, mask=mask if turn % 2 else None, autoreset="next_step"
                )
            elif not replay.config.resolved_tables["main"].data:
                replay.add_(added[turn], lengths if turn % 2 else None)
                replay.fill_(batches[0].trajectory_id, {"frame": batches[0]["late"]})
            for batch in batches:
                replay.sample_(batch)
                if replay.config.item_sampler.has_priorities:
                    values = (
                        batch["observation"].sum(2).abs() if turn % 2 else batch["reward"].abs()
                    )
                    replay.update_priorities_(batch, values)
            replay.sample()
        assert stub.elements.get("min", 0) <= device_steps.BATCH  # no scan of all items
        return list(stub.waits)


def section_of(sampler: str) -> dict[str, Any]:
    section = device_steps.section(sampler)
    section["fields"] = {
        **device_steps.FIELDS,
        "late": {"column": "frame", "length": device_steps.STEPS},
    }
    return section


@pytest.mark.parametrize(
    "wait",
    [
        lambda there: there[0, 0].item(),
        lambda there: bool(there.any()),
        lambda there: there.tolist(),
        lambda there: there.cpu(),
        lambda there: there[there > 1],
        lambda there: torch.nonzero(there),
        lambda there: torch.equal(there, there),
        lambda there: there[:, torch.tensor([0, 2])],
        lambda there: there.copy_(torch.ones(2, 3)),
        lambda there: torch.ones(3).to(DEVICE),
        lambda there: torch.tensor([1, 2], device=DEVICE),
    ],
)
def test_the_stub_notes_a_wait(wait: Callable[[Tensor], object]) -> None:
    with DeviceStub() as stub:
        there = on_device(torch.arange(6.0).view(2, 3))
        there[0, 1] = 7.0
        torch.where(there > 1, there, 0.0).sum(1)
        there[torch.zeros(2, dtype=torch.int64, device=DEVICE)] += 1
        torch.ones(2, 3, pin_memory=False).to(DEVICE, non_blocking=True)
        assert stub.waits == []
        wait(there)
        assert len(stub.waits) == 1
        with pytest.raises(AssertionError, match="uses a list"):
            there[:, [0, 2]].sum()


@pytest.mark.parametrize(("replica", "accumulation"), [(None, 1), (None, 2), (0, 1), (1, 1)])
@pytest.mark.parametrize("sampler", [*device_steps.SAMPLERS, *device_steps.LIMITED])
def test_a_step(sampler: str, replica: int | None, accumulation: int, replicate: Replicate) -> None:
    """Also of a replica among several, each with a table of its own."""
    if replica is not None:
        replicate(replica)
    section = {**section_of(sampler), "gradient_accumulation_steps": accumulation}
    assert waits_of(section, (replica or 0) * STEPS) == []


@pytest.mark.parametrize("sampler", device_steps.SAMPLERS)
def test_a_step_of_environments(sampler: str) -> None:
    section = section_of(sampler)
    section["tables"]["main"] |= {"num_envs": device_steps.ENVS}
    assert waits_of(section) == []


@pytest.mark.parametrize(("adds", "accumulation"), [("steps", 1), ("mixture", 1), ("mixture", 2)])
def test_replicas_draw_alone_and_share_no_random_word(
    adds: str, accumulation: int, replicate: Replicate
) -> None:
    """Each replica has tables, or `num_envs` environments, of its own."""
    section = {**section_of("prioritized"), "gradient_accumulation_steps": accumulation}
    of = section["sampler"]
    table = section["tables"]["main"]
    names = ["main"]
    if adds == "steps":
        table["num_envs"] = device_steps.ENVS
    else:
        names = ["a", "b"]
        section["sampler"] = {"kind": "mixture", "shares": {"a": 0.25, "b": 0.75}, "of": of}
        section["tables"] = dict.fromkeys(names, table)
    drawn: list[tuple[int, int]] = []  # table and number of each sample
    for replica in range(REPLICAS):
        replicate(replica)
        added = columns(replica)
        with DeviceStub() as stub, DeviceReplay(section, DEVICE) as replay:
            assert replay.table.num_envs == (device_steps.ENVS if adds == "steps" else 0)
            batches = [replay.new_batch() for _ in range(accumulation)]
            stub.waits.clear()
            for turn in range(STEPS):
                row = {name: values[:, turn] for name, values in added.items()}
                for name in names:
                    if adds == "steps":
                        replay.add_steps_(row, {"observation": added["observation"][:, turn + 1]})
                    else:
                        replay.add_(added, table=name)
                for batch in batches:
                    replay.sample_(batch)
                    replay.update_priorities_(batch, batch["reward"].abs() + batch.probability)
            assert stub.waits == []
            for batch in batches:
                source = [0] * batch.num_samples if adds == "steps" else held(batch.source).tolist()
                drawn += zip(source, held(batch.sample_number).tolist(), strict=True)
    counts = [sum(source == index for source, _ in drawn) for index in range(len(names))]
    batch_size = device_steps.BATCH
    assert counts == ([batch_size] if adds == "steps" else [batch_size // 4, batch_size * 3 // 4])
    assert len(set(drawn)) == len(drawn)


def of_data(tmp_path: Path, sampler: dict[str, Any]) -> dict[str, Any]:
    data = write_dataset(tmp_path / "data", lengths_of(20))
    section = config_of(
        sampler=sampler, fields={"observation": {"length": 4}, "reward": {}}, batch_size=32
    )
    return {**section, "tables": {"main": {"data": str(data), "placement": "device"}}}


@pytest.mark.parametrize("sampler", ["prioritized", "table"])
def test_a_step_of_replicas_with_the_same_data_set(
    sampler: str, replicate: Replicate, tmp_path: Path
) -> None:
    replicate(1)
    assert waits_of(of_data(tmp_path, device_steps.SAMPLERS[sampler])) == []


def test_top_k_of_copies_of_a_data_set_is_refused(replicate: Replicate, tmp_path: Path) -> None:
    replicate(1)
    with pytest.raises(
        ConfigError, match=r'must not be "top_k" .* on the devices of 2 replicas.*"host"'
    ):
        DeviceReplay(of_data(tmp_path, {"kind": "top_k", "unit": "step"}), DEVICE)


def test_replicas_with_the_same_data_set_share_the_epochs_of_one_process(
    replicate: Replicate, tmp_path: Path
) -> None:
    section = of_data(tmp_path, {"kind": "epoch", "unit": "step"})
    assert waits_of(section) == []

    def drawn() -> tuple[list[list[Any]], dict[str, Any]]:
        with DeviceReplay(section, "cpu") as replay:
            batches = [replay.sample().clone() for _ in range(24)]
            state = replay.state_dict()
        names = ("trajectory_id", "anchor", "epoch", "sample_number", "sample_index")
        return [[getattr(batch, name).tolist() for name in names] for batch in batches], state

    whole, state = drawn()
    assert max(max(epoch) for _, _, epoch, _, _ in whole) > 0
    parts = []
    for replica in range(REPLICAS):
        replicate(replica)
        found, own_state = drawn()
        assert own_state["train"] == state["train"]
        parts.append(found)
    for one, *of_replicas in zip(whole, *parts, strict=True):
        joined = [
            [value for values in zip(*columns, strict=True) for value in values]
            for columns in zip(*of_replicas, strict=True)
        ]
        assert one == joined
