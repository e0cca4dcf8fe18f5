"""Windows, padding and returns: every backend against the reference, bit for bit."""

import itertools
from typing import Any, NamedTuple

import pytest
import torch
from gather_fields import (
    FIRST_ROWS,
    LENGTHS,
    NONE,
    NUM_ROWS,
    Field,
    arguments_of,
    check,
    gather,
    random_bits,
    resolutions_of,
    scaling,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from op_arguments import advantage_arguments
from op_kit import (
    CPU,
    REFERENCE,
    REFUSED,
    compare,
    model_of,
    powers_of,
    refuse,
    same_bits,
)
from torch import Tensor

from deepspeed_gear.ops import Ops
from deepspeed_gear.ops.records import Align, Follows, Resolution, Source
from deepspeed_gear.schema import DTYPES

ALIGNS = (Align.IN_PLACE, Align.LEFT, Align.RIGHT)
NO_SAMPLE = [Resolution.NO_SAMPLE, Resolution.NO_SAMPLE, 0, 0, 0, 0, 0]
MOST_N = 3  # steps of an n-step return

# ---- windows -------------------------------------------------------------------------------------


class Table(NamedTuple):
    """Trajectories of some lengths, each of them one row longer; and samples: an anchor in one, or
    none.
    """

    lengths: list[int]
    samples: list[tuple[int, int] | None]

    @property
    def num_rows(self) -> int:
        return sum(n + 1 for n in self.lengths)

    @property
    def resolutions(self) -> Tensor:
        first = [sum(n + 1 for n in self.lengths[:i]) for i in range(len(self.lengths))]
        known = {i: [i, i, 0, first[i], n] for i, n in enumerate(self.lengths)}
        rows = [NO_SAMPLE if at is None else [*known[at[0]], at[1], 0] for at in self.samples]
        return torch.tensor([[*row, j] for j, row in enumerate(rows)], dtype=torch.int64).view(
            -1, 8
        )


@st.composite
def tables(draw: st.DrawFn) -> Table:
    lengths = draw(st.lists(st.integers(1, 9) | st.just(40), min_size=1, max_size=4))
    where = st.integers(0, len(lengths) - 1).flatmap(
        lambda i: st.tuples(st.just(i), st.integers(0, lengths[i] - 1))
    )
    return Table(lengths, draw(st.lists(st.one_of(where, where, where, st.none()), max_size=33)))


@st.composite
def divided_windows(draw: st.DrawFn) -> tuple[dict[str, Any], int]:
    """Return the options of a field's window, and the number of equal parts into which it is
    divided.
    """
    parts = draw(st.integers(1, 6))
    window = {
        "offset": draw(st.integers(-14, 14) | st.sampled_from([-60, -32, 60])),
        "length": parts * draw(st.integers(1, 8)),
        "align": draw(st.sampled_from(ALIGNS)),
        "follows": draw(st.integers(0, 1)),
        "pad": draw(st.sampled_from([0.0, -0.0, 3.0, "edge"])),
    }
    return window, parts


KINDS = [  # source, elements, dtype of the column and of the field, whether it is scaled
    (Source.STEPS, 3, torch.float32, torch.float32, False),
    (Source.STEPS_PLUS_ONE, 2, torch.uint8, torch.uint8, False),
    (Source.STEPS, 1, torch.bool, torch.float32, False),
    (Source.STEPS, 1, torch.int16, torch.int64, False),
    (Source.STEPS, 1, torch.float32, torch.float32, True),  # as return_to_go
    (Source.STEPS_PLUS_ONE, 5, torch.float64, torch.bfloat16, True),
    (Source.TIMESTEP, 1, torch.int64, torch.int64, False),
    (Source.POSITION, 1, torch.int64, torch.int64, False),
]


def real_places(first: int, length: int, rows: int, align: int) -> list[bool]:
    """Return which places of a window hold a row of the trajectory."""
    before = sum(row < 0 for row in range(first, first + length))
    real = sum(0 <= row < rows for row in range(first, first + length))
    begin = {Align.IN_PLACE: before, Align.LEFT: 0, Align.RIGHT: length - real}[align]
    return [begin <= place < begin + real for place in range(length)]


@settings(max_examples=100)
@given(table=tables(), divided=divided_windows(), kind=st.sampled_from(KINDS))
def test_windows_and_their_parts(
    native: Ops, table: Table, divided: tuple[dict[str, Any], int], kind: tuple[Any, ...]
) -> None:
    """The equal parts of a window, one after the other, are the window; each counts its own rows.

    Its mask is that of a walk step by step. What is no sample is padding, where the edge is zero.
    """
    (window, parts) = divided
    (source, elements, stored, dtype, is_scaled) = kind
    random = torch.Generator().manual_seed(table.num_rows)
    column = (torch.rand(table.num_rows, elements, generator=random) * 100).to(stored)
    scale = torch.linspace(-3, 3, elements).double(), torch.linspace(0.3, 2, elements).double()
    shift, gain = scaling(*scale) if is_scaled else (NONE, NONE)
    samples = table.samples
    length = window["length"]
    steps = [0 if sample is None else i % MOST_N + 1 for i, sample in enumerate(samples)]
    n_steps = torch.tensor(steps, dtype=torch.int64)

    def gathered(first: int, count: int) -> list[Tensor]:
        """Gather the rows [first, first + count) of the window: values, mask, and what
        is counted.
        """
        place = {"mask": 0, "first": first, "count": count}
        field = Field(column, source, dtype=dtype, shift=shift, gain=gain, **window, **place)
        values, mask, counters = check(native, [field], table.resolutions, n_steps)
        return [values, mask, counters - torch.tensor([1, 2, 3])]  # which they begin at

    whole, mask, counts = gathered(0, length)
    found = [gathered(first, length // parts) for first in range(0, length, length // parts)]
    assert same_bits(torch.cat([values for values, _, _ in found], dim=1), whole)
    assert torch.equal(torch.cat([real for _, real, _ in found], dim=1), mask)
    for values, real, counted in found:
        num_bytes = values.numel() * values.element_size()
        assert counted.tolist() == [int(real.sum()), real.numel(), num_bytes]
    assert torch.equal(sum(counted for _, _, counted in found), counts)
    wanted = []
    for sample, n in zip(samples, steps, strict=True):
        number, anchor = sample or (0, 0)
        first = anchor + window["offset"] + window["follows"] * n
        rows = table.lengths[number] + (source == Source.STEPS_PLUS_ONE) if sample else 0
        wanted.append(
            real_places(first, length, rows, window["align"]) if sample else [False] * length
        )
    assert mask.tolist() == wanted
    if source == Source.POSITION:
        assert torch.equal(whole[:, :, 0], torch.arange(length).repeat(len(whole), 1))
        return
    is_none = torch.tensor([sample is None for sample in samples], dtype=torch.bool)
    pad = torch.tensor(0.0 if isinstance(window["pad"], str) else window["pad"] + 0.0).to(dtype)
    assert same_bits(whole[is_none], torch.zeros_like(whole[is_none]) + pad)


def test_a_trajectorys_own_row_of_what_is_no_sample_is_padding(native: Ops) -> None:
    column = random_bits(torch.float64, len(LENGTHS), 4)
    resolutions = resolutions_of(7)
    resolutions[::2, :7] = torch.tensor(NO_SAMPLE)
    fields = [
        Field(column, Source.TRAJECTORY, pad=pad, dtype=dtype, mask=0)
        for pad in (0.0, 2.0, "edge")
        for dtype in (torch.float64, torch.float32)
    ]
    *outs, mask, _ = check(native, fields, resolutions)
    assert mask[:, 0].tolist() == [False, True] * 3 + [False]
    assert [out[::2].unique().tolist() for out in outs] == [[0]] * 2 + [[2]] * 2 + [[0]] * 2


@pytest.mark.parametrize(("count", "threads"), [(0, 1), (1, 1), (33, 1), (33, 2)])
def test_many_fields_at_once(native: Ops, count: int, threads: int) -> None:
    """Every source, n-step offsets, shared masks."""
    torch.manual_seed(count)
    observation = random_bits(torch.float32, NUM_ROWS, 2, 3)
    window: dict[str, Any] = {"offset": -4, "length": 9}
    computed: dict[str, Any] = {"column": NONE, "length": 9, "dtype": torch.int64}
    fields = [
        Field(observation, Source.STEPS_PLUS_ONE, offset=-4, length=5, mask=0, pad="edge"),
        Field(random_bits(torch.bool, NUM_ROWS), **window, mask=1),
        Field(random_bits(torch.int16, NUM_ROWS), **window, mask=1, align=Align.IN_PLACE),
        Field(random_bits(torch.float64, len(LENGTHS), 4), Source.TRAJECTORY, mask=2),
        Field(observation, Source.STEPS_PLUS_ONE, follows=1, mask=3),
        Field(
            observation, Source.STEPS, follows=1, offset=-2, length=6, align=Align.RIGHT, pad="edge"
        ),
        *(Field(source=Source.TIMESTEP, offset=-4, align=a, **computed) for a in ALIGNS),
        *(
            Field(source=Source.POSITION, offset=-60, align=a, follows=1, **computed)
            for a in ALIGNS
        ),
    ]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        check(native, fields, resolutions_of(count), torch.randint(1, 6, (count,)), threads)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 3])
def test_batches_larger_than_the_caches(cpu: Ops, threads: int) -> None:
    """Their long runs are stored past the caches, also beside padding and short fields."""
    torch.manual_seed(threads)
    wide = random_bits(torch.uint8, NUM_ROWS, 200_001)  # no multiple of a line
    fields = [
        Field(wide, offset=-1, length=3, mask=0, pad=7.0),
        Field(wide, Source.STEPS_PLUS_ONE, length=2, pad="edge"),
        Field(random_bits(torch.float32, NUM_ROWS, 2), offset=-1, length=3, mask=1),
    ]
    # 66 MB: more than an eighth of any third level
    check(cpu, fields, resolutions_of(66), None, threads)


@pytest.mark.parametrize("share", [0.0, 0.8, 1.0])
def test_goals_are_written_where_there_are_any(cpu: Ops, share: float) -> None:
    """Short and long rows, converted and not; a sample without a goal, or that is none, stays as it
    is.
    """
    torch.manual_seed(int(10 * share))
    resolutions = resolutions_of(600)
    goals = (torch.rand(600) * (resolutions[:, 4] + 1)).long()
    goals[torch.rand(600) >= share] = -1
    resolutions[17, :7] = torch.tensor(NO_SAMPLE)
    goals[17] = -1
    column = random_bits(torch.float32, NUM_ROWS, 3)
    follows = Follows.GOAL
    fields = [
        Field(column, Source.STEPS_PLUS_ONE, follows=follows, mask=0),
        Field(
            random_bits(torch.uint8, NUM_ROWS, 700), Source.STEPS_PLUS_ONE, follows=follows, mask=1
        ),
        Field(column, Source.STEPS_PLUS_ONE, follows=follows, mask=2, dtype=torch.float16),
    ]
    out, *_ = check(cpu, fields, resolutions, goals)
    assert (out[goals < 0] == 1).all()
    rows = resolutions[:, 3] + goals
    assert same_bits(out[goals >= 0, 0], column[rows[goals >= 0]])
    with pytest.raises(REFUSED, match="call of their own"):
        gather(cpu, [*fields, Field(column)], resolutions, goals)


@pytest.mark.parametrize("count", [0, 1, 33, 300])
def test_order_changes_nothing(cpu: Ops, native: Ops, count: int) -> None:
    torch.manual_seed(count)
    resolutions = resolutions_of(count)
    n_steps = torch.randint(0, 3, (count,))
    column = random_bits(torch.float32, NUM_ROWS, 5)
    fields = [
        Field(column, offset=-2, length=7, pad="edge", mask=0),
        Field(column, Source.STEPS_PLUS_ONE, follows=1, mask=1, dtype=torch.float16),
        Field(random_bits(torch.uint8, len(LENGTHS), 3), Source.TRAJECTORY),
        Field(NONE, Source.TIMESTEP, -3, 5, dtype=torch.int64, follows=1),
        Field(NONE, Source.POSITION, 0, 5, dtype=torch.int64),
    ]
    expected = gather(model_of(native), fields, resolutions, n_steps)
    by_row = resolutions[:, 3].argsort(stable=True)
    for order in (
        None,
        torch.arange(count),
        torch.arange(count).flip(0),
        torch.randperm(count),
        by_row,
    ):
        for ops in (model_of(native), native, cpu.on_host()):
            got = gather(ops, fields, resolutions, n_steps, 1, order)
            assert all(map(same_bits, got, expected))


@pytest.mark.parametrize("num_fields", [0, 15, 16, 17, 33])
def test_more_fields_than_one_launch_takes(native: Ops, num_fields: int) -> None:
    torch.manual_seed(num_fields)
    columns = [random_bits(torch.float32, NUM_ROWS, 1 + i % 5) for i in range(num_fields)]
    some = [torch.float32, torch.float64, torch.bfloat16]
    fields = [
        Field(column, offset=i % 7 - 3, length=1 + i % 4, mask=i, dtype=some[i % 3])
        for i, column in enumerate(columns)
    ]
    check(native, fields, resolutions_of(70))


@pytest.mark.parametrize("length", [1, 4, 20])
@pytest.mark.parametrize("padded", [[], [300], [0, 599]])
def test_blocks_of_whole_windows(native: Ops, length: int, padded: list[int]) -> None:
    """Many samples without padding, of every size that has a loop of its own, and some with
    padding.
    """
    torch.manual_seed(length)
    # the longest trajectory
    count = 600
    slot = 3
    sizes = (1, 2, 3, 4, 8, 12, 44, 64, 65, 68, 600, 2000)
    zero = torch.zeros(count, dtype=torch.int64)
    anchor = torch.randint(length - 1, LENGTHS[slot] - 1, (count,))
    known = zero + slot, zero + slot, zero, zero + FIRST_ROWS[slot], zero + LENGTHS[slot]
    resolutions = torch.stack((*known, anchor, zero, zero), 1)
    for sample in padded:
        resolutions[sample, 5] = 0 if sample else LENGTHS[slot] - 1
    if length > 1 and padded:
        resolutions[17, :7] = torch.tensor(NO_SAMPLE)
    n_steps = torch.randint(0, 2, (count,))
    columns = [random_bits(torch.uint8, NUM_ROWS, size) for size in sizes]
    fields = [Field(column, offset=1 - length, length=length, mask=0) for column in columns]
    other = random_bits(torch.float32, NUM_ROWS, 11)
    fields.append(Field(other, Source.STEPS_PLUS_ONE, 2 - length, length, mask=1))
    fields.append(
        Field(other, Source.STEPS_PLUS_ONE, 1 - length, length, follows=1, mask=2, pad=3.0)
    )
    check(native, fields, resolutions, n_steps)


# ---- columns that hold only the steps that are read ----------------------------------------------

STEPS = 6  # of the trajectory; it has one row more
COLUMN = torch.arange((STEPS + 1) * 3, dtype=torch.float32).view(-1, 3) + 1
WINDOWS = [(o, n) for o in (-9, -6, -2, -1, 0, 1, 2, 6, 9) for n in (1, 3, 20)]
CASES = list(
    itertools.product(WINDOWS, (0, 3, STEPS - 1), (0, 1))
)  # window, anchor, whether n steps follow
TWO = torch.tensor([2])


def record(anchor: int, first_row: int, num_steps: int = STEPS) -> Tensor:
    return torch.tensor([[0, 0, 0, first_row, num_steps, anchor, 0, 0]])


def steps_of(field: Field, anchor: int, n_step: int = 0) -> list[int]:
    """Return the steps that a window reads, by definition: the real ones, at an edge
    the nearest.
    """
    held = STEPS + (field.source == Source.STEPS_PLUS_ONE)
    first = anchor + field.offset + (n_step if field.follows else 0)
    every = range(first, first + field.length)
    if field.pad == "edge":
        return sorted({min(max(step, 0), held - 1) for step in every})
    return [step for step in every if 0 <= step < held]


def is_refused(
    ops: Ops, fields: list[Field], resolutions: Tensor, n_steps: Tensor | None = None
) -> None:
    given = arguments_of(fields, resolutions, n_steps)
    refuse(ops, "gather_", given, r"resolution 0 .*must lie in the columns")


@pytest.mark.parametrize(
    ("align", "pad"),
    [(Align.IN_PLACE, 7.5), (Align.IN_PLACE, "edge"), (Align.LEFT, "edge"), (Align.RIGHT, 0.0)],
)
@pytest.mark.parametrize("source", [Source.STEPS, Source.STEPS_PLUS_ONE])
def test_a_column_of_the_steps_that_are_read(
    native: Ops, source: int, align: int, pad: float | str
) -> None:
    """It gives what the whole trajectory gives; where nothing is read, first_row may be
    anything.
    """
    for (offset, length), anchor, follows in CASES:
        field = Field(COLUMN, source, offset, length, align, follows, pad, mask=0)
        want = gather(CPU, [field], record(anchor, 0), TWO)
        steps = steps_of(field, anchor, 2)
        low, high = (steps[0], steps[-1] + 1) if steps else (anchor, anchor + 1)
        field.column = COLUMN[low:high].clone()
        for first_row in (-low,) if steps else (-low, -(1 << 62), 1 << 62):
            got = check(native, [field], record(anchor, first_row), TWO)
            assert all(map(same_bits, got, want))


@pytest.mark.parametrize("pad", [0.0, "edge"])
@pytest.mark.parametrize("source", [Source.STEPS, Source.STEPS_PLUS_ONE])
def test_one_row_too_few_is_refused(on_host: Ops, source: int, pad: float | str) -> None:
    for (offset, length), anchor, follows in CASES:
        field = Field(COLUMN, source, offset, length, follows=follows, pad=pad, mask=0)
        if steps := steps_of(field, anchor, 2):
            field.column = COLUMN[steps[0] : steps[-1] + 1].clone()
            for first_row in (-steps[0] - 1, -steps[0] + 1, -(1 << 63), (1 << 63) - 1):
                is_refused(on_host, [field], record(anchor, first_row), TWO)


def test_only_the_part_is_read(native: Ops, careful: Ops) -> None:
    """The window begins 3 steps before the trajectory and ends 3 behind it; its outer parts only
    pad.
    """
    for first, count, low, high in (
        (0, 2, 0, 0),
        (2, 3, 0, 1),
        (5, 3, 2, 4),
        (8, 2, 5, 5),
        (10, 2, 5, 5),
    ):
        parts: dict[str, Any] = {
            "offset": -5,
            "length": 12,
            "pad": "edge",
            "first": first,
            "count": count,
        }
        want = gather(REFERENCE, [Field(COLUMN, **parts, mask=0)], record(2, 0))
        some = Field(COLUMN[low : high + 1].clone(), **parts, mask=0)
        assert all(map(same_bits, check(native, [some], record(2, -low)), want))
        is_refused(careful, [some], record(2, 1 - low))


def test_every_column_is_looked_at(careful: Ops) -> None:
    """Each alone is inside; a column of T rows may read a step that one of T+1 rows does not, and
    reverse.
    """
    last = Field(COLUMN[:1], offset=1, pad="edge")  # reads step T - 1
    final = Field(COLUMN[:1], Source.STEPS_PLUS_ONE, offset=1, pad="edge")  # reads step T
    anchor = STEPS - 1
    gather(careful, [last], record(anchor, -anchor))
    gather(careful, [final], record(anchor, -STEPS))
    for fields in ([last, final], [final, last]):
        for first_row in (-anchor, -STEPS):
            is_refused(careful, fields, record(anchor, first_row))
        two = [Field(COLUMN[:2], f.source, f.offset, pad="edge") for f in fields]
        gather(careful, two, record(anchor, -anchor))
    unread = Field(COLUMN[:1], offset=1)
    gather(careful, [unread, final], record(anchor, -STEPS))
    own = record(anchor, -STEPS)
    own[:, Resolution.SLOT] = 4
    gather(careful, [Field(COLUMN[:5], Source.TRAJECTORY)], own)
    is_refused(careful, [Field(COLUMN[:4], Source.TRAJECTORY)], own)


# ---- returns -------------------------------------------------------------------------------------

EXTENTS = torch.tensor(
    [[0, 1], [1, 7], [8, 0], [9, 33], [50, 200]]
)  # rows 42..49 belong to no process
NUM_REWARDS = 250


def rewards_of(dtype: torch.dtype) -> Tensor:
    torch.manual_seed(0)
    if not dtype.is_floating_point:
        return torch.randint(-(1 << 40), 1 << 40, (NUM_REWARDS,)).to(dtype)
    reward = torch.randn(NUM_REWARDS, dtype=torch.float64) * 10.0 ** torch.randint(
        -3, 4, (NUM_REWARDS,)
    )
    reward[60:62] = torch.tensor([torch.inf, -torch.inf])
    reward[100] = torch.nan
    reward[0] = -0.0
    return reward.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
def test_suffix_sum(native: Ops, dtype: torch.dtype) -> None:
    for extents in (EXTENTS, EXTENTS[:0], EXTENTS[2:3]):
        (found,) = compare(
            native, "suffix_sum_", torch.full((NUM_REWARDS,), 9.0), rewards_of(dtype), extents
        )
        assert (found[42:50] == 9.0).all()


def outs_of(count: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.full((count,), 9.0), torch.full((count,), 9.0), torch.full((count,), 9)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
def test_n_step(native: Ops, dtype: torch.dtype) -> None:
    reward = rewards_of(dtype)
    often, truncated = torch.rand(2, NUM_REWARDS) < 0.1
    at_32 = (
        torch.arange(NUM_REWARDS) - 50
    ) % 32 == 31  # a warp's last step, of windows at the first row
    never = truncated & False
    for count in (0, 1, 33, 240):
        trajectory = torch.tensor([0, 1, 3, 4])[torch.randint(0, 4, (count,))]
        first, length = EXTENTS[trajectory].unbind(1)
        zero = torch.zeros_like(first)
        anchor = torch.minimum((torch.rand(count) * length).long(), length - 1)
        anchor[: count // 3] = 0
        resolutions = torch.stack(
            (zero, trajectory, zero, first, length, anchor, zero, zero), dim=1
        )
        resolutions[5::9, :7] = torch.tensor(NO_SAMPLE)
        for n, terminated, ends, gamma in (
            (1, often, None, 0.9),
            (3, often, truncated, 0.99),
            (300, often, never, 1.0),
            (5, often, truncated, 0.0),
            (31, never, None, 0.99),  # about the lanes of a warp
            (32, never, never, 0.98),
            (33, at_32, never, 0.97),
            (300, at_32, None, 0.99),
            (64, never, at_32, 1.0),
        ):
            given = reward, terminated, ends, powers_of(gamma, n), resolutions, n
            found = compare(native, "n_step_", *outs_of(count), *given)
            assert not any(out[5::9].any() for out in found), "of no sample"


@pytest.mark.parametrize("off_policy", [False, True])
def test_advantages(native: Ops, off_policy: bool) -> None:
    for rows, steps in ((0, 3), (1, 1), (33, 7), (300, 40)):
        *given, factors = advantage_arguments(rows, steps, off_policy=off_policy)
        found = compare(native, "advantages_", *given, factors)
        mask = given[7]
        logs = given[8:10]
        assert all((out[~mask] == 0).all() for out in found)
        compare(native, "advantages_", *given[:6], None, mask, *logs, [1.0, 1.0, 1e30, 0.5])
        for at, special in (
            (3, torch.nan),
            (2, torch.inf),
            (8, -torch.inf),
            (8, torch.nan),
            (9, -torch.inf),
        ):
            if given[at] is not None:
                given[at].view(-1)[::5] = special
                compare(native, "advantages_", *given, factors)


@pytest.mark.parametrize("n", [1, 2, 9])
def test_n_step_of_the_steps_that_are_read(native: Ops, on_host: Ops, n: int) -> None:
    for anchor in (0, 3, STEPS - 1):
        reward = torch.randn(STEPS)
        some = slice(anchor, min(anchor + n, STEPS))

        def given(reward: Tensor, first_row: int, anchor: int = anchor) -> tuple[Any, ...]:
            flags = torch.zeros_like(reward, dtype=torch.bool)
            return (
                *outs_of(1),
                reward,
                flags,
                flags,
                powers_of(0.9, n),
                record(anchor, first_row),
                n,
            )

        want = compare(native, "n_step_", *given(reward, 0))
        assert all(
            map(same_bits, compare(native, "n_step_", *given(reward[some].clone(), -anchor)), want)
        )
        for shift in (-1, 1):
            refuse(
                on_host,
                "n_step_",
                given(reward[some].clone(), shift - anchor),
                "must lie in the columns",
            )


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "value"),
    [(0, 0), (0, -2), (1, 99), (1, -2), (2, 1), (3, 1), (3, -1), (4, -1), (5, 1), (6, 1)],
)
@pytest.mark.parametrize("source", [Source.STEPS, Source.TRAJECTORY])
def test_a_record_that_is_almost_no_sample_is_refused(
    on_host: Ops, source: int, word: int, value: int
) -> None:
    """It has no anchor, or its slot lies outside."""
    resolutions = torch.tensor([[*NO_SAMPLE, 5]])
    field = Field(torch.ones(NUM_ROWS, 2), source)
    gather(on_host, [field], resolutions)
    resolutions[0, word] = value
    refuse(on_host, "gather_", arguments_of([field], resolutions), "must lie")


PARTS = [(5, -1, 2), (5, 2, 0), (5, 4, 2), (5, 5, 1), (5, 0, 6), (5, (1 << 63) - 1, 5)]


@pytest.mark.parametrize(
    ("field", "match"),
    [
        (Field(torch.zeros(50, 2), length=0), "length"),
        (Field(torch.zeros(50, 2), offset=1 << 41), "offset"),
        (Field(torch.zeros(50, 2), Source.TRAJECTORY, length=2), "per trajectory"),
        (Field(torch.zeros(50, dtype=torch.int8), pad=128.0, offset=-1), "whole number"),
        (Field(torch.zeros(50, dtype=torch.int64), pad=0.5, offset=-1), "whole number"),
        (Field(torch.zeros(50, dtype=torch.bool), pad=2.0, offset=-1), "whole number"),
        (Field(torch.zeros(50, 2), follows=Follows.N_STEP), "n_steps"),
        (Field(torch.zeros(50, 2), follows=Follows.GOAL), "n_steps"),
        (
            Field(torch.zeros(50, 2), Source.TRAJECTORY, first=1, count=1),
            "first and count must be a part",
        ),
        *(
            (
                Field(torch.zeros(50, 2), length=n, first=first, count=count),
                "first and count must be a part",
            )
            for n, first, count in PARTS
        ),
    ],
)
def test_impossible_field_is_refused(careful: Ops, field: Field, match: str) -> None:
    with pytest.raises(REFUSED, match=match):
        gather(careful, [field], torch.tensor([[0, 0, 0, 0, 1, 0, 0, 0]]))
