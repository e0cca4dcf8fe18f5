"""What tests/gpu compares a GPU with, on the host alone: it must be right before there
is a card.
"""

import pytest
from device_steps import SAMPLERS, assert_equal, plainly, run_on
from memory_order import Draws
from op_arguments import ON_DEVICE, arguments
from op_arguments import assert_equal as assert_equal_arguments
from op_kit import REFERENCE, moved

from deepspeed_gear.ops import load_backend
from deepspeed_gear.ops.records import RingState


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_run_can_be_repeated_and_shows_every_turn(sampler: str) -> None:
    once = run_on("cpu", sampler, 12, plainly)
    assert_equal(run_on("cpu", sampler, 12, plainly), once)
    added = [int(found[-1][RingState.NEXT]) for found in once]
    assert added == sorted(set(added))
    newest = [int(found[0].max()) for found in once]
    assert newest[0] < newest[5] < newest[-1]
    with pytest.raises(AssertionError):
        assert_equal(once[:-1] + once[:1], once)


@pytest.mark.parametrize("name", ON_DEVICE)
def test_an_op_has_arguments_that_it_changes(name: str) -> None:
    before, expected, got = (moved(arguments(name), "cpu") for _ in range(3))
    getattr(REFERENCE, name)(*expected)
    getattr(load_backend("cpu"), name)(*got)
    assert_equal_arguments(got, expected)
    with pytest.raises(AssertionError):
        assert_equal_arguments(before, expected)


@pytest.mark.parametrize("is_weighed", [True, False])
def test_a_digest_of_draws_shows_every_one(is_weighed: bool) -> None:
    cpu = load_backend("cpu")
    found = [Draws(ops, "cpu", 40, is_weighed) for ops in (REFERENCE, cpu, cpu)]
    for _ in range(3):
        for draws in found:
            draws.draw()
    assert len({int(draws.digest) for draws in found}) == 1
    assert len(found[0].weights) == (40 if is_weighed else 0)
    stale = found[2]
    stale.records[7, 3] += 1
    stale.digest.add_(stale.sum() - found[1].sum())
    for draws in found:
        draws.draw()
    assert int(found[0].digest) == int(found[1].digest) != int(stale.digest)
