"""Books of a prompt ledger: where each number is that was ever issued, by reason and epoch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from deepspeed_gear.store.prompt_ledger import (
    EPOCHS,
    FIXED_REASONS,
    MOST_REASONS,
    OTHER_REASON,
    Entry,
    EntryState,
    Left,
    PromptCount,
    PromptLedger,
    PromptSpec,
    incomplete,
    num_in_training,
    version_of,
)


def books_of(ledger: PromptLedger) -> dict[str, Any]:
    """Return the account of a ledger, as `stored_books`. Requires the table's lock."""
    return stored_books(ledger.spec, ledger.views, ledger.numbers)


def num_by_state(ledger: PromptLedger) -> dict[str, int]:
    """Return how many numbers of a ledger are in each state, as `books_of` without its epochs.

    Requires the table's lock. Cost: a pass over the entries, which are few.
    """
    return stored_states(ledger.spec, ledger.views, ledger.numbers)


def stored_states(
    spec: PromptSpec, views: Mapping[str, np.ndarray], numbers: np.ndarray
) -> dict[str, int]:
    """Return how many numbers of a store are in each state; their sum is `issued`."""
    left = views["prompt_left"][0]
    states = views["prompt_entries"][:, Entry.STATE]
    training = num_in_training(spec, views)
    num_incomplete = int(incomplete(spec, views, numbers).sum())
    return {
        "trained": int(left[Left.DRAWN]) - training,
        "training": training,
        "waiting": int((states == EntryState.HELD).sum()) - num_incomplete,
        "incomplete": num_incomplete,
        "leased": int((states == EntryState.LEASED).sum()),
        "returned": int((states == EntryState.RETURNED).sum()),
        "dropped": int(left[1:MOST_REASONS].sum()),
    }


def stored_books(
    spec: PromptSpec, views: Mapping[str, np.ndarray], numbers: np.ndarray
) -> dict[str, Any]:
    """Return the account of a store, JSON-able; the sums over all stores are that of the table.

    `issued` is the sum of `trained`, `training` (in the rollout batch that is trained), `waiting`
    (complete, not drawn), `incomplete` (without late columns), `leased`, `returned`, and of the
    values of `dropped`, by reason: of one store, and of several together once they were loaded.
    `epochs` has the same of the latest ones, with `drawn` for those that are trained or in
    training, and of all before them, "earlier". `numbers` of groups, by slot.
    """
    counts = views["prompt_counts"].tolist()
    left = views["prompt_left"][0]
    names = views["prompt_reasons"]
    states = views["prompt_entries"][:, Entry.STATE]
    training = num_in_training(spec, views)
    named = [
        name.decode(errors="replace") for name in names[len(FIXED_REASONS) : OTHER_REASON].tolist()
    ]
    named = [f"{name} (worker)" if name in (*FIXED_REASONS, "other") else name for name in named]
    reasons = [*FIXED_REASONS, *named, "other"]
    is_incomplete = incomplete(spec, views, numbers)

    def parts(left: np.ndarray, among: np.ndarray) -> dict[str, Any]:
        """Divide the numbers that have left, and those of some entries."""
        num_incomplete = int((is_incomplete & among).sum())
        return {
            "waiting": int(((states == EntryState.HELD) & among).sum()) - num_incomplete,
            "incomplete": num_incomplete,
            "leased": int(((states == EntryState.LEASED) & among).sum()),
            "returned": int(((states == EntryState.RETURNED) & among).sum()),
            "dropped": {reasons[at]: int(left[at]) for at in range(1, MOST_REASONS) if left[at]},
        }

    issued = counts[PromptCount.ISSUED]
    epochs = {}
    of_entries = views["prompt_entries"][:, Entry.NUMBER]
    following = issued * spec.num_stores + spec.store
    rest = left.copy()
    before = issued
    latest = (
        int(views["prompt_epochs"][0, :, 0].max()) - 1
    )  # may be of another store, before a load
    newest = max(max(following - spec.num_stores, 0) // spec.num_prompts, latest)
    for epoch in range(newest, max(newest - EPOCHS, -1), -1):
        row = views["prompt_epochs"][0, epoch % EPOCHS]
        of_epoch = row[1:] * (row[0] == epoch + 1)
        first = min(spec.issued_below(epoch * spec.num_prompts), before)
        among = of_entries // spec.num_prompts == epoch
        own = {
            "issued": before - first,
            "drawn": int(of_epoch[Left.DRAWN]),
            **parts(of_epoch, among),
        }
        epochs[str(epoch)], rest, before = own, rest - of_epoch, first
    if newest >= EPOCHS:
        among = of_entries // spec.num_prompts <= newest - EPOCHS
        epochs["earlier"] = {"issued": before, "drawn": int(rest[Left.DRAWN]), **parts(rest, among)}
    return {
        "issued": issued,
        "trained": int(left[Left.DRAWN]) - training,
        "training": training,
        **parts(left, np.ones(len(states), bool)),
        "epoch": following // spec.num_prompts,
        "epochs": epochs,
        "version": version_of(spec, views),
        "largest_lag": counts[PromptCount.LARGEST_LAG],
        "leases_returned": counts[PromptCount.RETURNS],
        "expired_refused": counts[PromptCount.REFUSED],
        "workers_waited_s": counts[PromptCount.WAITED_NS] / 1e9,
    }
