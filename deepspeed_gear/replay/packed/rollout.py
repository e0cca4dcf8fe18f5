"""Rollout batch and its train steps: minibatches, micro batches, columns, means of losses.

A `Rollout` is an iterable of `TrainStep`s, and a `TrainStep` of micro batches, which its `Packs`
plan and read.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

import deepspeed_gear.arguments as arguments
from deepspeed_gear.batching.micro_batch import MicroBatch
from deepspeed_gear.batching.packing_plan import check_tokens
from deepspeed_gear.batching.policy_correction import correction_bounds
from deepspeed_gear.errors import ConfigError, FieldError, PeerError, ShapeError, StoreError
from deepspeed_gear.notebook_views import safe_view
from deepspeed_gear.ops.records import Resolution
from deepspeed_gear.public_names import PublicNames
from deepspeed_gear.replay.packed.packs import Packs
from deepspeed_gear.replay.packed.rollout_advantages import (
    GroupBaseline,
    set_advantages,
    whiten_column,
)
from deepspeed_gear.replay.packed.rollout_columns import FilledColumns, RolloutColumns
from deepspeed_gear.replay.packed.rollout_context import READ
from deepspeed_gear.replay.packed.rollout_correction import correct
from deepspeed_gear.replay.packed.rollout_views import rollout_view, step_view


class Rollout(PublicNames):
    """Rollout batch on this rank: an iterable of its optimizer steps. Methods are collective.

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

    _internal = frozenset({"abandon", "batch_columns", "check_open", "finish", "step"})

    def __init__(
        self,
        number: int,
        columns: RolloutColumns,
        consume: Callable[[], None],
        steps_done: int = 0,
    ) -> None:
        self.number = number
        self.batch_columns = columns
        self._consume = consume  # the loader's: releases the rows, and admits the next batch
        self._context = columns.context
        self._trajectories = columns.trajectories
        self._size = columns.context.settings.size
        self.num_items = self._trajectories.num_items
        self.num_tokens = self._trajectories.num_tokens
        self.num_trajectories = len(self._trajectories)
        self._minibatches = min(self._size.minibatches, max(self.num_items, 1))
        self.columns: Mapping[str, torch.Tensor] = self.batch_columns.filled
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
        steps_done = f"{self.steps_done} of {len(self)}"
        return rollout_view(self.number, self.batch_columns, steps_done, self._is_closed)

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
        self._context.check_same(READ, (name,), partial(self.batch_columns.check_values, name))
        return torch.from_numpy(self.batch_columns.values(name))

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
        columns = self.batch_columns
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
        packs = Packs(columns, np.arange(self.num_trajectories), tokens)
        _ = packs.loss  # cached here, as its computation is collective
        packs.fetch()
        filled = FilledColumns(missing, columns)
        for micro in packs.forward(filled):
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
            raise ShapeError(
                name,
                rule,
                list(array.shape),
                "give one value for each trajectory, or for each token",
            )
        self.batch_columns.set_column(name, array)

    def column(self, name: str) -> torch.Tensor:
        """Copy a column of this rollout batch, at predicting places. [num_tokens]. Collective.

        Args:
            name: A column that was filled or set, float32; or a stored one with a number per step,
                float64. Of a field with `absent`, tables without the column have this value.
        Raises:
            ConfigError: There is no such column.
            DataError: The column is late, and a trajectory does not have it yet.
        """
        columns = self.batch_columns
        if name in columns.filled:
            return columns.filled[name].clone()
        self.check_open()
        self._context.check_same(READ, (name,), partial(columns.step_column, name))
        return torch.from_numpy(columns.places(name, admits_absent=True))

    def advantages(
        self,
        kind: str = "grpo",
        reward: str = "reward",
        name: str = "advantage",
        group: str | None = None,
        member: str | None = None,
        count_masked: bool | None = None,
        absent: float | None = None,
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
            kind: "grpo", "dr_grpo" or "rloo" (see `batching/group_advantages.py`); "gae" or
                "vtrace".
            reward: Name of the rewards: a per-trajectory column, which "gae" and "vtrace" add to
                the last actions; or, with these two, a column that was filled or set, or a field or
                column with a number per step.
            name: Name of the column in micro batches; equal at all places of a trajectory.
            group: Per-trajectory column of integers that names the group; None: items are groups.
            member: Per-trajectory column that names the member; None: that of the table's groups,
                or each trajectory is a member.
            count_masked: Whether members without loss tokens count; None: `gear.loss.count_masked`.
            absent: Advantage in trajectories of tables without the column of the reward, which
                count in no baseline; not with "gae" and "vtrace". With 1 the policy gradient of
                supervised trajectories is that of their log-likelihood. None: all tables have it.
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
        columns = self.batch_columns
        baseline = GroupBaseline(group, member, count_masked, absent)
        advantages = set_advantages(columns, kind, reward, name, baseline, options)
        return torch.from_numpy(advantages)

    def mask(self, keep: torch.Tensor | np.ndarray) -> None:
        """Narrow the loss mask: what is not kept leaves the loss, and its mean. Collective.

        Following train steps have weights of what is left, in every normalisation of `gear.loss`;
        a step that was made before keeps its own. Advantages that are computed later count members
        by what is left, too. A checkpoint has the narrowed mask.

        Args:
            keep: Whether each trajectory stays, [n]; or each place, [num_tokens], trajectory by
                trajectory, at predicting places. Bool, the same on all ranks.
        Raises:
            ShapeError: `keep` has another shape or dtype.
            PeerError: Another rank failed, or has other values.
        """
        self.check_open()

        def check() -> np.ndarray:
            array = arguments.array("keep", keep)
            counts = (self.num_trajectories,), (self.num_tokens,)
            if array.dtype != bool or array.shape not in counts:
                shapes = f"[{self.num_trajectories}] or [{self.num_tokens}]"
                rule = f"must be bool and have shape {shapes}"
                value = f"{array.dtype} {list(array.shape)}"
                remedy = "give one flag for each trajectory, or for each token"
                raise ShapeError("keep", rule, value, remedy)
            return array

        array = self._context.agree(check)
        self._context.control_plane.compare("rollout.mask: keep", zlib.crc32(array.tobytes()))
        places = self.batch_columns.per_place(array)
        self._context.agree(partial(self.batch_columns.narrow, places))

    def correct(
        self,
        kind: str,
        cap: float | None = None,
        low: float | None = None,
        level: str = "token",
        current: str = "old_logp",
        behaviour: str = "logp",
        name: str = "correction",
        count_rejected: bool = False,
    ) -> dict[str, float]:
        """Set weights that correct for the policy that generated the tokens. Collective.

        `micro["correction"]` multiplies the loss of a token; it has no gradient. A token with
        another generator, such as one after an update of the weights within a response, has the
        ratio to that generator, as its log-probability is stored with it. What is rejected leaves
        the loss mask, as by `mask`.

        Args:
            kind: "tis", "mis" or "icepop": how ratios are bounded (see
                `batching/policy_correction.py`).
            cap: Most ratio; None: 2, with "icepop" 5.
            low: Least ratio of "icepop"; None: 0.5.
            level: "token": the ratio of each token; "sequence": the product over a sequence's loss
                tokens; "geometric": its root of their number.
            current: Log-probabilities by the trainer: a column that was filled or set.
            behaviour: Those by the generator: such a column, or a stored one. Trajectories of
                tables without it, where its field has `absent`, keep their tokens with the weight 1
                and do not count in what is returned.
            name: Name of the column in micro batches.
            count_rejected: Whether rejected tokens stay in the mean, with a loss of 0.
        Returns:
            Over the loss tokens: "ratio_mean", "ratio_min" and "ratio_max"; "capped" and
            "rejected", parts of them; and "ess", the effective sample size as a part of them.
        Raises:
            ConfigError: There is no such column, kind or level, or a bound is out of range.
            DataError: A log-probability at a loss token is not finite.
            PeerError: Another rank failed.
        """
        self.check_open()
        bounds = self._context.agree(partial(correction_bounds, kind, level, cap, low))
        return correct(self.batch_columns, bounds, current, behaviour, name, count_rejected)

    def whiten(self, name: str, over: str = "token") -> None:
        """Normalise a column of this rollout batch to mean 0 and deviation 1 over the whole batch.

        Args:
            name: Name of a column that was filled or set.
            over: "token": mean and deviation over all loss tokens; "sequence": over trajectories
                with loss tokens, each by the mean of its loss tokens.
        Raises:
            FieldError: There is no such column.
            ConfigError: `over` is neither of these.
        """
        self.check_open()
        if over not in ("token", "sequence"):
            raise ConfigError(
                "over", "must be token or sequence", over, 'write over="token" or over="sequence"'
            )
        filled = self.batch_columns.filled
        if name not in filled:
            has = f"there are: {', '.join(filled) or 'none'}"
            remedy = f'fill it in rollout.forward("{name}"), or set it with rollout.set; {has}'
            raise FieldError(f"column {name!r}", "must be filled or set before", None, remedy)
        whiten_column(self.batch_columns, name, filled[name].double().numpy(), over)

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
            ops = self.batch_columns.tables[0].table.ops
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
            remedy = "use its steps inside the loop over it; read values and columns before it ends"
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
    """Optimizer step of a rollout batch: an iterable of this rank's micro batches, used once.

    Attributes:
        number: Number of the step in its rollout batch.
        index: Trajectories of the step, of all ranks together. [n], int64.
        num_trajectories: Number of trajectories.
        num_tokens: Number of their steps.
        loss_tokens: Number of their loss tokens.
        shared_tokens: Number of their steps that have no places of their own, as `gear.pack.prefix`
            shares prefixes.
        name: Name of the step in errors.
    """

    _internal = frozenset({"name", "packs"})

    def __init__(self, rollout: Rollout, number: int, index: np.ndarray) -> None:
        self._rollout = rollout
        self.number = number
        self.index = index
        columns = rollout.batch_columns
        self._context = columns.context
        self.packs = Packs(columns, index, None)
        self.num_trajectories = len(index)
        self.num_tokens = int(columns.trajectories.lengths[index].sum())
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
        title = f"TrainStep {self.number} of rollout batch {self._rollout.number}"
        lengths = self._rollout.batch_columns.trajectories.lengths[self.index]
        return step_view(title, lengths, self.loss_tokens, len(self))

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
        packs.fetch()
        context.metrics.add(wait_s=time.perf_counter() - begin)
        for number in range(len(packs)):
            yield packs.read(number)
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
            self._context.loss_warning.count(self, self._rollout.batch_columns.num_rejected)
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
                f"{self.name}: {', '.join(values)}",
                rule,
                f"other numbers on {faults:.0f} ranks",
                "collect one number in each micro batch on every rank",
            )
        divisor = self._context.divisor.value
        return {name: value / divisor for name, value in zip(values, total, strict=True)}
