"""Packs: the C++ against the reference, and against plain Python."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from op_kit import compare

from deepspeed_gear.ops import Ops
from deepspeed_gear.ops.records import GatherSpec, Resolution, Source, lower

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
    target = (
        torch.int64 if source == Source.TIMESTEP else data.draw(st.sampled_from(TARGETS[dtype]))
    )
    scaled = target.is_floating_point and source != Source.TIMESTEP and data.draw(st.booleans())
    shift = torch.arange(elements, dtype=torch.float64) if scaled else torch.empty(0)
    gain = torch.full((elements,), 0.5, dtype=torch.float64) if scaled else torch.empty(0)
    first = data.draw(st.integers(0, 12))
    rows = data.draw(st.integers(0, 40))
    width = 1 if source == Source.TIMESTEP else elements
    spec = lower([GatherSpec(source, offset, elements=width)])
    outs = [torch.zeros(rows, width, dtype=target)]
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
