"""Exports: every format is read back bit for bit, by gear ingest and by the programs that it is
for.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gear_support import SCHEMA, config_of, run_command, trajectory, write_dataset
from store_support import killed_at

from deepspeed_gear import Column, DatasetWriter, Replay, Schema
from deepspeed_gear.cli import export as command
from deepspeed_gear.data.dataset import Dataset
from deepspeed_gear.data.export import FORMATS, export
from deepspeed_gear.data.ingest import ingest, open_source
from deepspeed_gear.data.ingest.output_columns import LENGTH, RETURN
from deepspeed_gear.errors import ConfigError, DataError
from deepspeed_gear.schema import DTYPES, FLOATING

EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "data"
SUFFIX = {"minari": "", "parquet": ".parquet", "jsonl": "", "npz": ".npz"}
Maker = Callable[..., Any]


def there_and_back(dataset: Dataset, folder: Path, format: str, **options: Any) -> Dataset:
    made = folder / f"made-{format}{SUFFIX[format]}"
    assert run_command(command, str(dataset.path), str(made), "--format", format) == 0
    assert sorted(path.name for path in folder.glob("made-*")) == [made.name]
    return ingest([made], folder / f"read-{format}", split=dataset.split, **options)


def orders(columns: list[Column]) -> list[list[Column]]:
    """Return the columns as given, reversed, and with values of a trajectory first."""
    return [
        columns,
        columns[::-1],
        sorted(columns, key=lambda column: (column.rows != "1", column.name)),
    ]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("derived", "order"), [((), 0), ((LENGTH,), 1), ((RETURN, LENGTH), 2), ((LENGTH, RETURN), 0)]
)
def test_columns_come_back_in_their_order(
    tmp_path: Path, format: str, derived: tuple[Column, ...], order: int
) -> None:
    """With the derived columns that the data set has, at their places, and no others; allow_nan
    stays.
    """
    rewards = [Column("reward", "float32", role="reward", allow_nan=True)]
    if format != "minari" and RETURN not in derived:
        rewards = []  # and no rule is asked for
    columns = [
        Column("observation.z", "float32", (2,), "observation", "T+1"),
        Column("observation.a", "int64", (), "observation", "T+1"),
        Column("action", "float64", (1,), "action", allow_nan=True),
        *rewards,
        Column("truncated", "bool", role="truncated"),
        Column("terminated", "bool", role="terminated"),
        Column("infos.x", "int8"),
        Column("seed", "int64", rows="1"),
        *derived,
    ]
    schema = Schema(orders(columns)[order])
    some = 1.5 if format == "jsonl" else np.nan  # which JSON does not hold
    with DatasetWriter(tmp_path / "set", schema) as writer:
        for steps in (2, 3):
            given: dict[str, Any] = {
                "observation.z": np.ones((steps + 1, 2)),
                "reward": np.arange(steps),
            }
            given |= {"observation.a": range(steps + 1), "action": np.full((steps, 1), some)}
            given |= {
                "truncated": np.arange(steps) == steps - 1,
                "terminated": np.zeros(steps, bool),
            }
            given |= {"infos.x": np.arange(steps), "seed": steps, "length": steps}
            given["return"] = given["reward"].sum()
            writer.add({name: given[name] for name in schema.names})
    dataset = Dataset.open(tmp_path / "set")
    assert there_and_back(dataset, tmp_path, format).fingerprint == dataset.fingerprint
    made = tmp_path / f"made-{format}{SUFFIX[format]}"
    grown = ingest([made], dataset.path, append=True)
    assert (len(grown), grown.schema.names) == (4, (*schema.names, "source"))
    if format != "minari":
        assert there_and_back(grown, tmp_path / "set", format).fingerprint == grown.fingerprint
    if not rewards:
        ruled = ingest([made], tmp_path / "ruled", reward="each=1").schema
        assert ("return" in ruled, "length" in ruled) == (True, LENGTH in derived)


def check_same(read: Dataset, dataset: Dataset) -> None:
    assert {c.name: c for c in read.schema} == {c.name: c for c in dataset.schema}
    assert read.lengths.tolist() == dataset.lengths.tolist()
    for column in dataset.schema:
        assert read.digest_of(column) == dataset.digest_of(column), column.name


@pytest.mark.parametrize("format", FORMATS)
def test_ingested_data_come_back(tmp_path: Path, minari: Maker, format: str) -> None:
    """Of several sources the column `source` is not one of Minari's."""
    sources = [EXAMPLES / "hopper_expert.hdf5", EXAMPLES / "hopper_medium.hdf5"]
    dataset = ingest(
        sources[: 1 if format in ("minari", "jsonl") else 2], tmp_path / "set", split={"eval": 0.2}
    )
    read = there_and_back(dataset, tmp_path, format)
    check_same(read, dataset)
    assert read.fingerprint == dataset.fingerprint
    infos = {
        "infos": lambda n: {"pos": np.arange(n + 1.0), "in": {"flag": np.ones((n, 2), np.int8)}}
    }
    minari(tmp_path / "min" / "data", lengths=(3, 1, 5), **infos)
    (tmp_path / format).mkdir()
    dataset = ingest([tmp_path / "min"], tmp_path / "min-set")
    assert there_and_back(dataset, tmp_path / format, format).fingerprint == dataset.fingerprint


