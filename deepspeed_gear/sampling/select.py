"""`select`: decides the samples of a global batch and commits them as an entry of the ring.

Order of writes, so that a process may die at any instruction: priority updates and queued masses to the tree
(repeatable), the samples to a ring entry marked empty, then the entry's key (the commit point), then the
position.

Ranks that sample concurrently would wait for each other's selections in every step. So they draw for the next
one in advance, in turn, as long as nothing has changed: Position.AHEAD is the global batch whose draws are
already in its ring entry. Any change discards them; the first rank that requests the batch selects it.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from deepspeed_gear.errors import ConfigError, StoreError
from deepspeed_gear.ops.constants import MOST_TOTAL_BITS
from deepspeed_gear.ops.records import Resolution
from deepspeed_gear.sampling.exclusions import summary_of
from deepspeed_gear.sampling.local_selector import LocalSelector
from deepspeed_gear.sampling.rate_limiting import NothingToSampleError
from deepspeed_gear.sampling.samplers.base import NativeDraw
from deepspeed_gear.sampling.samplers.uniform import stratify_
from deepspeed_gear.sampling.selection import PASS_SHIFT
from deepspeed_gear.sampling.stream_state import StreamState
from deepspeed_gear.store.stream_records import NOTHING, Head, Position

_WORDS_AFTER_KEY = struct.Struct(f"={Head.NUM_SET - 1}q")


@dataclass
class _Draw:
    """Input of a sampler over a stream's state: `samplers.base.Draw`."""

    state: StreamState
    selector: LocalSelector
    count: int
    first: int
    total: int
    epoch: int = 0
    at: int = 0

    def random(self) -> torch.Tensor:
        spec, coordinates = self.state.spec, torch.empty(self.count, dtype=torch.int64)
        self.state.ops.draw_(coordinates, spec.seed, spec.key, self.first, self.total)
        return coordinates

    def permuted(self) -> torch.Tensor:
        spec, coordinates = self.state.spec, torch.empty(self.count, dtype=torch.int64)
        self.state.ops.permute_(coordinates, spec.seed, spec.key, self.epoch, self.at, self.total)
        return coordinates

    def highest_priorities(self) -> torch.Tensor:
        return self.selector.highest(self.count)

    def oldest(self) -> torch.Tensor:
        return self.selector.extreme(self.count, newest=False)

    def newest(self) -> torch.Tensor:
        return self.selector.extreme(self.count, newest=True)


