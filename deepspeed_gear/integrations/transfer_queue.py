"""A storage backend of TransferQueue: its storage nodes, puts and gets, and checkpoints.

`tq.init({"backend": gear_backend()})` uses it. Values lie in files of the node (`SegmentStore`), by
default in /dev/shm, which the processes of the node read and write themselves; one actor per node
serves the processes of other nodes. No process holds a value, so none loses one by its death.

The import registers the backend. Other processes of the Ray job import this module when they
unpickle TransferQueue's config, which holds a `StorageUnits`.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from omegaconf import DictConfig
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from tensordict import NonTensorStack, TensorDict, is_tensor_collection
from transfer_queue import BatchMeta, StorageKeyNotFoundError
from transfer_queue.metadata import extract_field_schema
from transfer_queue.storage import StorageManager, StorageManagerFactory
from transfer_queue.storage.bootstrap import StorageBootstrapProvider

from deepspeed_gear.errors import CheckpointError, ConfigError, DataError, FieldError, StoreError
from deepspeed_gear.file_system import is_open
from deepspeed_gear.integrations.field_values import batch_of, field_block, packed, values_of
from deepspeed_gear.integrations.segment_index import FieldBlock
from deepspeed_gear.integrations.segment_store import LOCK, SegmentStore, StoredField

BACKEND = "Gear"
NAMESPACE = "transfer_queue"  # of TransferQueue's actors
_SHM = Path("/dev/shm")
_PREFIX = f"transfer-queue-{os.getuid()}-"
_FOLDER = "gear_storage"  # in a checkpoint
_UNITS = "units.json"
_THREADS = 4  # of a client: puts and gets that run at once
_END_S = 10.0  # within which the processes of a job that has ended release its folder


def gear_backend(
    path: str | os.PathLike[str] | None = None,
    capacity_bytes: int | None = None,
    syncs: bool = False,
    resume: bool = False,
    required_node_resource: str | None = None,
) -> dict[str, Any]:
    """Return the section `backend` of TransferQueue's config.

    Args:
        path: Folder of the values on each storage node, on tmpfs, ext4 or xfs; it stays after the
            job. None: a new one in /dev/shm, which `tq.close` removes.
        capacity_bytes: Bytes of values that a node may hold; None: what its file system holds.
        syncs: Whether each put is flushed to the disk before it returns, so that it survives a
            crash of the machine too.
        resume: Whether to keep what `path` holds, for `tq.load_checkpoint` of a checkpoint without
            storage; else it is emptied.
        required_node_resource: Resource of Ray that storage nodes have; None: all nodes.
    """
    options = {
        "path": None if path is None else os.path.abspath(path),
        "capacity_bytes": capacity_bytes,
        "syncs": syncs,
        "resume": resume,
        "required_node_resource": required_node_resource,
    }
    return {"storage_backend": BACKEND, BACKEND: options}


class StorageUnits:
    """The storage nodes of a job: sample i lies on node i modulo their number.

    A plain class, which OmegaConf passes through as it is.
    """

    def __init__(self, nodes: Sequence[str], folders: Sequence[str], is_temporary: bool) -> None:
        self.nodes = [*nodes]
        self.folders = [*folders]
        self.is_temporary = is_temporary
        self.owner = (ray.get_runtime_context().get_node_id(), os.getpid())


class NodeStorage:
    """The actor of a storage node: its values for the processes of other nodes.

    It holds nothing, so Ray restarts it and repeats the call that it died in.
    """

    def __init__(self, folder: str, capacity_bytes: int | None, syncs: bool) -> None:
        self._folder = Path(folder)
        self._options = (capacity_bytes, syncs)
        self._opened: SegmentStore | None = None

    def prepare(self, resume: bool) -> None:
        """Make the folder, once for a job; without `resume` it is emptied.

        Raises:
            StoreError: Another job uses it, or it is no folder of values.
        """
        folder = self._folder
        if folder.exists() and any(folder.iterdir()):
            if not (folder / LOCK).exists():
                rule = "must be empty or hold values of an earlier job"
                raise StoreError(str(folder), rule, None, "choose another path")
            deadline = time.monotonic() + _END_S
            while is_open(folder / LOCK) and time.monotonic() < deadline:
                time.sleep(0.1)
            if is_open(folder / LOCK):
                rule = "must belong to one job at a time"
                raise StoreError(
                    str(folder), rule, None, "end the other job, or choose another path"
                )
            if not resume:
                shutil.rmtree(folder)
        self._store()

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the values' `SegmentStore`, and return its result."""
        return getattr(self._store(), method)(*arguments)

    def pid(self) -> int:
        return os.getpid()

    def _store(self) -> SegmentStore:
        if self._opened is None:
            self._opened = SegmentStore(self._folder, *self._options)
        return self._opened


