"""Decompressed size of an Arrow IPC message, read from its metadata.

pyarrow decompresses a body to the sizes that the body itself states, without a limit, and its
Python API does not show the compression of a message. So the FlatBuffers table of the message is
read here.
"""

from __future__ import annotations

import struct
from typing import Any

# Each compressed buffer begins with its decompressed size; -1 means that it is stored as it is.
_PREFIX = struct.Struct("<q")


def decompressed_bytes(message: Any) -> int | None:
    """Return the decompressed bytes of a message's buffers; None if they are not compressed.

    Args:
        message: A pyarrow.ipc.Message, whose metadata pyarrow has verified.
    """
    view = memoryview(message.metadata)

    def number(form: str, at: int) -> int:
        return int(struct.unpack_from(form, view, at)[0])

    def field(table: int, index: int) -> int:
        """Return the position of a table's field; 0 if it is absent."""
        # A FlatBuffers table begins with the distance to its vtable, which lies before it. The
        # vtable is uint16: its own size, the table's size, then the offset of each field from the
        # table, 0 for an absent one. Fields that a later schema added lie beyond its size.
        vtable = table - number("<i", table)
        at = 4 + 2 * index
        offset = number("<H", vtable + at) if at < number("<H", vtable) else 0
        return table + offset if offset else 0

    header = field(number("<I", 0), 2)  # Message: version, header_type, header
    batch = header + number("<I", header)
    if message.type == "dictionary":  # DictionaryBatch: id, data
        data = field(batch, 1)
        batch = data + number("<I", data)
    if not field(batch, 3):  # RecordBatch: length, nodes, buffers, compression
        return None
    # A vector is its number of elements, uint32, and the elements: here structs of two int64.
    buffers = field(batch, 2)
    first = buffers + number("<I", buffers) + 4
    body = memoryview(message.body)
    total = 0
    for index in range(number("<I", first - 4)):
        offset, length = struct.unpack_from("<qq", view, first + 16 * index)
        if length >= _PREFIX.size and 0 <= offset <= len(body) - _PREFIX.size:
            total += max(_PREFIX.unpack_from(body, offset)[0], length)
    return total
