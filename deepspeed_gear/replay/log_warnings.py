"""Warnings in the log: clamped priorities, groups left out, batches that nothing is learnt from."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from deepspeed_gear.log import LOG
from deepspeed_gear.ops.constants import EXACT_MASS_BITS, MASS_BITS
from deepspeed_gear.sampling.batch_admission import MOST_ASKED
from deepspeed_gear.sampling.batch_stream import BatchStream
from deepspeed_gear.sampling.priority_masses import WINDOW
from deepspeed_gear.store.group_spec import GroupCount
from deepspeed_gear.store.groups import TableGroups
from deepspeed_gear.store.records import Control, Head

MOST_REJECTED = 10  # batches of groups that may fail the conditions while one batch is generated
MOST_CLAMPED = 1e-3  # fraction of the updates that may be clamped without a warning
PAUSE_S = 600.0  # between two warnings of one kind


class ClampWarning:
    """Warning in the log of many clamped priority updates, at most once in `PAUSE_S` seconds.

    Args:
        table: Name of the table.
        most_bits: log2 of the largest mass.
        counts: Returns the numbers of updates that were ever applied and clamped.
        recent: Returns those of the latest global batches; None: those since the last `check`.
    """

    def __init__(
        self,
        table: str,
        most_bits: int,
        counts: Callable[[], tuple[int, int]],
        recent: Callable[[], tuple[int, int]] | None = None,
    ) -> None:
        self._table = table
        self._largest = most_bits - MASS_BITS
        self._counts = counts
        self._recent = recent
        self._seen = counts()
        self._next = 0.0

    def check(self) -> None:
        """Log a warning if one is due. Cost: reads a few words if nothing was clamped."""
        now = self._counts()
        before = self._seen
        if now[1] == before[1] or time.monotonic() < self._next:
            return
        self._seen = now
        when = "since the last check()"
        applied = now[0] - before[0]
        clamped = now[1] - before[1]
        if self._recent is not None:
            applied, clamped = self._recent()
            when = f"in the latest {WINDOW} global batches"
        if clamped <= MOST_CLAMPED * applied:
            return
        self._next = time.monotonic() + PAUSE_S
        LOG.warning(
            f"gear: table {self._table}: priority ** alpha should be in "
            f"[2^{EXACT_MASS_BITS - MASS_BITS}, 2^{self._largest}], got {clamped} of {applied} "
            f"reports outside {when}: smaller ones are rounded by more than 1%, larger ones count "
            "as the bound; scale or clip what is reported, or lower sampler.alpha; with "
            "sampler.initial an outlier is not the first priority of new items"
        )


class GroupWarning:
    """Logs what a table of groups leaves out, each kind at most once in `PAUSE_S` seconds."""

    def __init__(self, stream: BatchStream, groups: TableGroups) -> None:
        self._stream = stream
        self._groups = groups
        self._table = stream.table.spec.name
        limited = stream.table.spec.retention.max_times_sampled
        # Whether no group may leave unsampled.
        self._draws_each = bool(limited) or stream.spec.sampler.each_once
        self._first = groups.counts.copy()
        self._loads = stream.table.control[Control.LOADS]
        # The next global batch, and the counts when it became that.
        self._number = stream.position[Head.NUMBER]
        self._at_number = self._first
        self._next: dict[str, float] = {}  # when each kind may be logged again

    def check(self) -> None:
        """Log the warnings that are due. Cost: reads a few words."""
        counts = self._groups.counts.copy()
        spec = self._groups.spec
        number = self._stream.position[Head.NUMBER]
        if self._loads != self._stream.table.control[Control.LOADS]:
            self._first = counts
            self._loads = self._stream.table.control[Control.LOADS]
            self._number = -1
        if number != self._number:
            self._number = number
            self._at_number = counts
        since = counts - self._at_number  # the latest selection
        failed = int(since[GroupCount.REJECTED] + since[GroupCount.OVERSIZED])
        if failed >= MOST_REJECTED * self._stream.spec.batch:
            judged = failed + int(since[GroupCount.INSERTED])
            self._log(
                "conditions",
                f"{failed} of {judged} groups since the latest batch failed group.where or were "
                f"too large ({1 - failed / judged:.1%} passed), and were evicted; check the "
                "column of the condition, or relax it. missing_groups() asks for up to "
                f"{MOST_ASKED} times as many groups",
            )
        reused = int(since[GroupCount.LATE_CONSUMED])
        if reused >= spec.size * self._stream.spec.batch:
            self._log(
                "reused",
                f"{reused} trajectories since the latest batch had the number of a group that has "
                f"left the table, and were dropped; column {spec.column} is the number of a "
                "group: give new responses a new number, or lower group.remember",
            )
        new = counts - self._first
        late = int(new[[GroupCount.LATE, GroupCount.SURPLUS]].sum())
        if late and spec.after_s is None:
            self._log(
                "late",
                f"{late} trajectories came when their group was complete, and were dropped; "
                f"column {spec.column} is the number of a group: give new responses a number that "
                f"no stored group has, and each group {spec.size} members. statistics()['groups'] "
                "counts them as late and surplus",
                pause_s=np.inf,
            )
        unsampled = int(new[GroupCount.EVICTED_UNSAMPLED])
        if unsampled and self._draws_each:
            self._log(
                "unsampled",
                f"{unsampled} complete groups were evicted before any batch drew them: the table "
                "is too small, or they are too old; raise capacity_steps or "
                f"capacity_trajectories, lower the groups of a batch ({self._stream.spec.batch}), "
                "or generate fewer at once",
            )

    def _log(self, kind: str, text: str, pause_s: float = PAUSE_S) -> None:
        if time.monotonic() >= self._next.get(kind, 0.0):
            self._next[kind] = time.monotonic() + pause_s
            LOG.warning("gear: table %s: %s", self._table, text)


class LossWarning:
    """Warning in the log of train steps without loss tokens, at most once in `PAUSE_S` seconds.

    Args:
        column: Name of the loss mask; None: there is none.
        predicts: Whether losses are of predicted tokens.
    """

    def __init__(self, column: str | None, predicts: bool) -> None:
        self._column = column
        self._predicts = predicts
        self._steps = self._without = 0  # train steps, and those without loss tokens
        self._next = 0.0

    def count(self, step: Any, num_rejected: int) -> None:
        """Count a train step (TrainStep), and log a warning if one is due.

        Args:
            step: The train step.
            num_rejected: Loss tokens of its rollout batch that were taken out of the mask.
        """
        self._steps += 1
        if step.loss_tokens:
            return
        self._without += 1
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + PAUSE_S
        mask = (
            "there is no loss mask"
            if self._column is None
            else f"the loss mask is column {self._column}"
        )
        first = ", and the first token of a trajectory is not predicted" if self._predicts else ""
        remedy = "Mark the tokens that were sampled where trajectories are written"
        if num_rejected:
            first += (
                f"; rollout.mask and rollout.correct took {num_rejected} loss tokens out of the "
                "rollout batch"
            )
            remedy = "Check what these calls reject"
        LOG.warning(
            f"gear: {step.name}: none of the {step.num_tokens} steps of its "
            f"{step.num_trajectories} trajectories counts in the loss ({mask}{first}), as in "
            f"{self._without} of {self._steps} train steps so far. Its loss and gradients are 0, "
            f"but momentum and weight decay still move the weights. {remedy}; a loop that skips a "
            "step whose step.loss_tokens is 0 leaves the weights alone"
        )


class EqualRewardsWarning:
    """Warning in the log of rollout batches all of whose groups have equal rewards.

    Their group-relative advantages are all 0. At most once in `PAUSE_S` seconds.
    """

    def __init__(self) -> None:
        self._batches = 0  # rollout batches, those without a difference, and their groups
        self._equal = 0
        self._groups = 0
        self._equal_groups = 0
        self._next = 0.0

    def count(
        self,
        advantages: np.ndarray,
        groups: np.ndarray,
        reward: str,
        counted: np.ndarray | None,
        num_rejected: int,
    ) -> None:
        """Count a rollout batch, and log a warning if one is due.

        Args:
            advantages: Advantage of each trajectory. [n], float64.
            groups: Group of each trajectory. [n], int64.
            reward: Column of the rewards.
            counted: Whether a trajectory has loss tokens, [n], bool; None: all members count.
            num_rejected: Loss tokens that were taken out of the mask.
        """
        if not len(groups):
            return
        number = np.unique(groups, return_inverse=True)[1].reshape(-1)
        differs = np.bincount(number, advantages != 0) > 0
        self._batches += 1
        self._groups += len(differs)
        self._equal_groups += int((~differs).sum())
        if differs.any():
            return
        self._equal += 1
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + PAUSE_S
        remedy = (
            "Check the reward, take harder or easier prompts, or keep such groups out of batches "
            f'with group.where: {{"{reward}": {{"std": {{"min": 1e-6}}}}}}'
        )
        without = 0 if counted is None else int((~counted).sum())
        if without:
            remedy = (
                f"Members without loss tokens do not count, and {without} of the {len(groups)} "
                f"trajectories have none. {remedy}"
            )
        if without and num_rejected:
            remedy = (
                f"Members without loss tokens do not count: rollout.mask and rollout.correct took "
                f"{num_rejected} loss tokens out, and {without} of the {len(groups)} trajectories "
                "have none. Check what these calls reject, or compute the advantages before them"
            )
        LOG.warning(
            f"gear: rollout batch: none of its {len(differs)} groups has members whose column "
            f"{reward} differs, so all advantages are 0 and the policy loss moves nothing, as in "
            f"{self._equal} of {self._batches} rollout batches and {self._equal_groups} of "
            f"{self._groups} groups so far. {remedy}"
        )


def warnings_of(streams: Sequence[BatchStream]) -> list[ClampWarning | GroupWarning]:
    """Return the warnings of streams with priorities, and of those whose tables have groups."""
    warnings: list[ClampWarning | GroupWarning] = []
    for stream in streams:
        masses = stream.state.priorities
        groups = stream.table.groups
        if masses is not None:
            name = stream.table.spec.name
            most_bits = masses.rule.most_bits
            warnings.append(ClampWarning(name, most_bits, masses.priority_counts, masses.recent))
        if groups is not None and stream.table.spec.dataset is None:
            warnings.append(GroupWarning(stream, groups))
    return warnings
