"""Offline training: progress, evaluations in Hopper, saves, resume, best weights, figure, result.

It saves after every evaluation, keeps the weights of the best one, and continues from the newest
save with --resume. Rank 0 writes progress and a summary to stderr; its last line of stdout is the
result as JSON. "sample_share" is the part of the training loop's time, without evaluations, that
the host spends in `gear_sample()`; "sample_us" is the mean time of a call.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import quiet_start
from deepspeed.accelerator import get_accelerator
from evaluate import MAX_STEPS
from plot import plot_curves
from torch import Tensor, nn

import deepspeed_gear
from deepspeed_gear import Batch

EPISODES = 5
FIRST_SEED = 1000
# steps
LOSS_EVERY = 50
PRINT_EVERY = 250
BEST = "best"  # tag of the checkpoint with the weights of the best evaluation

Loss = Callable[[Batch], Tensor]
# Model and seeds; return and number of steps of each episode.
Play = Callable[[nn.Module, list[int]], list[tuple[float, int]]]


def parser(description: str | None, name: str) -> argparse.ArgumentParser:
    """Return a parser of what all runs take; `name` is that of the config and of the folder of
    results.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    config = f"configs/{name}.json"
    out = Path("runs") / name
    parser.add_argument("--config", default=config, help="a ds_config with a gear section")
    parser.add_argument("--data", help="data set (default: the config's)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and of replay")
    parser.add_argument("--steps", type=int, help="optimizer steps (default: the schedule's)")
    parser.add_argument("--evaluate-every", type=int, default=1000, metavar="STEPS")
    parser.add_argument("--out", type=Path, default=out, help="folder of curves and results")
    parser.add_argument(
        "--resume", action="store_true", help="continue from the newest save in --out"
    )
    parser.add_argument("--local_rank", type=int, default=-1, help="given by the launcher")
    return parser


@dataclass
class Record:
    """What a run has reached, which its checkpoints carry.

    Args:
        loss: Mean loss by step.
        returns: Mean return of each evaluation by step, the first before training.
        lengths: Mean number of steps of the episodes of each evaluation.
        seconds: Of training, evaluations included.
    """

    loss: list[tuple[int, float]] = field(default_factory=list)
    returns: list[tuple[int, float]] = field(default_factory=list)
    lengths: list[float] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def best(self) -> tuple[int, float]:
        """Step and return of the best evaluation after the first one."""
        return max(self.returns[1:], key=lambda one: one[1])


