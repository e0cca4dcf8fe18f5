"""Columns and schema of a table: dtypes, roles, rows, late, opaque and ragged columns."""

from __future__ import annotations

import hashlib
import json
import math
import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args

import numpy as np
import torch

from deepspeed_gear.errors import SchemaError, known_names
from deepspeed_gear.notebook_views import safe_view, table_html, view_html

_DTYPES = "bool uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64".split()
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _DTYPES}
FLOATING = ("float16", "bfloat16", "float32", "float64")
# One value per trajectory, stored in a row of fixed size; never a tensor of a batch.
OPAQUE = ("bytes", "json")
# An opaque row begins with the length of its value, a little-endian integer of 4 bytes.
LENGTH_BYTES = 4
MOST_OPAQUE_BYTES = (1 << 31) - 1
MOST_RAGGED_VALUES = (1 << 31) - 1
_NUMPY_DTYPES: dict[str, np.dtype[Any]] = {
    **{name: np.dtype("uint16" if name == "bfloat16" else name) for name in DTYPES},
    **dict.fromkeys(OPAQUE, np.dtype(np.uint8)),
}
Role = Literal[
    "observation",
    "next_observation",
    "action",
    "reward",
    "terminated",
    "truncated",
    "return",
    "length",
    "token",
    "loss_mask",
    "timestep",
    "return_to_go",
    "media",
    "other",
]
ROLES: tuple[str, ...] = get_args(Role)
TOKEN_DTYPES = ("uint8", "int8", "int16", "int32", "int64")
# Roles of one number per step, which one column may have; the dtypes that it admits (empty: any).
_SCALAR_ROLES: dict[str, tuple[str, ...]] = {
    "reward": (),
    "terminated": (),
    "truncated": (),
    "token": TOKEN_DTYPES,
    "loss_mask": ("bool", "uint8"),
    "timestep": ("int32", "int64"),
    "return_to_go": ("float32", "float64"),
    "media": ("int64",),
}
Rows = Literal["T", "T+1", "1"]
# Elements of the smallest image; smaller rows, such as boards, have statistics by element.
_LEAST_IMAGE = 1024
MOST_LATE = 62  # late columns; a trajectory has a bit for each in one int64


def is_legal_name(name: str) -> bool:
    """Return whether a column, field, table or split may have this name."""
    return bool(name) and not name.startswith(".") and all(c.isalnum() or c in "_-." for c in name)


def _check(name: str, holds: bool, rule: str, value: Any, remedy: str) -> None:
    if not holds:
        raise SchemaError(name, rule, value, remedy)


