"""Messages of Arrow's IPC format: what a record batch takes in memory, read before anything is
decompressed.

pyarrow decompresses a body to the sizes that the body itself states, without a limit, and does not
show the compression of a message.
"""

from __future__ import annotations

import struct
from typing import Any

_PREFIX = struct.Struct("<q")  # before each compressed buffer: its decompressed size; -1: as it is


def decompressed_bytes(message: Any) -> int | None:
    """Return the decompressed bytes of a verified pyarrow.ipc.Message's buffers; None: not
    compressed.
    """
    view = memoryview(message.metadata)

    def number(form: str, at: int) -> int:
        return int(struct.unpack_from(form, view, at)[0])

    def field(table: int, index: int) -> int:  # position of a field of a table, 0: it is absent
        fields = table - number("<i", table)
        at = 4 + 2 * index
        offset = number("<H", fields + at) if at < number("<H", fields) else 0
        return table + offset if offset else 0

    header = field(number("<I", 0), 2)  # Message: version, header_type, header
    batch = header + number("<I", header)
    if message.type == "dictionary":  # DictionaryBatch: id, data
        batch = (data := field(batch, 1)) + number("<I", data)
    if not field(batch, 3):  # RecordBatch: length, nodes, buffers, compression
        return None
    buffers = field(batch, 2)
    first = buffers + number("<I", buffers) + 4
    body = memoryview(message.body)
    total = 0
    for index in range(number("<I", first - 4)):
        offset, length = struct.unpack_from("<qq", view, first + 16 * index)
        if length >= _PREFIX.size and 0 <= offset <= len(body) - _PREFIX.size:
            total += max(_PREFIX.unpack_from(body, offset)[0], length)
    return total
