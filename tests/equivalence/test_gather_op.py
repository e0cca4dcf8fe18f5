"""Windows, padding, masks and conversions: the C++ against the reference, bit for bit."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from gather_support import (
    FIRST_ROWS,
    LENGTHS,
    NONE,
    NUM_ROWS,
    Field,
    SameBits,
    check,
    gather,
    random_bits,
    resolutions_of,
)
from op_wrappers import scaling

from deepspeed_gear.ops import Ops
from deepspeed_gear.ops import reference as meaning
from deepspeed_gear.ops.records import Align, Source
from deepspeed_gear.schema import DTYPES


@pytest.mark.parametrize("count", [0, 1, 7, 33])
@pytest.mark.parametrize("length", [1, 3, 8, 50])
@pytest.mark.parametrize("align", [Align.IN_PLACE, Align.LEFT, Align.RIGHT])
def test_windows(
    reference: Ops, native: Ops, same_bits: SameBits, count: int, length: int, align: int
) -> None:
    torch.manual_seed(count * 100 + length)
    column = random_bits(torch.float32, NUM_ROWS, 3)
    for source, offset, pad in itertools.product(
        (Source.STEPS, Source.STEPS_PLUS_ONE), (-60, -length, -3, -1, 0, 1, 2, 60), (0.0, -0.0, 7.5, "edge")
    ):
        field = Field(column, source, offset, length, align, pad=pad, mask=0)
        _, mask, counters = check(reference, native, same_bits, [field], resolutions_of(count))
        assert counters.tolist() == [1 + int(mask.sum()), 2 + mask.numel(), 3 + mask.numel() * 12]


@pytest.mark.parametrize("target", DTYPES)
@pytest.mark.parametrize("source", DTYPES)
def test_every_conversion(reference: Ops, native: Ops, same_bits: SameBits, source: str, target: str) -> None:
    """Both give the same bits, or both refuse."""
    torch.manual_seed(1)
    from_dtype, to_dtype = DTYPES[source], DTYPES[target]
    column, resolutions = random_bits(from_dtype, NUM_ROWS, 61), resolutions_of(33)
    shift, gain = torch.randn(61, dtype=torch.float64), torch.randn(61, dtype=torch.float64)
    for scaled, pad in itertools.product((False, True), (0.0, 1.0, "edge")):
        scale = scaling(shift, gain) if scaled else (NONE, NONE)
        field = Field(column, offset=-2, length=5, pad=pad, dtype=to_dtype, shift=scale[0], gain=scale[1])
        if meaning.is_allowed(from_dtype, to_dtype, scaled):
            check(reference, native, same_bits, [field], resolutions)
        else:
            for ops in (reference, native):
                with pytest.raises((ValueError, RuntimeError), match=r"conver|floating"):
                    gather(ops, [field], resolutions)


@pytest.mark.parametrize("target", ["float16", "bfloat16"])
def test_rounding_to_16_bits_at_every_boundary(
    reference: Ops, native: Ops, same_bits: SameBits, target: str
) -> None:
    """All values of the target, the ties between them, and the floats beside both."""
    dtype = DTYPES[target]
    every = torch.arange(1 << 16).to(torch.int32).to(torch.int16).view(dtype)
    finite = every[every.isfinite()].double().unique()
    ties = (finite[1:] + finite[:-1]) / 2
    edge = torch.tensor([65519.996, 65520.0, 3.3961775e38, 1e-46, 2.0**-25], dtype=torch.float64)
    exact = torch.cat((finite, ties, edge, -edge)).float()
    nan = torch.tensor([0x7F800001, 0x7FC00000, -1], dtype=torch.int32).view(torch.float32)
    around = [exact, exact.nextafter(torch.tensor(torch.inf)), exact.nextafter(torch.tensor(-torch.inf)), nan]
    column = torch.cat(around)
    resolutions = torch.tensor([[0, 0, 0, 0, len(column), 0, 0, 0]])
    out = check(reference, native, same_bits, [Field(column, length=len(column), dtype=dtype)], resolutions)[
        0
    ]
    assert torch.equal(out.view(-1)[:-3].float(), column[:-3].to(dtype).float())
    # And back: every value of the narrow type, each NaN with its payload.
    wide = Field(every, length=1 << 16, dtype=torch.float32)
    resolutions[0, 4] = 1 << 16
    check(reference, native, same_bits, [wide], resolutions)


@pytest.mark.parametrize("elements", [1, 2, 3, 11, 61, 7056])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_row_sizes(
    reference: Ops, native: Ops, same_bits: SameBits, elements: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(elements)
    field = Field(random_bits(dtype, NUM_ROWS, elements), offset=-3, length=7, pad="edge", mask=0)
    check(reference, native, same_bits, [field], resolutions_of(33))


def test_column_at_an_odd_address(reference: Ops, native: Ops, same_bits: SameBits) -> None:
    rows = random_bits(torch.uint8, NUM_ROWS * 3 + 1)[1:].view(NUM_ROWS, 3)
    check(reference, native, same_bits, [Field(rows, offset=-1, length=4)], resolutions_of(33))


@pytest.mark.parametrize("repeats", [1, 5])
def test_scaling_repeats(reference: Ops, native: Ops, same_bits: SameBits, repeats: int) -> None:
    torch.manual_seed(3)
    shift, gain = torch.randn(2, 11, dtype=torch.float64).unbind()
    column = torch.randn(NUM_ROWS, 11)
    plain = Field(column, offset=-3, length=7, pad=2.5, shift=shift, gain=gain)
    more = Field(column, offset=-3, length=7, pad=2.5, shift=shift.repeat(repeats), gain=gain.repeat(repeats))
    out, tiled, _ = check(reference, native, same_bits, [plain, more], resolutions_of(33))
    assert same_bits(out, tiled)
    one = Field(column, offset=-3, length=7, shift=shift[:1], gain=gain[:1])
    check(reference, native, same_bits, [one], resolutions_of(33))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("count", [0, 1, 7, 33])
def test_many_fields_at_once(
    reference: Ops, native: Ops, same_bits: SameBits, count: int, threads: int
) -> None:
    """Every source, n-step offsets, shared masks."""
    torch.manual_seed(count)
    observation = random_bits(torch.float32, NUM_ROWS, 2, 3)
    window = {"offset": -4, "length": 9}
    fields = [
        Field(observation, Source.STEPS_PLUS_ONE, offset=-4, length=5, mask=0, pad="edge"),
        Field(random_bits(torch.bool, NUM_ROWS), **window, mask=1),  # type: ignore[arg-type]
        Field(random_bits(torch.int16, NUM_ROWS), **window, mask=1, align=Align.IN_PLACE),  # type: ignore[arg-type]
        Field(random_bits(torch.float64, len(LENGTHS), 4), Source.TRAJECTORY, mask=2),
        Field(observation, Source.STEPS_PLUS_ONE, after_n_step=1, mask=3),
        Field(observation, Source.STEPS, after_n_step=1, offset=-2, length=6, align=Align.RIGHT, pad="edge"),
        *(
            Field(NONE, Source.TIMESTEP, -4, 9, align, pad=pad, dtype=torch.int64)
            for align in (Align.IN_PLACE, Align.LEFT, Align.RIGHT)
            for pad in (-1.0, "edge")
        ),
        *(
            Field(NONE, Source.POSITION, offset, 9, align, follows, dtype=torch.int64)
            for align in (Align.IN_PLACE, Align.LEFT, Align.RIGHT)
            for offset, follows in ((-4, 0), (-60, 0), (0, 1))
        ),
    ]
    n_steps = torch.randint(1, 6, (count,))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        check(reference, native, same_bits, fields, resolutions_of(count), n_steps, threads)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("count", [0, 1, 33])
@pytest.mark.parametrize(("length", "part"), [(1, 1), (6, 1), (6, 2), (6, 3), (6, 6), (48, 12), (7, 4)])
def test_parts_of_windows(
    reference: Ops, native: Ops, same_bits: SameBits, count: int, length: int, part: int
) -> None:
    """Every part has the reference's bits and counters, also one that meets no real row."""
    torch.manual_seed(count * 100 + length + part)
    floats, bytes_ = random_bits(torch.float32, NUM_ROWS, 5), random_bits(torch.uint8, NUM_ROWS, 3)
    scale = scaling(*torch.randn(2, 5, dtype=torch.float64))
    n_steps, resolutions = torch.randint(1, 6, (count,)), resolutions_of(count)
    aligns = (Align.IN_PLACE, Align.LEFT, Align.RIGHT)
    firsts = sorted({*range(0, length - part + 1, part), length - part})
    for first, align, offset in itertools.product(firsts, aligns, (-60, -length, -3, 0, 2, 60)):
        window: dict[str, Any] = {
            "offset": offset,
            "length": length,
            "align": align,
            "first": first,
            "count": part,
        }
        fields = [
            Field(floats, mask=0, pad=7.5, **window),
            Field(floats, Source.STEPS_PLUS_ONE, after_n_step=1, pad="edge", mask=1, **window),
            Field(bytes_, pad="edge", mask=0, **window),
            Field(floats, pad="edge", dtype=torch.bfloat16, shift=scale[0], gain=scale[1], mask=2, **window),
            Field(NONE, Source.TIMESTEP, pad="edge", dtype=torch.int64, mask=3, **window),
            Field(NONE, Source.POSITION, dtype=torch.int64, mask=4, **window),
        ]
        found = check(reference, native, same_bits, fields, resolutions, n_steps)
        *masks, counters = found[len(fields) :]
        assert found[5].tolist() == [[[first + i] for i in range(part)]] * count
        real = 2 * int(masks[0].sum()) + sum(int(mask.sum()) for mask in masks[1:])
        row_bytes = 20 + 20 + 3 + 10 + 8 + 8
        assert counters.tolist() == [1 + real, 2 + 6 * count * part, 3 + count * part * row_bytes]


