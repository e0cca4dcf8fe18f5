"""Supervised fine-tuning and GRPO in one batch: demonstrations beside groups of responses.

    python examples/sft_and_grpo.py

teaches additions to the same small policy three times, in one process: from a thousand
demonstrations alone, by GRPO alone, and by both. A policy that has learned nothing never answers
right, so GRPO alone has nothing to learn from; demonstrations alone are too few for the others.

Every batch is a mixture of two tables. One has groups of responses, with log-probabilities and
rewards. The other is a data set of demonstrations, which has neither: its field `logp` is absent,
its advantage is 1, and the loss of both is one line. The loss is (1 - mu) times the mean over the
responses plus mu times the mean over the demonstrations (CHORD, arXiv:2508.11408). The last line is
the result as JSON: the accuracy of new problems after each run.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from grpo import TEST_SEED, accuracy, log_probabilities
from grpo_model import EOS, Problems, policy, sample
from torch import Tensor

from deepspeed_gear import Column, DatasetWriter, MicroBatch, Replay, Schema

DEMONSTRATIONS = 1  # index of their table in `sampler.shares`
SCHEMA = Schema(
    [Column("tokens", "uint8", (), "token"), Column("loss_mask", "bool", (), "loss_mask")]
)
PROBLEMS = Problems()
#: Weight of the demonstrations in each run.
RUNS = {"demonstrations": 1.0, "grpo": 0.0, "both": 0.5}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", default="configs/sft_and_grpo.json", help="with a gear section")
    parser.add_argument("--seed", type=int, default=0, help="of weights, problems and samples")
    parser.add_argument("--batches", type=int, default=400, help="batches of each run")
    parser.add_argument("--demonstrations", type=int, default=1000, help="problems with answers")
    return parser.parse_args()


def write_demonstrations(folder: Path, count: int, seed: int) -> None:
    """Write solved problems as a data set."""
    tokens, mask = PROBLEMS.solved(PROBLEMS.draw(count, seed))
    with DatasetWriter(folder, SCHEMA, overwrite=True) as writer:
        for row, counts in zip(tokens.numpy(), mask.numpy(), strict=True):
            length = int(counts.nonzero()[0][-1]) + 1
            writer.add({"tokens": row[:length].astype(np.uint8), "loss_mask": counts[:length] > 0})


def add_responses(
    replay: Replay, model: Any, groups: int, size: int, first: int, words: torch.Generator
) -> None:
    """Add groups of responses to new problems; `first` is the number of the first group."""
    prompts = PROBLEMS.draw(groups, first + 1).repeat_interleave(size, 0)
    responses, logps = sample(model, prompts, words)
    rewards = PROBLEMS.rewards(prompts, responses)
    rows = zip(prompts, responses, logps, rewards, strict=True)
    for number, (prompt, response, logp, reward) in enumerate(rows):
        is_end = response == EOS
        length = int(is_end.nonzero()[0]) + 1 if is_end.any() else len(response)
        tokens = torch.cat([prompt, response[:length]]).to(torch.uint8).numpy()
        one = {"tokens": tokens, "loss_mask": np.arange(len(tokens)) >= len(prompt)}
        one["logp"] = torch.cat([torch.zeros(len(prompt)), logp[:length]]).numpy()
        one |= {"reward": np.float32(reward), "group": np.int64(first + number // size)}
        replay.add(one, table="rollouts")


def loss_of(model: Any, micro: MicroBatch, mu: float) -> Tensor:
    """Return the loss of each place. [1, N].

    Demonstrations have no generator to compare with: their ratio is 1 and has the gradient of their
    log-probability. So with the advantage 1 their loss is that of supervised fine-tuning.
    """
    logp = log_probabilities(model, micro)
    is_shown = micro.per_place(micro.table) == DEMONSTRATIONS
    behaviour = torch.where(is_shown, logp.detach(), micro["logp"])
    weight = torch.where(is_shown, mu, 1 - mu)
    return -weight * torch.exp(logp - behaviour) * micro["advantage"]


def train(gear: Mapping[str, Any], model: Any, batches: int, mu: float) -> float:
    """Train batches; return the accuracy."""
    groups = round(gear["sampler"]["shares"]["rollouts"] * gear["batch"]["groups"])
    size = gear["tables"]["rollouts"]["group"]["size"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    words = torch.Generator().manual_seed(gear["seed"])
    with Replay(gear) as replay:
        for number in range(batches):
            add_responses(replay, model, groups, size, number * groups, words)
            rollout = replay.rollout()
            rollout.advantages("grpo", absent=1.0)
            for step in rollout:
                for micro in step:
                    micro.sum(loss_of(model, micro, mu)).backward()
                optimizer.step()
                optimizer.zero_grad()
    return round(accuracy(model, PROBLEMS, TEST_SEED), 3)


def main() -> None:
    args = arguments()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    gear = json.loads(Path(args.config).read_text())["gear"] | {"seed": args.seed}
    folder = Path(gear["tables"]["demonstrations"]["data"])
    write_demonstrations(folder, args.demonstrations, args.seed)
    first = policy()
    result: dict[str, Any] = {"before": round(accuracy(first, PROBLEMS, TEST_SEED), 3)}
    for name, mu in RUNS.items():
        result[name] = train(gear, copy.deepcopy(first), args.batches, mu)
        print(f"{name}: {result[name]}", flush=True)
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
