"""Rates as Reverb's limiters: the corner cases of who may go on and who waits."""

import math

import pytest
from store_support import InsertGate

from deepspeed_gear.store.rate_limiter import RateLimiter

ANY = math.inf
# Of each rate: the calls (held, ever added, drawn, how many more) of `may_insert` and of
# `may_sample`, of which the last one is refused and the others are not; [] if none is.
RATES = {
    "the difference is inserted * 2 - sampled, in [-4, 6]": (
        RateLimiter("trajectory", 1, 2.0, -4.0, 6.0),
        [(9, 4, 4, 1), (9, 4, 3, 1)], [(9, 3, 9, 1), (9, 3, 10, 1)]),
    "many at once count as a whole": (
        RateLimiter("step", 1, 1.0, 0.0, 10.0), [(5, 5, 0, 5), (5, 5, 0, 6)], [(5, 5, 0, 5), (5, 5, 0, 6)]),
    "a fraction of a sample counts": (
        RateLimiter("trajectory", 1, 0.25, 0.0, 1.0),
        [(9, 2, 0, 1), (9, 3, 0, 1), (9, 4, 0, 1)], [(9, 4, 0, 1), (9, 3, 0, 1)]),
    "up to the least size adding is always right": (
        RateLimiter("trajectory", 3, 1.0, -ANY, -100.0),
        [(0, 0, 0, 1), (1, 1, 0, 1), (2, 2, 0, 1), (3, 3, 0, 1)], [(3, 9, 0, 1), (2, 9, 0, 1)]),
    "items that have gone do not count": (
        RateLimiter("trajectory", 3, 1.0, -ANY, -100.0), [(0, 1000, 0, 3), (0, 1000, 0, 4)], []),
    "a ratio strays around what it is at the least size": (
        RateLimiter.ratio("step", 10, 4.0, 8.0),
        [(10, 10, 0, 2), (10, 10, 0, 3)], [(10, 10, 0, 8), (10, 10, 0, 9)]),
    "the least size waits for nothing else": (
        RateLimiter.least_size("trajectory", 2), [], [(2, 2, 10**15, 10**6), (1, 2, 0, 1)]),
}  # fmt: skip


@pytest.mark.parametrize("rule", RATES)
def test_what_may_be_inserted_and_sampled(rule: str) -> None:
    rate, inserts, samples = RATES[rule]
    with InsertGate(rate) as gate:
        for may, calls in ((gate.may_insert, inserts), (rate.may_sample, samples)):
            assert [may(*call) for call in calls] == [call != calls[-1] for call in calls]


def test_a_least_size_never_blocks_writers() -> None:
    with InsertGate(RateLimiter.least_size("trajectory", 2)) as gate:
        assert gate.may_insert(2, 10**15, 0, 10**6)
