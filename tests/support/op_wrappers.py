"""Ops that allocate their results, for tests and benchmarks: no checks beyond those of the ops."""

from collections.abc import Sequence

import torch
from torch import Tensor

from deepspeed_gear.ops import Ops, load_backend
from deepspeed_gear.ops.constants import tree_levels, tree_size
from deepspeed_gear.ops.records import MassUnit, Resolution, RowSample

_SCALING_ELEMENTS = 128
_PACKED_WORDS = 4


def draw(
    seed: int, stream: int, first: int, total: int, count: int, *, ops: Ops | None = None
) -> Tensor:
    """Draw the coordinates of the samples first .. first + count - 1 of a stream."""
    coordinates = torch.empty(count, dtype=torch.int64)
    (ops or load_backend()).draw_(coordinates, seed, stream, first, total)
    return coordinates


def permute(
    seed: int, stream: int, epoch: int, first: int, size: int, count: int, *, ops: Ops | None = None
) -> Tensor:
    """Return where an epoch's permutation of [0, size) puts the indices first .. first
    + count - 1.
    """
    items = torch.empty(count, dtype=torch.int64)
    (ops or load_backend()).permute_(items, seed, stream, epoch, first, size)
    return items


def tree(masses: Tensor, *, ops: Ops | None = None) -> Tensor:
    """Build the tree of integer sums over masses."""
    sums = torch.zeros(tree_size(len(masses)), dtype=torch.int64)
    sums[: len(masses)] = masses
    (ops or load_backend()).tree_build_(sums, len(masses))
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
    ops: Ops | None = None,
) -> Tensor:
    """Find the trajectory and the anchor that each coordinate hits."""
    resolutions = torch.empty(len(coordinates), Resolution.NUM_WORDS, dtype=torch.int64)
    run = (ops or load_backend()).resolve_
    run(resolutions, sums, slots, coordinates, list(rule), unit, seed, stream, first)
    return resolutions


def powers_of(gamma: float, n: int) -> Tensor:
    """Return gamma^0 .. gamma^n by repeated multiplication: equal everywhere. [n + 1], float64."""
    powers = [1.0]
    for _ in range(n):
        powers.append(powers[-1] * gamma)
    return torch.tensor(powers, dtype=torch.float64)


def scaling(shift: Tensor, gain: Tensor) -> tuple[Tensor, Tensor]:
    """Prepare the (x - shift) * gain of one field for `gather_`."""
    repeats = 1 if shift.numel() == 1 else -(-_SCALING_ELEMENTS // shift.numel())
    return (shift.reshape(-1).double().repeat(repeats), gain.reshape(-1).double().repeat(repeats))


def assign_draws(
    coordinates: Tensor, totals: Tensor, index: int, *, ops: Ops | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Find the shard that each coordinate hits."""
    owner, own, points = torch.empty(3, len(coordinates), dtype=torch.int64).unbind()
    found = torch.zeros(1, dtype=torch.int64)
    (ops or load_backend()).assign_draws_(owner, own, points, found, coordinates, totals, index)
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
    ops: Ops | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Find what other nodes need of this node's draws."""
    most = len(records) * readers.shape[1]
    samples = torch.empty(most, RowSample.NUM_WORDS, dtype=torch.int64)
    packed = torch.empty(most, _PACKED_WORDS + (steps is not None), dtype=torch.int64)
    ends = torch.empty(len(need_of), dtype=torch.int64)
    given = (records, own, steps, goals, readers, need_of, offset, index, int(takes_own))
    (ops or load_backend()).encode_draws_(samples, packed, ends, *given)
    return (samples[: int(ends[-1])], packed[: int(ends[-1])], ends)


def encode_rows(
    stored: Sequence[Tensor],
    samples: Tensor,
    windows: Tensor,
    members: Tensor,
    columns: Tensor,
    heads: Tensor,
    slots: Tensor,
    *,
    ops: Ops | None = None,
) -> tuple[Tensor, Tensor]:
    """Pack the rows of samples into messages, each row once."""
    run = (ops or load_backend()).encode_rows_
    sizes = torch.zeros_like(heads)
    given = (stored, samples, windows, members, columns, heads, slots)
    run(torch.empty(0, dtype=torch.int64), sizes, *given)
    message = torch.zeros(int((-(-(heads + sizes) // 8)).sum()), dtype=torch.int64)
    run(message, sizes, *given)
    return (message, sizes)


def decode_rows(
    arrivals: Sequence[Tensor],
    ring: Tensor,
    messages: Sequence[Tensor],
    which: Tensor,
    samples: Tensor,
    windows: Tensor,
    members: Tensor,
    columns: Tensor,
    heads: Tensor,
    room: Sequence[int],
    *,
    ops: Ops | None = None,
) -> tuple[Tensor, Tensor]:
    """Copy rows out of messages to where batches are gathered from."""
    sizes = torch.zeros_like(heads)
    needed = torch.zeros(2, dtype=torch.int64)
    given = (messages, which, samples, windows, members, columns, heads, room)
    (ops or load_backend()).decode_rows_(arrivals, ring, sizes, needed, *given)
    return (sizes, needed)


def top_k(priorities: Tensor, sums: Tensor, k: int, *, ops: Ops | None = None) -> Tensor:
    """Find the k items with a mass that have the highest priorities."""
    items = torch.empty(k, dtype=torch.int64)
    (ops or load_backend()).top_k_(items, priorities, sums)
    return items
