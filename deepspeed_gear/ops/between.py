"""Checked public wrappers of the ops between nodes; `functional` offers them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import ShapeError
from .backends import Ops, load_backend
from .checks import check_range, check_tensor
from .constants import (
    COLUMN_WORDS,
    REPORT_WORDS,
    RESOLUTION_WORDS,
    SAMPLE_WORDS,
    SLOT_WORDS,
    WINDOW_WORDS,
)

_PACKED_WORDS, _PACKED_REPORT_WORDS = 4, 3


def assign_draws(
    coordinates: Tensor, totals: Tensor, index: int, *, ops: Ops | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Find the shard that each coordinate hits.

    Args:
        coordinates: In [0, sum of totals). [B], int64.
        totals: Total mass of each shard, at least 0. [S], int64.
        index: One of the shards.
        ops: The backend; None for "auto".
    Returns:
        The shard of each ([B], int64), which ones hit `index`, and their coordinates within it ([n], int64).
    Raises:
        ShapeError: Wrong shape, dtype or range.
    """
    check_tensor("coordinates", coordinates, torch.int64, (None,))
    check_tensor("totals", totals, torch.int64, (None,))
    check_range("index", index, 0, len(totals))
    total = int(totals.sum())
    if len(coordinates) and not 0 <= int(coordinates.min()) <= int(coordinates.max()) < total:
        raise ShapeError("coordinates", f"must lie in [0, {total})", int(coordinates.max()))
    owner, own, points = torch.empty(3, len(coordinates), dtype=torch.int64).unbind()
    found = torch.zeros(1, dtype=torch.int64)
    (ops or load_backend()).assign_draws_(owner, own, points, found, coordinates, totals, index)
    return owner, own[: int(found)], points[: int(found)]


