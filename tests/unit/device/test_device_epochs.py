"""Epochs over a table on a device, here the host's: order, changes of the table, checkpoints,
PPO.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from gear_support import SCHEMA, config_of, lengths_of, trajectory, write_dataset
from ring_cases import (
    WINDOWS,
    Pair,
    assert_same,
    device_and_host,
    on_device,
    online,
    step_of,
    trajectories,
)
from torch import Tensor, nn

from deepspeed_gear import DeviceReplay
from deepspeed_gear.checkpoint import position
from deepspeed_gear.device import device_checkpoint
from deepspeed_gear.errors import ConfigError, DataError
from deepspeed_gear.ops import load_backend
from deepspeed_gear.ops.records import RingState
from deepspeed_gear.sampling.mass_rules import random_key_of

STEPS = {"kind": "epoch", "unit": "step"}
#: By what the epochs go over: steps, some steps, or trajectories.
EPOCHS: dict[str, dict[str, Any]] = {
    "steps": STEPS,
    "steps, whole batches": {**STEPS, "tail": "drop"},
    "every third step": {**STEPS, "anchors": {"every": 3}},
    "trajectories": {"kind": "epoch"},
    "trajectories, whole batches": {"kind": "epoch", "tail": "drop"},
}


def sample(both: Pair) -> Any:
    batch = both.sample()
    assert torch.equal(*(each.epoch for each in both.batches))
    return batch


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("data") / "set", lengths_of(40), {"eval": 0.2})


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("kind", EPOCHS)
def test_a_data_set_gives_the_batches_of_host_memory(
    data: Path, kind: str, accumulation: int
) -> None:
    section = config_of(data, sampler=EPOCHS[kind], fields=WINDOWS, batch_size=10, seed=5)
    section["gradient_accumulation_steps"] = accumulation
    with device_and_host(on_device(section)) as both:
        epoch = 0
        for turn in range(60 * accumulation):
            batch = sample(both)
            epoch = max(epoch, int(batch.epoch.max()))
            if turn % accumulation == accumulation - 1:
                assert both.device.state_dict()["train"] == both.host.state_dict()["train"]
        assert epoch > 1 or kind.startswith("steps")
        assert both.device.statistics()["epochs_cut"] == 0


@pytest.mark.parametrize("kind", EPOCHS)
def test_rollouts_that_replace_each_other_give_the_batches_of_host_memory(kind: str) -> None:
    """Each is read for whole epochs, as by PPO, until the next one evicts it."""
    num = 12
    longest = 10
    room = {"capacity_steps": num * longest, "max_length": longest, "capacity_trajectories": num}
    fields = {"observation": {"offset": -2, "length": 4, "pad": "edge"}, "action": {}, "task": {}}
    section = {
        "tables": {"main": {**room, "remove": "fifo", "placement": "device"}},
        "sampler": EPOCHS[kind],
        "fields": fields,
        "batch_size": 5,
        "seed": 3,
    }
    with device_and_host(section, {"main": SCHEMA}) as both:
        epoch = 0
        for rollout in range(4):
            for number in range(num):
                both.add(trajectory(rollout * num + number, longest))
            for _ in range(2 * (num if "traj" in kind else num * longest)):
                batch = sample(both)
                # A rollout ends with an epoch, or with a tail that is left out.
                size = int(both.device.table.state[RingState.EPOCH_SIZE])
                at = both.device.table.state[RingState.SAMPLES]
                left = size - int(at - both.device.table.state[RingState.EPOCH_FIRST])
                if left == 0 or (left < 5 and "whole" in kind):
                    break
            epoch = max(epoch, int(batch.epoch.max()))
        assert epoch >= 3
        assert both.device.statistics()["epochs_cut"] == 0


# ---- PPO -----------------------------------------------------------------------------------------

ENVS = 4096
LENGTH = 24
MINIBATCHES = 4
PASSES = 2


def ppo_section(**options: Any) -> dict[str, Any]:
    columns: dict[str, dict[str, Any]] = {
        name: {"dtype": "float32"} for name in ("log_probability", "advantage", "value_target")
    }
    columns["observation"] = {"dtype": "float32", "shape": [3], "role": "observation"}
    columns["action"] = {"dtype": "int64", "role": "action"}
    table = {"placement": "device", "remove": "fifo", "schema": {"columns": columns}}
    table |= {
        "capacity_steps": ENVS * LENGTH,
        "max_length": LENGTH,
        "capacity_trajectories": ENVS,
    }
    section = {
        "tables": {"main": table},
        "sampler": STEPS,
        "fields": {name: {} for name in columns},
    }
    return {**section, "batch_size": ENVS * LENGTH // MINIBATCHES, "seed": 11, **options}


def rollout_of(seed: int) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)
    rollout = {
        name: torch.randn(ENVS, LENGTH, generator=random)
        for name in ("log_probability", "advantage", "value_target")
    }
    rollout["log_probability"] -= 3
    rollout["observation"] = torch.randn(ENVS, LENGTH, 3, generator=random)
    rollout["action"] = torch.randint(0, 5, (ENVS, LENGTH), generator=random)
    return rollout


class Agent:
    """A linear actor and critic, and PPO's step."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.actor = nn.Linear(3, 5)
        self.critic = nn.Linear(3, 1)
        self.parameters = [*self.actor.parameters(), *self.critic.parameters()]
        self.optimizer = torch.optim.Adam(self.parameters, 1e-2)

    def learn(self, batch: Any) -> None:
        log_probabilities = self.actor(batch["observation"]).log_softmax(1)
        chosen = log_probabilities.gather(1, batch["action"][:, None])[:, 0]
        ratio = (chosen - batch["log_probability"]).exp()
        gain = torch.minimum(
            ratio * batch["advantage"], ratio.clamp(0.8, 1.2) * batch["advantage"]
        ).mean()
        value = self.critic(batch["observation"])[:, 0]
        loss = (value - batch["value_target"]).square().mean() - gain
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


