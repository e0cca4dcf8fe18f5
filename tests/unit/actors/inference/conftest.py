"""Replays that simulators ask."""

from collections.abc import Iterator

import pytest
from gear_support import SCHEMA, prefix, shared_files
from simulators import Envs, loader_of, section, short

from deepspeed_gear import Replay, TrajectoryWriter
from deepspeed_gear.actors.inference_client import InferenceClient
from deepspeed_gear.actors.inference_loader import InferenceLoader


@pytest.fixture
def replay() -> Iterator[Replay]:
    with Replay(section(), schemas={"main": SCHEMA}) as made:
        yield made
    assert shared_files(prefix()) == []


@pytest.fixture
def scene(replay: Replay) -> Iterator[tuple[InferenceLoader, InferenceClient]]:
    """A loader of batches of 2 and four simulators in this process."""
    with (
        loader_of(replay, 2) as loader,
        TrajectoryWriter.attach(section()) as writer,
        InferenceClient(writer, 4, "next_step", wait_s=1.0) as simulators,
    ):
        envs = Envs(range(4), "next_step", short)
        simulators.reset(observation=envs.look(), task=envs.task)
        yield loader, simulators
