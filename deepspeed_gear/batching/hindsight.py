"""Hindsight relabelling: draws the achieved goals that replace stored ones, and their rewards."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from deepspeed_gear.batching.batch import Batch
from deepspeed_gear.config import ResolvedField
from deepspeed_gear.config.field_resolution import reward_field
from deepspeed_gear.config.options import HindsightConfig
from deepspeed_gear.config.schedules import imported
from deepspeed_gear.errors import ShapeError
from deepspeed_gear.ops import Ops
from deepspeed_gear.ops.constants import ONE_Q62
from deepspeed_gear.ops.records import GoalStrategy

Reward = Callable[[Batch], torch.Tensor]
STRATEGIES = {
    "future": GoalStrategy.FUTURE,
    "final": GoalStrategy.FINAL,
    "episode": GoalStrategy.EPISODE,
}


class HindsightRelabelling:
    """Relabelling of samples by `gear.hindsight`: goals and rewards (None: neither). Thread safe.

    Rewards are computed only where this rank needs the reward field.
    """

    def __init__(
        self,
        config: HindsightConfig | None,
        seed: int,
        ops: Ops,
        fields: Sequence[ResolvedField],
        needed: Sequence[ResolvedField],
    ) -> None:
        self._config = config
        self._seed = seed
        self._draw_goals = ops.draw_goals_
        rows = [field.hindsight.rows for field in fields if field.hindsight is not None]
        self._final_row = int("T+1" in rows)
        self._reward: Reward | None = None
        if config is not None and config.reward is not None:
            self._name = reward_field(fields).name
            if any(field.name == self._name and not field.mask_only for field in needed):
                self._reward = imported(config.reward, "gear.hindsight.reward")
        self.draws_goals = config is not None
        self.has_reward = self._reward is not None  # the program computes rewards

    def draw(self, random_key: int, resolutions: torch.Tensor) -> torch.Tensor | None:
        """Return the row of the achieved goal of each sample, -1 for its own goal. [B], int64."""
        if self._config is None:
            return None
        goal_step = torch.empty(resolutions.size(0), dtype=torch.int64)
        fraction = int(self._config.fraction * ONE_Q62)  # exact: a power of two
        strategy = STRATEGIES[self._config.strategy]
        self._draw_goals(
            goal_step, resolutions, self._seed, random_key, strategy, fraction, self._final_row
        )
        return goal_step

    def reward(self, batch: Batch) -> None:
        """Replace the rewards of a batch by those of the program's function.

        Raises:
            ShapeError: The function returned another shape, or no tensor.
        """
        if self._reward is None:
            return
        reward = self._reward(batch)
        field = batch[self._name]
        if not isinstance(reward, torch.Tensor) or reward.shape != field.shape:
            got = list(reward.shape) if isinstance(reward, torch.Tensor) else type(reward).__name__
            rule = f"must return a tensor of the shape of field {self._name} ({list(field.shape)})"
            raise ShapeError(
                "gear.hindsight.reward", rule, got, "return one reward for each row of the field"
            )
        batch[self._name] = reward.detach().to(field)
