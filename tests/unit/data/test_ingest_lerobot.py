"""Ingest of LeRobot data sets: one that LeRobot wrote, layouts that the test writes, and broken
ones.
"""

import contextlib
import hashlib
import io
import json
import os
import shutil
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from gear_support import run_command
from ingest_refusals import refused
from lerobot_sets import FIRST, FRONT, LENGTHS, change_metadata, some_columns, write_set

from deepspeed_gear import Dataset
from deepspeed_gear.cli import ingest as command
from deepspeed_gear.cli.main import main
from deepspeed_gear.data.ingest import ingest
from deepspeed_gear.data.ingest.decoding.image_decoding import decode_images
from deepspeed_gear.data.ingest.readers.lerobot import read_ahead
from deepspeed_gear.data.ingest.source_checks import Expansion
from deepspeed_gear.errors import DataError

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "data" / "lerobot_v3"
# of the values that LeRobot's own reader (0.6.1) returns for the example, frame by frame
DIGESTS = {
    "observation.state": "24cb3ceb1fc40ff6",
    "observation.matrix": "80717a9ef329195b",
    "action": "2de191fd6d39dba3",
    "observation.images.wrist": "6ffdbc3f882cddcb",
    "reward": "440cdd7cc586004f",
    "next.success": "12ba5a4712202d7d",
    "timestamp": "09934e32ebd01892",
    "task_index": "942306482f6de352",
}


def test_a_set_of_version_3_has_the_rows_of_its_own_reader(tmp_path: Path) -> None:
    pytest.importorskip("av")
    dataset = ingest([EXAMPLE], tmp_path / "out")
    assert dataset.lengths.tolist() == [5, 8, 11, 14]
    for name, digest in DIGESTS.items():
        values = dataset.columns[name]
        values = (
            values.astype(np.float32) if name == "observation.matrix" else values
        )  # as its reader does
        assert hashlib.sha256(np.ascontiguousarray(values)).hexdigest()[:16] == digest, name
    red = b"reach the red block"
    tray = b"place it on the tray"
    assert [dataset.trajectory(i)["task"] for i in range(4)] == [red, red + b"\n" + tray, red, tray]
    ends = np.cumsum(dataset.lengths) - 1  # done without success is a time limit
    assert np.flatnonzero(dataset.columns["terminated"]).tolist() == ends[[0, 2]].tolist()
    assert np.flatnonzero(dataset.columns["truncated"]).tolist() == ends[[1, 3]].tolist()
    for number, steps in enumerate(dataset.lengths.tolist()):  # which one video holds
        frames = dataset.trajectory(number)[FRONT].astype(np.float64)
        # Blue is 25 t all over the frame, and green rises by 40 with each episode at the upper
        # edge.
        np.testing.assert_allclose(frames[..., 2].mean((1, 2)), 25 * np.arange(steps) % 256, atol=9)
        np.testing.assert_allclose(frames[:, 0, :, 1].mean(1), 40 * number, atol=12)


