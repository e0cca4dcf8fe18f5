"""A stream with priorities that several processes report, against plain Python and its own Philox
draws.
"""

from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch
from gear_support import trajectory
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from store_support import StoreScene, check_whole, priority_rule, store_trajectory, stream_spec

from deepspeed_gear.errors import StoreError, StoreFullError
from deepspeed_gear.ops.constants import MOST_MASS_BITS, ONE_Q62
from deepspeed_gear.ops.philox import philox_words
from deepspeed_gear.ops.records import LogEntry, RandomPurpose, Slot, SlotState
from deepspeed_gear.ops.reference.priorities import mass_
from deepspeed_gear.replay import table_access
from deepspeed_gear.sampling.mass_rules import Decay
from deepspeed_gear.store.records import Head

NUM_SLOTS = 5
NUM_ROWS = 40
KEY_OF_STREAM = 7
NUM_PEERS = 3
ALPHAS = (0.0, 0.3, 0.6, 1.0)
Item = tuple[int, int]  # trajectory, and its step; 0 where the unit is a trajectory

priorities = st.sampled_from([0.0, -0.0, 1e-40, 0.25, 1.0, 7.5, 1e4]) | st.floats(
    0, 2.0**20, width=32, allow_nan=False
)


def points_of(seed: int, first: int, total: int, count: int) -> list[int]:
    """Return floor(word * total / 2^128) in Python's integers."""
    high, low = philox_words(
        seed, torch.arange(count) + first, KEY_OF_STREAM, RandomPurpose.COORDINATE
    )
    words = [
        (h % 2**64 << 64) + low_ % 2**64
        for h, low_ in zip(high.tolist(), low.tolist(), strict=True)
    ]
    return [word * total >> 128 for word in words]


def masses_of(values: list[float], alpha: float) -> list[int]:
    out = torch.empty(len(values), dtype=torch.int64)
    mass_(out, torch.tensor(values, dtype=torch.float32), int(alpha * ONE_Q62), MOST_MASS_BITS)
    found: list[int] = out.tolist()
    return found


