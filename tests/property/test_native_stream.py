"""A batch stream makes the same selections by its native call as in Python, in any sequence of events."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_gear import Batch, Column, Replay, Schema
from deepspeed_gear.errors import GearError
from deepspeed_gear.sampling.batch_stream import BatchStream

SCHEMA = Schema(
    [
        Column("observation", "float32", (2,), "observation", "T+1"),
        Column("reward", "float32", (), "reward"),
        Column("truncated", "bool", (), "truncated"),
        Column("task", "int16", rows="1"),
        Column("score", "float32", (), late=True),
    ]
)
LONGEST = 5


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    unit = draw(st.sampled_from(["trajectory", "step"]))
    sampler: dict[str, Any] = {"kind": draw(st.sampled_from(["uniform", "prioritized"])), "unit": unit}
    if sampler["kind"] == "prioritized":
        sampler["normalize"] = draw(st.sampled_from(["batch", "table", None]))
        sampler["initial"] = draw(st.sampled_from([None, 0.5]))
        sampler["alpha"] = draw(st.sampled_from([0.6, {"linear": [0.2, 1, 5]}]))
        sampler["beta"] = draw(st.sampled_from([0.4, {"linear": [0.2, 1, 5]}]))
    else:
        sampler["stratified"] = draw(st.sampled_from([False, False, True]))
    if draw(st.sampled_from([False, False, True])):
        sampler["where"] = {"task": {"max": 5}}
    table = {"capacity_steps": draw(st.sampled_from([20, 300])), "max_length": LONGEST, "remove": "fifo"}
    limited = unit == "trajectory" and not sampler.get("stratified")
    if limited and draw(st.sampled_from([False, False, False, True])):
        table["max_times_sampled"] = 6
    fields = {"observation": {"offset": 0, "length": 2}, "reward": {}}
    if draw(st.sampled_from([False, False, True])):
        fields["score"] = {}
    return {
        "tables": {"main": table},
        "sampler": sampler,
        "fields": fields,
        "batch_size": draw(st.sampled_from([1, 4])),
        "seed": draw(st.integers(0, 2**63 - 1)),
        "timeout_s": 0.05,
    }


ACTIONS = ("add", "add", "sample", "sample", "sample", "update", "update", "step", "step", "remove")
ACTIONS += ("fill", "set", "seek", "died")
SCENES = st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 99)), min_size=5, max_size=40)


class Side:
    """A replay and what happened to it."""

    def __init__(self, config: dict[str, Any], native: bool) -> None:
        self.replay = Replay(config, schemas={"main": SCHEMA})
        self.stream: BatchStream = self.replay._parts.train[0]
        self.could = self.stream._native is not None
        if not native:
            self.stream._native = None
        self.writer = self.replay.vector_writer(1, "next_step")
        self.has_begun = False
        self.ids: list[int] = []
        self.batch: Batch | None = None
        self.position = self.replay.state_dict()

    def do(self, action: str, number: int) -> Any:
        try:
            return self._do(action, np.random.default_rng(number))
        except GearError as error:
            return type(error).__name__, str(error)

    def _do(self, action: str, rng: np.random.Generator) -> Any:
        replay = self.replay
        if action == "add":
            steps = int(rng.integers(1, LONGEST + 1))
            self.ids.append(
                replay.add(
                    {
                        "observation": rng.normal(size=(steps + 1, 2)).astype(np.float32),
                        "reward": rng.normal(size=steps).astype(np.float32),
                        "truncated": np.zeros(steps, bool),
                        "task": np.int16(rng.integers(0, 8)),
                    }
                )
            )
        elif action == "sample":
            self.batch = replay.sample().clone()
            return values_of(self.batch)
        elif action == "update" and self.batch is not None:
            replay.update_priorities(self.batch, torch.from_numpy(rng.random(self.batch.num_samples) * 3))
        elif action == "step":
            row = rng.normal(size=(1, 2)).astype(np.float32)
            if not self.has_begun:
                self.has_begun = True
                return self.writer.reset(observation=row, task=np.array([rng.integers(0, 8)], np.int16))
            ends = {"truncated": np.array([rng.integers(0, 4) == 0]), "terminated": np.zeros(1, bool)}
            reward, publish = np.ones(1, np.float32), bool(rng.integers(0, 3))
            return self.writer.step(observation=row, reward=reward, publish=publish, **ends)
        elif action == "remove" and self.ids:
            return replay.remove([self.ids[int(rng.integers(len(self.ids)))]])
        elif action == "fill" and self.ids:
            chosen = self.ids[int(rng.integers(len(self.ids)))]
            steps = len(replay.read([chosen])[0]["reward"])
            replay.fill(chosen, score=np.ones(steps, np.float32))
        elif action == "set" and self.ids and replay.config.sampler.kind == "prioritized":
            if replay.config.sampler.unit == "trajectory":
                return replay.set_priorities([self.ids[-1]], torch.tensor([float(rng.random())]))
        elif action == "seek":
            replay.load_state_dict(self.position)
        elif action == "died":  # as after the death of a process that held the lock
            replay.tables["main"].lock._holder[0] = 1
        return None

    def state(self) -> list[Any]:
        """Return what the store holds of the stream."""
        views = self.replay.tables["main"].views
        names = ("position", "heads", "consumed", "sums", "priorities", "counts", "window", "last_drawn")
        return [views["stream/train/" + name].tolist() for name in names if "stream/train/" + name in views]


def values_of(batch: Batch) -> list[Any]:
    tensors = {**dict(batch), **{"mask." + name: mask for name, mask in batch.mask.items()}}
    found = [(name, tensor.tolist()) for name, tensor in tensors.items()]
    return [*found, batch.host_records.tolist(), batch.is_weight.tolist(), batch.probability.tolist()]


@settings(deadline=None)
@given(configs(), SCENES)
def test_native_selections_are_those_of_python(config: dict[str, Any], scene: list[tuple[str, int]]) -> None:
    one, other = Side(config, native=True), Side(config, native=False)
    with one.replay, other.replay:
        for action, number in (("add", 0), *scene, ("sample", 0)):
            assert one.do(action, number) == other.do(action, number), action
            assert one.state() == other.state(), action


@pytest.mark.parametrize("kind", ["uniform", "prioritized"])
def test_a_plain_stream_is_native(kind: str) -> None:
    config = {
        "tables": {"main": {"capacity_steps": 300}},
        "sampler": {"kind": kind, "unit": "step"},
        "fields": {"reward": {}},
        "batch_size": 4,
    }
    side = Side(config, native=True)
    with side.replay:
        assert side.could
        side.do("add", 0)
        assert len(side.do("sample", 0)) == 5  # looks for dead writers, as once a second
        side.stream.get = None
        assert len(side.do("sample", 0)) == 5
        side.do("update", 1)
        side.do("step", 2)
        side.do("step", 3)
        side.do("add", 4)
        assert len(side.do("sample", 0)) == 5
