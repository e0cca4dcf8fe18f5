"""Outcome: the error of a rank or node as the others read it, from shared memory or
from a message.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from deepspeed_gear.errors import (
    EmptyTableError,
    GearError,
    NotReadyError,
    PeerError,
    StoreError,
    relayed,
)

_KINDS: tuple[type[GearError], ...] = (PeerError, EmptyTableError, NotReadyError, StoreError)
_HEAD_WORDS = 2  # kind, bytes of the text


@dataclass(frozen=True)
class Outcome:
    """A failure of another rank's or node's part of something that all do."""

    kind: int  # place in `_KINDS` of the first type that fits
    text: str  # with the name of the error's type where that is none of this package

    @classmethod
    def of(cls, error: BaseException) -> Outcome:
        """Return the outcome of an action that has raised an error."""
        text = str(error) if isinstance(error, GearError) else f"{type(error).__name__}: {error}"
        return cls(
            next((code for code, kind in enumerate(_KINDS) if isinstance(error, kind)), 0), text
        )

    def words(self, count: int) -> np.ndarray:
        """Return the kind, the text's number of bytes, and what fits of the text.
        [count], int64.
        """
        found = np.zeros(count, np.int64)
        text = self.text.encode()[: 8 * (count - _HEAD_WORDS)]
        found[:_HEAD_WORDS] = self.kind, len(text)
        found[_HEAD_WORDS:].view(np.uint8)[: len(text)] = np.frombuffer(text, np.uint8)
        return found

    @classmethod
    def read(cls, words: np.ndarray) -> Outcome:
        """Return the outcome that `words` has returned. [count], int64, contiguous."""
        text = words[_HEAD_WORDS:].view(np.uint8)[: words[1]].tobytes()
        return cls(int(words[0]), text.decode(errors="replace"))

    def error(self, where: str, is_own: bool = False) -> GearError:
        """Return the error to raise here, with `where`: the rank or node that has failed, and what
        it did. A PeerError, or a NotReadyError where the same call may succeed later; its own type
        if it `is_own`: it failed in this rank's place too.
        """
        kind = _KINDS[self.kind]
        if not is_own:
            kind = NotReadyError if issubclass(kind, NotReadyError) else PeerError
        return relayed(kind, self.text, where)
