"""Micro batch of packed trajectories: the fields of one pack, its sequences, and its part of the loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch

from deepspeed_gear.batching.gather import SharedRows
from deepspeed_gear.batching.packed_models import PackedModel, mask_inputs, named_inputs
from deepspeed_gear.batching.packing_plan import Prefixes
from deepspeed_gear.errors import ConfigError, FieldError, ShapeError
from deepspeed_gear.ops.records import Resolution
from deepspeed_gear.public_names import PublicNames

PADDING = -1  # the sequence of places that belong to no trajectory


@dataclass
class PackShape:
    """Where the trajectories of a pack stand, and which part of it a rank has."""

    lengths: np.ndarray  # steps of each trajectory, in the order of the pack. [S], int64.
    rows: int  # N, padding included
    # The places of this rank: all, or the slice of a sequence rank.
    first: int
    end: int
    prefixes: Prefixes | None = None  # that trajectories share; None: `gear.pack.prefix` is "own"

    def __post_init__(self) -> None:
        places = self.lengths if self.prefixes is None else self.lengths - self.prefixes.steps
        #: The place after the last one of each trajectory, and its first place. [S], int64.
        self.ends: np.ndarray = places.cumsum()
        self.starts: np.ndarray = self.ends - places
        self.num_tokens = int(self.ends[-1]) if len(places) else 0
        self.own_tokens = min(max(self.num_tokens - self.first, 0), self.end - self.first)

    @cached_property
    def bounds(self) -> np.ndarray:
        """The first place of each sequence, padding being one of its own, and N. [sequences + 1], int32."""
        last = [self.rows] if self.num_tokens < self.rows else []
        return np.concatenate([[0], self.ends, last]).astype(np.int32)

    @cached_property
    def sizes(self) -> np.ndarray:
        """Places of this rank in each sequence, one after the other. [sequences], int64."""
        inside: np.ndarray = np.minimum(np.maximum(self.bounds, self.first), self.end).astype(np.int64)
        return np.asarray(inside[1:] - inside[:-1])

    def spread(self, values: np.ndarray) -> np.ndarray:
        """Return each trajectory's value at this rank's places of it, 0 elsewhere. [S] -> [end - first]."""
        found = np.zeros(self.end - self.first, values.dtype)
        own = values.repeat(self.sizes[: len(values)])
        found[: len(own)] = own
        return found

    def owners(self) -> np.ndarray:
        """Return the trajectory of each of this rank's places, PADDING elsewhere. [end - first], int64."""
        numbers: np.ndarray = np.arange(len(self.sizes))
        numbers[len(self.lengths) :] = PADDING
        return np.asarray(numbers.repeat(self.sizes))

    def positions(self) -> np.ndarray:
        """Return each place's position in its sequence; padding has those of the longest. [end - first]."""
        begins = self.bounds[:-1].astype(np.int64)
        if self.prefixes is not None:
            begins[: len(self.lengths)] -= self.prefixes.steps
        places = np.arange(self.first, self.end) - begins.repeat(self.sizes)
        return np.asarray(places % self.lengths.max(initial=1))

    def runs(
        self, records: torch.Tensor, which: Any = slice(None), shared: SharedRows | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return resolutions of the runs of rows that have places in the pack, [m, 8], and where each begins,
        [m], from those of trajectories, [n, 8].
        """
        places = torch.from_numpy(self.starts[which])
        if self.prefixes is None and shared is None:
            return records, places
        skipped = np.zeros(len(records), np.int64)
        if self.prefixes is not None:
            skipped, records = self.prefixes.steps[which], records.clone()
            records[:, Resolution.NUM_STEPS] -= torch.from_numpy(skipped)
        return (shared or SharedRows.none(len(records))).runs(records, places, skipped)


@dataclass
class PackLoss:
    """The part of a pack in the loss of its optimizer step."""

    mask: torch.Tensor  # which places count. [1, rows of this rank], bool.
    weigh: Callable[[], tuple[torch.Tensor, float]]  # returns `weights`; forward passes do not call it
    divisor: Callable[[], float]  # returns what the framework divides the sum of all ranks' gradients by
    # Returns the sum of a tensor over the ranks that share this pack's sequences, with gradients; None: there
    # is one.
    reduce: Callable[[torch.Tensor], torch.Tensor] | None = None
    # What a sequence of the loss is: a trajectory, or all those of one member of a group.
    by: Literal["trajectory", "member"] = "trajectory"

    @cached_property
    def weights(self) -> tuple[torch.Tensor, float]:
        """The weight of each place, without the divisor, 0 where the mask is False, [rows of this rank],
        float32; and the part of the step's loss tokens that they have.
        """
        return self.weigh()


@dataclass(frozen=True)
class PackMedia:
    """The media that places of a pack name: each item once.

    Attributes:
        columns: Rows of each media column, item after item. [rows, *shape], on the device.
        counts: Rows of each item, by column. [items], int64, in host memory.
        place: The places of this rank that name an item, ascending. [names], int64, on the device.
        item: Which item each of them names. [names], int64, in host memory.
    """

    columns: dict[str, torch.Tensor]
    counts: dict[str, torch.Tensor]
    place: torch.Tensor
    item: torch.Tensor

    def per_place(self) -> dict[str, torch.Tensor]:
        """Return the rows of the items that places name, place after place: what is named twice is there
        twice, as the processors of transformers do. [rows, *shape].
        """
        found = {}
        for name, rows in self.columns.items():
            parts = torch.split(rows, self.counts[name].tolist())
            found[name] = torch.cat([rows[:0], *(parts[item] for item in self.item.tolist())])
        return found


@dataclass
class PackSources:
    """What a micro batch reports back to its rollout batch, whose arrays are read on demand."""

    index: np.ndarray  # trajectories of the pack, as indices into the rollout batch. [S], int64.
    of: Any  # the rollout batch: `records` of all its trajectories, `source` (table), `item` and `is_weight`
    at: Any  # `index`, or a slice of as many
    # Takes columns of this rank's places: `MicroBatch.fill`; None: it does not take any.
    fill: Callable[[MicroBatch, Mapping[str, torch.Tensor]], None] | None = None
    opaque: dict[str, list[Any]] = field(default_factory=dict)
    # Reads the media of this rank's places; None: there is no field of the role media.
    media: Callable[[], PackMedia] | None = None


class MicroBatch(PublicNames, Mapping[str, torch.Tensor]):
    """One pack of whole trajectories, `[1, N]`: the fields, the sequences and the loss weights.

    `micro["tokens"]` is [1, N, *shape] for a column with a row per step, [S, *shape] for one with a row per
    trajectory. In a table with a token column all other per-step fields stand where the token is predicted:
    place i holds the value of token i + 1, and the last place of a sequence padding, which has the weight 0.
    Without one, place i holds step i.

    A sequence rank has its slice of the places, N / P of them; `cu_seqlens` and `max_seqlen` are of the whole
    pack. Places of a trajectory that shares a prefix begin after it, and attend to it (`mask_mod`).

    Attributes:
        targets: The token that each place predicts, 0 where it predicts none; None: there are no tokens.
            [1, N], int64.
        index: Its trajectories as indices into the rollout batch. [S], int64, in host memory.
    """

    _internal = frozenset({"check_shape", "flat", "host_source", "pack_shape", "reported", "sources"})

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
        self._tensors, self.pack_shape, self._loss, self.sources = tensors, shape, loss, sources
        self._device, self._token, self.targets = device, token, targets
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
            raise FieldError(f"field {name!r}", "must be in the micro batch", None, has) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        """Return the number of fields; the number of trajectories is `num_trajectories`."""
        return len(self._tensors)

    def __repr__(self) -> str:
        names = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in self._tensors.items())
        return (
            f"MicroBatch({self.num_trajectories} trajectories, "
            f"{self.num_tokens} of {self.pack_shape.rows} places: {names})"
        )

    @property
    def reported(self) -> torch.Tensor:  # resolutions of its trajectories. [S, 8], int64, in host memory
        return torch.from_numpy(self.sources.of.records.numpy()[self.sources.at])

    @property
    def host_source(self) -> torch.Tensor:  # the table of each. [S], int64, in host memory
        return torch.from_numpy(self.sources.of.source[self.sources.at])

    @cached_property
    def trajectory_id(self) -> torch.Tensor:
        """[S], int64."""
        return self.reported[:, Resolution.ID].to(self._device, copy=True)

    @cached_property
    def group(self) -> torch.Tensor:
        """The item of each trajectory: those of one group have one number. [S], int64."""
        return torch.from_numpy(self.sources.of.item[self.sources.at]).to(self._device)

    @cached_property
    def is_weight(self) -> torch.Tensor:
        """The PER weight of each trajectory. [S], float32."""
        return torch.from_numpy(self.sources.of.is_weight[self.sources.at]).to(self._device)

    def opaque(self, name: str) -> list[Any]:
        """Return the opaque values of its trajectories, such as byte strings.

        Raises:
            FieldError: There is no such field.
        """
        if name not in self.sources.opaque:
            has = f"there are: {', '.join(self.sources.opaque) or 'none'}"
            raise FieldError(f"opaque field {name!r}", "must be in the micro batch", None, has)
        return self.sources.opaque[name]

    @cached_property
    def media(self) -> PackMedia:
        """The media that places name (docs/how-to/language-models.md); read before the train step ends.

        Raises:
            FieldError: The config has no field of a column of the role media.
        """
        if self.sources.media is None:
            rule = "must have a field of a column of the role media"
            raise FieldError("gear.fields", rule, None, 'name the column: "fields": {"image": {}}')
        return self.sources.media()

    @property
    def num_trajectories(self) -> int:
        return len(self.pack_shape.lengths)

    @property
    def num_tokens(self) -> int:
        """Places of trajectories in the whole pack, padding excluded; a shared prefix counts once."""
        return self.pack_shape.num_tokens

    @property
    def lengths(self) -> torch.Tensor:
        """Steps of each trajectory. [S], int64, in host memory."""
        return torch.from_numpy(self.pack_shape.lengths)

    @property
    def cu_seqlens(self) -> torch.Tensor:
        """Where each sequence of the whole pack begins, padding being one of its own, and N. int32."""
        return torch.from_numpy(self.pack_shape.bounds).to(self._device)

    @property
    def max_seqlen(self) -> int:
        """Places of the longest sequence of the whole pack, padding being one of its own."""
        return int(np.diff(self.pack_shape.bounds).max())

    @property
    def position_ids(self) -> torch.Tensor:
        """The step of each place in its sequence; padding has those of the longest. [1, N], int64."""
        return torch.from_numpy(self.pack_shape.positions()).to(self._device)[None]

    @property
    def sequence(self) -> torch.Tensor:
        """The trajectory of each place, of a shared prefix the first one; -1 for padding. [1, N], int64."""
        return torch.from_numpy(self.pack_shape.owners()).to(self._device)[None]

    @property
    def mask_mod(self) -> Callable[..., torch.Tensor]:
        """(batch, head, query, key) -> whether the one place attends to the other, for flex attention."""
        whole = replace(self.pack_shape, first=0, end=self.pack_shape.rows)
        begins = ends = whole.starts  # of the prefixes
        if whole.prefixes is not None:
            begins, ends = begins[whole.prefixes.leader], begins[whole.prefixes.leader] + whole.prefixes.steps
        arrays = whole.owners(), whole.spread(begins), whole.spread(ends)
        owner, begin, end = (torch.from_numpy(array).to(self._device) for array in arrays)

        def attends(batch: Any, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            is_own = (owner[query] == owner[key]) & (key <= query)
            return is_own | ((begin[query] <= key) & (key < end[query]))

        return attends

    @property
    def block_mask(self) -> torch.Tensor:
        """Which places each place attends to: its own sequence up to itself, and the prefix that it shares.

        [1, 1, N, N], bool. Of a whole pack; N * N bytes, for models without kernels for packed sequences.
        """
        places = torch.arange(self.pack_shape.rows, device=self._device)
        return self.mask_mod(0, 0, places[:, None], places)[None, None]

    def model_inputs(self, model: Any) -> dict[str, Any]:
        """Return the keyword arguments of a causal language model of transformers 5.

        Without a cache, since with one the model takes the pack for a single sequence. A model is accepted if
        its family is known to keep trajectories apart with its attention: docs/how-to/language-models.md has
        the table. Packs of one trajectory suit every model.

        Args:
            model: It, or an engine, a DDP or FSDP module, a compiled or a peft model around it. Or the name
                of its attention, where `Replay.check_packing` accepts that: "sdpa", "eager",
                "flex_attention", "flash_attention_2", "flash_attention_3" or "flash_attention_4".
        Raises:
            ConfigError: The model is not known to keep trajectories apart, there is no such attention, or the
                table has no column of the role token.
        """
        if self._token is None or self._token not in self._tensors:
            rule = 'must have a field of a column with the role "token"'
            raise ConfigError("gear.fields", rule, None, "give the column of token ids that role")
        inputs = {"input_ids": self._tensors[self._token], "use_cache": False}
        if self.pack_shape.prefixes is not None:
            return inputs | mask_inputs(model, self)
        if isinstance(model, str):
            return inputs | named_inputs(model, self)
        is_slice = self.pack_shape.end - self.pack_shape.first < self.pack_shape.rows
        return inputs | PackedModel(model).inputs(self, is_slice)

    @property
    def loss_mask(self) -> torch.Tensor:
        """Which places count in the loss: those that predict a token of the loss mask. [1, N], bool."""
        return self._loss.mask

    @property
    def weight(self) -> torch.Tensor:
        """The loss weight of each place, with the framework's divisor. [1, N], float32."""
        return self._loss.weights[0][None] * self._loss.divisor()

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return this micro batch's part of the loss, for `backward`.

        Summed over all micro batches and ranks, and divided by what the framework divides by, it is the mean
        that `gear.loss.normalize` names.

        Args:
            values: Of each place; where the mask is False they may be NaN or infinite. [1, N] or [N].
        Returns:
            [], float32.
        Raises:
            ShapeError: Another shape.
        """
        return (self._kept(values) * self._loss.weights[0]).sum() * self._loss.divisor()

    def _kept(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values, 0 outside of the loss mask. [N], float32."""
        flat = self.flat("values", values)
        # Selected before they are multiplied: 0 * NaN is NaN, also in the gradient.
        zero = torch.zeros((), dtype=flat.dtype, device=flat.device)
        return torch.where(self._loss.mask[0], flat, zero).float()

    @property
    def fraction(self) -> float:
        """The weight of a term that is no mean of tokens, such as an auxiliary loss of experts.

        Its part of the optimizer step's loss tokens, with the framework's divisor: over all micro batches and
        ranks the weights of such terms sum to 1.
        """
        return self._loss.weights[1] * self._loss.divisor()

    def per_sequence(self, values: torch.Tensor, how: Literal["mean", "sum"] = "mean") -> torch.Tensor:
        """Return the mean or the sum over the loss tokens of each trajectory, at every place of it.

        GSPO: `ratio = torch.exp(micro.per_sequence(logp - micro["old_logp"], "mean"))`.

        Args:
            values: Of each place; ignored where the mask is False. [1, N] or [N].
            how: "mean" or "sum".
        Returns:
            Of the shape of `values`, float32; 0 at padding and in sequences without loss tokens.
        Raises:
            ShapeError: Another shape.
            ConfigError: `gear.loss.by` is "member": other trajectories of a member may be in other packs.
        """
        if self._loss.by == "member":
            rule = 'must be "trajectory" for micro.per_sequence()'
            remedy = "a member's trajectories may be in several micro batches"
            raise ConfigError("gear.loss.by", rule, self._loss.by, remedy)
        if how not in ("mean", "sum"):
            raise ConfigError("how", "must be mean or sum", how)
        kept, mask = self._kept(values), self._loss.mask[0]
        owner = torch.from_numpy(self.pack_shape.owners()).to(kept.device)
        owner = torch.where(owner == PADDING, self.num_trajectories, owner)
        sums = kept.new_zeros(self.num_trajectories + 1).index_add(0, owner, kept)
        counts = kept.new_zeros(self.num_trajectories + 1).index_add(0, owner, mask.float())
        if self._loss.reduce is not None:  # the sequence continues on other ranks
            sums, counts = self._loss.reduce(sums), self._loss.reduce(counts)
        if how == "mean":
            sums = sums / counts.clamp(min=1)
        sums = torch.cat([sums[:-1], sums.new_zeros(1)])
        return sums[owner].view(values.shape)

    def fill(self, **columns: torch.Tensor) -> None:
        """Give columns of this micro batch to its rollout batch or table, as `forward` of either asks.

        Args:
            **columns: Where the token is predicted, [1, N] or [N]; of a table's per-trajectory column [S].
        Raises:
            ShapeError, DataError: Another shape; or a value is not finite, and the table's must be.
            FieldError: The micro batch is not one of `forward`, or a column is not one that it names.
        """
        if self.sources.fill is None:
            rule = "must be filled in micro batches of Rollout.forward or Replay.forward"
            remedy = "for example rollout.forward('old_logp')"
            raise FieldError(f"columns {', '.join(columns)}", rule, None, remedy)
        self.sources.fill(self, columns)

    def flat(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """Return values of this rank's places in one dimension; ShapeError: others."""
        self.check_shape(name, values, self.pack_shape.end - self.pack_shape.first)
        return values.reshape(-1)

    def check_shape(self, name: str, values: torch.Tensor, rows: int) -> None:
        """Raise ShapeError unless there is a value for each row."""
        if not isinstance(values, torch.Tensor) or values.numel() != rows or values.dim() not in (1, 2):
            got = list(values.shape) if isinstance(values, torch.Tensor) else type(values).__name__
            rule = f"must have shape [1, {rows}] or [{rows}]"
            raise ShapeError(name, rule, got, "one value for each place, or for each trajectory")
