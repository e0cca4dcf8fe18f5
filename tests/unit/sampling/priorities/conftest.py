"""Stores whose items have priorities."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from priority_cases import LENGTHS
from store_support import StoreScene, priority_rule, stream_spec


@pytest.fixture
def scenes() -> Iterator[Any]:
    made: list[StoreScene] = []

    def make(*, unit: str = "step", lengths: Any = LENGTHS, sizes: Any = None, **options: Any) -> StoreScene:
        spec = {key: options.pop(key) for key in ("batch", "anchors", "split", "depth") if key in options}
        rule = priority_rule(**options)
        scene = StoreScene([stream_spec(unit=unit, priorities=rule, **spec)], lengths, **(sizes or {}))
        made.append(scene)
        return scene

    yield make
    for scene in made:
        scene.close()
