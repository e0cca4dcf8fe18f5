"""A table in the memory of one device, here the host's: the batches of a table in shared memory, and more."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from gear_support import config_of, lengths_of, write_dataset
from torch import Tensor

from deepspeed_gear import DeviceReplay, Replay
from deepspeed_gear.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    GearError,
    SchemaError,
    ShapeError,
    StoreError,
)
from deepspeed_gear.ops.constants import RING_SAMPLES

WINDOWS = {
    "observation": {"offset": -3, "length": 5, "normalize": "mean_std"},
    "action": {"offset": -3, "length": 5, "align": "right", "pad": "edge"},
    "following": {"column": "observation", "offset": 1},
    "return_to_go": {},
    "timestep": {"offset": -3, "length": 5},
}
COLUMNS = {
    "observation": {"dtype": "float32", "shape": [3], "role": "observation", "rows": "T+1"},
    "action": {"dtype": "float32", "shape": [2], "role": "action"},
    "reward": {"dtype": "float32", "role": "reward"},
    "terminated": {"dtype": "bool", "role": "terminated"},
    "truncated": {"dtype": "bool", "role": "truncated"},
    "task": {"dtype": "int64", "rows": "1"},
}
PRIORITIZED = {"kind": "prioritized", "unit": "step", "beta": {"linear": [0.2, 1.0, 7]}}
SAMPLERS: dict[str, dict[str, Any]] = {
    "uniform steps": {"kind": "uniform", "unit": "step"},
    "trajectories": {"kind": "uniform", "stratified": True},
    "by length": {"kind": "length"},
    "prioritized": PRIORITIZED,
    "by the table": {**PRIORITIZED, "normalize": "table", "anchors": {"every": 2}},
    "not normalized": {**PRIORITIZED, "normalize": None, "stratified": True},
    "prioritized trajectories": {"kind": "prioritized", "initial": 2.5, "normalize": "table"},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("data") / "set", lengths_of(40), {"eval": 0.2})


def on_device(section: dict[str, Any], **table: Any) -> dict[str, Any]:
    """Put the table of a section on devices."""
    (name, options), *_ = section.get("tables", {"main": {"data": section.get("data")}}).items()
    rest = {key: value for key, value in section.items() if key not in ("data", "tables")}
    return {**rest, "tables": {name: {**options, "placement": "device", **table}}}


def online(sampler: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    table = {"capacity_steps": 60, "max_length": 6, "remove": "fifo", "placement": "device"}
    table |= {"schema": {"columns": COLUMNS}, **options.pop("table", {})}
    fields = {
        "observation": {"offset": -1, "length": 2},
        "following": {"column": "observation", "offset": "n_step"},
        "action": {},
        "reward": {},
        "task": {},
        "return_to_go": {},
    }
    section = {"tables": {"main": table}, "sampler": sampler or SAMPLERS["uniform steps"], "batch_size": 32}
    return {**section, "fields": fields, "n_step": {"n": 3, "gamma": 0.9}, **options}


def trajectories(count: int, steps: int, first: int = 0) -> dict[str, Tensor]:
    """Trajectories whose values say which they are, and which step."""
    number = torch.arange(first, first + count)
    step = number[:, None] * 100 + torch.arange(steps + 1)
    flags = torch.zeros(count, steps, dtype=torch.bool)
    ends = flags.clone()
    ends[:, -1] = number % 2 == 0
    return {
        "observation": step[..., None].float().expand(-1, -1, 3).contiguous(),
        "action": step[:, :-1, None].float().expand(-1, -1, 2).contiguous(),
        "reward": step[:, :-1].float(),
        "terminated": ends,
        "truncated": flags,
        "task": number,
    }


def assert_same(got: Any, expected: Any) -> None:
    assert torch.equal(got.id, expected.id)
    assert torch.equal(got.anchor, expected.anchor)
    assert torch.equal(got.number, expected.number)
    assert torch.equal(got.weight, expected.weight)
    assert torch.equal(got.probability, expected.probability)
    assert set(got) == set(expected)
    for name in expected:
        assert torch.equal(got[name], expected[name]), name
        if name in expected.mask:
            assert torch.equal(got.mask[name], expected.mask[name]), name


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_data_set_gives_the_batches_of_shared_memory(
    data: Path, sampler: str, backend: str, accumulation: int
) -> None:
    section = config_of(
        data, sampler=SAMPLERS[sampler], fields=WINDOWS, batch_size=24, backend=backend, seed=5
    )
    section["gradient_accumulation_steps"] = accumulation
    torch.manual_seed(0)
    with Replay(section) as host, DeviceReplay(on_device(section), "cpu") as device:
        for _ in range(20 if backend == "cpu" else 4):
            for _ in range(accumulation):
                expected, got = host.sample(), device.sample()
                assert_same(got, expected)
                if "prioritized" in sampler or "table" in sampler or "normalized" in sampler:
                    values = torch.rand(got.num_samples) * 3
                    host.update_priorities(expected, values)
                    device.update_priorities_(got, values)
        assert len(device) == len(host)
        assert device.num_steps == host.num_steps


def test_a_transform_gets_the_keys_of_shared_memory(data: Path) -> None:
    section = config_of(data, sampler=SAMPLERS["uniform steps"], fields=WINDOWS, batch_size=8, seed=5)

    def transform(batch: Any, key: Tensor) -> Any:
        batch["noisy"] = batch["observation"] + (key % 7).float()[:, None, None]
        return batch

    with Replay(section) as host, DeviceReplay(on_device(section), "cpu") as device:
        plain = set(device.sample())
        host.sample()
        host.transform = device.transform = transform
        for _ in range(5):
            assert_same(device.sample(), host.sample())
        device.transform = None
        assert set(device.sample()) == plain


@pytest.mark.parametrize("sampler", ["uniform steps", "trajectories", "by the table"])
def test_a_pass_over_a_split_is_that_of_shared_memory(data: Path, sampler: str) -> None:
    section = config_of(data, sampler=SAMPLERS[sampler], fields=WINDOWS, batch_size=7, seed=5)
    with Replay(section) as host, DeviceReplay(on_device(section), "cpu") as device:
        assert device.num_batches("eval") == host.num_batches("eval")
        for _ in range(2):
            passes = zip(device.iterator("eval"), host.iterator("eval"), strict=True)
            for got, expected in passes:
                assert_same(got, expected)
                assert torch.equal(got.valid, expected.valid)
                assert torch.equal(got.epoch, expected.epoch)
        assert_same(device.sample(), host.sample())
        with pytest.raises(ConfigError, match="must be one of train, eval"):
            device.iterator("test")


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
            assert torch.equal(batch["action"][:, 0], expected.float())
            assert torch.equal(batch["observation"][:, 1, 0], expected.float())
            before = torch.where(batch.anchor > 0, expected - 1, 0)
            assert torch.equal(batch["observation"][:, 0, 0], before.float())
            ahead = torch.minimum(torch.tensor(3), batch.num_steps - batch.anchor)
            assert torch.equal(batch["following"][:, 0], (expected + ahead).float())
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
    section = online(table={"capacity_steps": 16, "max_length": 1, "capacity_trajectories": 16}, **options)
    table = {name: value for name, value in section["tables"]["main"].items() if name != "placement"}
    torch.manual_seed(0)
    with DeviceReplay(section, "cpu") as device, Replay({**section, "tables": {"main": table}}) as host:
        for turn in range(30):
            columns = trajectories(3, 1, 3 * turn)
            rows = {name: values[:, 0] if name != "task" else values for name, values in columns.items()}
            device.add_transitions_(rows, {"observation": columns["observation"][:, 1]})
            for i in range(3):
                host.add({name: values[i].numpy() for name, values in columns.items()})
            expected, got = host.sample(), device.sample()
            assert len(device) == len(host)
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
        for i, number in enumerate(batch.id.tolist()):
            assert (batch["action"][i, 0] == -1) == (number in (0, 2))
            assert int(batch["task"][i]) == {0: 9, 2: 7}.get(number, number)
        with pytest.raises(SchemaError, match="column action"):
            replay.fill_(torch.tensor([1]), {"action": torch.zeros(1, 6, 2, dtype=torch.float64)})
        with pytest.raises(SchemaError, match="must not come late"):
            replay.fill_(torch.tensor([1]), {"reward": torch.zeros(1, 6)})
        with pytest.raises(ShapeError, match=r"must be \[1, 6, 2\]"):
            replay.fill_(torch.tensor([1]), {"action": torch.zeros(1, 5, 2)})


def test_what_is_added_between_micro_batches_changes_none_of_them() -> None:
    section = online(PRIORITIZED, seed=4, gradient_accumulation_steps=4, batch_size=32)
    with DeviceReplay(section, "cpu") as replay, DeviceReplay(section, "cpu") as quiet:
        for each in (replay, quiet):
            each.add_(trajectories(9, 6))
        for micro in range(4):
            got, expected = replay.sample(), quiet.sample()
            assert_same(got, expected)
            if micro < 3:
                with pytest.raises(StoreError, match="between two global batches"):
                    replay.state_dict()
            values = torch.rand(8)
            for each, batch in ((replay, got), (quiet, expected)):
                each.update_priorities_(batch, values)
            values.zero_()  # a buffer that its owner uses again
            replay.add_(trajectories(9, 6, 9 * (micro + 1)))
        assert set(replay.sample()["task"].tolist()) <= set(range(27, 45))
        replay.clear()
        replay.add_(trajectories(1, 6, 99))
        assert set(replay.sample()["task"].tolist()) == {99}


def test_only_batches_of_the_training_stream_have_priorities(data: Path) -> None:
    section = on_device(config_of(data, sampler=PRIORITIZED, fields=WINDOWS, batch_size=8))
    with DeviceReplay(section, "cpu") as replay, DeviceReplay(section, "cpu") as other:
        state = replay.table.sums.clone()
        for batch in (next(replay.iterator("eval")), other.sample(), replay.sample().clone()):
            with pytest.raises(DataError, match="must be"):
                replay.update_priorities_(batch, torch.ones(8))
        assert torch.equal(replay.table.sums, state)
        for change in (replay.clear, lambda: replay.add_({}), lambda: replay.fill_(torch.zeros(1), {})):
            with pytest.raises(StoreError, match="must not be changed"):
                change()
        batch = replay.sample()
        replay.update_priorities_(batch, torch.full((8,), 1e-60, dtype=torch.float64))
        items = replay.table.priorities[batch.records[:, 3] + batch.anchor]
        assert bool((items > 0).all())


def test_an_empty_state_is_empty() -> None:
    with DeviceReplay(online(), "cpu") as replay:
        empty = replay.state_dict()
        replay.add_(trajectories(2, 3))
        replay.load_state_dict(empty)
        with pytest.raises(StoreError, match="must hold a trajectory"):
            replay.sample()
        half = {**empty, "content": {k: v for k, v in empty["content"].items() if k != "sums"}}
        with pytest.raises(CheckpointError, match="content"):
            replay.load_state_dict(half)


def test_old_batches_fail_in_a_late_backward_pass() -> None:
    scale = torch.nn.Parameter(torch.ones(3))
    with DeviceReplay(online(PRIORITIZED), "cpu") as replay:
        replay.add_(trajectories(5, 6))
        batch = replay.new_batch()
        replay.sample_(batch)
        loss = (batch.weight * (batch["following"] * scale).sum(1)).sum()
        replay.sample_(batch)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_whole_step_is_traced_without_a_break() -> None:
    """Adding, drawing, training and updating in one graph of torch.compile, against the same without."""
    weights = torch.nn.Parameter(torch.zeros(3))

    def step(replay: DeviceReplay, batch: Any, columns: dict[str, Tensor]) -> Tensor:
        replay.add_(columns)
        replay.sample_(batch)
        error = (batch["following"] @ weights - batch["return_n"]).abs()
        replay.update_priorities_(batch, error)
        return (batch.weight * batch.valid * error).sum()

    torch._dynamo.reset()
    found = []
    for run in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        with DeviceReplay(online(PRIORITIZED, seed=3), "cpu") as replay:
            batch = replay.new_batch()
            losses = [run(replay, batch, trajectories(3, 4, 3 * turn)) for turn in range(12)]
            found.append((torch.stack(losses), batch.id.clone(), replay.table.state.clone()))
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


def without_masses(replay: DeviceReplay, why: str) -> None:
    """Add trajectories of which none can be drawn."""
    if why == "nothing was added":
        replay.add_(trajectories(3, 4), torch.tensor([0, 0, 0]))
    elif why == "no anchor":
        replay.add_(trajectories(3, 2))
    else:
        replay.add_(trajectories(1, 2))
        for _ in range(4):
            replay.update_priorities_(replay.sample(), torch.zeros(16))


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
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_table_without_masses_gives_batches_without_samples(
    sampler: dict[str, Any], why: str, backend: str
) -> None:
    """And what can be drawn is drawn as soon as it is there."""
    fields = {"fields": {**online()["fields"], "observation": {"offset": -2, "length": 3, "pad": "edge"}}}
    section = online(sampler, gradient_accumulation_steps=2, backend=backend, **fields)
    with DeviceReplay(section, "cpu") as replay:
        without_masses(replay, why)
        before = replay.statistics()
        first = int(replay.table.state[RING_SAMPLES])
        for micro in range(4):
            batch = replay.sample()
            assert batch.number.tolist() == [
                first + 16 * (micro // 2) * 2 + 2 * i + micro % 2 for i in range(16)
            ]
            assert batch.id.tolist() == [-1] * 16
            for empty in (*(batch[name] for name in batch), batch.valid, batch.weight, batch.probability):
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
        assert bool((batch.weight > 0).all())


def written_by(graph: torch.fx.GraphModule) -> set[torch.fx.Node]:
    """Return what the ops of gear write to in a traced graph."""
    found = set()
    for node in graph.graph.nodes:
        if node.op == "call_function" and "gear." in str(node.target):
            for argument, given in zip(node.target._schema.arguments, node.args, strict=False):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    found |= set(given) if isinstance(given, (list, tuple)) else {given}
    return found


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("sampler", ["uniform steps", "prioritized", "by the table"])
def test_a_traced_step_writes_to_fixed_tensors_only(sampler: str, accumulation: int) -> None:
    """What mode="reduce-overhead" asks for: it makes no CUDA graph of a step that writes to others."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    section = online(SAMPLERS[sampler], gradient_accumulation_steps=accumulation)
    with DeviceReplay(section, "cpu") as replay:
        batches = [replay.new_batch() for _ in range(accumulation)]

        def step(columns: dict[str, Tensor]) -> None:
            replay.add_(columns)
            for batch in batches:
                replay.sample_(batch)
                if sampler != "uniform steps":
                    replay.update_priorities_(batch, batch["reward"].abs())

        torch._dynamo.reset()
        run = torch.compile(step, fullgraph=True, backend=backend)
        for turn in range(3):
            run(trajectories(3, 4, 3 * turn))
    assert len(graphs) == 1, "nothing that a trace leaves behind makes the next call another one"
    for node in written_by(graphs[0]):
        facts = node.meta.get("tensor_dict", {})
        assert node.op != "placeholder" or "_dynamo_static_input_type" in facts, node.name


