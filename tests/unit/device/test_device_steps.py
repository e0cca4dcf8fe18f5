"""Steps of environments, added one by one to a table on a device, against a writer that publishes
each.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from ring_cases import (
    COLUMNS,
    PRIORITIZED,
    SAMPLERS,
    Pair,
    assert_rows,
    assert_same,
    device_and_host,
    online,
    trajectories,
)
from torch import Tensor

from deepspeed_gear import DeviceReplay
from deepspeed_gear.errors import ConfigError, SchemaError, ShapeError, StoreError
from deepspeed_gear.ops.records import OpenTrajectory

ENVS = 4
LONGEST = 5


class Episodes:
    """Environments whose observations say which episode it is, and which step of it.

    With `is_longer` no trajectory has only one step: a writer on the host commits those of a call
    first.
    """

    def __init__(self, num_envs: int = ENVS, seed: int = 0, is_longer: bool = False) -> None:
        self.is_longer = is_longer
        self.generator = torch.Generator().manual_seed(seed)
        self.episode = torch.arange(num_envs)
        self.at = torch.zeros(num_envs, dtype=torch.int64)
        self.begun = num_envs
        self.resets = torch.zeros(num_envs, dtype=torch.bool)

    def observation(self) -> Tensor:
        return (self.episode * 100 + self.at)[:, None].float().expand(-1, 3).contiguous()

    def begin(self, which: Tensor) -> None:
        count = int(which.sum())
        self.episode[which] = torch.arange(self.begun, self.begun + count)
        self.at[which] = 0
        self.begun = self.begun + count

    def step(self, autoreset: str) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """Step; return the columns, the state after the step, and the first of an episode that has
        begun.
        """
        count = len(self.episode)
        ends = ~self.resets
        if self.is_longer:
            ends &= self.at % LONGEST > 0
        columns = {
            "observation": self.observation(),
            "action": (self.episode * 100 + self.at)[:, None].float().expand(-1, 2).contiguous(),
            "reward": torch.rand(count, generator=self.generator),
            "terminated": (torch.rand(count, generator=self.generator) < 0.15) & ends,
            "truncated": (torch.rand(count, generator=self.generator) < 0.1) & ends,
            "task": self.episode.clone(),
        }
        ended = columns["terminated"] | columns["truncated"]
        if autoreset == "next_step" and self.resets.any():
            resets = self.resets
            self.at[~resets] += 1
            self.begin(resets)
        else:
            self.at += 1
        following = self.observation()
        if autoreset == "same_step":
            self.begin(ended)
        else:
            self.resets = ended
        return columns, following, self.observation()

    def add_to(self, replay: DeviceReplay) -> None:
        columns, following, _ = self.step("same_step")
        replay.add_steps_(columns, {"observation": following})


def section(sampler: dict[str, Any], num_envs: int = ENVS, **options: Any) -> dict[str, Any]:
    table = {"capacity_steps": 4000, "max_length": LONGEST, "num_envs": num_envs} | options.pop(
        "table", {}
    )
    return online(sampler, table=table, **options)


class Writer:
    """Adds steps to a table on a device, and to one in host memory by a writer that
    publishes each.
    """

    def __init__(self, both: Pair, num_envs: int, autoreset: str = "same_step") -> None:
        self.both = both
        self.autoreset = autoreset
        self.envs = Episodes(num_envs, is_longer=True)
        self.writer = both.host.vector_writer(num_envs, autoreset=autoreset)
        self.writer.reset(observation=self.envs.observation().numpy())

    def step(self) -> None:
        columns, following, now = self.envs.step(self.autoreset)
        self.both.device.add_steps_(columns, {"observation": following}, autoreset=self.autoreset)
        is_same = self.autoreset == "same_step"
        final = {"observation": following.numpy()} if is_same else None
        done_by = {
            name: values.numpy() for name, values in columns.items() if name != "observation"
        }
        self.writer.step(
            final, publish=True, observation=(now if is_same else following).numpy(), **done_by
        )


WITH_TOP_K = {**SAMPLERS, "top-k": {"kind": "top_k"}}


@pytest.mark.parametrize("sampler", list(WITH_TOP_K))
@pytest.mark.parametrize("autoreset", ["same_step", "next_step"])
def test_batches_are_those_of_a_writer_that_publishes_each_step(
    sampler: str, autoreset: str
) -> None:
    # Priorities of steps follow the order of the rows, which is that of the host for one
    # environment.
    options = WITH_TOP_K[sampler]
    by_row = options.get("unit") == "step" and options["kind"] == "prioritized"
    num_envs = 1 if by_row else ENVS
    made = section(options, num_envs, seed=3, batch_size=ENVS if sampler == "top-k" else 32)
    with device_and_host(made) as both:
        writer = Writer(both, num_envs, autoreset)
        for turn in range(60):
            writer.step()
            batch = both.sample()
            if both.device.config.item_sampler.has_priorities:
                both.report(torch.rand(batch.num_samples))
            assert both.device.num_steps == both.host.num_steps, turn
        assert len(both.device) == len(both.host) > 10 * num_envs
        both.device.check()


def test_a_late_priority_of_a_step_that_is_no_anchor_changes_nothing() -> None:
    """Batches are those of the host, whose priorities come as late."""
    with device_and_host(section({**PRIORITIZED, "anchors": "end"}, 1, seed=3)) as both:
        writer = Writer(both, 1)
        for turn in range(30):
            writer.step()
            if turn:
                both.report(torch.full((32,), 2.0 + turn))
            batch = both.sample()
            assert torch.equal(batch.anchor, batch.num_steps - 1)


@pytest.mark.parametrize("sampler", ["uniform steps", "prioritized"])
def test_the_oldest_are_evicted_and_windows_stay_whole(sampler: str) -> None:
    """Far more steps than fit: every row of a batch is of the episode and the step that it should
    be.
    """
    made = section(SAMPLERS[sampler], table={"capacity_steps": 2 * ENVS * LONGEST})
    envs = Episodes(seed=5)
    with DeviceReplay(made, "cpu") as replay:
        seen: set[int] = set()
        for turn in range(150):
            envs.add_to(replay)
            batch = replay.sample()
            number = batch["task"] * 100 + batch["observation"][:, 1, 0].long() % 100
            assert_rows(batch, number)
            seen |= set(batch["task"].tolist())
            if turn > 40:
                assert replay.num_steps >= 2 * ENVS * LONGEST - ENVS
                assert replay.statistics()["dropped"] == 0
        assert len(seen) > 60
        replay.clear()
        assert replay.num_steps == len(replay) == 0
        envs.add_to(replay)
        assert replay.num_steps == len(replay) == ENVS


def test_a_mask_leaves_environments_out_and_end_steps_ends_trajectories() -> None:
    envs = Episodes()
    with DeviceReplay(section(SAMPLERS["uniform steps"]), "cpu") as replay:
        columns, following, _ = envs.step("same_step")
        columns["terminated"].zero_()
        columns["truncated"].zero_()
        mask = torch.tensor([True, False, True, True])
        replay.add_steps_(columns, {"observation": following}, mask=mask)
        assert replay.num_steps == len(replay) == 3
        replay.end_steps_(torch.tensor([True, True, False, False]))
        assert replay.table.opened[:, OpenTrajectory.NUM_STEPS].tolist() == [0, 0, 1, 1]
        assert int(replay.table.columns["truncated"].sum()) == 1
        replay.add_steps_(columns, {"observation": following})
        assert (replay.num_steps, len(replay)) == (7, 5)
        replay.end_steps_()
        assert int(replay.table.columns["truncated"].sum()) == 5
        with pytest.raises(ShapeError, match=r"mask must be \[4\], a row per environment"):
            replay.end_steps_(torch.ones(3, dtype=torch.bool))


def test_after_a_load_trajectories_begin_anew(tmp_path: Path) -> None:
    envs = Episodes()
    made = section(PRIORITIZED)
    with DeviceReplay(made, "cpu") as replay, DeviceReplay(made, "cpu") as other:
        for _ in range(9):
            envs.add_to(replay)
        replay.update_priorities(replay.sample(), torch.rand(32))
        replay.save(tmp_path)
        other.load(tmp_path)
        assert_same(other.sample(), replay.sample())
        assert not other.table.opened[:, OpenTrajectory.NUM_STEPS].any()
        begun = len(other)
        envs.add_to(other)
        assert len(other) == begun + ENVS


def test_columns_that_do_not_fit_are_refused_before_anything_changes() -> None:
    columns, following, _ = Episodes().step("same_step")
    states = {"observation": following}
    wrong: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (SchemaError, "columns: column action must be given", {"columns": states}),
        (SchemaError, "must be one of", {"columns": {**columns, "other": following}}),
        (SchemaError, "following: column observation must be given", {"following": {}}),
        (SchemaError, "following: column action", {"following": {**states, "action": following}}),
        (
            SchemaError,
            "column reward must be float32",
            {"columns": {**columns, "reward": columns["task"]}},
        ),
        (ShapeError, "a row per environment", {"columns": {**columns, "reward": torch.zeros(3)}}),
        (SchemaError, "mask must be bool", {"mask": torch.ones(ENVS)}),
        (ConfigError, "autoreset must be one of", {"autoreset": "never"}),
    ]
    with DeviceReplay(section(SAMPLERS["uniform steps"]), "cpu") as replay:
        for error, text, change in wrong:
            with pytest.raises(error, match=text):
                replay.add_steps_(**{"columns": columns, "following": states, **change})
        assert replay.num_steps == 0
        with pytest.raises(StoreError, match="use add_steps_"):
            replay.add_(trajectories(2, 4))
    with (
        DeviceReplay(online(), "cpu") as replay,
        pytest.raises(StoreError, match=r"set gear.tables.main.num_envs"),
    ):
        replay.add_steps_(columns, states)


def test_ends_may_be_given_where_the_schema_has_no_such_columns() -> None:
    schema = {"columns": {name: column for name, column in COLUMNS.items() if name != "truncated"}}
    envs = Episodes()
    made = section(SAMPLERS["uniform steps"], table={"schema": schema})
    with DeviceReplay(made, "cpu") as replay:
        columns, following, _ = envs.step("same_step")
        columns["truncated"].fill_(True)
        for _ in range(3):
            replay.add_steps_(columns, {"observation": following})
        assert replay.num_steps == len(replay) == 3 * ENVS
        replay.end_steps_()
