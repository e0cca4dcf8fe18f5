"""The public names of the package by their modules; `__init__.py` reads this list too."""

from deepspeed_gear.actors.inference_client import InferenceClient as InferenceClient
from deepspeed_gear.actors.inference_loader import InferenceLoader as InferenceLoader
from deepspeed_gear.actors.policy_board import PolicyBoard as PolicyBoard
from deepspeed_gear.actors.start_actors import start_actors as start_actors
from deepspeed_gear.batching.batch import Batch as Batch
from deepspeed_gear.batching.micro_batch import MicroBatch as MicroBatch
from deepspeed_gear.data.dataset import Dataset as Dataset
from deepspeed_gear.data.dataset_writer import DatasetWriter as DatasetWriter
from deepspeed_gear.data.media import Media as Media
from deepspeed_gear.engine.attach import attach as attach
from deepspeed_gear.engine.attach import disable as disable
from deepspeed_gear.engine.attach import enable as enable
from deepspeed_gear.engine.attach import initialize as initialize
from deepspeed_gear.errors import BuildError as BuildError
from deepspeed_gear.errors import CheckpointError as CheckpointError
from deepspeed_gear.errors import ConfigError as ConfigError
from deepspeed_gear.errors import DataError as DataError
from deepspeed_gear.errors import EmptyTableError as EmptyTableError
from deepspeed_gear.errors import FieldError as FieldError
from deepspeed_gear.errors import GearError as GearError
from deepspeed_gear.errors import KernelError as KernelError
from deepspeed_gear.errors import LeaseExpiredError as LeaseExpiredError
from deepspeed_gear.errors import LostNodeError as LostNodeError
from deepspeed_gear.errors import NotReadyError as NotReadyError
from deepspeed_gear.errors import PeerError as PeerError
from deepspeed_gear.errors import SchemaError as SchemaError
from deepspeed_gear.errors import ShapeError as ShapeError
from deepspeed_gear.errors import StaleBatchError as StaleBatchError
from deepspeed_gear.errors import StoreError as StoreError
from deepspeed_gear.errors import StoreFullError as StoreFullError
from deepspeed_gear.errors import StoreGoneError as StoreGoneError
from deepspeed_gear.frameworks.gradient_divisor import gradient_divisor as gradient_divisor
from deepspeed_gear.remote.remote_policy_board import RemotePolicyBoard as RemotePolicyBoard
from deepspeed_gear.remote.remote_rollout_worker import RemoteRolloutWorker as RemoteRolloutWorker
from deepspeed_gear.remote.remote_writer import RemoteWriter as RemoteWriter
from deepspeed_gear.remote.remote_writer import SendOptions as SendOptions
from deepspeed_gear.replay.device_replay import DeviceReplay as DeviceReplay
from deepspeed_gear.replay.normalizer import Normalizer as Normalizer
from deepspeed_gear.replay.replay import Replay as Replay
from deepspeed_gear.replay.rollout import Rollout as Rollout
from deepspeed_gear.replay.rollout import TrainStep as TrainStep
from deepspeed_gear.replay.transition_buffer import TransitionBuffer as TransitionBuffer
from deepspeed_gear.schema import Column as Column
from deepspeed_gear.schema import Schema as Schema
from deepspeed_gear.writer.fill_worker import FillLease as FillLease
from deepspeed_gear.writer.fill_worker import FillWorker as FillWorker
from deepspeed_gear.writer.partial_publish import CompletedTrajectory as CompletedTrajectory
from deepspeed_gear.writer.rollout_worker import Lease as Lease
from deepspeed_gear.writer.rollout_worker import RolloutWorker as RolloutWorker
from deepspeed_gear.writer.trajectory_writer import TrajectoryWriter as TrajectoryWriter
from deepspeed_gear.writer.turns import Turn as Turn
from deepspeed_gear.writer.turns import trajectories_from_turns as trajectories_from_turns
from deepspeed_gear.writer.vector_writer import VectorWriter as VectorWriter

__version__: str
__all__: list[str]
