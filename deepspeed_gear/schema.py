"""Columns of a table and their schema."""

from __future__ import annotations

import hashlib
import json
import math
import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
import torch

from deepspeed_gear.errors import SchemaError, known_names

_DTYPES = "bool uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64".split()
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _DTYPES}
FLOATING = ("float16", "bfloat16", "float32", "float64")
OPAQUE = (
    "bytes",
    "json",
)  # one value per trajectory, in a row of fixed size: never a tensor of a batch
LENGTH_BYTES = 4  # of an opaque row, before the value: its length, little-endian
MOST_OPAQUE_BYTES = (1 << 31) - 1
_NUMPY_DTYPES: dict[str, np.dtype[Any]] = {
    **{name: np.dtype("uint16" if name == "bfloat16" else name) for name in DTYPES},
    **dict.fromkeys(OPAQUE, np.dtype(np.uint8)),
}
ROLES = (
    *(
        "observation",
        "next_observation",
        "action",
        "reward",
        "terminated",
        "truncated",
        "return",
        "length",
    ),
    *("token", "loss_mask", "timestep", "return_to_go", "media", "other"),
)
TOKEN_DTYPES = ("uint8", "int8", "int16", "int32", "int64")
_SCALAR_ROLES: dict[
    str, tuple[str, ...]
] = {  # of a value per step, at most one each; dtypes: any if empty
    **dict.fromkeys(("reward", "terminated", "truncated"), ()),
    "token": TOKEN_DTYPES,
    "loss_mask": ("bool", "uint8"),
    "timestep": ("int32", "int64"),
    "return_to_go": ("float32", "float64"),
    "media": ("int64",),
}
Rows = Literal["T", "T+1", "1"]
MOST_LATE = 62  # late columns: a bit each


def is_legal_name(name: str) -> bool:
    """Return whether a column, field, table or split may have this name."""
    return bool(name) and not name.startswith(".") and all(c.isalnum() or c in "_-." for c in name)


def _check(name: str, holds: bool, rule: str, value: Any = None, remedy: str = "") -> None:
    if not holds:
        raise SchemaError(name, rule, value, remedy)


