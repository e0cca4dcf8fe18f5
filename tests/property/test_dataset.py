"""What is written or ingested is read back, bit for bit; parts together are the whole."""

import tempfile
from pathlib import Path

import h5py
import numpy as np
from gear_support import write_dataset
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_gear.data.dataset import Dataset
from deepspeed_gear.data.dataset_parts import write_parts
from deepspeed_gear.data.dataset_writer import DatasetWriter
from deepspeed_gear.data.ingest import ingest
from deepspeed_gear.distributed.shard_placement import non_empty, shard_of_node, shards_of
from deepspeed_gear.ops import load_backend
from deepspeed_gear.ops.records import Slot
from deepspeed_gear.schema import DTYPES, Column, Schema
from deepspeed_gear.store.memory_layout import RunIdentity
from deepspeed_gear.store.records import Control
from deepspeed_gear.store.table import Table
from deepspeed_gear.store.table_spec import RETURN_TO_GO, Shard, TableSpec

SHAPES = st.lists(st.integers(1, 4), max_size=3).map(tuple)
LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=8)
ENDS = st.sampled_from(["terminals", "timeouts", "both"])


@st.composite
def schemas(draw: st.DrawFn) -> Schema:
    rows = draw(st.lists(st.sampled_from(["T", "T+1", "1"]), max_size=4))
    return Schema(
        [
            Column(f"c{i}", draw(st.sampled_from(list(DTYPES))), draw(SHAPES), rows=kind)
            for i, kind in enumerate([draw(st.sampled_from(["T", "T+1"])), *rows])
        ]
    )


@given(schema=schemas(), lengths=LENGTHS, seed=st.integers(0, 2**32))
@settings(max_examples=25)
def test_any_schema_round_trips(schema: Schema, lengths: list[int], seed: int) -> None:
    random = np.random.default_rng(seed)
    schema = schema.allowing_nan()

    def make(column: Column, length: int) -> np.ndarray:
        rows = {"T": (length,), "T+1": (length + 1,), "1": ()}[column.rows]
        raw = np.frombuffer(
            random.bytes(int(np.prod(rows, dtype=int)) * column.row_bytes), np.uint8
        )
        if column.dtype == "bool":
            raw = raw & 1
        return raw.view(column.numpy_dtype).reshape((*rows, *column.shape))

    written = [{column.name: make(column, length) for column in schema} for length in lengths]
    with tempfile.TemporaryDirectory() as folder:
        # Random bits hold NaNs of every kind, which must come back as they are.
        with DatasetWriter(Path(folder) / "set", schema) as writer:
            for trajectory in written:
                writer.add(trajectory)
        dataset = Dataset.open(Path(folder) / "set")
        dataset.verify()
        assert dataset.schema == schema
        assert dataset.lengths.tolist() == lengths
        for i, trajectory in enumerate(written):
            for name, found in dataset.trajectory(i).items():
                assert found.dtype == trajectory[name].dtype
                assert found.shape == trajectory[name].shape
                assert found.tobytes() == trajectory[name].tobytes()


