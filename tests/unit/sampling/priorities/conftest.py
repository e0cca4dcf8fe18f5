"""Stores whose items have priorities."""

from typing import Any

import pytest
from priority_cases import LENGTHS
from store_support import StoreScene, priority_rule, stream_spec


@pytest.fixture
def scenes(scenes: Any) -> Any:
    def make(
        *, unit: str = "step", lengths: Any = LENGTHS, sizes: Any = None, **options: Any
    ) -> StoreScene:
        spec = {
            key: options.pop(key)
            for key in ("batch", "anchors", "split", "depth")
            if key in options
        }
        spec = stream_spec(unit=unit, priorities=priority_rule(**options), **spec)
        made: StoreScene = scenes(spec, lengths=lengths, **(sizes or {}))
        return made

    return make
