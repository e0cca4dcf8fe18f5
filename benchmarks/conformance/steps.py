"""Cases of single transitions: the ends of episodes, n-step returns, capacity and saves."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from peers.interface import Steps, moment

from conformance.check import (
    StepBuffer,
    System,
    add_episode,
    case,
    draws,
    find,
    fits,
    prioritize,
    refuses,
)

LAST = 900.0  # the last observation of an episode; the next episode begins elsewhere


def add_ended(buffer: StepBuffer, count: int, how: str) -> None:
    """Add an episode of observations 0 to count - 1 and rewards 1, whose last
    observation is LAST.
    """
    for number in range(count):
        is_last = number == count - 1
        buffer.add(moment([number], [LAST if is_last else number + 1], [1.0], **{how: [is_last]}))


def ended(system: System, how: str) -> tuple[float, float, float]:
    """Return what a buffer gives for the last step, number 2, of an episode that is followed by
    another.
    """
    buffer = system.steps(Steps(capacity=64))
    add_ended(buffer, 3, how)
    add_episode(buffer, 10, 8)
    found = find(buffer, 2)
    assert found is not None, "never drew the last step of an episode"
    return found


@case("vwxyzjn/cleanrl#460", "the last step of an episode is drawn")
def the_last_step_is_drawn(system: System) -> None:
    ended(system, "terminated")


@case(
    "DLR-RM/stable-baselines3#934",
    "the next observation of a truncated step is the episode's last one",
)
def next_observation_at_a_truncation(system: System) -> None:
    assert ended(system, "truncated")[2] == LAST, "the next observation is another episode's"


@case("DLR-RM/stable-baselines3#633", "a truncated step bootstraps")
def a_truncated_step_bootstraps(system: System) -> None:
    assert ended(system, "truncated")[1] == 0.5, "the discount of a truncated step is 0"


@case("Sutton and Barto 2018", "a terminated step does not bootstrap")
def a_terminated_step_does_not(system: System) -> None:
    assert ended(system, "terminated")[1] == 0.0, "the discount of a terminated step is not 0"


@case(
    "vwxyzjn/cleanrl#499",
    "environments that reset in the step after an episode's end: that step is no transition",
)
def the_step_that_resets_is_left_out(system: System) -> None:
    buffer = system.vector_steps(Steps(capacity=64, autoreset="next_step"))
    for first, how in ((0, "terminated"), (100, "truncated"), (200, "terminated")):
        for number in range(first, first + 3):
            buffer.add(moment([number], reward=[1.0], **{how: [number == first + 2]}))
        buffer.add(
            moment([first + 3], [first + 100])
        )  # resets: the last observation, and the next first one
    seen = set()
    for _ in range(40):
        sampled = buffer.sample()
        assert (sampled.next_obs == sampled.obs + 1).all(), (
            "a next observation is another episode's"
        )
        seen.update(np.rint(sampled.obs).astype(int).tolist())
    assert seen == {0, 1, 2, 100, 101, 102, 200, 201, 202}, f"drew the steps {sorted(seen)}"


@case(
    "DLR-RM/stable-baselines3#47",
    "inside an episode a 3-step return is r + g r' + g^2 r'', bootstrapped by g^3",
)
def n_step_inside(system: System) -> None:
    buffer = system.steps(Steps(capacity=64, n_step=3))
    for number in range(12):
        buffer.add(moment([number], reward=[1.0 + number], terminated=[number == 11]))
    found = find(buffer, 4)
    assert found is not None, "never drew the step"
    assert np.allclose(found, (5 + 6 / 2 + 7 / 4, 0.125, 7.0), atol=1e-4), f"got {found}"


def n_step_at_end(system: System, how: str) -> tuple[float, float, float]:
    buffer = system.steps(Steps(capacity=64, n_step=3))
    add_ended(buffer, 5, how)
    for number in range(20, 32):
        buffer.add(moment([number], reward=[100.0], terminated=[number == 31]))
    found = find(buffer, 3)
    assert found is not None, "never drew the last but one step of an episode"
    return found


@case("younggyoseo/FastTD3#6", "a 3-step return stops at a termination, with discount 0")
def n_step_at_a_termination(system: System) -> None:
    reward, discount, _ = n_step_at_end(system, "terminated")
    assert (round(reward, 4), discount) == (1.5, 0.0), f"got return {reward}, discount {discount}"


@case(
    "younggyoseo/FastTD3#6",
    "a 3-step return stops at a truncation: g^2, and the episode's last observation",
)
def n_step_at_a_truncation(system: System) -> None:
    found = n_step_at_end(system, "truncated")
    assert np.allclose(found, (1.5, 0.25, LAST), atol=1e-4), f"got {found}"


@case(
    "younggyoseo/FastTD3#7",
    "in a full table no 3-step return goes from the newest step to the oldest",
)
def n_step_in_a_full_table(system: System) -> None:
    buffer = system.steps(Steps(capacity=32, n_step=3, batch=256))
    for number in range(200):
        buffer.add(moment([number], reward=[float(number)]))
    for _ in range(40):
        sampled = buffer.sample()
        steps = np.rint(np.log2(1 / sampled.discount)).astype(int)
        first = np.rint(sampled.obs)
        weights = 0.5 ** np.arange(3)
        wanted = [
            sum((f + k) * weights[k] for k in range(n)) for f, n in zip(first, steps, strict=True)
        ]
        good = np.isclose(sampled.reward, wanted, rtol=1e-4) & np.isclose(
            sampled.next_obs, first + steps
        )
        assert good.all(), f"step {first[~good][0]}: return {sampled.reward[~good][0]}"


@case("cpprb (several environments)", "3-step returns of environments that add in turn do not mix")
def n_step_of_several_environments(system: System) -> None:
    buffer = system.steps(Steps(capacity=256, num_envs=3, n_step=3, batch=256))
    offsets = np.array([0.0, 100.0, 200.0])
    for number in range(20):
        buffer.add(
            moment(offsets + number, reward=offsets + 1, terminated=np.full(3, number == 19))
        )
    sampled = buffer.sample()
    which = np.rint(sampled.obs) // 100
    inside = np.isclose(sampled.discount, 0.125)
    assert inside.any(), "no 3-step return inside an episode"
    wanted = (which * 100 + 1) * 1.75
    assert np.allclose(sampled.reward[inside], wanted[inside]), (
        "a return has rewards of another environment"
    )
    assert (np.rint(sampled.next_obs)[inside] // 100 == which[inside]).all(), (
        "a next observation is another's"
    )


@case("DLR-RM/stable-baselines3#1542", "hindsight goals are later states of the same episode")
def hindsight_stays_in_the_episode(system: System) -> None:
    episodes = [np.arange(100 * k, 100 * k + 8, dtype=np.float32) for k in range(6)]
    found = system.goals(episodes, 256)
    obs = np.rint(found["obs"])
    goal = np.rint(found["goal"])
    assert (obs // 100 == goal // 100).all(), "a goal is of another episode"
    assert (goal >= obs).all(), "a goal lies before its step"


# ---- capacity ------------------------------------------------------------------------------------


def drawn(buffer: StepBuffer) -> set[int]:
    """Return the observations of some batches."""
    return set(
        np.rint(np.concatenate([buffer.sample().obs for _ in range(60)])).astype(int).tolist()
    )


def holds_newest(buffer: StepBuffer, end: int, capacity: int) -> None:
    """Fail unless the newest items, up to `end`, are drawn, and none that is twice as old as they
    may be.
    """
    found = drawn(buffer)
    newest = set(range(end - capacity, end))
    assert newest <= found, f"lacks {sorted(newest - found)[:4]}"
    assert min(found) >= end - 2 * capacity, f"still holds {min(found)}"


@case(
    "meta-pytorch/torchtune#2981",
    "one item and a batch of 16: 16 samples of it, or a clear refusal",
)
def one_item(system: System) -> None:
    buffer = system.steps(Steps(capacity=64, batch=16))
    buffer.add(moment([7], terminated=[True]))
    sampled = buffer.sample()
    assert len(sampled.obs) == 16, f"{len(sampled.obs)} samples"
    assert (sampled.obs == 7).all(), f"samples of {set(sampled.obs.tolist())}"


@case("ray-project/ray#4649", "a batch from an empty buffer is refused")
def an_empty_buffer(system: System) -> None:
    refuses("sampling from nothing", system.steps(Steps(capacity=64)).sample)


@case(
    "DLR-RM/stable-baselines3#40",
    "a capacity of 10 for 3 environments holds the newest 9 or more transitions",
)
def capacity_and_environments(system: System) -> None:
    buffer = system.steps(Steps(capacity=10, num_envs=3))
    for number in range(40):
        buffer.add(
            moment([number, 100 + number, 200 + number], terminated=np.full(3, number % 2 == 1))
        )
    found = drawn(buffer)
    newest = {offset + number for offset in (0, 100, 200) for number in (37, 38, 39)}
    assert newest <= found, f"does not hold {sorted(newest - found)}"


@case(
    "ray-project/ray#60773",
    "16 environments add episodes to a full prioritized buffer: no error, and only new steps "
    "are drawn",
)
def many_environments_in_a_full_buffer(system: System) -> None:
    buffer = system.steps(Steps(capacity=256, num_envs=16, prioritized=True))
    rng = np.random.default_rng(0)
    offsets = 1000.0 * np.arange(16)
    for number in range(80):
        ends = (number + np.arange(16)) % 7 == 6
        buffer.add(moment(offsets + number, terminated=ends))
        sampled = buffer.sample()
        steps = np.rint(sampled.obs) % 1000
        assert (number - steps < 32).all(), (
            f"step {number}: drew step {steps.min()} from a buffer of 16"
        )
        assert (sampled.next_obs == sampled.obs + 1).all(), f"step {number}: steps are mixed"
        buffer.update(sampled, rng.uniform(1, 5, len(steps)))


@case("a ring", "a full buffer holds its newest items, and each of them is drawn")
def a_full_buffer_holds_the_newest(system: System) -> None:
    buffer = system.steps(Steps(capacity=32))
    for number in range(100):
        buffer.add(moment([number], terminated=[number % 2 == 1]))
    holds_newest(buffer, 100, 32)


@case("instadeepai/flashbax#66", "a buffer that is exactly full holds every item")
def exactly_full(system: System) -> None:
    buffer = system.steps(Steps(capacity=32))
    for number in range(32):
        buffer.add(moment([number], terminated=[number % 2 == 1]))
    fits(draws(buffer, 32, 400), np.ones(32), "of an exactly full buffer")


@case("a partly filled buffer", "only what was added is drawn, all of it equally often")
def partly_filled(system: System) -> None:
    buffer = system.steps(Steps(capacity=1000))
    add_episode(buffer, 0, 10)
    fits(draws(buffer, 10, 400), np.ones(10), "of a partly filled buffer")


@case("google-deepmind/reverb (no seed)", "the same seed gives the same batches")
def a_seed_gives_the_same_batches(system: System) -> None:
    found = []
    for _ in range(2):
        buffer = system.steps(Steps(capacity=64, seed=3))
        add_episode(buffer, 0, 40)
        found.append(np.concatenate([buffer.sample().obs for _ in range(4)]))
        buffer.close()
    assert np.array_equal(*found), "two runs with one seed drew different items"


# ---- saves ---------------------------------------------------------------------------------------


def reloaded(
    system: System, need: Steps, buffer: StepBuffer, first: int | None = None
) -> StepBuffer:
    """Save and close a buffer, and return another that has loaded it; it held steps from `first`
    on.
    """
    with tempfile.TemporaryDirectory() as folder:
        buffer.save(Path(folder))
        buffer.close()
        other = system.steps(need)
        if first is not None:
            add_episode(other, first, 4)
            other.load(Path(folder))
        other.load(Path(folder))
    return other


@case("pytorch/rl#3056", "priorities are as before after a load")
def priorities_after_a_load(system: System) -> None:
    priorities = np.array([1.0, 2.0, 4.0, 8.0])
    need = Steps(capacity=64, prioritized=True)
    buffer = system.steps(need)
    add_episode(buffer, 0, 4)
    prioritize(buffer, priorities)
    fits(draws(reloaded(system, need, buffer), 4, 400), priorities, "after a load")


@case("pytorch/rl#4089", "after a load the next batch is the one that would have come")
def the_next_batch_after_a_load(system: System) -> None:
    need = Steps(capacity=64, seed=5)
    buffer = system.steps(need)
    add_episode(buffer, 0, 40)
    for _ in range(3):
        buffer.sample()
    with tempfile.TemporaryDirectory() as folder:
        buffer.save(Path(folder))
        wanted = buffer.sample().obs
        buffer.close()
        other = system.steps(need)
        other.load(Path(folder))
        assert np.array_equal(other.sample().obs, wanted), "another batch"


@case("danijar/dreamerv3#103", "a load replaces what a buffer holds; loading twice adds nothing")
def loading_twice(system: System) -> None:
    need = Steps(capacity=64)
    buffer = system.steps(need)
    add_episode(buffer, 0, 6)
    other = reloaded(system, need, buffer, first=20)
    assert len(other) == 6, f"holds {len(other)} items"
    fits(draws(other, 24, 200)[:6], np.ones(6), "after two loads")


@case("instadeepai/flashbax#66", "a full buffer that was loaded replaces its oldest item first")
def adding_after_a_load(system: System) -> None:
    need = Steps(capacity=16)
    buffer = system.steps(need)
    for number in range(20):
        buffer.add(moment([number], terminated=[True]))
    other = reloaded(system, need, buffer)
    for number in range(20, 80):
        other.add(moment([number], terminated=[True]))
    holds_newest(other, 80, 16)