def test_all_layouts_give_the_rows_that_were_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Episodes of any number per file, in row groups and batches that divide them."""
    monkeypatch.setattr("deepspeed_gear.data.ingest.table_blocks.BLOCK_ROWS", 7)
    given = some_columns()
    made = []
    for name, version, per_file in (
        ("a", "v2.1", 1),
        ("b", "v3.0", 2),
        ("c", "v3.0", 5),
        ("d", "v2.0", 1),
    ):
        write_set(tmp_path / name, version, LENGTHS, per_file, **given)
        made.append(ingest([tmp_path / name], tmp_path / f"out_{name}"))
    assert len({dataset.fingerprint for dataset in made}) == 1
    done = given.pop("next.done")
    truncated = given.pop("next.truncated")
    expected = {"terminated": done & ~truncated, "truncated": truncated, **given}
    for key, values in expected.items():
        np.testing.assert_array_equal(made[0].columns[key.removeprefix("next.")], values)
    assert made[0].lengths.tolist() == list(LENGTHS)
    assert made[0].trajectory(1)["task"] == b"lift\nplace it\nwait"
    assert (
        "note is text per frame, which no column holds: left out"
        in made[0].source["sources"][0]["notes"]
    )


def test_tasks_of_several_sets_have_a_number_for_each_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each set begins with task 0. Appending gives what one ingest gives; also without the texts'
    column.
    """
    lift = "lift the red block"  # texts appended later must not be longer than those that are there
    tasks = {"a": [lift, "wait"], "b": ["put", lift], "c": ["wait", "turn", "put"]}
    expected = [0, 0, 0, 1, 1, 1, 2, 2, 2, 0, 0, 1, 1, 1, 3, 3, 3, 2, 2]
    for (name, texts), lengths in zip(tasks.items(), ([2, 4], [5], [8]), strict=True):
        total = sum(lengths)
        columns = {"observation.state": np.ones((total, 2)), "action": np.ones((total, 1))}
        write_set(tmp_path / name, "v3.0", lengths, tasks=texts, **columns)
    sources = [str(tmp_path / name) for name in tasks]
    dest = str(tmp_path / "out")
    for columns in ([], ["--columns", "task_index"]):
        options = ["--reward", "none", *columns]
        capsys.readouterr()
        assert run_command(command, *sources, dest, "--overwrite", *options) == 0
        note = "episode_index: 2 numbers that an earlier source has are replaced by free ones"
        assert (note in capsys.readouterr().err) == (not columns)
        whole = Dataset.open(dest)
        if not columns:
            assert whole.columns["episode_index"].tolist() == [0, 1, 2, 3]
        assert whole.columns["task_index"].tolist() == expected
        assert run_command(command, sources[0], dest, "--overwrite", *options) == 0
        assert Dataset.open(dest).columns["task_index"].tolist() == expected[:6]
        for source in sources[1:]:
            assert run_command(command, source, dest, "--append", *options) == 0
        grown = Dataset.open(dest)
        assert grown.fingerprint == whole.fingerprint
        assert grown.source["texts"] == whole.source["texts"]


def test_tasks_that_a_dtype_has_no_free_number_for_are_refused(tmp_path: Path) -> None:
    columns = {"observation.state": np.ones((300, 2)), "action": np.ones((300, 1))}
    for name in "ab":
        texts = [f"{name} {number}" for number in range(100)]
        write_set(tmp_path / name, "v3.0", [300], tasks=texts, **columns)
    given = [str(tmp_path / name) for name in "ab"] + [str(tmp_path / "out"), "--reward", "none"]
    refused = r"b: episode 0: task_index must have a free number.*128 in place of 28.*--dtype"
    with pytest.raises(DataError, match=refused):
        run_command(command, *given, "--dtype", "task_index=int8")
    assert not (tmp_path / "out").exists()
    assert run_command(command, *given) == 0
    assert Dataset.open(tmp_path / "out").columns["task_index"].tolist()[-1] == 199


@pytest.mark.parametrize(
    ("columns", "kept", "left_out"),
    [
        ([], "state actions image", ""),
        (["state"], "state actions", "note, image, timestamp, task_index, episode_index, task"),
        (["actions"], "state actions image", "note, timestamp, task_index, episode_index, task"),
        ([""], "state actions image", "note, timestamp, task_index, episode_index, task"),
        (["!image"], "state actions", ""),
        (["state", "!actions"], "state", "note, image, timestamp, task_index, episode_index, task"),
    ],
)
def test_observations_and_actions_of_other_names_are_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], columns: list[str], kept: str, left_out: str
) -> None:
    """An error about a video advises to leave it out with --columns; nothing else goes without a
    word.
    """
    given = {"state": np.ones((3, 2)), "actions": np.ones((3, 1)), "image": np.ones((3, 4))}
    write_set(tmp_path / "set", "v2.1", [3], **given)
    image = pytest.importorskip("PIL.Image")
    features = json.loads((tmp_path / "set" / "meta" / "info.json").read_text())["features"]
    picture = io.BytesIO()
    image.new("RGB", (4, 2)).save(picture, "PNG")
    _info(features={**features, "image": {"dtype": "image", "shape": [2, 4, 3]}})(tmp_path / "set")
    _rows("image", lambda rows: [{"bytes": picture.getvalue()}] * 3, FIRST)(tmp_path / "set")
    given_columns = [f"--columns={','.join(columns)}"] if columns else []
    source = str(tmp_path / "set")
    dest = str(tmp_path / "out")
    assert run_command(command, source, dest, "--reward", "none", *given_columns) == 0
    schema = Dataset.open(dest).schema
    assert [name for name in ("state", "actions", "image") if name in schema] == kept.split()
    roles = {"state": "observation", "image": "observation", "actions": "action"}
    assert all(schema[name].role == roles[name] for name in kept.split())
    note = f"left out, as --columns does not name them: {left_out}\n"
    assert (note in capsys.readouterr().err) == bool(left_out)


