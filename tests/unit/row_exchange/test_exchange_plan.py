"""Who needs what: which samples a node, which rows of them, which fields a rank; places
and shards.
"""

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import op_kit
import pytest
import torch
from gear_support import SCHEMA
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_gear.config import GearConfig, ResolvedField, check_against, parse
from deepspeed_gear.distributed.shard_placement import shards_of
from deepspeed_gear.distributed.topology import (
    AXES,
    RankCoordinates,
    Topology,
    check_grid,
    rank_grid,
)
from deepspeed_gear.errors import ConfigError
from deepspeed_gear.ops.records import Resolution, RowSample
from deepspeed_gear.row_exchange.exchange_plan import (
    ExchangePlan,
    needs_of,
    plan_exchange,
    row_needs,
)
from deepspeed_gear.row_exchange.row_messages import RowReads, WindowRead
from deepspeed_gear.schema import Column, Schema
from deepspeed_gear.store.table_spec import RETURN_TO_GO

FIELDS: dict[str, Any] = {
    "observation": {"offset": -5, "length": 6, "normalize": "mean_std"},
    "action": {"offset": -5, "length": 6, "align": "right"},
    "next": {"column": "observation", "offset": "n_step"},
    "ends": {"column": "code", "offset": 2, "length": 4, "pad": "edge"},
    "togo": {"derived": "return_to_go", "offset": -1, "length": 2},
    "timestep": {"length": 2},
    "task": {},
}
ENDS = {
    "inputs": ["observation", "mask.action", "task"],
    "labels": ["action", "ends", "return_n", "mask.observation"],
}
N_STEP_READS = (
    WindowRead("reward", 0, 2),
    WindowRead("terminated", 0, 2),
    WindowRead("truncated", 0, 2),
)
OBSERVATION = WindowRead("observation", -5, 1, final_row=1)
ACTION = WindowRead("action", -5, 1)
ENDS_READ = WindowRead("code", 2, 6, edge=True)


def resolved(schema: Schema = SCHEMA, **options: Any) -> tuple[GearConfig, list[ResolvedField]]:
    section = {
        "tables": {"main": {"capacity_steps": 9}},
        "fields": FIELDS,
        "n_step": {"n": 2, "gamma": 0.9},
    }
    config = parse({**section, "pipeline": ENDS, **options})
    return config, check_against(config, {"main": schema}, schema.names)


CONFIG, RESOLVED = resolved()
GRIDS: list[dict[str, int]] = [
    {"data": 1},
    {"data": 4},
    {"data": 8},
    {"data": 2, "tensor": 2},
    {"data": 2, "pipe": 2},
    {"data": 3, "pipe": 4},
    {"data": 2, "sequence": 2},
    {"pipe": 3, "data": 3, "sequence": 2, "tensor": 2},
]


def routes(topology: Topology, order: list[int]) -> ExchangePlan:
    return plan_exchange(topology, order, CONFIG, RESOLVED, SCHEMA)


