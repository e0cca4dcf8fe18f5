"""Quotas of writers on several nodes keep the rate of all, though each node knows only its own."""

import math
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st
from store_support import InsertGate

from deepspeed_gear.store.rate_limiter import RateLimiter, divide, kept

RATIOS = st.sampled_from([0.1, 0.3, 1 / 3, 1.0, 2.5, 7.0])


@given(st.integers(0, 300), st.lists(st.integers(0, 99), min_size=1, max_size=6), st.integers(0, 9))
def test_a_pool_is_divided_as_a_whole(pool: int, wanted: list[int], turn: int) -> None:
    """Whoever wants no more than there is gets it when its turn comes."""
    parts = divide(pool, wanted, turn)
    assert sum(parts) == pool
    assert min(parts) >= 0
    if any(wanted):
        assert all(want or not part for want, part in zip(wanted, parts, strict=True))
    turns = [divide(pool, wanted, turn + later) for later in range(len(wanted))]
    for node, want in enumerate(wanted):
        assert not 0 < want <= pool or any(parts[node] >= want for parts in turns)


@given(RATIOS, st.integers(0, 500), st.integers(0, 500), st.integers(0, 500), st.integers(0, 500))
def test_room_is_all_that_may_be_added(
    ratio: float, size: int, more: int, sampled: int, min_size: int
) -> None:
    rate = RateLimiter.ratio("step", min_size + 1, ratio, 40.0)
    inserted = size + more
    room = rate.room(size, inserted, sampled)
    with InsertGate(rate) as gate:
        for count in range(1, room + 1):
            assert gate.may_insert(size, inserted, sampled, count)
        assert not gate.may_insert(size, inserted, sampled, room + 1)
        assert not gate.may_insert(size, inserted, sampled, room + 10**6)


def tightest(min_size: int, ratio: float, longest: int, batch: int) -> RateLimiter:
    """Return the rate with the least buffer that a config may give; a bit more, as floats are not
    exact.
    """
    least = max((batch + ratio * longest) / 2, ratio * (longest - 1))
    return RateLimiter.ratio("step", min_size, ratio, least + 1e-9)


@dataclass
class Node:
    """What one node knows: what it has admitted, and how far its writers may go."""

    admitted: int = 0
    said: int = 0
    reach: int = 0
    wanted: int = 0

    def add(self, count: int) -> bool:
        if self.admitted + count > self.reach:
            self.wanted = max(self.wanted, count)
            return False
        self.admitted += count
        return True


class Nodes:
    """Several of them, whose records say what was so at different times."""

    def __init__(self, count: int, rate: RateLimiter) -> None:
        self.nodes = [Node() for _ in range(count)]
        self.rate = rate
        self.sampled = self.turn = 0
        self.was_open = True

    @property
    def inserted(self) -> int:
        return sum(node.admitted for node in self.nodes)

    def say(self, index: int) -> tuple[int, int, int]:
        node = self.nodes[index]
        node.reach = kept(node.admitted, max(node.reach, node.admitted), not self.was_open)
        said = node.admitted, node.reach, max(node.wanted, int(node.admitted > node.said))
        node.said = node.admitted
        node.wanted = 0
        return said

    def hear(self, said: list[tuple[int, int, int]], count: int) -> bool:
        admitted, reach, wanted = (list(words) for words in zip(*said, strict=True))
        room = self.rate.room(sum(admitted), sum(admitted), self.sampled)
        parts = divide(max(0, sum(admitted) + room - sum(reach)), wanted, self.turn)
        self.turn += 1
        for node, own, part in zip(self.nodes, reach, parts, strict=True):
            node.reach = own + part
        self.was_open = self.rate.may_sample(sum(admitted), sum(admitted), self.sampled, count)
        self.sampled += count if self.was_open else 0
        return self.was_open

    def is_kept(self) -> bool:
        if self.inserted <= self.rate.min_size:
            return True
        return self.inserted * self.rate.samples_per_insert - self.sampled <= self.rate.most


@settings(max_examples=200)
@given(
    st.data(), st.integers(1, 5), RATIOS, st.integers(1, 60), st.integers(1, 30), st.integers(1, 40)
)
def test_the_rate_is_kept_whenever_writers_add(
    data: st.DataObject, count: int, ratio: float, min_size: int, longest: int, batch: int
) -> None:
    """Also between what the nodes say, and between what they say and what they hear."""
    nodes = Nodes(count, tightest(min_size, ratio, longest, batch))
    additions = st.lists(st.tuples(st.integers(0, count - 1), st.integers(1, longest)), max_size=12)

    def add() -> None:
        for index, steps in data.draw(additions):
            nodes.nodes[index].add(steps)
            assert nodes.is_kept()

    for _ in range(data.draw(st.integers(1, 8))):
        add()
        said = []
        for index in range(count):
            said.append(nodes.say(index))
            add()
        nodes.hear(said, batch)
        add()


@settings(max_examples=100)
@given(
    st.lists(st.booleans(), min_size=1, max_size=5).filter(any),
    RATIOS,
    st.integers(1, 60),
    st.integers(1, 30),
    st.integers(1, 40),
)
def test_nobody_waits_for_ever(
    writes: list[bool], ratio: float, min_size: int, longest: int, batch: int
) -> None:
    """As little as the buffer may be, only some nodes write, and all trajectories are as long as
    may be.
    """
    nodes = Nodes(len(writes), tightest(min_size, ratio, longest, batch))
    most = len(writes) * (math.ceil((min_size * ratio + 3 * batch) / ratio / longest) + 3)
    for _ in range(3):
        for _ in range(most):
            if nodes.hear([nodes.say(index) for index in range(len(writes))], batch):
                break
            for node, does in zip(nodes.nodes, writes, strict=True):
                while does and node.add(longest):
                    pass
        else:
            raise AssertionError("no batch was drawn")
