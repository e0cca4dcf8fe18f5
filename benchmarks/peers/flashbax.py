"""flashbax: item buffers for transitions (prioritised or not), and the trajectory buffer for windows."""

from __future__ import annotations

import pickle
from importlib.metadata import version
from pathlib import Path
from typing import Any

import flashbax
import jax
import jax.numpy as jnp
import numpy as np

from peers.interface import (
    Array,
    Moment,
    NotOfferedError,
    Sampled,
    StepBuffer,
    Steps,
    System,
    Window,
    WindowBuffer,
    Windows,
)


class FlashbaxSteps(StepBuffer):
    def __init__(self, need: Steps) -> None:
        if need.n_step > 1 or need.normalize == "table":
            raise NotOfferedError
        self._draws = -(-need.batch // need.capacity)  # a batch must not exceed the capacity: take several
        batch = need.batch // self._draws
        sizes = {
            "max_length": need.capacity,
            "min_length": 1,
            "sample_batch_size": batch,
            "add_batches": True,
        }
        if need.prioritized:
            made = flashbax.make_prioritised_item_buffer(**sizes, priority_exponent=need.alpha)
            self._set = jax.jit(made.set_priorities)
        else:
            made = flashbax.make_item_buffer(**sizes)
        self._need, self._add, self._sample = need, jax.jit(made.add), jax.jit(made.sample)
        item = dict.fromkeys(("obs", "next_obs", "reward", "terminated"), jnp.zeros(()))
        self._can, self._state, self._key = made.can_sample, made.init(item), jax.random.PRNGKey(need.seed)

    def add(self, moment: Moment) -> None:
        columns = {"obs": moment.obs, "next_obs": moment.next_obs, "reward": moment.reward}
        rows = {**columns, "terminated": moment.terminated.astype(np.float32)}
        self._state = self._add(self._state, {name: jnp.asarray(values) for name, values in rows.items()})

    def sample(self) -> Sampled:
        if not self._can(self._state):
            raise ValueError("can_sample is false")
        self._key, *keys = jax.random.split(self._key, 1 + self._draws)
        found = [self._sample(self._state, key) for key in keys]
        joined = jax.tree.map(lambda *parts: np.concatenate(parts), *[one.experience for one in found])
        rows: dict[str, Array] = dict(joined)
        weight, handle = np.ones(len(rows["obs"])), None
        if self._need.prioritized:
            handle = np.concatenate([one.indices for one in found])
            weight = np.concatenate([one.probabilities for one in found]) ** -self._need.beta
        discount = self._need.gamma * (1 - rows["terminated"])
        return Sampled(rows["obs"], rows["next_obs"], rows["reward"], discount, weight / weight.max(), handle)

    def update(self, sampled: Sampled, priorities: Array) -> None:
        self._state = self._set(self._state, sampled.handle, jnp.asarray(priorities, jnp.float32))

    def save(self, folder: Path) -> None:
        (folder / "state").write_bytes(pickle.dumps(jax.device_get((self._state, self._key))))

    def load(self, folder: Path) -> None:
        self._state, self._key = jax.device_put(pickle.loads((folder / "state").read_bytes()))


class FlashbaxWindows(WindowBuffer):
    def __init__(self, need: Windows) -> None:
        if not need.whole:
            raise NotOfferedError
        made = flashbax.make_trajectory_buffer(
            add_batch_size=1,
            sample_batch_size=need.batch,
            sample_sequence_length=need.length,
            period=1,
            min_length_time_axis=need.length,
            max_length_time_axis=need.capacity,
        )
        self._buffer, self._key = made, jax.random.PRNGKey(need.seed)
        self._state: Any = made.init({"obs": jnp.zeros(())})

    def add(self, obs: Array) -> None:
        self._state = self._buffer.add(self._state, {"obs": jnp.asarray(obs)[None]})

    def sample(self) -> Window:
        if not self._buffer.can_sample(self._state):
            raise ValueError("can_sample is false")
        self._key, key = jax.random.split(self._key)
        obs = np.asarray(self._buffer.sample(self._state, key).experience["obs"])
        return Window(obs, np.ones(obs.shape, bool))


class Flashbax(System):
    name = "flashbax"

    def version(self) -> str:
        return version("flashbax")

    def steps(self, need: Steps) -> StepBuffer:
        return FlashbaxSteps(need)

    def windows(self, need: Windows) -> WindowBuffer:
        return FlashbaxWindows(need)


SYSTEM = Flashbax()
