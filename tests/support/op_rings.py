"""A ring on some backend, driven by its ops alone: for the tests that compare backends, and of
single ops.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from op_kit import REFERENCE, same_bits, tensors_of
from torch import Tensor

from deepspeed_gear.ops import Ops
from deepspeed_gear.ops.constants import HIGHEST_SO_FAR, ONE_Q62, minima_size, tree_size
from deepspeed_gear.ops.records import (
    MassUnit,
    OpenTrajectory,
    PlacedStep,
    PlacedTrajectory,
    Resolution,
    RingState,
    Slot,
    SlotState,
    UpdateCount,
)
from deepspeed_gear.sampling.mass_rules import AnchorRule

ONE = 0x3F800000
ALL_ANCHORS = [0, 0, 1, 1 << 40, 0]
SCRATCH = slice(16, 22)  # of a ring's state: what kernels pass to each other


@dataclass
class Ring:
    """The tensors of a ring."""

    ops: Ops
    num_rows: int
    num_slots: int
    final_row: int
    most_steps: int
    unit: int
    rule: list[int]
    prioritized: bool
    with_minima: bool = False
    alpha: int = round(0.6 * ONE_Q62)
    most_bits: int = 25
    device: str = "cpu"
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        items = self.num_rows if self.by_row else self.num_slots
        zeros: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "state": ((RingState.NUM_WORDS,), torch.int64),
            "slots": ((self.num_slots, 8), torch.int64),
            "begins": ((self.num_slots,), torch.int64),
            "sums": ((tree_size(items),), torch.int64),
            "minima": ((minima_size(items) if self.with_minima else 0,), torch.int64),
            "priorities": ((items if self.prioritized else 0,), torch.float32),
            "row_slots": ((self.num_rows if self.by_row else 0,), torch.int32),
        }
        self.tensors = {
            name: self.zeros(*size, dtype=dtype) for name, (size, dtype) in zeros.items()
        }
        self.tensors["state"][
            [RingState.COUNTS + UpdateCount.HIGHEST_PRIORITY, RingState.INITIAL]
        ] = ONE

    def __getattr__(self, name: str) -> Tensor:
        return self.__dict__["tensors"][name]

    def zeros(self, *size: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.zeros(size, dtype=dtype, device=self.device)

    def batch(self, count: int) -> tuple[Tensor, Tensor]:
        """Return what a draw writes: records, and weights where it is prioritized."""
        return self.zeros(count, 8), self.zeros(
            count if self.prioritized else 0, dtype=torch.float32
        )

    @property
    def by_row(self) -> bool:
        return self.prioritized and self.unit == MassUnit.STEP

    @property
    def drawn_unit(self) -> int:
        return MassUnit.TRAJECTORY if self.prioritized and not self.by_row else self.unit

    @property
    def item_unit(self) -> int:
        return MassUnit.STEP if self.by_row else MassUnit.TRAJECTORY

    @property
    def shape(self) -> list[int]:
        return [self.num_rows, self.num_slots, self.final_row, self.most_steps]

    def add(self, lengths: list[int], initial: int = HIGHEST_SO_FAR) -> Tensor:
        placed = self.zeros(len(lengths), PlacedTrajectory.NUM_WORDS) + 77
        rest = (self.rule, self.shape, self.unit, self.alpha, initial, self.most_bits)
        steps = torch.tensor(lengths, dtype=torch.int64, device=self.device)
        self.ops.ring_add_(*self.tensors.values(), placed, steps, *rest)
        return placed

    def select(self, count: int, draw: list[int], betas: list[int]) -> tuple[Tensor, Tensor]:
        records, weights = self.batch(count)
        known = (
            self.slots,
            self.sums,
            self.minima,
            self.row_slots,
            torch.tensor(betas, device=self.device),
        )
        how = self.rule, self.shape, draw, self.drawn_unit
        self.ops.ring_select_(self.state, records, weights, *known, *how)
        return records, weights

    def select_limited(
        self, count: int, draw: list[int], betas: list[int], most: int
    ) -> tuple[Tensor, Tensor]:
        """Draw, and remove what was drawn `most` times."""
        (resolutions, weights) = self.batch(count)
        unit = self.drawn_unit
        named = (self.state, resolutions, weights, self.slots, self.sums, self.minima)
        self.ops.ring_select_limited_(
            *named, torch.tensor(betas), self.rule, self.shape, draw, unit, most
        )
        drawn = resolutions[resolutions[:, Resolution.ID] >= 0]
        is_used_up = self.slots[drawn[:, Resolution.SLOT], Slot.TIMES_SAMPLED] >= most
        self.remove(sorted(set(drawn[is_used_up, Resolution.ID].tolist())))
        return resolutions, weights

    def top_k(self, count: int, draw: list[int]) -> tuple[Tensor, Tensor]:
        resolutions = torch.zeros(count, 8, dtype=torch.int64)
        weights = torch.zeros(count)
        named = (
            self.state,
            resolutions,
            weights,
            self.slots,
            self.sums,
            self.priorities,
            self.row_slots,
        )
        self.ops.ring_top_k_(*named, self.rule, self.shape, draw, self.item_unit, not self.by_row)
        return resolutions, weights

    def epoch(self, count: int, draw: list[int]) -> tuple[Tensor, Tensor]:
        """Take a batch of epochs: records, and the epoch of each sample."""
        records = self.zeros(count, 8)
        epochs = self.zeros(count) + 77
        named = (self.state, records, epochs, self.slots, self.sums)
        self.ops.ring_epoch_(*named, self.rule, self.shape, draw, self.unit)
        return records, epochs

    def update(self, resolutions: Tensor, values: Tensor) -> None:
        named = (self.state, self.sums, self.minima, self.priorities, self.slots)
        rest = (self.rule, self.shape, self.item_unit, self.alpha, self.most_bits)
        self.ops.ring_update_(*named, resolutions, values, *rest)

    def remove(self, ids: list[int]) -> Tensor:
        named = (self.state, self.slots, self.sums, self.minima, self.priorities)
        removed = torch.full((len(ids),), 77)
        which = torch.tensor(ids, dtype=torch.int64)
        self.ops.ring_remove_(*named, removed, which, self.shape, self.item_unit)
        return removed

    @property
    def content(self) -> dict[str, Tensor]:
        found = {name: tensor.clone() for name, tensor in self.tensors.items()}
        found["state"][SCRATCH] = 0
        return found


class Environments(Ring):
    """The tensors of a ring to which environments add steps."""

    def __init__(
        self,
        ops: Ops,
        num_envs: int,
        kind: tuple[Any, ...],
        most: int = 4,
        part: int = 0,
        own_slots: int = 0,
    ) -> None:
        unit, rule, prioritized, with_minima, final = kind
        part = part or most + final + (1 + final) * (most + 1) + 3
        sizes = num_envs * part, num_envs * (own_slots or most + 2), final, most
        super().__init__(ops, *sizes, unit, rule, prioritized, with_minima)
        self.num_envs = num_envs
        opened = torch.zeros(num_envs, OpenTrajectory.NUM_WORDS, dtype=torch.int64)
        owners = torch.zeros(self.num_rows, dtype=torch.int32)
        kept = {name: self.tensors[name] for name in ("sums", "minima", "priorities")}
        self.tensors = {
            "state": self.state,
            "slots": self.slots,
            "opened": opened,
            "owners": owners,
            **kept,
        }
        self.truncations = torch.zeros(self.num_rows, dtype=torch.bool)

    def step(
        self,
        terminated: Tensor,
        truncated: Tensor | None,
        mask: Tensor | None,
        next_step: bool = False,
    ) -> tuple[Tensor, Tensor]:
        placed, begun = (torch.full((self.num_envs, n), 77) for n in (PlacedStep.NUM_WORDS, 3))
        rest = (
            self.rule,
            self.shape,
            self.unit,
            self.alpha,
            HIGHEST_SO_FAR,
            self.most_bits,
            next_step,
        )
        flags = terminated, truncated, mask
        self.ops.ring_extend_(
            *self.tensors.values(), placed, begun, self.truncations, *flags, *rest
        )
        return placed, begun

    @property
    def row_slots(self) -> Tensor:
        return self.owners if self.by_row else torch.zeros(0, dtype=torch.int32)

    @property
    def content(self) -> dict[str, Tensor]:
        return super().content | {"truncations": self.truncations}

    def check(self) -> None:
        """Stored trajectories lie apart from each other, in their environments' parts; the tree is
        right.
        """
        num_rows = self.num_rows
        final = self.final_row
        most = self.most_steps
        part = num_rows // self.num_envs
        stored = self.slots[self.slots[:, Slot.STATE] == SlotState.COMMITTED]
        tail = int(self.state[RingState.TAIL])
        following = int(self.state[RingState.NEXT])
        assert sorted(stored[:, Slot.ID].tolist()) == list(range(tail, following))
        assert int(stored[:, Slot.NUM_STEPS].sum()) == self.state[RingState.STEPS]
        used = torch.zeros(num_rows, dtype=torch.int64)
        for slot in stored.tolist():
            first = slot[Slot.FIRST_ROW]
            rows = slot[Slot.NUM_ROWS]
            assert first // part == (first + rows - 1) // part
            assert 1 <= slot[Slot.NUM_STEPS] == rows - final <= most
            used[first : first + rows] += 1
        assert int(used.max()) <= 1
        items = num_rows if self.by_row else self.num_slots
        sums = self.sums.clone()
        minima = self.minima.clone()
        REFERENCE.tree_build_(sums, items)
        assert torch.equal(sums, self.sums)
        if len(minima):
            REFERENCE.minima_build_(minima, sums, items)
            assert torch.equal(minima, self.minima)
        if self.by_row:
            anchors = AnchorRule(*self.rule)
            for slot in stored.tolist():
                first = slot[Slot.FIRST_ROW]
                steps = slot[Slot.NUM_STEPS]
                are = anchors.admits(np.arange(steps), np.array(steps))
                assert not sums[first : first + steps][~torch.from_numpy(are)].any(), "of no anchor"
        assert int((sums[:items] > 0).sum()) == self.state[
            RingState.COUNTS + UpdateCount.DRAWABLE
        ] or (not self.prioritized)


class Both:
    """A ring on two backends: whatever is done to both gives the same bits.

    Attributes are those of the first one; a method runs on both, and must return the same.
    """

    def __init__(self, one: Ring, other: Ring) -> None:
        self.rings = one, other

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.rings[0], name)
        if not callable(value):
            return value

        def run(*arguments: Any, **named: Any) -> Any:
            found = [getattr(ring, name)(*arguments, **named) for ring in self.rings]
            assert all(map(same_bits, *map(tensors_of, found))), name
            return found[0]

        return run

    def assert_alike(self) -> None:
        """Check that both have the same bits, but for what kernels pass to each other."""
        one, other = (ring.content for ring in self.rings)
        for name, tensor in one.items():
            assert same_bits(tensor, other[name]), name