@given(lengths=LENGTHS, seed=st.integers(0, 2**32), data=st.data())
@settings(max_examples=25)
def test_any_d4rl_file_round_trips(lengths: list[int], seed: int, data: st.DataObject) -> None:
    random = np.random.default_rng(seed)
    total = sum(lengths)
    last = np.cumsum(lengths) - 1
    ends = data.draw(st.lists(ENDS, min_size=len(lengths), max_size=len(lengths)))
    trailing = data.draw(st.booleans())
    flags = {key: np.zeros(total, bool) for key in ("terminals", "timeouts")}
    for key, flag in flags.items():
        flag[last] = [end in (key, "both") for end in ends]
    if trailing:
        flags["terminals"][-1] = flags["timeouts"][-1] = False
    states = [random.normal(size=(length + 1, 3)) for length in lengths]
    actions = random.normal(size=(total, 2))
    rewards = random.normal(size=total)
    chunks = data.draw(st.one_of(st.none(), st.integers(1, total)))
    with tempfile.TemporaryDirectory() as folder:
        with h5py.File(Path(folder) / "a.hdf5", "w") as file:
            arrays = {
                "observations": np.concatenate([state[:-1] for state in states]),
                "next_observations": np.concatenate([state[1:] for state in states]),
                "actions": actions,
                "rewards": rewards,
                **flags,
            }
            for key, value in arrays.items():
                file.create_dataset(key, data=value, chunks=chunks and (chunks, *value.shape[1:]))
        dataset = ingest([Path(folder) / "a.hdf5"], Path(folder) / "set")
        assert dataset.lengths.tolist() == lengths
        for i, state in enumerate(states):
            rows = slice(last[i] + 1 - lengths[i], last[i] + 1)
            trajectory = dataset.trajectory(i)
            np.testing.assert_array_equal(trajectory["observation"], state)
            np.testing.assert_array_equal(trajectory["action"], actions[rows])
            np.testing.assert_array_equal(trajectory["reward"], rewards[rows])
            fragment = trailing and i == len(lengths) - 1
            assert trajectory["terminated"].tolist() == flags["terminals"][rows].tolist()
            truncated = flags["timeouts"][rows].tolist()
            assert trajectory["truncated"].tolist() == (
                [*truncated[:-1], True] if fragment else truncated
            )
            np.testing.assert_allclose(
                trajectory["return"], rewards[rows].sum(), rtol=1e-12, atol=1e-12
            )


# ---- parts: any bounds, and the tables of shards are slices of its table -------------------------


@given(lengths=LENGTHS, count=st.integers(1, 9))
def test_bounds_of_parts(lengths: list[int], count: int) -> None:
    bounds = shards_of(np.array(lengths), count)
    if count <= len(lengths):
        parts = non_empty(bounds)
        assert (parts[0], parts[-1]) == (0, len(lengths))
        assert (np.diff(parts) >= 1).all()
        if (np.diff(bounds) >= 1).all():
            assert parts.tolist() == bounds.tolist()
    shards = shard_of_node([None] * count, bounds)
    assert [shard.end - shard.first for shard in shards] == np.diff(bounds).tolist()


@given(lengths=LENGTHS, data=st.data())
@settings(max_examples=20)
def test_parts_and_shards_of_any_bounds(lengths: list[int], data: st.DataObject) -> None:
    inner = data.draw(st.sets(st.integers(1, max(1, len(lengths) - 1)), max_size=len(lengths) - 1))
    bounds = np.array([0, *sorted(inner), len(lengths)])
    in_memory = data.draw(st.booleans())
    arrivals = data.draw(st.sampled_from([(0, 0), (3, 2)]))
    with tempfile.TemporaryDirectory() as folder:
        whole = Dataset.open(write_dataset(Path(folder) / "whole", lengths))
        parts = write_parts(whole, Path(folder) / "out", bounds)
        for name, column in whole.columns.items():
            assert (
                np.concatenate([part.columns[name] for part in parts]).tobytes() == column.tobytes()
            )
        shards = shard_of_node([part.part for part in parts], bounds)
        assert shards == shard_of_node([None] * len(parts), bounds)
        everything: dict[str, list[np.ndarray]] = {
            name: [] for name in (*whole.schema.names, RETURN_TO_GO)
        }
        for shard, part in zip(shards, parts, strict=True):
            of_whole, of_part = (
                rows_of(dataset, shard, in_memory, arrivals) for dataset in (whole, part)
            )
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
    spec = TableSpec("main", dataset.schema, *sizes)
    ops = load_backend("cpu")
    table = Table.create(spec, [], {}, RunIdentity("0" * 32), ops, 10.0)
    try:
        ids = np.arange(shard.first, shard.end)
        assert table.control[Control.NEXT_ID] == dataset.num_trajectories_of_whole
        assert table.slots[:, Slot.ID].tolist() == ids.tolist()
        assert table.slots_of(ids).tolist() == list(range(len(ids)))
        return {name: table.columns[name].copy() for name in (*dataset.schema.names, RETURN_TO_GO)}
    finally:
        table.close()
