"""Rollout batch: selected once, trained for several optimizer steps, consumed as a whole."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from pydantic import ValidationError

import deepspeed_gear.arguments as arguments
from deepspeed_gear.batching.group_advantages import group_advantages
from deepspeed_gear.batching.micro_batch import ForwardPass, MicroBatch
from deepspeed_gear.batching.tensor_views import tensor_table
from deepspeed_gear.config.describe_options import translate
from deepspeed_gear.config.options import AdvantageConfig
from deepspeed_gear.errors import (
    ConfigError,
    DataError,
    FieldError,
    PeerError,
    ShapeError,
    StoreError,
)
from deepspeed_gear.notebook_views import histogram_svg, safe_view, view_html
from deepspeed_gear.ops.records import Resolution
from deepspeed_gear.public_names import PublicNames
from deepspeed_gear.replay.pack_reader import PackReader, PackSequence, check_tokens
from deepspeed_gear.replay.rollout_columns import RolloutColumns

EPSILON = 1e-8
READ = "the columns of a rollout batch that are read"


class Rollout(PublicNames):
    """A rollout batch on this rank: an iterable of its optimizer steps. Methods are collective.

    It ends with its last step, or when the loop over the steps is left.

    Attributes:
        number: Its number among the rollout batches of the run.
        num_items: Number of items: groups, or trajectories.
        num_trajectories: Number of trajectories.
        num_tokens: Number of steps of its trajectories.
        steps_done: Number of optimizer steps that are done.
        columns: Columns that were filled or set for this rollout batch. [num_tokens] each,
            float32, trajectory by trajectory.
    """

    _internal = frozenset({"abandon", "check_open", "finish", "reader", "step"})

    def __init__(
        self, number: int, reader: PackReader, consume: Callable[[], None], steps_done: int = 0
    ) -> None:
        self.number = number
        self.reader = reader
        self._consume = consume  # the loader's: releases the rows, and admits the next batch
        self._context = reader.context
        self._columns = reader.columns
        self._trajectories = reader.columns.trajectories
        self._size = reader.context.settings.size
        self.num_items = self._trajectories.num_items
        self.num_tokens = self._trajectories.num_tokens
        self.num_trajectories = len(self._trajectories)
        self._minibatches = min(self._size.minibatches, max(self.num_items, 1))
        self.columns: Mapping[str, torch.Tensor] = self._columns.filled
        self.steps_done = steps_done
        self._is_closed = False

    def __repr__(self) -> str:
        return (
            f"Rollout({self.number}: {self.num_items} items, {self.num_trajectories} trajectories, "
            f"{self.num_tokens} tokens, {self.steps_done} of {len(self)} steps done)"
        )

    def _repr_html_(self) -> str:
        """Return a table of the filled columns, with pictures of the trajectories, for notebooks.

        It is not collective: with several nodes, stored rewards have no picture.

        Cost: reads one reward of each trajectory, and at most 2^16 elements of a filled column.
        """
        return safe_view(self, self._view)

    def _view(self) -> str:
        trajectories = self._trajectories
        facts = {
            "items": f"{self.num_items:,}",
            "trajectories": f"{self.num_trajectories:,}",
            "tokens": f"{self.num_tokens:,}",
            "optimizer steps done": f"{self.steps_done} of {len(self)}",
        }
        if self._is_closed:
            facts["state"] = "ended"
        pictures = [histogram_svg("steps of a trajectory", trajectories.lengths)]
        if self.num_trajectories > self.num_items:
            sizes = np.bincount(trajectories.item)
            pictures.append(histogram_svg("trajectories of a group", sizes))
        rewards = self._shown_rewards()
        if rewards is not None:
            pictures.append(histogram_svg("reward of a trajectory", rewards))
        filled = [(name, values, None) for name, values in self._columns.filled.items()]
        table = tensor_table("filled column", filled) if filled else ""
        return view_html(f"Rollout {self.number}", facts, pictures, table)

    def _shown_rewards(self) -> np.ndarray | None:
        """Return the rewards of trajectories; None if this rank cannot read them all by itself."""
        if self._is_closed or self._context.is_spread or not self.num_trajectories:
            return None
        schemas = [rows.table.schema for rows in self._columns.tables]
        if not all("reward" in schema and schema["reward"].rows == "1" for schema in schemas):
            return None
        if any(schema["reward"].is_opaque for schema in schemas):
            return None
        try:
            return self._columns.values("reward")
        except DataError:  # late, and not all are filled
            return None

    @property
    def lengths(self) -> torch.Tensor:
        """Steps of each trajectory. [n], int64."""
        return torch.from_numpy(self._trajectories.lengths.copy())

    @property
    def group(self) -> torch.Tensor:
        """Item of each trajectory; those of one group have the same number. [n], int64."""
        return torch.from_numpy(self._trajectories.item.copy())

    @property
    def table(self) -> torch.Tensor:
        """Index of each item's table in a mixture's shares, else 0. [num_items], int64."""
        _, first = np.unique(self._trajectories.item, return_index=True)
        return torch.from_numpy(self._trajectories.source[first])

    @property
    def trajectory_id(self) -> torch.Tensor:
        """Id of each trajectory. [n], int64."""
        return self._trajectories.resolutions[:, Resolution.ID].clone()

    def values(self, name: str) -> torch.Tensor:
        """Return a per-trajectory column of all trajectories of the batch. [n, *shape].

        Raises:
            ConfigError: There is no such column.
            DataError: The column is late, and a trajectory does not have it yet.
            StoreError: The rollout batch has ended.
        """
        self.check_open()
        self._context.check_same(READ, (name,), partial(self._columns.check_values, name))
        return torch.from_numpy(self._columns.values(name))

    def forward(self, *names: str, tokens: int | None = None) -> Iterator[MicroBatch]:
        """Iterate over micro batches of the whole batch, to fill columns. Collective.

        `for micro in rollout.forward("old_logp"): micro.fill(old_logp=logp(micro))`. After the last
        one the columns are in the micro batches of every step on every rank, for this rollout
        batch. Columns that are already filled, as in a resumed run, are skipped.

        Args:
            *names: Names of the columns.
            tokens: Most steps of a micro batch; None: `gear.pack.tokens`. Without gradients more
                fit.
        Raises:
            FieldError: A name is a field of the config.
            ConfigError: `tokens` does not hold the longest trajectory.
            StoreError: A micro batch was not filled.
            PeerError: Another rank failed.
        """
        self.check_open()
        context = self._context
        columns = self._columns
        missing = [name for name in names if name not in columns.filled]

        def check() -> None:
            columns.check_names(missing)
            if missing:
                check_tokens(context.settings.pack, self._trajectories.lengths, tokens)

        # Rows move between nodes below: after this no rank still reads those of another batch.
        context.agree(check)
        context.check_same("rollout.forward: columns and tokens", (missing, tokens))
        if not missing:
            return
        packs = PackSequence(columns, np.arange(self.num_trajectories), tokens)
        _ = packs.loss  # cached here, as its computation is collective
        self.reader.fetch(packs)
        filled = _FilledColumns(columns, missing)
        for micro in self.reader.forward(packs, ForwardPass(missing, len(packs), filled)):
            yield micro
            self.check_open()  # the loop may be resumed after the batch has ended
        columns.filled.update(filled.of_all_ranks())

    def set(self, name: str, values: torch.Tensor | np.ndarray) -> None:
        """Set a column of this rollout batch; all ranks give the same values.

        Args:
            name: Name of the column in micro batches, [1, N].
            values: One for each trajectory, [n]; or one for each place, [num_tokens], trajectory by
                trajectory, at predicting places.
        Raises:
            FieldError: A field of the config has the name.
            ShapeError: `values` has another shape.
        """
        self.check_open()
        array = arguments.array(name, values)
        if array.shape not in ((self.num_trajectories,), (self.num_tokens,)):
            rule = f"must have shape [{self.num_trajectories}] or [{self.num_tokens}]"
            raise ShapeError(name, rule, list(array.shape))
        self._columns.set_column(name, array)

    def column(self, name: str) -> torch.Tensor:
        """Copy a column of this rollout batch. [num_tokens], float32, trajectory by trajectory.

        Raises:
            FieldError: The column was not filled or set.
        """
        if name not in self._columns.filled:
            has = f"there are: {', '.join(self._columns.filled) or 'none'}"
            raise FieldError(f"column {name!r}", "must be filled or set before", None, has)
        return self._columns.filled[name].clone()

    def advantages(
        self,
        kind: str = "grpo",
        reward: str = "reward",
        name: str = "advantage",
        group: str | None = None,
        member: str | None = None,
        count_masked: bool | None = None,
        **options: Any,
    ) -> torch.Tensor:
        """Set and return advantages: of trajectories against their group, or by a critic's values.

        With "grpo", "dr_grpo" and "rloo", members without loss tokens, such as overlong ones that
        are masked, do not count in the baseline; their own advantage is 0.

        "gae" and "vtrace" also set the column "value_target". A place of the loss mask is an
        action; other places take no time, so rewards after an action, up to the next one, belong to
        it. The last action bootstraps from the value after the trajectory, unless the trajectory
        was terminated. Without a column of the role terminated or truncated all are.

        Args:
            kind: "grpo", "dr_grpo" or "rloo": see `batching/loss_weights.py`; "gae" or "vtrace".
            reward: Name of the rewards: a per-trajectory column, which "gae" and "vtrace" add to
                the last actions; or, with these two, a column that was filled or set, or a field or
                column with a number per step.
            name: Name of the column in micro batches; equal at all places of a trajectory.
            group: Per-trajectory column of integers that names the group; None: items are groups.
            member: Per-trajectory column that names the member; None: that of the table's groups,
                or each trajectory is a member.
            count_masked: Whether members without loss tokens count; None: `gear.loss.count_masked`.
            **options: Options of "gae" and "vtrace", as in `gear.advantage`: `value`, `gamma` (1 if
                left out), `lam`, `next_value`, `log_prob`, `behaviour_log_prob`, `rho_bar`,
                `c_bar`.
        Returns:
            [n], float64; with "gae" and "vtrace" [num_tokens], float32.
        Raises:
            ConfigError: There is no such column, estimator or option.
            DataError: A column or the loss mask is late, and a trajectory does not have it yet; or
                there is no value after a trajectory that was not terminated.
            PeerError: Another rank failed.
        """
        self.check_open()
        if kind in ("gae", "vtrace"):
            of_groups = {"group": group, "member": member, "count_masked": count_masked}
            options |= {option: value for option, value in of_groups.items() if value is not None}
            return self._estimated(kind, reward, name, options)
        if options:
            option, value = next(iter(options.items()))
            raise ConfigError(
                f"rollout.advantages.{option}", f"is not an option of {kind!r}", value
            )
        columns = self._columns
        settings = self._context.settings
        member = settings.member if member is None else member
        named = tuple(column for column in (group, member, reward) if column is not None)
        if count_masked is None:
            count_masked = settings.loss.count_masked

        def compute() -> np.ndarray:
            values = {column: columns.values(column) for column in named}
            counted = None if count_masked else columns.counts > 0
            groups = self._trajectories.item if group is None else values[group].astype(np.int64)
            members = np.arange(len(groups)) if member is None else values[member].astype(np.int64)
            advantages = group_advantages(kind, values[reward], groups, members, counted)
            columns.set_column(name, advantages)
            return advantages

        # Reading is collective over nodes, so a wrong name must be raised on all ranks first.
        self._context.check_same(
            READ, (*named, count_masked), partial(columns.check_values, *named)
        )
        return torch.from_numpy(self._context.agree(compute))

    def _estimated(
        self, kind: str, reward: str, name: str, options: dict[str, Any]
    ) -> torch.Tensor:
        """Set advantages and value targets of places; return the former. [num_tokens], float32."""
        try:
            chosen = AdvantageConfig(**{"kind": kind, "gamma": 1.0, **options})
        except ValidationError as error:
            wrong = translate(AdvantageConfig, error)
            at = wrong.name.replace("gear", "rollout.advantages", 1)
            raise ConfigError(at, wrong.rule, wrong.value, wrong.remedy) from None
        columns = self._columns

        def compute() -> np.ndarray:
            advantages, targets = columns.estimate(chosen, reward)
            columns.set_column(name, advantages)
            columns.set_column("value_target", targets)
            return np.asarray(advantages)

        self._context.check_same(READ, (reward, chosen.model_dump()))
        return torch.from_numpy(self._context.agree(compute))

    def whiten(self, name: str, over: str = "token") -> None:
        """Normalise a column of this rollout batch to mean 0 and deviation 1 over the whole batch.

        Args:
            name: Name of a column that was filled or set.
            over: "token": mean and deviation over all loss tokens; "sequence": over trajectories
                with loss tokens, each by the mean of its loss tokens.
        Raises:
            FieldError: There is no such column.
            ConfigError: `over` is another word.
        """
        self.check_open()
        if over not in ("token", "sequence"):
            raise ConfigError("over", "must be token or sequence", over)
        values = self.column(name).double().numpy()
        columns = self._columns
        counted = values[columns.mask]
        if over == "sequence" and self.num_trajectories:
            sums = np.add.reduceat(np.where(columns.mask, values, 0.0), self._trajectories.starts)
            has = columns.counts > 0
            counted = sums[has] / columns.counts[has]
        if len(counted):
            deviation = np.sqrt(np.var(counted, ddof=min(1, len(counted) - 1)) + EPSILON)
            values = (values - counted.mean()) / deviation
        columns.filled[name] = torch.from_numpy(values.astype(np.float32))

    def __len__(self) -> int:
        """Return the number of optimizer steps of the whole batch, the same on every rank."""
        return self._size.epochs * self._minibatches

    def __iter__(self) -> Iterator[TrainStep]:
        """Iterate over the remaining steps. If the loop ends early, the rollout batch ends too.

        Raises:
            StoreError: The rollout batch has ended.
        """
        self.check_open()
        try:
            while self.steps_done < len(self):
                step = self.step(self.steps_done)
                yield step
                # A step that was skipped, or of which some micro batches were not used, counts too.
                if self.steps_done == step.number:
                    self.steps_done += 1
        finally:
            self.close()

    def step(self, number: int) -> TrainStep:
        """Return one of the steps, without an iteration.

        Raises:
            StoreError: The rollout batch has ended.
        """
        self.check_open()
        count = self.num_items
        parts = self._minibatches
        epoch, minibatch = divmod(number, parts)
        order = torch.arange(count)
        if self._size.shuffle and count:
            turn = self.number * self._size.epochs + epoch
            ops = self._columns.tables[0].table.ops
            ops.permute_(order, *self._context.settings.random_keys, turn, 0, count)
        # 7 items in 3 minibatches are [0:2], [2:4] and [4:7]; with "drop" [0:2], [2:4] and [4:6].
        first, end = (count * part // parts for part in (minibatch, minibatch + 1))
        if self._size.partial == "drop":
            first, end = (count // parts * part for part in (minibatch, minibatch + 1))
        chosen = np.zeros(count, bool)
        chosen[order[first:end].numpy()] = True
        return TrainStep(self, number, np.nonzero(chosen[self._trajectories.item])[0])

    def check_open(self) -> None:
        """Raise a StoreError if the batch has ended."""
        if self._is_closed:
            rule = "must not be used after its loop has ended, or the next one was requested"
            remedy = "use its steps inside the loop over it"
            raise StoreError(f"rollout batch {self.number}", rule, None, remedy)

    def finish(self, step: int) -> None:
        """Count a step as trained. A save after the last one resumes with the next batch."""
        self.steps_done = step + 1
        if self.steps_done == len(self):
            self.close()

    def close(self) -> None:
        """End the batch: its rows may be evicted, and the next one follows. Safe to call twice."""
        if not self._is_closed:
            self._is_closed = True
            self._consume()

    def abandon(self) -> None:
        """End the batch without consuming it, for example as another position was loaded."""
        self._is_closed = True


class TrainStep(PublicNames):
    """One optimizer step: an iterable of this rank's micro batches. Iterated once.

    Attributes:
        number: Number of the step in its rollout batch.
        index: Trajectories of the step, of all ranks together. [n], int64.
        num_trajectories: Number of trajectories.
        num_tokens: Number of their steps.
        loss_tokens: Number of their loss tokens.
        shared_tokens: Number of their steps that have no places of their own, as `gear.pack.prefix`
            shares prompts.
        name: Name of the step in errors.
    """

    _internal = frozenset({"name", "packs"})

    def __init__(self, rollout: Rollout, number: int, index: np.ndarray) -> None:
        self._rollout = rollout
        self.number = number
        self.index = index
        self._reader = rollout.reader
        self._context = rollout.reader.context
        self.packs = PackSequence(rollout.reader.columns, index, None)
        self.num_trajectories = len(index)
        self.num_tokens = int(rollout.reader.columns.trajectories.lengths[index].sum())
        self.loss_tokens = self.packs.loss.num_tokens
        self.shared_tokens = self.packs.shared_tokens
        self._is_used = False
        self.name = f"train step {number} of rollout batch {rollout.number}"

    def __len__(self) -> int:
        """Return the number of micro batches, the same on every rank."""
        return len(self.packs)

    def __repr__(self) -> str:
        return (
            f"TrainStep({self.number} of rollout batch {self._rollout.number}: "
            f"{self.num_trajectories} trajectories, {self.num_tokens} tokens, {len(self)} micro "
            "batches)"
        )

    def _repr_html_(self) -> str:
        """Return counts, with a picture of the lengths, for notebooks."""
        return safe_view(self, self._view)

    def _view(self) -> str:
        facts = {
            "trajectories": f"{self.num_trajectories:,}",
            "tokens": f"{self.num_tokens:,}",
            "loss tokens": f"{self.loss_tokens:,}",
            "micro batches of this rank": f"{len(self):,}",
        }
        lengths = self._rollout.lengths[self.index]
        pictures = [histogram_svg("steps of a trajectory", lengths)]
        title = f"TrainStep {self.number} of rollout batch {self._rollout.number}"
        return view_html(title, facts, pictures)

    def __iter__(self) -> Iterator[MicroBatch]:
        """Iterate over this rank's micro batches.

        Raises:
            StoreError: They were iterated over before, or the rollout batch has ended.
            PeerError: Another rank failed, died or ended.
        """
        if self._is_used:
            raise StoreError(self.name, "must be iterated once", None, "take the next step")
        self._is_used = True
        begin = time.perf_counter()
        context = self._context
        packs = self.packs
        context.agree(self._begin)
        if context.is_spread:
            batch = f"the train step of rollout batch {self._rollout.number}"
            context.control_plane.compare(batch, self.number)
        self._reader.fetch(packs)
        context.metrics.add(wait_s=time.perf_counter() - begin)
        for number in range(len(packs)):
            yield self._reader.read(packs, number)
            self._rollout.check_open()  # the loop may be resumed after the batch has ended
        context.metrics.add(
            steps=1,
            trajectories=self.num_trajectories,
            tokens=self.num_tokens,
            shared_tokens=self.shared_tokens,
            micro_batches=len(packs),
            fill=packs.fill_fraction,
            imbalance=packs.planned.imbalance,
        )
        self._rollout.finish(self.number)

    def _begin(self) -> None:
        self._rollout.check_open()
        if self._context.loss_warning is not None:
            self._context.loss_warning.count(self)
        for begun in self._context.observers:
            begun(self)

    def mean(self, **values: Sequence[torch.Tensor]) -> dict[str, float]:
        """Return means over the step and all ranks, normalised as the loss is. Collective.

        `step.mean(kl=kls, clip=clips)` after the loop, where `kls` has `micro.sum(kl)` of each
        micro batch.

        Args:
            **values: For each name, `micro.sum(x)` of all micro batches in their order, [] each.
                All ranks give the same names.
        Raises:
            ShapeError: There is not one number for each micro batch.
            PeerError: Another rank has raised the ShapeError.
        Cost: one all-reduce, and one copy from a device.
        """
        fault = None
        rule = f"must have a number for each of the {len(self)} micro batches"
        for name, given in values.items():
            if len(given) != len(self) or any(value.numel() != 1 for value in given):
                shapes = [list(value.shape) for value in given]
                fault = ShapeError(name, rule, shapes, f"collect micro.sum({name}) in the loop")
                break
        sums = torch.zeros(len(values) + 1, dtype=torch.float64)  # the last: ranks with a fault
        if fault is not None:
            sums[-1] = 1
        elif self._context.settings.place.tensor_rank == 0 and values:
            every = [value.detach().reshape(()) for given in values.values() for value in given]
            # One copy for all, so that the device is waited for once.
            stacked = torch.stack([value.to(every[0].device, torch.float64) for value in every])
            sums[:-1] = stacked.cpu().view(len(values), len(self)).sum(1)
        *total, faults = self._context.control_plane.sum(sums).tolist()
        if fault is not None:
            raise fault
        if faults:
            raise PeerError(
                f"{self.name}: {', '.join(values)}", rule, f"other numbers on {faults:.0f} ranks"
            )
        divisor = self._context.divisor.value
        return {name: value / divisor for name, value in zip(values, total, strict=True)}


class _FilledColumns:
    """Columns that a forward pass fills; each rank has the values of its own places."""

    def __init__(self, columns: RolloutColumns, names: Sequence[str]) -> None:
        self._columns = columns
        self._own = {name: torch.zeros(columns.trajectories.num_tokens) for name in names}

    def write(self, name: str, micro: MicroBatch, values: torch.Tensor) -> None:
        self._columns.write(self._own[name], micro, micro.flat(name, values))

    def of_all_ranks(self) -> dict[str, torch.Tensor]:
        """Return the whole columns, [num_tokens] each. Collective."""
        context = self._columns.context
        whole = dict[str, torch.Tensor]()
        for name, values in self._own.items():
            # Every place is filled on one replica; its tensor ranks have equal values, so only the
            # first of them adds to the sum.
            if context.settings.place.tensor_rank != 0:
                values.zero_()
            whole[name] = context.control_plane.sum(values)
        return whole
