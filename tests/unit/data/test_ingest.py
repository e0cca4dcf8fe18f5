"""Ingest: D4RL, several sources, options, and what happens when it stops in the middle."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from gear_support import run_command
from process_support import exit_status, in_child

from deepspeed_gear import Replay
from deepspeed_gear.cli import ingest as command
from deepspeed_gear.cli import init as init_command
from deepspeed_gear.cli import inspect as inspect_command
from deepspeed_gear.data.dataset import Dataset
from deepspeed_gear.data.dataset_writer import DatasetWriter
from deepspeed_gear.data.ingest import READERS, ingest, open_source, readers, row_buffers
from deepspeed_gear.data.ingest.decoding.hdf5_arrays import RowReader, read_rows
from deepspeed_gear.data.ingest.reader import Reader
from deepspeed_gear.errors import ConfigError, DataError, SchemaError
from deepspeed_gear.schema import Column

Maker = Callable[..., Any]
EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "data"


def test_the_folder_of_readers_has_all_readers_and_nothing_else() -> None:
    folder = Path(readers.__file__).parent
    modules = {f"{readers.__name__}.{path.stem}" for path in folder.glob("*.py")}
    assert modules - {f"{readers.__name__}.__init__"} == {
        reader.__module__ for reader in READERS.values()
    }


def test_columns_and_flags_of_a_d4rl_file(tmp_path: Path, d4rl: Maker) -> None:
    d4rl(tmp_path / "a.hdf5", (2, 2, 2, 3), ("terminals", "timeouts", "both", ""))
    dataset = ingest([tmp_path / "a.hdf5"], tmp_path / "out")
    assert [(c.name, c.dtype, c.shape, c.role, c.rows) for c in dataset.schema] == [
        ("observation", "float32", (2,), "observation", "T+1"),
        ("action", "float32", (3,), "action", "T"),
        ("reward", "float32", (), "reward", "T"),
        ("terminated", "bool", (), "terminated", "T"),
        ("truncated", "bool", (), "truncated", "T"),
        ("return", "float64", (), "return", "1"),
        ("length", "int64", (), "length", "1"),
    ]
    last = [
        (bool(t["terminated"][-1]), bool(t["truncated"][-1]))
        for t in map(dataset.trajectory, range(4))
    ]
    assert last == [(True, False), (False, True), (True, True), (False, True)]
    assert dataset.columns["terminated"].sum() == 2
    assert dataset.columns["truncated"].sum() == 3
    (source,) = dataset.source["sources"]
    assert source["notes"] == ["1 episodes have no end flag: kept as truncated episodes"]


def test_next_observations_that_are_not_shifted_are_kept(
    tmp_path: Path, d4rl: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the last bit of a row differs, in any of several blocks."""
    monkeypatch.setattr("deepspeed_gear.data.ingest.decoding.hdf5_arrays.BLOCK_BYTES", 24)
    lengths = (3, 1, 4, 2, 7, 3, 1)
    arrays = d4rl(tmp_path / "a.hdf5", lengths, ("timeouts",) * 7)
    inside = sorted(set(range(sum(lengths))) - set(np.cumsum(lengths) - 1))
    for row in inside:
        changed = arrays["next_observations"].copy()
        changed[row, 1] = np.nextafter(changed[row, 1], np.float32(np.inf))
        d4rl(tmp_path / "b.hdf5", lengths, ("timeouts",) * 7, next_observations=changed)
        assert open_source(tmp_path / "b.hdf5").columns[0].rows == "T", row
    shifted, kept = (ingest([tmp_path / f"{name}.hdf5"], tmp_path / name) for name in "ab")
    assert shifted.schema["observation"].rows == "T+1"
    actions = [shifted.trajectory(i)["action"] for i in range(7)]
    np.testing.assert_array_equal(np.concatenate(actions), arrays["actions"])
    assert kept.schema["observation"].rows == kept.schema["next_observation"].rows == "T"
    assert not kept.schema.has_final_row
    np.testing.assert_array_equal(kept.columns["observation"], arrays["observations"])
    np.testing.assert_array_equal(kept.columns["next_observation"], changed)


