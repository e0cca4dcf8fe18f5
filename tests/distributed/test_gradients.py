"""Gradients of ranks: what frameworks divide them by, and those of packs beside one process without packs.

GEAR_LONG_TESTS=1 trains every loss with every budget.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gradient_cases import BUDGETS, CASES, EVERY, KINDS, LOSSES, cases_of
from process_support import run_ranks

pytest.importorskip("transformers", reason="the model of packed gradients is transformers' Qwen2")

FLOAT32 = 1e-6  # of rounding, in sums of up to 12 gradients and in the weights; eps is 1.2e-7
# Of the largest gradient: float32 sums of about 700 tokens in another order, 7e-7 at most in all long cases.
BOUND = 2e-6

pytestmark = pytest.mark.timeout(900)  # of the launch
Gradients = Callable[[int], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def gradients(tmp_path_factory: pytest.TempPathFactory) -> Gradients:
    """Return a function: what each rank of a world has found, in one launch for each number of ranks."""
    known: dict[int, list[dict[str, Any]]] = {}

    def found(world: int) -> list[dict[str, Any]]:
        if world not in known:
            known[world] = []  # a launch that fails is not repeated
            out = tmp_path_factory.mktemp(f"gradients{world}")
            task = {"packed": cases_of(world, EVERY), "divisors": CASES[world], "out": str(out)}
            quiet = {"PYTHONWARNINGS": "ignore::FutureWarning"}  # of each of DeepSpeed's collectives
            run_ranks("gradients.py", world, json.dumps(task), timeout_s=800.0, **quiet)
            known[world] = [json.loads((out / f"{rank}.json").read_text()) for rank in range(world)]
        assert len(known[world]) == world, "the launch failed"
        return known[world]

    return found


@pytest.mark.parametrize(("world", "name"), [(world, name) for world in CASES for name in CASES[world]])
def test_the_sum_of_all_losses_is_trained(world: int, name: str, gradients: Gradients) -> None:
    """Each rank calls backward three times with losses of unequal numbers of weighted tokens."""
    case = CASES[world][name]
    for rank, of_rank in enumerate(gradients(world)):
        found = of_rank["divisors"][name]
        if isinstance(case["divisor"], str):
            assert case["divisor"] in found.get("refused", ""), (rank, found)
        else:
            assert found.get("divisor") == case["divisor"], (rank, found)
            assert found["error"] <= case.get("error", FLOAT32), (rank, found)


def test_every_loss_and_budget_is_among_the_cases() -> None:
    for world in KINDS:
        cases = [case for of_kind in cases_of(world, EVERY).values() for case in of_kind]
        assert {loss for loss, _ in cases} == set(LOSSES)
        assert {tokens for _, tokens in cases} == set(BUDGETS)


@pytest.mark.parametrize(("world", "kind"), [(world, kind) for world in KINDS for kind in KINDS[world]])
def test_packed_steps_are_those_of_one_process(world: int, kind: str, gradients: Gradients) -> None:
    """Weights change by the gradient of the intended mean, so the divisor is right, too."""
    by_case = zip(*(found["packed"][kind] for found in gradients(world)), strict=True)
    for case, of_case in zip(cases_of(world, EVERY)[kind], by_case, strict=True):
        assert [(one["loss"], one["tokens"]) for one in of_case] == [case] * world
        assert {one["divisor"] for one in of_case} == {KINDS[world][kind]}
        assert all(one["deviation"] < BOUND for one in of_case), of_case
        counts = np.array([one["counts"] for one in of_case])  # [ranks, K]: equally many on each
        if case == ("token", min(BUDGETS)):
            # What each token would weigh in a mean of means of micro batches: another gradient.
            of_means = counts.sum() / (counts.size * counts[counts > 0])
            assert of_means.max() / of_means.min() > 1.2
