"""Rows of conversations and responses: token ids, loss masks, rewards, numbers of groups.

TRL, verl and NeMo-RL write such rows. A row becomes the columns `tokens`, `loss_mask` and `logp`,
with a row per token, and the values `reward` and `prompt_id` of the trajectory, from which
docs/how-to/language-models.md trains. Other columns keep their names.
"""

from __future__ import annotations

import hashlib
import inspect
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from deepspeed_gear.config import recipes
from deepspeed_gear.config.schedules import imported
from deepspeed_gear.data.ingest.message_masks import (
    LOGP,
    TAKE_ROW,
    apply_losses,
    generated,
    is_messages,
    message_losses,
    with_default,
)
from deepspeed_gear.data.ingest.preferences import divide, is_pair_of_ids, label_as_reward
from deepspeed_gear.data.ingest.row_values import null_place, numeric
from deepspeed_gear.data.opaque_rows import byte_string
from deepspeed_gear.errors import DataError, GearError
from deepspeed_gear.schema import Schema

COLUMNS = {column.name: column for column in Schema.from_json({"columns": recipes.COLUMNS})}
# Names of columns in the rows of other programs; the first one that a row has counts.
_WHOLE = ("input_ids", "token_ids", "tokens")  # token ids of prompt and response
_PROMPT = ("prompt_ids", "prompt_token_ids", "prompts")
_RESPONSE = ("completion_ids", "response_ids", "response_token_ids", "responses")
_MESSAGES = ("message_log", "messages", "conversations")
_MASKS = (
    "loss_mask",
    "token_loss_mask",
    "token_mask",
    "assistant_masks",
    "completion_mask",
    "response_mask",
)
_LOGP = ("logp", LOGP, "rollout_log_probs", "logprobs", "old_log_probs")
_REWARDS = ("reward", "rewards", "score", "total_reward")
GROUPS = ("prompt_id", "group_id", "uid", "group")
#: Names with a meaning in rows of conversations.
NAMES = (*_WHOLE, *_PROMPT, *_RESPONSE, *_MESSAGES, *_MASKS, *_LOGP, *_REWARDS, *GROUPS)
# Parts of names of which others have a meaning, too: "chosen_input_ids", "prompt_attention_mask".
_PARTS_OF_NAMES = ("chosen", "rejected", "preferred", "ids", "mask", "label", "lengths", "kto_tag")
_NO_LOSS = -100  # label of a token without loss in transformers and TRL
_MAKE_TOKENS = "make them with --tokenize COLUMN=module:function, such as a chat template"


def has_tokens(names: Iterable[str]) -> bool:
    """Return whether rows with these names have token ids or messages."""
    known = (*_WHOLE, *_PROMPT, *_RESPONSE, *_MESSAGES)
    names = [*names]
    return is_pair_of_ids(names) or any(
        name in known or name.endswith("_input_ids") for name in names
    )


def may_be_read(name: str) -> bool:
    """Return whether a conversation may need a column by its name, also where it is not kept."""
    return name in NAMES or any(part in name for part in _PARTS_OF_NAMES)


def take_rows(tokenize: Mapping[str, str | Callable[..., Any]]) -> bool:
    """Return whether a function of `tokenize` gets whole rows, as in `TokenRows`."""
    return any(_takes_row(imported(given, "--tokenize")) for given in tokenize.values())


