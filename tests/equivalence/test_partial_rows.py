"""Trajectories of which a column holds only the steps that are read, bit for bit as whole ones."""

from __future__ import annotations

import itertools

import op_wrappers
import pytest
import torch
from gather_support import NONE, NUM_ROWS, Field, SameBits, arguments_of, gather, random_bits
from op_wrappers import powers_of
from torch import Tensor

from deepspeed_gear.ops import Ops
from deepspeed_gear.ops.records import Align, Resolution, Source

REFUSED = pytest.raises((ValueError, RuntimeError), match=r"resolution 0 .*must lie in the columns")
STEPS = 6  # of the trajectory; it has one row more
COLUMN = torch.arange((STEPS + 1) * 3, dtype=torch.float32).view(-1, 3) + 1
WINDOWS = [(o, n) for o in (-9, -6, -2, -1, 0, 1, 2, 6, 9) for n in (1, 3, 20)]


def record(anchor: int, first_row: int, num_steps: int = STEPS) -> Tensor:
    return torch.tensor([[0, 0, 0, first_row, num_steps, anchor, 0, 0]])


def steps_of(field: Field, anchor: int, n_step: int = 0) -> list[int]:
    """Return the steps that a window reads, by definition: the real ones, at an edge the nearest."""
    held = STEPS + (field.source == Source.STEPS_PLUS_ONE)
    first = anchor + field.offset + (n_step if field.after_n_step else 0)
    every = range(first, first + field.length)
    if field.pad == "edge":
        return sorted({min(max(step, 0), held - 1) for step in every})
    return [step for step in every if 0 <= step < held]


