"""Ragged values: what they are made of, their padded and nested forms, and sums by step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_gear import Column, DataError, Ragged, SchemaError, ShapeError
from deepspeed_gear.data.ragged import as_ragged, count_column, encode_ragged

ROWS = st.lists(st.lists(st.integers(-1000, 1000), max_size=7), max_size=9)


@given(rows=ROWS, width=st.integers(0, 8))
def test_rows_come_back_in_every_form(rows: list[list[int]], width: int) -> None:
    ragged = Ragged.of_rows(rows)
    assert len(ragged) == len(rows)
    assert [part.tolist() for part in ragged] == rows
    assert ragged.counts.tolist() == [len(row) for row in rows]
    assert ragged.steps.tolist() == [step for step, row in enumerate(rows) for _ in row]
    assert ragged.padded(width, 5000).tolist() == [(row + [5000] * width)[:width] for row in rows]
    most = max(map(len, rows), default=0)
    assert list(ragged.padded().shape) == [len(rows), most]
    assert ragged.sum(ragged.values.double()).tolist() == [float(sum(row)) for row in rows]
    assert Ragged.of_rows([np.array(row, np.int64) for row in rows]).offsets.equal(ragged.offsets)
    assert Ragged.of_rows([torch.tensor(row).long() for row in rows]).counts.equal(ragged.counts)


@given(rows=ROWS, data=st.data())
def test_steps_are_taken_in_any_order(rows: list[list[int]], data: st.DataObject) -> None:
    steps = data.draw(st.lists(st.integers(-1, len(rows) - 1), max_size=12))
    taken = Ragged.of_rows(rows).take(torch.tensor(steps, dtype=torch.int64))
    assert [part.tolist() for part in taken] == [[] if step < 0 else rows[step] for step in steps]
    first = data.draw(st.integers(0, len(rows)))
    end = data.draw(st.integers(first, len(rows)))
    part = Ragged.of_rows(rows).part(first, end)
    assert [one.tolist() for one in part] == rows[first:end]


def test_a_nested_tensor_and_gradients() -> None:
    values = torch.arange(5.0, requires_grad=True)
    ragged = Ragged(values, [0, 2, 2, 5])
    nested = ragged.nested()
    assert [row.tolist() for row in nested.unbind()] == [[0.0, 1.0], [], [2.0, 3.0, 4.0]]
    assert as_ragged(nested.detach(), "x") == Ragged(torch.arange(5.0), [0, 2, 2, 5])
    ragged.padded(2).sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [1.0, 1.0, 1.0, 1.0, 0.0]
    assert ragged[-1].tolist() == [2.0, 3.0, 4.0]
    assert ragged != Ragged(torch.arange(5.0), [0, 1, 2, 5])
    assert ragged != 3
    assert repr(ragged) == "Ragged(3 steps, 5 values, torch.float32)"
    with pytest.raises(IndexError):
        ragged[3]


@pytest.mark.parametrize(
    ("values", "offsets", "text"),
    [
        ([[1, 2]], [0, 2], r"ragged values must have one dimension, got \[1, 2\]"),
        ([1, 2], [[0, 2]], r"ragged offsets must have one dimension"),
        ([1, 2], [0.0, 2.0], r"ragged offsets must be integers, got 'torch.float32'"),
        (["a"], [0, 1], r"ragged values must be an array of numbers"),
    ],
)
def test_what_is_no_ragged_value_is_refused(values: Any, offsets: Any, text: str) -> None:
    with pytest.raises(ShapeError, match=text):
        Ragged(values, offsets)


COLUMN = Column("ids", "int16", max_values=3)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (
            Ragged([1, 2], [0, 1, 2]),
            r"x: column ids must have values for each of the 3 steps, got 2",
        ),
        (Ragged([1, 2], [0, 1, 1, 1]), r"offsets that rise from 0 to its 2 values"),
        (Ragged([1, 2], [1, 1, 2, 2]), r"offsets that rise from 0 to its 2 values, got '\[1, 1\]"),
        (Ragged([1, 2], [0, 2, 1, 2]), r"offsets that rise .* got '\[2, 1\] at step 1'"),
        (Ragged([1, 2], np.zeros(0, int)), r"offsets that rise from 0"),
        ([[1], [1, 2, 3, 4], []], r"at most max_values = 3 values at a step, got '4 at step 1'"),
        ([[1], [40_000], []], r"values that int16 can hold, got 40000"),
        ([[1], [0.5], []], r"values that int16 can hold, got 0.5"),
        ([[1], ["a"], []], r"column ids must have values for each step"),
        ([1, 2, 3], r"column ids must have values for each step"),
        (5, r"column ids must have values for each step"),
    ],
)
def test_values_that_do_not_fit_a_column_are_refused(value: Any, text: str) -> None:
    with pytest.raises(DataError, match=text):
        encode_ragged(value, COLUMN, "x: column ids", 3)


def test_values_that_are_not_finite_are_named_by_step() -> None:
    column = Column("logs", "float16", max_values=3)
    with pytest.raises(DataError, match=r"x: column logs must be finite, got 'nan at step 2'"):
        encode_ragged([[1.0, 2.0], [], [3.0, np.nan]], column, "x: column logs", 3)
    with pytest.raises(DataError, match=r"float16 can hold, got 100000.0"):
        encode_ragged([[1e5], [], []], column, "x: column logs", 3)
    free = Column("logs", "float16", max_values=3, allow_nan=True)
    assert np.isnan(encode_ragged([[np.nan]], free, "x: column logs", 1)[1]).all()


@pytest.mark.parametrize(
    ("most", "dtype"), [(1, "uint8"), (255, "uint8"), (256, "int16"), (32768, "int32")]
)
def test_counts_take_as_few_bytes_as_they_need(most: int, dtype: str) -> None:
    column = Column("ids", "int64", max_values=most)
    assert count_column(column) == Column("ids.counts", dtype)
    counts, values = encode_ragged([range(most), []], column, "x: column ids", 2)
    assert counts.tolist() == [most, 0]
    assert len(values) == most


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_values": -1}, r"max_values must be an integer in \[1, 2147483647\], got -1"),
        ({"max_values": True}, r"max_values must be an integer"),
        ({"max_values": 3, "shape": (2,)}, r"shape must be left out for a ragged column"),
        ({"max_values": 3, "rows": "T+1"}, r"rows must be left out for a ragged column"),
        ({"max_values": 3, "role": "token"}, r"role must be 'other' for a ragged column"),
        ({"max_values": 3, "dtype": "bytes", "max_bytes": 3, "rows": "1"}, r"dtype must be one of"),
    ],
)
def test_options_that_do_not_suit_a_ragged_column(options: dict[str, Any], text: str) -> None:
    with pytest.raises(SchemaError, match=text):
        Column("ids", **{"dtype": "int32", **options})
