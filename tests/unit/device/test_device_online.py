"""What programs add to a table in the memory of one device, here the host's, and what is drawn of
it.
"""

import dataclasses
from typing import Any

import pytest
import torch
from ring_cases import (
    COLUMNS,
    PRIORITIZED,
    SAMPLERS,
    assert_rows,
    assert_same,
    device_and_host,
    online,
    step_of,
    stored_slots,
    trajectories,
)

from deepspeed_gear import DeviceReplay
from deepspeed_gear.device.ring_table import RingTable, RingTableSpec
from deepspeed_gear.errors import ConfigError, DataError, SchemaError, ShapeError, StoreError
from deepspeed_gear.ops.records import RingState, Slot


@pytest.mark.parametrize("sampler", ["uniform steps", "prioritized", "prioritized trajectories"])
def test_what_was_added_is_drawn_and_the_oldest_go(sampler: str) -> None:
    with DeviceReplay(online(SAMPLERS[sampler], seed=1), "cpu") as replay:
        with pytest.raises(StoreError, match="must hold a trajectory"):
            replay.sample()
        seen: set[int] = set()
        for turn in range(40):
            steps = 1 + turn % 6
            lengths = torch.tensor([steps, 0, max(1, steps - 2)]) if turn % 3 else None
            replay.add_(trajectories(3, steps, 3 * turn), lengths)
            batch = replay.sample()
            number = batch["task"]
            seen |= set(number.tolist())
            assert not (number % 3 == 1)[number >= 3 * turn].any() or lengths is None
            expected = number * 100 + batch.anchor
            assert_rows(batch, expected)
            last = number * 100 + batch.num_steps - 1
            count = batch.num_steps - batch.anchor
            assert torch.equal(batch["return_to_go"], ((expected + last) * count / 2).float())
            if "prioritized" in sampler:
                replay.update_priorities_(batch, torch.rand(batch.num_samples))
        statistics = replay.statistics()
        assert statistics["steps"] == replay.num_steps >= 60 - 6
        assert statistics["trajectories"] == len(replay)
        assert statistics["refused"] == 0
        replay.check()
        assert len(seen) > 60
        replay.clear()
        assert replay.num_steps == len(replay) == 0
        with pytest.raises(StoreError, match="must hold a trajectory"):
            replay.sample()
        replay.add_(trajectories(2, 4, 900))
        assert set(replay.sample()["task"].tolist()) == {900, 901}


def test_transitions_are_those_of_a_table_in_shared_memory() -> None:
    """Single steps: both tables hold the newest ones, and draw the same."""
    options = {
        "sampler": SAMPLERS["prioritized"],
        "n_step": None,
        "fields": {"following": {"column": "observation", "offset": 1}, "task": {}},
    }
    section = online(
        table={"capacity_steps": 16, "max_length": 1, "capacity_trajectories": 16}, **options
    )
    torch.manual_seed(0)
    with device_and_host(section) as both:
        for turn in range(30):
            columns = trajectories(3, 1, 3 * turn)
            both.device.add_transitions_(*step_of(columns))
            for i in range(3):
                both.host.add({name: values[i].numpy() for name, values in columns.items()})
            expected = both.host.sample()
            got = both.device.sample()
            assert len(both.device) == len(both.host)
            assert set(got["task"].tolist()) <= set(range(3 * turn - 13, 3 * turn + 3))
            assert torch.equal(got["following"][:, 0], (got["task"] * 100 + 1).float())
            assert torch.equal(expected["following"][:, 0], (expected["task"] * 100 + 1).float())
            assert float(got.probability.sum()) > 0


def test_late_columns_are_written_to_what_is_stored() -> None:
    with DeviceReplay(online(), "cpu") as replay:
        replay.add_(trajectories(4, 5))
        columns = {"action": torch.full((3, 6, 2), -1.0), "task": torch.tensor([7, 8, 9])}
        replay.fill_(torch.tensor([2, 99, 0]), columns)
        batch = replay.sample()
        for i, number in enumerate(batch.trajectory_id.tolist()):
            assert (batch["action"][i, 0] == -1) == (number in (0, 2))
            assert int(batch["task"][i]) == {0: 9, 2: 7}.get(number, number)
        with pytest.raises(SchemaError, match="column action"):
            replay.fill_(torch.tensor([1]), {"action": torch.zeros(1, 6, 2, dtype=torch.float64)})
        with pytest.raises(SchemaError, match="must not be filled late"):
            replay.fill_(torch.tensor([1]), {"reward": torch.zeros(1, 6)})
        with pytest.raises(ShapeError, match=r"must be \[1, 6, 2\]"):
            replay.fill_(torch.tensor([1]), {"action": torch.zeros(1, 5, 2)})


