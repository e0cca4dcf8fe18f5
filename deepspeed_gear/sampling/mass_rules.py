"""Mass rules: anchors that trajectories admit; masses by weights, conditions, ages; decay.

In C++: ops/csrc/common.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Literal

import numpy as np
from pydantic import TypeAdapter

from deepspeed_gear.data.splits import split_of
from deepspeed_gear.errors import ConfigError, DataError
from deepspeed_gear.ops.constants import MOST_MASS_BITS, MOST_TOTAL_BITS
from deepspeed_gear.ops.records import MassUnit, Normalize
from deepspeed_gear.sampling.conditions import Condition

Unit = Literal["trajectory", "step", "group"]
# A group's mass is that of its leader.
UNIT_CODES = {
    "trajectory": MassUnit.TRAJECTORY,
    "step": MassUnit.STEP,
    "group": MassUnit.TRAJECTORY,
}
NORMALIZE_CODES = {None: Normalize.NONE, "batch": Normalize.BATCH, "table": Normalize.TABLE}
UNBOUNDED = 2**62


@dataclass(frozen=True)
class AnchorRule:
    """An arithmetic progression of steps."""

    first: int = 0  # first admissible step; distance from the last step when `from_end`
    trim: int = 0  # steps at the other end that are never anchors
    stride: int = 1  # every stride-th step
    most: int = UNBOUNDED  # at most this many anchors
    from_end: int = 0  # 1 to count from the last step backwards

    @classmethod
    def bounded(
        cls,
        windows: Sequence[tuple[int, int, int]],
        pad_before: int | None,
        pad_after: int | None,
        stride: int = 1,
    ) -> AnchorRule:
        """Admit anchors whose windows need at most so many steps of padding at either end.

        Args:
            windows: Offset, length, extra: rows [anchor + offset, anchor + offset + length) of
                T + extra.
            pad_before: Most steps of padding in front of the first row. None: any number.
            pad_after: Most steps of padding after the last row. None: any number.
            stride: Steps from one anchor to the next.
        Example:
            Two observations and 16 actions from one step before the anchor, (-1, 2, 0) and
            (-1, 16, 0), with pad_after = 7: the last 7 steps are no anchors, as 14 actions follow
            an anchor.
        """
        before = max((-offset for offset, _, _ in windows), default=0)
        after = max((offset + length - 1 - extra for offset, length, extra in windows), default=0)
        first = 0 if pad_before is None else max(0, before - pad_before)
        trim = 0 if pad_after is None else max(0, after - pad_after)
        return cls(first=first, trim=trim, stride=stride)

    def as_list(self) -> list[int]:
        """Return the words of the ops' `rule` argument."""
        return [self.first, self.trim, self.stride, self.most, self.from_end]

    def num_anchors(self, num_steps: np.ndarray) -> np.ndarray:
        """Return how many anchors trajectories of these lengths admit. [n], int64."""
        room = num_steps - self.first - self.trim
        return np.where(
            room <= 0, 0, np.minimum((room + self.stride - 1) // self.stride, self.most)
        )

    def anchor_at(self, index: np.ndarray, num_steps: np.ndarray) -> np.ndarray:
        """Return the index-th anchor of trajectories of these lengths. [n], [n] -> [n], int64."""
        distance = self.first + index * self.stride
        return num_steps - 1 - distance if self.from_end else distance

    def admits(self, steps: np.ndarray, num_steps: np.ndarray) -> np.ndarray:
        """Return which steps are anchors of trajectories of these lengths. [n], [n] ->
        [n], bool.
        """
        distance = (num_steps - 1 - steps if self.from_end else steps) - self.first
        index = distance // self.stride
        inside = (steps < num_steps) & (distance >= 0) & (distance % self.stride == 0)
        return np.asarray(inside & (index < self.num_anchors(num_steps)))


CustomMasses = Callable[[np.ndarray, np.ndarray, Callable[[str], np.ndarray]], np.ndarray]
NO_ID = -1  # every id is newer
_PARTS = 64  # parts into which each round divides the remaining range of ids


@dataclass(frozen=True)
class WindowEdge:
    """The edge at which an age window begins."""

    oldest: int  # the smallest id in it
    newest: int | float | None  # the largest value of its column; None: there is no value


@dataclass(frozen=True)
class AgeWindow:
    """A window of the newest items."""

    newest: int | None = None  # how many items; None for no limit
    column: str | None = None  # a per-trajectory column that grows with time; None for no limit
    distance: float = 0  # how far its values may lie below the largest one

    def edge(
        self,
        ids: np.ndarray,
        num_items: np.ndarray,
        values: np.ndarray | None,
        all_gather: Callable[[np.ndarray], np.ndarray] = lambda words: words[None],
    ) -> WindowEdge:
        """Return the window's edge among the trajectories of all nodes, given those of this one.
        Collective.

        A larger id is newer; `values` are those of the window's column, if it has one. [n] each.
        `all_gather` returns the same number of words of every node, [k] -> [S, k], int64; by
        default there is one node. Cost: a sort, and about 4 rounds of 64 words for 10^7
        trajectories, however many nodes.
        """
        there = num_items > 0
        newest = None
        if values is not None:
            number = np.int64 if values.dtype.kind in "biu" else np.float64
            own = np.zeros(2, np.int64)
            if there.any():
                own[:] = 1, np.array(np.fmax.reduce(values[there]), number).view(np.int64)
            of_nodes = all_gather(own)
            known = of_nodes[of_nodes[:, 0] > 0, 1].view(number)
            newest = np.fmax.reduce(known).item() if len(known) else None  # without NaN
        if self.newest is None:
            return WindowEdge(NO_ID, newest)
        order = np.argsort(ids)
        ordered = ids[order]
        newer = np.concatenate([[0], np.cumsum(num_items[order])])  # of those before each place
        low = NO_ID
        high = int(all_gather(np.array([ids.max(initial=NO_ID)])).max())
        # The smallest id after which there are fewer items than wanted is in [low, high].
        while low < high:
            step = -(-(high - low) // _PARTS)
            points = np.minimum(low + step * np.arange(_PARTS), high)
            after = newer[-1] - newer[np.searchsorted(ordered, points, side="right")]
            few = all_gather(after).sum(0) < self.newest
            first = int(np.argmax(few)) if few.any() else _PARTS
            if first == 0:
                return WindowEdge(low, newest)
            high = int(points[first]) if first < _PARTS else high
            low = int(points[first - 1]) + 1
        return WindowEdge(low, newest)

    def admits(
        self, edge: WindowEdge, ids: np.ndarray, num_items: np.ndarray, values: np.ndarray | None
    ) -> np.ndarray:
        """Return which trajectories are in a window that begins at an edge. [n], bool."""
        inside = (np.asarray(num_items) > 0) & (ids >= edge.oldest)
        if values is not None and edge.newest is not None:
            # A Python number: small integers would overflow.
            inside &= values >= edge.newest - self.distance
        return inside


@dataclass(frozen=True)
class MassRule:
    """The integer mass of each trajectory in one stream."""

    # What an item is. A step item has one unit of mass per anchor, so all steps are equally likely.
    # The rule of a group applies to its leader, with the number of steps of the whole group.
    unit: Unit
    by_length: bool  # trajectories in proportion to their number of steps
    anchors: AnchorRule  # which steps are admissible; a trajectory without one has mass 0
    where: tuple[Condition, ...] = ()  # filters that must all hold
    split: Mapping[str, float] = field(default_factory=dict)  # fractions of the splits
    split_index: int = 0  # the split this stream draws from; 0 is training
    # Per-trajectory column of weights, and log2 of the mass of weight 1.
    weight: tuple[str, int] | None = None
    custom: CustomMasses | None = None  # a program's own masses
    # Which of the admitted ones are new enough; applied by the selection.
    window: AgeWindow | None = None
    late: tuple[str, ...] = ()  # late columns that must be filled

    @property
    def draws_anchor(self) -> bool:
        """Whether a second draw selects the anchor; else one unit of a trajectory's mass is one
        anchor.
        """
        return self.unit != "step" or self.has_weights

    @property
    def has_weights(self) -> bool:
        return self.weight is not None or self.custom is not None

    @property
    def plain_unit(self) -> int | None:
        """Return the unit of `slot_masses_`; None unless masses follow from lengths and late
        columns.
        """
        if (
            self.has_weights
            or self.where
            or self.split
            or self.window is not None
            or self.unit == "group"
        ):
            return None
        return (
            MassUnit.LENGTH
            if self.unit == "trajectory" and self.by_length
            else UNIT_CODES[self.unit]
        )

    def describe(self) -> dict[str, Any]:
        """Return the rule for readers of a store, without a program's own masses; JSON-able."""
        description: dict[str, Any] = TypeAdapter(MassRule).dump_python(
            self, mode="json", exclude={"custom"}
        )
        return description

    def masses(
        self, ids: np.ndarray, num_steps: np.ndarray, column: Callable[[str], np.ndarray]
    ) -> np.ndarray:
        """Return the mass of trajectories by id, length and the values that `column` returns. [n],
        int64.
        """
        anchors = self.anchors.num_anchors(num_steps)
        if self.has_weights:
            items = anchors if self.unit == "step" else np.minimum(anchors, 1)
            most = (1 << MOST_TOTAL_BITS) // np.maximum(items, 1)  # else the product might overflow
            masses = np.minimum(self._weights(ids, num_steps, column), most) * items
        elif self.unit == "step":
            masses = anchors
        else:
            masses = np.where(anchors > 0, num_steps if self.by_length else 1, 0)
        keep = np.ones(len(ids), bool)
        for condition in self.where:
            keep &= condition.holds(column(condition.column))
        if self.split:
            keep &= split_of(ids, self.split) == self.split_index
        return np.where(keep, masses, 0).astype(np.int64)

    def _weights(
        self, ids: np.ndarray, num_steps: np.ndarray, column: Callable[[str], np.ndarray]
    ) -> np.ndarray:
        if self.weight is not None:
            name, bits = self.weight
            return masses_of_weights(column(name), bits)
        assert self.custom is not None
        masses = np.asarray(self.custom(ids, num_steps, column))
        good = masses.dtype.kind in "iu" and masses.shape == ids.shape
        if not good or (
            len(masses) and not 0 <= masses.min() <= masses.max() <= 1 << MOST_MASS_BITS
        ):
            raise ConfigError(
                "gear.sampler.masses",
                f"must return {len(ids)} integers in [0, 2^{MOST_MASS_BITS}]",
                f"{masses.dtype} {list(masses.shape)} in [{masses.min(initial=0)}, "
                f"{masses.max(initial=0)}]",
                "return an integer array of the length of ids",
            )
        return masses.astype(np.int64)


@dataclass(frozen=True)
class Decay:
    """Exponential decay of priorities by age, without touching old items: those of new ones grow.

    A priority counts times exp(-age / batches) up to a factor that all items have in common. It
    changes with each era, in which new items grow by at most 2^8; then all masses are computed
    again.
    """

    batches: float  # in which a priority falls by the factor e

    @property
    def era_batches(self) -> int:
        """Global batches of an era, over which exp falls by less than 2^8."""
        return int(5.5 * self.batches)

    def decayed(self, priorities: np.ndarray, born: np.ndarray, era: int) -> np.ndarray:
        """Return priorities as they count in an era; a positive one stays so. [n]; [n], batches;
        float32.

        Cost: one multiplication for each bit of the largest age. The bits do not depend on the
        machine.
        """
        # Batches until the end of the era.
        left = np.maximum((era + 1) * self.era_batches - 1 - born, 0)
        growth = np.full(len(born), 256.0)
        factor = float((-1 / Decimal(self.batches)).exp())
        while left.any():
            growth[left & 1 > 0] *= factor
            left >>= 1
            factor = factor * factor
        least = np.where(priorities > 0, np.finfo(np.float32).tiny, 0)
        return np.asarray(np.maximum(priorities * growth, least), np.float32)


@dataclass(frozen=True)
class PriorityRule:
    """How priorities become masses and importance weights."""

    alpha: Callable[[int], float]  # exponent of the priorities by global batch, in [0, 1]
    beta: Callable[[int], float]  # exponent of the importance weights by global batch, in [0, 1]
    # Priority of new items; None: the highest reported, as of the latest selection, 1 at first.
    initial: float | None
    # Divide the weights by the largest of the global batch, of the table, or not.
    normalize: Literal["batch", "table"] | None
    lag: int  # global batches that are prefetched
    log_size: int  # priority updates of one rank that may wait
    most_bits: int = MOST_MASS_BITS  # log2 of the largest mass
    decay: Decay | None = None


# Bits of the total mass of given weights, and of weight 1 where the weights are not known yet.
MOST_BITS = 56
WEIGHT_BITS = 24
_MOST_SHIFT = 1000


def check_weight(name: str, column: str, columns: Mapping[str, np.ndarray]) -> None:
    """Raise a DataError unless the weight of a new trajectory is finite and >= 0."""
    check_finite(f"{name}: column {column}: weight", np.atleast_1d(columns[column]))


def check_finite(name: str, values: np.ndarray, remedy: str = "correct it") -> None:
    """Raise a DataError unless weights, or priorities, are finite and >= 0."""
    if len(values) and not (values.min() >= 0 and values.max() < np.inf):  # a NaN is neither
        at = int(np.nonzero(~((values >= 0) & (values < np.inf)))[0][0])
        raise DataError(f"{name} {at}", "must be finite and at least 0", float(values[at]), remedy)


def masses_of_weights(weights: np.ndarray, bits: int) -> np.ndarray:
    """Return round(weight * 2^bits), in [1, 2^MOST_BITS] for a positive weight. [n] ->
    [n], int64.
    """
    scaled = np.ldexp(weights.astype(np.float64), bits)  # exact
    masses = np.rint(np.clip(scaled, 0, 2.0**MOST_BITS)).astype(np.int64)
    return np.where(weights > 0, np.maximum(masses, 1), 0)


def weight_bits(total: float) -> int:
    """Return the scale (log2) at which masses of this total weight, 0 if unknown, stay below
    2^MOST_BITS.
    """
    if total <= 0:
        return WEIGHT_BITS
    return int(np.clip(MOST_BITS - np.frexp(total)[1], -_MOST_SHIFT, _MOST_SHIFT))


def random_key_of(*names: str) -> int:
    """Return the 32-bit random key of a table and a stream, a part of each draw's counter."""
    return zlib.crc32("\0".join(names).encode())
