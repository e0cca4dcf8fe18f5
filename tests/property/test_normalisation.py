"""Normalised values have the mean, deviation and bounds that their names promise, or are refused."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_gear.batching.gather import affine
from deepspeed_gear.config.field_checks import ResolvedField
from deepspeed_gear.data.dataset_statistics import ColumnStatistics, compute_statistics
from deepspeed_gear.errors import ConfigError
from deepspeed_gear.ops.reference.convert import convert
from deepspeed_gear.schema import Column, Schema

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
    first, lengths = np.zeros(1, np.int64), np.array([len(values)])
    return compute_statistics(Schema([column]), {"x": values}, first, lengths, {})["x"]


@settings(deadline=None)
@given(st.data(), st.sampled_from(list(OFFSETS)), st.sampled_from(["mean_std", "min_max"]))
def test_normalised_values_are_what_they_are_called(data: st.DataObject, dtype: str, how: str) -> None:
    column = Column("x", dtype, ())  # type: ignore[arg-type]
    steps = data.draw(st.lists(st.integers(0, 50), min_size=2, max_size=40))
    offset, unit = (
        data.draw(st.sampled_from(OFFSETS[dtype])),
        data.draw(st.sampled_from(UNITS.get(dtype, [1]))),
    )
    values = (np.array(steps, np.int64 if dtype == "int64" else np.float64) * unit + offset).astype(dtype)
    known = statistics(column, values)
    field = ResolvedField("x", column, normalize=how)
    spread = float(np.ptp(values.astype(object if dtype == "int64" else np.longdouble)))
    if spread < 2.0**-41 * abs(offset) or not 1e-300 < spread < 1e300 or abs(offset) >= 2**60:
        with contextlib.suppress(ConfigError):  # may be refused
            affine(field, {"x": known}, ())
        return
    shift, gain = affine(field, {"x": known}, ())
    wanted = torch.float64 if dtype == "float64" else torch.float32
    found = convert(torch.from_numpy(values)[:, None], wanted, shift, gain)[:, 0].double().numpy()
    if how == "min_max":
        assert (found.min(), found.max()) == pytest.approx((-1, 1), abs=2e-3)
    else:
        assert (found.mean(), found.std()) == pytest.approx((0, 1), abs=2e-3)
    order = np.argsort(values, kind="stable")
    assert (np.diff(found[order]) >= 0).all()


def test_what_float64_does_not_hold_is_refused_and_constants_become_zero() -> None:
    wrong = {"float64": [1e15 + np.arange(3), 1e-320 * np.arange(3), 1e308 * np.array([-1, 1])]}
    wrong["int64"] = [2**60 + np.arange(3), np.full(3, 2**60 + 1)]
    for dtype, several in wrong.items():
        for values in several:
            column = Column("x", dtype, ())  # type: ignore[arg-type]
            for how in ("mean_std", "min_max"):
                field, known = ResolvedField("x", column, normalize=how), {"x": statistics(column, values)}
                with pytest.raises(
                    ConfigError, match=r"spread from 1e-307 .* in element \[\] of x.; store the"
                ):
                    affine(field, known, ())
    column = Column("x", "float32", ())
    known = {"x": statistics(column, np.full(100_000, 7.3, np.float32))}
    shift, gain = affine(ResolvedField("x", column, normalize="mean_std"), known, ())
    assert convert(torch.tensor([[7.3], [9.3]]), torch.float32, shift, gain).tolist() == [[0], [2]]


def test_means_of_many_rows_are_exact() -> None:
    """A sum of 10^5 time stamps has a rounding error above their spread."""
    values = 1_700_000_000_000_000_000 + 2**20 * np.arange(100_000) % 2**30
    known = statistics(Column("x", "int64", ()), values)
    assert known.mean == pytest.approx(np.mean(values - values[0]) + float(values[0]), abs=512)
    assert known.std == pytest.approx(np.std(values - values[0]), rel=1e-9)
