"""The error of a rank or node, as other ranks read it from shared memory or a message."""

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
_HEAD_WORDS = 2  # the kind, and the bytes of the text


@dataclass(frozen=True)
class Outcome:
    """A failure of another rank or node in an operation that all of them take part in."""

    kind: int  # index in `_KINDS` of the first type that the error is an instance of
    text: str  # the message; "TypeName: message" for errors that are none of this package

    @classmethod
    def of(cls, error: BaseException) -> Outcome:
        """Return the outcome of an operation that raised an error."""
        text = str(error) if isinstance(error, GearError) else f"{type(error).__name__}: {error}"
        kind = next((code for code, kind in enumerate(_KINDS) if isinstance(error, kind)), 0)
        return cls(kind, text)

    def words(self, count: int) -> np.ndarray:
        """Encode the outcome as [kind, bytes of the text, text...], cut to fit. [count], int64."""
        words = np.zeros(count, np.int64)
        text = self.text.encode()[: 8 * (count - _HEAD_WORDS)]
        words[:_HEAD_WORDS] = self.kind, len(text)
        words[_HEAD_WORDS:].view(np.uint8)[: len(text)] = np.frombuffer(text, np.uint8)
        return words

    @classmethod
    def read(cls, words: np.ndarray) -> Outcome:
        """Decode what `words` encoded. [count], int64, contiguous."""
        text = words[_HEAD_WORDS:].view(np.uint8)[: words[1]].tobytes()
        return cls(int(words[0]), text.decode(errors="replace"))

    def error(self, where: str, is_own: bool = False) -> GearError:
        """Return the error to raise on this rank.

        It is a PeerError, or a NotReadyError where the same call may succeed later.

        Args:
            where: The rank or node that failed, and the operation.
            is_own: The failure is this rank's as well, so the error keeps its own type.
        """
        kind = _KINDS[self.kind]
        if not is_own:
            kind = NotReadyError if issubclass(kind, NotReadyError) else PeerError
        return relayed(kind, self.text, where)
