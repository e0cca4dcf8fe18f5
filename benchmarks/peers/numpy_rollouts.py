"""Rollouts in a list of NumPy arrays, packed in their order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
from speed.leases import Leases
from speed.rollouts import Micro, Rollouts, budget_packs

from peers.interface import Array, Rows


def _packs(step: list[Rows], *names: str) -> Iterator[Rows]:
    """Yield the micro batches of a step."""
    lengths = [len(response["tokens"]) for response in step]
    for pack in budget_packs(lengths):
        micro = {name: np.concatenate([step[at][name] for at in pack]) for name in names}
        micro["tokens"] = micro["tokens"].astype(np.int64)
        micro["targets"] = np.roll(micro["tokens"], -1)
        micro["position_ids"] = np.concatenate([np.arange(lengths[at]) for at in pack])
        micro["cu_seqlens"] = np.cumsum([0, *(lengths[at] for at in pack)], dtype=np.int32)
        micro["reward"] = np.array([step[at]["reward"] for at in pack])
        yield micro


class NumpyRollouts(Rollouts):
    def __init__(self, num_tokens: int, groups: int, step: int) -> None:
        self._groups: deque[list[Rows]] = deque()
        self._size = step
        self._filled: list[Array] = []

    def add(self, number: int, group: list[Rows]) -> None:
        self._groups.append([{name: np.array(rows) for name, rows in one.items()} for one in group])

    def select(self) -> Any:
        return [response for _ in range(self._size) for response in self._groups.popleft()]

    def pack(self, step: Any) -> Iterator[Any]:
        return _packs(step, "tokens")

    def tokens(self, micro: Any) -> Array:
        return np.asarray(micro["tokens"])

    def fill(self, micro: Any, values: Array) -> None:
        self._filled += np.split(values, micro["cu_seqlens"][1:-1])

    def filled(self, step: Any) -> None:
        for response, values in zip(step, self._filled, strict=True):
            response["ref_logp"] = values
        self._filled = []

    def train(self, step: Any) -> Iterator[Any]:
        return _packs(step, "tokens", "loss_mask", "logp", "ref_logp")

    def micro(self, found: Any) -> Micro:
        first = found["tokens"][found["cu_seqlens"][:-1]]
        values = (found[name] for name in ("tokens", "loss_mask", "logp", "ref_logp"))
        return Micro(found["tokens"], first, found["reward"], *values)

    def close(self) -> None:
        pass


DTYPES = {"tokens": np.int32, "loss_mask": bool, "logp": np.float32, "reward": np.float32}


class NumpyLeases(Leases):
    """Groups in a list; a lease is a number, and no account is kept."""

    def __init__(self, groups: int) -> None:
        self._groups: list[list[Rows]] = []

    def lease(self, count: int) -> list[Any]:
        return list(range(count))

    def commit(self, lease: Any, responses: list[dict[str, Any]]) -> None:
        self._groups.append(
            [
                {name: np.array(rows, DTYPES[name]) for name, rows in one.items()}
                for one in responses
            ]
        )

    def consume(self) -> None:
        self._groups = []

    def check(self, responses: list[dict[str, Any]]) -> None:
        assert self._groups, "no group is held"
        for held in self._groups:
            for found, wanted in zip(held, responses, strict=True):
                for name, rows in wanted.items():
                    assert np.array_equal(found[name], np.array(rows, found[name].dtype)), name
        self.consume()

    def close(self) -> None:
        pass
