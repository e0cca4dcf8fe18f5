"""flashbax: item buffers on the device; jitted, the state is donated, and a work is one program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flashbax
import jax
import jax.numpy as jnp
import numpy as np
from peers.interface import Array, NotOfferedError, Rows
from speed import work

from device_peers.interface import (
    ADD,
    ADD_AND_SAMPLE,
    ALL,
    ALPHA,
    BOTH,
    CAPTURED,
    COMPILED,
    EAGER,
    SAMPLE,
    UPDATE,
    Call,
    Case,
    Table,
)

PACKAGE = "flashbax"
BY_XLA = "XLA puts what it can of a jitted program into CUDA graphs by itself"

LOOPS = "an eager call compiles the loops over its tree each time"


class Flashbax(Table):
    """A buffer, its state and its key: each work is a function of them."""

    plain = COMPILED  # eager calls take a hundred times as long

    def __init__(self, case: Case, compiler: str) -> None:
        if case.length > 1 or case.rollout:
            raise NotOfferedError
        self._case = case
        sizes = {"max_length": case.items, "min_length": 1, "sample_batch_size": case.batch}
        if case.prioritized:
            device = "gpu" if case.device == "cuda" else "cpu"
            made: Any = flashbax.make_prioritised_item_buffer(
                add_batches=True, priority_exponent=ALPHA, device=device, **sizes
            )
        else:
            made = flashbax.make_item_buffer(add_batches=True, **sizes)
        self._made = made
        self._td = jnp.asarray(1 - np.random.default_rng(0).random(case.batch, np.float32))
        first = next(case.content())
        self._state = made.init({name: jnp.asarray(values[0]) for name, values in first.items()})
        fill = jax.jit(made.add, donate_argnums=0)
        for rows in case.content():
            self._state = fill(self._state, _given(rows))
        self._given = _given(work.steps(case.items, case.added))
        self._key = jax.random.PRNGKey(0)
        self._last: Any = jax.jit(made.sample)(self._state, self._key)
        self._functions: dict[str, Callable[..., Any]] = {
            ADD: self._adding,
            SAMPLE: self._sampling,
            UPDATE: self._updating,
            ADD_AND_SAMPLE: lambda *now: self._sampling(*self._adding(*now)),
            ALL: lambda *now: self._updating(*self._sampling(*self._adding(*now))),
        }

    # Each is a function of all that changes or is given: state, key, batch, rows, priorities.

    def _adding(self, state: Any, key: Any, last: Any, rows: Any, td: Any) -> tuple[Any, ...]:
        return self._made.add(state, rows), key, last, rows, td

    def _sampling(self, state: Any, key: Any, last: Any, rows: Any, td: Any) -> tuple[Any, ...]:
        key, used = jax.random.split(key)
        return state, key, self._made.sample(state, used), rows, td

    def _updating(self, state: Any, key: Any, last: Any, rows: Any, td: Any) -> tuple[Any, ...]:
        return self._made.set_priorities(state, last.indices, td), key, last, rows, td

    def made(self, form: str, work: str) -> Call:
        if form in (CAPTURED, BOTH):
            raise NotOfferedError(BY_XLA)
        if form == EAGER and self._case.prioritized:
            raise NotOfferedError(LOOPS)
        function = self._functions[work]

        def changed(state: Any, key: Any, last: Any, rows: Any, td: Any) -> tuple[Any, ...]:
            return function(state, key, last, rows, td)[:3]

        run = changed if form == EAGER else jax.jit(changed, donate_argnums=(0, 1))

        def call() -> None:
            now = (self._state, self._key, self._last, self._given, self._td)
            self._state, self._key, self._last = run(*now)

        return call

    def wait(self) -> None:
        jax.block_until_ready((self._state, self._last))

    def offer(self, rows: Rows) -> None:
        self._given = _given(rows)

    def report(self, priorities: Array) -> None:
        self._td = jnp.asarray(priorities)

    def batch(self) -> Rows:
        experience = self._last.experience
        return {name: np.asarray(values) for name, values in experience.items()}

    def stored(self) -> Array:
        return np.asarray(self._state.experience["reward"]).reshape(-1).astype(np.int64)


def _given(rows: Rows) -> dict[str, Any]:
    return {name: jnp.asarray(values) for name, values in rows.items()}


make = Flashbax
