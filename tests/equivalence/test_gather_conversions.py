"""Conversions of gathered values: every backend against the reference, bit for bit."""

import ctypes
import itertools
import mmap
import os
from typing import Any

import pytest
import torch
from gather_fields import (
    NONE,
    NUM_ROWS,
    Field,
    check,
    gather,
    random_bits,
    resolutions_of,
    scaling,
)
from op_kit import (
    REFERENCE,
    REFUSED,
    at_offset,
    same_bits,
)
from torch import Tensor

from deepspeed_gear.ops import Ops
from deepspeed_gear.ops.conversion import is_allowed
from deepspeed_gear.ops.records import Align
from deepspeed_gear.schema import DTYPES

# ---- conversions: alignments, lengths and periods, whatever a kernel reads and writes at once ----


def runs_of(lengths: range) -> tuple[Tensor, int]:
    """Trajectories of these lengths, one after the other, each read at its last step; and all their
    rows.
    """
    rows = 0
    samples = []
    for slot, length in enumerate(lengths):
        samples.append([slot, slot, 0, rows, length, length - 1, 0, 0])
        rows += length
    return torch.tensor(samples), rows


@pytest.mark.parametrize("target", DTYPES)
@pytest.mark.parametrize("source", DTYPES)
def test_every_conversion(native: Ops, source: str, target: str) -> None:
    """Both give the same bits, or both refuse; runs of 1 to 70 elements from every
    address, to any.
    """
    torch.manual_seed(1)
    from_dtype = DTYPES[source]
    to_dtype = DTYPES[target]
    column = random_bits(from_dtype, NUM_ROWS, 61)
    resolutions = resolutions_of(33)
    scale = scaling(*torch.randn(2, 61, dtype=torch.float64))
    for shift, gain in ((NONE, NONE), scale):
        window: dict[str, Any] = {
            "offset": -2,
            "length": 5,
            "dtype": to_dtype,
            "shift": shift,
            "gain": gain,
        }
        fields = [Field(column, pad=pad, **window) for pad in (0.0, 1.0, "edge")]
        if is_allowed(from_dtype, to_dtype, len(shift) > 0):
            check(native, fields, resolutions)
        else:
            for ops in (REFERENCE, native):
                with pytest.raises(REFUSED, match=r"conver|floating"):
                    gather(ops, fields, resolutions)
    if source != target and is_allowed(from_dtype, to_dtype, False):
        runs, rows = runs_of(range(1, 71))  # the last one ends with its column
        values = random_bits(from_dtype, rows)
        columns = [at_offset(values, offset) for offset in range(0, 16, from_dtype.itemsize)]
        window = {"offset": -70, "length": 71, "align": Align.RIGHT, "dtype": to_dtype}
        out = check(native, [Field(column, **window) for column in columns], runs)
        assert all(same_bits(one, out[0]) for one in out[: len(columns)])


@pytest.mark.parametrize("target", ["float16", "bfloat16"])
def test_rounding_to_16_bits_at_every_boundary(native: Ops, target: str) -> None:
    """All values of the target, the ties between them, and the floats beside both."""
    dtype = DTYPES[target]
    every = torch.arange(1 << 16).to(torch.int32).to(torch.int16).view(dtype)
    finite = every[every.isfinite()].double().unique()
    ties = (finite[1:] + finite[:-1]) / 2
    edge = torch.tensor([65519.996, 65520.0, 3.3961775e38, 1e-46, 2.0**-25], dtype=torch.float64)
    exact = torch.cat((finite, ties, edge, -edge)).float()
    nan = torch.tensor([0x7F800001, 0x7FC00000, -1], dtype=torch.int32).view(torch.float32)
    around = [
        exact,
        exact.nextafter(torch.tensor(torch.inf)),
        exact.nextafter(torch.tensor(-torch.inf)),
        nan,
    ]
    column = torch.cat(around)
    resolutions = torch.tensor([[0, 0, 0, 0, len(column), 0, 0, 0]])
    out = check(native, [Field(column, length=len(column), dtype=dtype)], resolutions)[0]
    assert torch.equal(out.view(-1)[:-3].float(), column[:-3].to(dtype).float())
    # And back: every value of the narrow type, each NaN with its payload.
    resolutions[0, 4] = 1 << 16
    check(native, [Field(every, length=1 << 16, dtype=torch.float32)], resolutions)


SCALED = [
    (torch.uint8, torch.float32),
    (torch.uint8, torch.bfloat16),
    (torch.int16, torch.float64),
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float32),
    (torch.float64, torch.float16),
    (torch.int64, torch.float32),
]


