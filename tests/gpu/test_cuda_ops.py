"""Every op on a GPU against the reference, and what only a GPU can show: streams, large columns.

`tests/equivalence` runs all its cases on the GPU as well, where there is one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from deepspeed_gear.ops import Ops, fake, load_backend
from deepspeed_gear.ops.constants import (
    BY_TABLE,
    COMMITTED,
    NUM_UPDATE_COUNTS,
    ONE_Q62,
    RING_WORDS,
    SOURCE_STEPS,
    SOURCE_STEPS_PLUS_ONE,
    minima_size,
    tree_size,
)
from deepspeed_gear.ops.functional import powers_of

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
# The pieces of copy_pieces_ stay in memory of the host: test_host_placement.py.
ON_DEVICE = [name for name in fake.OP_NAMES if name not in (*fake.HOST_ONLY, "copy_pieces_")]
NUM_SLOTS, LENGTH, COUNT = 1500, 40, 33
ALL_ANCHORS = [0, 0, 1, 1 << 40, 0]


@pytest.fixture(scope="module")
def reference() -> Ops:
    return load_backend("reference")


@pytest.fixture(scope="module")
def cuda() -> Ops:
    return load_backend("cuda")


def resolutions_of(count: int, slots: int = NUM_SLOTS, length: int = LENGTH) -> Tensor:
    slot, anchor, zero = (
        torch.randint(0, slots, (count,)),
        torch.randint(0, length, (count,)),
        torch.zeros(count),
    )
    parts = (slot, slot, zero, slot * length, zero + length, anchor, zero + 1, torch.arange(count))
    return torch.stack([part.long() for part in parts], dim=1)


def window(column: Tensor, offset: int, length: int) -> list[int]:
    return [SOURCE_STEPS, offset, length, 0, 0, 0, column[0].numel(), 0, 0, length]


def plan_of_rows() -> tuple[Tensor, ...]:
    """Samples of three peers, windows of two groups, members, columns of steps and of trajectories, heads."""
    resolutions = resolutions_of(COUNT)
    samples = torch.zeros(COUNT, 7, dtype=torch.int64)
    samples[:, 0], samples[:, 1] = torch.randint(0, 3, (COUNT,)), torch.randint(0, 2, (COUNT,))
    samples[:, 2:5], samples[:, 5] = resolutions[:, (1, 4, 5)], torch.randint(0, 3, (COUNT,))
    samples[:, 6] = torch.where(torch.rand(COUNT) < 0.5, -1, resolutions[:, 5])
    windows = torch.tensor([[0, 0, -3, 4, 0, 0, 0], [0, 0, 0, 1, 1, 1, 0], [1, 1, 0, 1, 0, 0, 0]])
    members = torch.tensor([[True, False], [True, True], [False, True], [True, True]])
    columns = torch.tensor([[0, 0, 44], [0, 0, 1], [1, 0, 9000], [-1, 3, 12]])
    return samples, windows, members, columns, torch.tensor([8, 12, 0])


def columns_of_rows() -> list[Tensor]:
    rows = NUM_SLOTS * LENGTH
    sizes = rows * 44, rows, 9000 * rows // 100, 12 * NUM_SLOTS
    return [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes]


def arguments(name: str) -> tuple[Any, ...]:
    """Arguments of an op in host memory, outputs first."""
    torch.manual_seed(0)
    out, masses = torch.zeros(COUNT, dtype=torch.int64), torch.randint(0, 1 << 40, (NUM_SLOTS,))
    sums = torch.zeros(tree_size(NUM_SLOTS), dtype=torch.int64)
    sums[:NUM_SLOTS] = masses
    built = sums.clone()
    load_backend("reference").tree_build_(built, NUM_SLOTS)
    slots = torch.randint(0, 1 << 40, (NUM_SLOTS, 8))
    slots[:, 4] = torch.randint(1, LENGTH, (NUM_SLOTS,))
    coordinates = (torch.rand(COUNT, dtype=torch.float64) * int(masses.sum())).long()
    rows = torch.randn(NUM_SLOTS * LENGTH, 11)
    reward, ends = rows[:, 0].contiguous(), torch.rand(len(rows)) < 0.05
    extents = torch.stack((torch.arange(NUM_SLOTS) * LENGTH, torch.full((NUM_SLOTS,), LENGTH)), dim=1)
    items = torch.randint(0, 20, (500,))  # many equal ones: the last wins
    none, counters = torch.empty(0), torch.zeros(3, dtype=torch.int64)
    outs = [torch.zeros(COUNT, 7, 11), torch.zeros(COUNT, 7, 11, dtype=torch.bfloat16)]
    spec, scale = window(rows, -3, 7) * 2, [none, torch.randn(11)]
    masks, resolutions = [torch.zeros(COUNT, 7, dtype=torch.bool)], resolutions_of(COUNT)
    returns = torch.zeros(2, COUNT)
    table = slots.clone()
    table[:, 3], table[:, 4] = torch.arange(NUM_SLOTS) * 5, 5
    row_slots = (torch.arange(NUM_SLOTS) // 5).to(torch.int32)
    minima, alpha = torch.zeros(minima_size(NUM_SLOTS), dtype=torch.int64), round(0.6 * ONE_Q62)
    mended = minima.clone()
    table[:, 0], table[:, 1] = COMMITTED, 3
    reference, priorities = load_backend("reference"), (torch.rand(NUM_SLOTS) * 8).floor()
    reference.minima_build_(mended, built, NUM_SLOTS)
    reports = torch.randint(0, 5, (500, 6))
    reports[:, 1], reports[:, 3] = (
        3 - (torch.rand(500) < 0.1).long(),
        torch.rand(500).view(torch.int32).long(),
    )
    counts, two, three = (torch.zeros(n, dtype=torch.int64) for n in (NUM_UPDATE_COUNTS, 2, 3))
    weighed = torch.cat((resolutions[:, :6], masses[:COUNT, None] + 1, resolutions[:, 7:]), dim=1)
    return {
        "draw_": (out, 5, 1, 100, (1 << 62) - 1),
        "permute_": (out, 5, 1, 2, 3, 1000),
        "tree_build_": (sums, NUM_SLOTS),
        "tree_update_": (built, NUM_SLOTS, items, torch.randint(0, 1 << 40, (500,))),
        "slot_masses_": (built, table, items[:50], 130, 180, ALL_ANCHORS, 1),
        "resolve_": (resolutions * 0, built, slots, coordinates, ALL_ANCHORS, 0, 5, 1, 100),
        "resolve_rows_": (resolutions * 0, built, table, row_slots, coordinates, 100),
        "mass_": (out, torch.rand(COUNT), alpha),
        "importance_": (torch.zeros(COUNT), weighed, 1 << 40, 7, alpha),
        "minima_build_": (minima, built, NUM_SLOTS),
        "minima_update_": (minima, built, NUM_SLOTS, items),
        "top_k_": (torch.zeros(700, dtype=torch.int64), priorities, built),
        "report_": (torch.zeros(50, 6, dtype=torch.int64), weighed, torch.rand(COUNT), 40, 7),
        "prioritize_": (built, mended, priorities, counts, table, reports, alpha, 0),
        "suffix_sum_": (reward * 0, reward, extents),
        "n_step_": (returns[0], returns[1], out, reward, ends, ends, powers_of(0.9, 5), resolutions, 5),
        "gather_": (
            outs,
            masks,
            counters,
            [rows] * 2,
            scale,
            scale,
            resolutions,
            out + 1,
            spec,
            [0.0, 1.0],
            1,
            torch.randperm(COUNT),
        ),
        "pack_rows_": (
            torch.zeros(400_000).long(),
            three,
            columns_of_rows(),
            *plan_of_rows(),
            rows_of(slots),
        ),
        "unpack_rows_": (
            [column * 0 for column in columns_of_rows()],
            torch.zeros(COUNT, 8, dtype=torch.int64),
            three,
            two,
            [torch.randint(-9, 9, (100_000,)) for _ in range(3)],
            torch.randperm(COUNT),
            *plan_of_rows(),
            [3, 300, 2, 60, 100, 50],
        ),
    }[name]


def rows_of(slots: Tensor) -> Tensor:
    """The slot table of trajectories that share so few rows that all columns have them."""
    slots[:, 3] = torch.arange(len(slots)) % 10 * LENGTH
    return slots


def moved(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [moved(v) for v in value]
    return value.to(DEVICE) if isinstance(value, Tensor) else value


def tensors_of(value: Any) -> list[Tensor]:
    if isinstance(value, (list, tuple)):
        return [t for v in value for t in tensors_of(v)]
    return [value] if isinstance(value, Tensor) else []


def assert_equal(got: Any, expected: Any) -> None:
    for a, b in zip(tensors_of(got), tensors_of(expected), strict=True):
        assert torch.equal(a.cpu(), b)


@pytest.mark.parametrize("name", ON_DEVICE)
def test_equals_the_reference(reference: Ops, cuda: Ops, name: str) -> None:
    expected, got = arguments(name), moved(arguments(name))
    getattr(reference, name)(*expected)
    getattr(cuda, name)(*got)
    assert_equal(got, expected)


@pytest.mark.parametrize("count", [33, 1100])
def test_a_ring_equals_the_reference(reference: Ops, cuda: Ops, count: int) -> None:
    """A draw of nothing, adds that go round, a draw, an update: the sanitizers see all of its kernels."""
    shape = [(count + 2) * 5, count + 9, 1, 4]
    num_items, rule, alpha = shape[0], [*ALL_ANCHORS], round(0.6 * ONE_Q62)
    found = []
    for ops, device in ((reference, "cpu"), (cuda, DEVICE)):
        random = torch.Generator().manual_seed(count)
        kept = [torch.zeros(size, dtype=torch.int64) for size in (RING_WORDS, (shape[1], 8), shape[1])]
        kept += [torch.zeros(size(num_items), dtype=torch.int64) for size in (tree_size, minima_size)]
        kept += [torch.zeros(num_items), torch.zeros(num_items, dtype=torch.int32)]
        kept = [tensor.to(device) for tensor in kept]
        state, slots, _, sums, minima, priorities, row_slots = kept
        column = torch.zeros(shape[0], 3, device=device)
        records = torch.zeros(2, 65, 8, dtype=torch.int64, device=device)
        weights = torch.zeros(2, 65, device=device)
        betas = torch.tensor([alpha], device=device)
        draw, known = [5, 1, 1, 0, 0, BY_TABLE], (slots, sums, minima, row_slots, betas, rule, shape)
        ops.ring_select_(state, records[0], weights[0], *known, draw, 1)
        for _ in range(3):
            lengths = torch.randint(-1, 6, (count,), generator=random).to(device)
            placed = torch.zeros(count, 5, dtype=torch.int64, device=device)
            ops.ring_add_(*kept, placed, lengths, rule, shape, 1, alpha, 0x3F800000)
            values = torch.rand(count, 5, 3, generator=random).to(device)
            ops.scatter_([column], [values], placed, [SOURCE_STEPS_PLUS_ONE])
        ops.ring_select_(state, records[1], weights[1], *known, draw, 1)
        reported = torch.rand(65, generator=random).to(device)
        ops.ring_update_(state, sums, minima, priorities, slots, records[1], reported, shape, 1, alpha)
        state[16:22] = 0  # what kernels tell each other
        found.append([*kept, placed, column, records, weights])
    assert_equal(found[1], found[0])
    assert records[0, :, 0].tolist() == [-1] * 65


@pytest.mark.parametrize("name", ON_DEVICE)
def test_compiles_as_one_graph(reference: Ops, cuda: Ops, name: str) -> None:
    op: Callable[..., None] = getattr(cuda, name)
    expected, got = arguments(name), moved(arguments(name))
    getattr(reference, name)(*expected)
    torch._dynamo.reset()
    torch.compile(lambda *a: op(*a), fullgraph=True, backend="aot_eager")(*got)
    assert_equal(got, expected)


@pytest.mark.parametrize("name", ON_DEVICE)
def test_runs_on_the_current_stream_and_waits_for_nothing(reference: Ops, cuda: Ops, name: str) -> None:
    """Behind a kernel that sleeps, the call returns at once, and its result comes in the stream's order."""
    expected, got = arguments(name), moved(arguments(name))
    getattr(reference, name)(*expected)
    late = moved(arguments(name))
    getattr(cuda, name)(*late)  # loads the kernels
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(2_000_000_000)  # about a second
        getattr(cuda, name)(*got)
        behind = torch.cuda.Event()
        behind.record()
        assert not behind.query()
    stream.synchronize()
    assert_equal(got, expected)


