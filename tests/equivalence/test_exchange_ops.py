"""Messages between nodes: what is taken against what was sent.

`tests/property/test_rows.py` walks row by row through what travels.
"""

from bisect import bisect_right
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from op_kit import CPU, assign_draws, compare, encode_draws
from torch import Tensor

from deepspeed_gear.ops import Ops
from deepspeed_gear.ops.constants import ANY_SLOT, SHARD_BITS, UNKNOWN
from deepspeed_gear.ops.records import LogEntry, PriorityUpdate, Resolution, RowSample, Slot
from deepspeed_gear.sampling.priority_log import NEVER

MOST_32 = (1 << 32) - 1
MOST_BACK = (1 << 16) - 1
Row = tuple[int, int, int]  # peer, slot, and row of the trajectory
words_32 = st.integers(0, MOST_32) | st.sampled_from([0, 1 << 31, MOST_32])
words_62 = st.integers(0, 1 << 62) | st.sampled_from([0, 1 << 62])


def zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def resolutions(count: int, words: np.random.Generator) -> Tensor:
    """Resolutions with every bit that travels."""
    found = words.integers(0, 1 << 32, (count, 8))
    found[:, [0, 6]] = words.integers(0, 1 << 62, (count, 2))
    return torch.from_numpy(found)


@given(st.integers(0, 40), st.lists(st.integers(0, 1 << 60), min_size=1, max_size=4), st.data())
def test_draws_are_assigned(count: int, totals: list[int], data: st.DataObject) -> None:
    total = torch.tensor(totals)
    index = data.draw(st.integers(0, len(totals) - 1))
    points = (
        [data.draw(st.integers(0, sum(totals) - 1)) for _ in range(count)] if sum(totals) else []
    )
    coordinates = torch.tensor(points, dtype=torch.int64)
    owner, own, within = assign_draws(coordinates, total, index, ops=CPU)
    ends = list(accumulate(totals))
    expected = [bisect_right(ends, point) for point in points]
    assert owner.tolist() == expected
    assert own.tolist() == [i for i, shard in enumerate(expected) if shard == index]
    assert within.tolist() == [points[i] - (ends[index] - totals[index]) for i in own.tolist()]


