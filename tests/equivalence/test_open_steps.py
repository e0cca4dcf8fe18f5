"""Steps of environments on one device: every backend gives the reference's bits, and no invariant breaks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_ops import reference_ops
from torch import Tensor

from deepspeed_gear.errors import ShapeError
from deepspeed_gear.ops import Ops, load_backend
from deepspeed_gear.ops.constants import HIGHEST_SO_FAR, ONE_Q62, minima_size, tree_size
from deepspeed_gear.ops.records import (
    MassUnit,
    OpenTrajectory,
    PlacedStep,
    RingState,
    Slot,
    SlotState,
    UpdateCount,
)
from deepspeed_gear.sampling.anchors import AnchorRule

ALL_ANCHORS, SOME_ANCHORS, FROM_THE_END = [0, 0, 1, 1 << 40, 0], [1, 1, 2, 3, 0], [1, 0, 2, 2, 1]
SCRATCH = slice(16, 22)  # of the state: what kernels pass to each other
KINDS = [
    (MassUnit.TRAJECTORY, ALL_ANCHORS, False, False, 0),
    (MassUnit.STEP, SOME_ANCHORS, False, False, 1),
    (MassUnit.LENGTH, FROM_THE_END, False, False, 1),
    (MassUnit.TRAJECTORY, SOME_ANCHORS, True, True, 1),
    (MassUnit.STEP, ALL_ANCHORS, True, True, 1),
    (MassUnit.STEP, FROM_THE_END, True, True, 0),
    (MassUnit.STEP, SOME_ANCHORS, True, False, 1),
]


class Environments:
    """The tensors of a ring to which environments add steps."""

    def __init__(
        self, ops: Ops, num_envs: int, kind: tuple[Any, ...], most: int = 4, part: int = 0, own_slots: int = 0
    ) -> None:
        self.unit, self.rule, self.prioritized, with_minima, final = kind
        part = part or most + final + (1 + final) * (most + 1) + 3
        num_rows, num_slots = num_envs * part, num_envs * (own_slots or most + 2)
        self.ops, self.num_envs, self.shape = ops, num_envs, [num_rows, num_slots, final, most]
        self.by_row = self.prioritized and self.unit == MassUnit.STEP
        items = num_rows if self.by_row else num_slots
        owners = torch.zeros(num_rows, dtype=torch.int32)
        self.tensors = {
            "state": torch.zeros(RingState.NUM_WORDS, dtype=torch.int64),
            "slots": torch.zeros(num_slots, 8, dtype=torch.int64),
            "opened": torch.zeros(num_envs, OpenTrajectory.NUM_WORDS, dtype=torch.int64),
            "owners": owners,
            "sums": torch.zeros(tree_size(items), dtype=torch.int64),
            "minima": torch.zeros(minima_size(items) if with_minima else 0, dtype=torch.int64),
            "priorities": torch.zeros(items if self.prioritized else 0),
        }
        self.truncations = torch.zeros(num_rows, dtype=torch.bool)
        self.state, self.slots = self.tensors["state"], self.tensors["slots"]
        self.state[[RingState.COUNTS + UpdateCount.HIGHEST_PRIORITY, RingState.INITIAL]] = 0x3F800000

    def step(
        self, terminated: Tensor, truncated: Tensor | None, mask: Tensor | None, next_step: bool = False
    ) -> tuple[Tensor, Tensor]:
        placed, begun = (torch.full((self.num_envs, n), 77) for n in (PlacedStep.NUM_WORDS, 3))
        rest = (self.rule, self.shape, self.unit, round(0.6 * ONE_Q62), HIGHEST_SO_FAR, 25, next_step)
        flags = terminated, truncated, mask
        self.ops.ring_extend_(*self.tensors.values(), placed, begun, self.truncations, *flags, *rest)
        return placed, begun

    def select(self, seed: int) -> Tensor:
        unit = MassUnit.TRAJECTORY if self.prioritized and not self.by_row else self.unit
        row_slots = self.tensors["owners"] if self.by_row else torch.zeros(0, dtype=torch.int32)
        records, weights = torch.zeros(20, 8, dtype=torch.int64), torch.zeros(20 * self.prioritized)
        known = self.slots, self.tensors["sums"], self.tensors["minima"], row_slots, torch.tensor([ONE_Q62])
        draw = [seed, 1, 1, 0, 0, 1]
        self.ops.ring_select_(self.state, records, weights, *known, self.rule, self.shape, draw, unit)
        return records

    def update(self, records: Tensor, seed: int) -> None:
        if not self.prioritized:
            return
        known = (self.tensors[name] for name in ("state", "sums", "minima", "priorities", "slots"))
        values = torch.rand(20, generator=torch.Generator().manual_seed(seed)) * 4
        unit = MassUnit.STEP if self.by_row else MassUnit.TRAJECTORY
        how = self.rule, self.shape, unit, round(0.6 * ONE_Q62), 25
        self.ops.ring_update_(*known, records, values, *how)

    @property
    def content(self) -> dict[str, Tensor]:
        found = {name: tensor.clone() for name, tensor in self.tensors.items()}
        found["state"][SCRATCH] = 0
        return found | {"truncations": self.truncations}

    def check(self) -> None:
        """Stored trajectories lie apart from each other, in their environments' parts; the tree is right."""
        num_rows, num_slots, final, most = self.shape
        part, stored = num_rows // self.num_envs, self.slots[self.slots[:, Slot.STATE] == SlotState.COMMITTED]
        tail, following = int(self.state[RingState.TAIL]), int(self.state[RingState.NEXT])
        assert sorted(stored[:, Slot.ID].tolist()) == list(range(tail, following))
        assert int(stored[:, Slot.NUM_STEPS].sum()) == self.state[RingState.STEPS]
        used = torch.zeros(num_rows, dtype=torch.int64)
        for slot in stored.tolist():
            first, rows = slot[Slot.FIRST_ROW], slot[Slot.NUM_ROWS]
            assert first // part == (first + rows - 1) // part
            assert 1 <= slot[Slot.NUM_STEPS] == rows - final <= most
            used[first : first + rows] += 1
        assert int(used.max()) <= 1
        items = num_rows if self.by_row else num_slots
        sums, minima = self.tensors["sums"].clone(), self.tensors["minima"].clone()
        reference = reference_ops()
        reference.tree_build_(sums, items)
        assert torch.equal(sums, self.tensors["sums"])
        if len(minima):
            reference.minima_build_(minima, sums, items)
            assert torch.equal(minima, self.tensors["minima"])
        if self.by_row:
            anchors = AnchorRule(*self.rule)
            for slot in stored.tolist():
                first, steps = slot[Slot.FIRST_ROW], slot[Slot.NUM_STEPS]
                are = anchors.admits(np.arange(steps), np.array(steps))
                assert not sums[first : first + steps][~torch.from_numpy(are)].any(), "of no anchor"
        assert int((sums[:items] > 0).sum()) == self.state[RingState.COUNTS + UpdateCount.DRAWABLE] or (
            not self.prioritized
        )


