"""Steps of environments on one device: every backend gives the reference's bits, and no invariant breaks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_ops import reference_ops
from ring_op_cases import Environments, assert_alike
from torch import Tensor

from deepspeed_gear.errors import ShapeError
from deepspeed_gear.ops import Ops, load_backend
from deepspeed_gear.ops.constants import ONE_Q62
from deepspeed_gear.ops.records import (
    MassUnit,
    Normalize,
    OpenTrajectory,
    PlacedStep,
    RingState,
    Slot,
)

ALL_ANCHORS, SOME_ANCHORS, FROM_THE_END = [0, 0, 1, 1 << 40, 0], [1, 1, 2, 3, 0], [1, 0, 2, 2, 1]
KINDS = [
    (MassUnit.TRAJECTORY, ALL_ANCHORS, False, False, 0),
    (MassUnit.STEP, SOME_ANCHORS, False, False, 1),
    (MassUnit.LENGTH, FROM_THE_END, False, False, 1),
    (MassUnit.TRAJECTORY, SOME_ANCHORS, True, True, 1),
    (MassUnit.STEP, ALL_ANCHORS, True, True, 1),
    (MassUnit.STEP, FROM_THE_END, True, True, 0),
    (MassUnit.STEP, SOME_ANCHORS, True, False, 1),
]


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
            draw = [seed + turn, 1, 1, 0, 0, Normalize.BATCH]
            (drawn, _), (other, _) = (each.select(20, draw, [ONE_Q62]) for each in both)
            assert torch.equal(drawn, other)
        if kind[2] and turn > 3 and turn % 4 < 2:  # late: a step that was an anchor may be none
            values = torch.rand(20, generator=torch.Generator().manual_seed(seed + turn)) * 4
            for each in both:
                each.update(drawn, values)
        if turn % 6 == 5:
            both[0].check()
        assert_alike(both)


@pytest.mark.parametrize("num_envs", [1024, 1025, 2100])
def test_more_environments_than_threads_of_a_block(native: Ops, num_envs: int) -> None:
    kind = (MassUnit.TRAJECTORY, ALL_ANCHORS, False, False, 1)
    both = [Environments(ops, num_envs, kind, most=2) for ops in (load_backend("cpu"), native)]
    generator = torch.Generator().manual_seed(num_envs)
    for _ in range(4):
        terminated, mask = flags(num_envs, 0.4, generator), flags(num_envs, 0.8, generator)
        for a, b in zip(*[each.step(terminated, None, mask) for each in both], strict=True):
            assert torch.equal(a, b)
    assert_alike(both)


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
