"""TFRecord files: records with their checksums (CRC-32C), and the `tf.train.Example` in each.

A record is the length (8 bytes), the checksum of the length (4), the content and its checksum (4),
all little endian. An Example maps names to a list of byte strings, float32 or int64.

Source: tensorflow/core/lib/io/record_writer.h, tensorflow/core/example/{example,feature}.proto.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepspeed_gear.data.ingest.source_checks import DAMAGED
from deepspeed_gear.errors import DataError

_POLYNOMIAL = 0x82F63B78  # of CRC-32C (Castagnoli), with reversed bits
_MASK_DELTA = 0xA282EAD8
_WORD = 8  # bytes of a step of the checksum
_HEAD = struct.Struct("<QI")
_TAIL = struct.Struct("<I")
# Wire types of a field.
_VARINT = 0
_FIXED64 = 1
_BYTES = 2
_FIXED32 = 5
_MOST_VARINT = 2**64 - 1
_FEATURE_LISTS = 2  # field of a SequenceExample; an Example has none of this number


def records(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the number and the content of each record of a file.

    Raises:
        DataError: The file ends inside a record, or a checksum differs; names file and record.
    Cost: one pass over the file; memory of one record.
    """
    file_bytes = path.stat().st_size
    with path.open("rb") as file:
        number = 0
        while head := file.read(_HEAD.size):
            where = f"{path}: record {number}"
            if len(head) < _HEAD.size:
                raise _cut_off(where, _HEAD.size, len(head))
            length, checksum = _HEAD.unpack(head)
            _check(where, "length", head[:8], checksum)
            rest = file_bytes - file.tell()
            if length + _TAIL.size > rest:
                raise _cut_off(where, length + _TAIL.size, rest)
            content = file.read(length)
            _check(where, "content", content, _TAIL.unpack(file.read(_TAIL.size))[0])
            yield number, content
            number += 1


def _cut_off(where: str, wanted: int, rest: int) -> DataError:
    return DataError(where, f"must have {wanted} more bytes", f"{rest} until the end", DAMAGED)


def _check(where: str, part: str, content: bytes, expected: int) -> None:
    crc = crc32c(content)
    masked = ((crc >> 15 | crc << 17) + _MASK_DELTA) & 0xFFFFFFFF
    if masked != expected:
        raise DataError(
            where,
            f"must have the checksum {expected:#010x} of its {part}",
            f"{masked:#010x}",
            DAMAGED,
        )