def flags(num_envs: int, share: float, generator: torch.Generator) -> Tensor:
    return torch.rand(num_envs, generator=generator) < share


@pytest.mark.parametrize("kind", KINDS)
@given(
    seed=st.integers(0, 1000),
    num_envs=st.sampled_from([1, 3, 33]),
    ends=st.sampled_from([0.0, 0.2, 0.9]),
    present=st.sampled_from([0.1, 0.9, 1.0]),
    next_step=st.booleans(),
)
@settings(max_examples=12, deadline=None)
def test_equals_the_reference(
    native: Ops,
    same_bits: Callable[[Tensor, Tensor], bool],
    kind: tuple[Any, ...],
    seed: int,
    num_envs: int,
    ends: float,
    present: float,
    next_step: bool,
) -> None:
    both = [Environments(ops, num_envs, kind) for ops in (reference_ops(), native)]
    generator = torch.Generator().manual_seed(seed)
    for turn in range(30):
        terminated, truncated = flags(num_envs, ends, generator), flags(num_envs, ends / 2, generator)
        mask = None if present == 1 else flags(num_envs, present, generator)
        given_ = terminated, None if turn % 5 == 0 else truncated, mask, next_step
        found = [each.step(*given_) for each in both]
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
        if turn % 4 == 3:
            drawn, other = (each.select(seed + turn) for each in both)
            assert torch.equal(drawn, other)
        if turn > 3 and turn % 4 < 2:  # late: a step that was an anchor may be none
            for each in both:
                each.update(drawn, seed + turn)
        if turn % 6 == 5:
            both[0].check()
        for name, tensor in both[0].content.items():
            assert same_bits(tensor, both[1].content[name]), (turn, name)


