"""Stores with streams, without a Replay."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from store_support import StoreScene


@pytest.fixture
def scenes() -> Iterator[Any]:
    """Return what makes a scene of streams, with the arguments of `StoreScene`."""
    made: list[StoreScene] = []

    def make(*specs: Any, **options: Any) -> StoreScene:
        made.append(StoreScene(specs, **options))
        return made[-1]

    yield make
    for scene in made:
        scene.close()
