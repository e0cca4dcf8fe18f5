"""Packed rows: what the ops refuse, and that the C++ takes what the reference has packed.

`tests/property/test_rows.py` compares the backends byte for byte.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from deepspeed_gear.errors import ShapeError
from deepspeed_gear.ops import Ops
from deepspeed_gear.ops.records import Resolution, Slot

ROW_BYTES = (1, 2, 4, 8, 12, 16, 44, 61, 4096)
STEPS, TRAJECTORIES, HEAD = 50, 7, 24
REFUSED = (RuntimeError, ShapeError)


class Scene(NamedTuple):
    """Samples of a window of `length` steps of every column, from two peers.

    Args:
        stored: Bytes of columns.
        slots: The slot table.
        given: Samples, windows, members, columns, heads.
    """

    stored: list[Tensor]
    slots: Tensor
    given: list[Tensor]

    @property
    def count(self) -> int:
        return len(self.given[0])

    def pack(self, ops: Ops, room: int, **other: Any) -> tuple[Tensor, Tensor]:
        """Return messages, in a room of so many words, and the bytes of rows in each."""
        message, sizes = torch.full((room,), 9), torch.zeros(2, dtype=torch.int64)
        ops.encode_rows_(message, sizes, other.get("stored", self.stored), *self.given, self.slots)
        return message, sizes

    def unpack(
        self, ops: Ops, messages: list[Tensor], room: list[int]
    ) -> tuple[list[Tensor], Tensor, Tensor]:
        """Return arrivals, ring and what is needed."""
        arrivals = [torch.zeros((room[0] + room[1]) * size, dtype=torch.uint8) for size in ROW_BYTES]
        ring, which = torch.zeros(self.count, 8, dtype=torch.int64), torch.arange(self.count)
        sizes, needed = torch.zeros(2, 2, dtype=torch.int64).unbind()
        ops.decode_rows_(arrivals, ring, sizes, needed, messages, which, *self.given, room)
        return arrivals, ring, needed


def scene(count: int, length: int) -> Scene:
    torch.manual_seed(count)
    rows = STEPS * TRAJECTORIES
    stored = [torch.randint(0, 256, (rows * size,), dtype=torch.uint8) for size in ROW_BYTES]
    slots = torch.zeros(TRAJECTORIES, 8, dtype=torch.int64)
    slots[:, Slot.FIRST_ROW] = torch.arange(TRAJECTORIES) * STEPS
    samples = torch.zeros(count, 7, dtype=torch.int64)
    samples[:, 0], samples[:, 2] = torch.randint(0, 2, (count,)), torch.randint(0, TRAJECTORIES, (count,))
    samples[:, 3], samples[:, 4] = STEPS, torch.randint(0, STEPS, (count,))
    samples[:, 6] = -1
    windows = torch.tensor([[0, 0, 1 - length, 1, 0, 0, 0]])
    columns = torch.tensor([[0, 0, size] for size in ROW_BYTES])
    members = torch.ones(1, 1, dtype=torch.bool)
    return Scene(stored, slots, [samples, windows, members, columns, torch.tensor([HEAD, HEAD])])


def room_of(sizes: Tensor) -> int:
    return int((HEAD // 8 - (-sizes // 8)).sum())


@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize("count", [0, 1, 7, 33, 400])
def test_what_is_packed_arrives(reference: Ops, cpu: Ops, count: int, length: int) -> None:
    of = scene(count, length)
    _, sizes = of.pack(cpu, 0)
    message, _ = of.pack(reference, room_of(sizes))
    for ops in (cpu, cpu.on_host()):
        assert torch.equal(of.pack(ops, room_of(sizes))[0], message)
    first = HEAD // 8 - (-int(sizes[0]) // 8)
    messages, room = [message[:first], message[first:]], [2, STEPS * TRAJECTORIES * 2, 0, 14, 100, 1000]
    for ops in (reference, cpu, cpu.on_host()):
        arrivals, ring, _ = of.unpack(ops, messages, room)
        for sample, (slot, shift) in zip(
            of.given[0], ring[:, (Resolution.SLOT, Resolution.FIRST_ROW)].tolist(), strict=True
        ):
            assert 1000 <= slot < 1014
            for step in range(max(0, int(sample[4]) - length + 1), int(sample[4]) + 1):
                row, at = int(sample[2]) * STEPS + step, shift - 100 + step
                for size, stored, arrived in zip(ROW_BYTES, of.stored, arrivals, strict=True):
                    wanted = stored[row * size : (row + 1) * size]
                    assert torch.equal(arrived[at * size : (at + 1) * size], wanted)


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
def test_any_layout(reference: Ops, cpu: Ops, count: int, seed: int) -> None:
    torch.manual_seed(100 * count + seed)
    num_peers, num_needs, num_slots, steps = 1 + seed % 4, 1 + seed % 3, 9, 21
    windows, members, columns = any_layout(num_needs)
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
    given = samples, windows, members, columns, heads
    rows = num_slots * (steps + 1)
    stored = [torch.randint(0, 256, (rows * size,), dtype=torch.uint8) for size in columns[:, 2].tolist()]
    sizes = torch.zeros(num_peers, dtype=torch.int64)
    reference.encode_rows_(torch.zeros(0).long(), sizes, stored, *given, slots)
    ends = ((heads + sizes + 7) // 8).cumsum(0)
    message = torch.full((int(ends[-1]) + 1,), 9)
    expected, got = [message.clone(), sizes * 0], [message.clone(), sizes * 0]
    reference.encode_rows_(*expected, stored, *given, slots)
    cpu.encode_rows_(*got, stored, *given, slots)
    assert all(map(torch.equal, got, expected))
    messages = [part.clone() for part in expected[0][: int(ends[-1])].tensor_split(ends[:-1])]
    for num_rows, room_slots in ((rows, 40), (rows, 0), (3, 40)):
        unpacked = []
        for ops in (reference, cpu):
            arrivals = [torch.zeros((rows + 60) * size, dtype=torch.uint8) for size in columns[:, 2].tolist()]
            out = torch.full((count + 3, 8), -1), sizes * 0, torch.zeros(2, dtype=torch.int64)
            which = torch.randperm(count + 3, generator=torch.Generator().manual_seed(seed))[:count]
            room = [4, num_rows, 5, room_slots, 1000, 70]
            ops.decode_rows_(arrivals, *out, messages, which, *given, room)
            unpacked.append([*arrivals, *out])
        assert all(map(torch.equal, *unpacked))


@pytest.mark.parametrize("num_peers", [127, 300])
def test_many_peers(reference: Ops, cpu: Ops, num_peers: int) -> None:
    of = scene(50, 2)
    samples, windows, members, columns, _ = of.given
    samples[:, 0] = torch.randint(0, num_peers, (len(samples),))
    given, heads = (samples, windows, members, columns[:4]), torch.full((num_peers,), 8)
    results = []
    for ops in (reference, cpu):
        sizes, message = torch.zeros(num_peers, dtype=torch.int64), torch.full((20_000,), 9)
        ops.encode_rows_(message, sizes, of.stored[:4], *given, heads, of.slots)
        ends = ((15 + sizes) // 8).cumsum(0)
        messages = [part.clone() for part in message[: int(ends[-1])].tensor_split(ends[:-1])]
        arrivals = [torch.zeros(1000 * size, dtype=torch.uint8) for size in ROW_BYTES[:4]]
        out = torch.zeros(50, 8).long(), sizes * 0, torch.zeros(2).long()
        ops.decode_rows_(arrivals, *out, messages, torch.arange(50), *given, heads, [0, 1000, 0, 100, 0, 0])
        results.append([message, sizes, *arrivals, *out])
    assert results[0][1].any()
    assert all(map(torch.equal, *results))


def test_too_little_room_takes_nothing(careful: Ops) -> None:
    of = scene(33, 1)
    _, sizes = of.pack(careful, 0)
    message, same = of.pack(careful, room_of(sizes) - 1)
    assert torch.equal(same, sizes)
    assert message.eq(9).all()
    messages = [torch.ones(1 << 17, dtype=torch.int64)] * 2
    _, _, needed = of.unpack(careful, messages, [0, 1000, 0, 14, 0, 0])
    rows, slots = needed.tolist()
    for room in ([0, rows - 1, 0, slots, 0, 0], [0, rows, 0, slots - 1, 0, 0]):
        arrivals, _, same = of.unpack(careful, messages, room)
        assert same.tolist() == [rows, slots]
        assert not any(part.any() for part in arrivals)


def test_rows_outside_are_refused_before_any_is_copied(careful: Ops) -> None:
    of = scene(33, 1)
    _, sizes = of.pack(careful, 0)
    for stored in ([part[: len(part) // 2] for part in of.stored], [*of.stored[:-1], of.stored[-1][:-4096]]):
        of.given[0][0, 2], of.given[0][0, 4] = TRAJECTORIES - 1, STEPS - 1
        with pytest.raises(REFUSED, match="rows of samples must lie in the columns"):
            of.pack(careful, room_of(sizes) + 512, stored=stored)
    of.slots[:, Slot.FIRST_ROW] = -STEPS
    with pytest.raises(REFUSED, match="rows of samples must lie in the columns"):
        of.pack(careful, room_of(sizes) + 512)


def test_short_messages_are_refused(careful: Ops) -> None:
    of = scene(33, 1)
    _, sizes = of.pack(careful, 0)
    for less in (1, 10_000):
        said = [torch.zeros(max(0, HEAD // 8 - (-int(size) // 8) - less)).long() for size in sizes]
        with pytest.raises(REFUSED, match="messages must hold the rows of samples"):
            of.unpack(careful, said, [0, 1000, 0, 14, 0, 0])


def test_wrong_arguments_are_refused(cpu: Ops) -> None:
    of = scene(7, 1)
    samples, windows, members, columns, heads = of.given
    two, message = torch.zeros(2, dtype=torch.int64), torch.zeros(9, dtype=torch.int64)
    for arguments, match in (
        ((message.char(), two, of.stored, *of.given, of.slots), "message must be Long"),
        ((message, two[:1], of.stored, *of.given, of.slots), "sizes must have 2 values, got 1"),
        ((message, two, of.stored[1:], *of.given, of.slots), "there must be 9 columns, got 8"),
        (
            (message, two, of.stored, samples, windows, members, columns, heads - 99, of.slots),
            "heads must be",
        ),
        ((message, two, of.stored, *of.given, of.slots[:1]), "sample [0-9] must be a step"),
    ):
        with pytest.raises(RuntimeError, match=match):
            cpu.encode_rows_(*arguments)
    ring, which, said = torch.zeros(7, 8, dtype=torch.int64), torch.arange(7), [message] * 2
    room = [0, 9, 0, 9, 0, 0]
    arrivals = [torch.zeros(8 * size, dtype=torch.uint8) for size in ROW_BYTES]
    for arguments, match in (
        (
            (arrivals, ring, two, two + 0, said, which + 1, *of.given, room),
            "which must have an index of the ring",
        ),
        (
            (arrivals, ring, two, two + 0, said, which[:6], *of.given, room),
            "which must have an index of the ring",
        ),
        (
            (arrivals, ring, two, two + 0, said[:1], which, *of.given, room),
            "there must be a message of each peer",
        ),
        ((arrivals, ring, two, two + 0, said, which, *of.given, room[:5]), "room must be first row"),
        ((arrivals, ring, two, two + 0, said, which, *of.given, [-1, *room[1:]]), "room must be first row"),
    ):
        with pytest.raises(RuntimeError, match=match):
            cpu.decode_rows_(*arguments)
    said = [torch.zeros(1 << 17, dtype=torch.int64)] * 2
    with pytest.raises(RuntimeError, match="the room must lie in the arrivals"):
        cpu.decode_rows_(arrivals, ring, two, two + 0, said, which, *of.given, [5, 9, 0, 9, 0, 0])
