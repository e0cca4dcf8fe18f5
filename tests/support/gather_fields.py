"""Fields of a gather for the tests of the op: columns of random bits, resolutions, and a call of
it.
"""

from dataclasses import dataclass
from typing import Any

import torch
from op_kit import model_of, same_bits
from torch import Tensor

from deepspeed_gear.ops import Ops
from deepspeed_gear.ops.records import Align, Pad, Source

LENGTHS = (1, 2, 5, 40, 3, 11)  # steps of the trajectories; each has one row more
FIRST_ROWS = [sum(LENGTHS[:i]) + i for i in range(len(LENGTHS))]
NUM_ROWS = sum(LENGTHS) + len(LENGTHS)
NONE = torch.empty(0)
SCALING_ELEMENTS = 128  # of a field, at least, where its scaling has one per element
SPECIAL = [
    0.0,
    -0.0,
    1.0,
    float("inf"),
    -float("inf"),
    float("nan"),
    5e-324,
    1e-40,
    65504.0,
    65520.0,
    3.4e38,
]


def random_bits(dtype: torch.dtype, *shape: int) -> Tensor:
    """Any value of a dtype: subnormals, infinities and NaNs with any payload."""
    count = torch.Size(shape).numel()
    if dtype == torch.bool:
        return torch.randint(0, 2, shape).to(dtype)
    x = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8).view(dtype).clone()
    if dtype.is_floating_point:
        special = torch.tensor(SPECIAL, dtype=torch.float64).to(dtype)
        some = torch.rand(count) < 0.3
        x[some] = special[torch.randint(0, len(special), (int(some.sum()),))]
        near = torch.rand(count) < 0.3  # of a magnitude that narrower types can hold
        x[near] = torch.randn(int(near.sum()), dtype=torch.float64).to(dtype)
    return x.view(shape)


def resolutions_of(count: int) -> Tensor:
    """Some anchor in some trajectory, among them the first and the last steps."""
    slot = torch.randint(0, len(LENGTHS), (count,))
    length = torch.tensor(LENGTHS)[slot]
    anchor = (torch.rand(count) * length).long()
    anchor[::5] = 0
    anchor[1::5] = length[1::5] - 1
    rest = torch.zeros_like(slot)
    return torch.stack(
        (slot, slot, rest, torch.tensor(FIRST_ROWS)[slot], length, anchor, rest, rest), dim=1
    )


def scaling(shift: Tensor, gain: Tensor) -> tuple[Tensor, Tensor]:
    """Prepare the (x - shift) * gain of one field for `gather_`."""
    repeats = 1 if shift.numel() == 1 else -(-SCALING_ELEMENTS // shift.numel())
    return shift.reshape(-1).double().repeat(repeats), gain.reshape(-1).double().repeat(repeats)


@dataclass
class Field:
    """One field of a gather."""

    column: Tensor
    source: int = Source.STEPS
    offset: int = 0
    length: int = 1
    align: int = Align.IN_PLACE
    follows: int = 0
    pad: float | str = 0.0
    mask: int = -1
    dtype: torch.dtype | None = None
    shift: Tensor = NONE
    gain: Tensor = NONE
    first: int = 0
    count: int | None = None  # None: the whole window

    @property
    def elements(self) -> int:
        return 1 if self.source in (Source.TIMESTEP, Source.POSITION) else self.column[0].numel()

    @property
    def rows(self) -> int:
        return self.length if self.count is None else self.count

    @property
    def spec(self) -> list[int]:
        pad = Pad.EDGE if self.pad == "edge" else Pad.VALUE
        numbers = [self.source, self.offset, self.length, self.align, self.follows, pad]
        return [*numbers, self.elements, self.mask, self.first, self.rows]

    def out(self, count: int) -> Tensor:
        shape = (count, self.rows, self.elements)
        return torch.full(shape, 1).to(self.dtype or self.column.dtype)


def gather(
    ops: Ops,
    fields: list[Field],
    resolutions: Tensor,
    n_steps: Tensor | None = None,
    threads: int = 1,
    *order: Tensor | None,
) -> list[Tensor]:
    """Run the op; returns the fields, the masks and the counters."""
    arguments = arguments_of(fields, resolutions, n_steps, threads)
    ops.gather_(*arguments, *order)
    return [*arguments[0], *arguments[1], arguments[2]]


def arguments_of(
    fields: list[Field], resolutions: Tensor, n_steps: Tensor | None = None, threads: int = 1
) -> tuple[Any, ...]:
    """Make an op's arguments, with fresh outputs: the fields, the masks and the counters come
    first.
    """
    count = len(resolutions)
    outs = [f.out(count) for f in fields]
    masks = [
        torch.ones(count, next(f.rows for f in fields if f.mask == i), dtype=torch.bool)
        for i in range(max((f.mask for f in fields), default=-1) + 1)
    ]
    parts = ([f.column for f in fields], [f.shift for f in fields], [f.gain for f in fields])
    specs = [number for f in fields for number in f.spec]
    pads = [0.0 if isinstance(f.pad, str) else f.pad for f in fields]
    return outs, masks, torch.tensor([1, 2, 3]), *parts, resolutions, n_steps, specs, pads, threads


def check(native: Ops, fields: list[Field], *rest: Any) -> list[Tensor]:
    """Gather by a backend and by its model; return what both give."""
    expected = gather(model_of(native), fields, *rest)
    got = gather(native, fields, *rest)
    assert all(map(same_bits, got, expected))
    return expected
