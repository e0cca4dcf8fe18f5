"""Masses of a table's prompts, by which prompts are drawn: prioritized prompts, curricula.

Of several stores that draw each prompt once an epoch, each draws from a part of its own: epoch by
epoch the prompts are shuffled, and the one at a place is of the store that issues its number. Then
a lease needs no other store, and a store has as many prompts in an epoch as numbers.

Masses, and the epochs that have drawn each prompt last, are authoritative; the sum tree is derived
from them. Order of writes, so that a process may die at any instruction: the entry of a number has
its prompt before `note` writes the prompt's epoch, which `recover` takes from the entries. The tree
is marked as not built before a mass changes, and after a death; the next draw builds it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Final

import numpy as np

from deepspeed_gear.ops.constants import FAN_OUT, MASS_BITS, tree_levels
from deepspeed_gear.ops.philox import philox, word
from deepspeed_gear.ops.records import RandomPurpose
from deepspeed_gear.store.prompt_spec import Entry, PromptSpec

INITIAL_MASS: Final = 1 << MASS_BITS  # of priority 1
# Words of a tree.
_BUILT: Final = 0  # one more than the epoch that it is built for; 0: it must be built
_PART: Final = 1  # one more than the epoch whose part this store has taken, where drawn once


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
        #: One more than the latest epoch in which this store may not draw each prompt: it has drawn
        #: it, or it is not of its part. None: with replacement.
        self._drawn: np.ndarray | None = views.get("prompt_drawn")
        self._sums: np.ndarray = views["prompt_sums"]
        self._tree: np.ndarray = views["prompt_tree"]
        self._levels = tree_levels(spec.num_prompts)

    def initialise(self) -> None:
        """Give every prompt the priority 1, in a new store."""
        self.values[:] = INITIAL_MASS

    def set(self, prompts: np.ndarray, masses: np.ndarray) -> None:
        """Set the masses of different prompts, from the next draw on. [n] each, int64."""
        self._tree[_BUILT] = 0
        self.values[prompts] = masses

    def draw(self, number: int) -> int:
        """Return the prompt of a number that has none yet; `note` has to follow.

        With masses [3, 0, 5] the coordinates 0, 1 and 2 are of prompt 0, and 3 to 7 of prompt 2.

        Cost: a walk through the tree; in a new epoch and after `set`, a pass over all prompts.
        """
        spec = self._spec
        epoch = number // spec.num_prompts
        if self._drawn is not None and self._tree[_PART] != epoch + 1:
            self._take_part(epoch)
        if self._tree[_BUILT] != self._key(epoch):
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
        self._tree[_BUILT] = 0
        if self._drawn is not None:
            has = prompts >= 0
            epochs = numbers[has] // self._spec.num_prompts + 1
            np.maximum.at(self._drawn, prompts[has], epochs)

    def export(self) -> dict[str, np.ndarray]:
        """Return the arrays of a checkpoint."""
        arrays = {"prompt_masses": self.values.copy()}
        if self._drawn is not None:
            arrays["prompt_drawn"] = self._drawn.copy()
            arrays["prompt_part"] = self._tree[_PART:].copy()
        return arrays

    def restore(self, saved: Mapping[str, np.ndarray], entries: np.ndarray, issued: int) -> None:
        """Restore what `merge_masses` returned.

        Where each prompt is drawn once an epoch, the stores that the save was made of may have had
        other parts. All stores draw alike for the numbers without a prompt that some of those had
        skipped, and divide what the epoch of the next number has left.

        Args:
            saved: Arrays of all stores.
            entries: Those of all stores, into which the prompts of skipped numbers are written.
            issued: The number that follows those of all stores.
        """
        self._tree[_BUILT] = 0
        self.values[:] = saved["prompt_masses"]
        if self._drawn is None:
            return
        spec = self._spec
        skipped = np.nonzero(entries[:, Entry.PROMPT] < 0)[0]
        skipped = skipped[np.argsort(entries[skipped, Entry.NUMBER])]
        left = dict[int, np.ndarray]()  # of each epoch the prompts that no store has drawn
        for entry in skipped.tolist():
            number = int(entries[entry, Entry.NUMBER])
            epoch = number // spec.num_prompts
            own = left[epoch] if epoch in left else self._left(saved, epoch)
            sums = np.cumsum(self.values[own])
            drawn = word(spec.seed, number, spec.random_key, RandomPurpose.COORDINATE)
            at = int(np.searchsorted(sums, drawn * int(sums[-1]) >> 128, side="right"))
            entries[entry, Entry.PROMPT] = own[at]
            left[epoch] = np.delete(own, at)
        epoch, first = divmod(issued, spec.num_prompts)
        rest = left[epoch] if epoch in left else self._left(saved, epoch)
        assert len(rest) == spec.num_prompts - first, "an epoch has as many prompts left as numbers"
        is_left = np.isin(np.arange(spec.num_prompts), rest)
        order = self._shuffled(epoch)
        order = order[is_left[order]]
        numbers = issued + np.arange(len(order))
        self._drawn[:] = epoch + 1
        self._drawn[order[numbers % spec.num_stores == spec.store]] = epoch
        self._tree[_PART] = epoch + 1

    def _left(self, saved: Mapping[str, np.ndarray], epoch: int) -> np.ndarray:
        """Return the prompts that no store of a save had drawn in an epoch, ascending. [n]."""
        rows = saved["prompt_drawn"]
        order = self._shuffled(epoch)
        numbers = epoch * self._spec.num_prompts + np.arange(len(order))
        parts = []
        for store, (drawn, part) in enumerate(zip(rows, saved["prompt_part"], strict=True)):
            if part == epoch + 1:
                parts.append(np.nonzero(drawn <= epoch)[0])
            elif part <= epoch:  # it has not begun the epoch
                parts.append(order[numbers % len(rows) == store])
        return np.sort(np.concatenate(parts))

    def _shuffled(self, epoch: int) -> np.ndarray:
        """Return the prompts in the order in which an epoch's numbers divide them. [prompts]."""
        spec = self._spec
        first = epoch * spec.num_prompts
        numbers = np.arange(first, first + spec.num_prompts, dtype=np.uint64)
        purpose = np.array([[RandomPurpose.PERMUTATION]], np.uint64)
        high, low, *_ = philox(spec.seed, numbers, spec.random_key, purpose)
        return np.argsort(high[0] << np.uint64(32) | low[0], kind="stable")

    def _take_part(self, epoch: int) -> None:
        """Begin an epoch: mark the prompts that other stores draw."""
        assert self._drawn is not None
        spec = self._spec
        if spec.num_stores > 1:
            numbers = epoch * spec.num_prompts + np.arange(spec.num_prompts)
            others = self._shuffled(epoch)[numbers % spec.num_stores != spec.store]
            self._drawn[others] = epoch + 1
        self._tree[_PART] = epoch + 1  # last: nothing is drawn before

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
        # Last: a death before leaves a tree that is not built.
        self._tree[_BUILT] = self._key(epoch)


def merge_masses(stores: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Merge what `export` returned of all stores: masses, and what each store has drawn, by row."""
    if "prompt_masses" not in stores[0]:
        return {}
    merged = {"prompt_masses": stores[0]["prompt_masses"]}  # set on all nodes by one call
    if "prompt_drawn" in stores[0]:
        merged["prompt_drawn"] = np.stack([one["prompt_drawn"] for one in stores])
        merged["prompt_part"] = np.concatenate([one["prompt_part"] for one in stores])
    return merged
