"""Losses of packs beside TRL's own, in one process: the same log-probabilities give the same loss,
gradient and metrics.
"""

import importlib.util
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gear_support import prefix

from deepspeed_gear import Replay
from deepspeed_gear.integrations.grpo_losses import NORMALIZE, GRPOLoss

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("trl"), reason="trl is not installed")
PROMPT = 3  # tokens
COMPLETIONS = [5, 1, 7, 4, 0, 6, 2, 7]  # tokens of each response; 0: truncated, and masked
MOST = 8  # max_completion_length
CASES: list[dict[str, Any]] = [
    *({"loss_type": name} for name in NORMALIZE),
    *({"loss_type": name, "importance_sampling_level": "sequence"} for name in NORMALIZE),
    *({"loss_type": name, "beta": 0.3} for name in NORMALIZE),
    {"loss_type": "dapo", "epsilon_high": 0.05, "epsilon": 0.01},
    {"loss_type": "cispo", "epsilon_high": 1.01},
    {"loss_type": "dapo", "delta": 1.1},
    {"loss_type": "grpo", "beta": 0.3, "use_bias_correction_kl": False},
    {"loss_type": "dapo", "off_policy_mask_threshold": 0.01},
    {"loss_type": "grpo", "off_policy_mask_threshold": 0.01, "no_old": True},
    {"loss_type": "dapo", "no_old": True, "beta": 0.1},
    {"loss_type": "dapo", "is_ratio": True},
    {"loss_type": "vespo", "is_ratio": True},
    {"loss_type": "grpo", "is_ratio": True, "off_policy_mask_threshold": 0.02, "beta": 0.1},
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_a_packed_loss_is_that_of_trl(case: dict[str, Any]) -> None:
    from trl import GRPOConfig

    options = {name: value for name, value in case.items() if name not in ("no_old", "is_ratio")}
    defaults = {name: field.default for name, field in GRPOConfig.__dataclass_fields__.items()}
    args = SimpleNamespace(**defaults | {"steps_per_generation": 1} | options)
    batch = scored(case)
    loss, gradient, metrics = padded_loss(args, batch)
    packed, packed_gradient, packed_metrics = packed_loss(args, batch)
    assert packed == pytest.approx(loss, rel=1e-5, abs=1e-7)
    assert (gradient != 0).any()
    torch.testing.assert_close(packed_gradient, gradient, rtol=1e-5, atol=1e-7)
    if args.importance_sampling_level == "token" and args.loss_type != "vespo":
        # Of the others TRL logs means over responses, not over tokens.
        for name in metrics.keys() & packed_metrics.keys():
            assert packed_metrics[name] == pytest.approx(metrics[name], rel=1e-5, abs=1e-7), name
    own = {*packed_metrics} - {"vespo/phi_seq_mean"}
    assert own <= metrics.keys()


def scored(case: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return a scored generation batch, with the log-probabilities of the current policy."""
    draws = torch.Generator().manual_seed(0)
    shape = (len(COMPLETIONS), MOST)

    def near(logp: torch.Tensor) -> torch.Tensor:
        return logp + 0.2 * torch.randn(shape, generator=draws)

    logp = -3 * torch.rand(shape, generator=draws)
    mask = torch.arange(MOST) < torch.tensor(COMPLETIONS)[:, None]
    tools = torch.rand(shape, generator=draws) < 0.8
    batch = {
        "logp": logp,
        "prompt_ids": torch.ones(len(COMPLETIONS), PROMPT, dtype=torch.int64),
        "prompt_mask": torch.ones(len(COMPLETIONS), PROMPT, dtype=torch.int64),
        "completion_ids": torch.ones(shape, dtype=torch.int64),
        "completion_mask": mask.long(),
        "tool_mask": tools.long(),
        "advantages": torch.randn(len(COMPLETIONS), generator=draws),
        "old_per_token_logps": near(logp),
        "ref_per_token_logps": near(logp),
        "num_items_in_batch": (mask & tools).sum(),
    }
    if "no_old" in case:
        del batch["old_per_token_logps"]
    if "is_ratio" in case:
        batch["importance_sampling_ratio"] = near(torch.zeros(shape)).exp().where(mask & tools, 1.0)
        batch["sampling_per_token_logps"] = near(logp)
        batch["sampling_per_token_logps"][0, 1] = torch.nan
    return batch


def padded_loss(
    args: Any, batch: dict[str, torch.Tensor]
) -> tuple[float, torch.Tensor, dict[str, float]]:
    """Return TRL's loss, its gradient by the log-probabilities, and its metrics."""
    from trl import GRPOTrainer

    logp = batch["logp"].clone().requires_grad_()
    is_corrected = "importance_sampling_ratio" in batch

    class Padded(GRPOTrainer):  # type: ignore[misc]
        """A trainer of which only the loss is used."""

        def __init__(self) -> None:
            vars(self).update(vars(args))
            self.args = args
            self.epsilon_low = args.epsilon
            self.epsilon_high = args.epsilon if args.epsilon_high is None else args.epsilon_high
            self.max_completion_length = MOST
            self.use_vllm = is_corrected
            self.vllm_importance_sampling_correction = is_corrected
            self.aux_loss_enabled = False
            self._entropy_bonus_enabled = False
            self.model = SimpleNamespace(training=True)
            self.current_gradient_accumulation_steps = 1
            self._metrics = {"train": defaultdict(list)}
            self.accelerator = SimpleNamespace(
                num_processes=1, reduce=lambda x, reduction: x, gather=lambda x: x
            )

        def _get_per_token_logps_and_entropies(self, *_: Any, **__: Any) -> Any:
            return logp, torch.zeros_like(logp), None

    trainer = Padded()
    loss = trainer._compute_loss(trainer.model, batch)
    loss.backward()
    metrics = {name: values[0] for name, values in trainer._metrics["train"].items()}
    return loss.item(), logp.grad, metrics


def packed_loss(
    args: Any, batch: dict[str, torch.Tensor]
) -> tuple[float, torch.Tensor, dict[str, float]]:
    """Return the same of packs."""
    from deepspeed_gear.integrations.trl_internals import scored_columns
    from deepspeed_gear.integrations.trl_options import scored_columns as schema_columns

    loss_of = GRPOLoss.of(args)
    numbers = {"logp": {"dtype": "float32"}, **schema_columns(loss_of)}
    table = {
        "capacity_steps": 1000,
        "capacity_trajectories": 20,
        "max_length": 20,
        "schema": {"columns": numbers},
    }
    section = {
        "tables": {"main": table},
        "pack": {"tokens": 32, "pad": {"multiple": 1}},
        "sampler": {"kind": "fifo"},
        "rollout": {"trajectories": len(COMPLETIONS)},
        "loss": {"normalize": loss_of.normalize(MOST), "count_masked": True},
        "shared_memory": {"prefix": prefix()},
    }
    scored = {name: value for name, value in batch.items() if name != "logp"}
    with Replay(section) as replay:
        for row, response in enumerate(scored_columns(scored, loss_of.columns)):
            values = {name: value.numpy() for name, value in response.items()}
            own = batch["logp"][row][batch["completion_mask"][row].bool()].numpy()
            values["logp"] = np.append(np.zeros(PROMPT, np.float32), own)
            replay.add(values | {"group": np.int64(0)})
        rollout = replay.rollout()
        rollout.set("advantage", rollout.values("score"))
        total = 0.0
        gradient = torch.zeros_like(batch["logp"])
        sums: dict[str, float] = defaultdict(float)
        for micro in rollout.step(0):
            logp = micro["logp"].clone().requires_grad_()
            values, metrics = loss_of.at_places(micro, logp)
            part = micro.sum(values)
            part.backward()
            total += part.item()
            place = torch.arange(logp.numel())
            for index in range(micro.num_trajectories):
                own_places = place[micro.sequence[0] == index]
                completion = logp.grad[0, own_places][PROMPT - 1 : -1]
                gradient[int(micro.index[index]), : len(completion)] = completion
            for name, value in metrics.items():
                sums[name] += value[micro.loss_mask].sum().item()
    count = max(int(batch["num_items_in_batch"]), 1)
    return total, gradient, {name: value / count for name, value in sums.items()}