def test_a_state_continues_with_the_batches_that_would_have_come() -> None:
    section = online(SAMPLERS["by the table"], seed=2)
    with DeviceReplay(section, "cpu") as replay, DeviceReplay(section, "cpu") as other:
        replay.add_(trajectories(6, 5))
        for _ in range(3):
            replay.update_priorities_(replay.sample(), torch.rand(32))
        state = replay.state_dict()
        expected = [replay.sample().clone() for _ in range(3)]
        addresses = [tensor.data_ptr() for tensor in other.table.content.values()]
        other.load_state_dict(state)
        for batch in expected:
            assert_same(other.sample(), batch)
        assert addresses == [tensor.data_ptr() for tensor in other.table.content.values()]
        with pytest.raises(CheckpointError, match="format"):
            other.load_state_dict({**state, "format": 0})
        with pytest.raises(CheckpointError, match="digest"):
            other.load_state_dict({**state, "digest": "x"})
    with (
        DeviceReplay(online(SAMPLERS["by the table"], seed=2, table={"capacity_steps": 80}), "cpu") as larger,
        pytest.raises(CheckpointError, match="must be of a table of this size"),
    ):
        larger.load_state_dict(state)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"table": {"max_length": None}}, "max_length must be given"),
        ({"table": {"remove": "uniform"}}, 'remove must be "fifo"'),
        ({"table": {"writers": 2}}, "writers must not be given"),
        ({"table": {"max_age": 2}}, "max_age must not be given"),
        ({"prefetch": 2}, "prefetch must not be given"),
        ({"sampler": {"kind": "epoch"}}, "kind must be one of"),
        ({"sampler": {**PRIORITIZED, "alpha": {"linear": [0, 1, 5]}}}, "alpha must be a number"),
        ({"sampler": {**PRIORITIZED, "beta": {"callable": "math:sqrt"}}}, "beta must be a number or"),
        ({"table": {"placement": "host", "scope": "shard"}}, 'scope must be "table"'),
        ({"table": {"placement": "host"}}, 'placement must be "device"'),
    ],
)
def test_a_config_that_needs_the_host_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DeviceReplay(online(**change), "cpu")


