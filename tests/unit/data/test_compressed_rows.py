"""Compressed columns: the batches and rows of the plain data set, bit for bit; what is damaged or
refused.
"""

import pickle
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from batch_records import priorities, record
from gear_support import config_of, run_command

from deepspeed_gear import Column, Dataset, DatasetWriter, Replay, Schema
from deepspeed_gear.batching.gather import Gatherer, GatherOptions
from deepspeed_gear.cli import export as export_command
from deepspeed_gear.cli import ingest as ingest_command
from deepspeed_gear.cli import inspect as inspect_command
from deepspeed_gear.data.compressed_rows import CompressedRows, files_of
from deepspeed_gear.data.dataset_parts import write_parts
from deepspeed_gear.data.ingest import ingest
from deepspeed_gear.errors import ConfigError, DataError, GearError, SchemaError
from deepspeed_gear.plan.resolved_plan import resolve_plan
from deepspeed_gear.plan.stream_resolution import check_compressed

zstandard = pytest.importorskip("zstandard")
IMAGE = Column("image", "uint8", (6, 5), "observation", "T+1")
SCHEMA = Schema(
    [
        IMAGE,
        Column("depth", "bfloat16", (4,)),
        Column("pose", "float64", (2,)),
        Column("reward", "float32", (), "reward"),
        Column("terminated", "bool", (), "terminated"),
        Column("truncated", "bool", (), "truncated"),
        Column("task", "int64", (), "other", "1"),
    ]
)
LENGTHS = (40, 1, 7, 2, 33, 12, 1)
COMPRESSED = ["image", "depth", "pose"]
N_STEP = {"n": 3, "gamma": 0.5}


def trajectory(number: int, steps: int) -> dict[str, Any]:
    rng = np.random.default_rng(number)
    image = np.add.outer(np.arange(steps + 1) * 3, np.arange(30)).reshape(-1, 6, 5) + number
    ends = np.arange(steps) == steps - 1
    return {
        "image": np.where(rng.random(image.shape) < 0.1, 255, image % 200).astype(np.uint8),
        "depth": rng.standard_normal((steps, 4)),
        "pose": rng.standard_normal((steps, 2)),
        "reward": rng.random(steps),
        "terminated": ends & bool(number % 2),
        "truncated": ends,
        "task": number,
    }


def write(
    path: Path, lengths: tuple[int, ...] = LENGTHS, first: int = 0, **options: Any
) -> Dataset:
    with DatasetWriter(path, SCHEMA, **options) as writer:
        for number, steps in enumerate(lengths, first):
            writer.add(trajectory(number, steps))
    return Dataset.open(path)


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> tuple[Dataset, Dataset]:
    folder = tmp_path_factory.mktemp("sets")
    split = {"eval": 0.2}
    return write(folder / "plain", split=split), write(
        folder / "zstd", split=split, compress=COMPRESSED
    )


# ---- batches -------------------------------------------------------------------------------------

WINDOWS = {
    "stack": {"column": "image", "offset": -3, "length": 4},
    "edges": {"column": "image", "offset": -3, "length": 9, "pad": "edge"},
    "filled": {"column": "image", "offset": 2, "length": 6, "pad": 7, "as": "int64"},
    "left": {"column": "image", "offset": -8, "length": 12, "align": "left"},
    "right": {"column": "image", "offset": 3, "length": 8, "align": "right", "pad": "edge"},
    "later": {"column": "image", "offset": "n_step"},
    "after": {"column": "image", "offset": "n_step", "length": 2, "pad": "edge"},
    "normal": {"column": "image", "normalize": "mean_std", "length": 3},
    "scaled": {"column": "image", "scale": 0.25, "as": "float32"},
    "depth": {"length": 5, "offset": -2, "pad": "edge"},
    "beyond": {"column": "depth", "offset": 50, "length": 2, "pad": "edge", "normalize": "min_max"},
    "nothing": {"column": "depth", "offset": 50, "length": 2},
    "wide": {"column": "pose", "as": "float64", "length": 2},
    "reward": {"length": 3},
    "task": {},
}