def test_without_next_observations(tmp_path: Path, d4rl: Maker) -> None:
    """Terminated episodes repeat the last observation; others lose the step whose next one is not
    known.
    """
    ends = ("terminals", "timeouts", "timeouts", "both", "")
    arrays = d4rl(tmp_path / "a.hdf5", (3, 1, 4, 2, 2), ends, next_observations=None)
    dataset = ingest([tmp_path / "a.hdf5"], tmp_path / "out")
    assert dataset.schema["observation"].rows == "T+1"
    assert "next_observation" not in dataset.schema
    kept = [(0, 3, 2, True), (4, 7, 7, False), (8, 10, 9, True), (10, 11, 11, False)]
    assert len(dataset) == len(kept)
    for number, (low, high, last, terminated) in enumerate(kept):
        stored = dataset.trajectory(number)
        rows = arrays["observations"][[*range(low, high), last]]
        np.testing.assert_array_equal(stored["observation"], rows)
        np.testing.assert_array_equal(stored["reward"], arrays["rewards"][low:high])
        assert stored["terminated"].tolist() == [False] * (high - low - 1) + [terminated]
        assert stored["truncated"].tolist()[-1] == (not terminated or number == 2)
    source = dataset.source["sources"][0]
    assert (source["episodes"], source["steps"]) == (4, 9)
    assert "the last step of 3 episodes that do not terminate is left out" in source["notes"][1]


def test_other_arrays_become_columns(tmp_path: Path, d4rl: Maker) -> None:
    qpos = np.arange(16, dtype=np.float64).reshape(8, 2)
    extra = {
        "infos__qpos": qpos,
        "infos__goal no": np.arange(8, dtype=np.uint16),
        "version": np.float64(2),
    }
    d4rl(
        tmp_path / "a.hdf5", metadata__policy__weight=np.zeros(5), nothing=h5py.Empty("f4"), **extra
    )
    dataset = ingest(tmp_path / "a.hdf5", tmp_path / "all")
    assert dataset.schema.names[5:] == ("infos.goal_no", "infos.qpos", "return", "length")
    assert dataset.schema["infos.goal_no"].dtype == "int32"
    np.testing.assert_array_equal(
        np.concatenate([dataset.trajectory(i)["infos.qpos"] for i in range(3)]), qpos
    )
    assert (
        "version: not arrays of numbers with a row per step, left out"
        in dataset.source["sources"][0]["notes"]
    )
    chosen = ingest([tmp_path / "a.hdf5"], tmp_path / "chosen", columns=["infos.q*"])
    assert chosen.schema.names[5:] == ("infos.qpos", "return", "length")
    none = ingest([tmp_path / "a.hdf5"], tmp_path / "none", columns=[])
    assert none.schema.names[5:] == ("return", "length")
    with (
        open_source(tmp_path / "a.hdf5") as reader,
        pytest.raises(ConfigError, match="given to open_source"),
    ):
        ingest(reader, tmp_path / "no", columns=["infos.q*"])


def test_dtypes_of_a_source(tmp_path: Path, d4rl: Maker) -> None:
    flags = np.zeros((8, 1))
    flags[[2, 3, 7]] = 1
    d4rl(
        tmp_path / "a.hdf5",
        observations=np.arange(8, dtype=">f8"),
        next_observations=None,
        actions=np.arange(8, dtype=np.int32),
        rewards=np.arange(8).reshape(8, 1),
        terminals=flags,
        timeouts=np.zeros(8, np.uint8),
    )
    dataset = ingest([tmp_path / "a.hdf5"], tmp_path / "out")
    dtypes = "float64 int64 float64 bool bool float64 int64".split()
    assert [c.dtype for c in dataset.schema] == dtypes
    assert dataset.schema["observation"].shape == ()
    np.testing.assert_array_equal(dataset.columns["observation"], [0, 1, 2, 2, 3, 3, 4, 5, 6, 7, 7])
    assert dataset.columns["return"].tolist() == [3.0, 3.0, 22.0]


