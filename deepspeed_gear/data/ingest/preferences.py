"""Pairs of answers (DPO) and labels of answers (KTO) in rows of language models.

A pair becomes two trajectories, a group of two: the preferred answer with the reward 1, the other
one with 0. The layouts are those of TRL, LLaMA-Factory, OpenAI and their likes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from deepspeed_gear.data.ingest.message_masks import is_messages
from deepspeed_gear.data.ingest.row_values import numeric
from deepspeed_gear.errors import DataError

_SIDES = (("chosen", "rejected"), ("preferred", "non_preferred"), ("preferred", "dispreferred"))
_REJECTED = ("rejected", "non_preferred", "dispreferred")
_CHOSEN = ("chosen", "preferred", "messages", "conversations")
_IDS = ("_input_ids", "_token_ids", "_ids")
_LABELS = ("label", "kto_tag")


class Side(NamedTuple):
    """One conversation of a row.

    Attributes:
        label: "chosen", "rejected", or "" for a row that is no pair.
        row: The columns of this conversation.
        tokenized: The columns that functions make tokens of, in their order.
    """

    label: str
    row: dict[str, Any]
    tokenized: list[str]


def divide(where: str, row: Mapping[str, Any], tokenized: Sequence[str]) -> list[Side]:
    """Return the two conversations of a pair of answers, or the only one of another row.

    A row is a pair if functions make tokens of both answers, or if it has token ids of both. Where
    they make tokens of one answer only, the row is a conversation with that answer.

    Raises:
        DataError: The row has two answers, and it is unknown how they become tokens.
    """
    rejected = [
        name
        for name, value in row.items()
        if name.startswith(_REJECTED) and _is_answer(name, value)
    ]
    has_both = any(name in rejected for name in tokenized) and any(
        name.startswith(_CHOSEN) for name in tokenized
    )
    if not rejected or (tokenized and not has_both):
        return [Side("", dict(row), [*tokenized])]
    for good, bad in _SIDES:
        parts = [name.removeprefix(bad) for name in rejected if name.startswith(bad)]
        if tokenized:
            is_pair = {f"{side}{part}" in tokenized for side in (good, bad) for part in parts}
        else:
            ids = [part for part in parts if part in _IDS]
            is_pair = {f"{side}{part}" in row for side in (good, bad) for part in ids}
        if is_pair == {True}:
            sides = ((good, bad, 1.0), (bad, good, 0.0))
            return [_side(where, row, tokenized, *side) for side in sides]
    raise DataError(
        where,
        "must not be a pair of answers whose tokens are unknown",
        ", ".join(row),
        "make tokens of both, in two conversations of one group: --tokenize "
        "prompt=module:function --tokenize chosen=... --tokenize rejected=...; or make two rows of "
        "each, with the same prompt_id and the rewards 1 and 0; "
        "docs/how-to/tables-and-chats.md#preferences shows how",
    )


def _side(
    where: str,
    row: Mapping[str, Any],
    tokenized: Sequence[str],
    own: str,
    other: str,
    reward: float,
) -> Side:
    """Return the conversation with the answer `own` of a pair."""
    kept: dict[str, Any] = {}
    for name, value in row.items():
        if name in tokenized:
            if not name.startswith(other):
                kept[name] = value
            continue
        if (mine := _without(name, own)) is not None and _with(mine, name, own, other) in row:
            kept[mine or "answer"] = value
        elif (theirs := _without(name, other)) is None or _with(
            theirs, name, other, own
        ) not in row:
            kept[name] = value
    if not tokenized:
        kept = _with_ids(f"{where}: {own}", kept)
    if numeric(kept.get("reward")) is None:
        kept["reward"] = reward
    label = "chosen" if reward else "rejected"
    return Side(label, kept, [name for name in tokenized if name in kept])


def _without(name: str, side: str) -> str | None:
    """Return what a column is without its side: "chosen_score" and "score_chosen" are "score"."""
    if name == side:
        return ""
    if name.startswith(f"{side}_"):
        return name.removeprefix(f"{side}_")
    return name.removesuffix(f"_{side}") if name.endswith(f"_{side}") else None


def _with(part: str, name: str, side: str, other: str) -> str:
    """Return the name of the other side's column."""
    return name.replace(side, other, 1) if name.startswith(side) else f"{part}_{other}"


def _with_ids(where: str, row: dict[str, Any]) -> dict[str, Any]:
    """Return a conversation with the token ids of its prompt and answer.

    With labels, and where the ids begin with the prompt, they are those of both.
    """
    prompt = [
        name for name in row if name in ("prompt_input_ids", "prompt_token_ids", "prompt_ids")
    ]
    name = next(part[1:] for part in _IDS if part[1:] in row)
    ids = _unpadded(f"{where}_{name}", row.pop(name), row.pop("attention_mask", None))
    if "labels" in row:
        labels = _unpadded(f"{where}_labels", row.pop("labels"), None)
        rest = {key: value for key, value in row.items() if key not in prompt}
        return {**rest, "input_ids": ids, "labels": labels}
    if not prompt:
        return {**row, "input_ids": ids}
    begins = _unpadded(
        f"{where}: {prompt[0]}", row[prompt[0]], row.pop("prompt_attention_mask", None)
    )
    rest = {key: value for key, value in row.items() if key not in prompt}
    num = len(begins)
    is_whole = len(ids) > num and np.array_equal(ids[:num], begins)
    return {**rest, "prompt_ids": begins, "completion_ids": ids[num:] if is_whole else ids}


def _unpadded(where: str, value: Any, mask: Any) -> np.ndarray:
    ids = numeric(value)
    kept = None if mask is None else numeric(mask)
    is_bad = mask is not None and (kept is None or ids is None or kept.shape != ids.shape)
    if ids is None or ids.ndim != 1 or is_bad:
        raise DataError(
            where,
            "must be a list of token ids, with an attention mask of as many values or none",
            type(value).__name__,
            "store the ids as a list of numbers",
        )
    return ids if kept is None else ids[kept != 0]


def label_as_reward(row: dict[str, Any]) -> str:
    """Make a label of KTO, true or false, the reward of its answer; return its name, or ""."""
    names = [name for name in _LABELS if isinstance(row.get(name), (bool, np.bool_))]
    if not names or "reward" in row:
        return ""
    row["reward"] = float(row.pop(names[0]))
    return names[0]


def _is_answer(name: str, value: Any) -> bool:
    return isinstance(value, (str, Mapping)) or is_messages(value) or name.endswith("ids")


def is_pair_of_ids(names: Iterable[str]) -> bool:
    """Return whether columns are token ids of two answers."""
    given = {*names}
    return any({f"{good}{p}", f"{bad}{p}"} <= given for good, bad in _SIDES for p in _IDS)
