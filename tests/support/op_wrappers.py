"""Ops that allocate their results, for tests and benchmarks: no checks beyond those of the ops."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from deepspeed_gear.ops import Ops, load_backend
from deepspeed_gear.ops.constants import (
    minima_levels,
    tree_levels,
    tree_size,
)
from deepspeed_gear.ops.gather_spec import NUM_WORDS
from deepspeed_gear.ops.records import (
    Align,
    LogEntry,
    MassUnit,
    Pad,
    Resolution,
    RowSample,
    Source,
)

_SCALING_ELEMENTS = 128
_PACKED_WORDS, _PACKED_REPORT_WORDS = 4, 3


def draw(seed: int, stream: int, first: int, total: int, count: int, *, ops: Ops | None = None) -> Tensor:
    """Draw the coordinates of the samples first .. first + count - 1 of a stream."""
    coordinates = torch.empty(count, dtype=torch.int64)
    (ops or load_backend()).draw_(coordinates, seed, stream, first, total)
    return coordinates


def permute(
    seed: int, stream: int, epoch: int, first: int, size: int, count: int, *, ops: Ops | None = None
) -> Tensor:
    """Return where an epoch's permutation of [0, size) puts the indices first .. first + count - 1."""
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


def suffix_sum(reward: Tensor, extents: Tensor, *, ops: Ops | None = None) -> Tensor:
    """Sum every trajectory's rewards from each step to its end: the undiscounted return-to-go."""
    out = torch.zeros(len(reward), dtype=torch.float32)
    (ops or load_backend()).suffix_sum_(out, reward, extents)
    return out


def powers_of(gamma: float, n: int) -> Tensor:
    """Return gamma^0 .. gamma^n by repeated multiplication: equal everywhere. [n + 1], float64."""
    powers = [1.0]
    for _ in range(n):
        powers.append(powers[-1] * gamma)
    return torch.tensor(powers, dtype=torch.float64)


def n_step(
    reward: Tensor,
    terminated: Tensor,
    truncated: Tensor | None,
    resolutions: Tensor,
    n: int,
    gamma: float,
    *,
    ops: Ops | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute n-step returns from the anchors on."""
    returns, discount = torch.empty(2, len(resolutions), dtype=torch.float32).unbind()
    steps = torch.empty(len(resolutions), dtype=torch.int64)
    run = (ops or load_backend()).n_step_
    run(returns, discount, steps, reward, terminated, truncated, powers_of(gamma, n), resolutions, n)
    return (returns, discount, steps)


def gather(
    column: Tensor,
    resolutions: Tensor,
    *,
    source: int = Source.STEPS,
    offset: int = 0,
    length: int | None = None,
    align: int = Align.IN_PLACE,
    pad: float | str = 0.0,
    dtype: torch.dtype | None = None,
    first: int = 0,
    count: int | None = None,
    order: Tensor | None = None,
    ops: Ops | None = None,
) -> tuple[Tensor, Tensor]:
    """Gather one window of one column for every resolution."""
    target = dtype or column.dtype
    steps = 1 if length is None else length
    rows_wanted = steps - first if count is None else count
    elements = math.prod(column.shape[1:])
    kind = Pad.EDGE if pad == "edge" else Pad.VALUE
    spec = [source, offset, steps, align, 0, kind, elements, 0, first, rows_wanted]
    assert len(spec) == NUM_WORDS
    out = torch.empty(len(resolutions), rows_wanted, *column.shape[1:], dtype=target)
    mask = torch.empty(len(resolutions), rows_wanted, dtype=torch.bool)
    none = torch.empty(0)
    counters, value = (torch.zeros(3, dtype=torch.int64), 0.0 if isinstance(pad, str) else float(pad))
    run = (ops or load_backend()).gather_
    run([out], [mask], counters, [column], [none], [none], resolutions, None, spec, [value], 1, order)
    return (out[:, 0], mask[:, 0]) if length is None else (out, mask)


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


def decode_draws(
    received: Sequence[Tensor],
    owner: Tensor,
    asked: Tensor,
    records: Tensor,
    own: Tensor,
    need_of: Tensor,
    count: int,
    first: int,
    offset: int,
    index: int,
    *,
    steps: Tensor | None = None,
    takes_own: bool = False,
    ops: Ops | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Put the resolutions of a selection together."""
    ring, origins = (
        torch.empty(count, Resolution.NUM_WORDS, dtype=torch.int64),
        torch.zeros(count, dtype=torch.int64),
    )
    most = len(records) + len(asked)
    samples, which = (
        torch.empty(most, RowSample.NUM_WORDS, dtype=torch.int64),
        torch.empty(most, dtype=torch.int64),
    )
    found = torch.zeros(1, dtype=torch.int64)
    given = (received, records, own, steps, owner, asked, need_of, first, offset, index, int(takes_own))
    (ops or load_backend()).decode_draws_(ring, origins, samples, which, found, *given)
    return (ring, origins, samples[: int(found)], which[: int(found)])


def encode_reports(
    reports: Tensor, latest: int, num_shards: int, *, ops: Ops | None = None
) -> tuple[Tensor, Tensor]:
    """Pack reports by the shard in the upper half of their slots."""
    packed = torch.empty(len(reports), _PACKED_REPORT_WORDS, dtype=torch.int64)
    ends = torch.empty(num_shards, dtype=torch.int64)
    (ops or load_backend()).encode_reports_(packed, ends, reports, latest)
    return (packed, ends)


def decode_reports(packed: Tensor, latest: int, *, ops: Ops | None = None) -> Tensor:
    """Unpack reports: a slot that is not known is -1, with the id in place of the generation."""
    reports = torch.empty(len(packed), LogEntry.NUM_WORDS, dtype=torch.int64)
    (ops or load_backend()).decode_reports_(reports, packed, latest)
    return reports


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
    """Pack the rows of samples into messages, each row once; `reference/rows.py` says more."""
    run, sizes = ((ops or load_backend()).encode_rows_, torch.zeros_like(heads))
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
    """Copy rows out of messages to where batches are gathered from; `reference/rows.py` says more."""
    sizes, needed = (torch.zeros_like(heads), torch.zeros(2, dtype=torch.int64))
    given = (messages, which, samples, windows, members, columns, heads, room)
    (ops or load_backend()).decode_rows_(arrivals, ring, sizes, needed, *given)
    return (sizes, needed)


def least_mass(sums: Tensor, minima: Tensor, num_items: int) -> int:
    """Return the least non-zero mass of a tree, 0 if all are 0. Cost: one group of 32."""
    levels = minima_levels(num_items)
    top = minima[levels[-1][0] :] if levels else sums
    some = top[top > 0]
    return int(some.min()) if len(some) else 0


def top_k(priorities: Tensor, sums: Tensor, k: int, *, ops: Ops | None = None) -> Tensor:
    """Find the k items with a mass that have the highest priorities."""
    items = torch.empty(k, dtype=torch.int64)
    (ops or load_backend()).top_k_(items, priorities, sums)
    return items
