"""Sources that refer to other files, or decompress to more than they can be worth, are refused by name."""

import io
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from deepspeed_gear.data.arrow_messages import decompressed_bytes
from deepspeed_gear.data.ingest import ingest, open_source, source_checks
from deepspeed_gear.data.ingest.reader import Reader, decode_images
from deepspeed_gear.data.ingest.source_checks import Expansion
from deepspeed_gear.errors import ConfigError, DataError
from deepspeed_gear.replay.preview import read_lengths

Maker = Callable[..., Any]
SECRET = b"root:x:0:0"


class OwnReader(Reader):
    """A reader from outside, which reads any source."""

    format = "own"

    @classmethod
    def recognises(cls, path: Path) -> bool:
        return True

    def open(self) -> None:
        raise AssertionError("it must not get such a source")

    def episodes(self) -> Any:
        raise AssertionError("it must not be read")


FOREIGN = {
    "external": r"bad must not have its rows in other files, got '.*secret'",
    "link": r"bad must not be a link to another file, got '.*other.hdf5: /x'",
    "virtual": r"bad must not be a virtual data set over other files, got '.*other.hdf5'",
    "dangling": r"bad must not be a link to nothing, got '/nowhere'",
    "loop": r"bad must not be a link to nothing|must be a readable HDF5 file",
}


def refer(group: h5py.Group, kind: str, at: Path) -> None:
    """Make an array or a link that has its content elsewhere."""
    if kind == "external":
        group.create_dataset("bad", (len(SECRET), 1), "u1", external=[(str(at / "secret"), 0, len(SECRET))])
    elif kind == "virtual":
        layout = h5py.VirtualLayout((8, 1), "f4")
        layout[:] = h5py.VirtualSource(str(at / "other.hdf5"), "x", (8, 1))
        group.create_virtual_dataset("bad", layout)
    elif kind == "link":
        group["bad"] = h5py.ExternalLink(str(at / "other.hdf5"), "/x")
    else:
        group["bad"] = h5py.SoftLink("/nowhere" if kind == "dangling" else f"{group.name}/bad")


def refuse(source: Path, text: str, dest: Path, **options: Any) -> None:
    """Every way in refuses a source: by its content, by format, and for a reader of the user's."""
    for way in ("auto", f"{__name__}:OwnReader"):
        with pytest.raises(DataError, match=text):
            ingest([source], dest, format=way, **options)
    assert not dest.exists()


@pytest.mark.parametrize("kind", FOREIGN)
@pytest.mark.parametrize("form", ["d4rl", "minari file", "minari folder"])
def test_other_files(tmp_path: Path, d4rl: Maker, minari: Maker, form: str, kind: str) -> None:
    (tmp_path / "secret").write_bytes(SECRET)
    with h5py.File(tmp_path / "other.hdf5", "w") as other:
        other["x"] = np.zeros((8, 1), "f4")
    source = tmp_path / "source"
    if form == "d4rl":
        d4rl(source)
        file, place = source, "infos/deep"
    else:
        minari(source)
        file, place = source / "main_data.hdf5", "episode_1/infos"
        source = file if form == "minari file" else source
    with h5py.File(file, "a") as opened:
        refer(opened.require_group(place), kind, tmp_path)
    refuse(source, FOREIGN[kind], tmp_path / "out")


def test_links_within_a_file_are_read(tmp_path: Path, d4rl: Maker) -> None:
    d4rl(tmp_path / "source")
    with h5py.File(tmp_path / "source", "a") as file:
        file.require_group("infos")
        file.move("actions", "infos/same")
        file["actions"] = h5py.SoftLink("/infos/same")
        file["around"] = file["/"]  # a cycle of hard links
    assert "infos.same" in ingest([tmp_path / "source"], tmp_path / "out", columns=["infos.same"]).schema


@pytest.mark.parametrize("form", ["hdf5", "arrow"])
def test_links_out_of_a_folder(tmp_path: Path, minari: Maker, form: str) -> None:
    minari(tmp_path / "outside", form)
    minari(tmp_path / "set", form)
    name = "main_data.hdf5" if form == "hdf5" else "1"
    for target in (tmp_path / "outside" / name, Path("..", "outside", name)):
        shutil.rmtree(tmp_path / "set" / name) if form == "arrow" else (tmp_path / "set" / name).unlink()
        (tmp_path / "set" / name).symlink_to(target)
        refuse(tmp_path / "set", rf"{name} must not be a link out of .*cp -rL", tmp_path / "out")
        (tmp_path / "set" / name).unlink()
        copy = shutil.copytree if form == "arrow" else shutil.copy
        copy(tmp_path / "outside" / name, tmp_path / "set" / name)
    (tmp_path / "set" / "again").symlink_to(name)
    (tmp_path / "by_link").symlink_to(tmp_path / "set")  # which the user has named
    assert len(ingest([tmp_path / "by_link"], tmp_path / "out")) == 3
    os.mkfifo(tmp_path / "set" / "pipe")
    with pytest.raises(DataError, match="pipe must be a file or a folder"):
        open_source(tmp_path / "set")


