"""Rates as Reverb's limiters: the corner cases of who may go on and who waits."""

from __future__ import annotations

import math

import pytest

from deepspeed_gear.config.table_options import EVICTION_POLICIES
from deepspeed_gear.store.eviction import POLICIES, policy_class
from deepspeed_gear.store.records import EvictionCode
from deepspeed_gear.store.retention import RateLimiter, Retention


def test_the_bounds_themselves_are_admitted() -> None:
    """The difference is inserted * 2 - sampled, in [-4, 6]."""
    rate = RateLimiter("trajectory", 1, 2.0, -4.0, 6.0)
    assert rate.may_insert(9, 4, 4)  # 5 * 2 - 4 = 6
    assert not rate.may_insert(9, 4, 3)
    assert rate.may_sample(9, 3, 9, 1)  # 3 * 2 - 10 = -4
    assert not rate.may_sample(9, 3, 10, 1)


def test_many_at_once_count_as_a_whole() -> None:
    rate = RateLimiter("step", 1, 1.0, 0.0, 10.0)
    assert rate.may_insert(5, 5, 0, 5)
    assert not rate.may_insert(5, 5, 0, 6)
    assert rate.may_sample(5, 5, 0, 5)
    assert not rate.may_sample(5, 5, 0, 6)


def test_a_fraction_of_a_sample_counts() -> None:
    rate = RateLimiter("trajectory", 1, 0.25, 0.0, 1.0)
    assert [rate.may_insert(9, inserted, 0) for inserted in (2, 3, 4)] == [True, True, False]
    assert [rate.may_sample(9, inserted, 0, 1) for inserted in (3, 4)] == [False, True]


def test_up_to_the_least_size_adding_is_always_right() -> None:
    rate = RateLimiter("trajectory", 3, 1.0, -math.inf, -100.0)
    assert [rate.may_insert(size, size, 0) for size in (0, 1, 2, 3)] == [True, True, True, False]
    assert rate.may_insert(0, 1000, 0, 3)  # items that have gone do not count
    assert not rate.may_insert(0, 1000, 0, 4)


def test_below_the_least_size_nothing_is_sampled() -> None:
    rate = RateLimiter("trajectory", 3, 1.0, -math.inf, math.inf)
    assert [rate.may_sample(size, 9, 0, 1) for size in (2, 3, 2)] == [False, True, False]


def test_a_ratio_strays_around_what_it_is_at_the_least_size() -> None:
    rate = RateLimiter.ratio("step", 10, 4.0, 8.0)
    assert (rate.least, rate.most) == (32.0, 48.0)
    assert rate.may_sample(10, 10, 0, 8)  # 40 - 8 = 32
    assert not rate.may_sample(10, 10, 0, 9)
    assert rate.may_insert(10, 10, 0, 2)  # 48
    assert not rate.may_insert(10, 10, 0, 3)


def test_least_size_waits_for_nothing_else() -> None:
    rate = RateLimiter.least_size("trajectory", 2)
    assert rate.may_sample(2, 2, 10**15, 10**6)
    assert rate.may_insert(2, 10**15, 0, 10**6)
    assert not rate.may_sample(1, 2, 0, 1)


def test_a_queue_holds_what_was_not_drawn() -> None:
    rate, inserted, sampled, order = RateLimiter.queue("trajectory", 3), 0, 0, []
    for wanted in "iiiisssssiis":
        if wanted == "i" and rate.may_insert(1, inserted, sampled):
            inserted += 1
            order.append("i")
        elif wanted == "s" and rate.may_sample(1, inserted, sampled, 1):
            sampled += 1
            order.append("s")
    assert "".join(order) == "iiisssiis"
    assert inserted - sampled == 1


def test_codes_of_eviction_policies() -> None:
    codes = [policy_class(name).code for name in EVICTION_POLICIES]
    assert codes == [
        EvictionCode.NONE,
        EvictionCode.OLDEST,
        EvictionCode.NEWEST,
        EvictionCode.BY_CALLER,
        EvictionCode.BY_CALLER,
        EvictionCode.BY_CALLER,
    ]
    assert tuple(POLICIES) == EVICTION_POLICIES


@pytest.mark.parametrize("unit", ["step", "trajectory"])
def test_rates_as_words(unit: str) -> None:
    rate = RateLimiter(unit, 3, 0.5, -1.0, 7.0)  # type: ignore[arg-type]
    assert Retention().rate_words == ()
    assert Retention(rate_limiter=rate).rate_words == (unit == "step", 3, 0.5, 7.0)
