"""The weights after a packed step are those of one process without packs, for each kind of training.

GEAR_LONG_TESTS=1 trains every loss with every budget.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gradient_cases import BUDGETS, EVERY, KINDS, LOSSES, cases_of

pytest.importorskip("transformers", reason="the model is transformers' Qwen2")

# Of the largest gradient: float32 sums of about 700 tokens in another order, 7e-7 at most in all long cases.
BOUND = 2e-6

pytestmark = pytest.mark.timeout(900)


def test_every_loss_and_budget_is_among_the_cases() -> None:
    for world in KINDS:
        cases = [case for of_kind in cases_of(world, EVERY).values() for case in of_kind]
        assert {loss for loss, _ in cases} == set(LOSSES)
        assert {tokens for _, tokens in cases} == set(BUDGETS)


@pytest.mark.parametrize(("world", "kind"), [(world, kind) for world in KINDS for kind in KINDS[world]])
def test_packed_steps_are_those_of_one_process(
    world: int, kind: str, gradients: Callable[[int], list[dict[str, Any]]]
) -> None:
    of_ranks = [found["packed"][kind] for found in gradients(world)]
    assert {found["model"] for found in of_ranks} == {"Qwen2ForCausalLM"}
    by_case = zip(*(found["outcomes"] for found in of_ranks), strict=True)
    for case, of_case in zip(cases_of(world, EVERY)[kind], by_case, strict=True):
        assert [(one["loss"], one["tokens"]) for one in of_case] == [case] * world
        assert all(one["deviation"] < BOUND for one in of_case), of_case
        counts = np.array([one["counts"] for one in of_case])  # [ranks, K]: equally many on each
        if case == ("token", min(BUDGETS)):
            # What each token would weigh in a mean of means of micro batches: another gradient.
            of_means = counts.sum() / (counts.size * counts[counts > 0])
            assert of_means.max() / of_means.min() > 1.2
