"""Simulators ask a rank's policy for actions through shared memory; their steps land in
the store.
"""

import numpy as np
import pytest
import torch
from gear_support import SCHEMA, STEP, prefix, shared_files, wait_until
from process_support import exit_status, free_port, in_child
from simulators import (
    ASKS,
    Envs,
    any_runs,
    check_whole,
    loader_of,
    policy,
    section,
    serve,
    short,
    simulate,
    stored,
)

from deepspeed_gear import Column, Replay, Schema, TrajectoryWriter
from deepspeed_gear.actors.inference_client import InferenceClient
from deepspeed_gear.actors.inference_loader import InferenceLoader
from deepspeed_gear.actors.inference_mailbox import InferenceMailbox
from deepspeed_gear.errors import ConfigError, DataError, StoreError

# ---- what lands in the store ---------------------------------------------------------------------


@pytest.mark.parametrize("in_parts", [False, True])
@pytest.mark.parametrize("autoreset", ["next_step", "same_step", "disabled"])
def test_steps_land_in_the_store(autoreset: str, in_parts: bool) -> None:
    config = section()
    with Replay(config, schemas={"main": SCHEMA}) as replay:
        with loader_of(replay, 4, num_simulators=8, length=3, asks=ASKS) as loader:
            makers = [Envs(range(first, first + 3), autoreset, short) for first in (0, 3)]
            children = [
                in_child(lambda m=made: simulate(config, m, 40, in_parts)) for made in makers
            ]
            served = serve(loader, any_runs(children))
        episodes = check_whole(replay, short)
        assert sorted(episodes) == list(range(6))
        assert in_parts or all(3 < count < 14 for count in episodes.values())
        for request in served:
            assert (request["observation"][:, 0].long() % STEP == request.timestep).all()
            assert len(request) <= 4
            if autoreset != "same_step":
                assert (request["task"] == request["observation"][:, 0].long() // STEP).all()
    assert shared_files(prefix()) == []


def test_longer_than_max_length_is_cut() -> None:
    config = section(max_length=5)
    more = (
        Column("step", "int32", (), "timestep"),
        Column("to_go", "float32", (), "return_to_go", late=True),
    )
    with Replay(config, schemas={"main": Schema([*SCHEMA, *more])}) as replay:
        with pytest.raises(ConfigError, match=r"answers must name some of .*, got \['to_go'\]"):
            InferenceLoader(replay, 4, answers=["to_go"])  # late: written after the trajectory
        with loader_of(replay, length=3) as loader:
            envs = Envs(range(1), "next_step", lambda *_: 12)
            serve(loader, any_runs([in_child(lambda: simulate(config, envs, 13))]))
        parts = stored(replay)
    assert [len(part["code"]) for part in parts] == [5, 5, 2]
    assert torch.cat([part["code"] for part in parts]).tolist() == list(range(12))
    assert torch.cat([part["step"] for part in parts]).tolist() == list(range(12))
    rewards = torch.cat([part["reward"] for part in parts]).double()
    assert torch.equal(
        torch.cat([part["to_go"] for part in parts]), rewards.flip(0).cumsum(0).flip(0).float()
    )
    assert rewards.any()
    assert [part["observation"][-1, 0].item() for part in parts] == [5, 10, 12]
    assert [part["truncated"].tolist()[-1] for part in parts] == [True, True, False]


# ---- who is served when --------------------------------------------------------------------------


def test_nobody_starves(scene: tuple[InferenceLoader, InferenceClient]) -> None:
    loader, simulators = scene
    simulators.post(np.array([0, 1, 2]))
    seen = []
    for _ in range(6):  # those that are served first ask again at once
        request = next(loader)
        seen += request.simulators.tolist()
        request.reply(**policy(request["observation"]))
        envs = request.simulators.numpy()
        columns = {
            "reward": np.ones(len(envs), np.float32),
            "terminated": np.zeros(len(envs), bool),
        }
        columns |= {
            "truncated": columns["terminated"],
            "observation": np.zeros((len(envs), 3), np.float32),
        }
        simulators.step(envs=envs, **columns)
        simulators.post(envs)
    assert [seen.count(env) for env in (0, 1, 2)] == [4, 4, 4]


def test_the_oldest_come_first_and_answers_in_any_order(
    scene: tuple[InferenceLoader, InferenceClient],
) -> None:
    loader, simulators = scene
    none = next(loader)
    assert not none
    assert none["observation"].shape == (0, 3)
    none.reply(**policy(none["observation"]))
    for envs in ([2], [0], [1, 3]):
        simulators.post(envs)
    first = next(loader)
    second = next(loader)
    assert (first.simulators.tolist(), second.simulators.tolist()) == ([2, 0], [1, 3])
    second.reply(**policy(second["observation"]))
    assert simulators.ready(1).tolist() == [1, 3]
    first.reply(**policy(first["observation"]))
    assert simulators.answers()["code"].tolist() == [0, 20 * STEP, 40 * STEP, 60 * STEP]
    with pytest.raises(StoreError, match="must be answered only once"):
        first.reply(**policy(first["observation"]))


def test_a_batch_that_does_not_fill_comes_when_no_others_can(replay: Replay) -> None:
    """Or after the timeout, which in the second wait nothing outlasts."""
    with (
        loader_of(replay, 8, timeout=0.1) as loader,
        InferenceClient(replay.writer(), 3, "next_step") as simulators,
    ):
        envs = Envs(range(3), "next_step", short)
        simulators.reset(observation=envs.look(), task=envs.task)
        simulators.post(np.array([1]))
        assert next(loader).simulators.tolist() == [1]  # others may have come
        loader.timeout_s = 3600.0
        simulators.post()
        assert next(loader).simulators.tolist() == [0, 2]  # no others can come


# ---- several, and refusals -----------------------------------------------------------------------


def test_simulators_go_where_there_is_room(replay: Replay) -> None:
    table = replay.tables["main"]
    with loader_of(replay, num_simulators=4) as loader:
        own = loader.mailbox
        other = InferenceMailbox.create(own.places, table, 1, False)  # of another rank
        try:
            with (
                InferenceClient(replay.writer(), 3, "next_step"),
                InferenceClient(replay.writer(), 3, "next_step"),
                InferenceClient(replay.writer(), 1, "next_step"),
            ):
                assert sorted([own.num_taken, other.num_taken]) == [3, 4]
                with pytest.raises(StoreError, match="must have 2 free places, got 1"):
                    InferenceClient(replay.writer(), 2, "next_step", wait_s=0.05)
        finally:
            other.end()


def test_each_rank_of_a_node_answers_its_own() -> None:
    config = section()
    port = free_port()

    def rank(number: int) -> None:
        address = f"tcp://127.0.0.1:{port}"
        torch.distributed.init_process_group("gloo", address, rank=number, world_size=2)
        with Replay(config, schemas={"main": SCHEMA}) as replay:
            with loader_of(replay, 2, num_simulators=2) as loader:
                wait_until(lambda: loader.num_simulators == 2, "attaching")
                torch.distributed.barrier()  # else one could serve both, one after the other
                served = serve(loader, lambda: loader.num_simulators > 0)
            torch.distributed.barrier()
            assert sum(len(request) for request in served) > 30
            assert sorted(check_whole(replay, short)) == [0, 1, 2, 3]

    makers = [Envs(range(first, first + 2), "next_step", short) for first in (0, 2)]
    ranks = [in_child(lambda number=number: rank(number)) for number in range(2)]
    others = [in_child(lambda m=made: simulate(config, m, 20)) for made in makers]
    assert [exit_status(child) for child in (*others, *ranks)] == [0] * 4
    assert shared_files(prefix()) == []


def test_a_wrong_loader_is_refused(replay: Replay) -> None:
    with pytest.raises(
        ConfigError, match=r"answers must name some of action, code, got \['reward'\]"
    ):
        InferenceLoader(replay, 4, answers=["reward"])
    with pytest.raises(ConfigError, match="asks must name some of observation, task, got"):
        InferenceLoader(replay, 4, asks=["action"])
    with pytest.raises(ConfigError, match="batch_size must be an integer of at least 1"):
        InferenceLoader(replay, 0)
    with loader_of(replay), pytest.raises(StoreError, match="one inference loader at a time"):
        loader_of(replay)
    with pytest.raises(StoreError, match=r"must be open within 0\.05 s"):
        InferenceClient(replay.writer(), 1, "next_step", wait_s=0.05)
    no_writers = Replay(section(writers=0), schemas={"main": SCHEMA})
    with no_writers, pytest.raises(ConfigError, match="writers must be positive"):
        InferenceLoader(no_writers, 4)


def test_wrong_answers_are_refused(scene: tuple[InferenceLoader, InferenceClient]) -> None:
    loader, simulators = scene
    simulators.post()
    request = next(loader)
    answers = policy(request["observation"])
    with pytest.raises(DataError, match="column code must be one of the answers"):
        request.reply(action=answers["action"])
    spoiled = answers["action"].clone()
    spoiled[-1, 0] = torch.nan
    with pytest.raises(
        DataError, match="column action must be finite, got 'nan at step 0 of environment"
    ):
        request.reply(**{**answers, "action": spoiled})
    with pytest.raises(DataError, match="column action must have shape"):
        request.reply(action=answers["action"][:1], code=answers["code"])
    request.reply(
        **{name: column.double() for name, column in answers.items() if name == "action"},
        code=[0, 0],
    )


def test_wrong_steps_are_refused(scene: tuple[InferenceLoader, InferenceClient]) -> None:
    loader, simulators = scene
    columns = Envs(range(4), "next_step", short).step(np.arange(4))
    with pytest.raises(StoreError, match="step must be called after the answers"):
        simulators.step(**columns)
    simulators.post()
    serve(loader, lambda: False)
    with pytest.raises(DataError, match="the policy computes it"):
        simulators.step(action=np.zeros((4, 2), np.float32), **columns)
    simulators.close()
    with pytest.raises(StoreError, match="they were closed"):
        simulators.act()
    with (
        TrajectoryWriter.attach(section()) as writer,
        InferenceClient(writer, 1, "next_step") as fresh,
        pytest.raises(DataError, match="reset must come first"),
    ):
        fresh.act()