@pytest.mark.parametrize("name", ON_DEVICE)
def test_can_be_captured(reference: Ops, cuda: Ops, name: str) -> None:
    """In a CUDA graph an op does nothing until it is replayed, then the same."""
    expected, got = arguments(name), moved(arguments(name))
    getattr(cuda, name)(*moved(arguments(name)))  # loads the kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        getattr(cuda, name)(*got)
    assert_equal(got, expected)
    getattr(reference, name)(*expected)
    graph.replay()
    torch.cuda.synchronize()
    assert_equal(got, expected)


@pytest.mark.parametrize("elements", [1, 3, 44, 61, 7056])
@pytest.mark.parametrize("shift", [0, 1, 4, 7, 13])
def test_rows_at_any_address(reference: Ops, cuda: Ops, elements: int, shift: int) -> None:
    torch.manual_seed(elements)
    stored = torch.randint(0, 256, (shift + 400 * elements,), dtype=torch.uint8)
    resolutions, none = resolutions_of(COUNT, slots=10), torch.empty(0)
    expected, place = torch.empty(COUNT, 9, elements, dtype=torch.uint8), (shift * 3) % 16
    for ops, device in ((reference, "cpu"), (cuda, DEVICE)):
        column = stored.to(device)[shift:].view(-1, elements)
        out = torch.zeros(place + expected.numel(), dtype=torch.uint8, device=device)[place:].view(
            expected.shape
        )
        mask = torch.zeros(COUNT, 9, dtype=torch.bool, device=device)
        counters = torch.zeros(3, dtype=torch.int64, device=device)
        spec = window(column, -4, 9)
        ops.gather_(
            [out], [mask], counters, [column], [none], [none], resolutions.to(device), None, spec, [7.0], 1
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
    """Vectors of a lane, with and without shift and gain, by one launch and by short ones of few blocks."""
    torch.manual_seed(elements)
    samples = (20 << 20) // (9 * elements * source.itemsize) if elements > 1000 else 700
    resolutions, order = resolutions_of(samples, slots=10), torch.randperm(samples)
    rows, spec = torch.randint(-99, 99, (400, elements)).to(source), window(torch.zeros(1, elements), -4, 9)
    wide = torch.float64 if torch.float64 in (source, target) else torch.float32
    scale = torch.rand(2, elements, dtype=wide)

    def gather(ops: Ops, device: str, start: int, threads: int, shift: Tensor, gain: Tensor) -> list[Tensor]:
        column, out = (
            torch.zeros(start + size, dtype=dtype, device=device)[start:]
            for size, dtype in ((rows.numel(), source), (samples * 9 * elements, target))
        )
        column.view(rows.shape).copy_(rows)
        out, mask = out.view(samples, 9, elements), torch.zeros(samples, 9, dtype=torch.bool, device=device)
        counters = torch.zeros(3, dtype=torch.int64, device=device)
        lists = [column.view(rows.shape)], [shift.to(device)], [gain.to(device)]
        places = resolutions.to(device), None, spec, [7.0], threads, order.to(device)
        ops.gather_([out], [mask], counters, *lists, *places)
        return [out, mask, counters]

    for shift, gain in (scale, scale[:, :1].contiguous(), scale[:, :0].contiguous()):
        expected = gather(reference, "cpu", 0, 1, shift, gain)
        for start, threads in ((0, 1), (1, 32), (3, 4)):
            assert_equal(gather(cuda, DEVICE, start, threads, shift, gain), expected)


@pytest.mark.parametrize("k", [1, 1000, 5000])
@pytest.mark.parametrize("values", [1 << 20, 4])
def test_the_highest_of_many(cuda: Ops, values: int, k: int) -> None:
    """Also where millions are equal to the last one that counts."""
    torch.manual_seed(k)
    priorities, masses = (torch.rand(10_000_000) * values).floor(), torch.randint(0, 3, (10_000_000,))
    expected = torch.zeros(k, dtype=torch.int64)
    cuda.top_k_(expected, priorities, masses)  # by the CPU
    got = moved(expected * 0)
    cuda.top_k_(got, moved(priorities), moved(masses))
    assert torch.equal(got.cpu(), expected)


@pytest.mark.parametrize("num_items", [40, 1_000_000])
def test_many_reports_at_once(cuda: Ops, num_items: int) -> None:
    """Thousands of threads meet at few items; what they leave is what one after the other leaves."""
    torch.manual_seed(num_items)
    slots, count = torch.zeros(num_items, 8, dtype=torch.int64), 300_000
    slots[:, 0], slots[:, 4] = COMMITTED, 1
    reports = torch.zeros(count, 6, dtype=torch.int64)
    reports[:, 0], reports[:, 3] = (
        torch.randint(0, num_items, (count,)),
        torch.rand(count).view(torch.int32).long(),
    )
    reports[:, 4:] = torch.randint(0, 50, (count, 2))
    sums, minima = (torch.zeros(size(num_items), dtype=torch.int64) for size in (tree_size, minima_size))
    kept = [sums, minima, torch.zeros(num_items), torch.zeros(NUM_UPDATE_COUNTS, dtype=torch.int64)]
    got = moved(kept)
    cuda.prioritize_(*kept, slots, reports, ONE_Q62 // 2, 0)  # by the CPU
    cuda.prioritize_(*got, moved(slots), moved(reports), ONE_Q62 // 2, 0)
    assert_equal(got, kept)


def test_column_beyond_4_gib(cuda: Ops) -> None:
    """Offsets are 64 bits wide, in bytes and in rows."""
    if torch.cuda.mem_get_info()[0] < 8 << 30:
        pytest.skip("needs 8 GiB of free GPU memory")
    rows = (1 << 32) + (1 << 20)
    column = torch.zeros(rows, dtype=torch.uint8, device=DEVICE)
    column[-40:] = torch.arange(40, dtype=torch.uint8, device=DEVICE)
    resolutions = torch.tensor([[0, 0, 0, rows - 40, 40, 5, 0, 0]], device=DEVICE)
    none = torch.empty(0)
    out, counters = torch.zeros(1, 20, dtype=torch.uint8, device=DEVICE), torch.zeros(3, dtype=torch.int64)
    spec = [SOURCE_STEPS, 0, 20, 0, 0, 0, 1, -1, 0, 20]
    cuda.gather_([out], [], counters.to(DEVICE), [column], [none], [none], resolutions, None, spec, [0.0], 1)
    assert torch.equal(out[0].cpu(), torch.arange(5, 25, dtype=torch.uint8))


def test_tensors_of_two_devices_are_refused(cuda: Ops) -> None:
    out, reward, extents = arguments("suffix_sum_")
    with pytest.raises(RuntimeError, match="reward must be on cuda"):
        cuda.suffix_sum_(out.to(DEVICE), reward, extents.to(DEVICE))
