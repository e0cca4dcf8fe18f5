"""Facts of a table's column over all its rows, which decide its dtype, shape, rows and role."""

from __future__ import annotations

from typing import Any

import numpy as np

from deepspeed_gear.data.ingest.row_values import null_place, numeric, plain
from deepspeed_gear.data.ingest.source_columns import LEAVE_OUT, SCALARS, make_column
from deepspeed_gear.data.ingest.token_rows import COLUMNS
from deepspeed_gear.data.opaque_rows import byte_string, json_text
from deepspeed_gear.errors import DataError
from deepspeed_gear.schema import Column, Rows

#: Usual names of columns of steps, in the order of a schema.
STEP_NAMES = ("observation", "next_observation", "action", "reward", "terminated", "truncated")
_ROLES = {**{name: name for name in STEP_NAMES}, "next_observation": "observation"}
_FILL = "fill it in, or leave out the rows that lack it"


class ColumnFacts:
    """Facts about the values of one column of a table, collected over all trajectories.

    Attributes:
        name: The column.
        is_uneven: Its values have no common shape, or are not all numbers.
    """

    def __init__(self, where: str, name: str, row: str, is_json: bool) -> None:
        """Know no value yet.

        Args:
            where: The first value, for errors.
            row: What a row of the table is.
            is_json: The values are kept as JSON.
        """
        self.name = name
        self.is_uneven = False
        is_token = row == "conversation"
        self._where = where
        self._known = COLUMNS.get(name) if is_token else None
        self._is_json = is_json
        self._role = "other" if is_token else _ROLES.get(name.split(".")[0], "other")
        self._dtype: np.dtype[Any] | None = None
        # Shape of a row for each meaning that the rows may have: with T = 3, values [3, 5] are rows
        # of shape (5,) for "T", and one row of shape (3, 5) for "1".
        self._shapes: dict[Rows, tuple[int, ...]] = {}
        self._text_bytes = 0
        self._json_bytes = len("null")
        self._is_text = not is_json
        self._count = 0
        self._lacking = ""  # the first trajectory that lacks it

    def lack(self, where: str) -> None:
        """Record a trajectory without a value, or with null."""
        self._lacking = self._lacking or where

    def add(self, where: str, value: Any, length: int) -> None:
        """Add the value of a trajectory of `length` steps; DataError if it does not suit a role."""
        array = None if self._is_json else numeric(value)
        self._count += 1
        if array is None:
            self.is_uneven |= self._dtype is not None
            if self._role != "other":
                if (place := null_place(value)) is not None:
                    raise DataError(f"{where}{place}", "must not be null", None, _FILL)
                raise DataError(
                    where,
                    "must hold numbers, without gaps and in rows of one shape",
                    type(value).__name__,
                    _FILL,
                )
            self._is_text &= isinstance(value, (str, bytes))
            if isinstance(value, (str, bytes)):
                self._text_bytes = max(self._text_bytes, len(byte_string(value, where)))
            if not isinstance(value, bytes):
                text = json_text(plain(where, value), where, LEAVE_OUT)
                self._json_bytes = max(self._json_bytes, len(text))
            return
        self.is_uneven |= self._count > 1 and self._dtype is None
        fits: dict[Rows, tuple[int, ...]] = {"1": array.shape}
        if array.ndim and len(array) in (length, length + 1):
            fits["T" if len(array) == length else "T+1"] = array.shape[1:]
        known = self._shapes if self._dtype is not None else fits
        self._shapes = {rows: shape for rows, shape in known.items() if fits.get(rows) == shape}
        kinds = {array.dtype.kind, array.dtype.kind if self._dtype is None else self._dtype.kind}
        self._dtype = (
            array.dtype if self._dtype is None else np.result_type(self._dtype, array.dtype)
        )
        rounds = kinds == {"i", "u"} and self._dtype.kind == "f"  # int64 and uint64
        self.is_uneven |= not self._shapes or (rounds and self._known is None)
        if self._role != "other" and not {*self._shapes} - {"1"}:
            raise DataError(
                where,
                f"must have a row for each of {length} steps, of the shape of the episodes before",
                list(array.shape),
                "store a row for each step, of one shape in all episodes",
            )

    def lacks_numbers(self, num_trajectories: int) -> bool:
        """Return whether only some trajectories have numbers; DataError if it has a role."""
        is_partial = self._dtype is not None and self._count < num_trajectories
        if is_partial and (self._role != "other" or self._known is not None):
            raise DataError(
                f"{self._lacking}: {self.name}",
                "must be in every row, and not null",
                f"{self._count} of {num_trajectories}",
                _FILL,
            )
        return is_partial

    def column(self, num_trajectories: int) -> Column:
        """Return the column that holds all values."""
        if self._dtype is None:
            if self._is_text and self._count == num_trajectories:
                return Column(self.name, "bytes", rows="1", max_bytes=max(1, self._text_bytes))
            return Column(self.name, "json", rows="1", max_bytes=self._json_bytes)
        if self._known is not None and self._shapes.get(self._known.rows) == ():
            return self._known
        rows: Rows = next(rows for rows in ("T", "T+1", "1") if rows in self._shapes)
        is_scalar = self._shapes[rows] == () and rows == "T"
        role = (
            "other"
            if self._role in SCALARS and not (is_scalar and self.name in SCALARS)
            else self._role
        )
        return make_column(self._where, self.name, self._dtype, self._shapes[rows], role, rows)
