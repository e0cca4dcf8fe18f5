"""How a cut fills its entry of the ring: draws, the first items of an order, walks through epochs."""

from __future__ import annotations

import contextlib

import numpy as np
import torch

from deepspeed_gear.errors import StoreError
from deepspeed_gear.ops import Ops
from deepspeed_gear.ops.constants import MOST_TOTAL_BITS
from deepspeed_gear.ops.records import Resolution
from deepspeed_gear.sampling.exclusions import summary_of
from deepspeed_gear.sampling.local_selector import LocalSelector
from deepspeed_gear.sampling.rate_gate import EmptyError, RateGate
from deepspeed_gear.sampling.samplers.prioritized import PriorityMasses
from deepspeed_gear.sampling.selection import PASS_SHIFT, StreamSpec
from deepspeed_gear.sampling.stream_kinds import stratify_
from deepspeed_gear.sampling.sum_tree import ItemMasses
from deepspeed_gear.store.stream_records import Head, Position
from deepspeed_gear.store.table import Table


class Drawing:
    """The part of a stream that chooses samples, which is made by `Stream`. Every method wants the lock."""

    spec: StreamSpec
    table: Table
    ops: Ops
    masses: ItemMasses
    selector: LocalSelector
    position: np.ndarray
    has_item_masses: bool
    last_drawn: np.ndarray | None
    _words: memoryview
    _coordinates: torch.Tensor
    _gate: RateGate | None

    def pin(self, key: int, records: torch.Tensor) -> None:
        """Keep what a cut has drawn from being freed until all processes have consumed it. Wants the lock.

        Args:
            key: Of the cut.
            records: Resolutions, with slots of this store. [n, 8], int64.
        """
        if self.last_drawn is not None:
            self.last_drawn[records[:, Resolution.SLOT].numpy()] = key

    def _draw(self, rows: torch.Tensor, count: int, first: int, total: int) -> None:
        coordinates = self._coordinates if count == self.spec.batch else self._coordinates[:count]
        self.ops.draw_(coordinates, self.spec.seed, self.spec.key, first, total)
        if self.spec.kind == "stratified":
            stratify_(coordinates, total)
        self.selector.resolve(rows, 0, coordinates, first)

    def _draw_limited(self, rows: torch.Tensor, first: int) -> None:
        """Draw one sample after the other, as if each that uses a trajectory up took it out of the tree.

        Source: of the semantics: Reverb's `max_times_sampled`.
        """
        gate, done, counted = self._gate, 0, np.zeros(self.masses.num_items, np.int64)
        assert gate is not None
        while done < len(rows):
            coordinates = self._coordinates[: len(rows) - done]
            try:
                total = self._checked(self.selector.total)
            except EmptyError as empty:  # what was taken out stays so: this cut cannot be tried again
                raise empty.error from None
            self.ops.draw_(coordinates, self.spec.seed, self.spec.key, first + done, total)
            done += self.selector.resolve_until(rows, done, coordinates, first + done, gate, counted)

    def _take_first(self, rows: torch.Tensor, first: int) -> None:
        """Take the items of highest priority, the oldest or the newest ones."""
        if isinstance(self.masses, PriorityMasses):
            coordinates = self.selector.highest(len(rows))
        else:
            coordinates = self.selector.extreme(len(rows), self.spec.kind == "newest")
        if len(coordinates) < len(rows):
            raise EmptyError(
                StoreError(
                    f"stream {self.spec.name}: table {self.table.spec.name}",
                    f"must hold as many items as a global batch ({len(rows)}), each with a mass",
                    len(coordinates),
                    "lower the batch size, or add trajectories first",
                )
            )
        self.selector.resolve(rows, 0, coordinates, first)

    def _begin(self, key: int, after: list[int]) -> None:
        """Reset what belongs to one pass when a new pass begins."""
        after[Head.FILLERS] = 0
        if self.spec.kind == "pass" and key >> PASS_SHIFT != int(self.position[Head.KEY]) >> PASS_SHIFT:
            after[Head.SAMPLES] = after[Head.EPOCH_FIRST] = after[Head.EPOCH_SIZE] = 0
        if self.spec.kind == "pass":
            after[Head.EPOCH] = key >> PASS_SHIFT

    def _walk(
        self, key: int, rows: torch.Tensor, epochs: torch.Tensor, coordinates: torch.Tensor, after: list[int]
    ) -> None:
        """Visit items in an order; at the end of an epoch the queue is applied and the next one begins.

        A cut that fails or dies after that point cannot resolve the old epoch's last items again, since the
        tree has changed: it continues after them (Position.DONE): their resolutions lie in the ring already.
        """
        done, count = self._words[Position.DONE], len(rows)
        if (
            self.spec.drop
            and done == 0
            and after[Head.SAMPLES] + count > after[Head.EPOCH_FIRST] + after[Head.EPOCH_SIZE]
        ):
            after[Head.SAMPLES] = after[Head.EPOCH_FIRST] + after[Head.EPOCH_SIZE]
        while done < count:
            at = after[Head.SAMPLES] + done - after[Head.EPOCH_FIRST]
            if at >= after[Head.EPOCH_SIZE]:
                if self.spec.kind == "pass" and after[Head.EPOCH_SIZE] > 0:
                    after[Head.FILLERS] = max(after[Head.FILLERS], count - done)
                    at = 0  # fillers repeat the first items and are marked as such
                else:
                    if after[Head.EPOCH_SIZE] > 0:
                        after[Head.EPOCH] += 1
                    after[Head.EPOCH_FIRST] = after[Head.SAMPLES] + done
                    if self.selector.in_store and self.masses.waiting:
                        self.position[Position.DONE] = done
                    after[Head.EPOCH_SIZE] = after[Head.TOTAL] = self._checked(self.selector.apply(key))
                    if self.spec.drop:
                        self._check_epoch(after[Head.EPOCH_SIZE])
                    at = 0
            n = min(count - done, after[Head.EPOCH_SIZE] - at)
            part = coordinates[done : done + n]
            epochs[done : done + n] = after[Head.EPOCH]
            if self.spec.kind == "epoch":
                size, epoch = after[Head.EPOCH_SIZE], after[Head.EPOCH]
                self.ops.permute_(part, self.spec.seed, self.spec.key, epoch, at, size)
            else:
                torch.arange(at, at + n, out=part)
            self.selector.resolve(rows, done, part, after[Head.SAMPLES] + done)
            if self.selector.in_store:
                self.pin(key, rows[done : done + n])
            if self.spec.kind == "pass" and after[Head.FILLERS]:
                after[Head.EPOCH_FIRST] = after[Head.SAMPLES] + done + n - after[Head.EPOCH_SIZE]
            done += n

    def _checked(self, total: int) -> int:
        """Return the sum of all masses if a cut can draw from it."""
        if total == 0:
            # A cut of one store is made under the lock, one over several nodes without it.
            with contextlib.nullcontext() if self.selector.in_store else self.table.lock:
                held, remedy = summary_of(self.masses)
            raise EmptyError(
                StoreError(
                    f"stream {self.spec.name}: table {self.table.spec.name}",
                    "must hold at least one item that the sampler admits",
                    held,
                    remedy or "add trajectories first",
                )
            )
        if not 0 < total < 1 << MOST_TOTAL_BITS:
            raise StoreError(
                f"stream {self.spec.name}: the total mass",
                f"must be below 2^{MOST_TOTAL_BITS}",
                total,
                "give smaller masses or priorities",
            )
        return total

    def _check_epoch(self, size: int) -> None:
        if size < self.spec.batch:
            raise EmptyError(
                StoreError(
                    f"stream {self.spec.name}: an epoch",
                    f"must hold a global batch ({self.spec.batch} items) where its tail is dropped",
                    size,
                    'lower the batch size, or use sampler.tail = "wrap"',
                )
            )