def _actor_name(unit: int) -> str:
    return f"GearStorage#{unit}"


def start_storage(conf: DictConfig) -> dict[str, Any]:
    """Start an actor on each storage node and prepare the folders; called by `tq.init`."""
    if BACKEND not in conf.backend:
        conf.backend[BACKEND] = gear_backend()[BACKEND]
    options = conf.backend[BACKEND]
    wanted = options.get("required_node_resource")
    nodes = sorted(
        (node["NodeManagerAddress"], node["NodeID"])
        for node in ray.nodes()
        if node["Alive"] and (wanted is None or node["Resources"].get(wanted, 0) > 0)
    )
    if not nodes:
        rule = "must be a resource of at least one node of Ray"
        remedy = "start Ray on a node with it, or leave it out"
        raise StoreError(f"backend.{BACKEND}.required_node_resource", rule, wanted, remedy)
    path = options.get("path")
    if path is None:
        remove_abandoned()
        path = tempfile.mkdtemp(prefix=_PREFIX, dir=_SHM)
    folders = [str(Path(path) / f"unit-{unit}") for unit in range(len(nodes))]
    actors = []
    for unit, (_, node) in enumerate(nodes):
        actor = ray.remote(NodeStorage).options(
            name=_actor_name(unit),
            namespace=NAMESPACE,
            num_cpus=0,
            max_restarts=-1,
            max_task_retries=-1,
            max_concurrency=8,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        )
        limits = (options.get("capacity_bytes"), bool(options.get("syncs", False)))
        actors.append(actor.remote(folders[unit], *limits))
    resume = bool(options.get("resume", False))
    ray.get([actor.prepare.remote(resume) for actor in actors])
    is_temporary = options.get("path") is None
    options.units = StorageUnits([node for _, node in nodes], folders, is_temporary)
    return {"actors": actors}


StorageBootstrapProvider.register_provider(BACKEND)(start_storage)


def remove_abandoned() -> None:
    """Remove temporary folders in /dev/shm of killed jobs: no process has their locks open."""
    for folder in _SHM.glob(f"{_PREFIX}*"):
        locks = [*folder.glob(f"*/{LOCK}")]
        if locks and not any(is_open(lock) for lock in locks):
            shutil.rmtree(folder, ignore_errors=True)