def _info(**changes: Any) -> Callable[[Path], None]:
    def edit(root: Path) -> None:
        path = root / "meta" / "info.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return edit


def _rows(
    key: str, change: Callable[[list[Any]], list[Any]], file: str = "data/000/001.parquet"
) -> Callable[[Path], None]:
    def edit(root: Path) -> None:
        table = pq.read_table(root / file)
        changed = pa.array(change(table[key].to_pylist()))
        pq.write_table(table.set_column(table.column_names.index(key), key, changed), root / file)

    return edit


SECOND = "data/000/001.parquet"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n"
PATH = "data_path must be a path below the folder, with episode_chunk, episode_index in braces, got"
BROKEN: list[tuple[Callable[[Path], Any], str]] = [
    (
        lambda root: (root / FIRST).write_text(POINTER),
        f"{FIRST} must contain the data, got 'a Git LFS",
    ),
    (lambda root: (root / FIRST).write_text("PAR1"), f"{FIRST} must be a readable parquet file"),
    (lambda root: (root / SECOND).unlink(), f"{SECOND} must exist; the data set is incomplete"),
    (
        lambda root: shutil.copy(root / FIRST, root / SECOND),
        f"{SECOND} must have the 7 rows of its episodes",
    ),
    (
        _info(codebase_version="v1.6"),
        "codebase_version must be one of v2.0, v2.1, v3.0, got 'v1.6'",
    ),
    (
        _info(total_episodes=6),
        "episodes must list total_episodes = 6 episodes, and at least one, got 5",
    ),
    (_info(data_path="../{episode_index:03d}"), PATH),
    (_info(data_path="{episode_index:099999999d}"), PATH),
    (_info(data_path="{episode_index.__class__}"), PATH),
    (
        _rows("frame_index", lambda rows: rows[::-1]),
        "frame_index, episode 1 must be 0 at step 0, got 6",
    ),
    (
        _rows("episode_index", lambda rows: [*rows[1:], 2]),
        "episode_index, episode 1 must be 1 at step 6",
    ),
    (_rows("task_index", lambda rows: [3] * 7), "task_index, episode 1 must be a task of the"),
    (
        _rows("action", lambda rows: [None, *rows[1:]]),
        "action[0], episode 1 must not be null; fill it in, or leave the column",
    ),
    (
        _rows("action", lambda rows: [[], rows[1] * 2, *rows[2:]]),
        "action, episode 1 must have rows of shape [4]",
    ),
    (_rows("action", lambda rows: [0.0] * 7), "action, episode 1 must have rows of shape [4]"),
]


@pytest.mark.parametrize(("edit", "text"), BROKEN, ids=range(len(BROKEN)))
def test_broken_sets_are_refused(tmp_path: Path, edit: Callable[[Path], Any], text: str) -> None:
    write_set(tmp_path / "set", "v2.1", LENGTHS, **some_columns())
    edit(tmp_path / "set")
    assert text in refused(tmp_path / "set", tmp_path / "out")


