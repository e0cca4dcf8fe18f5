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
    with pytest.raises(IndexError, match="out of range"):
        prefetcher.get()
    with pytest.raises(RuntimeError, match="the prefetch thread has ended"):
        prefetcher.get()
    prefetcher.stop()


def test_a_thread_may_stop_itself() -> None:
    box: list[Prefetcher[int]] = []
    ready = threading.Event()

    def produce(i: int) -> int:
        ready.wait(20)
        box[0].stop()
        return i

    box.append(Prefetcher(produce, 1))
    ready.set()
    wait_until(lambda: not box[0]._thread.is_alive(), "the end of the thread")
