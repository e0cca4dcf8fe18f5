"""PackedGRPOTrainer: TRL's GRPOTrainer with packed training steps (docs/how-to/trl.md).

TRL generates, scores, computes advantages, evaluates and logs. The responses of all ranks go into a
table without padding, and a step trains packed micro batches of whole groups.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import deepspeed
import numpy as np
import torch
from torch import Tensor

from deepspeed_gear.engine.attach import disable, enable
from deepspeed_gear.errors import ConfigError
from deepspeed_gear.integrations.grpo_losses import GRPOLoss
from deepspeed_gear.integrations.trl_internals import GRPOTrainerParts, scored_columns
from deepspeed_gear.integrations.trl_options import LIMITED, check_options, fill_ds_config
from deepspeed_gear.replay.packed.rollout import Rollout, TrainStep

if TYPE_CHECKING:
    from trl import GRPOConfig


_COUNT = "loss tokens"


class PackedGRPOTrainer(GRPOTrainerParts):
    """A GRPOTrainer whose training step is one optimizer step over packed micro batches.

    The ds_config of `args.deepspeed` has a gear section with `pack`, and with the capacity of the
    table `rollouts`; the rest of the section follows from `args`. Engines of reference and reward
    models get no replay.

    Args:
        model: As of GRPOTrainer, with all that follow.
        reward_funcs: As of GRPOTrainer.
        args: The GRPOConfig.
        *arguments: As of GRPOTrainer.
        **options: As of GRPOTrainer.
    Raises:
        ConfigError: An option has no packed form, or the installed TRL is not supported.
    """

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: GRPOConfig | None = None,
        *arguments: Any,
        **options: Any,
    ) -> None:
        if args is None or args.hf_deepspeed_config is None:
            rule = "must be a ds_config, or its path, with a gear section"
            remedy = "docs/how-to/trl.md has one to begin with"
            raise ConfigError("GRPOConfig.deepspeed", rule, None, remedy)
        check_options(args)
        loss = GRPOLoss.of(args)
        fill_ds_config(args.hf_deepspeed_config.config, args, loss)
        with _initialize_by(disable):  # for the engines of reference and reward models
            super().__init__(model, reward_funcs, args, *arguments, **options)
        if self.has_router_loss:
            name = "router_aux_loss_coef"
            LIMITED[name].check(f"GRPOConfig.{name}", "the model's own")
        self._loss = loss
        self._train_steps: Iterator[TrainStep] = iter(())

    def train(self, *arguments: Any, **options: Any) -> Any:
        """Train, as GRPOTrainer does, with an engine that has the replay of the gear section."""
        with _initialize_by(enable):
            return super().train(*arguments, **options)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Train the next step of the rollout batch; where it has ended, of a new one.

        Returns:
            This rank's part of the mean loss over the step. [].
        """
        begin = time.perf_counter()
        engine = self.deepspeed
        engine.train()
        step = next(self._train_steps, None)
        if step is None:
            self._train_steps = iter(self.next_rollout(inputs))
            step = next(self._train_steps)
        total = torch.zeros((), device=engine.device)
        # Sums over loss tokens, of ones and of each metric: micro batches may have none of any.
        sums: dict[str, Tensor] = {}
        for micro in step:
            logp, entropy = self.log_probs_and_entropy(engine, micro)
            loss, metrics = self._loss.at_places(micro, logp)
            part = micro.sum(loss)
            engine.backward(part)
            total += part.detach()
            metrics = {_COUNT: torch.ones_like(loss), "entropy": entropy, **metrics}
            for name, values in metrics.items():
                sums[name] = sums.get(name, 0) + values.detach()[micro.loss_mask].sum()
        engine.step()
        means = self._means(sums)
        means["step_time"] = time.perf_counter() - begin
        self.log_means(means)
        self.count_step()
        return total

    def next_rollout(self, inputs: Any) -> Rollout:
        """Generate and score the next rollout batch, and return it with advantages. Collective.

        Args:
            inputs: This rank's prompts, as TRL's data loader gives them.
        """
        engine = self.deepspeed
        # A run that was resumed inside a rollout batch has its responses already.
        if not engine.gear.can_sample():
            self._add_responses(inputs)
            self.accelerator.wait_for_everyone()  # the responses of all ranks are there
        rollout: Rollout = engine.gear_rollout()
        rollout.set("advantage", rollout.values("score"))
        return rollout

    def _add_responses(self, inputs: Any) -> None:
        responses = scored_columns(self.generate_and_score(inputs), self._loss.columns)
        first = self.state.global_step * self.args.generation_batch_size
        first += self.args.process_index * len(responses)
        for number, response in enumerate(responses, first):
            columns = {name: values.numpy() for name, values in response.items()}
            columns["group"] = np.int64(number // self.args.num_generations)
            self.deepspeed.gear.add(columns)

    def _means(self, sums: dict[str, Tensor]) -> dict[str, float]:
        """Return the means of metrics over the loss tokens of all ranks. Collective."""
        total = self.accelerator.reduce(torch.stack([*sums.values()]), reduction="sum")
        counts = total[0].clamp(min=1)
        means = dict(zip(sums, (total / counts).tolist(), strict=True))
        del means[_COUNT]
        return means


@contextmanager
def _initialize_by(change: Callable[[], None]) -> Iterator[None]:
    """Change what `deepspeed.initialize` does, by `enable` or `disable`, and change it back."""
    before = deepspeed.initialize
    change()
    try:
        yield
    finally:
        deepspeed.initialize = before
