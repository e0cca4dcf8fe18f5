"""Nodes that do not exchange the rows of one step notice it; `tests/property` compares the rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from deepspeed_gear.distributed.row_exchange.trajectory_places import (
    NO_BATCH,
    TrajectoryExchange,
    TrajectoryPlaces,
)
from deepspeed_gear.distributed.sharded.selection_agreement import StatusMessage
from deepspeed_gear.errors import PeerError


class Wire:
    """Stands in for the channel of the first of two nodes. `key`: what the other one sends."""

    count, index = 2, 0

    def __init__(self, key: int) -> None:
        self.key, self.broken = key, False

    def begin(self, messages: Sequence[np.ndarray]) -> Callable[[], list[np.ndarray]]:
        other = np.zeros(StatusMessage.NUM_WORDS, np.int64)
        other[StatusMessage.KEY] = self.key
        return lambda: [messages[0][1:], other]

    def name(self, index: int) -> str:
        return f"node {index}"

    def abandon(self, error: Exception) -> None:
        self.broken = True


class Rows:
    """Stands in for RowMessages, of columns without bytes."""

    def encode(self, outgoing: torch.Tensor, heads: torch.Tensor) -> list[np.ndarray]:
        return [np.empty(head // 8, np.int64) for head in heads.tolist()]

    def decode(self, *given: Any) -> None:
        """Nothing comes."""


@pytest.mark.parametrize(
    ("key", "fits"), [(NO_BATCH - 1, True), (NO_BATCH - 2, False), (0, False), (-1, False)]
)
def test_all_nodes_exchange_the_rows_of_one_step(key: int, fits: bool) -> None:
    wire: Any = Wire(key)
    rows: Any = Rows()
    moves = TrajectoryPlaces(np.array([0]), np.array([3]), 0, 2, 0, False).move(np.array([[False], [True]]))
    assert moves is not None
    exchange = TrajectoryExchange(wire, rows)
    if fits:
        exchange.send(moves)
        assert not wire.broken
        return
    text = (
        r"the nodes must gather the packs of the same steps, got \{'node 0': 1, 'node 1': -?\d\}; all ranks"
    )
    with pytest.raises(PeerError, match=text):
        exchange.send(moves)
    assert wire.broken
