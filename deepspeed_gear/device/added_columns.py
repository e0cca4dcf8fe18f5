"""Columns that a program adds to a table on a device: checks, and filters of trajectories."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

import deepspeed_gear.arguments as arguments
from deepspeed_gear.data.trajectory_checks import ENDS_LAST
from deepspeed_gear.device.ring_table import RingTable
from deepspeed_gear.errors import ConfigError, DataError, SchemaError, ShapeError
from deepspeed_gear.sampling.conditions import Condition
from deepspeed_gear.schema import DTYPES, Column, Schema
from deepspeed_gear.writer.autoreset_modes import MODES

Columns = Mapping[str, Tensor]
_PER_ENVIRONMENT = ", a row per environment"


def _check_names(
    what: str, given: Columns, known: Collection[str], needed: Collection[str]
) -> None:
    arguments.tensors(what, given)
    for name in sorted({*needed} - {*given}):
        raise SchemaError(
            f"{what}: column {name}",
            "must be given",
            remedy="give every column of the table's schema",
        )
    for name in sorted({*given} - {*known}):
        raise SchemaError(
            f"{what}: column {name}",
            f"must be one of {', '.join(sorted(known))}",
            remedy="remove it, or add it to the schema",
        )


def _check_values(
    at: str, values: Tensor, column: Column, device: torch.device, sizes: list[int], note: str = ""
) -> None:
    """Raise unless a column has its device, dtype and shape: [*sizes, *shape of a row]."""
    if values.device != device:
        raise DataError(
            at, f"must be on {device}", str(values.device), f"move it with .to({str(device)!r})"
        )
    if values.dtype != DTYPES[column.dtype]:
        raise SchemaError(
            at,
            f"must be {column.dtype}",
            str(values.dtype),
            f"convert it with .to({DTYPES[column.dtype]})",
        )
    if list(values.shape) != [*sizes, *column.shape]:
        raise ShapeError(
            at,
            f"must be {[*sizes, *column.shape]}{note}",
            list(values.shape),
            f"a row of the column has the shape {list(column.shape)} in the schema",
        )


def check_trajectories(
    table: RingTable, columns: Columns, lengths: Tensor | None
) -> tuple[int, int]:
    """Check trajectories to be added, from shapes and dtypes alone.

    Returns:
        Number of trajectories, and of steps of the longest one.
    Raises:
        SchemaError, DataError, ShapeError: They cannot be added.
    """
    schema = table.schema
    device = table.state.device
    _check_names("columns", columns, schema.names, schema.names)
    # The first column that has the dimension decides: the others must agree with it.
    counts = (columns[name].shape[0] for name in schema.names if columns[name].dim() > 0)
    count = next(counts, -1)
    stepped = (c for c in schema.step_columns if columns[c.name].dim() > 1)
    known = (columns[c.name].shape[1] - int(c.rows == "T+1") for c in stepped)
    steps = next(known, table.most_steps)
    for column in schema:
        sizes = [count] if column.rows == "1" else [count, steps + int(column.rows == "T+1")]
        _check_values(f"column {column.name}", columns[column.name], column, device, sizes)
    if not 1 <= steps <= table.most_steps:
        raise ShapeError(
            "steps",
            f"must be in [1, {table.most_steps}], the table's max_length",
            steps,
            "add shorter trajectories, or raise max_length",
        )
    # Rows are a ring in which no trajectory wraps: at its end up to one extent may stay unused.
    most_rows = table.most_steps + int(schema.has_final_row)
    most = min(table.num_slots, table.num_rows // most_rows - 1)
    if not 1 <= count <= most:
        raise ShapeError(
            "trajectories",
            f"must be in [1, {most}], so that they fit at once",
            count,
            "add them in several calls, or raise the capacity",
        )
    if lengths is not None:
        arguments.dense("lengths", lengths)
        if lengths.shape != (count,) or lengths.dtype != torch.int64:
            form = f"{list(lengths.shape)}, {lengths.dtype}"
            raise ShapeError(
                "lengths",
                f"must have shape [{count}], int64",
                form,
                "give one length for each trajectory, as int64",
            )
    return count, steps


def without_inner_ends(table: RingTable, columns: Columns, lengths: Tensor, steps: int) -> Tensor:
    """Return checked lengths of trajectories: -1 where an end flag precedes the last step.

    In host memory, outside of traces, such a flag is a DataError.
    """
    flags = [columns[column.name][:, :-1].bool() for column in table.schema.end_columns]
    if not flags or steps == 1:
        return lengths
    inner = flags[0] if len(flags) == 1 else flags[0] | flags[1]
    inner = inner & (torch.arange(1, steps, device=table.device) < lengths[:, None])
    has_inner = inner.any(1)
    if table.device.type == "cpu" and not torch.compiler.is_compiling() and bool(has_inner.any()):
        number, step = inner.nonzero()[0].tolist()
        names = " or ".join(column.name for column in table.schema.end_columns)
        remedy = "add each episode as a trajectory, or steps with num_envs and add_steps_"
        raise DataError(
            f"column {names}", ENDS_LAST, f"a flag at step {step} of trajectory {number}", remedy
        )
    return torch.where(has_inner, -1, lengths)


def as_trajectories(table: RingTable, columns: Columns, following: Columns) -> dict[str, Tensor]:
    """Return transitions as trajectories of one step. [E, *shape] -> [E, 1 or 2, *shape]."""
    named: dict[str, Tensor] = {}
    arguments.tensors("following", following)
    for name, values in arguments.tensors("columns", columns).items():
        rows = table.schema[name].rows if name in table.columns else "1"
        if rows == "T+1" and name in following:
            if following[name].shape != values.shape:
                rule = f"must have shape {list(values.shape)}"
                given = list(following[name].shape)
                raise ShapeError(
                    f"following: column {name}",
                    rule,
                    given,
                    "give the observation after each step, in the shape of the step's own",
                )
            named[name] = torch.stack([values, following[name]], 1)
        else:
            named[name] = values if rows == "1" else values.unsqueeze(1)
    return named


def check_step(
    table: RingTable, columns: Columns, following: Columns, mask: Tensor | None, mode: str
) -> None:
    """Raise if a step of every environment cannot be added, from shapes and dtypes alone."""
    if mode not in MODES:
        raise ConfigError(
            "autoreset",
            f"must be one of {', '.join(MODES)}",
            mode,
            "give the mode of the vector environment",
        )
    schema = table.schema
    of_step = (table.state.device, [table.num_envs], _PER_ENVIRONMENT)
    known = {column.name: column for column in schema}
    needed = [*schema.names]
    for role in ("terminated", "truncated"):
        if schema.role(role) is None and role not in known:
            known[role] = Column(role, "bool")
    if schema.role("terminated") is None:
        needed.append("terminated")
    _check_names("columns", columns, known, needed)
    states = [column.name for column in schema if column.rows == "T+1"]
    _check_names("following", following, states, states)
    for name, values in columns.items():
        _check_values(f"column {name}", values, known[name], *of_step)
    for name, values in following.items():
        _check_values(f"following: column {name}", values, schema[name], *of_step)
    if mask is not None:
        check_mask(table, mask)


def check_mask(table: RingTable, mask: object) -> None:
    """Raise unless a mask has one bool per environment, on the table's device."""
    of_step = (table.state.device, [table.num_envs], _PER_ENVIRONMENT)
    _check_values("mask", arguments.dense("mask", mask), Column("mask", "bool"), *of_step)


