"""Windows, n-step returns and returns-to-go against an oracle that walks step by step in plain Python."""

from __future__ import annotations

import struct
from typing import NamedTuple

import op_wrappers
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_ops import ops_named

from deepspeed_gear.ops import Ops
from deepspeed_gear.ops.records import Align, Pad, Source


@pytest.fixture(scope="module", params=["reference", "cpu"])
def ops(request: pytest.FixtureRequest) -> Ops:
    return ops_named(request.param)


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
    in_front = {Align.IN_PLACE: real[0] - first, Align.LEFT: 0, Align.RIGHT: missing}[align]
    front, behind = [(real[0], False)] * in_front, [(real[-1], False)] * (missing - in_front)
    return [*front, *((row, True) for row in real), *behind]


@given(
    table=tables(),
    offset=st.integers(-14, 14),
    length=st.integers(1, 12),
    align=st.sampled_from([Align.IN_PLACE, Align.LEFT, Align.RIGHT]),
    pad=st.sampled_from([0.0, -3.0, "edge"]),
    source=st.sampled_from([Source.STEPS, Source.STEPS_PLUS_ONE]),
)
def test_window(
    ops: Ops, table: Table, offset: int, length: int, align: int, pad: float | str, source: int
) -> None:
    column = torch.arange(1, 2 * table.num_rows + 1).view(-1, 2)  # every element tells where it is from
    values, mask = op_wrappers.gather(
        column, table.resolutions, source=source, offset=offset, length=length, align=align, pad=pad, ops=ops
    )
    for j, (i, anchor) in enumerate(table.anchors):
        rows = table.lengths[i] + (source == Source.STEPS_PLUS_ONE)
        expected = window_by_hand(anchor + offset, length, rows, align)
        assert mask[j].tolist() == [real for _, real in expected]
        for place, (row, real) in enumerate(expected):
            stored = column[table.first_rows[i] + row].tolist()
            assert values[j, place].tolist() == (stored if real or pad == "edge" else [pad, pad])


class Kind(NamedTuple):
    """What a field is read from and becomes: its source, rows and dtype, and whether it is scaled."""

    source: int
    elements: int = 1
    stored: torch.dtype = torch.int64
    dtype: torch.dtype = torch.int64
    scaled: bool = False


KINDS = [
    Kind(Source.STEPS, 3, torch.float32, torch.float32),
    Kind(Source.STEPS_PLUS_ONE, 2, torch.uint8, torch.uint8),
    Kind(Source.STEPS, 1, torch.bool, torch.float32),
    Kind(Source.STEPS, 1, torch.int16, torch.int64),
    Kind(Source.STEPS, 1, torch.float32, torch.float32, scaled=True),  # as return_to_go
    Kind(Source.STEPS_PLUS_ONE, 5, torch.float64, torch.bfloat16, scaled=True),
    Kind(Source.TIMESTEP),
    Kind(Source.POSITION),
]


class Window(NamedTuple):
    """The window of a field."""

    offset: int
    length: int
    align: int
    after_n_step: int
    pad: float | str


@st.composite
def divided_windows(draw: st.DrawFn) -> tuple[Window, int]:
    """A window, and the number of equal parts into which it is divided."""
    parts, part = draw(st.integers(1, 6)), draw(st.integers(1, 5))
    align = draw(st.sampled_from([Align.IN_PLACE, Align.LEFT, Align.RIGHT]))
    window = Window(
        draw(st.integers(-32, 14)),
        parts * part,
        align,
        draw(st.integers(0, 1)),
        draw(st.sampled_from([0.0, 3.0, "edge"])),
    )
    return window, parts


def gather(
    ops: Ops, table: Table, column: torch.Tensor, kind: Kind, window: Window, first: int, count: int
) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Gather the rows [first, first + count) of a window: values, mask, and what is counted."""
    resolutions, none = table.resolutions, torch.empty(0)
    scale, n_steps = (none, none), torch.arange(len(resolutions)) % 4 + 1
    if kind.scaled:
        both = torch.stack((torch.linspace(-3, 3, kind.elements), torch.linspace(0.3, 2, kind.elements)))
        scale = op_wrappers.scaling(both[0], both[1])
    out = torch.full((len(resolutions), count, kind.elements), 1).to(kind.dtype)
    mask = torch.ones(len(resolutions), count, dtype=torch.bool)
    counters = torch.zeros(3, dtype=torch.int64)
    pad, value = (Pad.EDGE, 0.0) if isinstance(window.pad, str) else (Pad.VALUE, window.pad)
    spec = [kind.source, window.offset, window.length, window.align, window.after_n_step, pad]
    spec += [kind.elements, 0, first, count]
    ops.gather_(
        [out], [mask], counters, [column], [scale[0]], [scale[1]], resolutions, n_steps, spec, [value], 1
    )
    return out, mask, counters.tolist()


@settings(max_examples=300)
@given(table=tables(), divided=divided_windows(), kind=st.sampled_from(KINDS))
def test_parts_are_the_window(ops: Ops, table: Table, divided: tuple[Window, int], kind: Kind) -> None:
    """The equal parts of a window, one after the other, are the window; each counts its own rows."""
    window, parts = divided
    random = torch.Generator().manual_seed(table.num_rows)
    column = (torch.rand(table.num_rows, kind.elements, generator=random) * 100).to(kind.stored)
    whole, mask, counts = gather(ops, table, column, kind, window, 0, window.length)
    part = window.length // parts
    found = [gather(ops, table, column, kind, window, i * part, part) for i in range(parts)]
    joined, joined_mask = torch.cat([f[0] for f in found], dim=1), torch.cat([f[1] for f in found], dim=1)
    assert torch.equal(joined.view(torch.uint8), whole.view(torch.uint8))
    assert torch.equal(joined_mask, mask)
    for values, real, (num_real, num_rows, num_bytes) in found:
        assert (num_real, num_rows) == (int(real.sum()), real.numel())
        assert num_bytes == values.numel() * values.element_size()
    assert [sum(column) for column in zip(*(f[2] for f in found), strict=True)] == counts
    assert mask.tolist() == expected_mask(table, kind.source, window)
    if kind.source == Source.POSITION:
        assert torch.equal(whole[:, :, 0], torch.arange(window.length).repeat(len(whole), 1))


def expected_mask(table: Table, source: int, window: Window) -> list[list[bool]]:
    """Return where the whole windows are real."""
    more, masks = int(source == Source.STEPS_PLUS_ONE), []
    for j, (i, anchor) in enumerate(table.anchors):
        first = anchor + window.offset + window.after_n_step * (j % 4 + 1)
        places = window_by_hand(first, window.length, table.lengths[i] + more, window.align)
        masks.append([is_real for _, is_real in places])
    return masks


@given(table=tables(), offset=st.integers(-3, 3))
def test_single_step_and_trajectory_row(ops: Ops, table: Table, offset: int) -> None:
    column, each = torch.arange(table.num_rows), torch.arange(len(table.lengths)) * 10
    values, real = op_wrappers.gather(column, table.resolutions, offset=offset, pad=-1, ops=ops)
    rows, there = op_wrappers.gather(each, table.resolutions, source=Source.TRAJECTORY, ops=ops)
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
    returns, discount, steps = op_wrappers.n_step(
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
    got = op_wrappers.suffix_sum(torch.tensor(reward), table.extents, ops=ops)
    for first, length in table.extents.tolist():
        total = 0.0
        for row in reversed(range(first, first + length)):
            total += reward[row]
            assert float(got[row]) == as_float32(total)
        assert float(got[first + length]) == 0.0  # the final row belongs to no step
