"""Priorities of prompts, by which a prompt ledger draws the prompts of its numbers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import starmap
from pathlib import Path

import numpy as np
import torch

import deepspeed_gear.arguments as arguments
from deepspeed_gear.data.dataset import Dataset, reopened
from deepspeed_gear.distributed.control_plane import ControlPlane
from deepspeed_gear.errors import ConfigError, DataError, ShapeError
from deepspeed_gear.ops.constants import MASS_BITS, most_mass_bits
from deepspeed_gear.sampling.conditions import Condition, admitted_prompts
from deepspeed_gear.sampling.priority_log import check_priorities
from deepspeed_gear.store.prompt_masses import PromptMasses
from deepspeed_gear.store.table import Table


class PromptPriorities:
    """The priorities of a table's prompts.

    Args:
        table: The table, or this node's shard of it.
        control_plane: Of all ranks.
        writes: Whether this rank writes the masses of its node's store.
    Raises:
        ConfigError: The table has no prompts, or none that are drawn by priority.
    """

    def __init__(self, table: Table, control_plane: ControlPlane, writes: bool) -> None:
        ledger = table.ledger
        if ledger is None or ledger.masses is None:
            rule = 'must be "prioritized" or "prioritized_epoch" where prompts have priorities'
            given = None if ledger is None else ledger.spec.sampler
            at = f"gear.tables.{table.spec.name}.prompts.sampler"
            raise ConfigError(at, rule, given, "give the sampler of the table's prompts")
        self._table = table
        self._spec = ledger.spec
        self._masses: PromptMasses = ledger.masses
        self._control_plane = control_plane
        self._writes = writes

    @cached_property
    def _dataset(self) -> Dataset:
        return reopened(Path(self._spec.data), self._spec.fingerprint)

    @cached_property
    def _admitted(self) -> np.ndarray:
        """Places of the prompts that `where` admits, ascending. [prompts], int64."""
        return admitted_prompts(self._dataset, starmap(Condition, self._spec.where))

    def set(
        self,
        prompts: torch.Tensor | np.ndarray | Sequence[int],
        priorities: torch.Tensor | np.ndarray | Sequence[float],
    ) -> None:
        """Set the priorities that all ranks give; see `Replay.set_prompt_priorities`."""
        what = "set_prompt_priorities"
        given = self._control_plane.all_results(what, lambda: self._checked(prompts, priorities))
        numbers = np.concatenate([one for one, _ in given])
        masses = np.concatenate([one for _, one in given])
        # Of a prompt that several ranks give, or one rank gives twice, the last one: the first in
        # reversed order.
        numbers, first = np.unique(numbers[::-1], return_index=True)
        self._control_plane.attempt(what, lambda: self._write(numbers, masses[::-1][first]))

    def values(self) -> torch.Tensor:
        """Return the priority of each prompt of the data set, 0 where `where` leaves it out."""
        admitted = self._admitted
        priorities = np.zeros(len(self._dataset), np.float32)
        with self._table.lock:
            priorities[admitted] = self._masses.values / (1 << MASS_BITS)
        return torch.from_numpy(priorities)

    def _checked(
        self,
        prompts: torch.Tensor | np.ndarray | Sequence[int],
        priorities: torch.Tensor | np.ndarray | Sequence[float],
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the numbers of prompts among the admitted ones, and their masses. [n] each."""
        places = arguments.integers("prompts", prompts)
        with np.errstate(over="ignore"):  # refused below
            values = arguments.array("priorities", priorities).astype(np.float32)
        if values.shape != places.shape:
            rule = f"must have shape [{len(places)}]"
            raise ShapeError("priorities", rule, list(values.shape), "give one for each prompt")
        check_priorities(values)
        admitted = self._admitted
        is_missing = (places < 0) | (places >= len(self._dataset))
        if is_missing.any():
            rule = f"must be places in the data set of {len(self._dataset)} prompts"
            raise DataError("prompts", rule, int(places[is_missing][0]), "give lease.index")
        numbers = np.searchsorted(admitted, places)
        is_left_out = admitted[np.minimum(numbers, len(admitted) - 1)] != places
        if is_left_out.any():
            rule = "must pass prompts.where: others are never drawn"
            raise DataError("prompts", rule, int(places[is_left_out][0]), "leave it out")
        most = 1 << (most_mass_bits(self._spec.num_prompts) - MASS_BITS)
        if (values > most).any():
            rule = f"must be at most {most} for {self._spec.num_prompts} prompts"
            raise DataError("priorities", rule, float(values.max()), "divide all of them")
        if self._spec.draws_once and (values == 0).any():
            rule = 'must be above 0 with "prioritized_epoch": each epoch has every prompt'
            remedy = 'give a small one, or set prompts.sampler to "prioritized"'
            raise DataError("priorities", rule, 0.0, remedy)
        masses = np.rint(values.astype(np.float64) * (1 << MASS_BITS)).astype(np.int64)
        return numbers, np.maximum(masses, values > 0)

    def _write(self, numbers: np.ndarray, masses: np.ndarray) -> None:
        with self._table.lock:
            changed = self._masses.values.copy()
            changed[numbers] = masses
            if not changed.any():  # on every rank alike, as all stores have the same masses
                rule = "must leave a prompt with a priority above 0"
                raise DataError("priorities", rule, 0.0, "give a prompt a priority above 0")
            if self._writes:
                self._masses.set(numbers, masses)
