"""Packs, their plans and copies of pieces: the C++ against the reference, and against plain Python."""

from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from op_comparison import compare
from torch import Tensor

from deepspeed_gear.ops import Ops
from deepspeed_gear.ops.records import GatherSpec, Resolution, Source, lower

ANY = (1 << 31) - 1  # trajectories of a pack
TARGETS = {
    torch.bool: [torch.bool, torch.int64, torch.float32],
    torch.uint8: [torch.uint8, torch.int32, torch.bfloat16],
    torch.int16: [torch.int16, torch.int64, torch.float64],
    torch.int32: [torch.int32, torch.int64, torch.float16],
    torch.int64: [torch.int64, torch.float32],
    torch.float16: [torch.float16, torch.float32],
    torch.bfloat16: [torch.bfloat16, torch.float32],
    torch.float32: [torch.float32, torch.float16, torch.bfloat16],
    torch.float64: [torch.float64, torch.float32],
}


@given(
    st.lists(st.integers(1, 9), max_size=6),
    st.sampled_from(list(TARGETS)),
    st.integers(-3, 3),
    st.sampled_from([Source.STEPS, Source.STEPS_PLUS_ONE, Source.TRAJECTORY, Source.TIMESTEP]),
    st.integers(1, 3),
    st.data(),
)
def test_rows_of_a_pack(
    cpu: Ops,
    lengths: list[int],
    dtype: torch.dtype,
    offset: int,
    source: int,
    elements: int,
    data: st.DataObject,
) -> None:
    """Against slices of the trajectories as well."""
    words = np.random.default_rng(len(lengths))
    extents = np.cumsum([0, *(length + 1 for length in lengths)])
    records = torch.zeros(len(lengths), Resolution.NUM_WORDS, dtype=torch.int64)
    records[:, Resolution.SLOT] = torch.arange(len(lengths))
    records[:, Resolution.FIRST_ROW] = torch.from_numpy(extents[:-1])
    records[:, Resolution.NUM_STEPS] = torch.tensor(lengths, dtype=torch.int64)
    gaps = data.draw(st.lists(st.integers(0, 2), min_size=len(lengths), max_size=len(lengths)))
    places = torch.from_numpy(np.cumsum([0, *lengths])[:-1] + np.cumsum([0, *gaps])[1:]).long()
    column = torch.from_numpy(words.integers(-99, 99, (int(extents[-1]) + 8, elements))).to(dtype)
    target = torch.int64 if source == Source.TIMESTEP else data.draw(st.sampled_from(TARGETS[dtype]))
    scaled = target.is_floating_point and source != Source.TIMESTEP and data.draw(st.booleans())
    shift = torch.arange(elements, dtype=torch.float64) if scaled else torch.empty(0)
    gain = torch.full((elements,), 0.5, dtype=torch.float64) if scaled else torch.empty(0)
    first, rows = data.draw(st.integers(0, 12)), data.draw(st.integers(0, 40))
    width = 1 if source == Source.TIMESTEP else elements
    spec, outs = lower([GatherSpec(source, offset, elements=width)]), [torch.zeros(rows, width, dtype=target)]
    given = [column], [shift], [gain], records, places, spec, [1.0], first, rows
    (found,) = compare(cpu, "pack_", outs, *given)
    if source == Source.STEPS and dtype == target and not scaled:
        wanted = torch.zeros(first + rows + int(extents[-1]) + 20, elements, dtype=dtype)
        for i, (length, place) in enumerate(zip(lengths, places.tolist(), strict=True)):
            own = column[int(extents[i]) : int(extents[i]) + length]
            for t in range(length):
                inside = 0 <= t + offset < length
                wanted[place + t] = own[t + offset] if inside else torch.ones(elements).to(dtype)
        assert torch.equal(found, wanted[first : first + rows])


# ---- plans -------------------------------------------------------------------------------------------


def planned(cpu: Ops, lengths: list[int], *arguments: Any) -> list[Tensor]:
    outs = torch.full((2 * len(lengths) + 1,), -7).split([len(lengths)] * 2 + [1])
    return compare(cpu, "plan_packs_", *outs, torch.tensor(lengths, dtype=torch.int64), *arguments)


