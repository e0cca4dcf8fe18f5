"""TransferQueue's values: records of the store's log, and an index of the live ones.

The index is a function of the records. A put is one segment: for each of its fields, the values of
its samples one after another. A value is live until a newer put of the same sample and field
supersedes it or its sample is cleared.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from deepspeed_gear.errors import DataError, FieldError

MOST_DIMS = 8  # of values that are stored by shape
MOST_SAMPLES = 1 << 27  # sample numbers are indexes of arrays: 16 bytes each for every field
_FRAME = struct.Struct("<II")  # bytes of a record, and their checksum
_PUT = "put"
_CLEAR = "clear"
_NEXT = "next"  # the number of the next segment


class Form(NamedTuple):
    """How the bytes of a value are read."""

    kind: str  # the caller's: of the segments they are bytes
    dtype: str
    num_dims: int


@dataclass(frozen=True)
class FieldBlock:
    """Values of one field of a put, one for each sample.

    Args:
        form: How each value is read.
        sizes: Bytes of each value. [n], int64.
        shapes: Shape of each value. [n, form.num_dims], int64.
        buffers: The bytes of all values, one after another, in any pieces.
    """

    form: Form
    sizes: np.ndarray
    shapes: np.ndarray
    buffers: Sequence[Any] = ()


@dataclass
class SegmentField:
    """One field of a segment."""

    block: FieldBlock
    ends: np.ndarray  # of its values in the file. [n], int64
    live: np.ndarray  # [n], bool

    @property
    def starts(self) -> np.ndarray:
        return np.asarray(self.ends - self.block.sizes)


@dataclass
class Segment:
    """What one put stored."""

    number: int
    samples: np.ndarray  # [n], int64
    fields: dict[str, SegmentField]
    num_live: int = 0
    record_bytes: int = 0

    def to_record(self) -> bytes:
        """Return the record of the log from which `Segment.parse` makes the segment again."""
        fields = []
        arrays = [self.samples]
        for name, part in self.fields.items():
            is_live = bool(part.live.all())
            fields.append([name, is_live, *part.block.form])
            arrays += [part.block.sizes, part.block.shapes]
            arrays += [] if is_live else [part.live.astype(np.int64)]
        count = len(self.samples)
        head = {"kind": _PUT, "segment": self.number, "samples": count, "fields": fields}
        return _record(head, arrays)

    @classmethod
    def parse(cls, head: Mapping[str, Any], words: np.ndarray, record_bytes: int) -> Segment:
        """Return the segment of a record: its head, and what follows the head as int64 words.

        The words are the samples, then of each field its sizes, its shapes, and which of its values
        live, unless all do: of 2 samples and a field of matrices 2, 2 and 4 words.
        """
        count = head["samples"]
        samples, rest = np.split(words, [count])
        start = 0
        fields = {}
        for name, is_live, kind, dtype, num_dims in head["fields"]:
            sizes, shapes, rest = np.split(rest, [count, count * (1 + num_dims)])
            live = np.ones(count, np.int64)
            if not is_live:
                live, rest = np.split(rest, [count])
            ends = start + np.cumsum(sizes)
            start = aligned(int(ends[-1]))
            block = FieldBlock(Form(kind, dtype, num_dims), sizes, shapes.reshape(count, num_dims))
            fields[name] = SegmentField(block, ends, live.astype(bool))
        return cls(head["segment"], samples, fields, record_bytes=record_bytes)


def aligned(size: int) -> int:
    """Return where the next field of a segment starts: at a multiple of 64 bytes."""
    return -(-size // 64) * 64


def _record(head: Mapping[str, Any], arrays: Sequence[np.ndarray] = ()) -> bytes:
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    words = [np.ascontiguousarray(array, np.int64).tobytes() for array in arrays]
    return b"".join([struct.pack("<q", len(text)), text, *words])


def put_record(number: int, samples: np.ndarray, blocks: Mapping[str, FieldBlock]) -> bytes:
    """Return the record of a new segment, whose values are all live. Samples: [n], int64."""
    live = np.ones(len(samples), bool)
    fields = {name: SegmentField(block, block.sizes, live) for name, block in blocks.items()}
    return Segment(number, samples, fields).to_record()


def clear_record(samples: np.ndarray) -> bytes:
    """Return the record by which all values of samples are removed. [n], int64."""
    return _record({"kind": _CLEAR}, [samples])


def frame(record: bytes) -> bytes:
    """Return a record as the log holds it: what a killed process left unfinished is recognised."""
    return _FRAME.pack(len(record), zlib.crc32(record)) + record


def unframed(content: bytes) -> Iterator[tuple[bytes, int]]:
    """Yield the whole records at the start of a part of the log, each with where it ends."""
    at = 0
    while at + _FRAME.size <= len(content):
        size, checksum = _FRAME.unpack_from(content, at)
        at += _FRAME.size
        record = content[at : at + size]
        if size == 0 or len(record) < size or zlib.crc32(record) != checksum:
            return
        at += size
        yield record, at


class Freed(NamedTuple):
    """Values that are no longer live."""

    segment: Segment
    field: str
    positions: np.ndarray  # in the segment. [n], int64


@dataclass
class SegmentIndex:
    """Where each live value lies."""

    segments: dict[int, Segment] = field(default_factory=dict)
    next_number: int = 0
    live_bytes: int = 0
    record_bytes: int = 0  # of the records of segments with live values
    # Of each field the segment and the position of each sample's value; -1: none.
    # [samples, 2], int64.
    _places: dict[str, np.ndarray] = field(default_factory=dict)

    def apply(self, record: bytes) -> list[Freed]:
        """Take over a record of the log; return what it freed."""
        (size,) = struct.unpack_from("<q", record)
        head = json.loads(record[8 : 8 + size])
        words = np.frombuffer(record, np.int64, offset=8 + size)
        if head["kind"] == _PUT:
            return self._put(Segment.parse(head, words, len(record)))
        if head["kind"] == _CLEAR:
            return self._clear(words)
        self.next_number = max(self.next_number, head["segment"])
        return []

    def _put(self, segment: Segment) -> list[Freed]:
        freed = []
        self.segments[segment.number] = segment
        self.next_number = max(self.next_number, segment.number + 1)
        self.record_bytes += segment.record_bytes
        most = int(segment.samples.max()) + 1
        for name, part in segment.fields.items():
            places = self._places_of(name, most)
            at = np.flatnonzero(part.live)
            samples = segment.samples[at]
            freed += self._release(name, places[samples])
            places[samples, 0] = segment.number
            places[samples, 1] = at
            # Of a sample that the put names twice, the last value stays.
            part.live[at] = places[samples, 1] == at
            segment.num_live += int(np.count_nonzero(part.live))
            self.live_bytes += int(part.block.sizes[part.live].sum())
        return freed

    def _clear(self, samples: np.ndarray) -> list[Freed]:
        freed = []
        for name, places in self._places.items():
            known = np.unique(samples[samples < len(places)])
            freed += self._release(name, places[known])
            places[known] = -1
        return freed

    def _release(self, name: str, places: np.ndarray) -> list[Freed]:
        """Mark values as no longer live, by their places. [n, 2]."""
        places = places[places[:, 0] >= 0]
        freed = []
        for number in np.unique(places[:, 0]).tolist():
            segment = self.segments[number]
            positions = np.unique(places[places[:, 0] == number, 1])
            part = segment.fields[name]
            part.live[positions] = False
            self.live_bytes -= int(part.block.sizes[positions].sum())
            segment.num_live -= len(positions)
            if segment.num_live == 0:
                del self.segments[number]
                self.record_bytes -= segment.record_bytes
            freed.append(Freed(segment, name, positions))
        return freed

    def _places_of(self, name: str, most: int) -> np.ndarray:
        known = self._places.get(name)
        if known is None:
            known = np.full((0, 2), -1, np.int64)
        if len(known) < most:
            grown = np.full((max(most, 2 * len(known), 1024), 2), -1, np.int64)
            grown[: len(known)] = known
            self._places[name] = grown
            return grown
        return known

    def find(self, samples: np.ndarray, name: str) -> np.ndarray:
        """Return the segment and the position of each sample's value. [n] -> [n, 2], int64.

        Raises:
            FieldError: A sample has no value of this field.
        """
        places = self._places.get(name, np.empty((0, 2), np.int64))
        known = samples < len(places)
        known[known] = places[samples[known], 0] >= 0
        if not known.all():
            lacking = samples[~known].tolist()
            raise FieldError(
                f"field {name}",
                "must have a value for every sample that is read",
                f"none for samples {lacking[:8]}" + (" and more" if len(lacking) > 8 else ""),
                "put it first; a cleared sample has no values",
            )
        return np.asarray(places[samples])

    def names(self) -> list[str]:
        """Return the fields that have a live value."""
        return sorted({name for one in self.segments.values() for name in one.fields})

    def snapshot(self, renamed: Mapping[int, int] | None = None) -> bytes:
        """Return a log of one record for each segment, numbered anew if `renamed` says how."""
        numbers = renamed or {number: number for number in self.segments}
        head = {
            "kind": _NEXT,
            "segment": max([self.next_number, *(n + 1 for n in numbers.values())]),
        }
        parts = [frame(_record(head))]
        for number, one in self.segments.items():
            parts.append(frame(Segment(numbers[number], one.samples, one.fields).to_record()))
        return b"".join(parts)


def check_samples(samples: np.ndarray) -> np.ndarray:
    """Return sample numbers as an array. [n], int64; DataError: one cannot be an index."""
    numbers = np.asarray(samples, np.int64).reshape(-1)
    if len(numbers) and (numbers.min() < 0 or numbers.max() >= MOST_SAMPLES):
        wrong = numbers[(numbers < 0) | (numbers >= MOST_SAMPLES)]
        rule = f"must be in [0, {MOST_SAMPLES})"
        remedy = "number samples densely; the index is an array"
        raise DataError("the number of a sample", rule, int(wrong[0]), remedy)
    return numbers
