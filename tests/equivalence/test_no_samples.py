"""What is gathered of a record that is no sample, on every backend: padding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gather_support import (
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
from op_wrappers import powers_of, scaling
from torch import Tensor

from deepspeed_gear.errors import ShapeError
from deepspeed_gear.ops import Ops
from deepspeed_gear.ops.records import Align, Resolution, Source

EMPTY = [Resolution.NO_SAMPLE, Resolution.NO_SAMPLE, 0, 0, 0, 0, 0]


def mixed(count: int) -> tuple[Tensor, Tensor]:
    """Records of which some are no samples, and which."""
    resolutions, is_none = resolutions_of(count), torch.rand(count) < 0.4
    is_none[:1] = True
    resolutions[is_none, : Resolution.SAMPLE_NUMBER] = torch.tensor(EMPTY)
    resolutions[:, Resolution.SAMPLE_NUMBER] = torch.arange(count) + 7
    return resolutions, is_none


@pytest.mark.parametrize("count", [1, 7, 33])
@pytest.mark.parametrize("align", [Align.IN_PLACE, Align.LEFT, Align.RIGHT])
def test_all_that_is_collected_is_padding(
    reference: Ops, native: Ops, same_bits: SameBits, count: int, align: int
) -> None:
    torch.manual_seed(count)
    resolutions, is_none = mixed(count)
    floats, bytes_ = random_bits(torch.float32, NUM_ROWS, 5), random_bits(torch.uint8, NUM_ROWS, 3)
    shift, gain = scaling(*torch.randn(2, 5, dtype=torch.float64))
    scaled: dict[str, Any] = {"dtype": torch.bfloat16, "shift": shift, "gain": gain}
    per_trajectory = random_bits(torch.float64, len(LENGTHS), 4)
    fields = []
    for offset, length, first, rows in [(0, 1, 0, 1), (-3, 7, 0, 7), (2, 5, 1, 3), (60, 4, 2, 2)]:
        window: dict[str, Any] = {"offset": offset, "length": length, "align": align}
        window |= {"first": first, "count": rows}
        for pad in (0.0, -0.0, 2.0, "edge"):
            fields += [
                Field(floats, pad=pad, **window),
                Field(floats, Source.STEPS_PLUS_ONE, pad=pad, after_n_step=1, **window),
                Field(bytes_, pad=pad, **window),
                Field(random_bits(torch.int16, NUM_ROWS), pad=pad, **window),
                Field(floats, pad=pad, **window, **scaled),
                Field(bytes_, pad=pad, dtype=torch.int64, **window),
                Field(NONE, Source.TIMESTEP, pad=pad, dtype=torch.int64, **window),
                Field(NONE, Source.POSITION, pad=pad, dtype=torch.int64, after_n_step=1, **window),
            ]
    for pad in (0.0, 2.0, "edge"):
        fields += [
            Field(per_trajectory, Source.TRAJECTORY, pad=pad),
            Field(per_trajectory, Source.TRAJECTORY, pad=pad, dtype=torch.float32),
        ]
    for mask, field in enumerate(fields):
        field.mask = mask
    n_steps = torch.where(is_none, 0, torch.randint(0, 4, (count,)))
    found = check(reference, native, same_bits, fields, resolutions, n_steps)
    for field, out, mask in zip(fields, found, found[len(fields) :], strict=False):
        assert not mask[is_none].any()
        if field.source == Source.POSITION:
            expected: Any = torch.arange(field.first, field.first + field.rows)[:, None]
        else:
            expected = torch.tensor(0.0 if isinstance(field.pad, str) else field.pad + 0.0)
        wanted = torch.zeros_like(out[is_none]) + expected.to(out.dtype)
        assert same_bits(out[is_none], wanted)
    real = sum(int(mask.sum()) for mask in found[len(fields) : 2 * len(fields)])
    assert int(found[-1][0]) == 1 + real


@pytest.mark.parametrize("count", [1, 33])
def test_n_step_returns_are_0(reference: Ops, native: Ops, same_bits: SameBits, count: int) -> None:
    torch.manual_seed(count)
    resolutions, is_none = mixed(count)
    reward, ends = torch.randn(NUM_ROWS), torch.rand(NUM_ROWS) < 0.2
    results = []
    for ops in (reference, native):
        out = torch.full((count,), 9.0), torch.full((count,), 9.0), torch.full((count,), 9)
        ops.n_step_(*out, reward, ends, ends, powers_of(0.9, 5), resolutions, 5)
        results.append(out)
    assert all(same_bits(a, b) for a, b in zip(*results, strict=True))
    assert not any(part[is_none].any() for part in results[1])


@pytest.mark.parametrize(
    ("word", "value"), [(0, 0), (0, -2), (1, 99), (1, -2), (2, 1), (3, 1), (3, -1), (4, -1), (5, 1), (6, 1)]
)
@pytest.mark.parametrize("source", [Source.STEPS, Source.TRAJECTORY])
@pytest.mark.parametrize("backend", ["reference", "cpu", "kernels_on_host"])
def test_a_record_that_differs_from_it_is_refused(
    request: pytest.FixtureRequest, backend: str, source: int, word: int, value: int
) -> None:
    """As ever: it has no anchor, or its slot lies outside. On a device it would end all kernels."""
    ops: Ops = request.getfixturevalue(backend)
    record = torch.tensor([[*EMPTY, 5]])
    field = Field(torch.ones(NUM_ROWS, 2), source)
    gather(ops, [field], record)
    changed = record.clone()
    changed[0, word] = value
    with pytest.raises((RuntimeError, ShapeError), match=r"must lie|leads outside"):
        gather(ops, [field], changed)
