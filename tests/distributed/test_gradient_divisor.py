"""What frameworks divide gradients by: weights change by the gradient of the sum of all ranks' losses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gradient_cases import CASES

FLOAT32 = 1e-6  # of rounding, in sums of up to 12 gradients and in the weights; eps is 1.2e-7

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def outcomes(
    tmp_path_factory: pytest.TempPathFactory, deepspeed_run: Callable[..., str]
) -> Callable[[int], list[dict[str, Any]]]:
    """Return a function: what each rank of a world has found; one launch a world."""
    known: dict[int, list[dict[str, Any]]] = {}

    def found(world: int) -> list[dict[str, Any]]:
        if world not in known:
            known[world] = []  # a launch that fails is not repeated
            out: Path = tmp_path_factory.mktemp(f"world{world}")
            deepspeed_run("gradient_divisor.py", world, {"cases": CASES[world], "out": str(out)})
            known[world] = [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(world)]
        return known[world]

    return found


@pytest.mark.parametrize(("world", "name"), [(world, name) for world in CASES for name in CASES[world]])
def test_the_sum_of_all_losses_is_trained(
    world: int, name: str, outcomes: Callable[[int], list[dict[str, Any]]]
) -> None:
    """Each rank calls backward three times with losses of unequal numbers of weighted tokens."""
    case = CASES[world][name]
    of_ranks = outcomes(world)
    assert len(of_ranks) == world, "the launch failed"
    for rank, found in enumerate(of_ranks):
        if isinstance(case["divisor"], str):
            assert case["divisor"] in found[name].get("refused", ""), (rank, found[name])
        else:
            assert found[name].get("divisor") == case["divisor"], (rank, found[name])
            assert found[name]["error"] <= case.get("error", FLOAT32), (rank, found[name])
