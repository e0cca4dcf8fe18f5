"""The public wrappers: what they refuse, and how a backend is chosen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from deepspeed_gear.errors import BuildError, ConfigError, ShapeError
from deepspeed_gear.ops import Ops, fake_ops, functional, load_backend
from deepspeed_gear.ops.constants import SOURCE_POSITION, SOURCE_TIMESTEP, SOURCE_TRAJECTORY

RESOLUTIONS = torch.tensor([[0, 0, 0, 2, 5, 1, 1, 0]])
COLUMN = torch.arange(20.0).view(10, 2)
MASSES = torch.tensor([3, 0, 4])
STORED = torch.arange(18).byte()  # rows of 3 bytes
# Steps 1 and 2 of a trajectory that lies from row 1 on; behind a head of 8 bytes.
ROWS = (
    torch.tensor([[0, 0, 0, 5, 1, 0, -1]]),
    torch.tensor([[0, 0, 0, 2, 0, 0, 0]]),
    torch.ones(1, 1, dtype=torch.bool),
    torch.tensor([[0, 0, 3]]),
    torch.tensor([8]),
    torch.tensor([[0, 0, 0, 1, 0, 0, 0, 0]]),
)
WHICH, ROOM = torch.tensor([0]), (1, 2, 3, 1, 100, 200)


@pytest.fixture(scope="module")
def ops() -> Ops:
    return load_backend("reference")


def test_backends() -> None:
    assert load_backend("reference").native is None
    cpu = load_backend("cpu")
    assert cpu.native is not None
    assert load_backend("auto").draw_ is cpu.draw_
    assert load_backend().name == "cpu"
    with pytest.raises(ConfigError, match=r"gear\.backend must be auto, reference, cpu or cuda, got 'gpu'"):
        load_backend("gpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu_is_refused_with_a_remedy() -> None:
    with pytest.raises(BuildError, match=r'gear\.backend is cuda, .* set gear\.backend to "cpu"'):
        load_backend("cuda")


def test_every_op_of_every_backend_is_there() -> None:
    for name in ("reference", "cpu"):
        assert all(callable(getattr(load_backend(name), op)) for op in fake_ops.OP_NAMES)


def prioritize(ops: Ops, **changes: Any) -> None:
    """Call `functional.prioritize` on three trajectories, with some arguments changed."""
    arguments: dict[str, Any] = {
        "sums": functional.tree(MASSES, ops=ops),
        "minima": MASSES[:0],
        "priorities": torch.ones(3),
        "counts": torch.zeros(5).long(),
        "slots": torch.tensor([[2, 1, 10 + i, i * 5, 5, 5, 0, 0] for i in range(3)]),
        "updates": torch.tensor([[1, 1, 4, 0x40000000]]),
        "alpha": 1.0,
    }
    functional.prioritize(**{**arguments, **changes}, ops=ops)


def report(ops: Ops, **changes: Any) -> None:
    """Call `functional.report` on a log of two, with some arguments changed."""
    log, samples = torch.zeros(2, 6).long(), torch.ones(2, 8).long()
    arguments: dict[str, Any] = {
        "log": log,
        "resolutions": samples,
        "priorities": torch.ones(2),
        "tail": 0,
        "batch": 0,
    }
    functional.report(**{**arguments, **changes}, ops=ops)


REFUSED: dict[str, tuple[Callable[[Ops], object], str]] = {
    "seed": (lambda o: functional.draw(-1, 0, 0, 5, 1, ops=o), r"seed must be in \[0, "),
    "stream": (lambda o: functional.draw(0, 1 << 32, 0, 5, 1, ops=o), r"stream must be in \[0, "),
    "total": (lambda o: functional.draw(0, 0, 0, 0, 1, ops=o), r"total must be in \[1, .*got 0"),
    "count": (lambda o: functional.permute(0, 0, 0, 3, 5, 3, ops=o), r"count must be in \[0, 3\), got 3"),
    "first": (lambda o: functional.permute(0, 0, 0, 6, 5, 0, ops=o), r"first must be in \[0, 6\), got 6"),
    "dtype of masses": (lambda o: functional.tree(MASSES.int(), ops=o), r"masses must be torch.int64"),
    "masses": (lambda o: functional.tree(-MASSES, ops=o), "masses must not be negative, got -4"),
    "slots": (
        lambda o: functional.resolve(functional.tree(MASSES, ops=o), MASSES, MASSES, (0, 0, 1, 1, 0), ops=o),
        r"slots must have shape \[\*, 8\], got \[3\]",
    ),
    "coordinates": (
        lambda o: functional.resolve(
            functional.tree(MASSES, ops=o),
            torch.ones(3, 8).long(),
            torch.tensor([0, 7]),
            (0, 0, 1, 1, 0),
            ops=o,
        ),
        r"coordinates must lie in \[0, 7\), got 7",
    ),
    "rule": (
        lambda o: functional.resolve(
            functional.tree(MASSES, ops=o), torch.ones(3, 8).long(), MASSES, (0, 0, 0, 1, 0), ops=o
        ),
        "rule must be first, trim, stride >= 1",
    ),
    "priorities": (
        lambda o: functional.mass(torch.tensor([1, -1.0]), 0.6, ops=o),
        "priority 1 must be finite",
    ),
    "alpha": (lambda o: functional.mass(torch.ones(3), 1.5, ops=o), r"alpha must be in \[0, 1\], got 1.5"),
    "dtype of priorities": (
        lambda o: functional.mass(MASSES, 0.6, ops=o),
        "priorities must be torch.float32",
    ),
    "beta": (
        lambda o: functional.importance(RESOLUTIONS, 1, 1, -0.5, ops=o),
        r"beta must be in \[0, 1\], got -0.5",
    ),
    "numerator": (
        lambda o: functional.importance(RESOLUTIONS, 0, 1, 0.5, ops=o),
        r"numerator must be in \[1",
    ),
    "count of items": (
        lambda o: functional.importance(RESOLUTIONS, 1, 0, 0.5, ops=o),
        r"count must be in \[1",
    ),
    "no mass": (
        lambda o: functional.importance(RESOLUTIONS * 0, 1, 1, 0.5, ops=o),
        "masses must be positive",
    ),
    "sums of minima": (
        lambda o: functional.minima(MASSES, 3, ops=o),
        r"sums must have shape \[32\], got \[3\]",
    ),
    "minima": (
        lambda o: functional.minima_update(MASSES, functional.tree(MASSES, ops=o), 3, MASSES, ops=o),
        r"minima must have shape \[0\], got \[3\]",
    ),
    "items": (
        lambda o: functional.minima_update(MASSES[:0], functional.tree(MASSES, ops=o), 3, MASSES, ops=o),
        r"items must lie in \[0, 3\)",
    ),
    "row_slots": (
        lambda o: functional.resolve_rows(MASSES, MASSES, MASSES, MASSES, ops=o),
        "row_slots must be torch.int32",
    ),
    "coordinates of rows": (
        lambda o: functional.resolve_rows(
            functional.tree(MASSES, ops=o), torch.ones(1, 8).long(), MASSES.int() * 0, MASSES + 4, ops=o
        ),
        r"coordinates must lie in \[0, 7\)",
    ),
    "k": (lambda o: functional.top_k(torch.ones(3), MASSES, -1, ops=o), r"k must be in \[0"),
    "sums of k": (lambda o: functional.top_k(torch.ones(4), MASSES, 1, ops=o), "sums must have at least 4"),
    "infinite": (
        lambda o: functional.top_k(torch.tensor([1, float("inf")]), MASSES, 1, ops=o),
        "priority 1 must be finite",
    ),
    "counts": (lambda o: prioritize(o, counts=torch.zeros(4).long()), r"counts must have shape \[5\]"),
    "updates": (
        lambda o: prioritize(o, updates=torch.zeros(1, 3).long()),
        r"updates must have shape \[\*, 4\]",
    ),
    "minima of updates": (lambda o: prioritize(o, minima=MASSES), r"minima must have shape \[0\]"),
    "unit": (lambda o: prioritize(o, unit=2), "unit must be 0 or 1, got 2"),
    "priority of an update": (
        lambda o: prioritize(o, updates=torch.tensor([[0, 0, 0, 0], [0, 0, 0, 0x7FC00000]])),
        "priority 1 must be finite and at least 0, got nan",
    ),
    "log": (lambda o: report(o, log=torch.zeros(2, 5).long()), r"log must have shape \[\*, 6\]"),
    "room of the log": (
        lambda o: report(o, log=torch.zeros(1, 6).long()),
        "log must hold 2 reports, got 1",
    ),
    "samples of reports": (
        lambda o: report(o, resolutions=torch.ones(3, 8).long()),
        r"resolutions must have shape \[2, 8\]",
    ),
    "tail": (lambda o: report(o, tail=-1), r"tail must be in \[0, "),
    "priority of a report": (
        lambda o: report(o, priorities=torch.tensor([1.0, -1.0])),
        "priority 1 must be finite and at least 0, got -1.0",
    ),
    "extents": (
        lambda o: functional.suffix_sum(COLUMN[:, 0].contiguous(), torch.tensor([[8, 3]]), ops=o),
        "extent 0 must lie in 10 rows",
    ),
    "contiguous": (
        lambda o: functional.suffix_sum(COLUMN[:, 0], torch.tensor([[0, 3]]), ops=o),
        "reward must be contiguous",
    ),
    "terminated": (
        lambda o: functional.n_step(COLUMN[:, 0].contiguous(), MASSES > 1, None, RESOLUTIONS, 1, 0.9, ops=o),
        r"terminated must have shape \[10\], got \[3\]",
    ),
    "gamma": (
        lambda o: functional.n_step(
            COLUMN[:, 0].contiguous(), torch.zeros(10) > 1, None, RESOLUTIONS, 1, 1.1, ops=o
        ),
        r"gamma must be in \[0, 1\], got 1.1",
    ),
    "resolution": (
        lambda o: functional.gather(COLUMN[:3], RESOLUTIONS, ops=o),
        "resolution 0 must lie in the columns' 3 rows",
    ),
    "resolution of a return": (
        lambda o: functional.n_step(COLUMN[:4, 0] + 0, torch.zeros(4) > 1, None, RESOLUTIONS, 2, 0.9, ops=o),
        "resolution 0 must lie in the columns' 4 rows",
    ),
    "dtype of a column": (
        lambda o: functional.pack_rows([MASSES], *ROWS, ops=o),
        "columns must be torch.uint8",
    ),
    "number of columns": (
        lambda o: functional.pack_rows([], *ROWS, ops=o),
        r"columns must have shape \[0, 3\], got \[1, 3\]",
    ),
    "number of messages": (
        lambda o: functional.unpack_rows([STORED], RESOLUTIONS + 0, [], WHICH, *ROWS[:-1], ROOM, ops=o),
        "messages must be 1, got 0",
    ),
    "conversion": (
        lambda o: functional.gather(COLUMN, RESOLUTIONS, dtype=torch.int32, ops=o),
        "dtype must be one that torch.float32 can be converted to, got torch.int32",
    ),
    "timestep": (
        lambda o: functional.gather(COLUMN, RESOLUTIONS, source=SOURCE_TIMESTEP, ops=o),
        "source must",
    ),
    "position": (
        lambda o: functional.gather(COLUMN, RESOLUTIONS, source=SOURCE_POSITION, length=2, ops=o),
        "source must",
    ),
    "first of a window": (
        lambda o: functional.gather(COLUMN, RESOLUTIONS, length=3, first=3, ops=o),
        r"first must be in \[0, 3\), got 3",
    ),
    "count of a window": (
        lambda o: functional.gather(COLUMN, RESOLUTIONS, length=3, first=1, count=3, ops=o),
        r"count must be in \[1, 3\), got 3",
    ),
    "order of other samples": (
        lambda o: functional.gather(COLUMN, RESOLUTIONS, order=torch.tensor([1]), ops=o),
        r"order must have every index of \[0, 1\) once, got \[1\]",
    ),
    "window of a trajectory's row": (
        lambda o: functional.gather(COLUMN, RESOLUTIONS, source=SOURCE_TRAJECTORY, length=3, ops=o),
        "source must",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_wrong_argument_is_refused(ops: Ops, what: str) -> None:
    call, message = REFUSED[what]
    with pytest.raises(ShapeError, match=message):
        call(ops)


def test_results() -> None:
    """One small case of each wrapper, by hand, on the default backend."""
    sums = functional.tree(MASSES)
    assert functional.tree_total(sums, 3) == 7
    slots = torch.tensor([[2, 1, 10 + i, i * 5, 5, 5, 0, 0] for i in range(3)])
    found = functional.resolve(sums, slots, torch.tensor([2, 3]), (0, 0, 1, 1, 1), first=6)
    assert found.tolist() == [[10, 0, 1, 0, 5, 4, 3, 6], [12, 2, 1, 10, 5, 4, 4, 7]]
    values, mask = functional.gather(COLUMN, RESOLUTIONS, offset=-2, length=3, pad=9, dtype=torch.float64)
    assert values.tolist() == [[[9.0, 9.0], [4.0, 5.0], [6.0, 7.0]]]
    assert mask.tolist() == [[False, True, True]]
    part = functional.gather(COLUMN, RESOLUTIONS, offset=-2, length=3, pad=9, first=1, count=1)
    assert [x.tolist() for x in part] == [[[[4.0, 5.0]]], [[True]]]
    rest, _ = functional.gather(COLUMN, RESOLUTIONS, offset=-2, length=3, pad=9, first=1)
    assert rest.tolist() == [[[4.0, 5.0], [6.0, 7.0]]]
    two = RESOLUTIONS.repeat(2, 1)
    values, _ = functional.gather(COLUMN, two, order=torch.tensor([1, 0]))
    assert torch.equal(values, functional.gather(COLUMN, two)[0])
    reward, ends = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0]), torch.zeros(7, dtype=torch.bool)
    returns, discount, steps = functional.n_step(reward, ends, None, RESOLUTIONS, 2, 0.5)
    assert (returns.tolist(), discount.tolist(), steps.tolist()) == ([16.0], [0.25], [2])
    assert functional.suffix_sum(reward, torch.tensor([[1, 3]])).tolist() == [0, 14, 12, 8, 0, 0, 0]
    assert sorted(functional.permute(0, 0, 0, 0, 9, 9).tolist()) == list(range(9))
    assert functional.draw(0, 0, 0, 1, 3).tolist() == [0, 0, 0]
    assert functional.mass(torch.tensor([0.0, 1.0, 4.0]), 0.5).tolist() == [0, 1 << 24, 2 << 24]
    weights = functional.importance(torch.tensor([[0, 0, 0, 0, 1, 0, m, 0] for m in (3, 12)]), 3, 1, 0.5)
    assert weights.tolist() == [1.0, 0.5]
    minima = functional.minima(sums, 3)
    assert minima.shape == (0,)
    assert functional.least_mass(sums, minima, 3) == 3
    found = functional.resolve_rows(sums, slots, torch.tensor([0, 0, 0]).int(), torch.tensor([2, 3]), first=6)
    assert found.tolist() == [[10, 0, 1, 0, 5, 0, 3, 6], [10, 0, 1, 0, 5, 2, 4, 7]]
    assert functional.top_k(torch.tensor([0.5, 9.0, 0.5, 7.0]), sums, 3).tolist() == [0, 2, -1]
    priorities, counts = torch.zeros(3), torch.zeros(5).long()
    updates = torch.tensor([[1, 1, 4, 0x40000000], [1, 2, 4, 0]])
    functional.prioritize(sums, minima, priorities, counts, slots, updates, 1.0)
    assert priorities.tolist() == [0, 2, 0]
    assert sums[:3].tolist() == [3, 2 << 24, 4]
    assert counts.tolist() == [1, 1, 0, 0x40000000, 1]
    functional.minima_update(minima, sums, 3, torch.tensor([1]))
    log = torch.zeros(2, 6).long()
    functional.report(log, found, torch.tensor([2.0, 0.5]), 5, 9)
    assert log.tolist() == [[0, 1, 2, 0x3F000000, 9, 7], [0, 1, 0, 0x40000000, 9, 6]]
    packed, sizes = functional.pack_rows([STORED], *ROWS)
    assert packed.view(torch.uint8).tolist() == [0] * 8 + [6, 7, 8, 9, 10, 11, 0, 0]
    arrivals, ring = torch.zeros(9).byte(), RESOLUTIONS + 0
    taken = functional.unpack_rows([arrivals], ring, [packed], WHICH, *ROWS[:-1], ROOM)
    assert [part.tolist() for part in (sizes, *taken)] == [[6], [6], [2, 1]]
    assert arrivals.tolist() == [0, 0, 0, 6, 7, 8, 9, 10, 11]
    assert ring.tolist() == [[0, 203, 0, 101 - 1, 5, 1, 1, 0]]
    assert functional.powers_of(0.5, 2).tolist() == [1.0, 0.5, 0.25]


def test_scaling_is_of_the_ops_type_and_repeats() -> None:
    shift, gain = torch.arange(22.0, dtype=torch.float64).view(2, 11)
    for source, target, dtype in (
        (torch.float32, torch.bfloat16, torch.float32),
        (torch.float64, torch.float32, torch.float64),
        (torch.int32, torch.float32, torch.float64),
    ):
        a, b = functional.scaling(shift, gain, source, target)
        assert a.dtype == b.dtype == dtype
        assert len(a) == len(b) >= 128
        assert torch.equal(a.view(-1, 11)[-1].double(), shift)
    assert functional.scaling(shift[:1], gain[:1], torch.uint8, torch.float32)[0].shape == (1,)
