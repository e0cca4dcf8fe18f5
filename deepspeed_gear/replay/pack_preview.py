"""Pack preview: the packing plan of some lengths on any number of ranks, computed by one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from deepspeed_gear.batching.packing_plan import PackBudget, plan_packs
from deepspeed_gear.config import GearConfig
from deepspeed_gear.config.cross_checks import check_ranks
from deepspeed_gear.config.pack_options import room
from deepspeed_gear.errors import ConfigError, DataError
from deepspeed_gear.ops import load_backend


@dataclass(frozen=True)
class PackPreview:
    """The packs of one optimizer step.

    Args:
        trajectories, tokens: Of the step, all ranks together.
        longest: Steps of the longest trajectory.
        truncated: Trajectories of which only the first steps are trained.
        micro_batches: K of every rank.
        bound: The least K that any plan could have.
        rows: Places of all micro batches, padding included.
        step_imbalance: Cost of the slowest rank in each micro step, summed, / the mean, minus 1.
        rank_imbalance: Cost of the slowest rank / the mean, minus 1.
    """

    trajectories: int
    tokens: int
    longest: int
    truncated: int
    micro_batches: int
    bound: int
    rows: int
    step_imbalance: float
    rank_imbalance: float

    @property
    def fill(self) -> float:
        """Part of the places that hold a trajectory's step."""
        return self.tokens / self.rows


def read_lengths(path: Path) -> np.ndarray:
    """Read lengths: an .npy file of integers, or a text file with one number per line. [n], int64.

    Raises:
        DataError: It cannot be read, or holds something else.
    """
    try:
        found = (
            np.lib.format.open_memmap(path, mode="r")
            if path.suffix == ".npy"
            else np.loadtxt(path, np.int64, ndmin=1)
        )
    except (OSError, ValueError) as error:
        raise DataError(f"lengths {path}", "must be a file of whole numbers", None, str(error)) from error
    if found.ndim != 1 or found.dtype.kind not in "iu" or not len(found) or found.min() < 1:
        raise DataError(
            f"lengths {path}", "must be whole numbers of at least 1", f"{found.dtype} {found.shape}"
        )
    return found.astype(np.int64)


def pack_preview(config: GearConfig, lengths: np.ndarray, replicas: int, sequence: int = 1) -> PackPreview:
    """Plan the packs of one optimizer step.

    Args:
        config: With `gear.pack`.
        lengths: Steps of its trajectories. [n], int64.
        replicas: Ranks that train on different samples.
        sequence: Ranks that share a sequence.
    Raises:
        ConfigError: A trajectory is too long, or the ranks do not suit the config.
    """
    pack = config.pack
    if pack is None:
        remedy = 'give "pack": {"tokens": ...}, or leave --lengths out'
        raise ConfigError("gear.pack", "must be given for a preview of lengths", None, remedy)
    check_ranks(config, replicas, sequence, 1)
    most, longest = room(pack), int(lengths.max())
    if pack.too_long == "refuse" and longest > most:
        rule = f"must hold the longest trajectory ({longest} steps)"
        raise ConfigError("gear.pack.tokens", rule, pack.tokens, 'raise it, or set "too_long": "truncate"')
    packed = np.minimum(lengths, most)
    budget = PackBudget(most, pack.cost[0], pack.cost[1], pack.pad.multiple, pack.max_trajectories)
    width = pack.plan_width or replicas
    plan = plan_packs(torch.from_numpy(packed), budget, width, load_backend("auto").on_host())
    bins = (plan.micro * width + plan.rank).numpy()
    size = plan.num_micro * width
    costs = budget.linear * packed.astype(np.float64) + budget.quadratic * packed.astype(np.float64) ** 2
    per_rank = width // replicas
    # With a plan for more ranks, a rank trains several packs of it, one after the other.
    of_pack = np.bincount(bins, costs, size).reshape(plan.num_micro, replicas, per_rank)
    of_rank = of_pack.sum(axis=(0, 2))
    return PackPreview(
        trajectories=len(lengths),
        tokens=int(packed.sum()),
        longest=longest,
        truncated=int((lengths > most).sum()),
        micro_batches=plan.num_micro * per_rank,
        bound=-(-int(packed.sum()) // (most * width)) * per_rank,
        rows=int(
            _rows(np.bincount(bins, packed, size).astype(np.int64), plan.num_micro, width, config).sum()
        ),
        step_imbalance=float(of_pack.max(axis=1).sum() * replicas / costs.sum() - 1),
        rank_imbalance=float(of_rank.max() * replicas / costs.sum() - 1),
    )


def _rows(tokens: np.ndarray, num_micro: int, width: int, config: GearConfig) -> np.ndarray:
    """Return N of each pack. [num_micro, width], int64."""
    assert config.pack is not None
    multiple = config.pack.pad.multiple
    own: np.ndarray = np.maximum(-(-tokens // multiple), 1).reshape(num_micro, width) * multiple
    if config.pack.pad.to == "budget":
        return np.full_like(own, room(config.pack))
    if config.pack.pad.to == "step":
        return np.asarray(np.broadcast_to(own.max(axis=1, keepdims=True), own.shape))
    return own


def format_pack_preview(found: PackPreview, replicas: int) -> Sequence[str]:
    """Return the lines that `gear preview --lengths` prints."""
    truncated = f", {found.truncated} of them truncated" if found.truncated else ""
    return [
        f"{found.trajectories:,} trajectories, {found.tokens:,} tokens, longest {found.longest:,}{truncated}",
        f"micro batches of each of {replicas} replicas: {found.micro_batches} (at least {found.bound})",
        f"fill: {found.fill:.1%} of {found.rows:,} places",
        f"imbalance: {found.step_imbalance:.2%} over micro steps, {found.rank_imbalance:.2%} over ranks",
    ]