@dataclass(frozen=True)
class Column:
    """One stored quantity.

    Args:
        name: Unique in its schema; letters, digits, `_`, `-` and `.`.
        dtype: One of `DTYPES`, or of `OPAQUE` for byte strings and JSON values.
        shape: Shape of one row, without the time axis. Of an opaque column it is not given: a row
            is [4 + max_bytes], uint8 (see `data/opaque_rows.py`).
        role: What it means to derived fields, one of `ROLES`.
        rows: Rows per trajectory of T transitions: "T", "T+1" (observations) or "1" (one value).
        late: Whether it may be written after the trajectory was added, once.
        allow_nan: Whether a floating column may hold NaN and infinities; else they are refused.
        max_bytes: Bytes of the longest value of an opaque column; 0 for the others.
    """

    name: str
    dtype: str
    shape: tuple[int, ...] = ()
    role: str = "other"
    rows: Rows = "T"
    late: bool = False
    allow_nan: bool = False
    max_bytes: int = 0

    def __post_init__(self) -> None:
        for what in ("name", "dtype", "role", "rows"):
            if not isinstance(given := getattr(self, what), str):
                raise SchemaError(
                    f"column {self.name}: {what}", "must be a string", type(given).__name__
                )
        try:
            if isinstance(self.shape, bytes):
                raise TypeError
            object.__setattr__(self, "shape", tuple(operator.index(n) for n in self.shape))
        except TypeError:
            rule = "must be integers"
            raise SchemaError(
                f"column {self.name}: shape", rule, type(self.shape).__name__
            ) from None
        if not is_legal_name(self.name):
            raise SchemaError(
                "column name", "must consist of letters, digits, '_', '-' and '.'", self.name
            )
        name = f"column {self.name}"
        kinds = (*DTYPES, *OPAQUE)
        shape = self.shape
        _check(
            f"{name}: dtype", self.dtype in kinds, f"must be one of {', '.join(kinds)}", self.dtype
        )
        _check(f"{name}: role", self.role in ROLES, f"must be one of {', '.join(ROLES)}", self.role)
        _check(
            f"{name}: rows", self.rows in ("T", "T+1", "1"), "must be 'T', 'T+1' or '1'", self.rows
        )
        must_be_there = self.role in ("reward", "terminated", "truncated", "media")
        _check(
            name, not (self.late and must_be_there), f"must not be late with the role {self.role}"
        )
        rule = f"must be left out unless the dtype is one of {', '.join(FLOATING)}"
        _check(f"{name}: allow_nan", self.is_floating or not self.allow_nan, rule, self.dtype)
        _check(f"{name}: shape", all(n >= 1 for n in shape), "must have positive sizes", shape)
        most = self.max_bytes
        if not self.is_opaque:
            rule = f"must be left out unless the dtype is one of {', '.join(OPAQUE)}"
            _check(f"{name}: max_bytes", most == 0, rule, most)
            return
        of = f"for the dtype {self.dtype}"
        remedy = "give the length of the longest value"
        fits = type(most) is int and 1 <= most <= MOST_OPAQUE_BYTES
        rule = f"must be an integer in [1, {MOST_OPAQUE_BYTES}] {of}"
        _check(f"{name}: max_bytes", fits, rule, most, remedy)
        _check(
            f"{name}: rows",
            self.rows == "1",
            f"must be '1' {of}: one value per trajectory",
            self.rows,
        )
        _check(f"{name}: role", self.role == "other", f"must be 'other' {of}", self.role)
        stored = (LENGTH_BYTES + most,)
        remedy = "max_bytes gives the size of a row"
        _check(f"{name}: shape", shape in ((), stored), f"must be left out {of}", shape, remedy)
        object.__setattr__(self, "shape", stored)

    @property
    def is_opaque(self) -> bool:
        """Whether its values are byte strings or JSON, which batches hold as a list if at all."""
        return self.dtype in OPAQUE

    @property
    def torch_dtype(self) -> torch.dtype:
        """Dtype of a stored element."""
        return torch.uint8 if self.is_opaque else DTYPES[self.dtype]

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """NumPy's view of the stored bytes; bfloat16 as uint16, opaque values as uint8."""
        return _NUMPY_DTYPES[self.dtype]

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def row_bytes(self) -> int:
        return self.num_elements * self.numpy_dtype.itemsize

    @property
    def is_floating(self) -> bool:
        return self.dtype in FLOATING

    @property
    def significant_bits(self) -> int:
        """Bits of the significand of a floating column: 24 of float32; 53 of other columns."""
        return 1 - round(math.log2(torch.finfo(self.torch_dtype).eps)) if self.is_floating else 53

    def nearest(self, number: int | float) -> int | float:
        """Return the nearest value that a floating column holds, so that a bound of 0.8 equals a
        stored 0.8; the number itself where it is beyond them, or the column is not floating.
        """
        if not self.is_floating:
            return number
        held = torch.tensor(number, dtype=torch.float64).to(self.torch_dtype).item()
        return held if math.isfinite(held) else number

    @property
    def is_next_observation(self) -> bool:
        """Whether row t is the state after step t: it has the role, or a data set's name
        next_observation.
        """
        named = self.role == "observation" and self.name.split(".")[0] == "next_observation"
        return self.rows == "T" and (named or self.role == "next_observation")

    @property
    def must_be_finite(self) -> bool:
        """Whether NaN and infinities are refused."""
        return self.is_floating and not self.allow_nan


# The ordinal of a trajectory's source, in a data set of several sources. `gear ingest` adds it.
SOURCE = Column("source", "int64", rows="1")


