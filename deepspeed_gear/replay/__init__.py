"""Replay: the tables, streams and fields of a config, usable without an engine."""

from __future__ import annotations

from deepspeed_gear.device.device_loader import DeviceBatch
from deepspeed_gear.replay.device_replay import DeviceReplay
from deepspeed_gear.replay.replay import Replay
from deepspeed_gear.replay.transition_buffer import TransitionBuffer
from deepspeed_gear.sampling.batch_info import TRAIN, BatchInfo

__all__ = ["TRAIN", "BatchInfo", "DeviceBatch", "DeviceReplay", "Replay", "TransitionBuffer"]
