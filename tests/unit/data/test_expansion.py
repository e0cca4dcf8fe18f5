"""Small files that declare gigabytes are refused by name, or read in their true size, through both
doors.
"""

import gzip
import io
import json
import pickle
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from gear_support import run_command

from deepspeed_gear import Column, Schema
from deepspeed_gear.cli import ingest as command
from deepspeed_gear.data.array_values import as_array, holds_text
from deepspeed_gear.data.ingest import open_source, source_checks
from deepspeed_gear.data.ingest.decoding.arrow_sizes import ArrowSizes
from deepspeed_gear.data.ingest.decoding.image_decoding import decode_images
from deepspeed_gear.data.ingest.source_checks import Expansion
from deepspeed_gear.data.ingest.table_blocks import json_bytes
from deepspeed_gear.errors import DataError

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
FLOOR_BYTES = 1 << 20
# rows of nothing, and elements of what is repeated
ROWS = 50_000
LONG = 40_000
Maker = Callable[[], Any]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_checks, "FLOOR_BYTES", FLOOR_BYTES)


def zeros(count: int, dtype: type = np.int32) -> Any:
    return pa.array(np.zeros(count, dtype))


def runs(count: int, values: list[Any]) -> Any:
    return pa.RunEndEncodedArray.from_arrays(pa.array([count], pa.int32()), pa.array(values))


def no_width(kind: Any, count: int, *children: Any) -> Any:
    return pa.Array.from_buffers(kind, count, [None], children=[*children])


def views(kind: Any, count: int) -> Any:
    """Return views of one text of `LONG` letters."""
    entries = np.zeros((count, 4), np.int32)
    # the length, and the first letters
    entries[:, 0] = LONG
    entries[:, 1] = 0x78787878
    buffers = [None, pa.py_buffer(entries), pa.py_buffer(b"x" * LONG)]
    return pa.Array.from_buffers(kind, count, buffers)


def words(count: int, word: Any) -> Any:
    return pa.DictionaryArray.from_arrays(zeros(count, np.int8), pa.array([word]))


def empty_lists(count: int) -> Any:
    return no_width(pa.list_(pa.float32(), 0), count, pa.array([], pa.float32()))


