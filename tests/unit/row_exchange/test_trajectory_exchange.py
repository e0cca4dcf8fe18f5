"""Nodes exchange the rows of one step: the others are an error of all ranks."""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from deepspeed_gear.errors import PeerError
from deepspeed_gear.row_exchange.trajectory_exchange import NO_BATCH, TrajectoryExchange
from deepspeed_gear.row_exchange.trajectory_places import TrajectoryPlaces
from deepspeed_gear.sampling.selection_rounds import StatusMessage


class Rows:
    """Stands in for the row exchange of the first of two nodes, and for its channel.

    Args:
        number: What the other node sends.
    """

    count = 2
    table = SimpleNamespace(media=None)

    def __init__(self, number: int) -> None:
        self.channel = self
        self.number = number
        self.broken = False

    def send(self, head: np.ndarray, *_: Any) -> list[np.ndarray]:
        other = np.zeros(StatusMessage.NUM_WORDS, np.int64)
        other[StatusMessage.NUMBER] = self.number
        return [head, other]

    def fill(self, *given: Any) -> None:
        """Nothing comes."""

    def name(self, index: int) -> str:
        return f"node {index}"

    @contextlib.contextmanager
    def abandoned_on_error(self) -> Iterator[None]:
        try:
            yield
        except Exception:
            self.broken = True
            raise


@pytest.mark.parametrize(
    ("number", "fits"), [(NO_BATCH - 1, True), (NO_BATCH - 2, False), (0, False), (-1, False)]
)
def test_all_nodes_exchange_the_rows_of_one_step(number: int, fits: bool) -> None:
    rows: Any = Rows(number)
    moves = TrajectoryPlaces(np.array([0]), np.array([3]), 0, 2, 0, False).move(
        np.array([[False], [True]])
    )
    assert moves is not None
    exchange = TrajectoryExchange(rows)
    if fits:
        exchange.send(moves)
        assert not rows.broken
        return
    text = r"the nodes must gather the packs of the same steps, "
    text += r"got \{'node 0': 1, 'node 1': -?\d\}; all ranks"
    with pytest.raises(PeerError, match=text):
        exchange.send(moves)
    assert rows.broken
