"""Saved tables of replicas on devices, dealt to another number of replicas."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from ring_cases import SAMPLERS, online, step_of, stored_slots, trajectories
from torch import Tensor

from deepspeed_gear import DeviceReplay
from deepspeed_gear.device.device_checkpoint import deal
from deepspeed_gear.errors import CheckpointError
from deepspeed_gear.ops.constants import tree_size
from deepspeed_gear.ops.records import OpenTrajectory, RingState, Slot, SlotState, UpdateCount
from deepspeed_gear.store.table_spec import RETURN_TO_GO

ENVS = 6
Content = dict[str, Tensor]


def section(sampler: str, num_envs: int | None, steps: int = 72) -> dict[str, Any]:
    envs = {} if num_envs is None else {"num_envs": num_envs}
    return online(SAMPLERS[sampler], table={"capacity_steps": steps, **envs})


def fill(replay: DeviceReplay, first: int, turns: int) -> None:
    """Add trajectories, or steps of environments, whose numbers begin at `first`; report
    priorities.
    """
    for turn in range(turns):
        number = first + 3 * turn
        if replay.table.num_envs:
            for step in range(2 + turn % 3):
                row, following = step_of(trajectories(replay.table.num_envs, 5, number * 10), step)
                row["terminated"] = torch.arange(replay.table.num_envs) % 4 == turn % 4
                replay.add_steps_(row, following)
        else:
            replay.add_(trajectories(3, 1 + turn % 6, number))
        batch = replay.sample()
        if replay.config.item_sampler.has_priorities:
            replay.update_priorities(batch, torch.rand(batch.num_samples) * 3)


def content_of(replay: DeviceReplay) -> dict[str, Tensor]:
    content: dict[str, Tensor] = replay.export_table()["content"]["main"]
    return content


def items(content: dict[str, Tensor], by_row: bool) -> list[tuple[Any, ...]]:
    """The stored trajectories: columns, masses and priorities, independent of their places."""
    found = []
    for at, slot in enumerate(content["slots"].tolist()):
        if slot[Slot.STATE] != SlotState.COMMITTED:
            continue
        first = slot[Slot.FIRST_ROW]
        steps = slot[Slot.NUM_STEPS]
        rows = slot[Slot.NUM_ROWS]
        place = slice(first, first + steps) if by_row else slice(at, at + 1)
        found.append(
            (
                slot[Slot.BORN],
                int(content["column/task"][at]),
                slot[Slot.TIMES_SAMPLED],
                str(content["column/observation"][first : first + rows].tolist()),
                str(content["column/reward"][first : first + steps].tolist()),
                str(content[f"column/{RETURN_TO_GO}"][first : first + steps].tolist()),
                str(content["sums"][place].tolist()),
                str(content["priorities"][place].tolist()) if len(content["priorities"]) else "",
            )
        )
    return sorted(found)


@contextlib.contextmanager
def replays(count: int, made: dict[str, Any]) -> Iterator[list[DeviceReplay]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(DeviceReplay(made, "cpu")) for _ in range(count)]


def saved_of(count: int, made: dict[str, Any]) -> list[Content]:
    """Fill the tables of replicas; return what each saves."""
    with replays(count, made) as old:
        for number, replay in enumerate(old):
            fill(replay, 100 * number, 7 + number)
        return [content_of(replay) for replay in old]


def dealt_to(targets: list[DeviceReplay], saved: list[Content]) -> list[tuple[Content, int]]:
    count = len(targets)
    return [deal(replay.table, saved, number, count) for number, replay in enumerate(targets)]


@pytest.mark.parametrize("num_envs", [None, ENVS])
@pytest.mark.parametrize(
    "sampler", ["uniform steps", "prioritized", "by the table", "prioritized trajectories"]
)
@pytest.mark.parametrize(("before", "after"), [(3, 2), (1, 3), (2, 1)])
def test_every_trajectory_is_held_once_with_its_priorities(
    sampler: str, num_envs: int | None, before: int, after: int
) -> None:
    torch.manual_seed(before)
    saved = saved_of(before, section(sampler, num_envs))
    with replays(after, section(sampler, num_envs, 72 * before)) as new:
        found = dealt_to(new, saved)
        by_row = new[0].table.items.by_row
        assert [num_left_out for _, num_left_out in found] == [0] * after
        wanted = sorted(item for content in saved for item in items(content, by_row))
        assert sorted(item for content, _ in found for item in items(content, by_row)) == wanted
        states = [content["state"] for content, _ in found]
        sizes = [int(state[RingState.NEXT] - state[RingState.TAIL]) for state in states]
        assert max(sizes) - min(sizes) <= max(1, ENVS if num_envs else 1)
        before_all = torch.stack([content["state"] for content in saved]).sum(0)
        applied = RingState.COUNTS + UpdateCount.APPLIED
        assert sum(int(state[applied]) for state in states) == before_all[applied]
        for state in states:  # sample numbers continue after those of all saved replicas
            assert state[RingState.SAMPLES] * after >= before_all[RingState.SAMPLES]
        for replay, (content, _) in zip(new, found, strict=True):
            check_goes_on(replay, content)


def check_goes_on(replay: DeviceReplay, content: dict[str, Tensor]) -> None:
    """The dealt table works: its tree is right, batches come from it, and additions evict the
    oldest.
    """
    state = replay.export_table()
    replay.import_table({**state, "content": {"main": content}})
    table = replay.table
    sums = table.sums.clone()
    table.ops.tree_build_(sums, table.num_items)
    assert torch.equal(sums, table.sums)
    assert len(sums) == tree_size(table.num_items)
    batch = replay.sample()
    if table.num_envs == 0:
        assert torch.equal(batch["action"][:, 0].long(), batch["task"] * 100 + batch.anchor)
    newest = int(table.state[RingState.NEXT])
    fill(replay, 5000, 60)
    assert replay.num_steps >= 40
    stored = stored_slots(replay)
    (tail, end) = table.state[[RingState.TAIL, RingState.NEXT]].tolist()
    assert sorted(stored[:, Slot.ID].tolist()) == list(range(tail, end))
    assert tail > newest - 1, "all dealt ones are evicted, oldest first"
    used = torch.zeros(table.num_rows, dtype=torch.int64)
    for slot in stored.tolist():
        used[slot[Slot.FIRST_ROW] : slot[Slot.FIRST_ROW] + slot[Slot.NUM_ROWS]] += 1
    assert int(used.max()) == 1


@pytest.mark.parametrize("num_envs", [None, ENVS])
def test_the_oldest_are_left_out_where_a_table_is_too_small(num_envs: int | None) -> None:
    saved = saved_of(3, section("prioritized", num_envs, 240))
    with replays(1, section("prioritized", num_envs, 72)) as new:
        ((content, num_left_out),) = dealt_to(new, saved)
        stored = items(content, True)
        every = sorted(item for of in saved for item in items(of, True))
        assert num_left_out == len(every) - len(stored) > 0
        assert min(item[0] for item in stored) > every[0][0]
        if num_envs:
            assert not content["opened"][:, OpenTrajectory.NUM_STEPS].any()


def test_every_trajectory_keeps_how_often_it_was_drawn() -> None:
    made = online(
        {"kind": "uniform"}, batch_size=4, table={"capacity_steps": 200, "max_times_sampled": 3}
    )
    saved = saved_of(3, made)
    before = sorted(item for content in saved for item in items(content, False))
    assert {item[2] for item in before} == {0, 1, 2}
    with replays(2, made) as new:
        dealt = dealt_to(new, saved)
        assert sorted(item for content, _ in dealt for item in items(content, False)) == before


def test_other_columns_are_refused_by_name() -> None:
    with replays(2, section("prioritized", None)) as old:
        fill(old[0], 0, 3)
        content = content_of(old[0])
        for name, change, rule in [
            ("column/action", Tensor.double, "must be torch.float32"),
            ("column/reward", lambda values: values[:, None], "must be"),
            ("priorities", lambda values: values[:0], "must be kept"),
        ]:
            with pytest.raises(CheckpointError, match=f"{name} of shard-0 {rule}"):
                deal(old[1].table, [{**content, name: change(content[name])}], 0, 2)
        with pytest.raises(
            CheckpointError, match="must have the tensors of this config's table, got 'minima'"
        ):
            deal(old[1].table, [{n: v for n, v in content.items() if n != "minima"}], 0, 2)