ARROW: dict[str, Maker] = {
    "rows of nulls": lambda: pa.nulls(ROWS),
    "rows of structs": lambda: pa.StructArray.from_buffers(pa.struct([]), ROWS, [None]),
    "rows of lists": lambda: empty_lists(ROWS),
    "tensors": lambda: pa.ExtensionArray.from_storage(
        pa.fixed_shape_tensor(pa.float32(), (0,)), empty_lists(ROWS)
    ),
    "runs": lambda: runs(ROWS, [1.0]),
    "runs of a text": lambda: runs(200, ["x" * LONG]),
    "list of nulls": lambda: pa.ListArray.from_arrays(
        pa.array([0, 200_000], pa.int32()), pa.nulls(200_000)
    ),
    "list views": lambda: pa.ListViewArray.from_arrays(
        zeros(50), pa.array([LONG] * 50, pa.int32()), zeros(LONG)
    ),
    "list views of texts": lambda: pa.ListViewArray.from_arrays(
        zeros(9), pa.array([LONG] * 9, pa.int32()), pa.array(["a", "b"] * (LONG // 2))
    ),
    "text views": lambda: views(pa.string_view(), 200),
    "byte views": lambda: views(pa.binary_view(), 200),
    "a text in a dictionary": lambda: words(200, "x" * LONG),
    "a list in a dictionary": lambda: words(200, list(range(LONG))),
    "a dictionary in a struct": lambda: pa.StructArray.from_arrays(
        [words(200, "x" * LONG)], ["word"]
    ),
    "a dictionary in a list": lambda: pa.ListArray.from_arrays(
        pa.array([0, 200], pa.int32()), words(200, "x" * LONG)
    ),
    "a dictionary in a map": lambda: pa.MapArray.from_arrays(
        pa.array([0, 200], pa.int32()), zeros(200), words(200, "x" * LONG)
    ),
    "a union": lambda: pa.UnionArray.from_dense(
        zeros(200, np.int8), zeros(200), [pa.array(["x" * LONG])]
    ),
}
PARQUET: dict[str, Maker] = {
    "a text": lambda: words(200, "x" * LONG),
    "a text in lists": lambda: pa.array([["x" * LONG] * 200]),
    "a text in objects": lambda: pa.array([[{"role": "x" * LONG}] * 200]),
    "bytes of a size": lambda: pa.array([b"x" * LONG] * 200, pa.binary(LONG)),
    "a list": lambda: pa.array([[7] * 400_000]),
    "lists of nulls": lambda: pa.array([[None] * 300_000], pa.list_(pa.int64())),
    "rows of nulls": lambda: pa.nulls(ROWS),
}


def write(path: Path, array: Any, is_beside_steps: bool = False) -> Path:
    """Write a table of one column, or one of steps that also has this column."""
    columns = {"value": array}
    if is_beside_steps:
        count = len(array)
        columns = {"episode_id": zeros(count), "action": zeros(count, np.int8), **columns}
    table = pa.table(columns)
    if path.suffix == ".parquet":
        parquet.write_table(table, path, compression="zstd", store_schema=False)
    else:
        with pa.ipc.new_file(str(path), table.schema) as writer:
            writer.write_table(table)
    return path


def refuse(source: Path, text: str, **options: Any) -> None:
    """Both doors refuse a source by name, and no data set is made."""
    with pytest.raises(DataError, match=text), open_source(source, **options) as reader:
        list(reader.episodes())
    dest = source.with_name("out")
    given = [f"--{name.replace('_', '-')}" for name, value in options.items() if value is True]
    with pytest.raises(DataError, match=text):
        run_command(command, str(source), str(dest), "--quiet", *given)
    assert not dest.exists()


TOO_LARGE = (
    r"must hold at most 100 bytes for each of the \d+ bytes of its files, got .*--max-expansion"
)


@pytest.mark.parametrize("is_beside_steps", [False, True])
@pytest.mark.parametrize("name", ARROW)
def test_arrow(tmp_path: Path, name: str, is_beside_steps: bool) -> None:
    array = ARROW[name]()
    source = write(tmp_path / "a.arrow", array, is_beside_steps)
    if source.stat().st_size > FLOOR_BYTES // 100 and len(array) == ROWS and is_beside_steps:
        return  # the other columns are large enough for rows of nothing
    found = r"\d+ rows" if len(array) == ROWS else "column value of"
    refuse(source, rf"a.arrow: {found}.* {TOO_LARGE}")


@contextmanager
def own_pool() -> Iterator[Any]:
    """Give pyarrow a memory pool that counts the allocations of the block only."""
    before = pa.default_memory_pool()
    pool = pa.proxy_memory_pool(before)
    pa.set_memory_pool(pool)
    try:
        yield pool
    finally:
        pa.set_memory_pool(before)


@pytest.mark.parametrize("name", PARQUET)
def test_parquet(tmp_path: Path, name: str) -> None:
    source = write(tmp_path / "a.parquet", PARQUET[name](), True)
    with own_pool() as pool:
        refuse(source, rf"a.parquet: (column value|\d+ rows).* {TOO_LARGE}")
    assert pool.max_memory() < 4 * FLOOR_BYTES, "it was decoded"


@pytest.mark.parametrize("name", ["runs", "list views"])
def test_extension_types_inside(tmp_path: Path, name: str) -> None:
    """In some layouts pyarrow ends the process when it makes an object of them."""
    inside = pa.ExtensionArray.from_storage(pa.json_(pa.string()), pa.array(["1"]))
    made = {
        "runs": lambda: pa.RunEndEncodedArray.from_arrays(pa.array([2], pa.int32()), inside),
        "list views": lambda: pa.ListViewArray.from_arrays(
            zeros(2), pa.array([1, 1], pa.int32()), inside
        ),
    }
    refuse(
        write(tmp_path / "a.arrow", made[name](), True),
        "column value must hold values that Python can represent",
    )


@pytest.mark.parametrize("kind", ["union", "runs"])
def test_nulls_of_structs(tmp_path: Path, kind: str) -> None:
    """pyarrow ends the process that gives a union or runs the nulls of their struct."""
    part = pa.UnionArray.from_sparse(zeros(3, np.int8), [pa.array(["a", "b", "c"])])
    part = part if kind == "union" else runs(3, ["a"])
    made = pa.StructArray.from_arrays(
        [part, zeros(3)], ["x", "y"], mask=pa.array([False, True, False])
    )
    with open_source(write(tmp_path / "a.arrow", made, True)) as reader:
        values = [arrays["value.x"] for _, arrays in reader.episodes()]
    assert values == [["a", None, "c" if kind == "union" else "a"]]


def uneven() -> Any:
    """Numbers that become JSON: an array of 0.1 MB is a list of many times that."""
    return pa.array([[[1] * 20_000, [2] * 20_001]] * 2, pa.list_(pa.list_(pa.int8())))


def test_numbers_that_become_json(tmp_path: Path) -> None:
    source = write(tmp_path / "a.parquet", uneven(), True)
    refuse(source, rf"episode 0: value {TOO_LARGE}")


def test_json_lines_that_are_compressed(tmp_path: Path) -> None:
    """Parsed, each bracket is an object; those of text that is not compressed are never
    too many.
    """
    text = b'{"action": [0, 0], "value": [' + b"[1]," * LONG + b"[1]]}\n"
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(text))
    refuse(tmp_path / "a.jsonl.gz", rf"a.jsonl.gz {TOO_LARGE}")
    (tmp_path / "b.jsonl").write_bytes(text)
    with open_source(tmp_path / "b.jsonl") as reader:
        assert len(list(reader.episodes())) == 1
    for part in (b"[],", b"{},", b"0,", b'{"":', b"[", b'"",'):
        assert json_bytes(part * 100) <= 100 * 100 * len(part)


TEXTS = ["a"] * 2000 + ["x" * LONG]  # as NumPy's array of texts 320 MB


def peak_bytes(source: Path, **options: Any) -> tuple[int, list[str]]:
    """Return the most bytes that both passes over a source take, and its notes."""
    tracemalloc.start()
    try:
        with open_source(source, **options) as reader:
            assert sum(len(arrays["action"]) for _, arrays in reader.episodes()) == len(TEXTS)
            return tracemalloc.get_traced_memory()[1], reader.notes
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "texts", [TEXTS, [[text] for text in TEXTS], [*TEXTS[:-1], [1], *TEXTS[-1:]][1:]]
)
@pytest.mark.parametrize("form", ["rllib", "pickle", "pickle of arrays"])
def test_texts_have_their_own_size(tmp_path: Path, texts: list[Any], form: str) -> None:
    """Texts are left out with a note, as other objects are; NumPy would pad each to the longest."""
    count = len(texts)
    columns: dict[str, Any] = {
        "obs": [[0.0]] * (count + 1),
        "actions": [0] * count,
        "rewards": [0.0] * count,
    }
    columns |= {"dones": [False] * (count - 1) + [True], "names": texts}
    source = tmp_path / "source"
    options = {}
    if form == "rllib":
        columns["obs"].pop()
        source.write_text(json.dumps({"type": "SampleBatch", **columns, "eps_id": [1] * count}))
        columns["new_obs"] = columns["obs"]
        source.write_text(json.dumps({"type": "SampleBatch", **columns}))
    else:
        if form == "pickle of arrays":
            columns["names"] = [np.array(text) for text in columns["names"]]
        source.write_bytes(pickle.dumps([columns], protocol=4))
        options["allow_pickle"] = True
    peak, notes = peak_bytes(source, **options)
    assert peak < 32 << 20
    assert any(note.startswith("names: not arrays of numbers") for note in notes)
    dest = tmp_path / "out"
    given = ["--allow-pickle"] if options else []
    assert run_command(command, str(source), str(dest), "--quiet", *given) == 0