def check_late(table: RingTable, ids: Tensor, columns: Columns) -> None:
    """Raise if late columns do not fit, or if other columns are derived from one of them."""
    _check_names("columns", columns, table.schema.names, ())
    for name, values in columns.items():
        column = table.schema[name]
        if column.role in ("reward", "terminated", "truncated"):
            raise SchemaError(
                f"column {name}",
                "must not be filled late",
                column.role,
                "give it with add_ or add_steps_: other columns are derived from it",
            )
        rows = [] if column.rows == "1" else [table.most_steps + int(column.rows == "T+1")]
        _check_values(f"column {name}", values, column, table.state.device, [len(ids), *rows])


class AddFilter:
    """The sampler's conditions, applied when a trajectory is added: others are not stored.

    It reads columns with one value per trajectory. They must not be late, as there is no value yet.
    No call waits for the device.
    """

    def __init__(
        self, conditions: Sequence[Condition], schema: Schema, device: torch.device
    ) -> None:
        #: The columns that are read.
        self.columns = frozenset(condition.column for condition in conditions)
        # Column, least and largest value, and passing values of each condition; None: no limit.
        self._tests: list[tuple[str, float | None, float | None, Tensor | None]] = []
        limits = torch.iinfo(torch.int64)
        for condition in conditions:
            name = condition.column
            dtype = DTYPES[schema[condition.column].dtype]
            least = condition.minimum
            most = condition.maximum
            among = condition.among
            if schema[name].late:
                rule = "must not be late where gear.sampler.where names it, in a table on devices"
                raise SchemaError(
                    f"column {name}",
                    rule,
                    remedy="leave it out of gear.sampler.where, or store it with its trajectory",
                )
            if not dtype.is_floating_point:
                # A float bound would round large integers: compared are integers, with bounds that
                # int64 holds; no integer is equal to other values, or beyond the bounds.
                dtype = torch.int64
                if among is not None:
                    among = tuple(n for n in among if limits.min <= n <= limits.max and n == int(n))
                if (least or 0) > limits.max or (most or 0) < limits.min:
                    least = None
                    most = None
                    among = ()
                least = None if least is None else max(math.ceil(least), limits.min)
                most = None if most is None else min(math.floor(most), limits.max)
            number = float if dtype.is_floating_point else int
            passing = None
            if among is not None:
                passing = torch.tensor([number(n) for n in among], dtype=dtype).to(device)
            self._tests.append((name, least, most, passing))

    def lengths(self, columns: Columns, lengths: Tensor) -> Tensor:
        """Return the lengths of trajectories, 0 for those that fail a condition. [E], int64."""
        for name, least, most, passing in self._tests:
            values = columns[name]
            values = values if values.dtype.is_floating_point else values.long()
            holds = torch.ones_like(values, dtype=torch.bool)
            if least is not None:
                holds &= values >= least
            if most is not None:
                holds &= values <= most
            if passing is not None:
                holds &= (values[:, None] == passing).any(1)
            lengths = torch.where(holds, lengths, 0)
        return lengths
