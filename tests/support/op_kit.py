"""Ops in tests: the reference as a backend, calls that allocate, comparison of bits, random values.

The C++ is compared with the reference, and kernels with the C++, which is fast.
"""

from collections import ChainMap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from deepspeed_gear.errors import ShapeError
from deepspeed_gear.ops import Ops, load_backend
from deepspeed_gear.ops.backends import OP_NAMES
from deepspeed_gear.ops.constants import ONE_Q62, tree_levels, tree_size
from deepspeed_gear.ops.records import MassUnit, Resolution, RowSample, SlotState
from deepspeed_gear.ops.reference import epochs, gather, priorities, returns, ring_table, select

SIZES = (0, 1, 7, 33)
NUM_ITEMS = (0, 1, 7, 31, 32, 33, 1023, 1024, 1025, 33000)
ALPHAS = (0, 1, round(0.6 * ONE_Q62), ONE_Q62 - 1, ONE_Q62)
BAD_PRIORITIES = [-1.0, -1e-45, float("inf"), float("-inf"), float("nan")]
REFUSED = (ShapeError, RuntimeError)
#: In the error of a fault that has ended a kernel.
LOST = "The CUDA context of this process is lost"
_PACKED_WORDS = 4

# ---- the reference -------------------------------------------------------------------------------

MEANING = ChainMap(*map(vars, (epochs, gather, priorities, returns, ring_table, select)))
#: Message codecs and the packing heuristic exist once, in C++: their tests are round trips and
#: invariants.
WITHOUT_REFERENCE = frozenset(OP_NAMES) - MEANING.keys()


@dataclass(frozen=True)
class ReferenceOps(Ops):
    """The ops in plain PyTorch, for host memory; those without a reference are native."""

    def on_host(self) -> Ops:
        return self


CPU = load_backend("cpu")
#: What is no op, such as locks, is native.
REFERENCE = ReferenceOps(
    "reference", **{op: MEANING.get(op, getattr(CPU, op)) for op in OP_NAMES}, native=CPU.native
)


# ---- calls that allocate what they return --------------------------------------------------------


def draw(seed: int, stream: int, first: int, total: int, count: int, *, ops: Ops = CPU) -> Tensor:
    """Draw the coordinates of the samples first .. first + count - 1 of a stream."""
    coordinates = torch.empty(count, dtype=torch.int64)
    ops.draw_(coordinates, seed, stream, first, total)
    return coordinates


def permute(
    seed: int, stream: int, epoch: int, first: int, size: int, count: int, *, ops: Ops = CPU
) -> Tensor:
    """Return where an epoch's permutation of [0, size) puts the indices from `first` on."""
    items = torch.empty(count, dtype=torch.int64)
    ops.permute_(items, seed, stream, epoch, first, size)
    return items


def tree(masses: Tensor, *, ops: Ops = CPU) -> Tensor:
    """Build the tree of integer sums over masses."""
    sums = torch.zeros(tree_size(len(masses)), dtype=torch.int64)
    sums[: len(masses)] = masses
    ops.tree_build_(sums, len(masses))
    return sums


def tree_total(sums: Tensor, num_items: int) -> int:
    """Return the sum of all masses: of the tree's last level."""
    return int(sums[tree_levels(num_items)[-1][0] :].sum())


def resolve(
    sums: Tensor,
    slots: Tensor,
    coordinates: Tensor,
    rule: Sequence[int],
    *,
    unit: int = MassUnit.TRAJECTORY,
    seed: int = 0,
    stream: int = 0,
    first: int = 0,
    ops: Ops = CPU,
) -> Tensor:
    """Find the trajectory and the anchor that each coordinate hits."""
    resolutions = torch.empty(len(coordinates), Resolution.NUM_WORDS, dtype=torch.int64)
    ops.resolve_(resolutions, sums, slots, coordinates, list(rule), unit, seed, stream, first)
    return resolutions


def top_k(priorities: Tensor, sums: Tensor, k: int, *, ops: Ops = CPU) -> Tensor:
    """Find the k items with a mass that have the highest priorities."""
    items = torch.empty(k, dtype=torch.int64)
    ops.top_k_(items, priorities, sums)
    return items


def assign_draws(
    coordinates: Tensor, totals: Tensor, index: int, *, ops: Ops = CPU
) -> tuple[Tensor, Tensor, Tensor]:
    """Find the shard that each coordinate hits."""
    owner, own, points = torch.empty(3, len(coordinates), dtype=torch.int64).unbind()
    found = torch.zeros(1, dtype=torch.int64)
    ops.assign_draws_(owner, own, points, found, coordinates, totals, index)
    return (owner, own[: int(found)], points[: int(found)])


def encode_draws(
    records: Tensor,
    own: Tensor,
    readers: Tensor,
    need_of: Tensor,
    offset: int,
    index: int,
    *,
    steps: Tensor | None = None,
    goals: Tensor | None = None,
    takes_own: bool = False,
    ops: Ops = CPU,
) -> tuple[Tensor, Tensor, Tensor]:
    """Find what other nodes need of this node's draws."""
    most = len(records) * readers.shape[1]
    samples = torch.empty(most, RowSample.NUM_WORDS, dtype=torch.int64)
    packed = torch.empty(most, _PACKED_WORDS + (steps is not None), dtype=torch.int64)
    ends = torch.empty(len(need_of), dtype=torch.int64)
    given = (records, own, steps, goals, readers, need_of, offset, index, int(takes_own))
    ops.encode_draws_(samples, packed, ends, *given)
    return (samples[: int(ends[-1])], packed[: int(ends[-1])], ends)


