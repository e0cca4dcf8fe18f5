"""Account of a table's prompts: trained, leased, waiting or dropped, by reason and by epoch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from deepspeed_gear.ops.constants import MASS_BITS
from deepspeed_gear.ops.records import Slot, SlotState
from deepspeed_gear.store.group_spec import SlotGroup
from deepspeed_gear.store.prompt_spec import (
    EPOCHS,
    FIXED_REASONS,
    MOST_REASONS,
    OTHER_REASON,
    Entry,
    EntryState,
    Left,
    PromptCount,
    PromptSpec,
)
from deepspeed_gear.store.records import Head


class PromptAccount:
    """The account of a ledger, read from the words of its store.

    Requires the table's lock. A reader without it (`gear inspect`) may see a change half made.

    Args:
        views: The store's regions.
        numbers: Column of group numbers, by slot.
    """

    def __init__(
        self, spec: PromptSpec, views: Mapping[str, np.ndarray], numbers: np.ndarray
    ) -> None:
        self._spec = spec
        self._views = views
        self._numbers = numbers

    @property
    def num_selected(self) -> int:
        """Rollout batches that were selected: the number of the next one."""
        return int(self._views["stream/train/position"][Head.NUMBER])

    @property
    def trained_here(self) -> int:
        """Rollout batches that all ranks of this node have trained."""
        return min(int(self._views["stream/train/consumed"].min()), self.num_selected)

    @property
    def version(self) -> int:
        """Rollout batches that all ranks of all nodes have trained; -1: not known since a load."""
        if self._spec.num_stores == 1:
            return self.trained_here
        return int(self._views["prompt_counts"][PromptCount.TRAINED])

    @property
    def num_in_training(self) -> int:
        """Groups of this store in untrained batches. Cost: of several stores, a pass over slots."""
        if self._spec.num_stores == 1:
            return (self.num_selected - self.trained_here) * self._spec.groups
        is_drawn = self._views["slots"][:, Slot.STATE] == SlotState.EVICTED
        is_drawn &= self._views["stream/train/last_drawn"] >= self.trained_here
        return len(np.unique(self._numbers[np.flatnonzero(is_drawn)]))

    def leaders(self) -> np.ndarray:
        """Return the leaders of this store's complete groups. [n], int64."""
        slots = self._views["slots"]
        is_led = self._views["groups"][:, SlotGroup.LEADER] == np.arange(1, len(slots) + 1)
        return np.nonzero(is_led & (slots[:, Slot.STATE] == SlotState.COMMITTED))[0]

    def incomplete(self) -> np.ndarray:
        """Return which entries hold a group without a leader: it lacks late columns. [entries]."""
        words = self._views["prompt_entries"]
        is_held: np.ndarray = words[:, Entry.STATE] == EntryState.HELD
        if not (self._spec.needs and is_held.any()):
            return np.zeros(len(words), bool)
        return is_held & ~np.isin(words[:, Entry.NUMBER], self._numbers[self.leaders()])

    def report(self) -> dict[str, Any]:
        """Return the whole account, JSON-able; the sums over all stores are that of the table.

        `issued` is the sum of `trained`, `training` (in the rollout batch that is trained),
        `waiting` (complete, not drawn), `incomplete` (without late columns), `leased`, `returned`,
        and of the values of `dropped`, by reason: of one store, and of several together once they
        were loaded. `epochs` has the same of the latest ones, with `drawn` for those that are
        trained or in training, and of all before them, "earlier". `priorities` sums up those by
        which prompts are drawn, if they are.
        """
        counts = self._views["prompt_counts"].tolist()
        left = self._views["prompt_left"][0]
        training = self.num_in_training
        following = counts[PromptCount.ISSUED] * self._spec.num_stores + self._spec.store
        masks = self._masks()
        return {
            "issued": counts[PromptCount.ISSUED],
            "trained": int(left[Left.DRAWN]) - training,
            "training": training,
            **self._parts(left, masks, np.ones(self._spec.num_entries, bool)),
            "epoch": following // self._spec.num_prompts,
            "epochs": self._by_epoch(following, masks),
            "version": self.version,
            "largest_lag": counts[PromptCount.LARGEST_LAG],
            "leases_returned": counts[PromptCount.RETURNS],
            "expired_refused": counts[PromptCount.REFUSED],
            "workers_waited_s": counts[PromptCount.WAITED_NS] / 1e9,
            **({"priorities": self._priorities()} if self._spec.draws else {}),
        }

    def _priorities(self) -> dict[str, Any]:
        """Return the number of prompts, and the sum and the extremes of their priorities."""
        masses = self._views["prompt_masses"]
        one = 1 << MASS_BITS
        return {
            "prompts": len(masses),
            "zero": int((masses == 0).sum()),
            "sum": int(masses.sum()) / one,
            "smallest": int(masses.min()) / one,
            "largest": int(masses.max()) / one,
        }

    def by_state(self) -> dict[str, int]:
        """Return how many numbers are in each state, without epochs and reasons: `issued` in all.

        Cost: a pass over the entries, which are few.
        """
        left = self._views["prompt_left"][0]
        training = self.num_in_training
        return {
            "trained": int(left[Left.DRAWN]) - training,
            "training": training,
            **{state: int(mask.sum()) for state, mask in self._masks().items()},
            "dropped": int(left[1:MOST_REASONS].sum()),
        }

    def _masks(self) -> dict[str, np.ndarray]:
        """Return which entries are in each state of the account. [entries] each, bool."""
        states = self._views["prompt_entries"][:, Entry.STATE]
        is_incomplete = self.incomplete()
        return {
            "waiting": (states == EntryState.HELD) & ~is_incomplete,
            "incomplete": is_incomplete,
            "leased": states == EntryState.LEASED,
            "returned": states == EntryState.RETURNED,
        }

    def _parts(
        self, left: np.ndarray, masks: Mapping[str, np.ndarray], among: np.ndarray
    ) -> dict[str, Any]:
        """Divide some entries by their state, and the counted numbers by their reason."""
        reasons = self._reasons()
        dropped = {reasons[at]: int(left[at]) for at in range(1, MOST_REASONS) if left[at]}
        states = {state: int((mask & among).sum()) for state, mask in masks.items()}
        return {**states, "dropped": dropped}

    def _reasons(self) -> list[str]:
        """Return the names of all counters; a program's names that are taken are marked as its."""
        given = self._views["prompt_reasons"][len(FIXED_REASONS) : OTHER_REASON].tolist()
        named = [name.decode(errors="replace") for name in given]
        taken = {*FIXED_REASONS, "other"}
        return [
            *FIXED_REASONS,
            *(f"{name} (worker)" if name in taken else name for name in named),
            "other",
        ]

    def _by_epoch(
        self, following: int, masks: Mapping[str, np.ndarray]
    ) -> dict[str, dict[str, Any]]:
        """Return the account of the latest epochs, the newest first, and of all earlier ones.

        Args:
            following: The number that this store issues next.
            masks: Entries by state.
        """
        spec = self._spec
        rows = self._views["prompt_epochs"][0]
        epoch_of = self._views["prompt_entries"][:, Entry.NUMBER] // spec.num_prompts
        epochs = {}
        rest = self._views["prompt_left"][0].copy()
        before = int(self._views["prompt_counts"][PromptCount.ISSUED])
        latest = int(rows[:, 0].max()) - 1  # another store's may be newer, after a load
        newest = max(max(following - spec.num_stores, 0) // spec.num_prompts, latest)
        # From the newest epoch back, each takes its share of the numbers and counters so far; what
        # is left after EPOCHS of them belongs to the earlier ones.
        for epoch in range(newest, max(newest - EPOCHS, -1), -1):
            row = rows[epoch % EPOCHS]
            left = row[1:] * (row[0] == epoch + 1)
            first = min(spec.issued_below(epoch * spec.num_prompts), before)
            epochs[str(epoch)] = {
                "issued": before - first,
                "drawn": int(left[Left.DRAWN]),
                **self._parts(left, masks, epoch_of == epoch),
            }
            rest -= left
            before = first
        if newest >= EPOCHS:
            parts = self._parts(rest, masks, epoch_of <= newest - EPOCHS)
            epochs["earlier"] = {"issued": before, "drawn": int(rest[Left.DRAWN]), **parts}
        return epochs
