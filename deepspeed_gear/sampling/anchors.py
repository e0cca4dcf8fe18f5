"""Anchor rules: which steps of a trajectory may anchor a sample; in C++ ops/csrc/common/slot.h."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

UNBOUNDED = 2**62


@dataclass(frozen=True)
class WindowSpan:
    """Rows of a window at its anchor: [anchor + offset, anchor + offset + length) of T + extra."""

    offset: int
    length: int
    extra: int


@dataclass(frozen=True)
class AnchorRule:
    """An arithmetic progression of steps."""

    first: int = 0  # first admissible step; distance from the last step when `from_end`
    trim: int = 0  # steps at the other end that are never anchors
    stride: int = 1  # every stride-th step
    most: int = UNBOUNDED  # at most this many anchors
    from_end: int = 0  # 1 to count from the last step backwards

    @classmethod
    def all(cls) -> AnchorRule:
        return cls()

    @classmethod
    def start(cls) -> AnchorRule:
        return cls(most=1)

    @classmethod
    def end(cls) -> AnchorRule:
        return cls(most=1, from_end=1)

    @classmethod
    def every(cls, k: int) -> AnchorRule:
        return cls(stride=k)

    @classmethod
    def fits(cls, windows: Iterable[WindowSpan]) -> AnchorRule:
        """Admit the anchors whose windows need no padding."""
        windows = list(windows)
        first = max((-w.offset for w in windows), default=0)
        trim = max((w.offset + w.length - 1 - w.extra for w in windows), default=0)
        return cls(first=max(0, first), trim=max(0, trim))

    def as_list(self) -> list[int]:
        """Return the words of the ops' `rule` argument."""
        return [self.first, self.trim, self.stride, self.most, self.from_end]

    def num_anchors(self, num_steps: np.ndarray) -> np.ndarray:
        """Return how many anchors trajectories of these lengths admit. [n], int64."""
        room = num_steps - self.first - self.trim
        return np.where(room <= 0, 0, np.minimum((room + self.stride - 1) // self.stride, self.most))

    def anchor_at(self, index: np.ndarray, num_steps: np.ndarray) -> np.ndarray:
        """Return the index-th anchor of trajectories of these lengths. [n], [n] -> [n], int64."""
        distance = self.first + index * self.stride
        return num_steps - 1 - distance if self.from_end else distance

    def admits(self, steps: np.ndarray, num_steps: np.ndarray) -> np.ndarray:
        """Return which steps are anchors of trajectories of these lengths. [n], [n] -> [n], bool."""
        distance = (num_steps - 1 - steps if self.from_end else steps) - self.first
        index = distance // self.stride
        inside = (steps < num_steps) & (distance >= 0) & (distance % self.stride == 0)
        return np.asarray(inside & (index < self.num_anchors(num_steps)))
