"""Which steps of a group's prompts are stored once, and a notice where columns prevent it."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np

from deepspeed_gear.log import LOG
from deepspeed_gear.store.prompt_spec import PromptPart
from deepspeed_gear.store.table_spec import TableSpec


class PromptSharing:
    """Steps that the trajectories of a lease's group share with the first one.

    The native `TrajectoryReader.SharedSteps` finds the same. One thread at a time.

    Args:
        spec: Specification of a table with prompts.
    """

    def __init__(self, spec: TableSpec) -> None:
        self._table = spec.name
        self._names = spec.schema.names
        mask = spec.schema.role("loss_mask")
        self._mask = None if mask is None else self._names.index(mask.name)
        self._shares = spec.shares_prompts and mask is not None
        self._columns: dict[int, list[int]] = {}
        for index, column in enumerate(spec.schema):
            if column.rows != "1" and spec.prompts is not None:
                self._columns.setdefault(spec.prompts.part(column), []).append(index)
        self._has_warned = False

    def no_differences(self) -> np.ndarray:
        """Return counts for `shared_steps`, all 0. [1 + columns], int64."""
        return np.zeros(1 + len(self._names), np.int64)

    def shared_steps(
        self, trajectories: Sequence[list[np.ndarray]], apart: np.ndarray
    ) -> np.ndarray:
        """Return how many steps of its prompt each trajectory shares with the first one.

        A prompt of 5 tokens has 4 steps to share: its last one stays with each trajectory, as its
        logits predict the first token of the loss.

        Args:
            trajectories: Columns in the stored form of each trajectory.
            apart: Takes the steps that are stored again although the prompt is the same, and how
                many trajectories differ there by column. [1 + columns], int64.
        Returns:
            Number of steps, 0 for a trajectory that begins in another way. [n], int64.
        """
        shared: np.ndarray = np.zeros(len(trajectories), np.int64)
        if not self._shares:
            return shared
        lengths = [self._prompt_steps(columns) for columns in trajectories]
        first = trajectories[0]
        for number, columns in enumerate(trajectories):
            length = min(lengths[0], lengths[number])
            if number == 0 or length <= 1:
                continue
            if self._differing(PromptPart.IDENTITY, first, columns, length):
                continue
            differing = self._differing(PromptPart.STORED, first, columns, length)
            if not differing:
                shared[number] = length - 1
                continue
            apart[0] += length - 1
            apart[1 + np.array(differing)] += 1
        return shared

    def _prompt_steps(self, columns: Sequence[np.ndarray]) -> int:
        """Return the steps before the first one with a loss; without one all of them."""
        assert self._mask is not None
        has_loss = columns[self._mask].astype(bool, copy=False)
        end = int(has_loss.argmax())
        return end if has_loss[end] else len(has_loss)

    def _differing(
        self, part: int, one: Sequence[np.ndarray], other: Sequence[np.ndarray], num_steps: int
    ) -> list[int]:
        """Return the columns of a part whose first steps differ in two trajectories."""
        return [
            index
            for index in self._columns.get(part, [])
            if one[index][:num_steps].tobytes() != other[index][:num_steps].tobytes()
        ]

    def warn(self, apart: np.ndarray, num_trajectories: int, num_rows: int) -> None:
        """Log, once in this process, that equal prompts of a group are stored again.

        Args:
            apart: As `shared_steps` has counted. [1 + columns], int64.
            num_trajectories: Trajectories of the group.
            num_rows: Rows that they have in the store.
        """
        again = int(apart[0])
        if not again or self._has_warned:
            return
        self._has_warned = True
        names = np.array(self._names)[apart[1:] > 0].tolist()
        LOG.warning(
            f"gear: table {self._table}: the {num_trajectories} trajectories of a group are stored "
            f"in {num_rows:,} rows, where {num_rows - again:,} suffice: trajectories begin with "
            f"the same prompt, but differ in {', '.join(names)} at its tokens. If nothing reads "
            f'these values, add "shared_columns": {json.dumps(names)} to '
            f"gear.tables.{self._table}.prompts, or store zeros there"
        )
