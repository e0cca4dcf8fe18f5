"""Hindsight relabelling of this rank's batches: the goals of each stream, and a program's rewards."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from deepspeed_gear.batching.batch import Batch
from deepspeed_gear.batching.hindsight import HindsightGoals
from deepspeed_gear.config import GearConfig, ResolvedField
from deepspeed_gear.config.hindsight_checks import reward_field
from deepspeed_gear.config.schedules import imported
from deepspeed_gear.errors import ShapeError

Reward = Callable[[Batch], torch.Tensor]


class HindsightRelabelling:
    """Draws goals and computes rewards by `gear.hindsight`; without it, does nothing. One thread per stream.

    Args:
        config: The config.
        fields: The fields of a batch.
        needed: The fields that this rank gathers.
    Raises:
        ConfigError: The reward cannot be imported.
    """

    def __init__(
        self, config: GearConfig, fields: Sequence[ResolvedField], needed: Sequence[ResolvedField]
    ) -> None:
        self._config, self._seed = config.hindsight, config.seed
        rows = [field.hindsight.rows for field in fields if field.hindsight is not None]
        self._final_row = int("T+1" in rows)
        self._goals: dict[int, HindsightGoals] = {}
        self._reward: Reward | None = None
        if config.hindsight is not None and config.hindsight.reward is not None:
            self._name = reward_field(fields).name
            if any(field.name == self._name and not field.mask_only for field in needed):
                self._reward = imported(config.hindsight.reward, "gear.hindsight.reward")

    def draw(self, stream_key: int, records: torch.Tensor) -> torch.Tensor | None:
        """Return the rows of the achieved goals that samples get, -1 for their own goal. [B], int64.

        Args:
            stream_key: Of the batch stream; the draws depend on it.
            records: Resolutions of the samples. [B, 8], int64.
        """
        if self._config is None:
            return None
        if stream_key not in self._goals:
            self._goals[stream_key] = HindsightGoals(self._config, self._seed, stream_key, self._final_row)
        return self._goals[stream_key].draw(records)

    @staticmethod
    def together(parts: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
        """Concatenate the goals of samples of several tables."""
        given = [part for part in parts if part is not None]
        return torch.cat(given) if given else None

    def reward(self, batch: Batch) -> None:
        """Replace the rewards of a batch by those of the program's function.

        Raises:
            ShapeError: It returns no tensor of the field's shape.
        """
        if self._reward is None:
            return
        found, field = self._reward(batch), batch[self._name]
        if not isinstance(found, torch.Tensor) or found.shape != field.shape:
            what = list(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
            rule = f"must return a tensor of the shape of field {self._name} ({list(field.shape)})"
            raise ShapeError("gear.hindsight.reward", rule, what)
        batch[self._name] = found.detach().to(field)
