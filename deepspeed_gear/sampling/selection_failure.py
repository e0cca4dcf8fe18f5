"""Failure record of a selection: from the process that makes a node's selections to those that wait."""

from __future__ import annotations

from typing import Final

import numpy as np

from deepspeed_gear.outcome import Outcome
from deepspeed_gear.sampling.stream_spec import StreamSpec
from deepspeed_gear.store.table import Table


class FailureRecord:
    """Words before the outcome of a failed selection."""

    NUMBER: Final = 0
    KEY: Final = 1
    NUM_WORDS: Final = 2


class SelectionFailure:
    """The latest failure of a stream on this node. Process safe: takes the table's lock itself.

    Args:
        spec: The stream.
        table: Its table.
    """

    def __init__(self, spec: StreamSpec, table: Table) -> None:
        self._lock, self._words = table.lock, table.views[spec.at + "notice"]
        self._outcome: np.ndarray = self._words[FailureRecord.NUM_WORDS :]
        self._seen = 0  # number of the latest one that this process has raised, or written

    def write(self, key: int, error: Exception) -> None:
        """Record the failure of a global batch's selection."""
        with self._lock:
            self._outcome[:] = Outcome.of(error).words(len(self._outcome))
            self._words[FailureRecord.KEY] = key
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
            outcome = Outcome.read(self._outcome)
        self._seen = number
        if failed == key:
            raise outcome.error("the first rank of this node", is_own=True)
