"""flashbax on the CPU: item buffers for transitions, the trajectory buffer for windows."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

import flashbax
import jax
import jax.numpy as jnp
import numpy as np

from speed import work
from speed.work import Adding, Array, Batches, Rows

CHUNK = 100_000


def version() -> str:
    return version_of("flashbax")


def _given(rows: Rows) -> dict[str, Any]:
    return {name: jnp.asarray(values) for name, values in rows.items()}


class FlashbaxBatches(Batches):
    def __init__(self, made: Any, state: Any, lengths: tuple[int, ...]) -> None:
        self._state, self._key, self._shape = state, jax.random.PRNGKey(0), lengths
        self._sample = jax.jit(lambda state, key: made.sample(state, key))
        if hasattr(made, "set_priorities"):
            self._set = jax.jit(made.set_priorities, donate_argnums=0)

    def sample(self) -> Any:
        self._key, key = jax.random.split(self._key)
        return jax.block_until_ready(self._sample(self._state, key))

    def update(self, found: Any, priorities: Array) -> None:
        self._state = jax.block_until_ready(self._set(self._state, found.indices, priorities))

    def rows(self, found: Any) -> Rows:
        return {name: np.asarray(values) for name, values in found.experience.items()}

    def save(self, folder: Path) -> None:
        with open(folder / "state", "wb") as file:
            pickle.dump(jax.device_get(self._state), file, protocol=5)

    def load(self, folder: Path) -> None:
        with open(folder / "state", "rb") as file:
            self._state = jax.device_put(pickle.load(file))


def _items(count: int, batch: int, prioritized: bool, alpha: float) -> tuple[Any, Any]:
    sizes = {"max_length": count, "min_length": 1, "sample_batch_size": batch, "add_batches": True}
    if prioritized:
        made: Any = flashbax.make_prioritised_item_buffer(**sizes, priority_exponent=alpha)
    else:
        made = flashbax.make_item_buffer(**sizes)
    return made, jax.jit(made.add, donate_argnums=0)


def transitions(count: int, batch: int, prioritized: bool, fill: int | None = None) -> Batches:
    made, add = _items(count, batch, prioritized, 0.6)
    state = made.init({name: values[0] for name, values in _given(work.steps(0, 1)).items()})
    for first in range(0, fill or count, CHUNK):
        state = add(state, _given(work.steps(first, min(CHUNK, (fill or count) - first))))
    return FlashbaxBatches(made, state, (batch,))


def _parts(rows: Rows, count: int, batch: int, length: int, parts: Any) -> Batches:
    made = flashbax.make_trajectory_buffer(
        add_batch_size=1,
        sample_batch_size=batch,
        sample_sequence_length=length,
        period=1,
        min_length_time_axis=length,
        max_length_time_axis=count,
    )
    add = jax.jit(made.add, donate_argnums=0)
    state = made.init({name: values[0] for name, values in _given(rows).items()})
    for part in parts:
        state = add(state, {name: values[None] for name, values in _given(part).items()})
    return FlashbaxBatches(made, state, (batch, length))


def windows(count: int, batch: int, length: int) -> Batches:
    parts = work.trajectories(count // work.EPISODE)
    return _parts(next(work.trajectories(1)), count, batch, length, parts)


def frames(count: int, batch: int, length: int) -> Batches:
    parts = work.frames(count // 500, 500)
    return _parts(next(work.frames(1, 500)), count, batch, length, parts)


class FlashbaxAdding(Adding):
    def __init__(self, num_envs: int, capacity: int) -> None:
        sizes = {"max_length": capacity, "min_length": 1, "sample_batch_size": 256, "add_batches": True}
        self._made = flashbax.make_item_buffer(**sizes)
        self._add, self._sample = jax.jit(self._made.add, donate_argnums=0), jax.jit(self._made.sample)
        first = _given(next(work.environment_steps(num_envs)))
        self._state = self._made.init({name: values[0] for name, values in first.items()})
        self._key, self._count, self._capacity, self._envs = jax.random.PRNGKey(0), 0, capacity, num_envs

    def add(self, step: Rows) -> None:
        self._state = jax.block_until_ready(self._add(self._state, _given(step)))
        self._count += self._envs

    def sample(self) -> Any:
        self._key, key = jax.random.split(self._key)
        return jax.block_until_ready(self._sample(self._state, key))

    def held(self) -> int:
        return min(self._count, self._capacity)


adding = FlashbaxAdding


def numbered(count: int, batch: int) -> tuple[Callable[[], Array], Callable[[], None]]:
    made, add = _items(count, batch, True, 1.0)
    state = made.init({"number": jnp.zeros((), jnp.int32)})
    for first in range(0, count, 1 << 20):
        state = add(state, {"number": jnp.arange(first, min(first + (1 << 20), count), dtype=jnp.int32)})
    batches = FlashbaxBatches(made, state, (batch,))
    return lambda: batches.rows(batches.sample())["number"], lambda: None
