"""Batch: the fields, masks and samples that `sample` returns."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch.utils import _pytree as pytree

import deepspeed_gear.arguments as arguments
from deepspeed_gear.batching.burn_in import BurnIn
from deepspeed_gear.config.field_checks import LEARNS, MASK, SAMPLE_NAMES
from deepspeed_gear.errors import FieldError, StaleBatchError
from deepspeed_gear.ops.records import Resolution


@dataclass
class BatchSamples:
    """The samples of a batch: resolutions and what is derived from them.

    Args:
        records: Their resolutions. [B, 8], int64.
        valid: False for samples that only fill up the last batch of an evaluation pass. [B], bool.
        step_items: Whether an item is a step, which has a mass of 1, rather than a trajectory.
        total: Sum of the masses of all items. On a device [], int64.
        epoch: Epoch of each sample, 0 where the sampler has none. [B], int64.
        is_weight: PER weights; None: all 1. [B], float32.
        source: Index of each sample's table in the sampler's shares; None: there is one. [B], int64.
        probability: Of each sample's item, where it does not follow from the masses alone. [B], float64.
        goal_step: Row of the achieved goal of each relabelled sample, -1 for its own goal; None: all have
            their own. [B], int64.
        burn_in: Which steps are burn-in; None: none.
        origin: Node and slot of each sample's trajectory, node << 32 | slot; None: they are in this node's
            store. [B], int64.
        first_index: Index of the first sample in its global batch.
        index_step: Difference between the indices of consecutive samples.
    """

    records: torch.Tensor
    valid: torch.Tensor
    step_items: bool
    total: int | torch.Tensor
    epoch: torch.Tensor
    is_weight: torch.Tensor | None = None
    source: torch.Tensor | None = None
    probability: torch.Tensor | None = None
    goal_step: torch.Tensor | None = None
    burn_in: BurnIn | None = None
    origin: torch.Tensor | None = None
    first_index: int = 0
    index_step: int = 1


class Batch(Mapping[str, torch.Tensor]):
    """Fields of a batch by name, with their masks and samples.

    `batch["action"]` is [B, T, *shape] for a field with a window of T steps, [B, *shape] without one.
    `batch.mask["action"]` is [B, T] or [B], bool: True where the values are real.

    The tensors belong to a ring of preallocated batches. A batch of a Replay lives until max(2, accumulation)
    newer ones of its stream were requested. After that every access through the batch raises StaleBatchError,
    and a backward pass that would use overwritten values raises; `clone` keeps them. Objects that were taken
    out of the batch before (a tensor, the result of a `torch.utils._pytree` function) are not tracked.

    Args:
        tensors: The fields.
        mask: Their masks.
        samples: Its samples.
    """

    lifetime: BatchLifetime | None = None  # None: the tensors are the batch's own

    def __init__(
        self, tensors: dict[str, torch.Tensor], mask: dict[str, torch.Tensor], samples: BatchSamples
    ) -> None:
        self._tensors, self.mask, self._records = tensors, mask, samples.records
        self.valid, self.epoch = samples.valid, samples.epoch
        self._step_items, self._total, self._is_weight = samples.step_items, samples.total, samples.is_weight
        self._source, self._probability = samples.source, samples.probability
        self._goal_step, self._burn_in, self._origin = samples.goal_step, samples.burn_in, samples.origin
        self._first_index, self._index_step = samples.first_index, samples.index_step
        # These stay in host memory when the batch moves.
        self.host_records, self._host_origin = samples.records, samples.origin
        self.host_source = samples.source
        self.arrival: Any = None  # event that the device's stream must wait for

    # ---- fields ----------------------------------------------------------------------------------

    def __getitem__(self, name: str) -> torch.Tensor:
        try:
            return self._tensors[name]
        except (KeyError, TypeError):  # a slice has no hash
            has = f"it has {', '.join(self._tensors)}"
            raise FieldError(f"field {name!r}", "must be in the batch", None, has) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        """Return the number of fields; the number of samples is `num_samples`."""
        return len(self._tensors)

    def __setitem__(self, name: str, tensor: torch.Tensor) -> None:
        """Set a field, as a transform does."""
        self._tensors[name] = tensor

    def __eq__(self, other: object) -> bool:
        """Return whether another batch has the same samples, values and masks.

        DeepSpeed's AutoTP compares the inputs of the tensor ranks' first forward pass.
        """
        if not isinstance(other, Batch):
            return NotImplemented
        mine, theirs = (
            {**b, "gear.id": b.trajectory_id, "gear.number": b.sample_number} for b in (self, other)
        )
        return all(
            ours.keys() == others.keys()
            and all(tensor.equal(others[name].to(tensor.device)) for name, tensor in ours.items())
            for ours, others in ((mine, theirs), (self.mask, other.mask))
        )

    def part(self, name: str) -> torch.Tensor:
        """Return a part of the batch by its name in `gear.pipeline`: a field, `mask.<field>`, `is_weight` ...

        Raises:
            FieldError: The batch has no part of this name.
        """
        if not isinstance(name, str):
            raise FieldError(f"{name!r}", "must be a field or part of the batch")
        if name in self._tensors:
            return self._tensors[name]
        if name.startswith(MASK):
            return self._mask_of(name.removeprefix(MASK))
        if name.startswith(LEARNS):
            return self.learns(name.removeprefix(LEARNS))
        if name not in SAMPLE_NAMES:
            raise FieldError(f"{name!r}", "must be a field or part of the batch")
        found: torch.Tensor = getattr(self, name)
        return found

    def arrives(self, arrival: Any) -> None:
        """Set the event that the stream using the batch must wait for; None: there is none."""
        self.arrival = arrival

    def learns(self, name: str) -> torch.Tensor:
        """Return which steps of a field learn: its mask without the steps of `gear.burn_in`.

        Raises:
            FieldError: There is no such field.
        """
        mask = self._mask_of(name)
        return mask if self._burn_in is None else self._burn_in.learns(name, mask, self._records)

    def _mask_of(self, name: str) -> torch.Tensor:
        try:
            return self.mask[name]
        except (KeyError, TypeError):
            has = f"it has {', '.join(self.mask)}"
            raise FieldError(f"mask {name!r}", "must be in the batch", None, has) from None

    @property
    def num_samples(self) -> int:
        return self._records.size(0)  # `len` of a tensor takes ten times as long

    @property
    def device(self) -> torch.device:
        return next(iter(self._tensors.values())).device if self._tensors else self._records.device

    @property
    def reported(self) -> torch.Tensor:
        """Resolutions for priority updates, with node and slot as their slots. [B, 8]."""
        if self._host_origin is None:
            return self.host_records
        records = self.host_records.clone()
        records[:, Resolution.SLOT] = self._host_origin.to(records.device)
        return records

    # ---- samples ---------------------------------------------------------------------------------

    @property
    def trajectory_id(self) -> torch.Tensor:
        """Trajectory of each sample. [B], int64."""
        return self._records[:, Resolution.ID]

    @property
    def handle(self) -> torch.Tensor:
        """Shard, slot and generation of each sample's trajectory. [B, 3], int64."""
        slot = self._records[:, Resolution.SLOT] if self._origin is None else self._origin
        return torch.stack([slot >> 32, slot & 0xFFFFFFFF, self._records[:, Resolution.GENERATION]], dim=1)

    @property
    def anchor(self) -> torch.Tensor:
        """Step at which each sample's windows are placed. [B], int64."""
        return self._records[:, Resolution.ANCHOR]

    @property
    def sample_number(self) -> torch.Tensor:
        """Sample number in its stream: the same for every number of ranks. [B], int64."""
        return self._records[:, Resolution.SAMPLE_NUMBER]

    @property
    def sample_index(self) -> torch.Tensor:
        """Position of each sample in its global batch, of all tables: the same for every rank count. [B]."""
        end = self._first_index + self.num_samples * self._index_step
        return torch.arange(self._first_index, end, self._index_step, device=self._records.device)

    @property
    def num_steps(self) -> torch.Tensor:
        """Length of each sample's trajectory. [B], int64."""
        return self._records[:, Resolution.NUM_STEPS]

    @property
    def probability(self) -> torch.Tensor:
        """Probability of each sample's item in one draw: mass / total mass. [B], float64."""
        if self._probability is not None:
            return self._probability
        masses = self._records[:, Resolution.MASS].double()
        if self._step_items:
            masses = torch.ones_like(masses)
        # By a tensor: on a GPU torch multiplies by a number's reciprocal, which changes the last bit.
        return masses / torch.full_like(masses, 1).mul_(self._total)

    @property
    def source(self) -> torch.Tensor:
        """Table of each sample: its index in `sampler.shares` of a mixture, else 0. [B], int64."""
        return torch.zeros_like(self.trajectory_id) if self._source is None else self._source

    @property
    def is_weight(self) -> torch.Tensor:
        """PER weight; 0 for samples that only fill up an evaluation batch. [B], float32."""
        return self.valid.float() if self._is_weight is None else self._is_weight

    @property
    def goal_step(self) -> torch.Tensor:
        """Row of the achieved goal of each relabelled sample, else -1. [B], int64."""
        return torch.full_like(self.trajectory_id, -1) if self._goal_step is None else self._goal_step

    @property
    def relabelled(self) -> torch.Tensor:
        """Which samples have a goal that was achieved instead of their own. [B], bool."""
        return self.goal_step >= 0

    # ---- forms -----------------------------------------------------------------------------------

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        """Return a batch with a function applied to every tensor; shared masks stay shared.

        Raises:
            ConfigError: `function` is no function.
        """
        arguments.function("function", function)
        done: dict[int, torch.Tensor] = {}

        def once(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in done:
                done[id(tensor)] = function(tensor)
            return done[id(tensor)]

        tensors = {name: once(tensor) for name, tensor in self._tensors.items()}
        mask = {name: once(tensor) for name, tensor in self.mask.items()}
        records, valid, epoch = once(self._records), once(self.valid), once(self.epoch)
        optional = self._is_weight, self._source, self._probability, self._goal_step, self._origin
        is_weight, source, probability, goal_step, origin = (None if t is None else once(t) for t in optional)
        samples = BatchSamples(
            records,
            valid,
            self._step_items,
            self._total,
            epoch,
            is_weight,
            source,
            probability,
            goal_step,
            self._burn_in,
            origin,
            self._first_index,
            self._index_step,
        )
        batch = Batch(tensors, mask, samples)
        batch.host_records, batch._host_origin = self.host_records, self._host_origin
        batch.host_source = self.host_source
        # A lifetime is another object for each batch: reading it would guard the compiled code on it.
        if not torch.compiler.is_compiling() and self.lifetime is not None:
            self.lifetime.follow(batch)
        return batch

    def with_probability(self, probability: torch.Tensor) -> Batch:
        """Set the probabilities of the samples, and return the batch. [B], float64."""
        self._probability = probability
        return self

    def __copy__(self) -> Batch:
        """Return a batch of the same tensors, which lives as long."""
        batch = object.__new__(type(self))
        vars(batch).update(vars(self))
        if self.lifetime is not None:
            self.lifetime.bind(batch)
        return batch

    def __getstate__(self) -> dict[str, Any]:
        """Leave out objects of this process: an unpickled batch has its own tensors."""
        return {name: value for name, value in vars(self).items() if name not in ("lifetime", "arrival")}

    @property
    def every_tensor(self) -> list[torch.Tensor]:
        """All tensors of the batch, each once."""
        found: list[torch.Tensor] = []

        def note(tensor: torch.Tensor) -> torch.Tensor:
            found.append(tensor)
            return tensor

        self.map(note)
        return found

    def clone(self) -> Batch:
        """Return a copy that is never overwritten."""
        return self.map(torch.Tensor.clone)

    def to(self, device: torch.device | str) -> Batch:
        """Return the batch on a device; itself if it is already there.

        Raises:
            ConfigError: There is no such device.
        """
        there = arguments.device("device", device)
        return self if self.device == there else self.map(lambda tensor: tensor.to(there))

    def tree(self) -> dict[str, Any]:
        """Return nested dictionaries: field `observation.image` is `["observation"]["image"]`."""
        root: dict[str, Any] = {}
        for name, tensor in self._tensors.items():
            *path, leaf = name.split(".")
            node = root
            for part in path:
                node = node.setdefault(part, {})
            node[leaf] = tensor
        return root

    def to_tensordict(self) -> Any:
        """Return a `tensordict.TensorDict` of batch size [B], with masks under "mask".

        Raises:
            ImportError: The package `tensordict` is not installed.
        """
        from tensordict import TensorDict

        names = ("trajectory_id", "anchor", "sample_number", "sample_index", "is_weight")
        extra = {name: getattr(self, name) for name in names}
        content = {**self.tree(), "mask": dict(self.mask), "gear": extra}
        return TensorDict(content, batch_size=[self.num_samples])

    def __repr__(self) -> str:
        fields = ", ".join(f"{n}: {str(t.dtype)[6:]}{list(t.shape)}" for n, t in self._tensors.items())
        return f"Batch({self.num_samples} samples; {fields})"


class OverwrittenBatch(Batch):
    """Class of a batch whose lifetime has ended: every access raises.

    Changing the class adds no cost to a living batch, and no guard to `torch.compile`.
    """

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("__"):  # of the language: `__class__`, `__dict__`
            return object.__getattribute__(self, name)
        return _refuse_overwritten()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        _refuse_overwritten()

    def __copy__(self) -> NoReturn:
        _refuse_overwritten()

    def __repr__(self) -> str:
        return "Batch(overwritten)"


def _refuse_overwritten() -> NoReturn:
    raise StaleBatchError(
        "the batch",
        "must be used before later batches are written over its tensors",
        None,
        "keep batch.clone(): a batch lives until max(2, accumulation) newer ones were requested",
    )


class BatchLifetime:
    """Lifetime of a batch: as long as its ring entry holds its values.

    It is ended by the gatherer that fills the entry again, or earlier by the loader that returned the batch.

    Args:
        storages: Addresses of the entry's storages; see `storages_of`.
    """

    def __init__(self, storages: frozenset[int]) -> None:
        self._storages = storages
        self._batches: list[weakref.ref[Batch]] = []

    def bind(self, batch: Batch) -> None:
        """Bind a batch to this lifetime: it ends with it."""
        batch.lifetime = self
        self._batches.append(weakref.ref(batch))

    def follow(self, batch: Batch) -> None:
        """Bind a batch that was made of a bound one, if it uses any of the entry's memory."""
        if any(_storage(t) in self._storages for t in (*batch._tensors.values(), *batch.mask.values())):
            self.bind(batch)

    def end(self) -> None:
        """End the bound batches: later accesses raise. Safe to call twice, and from any thread."""
        for reference in self._batches:
            batch = reference()
            if batch is not None:
                object.__setattr__(batch, "__class__", OverwrittenBatch)
        self._batches.clear()


class LentTensors:
    """The latest batches of one stream, which their user may still use.

    Older ones end by number rather than when their memory is overwritten, since that time depends on the
    progress of prefetching and of the device.

    Args:
        keep: Maximum number of batches.
    """

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._lifetimes: deque[BatchLifetime | None] = deque()  # the oldest first

    def make_room(self) -> None:
        """End the oldest batches, before another is created."""
        while len(self._lifetimes) >= self._keep:
            lifetime = self._lifetimes.popleft()
            if lifetime is not None:
                lifetime.end()

    def add(self, batch: Batch) -> None:
        """Add a batch that is returned to its user."""
        self._lifetimes.append(batch.lifetime)


def storages_of(tensors: list[torch.Tensor]) -> frozenset[int]:
    """Return the identities of tensors' storages, valid as long as they are allocated."""
    return frozenset(storage for tensor in tensors if (storage := _storage(tensor)) is not None)


def _storage(tensor: torch.Tensor) -> int | None:
    """Return the address of a tensor's storage object; None where it has none, as a sparse tensor."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return None


def _flatten(batch: Batch) -> tuple[list[Any], Any]:
    names, masks = list(batch._tensors), list(batch.mask)
    values = [*batch._tensors.values(), *batch.mask.values(), batch._records, batch.valid, batch.epoch]
    optional = batch._is_weight, batch._source, batch._probability, batch._goal_step, batch._origin
    present = tuple(tensor is not None for tensor in optional)
    values += [tensor for tensor in optional if tensor is not None]
    facts = batch._step_items, batch._total, batch._burn_in, batch._first_index, batch._index_step
    return values, (names, masks, present, facts)


def _unflatten(values: Any, context: Any) -> Batch:
    names, masks, present, (step_items, total, burn_in, first_index, index_step) = context
    values = list(values)
    tensors = dict(zip(names, values[: len(names)], strict=True))
    mask = dict(zip(masks, values[len(names) : len(names) + len(masks)], strict=True))
    records, valid, epoch, *given = values[len(names) + len(masks) :]
    weight, source, probability, goal_step, origin = (given.pop(0) if there else None for there in present)
    known = records, valid, step_items, total, epoch, weight, source, probability, goal_step, burn_in, origin
    return Batch(tensors, mask, BatchSamples(*known, first_index, index_step))


pytree.register_pytree_node(Batch, _flatten, _unflatten, serialized_type_name="deepspeed_gear.Batch")


def _flatten_overwritten(batch: OverwrittenBatch) -> NoReturn:
    _refuse_overwritten()


pytree.register_pytree_node(OverwrittenBatch, _flatten_overwritten, _unflatten)
