"""What nodes send each other: the C++ against the reference, and what is taken against what was sent.

`tests/property/test_rows.py` walks row by row through what travels.
"""

import numpy as np
import op_wrappers
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from op_comparison import CPU, REFERENCE, compare
from torch import Tensor

from deepspeed_gear.ops import Ops
from deepspeed_gear.ops.constants import ANY_SLOT, SHARD_BITS, UNKNOWN
from deepspeed_gear.ops.records import LogEntry, PriorityUpdate, Resolution, RowSample, Slot
from deepspeed_gear.sampling.priority_log import NEVER

MOST_32, MOST_BACK = (1 << 32) - 1, (1 << 16) - 1
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
    total, index = torch.tensor(totals), data.draw(st.integers(0, len(totals) - 1))
    points = [data.draw(st.integers(0, sum(totals) - 1)) for _ in range(count)] if sum(totals) else []
    coordinates = torch.tensor(points, dtype=torch.int64)
    plain, fast = (op_wrappers.assign_draws(coordinates, total, index, ops=o) for o in (REFERENCE, CPU))
    assert all(map(torch.equal, plain, fast))
    begin = sum(totals[:index])
    assert [points[i] - begin for i in fast[1].tolist()] == fast[2].tolist()
    assert all(0 <= point < totals[index] for point in fast[2].tolist())


@pytest.mark.parametrize("num_nodes", [1, 2, 3])
@pytest.mark.parametrize("has_steps", [False, True])
@pytest.mark.parametrize("takes_own", [False, True])
@pytest.mark.parametrize("all_asked", [False, True])
def test_draws_arrive_as_they_were_made(
    num_nodes: int, has_steps: bool, takes_own: bool, all_asked: bool
) -> None:
    """Every node sends, and takes what the others have sent; replicas are read by one or by all nodes."""
    words, count, offset = np.random.default_rng(num_nodes), 33, 5
    owner = torch.from_numpy(words.integers(0, num_nodes, count))
    records, goals = resolutions(count, words), torch.from_numpy(words.integers(-1, 9, count))
    records[:, Resolution.SAMPLE_NUMBER] = 100 + torch.arange(count)
    steps = torch.arange(count) * 7
    readers = torch.tensor([[0, -1, -1], [*range(num_nodes), -1, -1][:3], [num_nodes - 1, -1, -1]])
    need_of = torch.full((num_nodes, 3), -1, dtype=torch.int16)
    for replica, nodes in enumerate(readers.tolist()):
        for node in nodes:
            need_of[node, replica] = replica if node >= 0 else need_of[node, replica]
    asks = (torch.zeros(1, num_nodes).long() + torch.arange(num_nodes), torch.zeros(num_nodes, 1).short())
    received: list[list[Tensor]] = []
    outgoing = []
    for node in range(num_nodes):
        own = torch.nonzero(owner == node)[:, 0]
        more = {"steps": steps[own] if has_steps else None, "goals": goals[own], "takes_own": takes_own}
        route = (*asks, 0, node) if all_asked else (readers, need_of, offset, node)
        given = records[own], own, *route
        found = [op_wrappers.encode_draws(*given, ops=ops, **more) for ops in (REFERENCE, CPU)]
        assert all(map(torch.equal, *found))
        _, packed, ends = found[1]
        bounds = [0, *ends.tolist()]
        received.append([packed[bounds[to] : bounds[to + 1]].reshape(-1) for to in range(num_nodes)])
        given = records[own], own, readers, need_of, offset, node
        outgoing.append(op_wrappers.encode_draws(*given, **more)[0])
    for node in range(num_nodes):
        own, needs = torch.nonzero(owner == node)[:, 0], need_of[node][(torch.arange(count) + offset) % 3]
        asked = torch.arange(count) if all_asked else torch.nonzero(needs >= 0)[:, 0]
        most = len(own) + len(asked)
        ring, origins, samples, which, num_samples = compare(
            *(CPU, "decode_draws_", zeros(count, 8), zeros(count), zeros(most, 7), zeros(most), zeros(1)),
            *([part[node] for part in received], records[own], own, steps[own] if has_steps else None),
            *(owner[asked], asked, need_of, 100, offset, node, int(takes_own)),
        )
        samples, which = samples[: int(num_samples)], which[: int(num_samples)]
        known = torch.isin(torch.arange(count), asked) | (owner == node)
        expected = records.clone()
        expected[owner != node, Resolution.FIRST_ROW] = 0  # known where they go
        assert torch.equal(ring[known], expected[known])
        assert (ring[~known, Resolution.ID] == UNKNOWN).all()
        assert torch.equal(origins[known], (owner << SHARD_BITS | records[:, Resolution.SLOT])[known])
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
        by_id, is_known = draw(st.booleans()), draw(st.booleans())
        slot = draw(st.integers(0, ANY_SLOT - 1)) if is_known or not by_id else ANY_SLOT
        row[PriorityUpdate.SLOT] = draw(st.integers(0, 3)) << SHARD_BITS | slot
        row[PriorityUpdate.GENERATION] = draw(words_62 if slot == ANY_SLOT else words_32)
        row[PriorityUpdate.ANCHOR], row[PriorityUpdate.PRIORITY] = draw(words_32), draw(words_32)
        row[LogEntry.BATCH] = latest - draw(st.integers(0, MOST_BACK - 1) | st.sampled_from([MOST_BACK - 1]))
        row[LogEntry.SAMPLE_NUMBER] = LogEntry.BY_ID if by_id else draw(st.integers(0, (1 << 48) - 3))
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
    latest, report = 1_000_000, torch.tensor([[3, 1, 2, 4, batch, 9]])
    packed, _ = compare(CPU, "encode_reports_", zeros(1, 3), zeros(1), report, latest)
    report[0, LogEntry.BATCH] = latest - MOST_BACK
    assert torch.equal(compare(CPU, "decode_reports_", zeros(1, 6), packed, latest)[0], report)


