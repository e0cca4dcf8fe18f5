"""Train with TRL's GRPOTrainer on two ranks with ZeRO 2: TRL generates and scores, gear packs and
trains.

    python examples/trl_grpo.py --steps 30

A tiny model with random weights learns to answer in vowels; the last line is the result as JSON. A
second call with more steps continues from the last checkpoint. `PackedGRPOTrainer` replaces TRL's
training step: responses of all ranks go into a table without padding, and are divided into packed
micro batches.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Iterator
from functools import partialmethod
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from accelerate import PartialState
from datasets import Dataset
from launched import is_rank, launch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from transformers.trainer_utils import get_last_checkpoint
from trl import GRPOConfig, GRPOTrainer

import deepspeed_gear
from deepspeed_gear import MicroBatch, TrainStep

RANKS = 2
LETTERS = "abcdefghijklmnopqrstuvwxyz"
VOWELS = set("aeiou")
NORMALIZE = {
    "dapo": "token",
    "grpo": "sequence",
}  # gear.loss.normalize by TRL's loss_type; and "dr_grpo"
COLUMNS = {  # the name of TRL's tensor, and the value where TRL has none
    "old_logp": ("old_per_token_logps", math.nan),
    "ref_logp": ("ref_per_token_logps", 0.0),
    "is_ratio": ("importance_sampling_ratio", 1.0),
}
METRICS = ("entropy", "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean", "kl")


class PackedGRPOTrainer(GRPOTrainer):
    """A GRPOTrainer whose training step is one optimizer step over packed micro batches.

    `gear` of the ds_config has `pack`, and the capacity of the table `rollouts`; the rest of the
    section follows from the arguments. Call `deepspeed_gear.enable()` after this trainer is made,
    before `train()`: the engines of reference and reward models, which are made first, get no
    replay.
    """

    def __init__(self, *given: Any, args: GRPOConfig, **options: Any) -> None:
        gear = args.hf_deepspeed_config.config["gear"]
        super().__init__(*given, args=args, **options)
        has_packed_form = {
            "loss_type": args.loss_type in (*NORMALIZE, "dr_grpo"),
            "top_entropy_quantile": args.top_entropy_quantile == 1,
            "off_policy_mask_threshold": args.off_policy_mask_threshold is None,
            "entropy_coef": not self._entropy_bonus_enabled,
            "router_aux_loss_coef": not self.aux_loss_enabled,
        }
        for name in (name for name, has in has_packed_form.items() if not has):
            raise ValueError(
                f"{name} = {getattr(args, name)} has no packed form: use GRPOTrainer's step"
            )
        columns: dict[str, Any] = {
            name: {"dtype": "float32", "allow_nan": True} for name in COLUMNS
        }
        columns["tokens"] = {"dtype": "int32", "role": "token"}
        columns["loss_mask"] = {"dtype": "bool", "role": "loss_mask"}
        columns |= {
            "score": {"dtype": "float32", "rows": "1"},
            "group": {"dtype": "int64", "rows": "1"},
        }
        table = gear["tables"]["rollouts"]
        table |= {"remove": "fifo", "max_times_sampled": 1, "schema": {"columns": columns}}
        table["group"] = {"column": "group", "size": self.num_generations}
        groups = args.generation_batch_size // self.num_generations
        steps = args.steps_per_generation
        normalize = NORMALIZE.get(args.loss_type, {"constant": self.max_completion_length})
        gear["sampler"] = {"kind": "fifo", "unit": "group"}
        gear["rollout"] = {"groups": groups, "minibatches": steps, "epochs": self.num_iterations}
        gear["loss"] = {"normalize": normalize, "count_masked": True}  # TRL counts masked responses
        self._steps: Iterator[TrainStep] = iter(())

    def training_step(
        self, model: Any, inputs: Any, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """Train the next step of the rollout batch, after generating one where it has ended."""
        begin = time.perf_counter()
        engine = self.deepspeed
        engine.train()
        step = next(self._steps, None)
        if step is None:
            if (
                not engine.gear.can_sample()
            ):  # False but for a run that was resumed inside a rollout batch
                self.add(self._generate_and_score_completions(inputs))
                self.accelerator.wait_for_everyone()  # the responses of all ranks are there
            rollout = engine.gear_rollout()
            rollout.set("advantage", rollout.values("score"))
            self._steps = iter(rollout)
            step = next(self._steps)
        total = 0.0
        sums = 0.0
        for micro in step:
            loss, metrics = self.packed_loss(engine, micro)
            part = micro.sum(loss)
            engine.backward(part)
            total += part.detach()
            sums += torch.stack(metrics).detach()[:, micro.loss_mask].sum(1)
        engine.step()
        sums = self.accelerator.reduce(sums, reduction="sum")
        means = (sums[1:] / sums[0].clamp(min=1)).tolist()  # over loss tokens
        means.append(time.perf_counter() - begin)
        for name, mean in zip((*METRICS[: len(means) - 1], "step_time"), means, strict=True):
            self._metrics["train"][name].append(mean)
        self._step += 1
        return total  # this rank's part of the mean over the batch

    def add(self, scored: dict[str, torch.Tensor]) -> None:
        """Add this rank's responses with their prompts to the table, without padding."""
        if "pixel_values" in scored:
            raise ValueError("PackedGRPOTrainer trains text; leave images out of the data set")
        scored = {name: values.cpu() for name, values in scored.items()}
        prompts = scored["prompt_mask"].bool()
        mask = scored["completion_mask"].bool()
        values = {
            "loss_mask": mask & scored.get("tool_mask", mask).bool()
        }  # of completions, with padding
        for name, (theirs, absent) in COLUMNS.items():
            values[name] = scored.get(theirs, torch.tensor(absent)).expand(mask.shape)
        columns = {
            name: torch.cat([torch.zeros_like(prompts), own], 1) for name, own in values.items()
        }
        columns["tokens"] = torch.cat([scored["prompt_ids"], scored["completion_ids"]], 1).int()
        is_there = torch.cat([prompts, mask], 1)
        rows = len(mask)
        first = (
            self.state.global_step * self.args.generation_batch_size
            + self.args.process_index * rows
        )
        for row, kept in enumerate(is_there):
            own = {name: column[row][kept].numpy() for name, column in columns.items()}
            group = np.int64((first + row) // self.num_generations)
            self.deepspeed.gear.add(
                {**own, "score": scored["advantages"][row].numpy(), "group": group}
            )

    def packed_loss(
        self, engine: Any, micro: MicroBatch
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return TRL's clipped loss, and ones with the METRICS, of each place. [1, N] each."""
        labels = micro.targets.masked_fill(~micro.loss_mask, -100)
        output = engine(**micro.model_inputs(engine), shift_labels=labels, fused_lm_head=True)
        logp = output.log_probs
        old = micro["old_logp"]
        log_ratio = logp - torch.where(
            old.isnan(), logp.detach(), old
        )  # nan: the policy has not changed
        if self.importance_sampling_level == "sequence":
            log_ratio = micro.per_sequence(log_ratio, "mean").view_as(logp)
        ratio = log_ratio.exp()
        advantage = micro["advantage"]
        clipped = ratio.clamp(1 - self.epsilon_low, 1 + self.epsilon_high)
        bounded = ratio if self.args.delta is None else ratio.clamp(max=self.args.delta)
        loss = -torch.minimum(bounded * advantage, clipped * advantage) * micro["is_ratio"]
        low = ((ratio < 1 - self.epsilon_low) & (advantage < 0)).float()
        high = ((ratio > 1 + self.epsilon_high) & (advantage > 0)).float()
        metrics = [torch.ones_like(loss), output.entropy, low, high, low + high]
        if self.beta != 0:
            difference = micro["ref_logp"] - logp
            kl = difference.exp() - difference - 1
            metrics.append(kl * ratio if self.args.use_bias_correction_kl else kl)
            loss = loss + self.beta * metrics[-1]
        return loss, metrics


def use_gloo() -> None:
    """Give accelerate a backend for DeepSpeed's ranks on CPUs, where it has none."""
    PartialState.__init__ = partialmethod(PartialState.__init__, backend="gloo")


def save_model(folder: Path) -> None:
    """Save a small model with random weights and its tokenizer of letters."""
    words = {word: number for number, word in enumerate(["<pad>", "<eos>", *LETTERS])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    special = {"pad_token": "<pad>", "eos_token": "<eos>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    known = {
        "vocab_size": len(words),
        "num_key_value_heads": 2,
        "pad_token_id": 0,
        "eos_token_id": 1,
    }
    torch.manual_seed(0)
    Qwen2ForCausalLM(Qwen2Config(**sizes, **known)).save_pretrained(folder)


def vowels(completions: list[str], **_: Any) -> list[float]:
    """Return the share of vowels in each completion."""
    return [sum(letter in VOWELS for letter in text) / max(len(text), 1) for text in completions]


def prompts(count: int) -> Dataset:
    """Return prompts of 2 to 40 letters."""
    draws = random.Random(0)
    texts = ("".join(draws.choices(LETTERS, k=draws.randint(2, 40))) for _ in range(count))
    return Dataset.from_dict({"prompt": list(texts)})


def ds_config(tokens: int) -> dict[str, Any]:
    """Return a ds_config for packs of so many tokens."""
    table = {"capacity_trajectories": 1024, "capacity_steps": 131072, "max_length": tokens}
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": "auto",
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 2},
        "gear": {
            "tables": {"rollouts": table},
            "pack": {"tokens": tokens, "pad": {"multiple": 64}},
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=30, help="optimizer steps")
    parser.add_argument(
        "--out", type=Path, default=Path("build/trl_grpo"), help="folder of the checkpoints"
    )
    parser.add_argument("--local_rank", type=int, help="given by the launcher")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        use_gloo()
    sizes = {"per_device_train_batch_size": 32, "num_generations": 8, "max_completion_length": 48}
    steps = {"max_steps": given.steps, "save_steps": 10, "logging_steps": 1}
    options = {"learning_rate": 3e-3, "bf16": False, "report_to": "none"}
    args = GRPOConfig(str(given.out), deepspeed=ds_config(512), **sizes, **steps, **options)
    model = given.out / "model"
    if args.process_index == 0:
        save_model(model)
    dist.barrier()
    trainer = PackedGRPOTrainer(str(model), vowels, args=args, train_dataset=prompts(1024))
    deepspeed_gear.enable()
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(given.out)))
    rewards = [
        round(entry["reward"], 3) for entry in trainer.state.log_history if "reward" in entry
    ]
    if args.process_index == 0:
        print(
            json.dumps(
                {"reward_first": rewards[0], "reward_last": rewards[-1], "steps": given.steps}
            )
        )


if __name__ == "__main__":
    sys.exit(main() if is_rank() else launch(__file__, RANKS))