@st.composite
def topologies(draw: st.DrawFn) -> tuple[list[Topology], list[int]]:
    """Draw a grid whose ranks lie on nodes in any way: one rank's view of each node, and the
    holders.
    """
    places = tuple(rank_grid(draw(st.sampled_from(GRIDS))))
    count = draw(st.integers(1, min(4, len(places))))
    if draw(st.booleans()):
        nodes = [rank * count // len(places) for rank in range(len(places))]
    else:
        drawn = draw(
            st.lists(st.integers(0, count - 1), min_size=len(places), max_size=len(places))
        )
        known = list(dict.fromkeys(drawn))
        nodes = [known.index(node) for node in drawn]  # nodes are counted in the order of ranks
    views = [Topology(nodes.index(node), places, tuple(nodes)) for node in range(max(nodes) + 1)]
    return views, draw(st.permutations(views[0].holders))


@given(topologies(), st.integers(0, 40), st.integers(0, 19))
def test_samples_go_to_whoever_reads_them(
    drawn: tuple[list[Topology], list[int]], count: int, offset: int
) -> None:
    views, order = drawn
    worlds = views[0].place.data_world
    readers: list[set[int]] = [set() for _ in range(count)]
    for place, node in zip(views[0].places, views[0].nodes, strict=True):
        for sample in range(count):
            if place.reads and (sample + offset) % worlds == place.data_rank:
                readers[sample].add(order.index(node))
    samples = np.arange(count)
    for view in views:
        found = routes(view, order)
        assert (found.num_nodes, found.data_world, found.holders) == (
            len(order),
            worlds,
            tuple(order),
        )
        if view.node not in order:
            assert found.index == -1
            continue
        index = order.index(view.node)
        assert found.index == index
        mine = [sample for sample in range(count) if index in readers[sample]]
        assert found.wanted(count, offset).tolist() == mine
        assert found.most_wanted(count) >= len(mine)
        batch = 3 * worlds  # that the replicas divide: every selection has exactly so many
        assert len(found.wanted(batch, offset)) == found.most_wanted(batch)
        own = torch.from_numpy(samples[samples % 3 != 1])
        records = torch.zeros(len(own), 8, dtype=torch.int64)
        records[:, Resolution.SLOT] = own
        tables = torch.from_numpy(found.readers), torch.from_numpy(found.need_of)
        sent, _, _ = op_kit.encode_draws(records, own, *tables, offset, index)
        wanted = [
            [n, s]
            for n in range(len(order))
            for s in own.tolist()
            if n in readers[s] and n != index
        ]
        assert sent[:, [RowSample.PEER, RowSample.SLOT]].tolist() == wanted


@given(topologies())
def test_each_node_needs_what_its_ranks_read(drawn: tuple[list[Topology], list[int]]) -> None:
    views, order = drawn
    found = routes(views[0], order)
    assert len(set(found.needs)) == len(found.needs)
    for index, node in enumerate(order):
        for replica in range(found.data_world):
            pairs = zip(views[0].places, views[0].nodes, strict=True)
            readers = [p for p, n in pairs if n == node and p.reads and p.data_rank == replica]
            which = found.need_of[index, replica]
            if not readers:
                assert which == -1
                continue
            needs = row_needs(
                [needs_of(place, CONFIG, RESOLVED) for place in readers], CONFIG, SCHEMA
            )
            assert found.needs[which] == needs


def rows(*places: RankCoordinates, **options: Any) -> RowReads:
    config, fields = resolved(**options)
    return row_needs([needs_of(place, config, fields) for place in places], config, SCHEMA)


def test_rows_of_a_whole_replica() -> None:
    found = rows(RankCoordinates())
    assert set(found.reads) == {
        OBSERVATION,
        ACTION,
        ENDS_READ,
        WindowRead("observation", 0, 1, follows=True, final_row=1),
        WindowRead(RETURN_TO_GO, -1, 1),
        *N_STEP_READS,
    }
    assert found.per_trajectory == ("task",)
    assert rows(RankCoordinates(), RankCoordinates()) == found


def test_rows_of_the_ends_of_a_pipeline() -> None:
    first = RankCoordinates(pipe_rank=0, pipe_world=3)
    last = RankCoordinates(pipe_rank=2, pipe_world=3)
    assert rows(first) == RowReads((OBSERVATION,), ("task",)), "of an action only the mask is read"
    assert set(rows(last).reads) == {ACTION, ENDS_READ, *N_STEP_READS}
    assert rows(last).per_trajectory == ()
    both = rows(first, last)
    assert set(both.reads) == {OBSERVATION, *rows(last).reads}
    assert both.per_trajectory == ("task",)


@pytest.mark.parametrize("rank", [0, 1])
def test_rows_of_a_part_of_the_time_axis(rank: int) -> None:
    """A part reads its own steps, but all of them where what lies in it depends on the whole
    window.
    """
    found = rows(RankCoordinates(sequence_rank=rank, sequence_world=2)).reads
    assert WindowRead("observation", -5 + 3 * rank, -2 + 3 * rank, final_row=1) in found
    assert WindowRead(RETURN_TO_GO, -1 + rank, rank) in found
    assert ACTION in found, "aligned to the right"
    assert ENDS_READ in found, "padded by the nearest row"
    assert OBSERVATION not in found


def test_goals_are_read_where_fields_are_relabelled() -> None:
    fields = {"observation": {"offset": -1, "length": 2}, "reward": {}}
    config, checked = resolved(fields=fields, n_step=None, pipeline=None)
    goal = SCHEMA["observation"]
    relabelled = [f if f.name != "reward" else replace(f, hindsight=goal) for f in checked]
    found = row_needs([needs_of(RankCoordinates(), config, relabelled)], config, SCHEMA)
    assert set(found.reads) == {
        WindowRead("observation", -1, 1, final_row=1),
        WindowRead("reward", 0, 1),
        WindowRead("observation", 0, 1, final_row=1, is_goal=True),
    }


# ---- fields of a rank, grids, shards -------------------------------------------------------------


def needs(place: RankCoordinates, **options: Any) -> dict[str, Any]:
    found = needs_of(place, *resolved(**options))
    return {**{field.name: field for field in found.fields}, "n_step": found.n_step}


def test_one_stage_reads_everything() -> None:
    assert list(needs(RankCoordinates())) == [*FIELDS, "n_step"]
    assert needs(RankCoordinates(), pipeline=None)["n_step"]
    place = RankCoordinates(data_rank=1, data_world=2, tensor_rank=1, tensor_world=2)
    assert needs(place) == needs(RankCoordinates())


def test_stages_read_their_ends() -> None:
    first, inner, last = (
        needs(RankCoordinates(pipe_rank=stage, pipe_world=3)) for stage in range(3)
    )
    assert list(first) == ["observation", "task", "action", "n_step"]
    assert (first["observation"].mask_only, first["action"].mask_only) == (False, True)
    assert inner == {"n_step": False}
    assert list(last) == ["action", "ends", "observation", "n_step"]
    assert last["observation"].mask_only
    assert last["observation"].normalize is None, "nothing is read that could be normalised"
    assert (first["n_step"], last["n_step"]) == (False, True)


def test_opaque_values_are_no_fields_of_ends() -> None:
    schema = Schema([*SCHEMA, Column("note", "json", rows="1", max_bytes=9)])
    config, fields = resolved(schema, fields={**FIELDS, "note": {}})
    whole = needs_of(RankCoordinates(sequence_rank=1, sequence_world=2), config, fields)
    assert [field.name for field in whole.opaque] == ["note"]
    assert [field.name for field in whole.fields] == list(FIELDS)
    assert not needs_of(RankCoordinates(pipe_world=2), config, fields).opaque


@pytest.mark.parametrize(
    ("labels", "wanted"),
    [(["return_n"], []), (["next", "action"], ["action", "next"]), (["trajectory_id"], [])],
)
def test_n_step_returns_only_where_they_are_read(labels: list[str], wanted: list[str]) -> None:
    ends = {"inputs": ["observation"], "labels": labels}
    last = needs(RankCoordinates(pipe_rank=1, pipe_world=2), pipeline=ends)
    assert list(last) == [*wanted, "n_step"]
    assert last["n_step"] == (labels != ["trajectory_id"])
    assert not needs(RankCoordinates(pipe_rank=0, pipe_world=2), pipeline=ends)["n_step"]


@pytest.mark.parametrize("world", [1, 2, 3, 6])
def test_sequence_ranks_share_windows_out(world: int) -> None:
    fields = {name: FIELDS[name] for name in ("observation", "action", "task")}
    places = [RankCoordinates(sequence_rank=rank, sequence_world=world) for rank in range(world)]
    parts = [needs(place, fields=fields, pipeline=None) for place in places]
    for name in ("observation", "action"):
        steps = [
            range(p[name].part_first, p[name].part_first + p[name].gathered_length) for p in parts
        ]
        assert list(itertools.chain.from_iterable(steps)) == list(range(6))
    assert all(part["task"].part_length is None for part in parts)


def test_what_cannot_be_planned_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"observation\.length must be a multiple of the sequence ranks \(4"
    ):
        needs(RankCoordinates(sequence_world=4))
    with pytest.raises(ConfigError, match=r"gear\.pipeline must be given"):
        needs(RankCoordinates(pipe_world=2), pipeline=None)


