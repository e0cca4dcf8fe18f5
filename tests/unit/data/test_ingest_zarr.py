"""Ingest of zarr: stores that zarr wrote, and stores of a small writer."""

from __future__ import annotations

import gzip
import json
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ingest_refusals import refused

from deepspeed_gear.cli.main import main
from deepspeed_gear.data.dataset import Dataset
from deepspeed_gear.data.ingest import ingest, open_source, step_blocks
from deepspeed_gear.data.ingest.decoding.tfrecord import crc32c
from deepspeed_gear.data.ingest.decoding.zarr_codecs import ChunkCodecs
from deepspeed_gear.errors import DataError

MINI = Path(__file__).parents[2] / "support" / "formats" / "mini_zarr"
NEEDED = {"pusht": "numcodecs", "umi": "imagecodecs", "pusht_v3": "zstandard"}
ENDS = [3, 5]


def write_array(folder: Path, values: Any, **changes: Any) -> None:
    """Write an array of version 2 in one chunk, without a compressor."""
    values = np.asarray(values)
    folder.mkdir(parents=True)
    described: dict[str, Any] = {
        "zarr_format": 2,
        "shape": list(values.shape),
        "chunks": list(values.shape),
        "dtype": values.dtype.str,
        "compressor": None,
        "filters": None,
        "fill_value": 0,
        "order": "C",
    }
    described.update(changes)
    (folder / ".zarray").write_text(json.dumps(described))
    (folder / ".".join("0" * values.ndim)).write_bytes(values.tobytes())


def write(folder: Path, **more: Any) -> Path:
    arrays = {
        "obs": np.arange(10, dtype="<f4").reshape(5, 2),
        "action": np.arange(5, dtype="<i8"),
        "reward": np.arange(5, dtype="<f8"),
        **more,
    }
    write_array(folder / "meta" / "episode_ends", np.array(ENDS))
    for name, values in arrays.items():
        write_array(folder / "data" / name, values)
    return folder


def columns(store: str) -> dict[str, str]:
    """Return the name of the column of each array of a store in `expected.npz`."""
    with np.load(MINI / "expected.npz") as expected:
        keys = [name.split("/", 2)[2] for name in expected if name.startswith(f"{store}/data/")]
    return {key: key.replace("obs/", "observation.") for key in keys}


@pytest.mark.parametrize("form", ["zip", "folder", "nested"])
@pytest.mark.parametrize("store", ["pusht", "umi", "pusht_v3", "sharded"])
def test_stores_of_zarr_are_read_as_by_itself(tmp_path: Path, store: str, form: str) -> None:
    """The arrays are those that zarr read; support/formats/make_zarr.py wrote both."""
    if store in NEEDED:
        pytest.importorskip(NEEDED[store])
    source = MINI / f"{store}.zarr.zip"
    if form != "zip":
        folder = tmp_path / "store" / ("inner" if form == "nested" else "")
        shutil.unpack_archive(source, folder)
        source = tmp_path / "store"
    reward = [] if store == "sharded" else ["--reward", "none"]
    assert main(["ingest", str(source), str(tmp_path / "out"), "--quiet", *reward]) == 0
    dataset = Dataset.open(tmp_path / "out")
    names = columns(store)
    with np.load(MINI / "expected.npz") as expected:
        ends = expected[f"{store}/meta/episode_ends"]
        assert dataset.lengths.tolist() == np.diff(ends, prepend=0).tolist()
        low = 0
        for number, high in enumerate(ends):
            trajectory = dataset.trajectory(number)
            for key, name in names.items():
                rows = expected[f"{store}/data/{key}"][low:high]
                assert dataset.schema[name].dtype == str(rows.dtype)
                assert dataset.schema[name].rows == "T"
                np.testing.assert_array_equal(trajectory[name], rows)
            assert not trajectory["terminated"].any()
            assert trajectory["truncated"].tolist() == [0] * (high - low - 1) + [1]
            if store == "sharded":
                assert trajectory["task"] == expected["sharded/meta/task"][number]
            low = high
    roles = {column.name: column.role for column in dataset.schema}
    assert {roles[name] for key, name in names.items() if key[:4] in ("robo", "came", "obs/")} <= {
        "observation"
    }
    notes = dataset.source["sources"][0]["notes"]
    absent = "observation.wide: 8 chunks are absent and hold the fill value 7"
    assert (absent in notes) == (store == "sharded")