@pytest.mark.parametrize("tokens", [TEXTS, [[1], [1, 2]]])
def test_tokens_of_another_kind(tmp_path: Path, tokens: list[Any]) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"tokens": [tokens]}))
    tracemalloc.start()
    try:
        refuse(tmp_path / "a.jsonl", "row 0: tokens must be a list of numbers")
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()


def test_arrays_of_lists_with_texts() -> None:
    assert as_array([[1, 2], [3, 4]]).shape == (2, 2)
    assert as_array("text").shape == ()
    same: Any = [[0.0]]
    for _ in range(40):
        same = [same] * 1000  # of which each list is visited once
    assert not holds_text(same)
    for value in (["a"], [[1], (b"a",)], np.array(["a"]), [np.array(b"a")], [np.str_("a")]):
        assert holds_text(value)
        assert as_array(value).dtype == object
    for number in (1, None, np.zeros(3), [1, 2.0, None], [{"a": "b"}], [np.zeros(2)]):
        assert not holds_text(number)


@pytest.mark.parametrize("kind", ["texts", "numbers"])
def test_counted_sizes_are_at_least_those_of_the_objects(kind: str) -> None:
    """`sys.getsizeof` of what pyarrow makes, for arrays of all layouts and for parts of them."""
    if kind == "texts":
        made = [["a" * n, None, "b" * 7 * n][: n % 4] for n in range(33)]
    else:
        made = [[n, None, 2.5 * n][: n % 4] for n in range(33)]
    child = pa.string() if kind == "texts" else pa.float64()
    forms = pa.list_, pa.large_list, pa.list_view, pa.large_list_view
    lists = [pa.array(made, form(child)) for form in forms]
    flat = [value for row in made for value in row]
    arrays = [*lists, pa.array(flat, child), pa.array(flat, child).dictionary_encode()]
    arrays += [pa.array(flat[:32], child).cast(pa.string_view())] if kind == "texts" else []
    arrays += [pa.array([{"a": a} for a in flat])]
    arrays += [pa.array([flat[i : i + 2] for i in range(0, 32, 2)], pa.list_(child, 2))]
    arrays += [pa.array([[(f"{i}", a)] for i, a in enumerate(flat)], pa.map_(pa.string(), child))]
    ends = pa.array(np.arange(1, len(flat) + 1) * 3, pa.int32())
    arrays += [pa.RunEndEncodedArray.from_arrays(ends, pa.array(flat, child))]
    codes = pa.array(np.zeros(len(flat), np.int8))
    arrays += [pa.UnionArray.from_sparse(codes, [pa.array(flat, child)])]
    arrays += [pa.UnionArray.from_dense(codes, zeros(len(flat)), [pa.array(flat, child)])]
    for array in arrays:
        for part in (array, array[3:], array[1:2], array[5:9], array[:0]):
            sizes = ArrowSizes(lambda _: None)
            assert sizes.column_bytes(pa, part, True) >= _object_bytes(part.to_pylist()), part.type


