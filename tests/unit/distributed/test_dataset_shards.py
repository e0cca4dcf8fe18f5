"""Which shard each node holds, and the sizes of its store."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gear_support import SCHEMA, config_of, write_dataset

from deepspeed_gear.config import parse
from deepspeed_gear.data.dataset import Dataset
from deepspeed_gear.data.dataset_files import DatasetPart
from deepspeed_gear.data.dataset_part_writer import write_parts
from deepspeed_gear.distributed.control_plane import ControlPlane
from deepspeed_gear.distributed.resolved_plan import open_data
from deepspeed_gear.distributed.shard_placement import non_empty, shard_of_node
from deepspeed_gear.distributed.table_resolution import store_of
from deepspeed_gear.errors import ConfigError, DataError
from deepspeed_gear.schema import Schema
from deepspeed_gear.store.table_spec import Shard

BOUNDS = np.array([0, 2, 3, 9])
WHOLE, OTHER = "a" * 64, "b" * 64
LENGTHS = [3, 1, 7, 2, 5, 4]


def part(index: int, bounds: np.ndarray = BOUNDS, whole: str = WHOLE) -> DatasetPart:
    first, end = int(bounds[index]), int(bounds[index + 1])
    return DatasetPart(index, len(bounds) - 1, first, end, int(bounds[-1]), 40, 31, 7, whole)


# ---- shards of nodes -----------------------------------------------------------------------------


def test_replicas_are_one_shard() -> None:
    assert shard_of_node([None] * 3, BOUNDS, replicate=True) == [Shard(0, 1, 0, 9)] * 3


REFUSALS: dict[str, tuple[list[DatasetPart | None], str]] = {
    "a mixture": ([None, part(1), part(2)], "must be the whole on every node, or a part on every node"),
    "two wholes": ([part(0), part(1, whole=OTHER), part(2)], "must be of one whole on all nodes"),
    "too few nodes": ([part(0), part(1)], "must have as many parts as nodes that consume, 2"),
    "too many nodes": (
        [part(0), part(1), part(2), part(2)],
        "must have as many parts as nodes that consume, 4",
    ),
    "two splits": ([part(0), part(0, np.array([0, 9])), part(2)], "must have as many parts as nodes"),
    "one twice": ([part(0), part(2), part(2)], "must be another part on every node"),
    "a gap": (
        [part(0), part(1), part(2, np.array([0, 2, 5, 9]))],
        "must be parts of one split, without gaps",
    ),
    "an overlap": (
        [part(0, np.array([0, 3, 5, 9])), part(1), part(2)],
        "must be parts of one split, without",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_would_lose_or_double_trajectories_is_refused(case: str) -> None:
    parts, rule = REFUSALS[case]
    nodes = [f"worker-{i}" for i in range(len(parts))]
    with pytest.raises(DataError) as refusal:
        shard_of_node(parts, BOUNDS, name="table main", nodes=nodes)
    text = str(refusal.value)
    assert text.startswith(f"table main {rule}")
    assert f"`gear split DATASET OUT --nodes {len(parts)}` and copy OUT/part-i to node i" in text
    for node, found in zip(nodes, parts, strict=True):
        assert f"  {node}: {'the whole' if found is None else str(found)}" in text.splitlines()


def test_replicas_must_be_whole() -> None:
    with pytest.raises(
        DataError, match=r"must be whole on every node .*; give every node the whole"
    ) as refusal:
        shard_of_node([None, part(0)], BOUNDS[:2], replicate=True)
    assert str(refusal.value).splitlines()[1:] == ["  node 0: the whole", f"  node 1: {part(0)}"]


@pytest.mark.parametrize(
    ("bounds", "wanted"),
    [
        ([0, 2, 3, 9], [0, 2, 3, 9]),
        ([0, 0, 0, 9], [0, 1, 2, 9]),
        ([0, 9, 9, 9], [0, 7, 8, 9]),
        ([0, 4, 4, 9], [0, 4, 5, 9]),
        ([0, 0, 3, 3], [0, 1, 2, 3]),
        ([0, 9], [0, 9]),
    ],
)
def test_no_part_is_empty(bounds: list[int], wanted: list[int]) -> None:
    assert non_empty(np.array(bounds)).tolist() == wanted


# ---- sizes of stores -----------------------------------------------------------------------------


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_dataset(tmp_path / "whole", LENGTHS)


@pytest.mark.parametrize("load", ["mmap", "memory"])
def test_a_shard_has_the_sizes_of_its_trajectories(data: Path, tmp_path: Path, load: str) -> None:
    config = parse(config_of(data, data={"path": str(data), "load": load}))
    whole = Dataset.open(data)
    parts = write_parts(whole, tmp_path / "out", np.array([0, 1, 4, 6]))
    for dataset in (whole, parts[1]):
        shards = {"main": Shard(1, 3, 1, 4)}
        spec = store_of(config, "main", SCHEMA, dataset, [], 2, shards["main"])
        assert (spec.num_slots, spec.num_rows) == (3, 10 + 3)
        assert spec.shard == shards["main"]
        assert (spec.in_memory, spec.dataset, spec.first_id) == (load == "memory", dataset, 1)
    spec = store_of(config, "main", SCHEMA, whole, [], 2)
    assert (spec.num_slots, spec.num_rows, spec.shard, spec.has_arrivals) == (6, 28, None, False)


@pytest.mark.parametrize("shard", [None, Shard(0, 3, 0, 1), Shard(1, 3, 1, 5), Shard(0, 1, 0, 6)])
def test_a_part_holds_no_other_shard(data: Path, tmp_path: Path, shard: Shard | None) -> None:
    """Above all not "everything": a run on one node with a part must not take it for the whole."""
    config = parse(config_of(data))
    mine = write_parts(Dataset.open(data), tmp_path / "out", np.array([0, 1, 4, 6]))[1]
    shards = {} if shard is None else {"main": shard}
    with pytest.raises(
        DataError, match=r"table main: .*part-1 must hold the trajectories .*, got 'part 1 of 3"
    ):
        store_of(config, "main", SCHEMA, mine, [], 2, shards.get("main"))


def test_one_part_of_one_is_everything(data: Path, tmp_path: Path) -> None:
    [mine] = write_parts(Dataset.open(data), tmp_path / "out", np.array([0, 6]))
    spec = store_of(parse(config_of(data)), "main", SCHEMA, mine, [], 2)
    assert (spec.num_slots, spec.num_rows, spec.first_id) == (6, 28, 0)


def without_final_row(schema: Schema) -> Schema:
    return Schema([replace(column, rows="T") if column.rows == "T+1" else column for column in schema])


@pytest.mark.parametrize(
    ("options", "count", "steps", "slots"),
    [
        ({"capacity_steps": 100, "capacity_trajectories": 10}, 1, 100, 10),
        ({"capacity_steps": 100, "capacity_trajectories": 10}, 3, 34, 4),
        ({"capacity_steps": 100, "capacity_trajectories": 2}, 3, 34, 1),
        ({"capacity_steps": 3}, 2, 2, 2),
        ({"capacity_steps": 64000}, 4, 16000, 1000),
        ({"capacity_steps": 100, "max_length": 34}, 3, 34, 34),
    ],
)
@pytest.mark.parametrize("form", [lambda schema: schema, without_final_row])
def test_a_capacity_is_that_of_all_nodes(
    options: dict[str, int], count: int, steps: int, slots: int, form: Callable[[Schema], Schema]
) -> None:
    config, schema = parse(config_of(tables={"main": options})), form(SCHEMA)
    for index in range(count):
        shards = {"main": Shard(index, count)}
        spec = store_of(config, "main", schema, None, [], 2, shards["main"])
        assert (spec.num_slots, spec.shard) == (slots, shards["main"])
        assert spec.num_rows == steps + (slots if schema.has_final_row else 0)


def test_the_longest_trajectory_must_fit_into_a_shard() -> None:
    config = parse(config_of(tables={"main": {"capacity_steps": 100, "max_length": 35}}))
    text = r"gear.tables.main.max_length must be at most 34, what each of 3 shards holds .* \(100\), got 35"
    with pytest.raises(ConfigError, match=text):
        store_of(config, "main", SCHEMA, None, [], 2, Shard(1, 3))


def test_a_group_must_fit_into_a_shard() -> None:
    table = {"capacity_steps": 100, "capacity_trajectories": 11, "max_length": 9}
    group = {"column": "task", "size": 4}
    config = parse(
        config_of(
            tables={"main": {**table, "group": group}},
            sampler={"kind": "uniform", "unit": "group"},
            pack={"tokens": 128},
            batch={"groups": 2},
        )
    )
    shards = {"main": Shard(1, 4)}
    text = r"capacity_trajectories must hold the 4 trajectories of a group in each of 4 shards, got 11; .* 16"
    with pytest.raises(ConfigError, match=text):
        store_of(config, "main", SCHEMA, None, [], 2, shards["main"])
    spec = store_of(config, "main", SCHEMA, None, [], 2, Shard(1, 3))
    assert spec.num_slots == 4


# ---- comparing what ranks have -------------------------------------------------------------------


class Others(ControlPlane):
    """An exchange in which another rank answers."""

    def __init__(self, other: Dataset) -> None:
        super().__init__()
        self._other = other

    def gather(self, value: object) -> list[object]:
        return [value, {"main": self._other.whole_fingerprint}] if isinstance(value, dict) else [value]


def test_ranks_may_have_parts_of_one_whole(data: Path, tmp_path: Path) -> None:
    whole = Dataset.open(data)
    parts = write_parts(whole, tmp_path / "out", np.array([0, 1, 4, 6]))
    for mine in (whole, parts[0]):
        for other in (whole, parts[0], parts[2]):
            found = open_data(Others(other), parse(config_of(mine.path)))
            assert found["main"].fingerprint == mine.fingerprint
    other = Dataset.open(write_dataset(tmp_path / "other", [1, 2]))
    with pytest.raises(DataError, match="must be the same data set on all ranks"):
        open_data(Others(other), parse(config_of(parts[0].path)))
