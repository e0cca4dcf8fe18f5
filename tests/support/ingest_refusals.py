"""Sources that ingest refuses: their errors, and that nothing of them is left."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from deepspeed_gear.data.ingest import ingest
from deepspeed_gear.errors import DataError


def refused(source: Any, dest: Path, **options: Any) -> str:
    """Return the error of an ingest, which must leave nothing behind."""
    before = sorted(os.listdir(dest.parent))
    with pytest.raises(DataError) as caught:
        ingest(source if isinstance(source, list) else [source], dest, **options)
    assert sorted(os.listdir(dest.parent)) == before
    assert caught.value.remedy
    return str(caught.value)
