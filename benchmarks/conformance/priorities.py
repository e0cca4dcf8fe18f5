"""Cases of prioritized sampling."""

from __future__ import annotations

import numpy as np
from peers.interface import Steps, moment

from conformance.check import (
    StepBuffer,
    System,
    add_episode,
    case,
    draws,
    fits,
    prioritize,
    refusal,
    refuses,
)

PAPER = "Schaul et al. 2016"


def prepared(system: System, priorities: np.ndarray, **options: object) -> StepBuffer:
    """Return a buffer of as many items as there are priorities, with these priorities."""
    buffer = system.steps(Steps(capacity=64, prioritized=True, **options))  # type: ignore[arg-type]
    add_episode(buffer, 0, len(priorities))
    prioritize(buffer, priorities)
    return buffer


@case(PAPER, "items of priorities 1, 2, 4 and 8 are drawn in these proportions")
def proportional(system: System) -> None:
    priorities = np.array([1.0, 2.0, 4.0, 8.0])
    fits(draws(prepared(system, priorities), 4, 600), priorities, "priorities")


@case("google-deepmind/reverb (small TD errors)", "priorities 1e-7 and 3e-7 are drawn as 1 : 3")
def small_priorities_keep_their_ratio(system: System) -> None:
    priorities = np.array([1e-7, 3e-7])
    fits(draws(prepared(system, priorities), 2, 400), priorities, "priorities")


@case(
    PAPER,
    "priorities 1 and 1e6 : the draws of the larger one do not hide the smaller ones' proportion",
)
def large_ratios(system: System) -> None:
    priorities = np.array([1.0, 1e3, 3e3])
    fits(draws(prepared(system, priorities), 3, 600), priorities, "priorities")


@case("instadeepai/flashbax#58", "an item of priority 0 is never drawn, in 10^6 draws")
def zero_is_never_drawn(system: System) -> None:
    buffer = prepared(system, np.array([1.0, 0.0, 1.0]), batch=1024)
    found = draws(buffer, 3, 1000)
    assert found[1] == 0, f"drew it {found[1]} times in {found.sum()}"


def refused(system: System, value: float) -> None:
    buffer = prepared(system, np.ones(4))

    def report() -> None:
        sampled = buffer.sample()
        priorities = np.ones(len(sampled.obs))
        priorities[0] = value
        buffer.update(sampled, priorities)
        buffer.sample()

    refuses(f"a priority of {value}", report)
    fits(draws(buffer, 4, 200), np.ones(4), "after the refusal")


@case("pytorch/rl#3925", "a NaN priority is refused, and nothing has changed")
def nan_is_refused(system: System) -> None:
    refused(system, np.nan)


@case(
    "google-deepmind/reverb (negative priority)",
    "-1 is refused, or counts as 1; the buffer goes on working",
)
def a_negative_priority(system: System) -> None:
    buffer = prepared(system, np.ones(4))
    sampled = buffer.sample()
    text = refusal(lambda: buffer.update(sampled, -np.ones(len(sampled.obs))))
    assert text != "", "an error without a text"
    fits(draws(buffer, 4, 200), np.ones(4), "after a priority of -1")


@case("pytorch/rl#3925", "an infinite priority is refused, and nothing has changed")
def infinity_is_refused(system: System) -> None:
    refused(system, np.inf)


@case(PAPER + ", algorithm 1", "a new item has the highest priority that was reported")
def new_items_have_the_highest_priority(system: System) -> None:
    buffer = prepared(system, np.array([1.0, 2.0, 5.0]))
    buffer.sample()  # a system may apply reports with the next batch
    add_episode(buffer, 3, 1)
    fits(draws(buffer, 4, 400), np.array([1.0, 2.0, 5.0, 5.0]), "with a new item")


@case(PAPER, "weights are (N p)^-beta / the largest of the batch")
def weights_by_batch(system: System) -> None:
    priorities = np.array([1.0, 2.0, 4.0, 8.0])
    buffer = prepared(system, priorities, beta=0.5)
    sampled = buffer.sample()
    own = priorities[np.rint(sampled.obs).astype(int)]
    assert np.allclose(sampled.weight, (own / own.min()) ** -0.5, rtol=1e-3), (
        f"got {sampled.weight[:4]}"
    )


