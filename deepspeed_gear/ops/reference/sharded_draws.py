"""Reference ops on draws and priority reports between nodes: owners, readers, and messages, in words of 32
bits. A resolution takes 32 bytes, and 8 more where windows follow n-step steps; a report 24.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from deepspeed_gear.errors import ShapeError
from deepspeed_gear.ops.constants import ANY_SLOT, SHARD_BITS, UNKNOWN
from deepspeed_gear.ops.records import LogEntry, PriorityUpdate, Resolution, RowSample

_LOW = (1 << SHARD_BITS) - 1
_NUMBER_BITS, _MOST_BACK = 48, (1 << 16) - 1
_MOST_NUMBER = (1 << _NUMBER_BITS) - 1
_UNKNOWN_BY_ID, _KNOWN_BY_ID = _MOST_NUMBER, _MOST_NUMBER - 1  # stand for LogEntry.BY_ID


def assign_draws_(
    owner: Tensor, own: Tensor, points: Tensor, found: Tensor, coordinates: Tensor, totals: Tensor, index: int
) -> None:
    """Find the shard that each coordinate in [0, sum(totals)) hits: `owner`, [B]; one outside is a
    ShapeError.

    The first `found` of `own` and `points` get which ones hit the shard `index`, ascending, and their
    coordinates within it.
    """
    ends = totals.cumsum(0)
    if len(coordinates) and not 0 <= int(coordinates.min()) <= int(coordinates.max()) < int(ends[-1]):
        raise ShapeError("coordinates", f"must lie in [0, {int(ends[-1])})", int(coordinates.max()))
    owner.copy_(torch.searchsorted(ends, coordinates, right=True))
    mine = torch.nonzero(owner == index)[:, 0]
    own[: len(mine)] = mine
    points[: len(mine)] = coordinates[mine] - (ends[index] - totals[index])
    found[0] = len(mine)


def encode_draws_(
    samples: Tensor,
    encoded: Tensor,
    ends: Tensor,
    records: Tensor,
    own: Tensor,
    steps: Tensor | None,
    goals: Tensor | None,
    readers: Tensor,
    need_of: Tensor,
    offset: int,
    index: int,
    takes_own: int,
) -> None:
    """Encode this node's draws for the nodes that need them, node by node.

    Args:
        samples: Gets the samples, as `encode_rows_` takes them. [n * most or more, 7], int64.
        encoded: Gets their encoded resolutions. [n * most or more, 4, or 5 with steps], int64.
        ends: Gets the samples up to and with those of each node. [S], int64.
        records, own: Resolutions of this node's draws, [n, 8], and their indices in the selection, ascending.
        steps: Steps of their n-step returns, where windows follow them. [n], int64.
        goals: Their rows of achieved goals, -1 for none, where some are drawn. [n], int64.
        readers: Nodes that read a replica's samples, then -1. [replicas, most], int64.
        need_of: What is read at each node of each replica's samples, -1 for nothing. [S, replicas], int16.
        offset: Of the selection's first sample among those of all tables: replicas take turns.
        index: This node; `takes_own`: it copies rows for itself as well.
    """
    replicas = [(sample + offset) % len(readers) for sample in own.tolist()]
    at = 0
    for node in range(len(need_of)):
        for i, replica in enumerate(replicas):
            if node not in readers[replica].tolist() or (node == index and not takes_own):
                continue
            some = None if steps is None else steps[i]
            samples[at] = _sample(records[i], node, int(need_of[node, replica]), some)
            samples[at, RowSample.GOAL] = -1 if goals is None else goals[i]
            encoded[at] = _encode(records[i], some if encoded.shape[1] > 4 else None)
            at += 1
        ends[node] = at


def decode_draws_(
    ring: Tensor,
    origins: Tensor,
    samples: Tensor,
    which: Tensor,
    found: Tensor,
    received: Sequence[Tensor],
    records: Tensor,
    own: Tensor,
    steps: Tensor | None,
    owner: Tensor,
    asked: Tensor,
    need_of: Tensor,
    first: int,
    offset: int,
    index: int,
    takes_own: int,
) -> None:
    """Put the resolutions of a selection into the ring, and find the samples whose rows this node needs.

    Args:
        ring: Gets the resolutions; `UNKNOWN` as id where there is none. [B, 8], int64.
        origins: Gets shard << 32 | slot of each. [B], int64.
        samples, which: Get the `found` samples whose rows are needed, as of `decode_rows_`, and their indices
            in the selection. [n + a or more, 7] and [n + a or more], int64.
        received: Encoded resolutions from each node, one after the other, and more. [words] each.
        owner, asked: Node of each sample that was asked for; its index in the selection. [a], int64.
        first: Sample number of the selection's first sample.
        records, own, steps, need_of, offset, index, takes_own: As of `encode_draws_`.
    """
    ring.zero_()
    ring[:, Resolution.ID] = UNKNOWN
    size, at, begins = 4 if steps is None else 5, 0, [0] * len(received)

    def put(sample: int, record: Tensor, node: int, n_steps: Tensor | None, copies: int) -> None:
        nonlocal at
        ring[sample] = record
        origins[sample] = node << SHARD_BITS | int(record[Resolution.SLOT])
        need = int(need_of[index, (sample + offset) % need_of.shape[1]])
        if need >= 0 and copies:
            samples[at], which[at] = _sample(record, node, need, n_steps), sample
            at += 1

    for node, sample in zip(owner.tolist(), asked.tolist(), strict=True):
        if node != index:
            words = received[node][begins[node] : begins[node] + size]
            begins[node] += size
            put(sample, _decode(words, first + sample), node, words[4] if size > 4 else None, 1)
    for i, sample in enumerate(own.tolist()):
        put(sample, records[i], index, None if steps is None else steps[i], takes_own)
    found[0] = at


def _sample(record: Tensor, peer: int, need: int, steps: Tensor | None) -> Tensor:
    slot, num_steps, anchor = record[Resolution.SLOT], record[Resolution.NUM_STEPS], record[Resolution.ANCHOR]
    return torch.tensor([peer, need, slot, num_steps, anchor, 0 if steps is None else steps, -1])


def _join(high: Tensor, low: Tensor) -> Tensor:
    return high << SHARD_BITS | (low & _LOW)


def _split(words: Tensor) -> tuple[Tensor, Tensor]:
    return words >> SHARD_BITS & _LOW, words & _LOW


def _encode(record: Tensor, steps: Tensor | None) -> Tensor:
    handle = _join(record[Resolution.GENERATION], record[Resolution.SLOT])
    place = _join(record[Resolution.NUM_STEPS], record[Resolution.ANCHOR])
    words = [record[Resolution.ID], record[Resolution.MASS], handle, place]
    return torch.stack([*words, *([] if steps is None else [steps])])


def _decode(words: Tensor, number: int) -> Tensor:
    record = torch.zeros(Resolution.NUM_WORDS, dtype=torch.int64)
    record[[Resolution.ID, Resolution.MASS]] = words[:2]
    record[Resolution.SAMPLE_NUMBER] = number
    record[Resolution.GENERATION], record[Resolution.SLOT] = _split(words[2])
    record[Resolution.NUM_STEPS], record[Resolution.ANCHOR] = _split(words[3])
    return record


def encode_reports_(encoded: Tensor, ends: Tensor, reports: Tensor, latest: int) -> None:
    """Encode reports by shard: `encoded`, [n, 3], and `ends`, how many those up to and with each shard's are.

    A report, as in a log, has the shard in the upper half of its slot. One by id carries the id where only
    another store can look up the slot: `ANY_SLOT`. Batches more than 65,534 before `latest`, the newest
    global batch of the reports or a later one, are not distinguished.
    """
    shard = reports[:, PriorityUpdate.SLOT] >> SHARD_BITS
    ordered = reports[torch.argsort(shard, stable=True)]
    by_id = ordered[:, LogEntry.SAMPLE_NUMBER] == LogEntry.BY_ID
    is_unknown = by_id & ((ordered[:, PriorityUpdate.SLOT] & _LOW) == ANY_SLOT)
    handle = _join(ordered[:, PriorityUpdate.GENERATION], ordered[:, PriorityUpdate.SLOT])
    encoded[:, 0] = torch.where(is_unknown, ordered[:, PriorityUpdate.GENERATION], handle)
    encoded[:, 1] = _join(ordered[:, PriorityUpdate.PRIORITY], ordered[:, PriorityUpdate.ANCHOR])
    back = (latest - ordered[:, LogEntry.BATCH]).clamp(0, _MOST_BACK)
    last = torch.where(is_unknown, _UNKNOWN_BY_ID, _KNOWN_BY_ID)
    number = torch.where(by_id, last, ordered[:, LogEntry.SAMPLE_NUMBER] & _MOST_NUMBER)
    encoded[:, 2] = back << _NUMBER_BITS | number
    ends.copy_(torch.bincount(shard, minlength=len(ends)).cumsum(0))


def decode_reports_(reports: Tensor, encoded: Tensor, latest: int) -> None:
    """Decode reports to the arguments of `encode_reports_`, with the slots of the store, -1 for an unknown
    one, and the id in place of the generation. [n, 6], int64.
    """
    number = encoded[:, 2] & _MOST_NUMBER
    is_unknown = number == _UNKNOWN_BY_ID
    generation, slot = _split(encoded[:, 0])
    reports[:, PriorityUpdate.SLOT] = torch.where(is_unknown, -1, slot)
    reports[:, PriorityUpdate.GENERATION] = torch.where(is_unknown, encoded[:, 0], generation)
    reports[:, PriorityUpdate.PRIORITY], reports[:, PriorityUpdate.ANCHOR] = _split(encoded[:, 1])
    reports[:, LogEntry.BATCH] = latest - (encoded[:, 2] >> _NUMBER_BITS & _MOST_BACK)
    reports[:, LogEntry.SAMPLE_NUMBER] = torch.where(number >= _KNOWN_BY_ID, LogEntry.BY_ID, number)
