"""Experience replay for large sequence models, as a part of DeepSpeed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from deepspeed_gear.actors.inference_client import InferenceClient
    from deepspeed_gear.actors.inference_loader import InferenceLoader
    from deepspeed_gear.actors.policy_board import PolicyBoard
    from deepspeed_gear.actors.start_actors import start_actors
    from deepspeed_gear.batching.batch import Batch
    from deepspeed_gear.batching.micro_batch import MicroBatch
    from deepspeed_gear.data.dataset import Dataset
    from deepspeed_gear.data.dataset_writer import DatasetWriter
    from deepspeed_gear.distributed.gradient_divisor import gradient_divisor
    from deepspeed_gear.engine.attach import attach, disable, enable, initialize
    from deepspeed_gear.errors import (
        BuildError,
        CheckpointError,
        ConfigError,
        DataError,
        EmptyTableError,
        FieldError,
        GearError,
        LostNodeError,
        NotReadyError,
        PeerError,
        SchemaError,
        ShapeError,
        StaleBatchError,
        StoreError,
        StoreFullError,
        StoreGoneError,
    )
    from deepspeed_gear.remote.remote_writer import RemoteWriter
    from deepspeed_gear.remote.sender import SendOptions
    from deepspeed_gear.replay import DeviceReplay, Replay, TransitionBuffer
    from deepspeed_gear.replay.normalizer import Normalizer
    from deepspeed_gear.replay.rollout import Rollout
    from deepspeed_gear.replay.train_step import TrainStep
    from deepspeed_gear.schema import Column, Schema
    from deepspeed_gear.writer.partial_publish import CompletedTrajectory
    from deepspeed_gear.writer.trajectory_writer import TrajectoryWriter
    from deepspeed_gear.writer.vector_writer import VectorWriter

_HOMES = {
    "Batch": "batching.batch",
    "BuildError": "errors",
    "CheckpointError": "errors",
    "Column": "schema",
    "CompletedTrajectory": "writer.partial_publish",
    "ConfigError": "errors",
    "DataError": "errors",
    "Dataset": "data.dataset",
    "DatasetWriter": "data.dataset_writer",
    "DeviceReplay": "replay",
    "EmptyTableError": "errors",
    "FieldError": "errors",
    "GearError": "errors",
    "InferenceClient": "actors.inference_client",
    "InferenceLoader": "actors.inference_loader",
    "LostNodeError": "errors",
    "MicroBatch": "batching.micro_batch",
    "Normalizer": "replay.normalizer",
    "NotReadyError": "errors",
    "PeerError": "errors",
    "PolicyBoard": "actors.policy_board",
    "RemoteWriter": "remote.remote_writer",
    "Replay": "replay",
    "Rollout": "replay.rollout",
    "Schema": "schema",
    "SendOptions": "remote.sender",
    "SchemaError": "errors",
    "ShapeError": "errors",
    "StaleBatchError": "errors",
    "StoreError": "errors",
    "StoreFullError": "errors",
    "StoreGoneError": "errors",
    "TrainStep": "replay.train_step",
    "TrajectoryWriter": "writer.trajectory_writer",
    "TransitionBuffer": "replay",
    "VectorWriter": "writer.vector_writer",
    "attach": "engine",
    "disable": "engine",
    "enable": "engine",
    "gradient_divisor": "distributed.gradient_divisor",
    "initialize": "engine",
    "start_actors": "actors.start_actors",
}
__all__ = [
    "Batch",
    "BuildError",
    "CheckpointError",
    "Column",
    "CompletedTrajectory",
    "ConfigError",
    "DataError",
    "Dataset",
    "DatasetWriter",
    "DeviceReplay",
    "EmptyTableError",
    "FieldError",
    "GearError",
    "InferenceClient",
    "InferenceLoader",
    "LostNodeError",
    "MicroBatch",
    "Normalizer",
    "NotReadyError",
    "PeerError",
    "PolicyBoard",
    "RemoteWriter",
    "Replay",
    "Rollout",
    "Schema",
    "SchemaError",
    "SendOptions",
    "ShapeError",
    "StaleBatchError",
    "StoreError",
    "StoreFullError",
    "StoreGoneError",
    "TrainStep",
    "TrajectoryWriter",
    "TransitionBuffer",
    "VectorWriter",
    "attach",
    "disable",
    "enable",
    "gradient_divisor",
    "initialize",
    "start_actors",
]


def __getattr__(name: str) -> Any:
    """Import on first use: without an engine nothing imports DeepSpeed."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    found = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    return found


def __dir__() -> list[str]:
    """Return the public names, imported or not: what completion shows."""
    return sorted(__all__)
