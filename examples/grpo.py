"""Teach a tiny language model addition with GRPO: rollouts in the training processes, packed
batches.

    python examples/grpo.py --seed 0

starts two ranks; so does `deepspeed --num_gpus 2 examples/grpo.py`. The last line is the result as
JSON.

A prompt is "34+58=", a response the digits of the sum from the last to the first, "290." A
supervised warm start brings the model to about 30% right answers. Then, in every iteration, each
rank samples 8 responses to each of its prompts and adds them to the table, until a rollout batch of
groups is there that have both right and wrong responses: the others teach nothing, and leave the
table (`where` in the config). Then `engine.gear_rollout()` selects the groups once, for both ranks,
and packs them. Groups that are left over are trained in the next iteration. Responses are stored
with the `logp` of the policy that sampled them; what has changed since is corrected by a truncated
importance weight.

Sources: Shao et al., "DeepSeekMath", 2024 (GRPO); Yu et al., "DAPO", 2025 (the upper clip, the mean
over tokens, the choice of groups); Yao et al., "Your Efficient RL Framework Secretly Brings You
Off-Policy RL Training", 2025 (truncated weights).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import quiet_start
from grpo_model import EOS, Problems, policy, sample
from launched import is_rank, launch
from torch import Tensor, nn

import deepspeed_gear
from deepspeed_gear import MicroBatch

RANKS = 2
# of a round, all ranks together; of each prompt
PROMPTS = 64
RESPONSES = 8
CLIP_LOW = 0.2
CLIP_HIGH = 0.28
MOST_WEIGHT = 2.0  # of the importance of a token that another policy has sampled
WARM_EVERY = 5
WARM_BATCH = 256
GOAL = 0.85
TEST_SEED = 7
TESTS = 1000


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--config", default="configs/grpo.json", help="a ds_config with a gear section"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of weights, prompts, samples and replay"
    )
    parser.add_argument("--iterations", type=int, default=500, help="rollout batches at most")
    parser.add_argument("--evaluate-every", type=int, default=10, metavar="ITERATIONS")
    parser.add_argument(
        "--warm-accuracy", type=float, default=0.3, help="where the warm start ends"
    )
    parser.add_argument("--goal", type=float, default=GOAL, help="accuracy that ends it")
    parser.add_argument(
        "--latency", type=float, default=0.0, help="seconds added to a batch of responses"
    )
    parser.add_argument("--out", type=Path, help="folder of the curve and the result")
    parser.add_argument("--local_rank", type=int, default=-1, help="given by the launcher")
    return parser.parse_args()


def accuracy(
    model: nn.Module, problems: Problems, seed: int, count: int = TESTS, greedy: bool = False
) -> float:
    """Return the part of responses to new prompts that are right: of sampled or of the most likely
    ones.
    """
    prompts = problems.draw(count, seed)
    words = torch.Generator().manual_seed(seed)
    responses, _ = sample(model, prompts, None if greedy else words)
    return float(problems.rewards(prompts, responses).mean())


def warm_start(model: nn.Module, problems: Problems, seed: int, wanted: float) -> None:
    """Train on right answers, the same on every rank, until an accuracy is reached."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(10_000):
        tokens, mask = problems.solved(problems.draw(WARM_BATCH, seed * 10_000 + step))
        logits = model(tokens[:, :-1], use_cache=False).logits
        losses = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
        (losses * mask[:, 1:].flatten()).sum().div(mask[:, 1:].sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
        is_due = step % WARM_EVERY == WARM_EVERY - 1
        if is_due and accuracy(model, problems, seed + 1, count=500) >= wanted:
            return
    raise RuntimeError("the warm start has not reached its accuracy")


def generate(
    engine: Any, problems: Problems, rounds: Iterator[int], seed: int, latency_s: float
) -> float:
    """Add responses until a rollout batch is there; return the mean reward of the last round."""
    while True:
        reward = add_rollouts(engine, problems, next(rounds), seed, latency_s)
        dist.barrier()  # the answer is for the responses of all ranks
        if engine.gear.can_sample():
            return reward


def add_rollouts(
    engine: Any, problems: Problems, round_number: int, seed: int, latency_s: float
) -> float:
    """Sample responses to this rank's prompts and add them to the table; return their
    mean reward.
    """
    replay = engine.gear
    rank = dist.get_rank()
    world = dist.get_world_size()
    first = round_number * PROMPTS
    numbers = np.arange(first, first + PROMPTS)[rank::world].repeat(RESPONSES)
    prompts = problems.draw(PROMPTS, seed * 100_000 + round_number)[rank::world]
    prompts = prompts.repeat_interleave(RESPONSES, 0)
    words = torch.Generator().manual_seed(seed * 1_000_000 + round_number * world + rank)
    responses, logp = sample(engine.module, prompts, words)
    time.sleep(latency_s)
    rewards = problems.rewards(prompts, responses)
    for number, prompt, response, own, reward in zip(
        numbers, prompts, responses, logp, rewards, strict=True
    ):
        length = (
            int((response == EOS).nonzero()[0]) + 1 if (response == EOS).any() else len(response)
        )
        tokens = torch.cat([prompt, response[:length]])
        replay.add(
            {
                "tokens": tokens.to(torch.uint8).numpy(),
                "loss_mask": np.arange(len(tokens)) >= len(prompt),
                "logp": torch.cat([torch.zeros(len(prompt)), own[:length]]).numpy(),
                "reward": np.float32(reward),
                "prompt_id": np.int64(number),
            }
        )
    return float(rewards.mean())


def log_probabilities(engine: Any, micro: MicroBatch) -> Tensor:
    """Return the log-probability of the token that each place predicts. [1, N]."""
    logits = engine(**micro.model_inputs(engine)).logits
    return -F.cross_entropy(logits[0], micro.targets[0], reduction="none")[None]


def policy_loss(logp: Tensor, micro: MicroBatch) -> tuple[Tensor, Tensor]:
    """Return the clipped loss of each place, and where it was clipped. [1, N] both."""
    ratio = torch.exp(logp - micro["old_logp"])
    advantage = micro["advantage"]
    clipped = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
    gain = torch.minimum(ratio * advantage, clipped * advantage)
    sampled = torch.exp(micro["old_logp"] - micro["logp"]).clamp(max=MOST_WEIGHT)
    return -sampled * gain, (ratio * advantage > clipped * advantage).float()


def train(engine: Any, **more: Callable[[MicroBatch], Tensor]) -> dict[str, float]:
    """Train one rollout batch; return its number of tokens, and means over those of its last step.

    Args:
        more: Further means by their names: what each place has. [1, N].
    """
    rollout = engine.gear_rollout()
    with torch.no_grad():
        for micro in rollout.forward("old_logp", tokens=2048):
            micro.fill(old_logp=log_probabilities(engine, micro))
    rollout.advantages("grpo")
    for step in rollout:
        sums = defaultdict(list)
        for micro in step:
            loss, clipped = policy_loss(log_probabilities(engine, micro), micro)
            values = {"loss": loss, "clipped": clipped} | {
                name: of(micro) for name, of in more.items()
            }
            for name, value in values.items():
                sums[name].append(micro.sum(value))
            engine.backward(sums["loss"][-1])
        engine.step()
    return {"tokens": rollout.num_tokens, **step.mean(**sums)}


class Speed:
    """Trained tokens per second from the end of the first rollout batch on: before it, processes
    start.
    """

    def __init__(self) -> None:
        self._begin = 0.0
        self._end = 0.0
        self._tokens = 0.0

    def add(self, tokens: float) -> None:
        """Count a rollout batch, at its end."""
        self._end = time.perf_counter()
        if self._begin:
            self._tokens += tokens
        else:
            self._begin = self._end

    @property
    def seconds(self) -> float:
        return self._end - self._begin

    @property
    def tokens_per_s(self) -> float:
        return self._tokens / max(self.seconds, 1e-9)

    def report(self) -> dict[str, float]:
        return {"tokens_per_s": round(self.tokens_per_s), "train_s": round(self.seconds, 1)}


def main() -> None:
    args = arguments()
    config = json.loads(Path(args.config).read_text())
    config["gear"]["seed"] = args.seed
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    begin = time.perf_counter()
    problems = Problems()
    model = policy()
    warm_start(model, problems, args.seed, args.warm_accuracy)
    warm_s = time.perf_counter() - begin
    with quiet_start():
        engine, *_ = deepspeed_gear.initialize(
            model=model, model_parameters=model.parameters(), config=config
        )
    before = accuracy(engine.module, problems, TEST_SEED)
    curve = [(0, time.perf_counter() - begin, before)]
    is_first = dist.get_rank() == 0
    rounds = count(1)
    speed = Speed()
    for iteration in range(1, args.iterations + 1):
        reward = generate(engine, problems, rounds, args.seed, args.latency)
        means = train(engine)
        speed.add(means["tokens"])
        if iteration % args.evaluate_every == 0 or iteration == args.iterations:
            curve.append(
                (
                    iteration,
                    time.perf_counter() - begin,
                    accuracy(engine.module, problems, TEST_SEED),
                )
            )
            if is_first:
                text = f"iteration {iteration}: accuracy {curve[-1][2]:.3f}, reward {reward:.3f}"
                print(
                    f"{text}, clipped {means['clipped']:.3f}, {curve[-1][1]:.0f} s", file=sys.stderr
                )
            if curve[-1][2] >= args.goal:
                break
    greedy = accuracy(engine.module, problems, TEST_SEED, greedy=True)
    if is_first:
        more = {"greedy_after": round(greedy, 3), **speed.report()}
        report(args, engine, curve, warm_s, more)
    engine.destroy()
    dist.destroy_process_group()


def report(
    args: argparse.Namespace,
    engine: Any,
    curve: list[tuple[int, float, float]],
    warm_s: float,
    more: dict[str, float],
) -> None:
    """Print the result as JSON, and save it."""
    metrics = engine.gear.take_metrics()
    result = {
        "accuracy_before": round(curve[0][2], 3),
        "accuracy_after": round(curve[-1][2], 3),
        "iterations": curve[-1][0],
        "seconds": round(curve[-1][1], 1),
        "warm_start_s": round(warm_s, 1),
        "seed": args.seed,
        "ranks": dist.get_world_size(),
        "fill": round(metrics["step_fill"], 3),
        **more,
    }
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "result.json").write_text(json.dumps({**result, "curve": curve}, indent=1))
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    sys.exit(main() if is_rank() else launch(__file__, RANKS))