@pytest.mark.parametrize("num_nodes", [1, 2, 3])
@pytest.mark.parametrize("has_steps", [False, True])
@pytest.mark.parametrize("takes_own", [False, True])
@pytest.mark.parametrize("all_asked", [False, True])
def test_draws_arrive_as_they_were_made(
    num_nodes: int, has_steps: bool, takes_own: bool, all_asked: bool
) -> None:
    """Every node sends, and takes what the others have sent; replicas are read by one or by all
    nodes.
    """
    words = np.random.default_rng(num_nodes)
    count = 33
    offset = 5
    owner = torch.from_numpy(words.integers(0, num_nodes, count))
    records = resolutions(count, words)
    goals = torch.from_numpy(words.integers(-1, 9, count))
    records[:, Resolution.SAMPLE_NUMBER] = 100 + torch.arange(count)
    steps = torch.arange(count) * 7
    readers = torch.tensor([[0, -1, -1], [*range(num_nodes), -1, -1][:3], [num_nodes - 1, -1, -1]])
    need_of = torch.full((num_nodes, 3), -1, dtype=torch.int16)
    for replica, nodes in enumerate(readers.tolist()):
        for node in nodes:
            need_of[node, replica] = replica if node >= 0 else need_of[node, replica]
    asks = (
        torch.zeros(1, num_nodes).long() + torch.arange(num_nodes),
        torch.zeros(num_nodes, 1).short(),
    )
    received: list[list[Tensor]] = []
    outgoing = []
    for node in range(num_nodes):
        own = torch.nonzero(owner == node)[:, 0]
        more = {
            "steps": steps[own] if has_steps else None,
            "goals": goals[own],
            "takes_own": takes_own,
        }
        route = (*asks, 0, node) if all_asked else (readers, need_of, offset, node)
        given = records[own], own, *route
        _, packed, ends = encode_draws(*given, ops=CPU, **more)
        bounds = [0, *ends.tolist()]
        received.append(
            [packed[bounds[to] : bounds[to + 1]].reshape(-1) for to in range(num_nodes)]
        )
        given = records[own], own, readers, need_of, offset, node
        outgoing.append(encode_draws(*given, **more)[0])
    for node in range(num_nodes):
        own = torch.nonzero(owner == node)[:, 0]
        needs = need_of[node][(torch.arange(count) + offset) % 3]
        asked = torch.arange(count) if all_asked else torch.nonzero(needs >= 0)[:, 0]
        most = len(own) + len(asked)
        ring, origins, samples, which, num_samples = compare(
            *(
                CPU,
                "decode_draws_",
                zeros(count, 8),
                zeros(count),
                zeros(most, 7),
                zeros(most),
                zeros(1),
            ),
            *(
                [part[node] for part in received],
                records[own],
                own,
                steps[own] if has_steps else None,
            ),
            *(owner[asked], asked, need_of, 100, offset, node, int(takes_own)),
        )
        samples = samples[: int(num_samples)]
        which = which[: int(num_samples)]
        known = torch.isin(torch.arange(count), asked) | (owner == node)
        expected = records.clone()
        expected[owner != node, Resolution.FIRST_ROW] = 0  # known where they go
        assert torch.equal(ring[known], expected[known])
        assert (ring[~known, Resolution.ID] == UNKNOWN).all()
        assert torch.equal(
            origins[known], (owner << SHARD_BITS | records[:, Resolution.SLOT])[known]
        )
        wanted = (needs >= 0) & ((owner != node) | takes_own)
        assert sorted(which.tolist()) == torch.nonzero(wanted)[:, 0].tolist()
        assert torch.equal(samples[:, RowSample.PEER], owner[which])
        theirs = torch.cat([part[part[:, RowSample.PEER] == node] for part in outgoing])
        theirs[:, RowSample.GOAL] = -1  # drawn where they go
        mine = samples.clone()
        mine[:, RowSample.PEER] = node
        assert sorted(mine.tolist()) == sorted(theirs.tolist())
        assert not has_steps or torch.equal(samples[:, RowSample.N_STEPS], steps[which])
        assert torch.equal(samples[:, RowSample.NEED], needs[which].long())


@st.composite
def reports(draw: st.DrawFn) -> tuple[Tensor, int]:
    """Draw reports of several shards, and the newest batch that they may be of."""
    latest = draw(st.integers(0, 1 << 40) | st.integers(0, 3))
    found = torch.zeros(draw(st.integers(0, 5)), 6, dtype=torch.int64)
    for row in found:
        by_id = draw(st.booleans())
        is_known = draw(st.booleans())
        slot = draw(st.integers(0, ANY_SLOT - 1)) if is_known or not by_id else ANY_SLOT
        row[PriorityUpdate.SLOT] = draw(st.integers(0, 3)) << SHARD_BITS | slot
        row[PriorityUpdate.GENERATION] = draw(words_62 if slot == ANY_SLOT else words_32)
        row[PriorityUpdate.ANCHOR] = draw(words_32)
        row[PriorityUpdate.PRIORITY] = draw(words_32)
        row[LogEntry.BATCH] = latest - draw(
            st.integers(0, MOST_BACK - 1) | st.sampled_from([MOST_BACK - 1])
        )
        row[LogEntry.SAMPLE_NUMBER] = (
            LogEntry.BY_ID if by_id else draw(st.integers(0, (1 << 48) - 3))
        )
    return found, latest


@given(reports())
def test_reports(drawn: tuple[Tensor, int]) -> None:
    made, latest = drawn
    packed, ends = compare(CPU, "encode_reports_", zeros(len(made), 3), zeros(4), made, latest)
    (found,) = compare(CPU, "decode_reports_", zeros(len(made), 6), packed, latest)
    shard = made[:, PriorityUpdate.SLOT] >> SHARD_BITS
    expected = made[torch.argsort(shard, stable=True)]
    expected[:, PriorityUpdate.SLOT] &= ANY_SLOT
    expected[expected[:, PriorityUpdate.SLOT] == ANY_SLOT, PriorityUpdate.SLOT] = -1
    assert torch.equal(found, expected), "by shard, in their order"
    assert ends.tolist() == [int((shard <= index).sum()) for index in range(4)]


