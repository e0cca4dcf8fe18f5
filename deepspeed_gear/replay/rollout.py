"""Rollout batch: selected once, trained for several optimizer steps, consumed as a whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import torch

import deepspeed_gear.arguments as arguments
from deepspeed_gear.batching.loss_weights import group_advantages
from deepspeed_gear.batching.micro_batch import MicroBatch
from deepspeed_gear.config.pack_options import RolloutConfig
from deepspeed_gear.errors import ConfigError, FieldError, ShapeError
from deepspeed_gear.ops.records import Resolution
from deepspeed_gear.public_names import public_names
from deepspeed_gear.replay.record_stream import RecordStream
from deepspeed_gear.replay.rollout_data import RolloutData
from deepspeed_gear.replay.rollout_nodes import BatchRows
from deepspeed_gear.replay.rollout_session import RolloutSession
from deepspeed_gear.replay.train_step import RolloutProgress, TrainStep, check_filled, forward_packs

EPSILON = 1e-8
INTERNAL = frozenset({"abandon", "step"})  # used by other modules of this package, and by no program


class Rollout:
    """A rollout batch on this rank: an iterable of its optimizer steps. Methods are collective.

    Args:
        data: Its trajectories.
        size: Minibatches and epochs.
        keys: Seed and 32-bit stream key of the shuffled orders.
        session: Of the ranks.
        records: The stream that it was taken from.
        rows: Its rows on this node.
        steps_done: Steps that were trained before, in a run that is resumed.
    """

    def __init__(
        self,
        data: RolloutData,
        size: RolloutConfig,
        keys: tuple[int, int],
        session: RolloutSession,
        records: RecordStream,
        rows: BatchRows,
        steps_done: int = 0,
    ) -> None:
        self._data, self._size, self._keys, self._session, self._rows = data, size, keys, session, rows
        self._progress = RolloutProgress(data.number, len(self), steps_done, records)

    def __repr__(self) -> str:
        return (
            f"Rollout({self.number}: {self.num_items} items, {self.num_trajectories} trajectories, "
            f"{self.num_tokens} tokens, {self.steps_done} of {len(self)} steps done)"
        )

    def __dir__(self) -> list[str]:
        """Return the public names: what completion shows."""
        return public_names(super().__dir__(), INTERNAL)

    # ---- contents --------------------------------------------------------------------------------

    @property
    def number(self) -> int:
        """Its number among the rollout batches of the run."""
        return self._progress.number

    @property
    def steps_done(self) -> int:
        """Optimizer steps that are done."""
        return self._progress.steps_done

    @property
    def num_items(self) -> int:
        """Items of the batch: groups, or trajectories."""
        return self._data.num_items

    @property
    def num_trajectories(self) -> int:
        return len(self._data.lengths)

    @property
    def num_tokens(self) -> int:
        """Steps of its trajectories."""
        return self._data.num_tokens

    @property
    def lengths(self) -> torch.Tensor:
        """Steps of each trajectory. [n], int64."""
        return torch.from_numpy(self._data.lengths.copy())

    @property
    def group(self) -> torch.Tensor:
        """Item of each trajectory: those of one group have one number. [n], int64."""
        return torch.from_numpy(self._data.item.copy())

    @property
    def trajectory_id(self) -> torch.Tensor:
        """[n], int64."""
        return self._data.records[:, Resolution.ID].clone()

    def values(self, name: str) -> torch.Tensor:
        """Return a per-trajectory column of all trajectories of the batch. [n, *shape].

        Raises:
            ConfigError: There is no such column.
            DataError: It is late, and a trajectory does not have it yet.
            StoreError: The rollout batch has ended.
        """
        self._progress.check_open()
        if self._data.is_spread:
            self._agree_on(name)
        return torch.from_numpy(self._data.values(name))

    def _agree_on(self, *names: str) -> None:
        """Raise on all ranks unless every rank names the same per-trajectory columns, and there are such."""

        def check() -> None:
            for name in names:
                self._data.check_values(name)

        self._session.agree(check)
        self._session.compare("the columns of a rollout batch that are read", names)

    # ---- columns of this rollout batch -------------------------------------------------------------

    def forward(self, *names: str, tokens: int | None = None) -> Iterator[MicroBatch]:
        """Yield micro batches of the whole batch, each of which the program fills with columns. Collective.

        `for micro in rollout.forward("old_logp"): micro.fill(old_logp=logp(micro))`. After the last one the
        columns are in the micro batches of every step on every rank, and stay for this rollout batch.
        Columns that are there already, as in a run that is resumed, are not asked for again.

        Args:
            *names: The columns.
            tokens: Most steps of a micro batch; None: `gear.pack.tokens`. Without gradients more of them fit.
        Raises:
            FieldError: A name is a field of the config.
            ConfigError: `tokens` does not hold the longest trajectory.
            StoreError: A micro batch was not filled.
            PeerError: Another rank failed.
        """
        self._progress.check_open()
        missing = [name for name in names if name not in self._data.columns]

        def check() -> None:
            for name in missing:
                self._data.check_name(name)
            if missing and tokens is not None:
                self._check_room(arguments.count("tokens", tokens))

        if self._data.is_spread:  # rows move between nodes: after it no rank reads those of another batch
            self._session.agree(check)
            self._session.compare("rollout.forward: columns and tokens", (missing, tokens))
        else:
            check()
        if not missing:
            return
        made = {name: torch.zeros(self.num_tokens) for name in missing}
        filled: dict[str, set[int]] = {name: set() for name in missing}  # numbers of micro batches

        def fill(number: int, micro: MicroBatch, columns: Mapping[str, torch.Tensor]) -> None:
            for name, values in columns.items():
                if name not in made:
                    rule = f"must be one of those that forward names ({', '.join(missing)})"
                    raise FieldError(f"column {name!r}", rule)
                self._data.write(made[name], micro, values)
                filled[name].add(number)

        count = 0
        for micro in forward_packs(self._data, tokens, self._session.divisor, fill, self._rows):
            count += 1
            yield micro
            self._progress.check_open()  # the loop may be resumed after the batch has ended
        self._session.agree(lambda: check_filled(filled, count))
        for name, values in made.items():
            if self._data.settings.place.tensor_rank != 0:
                values.zero_()
            self._data.columns[name] = self._session.sum(values)

    def _check_room(self, tokens: int) -> None:
        """Raise unless micro batches of so many steps hold every trajectory.

        Raises:
            ConfigError: They do not, or a multiple of the padding does not fit.
        """
        multiple, longest = self._data.settings.pack.pad.multiple, int(self._data.lengths.max(initial=1))
        if tokens // multiple * multiple < longest:
            rule = f"must hold the longest trajectory ({longest} steps) in multiples of {multiple}"
            raise ConfigError(
                "rollout.forward: tokens", rule, tokens, f"at least {-(-longest // multiple) * multiple}"
            )

    def set(self, name: str, values: torch.Tensor | np.ndarray) -> None:
        """Set a column of this rollout batch from values of every trajectory, the same on every rank.

        Args:
            name: Of the column in micro batches, [1, N].
            values: [n], or one for each place: [num_tokens], trajectory by trajectory, at predicting places.
        Raises:
            FieldError: A field of the config has the name.
            ShapeError: Another shape.
        """
        self._progress.check_open()
        array = values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)
        if array.shape not in ((self.num_trajectories,), (self.num_tokens,)):
            rule = f"must have shape [{self.num_trajectories}] or [{self.num_tokens}]"
            raise ShapeError(name, rule, list(array.shape))
        self._data.set_column(name, array)

    @property
    def columns(self) -> Mapping[str, torch.Tensor]:
        """The columns of this rollout batch. [num_tokens] each, float32, trajectory by trajectory."""
        return self._data.columns

    def column(self, name: str) -> torch.Tensor:
        """Return a column of this rollout batch. [num_tokens], float32, trajectory by trajectory.

        Raises:
            FieldError: It was not filled or set.
        """
        if name not in self._data.columns:
            has = f"there are: {', '.join(self._data.columns) or 'none'}"
            raise FieldError(f"column {name!r}", "must be filled or set before", None, has)
        return self._data.columns[name].clone()

    def advantages(
        self,
        kind: str = "grpo",
        reward: str = "reward",
        name: str = "advantage",
        group: str | None = None,
        member: str | None = None,
        count_masked: bool | None = None,
    ) -> torch.Tensor:
        """Set and return each trajectory's advantage against its group.

        Members without loss tokens, such as overlong ones that are masked, are no part of the baseline; their
        own advantage is 0.

        Args:
            kind: "grpo", "dr_grpo" or "rloo": see `batching/loss_weights.py`.
            reward: The per-trajectory column of rewards.
            name: Of the column in micro batches, the same at all places of a trajectory.
            group: The per-trajectory column of integers that names the group; None: items are groups.
            member: That of its members; None: those of the table's groups, or each trajectory is one.
            count_masked: Whether members without loss tokens count; None: `gear.loss.count_masked`.
        Returns:
            [n], float64.
        Raises:
            ConfigError: There is no such column or estimator.
            DataError: A column, or that of the loss mask, is late, and a trajectory does not have it yet.
            PeerError: Another rank failed.
        """
        self._progress.check_open()
        data, found = self._data, np.zeros(0)
        member = data.settings.member if member is None else member
        named = tuple(column for column in (group, member, reward) if column is not None)
        values: dict[str, np.ndarray] = {}
        counted: np.ndarray | None = None
        if count_masked is None:
            count_masked = data.settings.loss.count_masked

        def read() -> None:
            nonlocal counted
            values.update((column, data.values(column)) for column in dict.fromkeys(named))
            counted = None if count_masked else data.counts > 0

        def compute() -> None:
            nonlocal found
            if not data.is_spread:
                read()
            groups = data.item if group is None else values[group].astype(np.int64)
            members = np.arange(len(groups)) if member is None else values[member].astype(np.int64)
            found = group_advantages(kind, values[reward], groups, members, counted)
            data.set_column(name, found)

        if data.is_spread:  # reading is collective: no rank must do so alone
            self._agree_on(*named)
            self._session.compare("rollout.advantages: count_masked", count_masked)
            read()
        self._session.agree(compute)
        return torch.from_numpy(found)

    def whiten(self, name: str, over: str = "token") -> None:
        """Shift and scale a column of this rollout batch to mean 0 and deviation 1 over the whole batch.

        Args:
            name: Of a column that was filled or set.
            over: "token": mean and deviation over all loss tokens; "sequence": over trajectories with loss
                tokens, each by the mean of its loss tokens.
        Raises:
            FieldError: There is no such column.
            ConfigError: `over` is another word.
        """
        self._progress.check_open()
        if over not in ("token", "sequence"):
            raise ConfigError("over", "must be token or sequence", over)
        values = self.column(name).double().numpy()
        counted, data = values[self._data.mask], self._data
        if over == "sequence" and len(data.lengths):
            sums = np.add.reduceat(np.where(data.mask, values, 0.0), data.starts)
            has = data.counts > 0
            counted = sums[has] / data.counts[has]
        if len(counted):
            deviation = np.sqrt(np.var(counted, ddof=min(1, len(counted) - 1)) + EPSILON)
            values = (values - counted.mean()) / deviation
        data.columns[name] = torch.from_numpy(values.astype(np.float32))

    # ---- steps -----------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Return the number of optimizer steps of the whole batch, the same on every rank."""
        return self._size.epochs * self._minibatches

    @property
    def _minibatches(self) -> int:
        return min(self._size.minibatches, max(self.num_items, 1))

    def __iter__(self) -> Iterator[TrainStep]:
        """Yield the steps that are left. Where the loop ends early, the rollout batch ends too.

        Raises:
            StoreError: The rollout batch has ended.
        """
        self._progress.check_open()
        try:
            while self.steps_done < len(self):
                step = self.step(self.steps_done)
                yield step
                if self.steps_done == step.number:  # skipped, or not all of its micro batches were used
                    self._progress.steps_done += 1
        finally:  # also of a loop that is left
            self.close()

    def step(self, number: int) -> TrainStep:
        """Return one of the steps, outside of an iteration.

        Raises:
            StoreError: The rollout batch has ended.
        """
        self._progress.check_open()
        items = self._items_of(number)
        chosen = np.zeros(self.num_items, bool)
        chosen[items] = True
        index = np.nonzero(chosen[self._data.item])[0]
        return TrainStep(self._data, index, number, self._progress, self._session, self._rows)

    def _items_of(self, number: int) -> np.ndarray:
        """Return the items of a step: a part of its epoch's order."""
        epoch, minibatch = divmod(number, self._minibatches)
        count, parts = self.num_items, self._minibatches
        order = torch.arange(count)
        if self._size.shuffle and count:
            seed, key = self._keys
            turn = self.number * self._size.epochs + epoch
            self._data.ops.permute_(order, seed, key, turn, 0, count)
        if self._size.partial == "drop":
            size = count // parts
            return order[minibatch * size : (minibatch + 1) * size].numpy()
        bounds = [count * part // parts for part in range(parts + 1)]
        return order[bounds[minibatch] : bounds[minibatch + 1]].numpy()

    def close(self) -> None:
        """End the batch: its rows may be evicted, and the next one is selected next. Safe to call twice."""
        self._progress.close()

    def abandon(self) -> None:
        """End the batch without consuming it, as where another position was loaded."""
        self._progress.abandon()