def _of_images(root: Path, frames: list[Any]) -> Path:
    """Write a set of an episode of images, whose files are given."""
    write_set(root, "v2.1", [len(frames)], action=np.zeros((len(frames), 1)))
    change_metadata(
        FRONT,
        {"dtype": "image", "shape": [8, 8, 3], "names": ["height", "width", "channel"]},
        "features",
    )(root)
    table = pq.read_table(root / FIRST)
    images = pa.array([{"bytes": frame, "path": None} for frame in frames])
    pq.write_table(table.append_column(FRONT, images), root / FIRST)
    return root


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n"


def test_images_of_formats_that_are_not_named_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An EPS would start a program, gs, on what the file holds."""
    image = pytest.importorskip("PIL.Image")
    program = tmp_path / "gs"
    program.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    files: dict[str, Any] = {"EPS": EPS, "text": "text", "empty": b""}
    for form in ("JPEG", "PNG", "GIF", "BMP", "TIFF", "PPM", "WEBP"):
        sink = io.BytesIO()
        with contextlib.suppress(OSError, KeyError):  # an encoder that Pillow was built without
            image.new("RGB", (8, 8), (9, 99, 199)).save(sink, form)
            files[form] = sink.getvalue()
    files["PNG with an EPS"] = files["PNG"][:8] + EPS
    for number, (form, content) in enumerate(files.items()):
        source = _of_images(tmp_path / str(number), [content] * 2)
        if form in ("JPEG", "PNG"):
            rows = ingest([source], tmp_path / form, reward="none").columns[FRONT]
            np.testing.assert_allclose(rows[0, 0, 0], (9, 99, 199), atol=3)
            continue
        assert (
            main(["ingest", str(source), str(tmp_path / "out"), "--reward", "none", "--quiet"]) == 2
        )
        assert f"{FRONT}, episode 0 must hold " in (shown := capsys.readouterr().err), form
        assert "JPEG or PNG" in shown
    assert not (tmp_path / "ran").exists()


def test_damaged_images_are_data_errors() -> None:
    image = pytest.importorskip("PIL.Image")
    rng = np.random.default_rng(0)
    for form in ("JPEG", "PNG"):
        sink = io.BytesIO()
        image.fromarray(rng.integers(0, 255, (16, 16, 3), np.uint8)).save(sink, form)
        for _ in range(200):
            changed = np.frombuffer(sink.getvalue(), np.uint8).copy()
            changed[rng.integers(2, min(len(changed), 120), 3)] = rng.integers(0, 256, 3)
            with contextlib.suppress(DataError), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                decode_images("it", [changed.tobytes()], Expansion(), 1 << 30)


def _of_video(root: Path) -> Path:
    write_set(root, "v2.1", [2], action=np.zeros((2, 1)))
    change_metadata(
        FRONT,
        {"dtype": "video", "shape": [16, 32, 3], "names": ["height", "width", "channel"]},
        "features",
    )(root)
    change_metadata("video_path", "{video_key}")(root)
    return root


@pytest.mark.parametrize("codec", ["mjpeg", "mpeg1video", "png", "libx264", "libsvtav1"])
def test_video_codecs_are_named(tmp_path: Path, codec: str) -> None:
    av = pytest.importorskip("av")
    source = _of_video(tmp_path / "set")
    size = (64, 128)
    change_metadata("shape", [*size, 3], f"features/{FRONT}")(source)
    with av.open(str(source / FRONT), "w", format="mp4") as file:
        try:
            form = {"mjpeg": "yuvj420p", "png": "rgb24"}.get(codec, "yuv420p")
            stream = file.add_stream(codec, 25, width=size[1], height=size[0], pix_fmt=form)
        except (av.FFmpegError, ValueError, LookupError):
            pytest.skip(f"PyAV has no encoder {codec}")
        for _ in range(2):
            file.mux(
                stream.encode(
                    av.VideoFrame.from_ndarray(np.zeros((*size, 3), np.uint8), format="rgb24")
                )
            )
        file.mux(stream.encode(None))
    with pytest.raises(DataError) as caught:
        ingest([source], tmp_path / "out", reward="none")
    known = (
        "must have frame 1 at"
        if codec.startswith("lib")
        else "must be in one of the codecs av1, h264, hevc"
    )
    assert known in str(caught.value)


def test_a_video_names_no_other_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither by its content, a playlist, nor by its name, which FFmpeg could take for
    an address.
    """
    pytest.importorskip("av")
    source = _of_video(tmp_path / "set")
    playlists = {
        "concat": "ffconcat version 1.0\nfile /etc/passwd\n",
        "hls": "#EXTM3U\n#EXTINF:1,\n/etc/passwd\n",
        "sdp": "v=0\nm=video 9 RTP/AVP 96\n",
    }
    for content in playlists.values():
        (source / FRONT).write_text(content)
        with pytest.raises(DataError, match=rf"{FRONT}: episode 0 must be a readable video"):
            ingest([source], tmp_path / "out", reward="none")
    av = pytest.importorskip("av")
    with av.open(str(source / FRONT), "w", format="mp4") as file:
        stream = file.add_stream("mpeg4", 10, width=32, height=16, pix_fmt="yuv420p")
        for _ in range(2):
            file.mux(
                stream.encode(
                    av.VideoFrame.from_ndarray(np.zeros((16, 32, 3), np.uint8), format="rgb24")
                )
            )
        file.mux(stream.encode(None))
    (source / f"concat:{FRONT}").write_text("no video")
    change_metadata("video_path", "concat:{video_key}")(source)
    monkeypatch.chdir(source)
    with pytest.raises(DataError, match=rf"concat:{FRONT}: episode 0 must be a readable video"):
        ingest(["."], tmp_path / "out", reward="none")


