"""Which shard of each table a node holds, in which order they lie on the nodes; sizes of their
stores.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gear_support import SCHEMA, config_of, write_dataset

from deepspeed_gear.config import GearConfig, parse
from deepspeed_gear.data.dataset import Dataset
from deepspeed_gear.data.dataset_files import DatasetPart
from deepspeed_gear.data.dataset_parts import write_parts
from deepspeed_gear.distributed.control_plane import ControlPlane
from deepspeed_gear.distributed.shard_placement import (
    NOTHING,
    ShardPlacement,
    _place,
    non_empty,
    shard_of_node,
    shards_of,
)
from deepspeed_gear.distributed.topology import Topology, rank_grid
from deepspeed_gear.errors import ConfigError, DataError
from deepspeed_gear.plan.resolved_plan import open_data
from deepspeed_gear.plan.table_resolution import store_of
from deepspeed_gear.schema import Schema
from deepspeed_gear.store.table_spec import Shard, TableSpec

LENGTHS = [3, 1, 7, 2, 5, 4, 6, 2]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return Dataset.open(write_dataset(tmp_path_factory.mktemp("placement") / "whole", LENGTHS))


def bounds_of(num_nodes: int) -> np.ndarray:
    return non_empty(shards_of(np.array(LENGTHS) * SCHEMA.row_bytes, num_nodes))


def shards(num_nodes: int) -> list[Shard]:
    bounds = bounds_of(num_nodes).tolist()
    return [Shard(i, num_nodes, bounds[i], bounds[i + 1]) for i in range(num_nodes)]


@pytest.fixture(scope="module")
def parts(whole: Dataset, tmp_path_factory: pytest.TempPathFactory) -> list[Dataset]:
    """The parts of the whole for three nodes."""
    folder = tmp_path_factory.mktemp("placement") / "parts"
    return write_parts(whole, folder, bounds_of(3))


def topology(rank: int = 0, worlds: dict[str, int] | None = None, num_nodes: int = 3) -> Topology:
    places = tuple(rank_grid(worlds or {"data": 6}))
    nodes = tuple(r * num_nodes // len(places) for r in range(len(places)))
    return Topology(rank, places, nodes, tuple(f"worker-{i}" for i in range(num_nodes)))


def config(**tables: dict[str, Any]) -> GearConfig:
    shares = {name: 1 / len(tables) for name in tables}
    sampler = {"sampler": {"kind": "mixture", "shares": shares}} if len(tables) > 1 else {}
    return parse({"tables": tables, **sampler, "fields": {"observation": {}}})


DATA = {"data": "/d"}
REPLICATED = {"data": {"path": "/d", "replicate": True}}
ONLINE = {"capacity_steps": 9}


def place_all(
    tables: dict[str, dict[str, Any]], held: dict[str, list[Dataset]], views: list[Topology]
) -> list[ShardPlacement]:
    """Return what each of some ranks finds out; `held` is what each node has of each data set."""
    count = views[0].num_nodes
    known = {node: {name: sets[node].part for name, sets in held.items()} for node in range(count)}
    return [
        _place(
            view, config(**tables), {name: sets[view.node] for name, sets in held.items()}, known
        )
        for view in views
    ]


NODES = [topology(rank) for rank in (0, 2, 4)]


def test_wholes_are_shared_out_in_node_order(whole: Dataset) -> None:
    found = place_all({"main": DATA}, {"main": [whole] * 3}, NODES)
    assert found == [
        ShardPlacement((0, 1, 2), {"main": shard}, frozenset({"main"})) for shard in shards(3)
    ]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0), (2, 1, 0)])
def test_parts_stay_where_they_are(parts: list[Dataset], order: tuple[int, ...]) -> None:
    """Node i has part order[i] of one table, and its shard of a table with a capacity is the same
    one.
    """
    tables = {"main": DATA, "online": ONLINE}
    found = place_all(tables, {"main": [parts[index] for index in order]}, NODES)
    holders = tuple(order.index(index) for index in range(3))
    for placement, index in zip(found, order, strict=True):
        own = {"main": shards(3)[index], "online": Shard(index, 3, 0, 0)}
        assert placement == ShardPlacement(holders, own, frozenset({"main", "online"}))


def test_all_data_sets_lie_in_one_order(parts: list[Dataset]) -> None:
    tables = {"main": DATA, "other": DATA}
    other = [parts[2], parts[0], parts[1]]
    same = place_all(tables, {"main": other, "other": other}, NODES)
    assert {placement.order for placement in same} == {(1, 2, 0)}
    with pytest.raises(DataError, match="must lie on the nodes in one order") as refusal:
        place_all(tables, {"main": parts, "other": other}, NODES)
    assert "'main': [0, 1, 2]" in str(refusal.value)
    assert "'other': [1, 2, 0]" in str(refusal.value)


def test_replicas_are_not_spread(whole: Dataset, parts: list[Dataset]) -> None:
    alone = place_all({"main": REPLICATED}, {"main": [whole] * 3}, NODES)
    assert alone == [ShardPlacement((0, 1, 2), {}, frozenset())] * 3
    held = {"main": [whole] * 3, "other": [parts[1], parts[2], parts[0]]}
    both = place_all({"main": REPLICATED, "other": DATA}, held, NODES)
    for placement, index in zip(both, (1, 2, 0), strict=True):
        assert placement == ShardPlacement(
            (2, 0, 1), {"other": shards(3)[index]}, frozenset({"other"})
        )


@pytest.mark.parametrize("table", [DATA, REPLICATED])
def test_nodes_without_readers_hold_nothing(whole: Dataset, table: dict[str, Any]) -> None:
    """A stage in the middle of a pipeline lies on a node of its own."""
    views = [topology(rank, {"pipe": 3, "data": 2}) for rank in (0, 2, 4)]
    found = place_all({"main": table, "online": ONLINE}, {"main": [whole] * 3}, views)
    assert {placement.order for placement in found} == {(0, 2)}
    assert found[1].shards == {"main": NOTHING, "online": NOTHING}
    assert found[0].spread == found[1].spread == found[2].spread
    for placement, index in ((found[0], 0), (found[2], 1)):
        assert placement.shards["online"] == Shard(index, 2, 0, 0)
        assert placement.shards.get("main") == (shards(2)[index] if table is DATA else None)


def test_fewer_trajectories_than_nodes_are_refused(whole: Dataset) -> None:
    views = [topology(num_nodes=9, worlds={"data": 9})]
    held = {"main": [whole] * 9}
    with pytest.raises(ConfigError, match="a trajectory for each of 9 nodes, got 8"):
        place_all({"main": DATA}, held, views)
    assert place_all({"main": REPLICATED}, held, views)[0].spread == frozenset()


def test_parts_that_do_not_fit_name_their_nodes(whole: Dataset, parts: list[Dataset]) -> None:
    with pytest.raises(DataError, match=r"table main .* or a part on every node") as refusal:
        place_all({"main": DATA}, {"main": [*parts[:2], whole]}, NODES)
    assert all(f"node {node} (worker-{node})" in str(refusal.value) for node in range(3))


def test_a_data_set_of_groups_is_not_divided(whole: Dataset) -> None:
    data = {"path": "/d"}
    group = {"column": "task", "size": 2}

    def place(nodes: list[Topology], **options: bool) -> ShardPlacement:
        packed = parse(
            {
                "tables": {"main": {"data": {**data, **options}, "group": group}},
                "sampler": {"kind": "uniform", "unit": "group"},
                "pack": {"tokens": 128},
                "batch": {"groups": 2},
            }
        )
        return _place(nodes[0], packed, {"main": whole}, {n: {"main": None} for n in range(3)})

    text = (
        "gear.tables.main.data.replicate must be true for a data set of groups on 3 nodes, "
        "got False"
    )
    with pytest.raises(ConfigError, match=text):
        place(NODES)
    assert not place(NODES, replicate=True).spread
    assert not place([topology(0, num_nodes=1)]).spread


def test_ids_that_a_checkpoint_has_put_elsewhere() -> None:
    """Those that it held lie where it put them, later ones where they are added, the others
    nowhere.
    """
    placement = ShardPlacement((0, 1, 2), {}, frozenset({"main"}))
    ids = np.array([-1, 0, 1, 4, 5, 8, 9, 10])
    assert placement.shard_of("main", ids).tolist() == [-1, 0, 1, 1, 2, 2, 0, 1]
    placement.loaded["main"] = np.array([1, 4, 8]), np.array([0, 0, 2]), 9
    assert placement.shard_of("main", ids).tolist() == [-1, -1, 0, 0, -1, 2, 0, 1]
    placement.loaded["main"] = np.empty(0, np.int64), np.empty(0, np.int64), 9
    assert placement.shard_of("main", ids).tolist() == [-1, -1, -1, -1, -1, -1, 0, 1]


# ---- parts on the disks of nodes -----------------------------------------------------------------


BOUNDS = np.array([0, 2, 3, 9])
WHOLE = "a" * 64
OTHER = "b" * 64


def part(index: int, bounds: np.ndarray = BOUNDS, whole: str = WHOLE) -> DatasetPart:
    first = int(bounds[index])
    end = int(bounds[index + 1])
    return DatasetPart(index, len(bounds) - 1, first, end, int(bounds[-1]), 40, 31, 7, whole)


WHOLE_OR_PART = "must be the whole on every node, or a part on every node"


@pytest.mark.parametrize(
    ("parts", "rule"),
    [
        ([None, part(1), part(2)], WHOLE_OR_PART),
        ([part(0), part(1, whole=OTHER), part(2)], "must be of one whole on all nodes"),
        ([part(0), part(1)], "must have as many parts as nodes that consume, 2"),
        ([part(0), part(1), part(2), part(2)], "must have as many parts as nodes that consume, 4"),
        ([part(0), part(0, np.array([0, 9])), part(2)], "must have as many parts as nodes"),
        ([part(0), part(2), part(2)], "must be another part on every node"),
        (
            [part(0), part(1), part(2, np.array([0, 2, 5, 9]))],
            "must be parts of one split, without gaps",
        ),
        (
            [part(0, np.array([0, 3, 5, 9])), part(1), part(2)],
            "must be parts of one split, without",
        ),
    ],
)
def test_what_would_lose_or_double_trajectories_is_refused(parts: list[Any], rule: str) -> None:
    nodes = [f"worker-{i}" for i in range(len(parts))]
    with pytest.raises(DataError) as refusal:
        shard_of_node(parts, BOUNDS, name="table main", nodes=nodes)
    text = str(refusal.value)
    assert text.startswith(f"table main {rule}")
    assert f"`gear split DATASET OUT --nodes {len(parts)}` and copy OUT/part-i to node i" in text
    for node, found in zip(nodes, parts, strict=True):
        assert f"  {node}: {'the whole' if found is None else str(found)}" in text.splitlines()


def test_replicas_are_one_shard_and_must_be_whole() -> None:
    assert shard_of_node([None] * 3, BOUNDS, replicate=True) == [Shard(0, 1, 0, 9)] * 3
    text = r"must be whole on every node .*; give every node the whole"
    with pytest.raises(DataError, match=text) as refusal:
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


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("shards") / "whole", [3, 1, 7, 2, 5, 4])


def spec_of(
    config: dict[str, Any],
    dataset: Dataset | None = None,
    shard: Shard | None = None,
    schema: Schema = SCHEMA,
) -> TableSpec:
    """Return the spec of the one table of a config."""
    return store_of(parse(config), "main", schema, dataset, [], 2, shard)


@pytest.mark.parametrize("load", ["mmap", "memory"])
def test_a_shard_has_the_sizes_of_its_trajectories(data: Path, tmp_path: Path, load: str) -> None:
    config = config_of(data, data={"path": str(data), "load": load})
    shard = Shard(1, 3, 1, 4)
    whole = Dataset.open(data)
    for dataset in (whole, write_parts(whole, tmp_path / "out", np.array([0, 1, 4, 6]))[1]):
        spec = spec_of(config, dataset, shard)
        assert (spec.num_slots, spec.num_rows, spec.shard) == (3, 10 + 3, shard)
        assert (spec.in_memory, spec.dataset, spec.first_id) == (load == "memory", dataset, 1)
    for dataset in (whole, write_parts(whole, tmp_path / "one", np.array([0, 6]))[0]):
        spec = spec_of(config, dataset)
        assert (spec.num_slots, spec.num_rows, spec.first_id) == (6, 28, 0)
        assert (spec.shard, spec.has_arrivals) == (None, False)


@pytest.mark.parametrize("shard", [None, Shard(0, 3, 0, 1), Shard(1, 3, 1, 5), Shard(0, 1, 0, 6)])
def test_a_part_holds_no_other_shard(data: Path, tmp_path: Path, shard: Shard | None) -> None:
    """Above all not "everything": a run on one node with a part must not take it for the whole."""
    mine = write_parts(Dataset.open(data), tmp_path / "out", np.array([0, 1, 4, 6]))[1]
    text = r"table main: .*part-1 must hold the trajectories .*, got 'part 1 of 3"
    with pytest.raises(DataError, match=text):
        spec_of(config_of(data), mine, shard)


def without_final_row(schema: Schema) -> Schema:
    return Schema(
        [replace(column, rows="T") if column.rows == "T+1" else column for column in schema]
    )


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
    schema = form(SCHEMA)
    for index in range(count):
        spec = spec_of(config_of(tables={"main": options}), None, Shard(index, count), schema)
        assert (spec.num_slots, spec.shard) == (slots, Shard(index, count))
        assert spec.num_rows == steps + (slots if schema.has_final_row else 0)


def test_the_longest_trajectory_must_fit_into_a_shard() -> None:
    config = config_of(tables={"main": {"capacity_steps": 100, "max_length": 35}})
    text = (
        r"gear.tables.main.max_length must be at most 34, what each of 3 shards holds .* "
        r"\(100\), got 35"
    )
    with pytest.raises(ConfigError, match=text):
        spec_of(config, None, Shard(1, 3))


def test_a_group_must_fit_into_a_shard() -> None:
    table = {"capacity_steps": 100, "capacity_trajectories": 11, "max_length": 9}
    config = config_of(
        tables={"main": {**table, "group": {"column": "task", "size": 4}}},
        sampler={"kind": "uniform", "unit": "group"},
        pack={"tokens": 128},
        batch={"groups": 2},
    )
    text = (
        r"capacity_trajectories must hold the 4 trajectories of a group in each of 4 "
        r"shards, "
        r"got 11; .* 16"
    )
    with pytest.raises(ConfigError, match=text):
        spec_of(config, None, Shard(1, 4))
    assert spec_of(config, None, Shard(1, 3)).num_slots == 4


# ---- comparing what ranks have -------------------------------------------------------------------


class Others(ControlPlane):
    """An exchange in which another rank answers."""

    def __init__(self, other: Dataset) -> None:
        super().__init__()
        self._other = other

    def all_gather(self, value: object) -> list[object]:
        return (
            [value, {"main": self._other.whole_fingerprint}] if isinstance(value, dict) else [value]
        )


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
