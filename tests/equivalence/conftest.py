"""Both backends, and what the tests compare them with."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from deepspeed_gear.ops import Ops, load_backend


@pytest.fixture(scope="session")
def reference() -> Ops:
    return load_backend("reference")


@pytest.fixture(scope="session")
def native() -> Ops:
    return load_backend("cpu")


@pytest.fixture(scope="session")
def same_bits() -> Callable[[Tensor, Tensor], bool]:
    """Compare every bit: NaNs by their payload, and 0.0 differs from -0.0."""

    def compare(a: Tensor, b: Tensor) -> bool:
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bytes(a), _bytes(b))

    return compare


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().reshape(-1).view(torch.uint8)
