"""Simulators and ranks that answer them: deaths at any place, and waits that are too long."""

import os
import signal

import numpy as np
import pytest
from gear_support import SCHEMA, STEP, prefix, shared_files, wait_until
from process_support import exit_status, in_child, kill
from simulators import (
    Envs,
    check_one,
    loader_of,
    policy,
    runs,
    section,
    serve,
    short,
    simulate,
    stored,
)
from store_support import killed_at

from deepspeed_gear import Replay, TrajectoryWriter
from deepspeed_gear.actors.inference_client import InferenceClient
from deepspeed_gear.actors.inference_loader import InferenceLoader
from deepspeed_gear.errors import NotReadyError, PeerError, StoreError
from deepspeed_gear.store.live_stores import living_stores
from deepspeed_gear.store.shared_memory import remove_garbage


def test_no_answer_in_time(scene: tuple[InferenceLoader, InferenceClient]) -> None:
    loader, simulators = scene
    with pytest.raises(NotReadyError, match=r"must answer within 0\.05 s"):
        simulators.act(0.05)
    with pytest.raises(StoreError, match="must not be called while an answer is pending"):
        simulators.reset(observation=np.zeros((4, 3), np.float32), task=np.zeros(4, np.int64))
    serve(loader, lambda: False)
    assert simulators.act(1.0)["code"].tolist() == [0, 20 * STEP, 40 * STEP, 60 * STEP]


def test_the_loader_is_closed(scene: tuple[InferenceLoader, InferenceClient]) -> None:
    loader, simulators = scene
    loader.close()
    with pytest.raises(PeerError, match="was closed"):
        simulators.act()
    assert list(loader) == []


def test_the_loaders_process_dies() -> None:
    config = section()

    def rank() -> None:
        with Replay(config, schemas={"main": SCHEMA}) as replay, loader_of(replay) as loader:
            for _ in loader:
                pass  # never an answer

    child = in_child(rank)
    with (
        TrajectoryWriter.attach(config) as writer,
        InferenceClient(writer, 2, "next_step") as simulators,
    ):
        simulators.reset(observation=np.zeros((2, 3), np.float32), task=np.zeros(2, np.int64))
        with pytest.raises(NotReadyError):
            simulators.act(0.05)
        kill(child)
        with pytest.raises(PeerError, match="its process has died"):
            simulators.act(3600.0)  # long before
    wait_until(lambda: shared_files(prefix()) == [], "the reapers")


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
        before = len(replay)
        kill(child)
        request.reply(**policy(request["observation"]))
        wait_until(lambda: not next(loader) and loader.num_simulators == 0, "freeing")
        assert len(replay) == before


def test_an_answer_to_the_dead_does_not_reach_others(replay: Replay) -> None:
    config = section()
    with loader_of(replay, num_simulators=3) as loader:
        child = in_child(lambda: simulate(config, Envs(range(3), "next_step", short), 9))
        wait_until(lambda: loader.num_simulators == 3, "attaching")
        old = next(loader)
        kill(child)
        wait_until(lambda: not next(loader) and loader.num_simulators == 0, "freeing")
        with InferenceClient(replay.writer(), 3, "next_step", wait_s=1.0) as simulators:
            simulators.reset(observation=np.full((3, 3), 5, np.float32), task=np.zeros(3, np.int64))
            simulators.post()
            new = next(loader)
            old.reply(**policy(old["observation"]))
            with pytest.raises(NotReadyError):
                simulators.act(0.05)
            new.reply(**policy(new["observation"]))
            assert simulators.act(1.0)["code"].tolist() == [5, 5, 5]


def test_a_simulator_dies_anywhere_in_a_step() -> None:
    config = section()
    deaths = 0
    with (
        Replay(config, schemas={"main": SCHEMA}) as replay,
        loader_of(replay, num_simulators=3) as loader,
    ):
        for line in range(3, 200, 19):

            def until_it_dies(line: int = line) -> None:
                envs = Envs(range(3), "next_step", lambda *_: 2)
                writer = TrajectoryWriter.attach(config)
                simulators = InferenceClient(writer, 3, "next_step")
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


def test_what_the_killed_leave_is_garbage() -> None:
    config = section()

    def rank() -> None:
        with Replay(config, schemas={"main": SCHEMA}) as replay, loader_of(replay) as loader:
            serve(loader, lambda: True)

    def simulators() -> None:
        simulate(config, Envs(range(2), "disabled", lambda *_: 10**6), 10**6)

    inherited = {store.run.id for store in living_stores(os.getpid())}  # maps of earlier tests
    children = [in_child(rank), in_child(simulators)]
    wait_until(lambda: len(shared_files(prefix())) == 2, "attaching")
    (store,) = (one for one in living_stores(children[0]) if one.run.id not in inherited)
    assert store.table == "main"
    remove_garbage(prefix())
    assert len(shared_files(prefix())) == 2
    for child in children:
        os.kill(child, signal.SIGSTOP)  # else one may end by itself, as the other has died
    for child in children:
        kill(child)
    wait_until(lambda: shared_files(prefix()) == [], "the reapers")
