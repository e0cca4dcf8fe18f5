"""Messages of the gateway: trajectories as Arrow record batches, headers and errors as JSON.

A call is a unary gRPC call whose request and answer are bytes, without protobuf or generated code.

A record batch has one row per trajectory: its number; the bytes of each column in C order, as
`large_binary`; and in a table with media, the media items to which it refers (`MediaSpec.send`).
The bytes are those of the store, so bfloat16, bool and shapes need no Arrow types, and nothing is
converted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

import deepspeed_gear.arguments as arguments
from deepspeed_gear.arguments import parse_json
from deepspeed_gear.data.arrow_messages import decompressed_bytes
from deepspeed_gear.data.media import SENT, MediaSpec
from deepspeed_gear.data.media_digests import MediaItem
from deepspeed_gear.data.trajectory_checks import check_trajectory
from deepspeed_gear.errors import DataError, StoreError, show_bytes
from deepspeed_gear.schema import Column, Schema
from deepspeed_gear.store.prompt_ledger import LeaseRecord

# Of the protocol: 3 had no leases; 4 had no media; leases of 5 ended with their session; 6 waited
# for commits; members of 7 had one trajectory each, and its leases no place.
VERSION = 8
SESSION_S = 3600.0  # a session ends if its writer has not called for so long
MAX_MESSAGE_BYTES = 64 << 20  # default for the trajectories of one call
# Bounds of that limit; gRPC's own lengths end at 2 GiB.
LEAST_MAX_MESSAGE_BYTES = 1 << 20
MOST_MAX_MESSAGE_BYTES = 1 << 30
# For header, Arrow schema and padding: less than 512 bytes for each column, and its name.
SLACK_BYTES = 1 << 20
MOST_HEADER_BYTES = 512 << 10  # parsed JSON takes many times its length
# The gRPC service, with the methods hello, put and bye, and for weights board, weights and chunk.
SERVICE = "deepspeed_gear.Gateway"
CHUNK_BYTES = 4 << 20  # of a version of a policy board, in the answer of one call
NUM_LEASE_WORDS = 5  # the first words of a LeaseRecord, entry to attempt, identify it
_MOST_CLIENT = 64  # characters of a client's name, which the gateway keeps
_NUMBER = ".number"  # no column of a schema begins with a dot
_LENGTH = 4  # bytes of a header's length
SAME_VERSION = "use the same version of deepspeed_gear on both sides"
# Of each value and number: its offset in the message, and the array that the gateway makes of it.
# If these did not count, millions of short trajectories would take many times a message's length.
_VALUE_BYTES = 8 + 248
Arrays = Mapping[str, np.ndarray]


def trajectory_bytes(arrays: Arrays) -> int:
    """Return the memory of a trajectory in a gateway, in bytes: its values and their arrays."""
    return sum(array.nbytes for array in arrays.values()) + _VALUE_BYTES * (len(arrays) + 1)


def as_sent(
    name: str,
    schema: Schema,
    media: MediaSpec | None,
    trajectory: Mapping[str, Any],
    items: dict[int, MediaItem],
    **options: Any,
) -> dict[str, np.ndarray]:
    """Check a trajectory, and convert it to the form in which it is sent.

    Args:
        name: Name of the trajectory, for errors.
        schema: Columns of the table.
        media: Media of the table; None: it has none.
        trajectory: Columns by their dotted names.
        items: Media items that are sent already, by content id. New ones are added.
        **options: As `check_trajectory`.

    Returns:
        Columns in the stored form, with the content of new media items.
    """
    if media is None:
        return check_trajectory(name, schema, trajectory, **options)[0]
    own = dict[int, MediaItem]()
    arrays, _ = check_trajectory(name, schema, media.take(name, schema, trajectory, own), **options)
    arrays[SENT] = media.send(item.content for number, item in own.items() if number not in items)
    items |= own
    return arrays


def encode(schema: Schema, trajectories: Sequence[tuple[int, Arrays]]) -> pa.RecordBatch:
    """Return trajectories (number, and columns in the stored form) as a record batch."""
    columns = [pa.array([number for number, _ in trajectories], pa.int64())]
    for name in _names(schema):
        values = [np.ascontiguousarray(arrays[name]).reshape(-1) for _, arrays in trajectories]
        columns.append(pa.array([value.view(np.uint8).data for value in values], pa.large_binary()))
    return pa.record_batch(columns, names=[_NUMBER, *_names(schema)])


def _names(schema: Schema) -> list[str]:
    return [*schema.names, SENT] if schema.has_items else [*schema.names]


def decode(
    schema: Schema, content: pa.Buffer, most_bytes: int = MOST_MAX_MESSAGE_BYTES
) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
    """Yield the number and the columns of each trajectory of a record batch, without copying.

    `content`, the part of a message after its header, is not trusted. `most_bytes` limits the sum
    of the `trajectory_bytes`.
    """
    names = [_NUMBER, *_names(schema)]
    source = pa.BufferReader(content)
    types = [pa.int64(), *[pa.large_binary()] * (len(names) - 1)]
    kinds = pa.ArrowException, OSError, EOFError
    with DataError.on(
        "batch", "must be an Arrow stream of one record batch", *kinds, remedy=SAME_VERSION
    ):
        own = pa.ipc.read_schema(source)
        if own.names != names or own.types != types:
            raise DataError(
                "batch", f"must have the columns {names} of large_binary", str(own), SAME_VERSION
            )
        message = pa.ipc.read_message(source)
        if message.type == "record batch" and decompressed_bytes(message) is not None:
            remedy = (
                "write the stream without compression: a short message would take any "
                "amount of memory"
            )
            raise DataError("batch", "must not be compressed", None, remedy)
        batch = pa.ipc.read_record_batch(message, own)  # its buffers are parts of `content`
        batch.validate(full=True)  # checks that offsets are inside their buffers
    if (least := batch.num_rows * _VALUE_BYTES * (len(schema) + 1)) > most_bytes:
        rule = f"must take at most {show_bytes(most_bytes)}"
        remedy = "send fewer trajectories per call"
        raise DataError(f"batch of {batch.num_rows} trajectories", rule, show_bytes(least), remedy)
    if any(column.null_count for column in batch.columns):
        raise DataError("batch", "must have no nulls", remedy=SAME_VERSION)
    stored = [column.item_number if column.is_ragged else column for column in schema]
    every = [*stored, Column("media", "uint8")]  # whose bytes `MediaSpec.received` checks
    given = zip(names[1:], every, batch.columns[1:], strict=False)
    columns = {name: _decoded(column, array) for name, column, array in given}
    for row, number in enumerate(batch.column(0).to_pylist()):
        yield number, {name: arrays[row] for name, arrays in columns.items()}


def _decoded(column: Column, array: pa.Array) -> list[np.ndarray]:
    _, offsets_buffer, content_buffer = array.buffers()
    offsets = np.frombuffer(offsets_buffer, np.int64)[array.offset : array.offset + len(array) + 1]
    content = np.frombuffer(b"" if content_buffer is None else content_buffer, np.uint8)
    lengths = np.diff(offsets)
    bad = lengths != column.row_bytes if column.rows == "1" else lengths % column.row_bytes != 0
    if bad.any():
        rule = f"must have rows of {column.row_bytes} bytes"
        raise DataError(f"batch: column {column.name}", rule, int(lengths[bad][0]), SAME_VERSION)
    if column.dtype == "bool" and (content[offsets[0] : offsets[-1]] > 1).any():
        raise DataError(
            f"batch: column {column.name}",
            "must hold bytes of 0 and 1, as its dtype is bool",
            remedy=SAME_VERSION,
        )
    lead = () if column.rows == "1" else (-1,)
    pieces = (content[start:end] for start, end in pairwise(offsets))
    return [piece.view(column.numpy_dtype).reshape((*lead, *column.shape)) for piece in pieces]


def check_version(name: str, version: object) -> None:
    """Raise a StoreError unless a client has this version of the protocol."""
    if version != VERSION:
        rule = f"must have protocol version {VERSION}"
        raise StoreError(name, rule, version, "install the same deepspeed_gear on both sides")


def client_name(name: str, header: Mapping[str, Any]) -> str:
    """Return the client of a call's header; StoreError: its name is too long to be kept.

    Args:
        name: What the client is, for the error.
    """
    client = str(header.get("client"))
    if len(client) > _MOST_CLIENT:
        rule = f"must have a name of at most {_MOST_CLIENT} characters"
        raise StoreError(name, rule, len(client), "use a shorter client name")
    return client


def lease_words(lease: LeaseRecord) -> tuple[Any, ...]:
    """Return the words of a lease for a call, without the data that the worker has kept."""
    return (*lease[:NUM_LEASE_WORDS], None, lease.origin)


def lease_of(words: Any) -> LeaseRecord:
    """Return the lease of a call from its words, which are not trusted."""
    with DataError.on(
        "the lease of a call",
        "must be a list of 7 words",
        TypeError,
        ValueError,
        remedy=SAME_VERSION,
    ):
        entry, token, number, version, attempt, _, origin = words
    for word in (entry, token, number, version, attempt):
        arguments.count("a word of a lease", word, least=0)
    return LeaseRecord(entry, token, number, version, attempt, origin=str(origin))


def pack(
    header: Mapping[str, Any], batch: pa.RecordBatch | bytes | memoryview | None = None
) -> pa.Buffer:
    """Return a message: the length of the header, the header as JSON, and the content.

    `batch` is the content: bytes, or a record batch, which is written as an IPC stream.
    """
    sink = pa.BufferOutputStream()
    head = json.dumps(header).encode()
    sink.write(len(head).to_bytes(_LENGTH, "little") + head)
    if isinstance(batch, bytes | memoryview):
        sink.write(batch)
    elif batch is not None:
        with pa.ipc.new_stream(sink, batch.schema) as stream:
            stream.write_batch(batch)
    return sink.getvalue()


def unpack(
    message: pa.Buffer, most_bytes: int = MOST_HEADER_BYTES
) -> tuple[dict[str, Any], pa.Buffer]:
    """Return the header and the content of a message."""
    view = memoryview(message)
    end = _LENGTH + int.from_bytes(view[:_LENGTH], "little")
    if end > _LENGTH + most_bytes:
        raise DataError(
            "message",
            f"must have a header of at most {most_bytes} bytes",
            end - _LENGTH,
            SAME_VERSION,
        )
    with DataError.on("message", "must begin with a JSON object", ValueError, remedy=SAME_VERSION):
        header = parse_json(bytes(view[_LENGTH:end]))
    if not isinstance(header, dict) or end > len(view):
        raise DataError("message", "must begin with a JSON object", None, SAME_VERSION)
    return header, message.slice(end)


def differences(own: Schema, wanted: Schema) -> list[str]:
    """Describe how two schemas differ: missing columns, and attributes that differ."""
    texts = [f"column {name} is not in the table" for name in own.names if name not in wanted]
    texts += [f"column {name} is missing" for name in wanted.names if name not in own]
    for column in (c for c in wanted if c.name in own):
        other = own[column.name]
        size = "max_bytes" if column.is_opaque else "shape"
        for what in ("dtype", size, "role", "rows", "late", "allow_nan", "max_values"):
            here = getattr(other, what)
            there = getattr(column, what)
            if here != there:
                texts.append(f"column {column.name} has {what} {here}, the table {there}")
    if not texts and own != wanted:
        texts.append(f"the columns are in the order {', '.join(own.names)}")
    return texts
