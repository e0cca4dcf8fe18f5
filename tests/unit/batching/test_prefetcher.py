"""The background thread that prepares batches."""

import threading
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

    prefetcher = Prefetcher(produce, depth)
    wait_until(lambda: len(made) == depth + 1, "preparing")  # one more is made and waits for its place
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

    prefetcher = Prefetcher(produce, 1)
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


def test_a_thread_may_stop_itself() -> None:
    box: list[Prefetcher[int]] = []
    ready = threading.Event()

    def produce(i: int) -> int:
        ready.wait()
        box[0].stop()
        return i

    box.append(Prefetcher(produce, 1))
    ready.set()
    wait_until(lambda: not box[0]._thread.is_alive(), "the end of the thread")
