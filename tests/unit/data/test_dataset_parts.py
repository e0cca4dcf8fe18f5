"""Parts of a data set: what is written, what is refused, damage, the commands."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gear_support import run_command, write_dataset

from deepspeed_gear.cli import dataset_summary, split
from deepspeed_gear.data import dataset_writer
from deepspeed_gear.data.dataset import Dataset
from deepspeed_gear.data.dataset_files import DatasetPart
from deepspeed_gear.data.dataset_parts import write_parts
from deepspeed_gear.errors import ConfigError, DataError, show_bytes

LENGTHS = [3, 1, 7, 2, 5, 4]
BOUNDS = np.array([0, 1, 4, 6])
run = partial(run_command, split)


@pytest.fixture
def whole(tmp_path: Path) -> Dataset:
    return Dataset.open(write_dataset(tmp_path / "whole", LENGTHS, {"eval": 0.4}))


@pytest.mark.parametrize("block_bytes", [1, 100, 1 << 22])
def test_parts_together_are_the_whole(
    whole: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int
) -> None:
    monkeypatch.setattr(dataset_writer, "_BLOCK_BYTES", block_bytes)
    parts = write_parts(whole, tmp_path / "out", BOUNDS)
    assert [part.path for part in parts] == [tmp_path / "out" / f"part-{i}" for i in range(3)]
    for part in parts:
        part.verify()
        assert part.schema == whole.schema
        assert (part.split, part.source) == (whole.split, whole.source)
        assert (part.path / "stats.json").read_bytes() == (whole.path / "stats.json").read_bytes()
    assert np.concatenate([part.lengths for part in parts]).tolist() == LENGTHS
    for name, column in whole.columns.items():
        assert b"".join(part.columns[name].tobytes() for part in parts) == column.tobytes()


def test_a_part_knows_its_place(whole: Dataset, tmp_path: Path) -> None:
    parts = write_parts(whole, tmp_path / "out", BOUNDS)
    assert [part.part for part in parts] == [
        DatasetPart(
            i, 3, int(BOUNDS[i]), int(BOUNDS[i + 1]), 6, whole.num_rows, 22, 7, whole.fingerprint
        )
        for i in range(3)
    ]
    assert [part.first_id for part in parts] == [0, 1, 4]
    for part in [*parts, whole]:
        assert part.num_trajectories_of_whole == 6
        assert part.whole_fingerprint == whole.fingerprint
        assert part.longest == 7
    assert (whole.part, whole.first_id) == (None, 0)
    assert len({whole.fingerprint, *(part.fingerprint for part in parts)}) == 4
    (only,) = write_parts(whole, tmp_path / "one", np.array([0, 6]))
    assert only.part == DatasetPart(0, 1, 0, 6, 6, whole.num_rows, 22, 7, whole.fingerprint)
    assert only.fingerprint != whole.fingerprint
    assert (
        str(parts[1].part) == f"part 1 of 3, trajectories 1 to 3 of 6 of {whole.fingerprint[:12]}"
    )


@pytest.mark.parametrize(
    "bounds", [[0, 3, 3, 6], [0, 4, 3, 6], [1, 6], [0, 5], [0, 7], [0], [0, 0, 6]]
)
def test_bounds_that_are_none(whole: Dataset, tmp_path: Path, bounds: list[int]) -> None:
    with pytest.raises(
        DataError, match="must divide its 6 trajectories into parts of at least one"
    ):
        write_parts(whole, tmp_path / "out", np.array(bounds))
    assert not (tmp_path / "out").exists()


def test_what_is_there_is_replaced_only_when_asked_and_a_part_is_no_whole(
    whole: Dataset, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    write_parts(whole, out, np.arange(7))
    with pytest.raises(
        DataError, match=r"out must not exist yet; choose another place, or overwrite it"
    ):
        write_parts(whole, out, BOUNDS)
    assert len(list(out.iterdir())) == 6
    parts = write_parts(whole, out, BOUNDS, overwrite=True)
    assert [len(part) for part in parts] == [1, 3, 2]
    assert sorted(path.name for path in out.iterdir()) == ["part-0", "part-1", "part-2"]
    with pytest.raises(
        DataError, match=r"must be a whole data set, got 'part 1 of 3.*; split the whole"
    ):
        write_parts(parts[1], tmp_path / "other", np.array([0, 1, 3]))
    with pytest.raises(DataError, match="must be a whole data set to compute the statistics"):
        parts[1].statistics_for({"eval": 0.2})


@pytest.mark.parametrize("name", ["notes.txt", "part-x/a", "partition/a"])
def test_a_folder_of_something_else_is_never_replaced(
    whole: Dataset, tmp_path: Path, name: str
) -> None:
    path = tmp_path / "out" / name
    path.parent.mkdir(parents=True)
    path.write_text("mine")
    with pytest.raises(DataError, match="must hold parts only to be overwritten"):
        write_parts(whole, tmp_path / "out", BOUNDS, overwrite=True)
    assert path.read_text() == "mine"


def test_a_whole_that_changed_gives_no_parts(whole: Dataset, tmp_path: Path) -> None:
    """A change in the middle of a column, which opening does not see."""
    big = Dataset.open(write_dataset(tmp_path / "big", [20_000, 20_000]))
    with (big.path / "columns/code.npy").open("r+b") as file:
        file.seek(150_000)
        file.write(b"\xaa" * 8)
    with pytest.raises(DataError, match=r"big: column code must hold the bytes that were written"):
        write_parts(Dataset.open(big.path), tmp_path / "out", np.array([0, 1, 2]))
    assert not (tmp_path / "out").exists()


def test_a_failure_leaves_no_set_of_new_and_old_parts(
    whole: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_parts(whole, tmp_path / "out", BOUNDS)
    monkeypatch.setattr(Dataset, "digest_of", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_parts(whole, tmp_path / "out", BOUNDS, overwrite=True)
    assert [path.name for path in tmp_path.glob("out*")] == ["out"]
    for number in range(3):
        Dataset.open(tmp_path / "out" / f"part-{number}").verify()


WHOLE = "f" * 64
DAMAGES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "no entry": (lambda part: None, "must match its own fingerprint"),
    "another type": (lambda part: [1], "part must record index, count, first"),
    "a missing key": (
        lambda part: {k: v for k, v in part.items() if k != "whole"},
        "part must record index",
    ),
    "an unknown key": (lambda part: {**part, "more": 1}, "part must record index"),
    "a value of another type": (
        lambda part: {**part, "first": "1"},
        r"part\.first must be int, got '1'",
    ),
    "a flag": (lambda part: {**part, "index": True}, r"part\.index must be int, got True"),
    "another place": (lambda part: {**part, "first": 2}, "must match its own fingerprint"),
    "another whole": (lambda part: {**part, "whole": WHOLE}, "must match its own fingerprint"),
    "beyond the whole": (lambda part: {**part, "first": 4}, "part must describe 3 of the whole's"),
    "at the end": (lambda part: {**part, "first": 3}, "part must describe 3 of the whole's"),
    "at the beginning": (lambda part: {**part, "first": 0}, "part must describe 3 of the whole's"),
    "one too many": (lambda part: {**part, "index": 3}, "part must describe 3 of the whole's"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_entry_is_refused(whole: Dataset, tmp_path: Path, damage: str) -> None:
    change, text = DAMAGES[damage]
    path = write_parts(whole, tmp_path / "out", BOUNDS)[1].path / "schema.json"
    manifest = json.loads(path.read_text())
    entry = change(manifest.pop("part"))
    path.write_text(json.dumps(manifest if entry is None else {**manifest, "part": entry}))
    with pytest.raises(DataError, match=f"schema.json.*{text}"):
        Dataset.open(path.parent)


def test_split_balances_bytes_and_leaves_no_part_empty(
    whole: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(str(whole.path), str(tmp_path / "out"), "--nodes", "2") == 0
    lines = capsys.readouterr().out.splitlines()
    parts = [Dataset.open(tmp_path / "out" / f"part-{i}") for i in range(2)]
    assert [part.num_steps for part in parts] == [11, 11]
    size = show_bytes(parts[1].num_bytes)
    assert lines[1] == f"{tmp_path}/out/part-1: 3 trajectories (ids 3 to 5), 11 steps, {size}"
    assert run(str(whole.path), str(tmp_path / "out"), "--nodes", "2", "--overwrite") == 0
    for nodes in ("7", "0", "-1"):
        with pytest.raises(
            ConfigError, match=rf"--nodes must be in \[1, 6\], the trajectories, got {nodes}"
        ):
            run(str(whole.path), str(tmp_path / "more"), f"--nodes={nodes}")
    write_dataset(tmp_path / "set", [500, 1, 1])
    assert run(str(tmp_path / "set"), str(tmp_path / "none_empty"), "--nodes", "3") == 0
    assert [len(Dataset.open(tmp_path / "none_empty" / f"part-{i}")) for i in range(3)] == [1, 1, 1]


def test_inspect_says_which_part(whole: Dataset, tmp_path: Path) -> None:
    parts = write_parts(whole, tmp_path / "out", BOUNDS)
    summaries = [dataset_summary.summarize(part) for part in parts]
    lines = dataset_summary.dataset_lines({**summaries[1], "verified": False})
    assert "  part          1 of 3: ids 1 to 3 of 6" in lines
    assert f"  whole         {whole.fingerprint}, 22 steps" in lines
    assert "training split of the whole" in lines[-1]
    assert summaries[1]["part"]["first"] == 1
    of_whole = dataset_summary.summarize(whole)
    assert not any(
        "  part " in line for line in dataset_summary.dataset_lines({**of_whole, "verified": False})
    )
    for name, entry in of_whole["split"].items():
        found = sum(summary["split"][name]["trajectories"] for summary in summaries)
        assert found == entry["trajectories"]
    assert 0 < of_whole["split"]["eval"]["trajectories"] < 6