def send_draws(
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
    """Find what other nodes need of this node's draws.

    Args:
        records: Resolutions. [n, 8], int64.
        own: Their indices in the cut. [n], int64.
        readers: Nodes that read a replica's samples, then -1. [replicas, most], int64.
        need_of: What is read at each node of each replica's samples. [S, replicas], int16.
        offset: Of the cut's first sample among those of all tables.
        index: This node.
        steps: Of n-step returns. [n], int64.
        goals: Rows of achieved goals, -1 for none. [n], int64.
        takes_own: Whether this node copies rows for itself as well.
        ops: The backend; None for "auto".
    Returns:
        Samples ([m, 7], int64) and packed resolutions ([m, 4 or 5], int64) by node, and the samples up to and
        with those of each node ([S], int64).
    Raises:
        ShapeError: Wrong shape, dtype or range.
    """
    check_tensor("records", records, torch.int64, (None, RESOLUTION_WORDS))
    check_tensor("own", own, torch.int64, (len(records),))
    check_tensor("readers", readers, torch.int64, (None, None))
    check_tensor("need_of", need_of, torch.int16, (None, len(readers)))
    check_range("index", index, 0, len(need_of))
    for name, words in (("steps", steps), ("goals", goals)):
        if words is not None:
            check_tensor(name, words, torch.int64, (len(records),))
    most = len(records) * readers.shape[1]
    samples = torch.empty(most, SAMPLE_WORDS, dtype=torch.int64)
    packed = torch.empty(most, _PACKED_WORDS + (steps is not None), dtype=torch.int64)
    ends = torch.empty(len(need_of), dtype=torch.int64)
    given = records, own, steps, goals, readers, need_of, offset, index, int(takes_own)
    (ops or load_backend()).send_draws_(samples, packed, ends, *given)
    return samples[: int(ends[-1])], packed[: int(ends[-1])], ends


def take_draws(
    heard: Sequence[Tensor],
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
    """Put the resolutions of a cut together.

    Args:
        heard: Packed resolutions from each node. [words] each, int64.
        owner: Node that holds each sample that was asked for. [a], int64.
        asked: Their indices in the cut. [a], int64.
        records: Resolutions of this node's own draws. [n, 8], int64.
        own: Their indices in the cut. [n], int64.
        need_of: As of `send_draws`. [S, replicas], int16.
        count: Samples of the cut.
        first: Sample number of the first one.
        offset: As of `send_draws`.
        index: This node.
        steps: Of n-step returns of `records`, where steps travel. [n], int64.
        takes_own: Whether this node copies rows for itself as well.
        ops: The backend; None for "auto".
    Returns:
        Resolutions ([count, 8], int64), shard << 32 | slot of each that is known ([count], int64), and of the
        samples whose rows are wanted what `unpack_rows` takes ([k, 7], int64) and indices ([k], int64).
    Raises:
        ShapeError: Wrong shape, dtype or range.
    """
    check_tensor("records", records, torch.int64, (None, RESOLUTION_WORDS))
    check_tensor("own", own, torch.int64, (len(records),))
    check_tensor("asked", asked, torch.int64, (None,))
    check_tensor("owner", owner, torch.int64, (len(asked),))
    check_tensor("need_of", need_of, torch.int16, (len(heard), None))
    check_range("index", index, 0, len(need_of))
    ring, origins = (
        torch.empty(count, RESOLUTION_WORDS, dtype=torch.int64),
        torch.zeros(count, dtype=torch.int64),
    )
    most = len(records) + len(asked)
    samples, which = torch.empty(most, SAMPLE_WORDS, dtype=torch.int64), torch.empty(most, dtype=torch.int64)
    found = torch.zeros(1, dtype=torch.int64)
    given = heard, records, own, steps, owner, asked, need_of, first, offset, index, int(takes_own)
    (ops or load_backend()).take_draws_(ring, origins, samples, which, found, *given)
    return ring, origins, samples[: int(found)], which[: int(found)]


def pack_reports(
    reports: Tensor, latest: int, num_shards: int, *, ops: Ops | None = None
) -> tuple[Tensor, Tensor]:
    """Pack reports by the shard in the upper half of their slots.

    Args:
        reports: [n, 6], int64.
        latest: A batch that none of them is newer than.
        num_shards: S.
        ops: The backend; None for "auto".
    Returns:
        [n, 3], int64, and how many those up to and with each shard's are ([S], int64).
    Raises:
        ShapeError: Wrong shape, dtype or range.
    """
    check_tensor("reports", reports, torch.int64, (None, REPORT_WORDS))
    shards = reports[:, 0] >> 32
    if len(shards) and not 0 <= int(shards.min()) <= int(shards.max()) < num_shards:
        raise ShapeError("reports", f"must be of one of {num_shards} shards", int(shards.max()))
    packed = torch.empty(len(reports), _PACKED_REPORT_WORDS, dtype=torch.int64)
    ends = torch.empty(num_shards, dtype=torch.int64)
    (ops or load_backend()).pack_reports_(packed, ends, reports, latest)
    return packed, ends


def unpack_reports(packed: Tensor, latest: int, *, ops: Ops | None = None) -> Tensor:
    """Unpack reports of a store: where a slot is not known, as -1 and with the id in place of the generation.

    Args:
        packed: [n, 3], int64.
        latest: As of `pack_reports`.
        ops: The backend; None for "auto".
    Returns:
        [n, 6], int64.
    Raises:
        ShapeError: Wrong shape or dtype.
    """
    check_tensor("packed", packed, torch.int64, (None, _PACKED_REPORT_WORDS))
    reports = torch.empty(len(packed), REPORT_WORDS, dtype=torch.int64)
    (ops or load_backend()).unpack_reports_(reports, packed, latest)
    return reports


def pack_rows(
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
    """Pack the rows of samples into messages, each row once; `reference/rows.py` says more.

    Args:
        stored: The bytes of each column. [n] each, uint8.
        samples: By receiver. [n, 7], int64.
        windows: By group. [W, 7], int64.
        members: Which needs have each. [W or more, needs], bool.
        columns: [C, 3], int64.
        heads: Bytes in front of the rows of each message, which stay zero. [S], int64.
        slots: The slot table. [N, 8], int64.
        ops: The backend; None for "auto".
    Returns:
        The messages, one behind the other ([words]), and the bytes of rows in each ([S]). All int64.
    Raises:
        ShapeError: Wrong shape or dtype.
    """
    _check_rows(stored, samples, windows, members, columns, heads)
    check_tensor("slots", slots, torch.int64, (None, SLOT_WORDS))
    run, sizes = (ops or load_backend()).pack_rows_, torch.zeros_like(heads)
    given = stored, samples, windows, members, columns, heads, slots
    run(torch.empty(0, dtype=torch.int64), sizes, *given)  # to learn how much there is
    message = torch.zeros(int((-(-(heads + sizes) // 8)).sum()), dtype=torch.int64)
    run(message, sizes, *given)
    return message, sizes


def unpack_rows(
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
    """Copy rows out of messages to where batches are collected from; `reference/rows.py` says more.

    Args:
        arrivals: Get the rows. Bytes of each column. [n] each, uint8.
        ring: Gets where they lie. [r, 8], int64.
        messages: Of each peer. [words] each, int64.
        which: Places of samples in the ring. [n], int64.
        samples: By sender. [n, 7], int64.
        windows: As of `pack_rows`.
        members: Likewise.
        columns: Likewise.
        heads: Likewise.
        room: First row of the arrivals and how many there are, slots likewise; row and slot that the first of
            all arrivals has for the ring.
        ops: The backend; None for "auto".
    Returns:
        Bytes of rows in each message ([S]), and the rows and slots that arrive ([2]); nothing is copied where
        there is no room for them. All int64.
    Raises:
        ShapeError: Wrong shape or dtype.
    """
    _check_rows(arrivals, samples, windows, members, columns, heads)
    check_tensor("ring", ring, torch.int64, (None, RESOLUTION_WORDS))
    check_tensor("which", which, torch.int64, (len(samples),))
    if len(messages) != len(heads):
        raise ShapeError("messages", f"must be {len(heads)}", len(messages))
    for message in messages:
        check_tensor("messages", message, torch.int64, (None,))
    sizes, needed = torch.zeros_like(heads), torch.zeros(2, dtype=torch.int64)
    given = messages, which, samples, windows, members, columns, heads, room
    (ops or load_backend()).unpack_rows_(arrivals, ring, sizes, needed, *given)
    return sizes, needed


def _check_rows(
    data: Sequence[Tensor],
    samples: Tensor,
    windows: Tensor,
    members: Tensor,
    columns: Tensor,
    heads: Tensor,
) -> None:
    for column in data:
        check_tensor("columns", column, torch.uint8, (None,))
    check_tensor("samples", samples, torch.int64, (None, SAMPLE_WORDS))
    check_tensor("windows", windows, torch.int64, (None, WINDOW_WORDS))
    check_tensor("columns", columns, torch.int64, (len(data), COLUMN_WORDS))
    check_tensor("members", members, torch.bool, (None, None))
    check_tensor("heads", heads, torch.int64, (None,))