@dataclass(frozen=True)
class Column:
    """One stored quantity.

    Args:
        name: Unique in its schema; letters, digits, `_`, `-` and `.`.
        dtype: One of `DTYPES`, or of `OPAQUE` for byte strings and JSON values.
        shape: Shape of one row, without the time axis. Leave it out for an opaque column, whose
            rows are [4 + max_bytes], uint8 (see `data/opaque_rows.py`).
        role: Its meaning to derived fields, one of `ROLES`.
        rows: Rows per trajectory of T transitions: "T", "T+1" (observations) or "1" (one value).
        late: Whether it may be written once after the trajectory was added.
        allow_nan: Whether a floating column may hold NaN and infinities.
        max_bytes: Bytes of the longest value of an opaque column; 0 for the others.
        max_values: Most values of a step in a ragged column, whose steps have different numbers of
            values (see `data/ragged.py`); 0 for the others. The table has one number of an item
            for each trajectory, so `rows` becomes "1".
    """

    name: str
    dtype: str
    shape: tuple[int, ...] = ()
    role: str = "other"
    rows: Rows = "T"
    late: bool = False
    allow_nan: bool = False
    max_bytes: int = 0
    max_values: int = 0

    def __post_init__(self) -> None:
        for what in ("name", "dtype", "role", "rows"):
            if not isinstance(given := getattr(self, what), str):
                raise SchemaError(
                    f"column {self.name}: {what}",
                    "must be a string",
                    type(given).__name__,
                    "give a str",
                )
        try:
            if isinstance(self.shape, bytes):
                raise TypeError
            object.__setattr__(self, "shape", tuple(operator.index(n) for n in self.shape))
        except TypeError:
            raise SchemaError(
                f"column {self.name}: shape",
                "must be integers",
                type(self.shape).__name__,
                "give a list of integers; [] for a scalar",
            ) from None
        if not is_legal_name(self.name):
            raise SchemaError(
                "column name",
                "must consist of letters, digits, '_', '-' and '.'",
                self.name,
                "rename the column",
            )
        name = f"column {self.name}"
        kinds = (*DTYPES, *OPAQUE)
        shape = self.shape
        if self.dtype not in kinds:  # similar names take a while to find
            raise SchemaError(
                f"{name}: dtype",
                f"must be one of {', '.join(kinds)}",
                self.dtype,
                known_names(self.dtype, kinds),
            )
        _check(
            f"{name}: role",
            self.role in ROLES,
            f"must be one of {', '.join(ROLES)}",
            self.role,
            '"other" suits every column',
        )
        _check(
            f"{name}: rows",
            self.rows in ("T", "T+1", "1"),
            "must be 'T', 'T+1' or '1'",
            self.rows,
            "a row per step, one more at the end, or one per trajectory",
        )
        must_be_there = self.role in ("reward", "terminated", "truncated", "media")
        _check(
            name,
            not (self.late and must_be_there),
            f"must not be late with the role {self.role}",
            None,
            "store it with the trajectory",
        )
        _check(
            f"{name}: allow_nan",
            self.is_floating or not self.allow_nan,
            f"must be left out unless the dtype is one of {', '.join(FLOATING)}",
            self.dtype,
            "leave it out",
        )
        _check(
            f"{name}: shape",
            all(n >= 1 for n in shape),
            "must have positive sizes",
            shape,
            "[] is a scalar",
        )
        most = self.max_bytes
        if self.max_values:
            self._check_ragged(name)
        if not self.is_opaque:
            _check(
                f"{name}: max_bytes",
                most == 0,
                f"must be left out unless the dtype is one of {', '.join(OPAQUE)}",
                most,
                "leave it out",
            )
            return
        of = f"for the dtype {self.dtype}"
        fits = type(most) is int and 1 <= most <= MOST_OPAQUE_BYTES
        _check(
            f"{name}: max_bytes",
            fits,
            f"must be an integer in [1, {MOST_OPAQUE_BYTES}] {of}",
            most,
            "give the length of the longest value",
        )
        _check(
            f"{name}: rows",
            self.rows == "1",
            f"must be '1' {of}: one value per trajectory",
            self.rows,
            "set it to '1'",
        )
        _check(
            f"{name}: role",
            self.role == "other",
            f"must be 'other' {of}",
            self.role,
            "leave it out",
        )
        stored = (LENGTH_BYTES + most,)
        _check(
            f"{name}: shape",
            shape in ((), stored),
            f"must be left out {of}",
            shape,
            "max_bytes gives the size of a row",
        )
        object.__setattr__(self, "shape", stored)

    def _check_ragged(self, name: str) -> None:
        """Raise SchemaError unless the options suit a ragged column; set its `rows`."""
        most = self.max_values
        _check(
            f"{name}: max_values",
            type(most) is int and 1 <= most <= MOST_RAGGED_VALUES,
            f"must be an integer in [1, {MOST_RAGGED_VALUES}]",
            most,
            "give the most values of a step",
        )
        _check(
            f"{name}: dtype",
            not self.is_opaque,
            f"must be one of {', '.join(DTYPES)} for a ragged column",
            self.dtype,
            "leave out max_values for an opaque column",
        )
        of = "for a ragged column"
        _check(
            f"{name}: shape", not self.shape, f"must be left out {of}", self.shape, "leave it out"
        )
        _check(
            f"{name}: rows",
            self.rows in ("T", "1"),
            f"must be left out {of}: each step has values",
            self.rows,
            "leave it out",
        )
        _check(
            f"{name}: role",
            self.role == "other",
            f"must be 'other' {of}",
            self.role,
            "leave it out",
        )
        object.__setattr__(self, "rows", "1")

    @property
    def is_opaque(self) -> bool:
        """Whether its values are byte strings or JSON, which a batch holds as a list."""
        return self.dtype in OPAQUE

    @property
    def is_ragged(self) -> bool:
        """Whether its steps have different numbers of values, which a pack holds with offsets."""
        return self.max_values > 0

    @property
    def is_tensor(self) -> bool:
        """Whether a batch holds it as a tensor."""
        return not (self.is_opaque or self.is_ragged)

    @property
    def values(self) -> Column:
        """Column of a ragged column's values, one after the other."""
        return Column(self.name, self.dtype, allow_nan=self.allow_nan)

    @property
    def item_number(self) -> Column:
        """What the table has in place of a ragged column: the number of an item, 0 for none."""
        return Column(self.name, "int64", rows="1", late=self.late)

    @property
    def stored_dtype(self) -> str:
        """The dtype of its rows in the table: of a ragged column that of item numbers."""
        return "int64" if self.is_ragged else self.dtype

    @property
    def torch_dtype(self) -> torch.dtype:
        """Torch dtype of a stored element."""
        return torch.uint8 if self.is_opaque else DTYPES[self.stored_dtype]

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """NumPy dtype of the stored bytes.

        bfloat16 is uint16, opaque values are uint8, and item numbers of a ragged column int64.
        """
        return _NUMPY_DTYPES[self.stored_dtype]

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def row_bytes(self) -> int:
        return self.num_elements * self.numpy_dtype.itemsize

    @property
    def statistics_shape(self) -> tuple[int, ...]:
        """Shape of the column's statistics.

        It is the shape of a row, but 1 for the height and width of images: uint8 rows of at least
        three axes, [..., H, W, C] or [..., C, H, W], and more than 1,024 elements.
        """
        if self.dtype != "uint8" or len(self.shape) < 3 or self.num_elements <= _LEAST_IMAGE:
            return self.shape
        *rest, first, _, last = self.shape  # the channels are the smaller end
        return (*rest, 1, 1, last) if last <= first else (*rest, first, 1, 1)

    @property
    def is_floating(self) -> bool:
        return self.dtype in FLOATING

    @property
    def significant_bits(self) -> int:
        """Bits of the significand: 24 for float32, 11 for float16; 53 unless it is floating."""
        return 1 - round(math.log2(torch.finfo(self.torch_dtype).eps)) if self.is_floating else 53

    def nearest(self, number: int | float) -> int | float:
        """Round a number to the column's dtype, so that a bound of 0.8 equals a stored 0.8.

        A number outside the dtype's range is returned unchanged, and so is any number for a column
        that is not floating.
        """
        if not self.is_floating:
            return number
        held = torch.tensor(number, dtype=torch.float64).to(self.torch_dtype).item()
        return held if math.isfinite(held) else number

    @property
    def is_next_observation(self) -> bool:
        """Whether row t is the state after step t.

        By its role, or by the name `next_observation` that data sets use for it.
        """
        named = self.role == "observation" and self.name.split(".")[0] == "next_observation"
        return self.rows == "T" and (named or self.role == "next_observation")

    @property
    def must_be_finite(self) -> bool:
        """Whether NaN and infinities are refused in the rows of the table."""
        return self.is_floating and not (self.allow_nan or self.is_ragged)


