"""Selector: decides the samples of a global batch and commits them as an entry of the ring.

A process may die at any instruction: first priority updates and queued masses go to the tree
(repeatable), then samples to a ring entry marked empty, the entry's number (the commit point), and
the position.

Ranks that sample concurrently would wait for each other's selections in every step. So they draw
ahead in turn while nothing changes: Position.AHEAD is the batch whose draws are already in its ring
entry. Any change discards them; the first rank that requests the batch selects it.
"""

from __future__ import annotations

import contextlib
import struct
from typing import Any

import numpy as np
import torch

from deepspeed_gear.errors import ConfigError, StoreError
from deepspeed_gear.ops.constants import MOST_TOTAL_BITS
from deepspeed_gear.ops.records import Resolution, Slot
from deepspeed_gear.sampling.exclusions import summary_of
from deepspeed_gear.sampling.rate_limiting import NothingToSampleError
from deepspeed_gear.sampling.samplers.base import Draw, NativeDraw
from deepspeed_gear.sampling.samplers.kinds import stratify_
from deepspeed_gear.sampling.selection import PASS_SHIFT
from deepspeed_gear.sampling.stream_state import StreamState
from deepspeed_gear.sampling.sum_tree import items_of
from deepspeed_gear.store.records import NOTHING, Head, Position
from deepspeed_gear.store.store_lock import StoreLock

_WORDS_AFTER_NUMBER = struct.Struct(f"={Head.NUM_SET - 1}q")


