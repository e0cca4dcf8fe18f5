"""Selector: draws a global batch's samples, walks epochs, and commits them as an entry of the ring.

A store alone and the stores of several nodes are selected from in one way. Every node computes all
coordinates, and resolves those that fall into its own store. A store that holds all items, alone or
replicated on every node, resolves them in place, in its ring entry. Where items are spread over
nodes, a node keeps its own draws until all are made (`NodeDraws`); then each node gets the
resolutions of the samples that its ranks train on, and the rows that their windows read
(`DrawExchange`).

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
from typing import Any, Protocol

import numpy as np
import torch

from deepspeed_gear.errors import ConfigError, StoreError
from deepspeed_gear.ops.constants import MOST_TOTAL_BITS
from deepspeed_gear.ops.records import Resolution, Slot
from deepspeed_gear.sampling.batch_admission import NothingToSampleError
from deepspeed_gear.sampling.exclusions import summary_of
from deepspeed_gear.sampling.samplers.base import Draw, NativeDraw
from deepspeed_gear.sampling.samplers.kinds import stratify_
from deepspeed_gear.sampling.selection import PASS_SHIFT, NodeDraws, ShardDraws
from deepspeed_gear.sampling.selection_rounds import SelectionRounds
from deepspeed_gear.sampling.stream_state import StreamState
from deepspeed_gear.sampling.sum_tree import items_of
from deepspeed_gear.store.records import NOTHING, Head, Position
from deepspeed_gear.store.retention import UNLIMITED

_WORDS_AFTER_NUMBER = struct.Struct(f"={Head.NUM_SET - 1}q")


class DrawExchange(Protocol):
    """Sends a node's draws to the nodes that need them: `row_exchange/resolution_exchange.py`."""

    least_drawn: int  # the smallest mass that any node has drawn in the latest selection

    def fill(self, draws: NodeDraws) -> tuple[int, np.ndarray]:
        """Exchange a selection's draws, and fill its ring entry. Returns the number of resolutions,
        and those of this node, [n, 8], int64. Collective over the nodes.
        """


