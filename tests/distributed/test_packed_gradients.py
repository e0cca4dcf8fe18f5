"""The weights after a packed step are those of one process without packs, for each kind of training.

One launch for each number of ranks. GEAR_LONG_TESTS=1 trains every loss with every budget.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from packed_cases import BUDGETS, KINDS, LOSSES, cases_of
from process_support import run_ranks

pytest.importorskip("transformers", reason="the model is transformers' Qwen2")

EVERY = os.environ.get("GEAR_LONG_TESTS") == "1"
# Of the largest gradient: float32 sums of about 700 tokens in another order, 7e-7 at most in all long cases.
BOUND = 2e-6

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], list[dict[str, Any]]]:
    """Return a function: what each rank of a world has found."""
    known: dict[int, list[dict[str, Any]]] = {}

    def found(world: int) -> list[dict[str, Any]]:
        if world not in known:
            known[world] = []  # a launch that fails is not repeated
            out: Path = tmp_path_factory.mktemp(f"world{world}")
            task = {"cases": cases_of(world, EVERY), "out": str(out)}
            quiet = {"PYTHONWARNINGS": "ignore::FutureWarning"}  # of each of DeepSpeed's collectives
            run_ranks("packed_gradients.py", world, json.dumps(task), timeout_s=800.0, **quiet)
            known[world] = [json.loads((out / f"{rank}.json").read_text()) for rank in range(world)]
        return known[world]

    return found


def test_every_loss_and_budget_is_among_the_cases() -> None:
    for world in KINDS:
        cases = [case for of_kind in cases_of(world, EVERY).values() for case in of_kind]
        assert {loss for loss, _ in cases} == set(LOSSES)
        assert {tokens for _, tokens in cases} == set(BUDGETS)


@pytest.mark.parametrize(("world", "kind"), [(world, kind) for world in KINDS for kind in KINDS[world]])
def test_packed_steps_are_those_of_one_process(
    world: int, kind: str, outcomes: Callable[[int], list[dict[str, Any]]]
) -> None:
    of_ranks = outcomes(world)
    assert len(of_ranks) == world, "the launch failed"
    of_ranks = [found[kind] for found in of_ranks]
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
