"""Batch: the fields, masks and samples that `sample` returns, and the end of their lifetime."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn, overload

import numpy as np
import torch
from torch.utils import _pytree as pytree

import deepspeed_gear.arguments as arguments
from deepspeed_gear.batching.batch_parts import Samples, minibatch_samples, sample_taker
from deepspeed_gear.batching.batch_samples import OF_ALL, OF_EACH, BatchSamples
from deepspeed_gear.batching.tensor_views import tensor_table
from deepspeed_gear.config.field_names import SAMPLE_NAMES
from deepspeed_gear.config.field_resolution import LEARNS, MASK
from deepspeed_gear.errors import DataError, FieldError, ShapeError, StaleBatchError
from deepspeed_gear.notebook_views import histogram_svg, safe_view, table_html, view_html
from deepspeed_gear.ops.records import Resolution
from deepspeed_gear.public_names import PublicNames


class Batch(PublicNames, Mapping[str, torch.Tensor]):
    """Fields of a batch by name, with their masks and samples.

    `batch["action"]` is [B, T, *shape] for a field with a window of T steps, [B, *shape] without
    one. `batch.mask["action"]` is [B, T] or [B], bool: True where the values are real.

    `batch[:64]`, `batch[mask]` and `batch[indices]` are batches of some of the samples, with
    all that belongs to them: masks, weights, probabilities, sample indices, and what
    `update_priorities` needs. A slice shares the memory of its batch and lives as long; the others
    are copies.

    The tensors belong to a ring of preallocated batches. A batch of a Replay lives until max(2,
    accumulation) newer ones of its stream were requested. After that every access through the batch
    raises StaleBatchError, and a backward pass that would use overwritten values raises; `clone`
    keeps them. Objects that were taken out of the batch before (a tensor, the result of a
    `torch.utils._pytree` function) are not tracked.
    """

    _internal = frozenset(
        "arrival arrives every_tensor host_resolutions host_source lifetime reported".split()
    )
    lifetime: BatchLifetime | None = None  # None: the tensors are the batch's own

    def __init__(
        self, tensors: dict[str, torch.Tensor], mask: dict[str, torch.Tensor], samples: BatchSamples
    ) -> None:
        self._tensors = tensors
        self.mask = mask
        self._samples = samples
        # These stay in host memory when the batch moves.
        self.host_resolutions = samples.resolutions
        self._host_origin = samples.origin
        self.host_source = samples.source
        self.arrival: Any = None  # event that the device's stream must wait for

    @overload
    def __getitem__(self, key: str) -> torch.Tensor: ...

    @overload
    def __getitem__(self, key: Samples) -> Batch: ...

    def __getitem__(self, key: Any) -> Any:
        """Return a field, or a batch of some of the samples.

        Args:
            key: The name of a field; or which samples: a slice, a mask ([B], bool) or indices ([n],
                integers, negative ones from the end) as a tensor, an array or a list.
        Raises:
            FieldError: There is no such field.
            ShapeError: A mask or index does not fit the batch.
            DataError: A mask or index is of another dtype, or B values are of uint8, which could be
                either.
        Cost: of a slice, none but the object; else a copy. Indices on a GPU are read by the host.
        """
        try:
            return self._tensors[key]
        except (KeyError, TypeError):  # a slice has no hash
            if isinstance(key, (slice, torch.Tensor, np.ndarray, list)):
                return self._taken(key)
            has = f"it has {', '.join(self._tensors)}"
            if isinstance(key, str) and key in (self._samples.opaque or ()):
                has = f"its values are no tensor: batch.opaque({key!r})"
            if isinstance(key, int):
                has = f"write batch[{key}:{key + 1}] for a sample; {has}"
            raise FieldError(f"field {key!r}", "must be in the batch", None, has) from None

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
        """Return a part of the batch by its name in `gear.pipeline`.

        These are fields, `mask.<field>`, `learns.<field>`, and values per sample such as
        `is_weight`.

        Raises:
            FieldError: The batch has no part of this name.
        """
        if isinstance(name, str):
            if name in self._tensors:
                return self._tensors[name]
            if name.startswith(MASK):
                return self._mask_of(name.removeprefix(MASK))
            if name.startswith(LEARNS):
                return self.learns(name.removeprefix(LEARNS))
            if name in SAMPLE_NAMES:
                values: torch.Tensor = getattr(self, name)
                return values
        raise FieldError(
            f"{name!r}",
            "must be a field or part of the batch",
            remedy=f"it has {', '.join([*self._tensors, *SAMPLE_NAMES])}",
        )

    def opaque(self, name: str) -> list[Any]:
        """Return the values of a field whose column has the dtype "bytes" or "json", one a sample.

        They are objects in host memory, wherever the tensors are, shared with parts and copies of
        the batch. Functions of `torch.utils._pytree` leave them out.

        Returns:
            B values: bytes, or JSON values.
        Raises:
            FieldError: `gear.fields` names no such column.
        """
        known = self._samples.opaque or {}
        if not isinstance(name, str) or name not in known:
            has = f"it has {', '.join(known) or 'none'}; name the column in gear.fields"
            raise FieldError(f"opaque field {name!r}", "must be in the batch", None, has)
        return known[name]

    def arrives(self, arrival: Any) -> None:
        """Set the event that the stream using the batch must wait for; None: there is none."""
        self.arrival = arrival

    def learns(self, name: str) -> torch.Tensor:
        """Return which steps of a field learn: its mask without the steps of `gear.burn_in`.

        Raises:
            FieldError: There is no such field.
        """
        mask = self._mask_of(name)
        burn_in = self._samples.burn_in
        return mask if burn_in is None else burn_in.learns(name, mask, self._samples.resolutions)

    def _mask_of(self, name: str) -> torch.Tensor:
        try:
            return self.mask[name]
        except (KeyError, TypeError):
            has = f"it has {', '.join(self.mask)}"
            raise FieldError(f"mask {name!r}", "must be in the batch", None, has) from None

    @property
    def num_samples(self) -> int:
        return self._samples.resolutions.size(0)  # `len` of a tensor takes ten times as long

    @property
    def device(self) -> torch.device:
        return next(iter(self._tensors.values()), self._samples.resolutions).device

    @property
    def reported(self) -> torch.Tensor:
        """Resolutions for priority updates, with node and slot as their slots. [B, 8]."""
        if self._host_origin is None:
            return self.host_resolutions
        resolutions = self.host_resolutions.clone()
        resolutions[:, Resolution.SLOT] = self._host_origin.to(resolutions.device)
        return resolutions

    @property
    def valid(self) -> torch.Tensor:
        """False for samples that only fill up the last batch of an evaluation pass. [B], bool."""
        return self._samples.valid

    @property
    def epoch(self) -> torch.Tensor:
        """Epoch of each sample, 0 where the sampler has none. [B], int64."""
        return self._samples.epoch

    @property
    def trajectory_id(self) -> torch.Tensor:
        """Trajectory of each sample. [B], int64."""
        return self._samples.resolutions[:, Resolution.ID]

    @property
    def handle(self) -> torch.Tensor:
        """Shard, slot and generation of each sample's trajectory. [B, 3], int64."""
        slot = _slots(self._samples.origin, self._samples.resolutions)
        generation = self._samples.resolutions[:, Resolution.GENERATION]
        return torch.stack([slot >> 32, slot & 0xFFFFFFFF, generation], dim=1)

    @property
    def anchor(self) -> torch.Tensor:
        """Step at which each sample's windows are placed. [B], int64."""
        return self._samples.resolutions[:, Resolution.ANCHOR]

    @property
    def sample_number(self) -> torch.Tensor:
        """Sample number in its stream: the same for every number of ranks. [B], int64."""
        return self._samples.resolutions[:, Resolution.SAMPLE_NUMBER]

    @property
    def sample_index(self) -> torch.Tensor:
        """Position of each sample in its global batch. [B], int64.

        It counts the samples of all tables, and is the same for any number of ranks.
        """
        known = self._samples
        if known.index is not None:
            return known.index
        end = known.first_index + self.num_samples * known.index_step
        return torch.arange(
            known.first_index, end, known.index_step, device=known.resolutions.device
        )

    @property
    def num_steps(self) -> torch.Tensor:
        """Length of each sample's trajectory. [B], int64."""
        return self._samples.resolutions[:, Resolution.NUM_STEPS]

    @property
    def probability(self) -> torch.Tensor:
        """Probability of each sample's item in one draw: mass / total mass. [B], float64."""
        if self._samples.probability is not None:
            return self._samples.probability
        masses = self._samples.resolutions[:, Resolution.MASS].double()
        if self._samples.step_items:
            masses = torch.ones_like(masses)
        # Divided by a tensor, since on a GPU torch multiplies by the reciprocal of a number, which
        # changes the last bit.
        return masses / torch.full_like(masses, 1).mul_(self._samples.total)

    @property
    def source(self) -> torch.Tensor:
        """Table of each sample: its index in `sampler.shares` of a mixture, else 0. [B], int64."""
        return _sources(self._samples.source, self._samples.resolutions)

    @property
    def is_weight(self) -> torch.Tensor:
        """PER weight; 0 for samples that only fill up an evaluation batch. [B], float32."""
        weight = self._samples.is_weight
        return self.valid.float() if weight is None else weight

    @property
    def goal_step(self) -> torch.Tensor:
        """Row of the achieved goal of each relabelled sample, else -1. [B], int64."""
        goal_step = self._samples.goal_step
        return torch.full_like(self.trajectory_id, -1) if goal_step is None else goal_step

    @property
    def relabelled(self) -> torch.Tensor:
        """Which samples have a goal that was achieved instead of their own. [B], bool."""
        return self.goal_step >= 0

    def _taken(self, key: Samples) -> Batch:
        take = sample_taker(key, self.num_samples)
        index = take(self.sample_index)
        batch = self.map(take)
        opaque = self._samples.opaque
        if opaque is not None:
            places = take(torch.arange(self.num_samples)).tolist()
            opaque = {name: [values[i] for i in places] for name, values in opaque.items()}
        samples = batch._samples = replace(batch._samples, index=index, opaque=opaque)
        same = self.host_resolutions is self._samples.resolutions
        batch.host_resolutions = (
            samples.resolutions if same else take(self.host_resolutions)
        ).contiguous()
        batch._host_origin = None if self._host_origin is None else take(self._host_origin)
        batch.host_source = None if self.host_source is None else take(self.host_source)
        return batch

    def minibatches(self, size: int, epochs: int = 1, *, seed: int = 0) -> Iterator[Batch]:
        """Iterate over the samples in random order, once an epoch, as PPO does.

        The order follows from the seed, the epoch and the number of the batch's first sample alone:
        it is the same after a resume, and no generator needs to be saved. The batch must live as
        long as the iteration.

        Args:
            size: Samples of a minibatch; the last one of an epoch has the rest.
            epochs: Passes over the samples.
            seed: Seed of the order.
        Returns:
            Copies of `size` samples each, ceil(B / size) an epoch.
        Raises:
            ConfigError: `size` or `epochs` is less than 1, or `seed` less than 0.
        """
        size = arguments.count("size", size)
        epochs = arguments.count("epochs", epochs)
        seed = arguments.count("seed", seed, least=0)
        numbers = self.host_resolutions[:, Resolution.SAMPLE_NUMBER]
        return (self[chosen] for chosen in minibatch_samples(numbers, size, epochs, seed))

    @staticmethod
    def cat(batches: Sequence[Batch]) -> Batch:
        """Return a batch of the samples of several, one after the other; a copy.

        Its priorities can be reported as those of one batch. Probabilities are those of each
        sample's own draw.

        Args:
            batches: Batches with the same fields, masks, dtypes, windows and device.
        Raises:
            DataError: An item is not a batch, or the list is empty.
            ShapeError: Their fields differ.
        """
        batches = _alike(batches)
        first = batches[0]
        done = dict[tuple[int, ...], torch.Tensor]()

        def cat(tensors: list[torch.Tensor]) -> torch.Tensor:
            """Concatenate equal lists of tensors once, so that shared masks stay shared."""
            key = tuple(map(id, tensors))
            if key not in done:
                done[key] = torch.cat(tensors)
            return done[key]

        def optional(name: str, values: Callable[[Batch], torch.Tensor]) -> Any:
            """Concatenate an attribute of samples; None where it is None in all batches."""
            is_known = any(getattr(b._samples, name) is not None for b in batches)
            return torch.cat([values(b) for b in batches]) if is_known else None

        names = first._samples.opaque
        samples = BatchSamples(
            resolutions=cat([b._samples.resolutions for b in batches]),
            valid=torch.cat([b.valid for b in batches]),
            step_items=False,
            total=0,
            epoch=torch.cat([b.epoch for b in batches]),
            is_weight=optional("is_weight", lambda b: b.is_weight),
            source=optional("source", lambda b: b.source),
            probability=torch.cat([b.probability for b in batches]),
            goal_step=optional("goal_step", lambda b: b.goal_step),
            burn_in=first._samples.burn_in,
            origin=optional("origin", lambda b: _slots(b._samples.origin, b._samples.resolutions)),
            opaque=None
            if names is None
            else {n: [v for b in batches for v in b.opaque(n)] for n in names},
            index=torch.cat([b.sample_index for b in batches]),
        )
        tensors = {name: torch.cat([b._tensors[name] for b in batches]) for name in first._tensors}
        mask = {name: cat([b.mask[name] for b in batches]) for name in first.mask}
        made = Batch(tensors, mask, samples)
        made.host_resolutions = cat([b.host_resolutions for b in batches])
        made._host_origin = optional("origin", lambda b: _slots(b._host_origin, b.host_resolutions))
        made.host_source = optional("source", lambda b: _sources(b.host_source, b.host_resolutions))
        return made

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        """Return a batch with a function applied to every tensor; shared masks stay shared.

        Raises:
            ConfigError: `function` is not a function.
        """
        arguments.function("function", function)
        values, context = _flatten(self)
        done = {tensor: function(tensor) for tensor in dict.fromkeys(values)}  # by identity
        batch = _unflatten([done[tensor] for tensor in values], context)
        batch._samples.opaque = self._samples.opaque
        batch.host_resolutions = self.host_resolutions
        batch._host_origin = self._host_origin
        batch.host_source = self.host_source
        # Each batch has another lifetime: reading it would make torch.compile guard on that object
        # and compile again for every batch.
        if not torch.compiler.is_compiling() and self.lifetime is not None:
            self.lifetime.follow(batch)
        return batch

    def __copy__(self) -> Batch:
        """Return a batch of the same tensors, which lives as long."""
        batch = object.__new__(type(self))
        vars(batch).update(vars(self))
        batch._samples = replace(self._samples)
        if self.lifetime is not None:
            self.lifetime.bind(batch)
        return batch

    def __getstate__(self) -> dict[str, Any]:
        """Leave out objects of this process: an unpickled batch has its own tensors."""
        return {
            name: value for name, value in vars(self).items() if name not in ("lifetime", "arrival")
        }

    @property
    def every_tensor(self) -> list[torch.Tensor]:
        """All tensors of the batch, each once."""
        return list(dict.fromkeys(_flatten(self)[0]))

    def clone(self) -> Batch:
        """Return a copy that is never overwritten."""
        return self.map(torch.Tensor.clone)

    def to(self, device: torch.device | str) -> Batch:
        """Return the batch on a device; itself if it is already there.

        Raises:
            ConfigError: There is no such device, or torch cannot use it here.
        """
        there = arguments.device("device", device)
        if self.device == there:
            return self
        arguments.check_usable("device", there)
        return self.map(lambda tensor: tensor.to(there))

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
        fields = ", ".join(
            f"{n}: {str(t.dtype)[6:]}{list(t.shape)}" for n, t in self._tensors.items()
        )
        return f"Batch({self.num_samples} samples on {self.device}; {fields})"

    def _repr_html_(self) -> str:
        """Return a table of the fields, with pictures of the samples, for notebooks.

        Cost: copies at most 2^16 elements of a field, or one sample, to host memory.
        """
        return safe_view(self, self._view)

    def _view(self) -> str:
        facts = {
            "samples": f"{self.num_samples:,}",
            "trajectories": f"{len(np.unique(self.trajectory_id.cpu())):,}",
            "device": str(self.device),
        }
        weights = self.is_weight.cpu()
        num_filling = int((~self.valid).sum())
        if num_filling:
            facts["only fill up"] = f"{num_filling:,}"
        if self._samples.goal_step is not None:
            facts["relabelled"] = f"{int(self.relabelled.sum()):,}"
        if self._samples.source is not None:
            facts["tables"] = f"{len(np.unique(self.source.cpu())):,}"
        pictures = [
            histogram_svg("steps of the trajectories", self.num_steps.cpu()),
            histogram_svg("anchor of a sample", self.anchor.cpu()),
        ]
        if self._samples.is_weight is not None:
            pictures.append(histogram_svg("PER weight of a sample", weights))
        fields = ((name, tensor, self.mask.get(name)) for name, tensor in self._tensors.items())
        table = tensor_table("field", fields)
        opaque = self._samples.opaque or {}
        if opaque:
            rows = [[name, f"{len(values):,} objects"] for name, values in opaque.items()]
            table += table_html(["opaque field", "values"], rows)
        return view_html("Batch", facts, pictures, table)


