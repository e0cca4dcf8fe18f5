"""LedgerGRPOTrainer: TRL's GRPOTrainer on the prompts of a ledger (docs/how-to/trl.md).

Rollout workers lease prompts, generate while the ranks train, and commit groups with rewards. The
trainer waits for the groups of its next rollout batch; TRL's generation and rewards serve
evaluation alone.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from deepspeed_gear.errors import ConfigError
from deepspeed_gear.integrations.framework_options import TABLE
from deepspeed_gear.integrations.trl import PackedGRPOTrainer
from deepspeed_gear.integrations.trl_internals import placeholder_prompts
from deepspeed_gear.replay.packed.rollout import Rollout

if TYPE_CHECKING:
    from trl import GRPOConfig

#: File in `output_dir` with the gear section, for `RolloutWorker.attach`.
WORKER_CONFIG = "gear_config.json"
_POLL_S = 0.01
_EPSILON = 1e-4  # added to standard deviations, as TRL does


class LedgerGRPOTrainer(PackedGRPOTrainer):
    """A PackedGRPOTrainer whose responses come from rollout workers, while it trains.

    The table `rollouts` of the gear section has `prompts`. Rank 0 writes the whole section to
    `output_dir/gear_config.json`; workers attach with that file, and commit groups with the columns
    tokens, loss_mask, old_logp (the log-probability of each token that was sampled) and reward.

    Args:
        model: As of GRPOTrainer.
        args: The GRPOConfig; `max_steps` ends the training.
        publish: Called on every rank with the model and the number of rollout batches that its
            weights have trained, before the next one is taken: it gives workers the weights, for
            example by a PolicyBoard.
        reward_funcs: For evaluation.
        eval_dataset: As of GRPOTrainer.
        **options: As of GRPOTrainer.
    Raises:
        ConfigError: As PackedGRPOTrainer; or an option belongs to TRL's own generation.
    """

    def __init__(
        self,
        model: Any,
        args: GRPOConfig,
        publish: Callable[[Any, int], object] | None = None,
        reward_funcs: Any = None,
        eval_dataset: Any = None,
        **options: Any,
    ) -> None:
        _check(args, options)
        args.ignore_data_skip = True  # the ledger has the position
        super().__init__(
            model,
            _no_reward if reward_funcs is None else reward_funcs,
            args,
            placeholder_prompts(),  # TRL requires a data set
            eval_dataset,
            **options,
        )
        self._publish = publish
        if args.process_index == 0:
            section = {"gear": args.hf_deepspeed_config.config["gear"]}
            folder = Path(args.output_dir)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / WORKER_CONFIG).write_text(json.dumps(section, indent=1))

    def get_train_dataloader(self) -> Any:
        """Return empty batches without end: prompts are those of the ledger."""
        return repeat({})

    def next_rollout(self, inputs: Any) -> Rollout:
        """Wait for the groups of the next rollout batch; return it with advantages. Collective."""
        replay = self.deepspeed.gear
        is_ready = replay.can_sample()  # counts the rollout batch before as trained
        if self._publish is not None:
            version = replay.statistics()["prompts"][TABLE]["version"]
            self._publish(self.deepspeed.module, version)
        while not is_ready:
            time.sleep(_POLL_S)
            is_ready = replay.can_sample()
        rollout: Rollout = self.deepspeed.gear_rollout()
        rewards = rollout.values("reward").numpy()
        centred = rollout.advantages("dr_grpo").numpy()
        groups = rollout.values("group").numpy()
        scale = self.args.scale_rewards
        rollout.set("advantage", scaled_advantages(centred, rewards, groups, scale))
        rollout.set("is_ratio", torch.ones(rollout.num_trajectories))
        if self.args.beta != 0:
            with torch.no_grad():
                for micro in rollout.forward("ref_logp"):
                    micro.fill(ref_logp=self.log_probs(self.ref_model, micro))
        self.log_means({"reward": float(rewards.mean()), "reward_std": float(rewards.std(ddof=1))})
        return rollout


def scaled_advantages(
    centred: np.ndarray, rewards: np.ndarray, groups: np.ndarray, scale: str
) -> np.ndarray:
    """Return TRL's advantage of each response, by its `scale_rewards`. [n], float64.

    Args:
        centred: Rewards less the mean of their group. [n], float64.
        rewards: Rewards. [n].
        groups: Group of each response; all have one size. [n].
        scale: "group", "batch" or "none": whose standard deviation divides.
    """
    if scale == "none":
        return centred
    if scale == "batch":
        return np.asarray(centred / (rewards.std(ddof=1, dtype=np.float64) + _EPSILON))
    _, group = np.unique(groups, return_inverse=True)
    sizes = np.bincount(group)
    deviation = np.sqrt(np.bincount(group, centred * centred) / (sizes - 1))
    return np.asarray(centred / (deviation[group] + _EPSILON))


def _check(args: Any, options: dict[str, Any]) -> None:
    """Raise a ConfigError for what belongs to TRL's own generation."""
    ours = "rollout workers generate: give it to them"
    for name in ("train_dataset", "rollout_func", "tools", "environment_factory", "peft_config"):
        if options.get(name) is not None:
            raise ConfigError(
                f"LedgerGRPOTrainer.{name}", "must be left out", type(options[name]).__name__, ours
            )
    if args.use_vllm:
        raise ConfigError("GRPOConfig.use_vllm", "must be False", True, ours)
    if args.max_steps <= 0:
        rule = "must be given: a ledger has no end"
        raise ConfigError("GRPOConfig.max_steps", rule, args.max_steps, "give the optimizer steps")
    config = {} if args.hf_deepspeed_config is None else args.hf_deepspeed_config.config
    if "prompts" not in config.get("gear", {}).get("tables", {}).get(TABLE, {}):
        remedy = 'give "prompts": {"data": ..., "max_lag": 2}, or use PackedGRPOTrainer'
        raise ConfigError(f"gear.tables.{TABLE}", "must have prompts", None, remedy)


def _no_reward(completions: list[Any], **_: Any) -> list[float]:
    """Reward nothing: TRL requires a function, which only evaluation calls."""
    return [0.0] * len(completions)
