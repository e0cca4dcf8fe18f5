"""Ingest of RLDS: files that tensorflow-datasets wrote, and files of a small writer."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pytest
from ingest_refusals import refused

from deepspeed_gear.data.ingest import ingest, open_source
from deepspeed_gear.data.ingest.decoding.tfrecord import crc32c, parse_example, records
from deepspeed_gear.errors import DataError

MINI = Path(__file__).parents[2] / "support" / "formats" / "mini_robot"
Step = dict[str, Any]


def plain_crc32c(content: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in content:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def record(content: bytes) -> bytes:
    def checksum(part: bytes) -> bytes:
        crc = plain_crc32c(part)
        return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)

    length = struct.pack("<Q", len(content))
    return length + checksum(length) + content + checksum(content)


def varint(value: int) -> bytes:
    value &= 2**64 - 1
    out = b""
    while value > 127:
        out += bytes([value & 127 | 128])
        value >>= 7
    return out + bytes([value])


def field(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(content)) + content


def example(lists: dict[str, list[Any]]) -> bytes:
    entries = b""
    for key, values in lists.items():
        if isinstance(values[0], bytes):
            feature = field(1, b"".join(field(1, value) for value in values))
        elif isinstance(values[0], float):
            feature = field(2, field(1, struct.pack(f"<{len(values)}f", *values)))
        else:
            feature = field(3, field(1, b"".join(map(varint, values))))
        entries += field(1, field(1, key.encode()) + field(2, feature))
    return field(1, entries)


def tensor(dtype: str, *shape: int, encoding: str = "none") -> dict[str, Any]:
    dimensions = {"dimensions": [str(one) for one in shape]} if shape else {}
    return {"tensor": {"shape": dimensions, "dtype": dtype, "encoding": encoding}}


FEATURES = {
    "observation": tensor("float32", 2),
    "action": tensor("float32", 1),
    "reward": tensor("float32"),
    **{name: tensor("bool") for name in ("is_first", "is_last", "is_terminal")},
}


def episode(rewards: list[float], is_terminal: bool = True) -> dict[str, list[Any]]:
    num = len(rewards)
    last = [0] * (num - 1) + [1]
    return {
        "steps/observation": [float(i) for i in range(2 * num)],
        "steps/action": [float(i) for i in range(num)],
        "steps/reward": rewards,
        "steps/is_first": [1] + [0] * (num - 1),
        "steps/is_last": last,
        "steps/is_terminal": last if is_terminal else [0] * num,
    }


def write(
    folder: Path, episodes: list[dict[str, list[Any]]], features: dict[str, Any] = FEATURES
) -> Path:
    folder.mkdir()
    inner = {"featuresDict": {"features": features}}
    steps = {"sequence": {"feature": inner, "length": "-1"}}
    described = {"featuresDict": {"features": {"steps": steps}}}
    (folder / "features.json").write_text(json.dumps(described))
    split = {"name": "train", "shardLengths": [str(len(episodes))]}
    info = {"name": "mini", "version": "1.0.0", "fileFormat": "tfrecord", "splits": [split]}
    (folder / "dataset_info.json").write_text(json.dumps(info))
    content = b"".join(record(example(one)) for one in episodes)
    (folder / "mini-train.tfrecord-00000-of-00001").write_bytes(content)
    return folder


def test_files_of_tensorflow_datasets_are_read_as_by_itself(tmp_path: Path) -> None:
    """The arrays are those that tensorflow-datasets read; support/formats/make_rlds.py wrote both.

    The last row of an episode is its last observation, and the episode of one row has no step.
    """
    dataset = ingest([MINI], tmp_path / "out")
    assert dataset.lengths.tolist() == [2, 5, 3]
    with np.load(MINI / "expected.npz") as expected:
        read = [name.split("/")[:2] for name in expected if name.endswith("is_last")]
        kept = [one for one in read if len(expected["/".join((*one, "is_last"))]) > 1]
        assert len(kept) == 3
        for number, (split, name) in enumerate(kept):
            trajectory = dataset.trajectory(number)
            for key in ("observation.image", "observation.map", "observation.state"):
                rows = expected[f"{split}/{name}/{key}"]
                assert dataset.schema[key].dtype == str(rows.dtype)
                np.testing.assert_array_equal(trajectory[key], rows)
            for key in ("action", "reward", "count", "discount", "packed"):
                np.testing.assert_array_equal(
                    trajectory[key], expected[f"{split}/{name}/{key}"][:-1]
                )
            ends = expected[f"{split}/{name}/is_terminal"]
            assert trajectory["terminated"].tolist() == ends[1:].tolist()
            assert trajectory["truncated"].tolist() == [0] * (len(ends) - 2) + [not ends[-1]]
            assert trajectory["language_instruction"] == b"lift the block"
    assert dataset.source["sources"][0]["notes"] == [
        "features of the episode, left out: episode_metadata",
        "the last row of each episode is the observation after its last step",
        "1 episodes of one row have no step: left out",
    ]


@pytest.mark.parametrize(
    ("rewards", "meaning", "lengths", "kept"),
    [
        ([[1.0, 2.0, 0.0]], None, [2], [1, 2]),
        ([[1.0, 2.0, 3.0], [0.0, 5.0]], None, [3, 2], [1, 2, 3, 0, 5]),
        ([[0.0, 2.0, 3.0]], "reward", [2], [2, 3]),
        ([[0.0, 0.0, 3.0]], "transition", [3], [0, 0, 3]),
        ([[0.0, 2.0, 3.0]], "observation", [2], [0, 2]),
    ],
)
def test_the_last_row_by_rewards_or_by_option(
    tmp_path: Path, rewards: Any, meaning: str | None, lengths: list[int], kept: list[float]
) -> None:
    source = write(tmp_path / "set", [episode(one) for one in rewards])
    dataset = ingest([open_source(source, last_step=meaning)], tmp_path / "out")
    assert dataset.lengths.tolist() == lengths
    read = [dataset.trajectory(i)["reward"] for i in range(len(dataset))]
    assert np.concatenate(read).tolist() == kept
    rows = "T" if len(kept) == sum(map(len, rewards)) else "T+1"
    assert dataset.schema["observation"].rows == rows


def test_names_given_by_the_user(tmp_path: Path) -> None:
    names = {"observation": "state", "reward": "score", "is_last": "stop"}
    features = {names.get(key, key): one for key, one in FEATURES.items()}
    lists = {f"steps/{names.get(k[6:], k[6:])}": v for k, v in episode([1.0, 2.0, 0.0]).items()}
    rename = {"state": "observation", "score": "reward"}
    source = write(tmp_path / "set", [lists], features)
    dataset = ingest([source], tmp_path / "out", rename=rename)
    trajectory = dataset.trajectory(0)
    assert trajectory["reward"].tolist() == [1, 2]
    assert trajectory["observation"].shape == (3, 2)


def _damage(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        file = next(folder.glob("*tfrecord*"))
        file.write_bytes(change(file.read_bytes()))

    return apply


def _json(name: str, **values: Any) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        file = folder / name
        file.write_text(json.dumps({**json.loads(file.read_text()), **values}))

    return apply


FIRST = len(record(example(episode([1.0, 2.0, 0.0]))))
SEQUENCE = record(field(2, field(1, b"")))
BROKEN: list[tuple[Callable[[Path], None], str]] = [
    (_damage(lambda content: content[:-3]), "record 1 must have"),
    (_damage(lambda content: content[: FIRST + 5]), "record 1 must have 12 more bytes, got '5 unt"),
    (_damage(lambda content: content[:FIRST]), "must hold the 2 records that dataset_info.json"),
    (_damage(lambda c: c[:3] + b"\1" + c[4:]), "record 0 must have the checksum"),
    (_damage(lambda c: c[: FIRST + 40] + b"\xff" + c[FIRST + 41 :]), "of its content"),
    (_damage(lambda content: record(b"\xff\xff") * 2), "record 0 must be a tf.train.Example"),
    (_damage(lambda content: SEQUENCE * 2), "got 'a tf.train.SequenceExample'"),
    (lambda folder: (folder / "features.json").unlink(), "features.json must exist"),
    (lambda folder: (folder / "dataset_info.json").unlink(), "dataset_info.json must exist"),
    (lambda folder: next(folder.glob("*tfrecord*")).unlink(), "00000-of-00001 must exist"),
    (_json("dataset_info.json", fileFormat="array_record"), "fileFormat must be tfrecord, got"),
    (_json("dataset_info.json", splits=[{"name": "../a", "shardLengths": ["1"]}]), "splits must"),
    (_json("dataset_info.json", splits=None), "splits must list the shards of each split"),
    (_json("features.json", featuresDict={"features": {}}), "steps must be a Dataset feature"),
]


@pytest.mark.parametrize(("change", "text"), BROKEN)
def test_broken_sets_are_refused(tmp_path: Path, change: Callable[[Path], None], text: str) -> None:
    source = write(tmp_path / "set", [episode([1.0, 2.0, 0.0]), episode([4.0, 0.0])])
    change(source)
    assert text in refused(source, tmp_path / "out")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"steps/reward": [1.0, 2.0]}, "steps/reward must be 3 numbers, as features.json and 3"),
        ({"steps/action": [b"a", b"b", b"c"]}, "steps/action must be 3 numbers"),
        ({"steps/is_last": [1, 0, 1]}, "is_last must be set at the last row of an episode only"),
        ({"steps/reward": [0.0, 0.0, 1.0]}, "--last-step"),
    ],
)
def test_broken_episodes_are_refused(tmp_path: Path, changes: Any, text: str) -> None:
    source = write(tmp_path / "set", [{**episode([1.0, 2.0, 0.0]), **changes}])
    assert text in refused(source, tmp_path / "out")


def test_a_packed_tensor_takes_no_more_memory_than_it_declares(tmp_path: Path) -> None:
    features = {**FEATURES, "packed": tensor("int32", 2, encoding="zlib")}
    for size, text in ((8, ""), (1 << 20, "packed must have 8 bytes at step 0, got 9")):
        packed = [zlib.compress(bytes(size))] * 3
        lists = {**episode([1.0, 2.0, 0.0]), "steps/packed": packed}
        source = write(tmp_path / f"set{size}", [lists], features)
        if not text:
            trajectory = ingest([source], tmp_path / "out").trajectory(0)
            assert trajectory["packed"].tolist() == [[0, 0]] * 2
            continue
        with pytest.raises(DataError, match=text):
            ingest([source], tmp_path / "other")


def test_the_checksum_of_any_length() -> None:
    """Known values (RFC 3720, B.4), and lengths around the borders of lanes and words."""
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(bytes(32)) == 0x8A9136AA
    assert crc32c(b"\xff" * 32) == 0x62A8AB43
    content = np.random.default_rng(0).bytes(5000)
    for length in (0, 1, 7, 8, 9, 63, 64, 65, 511, 512, 513, 1023, 1024, 1025, 4999):
        assert crc32c(content[:length]) == plain_crc32c(content[:length])


def test_whole_numbers_of_all_lengths(tmp_path: Path) -> None:
    values = [0, 1, 127, 128, 150, 2**31, 2**63 - 1, -1, -(2**63), 3]
    read = parse_example("here", example({"a": values, "b": [1.5], "c": [b"", b"x"]}))
    assert read["a"].tolist() == values
    assert (read["b"].tolist(), read["c"]) == ([1.5], [b"", b"x"])
    unpacked = b"".join(varint(1 << 3) + varint(value) for value in values)
    entry = field(1, b"a") + field(2, field(3, unpacked))
    assert parse_example("here", field(1, field(1, entry)))["a"].tolist() == values
    copy = copytree(MINI, tmp_path / "copy")
    assert [n for n, _ in records(next(copy.glob("*train*")))] == [0, 1, 2]