def _object_bytes(value: Any) -> int:
    """Return the bytes of the elements of a list or mapping, and of the references to them."""
    parts = list(value.values()) if isinstance(value, dict) else value
    total = 8 * len(parts)
    for one in parts:
        if isinstance(one, (list, tuple)):
            total += sys.getsizeof([]) + _object_bytes(one)
        elif isinstance(one, dict):
            total += sys.getsizeof(one) + _object_bytes(one)
        elif one is not None:
            total += sys.getsizeof(one)
    return total


def test_repeated_texts_in_lists_are_read(tmp_path: Path) -> None:
    """A column whose texts could be too large, by its longest one, is read by its dictionary."""
    rows = [[["x" * LONG, "y"], ["y"] * 9], [], [["z", None], None]] * 9
    table = pa.table(
        {"action": [[0]] * 27, "value": pa.array(rows, pa.list_(pa.list_(pa.string())))}
    )
    parquet.write_table(table, tmp_path / "a.parquet")
    parquet.write_table(table, tmp_path / "b.parquet", use_dictionary=False)
    read = []
    for name in ("a.parquet", "b.parquet"):
        with open_source(tmp_path / name, max_expansion=1000) as reader:
            read.append([arrays["value"] for _, arrays in reader.episodes()])
    assert read[0] == read[1] == rows


