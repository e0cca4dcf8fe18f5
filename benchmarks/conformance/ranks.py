"""Cases of several processes: epochs, and one distribution for all of them."""

from __future__ import annotations

import numpy as np
from peers.interface import System

from conformance.check import case, fits


@case(
    "huggingface/accelerate#4195",
    "10 items over 3 ranks: each item once in an epoch, and no rank waits for ever",
)
def an_epoch_over_three_ranks(system: System) -> None:
    ranks = system.epoch(count=10, batch=1, ranks=3, used=0)
    found = sorted(item for items in ranks for item in items)
    assert found == list(range(10)), f"drew {found}"


@case("huggingface/accelerate#4195", "resumed in an epoch, the items that were used are not drawn again")
def an_epoch_that_is_resumed(system: System) -> None:
    whole = system.epoch(count=24, batch=2, ranks=2, used=0)
    rest = system.epoch(count=24, batch=2, ranks=2, used=4)
    for before, after in zip(whole, rest, strict=True):
        assert after == before[8:], f"went on with {after}, not {before[8:]}"


@case("pytorch/rl#1397", "4 processes draw from one prioritized buffer with one exact distribution")
def one_distribution_for_all(system: System) -> None:
    priorities = np.array([1.0, 2.0, 4.0, 8.0, 16.0])
    found = system.shared(priorities, processes=4, batches=40)
    assert len(found) == 4, f"{len(found)} processes"
    fits(np.bincount(np.concatenate(found), minlength=5), priorities, "all processes together")
    for own in found:
        fits(np.bincount(own, minlength=5), priorities, "one process")