@pytest.mark.parametrize(
    "options",
    [
        {"n_step": N_STEP, "fields": WINDOWS},
        {"n_step": N_STEP, "fields": WINDOWS, "load": "memory", "sampler": {"kind": "prioritized"}},
        {"n_step": N_STEP, "fields": WINDOWS, "transfer": {"way": "staged"}},
        {"n_step": N_STEP, "fields": WINDOWS, "transfer": {"way": "direct"}, "prefetch": 1},
        {"fields": {"depth": {}}, "sampler": {"kind": "epoch"}},
        {
            "sampler": {"unit": "step", "anchors": "fits"},
            "fields": {"image": {"length": 2}, "pose": {}},
        },
    ],
    ids=["mapped", "memory", "staged", "direct", "one", "every"],
)
def test_batches_are_those_of_the_plain_data_set(
    options: dict[str, Any], sets: tuple[Dataset, Dataset]
) -> None:
    rest = dict(options)
    load = rest.pop("load", "mmap")
    plain, packed = (
        Replay(
            config_of(data.path, batch_size=24, **rest, data={"path": str(data.path), "load": load})
        )
        for data in sets
    )
    with plain, packed:
        for _ in range(3):
            a = plain.sample()
            b = packed.sample()
            first = record(a)
            second = record(b)
            assert first.keys() == second.keys()
            for name, values in first.items():
                np.testing.assert_array_equal(values, second[name], name)
            if rest.get("sampler") == {"kind": "prioritized"}:
                for replay, batch in ((plain, a), (packed, b)):
                    replay.update_priorities(batch, priorities(batch))
        for a, b in zip(plain.iterator("eval"), packed.iterator("eval"), strict=True):
            assert all(torch.equal(a[name], b[name]) for name in a)
        if "prefetch" not in rest:  # else each is ahead as far as its thread was
            counts = [replay.statistics() for replay in (plain, packed)]
            assert counts[0]["bytes"] == counts[1]["bytes"]
            assert counts[0]["padding"] == counts[1]["padding"]
        read = [replay.read([4])[0] for replay in (plain, packed)]
        assert all(torch.equal(read[0][name], read[1][name]) for name in SCHEMA.names)


