"""Masks of chat messages: which messages have loss, by annotations and by default.

The keys are those of the field's formats: NeMo-RL's `message_loss_mask` beside the messages, and in
each message `weight` (OpenAI), `loss` (ms-swift) or `train` (Axolotl).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from deepspeed_gear.errors import DataError

LOGP = "generation_logprobs"  # of the tokens of a message
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


def generated(messages: Sequence[Mapping[str, Any]]) -> list[bool]:
    """Return for each message whether the model generated it.

    These are the messages of the assistant, and of these only the ones with log-probabilities if
    any message has them.
    """
    scored = any(LOGP in message for message in messages)
    return [is_of_assistant(one) and (not scored or LOGP in one) for one in messages]


def with_default(losses: Sequence[bool | None], default: Sequence[bool]) -> list[bool]:
    """Return whether each message has loss: as masks state it, else by a default."""
    return [own if loss is None else loss for loss, own in zip(losses, default, strict=True)]


def apply_losses(
    where: str,
    row: Mapping[str, Any],
    messages: Sequence[Mapping[str, Any]],
    made: tuple[np.ndarray, np.ndarray | None],
    tokens_of: Callable[[Sequence[Any]], np.ndarray],
) -> np.ndarray | None:
    """Return the loss mask of a chat's tokens, with the masks by message of its row.

    The tokens of a message are those by which the tokens of the chat up to it are more than those
    of the chat before it. Where a message with loss is the assistant's, the function's own mask
    counts in it, as it leaves out the tokens of the template.

    Args:
        where: Name of the row, for errors.
        messages: The messages of the row that tokens were made of.
        made: The tokens, and the mask that was made with them. [n] each; None without a mask.
        tokens_of: Makes the tokens of the first messages.
    Returns:
        [n], bool; None without a mask of either kind.
    Raises:
        DataError: The tokens of the first messages do not begin those of the chat.
    """
    tokens, own = made
    losses = message_losses(where, row, messages)
    usual = [is_of_assistant(message) for message in messages]
    filled = with_default(losses, usual)
    if all(loss is None for loss in losses) or (own is not None and filled == usual):
        return own
    mask = np.zeros(len(tokens), np.bool_)
    low = 0
    for number, has_loss in enumerate(filled):
        until = tokens if number + 1 == len(messages) else tokens_of(messages[: number + 1])
        high = len(until)
        if high <= low or not np.array_equal(tokens[:high], until):
            given = [
                key for key in _OF_MESSAGE if any(one.get(key) is not None for one in messages)
            ]
            keys = ", ".join([_OF_ROW] * (row.get(_OF_ROW) is not None) + given)
            raise DataError(
                f"{where}: {keys}",
                "must be applied to the tokens of each message, and those of the first "
                f"{number + 1} messages do not begin those of the chat",
                [None if loss is None else int(loss) for loss in losses],
                TAKE_ROW,
            )
        if has_loss:
            mask[low:high] = own[low:high] if usual[number] and own is not None else True
        low = high
    return mask


def _as_mask(where: str, value: Any) -> bool:
    if not isinstance(value, (bool, int, float, np.generic)) or value not in (0, 1):
        raise DataError(where, "must be 0 or 1: a loss mask has no weights", value, TAKE_ROW)
    return bool(value)
