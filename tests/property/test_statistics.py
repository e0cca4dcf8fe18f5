"""Statistics of columns against NumPy in float64, and the values that they normalise."""

import contextlib
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_gear.batching.normalisation import shift_and_gain
from deepspeed_gear.config.resolved_field import ResolvedField
from deepspeed_gear.data.dataset import Dataset
from deepspeed_gear.data.dataset_writer import DatasetWriter
from deepspeed_gear.data.file_threads import Workers
from deepspeed_gear.data.ingest import ingest
from deepspeed_gear.data.splits import split_of
from deepspeed_gear.data.statistics import column_scan, dataset_statistics
from deepspeed_gear.data.statistics.dataset_statistics import (
    ColumnStatistics,
    KeptRows,
    column_statistics,
    compute_statistics,
)
from deepspeed_gear.data.statistics.quantiles import QUANTILES
from deepspeed_gear.data.statistics.running_moments import Moment, add_rows
from deepspeed_gear.data.stored_values import as_float64
from deepspeed_gear.errors import ConfigError, DataError
from deepspeed_gear.ops.conversion import convert
from deepspeed_gear.schema import DTYPES, Column, Schema

Rows = st.sampled_from(["T", "T+1", "1"])


def real_rows(column: Column, values: np.ndarray, rows: KeptRows) -> np.ndarray:
    """Return the rows that count, picked one trajectory after the other."""
    parts = []
    for i in np.flatnonzero(rows.keep):
        first = rows.first_rows[i]
        steps = rows.lengths[i]
        ends = {"T": first + steps, "T+1": first + steps + 1}
        parts.append(values[i : i + 1] if column.rows == "1" else values[first : ends[column.rows]])
    return np.concatenate(parts)


def make(
    random: np.random.Generator, column: Column, lengths: list[int], keep: list[bool], final: bool
) -> tuple[np.ndarray, KeptRows]:
    steps = np.array(lengths)
    ends = np.cumsum(steps + final)
    rows = KeptRows(ends - steps - final, steps, np.array(keep), final)
    count = len(lengths) if column.rows == "1" else int(ends[-1])
    values = random.normal(50, 30, (count, *column.shape)).clip(0, 120)
    return values.astype(column.numpy_dtype), rows