# The ordinal of a trajectory's source, in a data set of several sources. `gear ingest` adds it.
SOURCE = Column("source", "int64", rows="1")


class Schema:
    """The columns of a table, in a fixed order. Immutable and hashable."""

    def __init__(self, columns: Iterator[Column] | list[Column] | tuple[Column, ...]) -> None:
        is_list = isinstance(columns, Iterable) and not isinstance(columns, torch.Tensor)
        given = tuple(columns) if is_list else (columns,)
        for one in given:
            _check(
                "schema",
                isinstance(one, Column),
                "must be a list of Columns",
                type(one).__name__,
                "give [Column(...), ...]",
            )
        self.columns: tuple[Column, ...] = given  # type: ignore[assignment]
        self._by_name = {column.name: column for column in self.columns}
        self.names = tuple(self._by_name)
        self.step_columns = tuple(c for c in self.columns if c.rows != "1")
        self.trajectory_columns = tuple(c for c in self.columns if c.rows == "1")
        self.late_columns = tuple(c for c in self.columns if c.late)
        self.ragged_columns = tuple(c for c in self.columns if c.is_ragged)
        self._late_bits = {c.name: 1 << index for index, c in enumerate(self.late_columns)}
        #: Whether an extent of T steps holds T+1 rows.
        self.has_final_row = any(c.rows == "T+1" for c in self.columns)
        #: Columns of the roles terminated and truncated.
        self.end_columns = tuple(c for c in self.columns if c.role in ("terminated", "truncated"))
        names = [c.name for c in self.columns]
        few_late = len(self.late_columns) <= MOST_LATE
        _check("schema", bool(names), "must have at least one column", None, "add the columns")
        _check(
            "schema",
            len(self.names) == len(names),
            "must have unique column names",
            names,
            "rename one",
        )
        _check(
            "schema",
            few_late,
            f"must have at most {MOST_LATE} late columns",
            None,
            "join some into vectors",
        )
        _check(
            "schema",
            bool(self.step_columns),
            "must have at least one column with a row per step",
            None,
            "set the rows of one to 'T'",
        )
        for role, dtypes in _SCALAR_ROLES.items():
            columns = [c for c in self.columns if c.role == role]
            if len(columns) > 1:
                raise SchemaError(
                    "schema",
                    f"must have at most one {role} column",
                    [c.name for c in columns],
                    'give the others the role "other"',
                )
            for column in columns:
                fits = column.dtype in dtypes or not dtypes
                if column.shape or column.rows != "T" or not fits:
                    of_dtype = f" of {', '.join(dtypes)}" if dtypes else ""
                    raise SchemaError(
                        f"column {column.name}",
                        f"has role {role} and must be a scalar with rows 'T'{of_dtype}",
                        column.dtype if dtypes else None,
                        'store one value for each step, or give it the role "other"',
                    )
        to_go = self.role("return_to_go")
        if to_go is not None and not (to_go.late and self.role("reward") is not None):
            raise SchemaError(
                f"column {to_go.name}",
                "has role return_to_go: must be late, in a table with a reward column",
                None,
                "it is written when the episode has ended",
            )

    @property
    def has_items(self) -> bool:
        """Whether rows have numbers of items in the store's pages: media, and ragged columns."""
        return bool(self.ragged_columns) or self.role("media") is not None

    def late_bits(self, names: Iterable[str]) -> int:
        """Return the bits that mark late columns as written; other columns have none."""
        return sum({self._late_bits.get(name, 0) for name in names})

    @property
    def row_bytes(self) -> int:
        """Bytes of one step, over all step columns."""
        return sum(c.row_bytes for c in self.step_columns)

    def role(self, role: str) -> Column | None:
        """Return the first column with a role, or None."""
        return next((c for c in self.columns if c.role == role), None)

    def __getitem__(self, name: str) -> Column:
        if not isinstance(name, str) or name not in self._by_name:
            raise SchemaError(
                f"column {name}", "must be in the schema", None, known_names(str(name), self.names)
            )
        return self._by_name[name]

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def __iter__(self) -> Iterator[Column]:
        return iter(self.columns)

    def __len__(self) -> int:
        return len(self.columns)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Schema) and self.columns == other.columns

    def __hash__(self) -> int:
        return hash(self.columns)

    def __repr__(self) -> str:
        def form(c: Column) -> str:
            if c.is_ragged:
                return f"{c.dtype} x 0 to {c.max_values} values per step"
            return f"{c.dtype}{list(c.shape)} x {c.rows}"

        columns = (f"{c.name}: {form(c)}" for c in self.columns)
        return f"Schema({', '.join(columns)})"

    def _repr_html_(self) -> str:
        """Return a table of the columns, for notebooks."""
        return safe_view(self, self._view)

    def _view(self) -> str:
        facts = {
            "columns": f"{len(self):,}",
            "bytes of a step": f"{self.row_bytes:,}",
            "bytes of a trajectory": f"{sum(c.row_bytes for c in self.trajectory_columns):,}",
        }
        rows = []
        for c in self.columns:
            options = [name for name in ("late", "allow_nan") if getattr(c, name)]
            shape = f"max_bytes {c.max_bytes}" if c.is_opaque else str(list(c.shape))
            shape = f"max_values {c.max_values}" if c.is_ragged else shape
            row = [c.name, c.dtype, shape, c.rows, c.role, ", ".join(options), f"{c.row_bytes:,}"]
            rows.append(row)
        heads = ["column", "dtype", "shape", "rows", "role", "options", "bytes of a row"]
        return view_html("Schema", facts, table=table_html(heads, rows))

    def allowing_nan(self) -> Schema:
        """Return the schema with `allow_nan` in every floating column."""
        return Schema([replace(c, allow_nan=c.is_floating) for c in self.columns])

    def to_json(self) -> dict[str, Any]:
        """Return a description as JSON values; `from_json` reverses it."""
        entries = [{**asdict(column), "shape": list(column.shape)} for column in self.columns]
        for entry in entries:
            if entry["max_bytes"]:
                del entry["shape"]  # it follows from max_bytes
            # These options came later; without their defaults, old fingerprints stay equal.
            for name in ("late", "allow_nan", "max_bytes", "max_values"):
                if not entry[name]:
                    del entry[name]
        return {"columns": entries}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Schema:
        """Build a schema from `to_json` or from a config's `{"columns": {name: {...}}}`.

        Raises:
            SchemaError: An entry is malformed.
        """
        if not isinstance(data, Mapping):
            raise SchemaError(
                "schema",
                "must be a mapping that has columns",
                type(data).__name__,
                'write {"columns": {...}}',
            )
        entries = data.get("columns")
        if not isinstance(entries, (Mapping, list)):
            raise SchemaError(
                "schema.columns",
                "must be a list or a mapping of columns",
                entries,
                'write {name: {"dtype": ..., "shape": ...}, ...}',
            )
        rule = "must hold name, dtype, shape, role and rows"
        kinds = (TypeError, AttributeError)
        columns = []
        for name, entry in entries.items() if isinstance(entries, Mapping) else enumerate(entries):
            named = {"name": name} if isinstance(entries, Mapping) else {}
            with SchemaError.on(
                "schema.columns",
                rule,
                *kinds,
                value=entry,
                remedy='write {"dtype": "float32", "shape": [3]} for each column',
            ):
                columns.append(Column(**{**named, **entry, "shape": tuple(entry.get("shape", ()))}))
        return cls(columns)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the canonical JSON, hex."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()
