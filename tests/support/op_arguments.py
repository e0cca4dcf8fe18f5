"""Arguments of every op in host memory, of one size, for tests that compare two backends."""

import functools
from typing import Any

import torch
from op_kit import REFERENCE, moved, powers_of, tensors_of
from op_rings import ALL_ANCHORS, SCRATCH, Environments, Ring
from torch import Tensor

from deepspeed_gear.ops.backends import OP_NAMES
from deepspeed_gear.ops.constants import HIGHEST_SO_FAR, ONE_Q62, minima_size, tree_size
from deepspeed_gear.ops.records import MassUnit, Normalize, PlacedStep, RingState, Source

RING_NAMES = [name for name in OP_NAMES if name.startswith("ring_") or name == "scatter_"]
ON_DEVICE = [
    "tree_build_",
    "mass_",
    "minima_build_",
    "suffix_sum_",
    "n_step_",
    "advantages_",
    "gather_",
    *RING_NAMES,
]
HOST_ONLY = [name for name in OP_NAMES if name not in ON_DEVICE]
NUM_SLOTS = 1500
LENGTH = 40
COUNT = 33
HOST_SLOTS = 40
HOST_COUNT = 7
ALPHA = round(0.6 * ONE_Q62)


def resolutions_of(count: int, slots: int = NUM_SLOTS, length: int = LENGTH) -> Tensor:
    slot = torch.randint(0, slots, (count,))
    anchor = torch.randint(0, length, (count,))
    zero = torch.zeros_like(slot)
    parts = (slot, slot, zero, slot * length, zero + length, anchor, zero + 1, torch.arange(count))
    return torch.stack(parts, dim=1)


def window(column: Tensor, offset: int, length: int) -> list[int]:
    return [Source.STEPS, offset, length, 0, 0, 0, column[0].numel(), 0, 0, length]


def arguments(name: str) -> tuple[Any, ...]:
    """Arguments of an op in host memory, outputs first."""
    if name in HOST_ONLY:
        return host_arguments(name)
    torch.manual_seed(0)
    if name in RING_NAMES:
        return tuple(moved(ring_arguments(name), "cpu"))
    out = torch.zeros(COUNT, dtype=torch.int64)
    masses = torch.randint(0, 1 << 40, (NUM_SLOTS,))
    sums = torch.zeros(tree_size(NUM_SLOTS), dtype=torch.int64)
    sums[:NUM_SLOTS] = masses
    built = sums.clone()
    REFERENCE.tree_build_(built, NUM_SLOTS)
    rows = torch.randn(NUM_SLOTS * LENGTH, 11)
    reward = rows[:, 0].contiguous()
    ends = torch.rand(len(rows)) < 0.05
    extents = torch.stack(
        (torch.arange(NUM_SLOTS) * LENGTH, torch.full((NUM_SLOTS,), LENGTH)), dim=1
    )
    none = torch.empty(0)
    counters = torch.zeros(3, dtype=torch.int64)
    outs = [torch.zeros(COUNT, 7, 11), torch.zeros(COUNT, 7, 11, dtype=torch.bfloat16)]
    spec = window(rows, -3, 7) * 2
    scale = [none.double(), torch.randn(11).double()]
    masks = [torch.zeros(COUNT, 7, dtype=torch.bool)]
    resolutions = resolutions_of(COUNT)
    returns = torch.zeros(2, COUNT)
    minima = torch.zeros(minima_size(NUM_SLOTS), dtype=torch.int64)
    return {
        "tree_build_": (sums, NUM_SLOTS),
        "mass_": (out, torch.rand(COUNT) * 99, ALPHA, 27),
        "minima_build_": (minima, built, NUM_SLOTS),
        "suffix_sum_": (reward * 0, reward, extents),
        "n_step_": (
            returns[0],
            returns[1],
            out,
            reward,
            ends,
            ends,
            powers_of(0.9, 5),
            resolutions,
            5,
        ),
        "advantages_": advantage_arguments(9, 7),
        "gather_": (
            outs,
            masks,
            counters,
            [rows] * 2,
            scale,
            scale,
            resolutions,
            out + 1,
            spec,
            [0.0, 1.0],
            1,
            torch.randperm(COUNT),
        ),
    }[name]


