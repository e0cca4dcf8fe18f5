"""Masses of a table's prompts, by which the ledger draws the prompt of each number.

Masses, and the epochs that have drawn each prompt last, are authoritative; the sum tree is derived
from them. Order of writes, so that a process may die at any instruction: the entry of a number has
its prompt before `note` writes the prompt's epoch, which `recover` takes from the entries. The tree
is marked as not built before a mass changes, and after a death; the next draw builds it.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Final

import numpy as np

from deepspeed_gear.ops.constants import FAN_OUT, MASS_BITS, tree_levels
from deepspeed_gear.ops.philox import word
from deepspeed_gear.ops.records import RandomPurpose
from deepspeed_gear.store.prompt_spec import PromptSpec

INITIAL_MASS: Final = 1 << MASS_BITS  # of priority 1
MASS_ARRAYS: Final = ("prompt_masses", "prompt_drawn")  # of `PromptMasses.export`
_NOT_BUILT: Final = 0  # in place of the epoch of the tree, plus 1


class PromptMasses:
    """The masses of a table's prompts. Every method requires the table's lock.

    Args:
        spec: Its sampler is "prioritized" (with replacement) or "prioritized_epoch" (each prompt
            once an epoch).
        views: The store's regions.
    """

    def __init__(self, spec: PromptSpec, views: Mapping[str, np.ndarray]) -> None:
        self._spec = spec
        #: The mass of each prompt. [prompts], int64.
        self.values: np.ndarray = views["prompt_masses"]
        #: One more than the latest epoch that has drawn each prompt; None: with replacement.
        self._drawn: np.ndarray | None = views.get("prompt_drawn")
        self._sums: np.ndarray = views["prompt_sums"]
        self._tree: np.ndarray = views["prompt_tree"]
        self._levels = tree_levels(spec.num_prompts)

    def initialise(self) -> None:
        """Give every prompt the priority 1, in a new store."""
        self.values[:] = INITIAL_MASS

    def set(self, prompts: np.ndarray, masses: np.ndarray) -> None:
        """Set the masses of different prompts, from the next draw on. [n] each, int64."""
        self._tree[0] = _NOT_BUILT
        self.values[prompts] = masses

    def draw(self, number: int) -> int:
        """Return the prompt of a number that has none yet; `note` has to follow.

        With masses [3, 0, 5] the coordinates 0, 1 and 2 are of prompt 0, and 3 to 7 of prompt 2.

        Cost: a walk through the tree; in a new epoch and after `set`, a pass over all prompts.
        """
        spec = self._spec
        epoch = number // spec.num_prompts
        if self._tree[0] != self._key(epoch):
            self._build(epoch)
        offset, width = self._levels[-1]
        total = int(self._sums[offset : offset + width].sum())
        assert total > 0, "an epoch has as many prompts left as numbers"
        drawn = word(spec.seed, number, spec.random_key, RandomPurpose.COORDINATE)
        left = drawn * total >> 128
        node = 0
        for offset, _ in reversed(self._levels):
            first = node * FAN_OUT
            for mass in self._sums[offset + first : offset + first + FAN_OUT].tolist():
                if left < mass:
                    break
                left -= mass
                first += 1
            node = first
        return node

    def note(self, prompt: int, number: int) -> None:
        """Note that the entry of a number has a prompt."""
        if self._drawn is None:
            return
        self._drawn[prompt] = number // self._spec.num_prompts + 1
        self._sums[prompt] = 0
        node = prompt
        for (offset, _), (above, _) in pairwise(self._levels):
            node //= FAN_OUT
            first = offset + node * FAN_OUT
            self._sums[above + node] = self._sums[first : first + FAN_OUT].sum()

    def recover(self, prompts: np.ndarray, numbers: np.ndarray) -> None:
        """Repair epochs and tree after a death, by the prompts of the entries in use. [n] each."""
        self._tree[0] = _NOT_BUILT
        if self._drawn is not None:
            has = prompts >= 0
            epochs = numbers[has] // self._spec.num_prompts + 1
            np.maximum.at(self._drawn, prompts[has], epochs)

    def export(self) -> dict[str, np.ndarray]:
        """Return the arrays of a checkpoint."""
        drawn = {} if self._drawn is None else {"prompt_drawn": self._drawn.copy()}
        return {"prompt_masses": self.values.copy(), **drawn}

    def restore(self, saved: Mapping[str, np.ndarray]) -> None:
        """Restore what `export` returned."""
        self._tree[0] = _NOT_BUILT
        self.values[:] = saved["prompt_masses"]
        if self._drawn is not None:
            self._drawn[:] = saved["prompt_drawn"]

    def _key(self, epoch: int) -> int:
        """Return the word of a tree that is built for an epoch; with replacement all are equal."""
        return 1 if self._drawn is None else epoch + 1

    def _build(self, epoch: int) -> None:
        sums = self._sums
        num_prompts = self._spec.num_prompts
        if self._drawn is None:
            sums[:num_prompts] = self.values
        else:
            sums[:num_prompts] = np.where(self._drawn <= epoch, self.values, 0)
        for (offset, width), (above, _) in pairwise(self._levels):
            groups = sums[offset : offset + width].reshape(-1, FAN_OUT)
            sums[above : above + len(groups)] = groups.sum(1)
        self._tree[0] = self._key(epoch)  # last: a death before leaves a tree that is not built
