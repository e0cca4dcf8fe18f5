"""Sizes of the values in Parquet pages, read from the page headers before any decoding.

pyarrow does not read by the counts in the footer. A dictionary's value is repeated for one bit or
less, and so are whole lists. Headers are structs in Thrift's compact protocol.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

# Page types, encodings and physical types are those of parquet.thrift.
DATA = 0
DICTIONARY = 2
DATA_V2 = 3
_BY_DICTIONARY = (2, 8)  # PLAIN_DICTIONARY and RLE_DICTIONARY: indices into the dictionary
_BY_PREFIX = 7  # DELTA_BYTE_ARRAY: a value repeats the beginning of the one before
_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 12, "FLOAT": 4, "DOUBLE": 8}
_MOST_FIELDS = 1000  # of one header
_INTEGERS = (3, 4, 5, 6)  # Thrift's types byte, i16, i32 and i64


class _Page(NamedTuple):
    kind: int
    size: int  # decompressed
    body: memoryview
    num_values: int
    encoding: int


@dataclass(frozen=True)
class ColumnPages:
    """Sizes of a column chunk's values, in bytes.

    Attributes:
        num_values: Its values, and nulls and empty lists between them.
        stored_bytes: Its pages, decompressed.
        longest: The largest text that may repeat; 0 if none can.
        decoded_bytes: Its values, if each that may repeat were as large as the largest one.
    """

    num_values: int
    stored_bytes: int
    longest: int
    decoded_bytes: int


def column_pages(
    arrow: Any, content: memoryview, chunk: Any, width: int, enough: int
) -> ColumnPages:
    """Read the headers of a column chunk's pages.

    Args:
        arrow: The module pyarrow.
        content: The whole file.
        chunk: pyarrow's metadata of the column chunk.
        width: Bytes of a value, as `value_width` returns them.
        enough: The longest value of a dictionary is searched for only if the column could be larger
            than this with the dictionary's whole size in its place.
    Raises:
        ValueError: A header is malformed.
    """
    num_values = stored = by_dictionary = longest = decoded = 0
    words: _Page | None = None
    for page in _pages(content, chunk):
        stored += page.size
        if page.kind == DICTIONARY:
            words = page
            continue
        num_values += page.num_values
        if page.encoding in _BY_DICTIONARY:
            by_dictionary += page.num_values
            continue
        decoded += page.size
        if page.encoding == _BY_PREFIX:
            longest = max(longest, page.size)
    if width:
        return ColumnPages(num_values, stored, 0, num_values * width)
    if words is not None:
        # The size of the whole dictionary bounds its longest value, without decompressing it.
        is_enough = decoded + by_dictionary * words.size <= enough
        in_words = words.size if is_enough else _longest(arrow, chunk.compression, words)
        longest = max(longest, in_words)
    return ColumnPages(num_values, stored, longest, decoded + by_dictionary * longest)


def value_width(column: Any) -> int:
    """Return the bytes of each value of a Parquet column; 0 if values differ in size."""
    if column.physical_type == "FIXED_LEN_BYTE_ARRAY":
        return int(column.length)
    return _WIDTHS.get(column.physical_type, 0)


def _pages(content: memoryview, chunk: Any) -> Iterator[_Page]:
    """Yield the pages of a column chunk, as many as pyarrow would read."""
    # Field of PageHeader that holds the header of a page's own type. In PageHeader, fields 1 to 3
    # are the type and the sizes, decompressed and stored; in the headers of all types, field 1 is
    # the number of values.
    kinds = {DATA: 5, DATA_V2: 8, DICTIONARY: 7}
    at = chunk.data_page_offset
    first = chunk.dictionary_page_offset
    if chunk.has_dictionary_page and first and 0 < first < at:
        at = first
    end = min(len(content), at + chunk.total_compressed_size)
    seen = 0
    while seen < chunk.num_values and 0 <= at < end:
        header, begin = _struct(content, at, 0)
        kind, size, length = (header.get(key, 0) for key in (1, 2, 3))
        of_data = header.get(kinds.get(kind, 0), {})
        if not isinstance(of_data, dict):
            raise ValueError("a page header with other fields than Parquet's")
        count = of_data.get(1, 0)
        encoding = of_data.get(4 if kind == DATA_V2 else 2, 0)
        if not all(
            isinstance(one, int) and one >= 0 for one in (kind, size, length, count, encoding)
        ):
            raise ValueError("a page header with other fields than Parquet's")
        at = begin + length
        yield _Page(kind, size, content[begin:at], count, encoding)
        seen += count if kind in (DATA, DATA_V2) else 0


def _longest(arrow: Any, compression: str, page: _Page) -> int:
    """Return the bytes of a dictionary page's longest value, at most those of the page."""
    plain: Any = page.body.tobytes()
    if compression != "UNCOMPRESSED":
        try:
            plain = arrow.Codec(compression).decompress(plain, page.size)
        except (ValueError, OSError, NotImplementedError):  # such as the framed LZ4 of Hadoop
            return page.size
    words = memoryview(plain)
    at = 0
    longest = 0
    while at + 4 <= len(words):
        length = int.from_bytes(words[at : at + 4], "little")
        longest = max(longest, length)
        at += 4 + length
    return min(longest, page.size)


def _struct(content: memoryview, at: int, depth: int) -> tuple[dict[int, Any], int]:
    """Decode a Thrift struct: its integers and structs by field number, and where it ends."""
    fields: dict[int, Any] = {}
    number = 0
    for _ in range(_MOST_FIELDS):
        head, at = _byte(content, at)
        if head == 0:  # the end of the struct
            return fields, at
        # The low half of the byte is the type, the high half the distance from the field before;
        # 0 means that the number of the field follows.
        kind = head & 15
        step = head >> 4
        if step:
            number += step
        else:
            number, at = _integer(content, at)
        if kind in (1, 2):  # true and false have no value of their own
            continue
        fields[number], at = _value(content, at, kind, depth)
    raise ValueError("a page header without an end")


def _value(content: memoryview, at: int, kind: int, depth: int) -> tuple[Any, int]:
    if kind == 3:
        return _byte(content, at)
    if kind in _INTEGERS:
        return _integer(content, at)
    if kind == 7:
        return None, at + 8
    if kind == 8:
        length, at = _unsigned(content, at)
        return None, at + length
    if kind == 12 and depth < 8:
        return _struct(content, at, depth + 1)
    raise ValueError("a page header with lists")


def _byte(content: memoryview, at: int) -> tuple[int, int]:
    if at >= len(content):
        raise ValueError("a page header that is cut off")
    return content[at], at + 1


def _unsigned(content: memoryview, at: int) -> tuple[int, int]:
    # Seven bits a byte, the low ones first; the eighth bit means that more follow.
    number = 0
    for shift in range(0, 70, 7):
        part, at = _byte(content, at)
        number |= (part & 127) << shift
        if part < 128:
            return number, at
    raise ValueError("a number of more than 64 bits")


def _integer(content: memoryview, at: int) -> tuple[int, int]:
    # Zigzag: 0, 1, 2, 3, 4 are 0, -1, 1, -2, 2.
    number, at = _unsigned(content, at)
    return (number >> 1) ^ -(number & 1), at
