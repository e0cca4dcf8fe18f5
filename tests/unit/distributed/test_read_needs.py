"""Who needs what: pure functions of places and configs."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from gear_support import SCHEMA
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_gear.config import check_against, parse
from deepspeed_gear.distributed.row_exchange.exchange_plan import grid, needs_of, readers_of, shards_of
from deepspeed_gear.distributed.topology import AXES, RankCoordinates, Topology, check_grid
from deepspeed_gear.errors import ConfigError
from deepspeed_gear.schema import Column, Schema

FIELDS = {
    "observation": {"offset": -5, "length": 6, "normalize": "mean_std"},
    "action": {"offset": -5, "length": 6},
    "next": {"column": "observation", "offset": "n_step"},
    "code": {},
}
ENDS = {"inputs": ["observation", "mask.action"], "labels": ["action", "is_weight", "mask.observation"]}


def needs(place: RankCoordinates, **options: Any) -> dict[str, Any]:
    section = {"tables": {"main": {"capacity_steps": 9}}, "fields": FIELDS, "n_step": {"n": 2, "gamma": 0.9}}
    config = parse({**section, "pipeline": ENDS, **options})
    found = needs_of(place, config, check_against(config, {"main": SCHEMA}, True))
    return {**{field.name: field for field in found.fields}, "n_step": found.n_step}


def test_one_stage_reads_everything() -> None:
    assert list(needs(RankCoordinates())) == [*FIELDS, "n_step"]
    assert needs(RankCoordinates(), pipeline=None)["n_step"]
    assert needs(RankCoordinates(data_rank=1, data_world=2, tensor_rank=1, tensor_world=2)) == needs(
        RankCoordinates()
    )


def test_stages_read_their_ends() -> None:
    first, inner, last = (needs(RankCoordinates(pipe_rank=stage, pipe_world=3)) for stage in range(3))
    assert list(first) == ["observation", "action", "n_step"]
    assert (first["observation"].mask_only, first["action"].mask_only) == (False, True)
    assert inner == {"n_step": False}
    assert list(last) == ["action", "observation", "n_step"]
    assert last["observation"].mask_only
    assert last["observation"].normalize is None, "nothing is read that could be normalised"
    assert not first["n_step"]
    assert not last["n_step"]


def test_opaque_values_are_no_fields_of_ends() -> None:
    schema = Schema([*SCHEMA, Column("note", "json", rows="1", max_bytes=9)])
    section = {"tables": {"main": {"capacity_steps": 9}}, "fields": {**FIELDS, "note": {}}}
    config = parse({**section, "pipeline": ENDS, "n_step": {"n": 2, "gamma": 0.9}})
    fields = check_against(config, {"main": schema}, True)
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
    parts = [needs(RankCoordinates(sequence_rank=rank, sequence_world=world)) for rank in range(world)]
    for name in ("observation", "action"):
        steps = [range(p[name].part_first, p[name].part_first + p[name].collected_length) for p in parts]
        assert list(itertools.chain.from_iterable(steps)) == list(range(6))
    assert all(part["code"].part_length is None for part in parts)


def test_what_cannot_be_planned_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"observation\.length must be a multiple of the sequence ranks \(4"
    ):
        needs(RankCoordinates(sequence_world=4))
    with pytest.raises(ConfigError, match=r"gear\.pipeline must be given"):
        needs(RankCoordinates(pipe_world=2), pipeline=None)


@pytest.mark.parametrize(
    "name", ["obs", "mask.obs", "mask", "mask.is_weight", "handle", "timestep", "mask.return_n", ""]
)
@pytest.mark.parametrize("end", ["inputs", "labels"])
def test_names_that_no_batch_has_are_refused(end: str, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"gear\.pipeline\.{end}\[?1?\]?"):
        needs(RankCoordinates(), pipeline={**ENDS, end: ["action", name]})


sizes = st.fixed_dictionaries({axis: st.integers(1, 3) for axis in AXES})


@given(sizes)
def test_a_grid_has_every_place_once(worlds: dict[str, int]) -> None:
    places = grid(worlds)
    check_grid(tuple(places))
    assert [place.coordinates for place in places] == sorted(place.coordinates for place in places)
    assert all(place.worlds == tuple(worlds[axis] for axis in AXES) for place in places)
    reporting = [place for place in places if place.reports]
    assert sorted(place.data_rank for place in reporting) == list(range(worlds["data"]))
    assert all(place.is_last_stage for place in reporting)
    topology = Topology(len(places) - 1, tuple(places), tuple(rank // 2 for rank in range(len(places))))
    assert topology.peers[topology.peer] == topology.rank


@given(sizes, st.data())
def test_places_that_are_no_grid_are_refused(worlds: dict[str, int], data: st.DataObject) -> None:
    places = grid(worlds)
    index = data.draw(st.integers(0, len(places) - 1))
    other = data.draw(
        st.sampled_from([RankCoordinates(), RankCoordinates(data_rank=3, data_world=3), places[index - 1]])
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


def test_readers_are_the_ends_of_a_replica() -> None:
    places = grid({"pipe": 3, "data": 2, "tensor": 2})
    found = readers_of(places, [rank // 4 for rank in range(12)], 1)
    assert {node: [(p.pipe_rank, p.tensor_rank) for p in there] for node, there in found.items()} == {
        0: [(0, 0), (0, 1)],
        2: [(2, 0), (2, 1)],
    }
