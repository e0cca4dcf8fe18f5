"""Micro batch: a pack's fields, sequences, model inputs and loss, and columns filled from it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch

from deepspeed_gear.batching.loss_weights import GradientDivisor, PackLoss, StepLoss
from deepspeed_gear.batching.pack_masks import MaskMod, attention_mask
from deepspeed_gear.batching.pack_rows import (
    PADDING,
    MediaReader,
    PackMedia,
    PackShape,
    RolloutTrajectories,
    TableTrajectories,
)
from deepspeed_gear.batching.packed_image_models import dummy_inputs, image_inputs
from deepspeed_gear.batching.packed_models import (
    OF_IMAGES,
    PackedModel,
    mask_inputs,
    named_inputs,
)
from deepspeed_gear.batching.ragged_rows import RaggedReader
from deepspeed_gear.batching.tensor_views import tensor_table
from deepspeed_gear.data.ragged import Ragged
from deepspeed_gear.errors import ConfigError, FieldError, ShapeError, StoreError
from deepspeed_gear.notebook_views import histogram_svg, safe_view, view_html
from deepspeed_gear.ops.records import Resolution
from deepspeed_gear.public_names import PublicNames


class ForwardPass(ABC):
    """Pass over micro batches in which the program fills columns; a subclass stores the values.

    Args:
        names: The columns.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._filled: dict[str, set[int]] = {name: set() for name in names}  # numbers of packs

    @abstractmethod
    def write(self, name: str, micro: MicroBatch, values: Any) -> None:
        """Store a column's values for one micro batch.

        Raises:
            ShapeError: Values of another shape.
        """

    def fill(self, micro: MicroBatch, columns: Mapping[str, Any]) -> None:
        """Store columns for one of the micro batches.

        Raises:
            FieldError: A column is not one of the pass.
        """
        for name, values in columns.items():
            if name not in self._filled:
                rule = f"must be one of those that forward names ({', '.join(self._filled)})"
                raise FieldError(
                    f"column {name!r}",
                    rule,
                    remedy="add it to the columns that forward is called with",
                )
            self.write(name, micro, values)
            self._filled[name].add(micro.sources.number)

    def check_filled(self, num_packs: int) -> None:
        """Raise StoreError unless every column was filled in each of this rank's micro batches."""
        for name, numbers in self._filled.items():
            if len(numbers) != num_packs:
                at = f"column {name!r}"
                rule = f"must be filled in each of the {num_packs} micro batches"
                remedy = f"call micro.fill({name}=...) in the loop"
                raise StoreError(f"forward: {at}", rule, len(numbers), remedy)


@dataclass(frozen=True)
class PackSources:
    """Trajectories of a micro batch within its rollout batch, read on demand."""

    trajectories: RolloutTrajectories  # all of the rollout batch
    index: np.ndarray  # trajectories of the pack, as indices into the rollout batch. [S], int64
    at: Any  # `index`, or a slice of as many
    number: int = 0  # index of the pack among those of this rank
    opaque: Mapping[str, list[Any]] = field(default_factory=dict)
    media: MediaReader | None = None  # None: there is no field of the role media
    ragged: Mapping[str, RaggedReader] = field(default_factory=dict)  # by field
    forward: ForwardPass | None = None  # the pass that fills it; None: it is trained
    has_peers: bool = False  # other ranks train the same model on other packs