def refuses(ops: Ops, fields: list[Field], resolutions: Tensor, n_steps: Tensor | None = None) -> None:
    """Check that a call is refused, and that it writes nothing."""
    arguments, untouched = (arguments_of(fields, resolutions, n_steps) for _ in range(2))
    with REFUSED:
        ops.gather_(*arguments)
    for got, want in zip((*arguments[:2], [arguments[2]]), (*untouched[:2], [untouched[2]]), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("pad", [0.0, 7.5, "edge"])
@pytest.mark.parametrize("align", [Align.IN_PLACE, Align.LEFT, Align.RIGHT])
@pytest.mark.parametrize("source", [Source.STEPS, Source.STEPS_PLUS_ONE])
def test_a_column_of_the_steps_that_are_read(
    native: Ops, reference: Ops, same_bits: SameBits, source: int, align: int, pad: float | str
) -> None:
    """It gives what the whole trajectory gives; where nothing is read, first_row may be anything."""
    for (offset, length), anchor, follows in itertools.product(WINDOWS, (0, 3, STEPS - 1), (0, 1)):
        field = Field(COLUMN, source, offset, length, align, follows, pad, mask=0)
        n_steps = torch.tensor([2])
        want = gather(reference, [field], record(anchor, 0), n_steps)
        steps = steps_of(field, anchor, 2)
        low, high = (steps[0], steps[-1] + 1) if steps else (anchor, anchor + 1)
        field.column = COLUMN[low:high].clone()
        for ops in (native, reference):
            for first_row in (-low,) if steps else (-low, -(1 << 62), 1 << 62):
                got = gather(ops, [field], record(anchor, first_row), n_steps)
                assert all(same_bits(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("pad", [0.0, "edge"])
@pytest.mark.parametrize("source", [Source.STEPS, Source.STEPS_PLUS_ONE])
def test_one_row_too_few_is_refused(careful: Ops, source: int, pad: float | str) -> None:
    for (offset, length), anchor, follows in itertools.product(WINDOWS, (0, 3, STEPS - 1), (0, 1)):
        field = Field(COLUMN, source, offset, length, after_n_step=follows, pad=pad, mask=0)
        steps, n_steps = steps_of(field, anchor, 2), torch.tensor([2])
        if steps:
            field.column = COLUMN[steps[0] : steps[-1] + 1]
            for first_row in (-steps[0] - 1, -steps[0] + 1, -(1 << 63), (1 << 63) - 1):
                refuses(careful, [field], record(anchor, first_row), n_steps)


def test_only_the_part_is_read(
    native: Ops, reference: Ops, same_bits: SameBits, request: pytest.FixtureRequest
) -> None:
    """The window begins 3 steps before the trajectory and ends 3 behind it; its outer parts only pad."""
    for first, count, low, high in ((0, 2, 0, 0), (2, 3, 0, 1), (5, 3, 2, 4), (8, 2, 5, 5), (10, 2, 5, 5)):
        parts = {"offset": -5, "length": 12, "pad": "edge", "mask": 0, "first": first, "count": count}
        want = gather(reference, [Field(COLUMN, **parts)], record(2, 0))  # type: ignore[arg-type]
        some = Field(COLUMN[low : high + 1].clone(), **parts)  # type: ignore[arg-type]
        for ops in (native, reference):
            got = gather(ops, [some], record(2, -low))
            assert all(same_bits(a, b) for a, b in zip(got, want, strict=True))
        for ops in (request.getfixturevalue("cpu"), reference):
            refuses(ops, [some], record(2, 1 - low))


def test_batch_of_whole_and_partial_trajectories(native: Ops, reference: Ops, same_bits: SameBits) -> None:
    """Received rows lie behind those of the store, in columns of T and of T+1 rows."""
    torch.manual_seed(0)
    rows = random_bits(torch.float32, NUM_ROWS, 5)
    anchors, n_steps = torch.tensor([0, 4, 2, 5, 5]), torch.tensor([2, 1, 2, 1, 1])
    ordinary = torch.cat([record(anchor, 7) for anchor in anchors.tolist()])
    steps = [(0, 3), (3, 6), (1, 5), (4, 7), None]  # what the fields below read; None: lies in the store
    arrived, received = ordinary.clone(), []
    for i, held in enumerate(steps):
        if held is not None:
            arrived[i, Resolution.FIRST_ROW] = NUM_ROWS + sum(map(len, received)) - held[0]
            received.append(rows[7 + held[0] : 7 + held[1]])

    def fields_of(column: Tensor) -> list[Field]:
        per_trajectory = torch.arange(4.0).view(2, 2)
        return [
            Field(column, Source.STEPS_PLUS_ONE, offset=-1, length=2, pad="edge", mask=0),
            Field(column[:, 0].contiguous(), offset=0, length=1, mask=1),
            Field(column, Source.STEPS_PLUS_ONE, after_n_step=1, mask=2),
            Field(column.double(), offset=-1, length=3, align=Align.RIGHT, pad=2.0, dtype=torch.float32),
            Field(per_trajectory, Source.TRAJECTORY),
            Field(NONE, Source.TIMESTEP, -4, 9, dtype=torch.int64),
            Field(NONE, Source.POSITION, -4, 9, dtype=torch.int64),
        ]

    want = gather(reference, fields_of(rows), ordinary, n_steps)
    for ops in (native, reference):
        got = gather(ops, fields_of(torch.cat((rows, *received))), arrived, n_steps)
        assert all(same_bits(a, b) for a, b in zip(got, want, strict=True))


def test_every_column_is_looked_at(careful: Ops) -> None:
    """Each alone is inside; a column of T rows may read a step that one of T+1 rows does not, and reverse."""
    last = Field(COLUMN[:1], offset=1, pad="edge")  # reads step T - 1
    final = Field(COLUMN[:1], Source.STEPS_PLUS_ONE, offset=1, pad="edge")  # reads step T
    anchor = STEPS - 1
    gather(careful, [last], record(anchor, -anchor))
    gather(careful, [final], record(anchor, -STEPS))
    for fields in ([last, final], [final, last]):
        for first_row in (-anchor, -STEPS):
            refuses(careful, fields, record(anchor, first_row))
        two = [Field(COLUMN[:2], f.source, f.offset, pad="edge") for f in fields]
        gather(careful, two, record(anchor, -anchor))
    unread = Field(COLUMN[:1], offset=1)
    gather(careful, [unread, final], record(anchor, -STEPS))


@pytest.mark.parametrize("n", [1, 2, 9])
@pytest.mark.parametrize("anchor", [0, 3, STEPS - 1])
def test_n_step(native: Ops, reference: Ops, same_bits: SameBits, anchor: int, n: int) -> None:
    torch.manual_seed(n)
    reward, steps = torch.randn(STEPS), slice(anchor, min(anchor + n, STEPS))

    def run(ops: Ops, reward: Tensor, first_row: int) -> tuple[Tensor, Tensor, Tensor]:
        out = torch.full((1,), 9.0), torch.full((1,), 9.0), torch.full((1,), 9)
        flags = torch.zeros_like(reward, dtype=torch.bool)
        ops.n_step_(*out, reward, flags, flags, powers_of(0.9, n), record(anchor, first_row), n)
        return out

    want, some = run(reference, reward, 0), reward[steps].clone()
    for ops in (native, reference):
        assert all(same_bits(a, b) for a, b in zip(run(ops, some, -anchor), want, strict=True))


@pytest.mark.parametrize("shift", [-1, 1])
def test_n_step_of_one_row_too_few_is_refused(careful: Ops, shift: int) -> None:
    for anchor, n in itertools.product((0, 3, STEPS - 1), (1, 2, 9)):
        reward = torch.zeros(min(anchor + n, STEPS) - anchor)
        out, flags = (torch.full((1,), 9.0), torch.full((1,), 9.0), torch.full((1,), 9)), reward > 1
        with REFUSED:
            careful.n_step_(*out, reward, flags, None, powers_of(0.9, n), record(anchor, shift - anchor), n)
        assert [x.tolist() for x in out] == [[9], [9], [9]]


def test_public_wrappers_take_them_too() -> None:
    values, mask = op_wrappers.gather(COLUMN[2:4].clone(), record(3, -2), offset=-1, length=2)
    assert torch.equal(values[0], COLUMN[2:4])
    assert mask.all()
    flags = torch.zeros(2, dtype=torch.bool)
    returns, _, steps = op_wrappers.n_step(torch.tensor([1.0, 2.0]), flags, None, record(3, -3), 2, 0.5)
    assert (returns.tolist(), steps.tolist()) == ([2.0], [2])
