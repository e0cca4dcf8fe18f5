"""Position in the batch streams: the state of a checkpoint, and the check that a run suits it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from deepspeed_gear.checkpoint.checked_files import ANOTHER, entry
from deepspeed_gear.config.resume_options import resume_digest
from deepspeed_gear.errors import CheckpointError
from deepspeed_gear.plan.resolved_plan import Resolved
from deepspeed_gear.store.records import Head

FORMAT = 2
AT = "the gear state"
WORDS = ("batches", "samples", "epoch", "epoch_first", "epoch_size")
_LEAST = {"epoch_first": -(1 << 62)}  # evicted items move the beginning of their epoch back
Position = dict[str, dict[str, int]]  # by sampled table


@dataclass(frozen=True)
class LoaderPosition:
    """Position of a rank's batches.

    Attributes:
        at: Position after the last global batch whose micro batches were all used; with rollout
            batches, after the last selection of which no item is left.
        rollout: The rollout batch after it, JSON-able: which items are consumed, and how many
            steps of it are done. None: there is none, or it begins with a selection.
        columns: Columns of that rollout batch that the trainer has computed.
    """

    at: Position
    rollout: Mapping[str, Any] | None = None
    columns: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def start(cls, tables: Sequence[str]) -> LoaderPosition:
        """Return the position before the first global batch."""
        return cls(start(tables))

    @property
    def num_batches(self) -> int:
        """Number of used global batches."""
        return batches(self.at)


def start(tables: Sequence[str]) -> Position:
    """Return the position before the first global batch."""
    return {table: dict.fromkeys(WORDS, 0) for table in tables}


def after(tables: Sequence[str], heads: Sequence[Sequence[int]]) -> Position:
    """Return the position after the selections of a global batch, from their heads."""
    words = Head.SAMPLES, Head.EPOCH, Head.EPOCH_FIRST, Head.EPOCH_SIZE
    return {
        table: dict(
            zip(WORDS, (head[Head.NUMBER] + 1, *(head[word] for word in words)), strict=True)
        )
        for table, head in zip(tables, heads, strict=True)
    }


def of(state: Mapping[str, Any], tables: Iterable[str] | None = None) -> Position:
    """Return the position of some tables, or of all, from a state.

    Raises:
        CheckpointError: An entry is missing or malformed.
    """
    train = entry(state, "train", dict, AT)
    position = Position()
    for table in train if tables is None else tables:
        words = entry(train, table, dict, f"{AT}: train")
        at = f"{AT}: train.{table}"
        position[table] = {word: entry(words, word, int, at, _LEAST.get(word, 0)) for word in WORDS}
    return position


def batches(position: Position) -> int:
    """Return the number of used global batches of a position."""
    return next(iter(position.values()))["batches"]


def fingerprint(plan: Resolved) -> dict[str, str]:
    """Return the fingerprint of each data set, by table."""
    return {name: dataset.whole_fingerprint for name, dataset in plan.datasets.items()}


def state_of(
    plan: Resolved,
    passes: Mapping[str, int],
    train: Position,
    save: Mapping[str, Any] | None = None,
    rollout: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the state of a replay for a checkpoint: JSON-able, equal on all ranks.

    Args:
        plan: The resolved plan of the replay.
        passes: Number of passes over each split that have begun.
        train: Position of the training stream.
        save: Id and manifests of the save that holds the tables; None: no tables were saved.
        rollout: The rollout batch after the position whose training is under way.
    """
    return {
        **({} if rollout is None else {"rollout": dict(rollout)}),
        "format": FORMAT,
        "options": resume_digest(plan.config),
        "data": fingerprint(plan),
        "passes": dict(passes),
        "train": {table: dict(words) for table, words in train.items()},
        "save": None if save is None else dict(save),
    }


def check(state: Mapping[str, Any], plan: Resolved, may_grow: bool = False) -> None:
    """Check that a state is complete, belongs to this data and selects the same samples.

    With `may_grow` the state may also be of an earlier version of a data set that has grown.

    Raises:
        CheckpointError: An entry is missing, or the state is of other data or options.
    """
    if not isinstance(state, Mapping):
        raise CheckpointError(
            AT, "must be a mapping", type(state).__name__, "pass a state from `save`"
        )
    if state.get("format") != FORMAT:
        raise CheckpointError(AT, f"must have format {FORMAT}", state.get("format"), ANOTHER)
    now = fingerprint(plan)
    data = entry(state, "data", dict, AT)
    is_known = data.keys() == now.keys() and all(
        str(data[name]) in (dataset.versions if may_grow else (now[name],))
        for name, dataset in plan.datasets.items()
    )
    if not is_known:
        rule = f"must be of the data that this run reads ({now})"
        rule += " or of what they have grown from by gear ingest --append" if may_grow else ""
        remedy = "use the data set that the checkpoint was trained on, or load without gear's state"
        raise CheckpointError(AT, rule, data, remedy)
    if entry(state, "options", str, AT) != resume_digest(plan.config):
        rule = "must be of the same seed, tables, sampler, fields and n_step"
        remedy = "use the gear section that is stored in the checkpoint's config"
        raise CheckpointError(AT, rule, None, remedy)
    passes = entry(state, "passes", dict, AT)
    for name in passes:
        entry(passes, name, int, f"{AT}: passes")
    of(state, plan.config.sampled_tables)


def describe(state: Mapping[str, Any]) -> dict[str, Any]:
    """Summarize a state of a Replay or a DeviceReplay for `gear inspect`; JSON-able.

    Returns:
        `train`: by sampled table the used `global_batches` and `samples`; for a sampler of epochs
        also the number of the `epoch`, its `epoch_items`, and how many were used, `epoch_samples`.
        `passes`: passes that have begun, by split. `data`: fingerprint of each data set.
    """
    train: dict[str, dict[str, int]] = {}
    for table, words in of(state).items():
        batches, samples, epoch, first, size = words.values()
        train[table] = {"global_batches": batches, "samples": samples}
        if size:
            train[table] |= {"epoch": epoch, "epoch_samples": samples - first, "epoch_items": size}
    return {"train": train, **{name: entry(state, name, dict, AT) for name in ("passes", "data")}}