def test_flags_names_and_columns_of_a_store(tmp_path: Path) -> None:
    more = {
        "dones": np.array([True, False, True, False, False]),
        "count": np.arange(5, dtype="<u2"),
        "label": np.array([b"a"] * 5),
        "images": np.zeros((5, 2, 2, 3), np.uint8),
    }
    source = write(tmp_path / "set.zarr", **more)
    write_array(source / "meta" / "task", np.array([4, 6], "<i4"))
    write_array(source / "meta" / "fps", np.array([10.0]))
    rename = {"count": "clock"}
    dataset = ingest([source], tmp_path / "out", rename=rename, role={"images": "other"})
    roles = {column.name: column.role for column in dataset.schema}
    assert roles["observation"] == "observation"
    assert (roles["action"], roles["reward"]) == ("action", "reward")
    assert {roles["clock"], roles["images"], roles["task"]} == {"other"}
    first, second = (dataset.trajectory(i) for i in range(2))
    assert first["terminated"].tolist() == [False, False, True]
    assert second["truncated"].tolist() == [False, True]
    assert [first["return"], second["return"], first["task"], second["task"]] == [3, 7, 4, 6]
    assert dataset.source["sources"][0]["notes"] == [
        "label: not arrays of numbers, left out",
        "taken as observations: images (--role NAME=other changes it)",
        "meta/fps: not one number for each episode, left out",
    ]
    named = write(tmp_path / "named.zarr")
    (named / "data" / "obs").rename(named / "data" / "qpos")
    renamed = ingest([named], tmp_path / "named", rename={"qpos": "observation"})
    np.testing.assert_array_equal(renamed.trajectory(1)["observation"], [[6, 7], [8, 9]])


def test_observations_after_steps_have_the_role_of_observations(tmp_path: Path) -> None:
    rows = np.arange(10, dtype="<f4").reshape(5, 2)
    more = {"next_obs": rows, "final_observation": rows}
    dataset = ingest([write(tmp_path / "set.zarr", **more)], tmp_path / "out")
    roles = {column.name: column.role for column in dataset.schema}
    assert roles["next_observation"] == roles["final_observation"] == "observation"


def _described(**values: Any) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        file = folder / "data" / "obs" / ".zarray"
        file.write_text(json.dumps({**json.loads(file.read_text()), **values}))

    return apply


def _content(content: bytes, name: str = "data/obs/0.0") -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        (folder / name).write_bytes(content)

    return apply


def _absent(folder: Path) -> None:
    _described(fill_value=None)(folder)
    (folder / "data" / "obs" / "0.0").unlink()


def _without(name: str) -> Callable[[Path], None]:
    return lambda folder: shutil.rmtree(folder / name)


def _ends(*values: int) -> Callable[[Path], None]:
    return _content(np.array(values).tobytes(), "meta/episode_ends/0")


BROKEN: list[tuple[Callable[[Path], None], str]] = [
    (_content(b"abc"), "0.0 must hold 40 bytes"),
    (_content(b"version https://git-lfs.github.com/spec/v1\n"), "a Git LFS pointer"),
    (_absent, "chunk [0, 0] must exist, as the array has no fill value"),
    (_described(compressor={"id": "pickle"}), "codecs must be one of gzip,"),
    (_described(filters=[{"id": "delta"}]), "--columns"),
    (
        _described(filters=[{"id": "gzip"}], compressor={"id": "zlib"}),
        "codecs must have one compressor at most, got ['gzip', 'zlib']",
    ),
    (_described(chunks=[5]), "must describe an array of zarr"),
    (_described(chunks=[0, 2]), "must describe an array of zarr"),
    (_described(zarr_format=3), "must describe an array of zarr"),
    (_described(shape=[4, 2]), "data/obs must have 5 rows, as meta/episode_ends states"),
    (_described(shape=[5, 1 << 40], chunks=[5, 1 << 40]), "must hold at most 100 bytes"),
    (_content(b"[]", "data/obs/.zarray"), "must hold an object"),
    (_content(b"{", "data/obs/.zarray"), "must be readable JSON"),
    (_ends(3, 3), "must rise: episode 1 has no step, got [3, 3]"),
    (_ends(3, 6), "must have 6 rows"),
]


@pytest.mark.parametrize(("change", "text"), BROKEN)
def test_broken_stores_are_refused(
    tmp_path: Path, change: Callable[[Path], None], text: str
) -> None:
    source = write(tmp_path / "set.zarr")
    change(source)
    assert text in refused(source, tmp_path / "out")