@given(data=st.data(), rows=Rows, dtype=st.sampled_from(list(DTYPES)), seed=st.integers(0, 2**32))
def test_statistics_are_those_of_the_kept_rows(
    data: st.DataObject, rows: str, dtype: str, seed: int
) -> None:
    lengths = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=12))
    keep = data.draw(st.lists(st.booleans(), min_size=len(lengths), max_size=len(lengths)))
    keep[data.draw(st.integers(0, len(lengths) - 1))] = True
    final = rows == "T+1" or data.draw(st.booleans())
    column = Column("x", dtype, data.draw(st.sampled_from([(), (3,), (2, 2)])), rows=rows)
    values, kept = make(np.random.default_rng(seed), column, lengths, keep, final)
    block = data.draw(st.sampled_from([1, 7, 33, 1 << 16]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(column_scan, "_BLOCK_ROWS", (1, block))
        patch.setattr(dataset_statistics, "_BLOCK_BYTES", 1)
        found = column_statistics(values, column, kept)
    wanted = as_float64(real_rows(column, values, kept), column)
    assert found.count == found.quantile_rows == len(wanted)
    assert found.non_finite == 0
    np.testing.assert_allclose(found.mean, wanted.mean(0), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(found.std, wanted.std(0), rtol=1e-9, atol=1e-9)
    np.testing.assert_array_equal(found.min, wanted.min(0))
    np.testing.assert_array_equal(found.max, wanted.max(0))
    for level in QUANTILES:
        exact = np.quantile(wanted, float(level), axis=0)
        np.testing.assert_allclose(found.quantiles[level], exact, rtol=1e-12)
    again = ColumnStatistics.from_json(found.to_json(), column)
    assert again.to_json() == found.to_json()
    assert again.mean.shape == column.shape


@given(
    offset=st.floats(-1e9, 1e9),
    scale=st.floats(1e-3, 1e6),
    sizes=st.lists(st.integers(1, 300), min_size=1, max_size=20),
    seed=st.integers(0, 2**32),
)
def test_merging_is_stable_far_from_zero(
    offset: float, scale: float, sizes: list[int], seed: int
) -> None:
    rows = np.random.default_rng(seed).normal(offset, scale, (sum(sizes), 2))
    moments = np.zeros((Moment.NUM_WORDS, 2))
    for block in np.split(rows, np.cumsum(sizes)[:-1]):
        moments = add_rows(moments, block)
    mean = moments[Moment.FIRST] + moments[Moment.MEAN]
    std = np.sqrt(moments[Moment.SQUARES] / moments[Moment.COUNT])
    exact = rows.astype(np.longdouble)
    np.testing.assert_allclose(mean, exact.mean(0).astype(float), rtol=1e-13, atol=1e-13 * scale)
    tolerance = 1e-12 * scale + 1e-14 * abs(offset)
    np.testing.assert_allclose(std, exact.std(0).astype(float), rtol=1e-9, atol=tolerance)


@given(data=st.data(), seed=st.integers(0, 2**32))
def test_non_finite_values_are_left_out(data: st.DataObject, seed: int) -> None:
    random = np.random.default_rng(seed)
    values = random.normal(size=(60, 3))
    holes = random.random((60, 3)) < data.draw(st.floats(0, 0.9))
    values[holes] = random.choice([np.nan, np.inf, -np.inf], int(holes.sum()))
    values[:, 2] = np.nan
    rows = KeptRows(np.array([0, 20]), np.array([20, 40]), np.array([True, True]), False)
    found = column_statistics(values, Column("x", "float64", (3,)), rows)
    assert found.non_finite == (~np.isfinite(values)).sum()
    for element in range(3):
        finite = values[np.isfinite(values[:, element]), element]
        results = [found.mean, found.std, found.min, found.max, *found.quantiles.values()]
        if not len(finite):
            assert all(np.isnan(result[element]) for result in results)
            continue
        wanted = [finite.mean(), finite.std(), finite.min(), finite.max()]
        wanted += [np.quantile(finite, float(level)) for level in QUANTILES]
        np.testing.assert_allclose(
            [result[element] for result in results], wanted, rtol=1e-9, atol=1e-12
        )
    assert None in found.to_json()["mean"]


@pytest.mark.parametrize("threads", [1, 2])
def test_large_columns_have_exact_quantiles(
    threads: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Over the training trajectories; of columns of more bytes than are ordered at once."""
    monkeypatch.setattr(dataset_statistics, "MOST_BINNED_BYTES", 1000)
    monkeypatch.setattr(dataset_statistics, "_BLOCK_BYTES", 4096)
    random = np.random.default_rng(0)
    schema = Schema(
        [
            Column("x", "float32", (5,), rows="T+1"),
            Column("count", "int64"),
            Column("reward", "float32", role="reward"),
        ]
    )
    parts = []
    with DatasetWriter(tmp_path / "data", schema, split={"eval": 0.3}, threads=threads) as writer:
        for number in range(40):
            steps = 1 + int(random.integers(1, 300))
            parts.append(
                {
                    "x": random.standard_cauchy((steps + 1, 5)).astype(np.float32),
                    "count": random.integers(-(2**60), 2**60, steps),
                    "reward": np.full(steps, float(number // 30), np.float32),
                }
            )
            writer.add(parts[-1])
    data = Dataset.open(tmp_path / "data")
    kept = np.flatnonzero(split_of(np.arange(40), {"eval": 0.3}) == 0)
    for name, found in data.statistics.items():
        values = np.concatenate([parts[i][name] for i in kept]).astype(np.float64)
        assert found.quantile_rows == found.count == len(values)
        for level in QUANTILES:
            wanted = np.quantile(values, float(level), axis=0)
            np.testing.assert_array_equal(found.quantiles[level], wanted)


def test_statistics_of_a_split_leave_its_trajectories_out(tmp_path: Path) -> None:
    schema = Schema(
        [
            Column("x", "float32", (2,), rows="T+1"),
            Column("y", "int64"),
            Column("z", "float64", rows="1"),
        ]
    )
    random = np.random.default_rng(0)
    split = {"eval": 0.3, "test": 0.2}
    with DatasetWriter(tmp_path / "set", schema, split=split) as writer:
        for length in random.integers(1, 9, 100):
            x = random.normal(size=(length + 1, 2)).astype(np.float32)
            writer.add(
                {"x": x, "y": random.integers(0, 9, length), "z": np.asarray(random.normal())}
            )
    dataset = Dataset.open(tmp_path / "set")
    train = np.flatnonzero(split_of(np.arange(100), split) == 0)
    assert 30 < len(train) < 70
    other = dataset.statistics_for({})
    for name, found in dataset.statistics.items():
        wanted = np.concatenate([np.atleast_1d(dataset.trajectory(int(i))[name]) for i in train])
        assert found.count == len(wanted)
        np.testing.assert_allclose(found.mean, wanted.mean(0, dtype=np.float64), rtol=1e-12)
        np.testing.assert_allclose(
            other[name].count, dataset.columns[name].shape[0] - 100 * (name == "y")
        )
    same = dataset.statistics_for(split)
    assert all(
        same[name].to_json() == found.to_json() for name, found in dataset.statistics.items()
    )


def test_what_overflows_is_null(tmp_path: Path) -> None:
    values = np.array([1e200, -1e200, 1.7e308, 1.7e308])[:, None] * np.array([1, 1e-200])
    with DatasetWriter(tmp_path / "set", Schema([Column("x", "float64", (2,))])) as writer:
        writer.add({"x": values})
    found = Dataset.open(tmp_path / "set").statistics["x"]
    assert found.count == 4
    assert np.isnan(found.std[0])
    assert (found.min[0], found.max[0]) == (-1e200, 1.7e308)
    assert found.std[1] == pytest.approx(values[:, 1].std())


# ---- images --------------------------------------------------------------------------------------

IMAGES = [
    ((24, 20, 3), (1, 1, 3)),
    ((3, 24, 20), (3, 1, 1)),
    ((2, 24, 30, 1), (2, 1, 1, 1)),
    ((40, 40, 1), (1, 1, 1)),
]


@pytest.mark.parametrize(("shape", "kept"), IMAGES)
def test_images_have_statistics_per_channel(
    shape: tuple[int, ...], kept: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    column = Column("x", "uint8", shape)
    random = np.random.default_rng(len(shape))
    share = np.linspace(0.1, 0.9, math.prod(kept)).reshape(kept)
    values = random.binomial(255, share, (9, *shape)).astype(np.uint8)
    rows = KeptRows(np.array([0, 4]), np.array([4, 4]), np.array([True, False]), True)
    monkeypatch.setattr(dataset_statistics, "_BLOCK_BYTES", 3 * column.row_bytes)
    found = column_statistics(values, column, rows)
    axes = (0, *(1 + i for i, n in enumerate(kept) if n == 1))
    wanted = values[:4].astype(np.float64)
    assert (found.count, found.quantile_rows, found.non_finite) == (4, 4, 0)
    for name in ("mean", "std", "min", "max"):
        got = getattr(found, name)
        assert got.shape == kept
        np.testing.assert_allclose(
            got.reshape(-1), np.reshape(getattr(wanted, name)(axes), -1), rtol=1e-13
        )
    for level, numbers in found.quantiles.items():
        np.testing.assert_allclose(
            numbers.reshape(-1), np.quantile(wanted, float(level), axes).reshape(-1)
        )
    assert ColumnStatistics.from_json(found.to_json(), column).to_json() == found.to_json()
    for how in ("mean_std", "min_max"):  # the numbers are those of each pixel
        shift, gain = shift_and_gain(ResolvedField("x", column, normalize=how), {"x": found}, shape)
        middle = found.mean
        spread = found.std
        if how == "min_max":
            middle = (found.min + found.max) / 2
            spread = (found.max - found.min) / 2
        got = convert(torch.from_numpy(values.reshape(9, -1)), torch.float32, shift, gain).numpy()
        np.testing.assert_allclose(
            got.reshape(values.shape), (values - middle) / spread, rtol=1e-5, atol=1e-6
        )


def test_statistics_of_each_pixel_that_older_data_sets_have_stay_readable() -> None:
    column = Column("x", "uint8", (24, 20, 3))
    random = np.random.default_rng(0)
    numbers = random.random((24, 20, 3))
    quantiles = dict.fromkeys(QUANTILES, numbers)
    old = ColumnStatistics(5, numbers, numbers + 1, numbers, numbers + 9, quantiles, 5, 0)
    read = ColumnStatistics.from_json(old.to_json(), column)
    assert read.mean.shape == column.shape
    shift, gain = shift_and_gain(
        ResolvedField("x", column, normalize="mean_std"), {"x": read}, column.shape
    )
    assert shift.tolist() == numbers.reshape(-1).tolist()
    assert gain.tolist() == (1 / (numbers + 1)).reshape(-1).tolist()
    with pytest.raises(ValueError, match="column x has statistics of shape"):
        ColumnStatistics.from_json(old.to_json(), Column("x", "uint8", (24, 20, 4)))


# ---- normalised values ---------------------------------------------------------------------------

OFFSETS = {
    "uint8": [0, 200],
    "float16": [0, 512, 30_000],
    "int32": [0, 2**30],
    "float32": [0, 1000, 1.7e9, 1e-40, 1e37],
    "int64": [0, 1_700_000_000_123_456_789, 2**53, 2**60],
    "float64": [0, 1.7e9, 1e15, -1e-300, 1e306],
}
UNITS = {"float32": [1.0, 1e-40, 1e-3, 1e30], "float64": [1.0, 1e-320, 1e-140, 1e300]}


def statistics(column: Column, values: np.ndarray) -> ColumnStatistics:
    first = np.zeros(1, np.int64)
    lengths = np.array([len(values)])
    schema = Schema([column])
    return compute_statistics(schema, {"x": values}, first, lengths, {}, Workers(1))["x"]


@given(
    st.data(), st.sampled_from(list(OFFSETS)), st.sampled_from(["mean_std", "min_max", "quantile"])
)
def test_normalised_values_are_what_they_are_called(
    data: st.DataObject, dtype: str, how: str
) -> None:
    column = Column("x", dtype, ())
    steps = data.draw(st.lists(st.integers(0, 50), min_size=2, max_size=40))
    offset = data.draw(st.sampled_from(OFFSETS[dtype]))
    unit = data.draw(st.sampled_from(UNITS.get(dtype, [1])))
    values = (np.array(steps, np.int64 if dtype == "int64" else np.float64) * unit + offset).astype(
        dtype
    )
    known = statistics(column, values)
    field = ResolvedField("x", column, normalize=how)
    spread = float(np.ptp(values.astype(object if dtype == "int64" else np.longdouble)))
    if spread < 2.0**-41 * abs(offset) or not 1e-300 < spread < 1e300 or abs(offset) >= 2**60:
        with contextlib.suppress(ConfigError):  # may be refused
            shift_and_gain(field, {"x": known}, ())
        return
    shift, gain = shift_and_gain(field, {"x": known}, ())
    wanted = torch.float64 if dtype == "float64" else torch.float32
    found = convert(torch.from_numpy(values)[:, None], wanted, shift, gain)[:, 0].double().numpy()
    if how == "min_max":
        assert (found.min(), found.max()) == pytest.approx((-1, 1), abs=2e-3)
    elif how == "quantile":
        ends = np.quantile(found, [0.01, 0.99])
        if known.quantiles["0.01"] < known.quantiles["0.99"]:
            assert ends == pytest.approx((-1, 1), abs=2e-3)
    else:
        assert (found.mean(), found.std()) == pytest.approx((0, 1), abs=2e-3)
    order = np.argsort(values, kind="stable")
    assert (np.diff(found[order]) >= 0).all()


def test_what_float64_does_not_hold_is_refused_and_constants_become_zero() -> None:
    wrong = {"float64": [1e15 + np.arange(3), 1e-320 * np.arange(3), 1e308 * np.array([-1, 1])]}
    wrong["int64"] = [2**60 + np.arange(3), np.full(3, 2**60 + 1)]
    for dtype, several in wrong.items():
        for values in several:
            column = Column("x", dtype, ())
            for how in ("mean_std", "min_max"):
                field = ResolvedField("x", column, normalize=how)
                known = {"x": statistics(column, values)}
                with pytest.raises(
                    ConfigError, match=r"spread from 1e-307 .* element \[\] of x.; store the"
                ):
                    shift_and_gain(field, known, ())
    column = Column("x", "float32", ())
    known = {"x": statistics(column, np.full(100_000, 7.3, np.float32))}
    shift, gain = shift_and_gain(ResolvedField("x", column, normalize="mean_std"), known, ())
    assert convert(torch.tensor([[7.3], [9.3]]), torch.float32, shift, gain).tolist() == [[0], [2]]


def test_means_of_many_rows_are_exact() -> None:
    """A sum of 10^5 time stamps has a rounding error above their spread."""
    values = 1_700_000_000_000_000_000 + 2**20 * np.arange(100_000) % 2**30
    known = statistics(Column("x", "int64", ()), values)
    assert known.mean == pytest.approx(np.mean(values - values[0]) + float(values[0]), abs=512)
    assert known.std == pytest.approx(np.std(values - values[0]), rel=1e-9)


def test_statistics_of_each_source_and_task(tmp_path: Path) -> None:
    """Quantiles are those of all rows of both sources, and each source has its own."""
    random = np.random.default_rng(0)
    sources = []
    for number, lengths in enumerate(((3, 40), (7, 1, 5))):
        steps = sum(lengths)
        task = np.repeat(np.arange(len(lengths)) % 2, lengths)
        arrays = {"obs": random.normal(number, 1, (steps, 2)), "acts": random.normal(size=steps)}
        ends = np.isin(np.arange(steps) + 1, np.cumsum(lengths))
        path = tmp_path / f"{number}.npz"
        np.savez(
            path, **arrays, rewards=np.ones(steps), terminals=ends, timeouts=ends * 0, task=task
        )
        sources.append(path)
    data = ingest(sources, tmp_path / "out")
    for name, values in (("source", data.columns["source"]), ("task", [0, 1, 0, 1, 0])):
        found = data.statistics_by(name)
        assert sorted(found) == [0, 1]
        for value, statistics in found.items():
            kept = [data.trajectory(i)["action"] for i in range(5) if values[i] == value]
            rows = np.concatenate(kept)
            assert statistics["action"].count == len(rows)
            assert statistics["action"].mean == pytest.approx(rows.mean())
            assert statistics["action"].quantiles["0.99"] == np.quantile(rows, 0.99)
    rows = np.concatenate([data.trajectory(i)["action"] for i in range(5)])
    low, high = np.quantile(rows, [0.01, 0.99])
    field = ResolvedField("action", data.schema["action"], normalize="quantile")
    shift, gain = shift_and_gain(field, data.statistics, ())
    found = convert(torch.from_numpy(rows)[:, None], torch.float64, shift, gain)[:, 0]
    np.testing.assert_allclose(found, 2 * (rows - low) / (high - low) - 1, rtol=1e-12, atol=1e-12)
    with pytest.raises(
        DataError, match="column tusk must be a column of the data set; did you mea"
    ):
        data.statistics_by("tusk")
    with pytest.raises(DataError, match="must have one value in all steps"):
        data.statistics_by("action")