@pytest.mark.parametrize(
    "name",
    ["obs", "mask.obs", "mask", "mask.is_weight", "handle", "return_to_go", "mask.return_n", ""],
)
@pytest.mark.parametrize("end", ["inputs", "labels"])
def test_names_that_no_batch_has_are_refused(end: str, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"gear\.pipeline\.{end}\[?1?\]?"):
        needs(RankCoordinates(), pipeline={**ENDS, end: ["action", name]})


sizes = st.fixed_dictionaries({axis: st.integers(1, 3) for axis in AXES})


@given(sizes)
def test_a_grid_has_every_place_once(worlds: dict[str, int]) -> None:
    places = rank_grid(worlds)
    check_grid(tuple(places))
    assert [place.coordinates for place in places] == sorted(place.coordinates for place in places)
    assert all(place.worlds == tuple(worlds[axis] for axis in AXES) for place in places)
    reporting = [place for place in places if place.reports]
    assert sorted(place.data_rank for place in reporting) == list(range(worlds["data"]))
    assert all(place.is_last_stage for place in reporting)
    topology = Topology(
        len(places) - 1, tuple(places), tuple(rank // 2 for rank in range(len(places)))
    )
    assert topology.peers[topology.peer] == topology.rank


@given(sizes, st.data())
def test_places_that_are_no_grid_are_refused(worlds: dict[str, int], data: st.DataObject) -> None:
    places = rank_grid(worlds)
    index = data.draw(st.integers(0, len(places) - 1))
    with pytest.raises(ConfigError, match="one place each in a grid"):
        check_grid((*places, places[index]))
    other = data.draw(
        st.sampled_from(
            [RankCoordinates(), RankCoordinates(data_rank=3, data_world=3), places[index - 1]]
        )
    )
    if other == places[index]:
        return
    broken = [*places[:index], other, *places[index + 1 :]]
    with pytest.raises(ConfigError, match="one place each in a grid") as caught:
        check_grid(tuple(broken))
    assert f"rank {index}: {other}" in str(caught.value)


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=60), st.integers(1, 8))
def test_shards_are_contiguous_and_balanced(lengths: list[int], nodes: int) -> None:
    bounds = shards_of(np.array(lengths), nodes)
    assert bounds[0] == 0
    assert bounds[-1] == len(lengths)
    assert (np.diff(bounds) >= 0).all()
    held = np.add.reduceat([*lengths, 0], np.minimum(bounds[:-1], len(lengths)))
    held[np.diff(bounds) == 0] = 0
    assert held.sum() == sum(lengths)
    assert held.max() <= sum(lengths) / nodes + max(lengths)