@pytest.mark.parametrize("format", ["parquet", "jsonl", "npz"])
@pytest.mark.parametrize("dtype", [*DTYPES, "bytes", "json"])
def test_every_dtype_comes_back(tmp_path: Path, format: str, dtype: str) -> None:
    is_opaque = dtype in ("bytes", "json")
    random = np.random.default_rng(3)
    columns = (
        [Column("value", dtype, rows="1", max_bytes=60)]
        if is_opaque
        else [
            Column("x.cube", dtype, (2, 3, 1), rows="T+1", allow_nan=dtype in FLOATING),
            Column("flat", dtype, ()),
            Column("once", dtype, (3,), rows="1"),
        ]
    )
    schema = Schema([*columns, Column("reward", "float32", (), "reward"), RETURN, LENGTH])
    values = (
        [b"\xc3\xa4\x00", b"", "é\n".encode()]
        if dtype == "bytes"
        else [{"a": [1, 2.5, None]}, None, "é\u2028"]
    )
    with DatasetWriter(tmp_path / "set", schema) as writer:
        for i, steps in enumerate((3, 1, 7)):
            rewards = random.standard_normal(steps).astype(np.float32)
            given: dict[str, Any] = {
                "reward": rewards,
                "return": rewards.astype(np.float64).sum(),
                "length": steps,
            }
            given |= {"value": values[i]} if is_opaque else {}
            for column in () if is_opaque else columns:
                shape = (*{"T": (steps,), "T+1": (steps + 1,), "1": ()}[column.rows], *column.shape)
                bits = random.bytes(int(np.prod(shape)) * column.numpy_dtype.itemsize)
                array = np.frombuffer(bits, column.numpy_dtype).reshape(shape).copy()
                if dtype == "bool":
                    array = random.integers(0, 2, shape).astype(bool)
                finite = np.isfinite(array) if dtype != "bfloat16" else (array & 0x7F80) != 0x7F80
                if format == "jsonl" or not column.allow_nan:
                    array[~finite] = 0
                given[column.name] = array
            writer.add(given)
    dataset = Dataset.open(tmp_path / "set")
    assert there_and_back(dataset, tmp_path, format).fingerprint == dataset.fingerprint


LOADS = """
import sys, json, numpy as np
from minari import MinariDataset
data = MinariDataset(sys.argv[1])
episodes = list(data.iterate_episodes())
print(json.dumps([len(episodes), data.total_steps, str(data.observation_space), str(data.action_space),
    float(sum(e.rewards.sum() for e in episodes)), len(episodes[1].observations)]))
"""


def test_returns_of_parts_are_those_that_ingest_derives(tmp_path: Path) -> None:
    """To the last bit, so that what was split by its flags can be exported."""
    random = np.random.default_rng(4)
    flags = np.arange(9010) == 8999
    rewards = random.standard_normal(9000) * 10 ** random.uniform(-8, 8, 9000)
    given = {"reward": np.append(rewards, np.ones(10)).astype(np.float32), "terminated": flags}
    columns = [
        Column("reward", "float32", (), "reward"),
        Column("terminated", "bool", (), "terminated"),
    ]
    with DatasetWriter(tmp_path / "set", Schema([*columns, RETURN, LENGTH])) as writer:
        writer.add({**given, "return": 0, "length": 0}, split_by_flags=True)
    dataset = Dataset.open(tmp_path / "set")
    check_same(there_and_back(dataset, tmp_path, "npz"), dataset)


def test_other_programs_read_them(tmp_path: Path, minari: Maker) -> None:
    minari(tmp_path / "a" / "data", lengths=(3, 1, 5))
    dataset = ingest([tmp_path / "a"], tmp_path / "set")
    for format in FORMATS:
        export(
            map(dataset.trajectory, range(3)),
            dataset.schema,
            tmp_path / f"made{SUFFIX[format] or format}",
            format,
        )
    done = subprocess.run(
        [sys.executable, "-c", LOADS, tmp_path / "mademinari" / "data"],
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout)
    total = float(dataset.columns["reward"].sum())
    assert found[:2] == [3, 9]
    assert found[2] == "Box(-inf, inf, (2,), float64)"
    assert found[3].startswith("Discrete(")
    assert found[4:] == [pytest.approx(total), 2]
    pyarrow = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.read_table(tmp_path / "made.parquet").to_pydict()
    assert table["reward"] == [dataset.trajectory(i)["reward"].tolist() for i in range(3)]
    lines = (tmp_path / "madejsonl" / "trajectories.jsonl").read_text().splitlines()
    assert json.loads(lines[2])["observation"] == dataset.trajectory(2)["observation"].tolist()
    with np.load(tmp_path / "made.npz", allow_pickle=False) as arrays:
        assert arrays["gear_lengths"].tolist() == [3, 1, 5]
        assert arrays["observation"].shape == (12, 2)