def test_parts_of_windows_and_of_batches(sets: tuple[Dataset, Dataset]) -> None:
    """As sequence ranks read them, and batches that are gathered in parts; a record may be no
    sample.
    """
    sections = [config_of(data.path, batch_size=24, fields=WINDOWS, n_step=N_STEP) for data in sets]
    with Replay(sections[0]) as plain, Replay(sections[1]) as packed:
        records = plain.sample()._samples.resolutions.clone()
        records[5] = torch.tensor([-1, -1, 0, 0, 0, 0, 0, 9])  # no sample
        halves = [
            replace(f, part_first=f.length // 2, part_length=1) for f in plain.fields if f.length
        ]
        for fields in (halves, [f for f in plain.fields if f.column == IMAGE and not f.follows]):
            n_step = plain.config.n_step if any(f.follows for f in fields) else None
            options = GatherOptions(fields, sets[0].statistics, n_step, 24, torch.float32, 1)
            made = [Gatherer(options, replay.tables["main"], 2) for replay in (plain, packed)]
            whole = [gatherer.gather(records) for gatherer in made]
            parts = [(made[0], records[:9], None), (made[1], records[9:], None)]
            whole.append(made[0].gather_from(parts))
            for tensors, mask in whole[1:]:
                for name, expected in whole[0][0].items():
                    assert torch.equal(tensors[name], expected), name
                assert all(torch.equal(mask[name], of) for name, of in whole[0][1].items())


@pytest.mark.parametrize("way", ["auto", "direct"])
def test_a_mixture_with_a_plain_table(way: str, sets: tuple[Dataset, Dataset]) -> None:
    """A column that is compressed in one table is staged in both."""
    made = []
    for first, second in ((sets[0], sets[0]), (sets[1], sets[0])):
        tables = {"a": {"data": str(first.path)}, "b": {"data": str(second.path)}}
        mixture = {"kind": "mixture", "shares": {"a": 0.5, "b": 0.5}}
        fields = {"stack": WINDOWS["stack"], "reward": {"length": 3}}
        options = {"batch_size": 8, "tables": tables, "sampler": mixture, "fields": fields}
        with Replay(config_of(transfer={"way": way}, **options)) as replay:
            made.append([record(replay.sample()) for _ in range(3)])
    np.testing.assert_equal(made[1], made[0])


# ---- data sets -----------------------------------------------------------------------------------


def test_the_rows_and_the_identity_of_a_data_set(
    sets: tuple[Dataset, Dataset], tmp_path: Path
) -> None:
    plain, packed = sets
    assert (packed.fingerprint, packed.statistics.keys()) == (
        plain.fingerprint,
        plain.statistics.keys(),
    )
    assert all(packed.digest_of(c) == plain.digest_of(c) for c in SCHEMA)
    for name, statistics in plain.statistics.items():
        np.testing.assert_equal(packed.statistics[name].to_json(), statistics.to_json())
    packed.verify()
    assert not list(packed.path.glob("columns/image*"))
    rows = packed.columns["image"]
    expected = plain.columns["image"]
    assert isinstance(rows, CompressedRows)
    assert rows.dictionary
    assert (len(rows), rows.shape, rows.dtype) == (len(expected), expected.shape, expected.dtype)
    for key in (
        0,
        -1,
        slice(3, 9),
        slice(None, None, -7),
        [5, 5, -2],
        np.array([[1], [0]]),
        slice(4, 4),
    ):
        np.testing.assert_array_equal(rows[key], expected[key])
    np.testing.assert_array_equal(rows[3:5, ...], expected[3:5])
    for wrong in (len(rows), [-len(rows) - 1], 0.5, None, (1, 2), rows[:, ...].any((1, 2))):
        with pytest.raises(IndexError, match="rows must be integers in"):
            rows[wrong]
    with pytest.raises(
        DataError, match=r"must be read by rows, got 'all 103 rows'; take columns\[name\]"
    ):
        np.asarray(rows)
    again = pickle.loads(pickle.dumps(packed))
    for name, tensor in plain[4].items():
        assert torch.equal(again[4][name], tensor)
    bounds = np.array([0, 2, len(plain)])
    others = write_parts(packed, tmp_path / "b", bounds)
    for a, b in zip(write_parts(plain, tmp_path / "a", bounds), others, strict=True):
        assert (a.fingerprint, b.compressed) == (b.fingerprint, {})


def test_a_data_set_grows_and_travels(
    sets: tuple[Dataset, Dataset], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The bytes of one ingest, also of the frames; a copy that is exported and ingested has them
    again.
    """
    packed = sets[1]
    write(tmp_path / "grown", LENGTHS[:3], compress=COMPRESSED, split={"eval": 0.2})
    grown = write(tmp_path / "grown", LENGTHS[3:], 3, append=True)
    assert grown.fingerprint == packed.fingerprint
    for file in packed.path.rglob("*.npy"):
        name = file.relative_to(packed.path)
        assert (grown.path / name).read_bytes() == file.read_bytes(), name
    assert (
        run_command(export_command, str(packed.path), str(tmp_path / "e.npz"), "--format", "npz")
        == 0
    )
    options = "--compress", "image,depth", "--compress", "pose", "--split", "eval=0.2"
    assert (
        run_command(
            ingest_command, str(tmp_path / "e.npz"), str(tmp_path / "e"), "--quiet", *options
        )
        == 0
    )
    back = Dataset.open(tmp_path / "e")
    assert sorted(back.compressed) == sorted(COMPRESSED)
    assert all(back.digest_of(c) == packed.digest_of(c) for c in SCHEMA)
    assert ingest([tmp_path / "e.npz"], tmp_path / "e", append=True).compressed.keys() == set(
        COMPRESSED
    )
    plain = ingest([tmp_path / "e.npz"], tmp_path / "e", append=True, compress=[])
    assert (plain.compressed, len(plain)) == ({}, 3 * len(packed))
    capsys.readouterr()
    assert run_command(inspect_command, str(packed.path), "--verify", "--json") == 0
    assert f'"bytes": {packed.compressed["image"].nbytes}' in capsys.readouterr().out


# ---- damage and refusals -------------------------------------------------------------------------


def frame(size: int, **options: Any) -> np.ndarray:
    return np.frombuffer(zstandard.ZstdCompressor(**options).compress(bytes(size)), np.uint8)


def replaced(frames: np.ndarray, offsets: np.ndarray, row: int, by: np.ndarray) -> None:
    """Write another frame over that of a row, which is longer."""
    frames[offsets[row] : offsets[row] + len(by)] = by


def swap(offsets: np.ndarray) -> None:
    offsets[[4, 5]] = offsets[[5, 4]]


DAMAGES: list[tuple[Callable[[np.ndarray, np.ndarray], object], str]] = [
    (lambda f, o: swap(o), ": row 4 must have its own frame of 30 bytes"),
    (lambda f, o: o.__setitem__(5, 0), ": row 4 must have its own frame of 30 bytes"),
    (lambda f, o: o.__setitem__(5, 1 << 60), ": row 4 must have its own frame"),
    (lambda f, o: o.__setitem__(4, -(1 << 62)), ": row 3 must have its own frame"),
    (
        lambda f, o: o.__setitem__(0, 1 << 20),
        " must begin with a dictionary of at most 32768 bytes",
    ),
    (
        lambda f, o: replaced(f, o, 4, frame(1 << 20)[:9]),
        ": row 4 must have its own frame of 30 bytes",
    ),
    (lambda f, o: replaced(f, o, 0, frame(31)[:9]), ": row 0 must decode to 30 bytes, got 31"),
    (lambda f, o: f.__setitem__(slice(o[0], o[0] + 4), 0), " must hold zstd frames, got "),
    (
        lambda f, o: f.__setitem__(slice(o[4] + 6, o[5]), 255),
        ": row 4 must have its own frame of 30 bytes",
    ),
]


@pytest.mark.parametrize(("damage", "text"), DAMAGES)
def test_what_is_damaged_is_refused_by_its_row(
    damage: Callable[[np.ndarray, np.ndarray], object], text: str, sets: tuple[Dataset, Dataset]
) -> None:
    frames, offsets = (np.load(sets[1].path / name) for name in files_of(IMAGE))
    damage(frames, offsets)
    with pytest.raises(DataError) as error:
        CompressedRows("x.frames.npy", IMAGE, frames, offsets)[:9]
    assert str(error.value).startswith(f"x.frames.npy{text}")


def test_damaged_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = write(tmp_path / "d", compress=["image"])
    frames, offsets = (data.path / f"compressed/image.{name}.npy" for name in ("frames", "offsets"))
    given = offsets.read_bytes()
    offsets.write_bytes(given[:-8] + bytes(8))
    with pytest.raises(
        DataError, match=r"image\.frames\.npy must be uint8\[0\]|offsets\.npy must hold"
    ):
        Dataset.open(data.path)
    offsets.write_bytes(given)
    frames.write_bytes(frames.read_bytes()[:-1])
    with pytest.raises(
        DataError, match=r"image\.frames\.npy must have \d+ bytes, got \d+; the file is trunc"
    ):
        Dataset.open(data.path)
    with pytest.raises(DataError, match=r"image\.\w+\.npy must not change while it is mapped"):
        data.files.check()
    write(tmp_path / "d", compress=["image"], overwrite=True)
    monkeypatch.setitem(sys.modules, "zstandard", None)
    text = r"must be compressed and decoded by zstandard; pip install 'deepspeed_gear\[zstd\]'"
    with pytest.raises(DataError, match=text):
        Dataset.open(data.path)
    with pytest.raises(DataError, match=text):
        write(tmp_path / "e", compress=["image"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d"]


@pytest.mark.parametrize(
    ("name", "kind", "text"),
    [
        ("task", DataError, "compress: column task must have rows of several values, one a step"),
        ("reward", DataError, "compress: column reward must have rows of several values"),
        ("imag", SchemaError, "column imag must be in the schema; did you mean 'image'"),
    ],
)
def test_columns_that_stay_as_they_are(
    name: str, kind: type[GearError], text: str, tmp_path: Path
) -> None:
    with pytest.raises(kind, match=text):
        write(tmp_path / "d", compress=[name])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "spread", "text"),
    [
        (
            {"tables": {"main": {"placement": "device"}}},
            (),
            'gear.tables.main.placement must be "host"',
        ),
        ({}, ("main",), "gear.tables.main.data.replicate must be true on several nodes"),
        (
            {"hindsight": {}, "fields": {"goal": {"column": "pose", "hindsight": "pose"}}},
            (),
            "gear.hindsight must not be given",
        ),
        (
            {"batch_size": None, "pack": {"tokens": 256}, "rollout": {"trajectories": 4}},
            (),
            "gear.pack must not be given",
        ),
    ],
    ids=["device", "nodes", "hindsight", "pack"],
)
def test_what_reads_other_than_windows_is_refused(
    options: dict[str, Any], spread: tuple[str, ...], text: str, sets: tuple[Dataset, Dataset]
) -> None:
    section = config_of(sets[1].path, **{"batch_size": 4, **options})
    on_device = "tables" in options
    if on_device:
        section["tables"] = {"main": {"data": section.pop("data"), **options["tables"]["main"]}}

    def resolve() -> None:
        plan = resolve_plan(section, None, None, None, None, on_device=on_device)
        check_compressed(plan.config, plan.datasets, spread)  # as on several nodes

    with pytest.raises(ConfigError) as error:
        resolve()
    assert str(error.value).startswith(
        f"{text} for compressed columns, got ['image', 'depth', 'pose']; make"
    )
