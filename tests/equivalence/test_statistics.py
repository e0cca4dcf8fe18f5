"""Statistics of columns: the native module and NumPy give the same bits, for any division."""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_gear import Column, Dataset, DatasetWriter, Schema
from deepspeed_gear.data import array_file
from deepspeed_gear.data.statistics import (
    column_scan,
    dataset_statistics,
    quantile_bins,
    quantile_brackets,
    quantile_digits,
)
from deepspeed_gear.data.statistics.column_scan import ColumnScan, block_rows
from deepspeed_gear.data.statistics.quantile_bins import QuantileBins
from deepspeed_gear.data.statistics.quantile_brackets import QuantileBrackets
from deepspeed_gear.data.statistics.quantile_digits import QuantileDigits
from deepspeed_gear.data.statistics.quantiles import interpolated
from deepspeed_gear.data.statistics.row_sample import RowSample
from deepspeed_gear.data.stored_values import are_finite, as_float64
from deepspeed_gear.errors import DataError
from deepspeed_gear.ops import Ops
from deepspeed_gear.schema import DTYPES, FLOATING

LEVELS = np.array([0.0, 0.01, 0.25, 0.5, 0.9, 1.0])
SHAPES = [(), (3,), (32,), (33,), (2, 600)]
SPECIAL = np.array([np.nan, -np.nan, np.inf, -np.inf])