# ---- rows --------------------------------------------------------------------------------------------


def any_layout(num_needs: int) -> tuple[Tensor, Tensor, Tensor]:
    """Windows of some groups, which needs have them, and columns that read them or have one row each."""
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


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("count", [1, 7, 33, 200])
def test_rows_of_any_layout(cpu: Ops, count: int, seed: int) -> None:
    torch.manual_seed(100 * count + seed)
    num_peers, num_needs, num_slots, steps = [1, 2, 127, 300][seed % 4], 1 + seed % 3, 9, 21
    slots = torch.zeros(num_slots, 8, dtype=torch.int64)
    slots[:, Slot.FIRST_ROW] = torch.randperm(num_slots) * (steps + 1)
    lengths = torch.randint(1, steps + 1, (num_slots,))
    slot, peer = torch.randint(0, num_slots, (count,)), torch.randint(0, num_peers, (count,))
    anchor = (torch.rand(count) * lengths[slot]).long()
    goal = torch.where(torch.rand(count) < 0.5, -1, anchor)
    n_steps = torch.minimum(torch.randint(0, 4, (count,)), lengths[slot])
    need = torch.randint(0, num_needs, (count,))
    samples = torch.stack((peer, need, slot, lengths[slot], anchor, n_steps, goal), dim=1)
    heads = torch.randint(0, 5, (num_peers,)) * 4
    given = samples, *any_layout(num_needs), heads
    row_bytes, rows = given[3][:, 2].tolist(), num_slots * (steps + 1)
    stored = [torch.randint(0, 256, (rows * size,), dtype=torch.uint8) for size in row_bytes]
    empty, sizes = torch.zeros(0).long(), torch.zeros(num_peers, dtype=torch.int64)
    _, sizes = compare(cpu, "encode_rows_", empty, sizes, stored, *given, slots)
    ends = ((heads + sizes + 7) // 8).cumsum(0)
    out = torch.full((int(ends[-1]) + 1,), 9)
    message, same = compare(cpu, "encode_rows_", out, sizes * 0, stored, *given, slots)
    assert torch.equal(same, sizes)
    direct = out.clone()
    cpu.on_host().encode_rows_(direct, sizes * 0, stored, *given, slots)
    assert torch.equal(direct, message)
    messages = [part.clone() for part in message[: int(ends[-1])].tensor_split(ends[:-1])]
    for num_rows, room_slots in ((rows, 40), (rows, 0), (3, 40)):
        arrivals = [torch.zeros((rows + 60) * size, dtype=torch.uint8) for size in row_bytes]
        outs = torch.full((count + 3, 8), -1), sizes * 0, torch.zeros(2, dtype=torch.int64)
        which = torch.randperm(count + 3)[:count]
        room = [4, num_rows, 5, room_slots, 1000, 70]
        compare(cpu, "decode_rows_", arrivals, *outs, messages, which, *given, room)
