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
    from deepspeed_gear.data.dataset import Dataset
    from deepspeed_gear.data.dataset_writer import DatasetWriter
    from deepspeed_gear.engine.attach import attach, disable, enable, initialize
    from deepspeed_gear.errors import (
        BuildError,
        CheckpointError,
        ConfigError,
        DataError,
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
    )
    from deepspeed_gear.remote.remote_writer import RemoteWriter
    from deepspeed_gear.remote.sender import SendOptions
    from deepspeed_gear.replay import DeviceReplay, Replay
    from deepspeed_gear.schema import Column, Schema
    from deepspeed_gear.writer.trajectory_writer import TrajectoryWriter
    from deepspeed_gear.writer.vector_writer import VectorWriter

_HOMES = {
    "Batch": "batching.batch",
    "BuildError": "errors",
    "CheckpointError": "errors",
    "Column": "schema",
    "ConfigError": "errors",
    "DataError": "errors",
    "Dataset": "data.dataset",
    "DatasetWriter": "data.dataset_writer",
    "DeviceReplay": "replay",
    "FieldError": "errors",
    "GearError": "errors",
    "InferenceClient": "actors.inference_client",
    "InferenceLoader": "actors.inference_loader",
    "LostNodeError": "errors",
    "NotReadyError": "errors",
    "PeerError": "errors",
    "PolicyBoard": "actors.policy_board",
    "RemoteWriter": "remote.remote_writer",
    "Replay": "replay",
    "Schema": "schema",
    "SendOptions": "remote.sender",
    "SchemaError": "errors",
    "ShapeError": "errors",
    "StaleBatchError": "errors",
    "StoreError": "errors",
    "StoreFullError": "errors",
    "TrajectoryWriter": "writer.trajectory_writer",
    "VectorWriter": "writer.vector_writer",
    "attach": "engine",
    "disable": "engine",
    "enable": "engine",
    "initialize": "engine",
    "start_actors": "actors.start_actors",
}
__all__ = [
    "Batch",
    "BuildError",
    "CheckpointError",
    "Column",
    "ConfigError",
    "DataError",
    "Dataset",
    "DatasetWriter",
    "DeviceReplay",
    "FieldError",
    "GearError",
    "InferenceClient",
    "InferenceLoader",
    "LostNodeError",
    "NotReadyError",
    "PeerError",
    "PolicyBoard",
    "RemoteWriter",
    "Replay",
    "Schema",
    "SchemaError",
    "SendOptions",
    "ShapeError",
    "StaleBatchError",
    "StoreError",
    "StoreFullError",
    "TrajectoryWriter",
    "VectorWriter",
    "attach",
    "disable",
    "enable",
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
    """List also the names that are imported on first use."""
    return sorted({*globals(), *__all__})
