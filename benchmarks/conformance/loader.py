"""Batches that the workers of a DataLoader draw; imported where there is torch."""

from __future__ import annotations

from collections.abc import Iterator

from peers.interface import Array, StepBuffer
from torch.utils.data import DataLoader, IterableDataset


class Drawn(IterableDataset[Array]):
    """Batches of one buffer, of which each worker has its own copy."""

    def __init__(self, buffer: StepBuffer, num_batches: int) -> None:
        self._buffer, self._num_batches = buffer, num_batches

    def __iter__(self) -> Iterator[Array]:
        return (self._buffer.sample().obs for _ in range(self._num_batches))


def by_workers(buffer: StepBuffer, num_workers: int, num_batches: int) -> list[Array]:
    """Return so many batches of each worker."""
    drawn = Drawn(buffer, num_batches)
    loader = DataLoader(drawn, batch_size=None, num_workers=num_workers, multiprocessing_context="fork")
    return list(loader)