@pytest.mark.parametrize(("source", "target"), SCALED)
def test_shifts_and_gains(native: Ops, source: torch.dtype, target: torch.dtype) -> None:
    """One for all elements, one for each of a row, and more than a row has."""
    resolutions, rows = runs_of(range(1, 14))
    for elements in (1, 3, 11, 44, 61):
        torch.manual_seed(elements)
        values = random_bits(source, rows, elements)
        shift, gain = scaling(*torch.randn(2, elements, dtype=torch.float64))
        fields = [
            Field(column, offset=-5, length=7, pad=pad, dtype=target, shift=s, gain=g)
            for column in (values, at_offset(values, 16 - source.itemsize))
            for pad in (2.0, "edge")
            for s, g in ((shift[:1], gain[:1]), (shift, gain), (shift.repeat(3), gain.repeat(3)))
        ]
        out = check(native, fields, resolutions)
        assert all(map(same_bits, out[1:12:3], out[2:12:3]))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_row_sizes_and_odd_addresses(native: Ops, dtype: torch.dtype) -> None:
    window: dict[str, Any] = {"offset": -3, "length": 7, "pad": "edge", "mask": 0}
    columns = [random_bits(dtype, NUM_ROWS, elements) for elements in (1, 2, 3, 11, 61, 7056, 7057)]
    columns.append(at_offset(random_bits(dtype, NUM_ROWS, 3), dtype.itemsize))
    check(native, [Field(column, **window) for column in columns], resolutions_of(33))


@pytest.mark.parametrize("elements", [1, 3, 130])
def test_batches_larger_than_a_cores_caches(native: Ops, elements: int) -> None:
    """Long windows, most of which is padding by rows of any size."""
    window: dict[str, Any] = {"length": 5000 // elements + 1, "pad": "edge"}
    columns = [random_bits(torch.uint8, NUM_ROWS, elements) for _ in range(2)]
    columns[1] = at_offset(columns[1], 1)
    fields = [Field(column, offset=offset, **window) for column in columns for offset in (-30, -5)]
    check(native, fields, resolutions_of(230))


@pytest.mark.parametrize("target", [torch.float32, torch.bfloat16, torch.float64, torch.int32])
def test_frames(native: Ops, target: torch.dtype) -> None:
    """Rows of 7056 bytes: each lane of a team reads many times."""
    resolutions, rows = runs_of(range(1, 5))
    shift, gain = scaling(*torch.rand(2, 7056, dtype=torch.float64))
    values = random_bits(torch.uint8, rows, 7056)
    fields = []
    for column in (at_offset(values, offset) for offset in (0, 1, 6, 15)):
        fields.append(Field(column, offset=-2, length=3, dtype=target))
        for s, g in ((shift, gain), (shift[:1], gain[:1])) if target.is_floating_point else ():
            fields.append(
                Field(column, offset=-3, length=5, pad="edge", dtype=target, shift=s, gain=g)
            )
    check(native, fields, resolutions)


@pytest.mark.parametrize("target", [torch.float64, torch.bfloat16])
def test_nothing_is_read_around_the_column(kernels_on_host: Ops, target: torch.dtype) -> None:
    """In a process of its own, as the system ends one that does."""
    page = mmap.PAGESIZE
    libc = ctypes.CDLL(None, use_errno=True)
    every = torch.frombuffer(mmap.mmap(-1, 3 * page), dtype=torch.uint8)
    for start in (0, 2 * page):  # pages around the column that cannot be read
        assert (
            libc.mprotect(ctypes.c_void_p(every.data_ptr() + start), ctypes.c_size_t(page), 0) == 0
        )
    memory = every[page : 2 * page]
    # Of each trajectory no step is read, and its rows would lie in front.
    nothing = torch.tensor([[0, 0, 0, -6, 1, 0, 0, 0]]).repeat(9, 1)
    child = os.fork()
    if child == 0:
        for length, offset in itertools.product(range(1, 40), range(4)):
            for side in (memory[: 4 * length], memory[len(memory) - 4 * length :]):
                # The runs lie at different alignments of the batch, by the padding in front.
                field = Field(
                    side.view(torch.float32), offset=-offset, length=length + offset, dtype=target
                )
                gather(kernels_on_host, [field], torch.tensor([[0, 0, 0, 0, length, 0, 0, 0]]))
        gather(
            kernels_on_host, [Field(memory.view(torch.float32), offset=4, dtype=target)], nothing
        )
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
