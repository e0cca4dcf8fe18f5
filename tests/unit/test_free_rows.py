"""Runs of free rows, against a plain list of rows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_gear.store.free_rows import FreeRows


class Rows:
    """The oracle: one flag per row."""

    def __init__(self, num_rows: int, extents: list[tuple[int, int]]) -> None:
        self.used = [False] * num_rows
        for first, count in extents:
            self.used[first : first + count] = [True] * count

    def runs(self) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        for row, used in enumerate(self.used):
            if not used and found and found[-1][1] == row:
                found[-1] = (found[-1][0], row + 1)
            elif not used:
                found.append((row, row + 1))
        return found

    def take(self, count: int) -> int | None:
        for begin, end in self.runs():
            if end - begin >= count:
                self.used[begin : begin + count] = [True] * count
                return begin
        return None


@st.composite
def scenes(draw: st.DrawFn) -> tuple[int, list[tuple[int, int]], list[int]]:
    gaps = draw(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 5)), max_size=8))
    at, extents = 0, []
    for gap, count in gaps:
        extents.append((at + gap, count))
        at += gap + count
    order = draw(st.permutations(extents))
    return at + draw(st.integers(0, 6)), order, draw(st.lists(st.integers(1, 8), max_size=10))


@given(scenes())
def test_first_fit(scene: tuple[int, list[tuple[int, int]], list[int]]) -> None:
    num_rows, extents, wanted = scene
    pairs = np.array(extents, np.int64).reshape(-1, 2)
    free, rows = FreeRows(num_rows, pairs[:, 0], pairs[:, 1]), Rows(num_rows, extents)
    for count in wanted:
        assert free.take(count) == rows.take(count)
        assert free.total == rows.used.count(False)
        assert free.longest == max((end - begin for begin, end in rows.runs()), default=0)


@pytest.mark.parametrize("num_rows", [0, 1, 7])
def test_capacity_edges(num_rows: int) -> None:
    nothing = np.zeros(0, np.int64)
    assert FreeRows(num_rows, nothing, nothing).take(num_rows + 1) is None
    free = FreeRows(num_rows, nothing, nothing)
    if num_rows:
        assert free.take(num_rows) == 0
    assert free.take(1) is None
    assert free.total == free.longest == 0
