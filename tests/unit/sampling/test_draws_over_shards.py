"""Draws, top-k and age windows over several shards are those of one table."""

from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import op_kit
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from thread_ranks import ThreadPlane, on_ranks

from deepspeed_gear.sampling.mass_rules import AgeWindow, WindowEdge

SIZES = {1: [1000], 3: [1, 700, 299], 8: [33, 0, 32, 1, 400, 31, 500, 3]}


def parts_of(values: torch.Tensor, sizes: list[int]) -> list[torch.Tensor]:
    return list(torch.split(values, sizes))


@pytest.mark.parametrize("num_shards", SIZES)
@pytest.mark.parametrize("spread", [1, 40])
def test_draws_over_shards_are_those_of_one_table(num_shards: int, spread: int) -> None:
    sizes = SIZES[num_shards]
    masses = 2 ** torch.randint(0, spread, (1000,), generator=torch.Generator().manual_seed(0))
    masses[::7] = 0
    whole = op_kit.tree(masses)
    shards = [op_kit.tree(part) for part in parts_of(masses, sizes)]
    totals = [op_kit.tree_total(s, n) for s, n in zip(shards, sizes, strict=True)]
    coordinates = op_kit.draw(3, 1, 0, op_kit.tree_total(whole, 1000), 20_000)
    slots = torch.zeros(1000, 8, dtype=torch.int64)
    slots[:, 2] = torch.arange(1000)
    slots[:, 4] = 1
    rule = (0, 0, 1, 1, 0)
    wanted = op_kit.resolve(whole, slots, coordinates, rule)[:, 0]
    found = torch.full_like(wanted, -1)
    for index, (sums, of_shard) in enumerate(zip(shards, parts_of(slots, sizes), strict=True)):
        shard, mine, part = op_kit.assign_draws(coordinates, torch.tensor(totals), index)
        assert torch.nonzero(shard == index)[:, 0].equal(mine)
        if len(part):
            found[mine] = op_kit.resolve(sums, of_shard.contiguous(), part, rule)[:, 0]
    assert found.equal(wanted)


@pytest.mark.parametrize("num_shards", SIZES)
@pytest.mark.parametrize("count", [1, 32, 33, 857, 858, 2000])
def test_top_k_over_shards_is_that_of_one_table(num_shards: int, count: int) -> None:
    sizes = SIZES[num_shards]
    priorities = torch.randint(0, 50, (1000,), generator=torch.Generator().manual_seed(1)).float()
    masses = torch.ones(1000, dtype=torch.int64)
    masses[::7] = 0
    starts = np.cumsum([0, *sizes])
    items = [
        op_kit.top_k(p, m, min(count, len(p)))
        for p, m in zip(parts_of(priorities, sizes), parts_of(masses, sizes), strict=True)
    ]
    every = np.concatenate(
        [start + i[i >= 0].numpy() for start, i in zip(starts, items, strict=False)]
    )
    found = every[np.lexsort((every, -priorities.numpy()[every]))[:count]]
    wanted = op_kit.top_k(priorities, masses, count)
    assert found.tolist() == wanted[wanted >= 0].tolist()


class Part(NamedTuple):
    """What a node holds: ids, numbers of items and values of a column."""

    ids: np.ndarray
    counts: np.ndarray
    values: np.ndarray


def edges(window: AgeWindow, parts: list[Part]) -> tuple[list[WindowEdge], int]:
    """Return the edge that each node finds, and how many rounds that took."""

    def ask(plane: ThreadPlane) -> tuple[WindowEdge, int]:
        ids, counts, values = parts[plane.rank]
        channel: Any = SimpleNamespace(
            all_gather=lambda words: np.stack(plane.all_gather(words.copy()))
        )
        edge = window.edge(
            ids, counts, None if window.column is None else values, channel.all_gather
        )
        return edge, plane.num_gathered

    found = on_ranks(len(parts), ask)
    return [edge for edge, _ in found], found[0][1]


FLOATS = st.floats(-5, 5, width=32) | st.sampled_from([np.nan, -0.0, 2.5, np.inf, -np.inf])
COLUMNS = {
    "float32": FLOATS,
    "float64": FLOATS,
    "int64": st.integers(-3, 3) | st.sampled_from([2**62, 2**62 + 1, -(2**63)]),
    "uint8": st.integers(0, 255),
    "bool": st.booleans(),
}


@st.composite
def worlds(draw: st.DrawFn) -> list[Part]:
    """Draw trajectories whose ids lie on the nodes in any way; some nodes have none."""
    nodes = draw(st.integers(1, 4))
    dtype = draw(st.sampled_from(sorted(COLUMNS)))
    ids = draw(st.lists(st.integers(0, 30) | st.integers(0, 10**9), max_size=12, unique=True))
    where = [draw(st.integers(0, nodes - 1)) for _ in ids]
    counts = [draw(st.integers(0, 4)) for _ in ids]
    values = [draw(COLUMNS[dtype]) for _ in ids]
    parts = []
    for node in range(nodes):
        mine = [i for i, its_node in enumerate(where) if its_node == node]
        words = (np.array([of[i] for i in mine], np.int64) for of in (ids, counts))
        parts.append(Part(*words, np.array([values[i] for i in mine], dtype)))
    return parts


@settings(max_examples=150)
@given(
    worlds(),
    st.none() | st.integers(1, 12),
    st.sampled_from([None, "version"]),
    st.sampled_from([0, 1, 2.5, 100]),
)
def test_the_edge_is_that_of_all_together(
    parts: list[Part], newest: int | None, column: str | None, distance: float
) -> None:
    window = AgeWindow(newest, column, distance)
    found, _ = edges(window, parts)
    assert all(repr(edge) == repr(found[0]) for edge in found), "NaN equals itself here"
    ids, counts, values = (np.concatenate(of) for of in zip(*parts, strict=True))
    content = ids, counts, None if column is None else values
    whole = window.edge(*content)
    assert repr(found[0].newest) == repr(whole.newest) or found[0].newest == whole.newest
    admitted = [window.admits(edge, *content).tolist() for edge in (found[0], whole)]
    assert admitted[0] == admitted[1]
    if newest is not None and counts.sum() > newest:  # else everything is in it
        assert newest <= counts[ids >= found[0].oldest].sum()
        assert counts[ids > found[0].oldest].sum() < newest


@pytest.mark.parametrize("newest", [1, 1000, 10**6])
def test_few_rounds_for_many_trajectories(newest: int) -> None:
    random = np.random.default_rng(0)
    ids = random.permutation(10**7)[:30_000]
    parts = [Part(own, np.ones(len(own), np.int64), own) for own in np.array_split(ids, 3)]
    found, num_rounds = edges(AgeWindow(newest=newest), parts)
    wanted = np.sort(ids)[::-1][newest - 1] if newest <= len(ids) else -1
    assert {edge.oldest for edge in found} == {int(wanted)}
    assert num_rounds <= 6
