"""flashbax on the CPU: item buffers for transitions (prioritised or not), trajectory buffers for
windows.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import flashbax
import jax
import jax.numpy as jnp
import numpy as np

from peers.interface import Array, Buffer, NotOfferedError, Rows, Steps, System, Windows


def _given(rows: Rows) -> dict[str, Any]:
    return {name: jnp.asarray(values) for name, values in rows.items()}


class FlashbaxBuffer(Buffer):
    """A buffer of flashbax and its state; a batch of several draws is joined."""

    def __init__(self, made: Any, need: Steps | Windows, draws: int = 1) -> None:
        self._need = need
        self._draws = draws
        self._added = 0
        self._add = jax.jit(made.add, donate_argnums=0)
        self._sample = jax.jit(made.sample)
        self._can = made.can_sample
        self._key = jax.random.PRNGKey(need.seed or 0)
        self._state = made.init({name: values[0] for name, values in _given(need.columns).items()})

    def add(self, rows: Rows) -> None:
        self._state = jax.block_until_ready(self._add(self._state, _given(rows)))
        self._added += len(next(iter(rows.values())))

    def can_sample(self) -> bool:
        return bool(self._can(self._state))

    def sample(self) -> Any:
        self._key, *keys = jax.random.split(self._key, 1 + self._draws)
        found = [self._sample(self._state, key) for key in keys]
        joined = (
            found[0] if self._draws == 1 else jax.tree.map(lambda *x: jnp.concatenate(x), *found)
        )
        return jax.block_until_ready(joined)

    def rows(self, found: Any) -> Rows:
        return {name: np.asarray(values) for name, values in found.experience.items()}

    def held(self) -> int:
        return min(self._added, self._need.capacity)

    def save(self, folder: Path) -> None:
        with open(folder / "state", "wb") as file:
            pickle.dump(jax.device_get((self._state, self._key)), file, protocol=5)

    def load(self, folder: Path) -> None:
        with open(folder / "state", "rb") as file:
            self._state, self._key = jax.device_put(pickle.load(file))


class FlashbaxSteps(FlashbaxBuffer):
    def __init__(self, need: Steps) -> None:
        if need.n_step > 1 or need.normalize == "table":
            raise NotOfferedError
        draws = -(
            -need.batch // need.capacity
        )  # a batch must not exceed the capacity: take several
        sizes = {
            "max_length": need.capacity,
            "min_length": 1,
            "sample_batch_size": need.batch // draws,
        }
        if need.prioritized:
            options = {**sizes, "priority_exponent": need.alpha}
            made: Any = flashbax.make_prioritised_item_buffer(add_batches=True, **options)
            self._set = jax.jit(made.set_priorities, donate_argnums=0)
        else:
            made = flashbax.make_item_buffer(add_batches=True, **sizes)
        super().__init__(made, need, draws)

    def update(self, found: Any, priorities: Array) -> None:
        given = jnp.asarray(priorities, jnp.float32)
        self._state = jax.block_until_ready(self._set(self._state, found.indices, given))

    def rows(self, found: Any) -> Rows:
        rows = super().rows(found)
        if self._need.prioritized:
            weight = np.asarray(found.probabilities) ** -self._need.beta
            rows["weight"] = weight / weight.max()
        return rows


class FlashbaxWindows(FlashbaxBuffer):
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
        super().__init__(made, need)

    def add(self, rows: Rows) -> None:
        super().add({name: values[None] for name, values in rows.items()})


class Flashbax(System):
    kinds = frozenset(("transitions", "windows", "frames", "adding", "calls", "numbered"))
    steps = FlashbaxSteps
    windows = FlashbaxWindows


SYSTEM = Flashbax("flashbax")