@pytest.fixture
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_checks, "FLOOR_BYTES", 1 << 16)


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize(
    "options", [{"compression": "gzip", "chunks": (1000, 64)}, {"chunks": (1, 1 << 18)}, {}]
)
def test_declared_arrays_are_bounded_by_the_file(
    tmp_path: Path, d4rl: Maker, options: dict[str, Any]
) -> None:
    """Compressed well, never written, or with a chunk that is larger than the array."""
    d4rl(tmp_path / "source")
    with h5py.File(tmp_path / "source", "a") as file:
        shape = (8, 1) if options.get("chunks", (0, 0))[1] == 1 << 18 else (1_000_000, 64)
        file.create_dataset("infos/bad", shape, "f8", maxshape=(None, None) if options else None, **options)
    rule = r"source must hold at most 100 bytes for each of the \d+ bytes of its files.*--max-expansion"
    refuse(tmp_path / "source", rule, tmp_path / "out")
    if "compression" not in options and options:
        data = ingest([open_source(tmp_path / "source", max_expansion=1e6)], tmp_path / "out")
        assert "infos.bad" in data.schema


def test_an_expansion_is_a_number() -> None:
    for wrong in (0.5, float("nan"), True, "9"):
        with pytest.raises(ConfigError, match="max_expansion must be a number of at least 1"):
            Expansion(wrong)  # type: ignore[arg-type]


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize("form", ["arrow", "parquet"])
def test_compressed_tables_are_bounded(tmp_path: Path, minari: Maker, form: str) -> None:
    minari(tmp_path / "set", form)
    path = tmp_path / "set" / "1" / f"part-0.{form}"
    reader: Any = pa.ipc.open_file(path) if form == "arrow" else pa.parquet.ParquetFile(path)
    table = reader.read_all() if form == "arrow" else reader.read()
    zeros = pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(4_000_000)), 2_000_000)
    wide = table.append_column("infos", pa.StructArray.from_arrays([zeros], ["bad"]))
    if form == "arrow":
        with pa.ipc.new_file(path, wide.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as out:
            out.write_table(wide)
    else:
        pa.parquet.write_table(wide, path, compression="zstd")
    before = pa.default_memory_pool().max_memory()
    refused = pytest.raises(DataError, match="must hold at most 100 bytes for each of")
    with refused, open_source(tmp_path / "set") as found:
        list(found.episodes())
    if form == "arrow":
        assert pa.default_memory_pool().max_memory() == before, "it was decompressed"
    with open_source(tmp_path / "set", columns=["episode_id"], max_expansion=1e6) as found:
        assert len(list(found.episodes())) == 3


def test_stated_sizes_of_arrow_batches() -> None:
    plain = pa.record_batch([pa.array(np.arange(1000)), pa.array(["a" * 50] * 1000)], names=["n", "text"])
    words = pa.record_batch([pa.array(["a" * 50] * 1000).dictionary_encode()], names=["text"])
    for batch, least in ((plain, 8000 + 50_000), (words, 4000)):
        for codec in (None, "lz4", "zstd"):
            sink = pa.BufferOutputStream()
            options = pa.ipc.IpcWriteOptions(compression=codec)
            with pa.ipc.new_stream(sink, batch.schema, options=options) as out:
                out.write_batch(batch)
            _, *messages = pa.ipc.MessageReader.open_stream(sink.getvalue())
            stated = [decompressed_bytes(message) for message in messages]
            assert all(size is None for size in stated) if codec is None else sum(map(int, stated)) >= least


@pytest.mark.usefixtures("_small")
def test_images_are_bounded_before_they_are_decoded() -> None:
    image = pytest.importorskip("PIL.Image")
    sink = io.BytesIO()
    image.new("RGB", (3000, 3000)).save(sink, "JPEG")
    with pytest.raises(DataError, match="it must hold at most 100 bytes for each"):
        decode_images("it", [sink.getvalue()] * 100, Expansion(), 1 << 30)
    small = io.BytesIO()
    image.new("RGB", (8, 8)).save(small, "JPEG")
    assert decode_images("it", [small.getvalue()] * 2, Expansion(), 1 << 30).shape == (2, 8, 8, 3)


def test_lengths_are_no_archive(tmp_path: Path) -> None:
    with (tmp_path / "lengths.npy").open("wb") as file:
        np.savez(file, lengths=np.ones(3, np.int64))
    with pytest.raises(DataError, match="must be a file of whole numbers"):
        read_lengths(tmp_path / "lengths.npy")
