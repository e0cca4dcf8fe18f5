"""Every public call answers bad arguments with a GearError, and nothing has changed."""

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gear_support import SCHEMA, config_of, prefix, trajectory

from deepspeed_gear import (
    Batch,
    Column,
    Dataset,
    DatasetWriter,
    DeviceReplay,
    Normalizer,
    PolicyBoard,
    RemoteRolloutWorker,
    RemoteWriter,
    Replay,
    Schema,
    TrajectoryWriter,
)
from deepspeed_gear.actors.inference_loader import InferenceLoader
from deepspeed_gear.errors import DataError, GearError, ShapeError

SAMPLER = {"kind": "prioritized", "unit": "step"}
ROOM = {"capacity_steps": 500, "capacity_trajectories": 60, "max_length": 50, "writers": 2}
ON_DEVICE = {"capacity_steps": 50, "max_length": 9, "remove": "fifo", "placement": "device"}
attach = partial(TrajectoryWriter.attach, wait_s=0.0)
BOARD_MODULE = torch.nn.Linear(1, 1)
ROWS = {name: np.stack([rows[0]] * 2) for name, rows in trajectory(0, 2).items() if name != "task"}


class Scene:
    """What the calls are made on, and what must stay as it is."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.replay = Replay(
            config_of(batch_size=4, sampler=SAMPLER, tables={"main": ROOM}),
            schemas={"main": SCHEMA},
        )
        for number in range(3):
            self.replay.add(trajectory(number, 5))
        self.batch = self.replay.sample().clone()
        self.writer = self.replay.writer()
        self.vector = self.replay.vector_writer(2, autoreset="next_step")
        self.vector.reset(observation=ROWS["observation"], task=[0, 1])
        self.device_config = config_of(batch_size=4, sampler=SAMPLER, tables={"main": ON_DEVICE})
        self.device = DeviceReplay(self.device_config, "cpu", schemas={"main": SCHEMA})
        self.columns = {
            name: torch.as_tensor(np.asarray(rows))[None] for name, rows in trajectory(1, 9).items()
        }
        self.device.add_(self.columns)
        self.device_batch = self.device.new_batch()
        self.device.sample_(self.device_batch)
        self.board = PolicyBoard.create(BOARD_MODULE, prefix=prefix())

    def stored(self) -> tuple[Any, ...]:
        return len(self.replay), self.replay.num_steps, len(self.device), self.board.version

    def close(self) -> None:
        for made in (self.board, self.device, self.replay):
            made.close()


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    made = Scene(tmp_path_factory.mktemp("arguments"))
    yield made
    made.close()


def bad_values() -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nested and quantized tensors are prototypes
        return {
            "None": None,
            "a float": 1.5,
            "a negative number": -1,
            "a large number": 1 << 70,
            "NaN": float("nan"),
            "a string": "/x",
            "bytes": b"x",
            "an object": object(),
            "a class": int,
            "a list": [],
            "ragged lists": [[1], [2, 3]],
            "a list of strings": ["x", "y"],
            "a mapping": {},
            "a mapping of numbers": {1: 2},
            "an empty array": np.empty(0),
            "objects": np.array([None, "x"], object),
            "complex numbers": torch.ones(4, dtype=torch.complex64),
            "a wrong shape": torch.ones(2, 2, 2),
            "a sparse tensor": torch.eye(4).to_sparse(),
            "a meta tensor": torch.ones(4, device="meta"),
            "a nested tensor": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
            "a quantized tensor": torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8),
            "a tensor with a history": torch.ones(3, requires_grad=True),
        }


BAD = bad_values()
NUMBERS = {"a negative number"}
# The call, and which of the values are none of its errors.
Call = tuple[Callable[[Scene, Any], Any], set[str]]
ARRAYS = {"None", "a list", "an empty array"}
CALLS: dict[str, Call] = {
    "Replay": (lambda s, bad: Replay(bad), set()),
    "Replay schemas": (lambda s, bad: Replay(config_of(batch_size=2), schemas=bad), set()),
    "Replay schema": (lambda s, bad: Replay(config_of(batch_size=2), schemas={"main": bad}), set()),
    "Replay info": (lambda s, bad: Replay(config_of(batch_size=2), info=bad), {"None"}),
    "Replay place": (lambda s, bad: Replay(config_of(batch_size=2), place=bad), {"None"}),
    "Replay turns": (lambda s, bad: Replay(config_of(batch_size=2), turns=bad), set()),
    "Replay device": (lambda s, bad: Replay(config_of(batch_size=2), device=bad), set()),
    "Replay dtype": (lambda s, bad: Replay(config_of(batch_size=2), engine_dtype=bad), set()),
    "add": (lambda s, bad: s.replay.add(bad), set()),
    "add a column": (lambda s, bad: s.replay.add({**trajectory(1, 3), "observation": bad}), set()),
    "add a value": (lambda s, bad: s.replay.add({**trajectory(1, 3), "task": bad}), NUMBERS),
    "add to": (lambda s, bad: s.replay.add(trajectory(1, 3), bad), {"None"}),
    "writer.add": (lambda s, bad: s.writer.add(bad), set()),
    "fill": (lambda s, bad: s.replay.fill(bad), set()),
    "set_version": (lambda s, bad: s.replay.set_policy_version(bad), set()),
    "read": (lambda s, bad: s.replay.read(bad), ARRAYS - {"None"}),
    "remove": (lambda s, bad: s.replay.remove(bad), {*ARRAYS, *NUMBERS} - {"None"}),
    "clear": (lambda s, bad: s.replay.clear(bad), {"None"}),
    "writer envs": (lambda s, bad: s.replay.writer(bad), {"None"}),
    "vector_writer autoreset": (lambda s, bad: s.replay.vector_writer(2, autoreset=bad), set()),
    "inference_loader": (lambda s, bad: InferenceLoader(s.replay, bad), set()),
    "loader timeout": (
        lambda s, bad: InferenceLoader(s.replay, 2, bad),
        {"None", "a float", "a large number"},
    ),
    "loader places": (lambda s, bad: InferenceLoader(s.replay, 2, num_simulators=bad), {"None"}),
    "loader asks": (lambda s, bad: InferenceLoader(s.replay, 2, asks=bad), {"None"}),
    "priorities of": (lambda s, bad: s.replay.update_priorities(bad, torch.ones(4)), set()),
    "update_priorities": (lambda s, bad: s.replay.update_priorities(s.batch, bad), set()),
    "priorities' mask": (
        lambda s, bad: s.replay.update_priorities(s.batch, torch.ones(4, 3), bad),
        {"None"},
    ),
    "set_priorities ids": (lambda s, bad: s.replay.set_priorities(bad, [1.0], [0]), NUMBERS),
    "set_priorities": (lambda s, bad: s.replay.set_priorities([0], bad, [0]), set()),
    "set_priorities steps": (lambda s, bad: s.replay.set_priorities([0], [1.0], bad), NUMBERS),
    "priorities": (lambda s, bad: s.replay.priorities(bad, [0]), NUMBERS),
    "iterator": (lambda s, bad: s.replay.iterator(bad), set()),
    "num_batches": (lambda s, bad: s.replay.num_batches(bad), set()),
    "transform": (lambda s, bad: setattr(s.replay, "transform", bad), {"None", "a class"}),
    "save": (lambda s, bad: s.replay.save(bad), {"a string"}),
    "load": (lambda s, bad: s.replay.load(bad, s.replay.state_dict()), {"a string"}),
    "load state": (lambda s, bad: s.replay.load(s.folder, bad), set()),
    "load_state_dict": (lambda s, bad: s.replay.load_state_dict(bad), set()),
    "batch[]": (lambda s, bad: s.batch[bad], {"a list"}),  # an empty one
    "batch.minibatches": (lambda s, bad: s.batch.minibatches(bad), set()),
    "batch.minibatches epochs": (lambda s, bad: s.batch.minibatches(2, bad), set()),
    "Batch.cat": (lambda s, bad: Batch.cat(bad), set()),
    "normalize": (lambda s, bad: s.replay.normalize(bad, 1.0), set()),
    "normalize values": (
        lambda s, bad: s.replay.normalize("observation", bad),
        {"a tensor with a history"},
    ),
    "denormalize values": (
        lambda s, bad: s.device.denormalize("observation", bad),
        {"a tensor with a history"},
    ),
    "Normalizer.load": (lambda s, bad: Normalizer.load(bad), set()),
    "Normalizer.from_config": (lambda s, bad: Normalizer.from_config(bad), set()),
    "Normalizer dataset": (lambda s, bad: Normalizer.from_config(s.device_config, bad), {"None"}),
    "batch.to": (lambda s, bad: s.batch.to(bad), set()),
    "batch.map": (lambda s, bad: s.batch.map(bad), {"a class"}),
    "batch.part": (lambda s, bad: s.batch.part(bad), set()),
    "batch.learns": (lambda s, bad: s.batch.learns(bad), set()),
    "attach": (lambda s, bad: attach(bad), {"None", "a mapping", "a mapping of numbers"}),
    "attach gear": (lambda s, bad: attach({"gear": bad}), set()),
    "attach tables": (lambda s, bad: attach({"tables": bad}), set()),
    "attach a table": (lambda s, bad: attach({"tables": {"a": bad}}), set()),
    "attach memory": (lambda s, bad: attach({"shared_memory": bad}), set()),
    "attach to": (lambda s, bad: attach(table=bad), {"None"}),
    "attach name": (lambda s, bad: attach(name=bad), {"None"}),
    "writer.vector": (lambda s, bad: s.writer.vector_writer(bad), set()),
    "vector.reset mask": (
        lambda s, bad: s.vector.reset(bad, observation=ROWS["observation"]),
        {"None"},
    ),
    "vector.reset": (lambda s, bad: s.vector.reset(observation=bad), set()),
    "vector.step envs": (lambda s, bad: s.vector.step(envs=bad, **ROWS), {"None"}),
    "vector.step reward": (lambda s, bad: s.vector.step(**{**ROWS, "reward": bad}), set()),
    "vector.step end": (lambda s, bad: s.vector.step(**{**ROWS, "terminated": bad}), set()),
    "DeviceReplay": (lambda s, bad: DeviceReplay(bad, "cpu"), set()),
    "DeviceReplay device": (lambda s, bad: DeviceReplay(s.device_config, bad), set()),
    "add_": (lambda s, bad: s.device.add_(bad), set()),
    "add_ a column": (lambda s, bad: s.device.add_({**s.columns, "reward": bad}), set()),
    "add_ lengths": (lambda s, bad: s.device.add_(s.columns, bad), {"None"}),
    "add_transitions_": (lambda s, bad: s.device.add_transitions_(bad, bad), set()),
    "fill_ ids": (lambda s, bad: s.device.fill_(bad, {}), set()),
    "fill_": (lambda s, bad: s.device.fill_(torch.zeros(1, dtype=torch.int64), bad), {"a mapping"}),
    "sample_": (lambda s, bad: s.device.sample_(bad), set()),
    "update_priorities_ of": (
        lambda s, bad: s.device.update_priorities_(bad, torch.ones(4)),
        set(),
    ),
    "update_priorities_": (lambda s, bad: s.device.update_priorities_(s.device_batch, bad), set()),
    "device load_state_dict": (lambda s, bad: s.device.load_state_dict(bad), set()),
    "device import_table": (lambda s, bad: s.device.import_table(bad), set()),
    "device save": (lambda s, bad: s.device.save(bad), {"a string"}),
    "device load": (lambda s, bad: s.device.load(bad, {}), set()),
    "device load state": (lambda s, bad: s.device.load(s.folder, bad), set()),
    "device iterator": (lambda s, bad: s.device.iterator(bad), set()),
    "Dataset.open": (lambda s, bad: Dataset.open(bad), set()),
    "DatasetWriter": (lambda s, bad: DatasetWriter(bad, SCHEMA), {"a string"}),
    "DatasetWriter schema": (lambda s, bad: DatasetWriter(s.folder / "a", bad), set()),
    "DatasetWriter split": (
        lambda s, bad: DatasetWriter(s.folder / "b", SCHEMA, split=bad),
        {"None", "a mapping"},
    ),
    "Schema": (lambda s, bad: Schema(bad), set()),
    "Schema[]": (lambda s, bad: SCHEMA[bad], set()),
    "Schema.from_json": (lambda s, bad: Schema.from_json(bad), set()),
    "Column": (lambda s, bad: Column(bad, "float32"), set()),
    "Column dtype": (lambda s, bad: Column("a", bad), set()),
    "Column shape": (
        lambda s, bad: Column("a", "float32", bad),
        {"a list", "a mapping", "an empty array", "a mapping of numbers"},
    ),
    "Column role": (lambda s, bad: Column("a", "float32", (), bad), set()),
    "PolicyBoard.create": (lambda s, bad: PolicyBoard.create(bad, prefix=prefix()), set()),
    "board prefix": (lambda s, bad: PolicyBoard.create(BOARD_MODULE, prefix=bad), {"None"}),
    "board replay": (lambda s, bad: PolicyBoard.create(BOARD_MODULE, bad), {"None"}),
    "PolicyBoard.attach": (lambda s, bad: PolicyBoard.attach(bad, wait_s=0.0), set()),
    "board name": (lambda s, bad: PolicyBoard.attach(name=bad, wait_s=0.0), set()),
    "board.publish": (lambda s, bad: s.board.publish(bad), set()),
    "board version": (lambda s, bad: s.board.publish(BOARD_MODULE, bad), {"None"}),
    "RemoteWriter url": (lambda s, bad: RemoteWriter.connect(bad, token="x", timeout_s=0.1), set()),
    "RemoteRolloutWorker url": (lambda s, bad: RemoteRolloutWorker.connect(bad, token="x"), set()),
    "RemoteWriter token": (
        lambda s, bad: RemoteWriter.connect("grpc://127.0.0.1:9", token=bad),
        {"a string"},
    ),
}


@pytest.mark.parametrize("call", CALLS)
def test_bad_arguments_are_named(scene: Scene, call: str) -> None:
    action, taken = CALLS[call]
    before = scene.stored()
    wrong = []
    for value, bad in BAD.items():
        if value in taken:
            continue
        try:
            action(scene, bad)
            wrong.append(f"{value}: taken")
        except GearError as error:
            if not error.rule:
                wrong.append(f"{value}: no rule")
        except Exception as error:
            wrong.append(f"{value}: {type(error).__name__}: {error}")
    assert wrong == []
    assert scene.stored() == before


@pytest.mark.parametrize(
    "form", [list, tuple, np.array, torch.tensor, lambda v: np.array(v, np.float64)]
)
def test_priorities_and_masks_in_any_form(scene: Scene, form: Callable[[Any], Any]) -> None:
    batch = scene.replay.sample()
    scene.replay.update_priorities(batch, form([1.0, 2.0, 3.0, 4.0]))
    scene.replay.update_priorities(batch, form([[1.0, 9.0]] * 4), [[True, False]] * 4)
    with pytest.raises(DataError, match="mask must be bool"):
        scene.replay.update_priorities(batch, [[1.0, 9.0]] * 4, [[1, 0]] * 4)
    with pytest.raises(ShapeError, match=r"priorities must have shape \[4\]"):
        scene.replay.update_priorities(batch, form([1.0]))


def test_exceptions_become_errors_with_their_text_as_value_or_remedy() -> None:
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({}, "file must be read; bad"),
        ({"value": 3}, "file must be read, got 3; bad"),
        ({"remedy": "copy it"}, "file must be read, got 'bad'; copy it"),
        ({"remedy": ""}, "file must be read, got 'bad'"),
        ({"value": 3, "remedy": "copy it"}, "file must be read, got 3; bad; copy it"),
    )
    for given, text in cases:
        with (
            pytest.raises(DataError) as raised,
            DataError.on("file", "must be read", ValueError, **given),
        ):
            raise ValueError("bad")
        assert str(raised.value) == text
    own = DataError("row", "must be whole")
    for error in (own, KeyError("bad")):  # itself, and others, stay
        with pytest.raises(type(error)) as stays, DataError.on("file", "must be read", ValueError):
            raise error
        assert stays.value is error