def test_several_sources_become_one_data_set_where_they_agree(tmp_path: Path, d4rl: Maker) -> None:
    d4rl(tmp_path / "a.hdf5")
    d4rl(tmp_path / "d.hdf5", (5, 2), ("terminals", ""))
    dataset = ingest(
        [tmp_path / "a.hdf5", tmp_path / "d.hdf5"], tmp_path / "both", split={"eval": 0.2}
    )
    assert dataset.columns["source"].tolist() == [0, 0, 0, 1, 1]
    assert dataset.schema["source"] == Column("source", "int64", rows="1")
    assert dataset.lengths.tolist() == [3, 1, 4, 5, 2]
    assert [source["name"] for source in dataset.source["sources"]] == ["a.hdf5", "d.hdf5"]
    assert dataset.split == {"eval": 0.2}
    with Replay({"data": str(dataset.path), "batch_size": 4}) as replay:
        assert not {"source", "origin"} & replay.sample().keys()
    d4rl(tmp_path / "b.hdf5", actions=np.zeros((8, 4), np.float32))
    d4rl(tmp_path / "c.hdf5", infos__qpos=np.zeros((8, 4), np.float32))
    a, b, c = (tmp_path / f"{name}.hdf5" for name in "abc")
    with pytest.raises(DataError) as caught:
        ingest([a, b], tmp_path / "out")
    assert str(caught.value) == (
        f"{b}: column action must be as in {a}, float32[3] with rows T, got 'float32[4] with rows "
        "T'; choose the common columns with --columns, or make a data set of each"
    )
    with pytest.raises(
        DataError, match=r"c.hdf5: column infos.qpos must be as in .*a.hdf5, absent"
    ):
        ingest([a, c], tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert len(ingest([a, c], tmp_path / "out", columns=[])) == 6


def test_the_same_source_gives_the_same_bytes(tmp_path: Path, d4rl: Maker) -> None:
    d4rl(tmp_path / "a.hdf5")
    splits: list[dict[str, float]] = [{"eval": 0.3}, {"eval": 0.3}, {}]
    made = [
        ingest([tmp_path / "a.hdf5"], tmp_path / f"{i}", split=split)
        for i, split in enumerate(splits)
    ]
    files = [path.relative_to(tmp_path / "0") for path in (tmp_path / "0").rglob("*.*")]
    assert len(files) == 10
    assert all(
        (tmp_path / "0" / file).read_bytes() == (tmp_path / "1" / file).read_bytes()
        for file in files
    )
    assert len({dataset.fingerprint for dataset in made}) == 1


def test_nan_is_allowed_by_a_flag_and_left_out_of_statistics(tmp_path: Path, d4rl: Maker) -> None:
    actions = np.ones((8, 3), np.float32)
    actions[5, 1] = np.nan
    actions[6, 2] = -np.inf
    d4rl(tmp_path / "a.hdf5", actions=actions)
    dataset = ingest([tmp_path / "a.hdf5"], tmp_path / "out", allow_nan=True)
    assert [column.name for column in dataset.schema if column.allow_nan] == [
        column.name for column in dataset.schema if column.is_floating
    ]
    statistics = dataset.statistics["action"]
    assert statistics.non_finite == 2
    assert statistics.mean.tolist() == [1, 1, 1]
    assert statistics.min.tolist() == [1, 1, 1]
    assert np.isnan(dataset.trajectory(2)["action"][1, 1])


def test_progress_is_in_bytes_with_the_time_left(
    tmp_path: Path, d4rl: Maker, capsys: pytest.CaptureFixture[str]
) -> None:
    d4rl(tmp_path / "a.hdf5")
    ingest([tmp_path / "a.hdf5"], tmp_path / "quiet")
    assert capsys.readouterr().err == ""
    dataset = ingest([tmp_path / "a.hdf5"], tmp_path / "out", progress=True, threads=1)
    num_bytes = dataset.num_steps * dataset.schema.row_bytes
    last = capsys.readouterr().err.rsplit("ingest:")[-1]
    assert f"{num_bytes:.0f}/{num_bytes:.0f}" in last
    assert "100%" in last
    assert f"B/s, {dataset.num_steps} steps" in last


@pytest.mark.parametrize("threads", [0, -1, 1.5, True])
def test_threads_are_a_positive_integer(tmp_path: Path, d4rl: Maker, threads: Any) -> None:
    d4rl(tmp_path / "a.hdf5")
    with pytest.raises(ConfigError, match="threads must be at least 1"):
        ingest([tmp_path / "a.hdf5"], tmp_path / "out", threads=threads)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("least_bytes", [1, 100, 1 << 16])
def test_row_reader_serves_any_rising_ranges(
    tmp_path: Path, least_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deepspeed_gear.data.ingest.decoding.hdf5_arrays.BLOCK_BYTES", 40)
    values = np.arange(33 * 2, dtype=np.int32).reshape(33, 2)
    reads: list[tuple[int, int]] = []

    def counted(where: str, dataset: h5py.Dataset, low: int, high: int, *into: Any) -> np.ndarray:
        reads.append((low, high))
        return read_rows(where, dataset, low, high, *into)

    monkeypatch.setattr("deepspeed_gear.data.ingest.decoding.hdf5_arrays.read_rows", counted)
    monkeypatch.setattr(row_buffers, "LEAST_BYTES", least_bytes)
    with h5py.File(tmp_path / "a.hdf5", "w") as file:
        file.create_dataset("x", data=values, chunks=(4, 1), compression="gzip")
        file["y"] = values
        for key in "xy":
            reader = RowReader(key, file[key])
            assert reader.block_rows == (4 if key == "x" else 1)
            for low, high in ((0, 1), (1, 7), (7, 7), (7, 20), (12, 13), (20, 33)):
                np.testing.assert_array_equal(reader[low:high], values[low:high])
            assert all(low % (file[key].chunks or (1,))[0] == 0 for low, _ in reads), (
                "chunks are divided"
            )
            assert reads.count((0, reader.block_rows)) == 1
            reads.clear()


def test_formats_are_found_by_content(tmp_path: Path, d4rl: Maker, minari: Maker) -> None:
    d4rl(tmp_path / "no_suffix")
    minari(tmp_path / "set" / "data")
    minari(tmp_path / "arrow" / "data", "arrow")
    assert open_source(tmp_path / "no_suffix").format == "d4rl"
    for path in ("set", "set/data", "set/data/main_data.hdf5", "arrow", "arrow/data"):
        assert open_source(tmp_path / path).format == "minari"


def test_command_line(tmp_path: Path, d4rl: Maker, capsys: pytest.CaptureFixture[str]) -> None:
    d4rl(tmp_path / "a.hdf5", ends=("terminals", "timeouts", ""), infos__x=np.zeros(8))
    source = str(tmp_path / "a.hdf5")
    dest = str(tmp_path / "out")
    assert run_command(command, source, source, dest, "--split", "eval=0.1", "--columns", "") == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"{dest}: 6 trajectories, 16 steps, ")
    num_bytes = 16 * Dataset.open(dest).schema.row_bytes
    assert f"{num_bytes}/{num_bytes}" in err
    assert "16 steps" in err
    assert f"{source}: 1 episodes have no end flag" in err
    assert Dataset.open(dest).split == {"eval": 0.1}
    assert run_command(command, source, dest, "--columns", "infos.x", "--overwrite", "--quiet") == 0
    assert capsys.readouterr().err == ""
    assert "infos.x" in Dataset.open(dest).schema


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--split", "eval"], "--split must be NAME=SHARE, got 'eval'; for example eval=0.05"),
        (
            ["--split", "a=0.1", "--split", "a=0.2"],
            "--split must give every name once, got 'a=0.2'",
        ),
        (
            ["--split", "a=1.0"],
            "split.a must name a held-out part (not train) and its share in (0, 1)",
        ),
        (
            ["--split", "a=0.5", "--split", "b=0.5"],
            "split must leave a share for training, got {'a': 0.5,",
        ),
    ],
)
def test_wrong_splits_are_refused(
    tmp_path: Path, d4rl: Maker, options: list[str], text: str
) -> None:
    d4rl(tmp_path / "a.hdf5")
    with pytest.raises(ConfigError) as caught:
        run_command(command, str(tmp_path / "a.hdf5"), str(tmp_path / "out"), *options)
    assert str(caught.value).startswith(text)
    assert os.listdir(tmp_path) == ["a.hdf5"]


