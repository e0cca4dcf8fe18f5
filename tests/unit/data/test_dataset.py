"""The on-disk data set: what the writer takes and leaves behind, and that NumPy alone reads it."""

import ast
import gc
import json
import os
import pickle
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deepspeed_gear.data.dataset import Dataset
from deepspeed_gear.data.dataset_files import npy_header
from deepspeed_gear.data.dataset_writer import DatasetWriter
from deepspeed_gear.data.statistics import dataset_statistics
from deepspeed_gear.errors import ConfigError, DataError
from deepspeed_gear.schema import DTYPES, Column, Schema

SCHEMA = Schema(
    [
        Column("observation", "float32", (2, 3), "observation", "T+1"),
        Column("action", "bfloat16", (4,), "action"),
        Column("done", "bool", role="terminated"),
        Column("task", "int64", (2,), rows="1"),
        Column("return", "float64", role="return", rows="1"),
    ]
)


def trajectory(length: int, schema: Schema = SCHEMA) -> dict[str, np.ndarray]:
    random = np.random.default_rng(length)
    result = {}
    for column in schema:
        rows = {"T": (length,), "T+1": (length + 1,), "1": ()}[column.rows]
        values = random.integers(0, 100, (*rows, *column.shape))
        result[column.name] = np.asarray(values).astype(column.numpy_dtype)
    for column in schema.end_columns:
        result[column.name][:-1] = False
    return result


def write(folder: Path, lengths: tuple[int, ...] = (3, 1, 33), **options: Any) -> Dataset:
    with DatasetWriter(folder, SCHEMA, **options) as writer:
        for length in lengths:
            writer.add(trajectory(length))
    return Dataset.open(folder)


def test_what_is_added_is_read(tmp_path: Path) -> None:
    writer = DatasetWriter(tmp_path / "set", SCHEMA, source={"made": "here"})
    assert [writer.add(trajectory(length)) for length in (3, 1, 33)] == [0, 1, 2]
    dataset = writer.close()
    assert dataset.lengths.tolist() == [3, 1, 33]
    assert dataset.first_rows.tolist() == [0, 4, 6]
    assert (len(dataset), dataset.num_steps, dataset.num_rows) == (3, 37, 40)
    assert dataset.source == {"made": "here"}
    assert not dataset.columns["action"][[3, 5, 39]].any(), (
        "rows beyond a trajectory's steps are zero"
    )
    with pytest.raises(ValueError, match="read-only"):
        dataset.columns["action"][0] = 1
    for i in (-1, 3):
        with pytest.raises(DataError, match=rf"trajectory id must be in \[0, 3\), got {i}"):
            dataset.trajectory(i)