def test_a_ppo_update_is_a_loop_over_the_permuted_rollout() -> None:
    """4,096 environments x 24 steps, bit for bit: rollout storage, its permutation, minibatches."""
    ops = load_backend("cpu")
    agent = Agent()
    other = Agent()
    total = ENVS * LENGTH
    with DeviceReplay(ppo_section(), "cpu") as replay:
        batch = replay.new_batch()
        seed = replay.config.seed
        key = random_key_of("main", "train")
        for update in range(2):
            rollout = rollout_of(update)
            replay.add_(rollout)
            for _ in range(PASSES * MINIBATCHES):
                replay.sample_(batch)
                agent.learn(batch)
            # Slots are used in turn: the table has the environments in their order.
            flat = {name: values.flatten(0, 1) for name, values in rollout.items()}
            for number in range(PASSES):
                order = torch.empty(total, dtype=torch.int64)
                ops.permute_(order, seed, key, update * PASSES + number, 0, total)
                for indices in order.chunk(MINIBATCHES):
                    other.learn({name: values[indices] for name, values in flat.items()})
        replay.check()
        assert replay.statistics()["epochs_begun"] == 2 * PASSES
        assert replay.statistics()["epochs_cut"] == 0
    assert all(map(torch.equal, agent.parameters, other.parameters))


# ---- changes of the table ------------------------------------------------------------------------


def small(sampler: dict[str, Any], **options: Any) -> dict[str, Any]:
    table = {"capacity_steps": 400, "max_length": 8, "num_envs": 3, "capacity_trajectories": 60}
    fields = {"observation": {}, "reward": {}}
    return online(sampler, table=table, fields=fields, n_step=None, **{"batch_size": 5, **options})


def test_steps_that_are_added_join_the_next_epoch() -> None:
    """Every batch is of all steps so far; a change inside an epoch is counted."""
    made = small(STEPS)
    with DeviceReplay(made, "cpu") as replay:
        columns = trajectories(3, 8)
        replay.add_steps_(*step_of(columns))
        assert replay.sample().epoch.tolist() == [0, 0, 0, 1, 1]
        for turn in range(1, 5):
            replay.add_steps_(*step_of(columns, turn))
            batch = replay.sample()
            assert batch.epoch.tolist() == [turn + 1] * 5
            assert (
                len({*zip(batch.trajectory_id.tolist(), batch.anchor.tolist(), strict=True)}) == 5
            )
        assert replay.statistics()["epochs_cut"] == 4
        assert replay.statistics()["epochs_begun"] == 6


def test_a_removal_ends_an_epoch_also_if_as_many_steps_are_added() -> None:
    """The table then has the ids and the number of steps that it had."""
    with DeviceReplay(small(STEPS), "cpu") as replay:
        columns = trajectories(3, 8)
        for turn in range(3):
            replay.add_steps_(*step_of(columns, turn))
        replay.sample()
        before = replay.table.state.clone()
        replay.remove_(torch.tensor([99]))
        assert int(replay.sample().epoch[0]) == 0
        replay.remove_(torch.tensor([2]))
        for turn in (3, 4):  # of the others, as the removed one would begin another trajectory
            mask = torch.tensor([True, turn == 3, False])
            replay.add_steps_(*step_of(columns, turn), mask=mask)
        words = [RingState.NEXT, RingState.TAIL, RingState.STEPS]
        assert torch.equal(replay.table.state[words], before[words])
        batch = replay.sample()
        assert int(batch.epoch[0]) == 2
        assert replay.statistics()["epochs_cut"] == 1
        assert 2 not in batch.trajectory_id.tolist()


def test_clear_ends_an_epoch() -> None:
    with DeviceReplay(ppo_section(batch_size=4096), "cpu") as replay:
        replay.add_(rollout_of(0))
        assert int(replay.sample().epoch[0]) == 0
        replay.clear()
        replay.add_(rollout_of(1))
        batch = replay.sample()
        assert batch.epoch.eq(1).all()
        assert batch.trajectory_id.min() >= ENVS


