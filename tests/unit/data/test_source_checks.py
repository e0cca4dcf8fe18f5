"""Sources that refer to other files, or decompress to more than they can be worth, are refused by
name.

Every refusal is asked for through both doors: `ingest` of a program and the `gear ingest` command.
"""

import bz2
import contextlib
import gzip
import io
import json
import os
import pickle
import re
import shutil
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from deepspeed_gear import Dataset
from deepspeed_gear.cli.main import main
from deepspeed_gear.data.arrow_messages import decompressed_bytes
from deepspeed_gear.data.ingest import READERS, ingest, ingested, open_source, source_checks
from deepspeed_gear.data.ingest.decoding.image_decoding import decode_images
from deepspeed_gear.data.ingest.reader import Reader
from deepspeed_gear.data.ingest.source_checks import Expansion
from deepspeed_gear.errors import ConfigError, DataError
from deepspeed_gear.replay.packed.pack_preview import read_lengths

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
        group.create_dataset(
            "bad", (len(SECRET), 1), "u1", external=[(str(at / "secret"), 0, len(SECRET))]
        )
    elif kind == "virtual":
        layout = h5py.VirtualLayout((8, 1), "f4")
        layout[:] = h5py.VirtualSource(str(at / "other.hdf5"), "x", (8, 1))
        group.create_virtual_dataset("bad", layout)
    elif kind == "link":
        group["bad"] = h5py.ExternalLink(str(at / "other.hdf5"), "/x")
    else:
        group["bad"] = h5py.SoftLink("/nowhere" if kind == "dangling" else f"{group.name}/bad")


WAYS = ("auto", f"{__name__}:OwnReader")  # by its content, and for a reader of the user's


def refuse(source: Path, text: str, dest: Path, ways: Sequence[str] = WAYS, **options: Any) -> None:
    """Every way in refuses a source, from a program and from the command line, in the
    same words.
    """
    for way in ways:
        with pytest.raises(DataError, match=text):
            ingest([open_source(source, way, **options)], dest)
        given = [f"--{name.replace('_', '-')}" for name in options]  # each is a flag
        with contextlib.redirect_stderr(io.StringIO()) as shown:
            status = main(["ingest", str(source), str(dest), "--format", way, "--quiet", *given])
        assert (status, "gear: error: " in shown.getvalue()) == (2, True), shown.getvalue()
        assert re.search(text, shown.getvalue()), shown.getvalue()
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
        file = source
        place = "infos/deep"
    else:
        minari(source)
        file = source / "main_data.hdf5"
        place = "episode_1/infos"
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
    assert (
        "infos.same"
        in ingest([tmp_path / "source"], tmp_path / "out", columns=["infos.same"]).schema
    )


@pytest.mark.parametrize("form", ["hdf5", "arrow"])
def test_links_out_of_a_folder(tmp_path: Path, minari: Maker, form: str) -> None:
    minari(tmp_path / "outside", form)
    minari(tmp_path / "set", form)
    name = "main_data.hdf5" if form == "hdf5" else "1"
    for target in (tmp_path / "outside" / name, Path("..", "outside", name)):
        shutil.rmtree(tmp_path / "set" / name) if form == "arrow" else (
            tmp_path / "set" / name
        ).unlink()
        (tmp_path / "set" / name).symlink_to(target)
        refuse(tmp_path / "set", rf"{name} must not be a link out of .*cp -rL", tmp_path / "out")
        (tmp_path / "set" / name).unlink()
        copy = shutil.copytree if form == "arrow" else shutil.copy
        copy(tmp_path / "outside" / name, tmp_path / "set" / name)
    (tmp_path / "set" / "again").symlink_to(name)
    (tmp_path / "by_link").symlink_to(tmp_path / "set")  # which the user has named
    assert len(ingest([tmp_path / "by_link"], tmp_path / "out")) == 3
    os.mkfifo(tmp_path / "set" / "pipe")
    refuse(tmp_path / "set", "pipe must be a file or a folder", tmp_path / "gone")


@pytest.fixture
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_checks, "FLOOR_BYTES", 1 << 16)


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n"
IS_POINTER = "must contain the data, got 'a Git LFS pointer'; run git lfs pull"
TOO_LARGE = r"must hold at most 100 bytes for each of the \d+ bytes of its files.*--max-expansion"
ZEROS = bytes(8 << 20)


def _file(name: str, content: bytes) -> Callable[[Path], Path]:
    def make(at: Path) -> Path:
        path = at / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return path

    return make


def _folder(name: str, content: bytes = POINTER) -> Callable[[Path], Path]:
    def make(at: Path) -> Path:
        _file(f"set/{name}", content)(at)
        return at / "set"

    return make


