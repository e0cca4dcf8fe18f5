"""Experience replay for large sequence models, as a part of DeepSpeed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from deepspeed_gear.actors.policy_board import PolicyBoard
    from deepspeed_gear.actors.start_actors import collect
    from deepspeed_gear.batching.batch import Batch
    from deepspeed_gear.data.dataset import Dataset, DatasetWriter
    from deepspeed_gear.engine.attach import attach, disable, enable, initialize
    from deepspeed_gear.errors import GearError
    from deepspeed_gear.remote.remote_writer import RemoteWriter
    from deepspeed_gear.replay import DeviceReplay, Replay
    from deepspeed_gear.schema import Column, Schema
    from deepspeed_gear.writer.trajectory_writer import TrajectoryWriter

_HOMES = {
    "Batch": "batching.batch",
    "Column": "schema",
    "Dataset": "data.dataset",
    "DatasetWriter": "data.dataset",
    "DeviceReplay": "replay",
    "GearError": "errors",
    "PolicyBoard": "actors.policy_board",
    "RemoteWriter": "remote.remote_writer",
    "Replay": "replay",
    "Schema": "schema",
    "TrajectoryWriter": "writer.trajectory_writer",
    "attach": "engine",
    "collect": "actors.start_actors",
    "disable": "engine",
    "enable": "engine",
    "initialize": "engine",
}
__all__ = [
    "Batch",
    "Column",
    "Dataset",
    "DatasetWriter",
    "DeviceReplay",
    "GearError",
    "PolicyBoard",
    "RemoteWriter",
    "Replay",
    "Schema",
    "TrajectoryWriter",
    "attach",
    "collect",
    "disable",
    "enable",
    "initialize",
]


def __getattr__(name: str) -> Any:
    """Import on first use: without an engine nothing imports DeepSpeed."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    found = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    return found


def __dir__() -> list[str]:
    """List what is imported on first use, too."""
    return sorted({*globals(), *__all__})