@pytest.mark.parametrize("num_envs", [1024, 1025, 2100])
def test_more_environments_than_threads_of_a_block(native: Ops, num_envs: int) -> None:
    kind = (MassUnit.TRAJECTORY, ALL_ANCHORS, False, False, 1)
    both = [Environments(ops, num_envs, kind, most=2) for ops in (load_backend("cpu"), native)]
    generator = torch.Generator().manual_seed(num_envs)
    for _ in range(4):
        terminated, mask = flags(num_envs, 0.4, generator), flags(num_envs, 0.8, generator)
        for a, b in zip(*[each.step(terminated, None, mask) for each in both], strict=True):
            assert torch.equal(a, b)
    for name, tensor in both[0].content.items():
        assert torch.equal(tensor, both[1].content[name]), name


def test_nodes_of_a_graph(kernels_on_host: Ops, launched: Callable[[], list[int]]) -> None:
    """As the model of costs counts them: the plan, evictions, slots and items, and each level above."""
    ring = Environments(kernels_on_host, 33, (MassUnit.STEP, ALL_ANCHORS, True, True, 1), most=30)
    assert 1024 < ring.shape[0] <= 1024 * 32  # three levels
    ring.step(torch.zeros(33, dtype=torch.bool), None, None)
    assert len(launched()) == 3 + 2


def test_an_open_trajectory_is_never_evicted_while_all_environments_step(cpu: Ops) -> None:
    """One environment has longest trajectories, the others ones of a step."""
    for final in (0, 1):
        kind, most = (MassUnit.STEP, ALL_ANCHORS, True, True, final), 7
        ring = Environments(cpu, 5, kind, most, part=most + final + (1 + final) * (most + 1))
        for turn in range(200):
            terminated = torch.ones(5, dtype=torch.bool)
            terminated[2] = False
            placed, _ = ring.step(terminated, None, None)
            assert placed[2, PlacedStep.STEP] == turn % most
            ring.check()
        assert ring.state[RingState.DROPPED] == 0
        lasts = ring.slots[ring.slots[:, Slot.NUM_STEPS] == most]
        ended = lasts[lasts[:, Slot.ID] != ring.tensors["opened"][2, OpenTrajectory.ID]]
        rows = ended[:, Slot.FIRST_ROW] + most - 1
        assert ring.truncations[rows].all()


def test_an_environment_that_pauses_begins_another_trajectory(native: Ops) -> None:
    ring = Environments(native, 3, (MassUnit.STEP, ALL_ANCHORS, True, True, 1))
    never, all_but_one = torch.zeros(3, dtype=torch.bool), torch.tensor([True, False, True])
    ring.step(never, None, None)
    for _ in range(60):
        ring.step(never, None, all_but_one)
        ring.check()
    placed, begun = ring.step(never, None, None)
    assert placed[1, PlacedStep.STEP] == 0
    assert begun[1, 0] == placed[1, PlacedStep.SLOT] >= 0
    ring.check()


def test_a_step_whose_call_evicts_its_trajectory_is_dropped_and_counted(native: Ops) -> None:
    ring = Environments(native, 2, (MassUnit.STEP, ALL_ANCHORS, False, False, 0), most=4, part=8)
    never, first = torch.zeros(2, dtype=torch.bool), torch.tensor([True, False])
    ring.step(never, None, None)  # trajectories 0 and 1
    for _ in range(11):  # 0, 2 and 3, in the rows of 0
        ring.step(never, None, first)
    assert (ring.state[RingState.TAIL], ring.state[RingState.DROPPED]) == (1, 0)
    placed, _ = ring.step(torch.tensor([False, True]), None, None)  # 4, in the rows of 2: 1 is older
    assert placed[:, PlacedStep.SLOT].tolist() == [4, -1]
    assert (ring.state[RingState.TAIL], ring.state[RingState.DROPPED]) == (3, 1)
    assert ring.tensors["opened"][1, OpenTrajectory.ENDED] == 1
    ring.check()
    placed, _ = ring.step(never, None, None)
    assert placed[1, [PlacedStep.SLOT, PlacedStep.STEP]].tolist() == [5, 0]
    ring.check()


def test_what_cannot_be_is_refused(careful: Ops) -> None:
    kind = (MassUnit.STEP, ALL_ANCHORS, True, False, 1)
    ring = Environments(careful, 2, kind, most=4, part=9)
    never = torch.zeros(2, dtype=torch.bool)
    with pytest.raises((RuntimeError, ShapeError), match="two longest trajectories"):
        ring.step(never, None, None)
    assert not any(tensor.any() for name, tensor in ring.tensors.items() if name not in ("state",))
