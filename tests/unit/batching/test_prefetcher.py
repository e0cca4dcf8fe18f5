"""The background thread that prepares batches."""

import time

import pytest
from gear_support import wait_until

from deepspeed_gear.batching.prefetcher import Prefetcher


@pytest.mark.parametrize("depth", [1, 3])
def test_results_and_errors_come_in_order_and_no_further_ahead_than_the_depth(depth: int) -> None:
    made: list[int] = []

    def produce(i: int) -> int:
        made.append(i)
        return [n * n for n in range(20)][i]

    prefetcher = Prefetcher[int](depth)
    prefetcher.begin(produce)
    prefetcher.start()
    wait_until(
        lambda: len(made) == depth + 1, "preparing"
    )  # one more is made and waits for its place
    time.sleep(0.15)
    assert len(made) == depth + 1
    assert prefetcher.get() == 0
    wait_until(lambda: len(made) == depth + 2, "preparing")
    time.sleep(0.15)
    assert made == list(range(depth + 2))
    assert [prefetcher.get() for _ in range(19)] == [i * i for i in range(1, 20)]
    for _ in range(2):  # it tries again
        with pytest.raises(IndexError, match="out of range"):
            prefetcher.get()
    prefetcher.stop()


def test_what_waits_outlives_a_stop_and_is_not_made_again() -> None:
    made: list[int] = []

    def produce(i: int) -> int:
        made.append(i)
        if made == [0, 1, 2, 3]:
            raise ValueError(i)
        return i

    prefetcher = Prefetcher[int](1)
    prefetcher.begin(produce)
    prefetcher.start()
    for _ in range(2):
        wait_until(lambda: made == [0, 1], "preparing")  # one waits beyond the depth
        prefetcher.stop()
    assert [prefetcher.get(), prefetcher.get()] == [0, 1]
    assert made == [0, 1]
    assert prefetcher.get() == 2
    wait_until(lambda: not prefetcher.is_alive, "the error")
    prefetcher.stop()  # forgets it
    assert prefetcher.get() == 3
    prefetcher.stop()
    assert made[:5] == [0, 1, 2, 3, 3]


def test_a_new_beginning_drops_what_was_prepared() -> None:
    prefetcher = Prefetcher[int](2)
    assert prefetcher.ready() is None
    prefetcher.stop()  # it was never started
    for shift in (10, 20):
        prefetcher.begin(lambda i, shift=shift: shift + i)  # type: ignore[misc]
        assert not prefetcher.is_alive
        assert prefetcher.ready() is None
        assert [prefetcher.get(), prefetcher.get()] == [shift, shift + 1]
    prefetcher.stop()


def test_a_thread_may_stop_itself() -> None:
    prefetcher = Prefetcher[int](1)

    def produce(i: int) -> int:
        prefetcher.stop()
        return i

    prefetcher.begin(produce)
    prefetcher.start()
    wait_until(lambda: not prefetcher.is_alive, "the end of the thread")