def _link(target: str) -> Callable[[Path], Path]:
    def make(at: Path) -> Path:
        (at / "set").mkdir()
        (at / "secret").write_bytes(SECRET)
        (at / "set" / "episode.jsonl").symlink_to(target)
        return at / "set"

    return make


def _device(name: str) -> Callable[[Path], Path]:
    return lambda _: Path("/dev", name)


def _fifo(at: Path) -> Path:
    os.mkfifo(at / "pipe.npz")
    return at / "pipe.npz"


def _archive(
    name: str, kind: int = zipfile.ZIP_DEFLATED, **contents: bytes
) -> Callable[[Path], Path]:
    def make(at: Path) -> Path:
        with zipfile.ZipFile(at / name, "w", kind) as archive:
            for entry, content in contents.items():
                archive.writestr(f"{entry}.npy", content)
        return at / name

    return make


def _hdf5(at: Path) -> Path:
    with h5py.File(at / "a.hdf5", "w") as file:
        for name in ("observations", "actions"):
            file.create_dataset(name, (1 << 40, 8), "f4", chunks=(1024, 8))
    return at / "a.hdf5"


def _parquet(at: Path) -> Path:
    rows = pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(4_000_000)), 2_000_000)
    table = pa.table({"observation": rows, "action": rows})
    pa.parquet.write_table(table, at / "a.parquet", compression="zstd")
    return at / "a.parquet"


def _arrow(at: Path) -> Path:
    table = pa.table({"observation": np.zeros(4_000_000), "action": np.zeros(4_000_000)})
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_file(at / "a.arrow", table.schema, options=options) as out:
        out.write_table(table)
    return at / "a.arrow"


def _of_objects() -> bytes:
    """Return an object array whose pickle holds a set for each byte."""
    with io.BytesIO() as file:
        np.lib.format.write_array(file, np.array([None], object))
        head = file.getvalue()
    return head[: head.index(b"\x80")] + b"\x80\x04(" + b"\x8f" * 200_000 + b"t."


# A source, how it is refused, the ways that see it before a reader does (both) or by its reader
# (the first), and options.
REFUSED: dict[str, tuple[Callable[[Path], Path], str, int, dict[str, Any]]] = {
    "missing": (lambda at: at / "gone", "gone must exist; check the path", 2, {}),
    "missing npz": (lambda at: at / "gone.npz", "gone.npz must exist; check the path", 2, {}),
    "missing table": (
        lambda at: at / "gone.parquet",
        "gone.parquet must exist; check the path",
        2,
        {},
    ),
    "long name": (
        lambda at: at / ("x" * 5000),
        "must be readable, got .*File name too long",
        2,
        {},
    ),
    "fifo": (_fifo, "pipe.npz must be a file or a folder, got 'prw", 2, {}),
    "device": (_device("zero"), "/dev/zero must be a file or a folder, got 'crw", 2, {}),
    "link out": (_link("../secret"), "jsonl must not be a link out of .*cp -rL", 2, {}),
    "link to /etc": (
        _link("/etc/passwd"),
        "jsonl must not be a link out of .*got '/etc/passwd'",
        2,
        {},
    ),
    "link to nothing": (_link("gone"), "jsonl must not be a link to nothing, got 'gone'", 2, {}),
    "link to itself": (_link("episode.jsonl"), "jsonl must not be a link to nothing", 2, {}),
    "pointer": (_file("a.hdf5", POINTER), f"a.hdf5 {IS_POINTER}", 2, {}),
    "pointer of a table": (_file("a.parquet", POINTER), f"a.parquet {IS_POINTER}", 2, {}),
    "pointer without a suffix": (_file("data", POINTER), f"data {IS_POINTER}", 2, {}),
    "pointer, Minari": (_folder("main_data.hdf5"), f"main_data.hdf5 {IS_POINTER}", 1, {}),
    "pointer, LeRobot": (_folder("meta/info.json"), f"info.json {IS_POINTER}", 1, {}),
    "pointer, tables": (_folder("a.parquet"), f"a.parquet {IS_POINTER}", 1, {}),
    "pointer, lines": (_folder("a.jsonl"), f"a.jsonl {IS_POINTER}", 1, {}),
    "pointer, packed lines": (_folder("a.jsonl.gz"), f"a.jsonl.gz {IS_POINTER}", 1, {}),
    "pointer, unknown": (_folder("deep/a.bin"), f"a.bin {IS_POINTER}", 1, {}),
    "HDF5 bomb": (_hdf5, f"a.hdf5 {TOO_LARGE}", 2, {}),
    "npz bomb": (_archive("a.npz", obs=ZEROS, acts=ZEROS), f"a.npz {TOO_LARGE}", 2, {}),
    "export bomb": (_archive("a.npz", gear_schema=ZEROS), f"a.npz {TOO_LARGE}", 2, {}),
    "zip bomb": (_archive("a", obs=ZEROS), f"a {TOO_LARGE}", 2, {}),
    "parquet bomb": (_parquet, f"a.parquet: column observation.list.element {TOO_LARGE}", 1, {}),
    "arrow bomb": (_arrow, f"a.arrow {TOO_LARGE}", 1, {}),
    "gzip bomb": (_file("a.jsonl.gz", gzip.compress(ZEROS)), f"a.jsonl.gz {TOO_LARGE}", 1, {}),
    "bzip2 bomb": (_file("a.jsonl.bz2", bz2.compress(ZEROS)), f"a.jsonl.bz2 {TOO_LARGE}", 1, {}),
    "pickle": (
        _file("a.pkl", pickle.dumps([{}], 4)),
        "a.pkl must not be a pickle; --allow-pickle",
        1,
        {},
    ),
    "pickled npz": (
        _archive("a.npz", zipfile.ZIP_STORED, obs=_of_objects()),
        f"a.npz: obs {TOO_LARGE}",
        1,
        {"allow_pickle": True},
    ),
    "pickle bomb": (
        _file("a.pkl", b"\x80\x04](" + b"\x8f" * 200_000 + b"e."),
        f"a.pkl {TOO_LARGE}",
        1,
        {"allow_pickle": True},
    ),
}


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize("case", REFUSED)
def test_refused_sources(tmp_path: Path, case: str) -> None:
    make, text, num_ways, options = REFUSED[case]
    refuse(make(tmp_path), text, tmp_path / "out", WAYS[:num_ways], **options)


