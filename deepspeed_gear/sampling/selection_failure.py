"""Failure record of a selection: from the process that makes a node's selections to those that wait."""

from __future__ import annotations

from typing import Final

import numpy as np

from deepspeed_gear.errors import EmptyTableError, GearError, NotReadyError, PeerError, StoreError, relayed
from deepspeed_gear.sampling.stream_spec import FAILURE_WORDS, StreamSpec
from deepspeed_gear.store.table import Table

_KINDS: tuple[type[GearError], ...] = (
    EmptyTableError,
    NotReadyError,
    StoreError,
    PeerError,
)  # types that other processes raise: the first that fits
_TEXT_BYTES = 8 * (FAILURE_WORDS - 4)


class FailureRecord:
    """Words before the text of a failure."""

    NUMBER: Final = 0
    KEY: Final = 1
    KIND: Final = 2
    NUM_BYTES: Final = 3


class SelectionFailure:
    """The latest failure of a stream on this node. Process safe: takes the table's lock itself.

    Args:
        spec: The stream.
        table: Its table.
    """

    def __init__(self, spec: StreamSpec, table: Table) -> None:
        words: np.ndarray = table.views[spec.at + "notice"]
        self._lock, self._words, self._text = table.lock, words, words[4:].view(np.uint8)
        self._seen = 0  # number of the latest one that this process has raised, or written

    def write(self, key: int, error: Exception) -> None:
        """Record the failure of a global batch's selection."""
        text = (str(error) if isinstance(error, GearError) else f"{type(error).__name__}: {error}").encode()
        text = text[:_TEXT_BYTES]
        with self._lock:
            self._text[: len(text)] = np.frombuffer(text, np.uint8)
            self._words[FailureRecord.KEY], self._words[FailureRecord.NUM_BYTES] = key, len(text)
            known = [code for code, kind in enumerate(_KINDS) if isinstance(error, kind)]
            self._words[FailureRecord.KIND] = known[0] if known else len(_KINDS) - 1
            self._words[FailureRecord.NUMBER] += 1
            self._seen = int(self._words[FailureRecord.NUMBER])

    def forget(self) -> None:
        """Discard the failures recorded until now: their selections are tried again."""
        self._seen = int(self._words[FailureRecord.NUMBER])

    def check(self, key: int) -> None:
        """Raise, once, the recorded failure of a global batch's selection.

        Raises:
            StoreError: No selection can be made, as without items, until contents or priorities change.
            NotReadyError: The table's rate limiter admits no selection yet.
            PeerError: Another rank has failed.
        """
        if self._words[FailureRecord.NUMBER] == self._seen:
            return
        with self._lock:
            number, failed = int(self._words[FailureRecord.NUMBER]), int(self._words[FailureRecord.KEY])
            text = bytes(self._text[: self._words[FailureRecord.NUM_BYTES]]).decode(errors="replace")
            kind = _KINDS[self._words[FailureRecord.KIND]]
        self._seen = number
        if failed == key:
            raise relayed(kind, text, "the first rank of this node")