@pytest.mark.parametrize("count", [0, 1, 7, 33, 300])
def test_order_changes_nothing(
    reference: Ops, cpu: Ops, native: Ops, same_bits: SameBits, count: int
) -> None:
    torch.manual_seed(count)
    resolutions, n_steps = resolutions_of(count), torch.randint(0, 3, (count,))
    column = random_bits(torch.float32, NUM_ROWS, 5)
    fields = [
        Field(column, offset=-2, length=7, pad="edge", mask=0),
        Field(column, Source.STEPS_PLUS_ONE, after_n_step=1, mask=1, dtype=torch.float16),
        Field(random_bits(torch.uint8, len(LENGTHS), 3), Source.TRAJECTORY),
        Field(NONE, Source.TIMESTEP, -3, 5, dtype=torch.int64, after_n_step=1),
        Field(NONE, Source.POSITION, 0, 5, dtype=torch.int64),
    ]
    expected = gather(reference, fields, resolutions, n_steps)
    by_row = resolutions[:, 3].argsort(stable=True)
    for order in (None, torch.arange(count), torch.arange(count).flip(0), torch.randperm(count), by_row):
        for ops in (reference, native, cpu.on_host()):
            got = gather(ops, fields, resolutions, n_steps, 1, order)
            assert all(same_bits(a, b) for a, b in zip(got, expected, strict=True))


