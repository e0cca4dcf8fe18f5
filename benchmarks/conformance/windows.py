"""Cases of windows of trajectories."""

from __future__ import annotations

import time

import numpy as np
from peers.interface import Windows

from conformance.check import System, WindowBuffer, case, fits, refusal, refuses


def filled(system: System, lengths: list[int], need: Windows) -> WindowBuffer:
    """Return a buffer of trajectories; trajectory k has the observations 100 k, 100 k + 1, ..."""
    buffer = system.windows(need)
    for number, length in enumerate(lengths):
        buffer.add(np.arange(100 * number, 100 * number + length, dtype=np.float32))
    return buffer


def firsts(buffer: WindowBuffer, num_batches: int) -> np.ndarray:
    """Return the first observations of windows, all of which lie inside a trajectory."""
    found = []
    for _ in range(num_batches):
        window = buffer.sample()
        assert window.mask.all(), "a window that should be whole has padding"
        assert (np.diff(window.obs, axis=1) == 1).all(), "a window crosses the end of a trajectory"
        found.append(window.obs[:, 0])
    return np.rint(np.concatenate(found)).astype(int)


@case(
    "pytorch/rl#2208",
    "lengths 2, 1, 3, 3, 1 and windows of 3: the two that fit, each with probability 1/2",
)
def only_windows_that_fit(system: System) -> None:
    found = firsts(filled(system, [2, 1, 3, 3, 1], Windows(64, 3)), 40)
    assert set(found.tolist()) == {200, 300}, f"drew windows at {sorted(set(found.tolist()))}"
    fits(np.bincount(found, minlength=301)[[200, 300]], np.ones(2), "the two windows")


@case("pytorch/rl#1774", "every window of a trajectory is drawn, with that of its last step")
def every_window(system: System) -> None:
    found = firsts(filled(system, [6], Windows(64, 3)), 40)
    fits(np.bincount(found, minlength=4), np.ones(4), "windows of a trajectory of 6 steps")


@case("huggingface/lerobot#918", "no window crosses the end of a trajectory")
def windows_stay_inside(system: System) -> None:
    firsts(filled(system, [5, 7, 4, 9, 3, 6], Windows(256, 3)), 40)


@case("pytorch/rl#1969", "in a full buffer no window goes from the newest step to the oldest")
def windows_of_a_full_buffer(system: System) -> None:
    buffer = filled(system, [7] * 40, Windows(50, 4))
    found = firsts(buffer, 40)
    assert 3900 in found, "the newest trajectory is not drawn"


@case("pytorch/rl#2056", "windows of one step draw every step, the last ones too")
def windows_of_one_step(system: System) -> None:
    found = firsts(filled(system, [3, 1, 2], Windows(64, 1)), 60)
    steps = [0, 1, 2, 100, 200, 201]
    assert set(found.tolist()) == set(steps), f"drew {sorted(set(found.tolist()))}"


@case(
    "pytorch/rl#2947", "padded windows: as many as were asked for, and the mask marks what is real"
)
def padded_windows(system: System) -> None:
    buffer = filled(system, [2, 5, 1], Windows(64, 4, batch=32, whole=False))
    seen = set()
    for _ in range(40):
        window = buffer.sample()
        assert window.obs.shape == (32, 4), f"got shape {window.obs.shape}"
        for obs, mask in zip(window.obs, window.mask, strict=True):
            real = obs[mask]
            assert len(real), "a window without a step"
            assert (np.diff(real) == 1).all(), f"a window of {real.tolist()}"
            seen.update(np.rint(real).astype(int).tolist())
    assert seen == {0, 1, 100, 101, 102, 103, 104, 200}, f"saw the steps {sorted(seen)}"


@case("pytorch/rl#1969", "windows longer than every trajectory are refused, not made up")
def no_window_fits(system: System) -> None:
    buffer = filled(system, [2, 3], Windows(64, 5))

    def sample() -> None:
        window = buffer.sample()
        assert window.mask.all(), "padding"
        good = (np.diff(window.obs, axis=1) == 1).all()
        assert not good, "steps that were never added"

    refuses("windows of 5 steps from trajectories of 2 and 3", sample)


@case(
    "a ring of steps",
    "a trajectory that is longer than the buffer is refused, or its newest steps are held",
)
def longer_than_the_buffer(system: System) -> None:
    buffer = system.windows(Windows(16, 3))
    text = refusal(lambda: buffer.add(np.arange(40, dtype=np.float32)))
    assert text != "", "an error without a text"
    if text is not None:
        return
    found = firsts(buffer, 20)
    assert found.min() >= 22, f"drew a window at {found.min()} of 40 steps, in a buffer of 16"


@case(
    "pytorch/rl#2669",
    "the time of a batch does not grow with the capacity: 1,000 times, at most 4 times as long",
)
def time_without_capacity(system: System) -> None:
    buffers = [filled(system, [50] * 20, Windows(capacity, 4)) for capacity in (5000, 5_000_000)]
    least = [np.inf, np.inf]
    for _ in range(12):
        for number, buffer in enumerate(buffers):
            begin = time.perf_counter()
            for _ in range(5):
                buffer.sample()
            least[number] = min(least[number], time.perf_counter() - begin)
    assert least[1] < 4 * least[0], f"{least[1] / least[0]:.1f} times as long"