@StorageManagerFactory.register(BACKEND)
class GearStorageManager(StorageManager):
    """The values of a job, in one of its processes."""

    def __init__(
        self, controller_info: Any, config: DictConfig, zmq_context: Any | None = None
    ) -> None:
        if config.get("units") is None:
            rule = "must name the storage nodes of the job"
            remedy = "use the config that tq.init returned"
            raise ConfigError(f"backend.{BACKEND}.units", rule, None, remedy)
        super().__init__(controller_info, config, zmq_context=zmq_context)
        self._units: StorageUnits = config.units
        own = ray.get_runtime_context().get_node_id()
        self._is_owner = self._units.owner == (own, os.getpid())
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix=self.storage_manager_id)
        self._actors: dict[int, Any] = {}
        self._own: dict[int, SegmentStore] = {}
        limits = (config.get("capacity_bytes"), bool(config.get("syncs", False)))
        for unit, node in enumerate(self._units.nodes):
            if node == own:
                self._own[unit] = SegmentStore(Path(self._units.folders[unit]), *limits)

    async def put_data(
        self,
        data: TensorDict,
        metadata: BatchMeta,
        data_parser: Callable[[Any], Any] | None = None,
    ) -> None:
        """Store fields of samples; once it returns, they survive the death of every process."""
        if metadata.size == 0:
            return
        schema = extract_field_schema(data)
        values = {name: _batched_values(data, name) for name in [*data.keys()]}
        samples = np.array(metadata.global_indexes, np.int64)
        await self._in_thread(self._put, samples, values, data_parser)
        await self.notify_data_update(metadata.partition_ids[0], metadata.global_indexes, schema)

    async def get_data(self, metadata: BatchMeta) -> TensorDict:
        """Read the fields of samples that `metadata` names."""
        if metadata.size == 0:
            return TensorDict({}, batch_size=0)
        samples = np.array(metadata.global_indexes, np.int64)
        batch = await self._in_thread(self._get, samples, [*metadata.field_names])
        return TensorDict(batch, batch_size=len(metadata))

    async def clear_data(self, metadata: BatchMeta) -> None:
        """Remove all fields of samples."""
        if metadata.size:
            await self._in_thread(self._clear, np.array(metadata.global_indexes, np.int64))

    async def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Save all values; folders on the file system of the values get links, without copies."""
        await self._in_thread(self._save, Path(checkpoint_dir) / _FOLDER)

    async def load_checkpoint(self, checkpoint_dir: str) -> None:
        """Replace all values by those of a checkpoint."""
        await self._in_thread(self._load, Path(checkpoint_dir) / _FOLDER)

    def close(self) -> None:
        """Detach; in the process that started the storage also end it."""
        super().close()
        pool = getattr(self, "_pool", None)
        if pool is None:  # the constructor failed
            return
        pool.shutdown(wait=True)
        for store in self._own.values():
            store.close()
        if self._is_owner:
            self._is_owner = False
            for unit in range(len(self._units.nodes)):
                ray.kill(self._actor(unit))
            if self._units.is_temporary:
                for folder in self._units.folders:
                    shutil.rmtree(Path(folder).parent, ignore_errors=True)

    async def _in_thread(self, call: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._pool, call, *arguments)

    def _actor(self, unit: int) -> Any:
        if unit not in self._actors:
            self._actors[unit] = ray.get_actor(_actor_name(unit), namespace=NAMESPACE)
        return self._actors[unit]

    def _positions(self, samples: np.ndarray) -> dict[int, np.ndarray]:
        """Return which of the samples lie on each unit."""
        homes = samples % len(self._units.nodes)
        return {unit: np.flatnonzero(homes == unit) for unit in np.unique(homes).tolist()}

    def _put(
        self,
        samples: np.ndarray,
        values: dict[str, Any],
        data_parser: Callable[[Any], Any] | None,
    ) -> None:
        if data_parser is not None:
            values = _parsed(values, data_parser)
        calls = {}
        for unit, at in self._positions(samples).items():
            chosen = values
            if len(at) < len(samples):
                chosen = {name: _selected(one, at) for name, one in values.items()}
            blocks = {name: field_block(name, one, _dumps) for name, one in chosen.items()}
            if unit not in self._own:
                blocks = {name: _in_one_piece(block) for name, block in blocks.items()}
            calls[unit] = (samples[at], blocks)
        self._call("put", calls)

    def _get(self, samples: np.ndarray, names: list[str]) -> dict[str, Any]:
        positions = self._positions(samples)
        try:
            calls = {unit: (samples[at], names) for unit, at in positions.items()}
            stored: dict[int, dict[str, StoredField]] = self._call("get", calls)
        except FieldError as error:
            raise StorageKeyNotFoundError(str(error)) from error
        batch = {}
        for name in names:
            parts = {unit: fields[name] for unit, fields in stored.items()}
            if len(parts) == 1:
                (part,) = parts.values()
                if not part.content.flags.writeable:  # it lies in Ray's object store
                    part = part._replace(content=part.content.copy())
                merged = batch_of(part)
            else:
                ordered: list[Any] = [None] * len(samples)
                for unit, part in parts.items():
                    for at, value in zip(positions[unit].tolist(), values_of(part), strict=True):
                        ordered[at] = value
                merged = packed(ordered)
            batch[name] = NonTensorStack(*merged) if isinstance(merged, list) else merged
        return batch

    def _clear(self, samples: np.ndarray) -> None:
        positions = self._positions(samples)
        self._call("clear", {unit: (samples[at],) for unit, at in positions.items()})

    def _save(self, folder: Path) -> None:
        folder.mkdir()
        self._call("save", self._parts(folder))
        (folder / _UNITS).write_text(json.dumps({"units": len(self._units.nodes)}))

    def _load(self, folder: Path) -> None:
        if not (folder / _UNITS).exists():
            rule = f"must be a folder that the backend {BACKEND} saved"
            raise CheckpointError(str(folder), rule, None, "load another checkpoint")
        saved = json.loads((folder / _UNITS).read_text())["units"]
        if saved != len(self._units.nodes):
            rule = f"must be of as many storage nodes as the job has, {len(self._units.nodes)}"
            remedy = "start it with so many nodes, by required_node_resource"
            raise CheckpointError(str(folder), rule, saved, remedy)
        self._call("load", self._parts(folder))

    def _parts(self, folder: Path) -> dict[int, tuple[Path]]:
        """Return each unit's folder in a checkpoint, as an argument."""
        return {unit: (folder / f"unit-{unit}",) for unit in range(len(self._units.nodes))}

    def _call(self, method: str, calls: Mapping[int, tuple[Any, ...]]) -> dict[int, Any]:
        """Call a method of units' stores: of other nodes by their actors, of this node here.

        Args:
            method: Its name.
            calls: Its arguments, by unit.
        Returns:
            Its results, by unit.
        """
        waiting = {
            unit: self._actor(unit).call.remote(method, *given)
            for unit, given in calls.items()
            if unit not in self._own
        }
        results = {
            unit: getattr(self._own[unit], method)(*given)
            for unit, given in calls.items()
            if unit in self._own
        }
        return results | {unit: ray.get(one) for unit, one in waiting.items()}


