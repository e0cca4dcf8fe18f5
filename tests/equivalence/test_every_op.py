"""Every op: on all backends, through torch.compile, by its schema, and what it refuses."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from op_arguments import HOST_COUNT, LENGTH, NUM_SLOTS, arguments
from op_kit import BAD_PRIORITIES, WITHOUT_REFERENCE, compare, outputs, refuse, tensors_of
from torch import Tensor
from torch.torch_version import TorchVersion

from deepspeed_gear.ops import Ops
from deepspeed_gear.ops.backends import OP_NAMES
from deepspeed_gear.ops.constants import ONE_Q62
from deepspeed_gear.ops.records import GatherSpec, RowSample, Slot, Source, lower

#: Ops of a table on a device: tests/unit/device.
COMPILED = [name for name in OP_NAMES if not name.startswith("ring_") and name != "scatter_"]


def skip_lists_of_old_torch(name: str) -> None:
    """Skip what torch 2.4 does not compile: ops that write to a list of tensors."""
    if name in ("gather_", "pack_", "decode_rows_") and TorchVersion(torch.__version__) < "2.5":
        pytest.skip("torch 2.4 compiles no op that writes to a list")


@pytest.mark.parametrize("name", COMPILED)
def test_compiles_as_one_graph(cpu: Ops, name: str) -> None:
    skip_lists_of_old_torch(name)
    op: Callable[..., None] = getattr(cpu, name)

    def around(*args: Any) -> list[Tensor]:
        op(*args)
        return [t + 1 for t in tensors_of(args)]

    expected = arguments(name)
    got = arguments(name)
    want = around(*expected)
    torch._dynamo.reset()
    have = torch.compile(around, fullgraph=True, backend="aot_eager", dynamic=False)(*got)
    assert all(map(torch.equal, want + tensors_of(expected), have + tensors_of(got)))


@pytest.mark.parametrize("name", COMPILED)
def test_schema_and_fake_are_right(cpu: Ops, name: str) -> None:
    """The op changes what its schema says and nothing else; the fake one agrees, for shapes of any
    size.
    """
    skip_lists_of_old_torch(name)
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(getattr(cpu, name), arguments(name), test_utils=tests)


@pytest.mark.parametrize("name", [name for name in COMPILED if name not in WITHOUT_REFERENCE])
def test_equals_the_reference(cpu: Ops, name: str) -> None:
    given = arguments(name)
    found = compare(cpu, name, *given)
    assert not all(map(torch.equal, found, outputs(name, given))), "it has changed nothing"


# ---- what is refused -----------------------------------------------------------------------------

MOST_31 = (1 << 31) - 1


def at(place: Any, value: Any) -> Callable[[Tensor], Tensor]:
    """Return a change of some elements of an argument."""

    def change(given: Tensor) -> Tensor:
        changed = given.clone()
        changed[place] = torch.as_tensor(value, dtype=given.dtype)
        return changed

    return change


def bad(name: str, *cases: tuple[Any, Any]) -> list[dict[str, Any]]:
    """Return changes of an argument: of the elements at a place, to a value."""
    return [{name: at(place, value)} for place, value in cases]


def words(name: str, row: int, *cases: tuple[int, Any]) -> list[dict[str, Any]]:
    """Return changes of one word of a record in an argument."""
    return bad(name, *(((row, word), value) for word, value in cases))


def first(count: int) -> Callable[[Any], Any]:
    """Return a change that leaves the first elements of an argument."""
    return lambda given: given[:count].clone() if isinstance(given, Tensor) else given[:count]


WRONG_ITEMS = [{"items": torch.tensor([0, item, 0])} for item in (-1, 40)]
COORDINATES = bad("coordinates", (1, -1), (1, 120), (1, 1 << 62))  # the total is 120
WINDOWS = lower([GatherSpec(Source.STEPS, length=2, part_count=2, elements=3)] * 2)
FLOATS = [(1, value) for value in BAD_PRIORITIES]
BITS = [((1, 3), int(torch.tensor(value).view(torch.int32))) for value in BAD_PRIORITIES]
ITEMS = r"items.* must lie in \[0, 40\)"
LIES = r"coordinates.* must lie in \[0, 120\)"
NO_PRIORITY = r"priority 1 must be finite and at least 0, got -?(1|inf|nan)"
EXTENT = "extent 1 must lie in"
NO_ROW = "coordinate 0 must hit a row"
ANY_SAMPLE = "sample 0 must be a step of a trajectory"
EVERY = slice(None)
OUTSIDE = r"resolution 2 .*must lie in the columns"
RECORDS = [
    (3, -LENGTH),
    (3, NUM_SLOTS * LENGTH),
    (3, 1 << 62),
    (4, 0),
    (4, 2**63 - 1),
    (5, -1),
    (5, LENGTH),
]
# Op, text, and changes of its arguments that are refused: by every backend in host memory,
HOST_CASES = [
    (
        "suffix_sum_",
        EXTENT,
        *bad("extents", (1, (-1, 2)), (1, (0, -1)), (1, (NUM_SLOTS * LENGTH - 1, 2))),
    ),
    (
        "suffix_sum_",
        EXTENT,
        *bad("extents", (1, (0, 1 << 20)), (1, (1 << 62, 1 << 62)), (1, (1, 2**63 - 1))),
    ),
    ("gather_", r"order must have every index of \[0, 33\) once", *bad("order", (1, -1), (32, 33))),
    ("mass_", NO_PRIORITY, *bad("priorities", *FLOATS)),
    *((op, OUTSIDE, *words("resolutions", 2, *RECORDS)) for op in ("gather_", "n_step_")),
]
# by those that name what they refuse (a kernel can only end),
CAREFUL_CASES = [
    ("draw_", "must be positive", {"total": 0}),
    ("permute_", r"indices.* in \[0, 5\)", {"size": 5}),
    ("tree_update_", ITEMS, *WRONG_ITEMS),
    ("minima_update_", ITEMS, *WRONG_ITEMS),
    ("slot_masses_", "entries.* must be in a log of 2", {"last": 3}, {"first": 2, "last": 1}),
    ("slot_masses_", r"items.* must lie in", *bad("log", (1, -1), (1, 40))),
    ("resolve_", LIES, *COORDINATES),
    ("resolve_rows_", LIES, *COORDINATES),
    # Coordinate 11 hits row 3, the fourth step of slot 0.
    ("resolve_rows_", NO_ROW, *bad("row_slots", (3, -1), (3, 40), (3, MOST_31), (3, -(1 << 31)))),
    ("resolve_rows_", NO_ROW, *words("slots", 0, (3, 4), (3, -9), (4, 3))),
    ("mass_", "alpha must be in", {"alpha": -1}, {"alpha": ONE_Q62 + 1}),
    ("mass_", r"most_bits must be in \[1, 40\], got", {"most_bits": 0}, {"most_bits": 41}),
    ("importance_", "beta must be in", {"beta": -1}, {"beta": ONE_Q62 + 1}),
    (
        "importance_",
        "numerator and count must be",
        {"numerator": 0},
        {"count": 0},
        {"numerator": -1},
    ),
    (
        "importance_",
        "mass of resolution 1 must be positive",
        *words("resolutions", 1, (6, 0), (6, -5)),
    ),
    ("append_reports_", "the log must hold 7 reports, got 6", {"log": first(6)}),
    ("append_reports_", NO_PRIORITY, *bad("priorities", *FLOATS)),
    (
        "prioritize_",
        r"(update 0|items) must.* in \[0, ",
        {
            "priorities": first(1),
            "sums": first(32),
            "minima": first(0),
            "updates": at((EVERY, 3), 0),
        },
    ),
    ("prioritize_", NO_PRIORITY, *bad("updates", *BITS)),
    (
        "gather_",
        OUTSIDE,
        *words("resolutions", 2, (1, -1)),
    ),  # a kernel needs no slot for rows of steps
    ("slot_priorities_", "entries must be in a log of 2", {"last": 5}),
    ("slot_priorities_", "must lie in", {"log": at(1, 40)}),
    (
        "gather_",
        r"order must have every index of \[0, 33\) once",
        {"order": torch.zeros(33).long()},
    ),
    (
        "pack_",
        "resolution 1",
        *words("resolutions", 1, (3, -99), (3, 1 << 50), (4, 0), (4, 1 << 50)),
    ),
    ("pack_", "packed field|must hold", {"spec": WINDOWS}),
    ("plan_packs_", "length 1 must be in", *bad("lengths", (1, 0), (1, -1), (1, 10))),
    ("plan_packs_", "tokens must be in", {"tokens": 0}, {"tokens": 1 << 31}),
    ("plan_packs_", "width must be in", {"width": 0}, {"width": (1 << 20) + 1}),
    ("plan_packs_", "linear", {"linear": -1}, {"linear": 1 << 62}),
    ("plan_packs_", "quadratic", {"quadratic": -1}),
    ("plan_packs_", "not both", {"linear": 0, "quadratic": 0}),
    ("plan_packs_", "trajectories must be in", {"trajectories": 0}, {"trajectories": 1 << 31}),
    ("plan_packs_", "must be below 2", {"linear": 1 << 61}),
    (
        "plan_packs_",
        "must be below 2",
        {"lengths": at(0, 1 << 30), "tokens": MOST_31, "quadratic": 4},
    ),
    (
        "plan_packs_",
        "must be below 2",
        {
            "lengths": at(0, MOST_31),
            "tokens": MOST_31,
            "linear": (1 << 62) - 1,
            "quadratic": (1 << 62) - 1,
        },
    ),
    (
        "encode_rows_",
        "rows of samples must lie in the columns",
        *bad("slots", ((EVERY, Slot.FIRST_ROW), -9), ((EVERY, Slot.FIRST_ROW), 595)),
        {"stored": [torch.zeros(400, dtype=torch.uint8)], "samples": at((1, RowSample.SLOT), 39)},
    ),
    (
        "decode_rows_",
        "messages must hold the rows of samples",
        *(
            {"messages": [torch.zeros(size).long() for size in held]}
            for held in ((1, 3), (2, 1), (0, 0))
        ),
    ),
]
# and by the C++ alone: shapes and dtypes.
CPU_CASES = [
    ("minima_build_", r"minima of 1500 items must have \d+ words, got 9", {"minima": first(9)}),
    ("top_k_", "sums must have a mass per priority", {"sums": first(39)}),
    ("append_reports_", "resolutions must have 6 rows, got 7", {"priorities": first(6)}),
    ("append_reports_", r"log must be \[n, 6\]", {"log": torch.zeros(9, 5).long()}),
    ("append_reports_", "tail must be at least 0, got -1", {"tail": -1}),
    ("prioritize_", "counts must have 5 values, got 4", {"counts": first(4)}),
    ("prioritize_", "minima of 40 items must have 32 words, got 5", {"minima": first(5)}),
    ("prioritize_", "unit must be 0 or 1, got 2", {"unit": 2}),
    (
        "prioritize_",
        r"updates must be \[n, 4\], or reports \[n, 6\]",
        {"updates": torch.ones(3, 3).long()},
    ),
    ("gather_", "order must have 33 values, got 2", {"order": torch.arange(2)}),
    ("gather_", "order must be Long", {"order": torch.arange(33, dtype=torch.int32)}),
    ("plan_packs_", "must have [17] values, got", {"micro_step": first(6)}, {"rank": first(6)}),
    ("plan_packs_", "must have [17] values, got", {"num_micro_steps": torch.zeros(2).long()}),
    ("plan_packs_", "lengths must be", {"lengths": torch.ones(HOST_COUNT, dtype=torch.int32)}),
    ("encode_draws_", "readers must be nodes", {"readers": torch.tensor([[2]])}),
    ("encode_draws_", "own must lie in", {"own": at(0, -1)}),
    (
        "decode_draws_",
        "received must have . values, got 0",
        {"received": [torch.zeros(0).long()] * 2},
    ),
    ("decode_draws_", "asked must lie in", {"asked": at(0, 3)}),
    ("decode_draws_", "owner must lie in", {"owner": at(0, 2)}),
    (
        "encode_rows_",
        ANY_SAMPLE,
        *words("samples", 0, (0, -1), (0, 2), (1, 1), (2, 40), (2, -1), (3, 0)),
    ),
    (
        "encode_rows_",
        ANY_SAMPLE,
        *words("samples", 0, (3, 1 << 50), (4, 9), (4, -1), (5, -1), (5, 10)),
    ),
    ("encode_rows_", ANY_SAMPLE, *words("samples", 0, (6, 10), (6, -2))),
    ("encode_rows_", "message must be Long", {"message": torch.zeros(7).char()}),
    ("encode_rows_", "sizes must have 2 values, got 1", {"sizes": first(1)}),
    ("encode_rows_", "there must be 1 columns, got 0", {"stored": []}),
    ("encode_rows_", "heads must be", {"heads": at(0, -99)}),
    ("encode_rows_", "sample [0-9] must be a step", {"slots": first(1)}),
    (
        "decode_rows_",
        "which must have an index of the ring",
        {"which": at(1, HOST_COUNT)},
        {"which": first(1)},
    ),
    ("decode_rows_", "there must be a message of each peer", {"messages": first(1)}),
    ("decode_rows_", "the room must lie in the arrivals", {"room": [50, 9, 0, 9, 50, 5]}),
    ("decode_rows_", "room must be first row", {"room": first(5)}, {"room": [-1, 9, 0, 9, 50, 5]}),
]


@pytest.mark.parametrize(
    ("backend", "op", "text", "changes"),
    [
        (backend, op, text, change)
        for backends, cases in (
            (("reference", "cpu", "kernels_on_host"), HOST_CASES),
            (("reference", "cpu"), CAREFUL_CASES),
            (("cpu",), CPU_CASES),
        )
        for op, text, *changes in cases
        for change in changes
        for backend in backends
        if backend != "reference" or op not in WITHOUT_REFERENCE
    ],
)
def test_what_is_refused_changes_nothing(
    request: pytest.FixtureRequest, backend: str, op: str, text: str, changes: dict[str, Any]
) -> None:
    names = [word.name for word in getattr(torch.ops.gear, op).default._schema.arguments]
    given = dict(zip(names, arguments(op), strict=False))
    assert changes.keys() <= given.keys()
    given |= {name: to(given[name]) if callable(to) else to for name, to in changes.items()}
    refuse(request.getfixturevalue(backend), op, tuple(given.values()), text)


def test_too_little_room_takes_no_row(cpu: Ops) -> None:
    """What is needed is given all the same."""
    message, sizes, *given = arguments("encode_rows_")
    cpu.encode_rows_(message[:0], sizes, *given)
    assert sizes.tolist() == [12, 8]
    short = torch.full((3,), 9)
    cpu.encode_rows_(short, sizes * 0, *given)
    assert short.eq(9).all()
    for more in ([4, 0, 9], [5, 0, 1]):  # rows, the first slot, slots
        (arrivals,), ring, sizes, needed, *given, _ = arguments("decode_rows_")
        cpu.decode_rows_([arrivals], ring, sizes, needed, *given, [1, *more, 50, 5])
        assert needed.tolist() == [5, 2]
        assert not arrivals.any()
