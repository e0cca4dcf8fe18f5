"""Columns of a rollout batch: loss mask, sequences of the loss, stored and filled columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np
import torch

from deepspeed_gear.batching.micro_batch import ForwardPass, MicroBatch
from deepspeed_gear.batching.pack_rows import (
    PackShape,
    RolloutTrajectories,
)
from deepspeed_gear.batching.prefixes import CommonPrefixes, shareable_steps
from deepspeed_gear.errors import ConfigError, FieldError
from deepspeed_gear.ops.records import GatherSpec, Resolution, Source, lower
from deepspeed_gear.replay.packed.rollout_context import MASK, RolloutContext
from deepspeed_gear.replay.packed.table_rows import TableRows
from deepspeed_gear.schema import Column

# The narrowed loss mask among the saved columns of a rollout batch.
NARROWED = "gear.loss_mask"
_STEPS = lower([GatherSpec(Source.STEPS)])


class RolloutColumns:
    """Columns of a rollout batch: stored ones, its loss mask, and those that the program fills.

    A selection pins the rows, which stay until the rollout batch ends. Reading stored columns is
    collective over nodes.

    Args:
        tables: Rows of the rollout batch in each table.
        context: Context of the rank's rollout batches.
        has_neighbours: Whether the trajectories of an item are side by side.
    """

    def __init__(
        self,
        tables: Sequence[TableRows],
        context: RolloutContext,
        has_neighbours: bool = True,
    ) -> None:
        self.tables = tables
        self.context = context
        self.trajectories = RolloutTrajectories.of(
            [rows.trajectories for rows in tables], has_neighbours
        )
        #: Columns of this rollout batch only, at predicting places. [num_tokens] each.
        self.filled: dict[str, torch.Tensor] = {}
        #: The loss mask after `narrow`; None: the stored one. [num_tokens], bool. It is replaced,
        #: never written to, so that packs keep the one that they are weighed with.
        self.narrowed: np.ndarray | None = None

    def reading(self, at: Any) -> AbstractContextManager[np.ndarray | None]:
        """Return a context in which rows of trajectories stay in place.

        Args:
            at: The trajectories: indices or a slice.
        Returns:
            The context gives which of them still have rows, [n], bool; None: all have.
        """
        return nullcontext()

    @property
    def mask(self) -> np.ndarray:
        """Mask of the steps that count in the loss, at predicting places. [num_tokens], bool.

        Collective over nodes.
        """
        return self.stored_mask if self.narrowed is None else self.narrowed

    @property
    def num_rejected(self) -> int:
        """Number of loss tokens of the whole batch that `narrow` has taken out."""
        return 0 if self.narrowed is None else int(self.stored_mask.sum() - self.narrowed.sum())

    def narrow(self, keep: np.ndarray) -> None:
        """Take places out of the loss mask; packs stay as they are planned. Collective over nodes.

        Args:
            keep: The places that stay. [num_tokens], bool.
        """
        self.narrowed = self.mask & keep
        self.__dict__.pop("counts", None)  # cached, of the mask before

    def saved(self) -> dict[str, torch.Tensor]:
        """Return what a checkpoint has of these columns, by name. [num_tokens] each."""
        if self.narrowed is None:
            return dict(self.filled)
        return {**self.filled, NARROWED: torch.from_numpy(self.narrowed)}

    def restore(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Set the columns that a checkpoint has. Collective over nodes."""
        self.filled.update({name: column for name, column in saved.items() if name != NARROWED})
        if NARROWED in saved:
            self.narrow(saved[NARROWED].numpy())

    @cached_property
    def stored_mask(self) -> np.ndarray:
        """The loss mask of the tables, at predicting places. [num_tokens], bool."""
        with self.reading(slice(None)) as has_rows:
            mask = self._read_mask()
        if has_rows is not None:  # what was evicted does not count
            mask = mask & has_rows.repeat(self.trajectories.lengths)
        return mask

    def _read_mask(self) -> np.ndarray:
        predicts = self.context.settings.predicts
        schema = self.context.settings.schema
        tokens = schema.role("token")
        flags = schema.role("loss_mask")
        if tokens is not None:
            for rows in self.tables:
                rows.check_filled(tokens.name)
        if flags is not None:
            own = [rows.steps(flags.name, int(predicts), as_flags=True) for rows in self.tables]
            return own[0] if len(own) == 1 else np.concatenate(own)
        mask = np.ones(self.trajectories.num_tokens, bool)
        if predicts:
            mask[self.trajectories.starts + self.trajectories.lengths - 1] = False
        return mask

    @cached_property
    def counts(self) -> np.ndarray:
        """Number of loss tokens of each trajectory. [n], int64."""
        if not len(self.trajectories):
            return np.zeros(0, np.int64)
        flags = self.mask.view(np.uint8)
        return np.add.reduceat(flags, self.trajectories.starts, dtype=np.int32).astype(np.int64)

    @cached_property
    def common_prefixes(self) -> CommonPrefixes | None:
        """First steps that the trajectories of an item have in common.

        A trajectory may share its steps before the first loss place. None: prefixes are not shared.
        A narrowed loss mask changes nothing. Collective over nodes.
        """
        token = self.context.settings.schema.role("token")
        if (
            self.context.settings.pack.prefix == "own"
            or token is None
            or not len(self.trajectories)
        ):
            return None
        trajectories = self.trajectories
        item = trajectories.item
        bound = shareable_steps(self.stored_mask, trajectories.starts, trajectories.lengths)
        # Nothing after the largest bound of an item, and the token that is predicted there, counts.
        most = np.zeros(trajectories.num_items, np.int64)
        np.maximum.at(most, item, bound)
        compared = np.minimum(trajectories.lengths, most[item] + 1)
        found = np.zeros((len(trajectories), 2), np.int64)
        for number, rows in enumerate(self.tables):
            own = np.nonzero(trajectories.source == number)[0]
            found[own] = rows.sorted_prefixes(compared[own], item[own])
        order = np.lexsort((found[:, 0], item))
        return CommonPrefixes(order, found[order, 1], bound)

    @cached_property
    def sequence(self) -> np.ndarray:
        """The sequence of each trajectory for the loss: itself, or its member. [n], int64."""
        member = self.context.settings.member
        if self.context.settings.loss.by == "trajectory" or member is None:
            return np.arange(len(self.trajectories))
        members = self.values_or_zero(member).astype(np.int64)
        pairs = np.stack([self.trajectories.item, members], axis=1)
        return np.unique(pairs, axis=0, return_inverse=True)[1].reshape(-1)

    def check_values(self, *names: str, where: str | None = None) -> None:
        """Raise ConfigError unless every table has per-trajectory columns.

        Args:
            *names: The columns.
            where: Only tables with this column must have them, if there is such a table.
        """
        tables = [rows for rows in self.tables if where is None or where in rows.table.schema]
        for name, rows in product(names, tables or self.tables):
            schema = rows.table.schema
            single = [c.name for c in schema.trajectory_columns if not c.is_ragged]
            if name not in single:
                known = ", ".join(single) or "none"
                rule = (
                    f"must be a column of table {rows.table.spec.name} with one value per "
                    f"trajectory"
                )
                remedy = f"there are: {known}"
                if name in schema:
                    remedy = f"rollout.column({name!r}) has one number per step; {remedy}"
                raise ConfigError(f"column {name!r}", rule, None, remedy)

    def values(self, name: str) -> np.ndarray:
        """Return a per-trajectory column's stored values. [n, *shape]. Collective over nodes."""
        self.check_values(name)
        return np.concatenate([rows.values(name) for rows in self.tables])

    def values_or_zero(self, name: str) -> np.ndarray:
        """Return as `values`, with 0 in tables without the column; one of them has it."""
        counts = [len(rows.rows) for rows in self.tables]
        known = [rows.values(name) if name in rows.table.schema else None for rows in self.tables]
        like = next(values for values in known if values is not None)
        return np.concatenate(
            [
                np.zeros((count, *like.shape[1:]), like.dtype) if values is None else values
                for count, values in zip(counts, known, strict=True)
            ]
        )

    def has_column(self, name: str) -> np.ndarray:
        """Return which trajectories are of tables with a stored column. [n], bool."""
        has = np.array([name in rows.table.schema for rows in self.tables])
        return np.asarray(has[self.trajectories.source])

    def step_column(self, name: str) -> tuple[Column, int]:
        """Return the column of numbers per step that micro batches have by a name; its offset.

        Raises:
            ConfigError: There is no such column.
        """
        settings = self.context.settings
        field = next((field for field in settings.fields if field.name == name), None)
        column = None if field is None else field.column
        if column is None and all(name in rows.table.schema for rows in self.tables):
            column = settings.schema[name]
        if column is None or column.rows == "1" or column.shape:
            rule = "must be filled or set before, or be a column with one number per step"
            raise ConfigError(f"column {name!r}", rule, None, self._other_columns(name))
        if field is not None:
            return column, int(field.offset)
        return column, int(settings.predicts and column.rows == "T")

    def _other_columns(self, name: str) -> str:
        """Return the remedy for a name that is no column of numbers per step."""
        schemas = [rows.table.schema for rows in self.tables]
        if all(name in schema and schema[name].rows == "1" for schema in schemas):
            return f"rollout.values({name!r}) has its value per trajectory"
        fields = [one.name for one in self.context.settings.fields]
        schema = self.context.settings.schema
        stored = [one.name for one in schema if one.rows != "1" and not one.shape]
        known = ", ".join(sorted({*fields, *stored, *self.filled}))
        remedy = f'fill it in rollout.forward("{name}"), or set it with rollout.set'
        return f"{remedy}; there are: {known}"

    def places(self, name: str, later: int = 0, admits_absent: bool = False) -> np.ndarray:
        """Return a column's values at the places of micro batches. [num_tokens], float64.

        Collective over nodes.

        Args:
            name: A column that was filled or set, or a field or column with a number per step.
            later: Number of steps after the place.
            admits_absent: Whether tables may lack the column of a field with the option `absent`.
        Raises:
            ConfigError: There is no such column, or a table lacks it.
        """
        if name in self.filled:
            return self.filled[name].double().numpy()
        column, offset = self.step_column(name)
        absent = self.absent_value(name) if admits_absent else None
        parts = []
        for rows in self.tables:
            if column.name in rows.table.schema:
                parts.append(rows.steps(column.name, offset + later))
                continue
            if absent is None:
                rule = f"must be a column of table {rows.table.spec.name}, too, or be filled or set"
                raise ConfigError(f"column {name!r}", rule, None, "set it with rollout.set")
            num_steps = int(rows.rows[:, Resolution.NUM_STEPS].sum())
            parts.append(np.full(num_steps, float(absent)))
        return np.concatenate(parts)

    def absent_value(self, name: str) -> int | float | None:
        """Return a field's value in tables without its column; None: all tables must have it."""
        fields = self.context.settings.fields
        return next((field.absent for field in fields if field.name == name), None)

    def set_column(self, name: str, values: np.ndarray) -> None:
        """Set a column of this rollout batch.

        Args:
            name: Name of the column.
            values: One value per trajectory, [n], or per place, [num_tokens].
        """
        self.check_names([name])
        places = self.per_place(values)
        self.filled[name] = torch.from_numpy(np.ascontiguousarray(places, np.float32))

    def per_place(self, values: np.ndarray) -> np.ndarray:
        """Repeat values of trajectories, [n], for each place; those of places, [num_tokens], stay.

        For lengths [2, 3], the values [a, b] become [a, a, b, b, b].
        """
        lengths = self.trajectories.lengths
        return values.repeat(lengths) if len(values) == len(lengths) else values

    def check_names(self, names: Sequence[str]) -> None:
        """Raise a FieldError if a field of the config has one of the names."""
        for name in {one.name for one in self.context.settings.fields}.intersection(names):
            rule = "must not be named like a field of gear.fields"
            raise FieldError(
                f"column {name!r}", rule, None, "choose another name, or leave the field out"
            )

    def packed(
        self, at: Any, shape: PackShape, loss_mask: np.ndarray | None
    ) -> dict[str, torch.Tensor]:
        """Gather the filled columns into a pack, and the loss mask if it is given.

        Args:
            at: The trajectories of the pack: indices or a slice.
            shape: Places of the trajectories in the pack.
            loss_mask: The loss mask of the whole rollout batch, where it is no field of the pack
                or is narrowed. [num_tokens], bool.
        Returns:
            Column (MASK for the loss mask) -> [1, rows].
        """
        rows = shape.end - shape.first
        buffers = dict(self.filled)
        if loss_mask is not None:
            buffers[MASK] = torch.from_numpy(loss_mask)
        outs = dict[str, torch.Tensor]()
        for name, buffer in buffers.items():
            array = np.empty((1, rows), buffer.numpy().dtype)
            array[:, shape.own_tokens :] = 0  # the padding: all other places are written below
            outs[name] = torch.from_numpy(array)
        if not len(shape.lengths):
            return outs
        # A column is one buffer, trajectory by trajectory: the first row of each is its start.
        first_rows = self.trajectories.resolutions.numpy()[at].copy()
        first_rows[:, Resolution.FIRST_ROW] = self.trajectories.starts[at]
        resolutions = torch.from_numpy(first_rows)
        none = [torch.empty(0)] * len(outs)
        self.tables[0].table.ops.pack_(
            list(outs.values()),
            list(buffers.values()),
            none,
            none,
            *shape.runs(resolutions),
            _STEPS * len(outs),
            [0.0] * len(outs),
            shape.first,
            rows,
        )
        return outs