class MicroBatch(PublicNames, Mapping[str, torch.Tensor]):
    """One pack of whole trajectories, `[1, N]`: the fields, the sequences and the loss weights.

    `micro["tokens"]` is [1, N, *shape] for a column with a row per step, [S, *shape] for one with a
    row per trajectory. In a table with a token column all other per-step fields stand where the
    token is predicted: place i holds the value of token i + 1, and the last place of a sequence
    padding, which has the weight 0. Without one, place i holds step i.

    A sequence rank has its slice of the places, N / P of them; `cu_seqlens` and `max_seqlen` are of
    the whole pack. Places of a trajectory that shares a prefix begin after it, and attend to it
    (`mask_mod`).

    Attributes:
        targets: The token that each place predicts, 0 where it predicts none; None: there are no
            tokens. [1, N], int64.
        index: Its trajectories as indices into the rollout batch. [S], int64, in host memory.
    """

    _internal = frozenset(
        {"check_shape", "flat", "host_source", "pack_shape", "reported", "sources"}
    )

    def __init__(
        self,
        tensors: dict[str, torch.Tensor],
        targets: torch.Tensor | None,
        shape: PackShape,
        loss: PackLoss,
        sources: PackSources,
        token: str | None,
        device: torch.device,
    ) -> None:
        self._tensors = tensors
        self.pack_shape = shape
        self._loss = loss
        self.sources = sources
        self._device = device
        self._token = token
        self.targets = targets
        self.index = torch.from_numpy(sources.index)

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return a field.

        Raises:
            FieldError: There is no such field.
        """
        try:
            return self._tensors[name]
        except (KeyError, TypeError):
            has = f"it has {', '.join(self._tensors)}"
            if isinstance(name, str) and name in self.sources.ragged:
                has = f"its values are ragged: micro.ragged({name!r})"
            raise FieldError(f"field {name!r}", "must be in the micro batch", None, has) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        """Return the number of fields; the number of trajectories is `num_trajectories`."""
        return len(self._tensors)

    def __repr__(self) -> str:
        names = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in self._tensors.items())
        return (
            f"MicroBatch({self.num_trajectories} trajectories, {self.num_tokens} of "
            f"{self.pack_shape.rows} places: {names})"
        )

    def _repr_html_(self) -> str:
        """Return a table of the fields, with a picture of the lengths, for notebooks.

        Cost: copies at most 2^16 elements of a field to host memory, or all of a field [1, N].
        """
        return safe_view(self, self._view)

    def _view(self) -> str:
        num_places = self.pack_shape.rows
        facts = {
            "trajectories": f"{self.num_trajectories:,}",
            "tokens": f"{self.num_tokens:,} of {num_places:,} places",
            "padding": f"{1 - self.num_tokens / max(1, num_places):.1%}",
            "loss tokens": f"{int(self._loss.host_mask.sum()):,}",
            "device": str(self._device),
        }
        fields = [(name, tensor, None) for name, tensor in self._tensors.items()]
        if self.targets is not None:
            fields.append(("targets", self.targets, None))
        picture = histogram_svg("steps of a trajectory", self.pack_shape.lengths)
        return view_html("MicroBatch", facts, [picture], tensor_table("field", fields))

    @property
    def reported(self) -> torch.Tensor:
        """Resolutions of its trajectories, for priority updates. [S, 8], in host memory."""
        return torch.from_numpy(self.sources.trajectories.resolutions.numpy()[self.sources.at])

    @property
    def host_source(self) -> torch.Tensor:
        """Table of each trajectory. [S], int64, in host memory."""
        return torch.from_numpy(self.sources.trajectories.source[self.sources.at])

    @cached_property
    def trajectory_id(self) -> torch.Tensor:
        """Id of each trajectory. [S], int64."""
        return self.reported[:, Resolution.ID].to(self._device, copy=True)

    @cached_property
    def group(self) -> torch.Tensor:
        """The item of each trajectory: those of one group have one number. [S], int64."""
        return torch.from_numpy(self.sources.trajectories.item[self.sources.at]).to(self._device)

    @cached_property
    def table(self) -> torch.Tensor:
        """Index of each trajectory's table in a mixture's shares, else 0. [S], int64."""
        return self.host_source.to(self._device)

    @cached_property
    def is_weight(self) -> torch.Tensor:
        """The PER weight of each trajectory. [S], float32."""
        return torch.from_numpy(self.sources.trajectories.is_weight[self.sources.at]).to(
            self._device
        )

    def opaque(self, name: str) -> list[Any]:
        """Return the opaque values of its trajectories, such as byte strings.

        Raises:
            FieldError: There is no such field.
        """
        if name not in self.sources.opaque:
            has = (
                f"it has {', '.join(self.sources.opaque) or 'none'}; name the column in gear.fields"
            )
            raise FieldError(f"opaque field {name!r}", "must be in the micro batch", None, has)
        return self.sources.opaque[name]

    @cached_property
    def media(self) -> PackMedia:
        """Media that places of the pack name (docs/how-to/media.md).

        Read it before the train step ends: its rows are free to go then.

        Raises:
            FieldError: The config has no field of a column of the role media.
        """
        if self.sources.media is None:
            rule = "must have a field of a column of the role media"
            raise FieldError("gear.fields", rule, None, 'name the column: "fields": {"image": {}}')
        return self.sources.media.read()

    def ragged(self, name: str) -> Ragged:
        """Return the values of a ragged column at this rank's places, each with its own number.

        Values stand where fields of steps do: in a table with a token column, place i has those of
        token i + 1. Padding has none. Read it before the train step ends: its rows are free to go
        then. Each call reads the column again.

        Raises:
            FieldError: There is no such field.
        """
        if name not in self.sources.ragged:
            has = ", ".join(self.sources.ragged) or "none"
            remedy = f"it has {has}; give the column max_values, and name it in gear.fields"
            raise FieldError(f"ragged field {name!r}", "must be in the micro batch", None, remedy)
        return self.sources.ragged[name].read(self.pack_shape).to(self._device)

    @property
    def num_trajectories(self) -> int:
        return len(self.pack_shape.lengths)

    @property
    def num_tokens(self) -> int:
        """Places of trajectories in the whole pack, without padding; shared prefixes count once."""
        return self.pack_shape.num_tokens

    @property
    def lengths(self) -> torch.Tensor:
        """Steps of each trajectory. [S], int64, in host memory."""
        return torch.from_numpy(self.pack_shape.lengths)

    @property
    def cu_seqlens(self) -> torch.Tensor:
        """First place of each sequence of the whole pack, and N. [sequences + 1], int32.

        Padding is a sequence of its own.
        """
        return torch.from_numpy(self.pack_shape.bounds).to(self._device)

    @property
    def max_seqlen(self) -> int:
        """Length of the longest sequence of the whole pack, padding being one of its own."""
        return int(np.diff(self.pack_shape.bounds).max())

    @property
    def position_ids(self) -> torch.Tensor:
        """Step of each place in its sequence. [1, N], int64.

        Positions of padding restart at the length of the longest trajectory.
        """
        return torch.from_numpy(self.pack_shape.positions()).to(self._device)[None]

    @property
    def sequence(self) -> torch.Tensor:
        """Trajectory of each place, -1 at padding. [1, N], int64.

        A place of a shared prefix belongs to the trajectory that it was gathered from.
        """
        return torch.from_numpy(self.pack_shape.owners()).to(self._device)[None]

    @property
    def mask_mod(self) -> MaskMod:
        """Mask function for flex attention: (batch, head, query, key) -> whether it attends."""
        until = torch.from_numpy(self.pack_shape.seen_until()).to(self._device)

        def attends(batch: Any, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            return (key <= query) & (query < until[key])

        return attends

    @property
    def block_mask(self) -> torch.Tensor:
        """Which places each place attends to: its past, and the prefix that it shares.

        [1, 1, N, N], bool. For models without kernels for packed sequences; N * N bytes, of a whole
        pack.
        """
        like = torch.empty(0, device=self._device)
        mask: torch.Tensor = attention_mask(self.mask_mod, self.pack_shape.rows, "sdpa", like)
        return mask

    def model_inputs(self, model: Any) -> dict[str, Any]:
        """Return the keyword arguments of a causal language model of transformers 5.

        Without a cache, since with one the model takes the pack for a single sequence. A model is
        accepted if its family is known to keep trajectories apart with its attention:
        docs/how-to/packed-models.md has the table. Packs of one trajectory suit every model. A
        model of text and images also gets the media of the pack, whose columns have the names of
        its arguments, and their positions; with several ranks, a pack without media gets a dummy.

        Args:
            model: It, or an engine, a DDP or FSDP module, a compiled or a peft model around it. Or
                the name of its attention, where `Replay.check_packing` accepts that: "sdpa",
                "eager", "flex_attention", "flash_attention_2", "flash_attention_3" or
                "flash_attention_4".
        Raises:
            ConfigError: The model is not known to keep trajectories apart, there is no such
                attention, or the table has no column of the role token.
        """
        if self._token is None or self._token not in self._tensors:
            rule = 'must have a field of a column with the role "token"'
            raise ConfigError("gear.fields", rule, None, "give the column of token ids that role")
        inputs = {"input_ids": self._tensors[self._token], "use_cache": False}
        if self.pack_shape.prefixes is not None:
            inputs |= mask_inputs(model, self)
        elif isinstance(model, str):
            inputs |= named_inputs(model, self)
        else:
            is_slice = self.pack_shape.end - self.pack_shape.first < self.pack_shape.rows
            inputs |= PackedModel(model).inputs(self, is_slice)
        if not isinstance(model, str) and PackedModel(model).family in OF_IMAGES:
            packed = PackedModel(model)
            tokens = self._tensors[self._token]
            media = self.media if self.sources.media is not None else None
            ids = self.trajectory_id.tolist()
            inputs |= image_inputs(packed, tokens, self.pack_shape, media, ids)
            if media is not None and self.sources.has_peers:
                inputs |= dummy_inputs(packed, tokens, self.pack_shape, media, self.mask_mod)
        return inputs

    @property
    def loss_mask(self) -> torch.Tensor:
        """Which places count in the loss: those that predict a loss token. [1, N], bool."""
        return self._loss.mask

    @property
    def weight(self) -> torch.Tensor:
        """Loss weight of each place, with the framework's divisor. [1, N], float32."""
        return self._loss.weights[None] * self._loss.divisor.value

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return this micro batch's part of the loss, for `backward`.

        Summed over all micro batches and ranks, and divided by what the framework divides by, it is
        the mean that `gear.loss.normalize` names.

        Args:
            values: Loss of each place; may be NaN or infinite where the mask is False. [1, N] or
                [N].
        Returns:
            [], float32.
        Raises:
            ShapeError: `values` has another shape.
        """
        return (self._kept(values) * self._loss.weights).sum() * self._loss.divisor.value

    def _kept(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values, 0 outside of the loss mask. [N], float32."""
        flat = self.flat("values", values)
        # Selected before they are multiplied: 0 * NaN is NaN, also in the gradient.
        zero = torch.zeros((), dtype=flat.dtype, device=flat.device)
        return torch.where(self._loss.mask[0], flat, zero).float()

    @property
    def fraction(self) -> float:
        """Weight of a loss term that is no mean over tokens, such as an auxiliary loss of experts.

        It is the micro batch's fraction of the optimizer step's loss tokens, times the framework's
        divisor: over all micro batches and ranks the weights of such terms sum to 1.
        """
        return self._loss.share * self._loss.divisor.value

    def per_sequence(
        self, values: torch.Tensor, how: Literal["mean", "sum"] = "mean"
    ) -> torch.Tensor:
        """Return the mean or the sum over the loss tokens of each trajectory, at every place of it.

        GSPO: `ratio = torch.exp(micro.per_sequence(logp - micro["old_logp"], "mean"))`.

        Args:
            values: Value of each place; ignored where the mask is False. [1, N] or [N].
            how: "mean" or "sum".
        Returns:
            Of the shape of `values`, float32; 0 at padding and in sequences without loss tokens.
        Raises:
            ShapeError: `values` has another shape.
            ConfigError: `gear.loss.by` is "member": other trajectories of a member may be in other
                packs.
        """
        if self._loss.by == "member":
            rule = 'must be "trajectory" for micro.per_sequence()'
            remedy = "a member's trajectories may be in several micro batches"
            raise ConfigError("gear.loss.by", rule, self._loss.by, remedy)
        if how not in ("mean", "sum"):
            raise ConfigError("how", "must be mean or sum", how, 'write how="mean" or how="sum"')
        kept = self._kept(values)
        mask = self._loss.mask[0]
        owner = torch.from_numpy(self.pack_shape.owners()).to(kept.device)
        owner = torch.where(owner == PADDING, self.num_trajectories, owner)
        sums = kept.new_zeros(self.num_trajectories + 1).index_add(0, owner, kept)
        counts = kept.new_zeros(self.num_trajectories + 1).index_add(0, owner, mask.float())
        if self._loss.ranks is not None:  # the sequence continues on other ranks
            sums = self._loss.ranks.sum(sums)
            counts = self._loss.ranks.sum(counts)
        if how == "mean":
            sums = sums / counts.clamp(min=1)
        sums = torch.cat([sums[:-1], sums.new_zeros(1)])
        return sums[owner].view(values.shape)

    def per_place(self, values: torch.Tensor) -> torch.Tensor:
        """Return each trajectory's value at every place of it, 0 at padding.

        `micro.per_place(micro.table) == 1` are the places of the second table of a mixture.

        Args:
            values: One value per trajectory, on the device. [S, ...].
        Returns:
            [1, N, ...].
        Raises:
            ShapeError: There is not one value for each trajectory.
        """
        if not values.dim() or len(values) != self.num_trajectories:
            rule = f"must have {self.num_trajectories} values, one for each trajectory"
            remedy = "give a tensor such as micro.table"
            raise ShapeError("values", rule, list(values.shape), remedy)
        padding = values.new_zeros(1, *values.shape[1:])  # PADDING, which is -1, is the last index
        return torch.cat([values, padding])[self.sequence]

    def fill(self, **columns: Any) -> None:
        """Store columns for this micro batch, within `Rollout.forward` or `Replay.forward`.

        Args:
            **columns: Values at the places that predict a token, [1, N] or [N]; [S] for a
                per-trajectory column of a table. A column of rows with a shape takes [1, N, ...],
                [N, ...] or [S, ...]. A ragged column of a table takes a Ragged of the N places.
        Raises:
            ShapeError: A column has another shape.
            DataError: A value is not finite, and the table requires that.
            FieldError: The micro batch is not one of `forward`, or it does not name a column.
        """
        if self.sources.forward is None:
            rule = "must be filled in micro batches of Rollout.forward or Replay.forward"
            remedy = "for example rollout.forward('old_logp')"
            raise FieldError(f"columns {', '.join(columns)}", rule, None, remedy)
        self.sources.forward.fill(self, columns)

    def flat(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """Return values of this rank's places in one dimension; ShapeError for another count."""
        self.check_shape(name, values, self.pack_shape.end - self.pack_shape.first)
        return values.reshape(-1)

    def check_shape(
        self, name: str, values: torch.Tensor, rows: int, row_shape: tuple[int, ...] = ()
    ) -> None:
        """Raise ShapeError unless there is a value, of the given shape, for each row."""
        given = tuple(values.shape) if isinstance(values, torch.Tensor) else ()
        fits = given in ((1, rows, *row_shape), (rows, *row_shape))
        if not fits and not (given == (rows, 1) and not row_shape):
            got = list(given) if isinstance(values, torch.Tensor) else type(values).__name__
            rule = f"must have shape {[1, rows, *row_shape]} or {[rows, *row_shape]}"
            raise ShapeError(name, rule, got, "one value for each place, or for each trajectory")


@dataclass(frozen=True)
class _Untrained:
    """Packs that belong to no optimizer step: their loss is 0."""

    loss: StepLoss


def pack_of_tokens(
    tokens: torch.Tensor, shape: PackShape, name: str | None, device: torch.device
) -> MicroBatch:
    """Return a micro batch of tokens that are in no rollout batch, to check a model with.

    Args:
        tokens: Tokens at this rank's places. [1, rows], int64.
        shape: Where their trajectories lie.
        name: Field of the tokens; None: there is none.
        device: Device of the micro batch.
    """
    count = len(shape.lengths)
    index = np.arange(count)
    resolutions = torch.zeros(count, Resolution.NUM_WORDS, dtype=torch.int64)
    resolutions[:, Resolution.NUM_STEPS] = torch.from_numpy(shape.lengths)
    none = torch.zeros(count, dtype=torch.int64)
    known = RolloutTrajectories.of(
        [TableTrajectories(resolutions, none.float(), none, none.bool())]
    )
    mask = torch.zeros(tokens.shape, dtype=torch.bool)
    step = _Untrained(StepLoss(0, np.zeros(count)))
    return MicroBatch(
        {} if name is None else {name: tokens.to(device)},
        None,
        shape,
        PackLoss(mask, mask.to(device), shape, index, step, GradientDivisor(1.0)),
        PackSources(known, index, index),
        name,
        device,
    )