def _batched_values(data: TensorDict, name: str) -> Any:
    """Return a field of a TensorDict as a tensor, a nested one, or a list of its values."""
    value = data[name]
    if isinstance(value, torch.Tensor):
        return value
    if is_tensor_collection(value):
        return [*value.unbind(0)]
    count = data.batch_size[0]
    if isinstance(value, (list, tuple, np.ndarray)) and len(value) == count:
        return [*value]
    return [value] * count  # one object for the whole batch


def _selected(values: Any, positions: np.ndarray) -> Any:
    if isinstance(values, torch.Tensor):
        if not values.is_nested:
            return values[torch.from_numpy(positions).to(values.device)]
        values = values.unbind()
    return [values[at] for at in positions.tolist()]


def _parsed(values: dict[str, Any], data_parser: Callable[[Any], Any]) -> dict[str, Any]:
    """Return what a parser of TransferQueue makes of a batch; it changes values in place."""
    batch = {}
    for name, one in values.items():
        is_nested = isinstance(one, torch.Tensor) and one.is_nested
        batch[name] = [*one.unbind()] if is_nested else one
    sizes = {name: len(one) for name, one in batch.items()}
    data_parser(batch)
    if {name: len(one) for name, one in batch.items()} != sizes:
        rule = "must keep the fields and the number of values of each"
        raise DataError("data_parser", rule, None, "change values in place only")
    return batch


def _in_one_piece(block: FieldBlock) -> FieldBlock:
    """Return a block whose bytes Ray sends without a copy of its own."""
    content = np.empty(int(block.sizes.sum()), np.uint8)
    at = 0
    for one in block.buffers:
        piece = np.frombuffer(one, np.uint8)
        content[at : at + len(piece)] = piece
        at += len(piece)
    return FieldBlock(block.form, block.sizes, block.shapes, [content])


def _dumps(value: Any) -> bytes:
    """Pickle an object; functions and classes of a script by their code, as Ray does."""
    content: bytes = ray.cloudpickle.dumps(value)
    return content
