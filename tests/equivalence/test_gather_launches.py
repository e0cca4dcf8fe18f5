"""How the kernel that gathers is launched: few blocks that its fields share, for a range of samples
each.
"""

import ctypes
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gather_fields import NONE, Field, check, gather, random_bits
from op_kit import REFERENCE, same_bits

from deepspeed_gear.ops import Ops
from deepspeed_gear.ops.records import Source

Launched = Callable[[], list[int]]
LAUNCH_BYTES = 6 << 20  # as gather.cu
ROWS = 400


def resolutions_of(count: int, steps: int) -> torch.Tensor:
    """Samples of trajectories of `steps` steps that begin anywhere."""
    first = torch.randint(0, ROWS - steps, (count,))
    rest = torch.zeros(count, dtype=torch.int64)
    fixed = [torch.full((count,), value) for value in (steps, steps // 2)]
    return torch.stack((rest, rest, rest, first, *fixed, rest, rest), dim=1)


def fields_of_some_sizes() -> list[Field]:
    return [
        Field(
            random_bits(torch.uint8, ROWS, 7056), offset=-8, length=16, mask=0, dtype=torch.bfloat16
        ),
        Field(random_bits(torch.float32, ROWS, 1000), offset=-3, length=10, pad="edge"),
        Field(random_bits(torch.float32, ROWS, 3), offset=-3, length=10, follows=1, mask=1),
        Field(NONE, Source.TIMESTEP, -3, 10, dtype=torch.int64),
    ]


BYTES = 16 * 7056 + 10 * 4000 + 10 * 12 + 10 * 8  # that a sample of these moves


@pytest.mark.parametrize("most", [2, 5, 32])
@pytest.mark.parametrize("is_ordered", [False, True])
def test_samples_are_cut_into_launches_of_few_blocks(
    kernels_on_host: Ops, launched: Launched, most: int, is_ordered: bool
) -> None:
    torch.manual_seed(most)
    count = 100
    fields = fields_of_some_sizes()
    resolutions = resolutions_of(count, 12)
    n_steps = torch.randint(0, 3, (count,))
    order = torch.randperm(count) if is_ordered else None
    expected = gather(REFERENCE, fields, resolutions, n_steps)
    got = gather(kernels_on_host, fields, resolutions, n_steps, most, order)
    assert all(map(same_bits, got, expected))
    launches = launched()
    assert len(launches) == -(-count // (LAUNCH_BYTES // BYTES)) == 3
    assert all(len(fields) <= blocks <= max(most, len(fields)) for blocks in launches)


def test_fields_share_the_blocks_by_their_bytes(kernels_on_host: Ops, launched: Launched) -> None:
    fields = fields_of_some_sizes()
    resolutions = resolutions_of(30, 12)
    shares = {}
    for most in (8, 32):
        gather(kernels_on_host, fields, resolutions, torch.zeros(30, dtype=torch.int64), most)
        shares[most] = launched()
    # One each, and of the others 73% and 26%; no more than a block for each of the 30 windows.
    assert shares == {8: [4 + 2 + 1], 32: [4 + 20 + 7]}


def test_large_windows_are_launched_eight_at_once(kernels_on_host: Ops, launched: Launched) -> None:
    """A launch of fewer would not keep enough reads under way."""
    field = Field(random_bits(torch.uint8, ROWS, 7056), offset=-150, length=300)
    gather(kernels_on_host, [field], resolutions_of(17, 300), None, 32)
    assert launched() == [6, 6, 5]


@pytest.mark.parametrize("threads", [0, 1])
def test_without_a_bound_all_is_one_launch(
    kernels_on_host: Ops, launched: Launched, threads: int
) -> None:
    fields = fields_of_some_sizes()
    resolutions = resolutions_of(100, 12)
    n_steps = torch.zeros(100, dtype=torch.int64)
    check(kernels_on_host, fields, resolutions, n_steps, threads)
    teams = [100, 100, 100 * 8 // 256 + 1, 100 * 10 // 256 + 1]
    assert launched() == [sum(teams)]


@pytest.mark.parametrize("num_fields", [16, 17])
def test_each_launch_of_many_fields_has_the_blocks(
    kernels_on_host: Ops, launched: Launched, num_fields: int
) -> None:
    columns = [random_bits(torch.float32, ROWS, 1 + i % 5) for i in range(num_fields)]
    fields = [Field(column, offset=-1, length=3, mask=i) for i, column in enumerate(columns)]
    check(kernels_on_host, fields, resolutions_of(70, 9), None, 4)
    assert launched() == [16, 2][: 1 + (num_fields > 16)]


def test_an_order_is_checked_in_every_launch(kernels_on_host: Ops) -> None:
    fields = fields_of_some_sizes()[:1]
    resolutions = resolutions_of(100, 12)
    for place in (0, 60, 99):
        order = torch.arange(100)
        order[place] = 100
        with pytest.raises(RuntimeError, match=r"gather_: order\[[0-9]+\] must be a position"):
            gather(kernels_on_host, fields, resolutions, None, 8, order)


@pytest.mark.parametrize(("elements", "length"), [(16, 20), (4, 5), (12, 3), (1000, 8)])
@pytest.mark.parametrize("most", [0, 32])
def test_eight_lanes_copy_a_line_whole(
    host_library: Path, kernels_on_host: Ops, elements: int, length: int, most: int
) -> None:
    """Wherever a window begins: over PCIe each line is one request."""
    take = ctypes.CDLL(str(host_library)).gear_host_streamed
    vectors = (ctypes.c_size_t * 2)()
    field = Field(random_bits(torch.float32, ROWS, elements), offset=-2, length=length)
    assert field.column.data_ptr() % 16 == 0
    take(vectors)
    gather(kernels_on_host, [field], resolutions_of(50, 9 + length), None, most)
    take(vectors)
    assert vectors[0] > 50 * elements * length // 8  # of 4 float32, less those at both ends
    assert vectors[1] == 0
