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
import random
import sys
from functools import partialmethod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState
from datasets import Dataset
from launched import is_rank, launch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from transformers.trainer_utils import get_last_checkpoint
from trl import GRPOConfig

from deepspeed_gear.integrations.trl import PackedGRPOTrainer

RANKS = 2
LETTERS = "abcdefghijklmnopqrstuvwxyz"
VOWELS = set("aeiou")


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
    has_gpu = torch.cuda.is_available()
    if not has_gpu:
        use_gloo()
    sizes = {"per_device_train_batch_size": 32, "num_generations": 8, "max_completion_length": 48}
    steps = {"max_steps": given.steps, "save_steps": 10, "logging_steps": 1}
    options = {"learning_rate": 3e-3, "bf16": has_gpu, "report_to": "none"}
    args = GRPOConfig(str(given.out), deepspeed=ds_config(512), **sizes, **steps, **options)
    model = given.out / "model"
    if args.process_index == 0:
        save_model(model)
    dist.barrier()
    trainer = PackedGRPOTrainer(str(model), vowels, args, train_dataset=prompts(1024))
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
