"""Memory of rows that is used again, and never while an array refers to it."""

import gc
import threading
from collections.abc import Iterator
from pathlib import Path

import h5py
import numpy as np
import pytest

from deepspeed_gear.data.ingest import row_buffers
from deepspeed_gear.data.ingest.decoding.hdf5_arrays import RowReader
from deepspeed_gear.data.ingest.row_buffers import RowBuffers

MIB = 1 << 20


def address(array: np.ndarray) -> int:
    return int(array.ctypes.data)


@pytest.mark.parametrize("dtype", ["uint8", "float32", "float64"])
def test_memory_is_used_again_after_the_last_view(dtype: str) -> None:
    buffers = RowBuffers()
    first = buffers.empty((3, 1000, 100), np.dtype(dtype))
    assert first.shape == (3, 1000, 100)
    assert first.dtype == dtype
    assert first.flags.c_contiguous
    assert first.flags.writeable
    where = address(first)
    view = first[1:].reshape(-1)[7:]
    second = buffers.empty(first.shape, first.dtype)
    assert address(second) != where
    del first
    gc.collect()
    third = buffers.empty(second.shape, second.dtype)
    assert address(third) not in (where, address(second))
    del view
    assert address(buffers.empty(second.shape, second.dtype)) == where


def test_a_buffer_fits_smaller_arrays_down_to_half_its_size() -> None:
    buffers = RowBuffers()
    where = address(buffers.empty((4 * MIB,), np.dtype("uint8")))
    assert address(buffers.empty((2 * MIB,), np.dtype("uint8"))) == where
    assert address(buffers.empty((MIB,), np.dtype("uint8"))) != where
    assert address(buffers.empty((5 * MIB,), np.dtype("uint8"))) != where


@pytest.mark.parametrize("shape", [(0,), (0, 5), (3, 0), (7,)])
def test_small_arrays_and_objects_are_of_their_own(shape: tuple[int, ...]) -> None:
    buffers = RowBuffers()
    assert buffers.empty(shape, np.dtype("float32")).shape == shape
    objects = buffers.empty((MIB,), np.dtype("O"))
    assert objects[-1] is None


def test_free_memory_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_buffers, "MOST_FREE_BYTES", 3 * MIB)
    buffers = RowBuffers()
    held = [buffers.empty((MIB,), np.dtype("uint8")) for _ in range(5)]
    places = [address(array) for array in held]
    while held:
        held.pop(0)
    # The two that were freed first are gone, and others are lent from the last one on.
    again = [buffers.empty((MIB,), np.dtype("uint8")) for _ in range(3)]
    assert [address(array) for array in again] == places[:1:-1]


def test_readers_share_buffers_while_there_is_a_reader() -> None:
    first = RowBuffers.shared()
    where = address(first.empty((MIB,), np.dtype("uint8")))
    second = RowBuffers.shared()
    assert first is second
    array = second.empty((MIB,), np.dtype("uint8"))
    assert address(array) == where
    del first, second
    array[:] = 1  # it keeps its memory, and the buffers
    assert address(RowBuffers.shared().empty((MIB,), np.dtype("uint8"))) != where


def test_threads_never_share_an_array() -> None:
    buffers = RowBuffers()
    wrong: list[int] = []

    def use(number: int) -> None:
        held: list[np.ndarray] = []
        for turn in range(300):
            array = buffers.empty((100_000 + 1000 * (turn % 7),), np.dtype("uint8"))
            array[:] = number
            held.append(array)
            if len(held) > 1 + turn % 3:
                old = held.pop(0)
                if (old != number).any():
                    wrong.append(turn)

    threads = [threading.Thread(target=use, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.fixture(params=[None, (7, 50), (1000, 100)], ids=["plain", "small chunks", "chunks"])
def dataset(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[h5py.Dataset]:
    with h5py.File(tmp_path / "a.hdf5", "w") as file:
        values = np.arange(30_000 * 100, dtype=np.int32).reshape(30_000, 100)
        yield file.create_dataset("a", data=values, chunks=request.param)


def test_rows_that_were_read_stay_as_they_are(dataset: h5py.Dataset) -> None:
    """Ranges that lie in a block, cross its end, are larger, and leave rows out."""
    reader = RowReader("a", dataset)
    low = 0
    kept = []
    for length in (10, 1, 2999, 700, 0, 9000, 3, 8000, 5000, 1, 4000):
        kept.append((low, low + length, reader[low : low + length]))
        low += length - min(length, 1)
        if length == 3:
            low += 40
    assert low > 28_000
    for first, end, rows in kept:
        np.testing.assert_array_equal(rows, dataset[first:end])