# ---- checkpoints ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", EPOCHS)
def test_a_save_goes_on_inside_the_epoch(kind: str, tmp_path: Path) -> None:
    made = online(EPOCHS[kind], batch_size=7)
    with DeviceReplay(made, "cpu") as replay:
        replay.add_(trajectories(9, 6))
        for _ in range(3):
            replay.sample()
        exported = replay.export_table()
        state = replay.save(tmp_path)
        expected = [replay.sample().clone() for _ in range(12)]
        with DeviceReplay(made, "cpu") as other, DeviceReplay(made, "cpu") as loaded:
            other.import_table(exported)
            loaded.load(tmp_path, state)
            for batch in expected:
                for each in (other, loaded):
                    found = each.sample()
                    assert_same(found, batch)
                    assert torch.equal(found.epoch, batch.epoch)
        described = position.describe(state)["train"]["main"]
        assert described["epoch_items"] > 0
        assert (
            described["epoch_samples"]
            == described["samples"] - state["train"]["main"]["epoch_first"]
        )


def test_a_position_goes_on_inside_the_epoch_of_a_data_set(data: Path) -> None:
    made = on_device(config_of(data, sampler=STEPS, fields=WINDOWS, batch_size=7, seed=5))
    with DeviceReplay(made, "cpu") as replay, DeviceReplay(made, "cpu") as other:
        for _ in range(3):
            replay.sample()
        other.load_state_dict(replay.state_dict())
        for _ in range(40):
            batch = replay.sample()
            found = other.sample()
            assert_same(found, batch)
            assert torch.equal(found.epoch, batch.epoch)


def test_a_position_of_another_content_begins_the_next_epoch() -> None:
    made = online(STEPS, batch_size=7)
    with DeviceReplay(made, "cpu") as replay, DeviceReplay(made, "cpu") as other:
        replay.add_(trajectories(9, 6))
        replay.sample()
        state = replay.state_dict()
        for added, epoch in ((9, 0), (5, 1)):
            other.clear()
            other.add_(trajectories(added, 6))
            other.load_state_dict(state)
            assert other.sample().epoch.eq(epoch).all()


def test_another_number_of_replicas_uses_orders_that_none_has_used() -> None:
    """Epoch e of replica r has the key e * replicas + r."""
    with DeviceReplay(online(STEPS, batch_size=7), "cpu") as replay:
        replay.add_(trajectories(9, 6))
        saved = []
        for batches in (3, 60):
            for _ in range(batches):
                replay.sample()
            saved.append(replay.export_table()["content"]["main"])
        most = max(int(content["state"][RingState.EPOCH]) for content in saved)
        assert most > 3
        for replicas in (1, 3, 5):
            for replica in range(replicas):
                content, _ = device_checkpoint.deal(replay.table, saved, replica, replicas)
                assert content["state"][RingState.EPOCH_SIZE] == 0
                epoch = int(content["state"][RingState.EPOCH])
                assert epoch * replicas + replica >= (most + 1) * 2


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "table", "message"),
    [
        (
            {"sampler": {"kind": "epoch"}},
            {"max_times_sampled": 2},
            r"max_times_sampled must not be given with epochs of a table on devices",
        ),
        (
            {"sampler": {**STEPS, "tail": "drop"}, "batch_size": 61},
            {},
            r"main must hold a global batch \(61 items\) where sampler\.tail is .drop., got 60",
        ),
        (
            {"sampler": {"kind": "epoch", "tail": "drop"}, "batch_size": 11},
            {"capacity_trajectories": 10},
            r"main must hold a global batch \(11 items\) .* got 10; lower gear\.batch_size",
        ),
    ],
)
def test_options_that_cannot_be_are_refused(
    options: dict[str, Any], table: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        DeviceReplay(online(table=table, **options), "cpu")


def test_a_data_set_that_fills_no_batch_is_refused(data: Path) -> None:
    sampler = {"kind": "epoch", "tail": "drop"}
    made = on_device(config_of(data, sampler=sampler, fields=WINDOWS, batch_size=36))
    with pytest.raises(ConfigError, match=r"must hold a global batch \(36 items\).*got 31"):
        DeviceReplay(made, "cpu")


def test_an_epoch_that_fills_no_batch_gives_none_and_is_reported() -> None:
    with DeviceReplay(online({**STEPS, "tail": "drop"}, batch_size=32), "cpu") as replay:
        replay.add_(trajectories(5, 6))
        batch = replay.sample()
        assert not batch.valid.any()
        assert not batch.probability.any()
        with pytest.raises(DataError, match=r"must hold a global batch .*1 global batches without"):
            replay.check()
        replay.add_(trajectories(2, 6))
        batch = replay.sample()
        assert batch.valid.all()
        assert batch.sample_number.tolist() == list(range(32))