@pytest.mark.parametrize(
    "device", ["cuda:99", "cudaa", "meta", *([] if torch.cuda.is_available() else ["cuda"])]
)
def test_a_device_that_is_not_there_is_refused(device: str) -> None:
    with pytest.raises(ConfigError, match="device must be"):
        DeviceReplay(online(), device)


def test_a_replay_in_shared_memory_refuses_a_table_on_devices() -> None:
    with pytest.raises(ConfigError, match="use DeviceReplay"):
        Replay(online())


def test_what_does_not_fit_is_refused_before_anything_changes() -> None:
    good = trajectories(2, 4)
    with DeviceReplay(online(PRIORITIZED), "cpu") as replay:
        state = replay.table.state.clone()
        bad: list[tuple[type[GearError], dict[str, Any], Any]] = [
            (SchemaError, {k: v for k, v in good.items() if k != "reward"}, None),
            (SchemaError, {**good, "more": good["reward"]}, None),
            (SchemaError, {**good, "reward": good["reward"].double()}, None),
            (ShapeError, {**good, "reward": good["reward"][:, :3]}, None),
            (ShapeError, {**good, "observation": good["observation"][:, :4]}, None),
            (ShapeError, {**good, "task": good["task"][:1]}, None),
            (ShapeError, trajectories(2, 7), None),
            (ShapeError, trajectories(50, 2), None),
            (ShapeError, good, torch.tensor([1])),
            (ShapeError, good, torch.tensor([1.0, 2.0])),
        ]
        for error, columns, lengths in bad:
            with pytest.raises(error):
                replay.add_(columns, lengths)
        assert torch.equal(replay.table.state, state)
        replay.add_(good, torch.tensor([5, 4]))  # a length that only the device sees
        assert replay.statistics()["refused"] == 1
        with pytest.raises(DataError, match="1 that were not"):
            replay.check()
        batch = replay.sample()
        assert set(batch["task"].tolist()) == {1}
        with pytest.raises(ShapeError, match="must have shape"):
            replay.update_priorities_(batch, torch.ones(3))
        replay.update_priorities_(batch, torch.full((32,), float("nan")))
        assert replay.statistics()["refused"] == 33
        replay.sample()
    with pytest.raises(StoreError, match="must be open"):
        replay.sample()


def test_a_clone_keeps_its_probabilities() -> None:
    with DeviceReplay(online(), "cpu") as replay:
        replay.add_(trajectories(2, 5))
        batch = replay.sample()
        kept, probability = batch.clone(), batch.probability.clone()
        replay.add_(trajectories(3, 6))
        assert not torch.equal(replay.sample().probability, probability)
        assert torch.equal(kept.probability, probability)


def test_ranks_that_share_the_time_axis_report_whole_samples() -> None:
    with DeviceReplay(online(PRIORITIZED), "cpu") as replay:
        replay.add_(trajectories(2, 5))
        batch = replay.sample()
        replay.batch_info = dataclasses.replace(replay.batch_info, sequence_world=2)
        with pytest.raises(ShapeError, match=r"must have shape \[B\] where ranks share the time axis"):
            replay.update_priorities_(batch, torch.ones(batch.num_samples, 2))
