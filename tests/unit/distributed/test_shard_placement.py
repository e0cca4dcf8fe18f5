"""Which node holds what of each table, and in which order the shards lie on the nodes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gear_support import SCHEMA, write_dataset

from deepspeed_gear.config import GearConfig, parse
from deepspeed_gear.data.dataset import Dataset
from deepspeed_gear.data.dataset_part_writer import write_parts
from deepspeed_gear.distributed.control_plane import ControlPlane
from deepspeed_gear.distributed.row_exchange.exchange_plan import grid, shards_of
from deepspeed_gear.distributed.shard_placement import (
    NOTHING,
    ShardPlacement,
    _place,
    non_empty,
    place_tables,
)
from deepspeed_gear.distributed.topology import Topology
from deepspeed_gear.errors import ConfigError, DataError
from deepspeed_gear.store.table_spec import Shard

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
    places = tuple(grid(worlds or {"data": 6}))
    nodes = tuple(r * num_nodes // len(places) for r in range(len(places)))
    return Topology(rank, places, nodes, tuple(f"worker-{i}" for i in range(num_nodes)))


def config(**tables: dict[str, Any]) -> GearConfig:
    shares = {name: 1 / len(tables) for name in tables}
    sampler = {"sampler": {"kind": "mixture", "shares": shares}} if len(tables) > 1 else {}
    return parse({"tables": tables, **sampler, "fields": {"observation": {}}})


DATA, REPLICATED, ONLINE = {"data": "/d"}, {"data": {"path": "/d", "replicate": True}}, {"capacity_steps": 9}


def place_all(
    tables: dict[str, dict[str, Any]], held: dict[str, list[Dataset]], views: list[Topology]
) -> list[ShardPlacement]:
    """Return what each of some ranks finds out; `held` is what each node has of each data set."""
    count = views[0].num_nodes
    known = {node: {name: sets[node].part for name, sets in held.items()} for node in range(count)}
    return [
        _place(view, config(**tables), {name: sets[view.node] for name, sets in held.items()}, known)
        for view in views
    ]


NODES = [topology(rank) for rank in (0, 2, 4)]


def test_wholes_are_shared_out_in_node_order(whole: Dataset) -> None:
    found = place_all({"main": DATA}, {"main": [whole] * 3}, NODES)
    assert found == [ShardPlacement((0, 1, 2), {"main": shard}, frozenset({"main"})) for shard in shards(3)]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0), (2, 1, 0)])
def test_parts_stay_where_they_are(parts: list[Dataset], order: tuple[int, ...]) -> None:
    """Node i has part order[i] of one table, and its shard of a table with a capacity is the same one."""
    tables = {"main": DATA, "online": ONLINE}
    found = place_all(tables, {"main": [parts[index] for index in order]}, NODES)
    holders = tuple(order.index(index) for index in range(3))
    for placement, index in zip(found, order, strict=True):
        own = {"main": shards(3)[index], "online": Shard(index, 3, 0, 0)}
        assert placement == ShardPlacement(holders, own, frozenset({"main", "online"}))


def test_all_data_sets_lie_in_one_order(parts: list[Dataset]) -> None:
    tables, other = {"main": DATA, "other": DATA}, [parts[2], parts[0], parts[1]]
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
        assert placement == ShardPlacement((2, 0, 1), {"other": shards(3)[index]}, frozenset({"other"}))


def test_one_node_holds_everything(whole: Dataset) -> None:
    found = place_all({"main": DATA, "online": ONLINE}, {"main": [whole]}, [topology(num_nodes=1)])
    assert found == [ShardPlacement((0,), {}, frozenset())]


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
    views, held = [topology(num_nodes=9, worlds={"data": 9})], {"main": [whole] * 9}
    with pytest.raises(ConfigError, match="a trajectory for each of 9 nodes, got 8"):
        place_all({"main": DATA}, held, views)
    assert place_all({"main": REPLICATED}, held, views)[0].spread == frozenset()


def test_parts_that_do_not_fit_name_their_nodes(whole: Dataset, parts: list[Dataset]) -> None:
    with pytest.raises(DataError, match=r"table main .* or a part on every node") as refusal:
        place_all({"main": DATA}, {"main": [*parts[:2], whole]}, NODES)
    assert all(f"node {node} (worker-{node})" in str(refusal.value) for node in range(3))


def test_place_tables_asks_all_nodes(whole: Dataset) -> None:
    found = place_tables(ControlPlane(), topology(worlds={}, num_nodes=1), config(main=DATA), {"main": whole})
    assert found == ShardPlacement((0,), {}, frozenset())


def test_a_data_set_of_groups_is_not_divided(whole: Dataset) -> None:
    data, group = {"path": "/d"}, {"column": "task", "size": 2}

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

    text = "gear.tables.main.data.replicate must be true for a data set of groups on 3 nodes, got False"
    with pytest.raises(ConfigError, match=text):
        place(NODES)
    assert not place(NODES, replicate=True).spread
    assert not place([topology(0, num_nodes=1)]).spread


def test_ids_that_a_checkpoint_has_put_elsewhere() -> None:
    """Those that it held lie where it put them, later ones where they are added, the others nowhere."""
    placement = ShardPlacement((0, 1, 2), {}, frozenset({"main"}))
    ids = np.array([-1, 0, 1, 4, 5, 8, 9, 10])
    assert placement.shard_of("main", ids).tolist() == [-1, 0, 1, 1, 2, 2, 0, 1]
    placement.loaded["main"] = np.array([1, 4, 8]), np.array([0, 0, 2]), 9
    assert placement.shard_of("main", ids).tolist() == [-1, -1, 0, 0, -1, 2, 0, 1]
    placement.loaded["main"] = np.empty(0, np.int64), np.empty(0, np.int64), 9
    assert placement.shard_of("main", ids).tolist() == [-1, -1, -1, -1, -1, -1, 0, 1]
