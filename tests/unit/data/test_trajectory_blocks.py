"""Blocks of trajectories: the data set and the errors of one trajectory after the other."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ingest_refusals import refused

from deepspeed_gear import Column, Dataset, DatasetWriter, Schema
from deepspeed_gear.cli.main import main as command
from deepspeed_gear.data.ingest import ingest, open_source, step_blocks
from deepspeed_gear.data.ingest.decoding import hdf5_arrays
from deepspeed_gear.data.trajectory_block import TrajectoryBlock
from deepspeed_gear.errors import DataError

Arrays = dict[str, np.ndarray]
#: Rows of episodes: one, a few, more than a block of the smaller sizes, and many short ones.
LENGTHS = (1, 2, 9, 1, 1, 40, 3, 7, 1, 150, *(1 + n % 4 for n in range(60)))
ENDS = np.cumsum(LENGTHS)
NUM_ROWS = int(ENDS[-1])
BLOCK_BYTES = (300, 4000, 1 << 30)  # beside blocks of one


def steps(terminal: float = 0.5) -> Arrays:
    """Return arrays of D4RL's names; a share of the episodes is terminal, the rest ends by time."""
    random = np.random.default_rng(7)
    is_terminal = random.random(len(LENGTHS)) < terminal
    flags = np.zeros((2, NUM_ROWS), np.bool_)
    flags[0, ENDS[is_terminal] - 1] = True
    flags[1, ENDS[~is_terminal] - 1] = True
    return {
        "observations": random.random((NUM_ROWS, 3)).astype(np.float32),
        "actions": random.random((NUM_ROWS, 2)).astype(np.float32),
        "rewards": random.normal(0, 1e3, NUM_ROWS).astype(np.float32),
        "infos/step": np.arange(NUM_ROWS),
        "terminals": flags[0],
        "timeouts": flags[1],
    }


def shifted() -> Arrays:
    """Return steps whose next observations are the shifted observations, inside of episodes."""
    given = steps()
    following = np.roll(given["observations"], -1, axis=0)
    following[ENDS - 1] = 7 + np.arange(len(ENDS))[:, None]
    return {**given, "next_observations": following}


def with_resets() -> Arrays:
    """Return steps whose next observations at ends are those of the next episodes."""
    given = steps()
    return {**given, "next_observations": np.roll(given["observations"], -1, axis=0)}


def own_next() -> Arrays:
    """Return steps whose next observations are columns of their own."""
    given = steps()
    return {**given, "next_observations": given["observations"] + 1}


def open_end() -> Arrays:
    """Return steps of which the last ones have no flag."""
    given = steps(terminal=1.0)
    given["terminals"] = given["terminals"] & (np.arange(NUM_ROWS) != NUM_ROWS - 1)
    return given


def last_rows() -> Arrays:
    """Return rows of RLDS: the last one holds only an observation; episodes of one have no step."""
    given = steps(terminal=0.3)
    given["is_last"] = given["terminals"] | given.pop("timeouts")
    given["is_terminal"] = given.pop("terminals")
    given["rewards"][ENDS - 1] = 0
    return given


SOURCES: dict[str, tuple[Callable[[], Arrays], dict[str, Any]]] = {
    "time limits": (lambda: steps(terminal=0), {}),
    "terminations": (lambda: steps(terminal=1), {}),
    "both": (steps, {}),
    "next": (shifted, {}),
    "next of resets": (with_resets, {}),
    "own next": (own_next, {}),
    "open end": (open_end, {}),
    "last rows": (last_rows, {"last_step": "observation"}),
    "moved rewards": (last_rows, {"last_step": "reward"}),
}


def write(path: Path, arrays: Arrays) -> Path:
    """Write a source; chunks of 7 rows are not those of any block."""
    if path.suffix == ".npz":
        np.savez(path, **arrays)  # type: ignore[arg-type]
        return path
    with h5py.File(path, "w") as file:
        for name, values in arrays.items():
            file.create_dataset(name, data=values, chunks=(7, *values.shape[1:]))
    return path