class Schema:
    """The columns of a table, in a fixed order. Immutable and hashable."""

    def __init__(self, columns: Iterator[Column] | list[Column] | tuple[Column, ...]) -> None:
        is_list = isinstance(columns, Iterable) and not isinstance(columns, torch.Tensor)
        for one in (given := tuple(columns) if is_list else (columns,)):
            _check(
                "schema", isinstance(one, Column), "must be a list of Columns", type(one).__name__
            )
        self.columns: tuple[Column, ...] = given  # type: ignore[assignment]
        self._by_name = {column.name: column for column in self.columns}
        self.names = tuple(self._by_name)
        self.step_columns = tuple(c for c in self.columns if c.rows != "1")
        self.trajectory_columns = tuple(c for c in self.columns if c.rows == "1")
        self.late_columns = tuple(c for c in self.columns if c.late)
        self._late_bits = {c.name: 1 << index for index, c in enumerate(self.late_columns)}
        #: Whether an extent of T steps holds T+1 rows.
        self.has_final_row = any(c.rows == "T+1" for c in self.columns)
        #: Columns of the roles terminated and truncated.
        self.end_columns = tuple(c for c in self.columns if c.role in ("terminated", "truncated"))
        names = [c.name for c in self.columns]
        few_late = len(self.late_columns) <= MOST_LATE
        _check("schema", bool(names), "must have at least one column")
        _check("schema", len(self.names) == len(names), "must have unique column names", names)
        _check("schema", few_late, f"must have at most {MOST_LATE} late columns")
        _check(
            "schema", bool(self.step_columns), "must have at least one column with a row per step"
        )
        for role, dtypes in _SCALAR_ROLES.items():
            found = [c for c in self.columns if c.role == role]
            if len(found) > 1:
                raise SchemaError(
                    "schema", f"must have at most one {role} column", [c.name for c in found]
                )
            for column in found:
                rule = f"has role {role} and must be a scalar with rows 'T'"
                if column.shape or column.rows != "T" or (dtypes and column.dtype not in dtypes):
                    of_dtype = (
                        (f"{rule} of {', '.join(dtypes)}", column.dtype) if dtypes else (rule,)
                    )
                    raise SchemaError(f"column {column.name}", *of_dtype)
        to_go = self.role("return_to_go")
        if to_go is not None and not (to_go.late and self.role("reward") is not None):
            rule = "has role return_to_go: must be late, in a table with a reward column"
            raise SchemaError(
                f"column {to_go.name}", rule, None, "it is written when the episode has ended"
            )

    def late_bits(self, names: Iterable[str]) -> int:
        """Return the bits that mark the named late columns as written; other columns
        have no bit.
        """
        return sum({self._late_bits.get(name, 0) for name in names})

    @property
    def row_bytes(self) -> int:
        """Payload of one step in bytes, all step columns together."""
        return sum(c.row_bytes for c in self.step_columns)

    def role(self, role: str) -> Column | None:
        """Return the first column with a role, or None."""
        return next((c for c in self.columns if c.role == role), None)

    def __getitem__(self, name: str) -> Column:
        if not isinstance(name, str) or name not in self._by_name:
            remedy = known_names(str(name), self.names)
            raise SchemaError(f"column {name}", "must be in the schema", None, remedy)
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
        columns = (f"{c.name}: {c.dtype}{list(c.shape)} x {c.rows}" for c in self.columns)
        return f"Schema({', '.join(columns)})"

    def allowing_nan(self) -> Schema:
        """Return the schema with `allow_nan` in every floating column."""
        return Schema([replace(c, allow_nan=c.is_floating) for c in self.columns])

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able description; `from_json` reverses it."""
        entries = [{**asdict(column), "shape": list(column.shape)} for column in self.columns]
        for entry in entries:
            if entry["max_bytes"]:
                del entry["shape"]  # follows from it
            for name in (
                "late",
                "allow_nan",
                "max_bytes",
            ):  # later options: old fingerprints stay equal
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
            raise SchemaError("schema", "must be a mapping that has columns", type(data).__name__)
        entries = data.get("columns")
        if not isinstance(entries, (Mapping, list)):
            raise SchemaError("schema.columns", "must be a list or a mapping of columns", entries)
        rule = "must hold name, dtype, shape, role and rows"
        kinds = (TypeError, AttributeError)
        columns = []
        for name, entry in entries.items() if isinstance(entries, Mapping) else enumerate(entries):
            named = {"name": name} if isinstance(entries, Mapping) else {}
            with SchemaError.on("schema.columns", rule, *kinds, value=entry):
                columns.append(Column(**{**named, **entry, "shape": tuple(entry.get("shape", ()))}))
        return cls(columns)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the canonical JSON, hex."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()