def test_an_order_that_is_none_is_refused(reference: Ops, cpu: Ops, kernels_on_host: Ops) -> None:
    field, resolutions = Field(torch.zeros(NUM_ROWS, 2)), resolutions_of(3)
    for bad in ([0, 1, 1], [0, 1, 3], [-1, 0, 1]):
        for ops in (reference, cpu, cpu.on_host()):
            with pytest.raises(
                (ValueError, RuntimeError), match=r"order must have every index of \[0, 3\) once"
            ):
                gather(ops, [field], resolutions, None, 1, torch.tensor(bad))
    for bad in ([0, 1, 3], [-1, 0, 1]):
        with pytest.raises(RuntimeError, match="leads outside"):
            gather(kernels_on_host, [field], resolutions, None, 1, torch.tensor(bad))
    for ops in (cpu, kernels_on_host):
        with pytest.raises(RuntimeError, match="order must have 3 values, got 2"):
            gather(ops, [field], resolutions, None, 1, torch.arange(2))
        with pytest.raises(RuntimeError, match="order must be Long"):
            gather(ops, [field], resolutions, None, 1, torch.arange(3, dtype=torch.int32))


@pytest.mark.parametrize("num_fields", [15, 16, 17, 33])
def test_more_fields_than_one_launch_takes(
    reference: Ops, native: Ops, same_bits: SameBits, num_fields: int
) -> None:
    torch.manual_seed(num_fields)
    columns = [random_bits(torch.float32, NUM_ROWS, 1 + i % 5) for i in range(num_fields)]
    some = [torch.float32, torch.float64, torch.bfloat16]
    fields = [
        Field(column, offset=i % 7 - 3, length=1 + i % 4, mask=i, dtype=some[i % 3])
        for i, column in enumerate(columns)
    ]
    check(reference, native, same_bits, fields, resolutions_of(70))