def test_a_killed_ingest_leaves_nothing_that_looks_complete(tmp_path: Path, d4rl: Maker) -> None:
    d4rl(tmp_path / "a.hdf5")
    source = tmp_path / "a.hdf5"
    dest = tmp_path / "out"
    add = DatasetWriter.add_block

    def add_then_die(self: DatasetWriter, *arguments: Any, **options: Any) -> None:
        add(self, *arguments, **options)
        os.kill(os.getpid(), signal.SIGKILL)

    def run() -> None:
        DatasetWriter.add_block = add_then_die  # type: ignore[method-assign]
        ingest([source], dest)

    assert exit_status(in_child(run)) == -signal.SIGKILL
    assert sorted(os.listdir(tmp_path)) == ["a.hdf5", "out.partial"]
    for path in (dest, tmp_path / "out.partial"):
        with pytest.raises(DataError):
            Dataset.open(path)
    with pytest.raises(DataError, match="its ingest did not finish; run it again"):
        Dataset.open(dest)
    ingest([source], dest).verify()
    assert sorted(os.listdir(tmp_path)) == ["a.hdf5", "out"]
    assert sorted(os.listdir(dest)) == ["columns", "extents.npy", "schema.json", "stats.json"]


def test_the_example_data(tmp_path: Path) -> None:
    dataset = ingest(
        [EXAMPLES / "hopper_expert.hdf5", EXAMPLES / "hopper_medium.hdf5"], tmp_path / "out"
    )
    assert (len(dataset), dataset.num_steps) == (67, 40308)
    assert dataset.schema["observation"] == Column(
        "observation", "float32", (11,), "observation", "T+1"
    )
    returns = dataset.columns["return"]
    assert returns[:20].mean() == pytest.approx(3728.19, abs=0.01)
    assert returns[20:].mean() == pytest.approx(1578.99, abs=0.01)
    assert dataset.columns["terminated"].sum() == 42
    assert dataset.columns["truncated"].sum() == 25


