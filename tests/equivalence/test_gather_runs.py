"""Runs that are converted: alignments, lengths and periods, whatever a kernel reads and writes at once."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os

import pytest
import torch
from gather_support import Field, SameBits, check, gather, random_bits
from op_wrappers import scaling
from torch import Tensor

from deepspeed_gear.ops import Ops
from deepspeed_gear.ops import reference as meaning
from deepspeed_gear.ops.records import Align
from deepspeed_gear.schema import DTYPES

ALLOWED = [
    (source, target)
    for source, target in itertools.product(DTYPES, DTYPES)
    if source != target and meaning.is_allowed(DTYPES[source], DTYPES[target], False)
]
SCALED = [
    (torch.uint8, torch.float32),
    (torch.uint8, torch.bfloat16),
    (torch.int16, torch.float64),
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float32),
    (torch.float64, torch.float16),
    (torch.int64, torch.float32),
]


def at_offset(values: Tensor, offset: int) -> Tensor:
    """Copy a tensor to an address that is `offset` bytes behind a multiple of 16."""
    size = values.numel() * values.element_size()
    room = torch.empty(size + 32, dtype=torch.uint8)
    start = -room.data_ptr() % 16 + offset
    there = room[start : start + size].view(values.dtype).view(values.shape)
    assert there.copy_(values).data_ptr() % 16 == offset
    return there


def runs_of(lengths: range) -> tuple[Tensor, int]:
    """Trajectories of these lengths, one after the other, each read at its last step; and all their rows."""
    rows, samples = 0, []
    for slot, length in enumerate(lengths):
        samples.append([slot, slot, 0, rows, length, length - 1, 0, 0])
        rows += length
    return torch.tensor(samples), rows


@pytest.mark.parametrize(("source", "target"), ALLOWED)
def test_every_alignment_and_length(
    reference: Ops, native: Ops, same_bits: SameBits, source: str, target: str
) -> None:
    """Runs of 1 to 70 elements from every address, to any; the last one ends with its column."""
    torch.manual_seed(1)
    dtype = DTYPES[source]
    resolutions, rows = runs_of(range(1, 71))
    values = random_bits(dtype, rows)
    columns = [at_offset(values, offset) for offset in range(0, 16, dtype.itemsize)]
    fields = [
        Field(column, offset=-70, length=71, align=Align.RIGHT, dtype=DTYPES[target]) for column in columns
    ]
    out = check(reference, native, same_bits, fields, resolutions)
    assert all(same_bits(one, out[0]) for one in out[: len(fields)])


@pytest.mark.parametrize("elements", [1, 3, 11, 44, 61])
@pytest.mark.parametrize(("source", "target"), SCALED)
def test_shifts_and_gains(
    reference: Ops, native: Ops, same_bits: SameBits, source: torch.dtype, target: torch.dtype, elements: int
) -> None:
    """One for all elements, one for each of a row, and more than a row has."""
    torch.manual_seed(elements)
    resolutions, rows = runs_of(range(1, 14))
    values = random_bits(source, rows, elements)
    shift, gain = scaling(*torch.randn(2, elements, dtype=torch.float64))
    fields = [
        Field(column, offset=-5, length=7, pad=pad, dtype=target, shift=s, gain=g)
        for column in (values, at_offset(values, 16 - source.itemsize))
        for s, g in ((shift, gain), (shift[:1], gain[:1]), (shift.repeat(3), gain.repeat(3)))
        for pad in (2.0, "edge")
    ]
    check(reference, native, same_bits, fields, resolutions)


@pytest.mark.parametrize("offset", [0, 1, 6, 15])
@pytest.mark.parametrize("target", [torch.float32, torch.bfloat16, torch.float64, torch.int32])
def test_frames(reference: Ops, native: Ops, same_bits: SameBits, target: torch.dtype, offset: int) -> None:
    """Rows of 7056 bytes: each lane of a team reads many times."""
    torch.manual_seed(offset)
    resolutions, rows = runs_of(range(1, 5))
    column = at_offset(random_bits(torch.uint8, rows, 7056), offset)
    fields = [Field(column, offset=-2, length=3, dtype=target)]
    if target.is_floating_point:
        scale = scaling(*torch.rand(2, 7056, dtype=torch.float64))
        fields += [
            Field(column, offset=-3, length=5, pad="edge", dtype=target, shift=s, gain=g)
            for s, g in (scale, (scale[0][:1], scale[1][:1]))
        ]
    check(reference, native, same_bits, fields, resolutions)


def guarded(count: int) -> tuple[Tensor, mmap.mmap]:
    """Map bytes between pages that cannot be read."""
    page = mmap.PAGESIZE
    size = -(-count // page) * page
    area = mmap.mmap(-1, size + 2 * page)
    every = torch.frombuffer(area, dtype=torch.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    for start in (0, page + size):
        assert libc.mprotect(ctypes.c_void_p(every.data_ptr() + start), ctypes.c_size_t(page), 0) == 0
    return every[page : page + size], area


@pytest.mark.parametrize("target", [torch.float64, torch.bfloat16])
def test_nothing_is_read_around_the_column(kernels_on_host: Ops, target: torch.dtype) -> None:
    """In a process of its own, as the system ends one that does."""
    memory, _ = guarded(1)
    # Of each trajectory no step is read, and its rows would lie in front.
    nothing = torch.tensor([[0, 0, 0, -6, 1, 0, 0, 0]]).repeat(9, 1)
    child = os.fork()
    if child == 0:
        for length, offset in itertools.product(range(1, 40), range(4)):
            for side in (memory[: 4 * length], memory[len(memory) - 4 * length :]):
                # The runs lie at different alignments of the batch, by the padding in front.
                field = Field(side.view(torch.float32), offset=-offset, length=length + offset, dtype=target)
                resolutions = torch.tensor([[0, 0, 0, 0, length, 0, 0, 0]])
                gather(kernels_on_host, [field], resolutions)
        gather(kernels_on_host, [Field(memory.view(torch.float32), offset=4, dtype=target)], nothing)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
