"""Ingest of WebDataset shards: those that webdataset wrote, and shards of a small writer."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from ingest_refusals import refused
from range_server import serving

from deepspeed_gear.cli.main import main
from deepspeed_gear.data.dataset import Dataset
from deepspeed_gear.data.ingest import ingest, open_source
from deepspeed_gear.data.sources.brace_patterns import expand
from deepspeed_gear.errors import DataError

MINI = Path(__file__).parents[2] / "support" / "formats" / "mini_webdataset"


def samples(name: str) -> list[dict[str, Any]]:
    """Return the fields of each sample as webdataset read them (make_webdataset.py)."""
    read: dict[int, dict[str, Any]] = {}
    with np.load(MINI / "expected.npz") as expected:
        for key in expected:
            of, number, field = key.split("/")
            if of == name:
                read.setdefault(int(number), {})[field] = expected[key]
    return [read[number] for number in sorted(read)]


def npy(value: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, np.asarray(value))
    return file.getvalue()


def write(path: Path, files: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def step(key: str, **more: bytes) -> dict[str, bytes]:
    fields = {
        "obs.npy": npy([1.0, 2.0]),
        "action.npy": npy(3),
        "json": json.dumps({"episode": 0, "reward": 0.5}).encode(),
        **more,
    }
    return {f"{key}.{field}": content for field, content in fields.items()}


def test_shards_of_steps_are_read_as_by_webdataset(tmp_path: Path) -> None:
    """An episode goes on in the next shard."""
    pytest.importorskip("PIL")
    assert main(["ingest", str(MINI / "steps"), str(tmp_path / "out"), "--quiet"]) == 0
    dataset = Dataset.open(tmp_path / "out")
    assert dataset.lengths.tolist() == [3, 5, 4]
    names = ("observation.state", "observation.image", "action", "reward")
    fields = ("observation.state.npy", "observation.image.png", "action.npy", "reward.npy")
    expected = samples("steps")
    low = 0
    for number, length in enumerate(dataset.lengths.tolist()):
        trajectory = dataset.trajectory(number)
        for name, field in zip(names, fields, strict=True):
            rows = np.stack([one[field] for one in expected[low : low + length]])
            assert trajectory[name].dtype == rows.dtype
            np.testing.assert_array_equal(trajectory[name], rows)
        assert trajectory["cls"].tolist() == [number % 2] * length
        assert trajectory["txt"] == f"task {number}".encode()
        assert trajectory["terminated"].tolist() == [0] * (length - 1) + [1]
        low += length


def test_a_shard_of_episodes_is_read_as_by_webdataset(tmp_path: Path) -> None:
    dataset = ingest([MINI / "episodes.tar.gz"], tmp_path / "out")
    expected = samples("episodes")
    assert len(dataset) == len(expected)
    for number, sample in enumerate(expected):
        trajectory = dataset.trajectory(number)
        for name, field in {"observation": "obs", "action": "actions", "reward": "rewards"}.items():
            np.testing.assert_array_equal(trajectory[name], sample[f"npz.{field}"])
        assert trajectory["seed"] == number


def test_names_skipped_files_and_a_remote_shard(tmp_path: Path) -> None:
    more = {"NPY": npy([1, 2]), "flow.mp4": b"video"}
    files = {"__info__.json": b"{}", "README": b"", **step("a/0", **more), **step("a/1", **more)}
    source = write(tmp_path / "part.tar", files)
    dataset = ingest([source], tmp_path / "out", rename={"npy": "state"})
    assert dataset.lengths.tolist() == [2]
    assert dataset.trajectory(0)["state"].tolist() == [[1, 2], [1, 2]]
    assert dataset.source["sources"][0]["notes"][-2:] == [
        "2 files without a key or a field: left out",
        "files of unknown kinds, left out: mp4",
    ]
    with serving({"/part.tar": source.read_bytes()}) as server:
        address = f"{server.url}/part.tar"
        remote = ingest([address], tmp_path / "remote", rename={"npy": "state"})
    assert remote.fingerprint == dataset.fingerprint


def test_a_shard_is_no_archive_of_its_last_file_and_no_hdf5_file_of_its_first(
    tmp_path: Path,
) -> None:
    """zipfile finds a zip file by the end of a file, and HDF5 one that begins at byte 512."""
    with io.BytesIO() as file:
        steps = {"observations": np.zeros((3, 2)), "actions": [0, 1, 2], "rewards": [0.5] * 3}
        np.savez(file, **steps, terminals=[0, 0, 1], timeouts=[0] * 3)
        episode = file.getvalue()
    with io.BytesIO() as file:
        with h5py.File(file, "w") as group:
            for name, rows in steps.items():
                group[name] = rows
            group["terminals"] = [0, 0, 1]
            group["timeouts"] = [0] * 3
        other = file.getvalue()
    files = {"0.h5": other, "0.npz": episode, "1.npz": episode}
    source = write(tmp_path / "part.tar", files)
    assert main(["ingest", str(source), str(tmp_path / "out"), "--quiet"]) == 0
    dataset = Dataset.open(tmp_path / "out")
    assert dataset.source["sources"][0]["format"] == "webdataset"
    assert dataset.lengths.tolist() == [3, 3]


BROKEN: list[tuple[dict[str, bytes], str]] = [
    ({"obs.npy": npy([1.0, 2.0])[:-1]}, "0.obs.npy must have the size of its entry"),
    ({"obs.npy": b"none"}, "0.obs.npy must be a readable npy file"),
    ({"obs.npz": b"none"}, "0.obs.npz must be a readable npz file"),
    ({"extra.npy": npy([None])}, "0.extra.npy must not be Python objects"),
    ({"json": b"{"}, "0.json must be JSON"),
    ({"cls": b"cat"}, "0.cls must be a whole number, got 'cat'"),
    ({"txt": b"\xff"}, "0.txt must be a text in UTF-8"),
    ({"reward.npy": npy(1.0)}, "must give the sample 0 the column reward once"),
]


@pytest.mark.parametrize(("fields", "text"), BROKEN)
def test_broken_samples_are_refused(tmp_path: Path, fields: dict[str, bytes], text: str) -> None:
    source = write(tmp_path / "part.tar", step("0", **fields))
    assert text in refused(source, tmp_path / "out")


def test_broken_shards_are_refused(tmp_path: Path) -> None:
    out = tmp_path / "out"
    text = "only shards of WebDataset may be named"
    assert text in refused(tmp_path / "part-{0..3}.parquet", out)
    whole = write(tmp_path / "whole.tar", step("0")).read_bytes()
    for content in (b"none" * 200, whole[:700], gzip.compress(whole)[:-300]):
        (tmp_path / "cut.tar").write_bytes(content)
        assert "cut.tar must be a readable tar file" in refused(tmp_path / "cut.tar", out)
    with tarfile.open(tmp_path / "link.tar", "w") as archive:
        member = tarfile.TarInfo("0.obs.npy")
        member.type = tarfile.SYMTYPE
        member.linkname = "/etc/passwd"
        archive.addfile(member)
    assert "0.obs.npy must be a whole file, and no link" in refused(tmp_path / "link.tar", out)


def test_a_gzip_file_takes_no_more_memory_than_its_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """tarfile reads what the header of a long name states, here many zeros, before any member."""
    monkeypatch.setattr("deepspeed_gear.data.ingest.source_checks.FLOOR_BYTES", 1 << 20)
    header = tarfile.TarInfo("././@LongLink")
    header.type = tarfile.GNUTYPE_LONGNAME
    header.size = 1 << 22
    content = gzip.compress(header.tobuf() + bytes(header.size))
    (tmp_path / "bomb.tar.gz").write_bytes(content)
    with pytest.raises(DataError, match="must hold at most 100 bytes for each of the"):
        ingest([tmp_path / "bomb.tar.gz"], tmp_path / "out")


def encode(text: str, row: dict[str, Any]) -> list[int]:
    return [len(text), int(row["extra"][0])]


@pytest.mark.parametrize("columns", ["txt,kept", "!depth,!extra"])
def test_entries_that_are_left_out_are_not_decoded(tmp_path: Path, columns: str) -> None:
    """Broken ones show it, from the first sample on."""
    with io.BytesIO() as file:
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("kept.npy", npy(1))
            archive.writestr("extra.npy", b"no array")
        arrays = file.getvalue()
    files: dict[str, bytes] = {}
    for number in range(40):
        files |= step(f"{number:03}", **{"txt": b"a", "depth.png": b"no image", "npz": arrays})
    source = write(tmp_path / "part.tar", files)
    assert main(["ingest", str(source), str(tmp_path / "out"), "--columns", columns]) == 0
    dataset = Dataset.open(tmp_path / "out")
    assert dataset.lengths.tolist() == [40]
    assert dataset.trajectory(0)["kept"].tolist() == [1] * 40
    assert not {"depth", "extra"} & {*dataset.schema.names}
    notes = dataset.source["sources"][0]["notes"]
    assert columns[0] == "!" or any("left out" in one and "depth, extra" in one for one in notes)
    with pytest.raises(DataError, match="must match an optional column, got 'deep'"):
        ingest([source], tmp_path / "none", columns=["!depth", "!extra", "deep"])
    with pytest.raises(DataError, match=r"000\.npz.* must be a readable npz file"):
        ingest([source], tmp_path / "none", columns=["txt"], rename={"extra": "observation.more"})


def test_a_function_of_rows_gets_the_entries_that_are_left_out(tmp_path: Path) -> None:
    files = {"0.txt": b"text", "0.extra.npy": npy([7, 8])}
    source = write(tmp_path / "part.tar", files)
    with open_source(source, columns=[], tokenize={"txt": encode}) as reader:
        dataset = ingest([reader], tmp_path / "out", reward="none")
    assert dataset.trajectory(0)["tokens"].tolist() == [4, 7]
    assert "extra" not in dataset.schema


# As braceexpand 0.1.7, which webdataset uses, expands them.
EXPANDED = {
    "s-{000..003}": "s-000 s-001 s-002 s-003",
    "s-{8..11}": "s-8 s-9 s-10 s-11",
    "{a,b}/s-{08..10}": "a/s-08 a/s-09 a/s-10 b/s-08 b/s-09 b/s-10",
    "s-{0..10..5}": "s-0 s-5 s-10",
    "s-{3..1}": "s-3 s-2 s-1",
    "s-{-01..1}": "s--01 s-000 s-001",
    "s-{x,y{1,2},z}": "s-x s-y1 s-y2 s-z",
    "s{,-b}{c..a..2}": "sc sa s-bc s-ba",
    "{0..1}-{x}": "0-{x} 1-{x}",
    r"{a\,b,\{c\}}": "a,b {c}",
}


@pytest.mark.parametrize(("pattern", "names"), EXPANDED.items())
def test_names_of_a_pattern(pattern: str, names: str) -> None:
    assert expand(pattern) == names.split()


def shards(folder: Path) -> dict[str, bytes]:
    """Write shards that hold one episode, of 12 steps; return their content by name."""
    for number in range(12):
        key = f"{number:03}"
        write(folder / f"part-{number}.tar", step(key, index=str(number).encode()))
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_shards_of_a_pattern_are_one_source_in_its_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On this machine and on servers; the order of the names would be 0, 1, 10, 11, 2."""
    content = shards(tmp_path)
    monkeypatch.chdir(tmp_path)
    command = ["ingest", "part-{0..11}.tar", "out", "--quiet"]
    assert main(command) == 0
    dataset = Dataset.open(tmp_path / "out")
    assert dataset.trajectory(0)["index"].tolist() == [*range(12)]
    assert dataset.source["sources"][0]["notes"][-1] == "12 shards, from part-0.tar to part-11.tar"
    with serving({f"/d/{name}": of for name, of in content.items()}) as server:
        address = f"{server.url.replace('//', '//me:secret@')}/d/part-{{0..11}}.tar?key=secret"
        assert main(["ingest", address, "remote", "--quiet"]) == 0
        remote = Dataset.open(tmp_path / "remote")
        assert remote.fingerprint == dataset.fingerprint
        assert remote.source["sources"][0]["url"] == f"{server.url}/d"
        del server.files["/d/part-3.tar"], server.files["/d/part-7.tar"]
        with pytest.raises(DataError) as caught:
            ingest([address], tmp_path / "none")
        names = f"{server.url}/d/part-3.tar, {server.url}/d/part-7.tar must exist; copy what is"
        assert names in str(caught.value)