class OfflineRun:
    """Trains a model on any number of ranks, and evaluates an average of its weights over steps.

    Args:
        model: Of the engine.
        config: A ds_config with a gear section.
        args: Of `parser`.
        steps: Optimizer steps, with those before a resume.
        average: The part of itself that the average keeps in a step.
        goal: Return that the model is asked for; None: it is not asked for one.
    """

    def __init__(
        self,
        model: nn.Module,
        config: dict[str, Any],
        args: argparse.Namespace,
        steps: int,
        average: float = 0.998,
        goal: float | None = None,
    ) -> None:
        self.average = copy.deepcopy(model)
        self.kept = average
        with quiet_start():
            self.engine, *_ = deepspeed_gear.initialize(
                model=model, model_parameters=model.parameters(), config=config
            )
        self.average.to(self.engine.device)
        self.args = args
        self.steps = steps
        self.goal = goal
        self.record = Record()
        self.out = args.out.resolve()
        self.folder = self.out / "checkpoint"
        self.times = dict[str, float]()

    def evaluate(self, play: Play) -> tuple[float, float]:
        """Return mean return and mean number of steps of episodes that the ranks divide, on every
        rank.

        Episodes run on the host, alike on any machine.
        """
        seeds = list(range(FIRST_SEED, FIRST_SEED + EPISODES))[
            dist.get_rank() :: dist.get_world_size()
        ]
        mine = play(copy.deepcopy(self.average).cpu(), seeds) if seeds else []
        sums = [sum(values) for values in zip((0.0, 0), *mine, strict=True)]
        total = torch.tensor(sums, dtype=torch.float64, device=self.engine.device)
        dist.all_reduce(total)
        mean_return, mean_steps = (total / EPISODES).tolist()
        return mean_return, mean_steps

    def train(self, loss_of: Loss, play: Play) -> None:
        """Load the newest save if asked to, train up to the number of steps, evaluate and save."""
        engine = self.engine
        record = self.record
        if self.args.resume and (self.folder / "latest").exists():
            _, state = engine.load_checkpoint(str(self.folder))
            self.average.load_state_dict(state["average"])
            record = self.record = Record(**state["record"])
            log_line(f"continuing after step {engine.global_steps}")
        else:
            self._evaluate_and_save(play)
        engine.gear.progress()  # the first period begins here
        recent = []
        sampling_s = 0.0
        evaluating_s = 0.0
        begin_s = now()
        first = engine.global_steps
        before_s = record.seconds
        for step in range(first + 1, self.steps + 1):
            asked_s = time.perf_counter()
            batch = engine.gear_sample()
            sampling_s += time.perf_counter() - asked_s
            loss = loss_of(batch)
            engine.backward(loss)
            engine.step()
            towards = 1 - min(self.kept, step / (step + 10))  # faster at the beginning
            update_average(self.average.parameters(), engine.module.parameters(), towards)
            recent.append(loss.detach())
            if step % LOSS_EVERY == 0 or step == self.steps:
                record.loss.append((step, float(torch.stack(recent).mean())))
                recent.clear()
            if step % PRINT_EVERY == 0:
                known = f"step {step} of {self.steps}: loss {record.loss[-1][1]:.4f}"
                log_line(f"{known}; {engine.gear.progress()}")
            if step % self.args.evaluate_every == 0 or step == self.steps:
                trained_s = now()
                record.seconds = before_s + trained_s - begin_s
                self._evaluate_and_save(play)
                engine.gear.progress()  # the next period begins after the evaluation
                evaluating_s += now() - trained_s
        loop_s = now() - begin_s - evaluating_s
        count = max(1, self.steps - first)
        share = sampling_s / loop_s
        call_us = sampling_s / count * 1e6
        self.times = {"sample_share": round(share, 5), "sample_us": round(call_us, 2)}

    def _evaluate_and_save(self, play: Play) -> None:
        """Evaluate the average of the weights and record it; save after training has begun."""
        step = self.engine.global_steps
        record = self.record
        value, length = self.evaluate(play)
        record.returns.append((step, value))
        record.lengths.append(length)
        place = f"step {step} of {self.steps}" if step else "step 0"
        log_line(f"{place}: return {value:.0f}")
        if step:
            state = {"average": self.average.state_dict(), "record": asdict(record)}
            self.engine.save_checkpoint(str(self.folder), f"global_step{step}", state)
            if record.best[0] == step:
                self.engine.save_checkpoint(str(self.folder), BEST, state, save_latest=False)

    def finish(self, loss_name: str, **known: Any) -> None:
        """Draw the curves, write and print the result with what else is known, and destroy the
        engine.
        """
        record = self.record
        (best_step, best) = record.best
        (last_step, after) = record.returns[-1]
        data = self.engine.gear.datasets["main"].statistics
        if dist.get_rank() == 0:
            result = {
                "return_before": round(record.returns[0][1], 1),
                "return_best": round(best, 1),
                "best_step": best_step,
                "return_after": round(after, 1),
                "data_return": round(float(data["return"].mean), 1) if "return" in data else None,
                "episode_steps": [round(record.lengths[0], 1), round(record.lengths[-1], 1)],
                "seconds_train": round(record.seconds, 1),
                **self.times,
                "device": str(self.engine.device),
                "ranks": dist.get_world_size(),
                **known,
                "steps": last_step,
                "seed": self.args.seed,
                "checkpoint": f"global_step{last_step}",
            }
            curves = {"loss": record.loss, "return": record.returns}
            plot_curves({"run": curves}, self.goal, loss_name, self.out / "curves.png")
            named = {**result, "curves": curves, "goal": self.goal, "loss_name": loss_name}
            (self.out / "result.json").write_text(json.dumps(named))
            log_line(self.summary(result))
            print(json.dumps(result), flush=True)
        self.engine.destroy()
        dist.destroy_process_group()

    def summary(self, result: dict[str, Any]) -> str:
        """Return what was learnt, and where it lies."""
        before = result["return_before"]
        after = result["return_after"]
        data = result["data_return"]
        steps_before, steps_after = result["episode_steps"]
        asked = "" if self.goal is None else f", asked for {self.goal:.0f}"
        compared = "" if data is None else f"; mean of the data set: {data:.0f}"
        end = "does not fall" if steps_after == MAX_STEPS else f"falls after {steps_after:.0f}"
        every = ", ".join(f"{value:.0f}" for _, value in self.record.returns[1:])
        return (
            f"return (mean of {EPISODES} episodes{asked}): {before:.0f} before training; after "
            f"{result['seconds_train']:.0f} s {result['return_best']:.0f} at the best "
            f"evaluation, of step "
            f"{result['best_step']}, and {after:.0f} at the last{compared}\n"
            f"the return varies from one evaluation to the next: {every}\n"
            f"behaviour: untrained, the hopper falls after {steps_before:.0f} of {MAX_STEPS} "
            f"steps; trained, "
            f"it {end}\n"
            f"curves: {self.out / 'curves.png'}\n"
            f"best weights: {self.folder / BEST}\n"
            f"checkpoint: {self.folder / result['checkpoint']}"
        )


@torch.no_grad()
def update_average(average: Iterable[Tensor], current: Iterable[Tensor], towards: float) -> None:
    """Move the averaged weights a part of the way towards the current ones."""
    torch._foreach_lerp_(list(average), list(current), towards)


def now() -> float:
    """Return the time after all queued work of the device is done."""
    get_accelerator().synchronize()
    return time.perf_counter()


def log_line(text: str) -> None:
    """Write a line to stderr, on the first rank."""
    if dist.get_rank() == 0:
        print(text, file=sys.stderr, flush=True)