@pytest.mark.parametrize("form", READERS)
def test_what_is_of_another_format_is_refused(tmp_path: Path, d4rl: Maker, form: str) -> None:
    """Each format refuses each foreign content in the words of a DataError."""
    d4rl(tmp_path / "a.hdf5")
    (tmp_path / "folder").mkdir()
    made = [tmp_path / "a.hdf5", tmp_path / "folder"]
    arrays = _archive("a.npz", obs=b"", gear_schema=b"x")(tmp_path)
    made += [
        _folder("meta/info.json", b"")(tmp_path),
        _file("a.pkl", b"\x80\x04.")(tmp_path),
        arrays,
    ]
    made += [
        _file(name, b"")(tmp_path) for name in ("a.parquet", "a.arrow", "a.json", "empty.hdf5")
    ]
    for source in made:
        if not (form == "d4rl" and source.name == "a.hdf5"):
            with pytest.raises(DataError, match=source.name):
                ingest([open_source(source, form)], tmp_path / "out")


def test_remedies_name_the_source(tmp_path: Path, d4rl: Maker) -> None:
    (tmp_path / "set").mkdir()
    d4rl(tmp_path / "set" / "a.hdf5")
    refuse(
        tmp_path / "set",
        "must have a known layout.*; give the file in it: .*/a.hdf5",
        tmp_path / "out",
        WAYS[:1],
    )
    with pytest.raises(
        DataError, match=r"set must be an HDF5 file, got 'a folder'; give the file in it: .*/a.hdf5"
    ):
        open_source(tmp_path / "set", "d4rl")
    d4rl(tmp_path / "set" / "b.hdf5")
    refuse(tmp_path / "set", "; give its files, such as .*/a.hdf5", tmp_path / "out", WAYS[:1])
    for content in ("", "[]", '{"version": 3}'):
        _folder("meta/info.json", content.encode())(tmp_path / "other")
        with pytest.raises(DataError, match=r"info\.json") as caught:
            open_source(tmp_path / "other" / "set")
        assert "gear ingest" not in str(caught.value)


def test_rows_of_a_program_are_no_option(tmp_path: Path) -> None:
    """No option takes a source around its checks."""
    for given in ([{"action": [0]}], {}, 0):
        with pytest.raises(TypeError, match="unexpected keyword argument 'rows'"):
            open_source(_file("a.json", b"[]")(tmp_path), rows=given)
    with pytest.raises(ConfigError, match="source must be a path, got 'list'"):
        open_source([{"action": [0]}])  # type: ignore[arg-type]
    with pytest.raises(
        DataError, match="rows must be rows of a program, got 'str'; open_source reads"
    ):
        Dataset.from_iterable(str(tmp_path / "a.hdf5"), tmp_path / "out")


