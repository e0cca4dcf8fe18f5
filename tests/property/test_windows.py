"""The parts of a window against the window, and its mask against an oracle that walks step by step.

`test_fields.py` has the values of windows, n-step returns and returns-to-go.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import op_wrappers
import pytest
import torch
from gather_support import NONE, Field, gather
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_ops import ops_named

from deepspeed_gear.ops import Ops
from deepspeed_gear.ops.records import Align, Source

NUM_STEPS = 3  # of an n-step return at most


@pytest.fixture(scope="module", params=["reference", "cpu"])
def ops(request: pytest.FixtureRequest) -> Ops:
    return ops_named(request.param)


class Table(NamedTuple):
    """Trajectories of some lengths, each of them one row longer, and anchors in them."""

    lengths: list[int]
    anchors: list[tuple[int, int]]

    @property
    def num_rows(self) -> int:
        return sum(n + 1 for n in self.lengths)

    @property
    def resolutions(self) -> torch.Tensor:
        first = [sum(n + 1 for n in self.lengths[:i]) for i in range(len(self.lengths))]
        rows = [
            [i, i, 0, first[i], self.lengths[i], anchor, 0, j] for j, (i, anchor) in enumerate(self.anchors)
        ]
        return torch.tensor(rows, dtype=torch.int64).view(-1, 8)


@st.composite
def tables(draw: st.DrawFn) -> Table:
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    where = st.integers(0, len(lengths) - 1).flatmap(
        lambda i: st.tuples(st.just(i), st.integers(0, lengths[i] - 1))
    )
    return Table(lengths, draw(st.lists(where, max_size=5)))


@st.composite
def divided_windows(draw: st.DrawFn) -> tuple[dict[str, Any], int]:
    """Return the options of a field's window, and the number of equal parts into which it is divided."""
    parts = draw(st.integers(1, 6))
    window = {
        "offset": draw(st.integers(-32, 14)),
        "length": parts * draw(st.integers(1, 5)),
        "align": draw(st.sampled_from([Align.IN_PLACE, Align.LEFT, Align.RIGHT])),
        "after_n_step": draw(st.integers(0, 1)),
        "pad": draw(st.sampled_from([0.0, 3.0, "edge"])),
    }
    return window, parts


KINDS = [  # source, elements, dtype of the column and of the field, whether it is scaled
    (Source.STEPS, 3, torch.float32, torch.float32, False),
    (Source.STEPS_PLUS_ONE, 2, torch.uint8, torch.uint8, False),
    (Source.STEPS, 1, torch.bool, torch.float32, False),
    (Source.STEPS, 1, torch.int16, torch.int64, False),
    (Source.STEPS, 1, torch.float32, torch.float32, True),  # as return_to_go
    (Source.STEPS_PLUS_ONE, 5, torch.float64, torch.bfloat16, True),
    (Source.TIMESTEP, 1, torch.int64, torch.int64, False),
    (Source.POSITION, 1, torch.int64, torch.int64, False),
]


def real_places(first: int, length: int, rows: int, align: int) -> list[bool]:
    """Return which places of a window hold a row of the trajectory."""
    before = sum(row < 0 for row in range(first, first + length))
    real = sum(0 <= row < rows for row in range(first, first + length))
    begin = {Align.IN_PLACE: before, Align.LEFT: 0, Align.RIGHT: length - real}[align]
    return [begin <= place < begin + real for place in range(length)]


@settings(max_examples=150)
@given(table=tables(), divided=divided_windows(), kind=st.sampled_from(KINDS))
def test_parts_are_the_window(
    ops: Ops, table: Table, divided: tuple[dict[str, Any], int], kind: tuple[Any, ...]
) -> None:
    """The equal parts of a window, one after the other, are the window; each counts its own rows."""
    (window, parts), (source, elements, stored, dtype, is_scaled) = divided, kind
    random = torch.Generator().manual_seed(table.num_rows)
    column = (torch.rand(table.num_rows, elements, generator=random) * 100).to(stored)
    shift, gain = NONE, NONE
    if is_scaled:
        shift, gain = op_wrappers.scaling(
            torch.linspace(-3, 3, elements).double(), torch.linspace(0.3, 2, elements).double()
        )
    n_steps = torch.arange(len(table.anchors)) % NUM_STEPS + 1

    def gathered(first: int, count: int) -> list[torch.Tensor]:
        """Gather the rows [first, first + count) of the window: values, mask, and what is counted."""
        place = {"mask": 0, "first": first, "count": count}
        field = Field(column, source, dtype=dtype, shift=shift, gain=gain, **window, **place)
        values, mask, counters = gather(ops, [field], table.resolutions, n_steps)
        return [values, mask, counters - torch.tensor([1, 2, 3])]  # which they begin at

    length = window["length"]
    whole, mask, counts = gathered(0, length)
    found = [gathered(first, length // parts) for first in range(0, length, length // parts)]
    joined = torch.cat([values for values, _, _ in found], dim=1)
    assert torch.equal(joined.view(torch.uint8), whole.view(torch.uint8))
    assert torch.equal(torch.cat([real for _, real, _ in found], dim=1), mask)
    for values, real, counted in found:
        num_bytes = values.numel() * values.element_size()
        assert counted.tolist() == [int(real.sum()), real.numel(), num_bytes]
    assert torch.equal(sum(counted for _, _, counted in found), counts)
    wanted = []
    for (i, anchor), n in zip(table.anchors, n_steps.tolist(), strict=True):
        first = anchor + window["offset"] + window["after_n_step"] * n
        rows = table.lengths[i] + (source == Source.STEPS_PLUS_ONE)
        wanted.append(real_places(first, length, rows, window["align"]))
    assert mask.tolist() == wanted
    if source == Source.POSITION:
        assert torch.equal(whole[:, :, 0], torch.arange(length).repeat(len(whole), 1))