def facts(dataset: Dataset) -> tuple[Any, ...]:
    """Return what a data set holds, its statistics and its notes."""
    dataset.verify()
    stats = (dataset.path / "stats.json").read_bytes()
    return dataset.fingerprint, stats, dataset.lengths.tolist(), dataset.source


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("suffix", [".hdf5", ".npz"])
def test_blocks_of_any_size_make_the_data_set_of_single_episodes(
    tmp_path: Path, kind: str, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, options = SOURCES[kind]
    path = write(tmp_path / f"source{suffix}", make())
    monkeypatch.setattr(hdf5_arrays, "BLOCK_BYTES", 2000)  # of the rows that are read at a time
    sizes = []
    add_block = DatasetWriter.add_block

    def counted(self: DatasetWriter, block: TrajectoryBlock, **more: Any) -> None:
        sizes.append(len(block))
        add_block(self, block, **more)

    monkeypatch.setattr(DatasetWriter, "add_block", counted)

    def made(block_bytes: int, threads: int = 1, count: int = 2) -> tuple[Any, ...]:
        monkeypatch.setattr(step_blocks, "BLOCK_BYTES", block_bytes)
        sizes.clear()
        opened = [open_source(path, **options) for _ in range(count)]
        split = {"eval": 0.3}
        return facts(ingest(opened, tmp_path / "set", split=split, threads=threads, overwrite=True))

    wanted = made(1)
    assert set(sizes) == {1}
    for block_bytes in BLOCK_BYTES:
        assert made(block_bytes) == wanted
        assert max(sizes) > 1
        assert sum(sizes) == len(wanted[2])
    assert made(4000, threads=4) == wanted
    assert made(4000, count=1) == made(1, count=1)


def test_the_rows_of_blocks_are_those_of_the_source(tmp_path: Path) -> None:
    """Compared with slices of the arrays."""
    given = steps()
    dataset = ingest([write(tmp_path / "source.hdf5", given)], tmp_path / "set")
    number = 0
    for low, high in zip(ENDS - LENGTHS, ENDS, strict=True):
        is_terminal = given["terminals"][high - 1]
        end = high if is_terminal else high - 1  # the observation after a time limit is unknown
        if end == low:
            continue
        row = dataset.row_of(number)
        length = end - low
        assert dataset.lengths[number] == length
        states = dataset.columns["observation"][row : row + length + 1]
        last = high - 1
        wanted = np.concatenate([given["observations"][low:end], given["observations"][[last]]])
        np.testing.assert_array_equal(states, wanted)
        for column, key in (("action", "actions"), ("infos.step", "infos/step")):
            rows = dataset.columns[column][row : row + length + 1]
            np.testing.assert_array_equal(rows[:-1], given[key][low:end])
            assert not rows[-1].any()
        flags = [dataset.columns[name][row : row + length] for name in ("terminated", "truncated")]
        assert [flag.sum() for flag in flags] == [is_terminal, not is_terminal]
        assert flags[int(not is_terminal)][-1]
        total = given["rewards"][low:end].astype(np.float64).sum()
        assert dataset.columns["return"][number] == total
        number += 1
    assert number == len(dataset)


@pytest.mark.parametrize(
    ("key", "value", "options", "text"),
    [
        ("rewards", np.nan, {}, "episode 9: column reward must be finite, got 'nan at step 5'"),
        ("observations", np.inf, {}, "episode 9: column observation must be finite, got 'inf at"),
        ("actions", 1e6, {"dtype": {"action": "float16"}}, "episode 9: column action must hold"),
        ("rewards", 1e6, {"dtype": {"reward": "float16"}}, "episode 9: column reward must hold"),
        ("infos/step", 300, {"dtype": {"infos.step": "uint8"}}, "episode 9: column infos.step"),
    ],
)
@pytest.mark.parametrize("threads", [1, 4])
def test_a_wrong_value_is_named_by_its_episode(
    tmp_path: Path,
    key: str,
    value: float,
    options: dict[str, Any],
    text: str,
    threads: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And what the data set does not keep may be anything: the last step of a time limit."""
    given = own_next() if key == "infos/step" else steps(terminal=1)
    given["infos/step"] %= 256
    given["rewards"] /= 1e3
    given[key][ENDS[8] + 5] = value
    path = write(tmp_path / "source.hdf5", given)
    errors = set()
    for block_bytes in (1, *BLOCK_BYTES):
        monkeypatch.setattr(step_blocks, "BLOCK_BYTES", block_bytes)
        errors.add(refused(path, tmp_path / "set", threads=threads, **options))
    assert len(errors) == 1
    assert text in errors.pop()


def test_a_value_that_is_left_out_may_be_anything(tmp_path: Path) -> None:
    given = steps(terminal=0)
    for key in ("actions", "rewards"):
        given[key][ENDS - 1] = np.nan
    path = write(tmp_path / "source.hdf5", given)
    assert command(["ingest", str(path), str(tmp_path / "set"), "--quiet"]) == 0
    dataset = Dataset.open(tmp_path / "set")
    assert np.isfinite(dataset.columns["return"]).all()
    assert dataset.statistics["reward"].non_finite == 0


def test_damaged_rows_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error while rows are read is not a wrong value, for which they are read again."""
    path = write(tmp_path / "source.hdf5", steps())
    opened = open_source(path)
    read_rows = hdf5_arrays.read_rows
    faults = [True]

    def fail_once(where: str, *rest: Any) -> Any:
        if faults and where.endswith("actions"):
            faults.clear()
            raise DataError(where, "must be readable")
        return read_rows(where, *rest)

    monkeypatch.setattr(hdf5_arrays, "read_rows", fail_once)
    with pytest.raises(DataError, match="actions must be readable"):
        ingest([opened], tmp_path / "set")


@pytest.mark.parametrize("options", [{"split_by_flags": True}, {"dtype": {"reward": "bfloat16"}}])
def test_options_of_columns_by_blocks(
    tmp_path: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "source.hdf5", own_next())
    wanted = facts(ingest([path], tmp_path / "many", **options))
    monkeypatch.setattr(step_blocks, "BLOCK_BYTES", 1)
    assert facts(ingest([path], tmp_path / "one", **options)) == wanted


@pytest.mark.parametrize("rule", ["last=1.5", "each=-1", "none"])
def test_rules_of_rewards_by_blocks(
    tmp_path: Path, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = steps()
    del given["rewards"]
    path = write(tmp_path / "source.hdf5", given)
    dataset = ingest([path], tmp_path / "many", reward=rule)
    if rule == "last=1.5":
        assert set(dataset.columns["return"].tolist()) == {1.5}
    if rule == "each=-1":
        np.testing.assert_array_equal(dataset.columns["return"], -dataset.lengths)
    monkeypatch.setattr(step_blocks, "BLOCK_BYTES", 1)
    assert facts(ingest([path], tmp_path / "one", reward=rule)) == facts(dataset)


SCHEMA = Schema(
    [
        Column("state", "float32", (2,), "observation", "T+1"),
        Column("action", "int64", role="action"),
        Column("done", "bool", role="terminated"),
        Column("task", "int32", rows="1"),
        Column("text", "bytes", rows="1", max_bytes=9),
    ]
)


def block_of(lengths: list[int], seed: int = 0) -> TrajectoryBlock:
    random = np.random.default_rng(seed)
    steps = np.array(lengths, np.int64)
    block = TrajectoryBlock("row {}".format, steps, {}, {c.name: c.rows for c in SCHEMA}, True)
    block.arrays["state"] = random.random((block.num_rows, 2)).astype(np.float32)
    block.arrays["action"] = random.integers(1, 9, block.num_rows)
    block.arrays["action"][block.final_rows] = 0
    block.arrays["done"] = np.zeros(block.num_rows, np.bool_)
    block.arrays["done"][block.last_steps] = random.random(len(steps)) < 0.5
    block.arrays["task"] = random.integers(0, 99, len(steps)).astype(np.int32)
    block.arrays["text"] = [bytes([65 + n % 26]) * (n % 9) for n in range(len(steps))]
    return block


@given(
    lengths=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=12), min_size=1, max_size=4)
)
def test_added_blocks_are_their_trajectories(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[list[int]]
) -> None:
    folder = tmp_path_factory.mktemp("sets")
    made = []
    for divides in (False, True):
        split = {"eval": 0.2}
        with DatasetWriter(folder / str(divides), SCHEMA, split=split, threads=1) as writer:
            for number, some in enumerate([[3, 1, 2, 4, 1, 1, 8, 2], *lengths]):
                block = block_of(some, number)
                for one in block.divided() if divides else (block,):
                    writer.add_block(one)
        made.append(facts(Dataset.open(folder / str(divides))))
    assert made[0] == made[1]


@pytest.mark.parametrize(
    ("column", "value", "rule"),
    [
        ("state", np.nan, "row 2: column state must be finite, got 'nan at step 1'"),
        ("done", True, "row 2: column done must be set at the last step"),
        ("task", 1 << 40, "row 2: column task must hold values that int32 can hold"),
        ("text", b"0123456789", "row 2: column text"),
        ("action", None, "column action must be in every trajectory"),
        ("other", np.zeros(9), "column other must be in the schema"),
    ],
)
def test_a_wrong_block_is_refused_as_its_trajectory(
    tmp_path: Path, column: str, value: Any, rule: str
) -> None:
    block = block_of([2, 3, 4, 1])
    place = block.first_rows[2] + 1 if column in ("state", "done") else 2
    if column == "task":
        block.arrays["task"] = block.arrays["task"].astype(np.int64)
    if value is None:
        del block.arrays[column]
    elif column == "other":
        block.arrays[column] = np.zeros(block.num_rows)
        block.rows[column] = "T"  # type: ignore[index]
    else:
        block.arrays[column][place] = value
    writer = DatasetWriter(tmp_path / "set", SCHEMA)
    with pytest.raises(DataError, match=rule):
        writer.add_block(block)
    writer.discard()


def test_rows_that_no_step_has_are_never_written(tmp_path: Path) -> None:
    block = block_of([2, 3])
    block.arrays["action"][block.final_rows] = 5
    with DatasetWriter(tmp_path / "set", SCHEMA) as writer:
        writer.add_block(block)
    assert not Dataset.open(tmp_path / "set").columns["action"][block.final_rows].any()


@given(
    lengths=st.lists(st.integers(1, 700), min_size=1, max_size=9),
    final=st.booleans(),
    seed=st.integers(0, 99),
)
def test_sums_have_the_bits_of_single_sums(lengths: list[int], final: bool, seed: int) -> None:
    random = np.random.default_rng(seed)
    block = TrajectoryBlock("{}".format, np.array(lengths, np.int64), {}, {}, final)
    values = random.normal(0, 10.0 ** random.integers(-9, 9), block.num_rows)
    if seed % 9 == 0:
        values[:] = -0.0
    values[block.final_rows] = 0
    each = zip(block.first_rows, block.last_steps + 1, strict=True)
    wanted = np.array([values[low:end].sum() for low, end in each])
    assert block.sums(values).tobytes() == wanted.tobytes()