@case(
    "openai/baselines (max_weight)",
    "weights are (N p)^-beta / the largest that any item would have",
)
def weights_by_table(system: System) -> None:
    priorities = np.array([1e-2, 4.0, 8.0])
    buffer = prepared(system, priorities, beta=0.5, normalize="table", batch=4)
    for _ in range(20):
        sampled = buffer.sample()
        own = priorities[np.rint(sampled.obs).astype(int)]
        assert np.allclose(sampled.weight, (own / 1e-2) ** -0.5, rtol=1e-2), f"got {sampled.weight}"


@case("pytorch/rl#4014", "after alpha goes from 1 to 0.5 every item has its new mass")
def alpha_changes(system: System) -> None:
    priorities = np.array([1.0, 4.0, 16.0])
    buffer = prepared(system, priorities)
    buffer.set_alpha(0.5)
    fits(draws(buffer, 3, 400), priorities**0.5, "with alpha 0.5")


@case("instadeepai/flashbax#52", "after 1,000 updates the draws still follow the latest priorities")
def many_updates(system: System) -> None:
    rng = np.random.default_rng(0)
    known = np.ones(32)
    buffer = prepared(system, known)
    for _ in range(1000):
        sampled = buffer.sample()
        index = np.rint(sampled.obs).astype(int)
        known[np.unique(index)] = np.exp(rng.uniform(-3, 3, len(np.unique(index))))
        buffer.update(sampled, known[index])
    fits(draws(buffer, 32, 2000), known, "after 1,000 updates")


@case(
    "pytorch/rl (repeated indices)",
    "of several priorities of one item in a batch the last one counts",
)
def the_last_of_repeated_updates_counts(system: System) -> None:
    buffer = prepared(system, np.ones(3))
    sampled = buffer.sample()
    index = np.rint(sampled.obs).astype(int)
    values = np.linspace(1, 8, len(index))
    buffer.update(sampled, values)
    last = np.array(
        [values[index == item][-1] if (index == item).any() else 1.0 for item in range(3)]
    )
    fits(draws(buffer, 3, 400), last, "after repeated items")


@case(
    "ray-project/ray (stale indices)",
    "the priority of an item that was evicted meanwhile changes no other one",
)
def a_late_report_changes_no_other_item(system: System) -> None:
    buffer = system.steps(Steps(capacity=8, prioritized=True))
    for number in range(8):
        buffer.add(moment([number], terminated=[True]))
    sampled = buffer.sample()
    for number in range(8, 72):
        buffer.add(moment([number], terminated=[True]))
    before = len(set(np.rint(np.concatenate([buffer.sample().obs for _ in range(30)])).tolist()))
    reported = np.where(
        np.rint(sampled.obs).astype(int) == int(np.rint(sampled.obs[0])), 1000.0, 1.0
    )
    buffer.update(sampled, reported)
    found = np.bincount(
        np.rint(np.concatenate([buffer.sample().obs for _ in range(60)])).astype(int), minlength=72
    )
    held = found[found > 0]
    fits(held, np.ones(len(held)), "after a late report")
    assert len(held) == before, f"{len(held)} of {before} items are drawn"


@case(
    "torch sum tree of float32",
    "131,072 equal items: each part of the table is drawn equally often",
)
def a_large_table(system: System) -> None:
    count = 1 << 17
    envs = 1 << 10
    buffer = system.steps(Steps(capacity=count, num_envs=envs, prioritized=True, batch=4096))
    for first in range(0, count, envs):
        buffer.add(moment(np.arange(first, first + envs), np.arange(first, first + envs) + envs))
    found = draws(buffer, count, 60)
    fits(found.reshape(64, -1).sum(1), np.ones(64), "64ths of the table")
    fits(found.reshape(-1, 64).sum(0), np.ones(64), "every 64th item")
