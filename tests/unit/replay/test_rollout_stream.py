"""Rollout batches as parts of the stream of items: of tokens, resumed in the middle, and over
nodes.
"""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rollout_support import COLUMNS, TABLE, filled, micros, responses, section

from deepspeed_gear import Replay
from deepspeed_gear.batching.pack_rows import TableTrajectories
from deepspeed_gear.batching.packing_plan import PackingPlan
from deepspeed_gear.distributed.topology import RankCoordinates
from deepspeed_gear.errors import CheckpointError, DataError, NotReadyError, PeerError
from deepspeed_gear.ops.constants import SHARD_BITS
from deepspeed_gear.ops.records import Resolution
from deepspeed_gear.replay.packed.packs import Packs
from deepspeed_gear.replay.packed.rollout import Rollout
from deepspeed_gear.replay.packed.rollout_columns import RolloutColumns
from deepspeed_gear.replay.packed.table_rows import TableRows
from deepspeed_gear.row_exchange.trajectory_places import Moves
from deepspeed_gear.store.table_spec import Shard


@pytest.mark.parametrize("tokens", [60, 149, 700])
@pytest.mark.parametrize("most", [5, 12])
def test_batches_of_tokens_divide_the_stream(tokens: int, most: int) -> None:
    size = {"trajectories": most, "tokens": tokens}
    with filled(section(rollout=size, sampler={"kind": "epoch"}), count=97) as replay:
        batches: list[list[int]] = []
        while sum(map(len, batches)) < 90:
            rollout = replay.rollout()
            batches.append(rollout.trajectory_id.tolist())
            trained = [i for micro in micros(rollout) for i in micro.trajectory_id.tolist()]
            assert sorted(trained) == sorted(batches[-1])
    with filled(
        section(rollout={"trajectories": most}, sampler={"kind": "epoch"}), count=97
    ) as whole:
        stream = [
            i for _ in range(-(-97 // most) + 1) for i in whole.rollout().trajectory_id.tolist()
        ]
    taken = [i for batch in batches for i in batch]
    assert taken == stream[: len(taken)]
    steps = [len(response["tokens"]) for response in responses(97)]
    for number, batch in enumerate(batches[:-1]):
        total = sum(steps[i] for i in batch)
        assert total <= tokens
        assert len(batch) == most or total + steps[batches[number + 1][0]] > tokens


def test_batches_of_tokens_have_whole_items_of_all_tables() -> None:
    """Groups stay whole, an item of more steps than a batch is one, tables keep their shares."""
    tables = dict.fromkeys("ab", TABLE)
    mixture = {"kind": "mixture", "shares": {"a": 0.75, "b": 0.25}, "of": {"kind": "epoch"}}
    config = section(tables=tables, sampler=mixture, rollout={"trajectories": 16, "tokens": 400})
    with Replay(config) as replay:
        for name, count in (("a", 60), ("b", 20)):
            for response in responses(count, seed=count):
                replay.add(response, table=name)
        taken: dict[int, list[int]] = {0: [], 1: []}
        for _ in range(4):
            rollout = replay.rollout()
            assert rollout.num_tokens <= 400
            source = rollout.batch_columns.trajectories.source
            assert abs((source == 1).mean() - 0.25) <= 1 / len(source)
            for table, ids in taken.items():
                ids += rollout.trajectory_id[torch.from_numpy(source == table)].tolist()
        assert all(len(ids) == len(set(ids)) for ids in taken.values())
    table = {"a": {**TABLE, "group": {"column": "prompt", "size": 4}}}
    size = {"groups": 3, "tokens": 120}
    with filled(
        section(tables=table, sampler={"kind": "fifo", "unit": "group"}, rollout=size)
    ) as replay:
        for number in range(8):
            rollout = replay.rollout()
            lengths = np.bincount(rollout.group.numpy(), rollout.lengths.numpy())  # of each item
            assert sum(lengths) <= 120 or len(lengths) == 1
            assert len(rollout.lengths) == 4 * len(lengths)
            if number == 0:
                assert replay.can_sample()


@pytest.mark.parametrize("middle", [False, True])
def test_batches_of_tokens_continue(middle: bool, tmp_path: Path) -> None:
    config = section(
        rollout={"trajectories": 12, "tokens": 200, "minibatches": 2}, sampler={"kind": "fifo"}
    )

    def packs(rollout: Rollout) -> list[list[int]]:
        return [micro.trajectory_id.tolist() for micro in micros(rollout)]

    with filled(config, count=90) as replay:
        for _ in range(3):
            packs(replay.rollout())
        rollout = replay.rollout()
        steps = []
        if middle:
            rollout.set("mine", torch.arange(rollout.num_trajectories))
            steps = iter(rollout)
            list(next(steps))
        else:
            packs(rollout)
        replay.save(tmp_path)
        rest = [micro.trajectory_id.tolist() for step in steps for micro in step]
        wanted = [rest, *(packs(replay.rollout()) for _ in range(3))]
    with Replay(config) as other:
        other.load(tmp_path)
        found = [packs(other.rollout()) for _ in range(4 if middle else 3)]
    assert found == wanted[0 if middle else 1 :]


def test_a_batch_of_tokens_waits_for_its_items() -> None:
    """A selection that is missing loses nothing of the one before it."""
    table = {**TABLE, "max_times_sampled": 1}
    size = {"trajectories": 10, "tokens": 250}
    config = section(tables={"responses": table}, rollout=size, timeout_s=0.5)
    with filled(config, count=10) as replay:
        count = 0
        while replay.can_sample():
            count += replay.rollout().num_items
        assert 0 < count < 10
        with pytest.raises(NotReadyError):
            replay.rollout()
        ids = [replay.add(response) for response in responses(30, seed=1)]
        assert replay.can_sample()
        rollout = replay.rollout()
        found = rollout.trajectory_id.tolist()
        assert found[-1] in ids
        assert found == list(range(found[0], found[-1] + 1))
        assert found[0] == count


def trained(rollout: Rollout) -> list[list[tuple[Any, ...]]]:
    """What each of the steps that are left trains."""
    return [
        [
            (
                m.trajectory_id.tolist(),
                m["old"].tolist(),
                m["advantage"].tolist(),
                m.weight.tolist(),
            )
            for m in step
        ]
        for step in rollout
    ]


@pytest.mark.parametrize("steps_done", [0, 1, 3])
@pytest.mark.parametrize("kind", ["fifo", "uniform", "epoch"])
def test_a_rollout_is_resumed_between_minibatches(
    kind: str, steps_done: int, tmp_path: Path
) -> None:
    size = {"trajectories": 12, "minibatches": 2, "epochs": 2}
    config = section(sampler={"kind": kind}, rollout=size)
    with filled(config) as replay:
        list(replay.rollout())
        rollout = replay.rollout()
        for micro in rollout.forward("old"):
            micro.fill(old=micro["logp"] * torch.rand(1))
        rollout.advantages("dr_grpo")
        rollout.mask(torch.arange(rollout.num_tokens) % 3 > 0)
        steps = iter(rollout)
        for _ in range(steps_done):
            list(next(steps))
        position = replay.state_dict()
        replay.save(tmp_path)
        replay.add(responses(1)[0])
        wanted = trained(rollout), replay.rollout().trajectory_id.tolist()
        with pytest.raises(CheckpointError, match="must be loaded from the folder of its save"):
            replay.load_state_dict(position)
    with Replay(config) as other:
        other.load(tmp_path)
        other.add(responses(1)[0])
        resumed = other.rollout()
        assert resumed.steps_done == steps_done
        assert list(resumed.forward("old")) == []
        assert (trained(resumed), other.rollout().trajectory_id.tolist()) == wanted
        other.save(tmp_path / "between")
        assert not list((tmp_path / "between").glob("rollout.*"))
    longer = section(sampler={"kind": kind}, rollout={**size, "epochs": 3})
    text = "size of this config"
    with Replay(longer) as other, pytest.raises(CheckpointError, match=text):
        other.load(tmp_path)


def test_a_rollout_is_not_resumed_with_other_lengths(tmp_path: Path) -> None:
    """Truncated to another length, the columns would belong to other tokens."""
    pack = {"tokens": 48, "pad": {"multiple": 16}, "too_long": "truncate"}
    config = section(pack=pack, rollout={"trajectories": 12, "minibatches": 2})
    with filled(config) as replay:
        rollout = replay.rollout()
        rollout.advantages("dr_grpo")
        number = rollout.num_tokens
        replay.save(tmp_path)
    with Replay({**config, "pack": {**pack, "tokens": 32}}) as other:
        other.load(tmp_path)
        with pytest.raises(
            CheckpointError, match=f"must have the {number} steps with which it was saved"
        ):
            other.rollout()
    with Replay({**config, "pack": {**pack, "plan_width": 3}}) as other:
        other.load(tmp_path)
        assert other.rollout().num_tokens == number


def test_a_save_in_the_last_step_resumes_after_the_rollout_batch(tmp_path: Path) -> None:
    config = section(sampler={"kind": "epoch"}, rollout={"trajectories": 8, "minibatches": 2})
    with filled(config) as replay:
        for step in replay.rollout():
            for micro in step:
                assert micro.num_tokens
            replay.save(tmp_path)  # of each step: the last one stays
        wanted = replay.rollout().trajectory_id.tolist()
    with Replay(config) as other:
        other.load(tmp_path)
        resumed = other.rollout()
        assert (len(list(resumed)), resumed.trajectory_id.tolist()) == (2, wanted)


# ---- over nodes ----------------------------------------------------------------------------------


TYPES = {
    "half": {"dtype": "bfloat16", "rows": "1"},
    "pair": {"dtype": "float64", "shape": [2], "rows": "1"},
}
LATE = {"score": {"dtype": "float32", "rows": "1", "late": True}}


def spread_over_two(index: int, **more: Any) -> Any:
    """Return how two nodes of a table exchange its rows."""
    replica_nodes = np.eye(2, dtype=bool)
    plan = SimpleNamespace(final_row=0, num_nodes=2, index=index, replica_nodes=replica_nodes)
    return SimpleNamespace(exchange_plan=plan, **more)


class Nodes:
    """Two nodes that hold a part of a rollout batch each: one process plays both, one after the
    other.

    Args:
        whole: The rollout batch of one node.
    """

    def __init__(self, whole: RolloutColumns) -> None:
        self._whole = whole
        [part] = whole.tables
        slots = part.trajectories.resolutions[:, Resolution.SLOT].numpy()
        self.shard = np.arange(len(slots)) * 7 % 3 // 2
        self.origins = self.shard << SHARD_BITS | slots
        self._sent: list[torch.Tensor] = []

    def columns(self, shard: int) -> RolloutColumns:
        whole = self._whole
        [part] = self._whole.tables
        table = copy.copy(part.table)
        table.spec = replace(table.spec, shard=Shard(shard, 2, 0, 0))
        plane = SimpleNamespace(sum=self._send if shard == 0 else self._add)
        context: Any = SimpleNamespace(control_plane=plane)
        trajectories = part.trajectories._replace(origins=torch.from_numpy(self.origins))
        own = TableRows(part.gatherer, table, trajectories, context, spread_over_two(shard))
        return RolloutColumns([own], whole.context)

    def _send(self, values: torch.Tensor) -> torch.Tensor:
        self._sent.append(values.clone())
        return values

    def _add(self, values: torch.Tensor) -> torch.Tensor:
        return values + self._sent.pop(0)

    def together(self, read: Callable[[RolloutColumns], Any]) -> Any:
        """Return what the second node reads, with what the first one has sent."""
        read(self.columns(0))
        return read(self.columns(1))


@pytest.fixture
def replay() -> Any:
    columns = {**COLUMNS, **TYPES, **LATE}
    fields = {"tokens": {}, "logp": {}}
    with Replay(section(columns, fields=fields)) as made:
        for number, response in enumerate(responses(40)):
            made.add({**response, "half": number / 3, "pair": [number, -number / 7]})
        yield made


def test_values_and_loss_mask_are_those_of_one_node(replay: Replay) -> None:
    """And trajectories are reported by the shard that holds them."""
    whole = replay.rollout().batch_columns
    nodes = Nodes(whole)
    assert (
        nodes.columns(0).trajectories.resolutions[:, Resolution.SLOT].tolist()
        == nodes.origins.tolist()
    )
    for name in ("reward", "prompt", "half", "pair"):
        found = nodes.together(lambda columns: columns.values(name))  # noqa: B023
        np.testing.assert_array_equal(found, whole.values(name))
    np.testing.assert_array_equal(nodes.together(lambda columns: columns.mask), whole.mask)


@pytest.mark.parametrize("shard", [0, 1])
def test_a_late_column_that_one_node_lacks_is_an_error_on_all(replay: Replay, shard: int) -> None:
    whole = replay.rollout().batch_columns
    nodes = Nodes(whole)
    ids = whole.trajectories.resolutions[:, Resolution.ID].tolist()
    absent = int(np.nonzero(nodes.shard == shard)[0][2])
    for at, number in enumerate(ids):
        if at != absent:
            replay.fill(number, score=1.0)

    def read(columns: RolloutColumns) -> str:
        try:
            columns.tables[0].check_filled("score")
        except DataError as error:
            return str(error)
        return ""

    found = nodes.together(read)
    assert (
        f"late column score must be filled before it is read, got 'absent in 1 of {len(ids)}"
        in found
    )


def test_ranks_compare_what_they_read_and_which_step_they_train(
    replay: Replay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over nodes each call is collective: ranks that differ would exchange rows of
    unlike things.
    """
    columns = replay.rollout().batch_columns
    context = replace(columns.context, is_spread=True)
    rollout = Rollout(0, RolloutColumns(columns.tables, context), lambda: None)
    compared: list[Any] = []
    monkeypatch.setattr(
        context.control_plane, "compare", lambda what, value: compared.append((what, value))
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

    def send(moves: Moves) -> Callable[[], None]:
        sent.append(moves.samples.tolist())
        return lambda: None

    exchange = SimpleNamespace(send=send)
    spread = spread_over_two(0, exchange=exchange, room=SimpleNamespace(first_row=5, first_slot=1))
    resolutions = torch.zeros(2, Resolution.NUM_WORDS, dtype=torch.int64)
    resolutions[:, Resolution.NUM_STEPS] = 3
    origins = torch.tensor([0, 1 << SHARD_BITS])
    trajectories = TableTrajectories(resolutions, torch.ones(2), origins, torch.zeros(2).bool())
    spec = SimpleNamespace(shard=Shard(0, 2, 0, 0))
    given = {"first_arrival": (100, 10), "gathers_own_rows": True, "shared_prompts": None}
    table: Any = SimpleNamespace(spec=spec, **given)
    place = RankCoordinates(data_rank=0, data_world=2)
    context: Any = SimpleNamespace(agree=agree, settings=SimpleNamespace(place=place))
    none: Any = None  # no part of an exchange
    part = TableRows(none, table, trajectories, context, spread)
    plan = PackingPlan(0, 2, np.zeros(2, np.int64), np.array([1, 0]))  # each needs the other's
    planned: Any = SimpleNamespace(plan=plan, per_rank=1, prefixes=None, rows=np.zeros((0, 2)))
    packs = Packs(RolloutColumns([part], context), np.arange(2), None, planned)

    def placed() -> list[int]:
        return part.rows[:, Resolution.FIRST_ROW].tolist()

    with pytest.raises(PeerError):
        packs.fetch()
    assert placed() == [0, 0]
    packs.fetch()
    packs.fetch()  # all there
    assert (sent, placed()) == ([[1], [1]], [0, 105])
    assert part.rows[:, Resolution.SLOT].tolist() == [0, 11]
