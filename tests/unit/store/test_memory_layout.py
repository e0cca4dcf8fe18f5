"""Where things lie in a store, and what a header refuses."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_gear.errors import StoreError
from deepspeed_gear.store.memory_layout import (
    ALIGNMENT,
    HEADER,
    HEADER_BYTES,
    HOLDER_OFFSET,
    MUTEX_BYTES,
    MUTEX_OFFSET,
    Layout,
    Region,
    RunIdentity,
    align,
    read_header,
    write_header,
)

SIZES = [0, 1, 7, 33, 127, 128, 129]
RUN = RunIdentity("0123456789abcdef" * 2, "r" * 64, "f" * 64)
LAYOUT = Layout.of([Region("a", "int64", (7,)), Region("b", "uint16", (3, 5))], {"table": "main"})


@given(
    st.lists(
        st.tuples(st.sampled_from(["bool", "uint16", "int64", "float64"]), st.sampled_from(SIZES)), max_size=8
    )
)
def test_regions_are_aligned_and_apart(shapes: list[tuple[str, int]]) -> None:
    regions = [Region(f"r{i}", dtype, (n, 3)) for i, (dtype, n) in enumerate(shapes)]
    layout = Layout.of(regions, {"n": len(regions)})
    at = HEADER_BYTES + len(layout.description)
    for region in regions:
        offset = layout.offsets[region.name]
        assert offset % ALIGNMENT == 0
        assert at <= offset < at + ALIGNMENT
        at = offset + region.num_bytes
    assert at <= layout.total_bytes < at + ALIGNMENT
    buffer = bytearray(layout.total_bytes)
    views = layout.views(buffer)
    for i, region in enumerate(regions):
        assert views[region.name].shape == region.shape
        views[region.name][...] = i % 2
    for i, region in enumerate(regions):
        assert (views[region.name] == i % 2).all()


def test_fixed_parts_are_apart_and_regions_aligned() -> None:
    assert HEADER.itemsize <= MUTEX_OFFSET
    assert MUTEX_OFFSET + MUTEX_BYTES == HOLDER_OFFSET
    assert HOLDER_OFFSET + 8 <= HEADER_BYTES
    assert [align(offset) for offset in (0, 1, 127, 128, 129)] == [0, 128, 128, 128, 256]


def test_round_trips_of_the_description_and_the_header() -> None:
    parsed = Layout.parse(LAYOUT.description)
    assert parsed == LAYOUT
    assert parsed.meaning == {"table": "main"}
    assert parsed.digest == LAYOUT.digest
    assert read_header(header(), LAYOUT.total_bytes, "F") == (LAYOUT, RUN)


@pytest.mark.parametrize(
    "other",
    [
        Layout.of([Region("a", "int64", (8,)), Region("b", "uint16", (3, 5))], {"table": "main"}),
        Layout.of([Region("b", "uint16", (3, 5)), Region("a", "int64", (7,))], {"table": "main"}),
        Layout.of([Region("a", "int64", (7,)), Region("b", "int16", (3, 5))], {"table": "main"}),
        Layout.of([Region("a", "int64", (7,)), Region("b", "uint16", (3, 5))], {"table": "other"}),
    ],
)
def test_any_difference_changes_the_digest(other: Layout) -> None:
    assert other.digest != LAYOUT.digest


def header() -> bytearray:
    buffer = bytearray(LAYOUT.total_bytes)
    write_header(buffer, LAYOUT, RUN)
    return buffer


def set_word(name: str, value: object) -> Callable[[bytearray], None]:
    def change(buffer: bytearray) -> None:
        np.ndarray((), HEADER, buffer=buffer)[name] = value

    return change


def set_byte(at: int, value: int) -> Callable[[bytearray], None]:
    return lambda buffer: buffer.__setitem__(at, value)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (set_word("magic", b"GEARSTOP"), "F must be a gear store, got b'GEARSTOP'"),
        (set_word("magic", b""), "F must be a gear store"),
        (set_word("format", 1), "F must have store format 2, got 1"),
        (set_word("total_bytes", LAYOUT.total_bytes + 1), r"F must have \d+ bytes, got \d+; it is truncated"),
        (set_word("description_bytes", 5), "F must have an undamaged layout"),
        (set_word("description_bytes", 1 << 40), "F must have an undamaged layout"),
        (set_word("description_bytes", -1), "F must have an undamaged layout"),
        (set_word("layout_digest", b"0" * 64), "F must have an undamaged layout"),
        (set_byte(HEADER_BYTES + 3, 1), "F must have an undamaged layout"),
        (set_byte(HEADER_BYTES, 0xFF), "F must have an undamaged layout"),
    ],
)
def test_damaged_headers_are_refused(change: Callable[[bytearray], None], text: str) -> None:
    buffer = header()
    change(buffer)
    with pytest.raises(StoreError, match=text):
        read_header(buffer, LAYOUT.total_bytes, "F")


@pytest.mark.parametrize("size", [0, 1, HEADER_BYTES - 1])
def test_short_files_are_refused(size: int) -> None:
    with pytest.raises(StoreError, match="F must be a gear store of at least 4096 bytes"):
        read_header(bytearray(size), size, "F")


def test_a_layout_of_another_size_is_refused() -> None:
    longer = Layout.of([Region("a", "int64", (700,)), Region("b", "uint16", (3, 5))], {"table": "main"})
    buffer = bytearray(longer.total_bytes)
    write_header(buffer, longer, RUN)
    set_word("total_bytes", LAYOUT.total_bytes)(buffer)
    with pytest.raises(StoreError, match=rf"F must have the {longer.total_bytes} bytes of its layout"):
        read_header(buffer, LAYOUT.total_bytes, "F")