class PriorityMachine(RuleBasedStateMachine):
    """The oracle: `known` is as of the latest selection; `reported` waits, with batch and order."""

    unit = "step"
    kind = "random"
    lag = 0
    normalize = "table"
    initial = None
    batch = 9
    decay = None

    @initialize(
        seed=st.integers(0, 1000), lengths=st.lists(st.integers(1, 6), min_size=1, max_size=4)
    )
    def make(self, seed: int, lengths: list[int]) -> None:
        self.seed = seed
        self.key = 0
        self.samples = 0
        self.asked = [-(1 << 62)] * NUM_PEERS
        self.alpha_of: dict[int, float] = {}
        self.alpha = 0.6
        rule = priority_rule(
            alpha=lambda key: self.alpha_of.setdefault(key, self.alpha),
            normalize=self.normalize,
            lag=self.lag,
            initial=self.initial,
            log_size=40,
            decay=None if self.decay is None else Decay(self.decay),
        )
        kind = {"top": "top_k", "stratified": "stratified"}.get(self.kind, "random")
        spec = stream_spec(
            kind, self.unit, self.batch, priorities=rule, seed=seed, depth=self.lag + 4
        )
        self.scene = StoreScene([spec], (), NUM_SLOTS, NUM_ROWS, NUM_PEERS)
        self.tables = [self.scene.table]
        self.streams = [self.scene.streams[0]]
        for peer in range(1, NUM_PEERS):
            table, (stream,) = self.scene.attach(peer)
            self.tables.append(table)
            self.streams.append(stream)
        self.stored: dict[int, int] = {}  # id -> steps
        self.known: dict[Item, float] = {}
        self.born: dict[
            int, int
        ] = {}  # of each trajectory, the global batch that it could first be drawn in
        self.reported: list[
            tuple[int, int, int, Item, float]
        ] = []  # batch, order, peer, item, priority
        self.waiting = [0] * NUM_PEERS
        self.drawn: list[tuple[int, np.ndarray]] = []
        self.highest = 1.0
        for steps in lengths:
            self.add(steps)

    # ---- content ---------------------------------------------------------------------------------

    @rule(steps=st.integers(1, 12), peer=st.integers(0, NUM_PEERS - 1))
    def add(self, steps: int, peer: int = 0) -> None:
        try:
            number = store_trajectory(
                self.tables[peer], [self.streams[peer]], trajectory(self.scene.count, steps), None
            )
        except StoreFullError:
            return
        self.scene.count += 1
        self.stored[number] = steps

    @precondition(lambda self: self.stored)
    @rule(data=st.data(), peer=st.integers(0, NUM_PEERS - 1))
    def remove(self, data: st.DataObject, peer: int) -> None:
        gone = data.draw(
            st.lists(st.sampled_from(sorted(self.stored)), min_size=1, max_size=2, unique=True)
        )
        assert table_access.remove(self.tables[peer], gone) == len(gone)
        for number in gone:
            del self.stored[number]

    # ---- reports ---------------------------------------------------------------------------------

    def _report(
        self, peer: int, updates: np.ndarray, values: list[float], order: Any, items: list[Item]
    ) -> None:
        orders = np.broadcast_to(order, len(items)).tolist()
        given = updates, np.array(values, np.float32), order
        if self.waiting[peer] + len(items) > 40:
            with pytest.raises(StoreError):
                self.streams[peer].masses.reports.add_items(*given)
            return
        self.streams[peer].masses.reports.add_items(*given)
        self.waiting[peer] += len(items)
        for place, item, value in zip(orders, items, values, strict=True):
            self.reported.append((self.asked[peer], place, peer, item, float(np.float32(value))))

    @precondition(lambda self: self.drawn)
    @rule(data=st.data(), peer=st.integers(0, NUM_PEERS - 1))
    def report_a_batch(self, data: st.DataObject, peer: int) -> None:
        """Some samples of one of the latest batches, in any order of time."""
        first, records = data.draw(st.sampled_from(self.drawn))
        places = data.draw(
            st.lists(st.integers(0, self.batch - 1), min_size=1, max_size=self.batch)
        )
        values = data.draw(st.lists(priorities, min_size=len(places), max_size=len(places)))
        chosen = records[places]
        items = [(int(r[0]), int(r[5]) if self.unit == "step" else 0) for r in chosen]
        numbers = np.array(places) + first
        self._report(peer, chosen[:, [1, 2, 5]], values, numbers, items)

    @precondition(lambda self: self.stored)
    @rule(data=st.data(), peer=st.integers(0, NUM_PEERS - 1))
    def report_by_id(self, data: st.DataObject, peer: int) -> None:
        ids = data.draw(st.lists(st.sampled_from(sorted(self.stored)), min_size=1, max_size=3))
        values = data.draw(st.lists(priorities, min_size=len(ids), max_size=len(ids)))
        steps = [
            data.draw(st.integers(0, self.stored[n] - 1)) if self.unit == "step" else 0 for n in ids
        ]
        table = self.tables[peer]
        slots = table.slots_of(np.array(ids))
        updates = np.stack([slots, table.slots[slots, Slot.GENERATION], steps], axis=1)
        self._report(peer, updates, values, LogEntry.BY_ID, list(zip(ids, steps, strict=True)))

    @rule(alpha=st.sampled_from(ALPHAS))
    def change_alpha(self, alpha: float) -> None:
        """Take effect at the next selection that no process has made."""
        self.alpha = alpha

    # ---- selections ------------------------------------------------------------------------------

    @rule(peer=st.integers(0, NUM_PEERS - 1), count=st.integers(1, 3))
    def sample(self, peer: int, count: int) -> None:
        for _ in range(count):
            self._sample_one(peer)

    def _sample_one(self, peer: int) -> None:
        """All ask for the next batch; one selections it, and those that the lag lets it prepare."""
        for each, stream in enumerate(self.streams):
            stream.state.ask(self.key - self.lag)
            self.asked[each] = self.key - self.lag
        self._apply()
        total = sum(masses_of([self._counted(item) for item in self.known], self.alpha_at))
        if not self._enough(total):
            with pytest.raises(StoreError):
                self.streams[peer].get(self.key)
            self.alpha_of.setdefault(self.key, self.alpha)
            return
        cut = self.streams[peer].get(self.key)
        records = cut.resolutions.numpy().copy()
        self._check(cut.head, records, total)
        for stream in self.streams:
            stream.release(self.key)
        self.drawn = [*self.drawn[-2:], (self.samples, records)]
        self.key = self.key + 1
        self.samples = self.samples + self.batch

    @property
    def alpha_at(self) -> float:
        return self.alpha_of.get(self.key, self.alpha)

    def _enough(self, total: int) -> bool:
        if self.kind == "top":
            return sum(value > 0 for value in self.known.values()) >= self.batch
        return total > 0

    def _apply(self) -> None:
        """Do what a selection does: content, then reports before key - lag, sorted, the
        last wins.
        """
        first = self.initial if self.initial is not None else self.highest
        count = {
            number: steps if self.unit == "step" else 1 for number, steps in self.stored.items()
        }
        items = {(number, step) for number, steps in count.items() for step in range(steps)}
        self.known = {item: self.known.get(item, first) for item in items}
        self.born = {number: self.born.get(number, self.key) for number in self.stored}
        due = [entry for entry in self.reported if entry[0] < self.key - self.lag]
        self.reported = [entry for entry in self.reported if entry[0] >= self.key - self.lag]
        for _, _, peer, item, value in sorted(due, key=lambda entry: entry[:3]):
            self.waiting[peer] -= 1
            if item in self.known:
                self.known[item] = value
            self.highest = max(self.highest, value)  # also of an item that was removed meanwhile

    def _counted(self, item: Item) -> float:
        """Return an item's priority as it counts in the draws."""
        value = self.known[item]
        if self.decay is None or not value:
            return value
        era = int(self.decay * 5.5)
        left = (self.key // era + 1) * era - 1 - self.born[item[0]]
        grown = Decimal(value) * 256 * (-Decimal(left) / Decimal(self.decay)).exp()
        return max(float(np.float32(grown)), 2.0**-126)

    def _order(self) -> list[Item]:
        """Return the items in stored order."""
        slots = self.scene.table.slots
        used = [int(s) for s in np.nonzero(slots[:, Slot.STATE] == SlotState.COMMITTED)[0]]
        if self.unit == "trajectory":
            return [(int(slots[s, Slot.ID]), 0) for s in used]
        used.sort(key=lambda s: int(slots[s, Slot.FIRST_ROW]))
        ids = slots[used, Slot.ID].tolist()
        return [(number, step) for number in ids for step in range(self.stored[number])]

    def _check(self, head: np.ndarray, records: np.ndarray, total: int) -> None:
        order = self._order()
        masses = masses_of([self._counted(item) for item in order], self.alpha_at)
        ends = np.cumsum(masses)
        assert int(ends[-1]) == total
        coordinates = points_of(self.seed, self.samples, total, self.batch)
        if self.kind == "stratified":
            coordinates = [(j * total + c) // self.batch for j, c in enumerate(coordinates)]
        if self.kind == "top":
            some = (item for item in order if self.known[item] > 0)
            wanted = sorted(some, key=lambda item: (-self.known[item], item))[: self.batch]
        else:
            wanted = [order[i] for i in np.searchsorted(ends, coordinates, side="right").tolist()]
        found = [(int(r[0]), int(r[5]) if self.unit == "step" else 0) for r in records]
        assert found == wanted
        weight_of = dict(zip(order, masses, strict=True))
        assert records[:, 6].tolist() == [weight_of[item] for item in wanted]
        assert records[:, 7].tolist() == list(range(self.samples, self.samples + self.batch))
        positive = [mass for mass in masses if mass]
        numerator = {
            "batch": min(weight_of[item] for item in wanted),
            "table": min(positive),
            None: total,
        }[self.normalize]
        divisor = len(positive) if self.normalize is None else 1
        assert [int(head[w]) for w in (Head.NUMERATOR, Head.DIVISOR)] == [numerator, divisor]
        assert int(head[Head.EXPONENT]) == int(0.4 * ONE_Q62)

    @invariant()
    def whole(self) -> None:
        check_whole(self.scene.table, self.scene.streams)

    def teardown(self) -> None:
        if hasattr(self, "scene"):
            for table in self.tables[1:]:
                table.close()
            self.scene.close()


def case(name: str, **options: Any) -> Any:
    """Return the tests of one kind of stream."""
    made: Any = type(name, (PriorityMachine,), options).TestCase
    made.settings = settings(max_examples=16, stateful_step_count=30)  # eight kinds share the rules
    return made


TestSteps = case("steps")
TestTrajectories = case("trajectories", unit="trajectory", normalize="batch")
TestStepsBehindALag = case("lagging", lag=2, normalize="batch")
TestStratified = case("stratified_steps", kind="stratified", normalize=None, initial=0.5)
TestDecaying = case("decaying", unit="trajectory", decay=1.5)
TestDecayingSteps = case("decaying_steps", decay=1.0, normalize=None, lag=1)
TestTop = case("top_steps", kind="top", normalize=None)
TestTopTrajectories = case(
    "top_trajectories", kind="top", unit="trajectory", normalize=None, batch=3
)
