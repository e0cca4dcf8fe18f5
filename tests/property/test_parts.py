"""Any bounds: parts together are the whole, and the tables of shards are slices of its table."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from gear_support import write_dataset
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_gear.data.dataset import Dataset
from deepspeed_gear.data.dataset_writer import write_parts
from deepspeed_gear.distributed.row_exchange.exchange_plan import shards_of
from deepspeed_gear.distributed.shard_placement import non_empty, shard_of_node
from deepspeed_gear.ops import load_backend
from deepspeed_gear.ops.records import Slot
from deepspeed_gear.store.memory_layout import RunIdentity
from deepspeed_gear.store.records import Control
from deepspeed_gear.store.table import Table
from deepspeed_gear.store.table_spec import RETURN_TO_GO, Shard, TableSpec

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=8)


@given(lengths=LENGTHS, count=st.integers(1, 9))
def test_bounds_of_parts(lengths: list[int], count: int) -> None:
    bounds = shards_of(np.array(lengths), count)
    if count <= len(lengths):
        parts = non_empty(bounds)
        assert (parts[0], parts[-1]) == (0, len(lengths))
        assert (np.diff(parts) >= 1).all()
        if (np.diff(bounds) >= 1).all():
            assert parts.tolist() == bounds.tolist()
    assert [shard.end - shard.first for shard in shard_of_node([None] * count, bounds)] == list(
        np.diff(bounds)
    )


@given(lengths=LENGTHS, data=st.data())
@settings(max_examples=20)
def test_parts_and_shards_of_any_bounds(lengths: list[int], data: st.DataObject) -> None:
    inner = data.draw(st.sets(st.integers(1, max(1, len(lengths) - 1)), max_size=len(lengths) - 1))
    bounds = np.array([0, *sorted(inner), len(lengths)])
    in_memory, arrivals = data.draw(st.booleans()), data.draw(st.sampled_from([(0, 0), (3, 2)]))
    with tempfile.TemporaryDirectory() as folder:
        whole = Dataset.open(write_dataset(Path(folder) / "whole", lengths))
        parts = write_parts(whole, Path(folder) / "out", bounds)
        for name, column in whole.columns.items():
            assert np.concatenate([part.columns[name] for part in parts]).tobytes() == column.tobytes()
        shards = shard_of_node([part.part for part in parts], bounds)
        assert shards == shard_of_node([None] * len(parts), bounds)
        everything: dict[str, list[np.ndarray]] = {name: [] for name in (*whole.schema.names, RETURN_TO_GO)}
        for shard, part in zip(shards, parts, strict=True):
            of_whole, of_part = (rows_of(dataset, shard, in_memory, arrivals) for dataset in (whole, part))
            for name, rows in of_part.items():
                np.testing.assert_array_equal(rows, of_whole[name])
                everything[name].append(rows)
        wanted = rows_of(whole, Shard(0, 1, 0, len(lengths)), in_memory, (0, 0))
        for name, rows in wanted.items():
            np.testing.assert_array_equal(np.concatenate(everything[name]), rows)


def rows_of(
    dataset: Dataset, shard: Shard, in_memory: bool, arrivals: tuple[int, int]
) -> dict[str, np.ndarray]:
    """Return all that the store of a shard holds."""
    low, high = (number - dataset.first_id for number in (shard.first, shard.end))
    rows = dataset.row_of(high) - dataset.row_of(low)
    sizes = (high - low, rows, dataset, in_memory, True, 1, shard, *arrivals)
    table = Table.create(
        TableSpec("main", dataset.schema, *sizes), [], {}, RunIdentity("0" * 32), load_backend("cpu"), 10.0
    )
    try:
        ids = np.arange(shard.first, shard.end)
        assert table.control[Control.NEXT_ID] == dataset.num_trajectories_of_whole
        assert table.slots[:, Slot.ID].tolist() == ids.tolist()
        assert table.slots_of(ids).tolist() == list(range(len(ids)))
        return {name: table.columns[name].copy() for name in (*dataset.schema.names, RETURN_TO_GO)}
    finally:
        table.close()
