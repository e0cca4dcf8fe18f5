"""Step columns: which columns reset, step and final of a vector writer take; their checks."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch

import deepspeed_gear.arguments as arguments
from deepspeed_gear.data.nested_columns import flatten
from deepspeed_gear.data.stored_values import as_stored, cast, check_finite
from deepspeed_gear.errors import DataError
from deepspeed_gear.schema import Column, Schema

_FLAG = Column("flag", "bool")  # form of an end flag that the schema has not


class StepColumns:
    """The columns of a schema by the call that takes them: `reset`, `step`, or its `final`.

    Args:
        computed: Columns that another process writes, which no call takes.

    Attributes:
        state: Columns of the state: observations, and all columns of T+1 rows.
        results: Columns of actions and their results, which lead to a state.
        once: Columns of one value per trajectory.
        flags: Column of each end flag, by role; None: the schema has none.
        flag_names: The name under which `step` takes each end flag, by role.
    """

    def __init__(self, schema: Schema, computed: Collection[str] = ()) -> None:
        self._schema = schema
        for column in schema.ragged_columns:
            if not column.late:
                rule = "must be late where environments write the steps"
                remedy = 'set "late": true and fill it, or add trajectories by writer.trajectory()'
                raise DataError(f"column {column.name}", rule, None, remedy)
        time = schema.role("timestep")
        steps = [column for column in schema if column.rows != "1" and not column.late]
        self.state = [c for c in steps if c.rows == "T+1" or c.role == "observation"]
        self.results = [
            c for c in steps if c not in self.state and c is not time and c.name not in computed
        ]
        self.once = [column for column in schema if column.rows == "1" and not column.late]
        self.flags = {role: schema.role(role) for role in ("terminated", "truncated")}
        self.flag_names = {
            role: role if column is None else column.name for role, column in self.flags.items()
        }
        states = [column.name for column in self.state]
        begins = [*states, *(column.name for column in self.once)]
        results = [column.name for column in self.results]
        self._names = frozenset({*schema.names, *self.flag_names.values()})
        self._taken = {
            "reset": frozenset(begins),
            "final": frozenset(states),
            "step": frozenset([*begins, *results, *self.flag_names.values()]),
        }

    def flat(self, call: str, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the columns of a call, which may come nested, by their dotted names."""
        return flatten(call, given, self._names)

    def check_names(self, call: str, given: Mapping[str, Any]) -> None:
        """Raise a DataError if a call is given a column that it does not take."""
        taken = self._taken[call]
        if given.keys() <= taken:
            return
        name = min(given.keys() - taken)
        remedy = f"it takes {', '.join(sorted(taken))}"
        if name in self._schema.names and self._schema[name].late:
            remedy = "the column is late: write it by fill, when the trajectory was added"
        raise DataError(
            f"{call}: column {name}", f"must be a column that {call} takes", None, remedy
        )

    def ends(self, given: Mapping[str, Any], num_envs: int) -> tuple[np.ndarray, np.ndarray]:
        """Return masks of the episodes that end and of those truncated. [n] each, bool, new."""
        name = self.flag_names["terminated"]
        if name not in given:
            remedy = "give the flags of the step, one for each environment"
            raise DataError(f"column {name}", "must be in every step", remedy=remedy)
        ended = np.zeros(num_envs, bool)
        truncated = np.zeros(num_envs, bool)
        for role, flags in (("terminated", ended), ("truncated", truncated)):
            name = self.flag_names[role]
            if name in given:
                values = arguments.array(f"column {name}", given[name])
                if values.shape != flags.shape:
                    rule = f"must have shape [{num_envs}]"
                    remedy = "give one flag for each environment"
                    raise DataError(f"column {name}", rule, list(values.shape), remedy)
                flags |= cast(values, _FLAG, f"column {name}")
        return ended | truncated, truncated

    def once_values(
        self, given: Mapping[str, Any], envs: np.ndarray, num_rows: int, kept: Any = slice(None)
    ) -> dict[str, np.ndarray]:
        """Convert columns of one value per trajectory to the stored form.

        Args:
            given: Columns of a call. [num_rows, *shape].
            envs: Environments of the rows that are kept. [n].
            num_rows: Number of rows of the call.
            kept: Index of the rows that are kept.
        Returns:
            Column -> [n, *shape].
        """
        columns = [column for column in self.once if column.name in given]
        values = {c.name: as_stored(given[c.name], c, "the steps", num_rows)[kept] for c in columns}
        check_finite("the steps", columns, values, lambda row: f"environment {envs[row]}")
        return values

    def last_states(
        self, at: np.ndarray, envs: np.ndarray, final: Mapping[str, Any] | None
    ) -> dict[str, np.ndarray]:
        """Return the last states of the episodes that end, at the places `at` of `envs`.

        Returns:
            Column -> [len(at), *shape], in the stored form.
        """
        rows = {}
        if final is not None:
            final = self.flat("final", final)
            self.check_names("final", final)
        for column in self.state:
            if final is None or column.name not in final:
                remedy = (
                    '"same_step": it comes with the next episode\'s first; gymnasium: '
                    'info["final_obs"]'
                )
                raise DataError(
                    f"final {column.name}", "must be given where an episode ends", None, remedy
                )
            given = final[column.name]
            # Arrays of objects, as gymnasium's, have None at the other environments.
            ends = given[at] if isinstance(given, torch.Tensor) else [given[i] for i in at.tolist()]
            rows[column.name] = as_stored(ends, column, "final", len(at))
        check_finite("final", self.state, rows, lambda row: f"environment {envs[at[row]]}")
        return rows


def pick(columns: list[Column], given: Mapping[str, Any], call: str) -> list[Any]:
    """Return the values of some columns; raise a DataError if a call lacks one."""
    try:
        return [given[column.name] for column in columns]
    except KeyError as error:
        name = f"column {error.args[0]}"
        remedy = f"give every column that the schema requires in each {call}"
        raise DataError(name, f"must be in every {call}", remedy=remedy) from None
