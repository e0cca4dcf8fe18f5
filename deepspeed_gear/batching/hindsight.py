"""Hindsight relabelling: draws which samples get a goal that their own trajectory achieved, and which.

Two random words per sample are keyed by its number, so the goals are the same on any number of ranks.

Source: Andrychowicz et al., "Hindsight Experience Replay", NeurIPS 2017, section 4.5.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from deepspeed_gear.config import HindsightConfig
from deepspeed_gear.ops import Ops
from deepspeed_gear.ops.constants import ONE_Q62
from deepspeed_gear.ops.gather_spec import GatherSpec, lower
from deepspeed_gear.ops.philox import Words, below, philox
from deepspeed_gear.ops.records import RandomPurpose, Resolution

_SHIFT = np.uint64(32)


class HindsightGoals:
    """Draws the goals of a stream's samples. Stateless.

    Args:
        config: Strategy and fraction.
        seed: Of the run.
        key: Of the stream.
        final_row: 1 where the achieved goals have T+1 rows, 0 where they have T.
    """

    def __init__(self, config: HindsightConfig, seed: int, key: int, final_row: int) -> None:
        self._rows_of: Callable[[np.ndarray, np.ndarray, Words], tuple[np.ndarray, np.ndarray]]
        self._rows_of = {"future": _future, "final": _final, "episode": _episode}[config.strategy]
        self._below = np.uint64(int(config.fraction * ONE_Q62))  # exact: a power of two
        self._seed, self._key, self._final_row = seed, key, final_row
        self._purposes = np.array([[RandomPurpose.RELABELLING], [RandomPurpose.GOAL]], np.uint64)

    def draw(self, records: torch.Tensor) -> torch.Tensor:
        """Return the row of the achieved goal that each sample gets, -1 for its own goal.

        Args:
            records: Resolutions. [B, 8], int64.
        Returns:
            [B], int64.
        """
        words = records.numpy()
        drawn = philox(
            self._seed, words[:, Resolution.SAMPLE_NUMBER].astype(np.uint64), self._key, self._purposes
        )
        chosen = ((drawn[0][0] << _SHIFT | drawn[1][0]) >> np.uint64(2)) < self._below
        rows = words[:, Resolution.NUM_STEPS] + self._final_row
        goal, exists = self._rows_of(words[:, Resolution.ANCHOR], rows, tuple(word[1] for word in drawn))
        return torch.from_numpy(np.where(chosen & exists, goal, -1))


@dataclass(frozen=True)
class GoalField:
    """Source and target of the goals of one field.

    Args:
        out: Index of the field's tensor.
        mask: Index of its mask, which no other field shares.
        column: The achieved goals. [rows, *shape].
        source: The op's code for their rows.
        shift: Of the field's conversion.
        gain: Likewise.
        shape: Of a row.
        dtype: In the batch.
    """

    out: int
    mask: int
    column: torch.Tensor
    source: int
    shift: torch.Tensor
    gain: torch.Tensor
    shape: tuple[int, ...]
    dtype: torch.dtype


class GoalRows:
    """Gathers the drawn rows of all goals of a batch in one call of `gather_`. Not thread-safe.

    Args:
        fields: The goals.
        ops: The ops.
        num_samples: B.
        threads: Of one call.
    """

    def __init__(self, fields: Sequence[GoalField], ops: Ops, num_samples: int, threads: int) -> None:
        self._fields, self._gather, self._threads = fields, ops.gather_, threads
        self._rows = [torch.zeros(num_samples, *field.shape, dtype=field.dtype) for field in fields]
        # One step at the anchor, moved by the vector of steps; no mask.
        self._words = lower(
            GatherSpec(field.source, after_n_step=1, elements=int(np.prod(field.shape, dtype=np.int64)))
            for field in fields
        )

    def fill(
        self,
        outs: Sequence[torch.Tensor],
        masks: Sequence[torch.Tensor],
        counters: torch.Tensor,
        records: torch.Tensor,
        goal_step: torch.Tensor,
    ) -> None:
        """Overwrite the goals of relabelled samples by the drawn rows.

        Args:
            outs: Every field's tensor. [B, ...].
            masks: Of the batch.
            counters: As `gather_`.
            records: Resolutions. [B, 8], int64.
            goal_step: As `HindsightGoals.draw` returns it. [B], int64.
        """
        chosen = (goal_step >= 0).nonzero().view(-1)
        if not len(chosen):
            return
        some = records[chosen]
        rows = [tensor[: len(chosen)] for tensor in self._rows]
        self._gather(
            rows,
            [],
            counters,
            [field.column for field in self._fields],
            [field.shift for field in self._fields],
            [field.gain for field in self._fields],
            some,
            goal_step[chosen] - some[:, Resolution.ANCHOR],
            self._words,
            [0.0] * len(rows),
            self._threads,
        )
        for field, values in zip(self._fields, rows, strict=True):
            outs[field.out].index_copy_(0, chosen, values)
            masks[field.mask].index_fill_(0, chosen, True)


def _future(anchor: np.ndarray, rows: np.ndarray, words: Words) -> tuple[np.ndarray, np.ndarray]:
    later = rows - 1 - anchor
    return anchor + 1 + below(words, later), later > 0


def _final(anchor: np.ndarray, rows: np.ndarray, words: Words) -> tuple[np.ndarray, np.ndarray]:
    del words
    return rows - 1, np.ones(len(anchor), bool)


def _episode(anchor: np.ndarray, rows: np.ndarray, words: Words) -> tuple[np.ndarray, np.ndarray]:
    return below(words, rows), np.ones(len(anchor), bool)