def advantage_arguments(rows: int, steps: int, *, off_policy: bool = True) -> tuple[Any, ...]:
    """Arguments of the op: windows that are padded on both sides, with ends inside."""
    shape = (rows, steps)
    reward, value, following, *logs = torch.randn(5, *shape, dtype=torch.float64)
    terminated, truncated = torch.rand(2, *shape) < 0.15
    mask = torch.arange(steps) >= torch.randint(0, 3, (rows, 1))
    mask &= torch.arange(steps) < steps - torch.randint(0, 3, (rows, 1))
    logs = [30.0 * log for log in logs] if off_policy else [None, None]
    outs = torch.full(shape, 9.0), torch.full(shape, 9.0)
    return (
        *outs,
        reward,
        value,
        following,
        terminated,
        truncated,
        mask,
        *logs,
        [0.99, 0.95, 1.5, 1.25],
    )


def host_arguments(name: str) -> tuple[Any, ...]:
    """Arguments of an op that works in host memory alone."""
    torch.manual_seed(0)
    out = torch.zeros(HOST_COUNT, dtype=torch.int64)
    slots = torch.arange(HOST_SLOTS)[:, None] * torch.tensor([0, 0, 1, 5, 0, 0, 0, 0])
    slots[:, 4] = 5
    sums = torch.zeros(tree_size(HOST_SLOTS), dtype=torch.int64)
    sums[:HOST_SLOTS] = 3
    sums[64:66] = torch.tensor([96, 24])
    rows = torch.randn(HOST_SLOTS * 5, 3)
    slot = torch.randint(0, HOST_SLOTS, (HOST_COUNT,))
    zero = torch.zeros(HOST_COUNT, dtype=torch.int64)
    resolutions = torch.stack((slot, slot, zero, slot * 5, zero + 5, zero + 2, zero, zero), dim=1)
    none = torch.empty(0)
    two = [none, none]
    pads = [0.0, 1.0]
    packed = [0, 1, 1, 0, 0, 0, 3, 0, 0, 1, 3, 0, 1, 0, 0, 0, 1, 0, 0, 1]
    masses = torch.full((HOST_COUNT,), 9)
    weighed = torch.cat((resolutions[:, :6], masses[:, None], masses[:, None]), dim=1)
    row_slots = torch.arange(HOST_SLOTS // 5, dtype=torch.int32).repeat_interleave(5)
    table = slots.clone()
    table[:, 0] = 2
    minima = torch.zeros(minima_size(HOST_SLOTS), dtype=torch.int64)
    priorities = torch.rand(HOST_SLOTS)
    updates = torch.tensor([[1, 0, 2, 0x3F000000], [1, 0, 2, 0x40000000], [9, 1, 2, 0x3F000000]])
    rows_bytes = torch.zeros(64).byte()
    messages = [torch.arange(n) << 40 | 7 for n in (2, 3)]
    nodes = torch.arange(2)
    room = [1, 9, 0, 9, 50, 5]
    sampled = torch.zeros(2, 7).long()
    words = torch.zeros(2, 4).long()
    readers = torch.tensor([[1]])
    rows_wanted = (
        torch.tensor([[0, 0, 3, 9, 4, 0, -1], [1, 0, 2, 9, 8, 0, -1]]),
        torch.tensor([[0, 0, -1, 2, 0, 0, 0]]),
        torch.ones(1, 1, dtype=torch.bool),
        torch.tensor([[0, 0, 4]]),
        nodes + 0,
    )
    needs = torch.zeros(2, 1, dtype=torch.int16)
    reported = torch.arange(18).view(3, 6)
    taken = (
        torch.zeros(3, 8).long(),
        torch.zeros(3).long(),
        sampled + 0,
        nodes + 0,
        torch.zeros(1).long(),
    )
    asked = torch.tensor([1]), torch.tensor([2]), needs
    return {
        "draw_": (out, 5, 1, 100, 1 << 40),
        "permute_": (out, 5, 1, 2, 3, 100),
        "tree_update_": (sums, HOST_SLOTS, torch.tensor([1, 1, 39]), torch.tensor([7, 9, 0])),
        "slot_masses_": (sums, slots, nodes, 0, 2, [0, 0, 1, 9, 0], 1),
        "resolve_": (resolutions * 0, sums, slots, out + 11, [0, 0, 1, 9, 0], 0, 5, 1, 100),
        "resolve_rows_": (resolutions * 0, sums.clone(), slots, row_slots, out + 11, 100),
        "importance_": (torch.zeros(HOST_COUNT), weighed, 3, 1, 1 << 61),
        "minima_update_": (minima, sums, HOST_SLOTS, torch.tensor([1, 1, 39])),
        "top_k_": (out, priorities, sums),
        "append_reports_": (
            torch.zeros(HOST_COUNT + 2, 6, dtype=torch.int64),
            weighed,
            torch.rand(HOST_COUNT),
            5,
            1,
        ),
        "prioritize_": (
            *(sums, minima + 3 * (torch.arange(len(minima)) < 2), priorities, out[:5].clone()),
            *(table, updates, [0, 0, 1, 9, 0], 1 << 61, 0, 40),
        ),
        "slot_priorities_": (
            *(sums * 0, minima, priorities, out[:5].clone()),
            *(*torch.zeros(2, HOST_SLOTS, dtype=torch.int64), none.long(), none.int()),
            *(table, nodes, 0, 2, [0, 0, 1, 9, 0], 0, 0x3F000000, 1 << 61, 40),
        ),
        "draw_goals_": (out + 0, resolutions, 5, 1, 0, 1 << 61, 1),
        "pack_": (
            *([torch.zeros(9, 3), torch.zeros(9).long()], [rows, none.long()], two, two),
            *(resolutions[:2], torch.tensor([1, 6]), packed, pads, 2, 9),
        ),
        "plan_packs_": (
            out + 0,
            out + 0,
            out[:1] + 0,
            torch.arange(1, HOST_COUNT + 1),
            9,
            1,
            1,
            2,
            9,
        ),
        "encode_rows_": (
            out + 0,
            nodes + 0,
            [rows.view(-1).view(torch.uint8)],
            *rows_wanted,
            table,
        ),
        "decode_rows_": (
            *([rows_bytes], weighed, nodes + 0, nodes + 5, messages, nodes + 0),
            *(*rows_wanted, room),
        ),
        "assign_draws_": (
            *torch.zeros(3, 3).long(),
            slot[:1] * 0,
            slot[:3],
            torch.tensor([9, 99]),
            1,
        ),
        "encode_draws_": (
            sampled,
            words,
            nodes + 0,
            weighed[:2],
            nodes,
            None,
            None,
            readers,
            needs,
            0,
            0,
            0,
        ),
        "decode_draws_": (
            *taken,
            [words.view(-1) + 1] * 2,
            weighed[:1],
            nodes[:1],
            None,
            *asked,
            0,
            0,
            0,
            1,
        ),
        "encode_reports_": (torch.zeros(3, 3).long(), nodes[:1] + 0, reported, 9),
        "decode_reports_": (reported * 0, torch.arange(9).view(3, 3), 9),
    }[name]


def assert_equal(got: Any, expected: Any) -> None:
    """Compare every tensor, of a ring's state what has a meaning behind the call."""
    for a, b in zip(tensors_of(got), tensors_of(expected), strict=True):
        found = a.cpu()
        wanted = b.cpu()
        if found.shape == (RingState.NUM_WORDS,):
            found = found.clone()
            wanted = wanted.clone()
            found[SCRATCH] = wanted[SCRATCH] = 0
        assert torch.equal(found, wanted)


@functools.cache
def ring_arguments(name: str) -> tuple[Any, ...]:
    """Return arguments of an op: of a table that is full and has lost some, prioritized by step."""
    shape = [5000, 1500, 1, 9]  # rows, slots, a row more than steps, the longest trajectory
    if name == "ring_extend_":
        envs = Environments(REFERENCE, 100, (MassUnit.STEP, ALL_ANCHORS, True, True, 1), 9, 50, 15)
        assert envs.shape == shape
        for turn in range(70):
            flags = [torch.rand(100) < share for share in (0.1, 0.05, 0.9)]
            if turn < 69:
                envs.step(*flags, next_step=True)
        outs = envs.zeros(100, PlacedStep.NUM_WORDS), envs.zeros(100, 3), envs.truncations
        how = envs.rule, shape, envs.unit, envs.alpha, HIGHEST_SO_FAR, envs.most_bits, True
        return *envs.tensors.values(), *outs, *flags, *how
    unit = MassUnit.TRAJECTORY if name == "ring_select_limited_" else MassUnit.STEP  # of items
    has_priorities = name != "ring_epoch_"
    ring = Ring(REFERENCE, *shape, unit, ALL_ANCHORS, has_priorities, has_priorities)
    for _ in range(7):
        placed = ring.add(torch.randint(-1, 11, (200,)).tolist())
    state, slots, _, sums, minima, priorities, row_slots = ring.tensors.values()
    betas = [0, ONE_Q62 // 2, ONE_Q62]
    draw = [1, 2, 1, 0, 0, Normalize.TABLE]
    batch = ring.select(300, draw, betas) if name == "ring_update_" else ring.batch(300)
    adding = unit, ring.alpha, HIGHEST_SO_FAR, ring.most_bits
    drawing = ring.rule, shape, draw, unit
    rows = torch.randint(0, 256, (200, 9, 7), dtype=torch.uint8), torch.randn(200, 10, 3)
    columns = ring.zeros(5000, 7, dtype=torch.uint8), ring.zeros(5000, 3, dtype=torch.float32)
    reported = torch.rand(300) * 3
    reported[::50] = -1.0  # no priority: it changes nothing
    lengths = torch.randint(-1, 11, (200,))
    ids = int(state[RingState.NEXT]) - 2 * torch.arange(300)
    arguments: dict[str, tuple[Any, ...]] = {
        "ring_add_": (*ring.tensors.values(), placed, lengths, ring.rule, shape, *adding),
        "ring_remove_": (state, slots, sums, minima, priorities, ring.zeros(300), ids, shape, unit),
        "ring_select_": (
            state,
            *batch,
            slots,
            sums,
            minima,
            row_slots,
            torch.tensor(betas),
            *drawing,
        ),
        "ring_select_limited_": (
            state,
            *batch,
            slots,
            sums,
            minima,
            torch.tensor(betas),
            *drawing,
            2,
        ),
        "ring_top_k_": (state, *batch, slots, sums, priorities, row_slots, *drawing, False),
        "ring_epoch_": (
            *(state, batch[0], ring.zeros(300), slots, sums),
            *(ring.rule, shape, [1, 2, 1, 0, 0, 0], unit),
        ),
        "ring_update_": (
            *(state, sums, minima, priorities, slots, batch[0], reported),
            *(ring.rule, shape, unit, ring.alpha, ring.most_bits),
        ),
        "scatter_": (
            [*columns, ring.zeros(1500, 2, dtype=torch.float64)],
            [*rows, torch.randn(200, 2, dtype=torch.float64)],
            *(placed, [Source.STEPS, Source.STEPS_PLUS_ONE, Source.TRAJECTORY]),
        ),
    }
    return arguments[name]