def bfloat16(values: np.ndarray) -> np.ndarray:
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def rows_of(column: Column, count: int, random: np.random.Generator) -> np.ndarray:
    """Return values with ties, zeros of both signs, and in a floating column non-finite ones."""
    values = random.normal(0, 40, (count, *column.shape)).round(int(random.integers(0, 3)))
    if not column.is_floating:
        values = abs(values).clip(0, 120)
    else:
        holes = random.random(values.shape) < random.choice([0, 0.2])
        values[holes] = random.choice(SPECIAL, int(holes.sum()))
        values[random.random(values.shape) < 0.1] = -0.0
    if column.dtype == "bfloat16":
        return bfloat16(values)
    with np.errstate(invalid="ignore"):
        stored = values.astype(column.numpy_dtype)
    if column.dtype == "int64":
        stored *= 10**15 + 1  # more bits than float64 has
    return stored


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_native_statistics_are_those_of_numpy(
    cpu: Ops, dtype: str, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    column = Column("x", dtype, shape)
    random = np.random.default_rng(len(dtype) + len(shape))
    for count in (1, 7, 33, 1200 if column.num_elements > 33 else 6000):
        values = rows_of(column, count, random)
        for keep in (None, random.random(count) < 0.7):
            kept = np.arange(count) if keep is None else np.flatnonzero(keep)
            runs = np.stack([kept, np.ones_like(kept)], axis=1)
            results = []
            for native in (None, cpu.native):
                for module in (column_scan, quantile_bins):
                    monkeypatch.setattr(module, "existing_native", lambda _, native=native: native)
                scan = ColumnScan(column)
                step = block_rows(column) * (3 if native is None else 1)
                for low in range(0, count, step):
                    part = None if keep is None else keep[low : low + step]
                    scan.add(values[low : low + step], part)
                bins = QuantileBins(values, column, runs, LEVELS, 2)
                for task in bins.tasks:
                    task()
                results.append((scan.moments + 0.0, bins.found + 0.0))
            for one, other in zip(*results, strict=True):
                np.testing.assert_array_equal(one.view(np.int64), other.view(np.int64))
            numbers = as_float64(values[kept].reshape(len(kept), column.num_elements), column)
            if len(kept) and np.isfinite(numbers).all():
                wanted = np.quantile(numbers, LEVELS, axis=0)
                np.testing.assert_array_equal(interpolated(bins.found, LEVELS), wanted)


def quantiles_of_all(values: np.ndarray, column: Column, keep: np.ndarray | None) -> QuantileBins:
    """Return the quantiles of the rows that are kept, from all of their values."""
    kept = np.arange(len(values)) if keep is None else np.flatnonzero(keep)
    runs = np.stack([kept, np.ones_like(kept)], axis=1)
    wanted = QuantileBins(values, column, runs, LEVELS)
    for task in wanted.tasks:
        task()
    return wanted


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (3,), (2, 20)])
@pytest.mark.parametrize("count_bytes", [1, 40_000, 1 << 27], ids=["bit", "short", "long"])
def test_quantiles_by_digits_are_those_of_all_values(
    cpu: Ops, dtype: str, shape: tuple[int, ...], count_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By digits of any length, and by NumPy alone; of rows in parts, some of which do not count."""
    monkeypatch.setattr(quantile_digits, "_COUNT_BYTES", count_bytes)
    column = Column("x", dtype, shape)
    random = np.random.default_rng(len(dtype) + len(shape))
    for count in (1, 7, 1100):
        values = rows_of(column, count, random)
        if column.is_floating and shape:
            values.reshape(count, -1)[:, -1] = rows_of(column, 1, random).reshape(-1)[-1]
        for keep in (None, random.random(count) < 0.7):
            wanted = quantiles_of_all(values, column, keep)

            def parts(
                values: np.ndarray = values, keep: np.ndarray | None = keep
            ) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
                for low in range(0, len(values), 400):
                    own = slice(low, low + 400)
                    yield values[own], None if keep is None else keep[own].copy()

            for native in (None, cpu.native):
                monkeypatch.setattr(
                    quantile_digits, "existing_native", lambda _, native=native: native
                )
                found = QuantileDigits(parts, values.nbytes, column, LEVELS, num_threads=2)
                for task in found.tasks:
                    task()
                np.testing.assert_array_equal(found.found + 0.0, wanted.found + 0.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (3,), (2, 20)])
def test_quantiles_by_brackets_are_those_of_all_values(
    cpu: Ops, dtype: str, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By NumPy and natively, from samples with all rows and with few of them.

    Brackets that are too narrow, or whose keys do not fit, find nothing; they never find others.
    """
    column = Column("x", dtype, shape)
    monkeypatch.setattr(quantile_brackets, "_LEAST_SAMPLED", 2)
    monkeypatch.setattr(quantile_brackets, "_MOST_TIES", 1 + len(shape))
    random = np.random.default_rng(len(dtype) + len(shape))
    num_found = 0
    for count, deviations, key_bytes in (
        (1, 4.5, 1 << 28),
        (1100, 4.5, 1 << 28),
        (1100, 0.1, 1 << 28),
        (1100, 4.5, 1 << 14),
        (7000, 4.5, 1 << 28),
    ):
        monkeypatch.setattr(quantile_brackets, "_DEVIATIONS", deviations)
        monkeypatch.setattr(quantile_brackets, "_KEY_BYTES", key_bytes)
        values = rows_of(column, count, random)
        for keep in (None, random.random(count) < 0.7):
            wanted = quantiles_of_all(values, column, keep)
            num_kept = count if keep is None else int(keep.sum())

            def shares(
                share: int,
                num_shares: int,
                values: np.ndarray = values,
                keep: np.ndarray | None = keep,
            ) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
                for low in range(400 * share, len(values), 400 * num_shares):
                    own = slice(low, low + 400)
                    yield values[own], None if keep is None else keep[own].copy()

            for sampled_rows, num_threads in ((10_000, 2), (1000, 1), (500, 2)):
                sample = RowSample(column.row_bytes, sampled_rows * column.row_bytes)
                sample.add(values, keep)
                facts = []
                for native in (None, cpu.native):
                    monkeypatch.setattr(
                        quantile_brackets, "existing_native", lambda _, native=native: native
                    )
                    brackets = QuantileBrackets(
                        shares, sample, wanted.found[0], num_kept, column, LEVELS, num_threads
                    )
                    for tasks in brackets.rounds():
                        for task in tasks:
                            task()
                    facts.append(brackets.is_found)
                    if brackets.is_found:
                        np.testing.assert_array_equal(brackets.found + 0.0, wanted.found + 0.0)
                assert facts[0] == facts[1]
                assert facts[0] or not sample.is_complete
                num_found += facts[0] and not sample.is_complete
    assert num_found


@given(data=st.data(), count=st.integers(1, 3000), most_rows=st.integers(2, 100))
def test_a_sample_does_not_depend_on_how_rows_are_added(
    data: st.DataObject, count: int, most_rows: int
) -> None:
    rows = np.arange(count)
    samples = []
    for _ in range(2):
        sample = RowSample(8, 8 * most_rows)
        low = 0
        while low < count:
            high = low + data.draw(st.integers(1, 1500))
            sample.add(rows[low:high], rows[low:high] % 3 != 0)
            low = high
        samples.append(sample.kept_rows())
    np.testing.assert_array_equal(*samples)
    assert sample.is_complete == (count <= most_rows)
    assert (samples[0] % 3 != 0).all()
    assert (np.diff(samples[0]) > 0).all()
    if count <= most_rows:
        assert len(samples[0]) == np.count_nonzero(rows % 3)
    else:  # one of each stratum, of which there are more than half of the most
        assert most_rows // 8 <= len(samples[0]) + 2 <= most_rows + 2


@pytest.mark.parametrize("shape", [(24, 20, 3), (3, 24, 20), (2, 24, 30, 1), (40, 40, 1)])
def test_native_counts_of_pixels_are_those_of_numpy(
    cpu: Ops, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    random = np.random.default_rng(0)
    pixels = random.integers(0, 256, (9, *shape)).astype(np.uint8)
    keep = np.array([True, False, True, True, True, False, False, True, True])
    bins = []
    for native in (None, cpu.native):
        monkeypatch.setattr(column_scan, "existing_native", lambda _, native=native: native)
        scan = ColumnScan(Column("x", "uint8", shape))
        scan.add(pixels, keep)
        bins.append(scan.bins)
    np.testing.assert_array_equal(*bins)
    assert bins[0].sum() == pixels[keep].size


@pytest.mark.parametrize("dtype", FLOATING)
def test_one_value_that_is_not_finite_is_found(cpu: Ops, dtype: str) -> None:
    column = Column("x", dtype)
    values = np.linspace(-3, 3, 37)
    for special in SPECIAL:
        for place in (0, 17, 36):
            given = values.copy()
            given[place] = special
            stored = bfloat16(given) if dtype == "bfloat16" else given.astype(dtype)
            assert not are_finite(stored, column)
    assert are_finite(bfloat16(values) if dtype == "bfloat16" else values.astype(dtype), column)


def test_a_data_set_is_the_same_for_any_threads_blocks_and_with_numpy_alone(
    cpu: Ops, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    schema = Schema(
        [
            Column("state", "float32", (5,), "observation", "T+1"),
            Column("image", "uint8", (32, 32, 3)),
            Column("number", "int64"),
            Column("done", "bool", role="terminated"),
            Column("weight", "float64", rows="1", allow_nan=True),
            Column("text", "json", max_bytes=20, rows="1"),
        ]
    )
    random = np.random.default_rng(0)
    trajectories = [
        {
            "state": random.standard_normal((length + 1, 5)).astype(np.float32),
            "image": random.integers(0, 256, (length, 32, 32, 3)).astype(np.uint8),
            "number": random.integers(0, 1 << 40, length),
            "done": np.arange(length) == length - 1,
            "weight": np.float64(random.choice([np.nan, 1.5, 2.5])),
            "text": f"{length}",
        }
        for length in random.integers(1, 60, 40).tolist()
    ]
    monkeypatch.setattr(column_scan, "_BLOCK_ROWS", (1, 8))
    contents = set()
    for threads, block_bytes, native in ((1, 2048, 1), (4, 2048, 1), (3, 1 << 20, 1), (2, 999, 0)):
        monkeypatch.setattr("deepspeed_gear.data.dataset_writer._LEAST_BLOCK_BYTES", block_bytes)
        monkeypatch.setattr("deepspeed_gear.data.dataset_writer._MEMORY", 1)
        module = cpu.native if native else None
        for user in (column_scan, quantile_bins, quantile_brackets, quantile_digits):
            monkeypatch.setattr(user, "existing_native", lambda _, module=module: module)
        dest = tmp_path / f"{threads}-{block_bytes}"
        with DatasetWriter(dest, schema, split={"eval": 0.3}, threads=threads) as writer:
            for trajectory in trajectories:
                writer.add(trajectory)
        files = sorted(file for file in dest.rglob("*") if file.is_file())
        digests = [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
        contents.add((Dataset.open(dest).fingerprint, *digests))
    assert len(contents) == 1
    assert Dataset.open(dest).statistics["state"].count < sum(
        len(one["state"]) for one in trajectories
    )


@pytest.mark.parametrize("most_binned", [1, 1 << 28], ids=["digits", "bins"])
def test_statistics_are_the_same_where_brackets_fail(
    tmp_path: Path, most_binned: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of columns in the order of their values, in random order, and with few values."""
    monkeypatch.setattr(dataset_statistics, "MOST_BINNED_BYTES", most_binned)
    monkeypatch.setattr(quantile_brackets, "_LEAST_SAMPLED", 2)
    monkeypatch.setattr(quantile_brackets, "_TILE", 512)
    monkeypatch.setattr("deepspeed_gear.data.dataset_writer.SAMPLE_BYTES", 4000)
    monkeypatch.setattr(dataset_statistics, "_BLOCK_BYTES", 8192)
    names = {"rising": "float32", "random": "float64", "few": "int16", "flag": "bool"}
    schema = Schema([Column(name, dtype) for name, dtype in names.items()])
    random = np.random.default_rng(0)
    rows = {
        "rising": np.arange(20_000, dtype=np.float32),
        "random": random.standard_normal(20_000),
        "few": random.integers(0, 5, 20_000).astype(np.int16),
        "flag": random.random(20_000) < 0.01,
    }
    written = set()
    for deviations in (4.5, 0.0):
        monkeypatch.setattr(quantile_brackets, "_DEVIATIONS", deviations)
        with DatasetWriter(tmp_path / "set", schema, overwrite=True, threads=2) as writer:
            writer.add(rows)
        statistics = Dataset.open(tmp_path / "set").statistics
        for name, values in rows.items():
            for level, quantile in statistics[name].quantiles.items():
                assert quantile == np.quantile(values.astype(np.float64), float(level))
        written.add((tmp_path / "set" / "stats.json").read_bytes())
    assert len(written) == 1


@pytest.mark.parametrize("threads", [1, 3])
def test_an_error_of_a_thread_is_raised_and_leaves_nothing(
    tmp_path: Path, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    column = Column("x", "float32", (256,))
    rows = np.ones((64, 256), np.float32)
    monkeypatch.setattr("deepspeed_gear.data.dataset_writer._LEAST_BLOCK_BYTES", 4096)
    monkeypatch.setattr("deepspeed_gear.data.dataset_writer._MEMORY", 1)
    written = []

    def full(fd: int, data: memoryview, offset: int) -> int:
        written.append(offset)
        if len(written) > 3:
            raise OSError(28, os.strerror(28))
        return len(data)

    monkeypatch.setattr(array_file.os, "pwrite", full)
    writer = DatasetWriter(tmp_path / "set", Schema([column]), threads=threads)

    def add_all() -> None:
        for _ in range(10_000):
            writer.add({"x": rows})

    with pytest.raises(DataError, match="No space left"):
        add_all()
    assert list(tmp_path.iterdir()) == []
