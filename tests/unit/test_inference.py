"""Simulators ask a rank's policy for actions through shared memory; their steps land in the store."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from gear_support import (
    SCHEMA,
    STEP,
    config_of,
    exit_status,
    free_port,
    in_child,
    kill,
    killed_at,
    prefix,
    shared_files,
    trajectory,
    wait_until,
)

from deepspeed_gear import Replay, TrajectoryWriter
from deepspeed_gear.errors import ConfigError, DataError, NotReadyError, PeerError, StoreError
from deepspeed_gear.replay.inference import InferenceLoader, Request
from deepspeed_gear.store.living import living_stores
from deepspeed_gear.store.memory import remove_garbage
from deepspeed_gear.store.request_slots import FREE, RequestSlots
from deepspeed_gear.store.table import COMMITTED, ID, STATE
from deepspeed_gear.writer.simulators import Simulators

ANSWERS, ASKS = ("action", "code"), ("observation", "task")


def section(backend: str = "cpu", **table: Any) -> dict[str, Any]:
    main = {"capacity_steps": 4000, "capacity_trajectories": 300, "writers": 6, **table}
    return config_of(tables={"main": main}, backend=backend, batch_size=4, fields={"observation": {}})


@pytest.fixture
def replay() -> Iterator[Replay]:
    with Replay(section(), schemas={"main": SCHEMA}) as made:
        yield made
    assert shared_files(prefix()) == []


def loader_of(
    replay: Replay, batch_size: int = 4, timeout: float | None = 0.02, **options: Any
) -> InferenceLoader:
    return replay.inference_loader(batch_size, timeout, answers=ANSWERS, **options)


def policy(observation: torch.Tensor) -> dict[str, torch.Tensor]:
    """Answer as `gear_support.trajectory` has its rows: what a row holds follows from its observation."""
    code = observation[:, 0].long()
    return {"action": torch.stack([code, -code], 1).float(), "code": code}


def serve(loader: InferenceLoader, goes_on: Callable[[], bool]) -> list[Request]:
    """Answer until a request is empty and nobody goes on."""
    served = []
    for request in loader:
        if request:
            request.reply(**policy(request["observation"]))
            served.append(request)
        elif not goes_on():
            break
    return served


def any_runs(children: list[int]) -> Callable[[], bool]:
    """Return what tells whether a child still runs; all must end well."""
    left = list(children)

    def check() -> bool:
        for child in list(left):
            found, status = os.waitpid(child, os.WNOHANG)
            if found:
                left.remove(child)
                assert status == 0
        return bool(left)

    return check


def runs(child: int) -> bool:
    """Return whether a child runs, and leave its status to `exit_status`."""
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


class Envs:
    """Environments whose episode e of number n is `trajectory(n * 20 + e, length)`, as gymnasium steps them.

    Args:
        numbers: Of the environments.
        autoreset: As gymnasium's.
        length: (number, episode) -> steps.
    """

    def __init__(self, numbers: range, autoreset: str, length: Callable[[int, int], int]) -> None:
        self.numbers, self.mode, self.length = numbers, autoreset, length
        self.episode, self.t = np.zeros(len(numbers), int), np.zeros(len(numbers), int)
        self.done = np.zeros(len(numbers), bool)

    @property
    def task(self) -> np.ndarray:
        return np.array(self.numbers) * 20 + self.episode

    def look(self) -> np.ndarray:
        codes = self.task * STEP + self.t
        return np.stack([codes, codes + 0.25, -codes], 1).astype(np.float32)

    def begin(self, which: np.ndarray) -> None:
        self.episode[which] += 1
        self.t[which] = 0
        self.done[which] = False

    def step(self, envs: np.ndarray) -> dict[str, Any]:
        """Step some; return columns of `Simulators.step`, with `task` of what is now."""
        resets = self.done.copy() if self.mode == "next_step" else np.zeros(len(self.done), bool)
        resets &= np.isin(np.arange(len(self.done)), envs)
        reward = (self.t % 7 + 1).astype(np.float32)
        for env in envs:
            self.t[env] += 1
            self.done[env] = self.t[env] == self.length(self.numbers[env], self.episode[env])
        self.begin(resets)
        even = self.task % 2 == 0
        ended = {"terminated": self.done & even, "truncated": self.done & ~even}
        columns: dict[str, Any] = {"reward": reward, **ended}
        final, task = self.look(), self.task.copy()
        if self.mode == "same_step":
            self.begin(self.done & np.isin(np.arange(len(self.done)), envs))
        columns |= {"observation": self.look(), "task": task}
        columns = {name: column[envs] for name, column in columns.items()}
        return columns | ({"final": {"observation": final[envs]}} if self.mode == "same_step" else {})


def simulate(
    config: dict[str, Any], envs: Envs, num_rounds: int, in_parts: bool = False, timeout_s: float = 10.0
) -> None:
    """Run environments as a process of simulators does."""
    with (
        TrajectoryWriter.attach(config) as writer,
        writer.simulators(len(envs.numbers), envs.mode) as simulators,
    ):
        simulators.reset(observation=envs.look(), task=envs.task)
        every = np.arange(len(envs.numbers))
        for _ in range(num_rounds):
            if in_parts:
                simulators.post()
                which: np.ndarray = simulators.ready(1, timeout_s)
                answers = simulators.answers(which)
            else:
                which, answers = every, simulators.act(timeout_s)
            acts = ~envs.done[which]
            assert answers["code"][acts].tolist() == (envs.task * STEP + envs.t)[which][acts].tolist()
            simulators.step(envs=which if in_parts else None, **envs.step(which))
            if envs.mode == "disabled" and envs.done.any():
                begun = envs.done.copy()
                envs.begin(begun)
                simulators.reset(begun, observation=envs.look(), task=envs.task)


def stored(replay: Replay) -> list[dict[str, torch.Tensor]]:
    table = replay.tables["main"]
    return replay.read(np.sort(table.slots[table.slots[:, STATE] == COMMITTED, ID]).tolist())


def check_whole(replay: Replay, length: Callable[[int, int], int]) -> dict[int, int]:
    """Compare every trajectory with what its simulator did; return number of environment -> episodes."""
    episodes: dict[int, int] = {}
    for found in stored(replay):
        number, episode = check_one(found, length)
        assert episodes.get(number, 0) == episode
        episodes[number] = episode + 1
    return episodes


def check_one(found: dict[str, torch.Tensor], length: Callable[[int, int], int]) -> tuple[int, int]:
    """Compare a trajectory with what its simulator did; return number of environment, and episode."""
    task = int(found["task"])
    number, episode = divmod(task, 20)
    wanted = trajectory(task, length(number, episode), task % 2 == 0, task % 2 == 1)
    for name, column in found.items():
        np.testing.assert_array_equal(column.numpy(), wanted[name], name)
    return number, episode


def short(number: int, episode: int) -> int:
    return 1 + (number * 7 + episode * 5) % 9


# ---- what lands in the store -----------------------------------------------------------------------


@pytest.mark.parametrize("in_parts", [False, True])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("autoreset", ["next_step", "same_step", "disabled"])
def test_steps_land_in_the_store(backend: str, autoreset: str, in_parts: bool) -> None:
    config = section(backend)
    with Replay(config, schemas={"main": SCHEMA}) as replay:
        with loader_of(replay, 4, num_simulators=8, length=3, asks=ASKS) as loader:
            makers = [Envs(range(first, first + 3), autoreset, short) for first in (0, 3)]
            children = [in_child(lambda m=made: simulate(config, m, 40, in_parts)) for made in makers]
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
    with Replay(config, schemas={"main": SCHEMA}) as replay:
        with loader_of(replay, length=3) as loader:
            envs = Envs(range(1), "next_step", lambda *_: 12)
            serve(loader, any_runs([in_child(lambda: simulate(config, envs, 13))]))
        parts = stored(replay)
    assert [len(part["code"]) for part in parts] == [5, 5, 2]
    assert torch.cat([part["code"] for part in parts]).tolist() == list(range(12))
    assert [part["observation"][-1, 0].item() for part in parts] == [5, 10, 12]
    assert [part["truncated"].tolist()[-1] for part in parts] == [True, True, False]


# ---- who is served when ----------------------------------------------------------------------------


@pytest.fixture
def scene(replay: Replay) -> Iterator[tuple[InferenceLoader, Simulators]]:
    """A loader of batches of 2 and four simulators in this process."""
    with (
        loader_of(replay, 2) as loader,
        TrajectoryWriter.attach(section()) as writer,
        writer.simulators(4, wait_s=1.0) as simulators,
    ):
        envs = Envs(range(4), "next_step", short)
        simulators.reset(observation=envs.look(), task=envs.task)
        yield loader, simulators


def test_the_oldest_come_first(scene: tuple[InferenceLoader, Simulators]) -> None:
    loader, simulators = scene
    for envs in ([2], [0], [1, 3]):
        simulators.post(envs)
    assert [next(loader).simulators.tolist() for _ in range(2)] == [[2, 0], [1, 3]]


def test_nobody_starves(scene: tuple[InferenceLoader, Simulators]) -> None:
    loader, simulators = scene
    simulators.post(np.array([0, 1, 2]))
    seen = []
    for _ in range(6):  # those that are served first ask again at once
        request = next(loader)
        seen += request.simulators.tolist()
        request.reply(**policy(request["observation"]))
        envs = request.simulators.numpy()
        columns = {"reward": np.ones(len(envs), np.float32), "terminated": np.zeros(len(envs), bool)}
        columns |= {"truncated": columns["terminated"], "observation": np.zeros((len(envs), 3), np.float32)}
        simulators.step(envs=envs, **columns)
        simulators.post(envs)
    assert [seen.count(env) for env in (0, 1, 2)] == [4, 4, 4]


def test_requests_may_be_answered_in_any_order(scene: tuple[InferenceLoader, Simulators]) -> None:
    loader, simulators = scene
    simulators.post()
    first, second = next(loader), next(loader)
    second.reply(**policy(second["observation"]))
    assert simulators.ready(1).tolist() == second.simulators.tolist()
    first.reply(**policy(first["observation"]))
    assert simulators.answers()["code"].tolist() == [0, 20 * STEP, 40 * STEP, 60 * STEP]
    with pytest.raises(StoreError, match="must be answered once"):
        first.reply(**policy(first["observation"]))


def test_nobody_asks(scene: tuple[InferenceLoader, Simulators]) -> None:
    begun = time.monotonic()
    request = next(scene[0])
    assert not request
    assert request["observation"].shape == (0, 3)
    assert 0.02 <= time.monotonic() - begun < 1.0
    request.reply(**policy(request["observation"]))


def test_a_batch_that_does_not_fill_comes_in_time(replay: Replay) -> None:
    with loader_of(replay, 8, timeout=0.2) as loader, replay.writer().simulators(3) as simulators:
        envs = Envs(range(3), "next_step", short)
        simulators.reset(observation=envs.look(), task=envs.task)
        simulators.post(np.array([1]))
        begun = time.monotonic()
        assert next(loader).simulators.tolist() == [1]
        assert time.monotonic() - begun > 0.15  # others may have come
        simulators.post()
        begun = time.monotonic()
        assert next(loader).simulators.tolist() == [0, 2]
        assert time.monotonic() - begun < 0.15  # no others can come


# ---- deaths and timeouts ---------------------------------------------------------------------------


def test_no_answer_in_time(scene: tuple[InferenceLoader, Simulators]) -> None:
    loader, simulators = scene
    with pytest.raises(NotReadyError, match=r"must answer within 0\.05 s"):
        simulators.act(0.05)
    with pytest.raises(StoreError, match="must not come while an answer is waited for"):
        simulators.reset(observation=np.zeros((4, 3), np.float32), task=np.zeros(4, np.int64))
    serve(loader, lambda: False)
    assert simulators.act(1.0)["code"].tolist() == [0, 20 * STEP, 40 * STEP, 60 * STEP]


def test_the_loader_is_closed(scene: tuple[InferenceLoader, Simulators]) -> None:
    loader, simulators = scene
    loader.close()
    with pytest.raises(PeerError, match="was closed"):
        simulators.act()
    assert list(loader) == []


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_the_loaders_process_dies(backend: str) -> None:
    config = section(backend)

    def rank() -> None:
        with Replay(config, schemas={"main": SCHEMA}) as replay, loader_of(replay) as loader:
            for _ in loader:
                pass  # never an answer

    child = in_child(rank)
    with TrajectoryWriter.attach(config) as writer, writer.simulators(2) as simulators:
        simulators.reset(observation=np.zeros((2, 3), np.float32), task=np.zeros(2, np.int64))
        with pytest.raises(NotReadyError):
            simulators.act(0.05)
        kill(child)
        begun = time.monotonic()
        with pytest.raises(PeerError, match="its process has died"):
            simulators.act(10.0)
        assert time.monotonic() - begun < 2.0
    remove_garbage(prefix())
    assert shared_files(prefix()) == []


def test_a_simulator_dies_while_it_waits(replay: Replay) -> None:
    config = section()
    with loader_of(replay, num_simulators=3) as loader:
        child = in_child(lambda: simulate(config, Envs(range(3), "next_step", short), 9))
        wait_until(lambda: loader.num_simulators == 3, "attaching")
        for _ in range(3):
            request = next(iter(loader))
            if len(request) == 3:
                request.reply(**policy(request["observation"]))
        request = next(loader)
        kill(child)
        before = len(replay)
        request.reply(**policy(request["observation"]))
        wait_until(lambda: not next(loader) and loader.num_simulators == 0, "freeing")
        assert len(replay) == before
        with replay.writer().simulators(3, wait_s=1.0):
            assert loader.num_simulators == 3


def test_a_simulator_dies_anywhere_in_a_step() -> None:
    config, deaths = section("reference"), 0  # in plain Python, where there are lines to die at
    with Replay(config, schemas={"main": SCHEMA}) as replay, loader_of(replay, num_simulators=3) as loader:
        for line in range(3, 300, 37):

            def until_it_dies(line: int = line) -> None:
                envs = Envs(range(3), "next_step", lambda *_: 2)
                writer = TrajectoryWriter.attach(config)
                simulators = writer.simulators(3)
                simulators.reset(observation=envs.look(), task=envs.task)
                simulators.act()
                simulators.step(**envs.step(np.arange(3)))
                simulators.act()
                columns = envs.step(np.arange(3))
                os._exit(7 if killed_at(line, lambda: simulators.step(**columns)) else 0)

            child = in_child(until_it_dies)
            serve(loader, lambda pid=child: runs(pid))  # type: ignore[misc]
            deaths += exit_status(child) == 7
            wait_until(lambda: not next(loader) and loader.num_simulators == 0, "freeing")
            for found in stored(replay):
                check_one(found, lambda *_: 2)
        assert deaths > 4


def test_an_answer_to_the_dead_does_not_reach_others(replay: Replay) -> None:
    config = section()
    with loader_of(replay, num_simulators=3) as loader:
        child = in_child(lambda: simulate(config, Envs(range(3), "next_step", short), 9))
        wait_until(lambda: loader._slots.num_taken == 3, "attaching")
        old = next(loader)
        kill(child)
        wait_until(lambda: not next(loader) and loader.num_simulators == 0, "freeing")
        with replay.writer().simulators(3) as simulators:
            simulators.reset(observation=np.full((3, 3), 5, np.float32), task=np.zeros(3, np.int64))
            simulators.post()
            new = next(loader)
            old.reply(**policy(old["observation"]))
            with pytest.raises(NotReadyError):
                simulators.act(0.05)
            new.reply(**policy(new["observation"]))
            assert simulators.act(1.0)["code"].tolist() == [5, 5, 5]


def test_what_the_killed_leave_is_garbage() -> None:
    config = section()

    def rank() -> None:
        with Replay(config, schemas={"main": SCHEMA}) as replay, loader_of(replay) as loader:
            serve(loader, lambda: True)

    def simulators() -> None:
        simulate(config, Envs(range(2), "disabled", lambda *_: 10**6), 10**6)

    children = [in_child(rank), in_child(simulators)]
    wait_until(lambda: len(shared_files(prefix())) == 2, "attaching")
    assert {store.table for store in living_stores(children[0])} == {"main"}
    remove_garbage(prefix())
    assert len(shared_files(prefix())) == 2
    for child in children:
        kill(child)
    remove_garbage(prefix())
    assert shared_files(prefix()) == []


# ---- several, and refusals -------------------------------------------------------------------------


def test_simulators_go_where_there_is_room(replay: Replay) -> None:
    table = replay.tables["main"]
    with loader_of(replay, num_simulators=4) as loader:
        slots = loader._slots
        name = table.memory.path.name
        other = RequestSlots.create(slots.places, name, 1, "0" * 32, table.ops, False)  # of another rank
        try:
            with replay.writer().simulators(3), replay.writer().simulators(3), replay.writer().simulators(1):
                taken = sorted(np.count_nonzero(s.states != FREE) for s in (slots, other))
                assert taken == [3, 4]
                with pytest.raises(StoreError, match="must have 2 free places, got 1"):
                    replay.writer().simulators(2, wait_s=0.05)
        finally:
            other.end()
            other.close()


def test_each_rank_of_a_node_answers_its_own() -> None:
    config, port = section(), free_port()

    def rank(number: int) -> None:
        address = f"tcp://127.0.0.1:{port}"
        torch.distributed.init_process_group("gloo", address, rank=number, world_size=2)
        with Replay(config, schemas={"main": SCHEMA}) as replay:
            with loader_of(replay, 2, num_simulators=2) as loader:
                wait_until(lambda: loader.num_simulators == 2, "attaching")
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
    with pytest.raises(ConfigError, match=r"answers must name some of action, code, got \['reward'\]"):
        replay.inference_loader(4, answers=["reward"])
    with pytest.raises(ConfigError, match="asks must name some of observation, task, got"):
        replay.inference_loader(4, asks=["action"])
    with pytest.raises(ConfigError, match="batch_size must be at least 1"):
        replay.inference_loader(0)
    with loader_of(replay), pytest.raises(StoreError, match="one inference loader of a rank"):
        loader_of(replay)
    with pytest.raises(StoreError, match=r"must be open within 0\.05 s"):
        replay.writer().simulators(1, wait_s=0.05)
    no_writers = Replay(section(writers=0), schemas={"main": SCHEMA})
    with no_writers, pytest.raises(ConfigError, match="writers must be positive"):
        no_writers.inference_loader(4)


def test_wrong_answers_are_refused(scene: tuple[InferenceLoader, Simulators]) -> None:
    loader, simulators = scene
    simulators.post()
    request = next(loader)
    answers = policy(request["observation"])
    with pytest.raises(DataError, match="column code must be one of the answers"):
        request.reply(action=answers["action"])
    with pytest.raises(DataError, match="column action must have shape"):
        request.reply(action=answers["action"][:1], code=answers["code"])
    request.reply(
        **{name: column.double() for name, column in answers.items() if name == "action"}, code=[0, 0]
    )


def test_wrong_steps_are_refused(scene: tuple[InferenceLoader, Simulators]) -> None:
    loader, simulators = scene
    columns = Envs(range(4), "next_step", short).step(np.arange(4))
    with pytest.raises(StoreError, match="step must come behind the answers"):
        simulators.step(**columns)
    simulators.post()
    serve(loader, lambda: False)
    with pytest.raises(DataError, match="the policy gives it"):
        simulators.step(action=np.zeros((4, 2), np.float32), **columns)
    simulators.close()
    with pytest.raises(StoreError, match="they were closed"):
        simulators.act()
    with (
        TrajectoryWriter.attach(section()) as writer,
        writer.simulators(1) as fresh,
        pytest.raises(DataError, match="reset must come first"),
    ):
        fresh.act()
