"""The control plane between ranks: agreement, errors on all ranks, barriers. The only module that uses
groups.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from deepspeed_gear.errors import GearError, PeerError

T = TypeVar("T")
SETUP_TIMEOUT_S = 900.0  # building the op, loading a data set


class Exchange:
    """Collectives over a gloo group of its own, or over nobody without torch.distributed.

    Thread safety: main thread only. Every method is collective: all ranks call it, in the same order.

    Args:
        process_group: Whose ranks take part; None for all, and for a single process without
            torch.distributed.
        timeout_s: Longest wait for another rank, in seconds.
    """

    def __init__(self, process_group: Any = None, timeout_s: float = SETUP_TIMEOUT_S) -> None:
        self.rank, self.world_size = 0, 1
        self._group: Any = None
        if not (dist.is_available() and dist.is_initialized()):
            return
        self.rank, self.world_size = dist.get_rank(process_group), dist.get_world_size(process_group)
        if self.world_size > 1:
            ranks = None if process_group is None else dist.get_process_group_ranks(process_group)
            timeout = timedelta(seconds=max(timeout_s, SETUP_TIMEOUT_S))
            self._group = dist.new_group(
                ranks=ranks, backend="gloo", timeout=timeout, use_local_synchronization=True
            )

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value, in the order of ranks."""
        if self._group is None:
            return [value]
        values: list[Any] = [None] * self.world_size
        try:
            dist.all_gather_object(values, value, group=self._group)
        except RuntimeError as error:
            text = str(error).splitlines()[0]
            raise PeerError(
                "a rank", "must answer", text, "look for the first error in the other ranks' logs"
            ) from error
        return values

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """Return the value of one rank."""
        return self.gather(value if self.rank == source else None)[source]

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.gather(None)

    def agree(self, what: str, action: Callable[[], T]) -> T:
        """Do something on every rank; if it fails on one, fail on all.

        Args:
            what: Names the action in the error of the other ranks.
            action: Must contain no collective.
        Returns:
            The action's result on this rank.
        Raises:
            Exception: What `action` raised here.
            PeerError: It failed on another rank; the text holds that rank's error.
        """
        result, error = None, None
        try:
            result = action()
        except Exception as caught:  # whatever it is, the other ranks must hear of it
            error = caught
        texts = self.gather(None if error is None else _text(error))
        if error is not None:
            raise error
        for rank, text in enumerate(texts):
            if text is not None:
                raise PeerError(f"rank {rank}: {what}", "must succeed on every rank", None, text)
        return result  # type: ignore[return-value]

    def close(self) -> None:
        """Leave the group."""
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None


def _text(error: Exception) -> str:
    return str(error) if isinstance(error, GearError) else f"{type(error).__name__}: {error}"