@pytest.mark.parametrize(
    ("options", "columns"),
    [
        ({"reward": "last=2.5"}, [0.0, 0.0, 2.5]),
        ({"reward": "each=-1"}, [-1.0, -1.0, -1.0]),
        ({"role": {"infos.sc?re": "reward"}}, [1.0, 2.0, 4.0]),
        ({"reward": "none"}, None),
    ],
)
def test_rewards_of_a_source_without_any(
    tmp_path: Path,
    options: dict[str, Any],
    columns: list[float] | None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """They are a rule's or a named column's, in any dtype; without a rule nothing is made."""
    with pytest.raises(
        DataError, match=r"--reward must be given, as the source has no rewards: none .*score"
    ):
        ingest([tmp_path], tmp_path / "out", format=f"{__name__}:Demonstrations")
    assert not (tmp_path / "out").exists()
    options = {**options, "rename": {"state": "observation"}, "dtype": {"observation": "float16"}}
    dataset = ingest([tmp_path], tmp_path / "out", format=f"{__name__}:Demonstrations", **options)
    assert dataset.source["options"] == options
    assert dataset.schema["observation"] == Column(
        "observation", "float16", (1,), "observation", "T+1"
    )
    assert dataset.lengths.tolist() == dataset.columns["length"].tolist() == [3, 3]
    reward = dataset.schema.role("reward")
    if columns is None:
        assert reward is None
        assert "return" not in dataset.schema
    else:
        assert reward is not None
        assert dataset.columns[reward.name].tolist() == [*columns, 0.0] * 2  # a row of T+1
        assert dataset.columns["return"].tolist() == [sum(columns)] * 2
    run_command(inspect_command, str(tmp_path / "out"))
    assert ("return " in capsys.readouterr().out.split("columns")[0]) == (columns is not None)
    assert run_command(init_command, str(tmp_path / "out"), "--out", str(tmp_path)) == 0


class Demonstrations(Reader):
    """Two episodes of three steps without rewards and end flags."""

    format = "demonstrations"

    @classmethod
    def recognises(cls, path: Path) -> bool:
        return False

    def open(self) -> None:
        self.columns = (
            Column("state", "float64", (1,), "observation", "T+1"),
            Column("action", "float32", (2,), "action"),
            Column("infos.score", "float32"),
        )

    def episodes(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for number in range(2):
            yield (
                f"episode {number}",
                {
                    "state": np.arange(4.0)[:, None],
                    "action": np.ones((3, 2), np.float32),
                    "infos.score": np.array([1, 2, 4], np.float32),
                },
            )


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            ["--dtype", "observatio=float32"],
            "--dtype must name a column of the source, got 'observatio'; did you",
        ),
        (
            ["--role", "x=reward"],
            "--role must name a column of the source, got 'x'; known are observation, act",
        ),
        (
            ["--rename", "rewards=r"],
            "--rename must name a column of the source, got 'rewards'; did you mean 'rew",
        ),
        (["--rename", "act*=a"], "--rename must name a column of the source, got 'act*'"),
        (
            ["--rename", "action=reward"],
            "reward must not have the name of another column, or of a derived one",
        ),
        (
            ["--rename", "action=length"],
            "length must not have the name of another column, or of a derived one",
        ),
        (["--dtype", "action=float"], "column action: dtype must be one of bool"),
        (["--dtype", "action=bool"], "column action must hold values that bool can hold"),
        (["--role", "action=reward"], "schema must have at most one reward column"),
        (
            ["--role", "reward"],
            "--role must be COLUMN=ROLE, got 'reward'; for example score=reward",
        ),
        (
            ["--reward", "last=1"],
            "--reward must be for a source without rewards, got 'last=1'; the source has",
        ),
        (
            ["--role", "reward=other", "--reward", "last"],
            "--reward must be none (no column), last=VALUE (of",
        ),
        (
            ["--role", "reward=other", "--reward", "each=inf"],
            "--reward must be none (no column), last=VALUE",
        ),
        (
            ["--role", "reward=other", "--reward", "each=1"],
            "reward must not have the name of another column",
        ),
    ],
)
def test_wrong_column_options_are_refused(
    tmp_path: Path, d4rl: Maker, options: list[str], text: str
) -> None:
    d4rl(tmp_path / "a.hdf5")
    with pytest.raises((ConfigError, DataError, SchemaError)) as caught:
        run_command(command, str(tmp_path / "a.hdf5"), str(tmp_path / "out"), *options)
    assert text in str(caught.value)
    assert os.listdir(tmp_path) == ["a.hdf5"]
