"""A tokenizer for the miniatures: the bytes of a text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def encode(text: str) -> list[int]:
    """Return the token ids of a text."""
    return list(text.encode())


def transcript(text: str) -> tuple[list[int], list[bool]]:
    """Return the token ids of a transcript of HH-RLHF; those of the last reply have loss."""
    before, mark, reply = text.rpartition("\n\nAssistant:")
    head = encode(before + mark)
    tokens = encode(reply)
    return head + tokens, [False] * len(head) + [True] * len(tokens)


def chat(messages: Sequence[Mapping[str, Any]]) -> tuple[list[int], list[bool]]:
    """Return the token ids of a chat, and which of them the assistant has written."""
    ids = []
    has_loss = []
    for message in messages:
        role = message.get("role", message.get("from"))
        tokens = encode(message.get("content", message.get("value")) + "\n")
        ids += tokens
        has_loss += [role in ("assistant", "gpt")] * len(tokens)
    return ids, has_loss