def test_what_is_added_between_micro_batches_changes_none_of_them() -> None:
    section = online(PRIORITIZED, seed=4, gradient_accumulation_steps=4, batch_size=32)
    with DeviceReplay(section, "cpu") as replay, DeviceReplay(section, "cpu") as quiet:
        for each in (replay, quiet):
            each.add_(trajectories(9, 6))
        for micro in range(4):
            got = replay.sample()
            expected = quiet.sample()
            assert_same(got, expected)
            if micro < 3:
                with pytest.raises(StoreError, match="between two global batches"):
                    replay.export_table()
            values = torch.rand(8)
            for each, batch in ((replay, got), (quiet, expected)):
                each.update_priorities_(batch, values)
            values.zero_()  # a buffer that its owner uses again
            replay.add_(trajectories(9, 6, 9 * (micro + 1)))
        assert set(replay.sample()["task"].tolist()) <= set(range(27, 45))
        replay.clear()
        replay.add_(trajectories(1, 6, 99))
        assert set(replay.sample()["task"].tolist()) == {99}


@pytest.mark.parametrize(
    ("sampler", "why"),
    [
        ({"kind": "uniform", "unit": "step"}, "nothing was added"),
        ({"kind": "uniform"}, "nothing was added"),
        ({"kind": "uniform", "unit": "step", "anchors": "fits"}, "no anchor"),
        ({**PRIORITIZED, "anchors": "fits", "normalize": "table"}, "no anchor"),
        (PRIORITIZED, "no priority"),
        ({**PRIORITIZED, "normalize": "table"}, "no priority"),
        ({**PRIORITIZED, "normalize": None}, "no priority"),
    ],
)
def test_a_table_without_masses_gives_batches_without_samples(
    sampler: dict[str, Any], why: str
) -> None:
    """And what can be drawn is drawn as soon as it is there."""
    fields = {
        "fields": {**online()["fields"], "observation": {"offset": -2, "length": 3, "pad": "edge"}}
    }
    section = online(sampler, gradient_accumulation_steps=2, **fields)
    with DeviceReplay(section, "cpu") as replay:
        replay.add_(trajectories(3, 2), torch.tensor([0, 0, 0]) if "added" in why else None)
        if "priority" in why:
            for _ in range(8):
                replay.update_priorities_(replay.sample(), torch.zeros(16))
        before = replay.statistics()
        first = int(replay.table.state[RingState.SAMPLES])
        for micro in range(4):
            batch = replay.sample()
            assert batch.sample_number.tolist() == [first + 2 * i + micro % 2 for i in range(16)]
            assert batch.trajectory_id.tolist() == [-1] * 16
            for empty in (
                *(batch[name] for name in batch),
                batch.valid,
                batch.is_weight,
                batch.probability,
            ):
                assert not empty.any()
            assert not any(mask.any() for mask in batch.mask.values())
            assert not batch.clone().valid.any()
            if "priority" in why:
                replay.update_priorities_(batch, torch.ones(16))
        found = replay.statistics()
        assert found["empty_batches"] - before["empty_batches"] == 2
        if "priority" in why:
            assert found["priorities_ignored"] - before["priorities_ignored"] == 64
            assert found["priorities_applied"] == before["priorities_applied"]
        message = f"got '{found['empty_batches']} global batches without samples'; add trajectories"
        with pytest.raises(DataError, match=message):
            replay.check()
        replay.add_(trajectories(3, 6, 100))
        batch = replay.sample()
        assert batch.valid.all()
        assert set(batch["task"].tolist()) <= {100, 101, 102}
        assert bool((batch.is_weight > 0).all())


WHERE: list[tuple[dict[str, Any], Any]] = [
    ({"task": {"min": 2.5, "max": 7}}, lambda n: 3 <= n <= 7),
    ({"task": {"in": [1, 4, 9, 300, 2**70]}}, lambda n: n in (1, 4, 9)),
    ({"task": {"min": -(2.0**70)}, "score": {"max": 0.5}}, lambda n: n / 10 <= 0.5),
    ({"flag": {"in": [1]}}, lambda n: n % 2 == 1),
    ({"task": {"max": -1}}, lambda _: False),
]