class LocalSelector:
    """Makes the selections of a stream of one store, whose `lock` is held meanwhile (None: by the
    caller). `select` calls the phases; for several nodes: distributed/sharded_selection.py.
    """

    def __init__(self, state: StreamState, lock: StoreLock | None = None) -> None:
        self.state = state
        self.spec = state.spec
        self.masses = state.masses
        self.lock: contextlib.AbstractContextManager[Any] = (
            contextlib.nullcontext() if lock is None else lock
        )
        self._sampler = state.spec.sampler
        self._native = state.spec.sampling.native
        self._coordinates = torch.empty(state.spec.batch, dtype=torch.int64)
        self._sampled_masses = [entry[:, Resolution.MASS] for entry in state.drawn_words]
        limiter = state.limiter
        self._counting = limiter if limiter is not None and limiter.most else None

    @property
    def total(self) -> int:
        return self.masses.total

    def begin(self, number: int, entry: int, count: int) -> int | None:
        """Begin the selection of a global batch. Returns how many samples of `count` the rate
        limiter admits, all or, of a stream that `is_optional`, none; None: it must wait.
        """
        limiter = self.state.limiter if self.spec.is_optional else None
        return count if limiter is None or limiter.is_open(count) else 0

    def apply(self, number: int) -> int:
        """Apply all changes of masses that precede the selection. Returns their sum."""
        self.masses.apply(number)
        return self.masses.total

    def resolve(self, rows: torch.Tensor, done: int, coordinates: torch.Tensor, first: int) -> None:
        """Resolve coordinates, from sample number `first`, to rows[done:]. [n], int64;
        [count, 8].
        """
        count = coordinates.size(0)  # `len` of a tensor takes ten times as long
        into = rows if count == rows.size(0) else rows[done : done + count]
        with self.lock:
            self.masses.resolve(into, coordinates, first)

    def walk(self, rows: torch.Tensor, done: int, coordinates: torch.Tensor, first: int) -> int:
        """Resolve an epoch's next coordinates but those of evicted items; return how
        many are left.
        """
        self.resolve(rows, done, coordinates, first)
        if self.state.walked is None:
            return coordinates.size(0)
        slots = rows[done : done + coordinates.size(0), Resolution.SLOT].numpy()
        left = torch.from_numpy(~self.state.evicted(slots))
        if not left.all():
            coordinates = coordinates[left]
            self.resolve(
                rows, done, coordinates, first
            )  # with the sample numbers of those that are left
        return coordinates.size(0)

    def drop(self) -> None:
        """Drop the samples of the selection so far: they do not fill a batch at the end of an
        epoch.
        """

    def resolve_until(
        self,
        rows: torch.Tensor,
        done: int,
        coordinates: torch.Tensor,
        first: int,
        counted: np.ndarray,
    ) -> int:
        """Resolve coordinates up to the first that uses up a trajectory, whose mass then becomes 0;
        return their number. The rest must be drawn again. Adds to `counted`, the samples of each
        slot so far, [slots].
        """
        self.resolve(rows, done, coordinates, first)
        slots = rows[done:, Resolution.SLOT].numpy()
        assert self._counting is not None
        standing = min(self._counting.num_admitted(slots, counted) + 1, len(slots))
        if standing < len(slots):
            self._checked(
                self._counting.draws_left(counted) >= len(slots)
            )  # before a mass is set to 0
        np.add.at(counted, slots[:standing], 1)
        if standing < len(slots):
            self.masses.take_out(int(slots[standing - 1]))
        return standing

    @property
    def moments(self) -> np.ndarray:
        """The running moments of all stores, as of the selection. [6, elements], float64."""
        return self.state.table.extents.moments

    def highest(self, count: int) -> torch.Tensor:
        """Return the coordinates of the items of highest priority; fewer if there are fewer items.
        [n].
        """
        masses = self.state.with_priorities
        with self.lock:
            return masses.coordinates_of(masses.highest_items(count))

    def extreme(self, count: int, newest: bool) -> torch.Tensor:
        """Return the coordinates of the oldest or the newest items; or fewer. [n]."""
        _, masses, first = self.state.with_ages.ends(count, newest)
        return items_of(masses, first, count, newest)

    def finish(self, number: int, entry: int, count: int) -> tuple[int, np.ndarray]:
        """Pin the samples of `count` items for the gather.

        Returns the number of resolutions, of groups those of all members, and the resolutions that
        lie in this store, [n, 8], int64.
        """
        with self.lock:
            self.state.pin(number, self.state.drawn[entry][0][:count])
            num_resolutions = self.state.expand(entry, count) if self.spec.by_group else count
            return num_resolutions, self.state.ring_words[entry, :num_resolutions]

    def weigh(self, number: int, drawn: np.ndarray, total: int) -> tuple[int, int, int]:
        """Return numerator, divisor, exponent (Q62): a weight is (numerator / (divisor *
        mass))**exponent.
        """
        masses = self.state.with_priorities
        beta = masses.beta_at(number)
        normalize = masses.rule.normalize
        if normalize == "batch":
            return int(np.minimum.reduce(drawn)), 1, beta  # faster than `min`, which calls it
        if normalize == "table":
            return masses.least, 1, beta
        return total, masses.num_drawable, beta

    def select(self, number: int, entry: int) -> bool:
        """Make and commit a batch's selection; False: the limiter of all nodes does not admit it
        yet. Requires the table's lock where no other node takes part. NothingToSampleError: too few
        items have a mass.
        """
        state = self.state
        head = state.head_words[entry]
        head[Head.NUMBER] = NOTHING
        after: list[int] = state.words[: Head.NUM_SET].tolist()
        after[Head.FILLERS] = 0
        if self._sampler.is_pass:
            after[Head.EPOCH] = number >> PASS_SHIFT
            if after[Head.EPOCH] != state.words[Head.NUMBER] >> PASS_SHIFT:  # a new pass begins
                after[Head.SAMPLES] = after[Head.EPOCH_FIRST] = after[Head.EPOCH_SIZE] = 0
        count = self.begin(number, entry, self.spec.num_samples(number))
        if count is None:
            return False
        rows = self._rows(entry, count)
        if self._sampler.walks:
            self._walk(number, rows, state.drawn[entry][1], after)
        elif count:
            is_ahead = state.words[Position.AHEAD] == number and not state.masses.waiting
            after[Head.TOTAL] = self._checked(self.apply(number))
            if self._counting is not None and not self._sampler.each_once:
                self._sample_counting(rows, after[Head.SAMPLES])
            elif not is_ahead:
                first = after[Head.SAMPLES]
                self.resolve(rows, 0, self._coordinates_of(count, first, after[Head.TOTAL]), first)
        num_resolutions, samples = self.finish(number, entry, count)
        if count and state.priorities is not None:
            masses = self._sampled_masses[entry][:count]
            after[Head.NUMERATOR : Head.EXPONENT + 1] = self.weigh(
                number, masses, after[Head.TOTAL]
            )
        after[Head.NUMBER] = number + 1
        after[Head.COUNT] = num_resolutions
        after[Head.SAMPLES] += count
        with self.lock:
            _WORDS_AFTER_NUMBER.pack_into(head, head.itemsize, *after[1:])
            if self._counting is not None:
                self._counting.count(samples)
            if state.numbers is not None:
                state.numbers[entry] = self.moments
            head[Head.NUMBER] = number  # the commit point
            state.advance(entry)
            if self._counting is not None:
                self._counting.evict_used_up()
            if state.counts is not None:
                state.counts.count(samples)
        return True

    def draw_ahead(self, number: int) -> None:
        """Draw for the next batch if no change precedes it; every process has released its ring
        entry.
        """
        state = self.state
        words = self.state.words
        if self._native is None or self.spec.count is not None:  # a count may fail, or be 0
            return
        if words[Head.NUMBER] != number or words[Position.AHEAD] == number or state.masses.waiting:
            return
        entry = number % self.spec.depth
        state.head_words[entry][Head.NUMBER] = NOTHING
        total = state.masses.total
        if total:
            count = self.spec.batch
            first = words[Head.SAMPLES]
            rows = self._rows(entry, count)
            self.resolve(rows, 0, self._coordinates_of(count, first, total), first)
            words[Position.AHEAD] = number

    def _rows(self, entry: int, count: int) -> torch.Tensor:
        rows: torch.Tensor = self.state.drawn[entry][0]
        return rows if count == self.spec.batch else rows[:count]

    def _coordinates_of(self, count: int, first: int, total: int) -> torch.Tensor:
        """Return coordinates from the native op, or from the sampler, which are checked. [count],
        int64.
        """
        if self._native is not None:
            coordinates = (
                self._coordinates if count == self.spec.batch else self._coordinates[:count]
            )
            self.state.ops.draw_(coordinates, self.spec.seed, self.spec.random_key, first, total)
            if self._native is NativeDraw.STRATIFIED:
                stratify_(coordinates, total)
            return coordinates
        found: Any = self._sampler.sample(Draw(self, count, first, total))
        good = isinstance(found, torch.Tensor) and found.dtype == torch.int64 and found.dim() == 1
        if not good or len(found) > count or bool(((found < 0) | (found >= total)).any()):
            rule = f"must sample at most {count} coordinates in [0, {total}), as int64"
            shown = (
                f"{found.dtype} {list(found.shape)}" if isinstance(found, torch.Tensor) else found
            )
            raise ConfigError(f"sampler {self._sampler.kind}", rule, shown)
        if len(found) < count:
            name = f"stream {self.spec.name}: table {self.state.table.spec.name}"
            rule = f"must hold as many items as a global batch ({count}), each with a mass"
            remedy = "lower the batch size, or add trajectories first"
            raise NothingToSampleError(name, rule, len(found), remedy)
        return torch.as_tensor(found)

    def _sample_counting(self, rows: torch.Tensor, first: int) -> None:
        """Draw as if one by one: a used-up trajectory leaves at once (Reverb's
        `max_times_sampled`).
        """
        done = 0
        counted = np.zeros(self.state.masses.num_items, np.int64)
        while done < len(rows):
            coordinates = self._coordinates_of(
                len(rows) - done, first + done, self._checked(self.total)
            )
            done += self.resolve_until(rows, done, coordinates, first + done, counted)

    def _walk(
        self, number: int, rows: torch.Tensor, epochs: torch.Tensor, after: list[int]
    ) -> None:
        """Resolve the next items of an epoch; at its end, apply queued masses and begin the next
        epoch.

        A selection that fails after that point continues after the old epoch's last items
        (Position.DONE, their resolutions are in the ring), since the tree has changed. Evicted
        items keep their masses, so that coordinates keep their meaning; they are skipped, and the
        epoch moves forward by as many.
        """
        state = self.state
        sampler = self._sampler
        has_ended = state.words[Position.DONE] > 0
        count = len(rows)
        done = max(state.words[Position.DONE] - 1, 0)
        end = after[Head.EPOCH_FIRST] + after[Head.EPOCH_SIZE]
        if sampler.drops_tail and done == 0 and after[Head.SAMPLES] + count > end:
            after[Head.SAMPLES] = end
        while done < count:
            at = after[Head.SAMPLES] + done - after[Head.EPOCH_FIRST]
            if at >= after[Head.EPOCH_SIZE] or has_ended:
                has_ended = False
                if (
                    sampler.drops_tail and done
                ):  # items were skipped, so that the rest fills no batch
                    self.drop()
                    after[Head.SAMPLES], done = after[Head.SAMPLES] + done, 0
                if sampler.is_pass and after[Head.EPOCH_SIZE] > 0:
                    after[Head.FILLERS] = max(after[Head.FILLERS], count - done)
                else:
                    self._begin_epoch(number, done, after)
                at = 0  # in a pass: fillers repeat the first items and are marked as such
            n = min(count - done, after[Head.EPOCH_SIZE] - at)
            first = after[Head.SAMPLES] + done
            draw = Draw(self, n, first, after[Head.EPOCH_SIZE], after[Head.EPOCH], at)
            left = self.walk(rows, done, sampler.sample(draw), first)
            epochs[done : done + left] = after[Head.EPOCH]
            after[Head.EPOCH_FIRST] -= n - left
            if state.walked is not None:
                after[Head.SKIPPED] += n - left
            if after[Head.FILLERS]:
                after[Head.EPOCH_FIRST] = first + n - after[Head.EPOCH_SIZE]
            done += left

    def _begin_epoch(self, number: int, done: int, after: list[int]) -> None:
        if after[Head.EPOCH_SIZE] > 0:
            after[Head.EPOCH] += 1
        after[Head.EPOCH_FIRST] = after[Head.SAMPLES] + done
        if not self.spec.together and self.state.masses.waiting:
            self.state.pin(number, self.state.drawn[number % self.spec.depth][0][:done])
            self.state.words[Position.DONE] = 1 + done
        size = self._checked(self.apply(number))
        with self.lock:
            if self.state.walked is not None:  # the trajectories that the tree has masses of
                self.state.walked[:] = self.state.table.slots[:, Slot.GENERATION]
        after[Head.EPOCH_SIZE] = after[Head.TOTAL] = size
        if self._sampler.drops_tail and size < self.spec.batch:
            rule = f"must hold a global batch ({self.spec.batch} items) where its tail is dropped"
            remedy = 'lower the batch size, or use sampler.tail = "wrap"'
            raise NothingToSampleError(f"stream {self.spec.name}: an epoch", rule, size, remedy)

    def _checked(self, total: int) -> int:
        """Return the sum of all masses if samples can be drawn from it; 0: too few can."""
        name = f"stream {self.spec.name}"
        table = self.state.table
        if total == 0:
            with self.lock:
                held, remedy = summary_of(self.state.masses)
            rule = "must hold at least one item that the sampler admits"
            raise NothingToSampleError(
                f"{name}: table {table.spec.name}", rule, held, remedy or "add trajectories first"
            )
        if not 0 < total < 1 << MOST_TOTAL_BITS:
            rule = f"must be below 2^{MOST_TOTAL_BITS}"
            raise StoreError(
                f"{name}: the total mass", rule, total, "give smaller masses or priorities"
            )
        return total
