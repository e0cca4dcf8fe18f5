"""Where things lie in a store, and what a header refuses."""

import os
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
    Layout,
    Region,
    RunIdentity,
    read_header,
    write_header,
)

SIZES = [0, 1, 7, 33, 127, 128, 129]
RUN = RunIdentity("0123456789abcdef" * 2, "r" * 64, "f" * 64)
LAYOUT = Layout.of([Region("a", "int64", (7,)), Region("b", "uint16", (3, 5))], {"table": "main"})


@given(
    st.lists(
        st.tuples(st.sampled_from(["bool", "uint16", "int64", "float64"]), st.sampled_from(SIZES)),
        max_size=8,
    )
)
def test_regions_are_aligned_and_apart(shapes: list[tuple[str, int]]) -> None:
    regions = [Region(f"r{i}", dtype, (n, 3)) for i, (dtype, n) in enumerate(shapes)]
    layout = Layout.of(regions, {"n": len(regions)})
    at = HEADER_BYTES + len(layout.description)
    buffer = bytearray(layout.total_bytes)
    views = layout.views(buffer)
    base = np.frombuffer(buffer, np.uint8).ctypes.data
    for region in regions:
        offset = views[region.name].__array_interface__["data"][0] - base
        assert offset % ALIGNMENT == 0
        assert at <= offset < at + ALIGNMENT
        at = offset + region.num_bytes
    assert at <= layout.total_bytes < at + ALIGNMENT
    for i, region in enumerate(regions):
        assert views[region.name].shape == region.shape
        views[region.name][...] = i % 2
    for i, region in enumerate(regions):
        assert (views[region.name] == i % 2).all()


def test_round_trips_of_the_description_and_the_header() -> None:
    parsed = Layout.parse(LAYOUT.description)
    assert parsed == LAYOUT
    assert parsed.meaning == {"table": "main"}
    assert parsed.digest == LAYOUT.digest
    assert read(header()) == (LAYOUT, RUN)


def header() -> bytearray:
    buffer = bytearray(LAYOUT.total_bytes)
    write_header(buffer, LAYOUT, RUN)
    return buffer


def read(content: bytearray) -> tuple[Layout, RunIdentity]:
    """Return what the header of a file F of this content says."""
    fd = os.memfd_create("F")
    try:
        os.write(fd, content)
        return read_header(fd, "F")
    finally:
        os.close(fd)


def set_word(name: str, value: object) -> Callable[[bytearray], None]:
    def change(buffer: bytearray) -> None:
        np.ndarray((), HEADER, buffer=buffer)[name] = value

    return change


def set_byte(at: int, value: int) -> Callable[[bytearray], None]:
    return lambda buffer: buffer.__setitem__(at, value)


def cut(size: int) -> Callable[[bytearray], None]:
    def change(buffer: bytearray) -> None:
        set_word("total_bytes", size)(buffer)
        del buffer[size:]

    return change


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (set_word("magic", b"GEARSTOP"), "F must be a gear store, got b'GEARSTOP'"),
        (set_word("magic", b""), "F must be a gear store"),
        (set_word("format", 1), "F must have store format 3, got 1"),
        (
            set_word("total_bytes", LAYOUT.total_bytes + 1),
            r"F must have \d+ bytes, got \d+; it is truncated",
        ),
        (set_word("description_bytes", 5), "F must have an undamaged layout"),
        (set_word("description_bytes", 1 << 40), "F must have an undamaged layout"),
        (set_word("description_bytes", -1), "F must have an undamaged layout"),
        (set_word("layout_digest", b"0" * 64), "F must have an undamaged layout"),
        (set_byte(HEADER_BYTES + 3, 1), "F must have an undamaged layout"),
        (set_byte(HEADER_BYTES, 0xFF), "F must have an undamaged layout"),
        *(
            (cut(size), "F must be a gear store of at least 4096 bytes")
            for size in (0, 1, HEADER_BYTES - 1)
        ),
        (cut(LAYOUT.total_bytes - 1), f"F must have the {LAYOUT.total_bytes} bytes of its layout"),
    ],
)
def test_damaged_headers_and_short_files_are_refused(
    change: Callable[[bytearray], None], text: str
) -> None:
    buffer = header()
    change(buffer)
    with pytest.raises(StoreError, match=text):
        read(buffer)
