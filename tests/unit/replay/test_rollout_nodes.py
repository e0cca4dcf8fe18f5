"""What a rank contributes of a rollout batch over nodes, and what all of them see together."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from rollout_support import COLUMNS, responses, section

from deepspeed_gear import Replay
from deepspeed_gear.errors import DataError, PeerError
from deepspeed_gear.ops.constants import SHARD_BITS
from deepspeed_gear.ops.records import Resolution
from deepspeed_gear.replay.rollout_data import PackSettings, Records, RolloutData, TablePart
from deepspeed_gear.store.table_spec import Shard

TYPES = {"half": {"dtype": "bfloat16", "rows": "1"}, "pair": {"dtype": "float64", "shape": [2], "rows": "1"}}
LATE = {"score": {"dtype": "float32", "rows": "1", "late": True}}


def spread_over(num_nodes: int, index: int, **more: Any) -> Any:
    """Return how the nodes of a table exchange its rows."""
    replica_nodes = np.eye(num_nodes, dtype=bool)
    plan = SimpleNamespace(final_row=0, num_nodes=num_nodes, index=index, replica_nodes=replica_nodes)
    return SimpleNamespace(plan=plan, **more)


class Nodes:
    """Two nodes that hold a part of a rollout batch each: one process plays both, one after the other.

    Args:
        whole: The rollout batch of one node.
    """

    def __init__(self, whole: RolloutData) -> None:
        self._whole, [part] = whole, whole.parts
        slots = part.records.resolutions[:, Resolution.SLOT].numpy()
        self._shard = np.arange(len(slots)) * 7 % 3 // 2
        self._origins = self._shard << SHARD_BITS | slots
        self._sent: list[torch.Tensor] = []

    def data(self, shard: int) -> RolloutData:
        whole, [part] = self._whole, self._whole.parts
        table = copy.copy(part.table)
        table.spec = replace(table.spec, shard=Shard(shard, 2, 0, 0))
        exchange = SimpleNamespace(sum=self._send if shard == 0 else self._add)
        session: Any = SimpleNamespace(exchange=exchange)
        records = part.records._replace(origins=torch.from_numpy(self._origins))
        own = TablePart(part.gatherer, table, records, session, spread_over(2, shard))
        return RolloutData([own], whole.settings, whole.ops, whole.session)

    def _send(self, values: torch.Tensor) -> torch.Tensor:
        self._sent.append(values.clone())
        return values

    def _add(self, values: torch.Tensor) -> torch.Tensor:
        return values + self._sent.pop(0)

    def together(self, read: Callable[[RolloutData], Any]) -> Any:
        """Return what the second node reads, with what the first one has sent."""
        read(self.data(0))
        return read(self.data(1))


@pytest.fixture
def replay() -> Any:
    columns, fields = {**COLUMNS, **TYPES, **LATE}, {"tokens": {}, "logp": {}}
    with Replay(section(columns, fields=fields)) as made:
        for number, response in enumerate(responses(40)):
            made.add({**response, "half": number / 3, "pair": [number, -number / 7]})
        yield made


def test_values_and_loss_mask_are_those_of_one_node(replay: Replay) -> None:
    whole = replay.rollout()._data
    nodes = Nodes(whole)
    for name in ("reward", "prompt", "half", "pair"):
        np.testing.assert_array_equal(nodes.together(lambda data: data.values(name)), whole.values(name))  # noqa: B023
    np.testing.assert_array_equal(nodes.together(lambda data: data.mask), whole.mask)


@pytest.mark.parametrize("shard", [0, 1])
def test_a_late_column_that_one_node_lacks_is_an_error_on_all(replay: Replay, shard: int) -> None:
    whole = replay.rollout()._data
    nodes, ids = Nodes(whole), whole.records[:, Resolution.ID].tolist()
    absent = int(np.nonzero(nodes._shard == shard)[0][2])
    for at, number in enumerate(ids):
        if at != absent:
            replay.fill(number, score=1.0)

    def read(data: RolloutData) -> str:
        try:
            data.parts[0].check_filled("score")
        except DataError as error:
            return str(error)
        return ""

    found = nodes.together(read)
    assert f"late column score must be filled before it is read, got 'absent in 1 of {len(ids)}" in found


def test_records_are_reported_by_the_shard_that_holds_them(replay: Replay) -> None:
    nodes = Nodes(replay.rollout()._data)
    assert nodes.data(0).records[:, Resolution.SLOT].tolist() == nodes._origins.tolist()


def test_ranks_compare_what_they_read_and_which_step_they_train(
    replay: Replay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over nodes each call is collective: ranks that differ would exchange rows of unlike things."""
    rollout, compared = replay.rollout(), []
    rollout._data.is_spread = True
    monkeypatch.setattr(
        rollout._data.session.exchange, "compare", lambda what, value: compared.append((what, value))
    )
    rollout.values("reward")
    next(iter(rollout.step(1)))
    next(rollout.forward("old_logp", tokens=256))
    number = f"the train step of rollout batch {rollout.number}"
    assert compared == [
        ("the columns of a rollout batch that are read", ("reward",)),
        (number, 1),
        ("rollout.forward: columns and tokens", (["old_logp"], 256)),
    ]


def test_an_exchange_that_fails_is_made_again() -> None:
    """Rows that have not come are not accounted as there."""
    sent: list[list[int]] = []
    failures = iter([PeerError("node1", "must answer"), None])

    def agree(action: Callable[[], None]) -> None:
        action()
        if (error := next(failures)) is not None:
            raise error

    exchange = SimpleNamespace(send=lambda moves: sent.append(moves.samples.tolist()))
    spread = spread_over(2, 0, exchange=exchange, room=SimpleNamespace(first_row=5, first_slot=1))
    resolutions = torch.zeros(2, Resolution.NUM_WORDS, dtype=torch.int64)
    resolutions[:, Resolution.NUM_STEPS] = 3
    records = Records(resolutions, torch.ones(2), torch.tensor([0, 1 << SHARD_BITS]))
    spec = SimpleNamespace(shard=Shard(0, 2, 0, 0))
    table: Any = SimpleNamespace(spec=spec, first_arrival=(100, 10), gathers_own_rows=True)
    session: Any = SimpleNamespace(agree=agree)
    settings = cast(PackSettings, SimpleNamespace())
    part = TablePart(cast(Any, None), table, records, session, spread)
    data = RolloutData([part], settings, cast(Any, None), session)

    def placed() -> list[int]:
        return part.rows[:, Resolution.FIRST_ROW].tolist()

    packs: Any = SimpleNamespace(index=np.array([0, 1]), replica=np.array([1, 0]))  # each needs the other's
    with pytest.raises(PeerError):
        data.fetch(packs)
    assert placed() == [0, 0]
    data.fetch(packs)
    data.fetch(packs)  # all there
    assert (sent, placed()) == ([[1], [1]], [0, 105])
    assert part.rows[:, Resolution.SLOT].tolist() == [0, 11]