def test_a_source_has_one_store(tmp_path: Path) -> None:
    write(tmp_path / "sets" / "a.zarr")
    write(tmp_path / "sets" / "b.zarr")
    with pytest.raises(DataError, match=r"\['a.zarr/', 'b.zarr/'\]; give the folder of one store"):
        open_source(tmp_path / "sets")
    _without("meta")(tmp_path / "sets" / "a.zarr")
    with pytest.raises(DataError, match="meta/episode_ends must be in the source once"):
        open_source(tmp_path / "sets" / "a.zarr", "zarr")


@pytest.mark.parametrize("flags", [{}, {"dones": [3]}, {"terminals": [5], "timeouts": [0, 5]}])
def test_blocks_of_episodes_are_those_of_single_ones(
    tmp_path: Path, flags: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of values that only some of the episodes may have."""
    ends = np.cumsum([1, 4, 2, 1, 9, 3, 1])
    random = np.random.default_rng(0)
    arrays = {
        "obs": random.random((21, 2)).astype(np.float32),
        "action": random.integers(0, 9, 21),
        "reward": random.random(21),
        **{name: np.isin(np.arange(21), ends[chosen] - 1) for name, chosen in flags.items()},
    }
    source = tmp_path / "set.zarr"
    write_array(source / "meta" / "episode_ends", ends)
    write_array(source / "meta" / "prompt_id", np.arange(7) // 2)
    for name, values in arrays.items():
        write_array(source / "data" / name, values)
    made = {}
    for block_bytes in (1, 200, 1 << 20):
        monkeypatch.setattr(step_blocks, "BLOCK_BYTES", block_bytes)
        dataset = ingest([source], tmp_path / str(block_bytes))
        made[dataset.fingerprint] = dataset.columns["prompt_id"].tolist()
        with pytest.raises(DataError) as caught:
            ingest([source], tmp_path / "other", dtype={"obs*": "float16", "action": "bool"})
        made[str(caught.value)] = []
    assert len(made) == 2
    assert [0, 0, 1, 1, 2, 2, 3] in made.values()


def test_flags_inside_an_episode_are_refused(tmp_path: Path) -> None:
    source = write(tmp_path / "set.zarr", terminals=np.array([0, 1, 1, 0, 1], bool))
    with pytest.raises(DataError) as caught:
        ingest([source], tmp_path / "out")
    assert "terminals, episode 0 must be set at the last step of an episode only, got 'row 1'" in (
        str(caught.value)
    )
    assert "--rename terminals=dones" in str(caught.value)
    dataset = ingest([source], tmp_path / "out", rename={"terminals": "dones"})
    assert [dataset.trajectory(i)["terminated"][-1] for i in range(2)] == [True, True]


def _blosc(stated: int) -> bytes:
    sizes = (stated, stated, 16)
    return bytes([2, 1, 0, 1]) + b"".join(n.to_bytes(4, "little") for n in sizes)


@pytest.mark.parametrize(
    ("codec", "content"),
    [
        ("zlib", zlib.compress(bytes(1 << 22))),
        ("gzip", gzip.compress(bytes(1 << 22))),
        ("gzip", gzip.compress(bytes(40))[:-12]),
        ("zlib", b"no stream"),
        ("bz2", b"no stream"),
        ("blosc", _blosc(1 << 30)),
        ("blosc", _blosc(40)[:10]),
        ("lz4", (1 << 30).to_bytes(4, "little") + bytes(20)),
        ("zstd", b"\x28\xb5\x2f\xfd\xa0\x00\x00\x00\x40\x01\x00\x00"),
        ("crc32c", bytes(40) + b"none"),
        ("crc32c", b""),
    ],
)
def test_a_chunk_takes_no_more_memory_than_it_declares(codec: str, content: bytes) -> None:
    needed = {"blosc": "numcodecs.blosc", "lz4": "numcodecs.lz4", "zstd": "zstandard"}
    if codec in needed:
        pytest.importorskip(needed[codec])
    codecs = ChunkCodecs((0, 1), np.dtype("<f4"), (codec,))
    with pytest.raises(DataError, match="here must hold 40 bytes"):
        codecs.decode("here", content, (5, 2))


def test_checksums_around_a_compressor() -> None:
    def sealed(content: bytes) -> bytes:
        return content + crc32c(content).to_bytes(4, "little")

    values = np.arange(10, dtype="<f4").reshape(5, 2)
    codecs = ChunkCodecs((1, 0), np.dtype("<f4"), ("crc32c", "zlib", "crc32c"))
    content = sealed(zlib.compress(sealed(values.T.tobytes())))
    np.testing.assert_array_equal(codecs.decode("here", content, (5, 2)), values)