@pytest.mark.parametrize("length", [1, 4, 20])
@pytest.mark.parametrize("padded", [[], [300], [0, 599]])
def test_blocks_of_whole_windows(
    reference: Ops, native: Ops, same_bits: SameBits, length: int, padded: list[int]
) -> None:
    """Many samples without padding, of every size that has a loop of its own, and some with padding."""
    torch.manual_seed(length)
    count, slot = 600, 3  # the longest trajectory
    sizes, zero = (1, 2, 3, 4, 8, 12, 44, 64, 65, 68, 600, 2000), torch.zeros(count, dtype=torch.int64)
    anchor = torch.randint(length - 1, LENGTHS[slot] - 1, (count,))
    resolutions = torch.stack(
        (zero + slot, zero + slot, zero, zero + FIRST_ROWS[slot], zero + LENGTHS[slot], anchor, zero, zero), 1
    )
    for sample in padded:
        resolutions[sample, 5] = 0 if sample else LENGTHS[slot] - 1
    if length > 1 and padded:
        resolutions[17] = torch.tensor([-1, -1, 0, 0, 0, 0, 0, 17])  # no sample
    n_steps = torch.randint(0, 2, (count,))
    columns = [random_bits(torch.uint8, NUM_ROWS, size) for size in sizes]
    fields = [Field(column, offset=1 - length, length=length, mask=0) for column in columns]
    other = random_bits(torch.float32, NUM_ROWS, 11)
    fields.append(Field(other, Source.STEPS_PLUS_ONE, 2 - length, length, mask=1))
    fields.append(Field(other, Source.STEPS_PLUS_ONE, 1 - length, length, after_n_step=1, mask=2, pad=3.0))
    check(reference, native, same_bits, fields, resolutions, n_steps)


def test_nothing_to_gather(reference: Ops, native: Ops, same_bits: SameBits) -> None:
    check(reference, native, same_bits, [], resolutions_of(7))


@pytest.mark.parametrize(
    ("word", "value"),
    [
        (3, -1),
        (3, NUM_ROWS),
        (3, 1 << 62),
        (4, 0),
        (4, (1 << 63) - 1),
        (5, -1),
        (5, 1),
        (1, -1),
    ],
)
def test_resolution_outside_the_columns_is_refused(careful: Ops, word: int, value: int) -> None:
    resolutions = torch.tensor([[0, 0, 0, 0, 1, 0, 0, 0]]).repeat(3, 1)
    field = Field(torch.zeros(NUM_ROWS, 2))
    gather(careful, [field], resolutions)
    resolutions[2, word] = value
    with pytest.raises((ValueError, RuntimeError), match=r"resolution 2 .*must lie in the columns"):
        gather(careful, [field], resolutions)


def test_final_row_and_slots_are_checked(careful: Ops) -> None:
    resolutions = torch.tensor([[0, 4, 0, 2, 3, 0, 0, 0]])
    column = torch.zeros(5, 2)
    gather(careful, [Field(column, offset=3, pad="edge")], resolutions)
    gather(careful, [Field(column, Source.TRAJECTORY)], resolutions)
    final = Field(column, Source.STEPS_PLUS_ONE, offset=3, pad="edge")
    for field in (final, Field(column[:4], Source.TRAJECTORY)):
        with pytest.raises((ValueError, RuntimeError), match="must lie in the columns"):
            gather(careful, [field], resolutions)


@pytest.mark.parametrize(
    ("field", "match"),
    [
        (Field(torch.zeros(50, 2), length=0), "length"),
        (Field(torch.zeros(50, 2), offset=1 << 41), "offset"),
        (Field(torch.zeros(50, 2), Source.TRAJECTORY, length=2), "per trajectory"),
        (Field(torch.zeros(50, dtype=torch.int8), pad=128.0, offset=-1), "whole number"),
        (Field(torch.zeros(50, dtype=torch.int64), pad=0.5, offset=-1), "whole number"),
        (Field(torch.zeros(50, dtype=torch.bool), pad=2.0, offset=-1), "whole number"),
        (Field(torch.zeros(50, 2), after_n_step=1), "n_steps"),
        (Field(torch.zeros(50, 2), length=5, first=-1, count=2), "first and count must be a part"),
        (Field(torch.zeros(50, 2), length=5, first=2, count=0), "first and count must be a part"),
        (Field(torch.zeros(50, 2), length=5, first=4, count=2), "first and count must be a part"),
        (Field(torch.zeros(50, 2), length=5, first=5, count=1), "first and count must be a part"),
        (Field(torch.zeros(50, 2), length=5, first=0, count=6), "first and count must be a part"),
        (Field(torch.zeros(50, 2), length=5, first=(1 << 63) - 1, count=5), "first and count must be a part"),
        (Field(torch.zeros(50, 2), Source.TRAJECTORY, first=1, count=1), "first and count must be a part"),
    ],
)
@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_impossible_field_is_refused(
    request: pytest.FixtureRequest, name: str, field: Field, match: str
) -> None:
    resolutions = torch.tensor([[0, 0, 0, 0, 1, 0, 0, 0]])
    with pytest.raises((ValueError, RuntimeError), match=match):
        gather(request.getfixturevalue(name), [field], resolutions)
