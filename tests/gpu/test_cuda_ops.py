"""Every op on a GPU against the reference, and what only a GPU can show: streams, large columns.

`tests/equivalence` runs all its cases on the GPU as well, where there is one.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from op_arguments import COUNT, ON_DEVICE, arguments, assert_equal, resolutions_of, window
from op_kit import REFERENCE, moved, tensors_of
from op_rings import ALL_ANCHORS, ONE, Ring
from torch import Tensor

from deepspeed_gear.ops import Ops, load_backend
from deepspeed_gear.ops.records import MassUnit, Normalize, Source

# The first test builds both ops, where that has not been done before.
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]
DEVICE = "cuda"


@pytest.fixture(scope="module")
def reference() -> Ops:
    return REFERENCE


@pytest.fixture(scope="module")
def cuda() -> Ops:
    return load_backend("cuda")


def at_once(op: Callable[..., None], given: Any) -> None:
    op(*given)


def compiled(op: Callable[..., None], given: Any) -> None:
    torch._dynamo.reset()
    torch.compile(lambda *a: op(*a), fullgraph=True, backend="aot_eager")(*given)


def captured(op: Callable[..., None], given: Any) -> None:
    """In a CUDA graph an op does nothing until it is replayed, then the same."""
    before = [tensor.clone() for tensor in tensors_of(given)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        op(*given)
    assert_equal(given, before)
    graph.replay()
    torch.cuda.synchronize()


def behind_a_kernel(op: Callable[..., None], given: Any) -> None:
    """Behind a kernel that sleeps, the call returns at once, and its result comes in the stream's
    order.
    """
    late = moved(moved(given, "cpu"), DEVICE)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        op(*late)  # leaves what it allocated to this stream
        stream.synchronize()
        torch.cuda._sleep(2_000_000_000)  # about a second
        op(*given)
        behind = torch.cuda.Event()
        behind.record()
        assert not behind.query()
    stream.synchronize()


@pytest.mark.parametrize("name", ON_DEVICE)
@pytest.mark.parametrize(
    "run", [pytest.param(at_once, marks=pytest.mark.sanitize), compiled, captured, behind_a_kernel]
)
def test_equals_the_reference(
    reference: Ops, cuda: Ops, name: str, run: Callable[[Callable[..., None], Any], None]
) -> None:
    expected = arguments(name)
    got = moved(arguments(name), DEVICE)
    getattr(reference, name)(*expected)
    getattr(cuda, name)(*moved(arguments(name), DEVICE))  # loads the kernels
    run(getattr(cuda, name), got)
    assert_equal(got, expected)


@pytest.mark.sanitize
@pytest.mark.parametrize("count", [33, 1100])
def test_a_ring_equals_the_reference(reference: Ops, cuda: Ops, count: int) -> None:
    """A draw of nothing, adds that go round, a draw, an update: the sanitizers see all of its
    kernels.
    """
    found = []
    for ops, device in ((reference, "cpu"), (cuda, DEVICE)):
        random = torch.Generator().manual_seed(count)
        sizes = (count + 2) * 5, count + 9, 1, 4
        ring = Ring(ops, *sizes, MassUnit.STEP, [*ALL_ANCHORS], True, True, device=device)
        column = ring.zeros(ring.num_rows, 3, dtype=torch.float32)
        draw = [5, 1, 1, 0, 0, Normalize.TABLE]
        betas = [ring.alpha]
        nothing = ring.select(65, draw, betas)
        for _ in range(3):
            placed = ring.add(torch.randint(-1, 6, (count,), generator=random).tolist(), ONE)
            values = torch.rand(count, 5, 3, generator=random).to(device)
            ops.scatter_([column], [values], placed, [Source.STEPS_PLUS_ONE])
        drawn = ring.select(65, draw, betas)
        ring.update(drawn[0], torch.rand(65, generator=random).to(device))
        found.append([*ring.content.values(), placed, column, *nothing, *drawn])
    assert_equal(found[1], found[0])
    assert nothing[0][:, 0].tolist() == [-1] * 65


@pytest.mark.sanitize
@pytest.mark.parametrize("elements", [1, 3, 44, 61, 7056])
@pytest.mark.parametrize("shift", [0, 1, 4, 7, 13])
def test_rows_at_any_address(reference: Ops, cuda: Ops, elements: int, shift: int) -> None:
    torch.manual_seed(elements)
    stored = torch.randint(0, 256, (shift + 400 * elements,), dtype=torch.uint8)
    resolutions = resolutions_of(COUNT, slots=10)
    none = torch.empty(0)
    expected = torch.empty(COUNT, 9, elements, dtype=torch.uint8)
    place = (shift * 3) % 16
    for ops, device in ((reference, "cpu"), (cuda, DEVICE)):
        column = stored.to(device)[shift:].view(-1, elements)
        out = torch.zeros(place + expected.numel(), dtype=torch.uint8, device=device)[place:].view(
            expected.shape
        )
        mask = torch.zeros(COUNT, 9, dtype=torch.bool, device=device)
        counters = torch.zeros(3, dtype=torch.int64, device=device)
        spec = window(column, -4, 9)
        ops.gather_(
            [out],
            [mask],
            counters,
            [column],
            [none],
            [none],
            resolutions.to(device),
            None,
            spec,
            [7.0],
            1,
        )
        if device == "cpu":
            expected.copy_(out)
    assert torch.equal(out.cpu(), expected)


@pytest.mark.parametrize("elements", [1, 11, 61, 7056])
@pytest.mark.parametrize(
    ("source", "target"),
    [
        (torch.uint8, torch.float32),
        (torch.uint8, torch.bfloat16),
        (torch.int16, torch.float64),
        (torch.float32, torch.bfloat16),
        (torch.float64, torch.float16),
    ],
)
def test_converted_rows_at_any_address(
    reference: Ops, cuda: Ops, source: torch.dtype, target: torch.dtype, elements: int
) -> None:
    """Vectors of a lane, with and without shift and gain, by one launch and by short ones of few
    blocks.
    """
    torch.manual_seed(elements)
    samples = (20 << 20) // (9 * elements * source.itemsize) if elements > 1000 else 700
    resolutions = resolutions_of(samples, slots=10)
    order = torch.randperm(samples)
    rows = torch.randint(-99, 99, (400, elements)).to(source)
    spec = window(torch.zeros(1, elements), -4, 9)
    scale = torch.rand(2, elements, dtype=torch.float64)

    def gather(
        ops: Ops, device: str, start: int, threads: int, shift: Tensor, gain: Tensor
    ) -> list[Tensor]:
        column, out = (
            torch.zeros(start + size, dtype=dtype, device=device)[start:]
            for size, dtype in ((rows.numel(), source), (samples * 9 * elements, target))
        )
        column.view(rows.shape).copy_(rows)
        out = out.view(samples, 9, elements)
        mask = torch.zeros(samples, 9, dtype=torch.bool, device=device)
        counters = torch.zeros(3, dtype=torch.int64, device=device)
        lists = [column.view(rows.shape)], [shift.to(device)], [gain.to(device)]
        places = resolutions.to(device), None, spec, [7.0], threads, order.to(device)
        ops.gather_([out], [mask], counters, *lists, *places)
        return [out, mask, counters]

    for shift, gain in (scale, scale[:, :1].contiguous(), scale[:, :0].contiguous()):
        expected = gather(reference, "cpu", 0, 1, shift, gain)
        for start, threads in ((0, 1), (1, 32), (3, 4)):
            assert_equal(gather(cuda, DEVICE, start, threads, shift, gain), expected)


def test_column_beyond_4_gib(cuda: Ops) -> None:
    """Offsets are 64 bits wide, in bytes and in rows."""
    if torch.cuda.mem_get_info()[0] < 8 << 30:
        pytest.skip("needs 8 GiB of free GPU memory")
    rows = (1 << 32) + (1 << 20)
    column = torch.zeros(rows, dtype=torch.uint8, device=DEVICE)
    column[-40:] = torch.arange(40, dtype=torch.uint8, device=DEVICE)
    resolutions = torch.tensor([[0, 0, 0, rows - 40, 40, 5, 0, 0]], device=DEVICE)
    none = torch.empty(0)
    out = torch.zeros(1, 20, dtype=torch.uint8, device=DEVICE)
    counters = torch.zeros(3, dtype=torch.int64)
    spec = [Source.STEPS, 0, 20, 0, 0, 0, 1, -1, 0, 20]
    cuda.gather_(
        [out], [], counters.to(DEVICE), [column], [none], [none], resolutions, None, spec, [0.0], 1
    )
    assert torch.equal(out[0].cpu(), torch.arange(5, 25, dtype=torch.uint8))


def test_tensors_of_two_devices_are_refused(cuda: Ops) -> None:
    out, reward, extents = arguments("suffix_sum_")
    with pytest.raises(RuntimeError, match="reward and extents must be on cuda"):
        cuda.suffix_sum_(out.to(DEVICE), reward, extents.to(DEVICE))
