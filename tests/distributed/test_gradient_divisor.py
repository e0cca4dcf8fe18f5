"""What frameworks divide gradients by: weights change by the gradient of the sum of all ranks' losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from gradient_cases import CASES

FLOAT32 = 1e-6  # of rounding, in sums of up to 12 gradients and in the weights; eps is 1.2e-7

pytestmark = pytest.mark.timeout(900)  # of the launch


@pytest.mark.parametrize(("world", "name"), [(world, name) for world in CASES for name in CASES[world]])
def test_the_sum_of_all_losses_is_trained(
    world: int, name: str, gradients: Callable[[int], list[dict[str, Any]]]
) -> None:
    """Each rank calls backward three times with losses of unequal numbers of weighted tokens."""
    case = CASES[world][name]
    for rank, of_rank in enumerate(gradients(world)):
        found = of_rank["divisors"]
        if isinstance(case["divisor"], str):
            assert case["divisor"] in found[name].get("refused", ""), (rank, found[name])
        else:
            assert found[name].get("divisor") == case["divisor"], (rank, found[name])
            assert found[name]["error"] <= case.get("error", FLOAT32), (rank, found[name])