class TokenRows:
    """Converts rows into trajectories of tokens.

    A group's number is its id, also where that is written as text. For any other text it is a hash,
    which is equal in all sources. A pair of answers without an id has the number of
    pairs before it.

    Attributes:
        num_pairs: Pairs without an id so far.
        label: Column of KTO's labels that became rewards; "" without one.
    """

    def __init__(self, tokenize: Mapping[str, str | Callable[..., Any]]) -> None:
        """Import the functions that make tokens of a column.

        Args:
            tokenize: Function, or its "module:function", by column. It returns token ids; the ids
                and a mask of the tokens with loss; or a mapping with `input_ids`, as a chat
                template does. Without a mask, only the tokens of the last of several columns have
                loss. A function with a parameter `row` gets the whole row as well, and applies the
                masks of messages that the row has.
        """
        self._tokenize = {name: imported(given, "--tokenize") for name, given in tokenize.items()}
        self._names = {name: _shown(given) for name, given in tokenize.items()}
        self._take_row = {name for name, function in self._tokenize.items() if _takes_row(function)}
        self.num_pairs = 0
        self.label = ""

    def __call__(
        self, where: str, given: Mapping[str, Any]
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield each conversation of a row: its name, and its columns.

        These are arrays per token, and values. A row has two conversations if it is a pair.
        """
        row = {name: value for name, value in given.items() if value is not None}
        sides = divide(where, row, [*self._tokenize])
        has_number = len(sides) == 2 and _first(row, GROUPS) is None
        for label, part, tokenized in sides:
            if has_number:
                part["prompt_id"] = self.num_pairs
            columns = self._columns(f"{where}: {label}" if label else where, part, tokenized)
            self.label = label_as_reward(columns) or self.label
            yield label, columns
        self.num_pairs += has_number

    def _columns(self, where: str, row: dict[str, Any], tokenized: Sequence[str]) -> dict[str, Any]:
        ids = row.get(_first(row, _WHOLE) or "")
        lists = (list, np.ndarray)
        inner = numeric(ids[0]) if isinstance(ids, lists) and len(ids) == 1 else None
        if inner is not None and inner.ndim == 1:  # a batch of one, as of NeMo-RL
            row = {
                key: v[0] if isinstance(v, lists) and len(v) == 1 else v for key, v in row.items()
            }
        messages = next((name for name in _MESSAGES if isinstance(row.get(name), lists)), None)
        if tokenized:
            row.update(_joined([self._tokens_of(where, name, row) for name in tokenized]))
            row = {name: value for name, value in row.items() if name not in self._tokenize}
        elif messages and any(
            isinstance(one, Mapping) and one.get("token_ids") is not None for one in row[messages]
        ):
            row.update(_joined(_message_parts(where, row, row[messages])))
            del row[messages]
        else:
            row = _from_ids(where, row)
        if not _value(where, "sample_loss_mask", row.get("sample_loss_mask", 1)):
            row["loss_mask"] = np.zeros(len(row["tokens"]), np.bool_)
        if (group := _first(row, GROUPS)) and isinstance(row[group], (str, int, np.integer)):
            row["prompt_id"] = _group_number(f"{where}: {group}", row.pop(group))
        arrays = {name: numeric(row.get(name)) for name in _REWARDS}
        scalar = [name for name, array in arrays.items() if array is not None and not array.ndim]
        if scalar and (scalar[0] == "reward" or "reward" not in row):
            row["reward"] = row.pop(scalar[0])
        return row

    def _tokens_of(self, where: str, name: str, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the tokens that the function makes of a column, and the mask if it makes one."""
        if name not in row:
            raise DataError(
                f"{where}: --tokenize",
                "must name a column of every row",
                name,
                f"columns are {', '.join(row)}",
            )
        at = f"{where}: --tokenize {name}"
        columns, is_masked = self._made(at, name, row)
        mask = columns["loss_mask"] if is_masked else None
        if name not in self._take_row:
            mask = self._with_masks_of(where, name, row, (columns["tokens"], mask))
        return {"tokens": columns["tokens"], **({} if mask is None else {"loss_mask": mask})}

    def _made(self, at: str, name: str, row: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
        """Return the columns that the function makes of a column, and whether it made a mask."""
        made = self._call(at, name, row)
        if isinstance(made, tuple):
            if len(made) != 2:
                raise DataError(
                    at,
                    f"must get token ids, or the ids and a mask, of {self._names[name]}",
                    f"{len(made)} values",
                    "return token ids, or a pair (ids, mask)",
                )
            made = dict(zip(("input_ids", "loss_mask"), made, strict=True))
        made = {**made} if isinstance(made, Mapping) else {"input_ids": made}
        columns = _from_ids(at, made)
        is_masked = _first(made, (*_MASKS, "labels")) is not None
        return columns, is_masked

    def _call(self, where: str, name: str, row: Mapping[str, Any]) -> Any:
        """Call the function of a column; if it fails, raise a DataError with its name and line."""
        more = {"row": dict(row)} if name in self._take_row else {}
        try:
            return self._tokenize[name](row[name], **more)
        except GearError:
            raise
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            raise DataError(
                where,
                f"must hold a value that {self._names[name]} takes",
                f"{type(error).__name__}: {error}",
                f"raised in {last.filename}, line {last.lineno}",
            ) from error

    def _with_masks_of(
        self,
        where: str,
        name: str,
        row: Mapping[str, Any],
        made: tuple[np.ndarray, np.ndarray | None],
    ) -> np.ndarray | None:
        """Return the mask of a column's tokens with the masks by message of the row.

        Args:
            made: The tokens of the column's function, and its mask.
        Raises:
            DataError: A mask of tokens, which the function cannot have applied.
        """
        for key in (*_MASKS, "labels"):
            if isinstance(row.get(key), (list, np.ndarray)):
                raise DataError(
                    f"{where}: {key}",
                    "must apply to token ids in the row, not to those that --tokenize makes",
                    None,
                    TAKE_ROW,
                )
        if not is_messages(row[name]):
            return made[1]
        at = f"{where}: --tokenize {name}"

        def tokens_of(messages: Sequence[Any]) -> np.ndarray:
            tokens: np.ndarray = self._made(at, name, {**row, name: messages})[0]["tokens"]
            return tokens

        return apply_losses(where, row, row[name], made, tokens_of)


def _shown(function: str | Callable[..., Any]) -> str:
    if isinstance(function, str):
        return function
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{getattr(function, '__module__', '')}:{name}"


def _takes_row(function: Callable[..., Any]) -> bool:
    """Return whether a function has a parameter `row`; some functions in C have no signature."""
    with suppress(TypeError, ValueError):
        return "row" in inspect.signature(function).parameters
    return False


def _group_number(where: str, group: str | int) -> int:
    """Return the number of a group id; for a text that is no number, 63 bits of its SHA-256."""
    if not isinstance(group, str):
        return int(group)
    if group.isdecimal() and len(group) < 20 and str(int(group)) == group and int(group) < 1 << 63:
        return int(group)
    digest = hashlib.sha256(byte_string(group, where)).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def _first(row: Mapping[str, Any], names: Sequence[str]) -> str | None:
    return next((name for name in names if name in row), None)


def _array(where: str, name: str, value: Any, length: int | None = None) -> np.ndarray:
    array = numeric(value)
    if array is None and (place := null_place(value)) is not None:
        raise DataError(
            f"{where}: {name}{place}", "must not be null", remedy="fill it, or leave the row out"
        )
    if array is None or array.ndim != 1 or (length is not None and len(array) != length):
        each = "" if length is None else f", one for each of {length} tokens"
        shown = type(value).__name__ if array is None else list(array.shape)
        raise DataError(
            f"{where}: {name}",
            f"must be a list of numbers{each}",
            shown,
            "store it as a list of numbers",
        )
    return array


def _value(where: str, name: str, value: Any) -> float:
    array = numeric(value)
    if array is None or array.ndim:
        raise DataError(
            f"{where}: {name}", "must be a number", type(value).__name__, "store it as a number"
        )
    return float(array)


def _from_ids(where: str, row: dict[str, Any]) -> dict[str, Any]:
    """Return a row of token ids with its columns per token, without padding.

    Columns of the response's length get zeros for the prompt: with 2 + 3 tokens, the
    log-probabilities [a, b, c] become [0, 0, a, b, c].
    """
    row = dict(row)
    prompt, response, whole = (
        None if (name := _first(row, names)) is None else _array(where, name, row.pop(name))
        for names in (_PROMPT, _RESPONSE, _WHOLE)
    )
    if whole is None and response is None:
        raise DataError(where, "must have token ids", ", ".join(row), _MAKE_TOKENS)
    parts = [prompt, response] if whole is None else [whole]
    tokens = np.concatenate([part for part in parts if part is not None])
    if response is not None and len(tokens) < len(response):
        raise DataError(
            where,
            f"must have at least the {len(response)} tokens of its response",
            len(tokens),
            "store the tokens of the prompt and of the response in the row",
        )
    before = 0 if response is None else len(tokens) - len(response)
    columns = {"tokens": tokens}
    for name, value in row.items():
        array = numeric(value)
        if array is not None and array.shape in ((len(tokens),), (len(tokens) - before,)):
            columns[name] = np.concatenate([np.zeros(len(tokens) - len(array), array.dtype), array])
    if (mask := _first(row, (*_MASKS, "labels"))) is None:
        columns["loss_mask"] = np.arange(len(tokens)) >= before
    else:
        array = _array(where, mask, columns.pop(mask, row[mask]), len(tokens))
        columns["loss_mask"] = array != (_NO_LOSS if mask == "labels" else 0)
    if (logp := _first(row, _LOGP)) is not None:
        columns["logp"] = _array(where, logp, columns.pop(logp, row[logp]), len(tokens))
    kept = np.arange(len(tokens)) < _value(
        where, "input_lengths", row.pop("input_lengths", len(tokens))
    )
    kept &= _array(where, "attention_mask", columns.pop("attention_mask", kept), len(tokens)) != 0
    used = {*columns, mask, logp, "attention_mask"}
    rest = {name: value for name, value in row.items() if name not in used}
    return {**rest, **{name: array[kept] for name, array in columns.items()}}


def _message_parts(where: str, row: Mapping[str, Any], messages: list[Any]) -> list[dict[str, Any]]:
    """Return the tokens of each message, with their loss masks.

    A message has loss where the source's masks mark it, else where it was generated
    (`message_masks.generated`).
    """
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise DataError(
                f"{where}: message {number}",
                "must be an object",
                type(message).__name__,
                "write each message as an object with role and content",
            )
    given = [{key: one for key, one in message.items() if one is not None} for message in messages]
    parts = []
    scored = any(LOGP in message for message in given)
    losses = message_losses(where, row, given)
    have_loss = with_default(losses, generated(given))
    for number, message in enumerate(given):
        at = f"{where}: message {number}"
        tokens = _array(at, "token_ids", message.get("token_ids", []))
        mask = message.get("token_loss_mask", np.full(len(tokens), have_loss[number]))
        mask = _array(at, "token_loss_mask", mask, len(tokens)) != 0
        part = {"tokens": tokens, "loss_mask": mask & (losses[number] is not False)}
        if scored:
            part["logp"] = _array(at, LOGP, message.get(LOGP, np.zeros(len(tokens))), len(tokens))
        parts.append(part)
    return parts


def _joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Concatenate the parts of a row; without a mask, only the last part has loss."""
    for part in parts:
        part.setdefault("loss_mask", np.full(len(part["tokens"]), part is parts[-1]))
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