@pytest.mark.parametrize("batch", [NEVER, -1, 0, 1_000_000 - MOST_BACK - 1, 1_000_000 - MOST_BACK])
def test_batches_that_lie_far_back_are_not_told_apart(batch: int) -> None:
    latest = 1_000_000
    report = torch.tensor([[3, 1, 2, 4, batch, 9]])
    packed, _ = compare(CPU, "encode_reports_", zeros(1, 3), zeros(1), report, latest)
    report[0, LogEntry.BATCH] = latest - MOST_BACK
    assert torch.equal(compare(CPU, "decode_reports_", zeros(1, 6), packed, latest)[0], report)


# ---- rows ----------------------------------------------------------------------------------------


def any_layout(num_needs: int) -> tuple[Tensor, Tensor, Tensor]:
    """Windows of some groups, which needs have them, and columns that read them or have one row
    each.
    """
    groups = torch.randint(1, 4, (int(torch.randint(0, 4, ())),))
    windows = torch.zeros(int(groups.sum()), 7, dtype=torch.int64)
    count = len(windows)
    windows[:, 0] = torch.repeat_interleave(torch.arange(len(groups)), groups)
    windows[:, 1] = torch.rand(count) < 0.2
    windows[:, 2] = torch.randint(-6, 6, (count,))
    windows[:, 3] = windows[:, 2] + torch.randint(1, 9, (count,))
    windows[:, 4:] = torch.rand(count, 3) < 0.4
    members = torch.rand(count + 2, num_needs) < 0.7
    columns = torch.zeros(6, 3, dtype=torch.int64)
    columns[:, 0] = torch.randint(-1, max(len(groups), 1), (6,)) if len(groups) else -1
    columns[:, 1] = torch.randint(0, count + 2, (6,))
    columns[:, 2] = torch.tensor([0, 1, 3, 8, 20, 9001])[torch.randperm(6)]
    return windows, members, columns


class Wanted(NamedTuple):
    """What samples need of the trajectories of peers."""

    rows: list[set[Row]]  # of each column
    of_sample: list[
        list[tuple[int, int]]
    ]  # column and row of each sample, -1 for one row per trajectory
    blocks: set[Row]  # steps from the first to the last that any column of a sample reads
    trajectories: set[tuple[int, int]]


def rows_read(sample: list[int], window: list[int]) -> tuple[list[int], list[int]]:
    """Return the rows that a window reads of a sample, and the row that is nearest to
    the window.
    """
    num_steps, anchor, n_steps, goal = sample[RowSample.NUM_STEPS :]
    _, is_goal, first, end, after_n_step, edge, final_row = window
    if is_goal:
        rows = [goal] if goal >= 0 else []
        return rows, rows
    begin = anchor + first + (n_steps if after_n_step else 0)
    held = num_steps + final_row
    nearest = [min(max(begin, 0), held - 1)]
    rows = [row for row in range(begin, begin + end - first) if 0 <= row < held]
    return (nearest if edge and not rows else rows), nearest