WRONG = [
    ("part-{0..3.tar", "must have a closing brace for each opening one"),
    ("part-0..3}{.tar", "must have a closing brace for each opening one"),
    ("part-{0-3}.tar", "must have a list or a range in its braces"),
    ("part-{0..1,1}.tar", "part-0..1.tar must exist"),
    ("part-{1,1}.tar", "must give every name once"),
    ("part-{0..999999999999}.tar", "must stand for at most 100,000 names"),
    ("{0..999}{0..999}.tar", "must stand for at most 100,000 names"),
    ("part-{10..12}.tar", "part-12.tar must exist"),
    ("part-{12..40}.tar", "and 21 more must exist"),
]


@pytest.mark.parametrize(("pattern", "text"), WRONG)
def test_wrong_patterns_of_shards(tmp_path: Path, pattern: str, text: str) -> None:
    shards(tmp_path)
    assert text in refused(tmp_path / pattern, tmp_path / "out")


def test_a_file_with_the_name_of_a_pattern_is_that_file(tmp_path: Path) -> None:
    name = "part-{0..1}.tar"
    source = write(tmp_path / name, {**step("0"), **step("1")})
    assert ingest([source], tmp_path / "out").lengths.tolist() == [2]
    with serving({f"/{name}": source.read_bytes()}) as server:
        remote = ingest([f"{server.url}/{name}"], tmp_path / "remote")
    assert remote.lengths.tolist() == [2]
