"""A window over the trajectories of several nodes begins where it does over all of them together."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_gear.distributed.sharded.sharded_selector import edge_over_nodes
from deepspeed_gear.sampling.mass_rules import AgeWindow, WindowEdge


class Gathering:
    """What threads say, as the nodes of a link do: all of them gather together."""

    def __init__(self, count: int) -> None:
        self._barrier = threading.Barrier(count, timeout=20.0)
        self._said: list[np.ndarray] = [np.empty(0)] * count
        self.num_exchanges = 0

    def of(self, index: int) -> MemoryLink:
        return MemoryLink(self, index)

    def gather(self, index: int, words: np.ndarray) -> np.ndarray:
        assert words.dtype == np.int64
        self._said[index] = words.copy()
        self._barrier.wait()
        found = np.stack(self._said)  # of equal size
        if self._barrier.wait() == 0:
            self.num_exchanges += 1
        return found


class MemoryLink(NamedTuple):
    """The part of a Link that a window needs."""

    gathering: Gathering
    index: int

    def gather(self, words: np.ndarray) -> np.ndarray:
        return self.gathering.gather(self.index, words)


class Part(NamedTuple):
    """What a node holds: ids, numbers of items and values of a column."""

    ids: np.ndarray
    counts: np.ndarray
    values: np.ndarray


def edges(window: AgeWindow, parts: list[Part]) -> tuple[list[WindowEdge], int]:
    """Return the edge that each node finds, and how many exchanges that took."""
    gathering = Gathering(len(parts))

    def ask(index: int) -> WindowEdge:
        ids, counts, values = parts[index]
        column = None if window.column is None else values
        return edge_over_nodes(gathering.of(index), window, ids, counts, column)  # type: ignore[arg-type]

    with ThreadPoolExecutor(len(parts)) as threads:
        return list(threads.map(ask, range(len(parts)))), gathering.num_exchanges


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
    nodes, dtype = draw(st.integers(1, 4)), draw(st.sampled_from(sorted(COLUMNS)))
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
    whole = window.edge(ids, counts, lambda _: values)
    assert repr(found[0].newest) == repr(whole.newest) or found[0].newest == whole.newest
    admitted = [window.admits(edge, ids, counts, lambda _: values).tolist() for edge in (found[0], whole)]
    assert admitted[0] == admitted[1]
    if newest is not None and counts.sum() > newest:  # else everything is in it
        assert newest <= counts[ids >= found[0].oldest].sum()
        assert counts[ids > found[0].oldest].sum() < newest


@pytest.mark.parametrize("newest", [1, 1000, 10**6])
def test_few_exchanges_for_many_trajectories(newest: int) -> None:
    random = np.random.default_rng(0)
    ids = random.permutation(10**7)[:30_000]
    parts = [Part(own, np.ones(len(own), np.int64), own) for own in np.array_split(ids, 3)]
    found, num_exchanges = edges(AgeWindow(newest=newest), parts)
    wanted = np.sort(ids)[::-1][newest - 1] if newest <= len(ids) else -1
    assert {edge.oldest for edge in found} == {int(wanted)}
    assert num_exchanges <= 6
