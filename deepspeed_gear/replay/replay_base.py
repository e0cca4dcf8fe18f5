"""Base of Replay and DeviceReplay: iterators, transform, normalizer, loading of the newest save."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

import deepspeed_gear.arguments as arguments
from deepspeed_gear.batching.batch import Batch
from deepspeed_gear.batching.transform import Transform
from deepspeed_gear.checkpoint import checked_files, save_folders, whole_saves
from deepspeed_gear.checkpoint.folder_locks import FolderLocks
from deepspeed_gear.data.statistics.dataset_statistics import ColumnStatistics
from deepspeed_gear.distributed.control_plane import ControlPlane
from deepspeed_gear.errors import CheckpointError, ConfigError, PeerError, StoreError
from deepspeed_gear.plan.resolved_plan import Resolved
from deepspeed_gear.public_names import PublicNames
from deepspeed_gear.replay.batch_loader import Evaluation
from deepspeed_gear.replay.metrics import Progress
from deepspeed_gear.replay.normalizer import Normalizer
from deepspeed_gear.sampling.batch_sizes import TRAIN
from deepspeed_gear.store.process_bound import ProcessBound

if TYPE_CHECKING:  # tables on devices are imported by those who have one
    from deepspeed_gear.device.device_loader import DeviceEvaluation

T = TypeVar("T")
_MOST_LOADS = 20  # attempts to read a newest save that other saves replace meanwhile


class ReplayBase(ProcessBound, PublicNames, ABC):
    """Base of Replay and DeviceReplay: batches, priorities, checkpoints and statistics.

    Construction, `state_dict`, `load_state_dict`, `save`, `load` and `close` are collective. One
    thread per process uses a replay.
    """

    _internal = frozenset(
        {
            "close_with",
            "control_plane",
            "load_folder",
            "metrics",
            "observe_steps",
            "take_turn",
            "topology",
            "total_progress",
        }
    )

    def __init__(self, plan: Resolved, device: torch.device, engine_dtype: torch.dtype) -> None:
        self.config = plan.config
        self.batch_info = plan.info
        self.device = device
        self.datasets = plan.datasets
        self.topology = plan.topology
        self._plan = plan
        self._engine_dtype = engine_dtype
        self._closed = False
        self._transform: Transform | None = None
        self._normalizer: tuple[Mapping[str, ColumnStatistics], Normalizer] | None = None
        self._passes: Evaluation | DeviceEvaluation
        self._last_saves: dict[str, Mapping[str, Any]] = {}  # by folder: state of its latest save
        self._folder_locks = FolderLocks()
        self._begin_s = time.perf_counter()
        self._progress = Progress(0, 0.0, 0.0, None)

    def __repr__(self) -> str:
        kind = self.config.sampler.kind
        info = self.batch_info
        sizes = f"batches of {info.micro}"
        if info.num_micro_batches > 1:
            sizes += f" of {info.global_batch}"
        if self._closed:
            end = ", closed"
        elif self.config.on_device and self.device.type == "cuda":
            end = ""  # a `repr` must not wait for a GPU, nor break a capture
        else:
            end = f", {len(self):,} trajectories, {self.num_steps:,} steps"
        tables = ", ".join(self.config.sampled_tables)
        return f"{type(self).__name__}({tables}: {kind}, {sizes}, on {self.device}{end})"

    def _table_name(self, given: str | None, known: Iterable[str], choice: Sequence[str]) -> str:
        """Return the name of the table that a call means: `given`, or the only one of `choice`."""
        if given is None and len(choice) > 1:
            rule = "must be given where there are several"
            raise ConfigError("table", rule, None, f"one of {', '.join(choice)}")
        name = choice[0] if given is None else given
        if not isinstance(name, str) or name not in known:
            raise ConfigError(
                "table", f"must be one of {', '.join(known)}", name, "choose one of them"
            )
        return name

    @property
    def control_plane(self) -> ControlPlane:
        """The control plane of all ranks, whose waits end when a rank is lost.

        After `close`, a control plane without the failure detector.
        """
        return ControlPlane() if self._closed else self._plan.control_plane

    @property
    def num_replicas(self) -> int:
        """Number of replicas, each with its tensor, sequence and pipeline ranks."""
        return self.topology.place.data_world

    @property
    def node(self) -> int:
        """Index of this rank's node."""
        return self.topology.node

    @property
    def is_node_leader(self) -> bool:
        """Whether this rank is its node's leader, for example to start the node's actors."""
        return self.topology.leads_node

    @property
    def transform(self) -> Transform | None:
        """Transform of batches: (batch, a random word per sample [B] int64) -> batch.

        Set it before sampling. The words depend only on seed, stream and sample number: values
        derived from them are the same for any number of ranks. They are on the batch's device.
        `DeviceReplay.sample_` does not call the transform.
        """
        self._check_open()
        return self._transform

    @transform.setter
    def transform(self, transform: Transform | None) -> None:
        self._check_open()
        if transform is not None and self.config.pack is not None:
            remedy = "convert micro batches in the loop over them"
            raise ConfigError("transform", "must not be set with gear.pack", None, remedy)
        self._set_transform(
            None if transform is None else arguments.function("transform", transform)
        )

    def _set_transform(self, transform: Transform | None) -> None:
        self._transform = transform

    @abstractmethod
    def sample(self) -> Batch:
        """Return this rank's next micro batch of the training stream."""

    def __iter__(self) -> Iterator[Batch]:
        return self.iterator()

    def iterator(self, stream: str = TRAIN) -> Iterator[Batch]:
        """Return an iterator over batches: endless for training, one pass over a split.

        All ranks iterate over a split together and get the same number of batches. The last ones
        may have filler samples, whose `valid` is False and `is_weight` 0.

        Args:
            stream: "train", or the name of a split.
        Raises:
            ConfigError: There is no such stream.
        """
        self._check_reads()
        arguments.one_of("stream", stream, str, "a name")
        if stream == TRAIN:
            return (self.sample() for _ in count())
        batches = self._passes.batches(stream)

        def next_one() -> Batch | None:
            self._check_open()
            return next(batches, None)

        return iter(next_one, None)

    def num_batches(self, stream: str) -> int:
        """Return the number of batches that each rank gets in one pass over a split.

        Raises:
            ConfigError: There is no such split.
        """
        self._check_open()
        return self._passes.num_batches(arguments.one_of("stream", stream, str, "a name"))

    @property
    def normalizer(self) -> Normalizer:
        """The conversions of all fields; usable without this replay, and in other processes.

        For a table without a data set, those of the newest selection: a new object whenever they
        change.
        """
        statistics = self._statistics_of_fields()
        plan = self._plan
        if self._normalizer is None or self._normalizer[0] is not statistics:
            made = Normalizer.of(plan.config, plan.fields, statistics, self._engine_dtype)
            self._normalizer = statistics, made
        return self._normalizer[1]

    def _statistics_of_fields(self) -> Mapping[str, ColumnStatistics]:
        """Return the statistics for normalised fields; the same object while they are the same."""
        return self._plan.statistics(self._plan.fields)

    def normalize(self, name: str, values: Any) -> Any:
        """Convert values as a batch's field is converted; see `Normalizer.normalize`."""
        return self.normalizer.normalize(name, values)

    def denormalize(self, name: str, values: Any) -> Any:
        """Convert values back to the units of a field's column; see `Normalizer.denormalize`."""
        return self.normalizer.denormalize(name, values)

    @abstractmethod
    def update_priorities(
        self, batch: Batch, priorities: torch.Tensor, mask: torch.Tensor | None = None
    ) -> None:
        """Report the priorities of a batch's items, [B] or [B, T], for later selections."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the position after the global batches that were used whole. Collective.

        Equal on all ranks, and JSON-able. Prefetched batches do not count, and a global batch of
        which only some micro batches were used is sampled again. A DeviceReplay waits for the
        device.

        Raises:
            StoreError: In a DeviceReplay, only some micro batches of a global batch were used.
        """

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at a state, on any number of ranks; tables keep their contents. Collective.

        Captured graphs of a DeviceReplay stay valid.

        Args:
            state: From `state_dict` or `save`.
        Raises:
            CheckpointError: The state has another format, or is of other data or of options that
                select other samples; nothing has changed.
        """
        self._check_open()
        arguments.mapping("state", state, "pass a state from state_dict or save")
        self._load(state, None)

    def save(self, folder: str | Path) -> dict[str, Any]:
        """Save added trajectories, priorities and the position; return the position. Collective.

        The save is written beside the one before, fsynced, and swapped with it. The one before
        stays until the next save into the folder begins. Whenever the program is interrupted, one
        of the two can be loaded: by a returned state that was stored elsewhere, or by the state in
        the folder. Only one run saves into a folder, from its first save until it is closed or
        ends; another run is refused.

        Args:
            folder: Gets `position.json`, `normalizer.json` and a folder for each table with a
                capacity or with priorities; other files in it stay unchanged. It must be on a file
                system that all nodes share.
        Returns:
            `state_dict()`, with the id and the checksums of this save.
        Raises:
            CheckpointError: A file cannot be written, or another run saves into this folder; the
                save before this one stays.
            StoreError: In a DeviceReplay, only some micro batches of a global batch were used.
        """
        self._check_open()
        at = os.path.realpath(arguments.folder("folder", folder))
        control_plane = self._plan.control_plane
        leads = self.topology.rank == 0

        def lock() -> None:
            if leads:
                with checked_files.writing(Path(at)):
                    save_folders.make(Path(at))
                    self._folder_locks.acquire(Path(at))

        control_plane.attempt("locking the folder of the save", lock)
        state = self._save(Path(at), self._last_saves.get(at))
        self._last_saves[at] = state
        control_plane.attempt(
            "saving the normalizer", lambda: self.normalizer.save(at) if leads else None
        )
        return state

    def load(self, folder: str | Path, state: Mapping[str, Any] | None = None) -> None:
        """Load a save: replace the contents of tables, and continue at its position. Collective.

        Another process may save into the folder meanwhile: without a state, the newest whole save
        is loaded. Do not report priorities of earlier batches afterwards: their trajectories may
        have moved.

        Args:
            folder: The folder of the save.
            state: The state that `save` returned; None: the newest save of the folder.
        Raises:
            CheckpointError: A file is missing, has changed or is of another save than the state, or
                the state does not fit; nothing has changed.
            StoreFullError: A table is too small; nothing has changed.
        """
        self._check_open()
        at = Path(os.path.realpath(arguments.folder("folder", folder)))
        if state is not None:
            arguments.mapping("state", state, "pass a state from save")
        load = partial(self.load_folder, at, state)
        whole_saves.name_others(self._plan.control_plane, load, partial(whole_saves.others_in, at))

    def load_folder(self, folder: Path, state: Mapping[str, Any] | None) -> None:
        """Load a folder's save as `load`, without naming other saves in errors."""
        loaded = self._load_newest(folder) if state is None else self._load(state, folder)
        if loaded is not None:
            self._last_saves[str(folder)] = loaded

    def _load_newest(self, folder: Path) -> Mapping[str, Any] | None:
        """Load the newest save; try again if another save replaces it meanwhile. Collective."""
        for _ in range(_MOST_LOADS):
            known = self._from_leader(partial(save_folders.read_position, folder))
            try:
                return self._load(known, folder)
            except (CheckpointError, PeerError) as error:
                if not self._from_leader(partial(save_folders.is_replaced, folder, known)):
                    raise
                cause = error
        rule = f"must hold a save for as long as it is read: {_MOST_LOADS} were replaced meanwhile"
        remedy = "save less often, or load a copy of the folder"
        raise CheckpointError(str(folder), rule, None, remedy) from cause

    def _from_leader(self, action: Callable[[], T]) -> T:
        """Return the result of rank 0, as other ranks might find another save. Collective."""
        control_plane = self._plan.control_plane
        leads = self.topology.rank == 0
        result: T = control_plane.broadcast(
            control_plane.attempt("loading the state", lambda: action() if leads else None)
        )
        return result

    @abstractmethod
    def _save(self, folder: Path, kept: Mapping[str, Any] | None) -> dict[str, Any]:
        """Save; `kept` is the state of the latest save in this folder that was loaded or made."""

    @abstractmethod
    def _load(self, state: Mapping[str, Any], folder: Path | None) -> Mapping[str, Any] | None:
        """Continue at a state, and load the tables of a save's folder; None: tables stay.

        Returns:
            The state of the loaded save, which the next save into this folder keeps; None: none.
        """

    @property
    @abstractmethod
    def num_steps(self) -> int:
        """Number of steps stored on this node."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of trajectories stored on this node."""

    @abstractmethod
    def statistics(self) -> dict[str, Any]:
        """Return sizes of the store, and statistics of samples and updates.

        docs/how-to/statistics.md explains each entry.
        """

    @abstractmethod
    def take_metrics(self) -> dict[str, float]:
        """Return the metrics for DeepSpeed's monitor, since the last call."""

    def progress(self) -> Progress:
        """Return samples per second, time in `sample` and policy lag since the last call.

        The first call counts from the construction of the replay. Not collective.

        Returns:
            A Progress, whose `str` is one line for a log.
        Raises:
            StoreError: The rank is an inner stage of a pipeline, or the replay is closed.
        Cost: a difference of counters; with policy versions, a copy of the newest selection. A
            DeviceReplay waits for the device.
        """
        self._check_reads()
        before, self._progress = self._progress, self.total_progress()
        return self._progress - before

    @abstractmethod
    def total_progress(self) -> Progress:
        """Return the progress since this replay was made."""

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError(f"the {type(self).__name__}", "must be open", None, "it was closed")

    def _check_reads(self) -> None:
        self._check_open()

    @abstractmethod
    def close(self) -> None:
        """Detach from the other ranks and release all resources; safe to call twice."""