@pytest.mark.parametrize("binned_bytes", [0, 1 << 28], ids=["counted", "compared"])
@pytest.mark.parametrize("width", [3, 600])
def test_no_file_stays_mapped_after_it_was_written(
    tmp_path: Path, width: int, binned_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not until a garbage collection either: one that is removed then would keep its disk space."""
    monkeypatch.setattr(dataset_statistics, "MOST_BINNED_BYTES", binned_bytes)
    gc.collect()
    gc.disable()
    try:
        schema = Schema([Column("a", "float32", (width,))])
        with DatasetWriter(tmp_path / "set", schema, threads=2) as writer:
            writer.add(trajectory(9, schema))
        del writer
        assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    finally:
        gc.enable()


def test_it_is_a_data_set_of_pytorch(tmp_path: Path) -> None:
    dataset = write(tmp_path / "set")
    again = pickle.loads(pickle.dumps(dataset))
    assert again.fingerprint == dataset.fingerprint
    for i, item in enumerate(again):
        for name, value in dataset.trajectory(i).items():
            bits = value if dataset.schema[name].dtype != "bfloat16" else value.view(np.int16)
            assert item[name].dtype == dataset.schema[name].torch_dtype
            assert np.array_equal(
                item[name].view(torch.int16) if bits is not value else item[name], bits
            )
            assert value.ndim == 0 or not value.flags.writeable
            assert value.ndim == 0 or value.base is not None, "a copy"
    assert len(list(again)) == 3
    assert dataset[-1]["done"].shape == (33,)
    with pytest.raises(IndexError):
        dataset[3]
    loader = torch.utils.data.DataLoader(dataset, batch_size=2, num_workers=1, collate_fn=list)
    assert [[len(item["done"]) for item in batch] for batch in loader] == [[3, 1], [33]]


NUMPY_ONLY = """
import json, sys
import numpy as np
folder = sys.argv[1]
assert "deepspeed_gear" not in sys.modules
schema = json.load(open(folder + "/schema.json"))
extents = np.load(folder + "/extents.npy")
sums = []
for entry in schema["schema"]["columns"]:
    column = np.load(folder + "/columns/" + entry["name"] + ".npy", mmap_mode="r")
    assert column.shape[1:] == tuple(entry["shape"])
    assert len(column) == schema["num_trajectories" if entry["rows"] == "1" else "num_rows"]
    first, steps = extents[1]
    rows = {"T": slice(first, first + steps), "T+1": slice(first, first + steps + 1), "1": 1}[entry["rows"]]
    sums.append(int(column[rows].astype(np.int64).sum()))
print(json.dumps(sums))
"""


def test_numpy_alone_reads_it(
    tmp_path: Path, run_python: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    write(tmp_path / "set")
    run = run_python("-c", NUMPY_ONLY, str(tmp_path / "set"), cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout) == [
        int(values.astype(np.int64).sum()) for values in trajectory(1).values()
    ]


@pytest.mark.parametrize("dtype", DTYPES)
def test_headers_are_numpys_and_of_one_length(tmp_path: Path, dtype: str) -> None:
    stored = Column("x", dtype).numpy_dtype
    for shape in ((), (3,), (84, 84, 4), (1,) * 30):
        headers = {rows: npy_header(stored, (rows, *shape)) for rows in (0, 1, 10**6, 10**19)}
        assert len({len(header) for header in headers.values()}) == 1
        for rows, header in headers.items():
            assert len(header) % 64 == 0
            assert int.from_bytes(header[8:10], "little") == len(header) - 10
            assert ast.literal_eval(header[10:].decode())["shape"] == (rows, *shape)
        (tmp_path / "x.npy").write_bytes(headers[1] + bytes(stored.itemsize * int(np.prod(shape))))
        loaded = np.load(tmp_path / "x.npy")
        assert (loaded.dtype, loaded.shape) == (stored, (1, *shape))


CORRECT = 'correct it, or set "allow_nan" of the column (gear ingest: --allow-nan)'
WRONG: list[tuple[str, Any, str]] = [
    ("extra", [0], "must be in the schema; known are observation, action, done, task, return"),
    (
        "observation",
        np.zeros((4, 2, 2)),
        "must have shape ['T+1', 2, 3], got [4, 2, 2]; the schema has float32[2, 3], rows T+1",
    ),
    ("observation", np.full((4, 2, 3), np.nan), f"must be finite, got 'nan at step 0'; {CORRECT}"),
    (
        "action",
        np.full((3, 4), 0xFF80, np.uint16),
        f"must be finite, got '-inf at step 0'; {CORRECT}",
    ),
    ("return", np.array(np.nan), f"must be finite, got nan; {CORRECT}"),
]


def test_a_wrong_trajectory_changes_nothing(tmp_path: Path) -> None:
    """What else is wrong: tests/unit/store/test_table.py."""
    writer = DatasetWriter(tmp_path / "set", SCHEMA)
    writer.add(trajectory(3))
    for column, values, text in WRONG:
        with pytest.raises(DataError) as caught:
            writer.add({**trajectory(3), column: values})
        assert str(caught.value) == f"trajectory 1: column {column} {text}"
    writer.add(trajectory(1))
    assert writer.close().fingerprint == write(tmp_path / "same", (3, 1)).fingerprint
    with pytest.raises(DataError, match="source must be JSON, without NaN and infinities"):
        DatasetWriter(tmp_path / "new", SCHEMA, source={"scale": float("nan")})


def test_a_data_set_has_training_data(tmp_path: Path) -> None:
    rule = "must get at least one trajectory, got 0; an empty data set is not written"
    with pytest.raises(DataError, match=rule):
        DatasetWriter(tmp_path / "set", SCHEMA).close()
    assert os.listdir(tmp_path) == []
    writer = DatasetWriter(tmp_path / "set", SCHEMA, split={"eval": 1 - 2**-53})
    writer.add(trajectory(1))
    with pytest.raises(
        DataError, match="split must leave at least one of 1 trajectories for training"
    ):
        writer.close()
    assert os.listdir(tmp_path) == []
    with pytest.raises(ConfigError, match=r"split.train must name a held-out part"):
        DatasetWriter(tmp_path / "set", SCHEMA, split={"train": 0.5})


def test_an_exception_leaves_nothing_and_two_writers_do_not_meet(tmp_path: Path) -> None:
    writer = DatasetWriter(tmp_path / "set", SCHEMA)
    with pytest.raises(
        DataError, match="must have one writer at a time; wait for the other ingest"
    ):
        DatasetWriter(tmp_path / "set", SCHEMA)
    writer.add(trajectory(1))
    assert os.listdir(tmp_path) == ["set.partial"]
    with pytest.raises(DataError, match="column observation must be in every trajectory"), writer:
        writer.add({})
    assert os.listdir(tmp_path) == []
    with pytest.raises(DataError, match="must be open to be written"):
        writer.add(trajectory(1))
    with pytest.raises(DataError, match="must be closed once only"):
        writer.close()


def test_what_is_there_is_not_replaced_by_accident(tmp_path: Path) -> None:
    dest = tmp_path / "set"
    first = write(dest)
    rule = (
        r"set must not exist yet; choose another place, overwrite it \(--overwrite\) or "
        r"append to it \("
    )
    with pytest.raises(DataError, match=rule):
        write(dest)
    second = write(dest, (5,), overwrite=True)
    assert second.fingerprint != first.fingerprint
    np.testing.assert_array_equal(first.trajectory(0)["done"], trajectory(3)["done"])
    assert sorted(os.listdir(dest)) == ["columns", "extents.npy", "schema.json", "stats.json"]
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").touch()
    with pytest.raises(
        DataError, match="must be a gear data set to be overwritten; choose another place"
    ):
        write(tmp_path / "home", overwrite=True)
    (tmp_path / "mine.partial").mkdir()
    (tmp_path / "mine.partial" / "thesis.txt").touch()
    rule = "must not exist, or be what an interrupted ingest left; move it away"
    with pytest.raises(DataError, match=rule):
        write(tmp_path / "mine")
    assert (tmp_path / "mine.partial" / "thesis.txt").exists()


def test_a_column_may_have_the_name_of_another_file(tmp_path: Path) -> None:
    with DatasetWriter(tmp_path / "set", Schema([Column("extents", "uint8", (1000,))])) as writer:
        writer.add({"extents": np.zeros((300, 1000), np.uint8)})
    Dataset.open(tmp_path / "set").verify()


def test_an_unwritable_place_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        DataError, match="file/set must be writable, got 'Not a directory'; check the path"
    ):
        DatasetWriter(tmp_path / "file" / "set", SCHEMA)
