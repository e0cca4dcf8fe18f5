"""The op `pack_`: C++ against the reference, and both against slices of the trajectories."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference_ops import reference_ops
from torch import Tensor

from deepspeed_gear.errors import ShapeError
from deepspeed_gear.ops import Ops, load_backend
from deepspeed_gear.ops.gather_spec import GatherSpec, lower
from deepspeed_gear.ops.records import Resolution, Source

PLAIN, FAST = reference_ops(), load_backend("cpu")
DTYPES = {
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


def records_of(first_rows: list[int], lengths: list[int]) -> Tensor:
    records = torch.zeros(len(lengths), Resolution.NUM_WORDS, dtype=torch.int64)
    records[:, Resolution.SLOT] = torch.arange(len(lengths))
    records[:, Resolution.FIRST_ROW] = torch.tensor(first_rows, dtype=torch.int64)
    records[:, Resolution.NUM_STEPS] = torch.tensor(lengths, dtype=torch.int64)
    return records


@given(
    st.lists(st.integers(1, 9), max_size=6),
    st.sampled_from(list(DTYPES)),
    st.integers(-3, 3),
    st.sampled_from([Source.STEPS, Source.STEPS_PLUS_ONE, Source.TRAJECTORY, Source.TIMESTEP]),
    st.integers(1, 3),
    st.data(),
)
def test_backends_are_equal(
    lengths: list[int], dtype: torch.dtype, offset: int, source: int, elements: int, data: st.DataObject
) -> None:
    words = np.random.default_rng(len(lengths))
    extents = np.cumsum([0, *(length + 1 for length in lengths)])
    records = records_of(extents[:-1].tolist(), lengths)
    gaps = data.draw(st.lists(st.integers(0, 2), min_size=len(lengths), max_size=len(lengths)))
    places = torch.from_numpy(np.cumsum([0, *lengths])[:-1] + np.cumsum([0, *gaps])[1:]).long()
    column = torch.from_numpy(words.integers(-99, 99, (int(extents[-1]) + 8, elements))).to(dtype)
    target = torch.int64 if source == Source.TIMESTEP else data.draw(st.sampled_from(DTYPES[dtype]))
    scaled = target.is_floating_point and source != Source.TIMESTEP and data.draw(st.booleans())
    wide = torch.float64 if {dtype, target} & {torch.float64, torch.int64, torch.int32} else torch.float32
    shift = torch.arange(elements, dtype=wide) if scaled else torch.empty(0)
    gain = torch.full((elements,), 0.5, dtype=wide) if scaled else torch.empty(0)
    first, rows = data.draw(st.integers(0, 12)), data.draw(st.integers(0, 40))
    width = 1 if source == Source.TIMESTEP else elements
    spec, pad = lower([GatherSpec(source, offset, elements=width)]), 1.0
    found = []
    for ops in (PLAIN, FAST):
        out = torch.full((rows, width), 0, dtype=target)
        ops.pack_([out], [column], [shift], [gain], records, places, spec, [pad], first, rows)
        found.append(out)
    assert torch.equal(*(out.view(torch.uint8) for out in found))
    if source == Source.STEPS and dtype == target and not scaled:
        wanted = torch.zeros(first + rows + int(extents[-1]) + 20, elements, dtype=dtype)
        for i, (length, place) in enumerate(zip(lengths, places.tolist(), strict=True)):
            own = column[int(extents[i]) : int(extents[i]) + length]
            for t in range(length):
                inside = 0 <= t + offset < length
                wanted[place + t] = own[t + offset] if inside else torch.ones(elements).to(dtype)
        assert torch.equal(found[0], wanted[first : first + rows])


@pytest.mark.parametrize("ops", [PLAIN, FAST], ids=["reference", "cpu"])
@pytest.mark.parametrize(
    ("change", "text"),
    [
        ((0, Resolution.FIRST_ROW, 8), "resolution 0"),
        ((0, Resolution.FIRST_ROW, -1), "resolution 0"),
        ((1, Resolution.NUM_STEPS, 0), "resolution 1"),
        ((1, Resolution.NUM_STEPS, 1 << 50), "resolution 1"),
    ],
)
def test_rows_outside_are_refused(ops: Ops, change: tuple[int, int, int], text: str) -> None:
    records, column = records_of([0, 5], [5, 5]), torch.zeros(10)
    records[change[0], change[1]] = change[2]
    out, none, places = torch.zeros(10), torch.empty(0), torch.tensor([0, 5])
    spec = lower([GatherSpec(Source.STEPS)])
    with pytest.raises((ShapeError, RuntimeError), match=text):
        ops.pack_([out], [column], [none], [none], records, places, spec, [0.0], 0, 10)
    spec = lower([GatherSpec(Source.STEPS, length=2, part_count=2)])
    with pytest.raises((ShapeError, RuntimeError), match=r"packed field|must hold"):
        ops.pack_([out], [column], [none], [none], records_of([0], [5]), places[:1], spec, [0.0], 0, 10)