def test_saved_and_living_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    late = Schema([*SCHEMA, Column("verdict", "json", rows="1", late=True, max_bytes=20)])
    table = {"capacity_steps": 60, "capacity_trajectories": 9, "remove": "fifo", "max_length": 20}
    with Replay(config_of(tables={"main": table}, batch_size=2), schemas={"main": late}) as replay:
        ids = [replay.add(trajectory(number, 3 + number)) for number in range(9)]
        for number in ids[4:-1]:
            replay.fill(number, verdict=[number])
        held = [number for number in ids[4:-1] if replay.read([number])]
        replay.save(tmp_path / "save")
        child = ["--living", str(os.getpid())]
        for given in ([str(tmp_path / "save")], child):
            dest = str(tmp_path / f"out-{len(given)}")
            assert run_command(command, *given, dest, "--format", "jsonl") == 0
            assert "lack late columns" in capsys.readouterr().err
            read = ingest([dest], dest + "-read")
            assert [read.trajectory(i)["verdict"] for i in range(len(read))] == [
                [number] for number in held
            ]
            for i, number in enumerate(held):
                for name, rows in trajectory(number, 3 + number).items():
                    np.testing.assert_array_equal(read.trajectory(i)[name], rows)
        with pytest.raises(
            ConfigError, match="--table must name a table that holds rows, got 'mian'"
        ):
            run_command(command, *child, str(tmp_path / "x"), "--format", "npz", "--table", "mian")


def test_what_is_refused_leaves_nothing(tmp_path: Path) -> None:
    dataset = Dataset.open(write_dataset(tmp_path / "set", [2, 3]))
    source = str(dataset.path)
    cases = [
        (
            "minari",
            [],
            "column task must be one that Minari's layout holds exactly, got 'int64, role "
            "other, rows 1'",
        ),
        ("npz", ["--columns", "nothing"], "--columns must match an optional column"),
    ]
    for format, options, text in cases:
        with pytest.raises(DataError, match=text):
            run_command(command, source, str(tmp_path / "out"), "--format", format, *options)
    with pytest.raises(ConfigError, match="--table must be left out for a data set, got 'main'"):
        run_command(command, source, str(tmp_path / "out"), "--format", "npz", "--table", "main")
    assert run_command(command, source, str(tmp_path / "a.npz"), "--format", "npz") == 0
    content = (tmp_path / "a.npz").read_bytes()
    (tmp_path / "a.npz").write_bytes(content.replace(b"\x93NUMPY", b"\x93NUMPX", 1))
    with pytest.raises(DataError, match=r"a.npz must be as gear export wrote it, got .*CRC"):
        ingest(tmp_path / "a.npz", tmp_path / "out")
    (tmp_path / "a.npz").unlink()
    (tmp_path / "there.npz").write_text("mine")
    with pytest.raises(
        DataError, match=r"there.npz must not exist yet; choose another place, or overwrite"
    ):
        run_command(command, source, str(tmp_path / "there.npz"), "--format", "npz")
    with pytest.raises(DataError, match="must be of the format minari to be overwritten"):
        run_command(
            command, source, source, "--format", "minari", "--columns", "code", "--overwrite"
        )
    assert sorted(os.listdir(tmp_path)) == ["set", "there.npz"]
    assert (
        run_command(command, source, str(tmp_path / "m"), "--format", "minari", "--columns", "code")
        == 0
    )
    assert (
        run_command(
            command,
            source,
            str(tmp_path / "m"),
            "--format",
            "minari",
            "--columns",
            "",
            "--overwrite",
        )
        == 0
    )
    assert "code" not in [c.name for c in open_source(tmp_path / "m").columns]


@pytest.mark.parametrize("format", ["parquet", "jsonl"])
def test_a_kill_leaves_the_old_or_the_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str
) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)
    dest = tmp_path / "made.parquet"
    line = 1
    found = set()
    old, new = (
        Dataset.open(write_dataset(tmp_path / name, lengths))
        for name, lengths in (("a", [2]), ("b", [3, 1]))
    )

    def make(dataset: Dataset) -> None:
        export(
            map(dataset.trajectory, range(len(dataset))),
            dataset.schema,
            dest,
            format,
            overwrite=True,
        )

    make(old)
    while killed_at(line, lambda: make(new), ["data/export.py", "file_system.py"]):
        found.add(len(list(open_source(dest).episodes())))
        line += 11
    assert found >= {1}
    assert len(list(open_source(dest).episodes())) == 2
    make(old)
    assert sorted(os.listdir(tmp_path)) == ["a", "b", "made.parquet"]