@settings(max_examples=150)
@given(
    st.lists(st.integers(1, 40), max_size=60),
    st.integers(0, 60),
    st.sampled_from([(1, 0), (0, 1), (30, 1), (1, 1000)]),
    st.integers(1, 9),
    st.sampled_from([1, 2, 3, 60]),
)
def test_plans(cpu: Ops, lengths: list[int], room: int, cost: tuple[int, int], width: int, most: int) -> None:
    planned(cpu, lengths, max([*lengths, 1]) + room, *cost, width, most)


@settings(max_examples=30)
@given(
    st.sampled_from(["log-normal", "bimodal", "uniform", "equal", "tiny", "giant", "thirds", "pareto"]),
    st.integers(1, 500),
    st.sampled_from([1, 2, 8, 33]),
    st.integers(0, 1 << 30),
)
def test_plans_of_real_distributions(cpu: Ops, kind: str, count: int, width: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    lengths = {
        "log-normal": lambda: np.minimum(np.exp(random.normal(7.6, 0.9, count)).astype(int) + 100, 8192),
        "bimodal": lambda: random.choice([300, 301, 5000, 5001], count),
        "uniform": lambda: random.integers(1, 8192, count, endpoint=True),
        "equal": lambda: np.full(count, 1500),
        "tiny": lambda: random.integers(1, 40, count),
        "giant": lambda: np.append(random.integers(1, 900, count - 1), 8192),
        "thirds": lambda: random.integers(2600, 2860, count),
        "pareto": lambda: np.minimum(200 + (random.pareto(1.2, count) * 200).astype(int), 8192),
    }[kind]()
    # The budget that makes the fewest packs exactly full, and one with room.
    num_micro = int(random.integers(1, 20))
    full = max(-(-int(lengths.sum()) // (width * num_micro)), int(lengths.max()))
    for tokens in (full, full + full // 100 + 1, 4 * full, max(8192, full)):
        for most in (ANY, max(1, count // (width * num_micro))):
            planned(cpu, lengths.tolist(), tokens, 24576, 1, width, most)


def test_plans_up_to_the_largest_costs(cpu: Ops) -> None:
    planned(cpu, [ANY], ANY, 1, 0, 1 << 10, ANY)
    planned(cpu, [1] * 7, 3, (1 << 62) // 7, 0, 2, ANY)
    planned(cpu, [1 << 29, 1 << 29, 5, 1 << 28], ANY, 0, 7, 3, ANY)
    planned(cpu, [1, 1], 1, 0, (1 << 61) - 1, 1, ANY)
    found = torch.full((3,), -7)
    cpu.plan_packs_(*found.split(1), torch.tensor([ANY]), ANY, 1, 0, 1 << 20, ANY)
    assert found.tolist() == [0, 0, 1]


# ---- pieces ------------------------------------------------------------------------------------------

COLUMNS = [torch.arange(60, dtype=torch.uint8), torch.arange(40).view(20, 2), torch.randn(7).bfloat16()]


@given(data=st.data(), count=st.integers(0, 12))
def test_pieces_arrive(on_host: Ops, data: st.DataObject, count: int) -> None:
    stored = [column.reshape(-1).view(torch.uint8) for column in COLUMNS]
    pieces, at = [], 0
    for _ in range(count):
        column = data.draw(st.integers(0, 2))
        size = data.draw(st.integers(1, len(stored[column])))
        begin = data.draw(st.integers(0, len(stored[column]) - size))
        at += data.draw(st.integers(0, 3))
        pieces.append([column, begin, at, size])
        at += size
    out, given_pieces = torch.full((at + 2,), 7, dtype=torch.uint8), torch.tensor(pieces).long().view(-1, 4)
    wanted = out.clone()
    for column, begin, to, size in pieces:
        wanted[to : to + size] = stored[column][begin : begin + size]
    assert torch.equal(compare(on_host, "copy_pieces_", out, COLUMNS, given_pieces)[0], wanted)