class OverwrittenBatch(Batch):
    """Batch whose lifetime has ended: every access raises.

    `BatchLifetime.end` assigns it to the `__class__` of a batch, so that accesses to a living
    batch, and graphs compiled from them, need no check.
    """

    def __getattribute__(self, name: str) -> Any:
        # Python itself reads `__class__` and `__dict__`, and notebooks `_repr_html_`.
        if name.startswith("__") or name == "_repr_html_":
            return object.__getattribute__(self, name)
        if not hasattr(Batch, name) and name not in object.__getattribute__(self, "__dict__"):
            raise AttributeError(name)  # printers of objects look for `__rich_repr__` and the like
        return _refuse_overwritten()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        _refuse_overwritten()

    def __copy__(self) -> NoReturn:
        _refuse_overwritten()

    def __repr__(self) -> str:
        return "Batch(overwritten)"

    def _repr_html_(self) -> str:
        rule = "Its tensors have been written again; keep batch.clone()."
        return view_html("Batch(overwritten)", {rule: ""})


def _refuse_overwritten() -> NoReturn:
    rule = "must be used before later batches are written over its tensors"
    remedy = (
        "keep batch.clone(): a batch lives until max(2, accumulation) newer ones were requested"
    )
    raise StaleBatchError("the batch", rule, None, remedy)


