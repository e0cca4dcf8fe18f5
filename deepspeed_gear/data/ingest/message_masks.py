"""Annotations of chats: which messages have loss, and which answers are preferred.

The keys are those of the field's formats: NeMo-RL's `message_loss_mask` beside the messages, and in
each message `weight` (OpenAI), `loss` (ms-swift) or `train` (Axolotl).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from deepspeed_gear.errors import DataError

_OF_ROW = "message_loss_mask"
_OF_MESSAGE = (
    "weight",
    "loss",
    "loss_mask",
    "message_loss_mask",
    "train",
    "training",
    "train_on_turn",
)
# Keys without one known meaning: masks of parts of a message, scaled losses, or keys whose 1 means
# loss in some formats and no loss in others.
_UNCLEAR = ("mask", "loss_scale", "loss_weight", "train_detail", "training_detail")
_UNKNOWN = "must not mask messages: the meaning of this key is ambiguous"
_ASSISTANTS = ("assistant", "gpt", "model", "bot", "chatgpt")
_REJECTED = ("rejected", "non_preferred", "dispreferred")
_CHOSEN = ("chosen", "preferred", "messages", "conversations")
TAKE_ROW = (
    "apply it in the function of --tokenize: def encode(messages, row), where row is the whole row"
)


def is_messages(value: Any) -> bool:
    """Return whether a value is a list of messages.

    Each is a mapping with role and content, or with from and value (ShareGPT).
    """
    if not isinstance(value, (list, tuple, np.ndarray)) or not len(value):
        return False
    keys = ("role", "content"), ("from", "value")
    return all(
        isinstance(one, Mapping) and any({*two} <= one.keys() for two in keys) for one in value
    )


def is_of_assistant(message: Mapping[str, Any]) -> bool:
    """Return whether the model wrote a message."""
    return message.get("role", message.get("from")) in _ASSISTANTS


def message_losses(
    where: str, row: Mapping[str, Any], messages: Sequence[Any]
) -> list[bool | None]:
    """Return for each message whether its tokens have loss; None where no mask states it.

    Raises:
        DataError: A mask is not 0 or 1 for each message, or has no known meaning.
    """
    losses: list[bool | None] = [None] * len(messages)
    for number, message in enumerate(messages):
        given = message if isinstance(message, Mapping) else {}
        for key in _UNCLEAR:
            if given.get(key) is not None:
                raise DataError(f"{where}: message {number}: {key}", _UNKNOWN, None, TAKE_ROW)
        for key in _OF_MESSAGE:
            if (value := given.get(key)) is not None:
                is_kept = _as_mask(f"{where}: message {number}: {key}", value)
                losses[number] = is_kept and losses[number] is not False
    # In NeMo's chats, `mask` names the role that has no loss.
    if isinstance(row.get("mask"), (str, list, np.ndarray)):
        raise DataError(f"{where}: mask", _UNKNOWN, None, TAKE_ROW)
    of_row = row.get(_OF_ROW)
    if of_row is not None:
        if np.ndim(of_row) != 1 or len(of_row) != len(messages):
            raise DataError(
                f"{where}: {_OF_ROW}",
                f"must have a value for each of {len(messages)} messages",
                of_row,
                "give one value for each message, or apply the mask in the function of --tokenize",
            )
        for number, value in enumerate(of_row):
            is_kept = _as_mask(f"{where}: {_OF_ROW}[{number}]", value)
            losses[number] = is_kept and losses[number] is not False
    return losses


def check_applied(
    where: str, row: Mapping[str, Any], messages: Sequence[Mapping[str, Any]], has_mask: bool
) -> None:
    """Raise DataError if masks by message differ from the usual mask of the assistant's tokens.

    Args:
        where: Name of the row, for errors.
        messages: The messages of the row that tokens were made of.
        has_mask: Whether a mask was made with the tokens.
    """
    losses = message_losses(where, row, messages)
    usual = [is_of_assistant(message) for message in messages]
    filled = [own if loss is None else loss for loss, own in zip(losses, usual, strict=True)]
    if any(loss is not None for loss in losses) and not (has_mask and filled == usual):
        given = [key for key in _OF_MESSAGE if any(one.get(key) is not None for one in messages)]
        key = ", ".join([_OF_ROW] * (row.get(_OF_ROW) is not None) + given)
        shown = [None if loss is None else int(loss) for loss in losses]
        raise DataError(
            f"{where}: {key}", "must be applied to the tokens of each message", shown, TAKE_ROW
        )


def _as_mask(where: str, value: Any) -> bool:
    if not isinstance(value, (bool, int, float, np.generic)) or value not in (0, 1):
        raise DataError(where, "must be 0 or 1: a loss mask has no weights", value, TAKE_ROW)
    return bool(value)


def check_no_pairs(where: str, row: Mapping[str, Any], tokenized: Iterable[str]) -> None:
    """Raise DataError if a row holds a preferred and a rejected answer.

    Both would become one trajectory. Only where a function makes tokens of one of them is the row a
    conversation with that answer.
    """
    rejected = [
        name
        for name, value in row.items()
        if name.startswith(_REJECTED) and _is_answer(name, value)
    ]
    tokenized = [*tokenized]
    is_one = tokenized and not (
        any(name in rejected for name in tokenized)
        and any(name.startswith(_CHOSEN) for name in tokenized)
    )
    if rejected and not is_one:
        raise DataError(
            where,
            "must not be a pair of answers: a trajectory is one conversation",
            ", ".join(row),
            "make two rows of each, with the same prompt_id and the rewards 1 and 0; "
            "docs/how-to/tables-and-chats.md#preferences shows how",
        )


def _is_answer(name: str, value: Any) -> bool:
    return isinstance(value, (str, Mapping)) or is_messages(value) or name.endswith("ids")
