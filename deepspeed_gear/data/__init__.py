"""Data sets on disk: reading, writing, splits, parts and statistics."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deepspeed_gear.data.dataset import Dataset, register_ingest
from deepspeed_gear.schema import Schema


def _ingest_rows(
    rows: Any, dest: str | Path, schema: Schema | None, options: Mapping[str, Any]
) -> Dataset:
    # Imported on first use: its readers import h5py, which ranks and actors do without.
    from deepspeed_gear.data.ingest import ingest_rows

    return ingest_rows(rows, dest, schema, options)


register_ingest(_ingest_rows)
