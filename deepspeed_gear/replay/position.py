"""Where a replay is in its streams: what a checkpoint carries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from deepspeed_gear.config import GearConfig
from deepspeed_gear.errors import CheckpointError
from deepspeed_gear.ops import reference
from deepspeed_gear.ops.constants import FOR_TRANSFORM
from deepspeed_gear.selection.cut import EPOCH, EPOCH_FIRST, EPOCH_SIZE, KEY, SAMPLES

FORMAT = 1
WORDS = ("batches", "samples", "epoch", "epoch_first", "epoch_size")


Position = dict[str, dict[str, int]]  # by sampled table


def start(tables: Sequence[str]) -> Position:
    """Return the position before the first global batch."""
    return {table: dict.fromkeys(WORDS, 0) for table in tables}


def after(tables: Sequence[str], heads: Sequence[Sequence[int]]) -> Position:
    """Return the position after the cuts of a global batch, from their heads."""
    return {table: _after(head) for table, head in zip(tables, heads, strict=True)}


def _after(head: Sequence[int]) -> dict[str, int]:
    words = (head[KEY] + 1, *(head[word] for word in (SAMPLES, EPOCH, EPOCH_FIRST, EPOCH_SIZE)))
    return dict(zip(WORDS, words, strict=True))


def of(state: Mapping[str, Any], tables: Sequence[str]) -> Position:
    """Return the position that a checked state holds."""
    return {table: {word: int(state["train"][table][word]) for word in WORDS} for table in tables}


def batches(position: Position) -> int:
    """Return how many global batches were used."""
    return next(iter(position.values()))["batches"]


def state_of(
    config: GearConfig, fingerprint: dict[str, str], passes: Mapping[str, int], train: Position
) -> dict[str, Any]:
    """Return a position as a checkpoint holds it: JSON-able, equal on all ranks."""
    return {
        "format": FORMAT,
        "options": config.resume_digest,
        "data": fingerprint,
        "passes": dict(passes),
        "train": {table: dict(words) for table, words in train.items()},
    }


def check(state: Mapping[str, Any], config: GearConfig, fingerprint: dict[str, str]) -> None:
    """Check that a state belongs to this data and selects the same samples.

    Raises:
        CheckpointError: It does not.
    """
    if state.get("format") != FORMAT:
        raise CheckpointError("the gear state", f"must have format {FORMAT}", state.get("format"))
    if state["data"] != fingerprint:
        raise CheckpointError(
            "the gear state",
            f"must be of the data that this run reads ({fingerprint})",
            state["data"],
            "use the data set that the checkpoint was trained on, or load without gear's state",
        )
    if state["options"] != config.resume_digest:
        raise CheckpointError(
            "the gear state",
            "must be of the same seed, tables, sampler, fields and n_step",
            None,
            "use the gear section that is stored in the checkpoint's config",
        )


def transform_keys(seed: int, stream: int, numbers: torch.Tensor) -> torch.Tensor:
    """Return a random word per sample for a user's transform, the same on any number of ranks. [B], int64."""
    return reference.philox(seed, numbers, stream, FOR_TRANSFORM)[0]