class BatchLifetime:
    """Lifetime of a batch: the time until its tensors are written again.

    It ends when the gatherer fills the ring entry again, or when the loader that returned the batch
    ends it earlier. The entry is known by the storages of its tensors.
    """

    __slots__ = ("_batches", "_storages")

    def __init__(self, storages: frozenset[int]) -> None:
        self._storages = storages
        self._batches: list[weakref.ref[Batch]] = []

    def bind(self, batch: Batch) -> None:
        """Bind a batch to this lifetime: it ends when the lifetime ends."""
        batch.lifetime = self
        self._batches.append(weakref.ref(batch))

    def follow(self, batch: Batch) -> None:
        """Bind a batch made from a bound one, if it uses any of the entry's memory."""
        if any(
            storage_of(t) in self._storages
            for t in (*batch._tensors.values(), *batch.mask.values())
        ):
            self.bind(batch)

    def end(self) -> None:
        """End the bound batches: later accesses raise. Safe to call twice, and from any thread."""
        for reference in self._batches:
            batch = reference()
            if batch is not None:
                object.__setattr__(batch, "__class__", OverwrittenBatch)
        self._batches.clear()


def storage_of(tensor: torch.Tensor) -> int | None:
    """Return the address of a tensor's storage object; None for one without storage (sparse)."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return None


def _slots(origin: torch.Tensor | None, resolutions: torch.Tensor) -> torch.Tensor:
    """Return node << 32 | slot of each sample. [B], int64."""
    return resolutions[:, Resolution.SLOT] if origin is None else origin


def _sources(source: torch.Tensor | None, resolutions: torch.Tensor) -> torch.Tensor:
    """Return the index of each sample's table. [B], int64."""
    return torch.zeros_like(resolutions[:, 0]) if source is None else source


