"""A curriculum for GRPO: prompts of which the policy answers some and fails some come more often.

    python examples/curriculum.py

teaches the additions of examples/grpo.py to the same warm policy twice, in one process: with
prompts in a shuffled order, and with prompts drawn by priority. The policy always solves a third of
the prompts. A group in which every response is right, or every one is wrong, has no advantage and
teaches nothing. So the priority of a prompt is p (1 - p) of its pass rate p, and a little more, so
that no prompt is forgotten: at first by the warm policy, then by each rollout batch that it is in.

The prompts have the pass rate of the warm policy as a column, and `prompts.where` leaves out those
that it never solved. Both runs train the same number of responses. The last line is the result as
JSON: the accuracy of new problems, and the share of groups with right and wrong responses.
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
from grpo import TEST_SEED, accuracy, log_probabilities, warm_start
from grpo_model import EOS, Problems, policy, sample
from torch import Tensor

from deepspeed_gear import Column, DatasetWriter, Lease, Replay, Schema

EASY = 0.99  # least pass rate of an easy problem: all of these are prompts
OTHERS = 400  # prompts that are not easy
LEAST = 0.02  # priority of a prompt that is always or never solved
SCHEMA = Schema(
    [Column("tokens", "uint8", (), "token"), Column("pass_rate", "float32", (), "other", "1")]
)
PROBLEMS = Problems()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", default="configs/curriculum.json", help="with a gear section")
    parser.add_argument("--seed", type=int, default=0, help="of weights, prompts and samples")
    parser.add_argument("--batches", type=int, default=60, help="rollout batches of each run")
    parser.add_argument("--pool", type=int, default=8000, help="problems to take prompts from")
    parser.add_argument("--warm-accuracy", type=float, default=0.5, help="ends the warm start")
    return parser.parse_args()


def answer(
    model: Any, prompts: Tensor, size: int, words: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Return responses to each prompt. [n, size, 4] tokens and logp, [n, size] rewards."""
    repeated = prompts.repeat_interleave(size, 0)
    tokens, logp = sample(model, repeated, words)
    rewards = PROBLEMS.rewards(repeated, tokens)
    shape = (len(prompts), size, -1)
    return tokens.view(shape), logp.view(shape), rewards.view(shape[:2])


def write_prompts(folder: Path, model: Any, size: int, pool: Tensor, seed: int) -> None:
    """Write prompts of a pool with the pass rate of the warm policy."""
    rates = answer(model, pool, size, torch.Generator().manual_seed(seed))[2].mean(1)
    is_easy = rates > EASY
    is_taken = is_easy | (~is_easy & ((~is_easy).cumsum(0) <= OTHERS))
    prompts, rates = pool[is_taken], rates[is_taken]
    with DatasetWriter(folder, SCHEMA, overwrite=True) as writer:
        for tokens, rate in zip(prompts.numpy(), rates.numpy(), strict=True):
            writer.add({"tokens": tokens.astype(np.uint8), "pass_rate": rate})


def generate(model: Any, leases: list[Lease], size: int, words: torch.Generator) -> None:
    """Commit the groups of leased prompts; the commit fills in which prompt each one answers."""
    prompts = torch.stack([torch.tensor(lease.prompt["tokens"]).long() for lease in leases])
    answers = zip(*answer(model, prompts, size, words), strict=True)
    for lease, prompt, (responses, logps, rewards) in zip(leases, prompts, answers, strict=True):
        group = []
        for response, logp, reward in zip(responses, logps, rewards, strict=True):
            is_end = response == EOS
            length = int(is_end.nonzero()[0]) + 1 if is_end.any() else len(response)
            tokens = torch.cat([prompt, response[:length]]).to(torch.uint8).numpy()
            one = {"tokens": tokens, "loss_mask": np.arange(len(tokens)) >= len(prompt)}
            one["logp"] = torch.cat([torch.zeros(len(prompt)), logp[:length]]).numpy()
            group.append({**one, "reward": np.float32(reward)})
        lease.commit(group)


def priority(rates: np.ndarray) -> np.ndarray:
    """Return the priority of prompts by their pass rates: where half is right, most is learned."""
    return np.asarray(rates * (1 - rates) + LEAST)


def train(gear: Mapping[str, Any], model: Any, batches: int) -> dict[str, float]:
    """Train rollout batches; return the accuracy and the share of groups that taught something."""
    groups = gear["batch"]["groups"]
    table = gear["tables"]["rollouts"]
    size = table["group"]["size"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    words = torch.Generator().manual_seed(gear["seed"])
    num_mixed = 0
    draws = table["prompts"]["sampler"] == "prioritized"
    with Replay(gear) as replay, replay.rollout_worker() as worker:
        if draws:
            known = np.asarray(worker.prompts.columns["pass_rate"])
            admitted = np.flatnonzero(replay.prompt_priorities())
            replay.set_prompt_priorities(admitted, priority(known[admitted]))
        for _ in range(batches):
            generate(model, worker.lease(groups), size, words)
            rollout = replay.rollout()
            prompts = np.asarray(rollout.values("prompt"))[::size]
            rates = np.asarray(rollout.values("reward")).reshape(groups, size).mean(1)
            num_mixed += int(((rates > 0) & (rates < 1)).sum())
            if draws:
                replay.set_prompt_priorities(prompts, priority(rates))
            rollout.advantages("grpo")
            for step in rollout:
                for micro in step:
                    ratio = torch.exp(log_probabilities(model, micro) - micro["logp"])
                    micro.sum(-ratio * micro["advantage"]).backward()
                optimizer.step()
                optimizer.zero_grad()
    mixed = num_mixed / (batches * groups)
    return {"accuracy": round(accuracy(model, PROBLEMS, TEST_SEED), 3), "mixed": round(mixed, 3)}


def main() -> None:
    args = arguments()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    gear = json.loads(Path(args.config).read_text())["gear"] | {"seed": args.seed}
    table = gear["tables"]["rollouts"]
    warm = policy()
    warm_start(warm, PROBLEMS, args.seed, args.warm_accuracy)
    data = Path(table["prompts"]["data"])
    pool = PROBLEMS.draw(args.pool, args.seed)
    write_prompts(data, warm, table["group"]["size"], pool, args.seed)
    result: dict[str, Any] = {"accuracy_before": round(accuracy(warm, PROBLEMS, TEST_SEED), 3)}
    for sampler in ("epoch", "prioritized"):
        table["prompts"]["sampler"] = sampler
        result[sampler] = train(gear, copy.deepcopy(warm), args.batches)
        print(f"{sampler}: {result[sampler]}", flush=True)
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
