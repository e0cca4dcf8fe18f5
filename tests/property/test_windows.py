"""Windows, n-step returns and returns-to-go against an oracle that walks step by step in plain Python."""

from __future__ import annotations

import struct
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_gear.ops import Ops, functional, load_backend
from deepspeed_gear.ops.constants import (
    ALIGN_IN_PLACE,
    ALIGN_LEFT,
    ALIGN_RIGHT,
    SOURCE_STEPS,
    SOURCE_STEPS_PLUS_ONE,
    SOURCE_TRAJECTORY,
)


@pytest.fixture(scope="module", params=["reference", "cpu"])
def ops(request: pytest.FixtureRequest) -> Ops:
    return load_backend(request.param)


class Table(NamedTuple):
    """Trajectories of some lengths, each of them one row longer, and anchors in them."""

    lengths: list[int]
    anchors: list[tuple[int, int]]

    @property
    def first_rows(self) -> list[int]:
        return [sum(n + 1 for n in self.lengths[:i]) for i in range(len(self.lengths))]

    @property
    def num_rows(self) -> int:
        return sum(n + 1 for n in self.lengths)

    @property
    def extents(self) -> torch.Tensor:
        return torch.tensor(list(zip(self.first_rows, self.lengths, strict=True)))

    @property
    def resolutions(self) -> torch.Tensor:
        rows = [
            [i, i, 0, self.first_rows[i], self.lengths[i], anchor, 0, j]
            for j, (i, anchor) in enumerate(self.anchors)
        ]
        return torch.tensor(rows, dtype=torch.int64).view(-1, 8)


@st.composite
def tables(draw: st.DrawFn) -> Table:
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    where = st.integers(0, len(lengths) - 1).flatmap(
        lambda i: st.tuples(st.just(i), st.integers(0, lengths[i] - 1))
    )
    return Table(lengths, draw(st.lists(where, max_size=5)))


def window_by_hand(first: int, length: int, rows: int, align: int) -> list[tuple[int, bool]]:
    """Return (row, is real) for every place; of padding, the row whose value an edge pad takes."""
    real = [row for row in range(first, first + length) if 0 <= row < rows]
    if not real:
        return [(0 if first < 0 else rows - 1, False)] * length
    missing = length - len(real)
    in_front = {ALIGN_IN_PLACE: real[0] - first, ALIGN_LEFT: 0, ALIGN_RIGHT: missing}[align]
    front, behind = [(real[0], False)] * in_front, [(real[-1], False)] * (missing - in_front)
    return [*front, *((row, True) for row in real), *behind]


@given(
    table=tables(),
    offset=st.integers(-14, 14),
    length=st.integers(1, 12),
    align=st.sampled_from([ALIGN_IN_PLACE, ALIGN_LEFT, ALIGN_RIGHT]),
    pad=st.sampled_from([0.0, -3.0, "edge"]),
    source=st.sampled_from([SOURCE_STEPS, SOURCE_STEPS_PLUS_ONE]),
)
def test_window(
    ops: Ops, table: Table, offset: int, length: int, align: int, pad: float | str, source: int
) -> None:
    column = torch.arange(1, 2 * table.num_rows + 1).view(-1, 2)  # every element tells where it is from
    values, mask = functional.gather(
        column, table.resolutions, source=source, offset=offset, length=length, align=align, pad=pad, ops=ops
    )
    for j, (i, anchor) in enumerate(table.anchors):
        rows = table.lengths[i] + (source == SOURCE_STEPS_PLUS_ONE)
        expected = window_by_hand(anchor + offset, length, rows, align)
        assert mask[j].tolist() == [real for _, real in expected]
        for place, (row, real) in enumerate(expected):
            stored = column[table.first_rows[i] + row].tolist()
            assert values[j, place].tolist() == (stored if real or pad == "edge" else [pad, pad])


@given(table=tables(), offset=st.integers(-3, 3))
def test_single_step_and_trajectory_row(ops: Ops, table: Table, offset: int) -> None:
    column, each = torch.arange(table.num_rows), torch.arange(len(table.lengths)) * 10
    values, real = functional.gather(column, table.resolutions, offset=offset, pad=-1, ops=ops)
    rows, there = functional.gather(each, table.resolutions, source=SOURCE_TRAJECTORY, ops=ops)
    assert rows.tolist() == [10 * i for i, _ in table.anchors]
    assert there.all()
    for j, (i, anchor) in enumerate(table.anchors):
        inside = 0 <= anchor + offset < table.lengths[i]
        assert bool(real[j]) == inside
        assert int(values[j]) == (table.first_rows[i] + anchor + offset if inside else -1)


def as_float32(x: float) -> float:
    return float(struct.unpack("f", struct.pack("f", x))[0])


rewards = st.floats(-1e6, 1e6, width=32)


@given(data=st.data(), table=tables(), n=st.integers(1, 12), gamma=st.sampled_from([0.0, 0.5, 0.97, 1.0]))
def test_n_step(ops: Ops, data: st.DataObject, table: Table, n: int, gamma: float) -> None:
    size = {"min_size": table.num_rows, "max_size": table.num_rows}
    reward = data.draw(st.lists(rewards, **size))
    terminated = data.draw(st.lists(st.booleans(), **size))
    truncated = data.draw(st.none() | st.lists(st.booleans(), **size))
    returns, discount, steps = functional.n_step(
        torch.tensor(reward),
        torch.tensor(terminated),
        None if truncated is None else torch.tensor(truncated),
        table.resolutions,
        n,
        gamma,
        ops=ops,
    )
    for j, (i, anchor) in enumerate(table.anchors):
        first, end = table.first_rows[i] + anchor, table.first_rows[i] + table.lengths[i]
        total, power, taken, dead = 0.0, 1.0, 0, False
        for row in range(first, min(first + n, end)):
            total += power * reward[row]
            power *= gamma
            taken += 1
            dead = terminated[row]
            if dead or (truncated is not None and truncated[row]):
                break
        assert float(returns[j]) == as_float32(total)
        assert float(discount[j]) == (0.0 if dead else as_float32(power))
        assert int(steps[j]) == taken


@given(data=st.data(), table=tables())
def test_return_to_go(ops: Ops, data: st.DataObject, table: Table) -> None:
    reward = data.draw(st.lists(rewards, min_size=table.num_rows, max_size=table.num_rows))
    got = functional.suffix_sum(torch.tensor(reward), table.extents, ops=ops)
    for first, length in table.extents.tolist():
        total = 0.0
        for row in reversed(range(first, first + length)):
            total += reward[row]
            assert float(got[row]) == as_float32(total)
        assert float(got[first + length]) == 0.0  # the final row belongs to no step