def walked(samples: Tensor, windows: Tensor, members: Tensor, columns: Tensor) -> Wanted:
    """Walk through samples, columns and windows, one row after the other."""
    has = members.tolist()
    found = Wanted([set() for _ in columns], [], set(), set())
    for sample in samples.tolist():
        peer, need, slot = sample[: RowSample.NUM_STEPS]
        found.trajectories.add((peer, slot))
        reads = [
            (window[0], *rows_read(sample, window))
            for number, window in enumerate(windows.tolist())
            if has[number][need]
        ]
        every = [row for _, rows, nearest in reads for row in (*rows, *nearest)]
        if every:
            found.blocks.update((peer, slot, row) for row in range(min(every), max(every) + 1))
        own = list[tuple[int, int]]()
        for column, (group, row_of_members, _) in enumerate(columns.tolist()):
            if group < 0:
                own += [(column, -1)] if has[row_of_members][need] else []
            else:
                own += [(column, row) for of, rows, _ in reads if of == group for row in rows]
        for column, row in own:
            found.rows[column].add((peer, slot, row))
        found.of_sample.append(own)
    return found


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("count", [1, 7, 33, 200])
def test_rows_of_any_layout(cpu: Ops, count: int, seed: int) -> None:
    """Each row is in a message once, and arrives where its samples look for it, or nothing does."""
    torch.manual_seed(100 * count + seed)
    num_peers = [1, 2, 127, 300][seed % 4]
    num_needs = 1 + seed % 3
    num_slots = 9
    steps = 21
    slots = torch.zeros(num_slots, 8, dtype=torch.int64)
    slots[:, Slot.FIRST_ROW] = torch.randperm(num_slots) * (steps + 1)
    lengths = torch.randint(1, steps + 1, (num_slots,))
    slot = torch.randint(0, num_slots, (count,))
    peer = torch.randint(0, num_peers, (count,))
    anchor = (torch.rand(count) * lengths[slot]).long()
    goal = torch.where(torch.rand(count) < 0.5, -1, anchor)
    n_steps = torch.minimum(torch.randint(0, 4, (count,)), lengths[slot])
    need = torch.randint(0, num_needs, (count,))
    samples = torch.stack((peer, need, slot, lengths[slot], anchor, n_steps, goal), dim=1)
    heads = torch.randint(0, 5, (num_peers,)) * 4
    given = samples, *any_layout(num_needs), heads
    wanted = walked(*given[:-1])
    row_bytes = given[3][:, 2].tolist()
    rows = num_slots * (steps + 1)
    stored = [torch.randint(0, 256, (rows * size,), dtype=torch.uint8) for size in row_bytes]
    sizes = torch.zeros(num_peers, dtype=torch.int64)
    cpu.encode_rows_(torch.zeros(0).long(), sizes, stored, *given, slots)
    expected = [0] * num_peers
    for size, of_column in zip(row_bytes, wanted.rows, strict=True):
        for row in of_column:
            expected[row[0]] += size
    assert sizes.tolist() == expected
    ends = ((heads + sizes + 7) // 8).cumsum(0)
    message = torch.full((int(ends[-1]) + 1,), 9)
    cpu.encode_rows_(message, sizes.zero_(), stored, *given, slots)
    assert sizes.tolist() == expected
    direct = torch.full_like(message, 9)
    cpu.on_host().encode_rows_(direct, sizes.zero_(), stored, *given, slots)
    assert torch.equal(direct, message)
    messages = [part.clone() for part in message[: int(ends[-1])].tensor_split(ends[:-1])]
    needs = len(wanted.blocks), len(wanted.trajectories)
    for num_rows, room_slots in (needs, (needs[0] - 1, needs[1]), (needs[0], needs[1] - 1)):
        if num_rows < 0:
            continue
        lengths_of = (
            num_rows + 4,
            room_slots + 5,
        )  # of columns of steps, and of one row per trajectory
        room = [4, num_rows, 5, room_slots, 1000, 70]
        arrivals = [
            torch.zeros(lengths_of[group < 0] * size, dtype=torch.uint8)
            for group, _, size in given[3].tolist()
        ]
        ring = torch.full((count + 3, 8), -1)
        needed = torch.zeros(2, dtype=torch.int64)
        which = torch.randperm(count + 3)[:count]
        cpu.decode_rows_(arrivals, ring, sizes.zero_(), needed, messages, which, *given, room)
        assert sizes.tolist() == expected
        assert tuple(needed.tolist()) == needs
        unused = torch.ones(count + 3, dtype=torch.bool).index_fill(0, which, False)
        assert ring[unused].eq(-1).all()
        if (num_rows, room_slots) != needs:
            assert not any(map(torch.any, arrivals))
            continue
        first_rows = ring[which, Resolution.FIRST_ROW] - 1000
        own_slots = ring[which, Resolution.SLOT] - 70
        for sample, reads in enumerate(wanted.of_sample):
            for column, row in reads:
                at = int(own_slots[sample] if row < 0 else first_rows[sample] + row)
                begin = int(slot[sample] if row < 0 else slots[slot[sample], Slot.FIRST_ROW] + row)
                size = row_bytes[column]
                arrived = arrivals[column][at * size : (at + 1) * size]
                assert torch.equal(arrived, stored[column][begin * size : (begin + 1) * size])