@pytest.mark.usefixtures("_small")
def test_rows_that_share_their_bytes_are_counted(tmp_path: Path, minari: Maker) -> None:
    """In HDF5 each row of any length is a reference, and all may be to one place."""
    minari(tmp_path / "a")
    path = tmp_path / "a" / "main_data.hdf5"
    count = 2000
    kind = h5py.vlen_dtype(np.uint8)
    with h5py.File(path, "a") as file:
        rows = file.require_group("episode_0/infos").create_dataset("bad", (count,), kind)
        rows[0] = np.zeros(100_000, np.uint8)
        rows[1:] = [np.zeros(1, np.uint8)] * (count - 1)
        begin = rows.id.get_offset()
        size = rows.id.get_storage_size()
        texts = file.require_group("episode_0/infos").create_dataset(
            "text", (8,), h5py.string_dtype()
        )
        texts[:] = ["x"] * 8
    content = bytearray(path.read_bytes())
    content[begin : begin + size] = bytes(content[begin : begin + size // count]) * count
    path.write_bytes(content)
    refuse(path, rf"infos/bad {TOO_LARGE}", tmp_path / "out", WAYS[:1])
    with pytest.raises(DataError, match="infos/text must be numeric"):
        open_source(path, columns=["infos.text"])


def test_descriptions_of_sources_are_json(tmp_path: Path, minari: Maker) -> None:
    minari(tmp_path / "a")
    path = tmp_path / "a" / "metadata.json"
    good = json.loads(path.read_text())
    for changes in ({"author": float("nan")}, {"description": [float("inf")]}):
        path.write_text(json.dumps({**good, **changes}))
        refuse(
            tmp_path / "a",
            r"metadata.json: .* must be JSON of finite numbers",
            tmp_path / "out",
            WAYS[:1],
        )
    path.write_text(json.dumps(good))
    with h5py.File(tmp_path / "a" / "main_data.hdf5", "a") as file:
        file["episode_0"].attrs["total_steps"] = "many"
    refuse(
        tmp_path / "a",
        "total_steps must be a whole number in every episode",
        tmp_path / "out",
        WAYS[:1],
    )
    with h5py.File(tmp_path / "b.hdf5", "w") as file:
        file.create_group("data/demo_0").attrs["x"] = 1
        file["data/demo_0/actions"] = np.zeros(2)
        file["data/demo_0/obs"] = np.zeros((2, 1))
        file["data/demo_0/dones"] = np.arange(2)
        file["data/demo_0/rewards"] = np.zeros(2)
        file["data"].attrs["env_args"] = '{"a": NaN}'
    refuse(
        tmp_path / "b.hdf5", "env_args must be JSON of finite numbers", tmp_path / "out", WAYS[:1]
    )


def test_other_doors_check_their_files(tmp_path: Path) -> None:
    """Those that a config names (`data`, prompts), and lengths."""
    with pytest.raises(DataError, match=rf"a\.jsonl {IS_POINTER}"):
        ingested(_file("a.jsonl", POINTER)(tmp_path))
    with pytest.raises(DataError, match=r"pipe\.npz must be the folder of a data set"):
        ingested(_fifo(tmp_path))
    packed = gzip.compress(b"1\n" * 1000)
    lengths = {
        "a.txt": (POINTER, IS_POINTER),
        "a.npy": (POINTER, IS_POINTER),
        "a.txt.gz": (packed, "whole numbers"),
    }
    for name, (content, text) in lengths.items():
        with pytest.raises(DataError, match=text):
            read_lengths(_file(name, content)(tmp_path))
    huge = b"\x93NUMPY\x01\x00\x76\x00"
    huge += b"{'descr': '<i8', 'fortran_order': False, 'shape': (9999999999999999999,), }".ljust(
        118
    )
    for path in (
        tmp_path / "pipe.npz",
        Path("/dev/zero"),
        tmp_path / "gone",
        _file("b.npy", huge)(tmp_path),
    ):
        with pytest.raises(DataError, match=str(path)):
            read_lengths(path)
    (tmp_path / "a.txt").write_text("3\n1\n")
    assert read_lengths(tmp_path / "a.txt").tolist() == [3, 1]


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
        file.create_dataset(
            "infos/bad", shape, "f8", maxshape=(None, None) if options else None, **options
        )
    rule = (
        r"source must hold at most 100 bytes for each of the \d+ bytes of its "
        r"files.*--max-expansion"
    )
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
        with pa.ipc.new_file(
            path, wide.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")
        ) as out:
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
    plain = pa.record_batch(
        [pa.array(np.arange(1000)), pa.array(["a" * 50] * 1000)], names=["n", "text"]
    )
    words = pa.record_batch([pa.array(["a" * 50] * 1000).dictionary_encode()], names=["text"])
    for batch, least in ((plain, 8000 + 50_000), (words, 4000)):
        for codec in (None, "lz4", "zstd"):
            sink = pa.BufferOutputStream()
            options = pa.ipc.IpcWriteOptions(compression=codec)
            with pa.ipc.new_stream(sink, batch.schema, options=options) as out:
                out.write_batch(batch)
            _, *messages = pa.ipc.MessageReader.open_stream(sink.getvalue())
            stated = [decompressed_bytes(message) for message in messages]
            assert (
                all(size is None for size in stated)
                if codec is None
                else sum(map(int, stated)) >= least
            )


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
