"""Steps of environments, added one by one to open trajectories in the memory of one device."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

import deepspeed_gear.arguments as arguments
from deepspeed_gear.batching.gather import SOURCES
from deepspeed_gear.device.ring_table import NewItems, RingTable
from deepspeed_gear.errors import ConfigError, DataError, SchemaError, ShapeError
from deepspeed_gear.ops.records import OpenTrajectory, PlacedStep, Slot, SlotState, Source
from deepspeed_gear.schema import DTYPES, Column

_AUTORESET = ("same_step", "next_step", "disabled")


class OpenSteps:
    """The open trajectories of a RingTable. Every method mutates fixed tensors and waits for nothing.

    Args:
        items: Mass rule of its items.
    Raises:
        SchemaError: A column of ends is not of the dtype bool.
    """

    def __init__(self, table: RingTable, items: NewItems) -> None:
        self._table, self._items = table, items
        schema = table.schema
        roles = {role: schema.role(role) for role in ("terminated", "truncated")}
        for role, column in roles.items():
            if column is not None and column.dtype != "bool":
                rule = f"has role {role} and must be bool where steps are added one by one"
                raise SchemaError(f"column {column.name}", rule, column.dtype)
        self._names = {role: role if column is None else column.name for role, column in roles.items()}
        truncated = roles["truncated"]
        self._truncations = (
            torch.zeros(0, dtype=torch.bool, device=table.device)
            if truncated is None
            else table.columns[truncated.name]
        )
        self._steps = [column for column in schema if column.rows != "1"]
        self._once = [column for column in schema if column.rows == "1"]

    def check(
        self, columns: Mapping[str, Tensor], following: Mapping[str, Tensor], mask: Tensor | None, mode: str
    ) -> None:
        """Raise if a step cannot be added, from shapes and dtypes alone.

        Raises:
            SchemaError, ShapeError, DataError: A column is missing, unknown, or of another shape, dtype or
                device.
            ConfigError: There is no such autoreset mode.
        """
        if mode not in _AUTORESET:
            raise ConfigError("autoreset", f"must be one of {', '.join(_AUTORESET)}", mode)
        schema = self._table.schema
        ends = [name for name in self._names.values() if name not in schema.names]
        self._check_names(
            "columns", columns, {*schema.names, *ends}, {*schema.names, self._names["terminated"]}
        )
        states = {column.name for column in self._steps if column.rows == "T+1"}
        self._check_names("following", following, states, states)
        for name, values in columns.items():
            column = schema[name] if name in schema.names else Column(name, "bool")
            self._check_values(f"column {name}", values, column)
        for name, values in following.items():
            self._check_values(f"following: column {name}", values, schema[name])
        if mask is not None:
            if not isinstance(mask, torch.Tensor):
                raise DataError("mask", "must be a tensor", type(mask).__name__)
            self._check_values("mask", arguments.dense("mask", mask), Column("mask", "bool"))

    @staticmethod
    def _check_names(what: str, given: Mapping[str, Tensor], known: set[str], needed: set[str]) -> None:
        arguments.tensors(what, given)
        for name in sorted(needed - given.keys()):
            raise SchemaError(f"{what}: column {name}", "must be given")
        for name in sorted(given.keys() - known):
            raise SchemaError(f"{what}: column {name}", f"must be one of {', '.join(sorted(known))}")

    def _check_values(self, name: str, values: Tensor, column: Column) -> None:
        wanted = [self._table.num_envs, *column.shape]
        if values.device != self._table.state.device:
            raise DataError(name, f"must be on {self._table.device}", str(values.device))
        if values.dtype != DTYPES[column.dtype]:
            raise SchemaError(name, f"must be {column.dtype}", str(values.dtype))
        if list(values.shape) != wanted:
            raise ShapeError(name, f"must be {wanted}, a row per environment", list(values.shape))

    def add_(
        self, columns: Mapping[str, Tensor], following: Mapping[str, Tensor], mask: Tensor | None, mode: str
    ) -> None:
        """Add a step that `check` has checked to the open trajectory of every environment."""
        table, items, truncated = self._table, self._items, self._names["truncated"]
        # Made anew: a tensor that was made in a trace or a capture cannot be used outside of it.
        placed, begun = (
            torch.empty(table.num_envs, words, dtype=torch.int64, device=table.device)
            for words in (PlacedStep.NUM_WORDS, 3)
        )
        table.ops.ring_extend_(
            table.state,
            table.slots,
            table.opened,
            table.owners,
            table.sums,
            table.minima,
            table.priorities,
            placed,
            begun,
            self._truncations,
            columns[self._names["terminated"]].contiguous(),
            columns[truncated].contiguous() if truncated in columns else None,
            None if mask is None else mask.contiguous(),
            items.anchors,
            table.shape,
            items.unit,
            items.alpha,
            items.initial,
            items.most_bits,
            mode == "next_step",
        )
        rows = [
            torch.stack([columns[c.name], following[c.name]], 1)
            if c.rows == "T+1"
            else columns[c.name][:, None]
            for c in self._steps
        ]
        self._write(self._steps, rows, placed)
        if self._once:
            self._write(self._once, [columns[column.name] for column in self._once], begun)

    def _write(self, columns: list[Column], values: list[Tensor], placed: Tensor) -> None:
        targets, sources = [self._table.columns[c.name] for c in columns], [SOURCES[c.rows] for c in columns]
        self._table.ops.scatter_(targets, [rows.contiguous() for rows in values], placed, sources)

    def end_(self, mask: Tensor | None = None) -> None:
        """End open trajectories: their last steps are marked as truncated.

        Args:
            mask: Of which environments; None: of all. [num_envs], bool.
        """
        table, opened = self._table, self._table.opened
        steps, ids = opened[:, OpenTrajectory.NUM_STEPS], opened[:, OpenTrajectory.ID]
        which = torch.ones_like(steps, dtype=torch.bool) if mask is None else mask
        slots = torch.remainder(ids, table.num_slots)
        records = table.slots[slots]
        is_stored = (records[:, Slot.ID] == ids) & (records[:, Slot.STATE] == SlotState.COMMITTED)
        slot = torch.where(which & (steps > 0) & is_stored, slots, -1)
        if len(self._truncations):
            last = torch.stack([slot, records[:, Slot.FIRST_ROW] + steps - 1, torch.ones_like(slot)], 1)
            marks = torch.ones(len(slot), 1, dtype=torch.bool, device=table.device)
            table.ops.scatter_([self._truncations], [marks], last, [Source.STEPS])
        for word in (OpenTrajectory.NUM_STEPS, OpenTrajectory.ENDED):
            opened[:, word].masked_fill_(which, 0)