class FilledColumns(ForwardPass):
    """Columns of a rollout batch that a forward pass fills; a rank has the values of its places."""

    def __init__(self, names: Sequence[str], columns: RolloutColumns) -> None:
        super().__init__(names)
        self._context = columns.context
        self._trajectories = columns.trajectories
        self._own = {name: torch.zeros(columns.trajectories.num_tokens) for name in names}

    def write(self, name: str, micro: MicroBatch, values: Any) -> None:
        column = self._own[name].numpy()  # NumPy copies a slice in a tenth of torch's time
        given = micro.flat(name, values).detach().to("cpu", torch.float32).numpy()
        shape = micro.pack_shape
        # This rank's first place within each trajectory: of a slice that begins at row 5, a
        # trajectory that starts at row 3 has place 2 first.
        begins = np.maximum(shape.first - shape.starts, 0)
        whole = self._trajectories.starts[micro.index.numpy()]
        to = whole + begins if shape.prefixes is None else whole + shape.prefixes.steps
        at = 0
        # Not strict: the last size is that of the padding.
        for start, size in zip(to.tolist(), shape.sizes.tolist(), strict=False):
            column[start : start + size] = given[at : at + size]
            at += size
        if shape.prefixes is not None:  # values of a prefix are those of its leader
            for start, steps, leader in zip(whole, *shape.prefixes, strict=True):
                column[start : start + steps] = column[whole[leader] : whole[leader] + steps]

    def of_all_ranks(self) -> dict[str, torch.Tensor]:
        """Return the whole columns, [num_tokens] each. Collective."""
        whole = dict[str, torch.Tensor]()
        for name, values in self._own.items():
            # Every place is filled on one replica; its tensor ranks have equal values, so only the
            # first of them adds to the sum.
            if self._context.settings.place.tensor_rank != 0:
                values.zero_()
            whole[name] = self._context.control_plane.sum(values)
        return whole
