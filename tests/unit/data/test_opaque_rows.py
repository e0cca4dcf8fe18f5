"""Byte strings and JSON values: schemas, rows, data sets on disk."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deepspeed_gear import Column, Dataset, DatasetWriter, Schema
from deepspeed_gear.cli.main import main
from deepspeed_gear.data.opaque_rows import decode, encode, encode_rows
from deepspeed_gear.data.stored_values import no_values
from deepspeed_gear.errors import DataError, SchemaError

RAW = Column("raw", "bytes", rows="1", max_bytes=6)
NOTE = Column("note", "json", rows="1", max_bytes=40)
SCHEMA = Schema([Column("code", "int64"), RAW, NOTE])


@pytest.mark.parametrize("value", [b"", b"\x00", b"a\x00b\x00", bytes(6), b"\xff" * 6])
def test_bytes_come_back(value: bytes) -> None:
    row = encode(value, RAW, "raw")
    assert row.shape == RAW.shape == (10,)
    assert decode(row, RAW, "raw") == value
    np.testing.assert_array_equal(encode(row, RAW, "raw"), row)  # a row stays as it is
    assert decode(encode(bytearray(value), RAW, "raw"), RAW, "raw") == value


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        0,
        -(10**30),
        0.1,
        "",
        "ä€🙂",
        [],
        {},
        [1, [2, {"a": None}]],
        {"b": 1, "a": {"c": [1.5]}},
    ],
)
def test_json_comes_back(value: Any) -> None:
    found = decode(encode(value, NOTE, "note"), NOTE, "note")
    assert found == value
    assert type(found) is type(value)


def test_equal_values_are_equal_bytes_and_a_row_that_was_never_written_has_none() -> None:
    np.testing.assert_array_equal(
        encode({"a": 1, "b": (2,)}, NOTE, ""), encode({"b": [2], "a": 1}, NOTE, "")
    )
    np.testing.assert_array_equal(encode("ä", RAW, ""), encode("ä".encode(), RAW, ""))
    assert decode(no_values(RAW, 3), RAW, "raw") == b""
    assert decode(no_values(NOTE, 3), NOTE, "note") is None


CIRCLE: list[Any] = []
CIRCLE.append(CIRCLE)


@pytest.mark.parametrize(
    ("column", "value", "text"),
    [
        (RAW, b"1234567", "must have at most max_bytes = 6 bytes, got 7"),
        (RAW, "ääää", "must have at most max_bytes = 6 bytes, got 8"),
        (RAW, "\ud800", "must be a str that UTF-8 can hold"),
        (RAW, 5, "must be bytes or a str, got 'int'"),
        (RAW, np.zeros(6, np.uint8), "must be bytes or a str, got 'ndarray'"),
        (RAW, np.full(10, 1, np.uint8), "must hold a value of at most max_bytes = 6 bytes"),
        (
            RAW,
            np.array([1, 0, 0, 0, 65, 66, 0, 0, 0, 0], np.uint8),
            "must have zeros after its value",
        ),
        (NOTE, "x" * 39, "must have at most max_bytes = 40 bytes, got 41"),
        (NOTE, {"a": float("nan")}, "must be a JSON value"),
        (NOTE, {"a": np.int64(3)}, "must be a JSON value"),
        (NOTE, b"bytes", "must be a JSON value"),
        (NOTE, [{1: 2}], "must have strings as keys, got 1"),
        (NOTE, CIRCLE, "must be a JSON value"),
        (NOTE, "\ud800", "must be a JSON value"),
        (NOTE, np.array([2, 0, 0, 0, 0xFF, 0xFF] + [0] * 38, np.uint8), "must hold JSON"),
    ],
)
def test_other_values_are_refused(column: Column, value: Any, text: str) -> None:
    with pytest.raises(DataError, match=text):
        encode(value, column, "table main: column x")


def test_rows_of_several_values() -> None:
    values = [b"a", "b", encode(b"c", RAW, "")]
    rows = encode_rows(values, RAW, "raw", 3)
    assert [decode(row, RAW, "raw") for row in rows] == [b"a", b"b", b"c"]
    np.testing.assert_array_equal(encode_rows(rows, RAW, "raw", 3), rows)
    for wrong in (b"abc", values[:2], {"a": 1}, np.array(3)):
        with pytest.raises(DataError, match="must be a list of 3 values"):
            encode_rows(wrong, RAW, "raw", 3)
    assert [decode(row, NOTE, "") for row in encode_rows([[1], [2, [3]]], NOTE, "", 2)] == [
        [1],
        [2, [3]],
    ]


def test_a_schema_goes_through_json_and_keeps_its_fingerprint() -> None:
    entry = SCHEMA.to_json()["columns"][1]
    assert entry == {"name": "raw", "dtype": "bytes", "role": "other", "rows": "1", "max_bytes": 6}
    assert Schema.from_json(json.loads(json.dumps(SCHEMA.to_json()))) == SCHEMA
    longer = Schema([*SCHEMA.columns[:2], Column("note", "json", rows="1", max_bytes=41)])
    assert longer.fingerprint != SCHEMA.fingerprint
    assert SCHEMA.allowing_nan() == SCHEMA
    plain = Schema([Column("code", "int64"), Column("score", "float32", rows="1", late=True)])
    assert plain.fingerprint == "6fc7f3f86d88426eef34d730fa625acb63d1efdeef650a45f41541afdc6f777e"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"dtype": "bytes", "max_bytes": None}, "max_bytes must be an integer in"),
        ({"max_bytes": 1.5}, "max_bytes must be an integer in"),
        ({"max_bytes": 1 << 31}, "max_bytes must be an integer in"),
        ({"rows": "T"}, "rows must be '1' for the dtype json"),
        ({"role": "action"}, "role must be 'other'"),
        ({"shape": (3,)}, "shape must be left out"),
        ({"allow_nan": True}, "allow_nan must be left out"),
        ({"dtype": "int64"}, "max_bytes must be left out unless the dtype"),
        ({"dtype": "text", "max_bytes": None}, "dtype must be one of .*float64, bytes, json"),
    ],
)
def test_wrong_columns_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(SchemaError, match=text):
        Column("x", **{"dtype": "json", "rows": "1", "max_bytes": 8, **options})


def test_a_data_set_holds_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    notes: list[Any] = [{"prompt": "1+1", "tags": ["a"]}, None, [1, 2]]
    with DatasetWriter(tmp_path / "set", SCHEMA) as writer:
        for index, note in enumerate(notes):
            writer.add({"code": [index] * 2, "raw": bytes([index, 0]), "note": note})
        for wrong in (
            {"raw": b"1234567", "note": None},
            {"raw": b"", "note": {1: 2}},
            {"raw": b""},
        ):
            with pytest.raises(DataError, match="trajectory 3: column"):
                writer.add({"code": [7], **wrong})
    data = Dataset.open(tmp_path / "set")
    data.verify()
    assert set(data.statistics) == {"code"}
    assert [data.trajectory(i)["note"] for i in range(3)] == notes
    assert [data.trajectory(i)["raw"] for i in range(3)] == [b"\x00\x00", b"\x01\x00", b"\x02\x00"]
    with DatasetWriter(tmp_path / "copy", data.schema) as writer:
        for i in range(3):
            writer.add(data.trajectory(i))
    assert Dataset.open(tmp_path / "copy").fingerprint == data.fingerprint

    capsys.readouterr()
    assert main(["inspect", str(tmp_path / "set")]) == 0
    line = next(
        line for line in capsys.readouterr().out.splitlines() if line.strip().startswith("note")
    )
    assert line.split()[1:5] == ["json", "max_bytes", "40", "1"]
    assert main(["inspect", str(tmp_path / "set"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["columns"]["raw"]
    assert (found["dtype"], found["max_bytes"], found["statistics"]) == ("bytes", 6, None)
    assert main(["split", str(tmp_path / "set"), str(tmp_path / "parts"), "--nodes", "2"]) == 0
    part = Dataset.open(tmp_path / "parts" / "part-1")
    assert part.trajectory(len(part) - 1)["note"] == [1, 2]