class SelectionMaker:
    """Makes the selections of a batch stream in this process.

    Process safety: `select` and `draw_ahead` require the table's lock where the selector is `in_store`.

    Args:
        state: Of the stream.
        selector: The items, of this store or of all nodes.
    """

    def __init__(self, state: StreamState, selector: LocalSelector) -> None:
        self._state, self._selector, self._spec, self._ops = state, selector, state.spec, state.ops
        self._sampler, self._native = state.spec.sampler, state.spec.sampling.native
        self._coordinates = torch.empty(state.spec.batch, dtype=torch.int64)
        self._sampled_masses = [entry[:, Resolution.MASS] for entry in state.drawn_words]
        limiter = state.limiter
        self._counting = limiter if limiter is not None and limiter.most else None

    def select(self, key: int, entry: int, check: Callable[[], None]) -> None:
        """Make and commit the selection of a global batch.

        Args:
            key: Its number.
            entry: Of the ring.
            check: Raises where a wait for other nodes must end.
        Raises:
            NothingToSampleError: Too few items have a mass.
            RateLimitedError: The rate limiter of all nodes admits no selection yet.
        """
        state, selector = self._state, self._selector
        rows, count = self._rows(key, entry)
        head = state.head_words[entry]
        head[Head.KEY] = NOTHING
        after: list[int] = state.words[: Head.NUM_SET].tolist()
        self._begin(key, after)
        selector.begin(key, entry, count, check)
        if self._sampler.walks:
            self._walk(key, rows, state.drawn[entry][1], after)
        elif count:
            is_ahead = state.words[Position.AHEAD] == key and not state.masses.waiting
            after[Head.TOTAL] = self._checked(selector.apply(key))
            if self._counting is not None and not self._sampler.each_once:
                self._sample_counting(rows, after[Head.SAMPLES])
            elif not is_ahead:
                self._sample(rows, count, after[Head.SAMPLES], after[Head.TOTAL])
            if selector.in_store:
                state.pin(key, rows)
        num_records = selector.finish(entry, count)
        if count and state.priorities is not None:
            masses = self._sampled_masses[entry][:count]
            after[Head.NUMERATOR : Head.EXPONENT + 1] = selector.weigh(key, masses, after[Head.TOTAL])
        after[Head.KEY], after[Head.COUNT] = key + 1, num_records
        after[Head.SAMPLES] += count
        if selector.in_store:
            self._commit(key, entry, after)
        else:
            with state.table.lock:
                self._commit(key, entry, after)

    def _commit(self, key: int, entry: int, after: list[int]) -> None:
        state, head = self._state, self._state.head_words[entry]
        _WORDS_AFTER_KEY.pack_into(head, head.itemsize, *after[1:])
        samples = state.ring_words[entry, : after[Head.COUNT]]
        if self._counting is not None:
            self._counting.count(self._selector.own_samples(samples))
        head[Head.KEY] = key  # the commit point
        state.advance(entry)
        if self._counting is not None:
            self._counting.evict_used_up()
        if state.counts is not None and self._selector.counts_draws:
            state.counts.count(samples)

    def draw_ahead(self, key: int) -> None:
        """Draw for the next selection, if no change is waiting that precedes it.

        The caller has checked that every process has released its ring entry.
        """
        state, words = self._state, self._state.words
        if self._native is None or self._spec.count is not None:  # a count may fail, or be 0
            return
        if words[Head.KEY] != key or words[Position.AHEAD] == key or state.masses.waiting:
            return
        entry = key % self._spec.depth
        state.head_words[entry][Head.KEY] = NOTHING
        total = state.masses.total
        if total:
            self._sample(*self._rows(key, entry), words[Head.SAMPLES], total)
            words[Position.AHEAD] = key

    # ---- samples ---------------------------------------------------------------------------------

    def _rows(self, key: int, entry: int) -> tuple[torch.Tensor, int]:
        """Return the places of the items that a selection draws, and their number."""
        rows, count = self._state.drawn[entry][0], self._spec.num_samples(key)
        return (rows if count == self._spec.batch else rows[:count]), count

    def _sample(self, rows: torch.Tensor, count: int, first: int, total: int) -> None:
        self._selector.resolve(rows, 0, self._drawn(count, first, total), first)

    def _drawn(self, count: int, first: int, total: int) -> torch.Tensor:
        """Return coordinates from the native op, or from the sampler. [count], int64."""
        if self._native is None:
            return self._called(_Draw(self._state, self._selector, count, first, total))
        coordinates = self._coordinates if count == self._spec.batch else self._coordinates[:count]
        self._ops.draw_(coordinates, self._spec.seed, self._spec.key, first, total)
        if self._native is NativeDraw.STRATIFIED:
            stratify_(coordinates, total)
        return coordinates

    def _called(self, draw: _Draw) -> torch.Tensor:
        """Call the sampler and check its coordinates.

        Raises:
            NothingToSampleError: There are fewer items than samples.
            ConfigError: It has not returned coordinates.
        """
        found: Any = self._sampler.sample(draw)
        good = isinstance(found, torch.Tensor) and found.dtype == torch.int64 and found.dim() == 1
        if not good or len(found) > draw.count or bool(((found < 0) | (found >= draw.total)).any()):
            rule = f"must sample at most {draw.count} coordinates in [0, {draw.total}), as int64"
            shown = f"{found.dtype} {list(found.shape)}" if isinstance(found, torch.Tensor) else found
            raise ConfigError(f"sampler {self._sampler.kind}", rule, shown)
        if len(found) < draw.count:
            raise NothingToSampleError(
                StoreError(
                    f"stream {self._spec.name}: table {self._state.table.spec.name}",
                    f"must hold as many items as a global batch ({draw.count}), each with a mass",
                    len(found),
                    "lower the batch size, or add trajectories first",
                )
            )
        coordinates: torch.Tensor = found
        return coordinates

    def _sample_counting(self, rows: torch.Tensor, first: int) -> None:
        """Draw samples as if one by one, where a used-up trajectory leaves the tree at once.

        Source of the semantics: Reverb's `max_times_sampled`.
        """
        limiter, done = self._counting, 0
        counted = np.zeros(self._state.masses.num_items, np.int64)
        assert limiter is not None
        while done < len(rows):
            try:
                total = self._checked(self._selector.total)
            except NothingToSampleError as empty:  # masses set to 0 stay so: no retry
                raise empty.error from None
            coordinates = self._drawn(len(rows) - done, first + done, total)
            done += self._selector.resolve_until(rows, done, coordinates, first + done, limiter, counted)

    # ---- epochs ----------------------------------------------------------------------------------

    def _begin(self, key: int, after: list[int]) -> None:
        """Reset the words of a pass when a new pass begins."""
        after[Head.FILLERS] = 0
        if not self._sampler.is_pass:
            return
        if key >> PASS_SHIFT != self._state.words[Head.KEY] >> PASS_SHIFT:
            after[Head.SAMPLES] = after[Head.EPOCH_FIRST] = after[Head.EPOCH_SIZE] = 0
        after[Head.EPOCH] = key >> PASS_SHIFT

    def _walk(self, key: int, rows: torch.Tensor, epochs: torch.Tensor, after: list[int]) -> None:
        """Resolve the next items of an epoch; at its end, apply queued masses and begin the next epoch.

        A selection that fails or dies after that point cannot resolve the old epoch's last items again, since
        the tree has changed: it continues after them (Position.DONE), as their resolutions are in the ring.

        An epoch is of the items that were there when it began and still are. Of evicted ones the masses stay,
        so that coordinates keep their meaning; they are skipped, and the epoch moves forward by as many.
        """
        state, selector, sampler = self._state, self._selector, self._sampler
        has_ended, count = state.words[Position.DONE] > 0, len(rows)
        done = max(state.words[Position.DONE] - 1, 0)
        end = after[Head.EPOCH_FIRST] + after[Head.EPOCH_SIZE]
        if sampler.drops_tail and done == 0 and after[Head.SAMPLES] + count > end:
            after[Head.SAMPLES] = end
        while done < count:
            at = after[Head.SAMPLES] + done - after[Head.EPOCH_FIRST]
            if at >= after[Head.EPOCH_SIZE] or has_ended:
                has_ended = False
                if sampler.drops_tail and done:  # items were skipped, so that the rest fills no batch
                    selector.drop()
                    after[Head.SAMPLES], done = after[Head.SAMPLES] + done, 0
                if sampler.is_pass and after[Head.EPOCH_SIZE] > 0:
                    after[Head.FILLERS] = max(after[Head.FILLERS], count - done)
                else:
                    self._begin_epoch(key, done, after)
                at = 0  # in a pass: fillers repeat the first items and are marked as such
            n = min(count - done, after[Head.EPOCH_SIZE] - at)
            first = after[Head.SAMPLES] + done
            draw = _Draw(state, selector, n, first, after[Head.EPOCH_SIZE], after[Head.EPOCH], at)
            left = selector.walk(rows, done, sampler.sample(draw), first)
            epochs[done : done + left] = after[Head.EPOCH]
            after[Head.EPOCH_FIRST] -= n - left
            if state.walked is not None:
                after[Head.SKIPPED] += n - left
            if selector.in_store:
                state.pin(key, rows[done : done + left])
            if after[Head.FILLERS]:
                after[Head.EPOCH_FIRST] = first + n - after[Head.EPOCH_SIZE]
            done += left

    def _begin_epoch(self, key: int, done: int, after: list[int]) -> None:
        if after[Head.EPOCH_SIZE] > 0:
            after[Head.EPOCH] += 1
        after[Head.EPOCH_FIRST] = after[Head.SAMPLES] + done
        if self._selector.in_store and self._state.masses.waiting:
            self._state.words[Position.DONE] = 1 + done
        size = self._checked(self._selector.apply(key))
        with contextlib.nullcontext() if self._selector.in_store else self._state.table.lock:
            self._state.begin_epoch()
        after[Head.EPOCH_SIZE] = after[Head.TOTAL] = size
        if self._sampler.drops_tail and size < self._spec.batch:
            raise NothingToSampleError(
                StoreError(
                    f"stream {self._spec.name}: an epoch",
                    f"must hold a global batch ({self._spec.batch} items) where its tail is dropped",
                    size,
                    'lower the batch size, or use sampler.tail = "wrap"',
                )
            )

    def _checked(self, total: int) -> int:
        """Return the sum of all masses if samples can be drawn from it."""
        name, table = f"stream {self._spec.name}", self._state.table
        if total == 0:
            # A selection of one store is made under the lock, one over several nodes without it.
            with contextlib.nullcontext() if self._selector.in_store else table.lock:
                held, remedy = summary_of(self._state.masses)
            rule = "must hold at least one item that the sampler admits"
            error = StoreError(
                f"{name}: table {table.spec.name}", rule, held, remedy or "add trajectories first"
            )
            raise NothingToSampleError(error)
        if not 0 < total < 1 << MOST_TOTAL_BITS:
            rule = f"must be below 2^{MOST_TOTAL_BITS}"
            raise StoreError(f"{name}: the total mass", rule, total, "give smaller masses or priorities")
        return total
