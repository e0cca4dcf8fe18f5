"""Packing plans: arguments, and the balance of batches like those of language models."""

import numpy as np
import pytest
import torch

from deepspeed_gear.batching.packing_plan import PackBudget, plan_packs
from deepspeed_gear.errors import DataError, GearError, ShapeError
from deepspeed_gear.ops import load_backend

OPS = load_backend("cpu").on_host()


def test_lengths_may_be_a_view_and_padding_counts() -> None:
    view = torch.tensor([[5, 99], [7, 99], [2, 99]])[:, 0]
    assert plan_packs(view, PackBudget(7), 1, OPS).num_micro_steps == 2
    lengths = torch.full((8,), 100)
    assert plan_packs(lengths, PackBudget(400), 1, OPS).num_micro_steps == 2
    assert plan_packs(lengths, PackBudget(400, multiple=128), 1, OPS).num_micro_steps == 3
    assert (
        plan_packs(torch.full((3,), 1 << 30), PackBudget(1 << 30, 0, 1), 2, OPS).num_micro_steps
        == 2
    )


@pytest.mark.parametrize(
    ("lengths", "budget", "width", "error", "text"),
    [
        (
            torch.tensor([4, 11]),
            PackBudget(10),
            2,
            DataError,
            "trajectory 1 must have at most 10 tokens",
        ),
        (
            torch.tensor([4, 0]),
            PackBudget(10),
            2,
            DataError,
            "trajectory 1 must have at least 1 token",
        ),
        (
            torch.tensor([-4, 3]),
            PackBudget(10),
            2,
            DataError,
            "trajectory 0 must have at least 1 token",
        ),
        (
            torch.tensor([385]),
            PackBudget(400, multiple=128),
            1,
            DataError,
            "at most 384 tokens, the budget",
        ),
        (
            torch.full((4,), 1 << 30),
            PackBudget(1 << 30, 0, 1),
            2,
            DataError,
            r"must be below 2\^62",
        ),
        (torch.tensor([1]), PackBudget(10), 0, ShapeError, "width must be in"),
        (torch.tensor([1]), PackBudget(10), (1 << 20) + 1, ShapeError, "width must be in"),
    ],
)
def test_wrong_arguments(
    lengths: torch.Tensor, budget: PackBudget, width: int, error: type[GearError], text: str
) -> None:
    with pytest.raises(error, match=text):
        plan_packs(lengths, budget, width, OPS)


@pytest.mark.parametrize(("count", "width", "most"), [(1024, 8, 0.002), (4096, 64, 0.005)])
@pytest.mark.parametrize("seed", range(3))
def test_language_models(count: int, width: int, most: float, seed: int) -> None:
    """As few packs as the tokens need, and micro steps in which all ranks have the same to do."""
    random = np.random.default_rng(seed)
    prompts = random.integers(100, 600, count // 8).repeat(8)
    lengths = np.minimum(prompts + np.exp(random.normal(7.6, 0.9, count)).astype(int) + 1, 12288)
    plan = plan_packs(torch.from_numpy(lengths), PackBudget(16384, 24576, 1), width, OPS)
    assert plan.num_micro_steps == -(-int(lengths.sum()) // (16384 * width))
    costs = 24576 * lengths + lengths * lengths
    pack = plan.micro_step * width + plan.rank
    of_pack = np.bincount(pack, costs, plan.num_micro_steps * width).reshape(
        plan.num_micro_steps, width
    )
    assert of_pack.max(1).sum() * width / costs.sum() - 1 <= most
    assert of_pack.sum(0).max() * width / costs.sum() - 1 <= most / 10, (
        "of a rank over all micro steps"
    )