def test_exports(tmp_path: Path) -> None:
    """The schema of an export declares the size of each row, and the lengths how many there are."""
    steps = [Column("action", "float32"), Column("reward", "float32", role="reward")]
    note = Column("note", "bytes", rows="1", max_bytes=1 << 30)
    folder = tmp_path / "jsonl"
    folder.mkdir()
    (folder / "gear_schema.json").write_text(json.dumps(Schema([*steps, note]).to_json()))
    (folder / "trajectories.jsonl").write_text('{"action": [1.0], "reward": [1.0], "note": "a"}\n')
    refuse(folder, rf"jsonl: columns of texts and objects {TOO_LARGE}")
    (folder / "gear_schema.json").write_text(json.dumps(Schema(steps).to_json()))
    (folder / "trajectories.jsonl").write_text(
        json.dumps({"action": TEXTS, "reward": [0.0] * len(TEXTS)})
    )
    with pytest.raises(
        DataError, match="column action must be convertible to float32, got 'object'"
    ):
        run_command(command, str(folder), str(tmp_path / "out"), "--quiet")

    schema = np.array(json.dumps(Schema(steps).to_json()))
    arrays: dict[str, Any] = dict.fromkeys(("action", "reward"), np.zeros(0, np.float32))
    arrays["gear_lengths"] = np.zeros(10_000, np.int64)
    np.savez_compressed(tmp_path / "a.npz", gear_schema=schema, **arrays)
    with pytest.raises(DataError, match="trajectory must have at least one step"):
        run_command(command, str(tmp_path / "a.npz"), str(tmp_path / "out"), "--quiet")
    np.savez_compressed(tmp_path / "b.npz", gear_schema=np.array("x" * (1 << 19)), **arrays)
    refuse(tmp_path / "b.npz", rf"b.npz {TOO_LARGE}")


def repeat_first(path: Path, name: str) -> None:
    """Make all elements of an array of variable length refer to the content of the first one."""
    with h5py.File(path, "r") as file:
        first = file[name].id.get_offset()
        count = len(file[name])
    content = bytearray(path.read_bytes())
    content[first : first + 16 * count] = content[first : first + 16] * count
    path.write_bytes(content)


def test_hdf5_of_variable_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.hdf5"
    count = 400
    with h5py.File(path, "w") as file:
        group = file.create_group("episode_0")
        group.attrs.update(id=0, total_steps=count - 1)
        group.attrs.create("notes", ["x"] * 9, dtype=h5py.string_dtype())
        for name in ("rewards", "terminations", "truncations"):
            group[name] = np.zeros(count - 1)
        images = group.create_dataset("observations", count, h5py.vlen_dtype(np.uint8))
        images[0] = np.ones(LONG, np.uint8)
        images[1:] = [np.ones(1, np.uint8)] * (count - 1)
        group["actions"] = np.zeros((count - 1, 1))
    repeat_first(path, "episode_0/observations")
    refuse(path, rf"observations {TOO_LARGE}")
    with h5py.File(path, "a") as file:
        del file["episode_0/observations"]
        file["episode_0/observations"] = np.zeros((count, 1))
        words = file["episode_0"].create_dataset("infos/word", count - 1, h5py.string_dtype())
        words[...] = ["x" * LONG] + ["a"] * (count - 2)
    repeat_first(path, "episode_0/infos/word")
    refuse(path, "infos/word must be numeric")
    with open_source(path, columns=[]) as reader:
        assert len(list(reader.episodes())) == 1


def test_flags_of_variable_length(tmp_path: Path) -> None:
    path = tmp_path / "a.hdf5"
    with h5py.File(path, "w") as file:
        file["observations"] = file["actions"] = np.zeros((9, 1))
        flags = file.create_dataset("terminals", 9, h5py.string_dtype())
        flags[...] = ["x" * LONG] + ["a"] * 8
    repeat_first(path, "terminals")
    refuse(path, "terminals must be numeric")


def test_repeated_images_are_those_of_their_file() -> None:
    image = pytest.importorskip("PIL.Image")
    sink = io.BytesIO()
    image.new("RGB", (64, 64)).save(sink, "JPEG")
    assert decode_images("it", [sink.getvalue()] * 400, Expansion(), 1 << 20).shape == (
        400,
        64,
        64,
        3,
    )
    with pytest.raises(DataError, match="it must hold at most 100 bytes for each of the 700 bytes"):
        decode_images("it", [sink.getvalue()] * 400, Expansion(), 700)
