"""Both ways to a device give the batches of the gatherer, whatever is gathered; here on
the host.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from gear_support import config_of
from hypothesis import given
from hypothesis import strategies as st
from op_kit import same_bits

from deepspeed_gear import Column, Replay, Schema
from deepspeed_gear.batching.gather import Gatherer, GatherOptions
from deepspeed_gear.batching.transfer.cuda_streams import HostStream
from deepspeed_gear.batching.transfer.device_gather import (
    DIRECT,
    STAGED,
    WAYS,
    DeviceGatherer,
    FieldTransfer,
)
from deepspeed_gear.config import ResolvedField
from deepspeed_gear.config.options import NStepConfig
from deepspeed_gear.ops import Ops
from deepspeed_gear.ops.records import Slot
from deepspeed_gear.store.table import Table

DEPTH = 2  # of rings
LENGTHS = (1, 2, 5, 40, 3, 11)
COLUMNS = {  # dtype, shape, rows, and the dtypes of fields
    "a": ("float32", (3,), "T", ("float32", "float64", "bfloat16")),
    "b": ("int64", (), "T", ("int64",)),
    "c": ("uint8", (2, 2), "T", ("uint8", "float32")),
    "d": ("bfloat16", (5,), "T", ("bfloat16", "float32")),
    "final": ("float16", (7,), "T+1", ("float16", "engine")),
    "one": ("float64", (3,), "1", ("float64",)),
}
SCHEMA = Schema(
    [
        *(
            Column(name, dtype, shape, "other", rows)
            for name, (dtype, shape, rows, _) in COLUMNS.items()
        ),
        Column("reward", "float32", (), "reward"),
        Column("terminated", "bool", (), "terminated"),
        Column("truncated", "bool", (), "truncated"),
    ]
)
NAMES = (*SCHEMA.names, "derived/return_to_go")


def trajectory(steps: int) -> dict[str, Any]:
    words = np.random.default_rng(steps)
    made: dict[str, Any] = {}
    for name, (dtype, shape, kind, _) in COLUMNS.items():
        rows = {"T+1": (steps + 1,), "1": ()}.get(kind, (steps,))
        values = words.integers(0, 200, (*rows, *shape))
        made[name] = torch.from_numpy(values).bfloat16() if name == "d" else values.astype(dtype)
    ends = np.arange(steps) == steps - 1
    made["reward"] = words.random(steps).astype(np.float32)
    return {**made, "terminated": ends & (steps % 2 == 0), "truncated": ends & (steps % 2 == 1)}


@pytest.fixture(scope="module", params=["cpu", "kernels_on_host"])
def placed_ops(request: pytest.FixtureRequest) -> Ops:
    """What gathers on the device."""
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def table() -> Iterator[Table]:
    config = config_of(fields={"return_to_go": {}}, batch_size=2)
    with Replay(config, schemas={"main": SCHEMA}) as replay:
        for steps in LENGTHS:
            replay.add(trajectory(steps))
        yield replay.tables["main"]


@st.composite
def fields(draw: st.DrawFn, name: str, follows: bool) -> ResolvedField:
    source = draw(st.sampled_from([*COLUMNS, "timestep", "position", "return_to_go"]))
    length = None if source == "one" else draw(st.none() | st.integers(1, 9))
    if source == "position" and length is None:
        length = 3
    part = None if length is None else draw(st.none() | st.integers(1, length))
    common: dict[str, Any] = {
        "offset": "n_step" if follows and draw(st.booleans()) else draw(st.integers(-12, 12)),
        "length": length,
        "align": draw(st.sampled_from(["in_place", "left", "right"])) if length else "in_place",
        "pad_kind": draw(st.sampled_from(["zero", "value", "edge"])),
        "part_length": part,
        "part_first": 0 if part is None or length is None else draw(st.integers(0, length - part)),
    }
    common["pad_value"] = 3 if common["pad_kind"] == "value" else 0
    if source not in COLUMNS:
        dtype = "float32" if source == "return_to_go" else "int64"
        return ResolvedField(name, None, source, dtype=dtype, **common)
    if source == "one":
        common |= {"offset": 0, "pad_kind": "zero", "pad_value": 0}
    target = draw(st.sampled_from(COLUMNS[source][-1]))
    scale = draw(st.sampled_from([1.0, 0.5])) if target not in ("int64", "uint8") else 1.0
    return ResolvedField(name, SCHEMA[source], dtype=target, scale=scale, **common)


def records_of(table: Table, draw: st.DrawFn) -> torch.Tensor:
    count = draw(st.integers(1, 9))
    rows = []
    for number in range(count):
        slot = draw(st.integers(0, len(LENGTHS) - 1))
        first = int(table.slots[slot, Slot.FIRST_ROW])
        rows.append(
            [
                slot,
                slot,
                0,
                first,
                LENGTHS[slot],
                draw(st.integers(0, LENGTHS[slot] - 1)),
                1,
                number,
            ]
        )
    return torch.tensor(rows)


def placed(
    ops: Ops, way: str, reached: frozenset[str], options: GatherOptions, table: Table
) -> DeviceGatherer:
    columns = {name: table.gather_source(name) for name in reached}
    n_step = {"reward", "terminated", "truncated"} <= reached
    transfer = FieldTransfer(HostStream(), ops, way, lambda name: name in reached, n_step, 2)
    return DeviceGatherer(transfer, columns, options, table, DEPTH)


def ways_in(gatherer: DeviceGatherer) -> dict[str, str]:
    """Return the transfer method of each field."""
    return {field.name: way for field, way in zip(gatherer._fields, gatherer._ways, strict=True)}


@given(data=st.data(), way=st.sampled_from(WAYS), n=st.none() | st.integers(1, 4))
def test_every_way_gives_the_batches_of_the_gatherer(
    table: Table, placed_ops: Ops, data: st.DataObject, way: str, n: int | None
) -> None:
    count = data.draw(st.integers(0 if n else 1, 5))
    wanted = [data.draw(fields(f"field{i}", n is not None)) for i in range(count)]
    everything = data.draw(st.booleans())
    reached = frozenset(NAMES) if everything else data.draw(st.frozensets(st.sampled_from(NAMES)))
    records = data.draw(st.composite(lambda draw: records_of(table, draw))())
    n_step = None if n is None else NStepConfig(n=n, gamma=0.9)
    options = GatherOptions(wanted, {}, n_step, len(records), torch.bfloat16, 1)
    plain = Gatherer(options, table, DEPTH)
    other = placed(placed_ops, way, reached, options, table)
    if everything and way == DIRECT:
        assert set(ways_in(other).values()) <= {DIRECT}
    for turn in range(3):
        here = plain.gather(records.roll(turn, 0))
        there = other.gather(records.roll(turn, 0))
        for expected, got in zip(here, there, strict=True):
            assert expected.keys() == got.keys()
            for name in expected:
                assert same_bits(got[name], expected[name]), (name, ways_in(other))
    assert torch.equal(other.totals(), plain.totals())


@given(data=st.data(), way=st.sampled_from(WAYS))
def test_parts_of_a_batch_from_several_gatherers(
    table: Table, placed_ops: Ops, data: st.DataObject, way: str
) -> None:
    wanted = [data.draw(fields(f"field{i}", True)) for i in range(3)]
    some = [data.draw(st.composite(lambda draw: records_of(table, draw))()) for _ in range(3)]
    some[1] = some[1][:0]
    num_samples = sum(len(records) for records in some)
    options = GatherOptions(wanted, {}, NStepConfig(n=2, gamma=0.5), num_samples, torch.float16, 1)
    reached = data.draw(st.frozensets(st.sampled_from(NAMES)) | st.just(frozenset(NAMES)))
    plain = Gatherer(options, table, DEPTH).gather(torch.cat(some))
    gatherers = [placed(placed_ops, way, reached, options, table) for _ in some]
    parts = [(gatherer, records, None) for gatherer, records in zip(gatherers, some, strict=True)]
    got = gatherers[0].gather_from(parts)
    for expected, found in zip(plain, got, strict=True):
        assert all(same_bits(found[name], expected[name]) for name in expected), ways_in(
            gatherers[0]
        )


def test_what_cannot_go_a_way_goes_another(table: Table) -> None:
    kinds = {
        "edge": ResolvedField("edge", SCHEMA["a"], length=3, pad_kind="edge"),
        "window": ResolvedField("window", SCHEMA["a"], length=3),
        "follows": ResolvedField("follows", SCHEMA["a"], offset="n_step"),
        "one": ResolvedField("one", SCHEMA["one"], dtype="float64"),
        "far": ResolvedField("far", SCHEMA["c"], dtype="uint8", length=2),
        "step": ResolvedField("step", None, "timestep", dtype="int64"),
        "goal": ResolvedField("goal", SCHEMA["a"], hindsight=SCHEMA["a"]),
    }
    n_step = NStepConfig(n=1, gamma=1.0)
    options = GatherOptions(list(kinds.values()), {}, n_step, 2, torch.float32, 1)
    reached = frozenset(NAMES) - {"c"}
    found = {way: placed(table.ops, way, reached, options, table) for way in WAYS}
    always = {"far": STAGED, "goal": STAGED}
    assert ways_in(found[DIRECT]) == {**dict.fromkeys(kinds, DIRECT), **always}
    assert ways_in(found[STAGED]) == dict.fromkeys(kinds, STAGED)
    assert [found[way].reads_in_place for way in WAYS] == [True, False]