def powers_of(gamma: float, n: int) -> Tensor:
    """Return gamma^0 .. gamma^n by repeated multiplication: equal everywhere. [n + 1], float64."""
    powers = [1.0]
    for _ in range(n):
        powers.append(powers[-1] * gamma)
    return torch.tensor(powers, dtype=torch.float64)


# ---- comparison ----------------------------------------------------------------------------------


def moved(value: Any, device: str) -> Any:
    """Arguments with copies of their tensors on a device."""
    if isinstance(value, (list, tuple)):
        return [moved(v, device) for v in value]
    return value.to(device, copy=True) if isinstance(value, Tensor) else value


def tensors_of(value: Any) -> list[Tensor]:
    if isinstance(value, (list, tuple)):
        return [t for v in value for t in tensors_of(v)]
    return [value] if isinstance(value, Tensor) else []


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Compare every bit: NaNs by their payload, and 0.0 differs from -0.0."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bytes(a), _bytes(b))


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().reshape(-1).view(torch.uint8)


def at_offset(values: Tensor, offset: int) -> Tensor:
    """Copy a tensor to an address that is `offset` bytes behind a multiple of 16."""
    room = torch.empty(values.nbytes + 32, dtype=torch.uint8)
    start = -room.data_ptr() % 16 + offset
    there = room[start : start + values.nbytes].view(values.dtype).view(values.shape)
    assert there.copy_(values).data_ptr() % 16 == offset
    return there


def outputs(name: str, arguments: tuple[Any, ...]) -> list[Tensor]:
    """Return the tensors that an op writes, by its schema."""
    words = getattr(torch.ops.gear, name).default._schema.arguments
    is_written = [word.alias_info is not None and word.alias_info.is_write for word in words]
    return [t for a, w in zip(arguments, is_written, strict=False) if w for t in tensors_of(a)]


def model_of(native: Ops) -> Ops:
    """Return the backend that another one must equal."""
    return REFERENCE if native.name == "cpu" else CPU


def compare(native: Ops, name: str, *arguments: Any) -> list[Tensor]:
    """Run an op on copies of what it writes, also on the backend's model where the op has one.

    Return what both have written.
    """
    backends = (native,) if name in WITHOUT_REFERENCE else (model_of(native), native)
    found = []
    for ops in backends:
        own = copied(name, arguments)
        getattr(ops, name)(*own)
        found.append(outputs(name, own))
    assert all(map(same_bits, found[0], found[-1])), name
    return found[0]


def copied(name: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return arguments with copies of what the op writes, at addresses of the same alignment."""
    written = {id(t) for t in outputs(name, arguments)}

    def copy(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [copy(v) for v in value]
        return at_offset(value, value.data_ptr() % 16) if id(value) in written else value

    return tuple(map(copy, arguments))


def refuse(ops: Ops, name: str, arguments: tuple[Any, ...], match: str) -> None:
    """Check that a call is refused and writes nothing; a kernel ends where it is.

    The sizes of rows that travel are given all the same.
    """
    is_kernel = ops.name.startswith("kernels")
    own = copied(name, arguments)
    with pytest.raises(REFUSED, match=f"{match}|{LOST}" if is_kernel else match):
        getattr(ops, name)(*own)
    count = 1 if name in ("encode_rows_", "decode_rows_") else None
    assert is_kernel or all(map(same_bits, outputs(name, own)[:count], outputs(name, arguments)))


# ---- priorities, masses and slots of any magnitude -----------------------------------------------


def any_priorities(count: int) -> Tensor:
    """Finite floats of any magnitude, and zeros of both signs."""
    priorities = torch.randint(0, 0x7F800000, (count,), dtype=torch.int32).view(torch.float32)
    chosen = torch.rand(count)
    return torch.where(chosen < 0.1, -0.0, torch.where(chosen < 0.2, 0.0, priorities))


def masses_of(count: int) -> Tensor:
    """Masses of any magnitude, a third of them 0, and small ones that repeat."""
    masses = torch.randint(1, 1 << 40, (count,)) >> torch.randint(0, 40, (count,))
    return masses * (torch.rand(count) < 0.67)


def store_of(lengths: list[int], gap: int = 2) -> tuple[Tensor, Tensor]:
    """Slots in falling order of their rows, with unused rows between; and each row's slot."""
    slots = torch.randint(0, 1 << 40, (len(lengths), 8))
    slots[:, 0] = SlotState.COMMITTED
    row_slots = torch.full((sum(lengths) + gap * len(lengths),), -1, dtype=torch.int32)
    first = len(row_slots)
    for i, length in enumerate(lengths):
        first -= length + gap
        slots[i, 3] = first
        slots[i, 4] = length
        row_slots[first : first + length] = i
    return slots, row_slots