def _alike(batches: Sequence[Batch]) -> list[Batch]:
    """Return batches as a list, after the checks of `Batch.cat`."""
    given = list(batches) if isinstance(batches, (list, tuple)) else []
    if not given or not all(isinstance(batch, Batch) for batch in given):
        kinds = [type(batch).__name__ for batch in given] or type(batches).__name__
        raise DataError(
            "batches", "must be a list of at least one batch", kinds, "write Batch.cat([a, b])"
        )

    def forms(batch: Batch) -> dict[str, tuple[Any, ...]]:
        parts = {**batch._tensors, **{f"{MASK}{name}": mask for name, mask in batch.mask.items()}}
        return {
            name: (str(t.dtype)[6:], list(t.shape[1:]), str(t.device)) for name, t in parts.items()
        } | dict.fromkeys(batch._samples.opaque or (), ("opaque",))

    wanted = forms(given[0])
    for number, batch in enumerate(given[1:], 1):
        here = forms(batch)
        name = next((n for n in [*wanted, *here] if wanted.get(n) != here.get(n)), None)
        if name is not None:
            rule = f"must be as in batch 0: {wanted.get(name, 'missing')}"
            raise ShapeError(
                f"field {name!r} of batch {number}",
                rule,
                here.get(name, "missing"),
                "join batches of one config only",
            )
        if batch._samples.burn_in != given[0]._samples.burn_in:
            raise ShapeError(
                f"the burn-in of batch {number}",
                "must be that of batch 0",
                remedy="join batches of one config only",
            )
    return given


def _flatten(batch: Batch) -> tuple[list[Any], Any]:
    parts = {**{name: getattr(batch._samples, name) for name in OF_EACH}, "valid": batch.valid}
    known = {name: part for name, part in parts.items() if part is not None}
    values = [*batch._tensors.values(), *batch.mask.values(), *known.values()]
    facts = tuple(getattr(batch._samples, name) for name in OF_ALL)
    return values, (list(batch._tensors), list(batch.mask), list(known), facts)


def _unflatten(values: Any, context: Any) -> Batch:
    names, masks, known, facts = context
    values = list(values)
    end = len(names) + len(masks)
    tensors = dict(zip(names, values[: len(names)], strict=True))
    mask = dict(zip(masks, values[len(names) : end], strict=True))
    parts = dict(zip(known, values[end:], strict=True))
    return Batch(tensors, mask, BatchSamples(**parts, **dict(zip(OF_ALL, facts, strict=True))))


pytree.register_pytree_node(
    Batch, _flatten, _unflatten, serialized_type_name="deepspeed_gear.Batch"
)


pytree.register_pytree_node(OverwrittenBatch, lambda batch: _refuse_overwritten(), _unflatten)