@pytest.mark.parametrize(
    ("times", "text"),
    [
        (range(7), ""),
        (range(6), "episode 0 must have 7 frames, one for each row, got 6"),
        (range(8), "episode 0 must have 7 frames, one for each row, got 8"),
        ((0, 1, 2, 4, 5, 6, 7), "episode 0 must have frame 3 at 0.300000 s, got '0.400000 s'"),
    ],
)
def test_a_video_has_a_frame_for_each_row(tmp_path: Path, times: Sequence[int], text: str) -> None:
    """Frames are at tenths of a second; the brightness of each is 20 times its number."""
    av = pytest.importorskip("av")
    source = tmp_path / "set"
    shape = {"shape": [3, 16, 32], "names": ["channels", "height", "width"]}
    write_set(source, "v2.1", [7], action=np.zeros((7, 1)))
    _info(features={FRONT: {"dtype": "video", **shape}}, video_path="{video_key}.mp4")(source)
    with av.open(str(source / f"{FRONT}.mp4"), "w") as file:
        stream = file.add_stream("mpeg4", 10, width=32, height=16, pix_fmt="yuv420p")
        for number, time in enumerate(times):
            frame = av.VideoFrame.from_ndarray(
                np.full((16, 32, 3), 20 * number, np.uint8), format="rgb24"
            )
            frame.pts = time
            file.mux(stream.encode(frame))
        file.mux(stream.encode(None))
    with pytest.raises(DataError) as caught:
        ingest([source], tmp_path / "out", **({"reward": "none"} if text else {}))
    assert (text or "--reward must be given, as the source has no rewards") in str(caught.value)
    if not text:
        frames = ingest([source], tmp_path / "out", reward="none").columns[FRONT]
        assert frames.shape == (7, 16, 32, 3)
        np.testing.assert_allclose(frames.mean((1, 2, 3)), 20 * np.arange(7), atol=3)


def test_reading_ahead_keeps_order_bound_and_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepspeed_gear.data.ingest.readers.lerobot.AHEAD_BYTES", 10)
    started: list[int] = []

    def read(item: int) -> int:
        started.append(item)
        if item == 7:
            raise DataError("item 7", "must be readable")
        return item

    results = read_ahead(read, range(100), lambda item: 3 if item != 5 else 50)
    for item in range(7):
        assert next(results) == item
        assert max(started) <= item + 4
    with pytest.raises(DataError, match="item 7"):
        next(results)
    assert max(started) <= 11