@pytest.mark.parametrize(("where", "admits"), WHERE)
@pytest.mark.parametrize("lengths", [None, [4, 3, 0, 4, 2, 4, 4, 1, 4, 4]])
def test_trajectories_that_fail_a_condition_are_not_stored(
    where: dict[str, Any], admits: Any, lengths: list[int] | None
) -> None:
    columns = trajectories(10, 4)
    columns["score"] = torch.arange(10) / 10
    columns["flag"] = torch.arange(10) % 2 == 1
    more = {"score": {"dtype": "float32", "rows": "1"}, "flag": {"dtype": "bool", "rows": "1"}}
    schema = {**COLUMNS, **more}
    made = online(
        {"kind": "uniform", "unit": "step", "where": where}, table={"schema": {"columns": schema}}
    )
    stored = [n for n in range(10) if admits(n) and (lengths is None or lengths[n])]
    with DeviceReplay(made, "cpu") as replay:
        replay.add_(columns, None if lengths is None else torch.tensor(lengths))
        assert len(replay) == len(stored)
        batches = [replay.sample() for _ in range(8)]
        found = {int(n) for batch in batches for n in batch["task"][batch.valid]}
        assert found == set(stored)
        name = next(iter(where))
        with pytest.raises(SchemaError, match=f"column {name} must not be filled"):
            replay.fill_(torch.tensor([0]), {name: columns[name][:1]})


@pytest.mark.parametrize("sampler", ["uniform steps", "prioritized", "by the table", "by length"])
def test_removed_trajectories_are_not_drawn_and_others_stay(sampler: str) -> None:
    with DeviceReplay(online(SAMPLERS[sampler]), "cpu") as replay:
        for turn in range(30):
            replay.add_(trajectories(3, 4, 3 * turn))
            before = replay.num_steps
            ids = torch.tensor([3 * turn + 1, 99_999, -5, 3 * turn + 1])
            replay.remove_(ids)
            assert replay.num_steps == before - 4
            batch = replay.sample()
            assert not (batch.trajectory_id % 3 == 1).any()
            if replay.config.item_sampler.has_priorities:
                replay.update_priorities(batch, torch.rand(32))
            assert (
                replay.num_steps
                == int(stored_slots(replay)[:, Slot.NUM_STEPS].sum())
                == 4 * len(replay)
            )
        assert replay.statistics()["trajectories"] == len(replay) > 8
        with pytest.raises(ShapeError, match=r"ids must be a tensor \[n\], int64"):
            replay.remove_(torch.zeros(1))


def test_steps_that_follow_a_removed_open_trajectory_are_another() -> None:
    rows = trajectories(2, 4)
    with DeviceReplay(online(table={"num_envs": 2}), "cpu") as replay:
        for turn in range(4):
            row, following = step_of(rows, turn)
            replay.add_steps_({**row, "terminated": torch.zeros(2, dtype=torch.bool)}, following)
            if turn == 1:
                replay.remove_(torch.tensor([0]))
                assert (len(replay), replay.num_steps) == (1, 2)
        assert (len(replay), replay.num_steps) == (2, 6)
        batch = replay.sample()
        assert set(batch.trajectory_id.tolist()) == {1, 2}
        assert batch["action"][batch.trajectory_id == 2, 0].min() == 2


@pytest.mark.parametrize("steps", [1, 4, 6])
def test_an_add_is_launched_by_the_steps_that_it_brings(steps: int) -> None:
    """Not by the longest that the table admits, which would be many kernels for few rows."""
    with DeviceReplay(online(), "cpu") as replay:
        table = replay.table
        shapes = []

        def ring_add_(*given: Any) -> None:
            shapes.append(given[-5])
            plain.ring_add_(*given)

        plain = table.ops
        table.ops = dataclasses.replace(plain, ring_add_=ring_add_)
        replay.add_(trajectories(2, steps))
        assert shapes == [[*table.shape[:3], steps]]
        assert table.shape[3] == 6
        assert replay.num_steps == 2 * steps


@pytest.mark.parametrize("what", ["rows", "slots"])
def test_more_rows_or_slots_than_32_bits_number_are_refused(what: str) -> None:
    """Before their memory is asked for."""
    with DeviceReplay(online(), "cpu") as replay:
        table = replay.table
        spec = RingTableSpec(table.schema, 100, 10, 6, table.items, False)
        refused = dataclasses.replace(spec, **{f"num_{what}": 1 << 31})
        with pytest.raises(ConfigError, match=f"{what} must be at most 2147483646.*lower cap"):
            RingTable(refused, table.ops, torch.device("cpu"))