def crc32c(content: bytes) -> int:
    """Return the CRC-32C (Castagnoli) of bytes.

    The content is divided into lanes of equal length, which NumPy advances together by 8 bytes at a
    time, as tables of 8 positions allow ("slicing by 8"). A checksum is linear, so that of two
    parts is that of the first, advanced over the bytes of the second, xor that of the second.
    """
    words = len(content) // _WORD
    lanes = min(4096, 1 << (max(1, words // 64).bit_length() - 1))
    per_lane = words // lanes
    whole = per_lane * lanes * _WORD
    crc = 0xFFFFFFFF
    if per_lane:
        columns = np.frombuffer(content, "<u4", whole // 4).reshape(lanes, per_lane, 2)
        columns = np.ascontiguousarray(columns.transpose(1, 2, 0))
        states = np.zeros(lanes, np.uint32)
        states[0] = crc
        tables = _tables()
        for low, high in columns:
            low = low ^ states
            states = tables[7][low & 255] ^ tables[6][low >> 8 & 255]
            states ^= tables[5][low >> 16 & 255] ^ tables[4][low >> 24]
            states ^= tables[3][high & 255] ^ tables[2][high >> 8 & 255]
            states ^= tables[1][high >> 16 & 255] ^ tables[0][high >> 24]
        # Lanes are joined in pairs: with 4 lanes a b c d, first ab and cd, then abcd.
        num_bytes = per_lane * _WORD
        while len(states) > 1:
            states = _advanced(states[0::2], num_bytes) ^ states[1::2]
            num_bytes *= 2
        crc = int(states[0])
    table = _tables()[0]
    for byte in content[whole:]:
        crc = int(table[(crc ^ byte) & 255]) ^ crc >> 8
    return crc ^ 0xFFFFFFFF


@cache
def _tables() -> NDArray[np.uint32]:
    """Return the checksums [8, 256] of each byte with 0 to 7 zero bytes after it."""
    first = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        first = np.where(first & 1, first >> 1 ^ np.uint32(_POLYNOMIAL), first >> 1)
    tables = [first.astype(np.uint32)]
    for _ in range(7):
        tables.append(tables[0][tables[-1] & 255] ^ tables[-1] >> 8)
    return np.stack(tables)


def _advanced(states: NDArray[np.uint32], num_bytes: int) -> NDArray[np.uint32]:
    """Return the states after `num_bytes` zero bytes."""
    matrix = _zeros_matrix(num_bytes)
    result = np.zeros_like(states)
    for bit in range(32):
        result ^= np.where(states >> np.uint32(bit) & 1, matrix[bit], np.uint32(0))
    return result


@cache
def _zeros_matrix(num_bytes: int) -> NDArray[np.uint32]:
    """Return what each of the 32 bits of a state becomes after zero bytes."""
    bits = np.uint32(1) << np.arange(32, dtype=np.uint32)
    if num_bytes == 1:
        one: NDArray[np.uint32] = _tables()[0][bits & 255] ^ bits >> 8
        return one
    half = _zeros_matrix(num_bytes // 2)
    result = np.zeros_like(half)
    for bit in range(32):
        result ^= np.where(half >> np.uint32(bit) & 1, half[bit], np.uint32(0))
    if num_bytes % 2:
        result = _tables()[0][result & 255] ^ result >> 8
    return result


def parse_example(where: str, content: bytes) -> dict[str, Any]:
    """Return the lists of a serialised `tf.train.Example` by name.

    Returns:
        An array of float32 or int64, or a list of byte strings, for each name; None for an empty
        feature.
    """
    example: dict[str, Any] = {}
    with DataError.on(
        where, "must be a tf.train.Example", ValueError, IndexError, struct.error, remedy=DAMAGED
    ):
        for number, features in _fields(memoryview(content)):
            if number == _FEATURE_LISTS:
                raise DataError(
                    where,
                    "must be a tf.train.Example",
                    "a tf.train.SequenceExample",
                    "write Examples, as tensorflow-datasets does",
                )
            for _, entry in _fields(features):
                parts = dict(_fields(entry))
                key = bytes(parts[1]).decode() if 1 in parts else ""
                example[key] = _values(parts.get(2, memoryview(b"")))
    return example


def _values(feature: memoryview) -> Any:
    for kind, values in _fields(feature):
        parts = [part for number, part in _fields(values) if number == 1]
        if kind == 1:
            return [bytes(part) for part in parts]
        if kind == 2:
            return np.frombuffer(b"".join(parts), "<f4")
        if kind == 3:
            # Values that are not packed have a varint each, as an int of which 64 bits count.
            numbers = [
                _varints(part)
                if isinstance(part, memoryview)
                else np.array([part & _MOST_VARINT], np.uint64).view(np.int64)
                for part in parts
            ]
            return np.concatenate([np.empty(0, np.int64), *numbers])
        raise ValueError(f"a feature of kind {kind}")
    return None


def _fields(message: Any) -> Iterator[tuple[int, Any]]:
    """Yield the number and the value of each field: an int, or the bytes of any other type."""
    if not isinstance(message, memoryview):
        raise ValueError("a number in place of a message")
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        number = tag >> 3
        wire = tag & 7
        if wire == _VARINT:
            value, at = _varint(message, at)
            yield number, value
            continue
        size = {_FIXED64: 8, _FIXED32: 4}.get(wire)
        if wire == _BYTES:
            size, at = _varint(message, at)
        if size is None or at + size > len(message):
            raise ValueError(f"a field of wire type {wire} that ends after its message")
        yield number, message[at : at + size]
        at += size


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    value = 0
    shift = 0
    while True:
        byte = message[at]
        value |= (byte & 127) << shift
        at += 1
        shift += 7
        if byte < 128:
            return value, at
        if shift > 63:
            raise ValueError("a varint of more than 10 bytes")


def _varints(content: memoryview) -> NDArray[np.int64]:
    """Decode packed varints; a number ends with a byte below 128, and the lowest bits come first.

    With the bytes 150 1 3 the numbers are 22 + (1 << 7) = 150 and 3: `ends` is [1, 2] and the
    place of each byte in its number [0, 1, 0].
    """
    data = np.frombuffer(content, np.uint8)
    if not len(data):
        return np.empty(0, np.int64)
    ends = np.flatnonzero(data < 128)
    if not len(ends) or ends[-1] != len(data) - 1:
        raise ValueError("a varint that is cut off")
    starts = np.append(0, ends[:-1] + 1)
    lengths = ends - starts + 1
    if lengths.max() > 10:
        raise ValueError("a varint of more than 10 bytes")
    place = (np.arange(len(data)) - np.repeat(starts, lengths)).astype(np.uint64)
    parts = (data & 127).astype(np.uint64) << (place * np.uint64(7))
    return np.add.reduceat(parts, starts).view(np.int64)