class Selector:
    """Makes the selections of a stream, from one store or from those of several nodes.

    Of one store the caller of `select` holds the table's lock. Over nodes one process of each
    selects, in one thread; it takes the lock for each change itself, and never holds it while it
    waits for other nodes.

    Args:
        rounds: The rounds with the other nodes, if there are any.
        exchange: Sends the draws, where the items are spread over the nodes.
    """

    def __init__(
        self,
        state: StreamState,
        rounds: SelectionRounds,
        exchange: DrawExchange | None = None,
    ) -> None:
        self.state = state
        self.spec = state.spec
        self.masses = state.masses
        self.rounds = rounds
        self._channel = rounds.channel
        self._lock: contextlib.AbstractContextManager[Any] = (
            contextlib.nullcontext() if rounds.is_alone else state.table.lock
        )
        self._exchange = exchange
        self.is_spread = exchange is not None  # whether each node holds a part of the items
        self._draws: NodeDraws | None = None  # of the selection that is being made
        self._sampler = state.spec.sampler
        self._native = state.spec.sampling.native
        self._coordinates = torch.empty(state.spec.batch, dtype=torch.int64)
        # Owner and index of each draw, where this store holds all items: allocated once.
        self._no_other = np.zeros(state.spec.batch, np.int64)
        self._every = np.arange(state.spec.batch)
        self._sampled_masses = [entry[:, Resolution.MASS] for entry in state.drawn_words]
        limiter = state.limiter
        self._limiter = limiter if state.is_limited or state.spec.is_optional else None
        self._counting = limiter if limiter is not None and limiter.most else None

    def select(self, number: int, entry: int) -> bool:
        """Make and commit a batch's selection; False: the rate limiter does not admit it yet.

        Requires the table's lock where no other node takes part.

        Raises:
            NothingToSampleError: Too few items have a mass.
            NotReadyError: The nodes do not admit it together, and one of them waits no longer.
            StoreError, PeerError: The stream is closing; a node failed, ended, or asks for another
                batch.
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
        count = self._begin(number, self.spec.num_samples(number))
        if count is None:
            return False
        if self._exchange is not None:
            self._draws = NodeDraws(number, entry, count)
        rows = self._rows(entry, count)
        if self._sampler.walks:
            self._walk(number, rows, state.drawn[entry][1], after)
        elif count:
            is_ahead = state.words[Position.AHEAD] == number and not state.masses.waiting
            after[Head.TOTAL] = self._checked(self._apply(number))
            if self._counting is not None and not self._sampler.each_once:
                self._sample_counting(rows, after[Head.SAMPLES])
            elif not is_ahead:
                first = after[Head.SAMPLES]
                coordinates = self._coordinates_of(count, first, after[Head.TOTAL])
                self._keep(0, first, self._resolve(rows, 0, coordinates, first))
        num_resolutions, samples = self._finish(number, entry, count)
        if count and state.priorities is not None:
            masses = self._sampled_masses[entry][:count]
            after[Head.NUMERATOR : Head.EXPONENT + 1] = self._weigh(
                number, masses, after[Head.TOTAL]
            )
        after[Head.NUMBER] = number + 1
        after[Head.COUNT] = num_resolutions
        after[Head.SAMPLES] += count
        with self._lock:
            _WORDS_AFTER_NUMBER.pack_into(head, head.itemsize, *after[1:])
            if self._counting is not None:
                self._counting.count(samples)
            if state.numbers is not None:
                state.numbers[entry] = self.rounds.moments
            head[Head.NUMBER] = number  # the commit point
            state.advance(entry)
            if self._counting is not None:
                self._counting.evict_used_up()
            if state.counts is not None:
                state.counts.count(samples)
        return True

    # ---- begin: what the limiter admits, and changes of masses -----------------------------------

    def _begin(self, number: int, count: int) -> int | None:
        """Begin a selection. Returns how many samples of `count` the rate limiter admits: all or,
        of a stream that `is_optional`, none. None: it must wait.
        """
        if self.spec.together:
            is_open = self.rounds.begin(number, count)
        else:
            exact = self.spec.is_optional
            is_open = self._limiter is None or self._limiter.is_open(count, exact)
        if is_open:
            return count
        return 0 if self.spec.is_optional else None

    def _apply(self, number: int) -> int:
        """Apply all changes of masses that precede the selection. Returns the sum of all."""
        if self.spec.together:
            self.rounds.apply(number)
        else:
            self.masses.apply(number)
        return self.rounds.total

    # ---- draw ------------------------------------------------------------------------------------

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
            self._resolve(rows, 0, self._coordinates_of(count, first, total), first)
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
        sampled: Any = self._sampler.sample(Draw(self, count, first, total))
        good = (
            isinstance(sampled, torch.Tensor)
            and sampled.dtype == torch.int64
            and sampled.dim() == 1
        )
        if not good or len(sampled) > count or bool(((sampled < 0) | (sampled >= total)).any()):
            rule = f"must sample at most {count} coordinates in [0, {total}), as int64"
            shown = (
                f"{sampled.dtype} {list(sampled.shape)}"
                if isinstance(sampled, torch.Tensor)
                else sampled
            )
            raise ConfigError(
                f"sampler {self._sampler.kind}", rule, shown, "correct the sampler's sample()"
            )
        if len(sampled) < count:
            name = f"stream {self.spec.name}: table {self.state.table.spec.name}"
            rule = f"must hold as many items as a global batch ({count}), each with a mass"
            remedy = "lower the batch size, or add trajectories first"
            raise NothingToSampleError(name, rule, len(sampled), remedy)
        return torch.as_tensor(sampled)

    def highest(self, count: int) -> torch.Tensor:
        """Return the coordinates of the items of highest priority; fewer if there are fewer items.
        [n].
        """
        masses = self.state.with_priorities
        with self._lock:
            items = masses.highest_items(count)
            coordinates = masses.coordinates_of(items)
            if not self.is_spread:
                return coordinates
            values = masses.values[items.numpy()].view(np.int32).astype(np.int64)
            own = np.stack([values, masses.ids_of(items.numpy()), coordinates.numpy()], axis=1)
        every, shards = self._channel.all_gather_ragged(own)
        # Equal priorities by the age of their trajectories; a data set's are older in the first
        # shards.
        ages = every[:, 1] if self.state.table.spec.dataset is None else shards
        chosen = np.lexsort((ages, -every[:, 0].astype(np.int32).view(np.float32)))[:count]
        return torch.from_numpy(self.rounds.first_coordinates[shards[chosen]] + every[chosen, 2])

    def extreme(self, count: int, newest: bool) -> torch.Tensor:
        """Return the coordinates of the oldest or the newest items; or fewer. [n]."""
        ledger = self.state.table.ledger
        is_joint = ledger is not None and ledger.spec.is_joint
        with self._lock:
            # Any complete group of a joint ledger may have to come now.
            ages, masses, first = self.state.with_ages.ends(
                UNLIMITED if is_joint else count, newest
            )
            if not self.is_spread:
                return items_of(masses, first, count, newest)
            own = np.stack([ages, masses, first], axis=1)
            if ledger is not None and is_joint:
                own = np.concatenate([own, ledger.marks(ages)], axis=1)
        every, shards = self._channel.all_gather_ragged(own)
        every[:, 2] += self.rounds.first_coordinates[shards]
        order = np.argsort(every[:, 0], kind="stable")
        if ledger is not None and is_joint:
            order = ledger.merged(every[:, 0], every[:, 3:])
        every = every[order[::-1] if newest else order]
        return items_of(every[:, 1], every[:, 2], count, newest)

    # ---- resolve ---------------------------------------------------------------------------------

    def _resolve(
        self, rows: torch.Tensor, done: int, coordinates: torch.Tensor, first: int
    ) -> ShardDraws:
        """Resolve the coordinates that fall into this store, numbered from `first` on. [n], int64.

        A store that holds all items writes them to their place in the ring entry, rows[done:],
        [count, 8].
        """
        count = coordinates.size(0)  # `len` of a tensor takes ten times as long
        if not self.is_spread:
            into = rows if count == rows.size(0) else rows[done : done + count]
            with self._lock:
                self.masses.resolve(into, coordinates, first)
            return ShardDraws(self._no_other[:count], self._every[:count], into)
        owner = torch.empty(count, dtype=torch.int64)
        mine = torch.empty(count, dtype=torch.int64)
        points = torch.empty(count, dtype=torch.int64)
        num_own = np.zeros(1, np.int64)
        totals = torch.from_numpy(self.rounds.totals)
        self.masses.ops.assign_draws_(
            owner, mine, points, torch.from_numpy(num_own), coordinates, totals, self._channel.index
        )
        indices = mine.numpy()[: num_own[0]]
        resolutions = torch.empty(len(indices), Resolution.NUM_WORDS, dtype=torch.int64)
        if len(indices):
            with self._lock:
                self.masses.resolve_numbered(resolutions, points[: num_own[0]], indices + first)
        return ShardDraws(owner.numpy(), indices, resolutions)

    def _keep(self, done: int, first: int, draws: ShardDraws) -> None:
        """Add draws to the selection, after the `done` ones in it: pin this store's until they are
        exchanged.

        Those of a store that holds all items are in the ring already, and pinned with all others.
        """
        if self._draws is None:
            return
        if len(draws.indices):
            with self._lock:
                self.state.pin(self._draws.number, draws.resolutions)
        self._draws.add(done, first, draws)

    def _sample_counting(self, rows: torch.Tensor, first: int) -> None:
        """Draw as if one by one: a used-up trajectory leaves at once (Reverb's
        `max_times_sampled`).
        """
        done = 0
        counted = np.zeros(self.state.masses.num_items, np.int64)
        while done < len(rows):
            total = self._checked(self.rounds.total)
            coordinates = self._coordinates_of(len(rows) - done, first + done, total)
            done += self._resolve_until(rows, done, coordinates, first + done, counted)

    def _resolve_until(
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
        assert self._counting is not None
        draws = self._resolve(rows, done, coordinates, first)
        slots = draws.slots
        num_valid = len(coordinates)
        if self._counting.fewest <= len(rows):
            num_valid = self._num_valid(draws.indices, slots, num_valid, counted)
        if num_valid < len(coordinates):
            draws = draws.before(num_valid)
            slots = slots[: len(draws.indices)]
        np.add.at(counted, slots, 1)
        self._keep(done, first, draws)
        return num_valid

    def _num_valid(
        self, indices: np.ndarray, slots: np.ndarray, count: int, counted: np.ndarray
    ) -> int:
        """Return how many of `count` draws come before one has used up its trajectory, and that
        one: all nodes find the first. If others follow, the trajectory's mass becomes 0. Indices
        and slots of this node's draws, [m].
        """
        limiter = self._counting
        assert limiter is not None
        before = limiter.num_admitted(slots, counted)
        uses_up = before < len(slots)
        if not (uses_up or self.is_spread):
            return count
        at = int(indices[before]) if uses_up else count
        mass = int(self.masses.leaves[slots[before]]) if uses_up else 0
        left = limiter.draws_left(counted)
        with self._lock:
            least = self.rounds.own_least
        received = self._channel.all_gather(np.array([at, mass, least, left]))
        node = int(received[:, 0].argmin())
        num_valid = min(int(received[node, 0]) + 1, count)
        if num_valid < count:
            self._checked(bool(received[:, 3].sum() >= count))  # before a mass is set to 0
            self.rounds.take_out(node, int(received[node, 1]), received[:, 2])
            if node == self._channel.index:
                with self._lock:
                    self.masses.take_out(int(slots[before]))
        return num_valid

    # ---- epochs ----------------------------------------------------------------------------------

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
            # In an epoch of 5 items that begins with sample 10, sample 12 is the item at 2. If that
            # one is skipped, the epoch counts as begun with sample 9: sample 12 is the item at 3.
            at = after[Head.SAMPLES] + done - after[Head.EPOCH_FIRST]
            if at >= after[Head.EPOCH_SIZE] or has_ended:
                has_ended = False
                # Items were skipped, so that the rest fills no batch.
                if sampler.drops_tail and done:
                    if self._draws is not None:
                        self._draws.parts.clear()
                    after[Head.SAMPLES] += done
                    done = 0
                if sampler.is_pass and after[Head.EPOCH_SIZE] > 0:
                    after[Head.FILLERS] = max(after[Head.FILLERS], count - done)
                else:
                    self._begin_epoch(number, done, after)
                at = 0  # in a pass: fillers repeat the first items and are marked as such
            n = min(count - done, after[Head.EPOCH_SIZE] - at)
            first = after[Head.SAMPLES] + done
            draw = Draw(self, n, first, after[Head.EPOCH_SIZE], after[Head.EPOCH], at)
            left = self._resolve_left(rows, done, sampler.sample(draw), first)
            epochs[done : done + left] = after[Head.EPOCH]
            after[Head.EPOCH_FIRST] -= n - left
            if state.walked is not None:
                after[Head.SKIPPED] += n - left
            if after[Head.FILLERS]:
                after[Head.EPOCH_FIRST] = first + n - after[Head.EPOCH_SIZE]
            done += left

    def _resolve_left(
        self, rows: torch.Tensor, done: int, coordinates: torch.Tensor, first: int
    ) -> int:
        """Resolve an epoch's next coordinates but those of evicted items; return their number."""
        draws = self._resolve(rows, done, coordinates, first)
        if self.state.walked is not None:
            with self._lock:
                evicted = self.state.evicted(draws.slots)
            skipped, _ = self._channel.all_gather_ragged(draws.indices[evicted, None])
            if len(skipped):
                left = np.ones(len(coordinates), bool)
                left[skipped[:, 0]] = False
                # Again, with the sample numbers of those that are left.
                coordinates = coordinates[torch.from_numpy(left)]
                draws = self._resolve(rows, done, coordinates, first)
        self._keep(done, first, draws)
        return coordinates.size(0)

    def _begin_epoch(self, number: int, done: int, after: list[int]) -> None:
        if after[Head.EPOCH_SIZE] > 0:
            after[Head.EPOCH] += 1
        after[Head.EPOCH_FIRST] = after[Head.SAMPLES] + done
        if not self.spec.together and self.state.masses.waiting:
            self.state.pin(number, self.state.drawn[number % self.spec.depth][0][:done])
            self.state.words[Position.DONE] = 1 + done
        size = self._checked(self._apply(number))
        with self._lock:
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
            with self._lock:
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

    # ---- finish ----------------------------------------------------------------------------------

    def _finish(self, number: int, entry: int, count: int) -> tuple[int, np.ndarray]:
        """Complete the ring entry of `count` items. Returns the number of resolutions, of groups
        those of all members, and the resolutions that lie in this store, [n, 8], int64.
        """
        if self._exchange is not None:
            assert self._draws is not None
            return self._exchange.fill(self._draws)
        with self._lock:
            self.state.pin(number, self.state.drawn[entry][0][:count])
            num_resolutions = self.state.expand(entry, count) if self.spec.by_group else count
            return num_resolutions, self.state.ring_words[entry, :num_resolutions]

    def _weigh(self, number: int, drawn: np.ndarray, total: int) -> tuple[int, int, int]:
        """Return numerator, divisor, exponent (Q62): a weight is (numerator / (divisor *
        mass))**exponent.
        """
        masses = self.state.with_priorities
        beta = masses.beta_at(number)
        if masses.rule.normalize == "batch":
            if self._exchange is not None:
                return self._exchange.least_drawn, 1, beta
            return int(np.minimum.reduce(drawn)), 1, beta  # faster than `min`, which calls it
        if masses.rule.normalize == "table":
            return self.rounds.least, 1, beta
        return total, self.rounds.num_items, beta

    def deliver(self, draws: NodeDraws) -> None:
        """Fill a ring entry with a checkpoint's selection, as `select` does. Collective."""
        assert self._exchange is not None
        self.state.pin(draws.number, draws.joined().resolutions)
        self._exchange.fill(draws)
